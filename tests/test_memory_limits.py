"""Schedules under a memory limit: planned for some times, safe for all."""

import shlex

import numpy as np
import pytest
import reference
from daily import daily, read_cases, with_cases
from hypothesis import given, strategies as st
from legal_sizes import build

import pipejax as pj
from pipejax.schedules.cells.cells import looped
from pipejax.schedules.cells.ops import format_cell
from pipejax.schedules.heuristics.memory_limited_pipe import (
    LimitedPipe,
    ada_offload_starts,
    zero_bubble_starts,
)
from pipejax.schedules.heuristics.timeline import TimedOps, rows_from_starts
from pipejax.schedules.table.table import ScheduleTable

F, B, I, W, O, L = (pj.Phase[letter] for letter in "FBIWOL")  # noqa: E741
# all dyadic, so that sums in any order are equal
TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.125])


def make_run(table, costs, host_links=()):
    """The oracle's run: no compilation for each of many small tables."""
    texts = [[format_cell(cell) for cell in row] for row in table.rows()]
    return reference.Run(texts, [0] * table.num_microbatches, costs, host_links=host_links)


def peak_over_time(run, sizes, weight_share):
    """Most that each worker holds at any time of a run: taken at starts, freed at ends."""
    stages = len(sizes)
    curves = run.held(sizes, [weight_share] * stages, [0.0] * stages)
    return np.array([max(level for _, level in curve) for curve in curves])


@st.composite
def pipes(draw):
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 7))

    def per(count, values):
        return draw(st.lists(values, min_size=count, max_size=count))

    sizes = per(stages, st.sampled_from([0.5, 1.0, 1.7]))
    room = per(stages, st.sampled_from([1.0, 1.5, 2.0, 2.5, 4.0]))
    return LimitedPipe.from_numbers(
        stages,
        microbatches,
        forward=per(stages, TIMES),
        input_grad=per(stages, TIMES),
        weight_grad=per(stages, TIMES),
        there=per(stages - 1, TIMES),
        back=per(stages - 1, TIMES),
        sizes=sizes,
        limits=np.multiply(sizes, room),
        weight_share=draw(st.sampled_from([0.0, 1 / 3, 0.4, 1.0])),
    )


def make_table(pipe, ops, host_links=()):
    memory = {name: getattr(pipe, name) for name in ("sizes", "limits", "weight_share")}
    rows = rows_from_starts(ops, **memory, host_links=host_links)
    return ScheduleTable.from_rows(rows, placement=looped(pipe.num_stages))


def make_costs(pipe, offload=0.0, load=0.0):
    times = {"F": pipe.forward, "I": pipe.input_grad, "W": pipe.weight_grad}
    stages = range(pipe.num_stages)
    hops = {
        (back, 0, k): time
        for back, times in enumerate((pipe.there, pipe.back))
        for k, time in enumerate(times)
    }
    return reference.Costs(
        {(letter, s): float(times[letter][s]) for letter in times for s in stages}
        | {("O", s): offload for s in stages}
        | {("L", s): load for s in stages},
        {},
        hops,
    )


def random_costs(stages, seed):
    rng = np.random.default_rng(seed)

    def time():
        return float(np.exp(rng.normal(0, 1.5)))

    return reference.Costs(
        {(letter, s): time() for letter in "FBIWOL" for s in range(stages)},
        {},
        {(back, 0, k): time() for back in (0, 1) for k in range(stages)},
    )


def lower_bound(pipe):
    """No stage ends before its first input came, its work is done and the rest went back."""
    work = pipe.num_microbatches * (pipe.forward + pipe.input_grad + pipe.weight_grad)
    first = np.append(0.0, np.cumsum(pipe.forward[:-1] + pipe.there))
    return float((first + work).max())


@given(pipe=pipes(), seed=st.integers(0, 99))
def test_zero_bubble_keeps_its_limits_and_is_what_it_plans(pipe, seed):
    ops = zero_bubble_starts(pipe, by_span=False)
    table = make_table(pipe, ops)
    run = make_run(table, make_costs(pipe))
    assert lower_bound(pipe) * (1 - 1e-9) <= run.makespan <= ops.end.max() * (1 + 1e-9)
    for costs in (make_costs(pipe), random_costs(pipe.num_stages, seed)):
        held = peak_over_time(make_run(table, costs), pipe.sizes, pipe.weight_share)
        assert np.all(held <= pipe.limits * (1 + 1e-6))


