"""Every command says the same of the memory of one table and workload."""

import dataclasses
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.formulas import layer_activation_bytes, layer_weight_grad_bytes
from pipejax.costs.model.layout import Layout
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import data_file
from pipejax.sweep import run_sweep

WORKERS, MICROBATCHES = 4, 8
WORKLOAD = pj.Workload(pj.load_model("gpt-22b"), MICROBATCHES, tensor_parallel=8)
MODEL = ["--model", "gpt-22b", "--minibatch", MICROBATCHES, "--tensor-parallel", 8]


@pytest.fixture
def table():
    return pj.schedules.build("zb-h1", num_workers=WORKERS, num_microbatches=MICROBATCHES)


@pytest.fixture
def system(table, tmp_path):
    """An accelerator in which the schedule fits, but not if activations stayed whole until W."""
    whole = dataclasses.replace(WORKLOAD, weight_share=1.0)
    need, too_much = (pj.memory_bytes(w, table).max() for w in (WORKLOAD, whole))
    assert need < 0.995 * too_much
    described = json.loads(data_file("hardware", "a100", "system").read_text())
    described["memory"]["capacity_GB"] = (need + too_much) / 2e9 + described["memory"]["reserve_GB"]
    path = tmp_path / "short.json"
    path.write_text(json.dumps(described))
    return path


def test_all_doors_agree(answer, table, system):
    run = answer("evaluate", *schedule(), *MODEL, "--system", system)
    need = run["memory_bytes"]
    capacity = float(pj.load_system(system).memory_available)
    static = np.subtract(need, run["activation_memory"]["peak"])
    assert max(need) < capacity
    assert need == pj.memory_bytes(WORKLOAD, table).tolist()
    counts = ["--workers", WORKERS, "--microbatches", MICROBATCHES]
    compared = answer("compare", "--schedules", "zb-h1", *counts, *MODEL, "--system", system)
    assert compared["rows"][0]["memory_bytes"] == need
    tuned = answer("tune", "--schedule", "zb-h1", *counts[:2], *MODEL, "--system", system)
    (size,) = (s for s in tuned["exhaustive"]["sizes"] if s["microbatches"] == MICROBATCHES)
    assert (size["memory_bytes"], size["fits"]) == (pytest.approx(max(need), rel=1e-12), True)
    limit = ["--memory-limit", f"{capacity / 1e9}GB", "--time-limit", 0.5, "--no-store"]
    best = answer("optimize", *schedule(), *MODEL, "--system", system, *limit)
    assert best["baseline"]["zb-h1"] == pytest.approx(run["makespan"])  # None where it does not fit
    assert best["static_bytes"] == pytest.approx(static.tolist(), rel=1e-12)
    assert best["weight_share"] == run["activation_memory"]["weight_share"]


@pytest.mark.slow
def test_a_sweep_agrees(table, system, tmp_path):
    data = run_sweep(
        {
            "schedules": "zb-h1",
            "workers": WORKERS,
            "minibatch": MICROBATCHES,
            "microbatch_size": 1,
            "models": "gpt-22b",
            "systems": str(system),
            "tensor_parallel": 8,
        },
        tmp_path / "out.zarr",
    )
    assert float(data.memory_bytes) == pj.memory_bytes(WORKLOAD, table).max()
    assert int(data.status) == data.status.attrs["flag_meanings"].split().index("feasible")


def schedule():
    return ["--schedule", "zb-h1", "--workers", WORKERS, "--microbatches", MICROBATCHES]


def test_a_share_that_is_given_is_taken(answer, table):
    options = answer("evaluate", *schedule(), *MODEL, "--system", "a100", "--weight-share", 1)
    whole = dataclasses.replace(WORKLOAD, weight_share=1.0)
    assert options["memory_bytes"] == pj.memory_bytes(whole, table).tolist()
    assert options["activation_memory"]["weight_share"] == 1.0
    share = ["--workers", WORKERS, *MODEL, "--system", "a100", "--weight-share", 1]
    row = answer("compare", "--schedules", "zb-h1", "--microbatches", MICROBATCHES, *share)["rows"]
    assert row[0]["memory_bytes"] == options["memory_bytes"]
    tuned = answer("tune", "--schedule", "zb-h1", *share)
    sizes = {s["microbatches"]: s["memory_bytes"] for s in tuned["exhaustive"]["sizes"]}
    assert sizes[MICROBATCHES] == pytest.approx(max(options["memory_bytes"]), rel=1e-12)
    with pytest.raises(ValueError, match=r"weight_share must be a number from 0 to 1, got 1\.5"):
        dataclasses.replace(WORKLOAD, weight_share=1.5)


SHARES = {  # (model, how): bytes per token and hidden unit that W needs, of those that are kept
    ("gpt-22b", "none"): (32, 34 + 5 * 64 * 2048 / 6144),  # 5as/h
    ("gpt-22b", "selective"): (32, 34),  # only the dropout masks go
    ("llama3-70b", "none"): (12 + 4 * 8 / 64 + 6 * 28672 / 8192,) * 2,  # no masks, no scores
}


@pytest.mark.parametrize(("name", "recompute"), SHARES)
def test_the_share_follows_from_the_layer(name, recompute):
    model = pj.load_model(name)
    needed, remaining = SHARES[name, recompute]
    unit = model.sequence * model.hidden
    assert layer_weight_grad_bytes(model) == pytest.approx(needed * unit)
    assert layer_activation_bytes(model, recompute=recompute) == pytest.approx(remaining * unit)
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=4)
    share = stage_bytes(pj.Workload(model, 4, recompute=recompute), table).weight_share
    assert share[1] == pytest.approx(needed / remaining)


@pytest.mark.parametrize("shared", [False, True])
def test_parallelism_splits_what_w_needs(shared):
    model, t = pj.load_model("gpt-22b"), 8
    layout = Layout(tensor=t, sequence_parallel=float(shared))
    unit = model.sequence * model.hidden
    # inputs of queries and MLP, gradients of projection and MLP are whole; the others split
    needed = 8 / (t if shared else 1) + 24 / t
    assert layer_weight_grad_bytes(model, layout) == pytest.approx(needed * unit)


def test_of_a_recomputed_layer_w_needs_what_it_needs_of_any():
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=4)
    none = dataclasses.replace(WORKLOAD, minibatch=4)
    for_w, again = (
        stage_bytes(dataclasses.replace(none, recompute=how), table).parts[1]
        for how in ("none", "full")
    )
    np.testing.assert_allclose(again, for_w)
