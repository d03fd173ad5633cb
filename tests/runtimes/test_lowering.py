"""Every table that PyTorch's schedule classes generate: read, written, and lowered as they lower it."""

import json
from pathlib import Path

import pytest
import torch_tables as torch_own

import pipejax as pj
from pipejax.schedules.cells.ops import format_cell


def counts(ranks):
    return sorted({1, 2, 3, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks + 1, 8 * ranks})


def cells(table):
    return [[format_cell(cell) for cell in row if cell] for row in table.rows()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_lowered_cell_by_cell(ranks):
    compared = 0
    for name, _, per_rank, count, actions in torch_own.grid((ranks,), (1, 2, 3, 4), counts):
        table = pj.ScheduleTable.from_rows(torch_own.texts(actions))
        theirs = torch_own.texts(torch_own.lowered(actions, ranks, per_rank, count))
        ours = pj.links.insert_transfers(table, lowering="pytorch")
        assert cells(ours) == theirs, (name, ranks, per_rank, count)
        compared += 1
    assert compared > 25


def test_interleaved_zb_has_pytorchs_cells():
    compared = 0
    for name, ranks, per_rank, count, actions in torch_own.grid(range(2, 7), (2, 3, 4), counts):
        if name == "InterleavedZeroBubble":
            sizes = {"num_workers": ranks, "num_microbatches": count}
            ours = pj.schedules.build("interleaved-zb", **sizes, stages_per_worker=per_rank)
            texts = [[cell for cell in row if cell] for row in torch_own.texts(actions)]
            assert cells(ours) == texts, sizes
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("ranks", [2, 4])
def test_read_and_written(ranks, tmp_path):
    path = tmp_path / "table.csv"
    for _, _, per_rank, count, actions in torch_own.grid((ranks,), (1, 2), counts):
        theirs = torch_own.texts(torch_own.lowered(actions, ranks, per_rank, count))
        for rows in (torch_own.texts(actions), theirs):
            path.write_text(torch_own.as_csv(rows))
            table = pj.read_table(path)
            pj.write_table(table, path)
            again = pj.read_table(path)
            assert cells(table) == cells(again) == [[c for c in row if c] for row in rows]


def test_what_the_other_tests_hold_is_what_pytorch_makes():
    path = Path(__file__).parents[1] / "data" / "torch_lowered.json"
    for case in json.loads(path.read_text())["tables"]:
        sizes = case["workers"], case["stages_per_worker"], case["microbatches"]
        actions = torch_own.compute_only(case["schedule"], *sizes)
        lowered = torch_own.lowered(actions, *sizes)
        for rows, key in ((actions, "compute"), (lowered, "lowered")):
            texts = [" ".join(cell or "-" for cell in row) for row in torch_own.texts(rows)]
            assert texts == case[key]