@given(
    pipe=pipes(),
    offload=TIMES,
    load=TIMES,
    seed=st.integers(0, 99),
    host_links=st.sampled_from([[], [[0, 1]], [[3, 1, 2]]]),
)
def test_offloads_keep_the_limits_whatever_the_times(pipe, offload, load, seed, host_links):
    host_links = [[w for w in group if w < pipe.num_stages] for group in host_links]
    host_links = [group for group in host_links if group]
    ops = ada_offload_starts(pipe, offload=offload, load=load, host_links=host_links)
    table = make_table(pipe, ops, host_links)
    base_costs = make_costs(pipe, offload, load)
    assert make_run(table, base_costs, host_links).makespan <= ops.end.max() * (1 + 1e-9)
    for costs in (base_costs, random_costs(pipe.num_stages, seed)):
        run = make_run(table, costs, host_links)
        held = peak_over_time(run, pipe.sizes, pipe.weight_share)
        assert np.all(held <= pipe.limits * (1 + 1e-6))


@pytest.mark.parametrize("message", [0, 1, 5])
def test_two_microbatches_that_fit_go_through_the_pipe_behind_each_other(message):
    pipe = LimitedPipe.from_numbers(
        3, 2, forward=1, input_grad=1, weight_grad=1, there=message, limits=3
    )
    way = 2 * 2 * (1 + message)  # to the last stage and back
    assert zero_bubble_starts(pipe).end.max() == way + 2 * 2 + 1  # there F and I, then a W


@given(pipe=pipes(), offload=TIMES)
def test_without_offloads_the_greedy_schedule_is_plain(pipe, offload):
    plain = ada_offload_starts(pipe)
    assert not np.isin(plain.phase, (O, L)).any()
    ample = pipe._replace(limits=pipe.sizes * pipe.num_microbatches)
    same, other = (ada_offload_starts(ample, offload=t) for t in (None, offload))
    assert not np.isin(other.phase, (O, L)).any()  # nothing asks for an offload
    assert same.end.max() == other.end.max()


def test_only_offloads_reach_the_time_of_ample_memory_in_half_of_it():
    times = {"forward": 1, "input_grad": 1, "weight_grad": 1}
    plain, offloading, ample = (
        ada_offload_starts(LimitedPipe.from_numbers(8, 32, limits=limit, **times), offload=offload)
        for limit, offload in ((4, None), (4, 0.5), (32, None))
    )
    assert (plain.end.max(), ample.end.max()) == (pytest.approx(160, abs=20), 103)
    assert offloading.end.max() <= 1.05 * ample.end.max()


def timed_ops(text):
    """Phase, microbatch, start and end of ops."""
    words = (op.split() for op in text.split(","))
    return [(pj.Phase[op[0]], int(op[1:]), float(start), float(end)) for op, start, end in words]


ROW = timed_ops("F0 0 1, O0 1 1.8, F1 2 3, I1 3 4, W1 4 5, L0 5 6, I0 6 7, W0 7 8")


def row_text(ops, limit, weight_share=1 / 3):
    timed = TimedOps.from_tuples([(phase, 0, m, 0, start, end) for phase, m, start, end in ops])
    (row,) = rows_from_starts(timed, sizes=[1.0], limits=[limit], weight_share=weight_share)
    return " ".join(str(op)[1:] for cell in row for op in cell)


def test_a_wait_stands_only_where_memory_needs_it():
    assert row_text(ROW, 1.0) == "F0 O0 WAIT_O0 F1 I1 W1 L0 I0 W0"
    assert row_text(ROW, 2.0) == "F0 O0 F1 I1 W1 L0 I0 W0"
    more = [*ROW, *timed_ops("F2 8 9, F3 9 10")]
    assert "WAIT_O" not in row_text(more, 2.0)  # the load of microbatch 0 waited for its offload


START = "F0 0 1, O0 1 2"


@with_cases("ops row", *read_cases("test_loads_are_issued_where_their_room_is_known"))
def test_loads_are_issued_where_their_room_is_known(ops, row):
    assert row_text(timed_ops(ops), 2.0) == row


@with_cases(
    "change message",
    ({1: (O, 0, 2.5, 3.0)}, "0F1 finds no room: activations exceed the limit of 1"),
    ({5: (L, 0, 4.0, 5.0)}, "0L0 finds no room"),
    ({0: (pj.Phase.R, 0, 0.0, 1.0)}, "no rows are made from starts of R: only of F, B, I, W"),
)
def test_starts_that_break_the_limit_are_refused(change, message):
    ops = [change.get(k, op) for k, op in enumerate(ROW)]
    with pytest.raises(ValueError, match=message):
        row_text(ops, 1.0)


