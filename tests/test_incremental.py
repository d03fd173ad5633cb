"""Runs that are changed step by step: after every change as a full evaluation, bit by bit."""

import dataclasses

import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st
from test_longest_paths import graphs

import pipejax as pj
from pipejax.base import longest_path
from pipejax.base.incremental_path import IncrementalPath, to_waits
from pipejax.base.longest_path import CycleError, topological_order
from pipejax.engine.pricing import price
from pipejax.schedules.cells.ops import format_cell

LINKS = st.sampled_from(["delay", "queued", "blocking", "rendezvous"])
SEEDS = st.integers(0, 2**32 - 1)


def run_anew(path):
    """Finish times of a graph as it is now, its nodes sorted again."""
    edges = [(u, v, lag) for v, w in enumerate(path.waits) for u, lag in zip(*w, strict=True) if v]
    tail, head = (np.array(column) for column in [*zip(*edges, strict=True)][:2])
    order = topological_order(len(path.waits), tail, head)
    finish = dict.fromkeys(order, 0.0)
    for node in order:
        arrivals = [finish[u] + lag for u, v, lag in edges if v == node]
        finish[node] = max(arrivals, default=0.0) + path.duration[node]
    return [finish[node] for node in range(len(order))]


@given(graph=graphs(), seed=SEEDS)
@settings(max_examples=40)
def test_any_changes_of_a_graph_and_back(graph, seed):
    preds, duration, lag, _ = graph
    rng, path = np.random.default_rng(seed), IncrementalPath(preds, duration, lag)
    seen = []
    for _ in range(12):
        state = [list(path.finish), list(path.duration), list(path.waits), path.makespan]
        nodes = rng.permutation(np.arange(1, len(preds)))[: rng.integers(1, 3)].tolist()
        if rng.random() < 0.5:
            path.change({node: float(rng.choice([0.1, 0.7, 2.0])) for node in nodes})
        else:
            waits = {}
            for node in nodes:
                others = rng.permutation(len(preds))[: rng.integers(0, 3)].tolist()
                waits[node] = to_waits((v, float(rng.random())) for v in others if v != node)
            try:
                path.change(waits=waits)
            except CycleError:
                assert [path.finish, path.duration, path.waits, path.makespan] == state
                continue
        seen.append(state)
        assert path.finish == run_anew(path)
        assert path.makespan == max(path.finish)
        if rng.random() < 0.2:
            path.undo()
            assert [path.finish, path.duration, path.waits, path.makespan] == seen.pop()
    while seen:
        path.undo()
        assert [path.finish, path.duration, path.waits, path.makespan] == seen.pop()


def evaluated(table, costs, durations, link):
    """Finish times of all ops by a full evaluation; some have durations of their own."""
    result = pj.evaluate(table, costs, link=link)
    preds, priced = np.asarray(result.program.preds), price(result.program, costs)
    duration, node = np.array(priced.duration), result.program.node_of_cell
    labels = {}
    for (worker, slot), at in np.ndenumerate(node):
        if at:
            label = format_cell(table.cell(worker, slot))
            labels[label] = at
            duration[at] = durations.get(label, duration[at])
    finish = longest_path.finish_times(preds, duration, np.asarray(priced.lag))
    return {label: finish[at] for label, at in labels.items()}, float(finish.max())


def held_by(table, worker):
    """The cells of a row that hold something."""
    return [cell for cell in [*table.rows()][worker] if cell]


@given(case=strategies.cases(pairs=True, step_end=True), link=LINKS, seed=SEEDS)
@settings(max_examples=25)
def test_any_changes_of_a_run_and_back(case, link, seed):
    rng = np.random.default_rng(seed)
    run = pj.analysis.IncrementalRun(pj.evaluate(case.table, case.costs, link=link))
    costs, durations, states, table = case.costs, {}, [], case.table
    # a worker has an all-reduce for every stage that a pipe puts there, used or not
    worker_stages = [
        np.nonzero(table.placement == worker)[1] for worker in range(table.num_workers)
    ]
    shares = max(len({*stages.tolist()}) for stages in worker_stages) > 1
    hangs_on_rows = table.offloads or table.updates_within or shares
    for _ in range(10):
        state = costs, dict(durations), run.finish, run.makespan
        kind = rng.integers(4)
        if kind == 0 and states:
            costs, durations, finish, makespan = states.pop()
            assert (run.undo(), run.finish) == (makespan, finish)
        elif kind == 1:
            op = str(rng.choice(list(run.finish)))
            if op.split("OVERLAP")[0][-1] in "AU":  # beside the cells
                continue
            durations[op] = float(rng.choice([0.1, 1.0, 7.3]))
            run.set_duration(op, durations[op])
            states.append(state)
        elif kind == 2 and not durations:
            name = str(rng.choice(["forward", "backward", "weight_grad", "latency", "transmit"]))
            value = np.array(getattr(costs, name)) + 0.0
            if value.size == 0:
                continue
            value.flat[rng.integers(value.size)] = rng.choice([0.1, 0.3, 3.7])
            costs = dataclasses.replace(costs, **{name: value})
            run.set_costs(costs)
            states.append(state)
        elif kind == 3:
            worker = rng.integers(table.num_workers)
            row = held_by(run.table, worker)
            if len(row) < 2:
                continue
            at = int(rng.integers(len(row) - 1))
            try:
                run.swap(format_cell(row[at]), format_cell(row[at + 1]))
            except pj.ScheduleError:
                assert held_by(run.table, worker) == row
            except ValueError:
                assert link != "delay" or hangs_on_rows
            else:
                states.append(state)
        if link == "delay" and not table.offloads:
            finish, makespan = evaluated(run.table, costs, durations, link)
        else:
            finish, makespan = evaluated(table, costs, durations, link)
        ours = run.finish
        assert {op: ours[op] for op in finish} == finish
        assert run.makespan == makespan


@given(case=strategies.cases(pairs=True, step_end=True), link=LINKS, seed=SEEDS)
@settings(max_examples=15)
def test_what_if_an_op_took_another_time(case, link, seed):
    rng = np.random.default_rng(seed)
    run = pj.analysis.IncrementalRun(pj.evaluate(case.table, case.costs, link=link))
    ops = [*run.finish]
    for op in ops[:: 1 + len(ops) // 12]:
        time = float(rng.integers(0, 80)) / 8  # sums of eighths are exact
        expected = run.makespan_if(op, time)
        assert run.set_duration(op, time) == expected
        assert run.makespan_if(op, 0.5) <= expected or time < 0.5
        if rng.random() < 0.5:
            run.undo()


@given(case=strategies.cases(pairs=True, step_end=True), seed=SEEDS)
@settings(max_examples=25)
def test_what_if_two_ops_were_swapped(case, seed):
    rng = np.random.default_rng(seed)
    run = pj.analysis.IncrementalRun(pj.evaluate(case.table, case.costs))
    for _ in range(12):
        row = [*run.table.rows()][rng.integers(case.table.num_workers)]
        row = [format_cell(cell) for cell in row if cell]
        if len(row) < 2:
            continue
        at = int(rng.integers(len(row) - 1))
        before = run.finish
        try:
            expected = run.makespan_if_swapped(*row[at : at + 2])
        except ValueError:  # the very swap is refused as well
            with pytest.raises(ValueError, match=r"cannot come before|must be delay|follow"):
                run.swap(*row[at : at + 2])
            continue
        assert run.finish == before
        assert run.swap(*row[at : at + 2]) == expected  # sums of eighths are exact
        if rng.random() < 0.3:
            run.undo()
