"""Tables run under JAX: gradients equal to those of the model without a pipeline."""

import json
import subprocess

import pytest

import pipejax as pj
from pipejax.runtimes.spmd.model import SmallModel
from pipejax.runtimes.spmd.runtime import run_tables
from pipejax.schedules import REGISTRY

SMALL = SmallModel(hidden=4, batch_size=1)
EXACT = 1e-9  # relative, in float64; 1e-5 is asked for


@pytest.fixture(scope="module")
def registered():
    """Every schedule that can be built, run on four devices in one process."""
    tables = [pj.schedules.build(name, num_workers=4, num_microbatches=8) for name in REGISTRY]
    return dict(zip(REGISTRY, run_tables(tables, SMALL), strict=True))


@pytest.mark.process
@pytest.mark.parametrize("name", REGISTRY)
def test_every_schedule_has_the_gradients_of_the_model_without_a_pipeline(name, registered):
    assert registered[name].error < EXACT


@pytest.mark.process
def test_the_command_says_whether_gradients_are_equal(call, monkeypatch):
    command = ("run", "--schedule", "zb-h1", "--workers", "2", "--microbatches", "3")
    code, out, _ = call(*command, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["runtime"], found["left_out"]) == (0, True, "jax", {})
    assert 0 <= found["gradient_error"] < EXACT
    code, out, _ = call(*command, "--tolerance", "1e-300")
    assert (code, "not equal" in out) == (1, True)


@pytest.mark.process
def test_what_fails_in_the_process_is_told(monkeypatch, call):
    started = subprocess.Popen

    def without_devices(words, env, **given):
        return started(words, env={**env, "JAX_NUM_CPU_DEVICES": "1"}, **given)

    monkeypatch.setattr(subprocess, "Popen", without_devices)
    code, out, err = call("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    assert (code, out) == (2, "")
    assert "2 workers, but JAX has 1 devices" in err
