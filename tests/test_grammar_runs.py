"""Random tables with kinds and rules against the event loop, with exact sums."""

import json
import os
import re
from itertools import pairwise

import grammar_cases
import jax
import numpy as np
import pytest
import reference
import strategies
from daily import read_cases, with_cases
from grammar_cases import priced
from hypothesis import assume, given, settings, strategies as st
from legal_sizes import build
from reference import SHARDING, IllegalError

import pipejax as pj
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table_files import from_json, to_json

EXAMPLES = int(os.environ.get("EXAMPLES", "200"))
MODELS = st.sampled_from(strategies.LINKS)
QUEUES = st.sampled_from(["worker", "pair", "direction"])
SEEDS = st.integers(0, 2**32 - 1)
NAME = re.compile(
    r"(\S+) \((?:(?:worker|host link of worker) (\d+)|lane \S+)\)|(\S+) \(worker (\d+) to (\d+)\)"
)


# ------------------------------------------------------------------------------------------- cycles
def get_events(name, run):
    """Return the reference's names of the ops and messages of a cycle."""
    op, worker, send, sender, receiver = NAME.fullmatch(name).groups()
    if op is None:
        letter, ends = send[send.index("SEND_") + 5], (int(sender), int(receiver))
        return [
            event
            for event, message in run.messages.items()
            if (message.sender, message.receiver) == ends and is_sent(event, send, letter, run)
        ]
    result = [
        (w, k)
        for w, row in enumerate(run.table.rows)
        for k, cell in enumerate(row)
        if cell and (w, k) in run.durations and cell_text(cell, run) == op
    ]
    return [cell for cell in result if worker is None or cell[0] == int(worker)] or result


def is_sent(event, send, letter, run):
    """Return whether an event is the message that an error names by its SEND."""
    maker = event[0] if isinstance(event[0], tuple) else event
    way = event[2] < maker[1] if isinstance(event[0], tuple) else event[0] == "SEND_B"
    number = run.rules.op_text(maker).split(maker[0])[1]
    return send == f"{maker[1]}SEND_{letter}{number}" and "FB"[way] == letter


def cell_text(cell, run):
    ops = [*map(run.rules.op_text, cell)]
    return f"({';'.join(ops)})OVERLAP_F_B" if len(ops) == 2 else ops[0]


def awaited(event, run):
    """All that an event waits for, and the makers of messages among it."""
    waits = {other for other, _ in run.waits[event]}
    return waits | {maker for send in waits & {*run.messages} for maker, _ in run.waits[send]}


def assert_is_a_cycle(message, run):
    """Each of the ops that an error names waits for the one before it."""
    names = message.splitlines()[0].partition("can start: ")[2].split(" -> ")
    assert len(names) > 1
    assert names[0] == names[-1]
    for name, following in pairwise(names):
        makers = get_events(name, run)
        assert makers, name
        joined = {cell for maker in makers for cell in collective(maker, run)}
        assert any(joined & awaited(event, run) for event in get_events(following, run)), message


def collective(event, run):
    """The cells of an event, which are many where all workers do it together."""
    letters = run.letters(event)
    if not letters or not run.rules.is_collective(letters):
        return [event]
    op = run.table.rows[event[0]][event[1]][0]
    return [cell for other, cell in run.table.cell.items() if other[::2] == op[::2]]


# --------------------------------------------------------------------------------------------- runs
def assert_lanes(result, run):
    """Compare busy times of lanes, and their parts in idle compute."""
    expected = {}
    workers = range(result.workers)
    computes = [[(run.start[e], run.end[e]) for e in run.worker_events(w)] for w in workers]
    event_lanes = {e: run.rules.lane(run.letters(e)) for e in run.end if run.letters(e)}
    for (w, k), lane in event_lanes.items():
        if lane == "compute":
            continue
        start, end = run.start[w, k], run.end[w, k]
        hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in computes[w])
        times = expected.setdefault(lane, np.zeros((2, result.workers)))
        times[:, w] += end - start, end - start - hidden
    for lane in pj.analysis.lane_times(result):
        busy, exposed = expected.pop(lane.lane)
        assert lane.busy.tolist() == busy.tolist()
        np.testing.assert_allclose(lane.exposed, exposed, atol=1e-12)
    assert not expected


def assert_batch(result, rows, links):
    """A batch of costs is so many runs; counts times costs are the makespan."""
    program, many = result.program, jax.tree.map(lambda *leaf: np.stack(leaf), *rows)
    expected = [pj.evaluate(result.table, row, link=links).makespan for row in rows]
    assert pj.makespans(program, many, batch_size=len(rows)).tolist() == expected
    values, counts = pj.makespans_and_grad(program, many, batch_size=len(rows))
    assert values.tolist() == expected
    if rows[0].pair_factor is not None:  # a time that is no sum of costs
        return
    products = jax.tree.map(lambda n, x: (n * x).reshape(len(rows), -1).sum(1), counts, many)
    assert sum(jax.tree.leaves(products)).tolist() == expected