def test_columns_follow_the_starts_on_a_shared_link():
    by_worker = "F0 0 1, O0 2 3, L0 4 5, B0 5 6", "F0 .5 1.5, O0 1.5 2, L0 3 4, B0 4 5"
    timed = TimedOps.from_tuples(
        [
            (phase, worker, m, worker, start, end)
            for worker, text in enumerate(by_worker)
            for phase, m, start, end in timed_ops(text)
        ]
    )
    rows = rows_from_starts(timed, sizes=[1, 1], limits=[1, 1], host_links=[[1, 0]])
    column = {str(op): k for row in rows for k, cell in enumerate(row) for op in cell}
    assert column["1O0"] < column["0O0"] < column["1L0"] < column["0L0"]
    alone = rows_from_starts(timed, sizes=[1, 1], limits=[1, 1])
    assert [[cell for cell in row if cell] for row in rows] == alone


@pytest.mark.parametrize(("name", "limit"), [("zb-1p", 4), ("zb-2p", 8), ("zero-bubble", 2.5)])
def test_builders_keep_their_limit_whatever_the_times(name, limit):
    options = {"memory_limit": limit} if name == "zero-bubble" else {}
    for share in (0.0, 0.2, 0.5):
        table = build(name, 4, 12, weight_share=share, transfer=0.3, **options)
        run = make_run(table, random_costs(4, 3))
        assert peak_over_time(run, [1] * 4, share).max() <= limit + 1e-9


def test_zb_h_holds_what_is_published():  # Table 2 and section 2.3, 0-based
    p, share = 4, 0.3
    for name, whole, parts in (
        ("zb-h1", lambda r: p - r, lambda r: r),
        ("zb-h2", lambda r: 2 * (p - r) - 1, lambda r: 2 * r),
    ):
        table = pj.schedules.build(name, num_workers=p, num_microbatches=16)
        unit = reference.Costs({(letter, s): 1.0 for letter in "FIW" for s in range(p)}, {}, {})
        held = peak_over_time(make_run(table, unit), [1] * p, share)
        assert held == pytest.approx([whole(r) + parts(r) * share for r in range(p)])


OF_STAGE = {"F": 2.0, "I": 2.25, "W": 1.5}  # of one stage


def pipe_offload(p, v, m, **options):
    """The table, planned for these times, its run on them, and the most that a worker holds."""
    slots = {**OF_STAGE, "B": OF_STAGE["I"] + OF_STAGE["W"]}
    options |= {"stages_per_worker": v, "slots": slots, "weight_share": 1 / 3}
    table = build("pipe-offload", p, m, **options)
    costs = {(letter, s): time for letter, time in OF_STAGE.items() for s in range(p * v)}
    trips = {"O": options.get("offload", 1.0), "L": options.get("load", options.get("offload", 1))}
    costs |= {(letter, s): trips[letter] for letter in "OL" for s in range(p * v)}
    run = make_run(table, reference.Costs(costs, {}, {}))
    return table, run, peak_over_time(run, [1] * p * v, 1 / 3)


@pytest.mark.parametrize(("p", "v", "group"), [(4, 1, 4), (4, 2, 4), (4, 3, 2), (6, 2, 3)])
def test_pipe_offload_without_offloads_is_the_schedule_of_its_source(p, v, group):
    """Bubble and peak of GIS and GIS-H: Table 1 and section 3 of arXiv:2503.01328."""
    m = 2 * p
    _, run, held = pipe_offload(p, v, m, group_size=group, offload_share=0.0)
    extra = (p - group) * (v - 1) * (OF_STAGE["F"] + OF_STAGE["I"] - OF_STAGE["W"])
    bubble = (p - 1) * (OF_STAGE["F"] + OF_STAGE["I"]) + extra
    assert run.makespan == pytest.approx(m * v * sum(OF_STAGE.values()) + bubble)
    assert held.max() == pytest.approx(group * (v - 1) + p)


@pytest.mark.parametrize(
    ("v", "group", "share", "offload"),
    daily(
        [
            (*arguments, offload)
            for arguments in [(1, 4, 0.5), (1, 4, 1.0), (2, 4, 0.5), (2, 1, 1)]
            for offload in [1.0, 3.0, 9.0]
        ]
    ),
)
def test_pipe_offload_never_waits_for_its_link(v, group, share, offload):
    """At the times that it was planned for, however slow the link: what does not fit stays."""
    _, plain, whole = pipe_offload(4, v, 8, group_size=group, offload_share=0.0)
    table, run, held = pipe_offload(
        4, v, 8, group_size=group, offload_share=share, offload=offload, load=offload / 2
    )
    assert run.makespan == pytest.approx(plain.makespan)
    assert held.max() <= whole.max() + 1e-9
    assert (table.phase == O).any()
    for seed in range(3):  # and what it holds is a limit whatever the times turn out to be
        strange = make_run(table, random_costs(4 * v, seed))
        assert np.all(peak_over_time(strange, [1] * 4 * v, 1 / 3) <= held + 1e-9)


