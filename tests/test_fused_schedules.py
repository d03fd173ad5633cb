"""DualPipe and DualPipeV: the published orders, bubbles and activations."""

import csv

import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.comparison.comparison import Times, closed_form
from pipejax.schedules.cells.ops import format_cell
from pipejax.schedules.table.held_activations import peak_in_flight

SIZES = [(2, 4), (4, 8), (4, 14), (6, 18), (8, 16), (12, 30)]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dualpipe", "DualPipe_4_8"),  # the step of DualPipe's own dualpipe.py, computing recorded
        ("dualpipe-v", "DualPipeV_4_8"),  # PyTorch's ScheduleDualPipeV
    ],
)
def test_the_order_is_the_published_one(data, name, file):
    rows = list(csv.reader((data / f"{file}.csv").read_text().splitlines()))
    built = [[format_cell(cell) for cell in row if cell] for row in build(name, 4, 8).rows()]
    assert built == [[cell for cell in row if cell] for row in rows]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_dualpipe_is_dualpipe_v_from_both_ends(p, m):
    """Either half has the rows of DualPipeV, in which the pipes are the ways down and up."""

    def rows(table, all_values):
        return [
            [
                [(op.phase, op.stage, op.microbatch // all_values) for op in cell]
                for cell in row
                if cell
            ]
            for row in table.rows()
        ]

    half = rows(build("dualpipe-v", p // 2, m // 2), 1)
    assert rows(build("dualpipe", p, m), 2) == [*half, *half[::-1]]


@pytest.mark.parametrize("pair", [0.0, 0.5, 1.0])  # of the way from the longer op to the sum
@pytest.mark.parametrize("weight", [0.25, 1.0, 1.5])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_the_published_bubble_is_that_of_the_worker_that_waits_longest(name, weight, pair):
    f, i, w = 1.5, 1.5, weight
    times = Times(f, i, w, (i + w) + pair * f)
    costs = pj.Costs(forward=f, input_grad=i, weight_grad=w, pair=times.pair)
    for p, m in SIZES:
        table = build(name, p, m)
        run, (form, shape) = pj.evaluate(table, costs), closed_form(table)
        idle = run.makespan - run.busy
        assert idle.max() == form.idle[1](shape, times)
        assert pair < 1 or idle.min() == idle.max()
        assert idle[p // 2 if name == "dualpipe" else p - 1] == idle.max()


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_worker_holds_what_is_published(name, p, m):
    table = build(name, p, m)
    form, shape = closed_form(table)
    assert peak_in_flight(table).tolist() == [form.in_flight[1](shape, r) for r in range(p)]
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
    assert run.bubble_ratio == pytest.approx(form.bubble_ratio[1](shape), abs=1e-15)


def test_a_makespan_of_another_program():
    """66 slots at P = 8, M = 20, F = 1, B = 2, F&B = 3, by PP-Schedule-Visualization."""
    run = pj.evaluate(build("dualpipe", 8, 20), pj.Costs(forward=1.0, backward=2.0, pair=3.0))
    assert run.makespan == 66.0
