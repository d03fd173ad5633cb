"""One object has one meaning: every door says the same seconds of a table with costs and links."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from legal_sizes import build
from one_object import DOORS, EXAMPLES, MANY, alone, sets

import pipejax as pj
from pipejax.base.checks import ArgumentError

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


def test_a_row_of_a_sweep_is_an_evaluation(tmp_path):
    grid = {
        "schedules": ["1f1b", "chimera", "pipedream"],
        "workers": 2,
        "microbatch_size": 2,
        "minibatch": 8,
        "models": "gpt-22b",
        "systems": ["h100", "a100"],
        "tensor_parallel": 8,
        "stragglers": ["", "1=1.5"],
        "link": ["queued", "rendezvous"],
    }
    result = pj.run_sweep(grid, tmp_path / "sweep.zarr").step_time.squeeze(drop=True)
    axes = result.dims
    for at in itertools.product(*(result[name].values.tolist() for name in axes)):
        point = dict(zip(axes, at, strict=True))
        table = build(point["schedule"], 2, 4)
        slow = {1: 1.5} if point["stragglers"] else {}
        work = pj.Workload(pj.load_model("gpt-22b"), 8, tensor_parallel=8, stragglers=slow)
        costs = pj.stage_costs(work, pj.load_system(point["system"]), table)
        seconds = pj.evaluate(table, costs, link=point["link"]).makespan
        assert float(result.sel(point)) == pytest.approx(seconds, rel=1e-12)
