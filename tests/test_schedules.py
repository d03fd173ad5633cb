"""Builders, crossed over the registry: complete, legal, in order, and clear about what is not."""

import itertools
import json

import numpy as np
import pytest
from daily import daily, read_cases, with_cases
from hypothesis import given, strategies as st
from legal_sizes import SLICED, is_legal

import pipejax as pj
from pages.gallery import option_meanings
from pipejax.analysis.comparison import closed_form
from pipejax.base import longest_path
from pipejax.base.longest_path import CycleError, run_edges, topological_order
from pipejax.schedules import EXTENDED, REGISTRY, build
from pipejax.schedules.cells.ops import COMPUTE, Phase
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import Work
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table_files import to_json

SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 7, 8, 12, 13)]
SIZES += [(6, m) for m in (1, 7, 12)]
F, I, W = (pj.Phase[letter] for letter in "FIW")  # noqa: E741
INSTANT = [pj.Phase[letter] for letter in ("U", "O", "L", "WAIT_O")]
OPTIONS = read_cases("options of schedules")
PAIR = pj.Costs(forward=1.0, backward=2.0, transmit=0.25)
CASES = [(name, options) for name in REGISTRY for options in OPTIONS.get(name, [{}])]


@pytest.mark.parametrize(("name", "options"), daily(CASES, total=6))
def test_builds_at_every_legal_size(name, options):
    for p, m in SIZES:
        pipes = options.get("pipes", 1)
        if not is_legal(name, p, m) or p % pipes or m % pipes:
            continue
        for slots in ({"F": 1, "B": 1}, {"F": 2, "B": 3})[: 1 + (m < 8)]:
            size = {"num_workers": p, "num_microbatches": m}
            table = pj.schedules.build(name, **size, slots=slots, **options)
            slices = table.grammar.slices
            count = m * slices
            assert (table.num_workers, table.num_microbatches, table.name) == (p, count, name)
            microbatch_pipes = table.pipe_of_microbatch
            for phase in (
                pj.Phase[letter] for letter in "FBIW"
            ):  # each stage in microbatch order, per pipe
                for w, row in enumerate(table.rows()):
                    order = [op for cell in row for op in cell if op.phase is phase]
                    for stage in {op.stage for op in order}:
                        for pipe in range(table.num_pipes):
                            is_own = [
                                op.microbatch
                                for op in order
                                if op.stage == stage and microbatch_pipes[op.microbatch] == pipe
                            ]
                            back = name == "circular" or "last_first" in options
                            back &= phase == pj.Phase.B
                            if slices > 1 and phase == pj.Phase.B:  # the last slice first
                                is_own = [x - 2 * (x % slices) + slices - 1 for x in is_own]
                            assert is_own == sorted(is_own, reverse=back), (name, p, m, w)


@pytest.mark.parametrize(("limit", "slots"), [(1, 384), (4, 201), (5, 196)])
def test_a_pipe_of_chimera_admits_so_many(limit, slots):
    double = {"F": 1, "B": 2}
    options = {} if limit == 4 else {"in_flight": limit}
    table = build("chimera", num_workers=4, num_microbatches=64, slots=double, **options)
    start, finish = slot_times(table, double)
    assert finish.max() == slots
    first, last = (
        np.array([moment[table.microbatch == m] for m in range(64)]) for moment in (start, finish)
    )
    first, last = first.min(-1), last.max(-1)
    for pipe in (0, 1):
        options = np.arange(pipe, 64, 2)
        active = (first[options, None] <= first[options]) & (first[options] < last[options, None])
        assert active.sum(0).max() == limit


@pytest.mark.parametrize("name", [*REGISTRY, *EXTENDED])
def test_what_is_said_to_be_legal_can_be_built_and_nothing_else(name):
    for p, m in itertools.product(range(1, 5), [*range(1, 4), 7, 8]):
        try:
            table = pj.schedules.build(name, num_workers=p, num_microbatches=m)
        except ValueError:
            assert not is_legal(name, p, m), (p, m)
        else:
            assert is_legal(name, p, m), (p, m)
            count = m * table.grammar.slices
            assert (table.num_workers, table.num_microbatches, table.name) == (p, count, name)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_columns_are_start_slots(name, options):
    options = {"num_workers": 4, "num_microbatches": 8, "slots": {"F": 1, "B": 2}, **options}
    table = pj.schedules.build(name, **options)
    if name == "chimera-asymmetric":
        return  # starts are no whole numbers there: columns are their order
    start, _ = slot_times(table)
    instant = np.isin(table.phase, INSTANT)  # they take no slot and stand in columns of their own
    slot = np.cumsum(~instant.any(axis=0)) - 1
    held = (table.phase != pj.Phase.IDLE) & ~instant
    assert np.array_equal(start[held], slot[np.nonzero(held)[1]])


