"""Every way a table can be wrong, with its message; and what a right one prints."""

import numpy as np
import pytest

import pipejax as pj
from pipejax.schedules.cells.ops import CELL_PHASES, SHARDING, format_cell, parse_cell
from pipejax.schedules.table.table import format_grid

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def test_error_shows_the_grid_with_the_place_marked():
    with pytest.raises(pj.ScheduleError) as caught:
        pj.ScheduleTable.from_rows([[*TWO[0], "0F1"], TWO[1]])
    assert caught.value.grid.splitlines() == [
        "             0    1    2    3     4",
        "  worker 0  0F0  0F1  0B0  0B1  >0F1<",
        "  worker 1  1F0  1B0  1F1  1B1    .",
    ]
    assert str(caught.value) == f"{caught.value.reason}\n{caught.value.grid}"


def test_grid_of_a_long_table_is_a_window():
    text = format_grid([[f"0F{m}" for m in range(100)]], mark=(0, 50), max_slots=9)
    assert ">0F50<" in text
    assert "(slots 46 to 54 of 100)" in text


@pytest.mark.usefixtures("unchecked")
def test_the_arrays_of_a_table_hold_whole_numbers():
    table = pj.ScheduleTable.from_rows(TWO)
    wide = pj.ScheduleTable(table.cells, table.partners, [[0, 1]])
    assert wide.placement.dtype == np.int32
    options = np.array([0, 0], np.int32)
    pj.ScheduleTable.from_rows(TWO, placement=[[0, 1]], pipe_of_microbatch=options)
    options[0] = 1  # the caller's own array stays his


def test_arrays_are_dense_integers_and_frozen():
    table = pj.ScheduleTable.from_rows(TWO)
    for array in (table.phase, table.stage, table.microbatch, table.pipe):
        assert array.shape == (2, 4)
        assert array.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0
    assert pj.Phase(table.phase[0, 2]) is pj.Phase.B


def test_mirrored_rows_are_two_pipes():
    table = pj.ScheduleTable.from_rows([["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]])
    assert table.placement.tolist() == [[0, 1], [1, 0]]
    assert table.pipe_of_microbatch.tolist() == [0, 1]


@pytest.mark.parametrize(("workers", "pipes"), [(4, 4), (8, 4), (6, 6), (12, 6)])
def test_couples_of_pipes_are_read_off_the_rows(workers, pipes):
    size = {"num_workers": workers, "num_microbatches": 2 * pipes}
    table = pj.schedules.build("chimera", **size, pipes=pipes)
    read = pj.ScheduleTable.from_rows([*table.rows()])
    assert read.placement.tolist() == table.placement.tolist()
    assert read.pipe_of_microbatch.tolist() == table.pipe_of_microbatch.tolist()
    if workers == pipes:  # whichever workers change places, these remain couples
        return
    shifted = [*table.rows()]
    with pytest.raises(pj.ScheduleError, match="shifted by a fixed number"):
        pj.ScheduleTable.from_rows([shifted[1], shifted[0], *shifted[2:]])


@pytest.mark.parametrize("phase", CELL_PHASES)
def test_parse_is_the_inverse_of_print(phase):
    text = f"12{phase.name}" + ("" if phase in SHARDING else "345")
    assert format_cell(parse_cell(text)) == text
    pair = "(0F8;7B0)OVERLAP_F_B"
    assert format_cell(parse_cell(f" {pair} ")) == pair
    assert format_cell(parse_cell("")) == ""
