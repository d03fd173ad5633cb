"""Schedules of microbatches in slices, against their orders and forms written down again.

Orders are those of thunlp/Seq1F1B (`schedules.py`: warm-up P - r + K - 2; `sp_utils.py`: a queue
from which microbatches leave in order and slices of one in the reverse order), of GPipe, and of
interleaved 1F1B with groups of P slices. The checker runs them.
"""

import itertools

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.comparison.comparison import closed_form

GRID = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 3, 5)))
SLIM = [(p, m, k * p, v) for p, m, k, v in itertools.product((1, 2, 4), (1, 2, 5), (1, 3), (2, 3))]


def built(name, p, m, k, **options):
    return pj.schedules.build(name, num_workers=p, num_microbatches=m, slices=k, **options)


def turns(warmup, forwards, backwards):
    first, rest = forwards[:warmup], forwards[warmup:]
    pairs = [op for pair in zip(rest, backwards, strict=False) for op in pair]
    return first + pairs + backwards[len(rest) :]


def order(name, p, m, k, v=1):
    rows = []
    for r in range(p):
        groups = range(0, k, p) if v > 1 else [0]
        size = p if v > 1 else k
        passes = [(c, g + j) for g in groups for c in range(v) for j in range(size)]
        forwards = [("F", c * p + r, i, j) for i in range(m) for c, j in passes]
        backwards = [("B", c * p + r, i, j) for i in range(m) for c, j in reversed(passes)]
        warmup = {"terapipe": m * k, "seq-1f1b": p - r + k - 2}.get(name, k * v + 2 * (p - r) - 3)
        rows.append(turns(min(warmup, m * k * v), forwards, backwards))
    return rows


CASES = [(name, p, m, k, 1) for name in ("seq-1f1b", "terapipe") for p, m, k in GRID[::3]]
CASES += [("slimpipe", *sizes) for sizes in SLIM]


@pytest.mark.parametrize("name", ["seq-1f1b", "terapipe", "slimpipe"])
def test_orders_are_those_written_here_and_run_as_the_checker_runs_them(name):
    rng = np.random.default_rng(len(name))
    for _, p, m, k, v in [case for case in CASES if case[0] == name]:
        table = built(name, p, m, k, **({"stages_per_worker": v} if v > 1 else {}))
        rows = order(name, p, m, k, v)
        number = {"F": pj.Phase.F, "B": pj.Phase.B}
        expected = [[(number[f], s, i * k + j) for f, s, i, j in row] for row in rows]
        assert [[tuple(op) for cell in row for op in cell] for row in table.rows()] == expected
        times = {phase: rng.random((p * v, m * k)) for phase in "FB"}
        costs = pj.Costs(forward=times["F"], backward=times["B"], transmit=0.25)
        run = pj.evaluate(table, costs)
        assert pj.verify(pj.certificate(run)).problems == ()


@pytest.mark.parametrize("name", ["seq-1f1b", "terapipe", "slimpipe"])
def test_bubble_and_memory_are_those_that_are_published(name):
    """Idle is (P - 1) / (K V) of a microbatch's F and B; activations by worker, in slices."""
    for _, p, m, k, v in [case for case in CASES if case[0] == name]:
        table = built(name, p, m, k, **({"stages_per_worker": v} if v > 1 else {}))
        ran = pj.evaluate(table, pj.Costs.per_worker(table, forward=1.0, backward=2.0))
        assert ran.makespan == pytest.approx(3 * (m + (p - 1) / (k * v)))
        assert ran.bubble_overhead == pytest.approx((p - 1) / (k * v * m))
        held = {
            "seq-1f1b": [min(p - r - 1 + k, m * k) for r in range(p)],
            "terapipe": [m * k] * p,
            "slimpipe": [min(k * v + 2 * (p - r - 1), m * k * v) for r in range(p)],
        }[name]
        assert ran.peak_in_flight.tolist() == held
        form, shape = closed_form(table)
        assert form.holds(shape)
        assert form.bubble_ratio[1](shape) == pytest.approx(ran.bubble_ratio, abs=1e-12)
        assert [form.in_flight[1](shape, r) for r in range(p)] == held


def test_memory_of_the_first_worker_in_microbatches():
    """1F1B holds P of M_a / P; Seq1F1B (P - 1 + K) / K, SlimPipe one and 2 (P - 1) / (K V)."""
    for p, k in ((4, 4), (4, 16), (8, 8), (8, 64)):
        seq, slim = built("seq-1f1b", p, 2 * p, k), built("slimpipe", p, 2 * p, k)
        costs = pj.Costs(forward=1.0, backward=2.0)
        held = [pj.compare(table, costs).peak_microbatches for table in (seq, slim)]
        assert held == pytest.approx([(p - 1 + k) / k, 1 + 2 * (p - 1) / (2 * k)])


def test_one_slice_is_the_schedule_itself():
    for name, other in (("seq-1f1b", "1f1b"), ("terapipe", "gpipe")):
        sliced, whole = (
            built(name, 4, 8, 1),
            pj.schedules.build(other, num_workers=4, num_microbatches=8),
        )
        assert [*sliced.rows()] == [*whole.rows()]


def test_rules_hold_slices_in_order():
    rows = [["0F0.1", "0F0.0", "0B0.1", "0B0.0"]]
    with pytest.raises(pj.ScheduleError, match=r"0F0\.1 on worker 0 waits for 0F0\.0"):
        pj.ScheduleTable.from_rows(rows, grammar=pj.schedules.Grammar(slices=2))


def test_the_command_line_takes_slices(answer, mistake):
    size = ["-P", "4", "-M", "8", "--worker-times", "F=1,B=2"]
    result = answer("evaluate", "-s", "seq-1f1b", "--slices", "4", *size)
    assert (result["microbatches"], result["slices"]) == (8, 4)
    assert result["makespan"] == pytest.approx(3 * (8 + 3 / 4))
    rows = answer("compare", "-S", "1f1b,seq-1f1b,slimpipe", "--slices", "8", *size)["rows"]
    by_name = {row["schedule"]: row["makespan"] for row in rows}
    assert by_name == pytest.approx(
        {"slimpipe slices=8": 24 + 9 / 16, "seq-1f1b slices=8": 24 + 9 / 8, "1f1b": 33.0}
    )
    assert {row["microbatches"] for row in rows} == {8}
    assert "multiple of the workers (4), got 6" in mistake(
        "evaluate", "-s", "slimpipe", "--slices", "6", *size
    )
    assert "takes no slices" in mistake("evaluate", "-s", "1f1b", "--slices", "2", *size)