@pytest.mark.parametrize("name", pj.schedules.REGISTRY)
@pytest.mark.usefixtures("unchecked")
def test_builders_take_whole_numbers_alone(name):
    builder = REGISTRY[name].function
    for wrong in (1.5, 4.0, True, "4", None, np.float64(4), 0):
        with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
            builder(wrong, 4)
        with pytest.raises(ValueError, match="num_microbatches must be a whole number of at least"):
            builder(4, num_microbatches=wrong)
    counts = {"stages_per_worker", "waves", "accumulation", "runs", "local_steps", "slices"}
    for option in counts & set(REGISTRY[name].options):
        for wrong in (2.5, True, "2"):
            with pytest.raises(ValueError, match=f"{option} must be a whole number"):
                builder(4, 4, **{option: wrong})


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_numpy_are_numbers():
    size = {"num_workers": np.int64(2), "num_microbatches": np.int32(3), "waves": np.int8(1)}
    table = pj.schedules.build("hanayo", **size, slots={"F": np.float32(1), "B": np.int64(2)})
    assert table.num_stages == 4
    assert json.loads(to_json(table))["slots"] == dict(table.slots)


@with_cases("slots", {"F": 1e12, "B": 1e12 + 1}, {"F": 1e-7, "B": 3e-7}, {"F": 1e-12, "B": 2e-12})
@pytest.mark.parametrize("name", ["1f1b", "chimera", "hanayo"])
def test_slots_of_any_size_are_drawn(name, slots):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, slots=slots)
    assert table.num_slots < 1000
    smaller = {letter: size / slots["F"] for letter, size in slots.items()}
    same = pj.schedules.build(name, num_workers=4, num_microbatches=8, slots=smaller)
    for first, second in zip(table.rows(), same.rows(), strict=True):
        assert [c for c in first if c] == [c for c in second if c]


def test_asymmetric_shares_balance_workers():
    table = pj.schedules.build("chimera-asymmetric", num_workers=6, num_microbatches=6)
    shares = np.asarray(table.stage_shares)
    assert shares.mean() == pytest.approx(1)
    assert shares[-1] / shares[0] == pytest.approx(2)
    np.testing.assert_allclose(shares[table.placement].sum(axis=0)[[0, 2, 5]], 2)


def test_rows_are_recognized_by_their_ops_and_pairs():
    table = pj.schedules.build("dualpipe-v", num_workers=2, num_microbatches=8)
    assert pj.traces.registered(table) == ("dualpipe-v", {})
    rows = [[(op,) for cell in row for op in cell] for row in table.rows()]
    places = {"placement": table.placement, "pipe_of_microbatch": table.pipe_of_microbatch}
    assert pj.traces.registered(pj.ScheduleTable.from_rows(rows, **places)) is None
    idle = [["0F0", "", "0F1", "0B0", "", "", "0B1"], ["", "1F0", "1B0", "1F1", "", "1B1"]]
    assert pj.traces.registered(pj.ScheduleTable.from_rows(idle)) == ("1f1b", {})
    swapped = [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1B1", "1F0", "1B0"]]
    assert pj.traces.registered(pj.ScheduleTable.from_rows(swapped)) is None


def test_every_builder_names_its_source_and_is_found():
    for name, builder in [*REGISTRY.items(), *EXTENDED.items()]:
        assert "arXiv" in builder.source or (name in EXTENDED and "Megatron" in builder.source)
        assert builder.summary
        assert len(option_meanings(builder)) == len(builder.options)
        assert pj.schedules.named(name.upper()) == name
        assert name in pj.schedules.names()
        with pytest.raises(ValueError, match="num_workers must be a whole number of at least 1"):
            builder.function(0, 4)


@st.composite
def works(draw, tightest=4):
    """Any placement, times and sizes; limits at which one microbatch at a time surely runs."""

    def numbers(low, high, *shape):
        flat = draw(st.lists(st.integers(low, high), min_size=1, max_size=9))
        return np.resize(flat, shape).tolist()

    workers, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    stages, pipes = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    limit = tightest * stages * pipes
    work = Work(
        placement=numbers(0, workers - 1, pipes, stages),
        microbatch_pipes=numbers(0, pipes - 1, microbatches),
        durations={phase: numbers(1, 5, stages) for phase in (F, I, W)},
        lag=numbers(0, 4, 2, pipes, stages - 1),
        transmit=numbers(0, 3, 2, pipes, stages - 1),
        sizes=numbers(2, 4, stages),
        weight_sizes=numbers(0, 2, stages),
        limits=numbers(limit, 2 * limit, workers),
    )
    return work, numbers


def check_run(work, run, depth=()):
    """Every op has run, behind what it waits for, alone on its worker and within the limits."""
    stages, sizes = len(work.placement[0]), work.sizes
    times = {(phase, s, m): (start, end) for phase, s, m, _, start, end in run.log}
    assert len(times) == len(run.log) == 3 * stages * len(work.microbatch_pipes)
    assert all(type(time) is int for pair in times.values() for time in pair)
    for (phase, stage, m), (start, _) in times.items():
        pipe = work.microbatch_pipes[m]
        before = stage - 1 if phase is F else stage + 1
        if phase is W or (phase is I and stage == stages - 1):
            assert start >= times[I if phase is W else F, stage, m][1]
        elif 0 <= before < stages:
            hop = int(phase is I), pipe, min(stage, before)
            sent = (values[hop[0]][hop[1]][hop[2]] for values in (work.lag, work.transmit))
            assert start >= times[phase, before, m][1] + sum(sent)
        if phase is F and depth:
            ahead = [times[I, stage, n][0] for n in range(m) if work.microbatch_pipes[n] == pipe]
            assert sum(begun > start for begun in ahead) < depth[pipe][stage]
    for worker in range(len(work.limits)):
        rows = sorted((start, end) for *_, w, start, end in run.log if w == worker)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(rows))
        changes = sorted(
            (end if phase in (I, W) else start, change)
            for phase, s, _, w, start, end in run.log
            for change in [
                {F: sizes[s], I: work.weight_sizes[s] - sizes[s], W: -work.weight_sizes[s]}[phase]
            ]
            if w == worker
        )
        assert max(itertools.accumulate([0, *(c for _, c in changes)])) <= work.limits[worker]


