"""One object has one meaning: every door says the same seconds of a table with costs and links."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from legal_sizes import SLICED, at_least
from one_object import DOORS, EXAMPLES, MANY, alone, sets

import pipejax as pj
from pipejax.base.checks import ArgumentError
from pipejax.costs.layers.formulas import layer_activation_bytes, layer_weight_grad_bytes
from pipejax.costs.model.layout import Layout
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import data_file
from pipejax.schedules import REGISTRY

SETS = -(-EXAMPLES // MANY // 2)  # most of the time is compilation
BATCHED = (
    pj.makespans,
    pj.cycle_time,
    lambda program, costs, **more: pj.analysis.extrapolated_makespans(
        program, costs, num_microbatches=program.num_microbatches, **more
    ),
)
COSTLY = ("explorer", "jitter", "periods")  # of which a set meets one


def check(name, result):
    door = DOORS[name]
    seconds = np.array([float(value) for value in door.seconds(result)])
    expected = np.array([run.makespan for run in result.runs])[: len(seconds)]
    rounding = 0.0 if result.exact else door.rounding
    off = np.abs(seconds - expected)
    assert len(seconds)
    assert (off <= np.maximum(door.off, rounding * expected)).all(), (
        f"{name} says {seconds}, evaluate {expected}"
    )


@settings(max_examples=SETS)
@given(result=sets(), costly=st.sampled_from(COSTLY))
def test_every_door_says_the_same(result, costly):
    for name, door in DOORS.items():
        if (name == costly or name not in COSTLY) and door.applies(result):
            check(name, result)


@settings(max_examples=40)
@given(result=sets())
def test_what_reads_a_batch_refuses_one_configuration_or_reads_it_as_all_do(result):
    doors = BATCHED if DOORS["periods"].applies(result) else BATCHED[:1]
    for (costs, run), door in itertools.product(zip(result.rows, result.runs, strict=True), doors):
        if seconds := refused_or(door, result.program, costs):  # no axis has several entries
            message = door(result.program, alone(costs), batch_size=1).tolist()
            assert seconds == pytest.approx(message)
            assert door is not pj.makespans or seconds == pytest.approx([run.makespan])


def refused_or(door, program, costs):
    """The seconds of a door that takes batches, none where it names what it refuses, and its shape."""
    try:
        return door(program, costs).tolist()
    except ArgumentError as refused:
        named, text = np.shape(getattr(costs, refused.argument)), str(refused)
        return [] if named == refused.value and "batch_size=1" in text else [text]


TWO = {  # on two workers: each alone, what it reads as one configuration or as a batch of two
    "direction, pipe, boundary": {"transmit": [[[1.0]], [[0.5]]]},
    "beside one boundary": {"transmit": [0.5]},
    "stages and microbatches": {"forward": [[1.0, 3.0], [2.0, 1.0]]},
    "one by microbatch": {"forward": [[1.0, 3.0]], "backward": 2.0},
    "copies of a stage": {"update": [[1.0, 3.0], [0.5, 0.25]]},
}


@pytest.mark.parametrize("what", TWO)
def test_costs_that_read_in_two_ways_are_refused(what):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    program, run = pj.lower(table), functools.partial(pj.evaluate, table)
    costs = pj.Costs(**{"forward": [1.0, 3.0], "backward": [2.0, 6.0], **TWO[what]})
    expected = run(costs).makespan
    assert pj.makespan(program, costs) == expected
    with pytest.raises(ArgumentError, match=r"shape \(.*a batch, or one entry for each of [12] "):
        pj.makespans(program, costs)
    assert pj.makespans(program, alone(costs), batch_size=1).tolist() == [expected]
    size = max(len(leaf) for leaf in jax.tree.leaves(costs) if np.ndim(leaf))
    rows = [
        jax.tree.map(lambda leaf, k=k: leaf[k % len(leaf)] if np.ndim(leaf) else leaf, costs)
        for k in range(size)
    ]
    expected = [run(row).makespan for row in rows]
    assert pj.makespans(program, costs, batch_size=size).tolist() == expected


def test_periods_follow_the_makespan():
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=8)
    program = pj.lower(table)
    costs = pj.Costs(forward=[1.0, 3.0], backward=[2.0, 6.0], transmit=[[[1.0]], [[0.5]]])
    for door, expected in zip(BATCHED, ([35.0, 85.0], [4.0, 9.5], [35.0, 85.0]), strict=True):
        with pytest.raises(ArgumentError, match=r"forward has shape \(2,\): a batch, or"):
            door(program, costs)
        assert door(program, costs, batch_size=2).tolist() == expected
    single = [door(program, alone(costs), batch_size=1).item() for door in BATCHED]
    assert single == [76.5, 9.0, 76.5]


# Every door builds the same schedule for a run: what `evaluate` says of it holds at all of them

WORKERS = 4
# forwards alone, asynchronous, or in slices: sweeps and tuning take none of them
OTHERS = (*SLICED, "pipedream", "pipedream-2bw", "local-sgd", "naive")
PLANNED = tuple(name for name, builder in REGISTRY.items() if builder.planned)
SEEDS = 20


def is_usual(name):
    if name in OTHERS:
        return False
    microbatches = at_least(name, WORKERS, 8)
    table = pj.schedules.build(name, num_workers=WORKERS, num_microbatches=microbatches)
    return not table.grammar.custom_phases and not table.updates_within


def draw(seed, folder):
    """Draw a model and a system whose F, I and W differ, as options of the command line."""
    rng = np.random.default_rng(seed)
    model = json.loads(data_file("models", "llama3-8b", "model").read_text())
    model |= {
        "name": f"model{seed}",
        "layers": int(8 * rng.integers(2, 6)),
        "hidden": int(128 * 8 * rng.integers(1, 6)),
        "ffn_hidden": int(256 * rng.integers(8, 60)),
        "sequence_tokens": int(1024 * 2 ** rng.integers(0, 6)),
        "heads": 8,
        "kv_heads": 8,
    }
    system = json.loads(data_file("hardware", "h100", "system").read_text()) | {"name": "machine"}
    system["compute"] = system["compute"] | {"peak_TFLOP_per_s": float(rng.uniform(200, 2000))}
    network = {"bandwidth_GB_per_s": float(10 ** rng.uniform(0, 2))}
    system["network"] = system["network"] | network
    system["node"] = system["node"] | {"gpus": 2}
    system["memory"] = system["memory"] | {"capacity_GB": 4000}
    paths = folder / f"model{seed}.json", folder / f"system{seed}.json"
    for path, content in zip(paths, (model, system), strict=True):
        path.write_text(json.dumps(content))
    return ["--model", str(paths[0]), "--system", str(paths[1])]


@pytest.fixture(scope="module")
def names():
    """Schedules that all doors take, with their fewest microbatches from 8 on."""
    return {name: at_least(name, WORKERS, 8) for name in REGISTRY if is_usual(name)}


def check_doors(seed, names, folder, answer):
    """Ask every door for the step of every schedule; return those that differ from evaluate."""
    options, wrong = draw(seed, folder), []
    for count in sorted({*names.values()}):
        alike = [name for name, number in names.items() if number == count]
        sizes = ["--workers", WORKERS, "--minibatch", count]
        table = [*sizes, "--microbatches", count, *options]
        steps = {n: answer("evaluate", "--schedule", n, *table)["step_time"] for n in alike}
        doors = {"sweep": sweep_row(alike, count, options, folder)}
        compared = answer("compare", "--schedules", ",".join(alike), *table)
        doors["compare"] = {row["schedule"]: row["makespan"] for row in compared["rows"]}
        for name in [name for name in alike if name in PLANNED]:
            few = ["--schedules", name]  # its step time alone is asked for
            explained = answer("explain", "--schedule", name, *table, *few)
            doors.setdefault("explain", {})[name] = explained["step_time"]
            line = "--schedule", name, *sizes, *options, "--method", "exhaustive"
            tuned = answer("tune", "size", *line)
            size = {row["microbatches"]: row["step_time"] for row in tuned["exhaustive"]["sizes"]}
            doors.setdefault("tune size", {})[name] = size[count]
        wrong += [
            (door, name, step, steps[name])
            for door, result in doors.items()
            for name, step in result.items()
            if step != pytest.approx(steps[name], rel=1e-9)
        ]
    return wrong


def sweep_row(names, count, arguments, folder):
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    grid = {"schedules": list(names), "workers": WORKERS, "microbatches": count, "minibatch": count}
    grid |= {"models": options["--model"], "systems": options["--system"]}
    data = pj.run_sweep(grid, folder / f"{'-'.join(names)[:40]}{count}.zarr")
    return {n: float(s) for n, s in zip(names, np.ravel(data.step_time.values), strict=True)}


def test_every_door_answers_alike(names, tmp_path, answer):
    assert {*PLANNED} <= {*names}
    few = {name: names[name] for name in ("1f1b", *PLANNED[3::3])}
    assert not check_doors(0, few, tmp_path, answer)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_every_door_answers_alike_for_every_schedule(seed, names, tmp_path, answer):
    assert not check_doors(seed, names, tmp_path, answer)


# Every command says the same of the memory of one table and workload

MICROBATCHES = 8
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


SHARES = {  # (model, how): bytes per token and hidden unit that W needs, of those that are kept
    ("gpt-22b", "none"): (32, 34 + 5 * 64 * 2048 / 6144),  # 5as/h
    ("gpt3-175b", "none"): (32, 34 + 5 * 96 * 2048 / 12288),  # Zero Bubble, Table 1
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