def test_selective_offload_saves_more_than_its_share():
    """PO-H at P = 8, V = 4: half of the activations go, a quarter is left (source: about 6)."""
    held = []
    for options in ({"group_size": 1, "offload_share": 0.5}, {"offload_share": 0.0}):
        size = {"num_workers": 8, "num_microbatches": 16, "stages_per_worker": 4}
        table = pj.schedules.build("pipe-offload", **size, **options)
        run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, offload=1.0))
        held.append(pj.analysis.activation_memory(run).peak.max())
    assert held == [8.0, 32.0]


def test_ada_offload_copes_with_little_memory_and_with_stages_that_differ():
    """530 is the best known schedule of the first problem; the second one has room for one."""
    tight = LimitedPipe.from_numbers(4, 16, forward=10, input_grad=10, weight_grad=10, limits=2)
    assert ada_offload_starts(tight, offload=10, load=10).end.max() == 530
    times = {"forward": 2, "input_grad": 2, "weight_grad": 2}
    uneven = LimitedPipe.from_numbers(4, 10, **times, limits=[1, 2, 2, 2])
    alone, away = (ada_offload_starts(uneven, offload=t).end.max() for t in (None, 1.0))
    assert (alone, away) == (180.0, 86.0)


def test_offloads_take_turns_on_a_shared_link():
    links = [[0, 1], [2, 3]]
    table, _, alone = pipe_offload(4, 1, 8, offload_share=1.0, offload=2.5)
    together, _, held = pipe_offload(4, 1, 8, offload_share=1.0, offload=2.5, host_links=links)
    costs = pj.Costs(forward=2.0, input_grad=2.25, weight_grad=1.5, offload=2.5)
    assert (together.phase == O).sum() < (table.phase == O).sum()
    shared = pj.Links(host_links=links)
    times = [pj.evaluate(t, costs, link=shared).makespan for t in (together, table)]
    assert times[0] == pj.evaluate(table, costs).makespan < times[1]
    assert held.max() >= alone.max()


ONE = ["--workers", "8", "--microbatches", "24"]
PUBLISHED = ["--stage-times", "F=18.522,I=18.086,W=9.337", "--comm", "0.601"]  # 1.5B, M = 24


def test_the_command_plans_for_the_times_of_the_run(answer, tmp_path):
    words = ["evaluate", "--schedule", "zb-2p", *ONE, "--weight-share", "0.36641"]
    planned = answer(*words, *PUBLISHED)
    assert planned["span_bubble_ratio"] == pytest.approx(0.0433, abs=6e-5)  # Table 5
    slots = ["--slots", "F=18.522,I=18.086,W=9.337", "--planned-comm", "0.601"]
    assert answer(*words, *slots, *PUBLISHED)["makespan"] == planned["makespan"]
    other = answer(*words, "--slots", "F=1,I=1,W=1", *PUBLISHED)
    assert other["max_span"] > 1.01 * planned["max_span"]
    costs = tmp_path / "costs.json"
    costs.write_text(
        '{"unit": "seconds", "F": 18.522, "I": 18.086, "W": 9.337, "message": {"transmit": 0.601}}'
    )
    assert answer(*words, "--costs", costs)["makespan"] == planned["makespan"]


def test_the_command_plans_offloads(answer):
    words = shlex.split("evaluate -s ada-offload -P 4 -M 8 --memory-limit 2 --stage-times")
    slow, fast = (answer(*words, f"F=1,I=1,W=1,O={o}")["makespan"] for o in (3, 0.5))
    assert (slow, fast) == (41.0, 29.0)  # too slow to pay, and almost as if memory were ample


def test_other_schedules_leave_the_weight_share_alone(answer):
    rows = answer(
        *shlex.split("compare --schedules 1f1b,zb-h1,zero-bubble --workers 4 --microbatches 8"),
        *shlex.split("--weight-share 0.4 --memory-limit 4 --stage-times F=1,B=2 --comm 0.1"),
    )["rows"]
    plain, handcrafted, searched = (row["makespan"] for row in rows)
    assert searched <= handcrafted < plain