@given(samples=works())
def test_what_the_list_scheduler_runs_can_run(samples):
    work, numbers = samples
    depth = numbers(1, 4, len(work.placement), len(work.placement[0]))
    run = list_schedule(work, Rules(depth, (F, I)))
    if run is None:  # memory may stop them: with one microbatch of each pipe at a time it does not
        run = list_schedule(work, Rules(np.ones_like(depth).tolist(), (F, I)))
    check_run(work, run, depth)


def one_after_the_other(forwards, gradients, weights, warmup, delay):
    """Rows as the papers tell them: a turn is a gradient, a weight gradient, a forward."""
    row = forwards[:warmup]
    for turn, gradient in enumerate(gradients):
        row = [*row, gradient, *weights[max(turn - delay, 0) : max(turn - delay + 1, 0)]]
        row += forwards[warmup + turn : warmup + turn + 1]
    return row + weights[max(len(gradients) - delay, 0) :]


@pytest.mark.parametrize("wide", [1, 99])  # rows run wave by wave, or op by op
@pytest.mark.parametrize(("workers", "count"), [(1, 1), (2, 5), (3, 2), (4, 7), (5, 5), (7, 18)])
def test_rows_are_in_the_order_of_the_papers(monkeypatch, workers, count, wide):
    monkeypatch.setattr(longest_path, "WIDE", wide)

    def rows(name, **options):
        table = build(name, num_workers=workers, num_microbatches=count, **options)
        return [[str(op) for cell in row for op in cell] for row in table.rows()]

    def ops(letter, stage):
        return [f"{stage}{letter}{m}" for m in range(count)]

    for w in range(workers):
        later = workers - w - 1
        warmups = {"gpipe": count, "1f1b": later, "eager-1f1b": 2 * later}
        for name, warmup in warmups.items():
            forwards, backwards = ops("F", w), ops("B", w)
            # 1F1B begins a turn with the forward
            warmup_ops = min(warmup + (name != "gpipe"), count)
            expected = one_after_the_other(forwards, backwards, [], warmup_ops, 0)
            assert rows(name)[w] == expected, name
        for name, warmup, delay in (("zb-h1", later + 1, w), ("zb-h2", 2 * later + 1, 2 * w)):
            split = (ops(letter, w) for letter in "FIW")
            assert rows(name)[w] == one_after_the_other(*split, warmup, delay), name
        turns = [(f"{w}F{m}", f"{w + workers}F{m}") for m in range(count)]
        both = [op for part in zip(*turns, strict=True) for op in part]
        back = [op.replace("F", "B") for stage in (w + workers, w) for op in ops("F", stage)]
        assert rows("looped-bfs")[w] == both + back


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_looped_bfs_in_the_order_of_pytorch(workers, stages):
    """Backwards go back, as ScheduleLoopedBFS's `_calculate_single_rank_operations` lists them."""
    for count in (1, 2, 3, 4, 8, 9):
        sizes = {"num_workers": workers, "num_microbatches": count, "stages_per_worker": stages}
        table = build("looped-bfs", **sizes, last_first=True)
        for rank, row in enumerate(table.rows()):
            local = [rank + workers * k for k in range(stages)]
            order = [f"{s}F{m}" for s in local for m in range(count)]
            order += [f"{s}B{m}" for s in local[::-1] for m in range(count)[::-1]]
            assert [str(op) for cell in row for op in cell] == order
        runs = [pj.evaluate(t, PAIR) for t in (table, build("looped-bfs", **sizes))]
        assert runs[0].makespan == runs[1].makespan
        assert runs[0].peak_in_flight.tolist() == runs[1].peak_in_flight.tolist()