@st.composite
def make_links(draw, workers):
    """Draw links as strategies do, without posting by program, which needs SEND and RECV cells."""
    model, queues = draw(MODELS), draw(QUEUES)
    more = draw(strategies.carried(model, workers))
    more.pop("posting", None)
    return model, queues, draw(strategies.host_links(workers)), more


@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_number_is_that_of_the_event_loop(data, seed):
    by_microbatch = data.draw(st.booleans())
    case = data.draw(grammar_cases.cases(by_microbatch))
    model, queues, groups, more = data.draw(make_links(len(case.data["rows"])))
    links = pj.Links(model, queues, groups, **more)
    try:
        run = case.run(model, queues, host_links=groups, **more)
    except IllegalError:
        with pytest.raises(pj.ScheduleError):
            case.table()
        return
    except reference.DeadlockError as deadlock:
        with pytest.raises(pj.ScheduleError, match="deadlock") as error:
            pj.lower(case.table(), link=links, costs=case.costs)
        assert_is_a_cycle(str(error.value), deadlock.run)
        return
    table, rng = case.table(), np.random.default_rng(seed)
    again = from_json(json.loads(to_json(table)))
    assert (str(again), again.grammar) == (str(table), table.grammar)
    result = pj.evaluate(table, case.costs, link=links)
    assert result.makespan == run.makespan
    assert result.busy.tolist() == run.busy()
    sizes, share = rng.integers(0, 9, result.stages) / 2, rng.integers(0, 5, result.stages) / 4
    how = {"sizes": sizes, "weight_share": share, "checkpoints": 0.25}
    memory = pj.analysis.activation_memory(result, **how)
    # start and end of every cell and message, and what each worker holds when
    certificate = json.loads(json.dumps(pj.certificate(result, memory=memory)))
    assert pj.verify(certificate).problems == ()
    assert_lanes(result, run)
    if not links.eager_below:
        rows = [case.costs, *(grammar_cases.again(case, rng).costs for _ in range(2))]
        assert_batch(result, rows, links)


# ----------------------------------------------------- what else says how long a run takes
@st.composite
def runs(draw, **case_options):
    """Draw a case that can run, with a link model, its table and its run by the event loop."""
    case, model = draw(grammar_cases.cases(**case_options)), draw(MODELS)
    try:
        run = case.run(model)
    except (IllegalError, reference.DeadlockError):
        assume(False)
    return case, model, case.table(), run


@settings(max_examples=40)
@given(result=runs(max_workers=2), seed=SEEDS)
def test_kinds_are_parameters_by_their_letters(result, seed):
    case, model, table, _ = result
    program = pj.lower(table, link=model, step_end=False)
    names = [name for name in default_names(program, case) if name not in ("c_F", "c_B")]
    assume(len(names) < 6)  # more have many facets
    rng = np.random.default_rng(seed)
    form = pj.formula(program)
    assert [name for name in form.parameters if name not in ("c_F", "c_B")] == names
    for _ in range(3):
        values = {name: rng.integers(0, 9) / 4 for name in form.parameters}
        assert form(**values) == priced(case.data, by_letters(case, values)).run(model).makespan


def default_names(program, case):
    """Letters of what a table holds, each cost once, a backward whole or in its parts."""
    held = {phase.name for phase in (*program.layout.phases, *program.layout.paired_phases)}
    fields, names = {}, []
    split = held & {"I", "W"}
    for letters, (name, _) in grammar_cases.get_fields(case.data).items():
        is_known = letters in held and letters not in ("L", "U", "A", *SHARDING)
        is_known |= bool(split) and letters in ("I", "W")
        if is_known and not (split and letters == "B") and name not in fields:
            fields[name] = letters
            names.append(letters)
    order = ["F", "B", "I", "W", "R", "O"]
    return [x for x in order if x in names] + [x for x in names if x not in order]


def by_letters(case, values):
    """Costs of all stages alike, from parameters by letters and what follows from them."""
    fields = grammar_cases.get_fields(case.data)
    seconds = {fields[letters][0]: value for letters, value in values.items() if letters in fields}
    if "backward" in seconds:
        seconds["input_grad"] = seconds["weight_grad"] = seconds["backward"] / 2
    elif "input_grad" in seconds:
        seconds["backward"] = seconds["input_grad"] + seconds["weight_grad"]
    seconds["load"] = seconds.get("offload", 0.0)
    result = {
        name: None if value is None else np.full(np.shape(value), seconds.get(name, 0.0))
        for name, value in case.arrays.items()
    }
    for way, letter in enumerate("FB"):
        result["transmit"][way] = values.get(f"c_{letter}", 0.0)
    return {**result, "pair": None, "pair_factor": None}


