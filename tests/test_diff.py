"""Differences of two tables: cells, rows, workers, phases; and their cost."""

import itertools
import random

import pytest

import pipejax as pj
from pipejax.analysis.comparison.table_difference import row_exchanges, table_difference
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links

SIZE = {"num_workers": 4, "num_microbatches": 8}
PIPE = pj.schedules.build("1f1b", **SIZE)
ONE = ["0F0", "0F1", "0B0", "0B1"]


def get_rows(*rows):
    return pj.ScheduleTable.from_rows(rows)


def test_idle_slots_are_no_difference():
    result = table_difference(get_rows(ONE), get_rows(["", *ONE[:2], "", *ONE[2:]]))
    assert result.is_none
    assert result.rows == []


def test_the_first_difference_and_what_is_out_of_order():
    result = table_difference(get_rows(ONE), get_rows(["0F0", "0B0", "0F1", "0B1"]))
    (row,) = result.rows
    assert (row.worker, row.first, row.reordered, row.only) == (0, 1, 1, (0, 0))
    assert [[str(cell[0]) for cell in cells] for _, cells in row.around(1)] == [
        ["0F0", "0F1", "0B0"],
        ["0F0", "0B0", "0F1"],
    ]
    assert result.only == {}


def test_fewest_ops_that_would_have_to_move():
    """Against the longest common order by trying all parts of the row."""
    draw = random.Random(1)
    ops = [f"0{phase}{m}" for phase in "FB" for m in range(4)]
    for _ in range(5):
        order = draw.sample(range(4), 4), draw.sample(range(4), 4)
        row = [f"0F{m}" for m in order[0]] + [f"0B{m}" for m in order[1]]
        result = table_difference(get_rows(ops), get_rows(row))
        longest = max(
            size
            for size in range(len(ops) + 1)
            for part in itertools.combinations(ops, size)
            if [op for op in row if op in part] == list(part)
        )
        assert sum(entry.reordered for entry in result.rows) == len(ops) - longest


def test_split_backwards_are_counted_once():
    result = table_difference(PIPE, pj.schedules.build("zb-h1", **SIZE))
    assert result.split == (0, 32)
    assert result.only == {Phase.B: (32, 0), Phase.I: (0, 32), Phase.W: (0, 32)}
    back = table_difference(pj.schedules.build("zb-h1", **SIZE), PIPE)
    assert back.split == (32, 0)


def test_cells_of_communication_and_workers():
    sent = pj.links.insert_transfers(PIPE, link=Links("rendezvous"))
    result = table_difference(PIPE, sent)
    assert result.communication == (0, 2 * 2 * 3 * 8)
    assert result.other_placement is False
    mirrored = pj.ScheduleTable.from_rows([*PIPE.rows()][::-1])
    result = table_difference(PIPE, mirrored)
    assert (result.other_placement, len(result.moved)) == (True, 64)
    assert result.moved[pj.Op(Phase.F, 0, 0)] == (0, 3)
    assert result.only == {}


def test_tables_of_other_sizes():
    result = table_difference(PIPE, pj.schedules.build("1f1b", num_workers=3, num_microbatches=9))
    assert result.sizes == {"workers": (4, 3), "stages": (4, 3), "microbatches": (8, 9)}
    assert [row.worker for row in result.rows] == [0, 1, 2]
    assert result.only[Phase.F] == (8, 3)


def test_a_row_alone_is_exchanged():
    other = pj.schedules.build("gpipe", **SIZE)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    result = [*row_exchanges(PIPE, other, range(4), costs, Links())]
    rows = [next(iter(other.rows())), *[*PIPE.rows()][1:]]
    assert result[0] == pj.evaluate(PIPE.with_rows(rows), costs).makespan
    assert result[1:] == [None] * 3  # backwards in another order than the next worker's


def test_the_command(answer, call, tmp_path):
    pj.write_table(PIPE, tmp_path / "pipe.csv")
    both = ["compare", "--diff", "--schedules", f"{tmp_path / 'pipe.csv'},zb-h1"]
    options = [*both, "--stage-times", "F=1,B=2", "--comm", 0.1]
    result = answer(*options)
    assert [run["workers"] for run in result["tables"]] == [4, 4]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    assert result["tables"][0]["makespan"] == pj.evaluate(PIPE, costs).makespan
    assert (result["equal"], result["split"], result["unit"]) == (False, [0, 32], "seconds")
    assert result["rows"][0]["cells"] == ["0B0", "0I0"]
    assert [row["worker"] for row in result["exchanges"]] == [0, 1, 2, 3]
    code, out, _ = call(*options, "--details")
    assert code == 0
    assert ">0B0<" in out
    assert "backwards that are split into I and W, only in B: 32" in out
    pj.write_table(PIPE, tmp_path / "same.csv")
    both[-1] = f"{tmp_path / 'pipe.csv'},{tmp_path / 'same.csv'}"
    same = answer(*both)
    assert (same["equal"], same["unit"], same["exchanges"]) == (True, "slots", [])
    assert "the same cells in the same order" in call(*both, "--labels", "mine,yours")[1]


@pytest.mark.parametrize("name", pj.schedules.names())
def test_a_table_is_like_itself(name):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    assert table_difference(table, table).is_none