def test_waves_are_the_order_and_the_times_of_nodes_one_by_one_or_name_a_cycle():
    rng = np.random.default_rng(3)
    for size in (1, 2, 12, 60):
        place = rng.permutation(size)
        ends = rng.integers(size, size=(2, 3 * size))  # some edges twice, some nodes without any
        tail, head = ends[:, place[ends[0]] < place[ends[1]]]
        duration = rng.random(size)
        one_by_one, in_waves = (topological_order(size, tail, head, w) for w in (1, 99))
        np.testing.assert_array_equal(in_waves, one_by_one)
        expected = run_edges(tail, head, duration)
        np.testing.assert_array_equal(run_edges(tail, head, duration, width=99), expected)
    back = np.append(tail, in_waves[[40, 9]]), np.append(head, in_waves[[9, 40]])
    cycles = []
    for width in (1, 99):
        for run in (
            lambda width: topological_order(size, *back, width),
            lambda width: run_edges(*back, duration, width=width),
        ):
            with pytest.raises(CycleError) as caught:
                run(width)
            cycles.append(caught.value.cycle)
    assert cycles == cycles[:1] * 4


# Registered schedules at many sizes: legal, with published bubbles and activations

LINKS = [pj.Links(model) for model in ("delay", "queued", "blocking")]
LINKS += [pj.Links("rendezvous", queues=queues) for queues in ("worker", "pair", "direction")]
LINKS += [pj.Links("rendezvous", queues=q, posting="program") for q in ("worker", "direction")]
LINKS += [pj.Links(model, shared_links="pairs") for model in ("queued", "rendezvous")]
GRID_OPTIONS = {"ada-offload": {"memory_limit": 2}}
TIMES = {  # of F, I and W, by what a form assumes
    "F = B": (1.0, 0.5, 0.5),
    "F = I = W": (1.0, 1.0, 1.0),
    "": (1.0, 1.25, 0.5),
}


def sizes(workers, microbatches):
    """Sizes (P, M) as functions of P."""
    return [(p, m) for p in workers for m in dict.fromkeys(microbatches(p))]


def check(name, p, m, links):
    if not is_legal(name, p, m):
        return
    options = GRID_OPTIONS.get(name, {})
    table = pj.schedules.build(name, num_workers=p, num_microbatches=m, **options)
    # the search for a table's schedule skips builders without this option
    assert Phase.O not in table.used_phases or "offload" in REGISTRY[name].options
    done = table.ops.take(table.ops.phase == pj.Phase.F)
    assert len(done.cell) == table.num_stages * m * table.grammar.slices
    assert set(table.ops.phase.tolist()) & {*COMPUTE}
    for link in links:
        if link.posting == "early" or name not in SLICED:
            pj.lower(table, link=link)  # a deadlock is an error
    form, shape = closed_form(table)
    if not form.holds(shape):
        return
    f, i, w = next(times for what, times in TIMES.items() if what in form.assumes)
    run = pj.evaluate(table, pj.Costs(forward=f, input_grad=i, weight_grad=w, offload=0.0))
    for printed, result in (
        (form.bubble_ratio, run.bubble_ratio),
        (form.span_bubble_ratio, run.span_bubble_ratio),
    ):
        if printed is not None:
            assert result == pytest.approx(printed[1](shape), abs=1e-12)
    if form.in_flight is not None and (name != "chimera" or m == p):
        assert run.peak_in_flight.max() == max(form.in_flight[1](shape, r) for r in range(p))


@pytest.mark.parametrize("name", REGISTRY)
def test_small_sizes(name):
    for p, m in sizes((2, 3, 4), lambda p: (1, p, 2 * p, 3 * p)):
        check(name, p, m, [LINKS[(p + m + k) % len(LINKS)] for k in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", REGISTRY)
def test_all_sizes(name, p):
    for _, m in sizes((p,), lambda p: (*range(1, 2 * p + 1), 3 * p, 8 * p)):
        check(name, p, m, LINKS)
