"""Closed forms that schedules are known by, at sizes that include 1 and M < P."""

import csv

import numpy as np
import pytest
from daily import read_cases, with_cases
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.comparison import Times, closed_form
from pipejax.schedules.cells.ops import format_cell
from pipejax.schedules.table.held_activations import peak_in_flight

SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 8), (5, 13), (8, 32)]
FUSED_SIZES = [(2, 4), (4, 8), (4, 14), (6, 18), (8, 16), (12, 30)]


def run(name, p, m, forward=1.0, backward=1.0, transfer=0.0, **options):
    table = build(name, p, m, **options)
    costs = pj.Costs.per_worker(table, forward=forward, backward=backward)
    costs = type(costs)(**{**vars(costs), "transmit": transfer})
    return table, pj.evaluate(table, costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("backward", [1.0, 2.0, 0.3])
def test_gpipe_and_1f1b(name, p, m, backward):
    _, result = run(name, p, m, backward=backward)
    assert result.makespan == pytest.approx((m + p - 1) * (1 + backward))
    assert result.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_naive(p, m):
    _, result = run("naive", p, m, backward=2.0, transfer=0.3)
    messages = 2 * m * (p - 1) * 0.3
    assert result.makespan == pytest.approx(3 * m * p + messages)
    assert run("naive", p, m)[1].bubble_ratio == pytest.approx((p - 1) / p)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_in_flight(p, m):
    one_f_one_b, _ = run("1f1b", p, m)
    all_of_them, _ = run("gpipe", p, m)
    assert peak_in_flight(one_f_one_b).tolist() == [min(p - r, m) for r in range(p)]
    assert peak_in_flight(all_of_them).tolist() == [m] * p


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 6), (4, 4), (4, 8), (8, 16)])
def test_interleaved(p, m, v):
    _, result = run("interleaved-1f1b", p, m, backward=2.0, stages_per_worker=v)
    idle = result.makespan - result.busy
    np.testing.assert_allclose(idle, (p - 1) * 3.0 / v)  # (P-1)(F+B)/V


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (5, 15)])
def test_circular(p, m, v):
    """Delayed forwarding takes two ops a hop, both ways: the bubble doubles; M is at least 2P."""
    for transfer, bubble in ((0.0, p - 1), (1.0, 2 * (p - 1))):
        table = build("circular", p, m, stages_per_worker=v)
        run = pj.evaluate(table, pj.Costs(forward=1.0, backward=1.0, transmit=transfer))
        assert run.makespan == 2 * (m * v + bubble)
        assert run.bubble_ratio == pytest.approx(bubble / (m * v + bubble))


@pytest.mark.parametrize("pipes", [2, 4, 6, 8])
@pytest.mark.parametrize("p", [2, 4, 6, 8, 12, 16])
def test_chimera_with_several_couples_of_pipes(p, pipes):
    """Table 3: (P-2f)/(2fM+P-2f), from P-P/2f+1 to P activations."""
    if p % pipes:
        return
    for m in (p, 3 * p):
        table, result = run("chimera", p, m, pipes=pipes)
        form, shape = closed_form(table)
        assert (form.weight_copies, shape.f) == (pipes, pipes // 2)
        assert result.makespan == 2 * m + 2 * p // pipes - 2
        assert result.bubble_ratio == pytest.approx(form.bubble_ratio[1](shape), abs=1e-15)
        peak = peak_in_flight(table)
        assert peak.max() == p
        if m == p:
            assert peak.min() == p - p // pipes + 1
            assert peak.tolist() == [form.in_flight[1](shape, r) for r in range(p)]


@pytest.mark.parametrize("p", [4, 6, 8, 16])
def test_chimera_b_2f(p):  # P=M: P forwards and 2P-2 backwards on the critical path
    assert run("chimera", p, p, backward=2.0)[1].makespan == p + (2 * p - 2) * 2


@pytest.mark.parametrize(("waves", "expected"), [(1, 38.0), (2, 31.5), (4, 27.75)])
def test_hanayo_8_8(waves, expected):
    assert run("hanayo", 8, 8, backward=2.0, waves=waves)[1].makespan == expected


def test_schedules_without_formula_say_so():
    form, _ = closed_form(build("hanayo", 2, 2))
    assert form.bubble_ratio is None
    assert form.weight_copies == 1
    assert closed_form(build("chimera-asymmetric", 2, 2))[0].weight_copies == 2


# DualPipe and DualPipeV: the published orders, bubbles and activations
@with_cases("name file", *read_cases("test_the_order_is_the_published_one"))
def test_the_order_is_the_published_one(data, name, file):
    rows = list(csv.reader((data / f"{file}.csv").read_text().splitlines()))
    built = [[format_cell(cell) for cell in row if cell] for row in build(name, 4, 8).rows()]
    assert built == [[cell for cell in row if cell] for row in rows]


@pytest.mark.parametrize(("p", "m"), FUSED_SIZES)
def test_dualpipe_is_dualpipe_v_from_both_ends(p, m):
    """Either half has the rows of DualPipeV, in which the pipes are the ways down and up."""

    def rows(table, all_values):
        cells = [[cell for cell in row if cell] for row in table.rows()]

        def unit(op):
            return (op.phase, op.stage, op.microbatch // all_values)

        return [[[unit(op) for op in cell] for cell in row] for row in cells]

    half = rows(build("dualpipe-v", p // 2, m // 2), 1)
    assert rows(build("dualpipe", p, m), 2) == [*half, *half[::-1]]


@pytest.mark.parametrize("pair", [0.0, 0.5, 1.0])  # of the way from the longer op to the sum
@pytest.mark.parametrize("weight", [0.25, 1.0, 1.5])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_the_published_bubble_is_that_of_the_worker_that_waits_longest(name, weight, pair):
    f, i, w = 1.5, 1.5, weight
    times = Times(f, i, w, (i + w) + pair * f)
    costs = pj.Costs(forward=f, input_grad=i, weight_grad=w, pair=times.pair)
    for p, m in FUSED_SIZES:
        table = build(name, p, m)
        run, (form, shape) = pj.evaluate(table, costs), closed_form(table)
        idle = run.makespan - run.busy
        assert idle.max() == form.idle[1](shape, times)
        assert pair < 1 or idle.min() == idle.max()
        assert idle[p // 2 if name == "dualpipe" else p - 1] == idle.max()


def test_a_makespan_of_another_program():
    """66 slots at P = 8, M = 20, F = 1, B = 2, F&B = 3, by PP-Schedule-Visualization."""
    run = pj.evaluate(build("dualpipe", 8, 20), pj.Costs(forward=1.0, backward=2.0, pair=3.0))
    assert run.makespan == 66.0


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (6, 18), (8, 16), (12, 30)])
def test_every_worker_of_fused_schedules_holds_what_is_published(name, p, m):
    table = build(name, p, m)
    form, shape = closed_form(table)
    assert peak_in_flight(table).tolist() == [form.in_flight[1](shape, r) for r in range(p)]
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
    assert run.bubble_ratio == pytest.approx(form.bubble_ratio[1](shape), abs=1e-15)
