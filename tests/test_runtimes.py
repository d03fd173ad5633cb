"""Tables run under JAX: gradients equal to those of the model without a pipeline."""

import json
import subprocess

import numpy as np
import pytest
from daily import daily
from hypothesis import Phase as Stage, given, settings
from legal_sizes import WHOLE, build
from strategies import tables

import pipejax as pj
from pipejax.runtimes import processes
from pipejax.runtimes.spmd.execute import SmallModel
from pipejax.runtimes.spmd.instructions import LEFT_OUT
from pipejax.runtimes.spmd.runtime import run_tables
from pipejax.schedules.table.table import without

MODEL = SmallModel(hidden=4, batch_size=1)
EXACT = 1e-9  # relative, in float64; 1e-5 is asked for


def draw_samples(count, **what):
    result = []

    @settings(max_examples=count, phases=[Stage.generate], derandomize=True, database=None)
    @given(tables(**what))
    def draw(case):
        result.append(case[0])

    draw()
    return result[:count]


FOUR_PIPES = "chimera, 4 pipes"
FEW = 10  # random tables that always run; 50 where there is time


def asked_for(session):
    """Names of the schedules that this run looks at."""
    test = test_every_schedule_has_the_gradients_of_the_model_without_a_pipeline
    chosen = [item for item in session.items if getattr(item, "function", None) is test]
    return {item.callspec.params["name"] for item in chosen}


@pytest.fixture(scope="module")
def steps(request):
    """The schedules of this run and a few random tables."""
    size = {"num_workers": 4, "num_microbatches": 8}
    names = [name for name in (*WHOLE, FOUR_PIPES) if name in asked_for(request.session)]
    registered = [
        pj.schedules.build("chimera", **size, pipes=4)
        if name == FOUR_PIPES
        else pj.schedules.build(name, **size)
        for name in names
    ]
    random = draw_samples(FEW, communication=True)
    runs = run_tables([*registered, *random], MODEL)
    return dict(zip([*names, *range(len(random))], runs, strict=True))


@pytest.mark.parametrize("name", daily([*WHOLE, FOUR_PIPES], total=2))
def test_every_schedule_has_the_gradients_of_the_model_without_a_pipeline(name, steps):
    assert (steps[name].gradient_error < EXACT, steps[name].loss_error < EXACT) == (True, True)


def test_random_tables_have_them_too(steps):
    assert max(steps[number].error for number in range(FEW)) < EXACT


@pytest.mark.slow
def test_many_random_tables_have_them_too():
    random = [*draw_samples(25), *draw_samples(25, communication=True)]
    assert max(run.error for run in run_tables(random, MODEL)) < EXACT
    held = {phase for table in random for phase in np.unique(table.phase)}
    assert held >= {int(pj.Phase[letter]) for letter in "FBIWROLU"}
    assert any(table.is_fused.any() for table in random)
    assert {table.num_pipes for table in random} == {1, 2}


def test_what_is_not_executed_is_said():
    table = pj.links.insert_transfers(build("gpipe", 2, 2))
    assert not without(table, tuple(LEFT_OUT)).has_communication
    assert {phase.name for phase in LEFT_OUT} >= {"SEND_F", "RECV_B", "WAIT_SEND_F", "UNSHARD"}


@pytest.mark.slow
def test_the_command_says_what_it_found_and_what_it_left_out(call, tmp_path):
    table = pj.links.insert_transfers(build("zb-h1", 2, 3))
    pj.write_table(table, tmp_path / "table.csv")
    code, out, _ = call("run", "--table", tmp_path / "table.csv", "--tolerance", "1e-300", "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["runtime"]) == (1, False, "jax")
    assert 0 < result["gradient_error"] < EXACT
    assert result["loss_error"] < EXACT
    assert set(result["left_out"]) == {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(1e-9, 0, "gradients are those"), (np.nan, 1, "gradients differ from")],
)
def test_a_person_reads_whether_gradients_are_equal(error, code, says, call, monkeypatch):
    run = processes.RuntimeRun(
        "jax", "1.0", error, 1.5, 0.0, {"U": "why"}, [1.0, 3.0, 2.0], 2.2, {"F": [0.1, 0.2]}
    )
    monkeypatch.setattr(processes, "run_table", lambda name, job: run)
    command = ("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    ended, out, _ = call(*command, "--details")
    assert (ended, says in out) == (code, True)
    for text in ("2 s measured", "2.2 s, 10 % off", "U cells", "200 ms"):
        assert text in out
    ended, out, _ = call(*command, "--json")
    result = json.loads(out)
    assert result["gradient_error"] == (None if np.isnan(error) else error)
    assert (result["step_time"], result["predicted"], result["ok"]) == (2.0, 2.2, code == 0)


@pytest.mark.parametrize(("name", "step_size"), [("pipedream", 0.0), ("1f1b", None)])
def test_the_step_size_of_updates_is_said(name, step_size, call, monkeypatch):
    def ends(module, requests, environment):
        step = {"gradient_error": 0.0, "loss": 1.0, "loss_error": 0.0}
        return [{"version": "1.0", "steps": [step]}]

    monkeypatch.setattr("pipejax.runtimes.spmd.runtime.call_together", ends)
    command = ("run", "--schedule", name, "--workers", "2", "--microbatches", "2")
    _, out, _ = call(*command)
    message = "step size 0: all weight versions equal the first"
    assert (message in " ".join(out.split())) == (step_size is not None)
    assert json.loads(call(*command, "--json")[1])["step_size"] == step_size


def test_devices_that_are_missing_are_named(monkeypatch, call):
    started = subprocess.Popen

    def without_devices(words, env, **rest):
        return started(words, env={**env, "JAX_NUM_CPU_DEVICES": "1"}, **rest)

    monkeypatch.setattr(subprocess, "Popen", without_devices)
    code, out, err = call("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    assert (code, out) == (2, "")
    assert "2 workers, but JAX has 1 devices" in err


def test_what_has_no_effect_on_gradients_is_refused(call):
    command = ("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    for option, named in ((("--link", "queued"), "links"), (("-T", "F=1,B=2"), "times")):
        code, out, err = call(*command, *option)
        assert (code, out) == (2, "")
        assert f"{named} have no effect in jax" in err