@settings(max_examples=40)
@given(result=runs(by_microbatch=True))
def test_the_longest_path_is_the_makespan_and_adds_up(result):
    case, model, table, run = result
    evaluation = pj.evaluate(table, case.costs, link=model)
    longest, *others = pj.analysis.longest_paths(evaluation, 3)
    assert longest.length == run.makespan
    assert all(path.length <= longest.length for path in others)
    assert sum(longest.counts.values()) >= len(longest.ops)
    names = {table.grammar.text(cell) for row in table.rows() for cell in row if cell}
    assert {op for op in longest.ops if op[-1] not in "AU"} <= names


BRAID = {x: 1.0 + k / 4 for k, x in enumerate(("fa", "fd", "fm", "fc", "ba", "bd", "bm", "bc"))}
GROWING = {
    "combined-1f1b": (3, BRAID),
    "vocabulary-1f1b": (2, {"x": 0.25, "y": 0.5, "s": 0.5, "t": 0.75}),
    "seq-1f1b": (3, {}),
}


@pytest.mark.parametrize("name", GROWING)
def test_makespans_of_more_microbatches(name):
    workers, others = GROWING[name]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.25, others=others)
    table, longer = (build(name, workers, m) for m in (24, 60))
    per = longer.num_microbatches // 60
    program = pj.lower(table)
    result = pj.analysis.extrapolated_makespans(program, costs, num_microbatches=60 * per)
    assert result.tolist() == [pj.evaluate(longer, costs).makespan]
    cycle = pj.cycle_time(program, costs).item() * per
    more = pj.evaluate(longer, costs).makespan - pj.evaluate(table, costs).makespan
    assert cycle == pytest.approx(more / 36, rel=1e-12)


# -------------------------------------------------------------------------------------- by one case
def kind(lane="compute", scope="microbatch", time="own", **more):
    return pj.schedules.OpKind(time, time, lane, scope, **more)


def make_table(rows, grammar, **more):
    return pj.ScheduleTable.from_rows(rows, grammar=pj.schedules.Grammar(**grammar), **more)


def test_a_microbatch_that_computes_nothing_has_a_pipe():
    rows = [["0F0", "0N1", "0F2"]]
    kinds = {"F_": kind(), "N": kind("net")}
    data = {"placement": [[0], [0]], "pipe_of_microbatch": [0, 1, 0]}
    table = make_table([[x.replace("F", "F_") for x in rows[0]]], {"kinds": kinds}, **data)
    assert table.pipe_of_microbatch.tolist() == [0, 1, 0]


FORK, JOIN = [(1, 0), (1, 2)], [(0, 1), (2, 1)]  # an edge to a lower stage and one to a higher
THERE_AND_BACK = [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]
TWO_EACH = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
TWO_EACH.append([op.replace("0", "2", 1) for op in TWO_EACH[0]])


@with_cases(
    "graph rows forward transmit makespan",
    *read_cases("test_activations_of_a_graph_share_a_queue_whatever_the_numbers_of_their_stages"),
)
def test_activations_of_a_graph_share_a_queue_whatever_the_numbers_of_their_stages(
    graph, rows, forward, transmit, makespan
):
    """Times by hand: an activation goes along an edge, to a lower stage too; backwards take 1 s."""
    table = make_table(rows, {"graph": graph, "forward_only": len(rows[0]) == 1})
    costs = pj.Costs(forward=forward, backward=1.0, transmit=np.array(transmit))
    result = pj.evaluate(table, costs, link=pj.Links("rendezvous", "direction"))
    assert result.makespan == makespan
    assert pj.verify(pj.certificate(result)).problems == ()


def test_what_all_do_together_is_one_op_where_transfers_get_their_order():
    """In the run of unit slots the host link of worker 0 waits for both workers."""
    kinds = {"S": kind(scope="worker", is_collective=True), "H": kind("host", time="host")}
    rows = [["S0", "0F0", "0H0"], ["1N0", "S0", "1F0"]]
    table = make_table(rows, {"kinds": {**kinds, "N": kind(time="net")}, "forward_only": True})
    start, _ = slot_times(table, table.grammar.unit_slots)
    assert start.tolist() == [[1.0, 2.0, 3.0], [0.0, 1.0, 3.0]]
