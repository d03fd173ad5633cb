"""Every way a table can be wrong, with its message; and what a right one prints."""

import numpy as np
import pytest

import pipejax as pj
from pipejax.schedules.cells.ops import CELL_PHASES, SHARDING, format_cell, parse_cell
from pipejax.schedules.table.table import format_grid

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]

CYCLE_OF_PAIRS = r"no op of this cycle can start: (\(\dF1;\dB0\)OVERLAP_F_B \(worker \d\) -> ){2}\("
WRONG = {  # rows, workers apart by a slash
    "0F0 0B0 0B1 / 1F0 1B0 1F1 1B1": r"missing op 0F1 on worker 0: .*no forward",
    "0F0 0F1 0B0 / 1F0 1B0 1F1 1B1": r"missing op 0B1 on worker 0",
    "0F0 0B0 2F0 2B0": r"missing op 1F0",
    "0F0 0W0": r"missing op 0I0 on worker 0",
    "0F0 0I0": r"missing op 0W0 on worker 0",
    "0F0 0B0 0I0 0W0": r"op 0B0 .* does the backward twice",
    "0F0 (0F1;0B0)OVERLAP_F_B 0I0 0W0 0B1": r"op 0B0 .* does the backward twice",
    "0F0 0F1 0B0 0B1 0F1 / 1F0 1B0 1F1 1B1": r"op 0F1 stands twice on worker 0: in slots 1 and 4",
    "0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 0F1": r"op 0F1 is on worker 1, but 0F1 .* worker 0",
    "0F0 0F1 0B0 1B1 / 1F0 1B0 1F1 0B1": r"op 1F1 is on worker 1, but 1B1 is on worker 0",
    "0F0 0F1 0B0 0B1 / 1F0 1B0 / 1F1 1B1": (
        r"op 1F1 is on worker 2, but stage 1 of microbatch 0 is on worker 1"
    ),
    "0B0 0F0": r"deadlock: 0B0 on worker 0 waits for 0F0",
    "0F0 0W0 0I0": r"deadlock: 0W0 on worker 0 waits for 0I0",
    "0F0 0B0 0R0": r"deadlock: 0B0 .* waits for 0R0",
    "0F0 0B0 0F1 0B1 / 1F1 1F0 1B0 1B1": (
        r"deadlock: .*1F1 \(worker 1\) -> 1F0 \(worker 1\).* -> 1F1 \(worker 1\)"
    ),
    "(0F0;0B0)OVERLAP_F_B": r"deadlock: .* which is the same fused pair",
    "(0F0;0F1)OVERLAP_F_B 0B0 0B1": r"not a fused pair",
    "/ 0F0 0B0": r"worker 0 has no op",
    "0X0": r"worker 0, slot 0: '0X0' is not an op",
    "0F": r"F carries a microbatch",
    "0UNSHARD1": r"UNSHARD carries no microbatch",
    "0F0 1UNSHARD 0B0 / 1F0 1B0": r"does not hold that stage",
    "999999999F0 999999999B0": r"missing op 0F0",
    "0F0 0SEND_F7 0B0 / 1F0 1B0": (
        r"op 0SEND_F7 on worker 0 has no forward: microbatches are 0 to 0"
    ),
    "0F0 9SEND_F0 0B0 / 1F0 1B0": r"op 9SEND_F0 on worker 0 has no place: stages are 0 to 1",
    "0F0 0SEND_F0 1RECV_F0 0B0 / 1F0 1B0": (
        r"op 1RECV_F0 stands on worker 0, but stage 1 .* is placed on worker 1"
    ),
    "0F0 0SEND_F0 0B0 / 1F0 1B0": r"missing op 1RECV_F0",
    "0F0 0B0 / 1RECV_F0 1F0 1B0": r"missing op 0SEND_F0",
    "0SEND_F0 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0": (
        r"deadlock: 0SEND_F0 .* before 0F0, which makes"
    ),
    "0F0 0SEND_F0 0B0 0RECV_B0 / 1RECV_F0 1F0 1B0 1SEND_B0": (
        r"deadlock: 0RECV_B0 .* after 0B0, which waits"
    ),
    "0F0 0WAIT_SEND_F0 0SEND_F0 0B0 / 1RECV_F0 1F0 1B0": (
        r"deadlock: 0WAIT_SEND_F0 on worker 0 waits for 0SEND_F0, which stands after it"
    ),
    "0F0 0B0 / 1F0 1B0 1WAIT_SEND_B0": (
        r"missing op 1SEND_B0 on worker 1: 1WAIT_SEND_B0 waits for it"
    ),
    "0F0 0SEND_F0 0WAIT_SEND_F0 0WAIT_SEND_F0 0B0 / 1F0 1B0": (
        r"op 0WAIT_SEND_F0 stands twice on worker 0: in slots 2 and 3"
    ),
    "0F0 0SEND_F0 0B0 / 1F0 0WAIT_SEND_F0 1B0": (
        r"op 0WAIT_SEND_F0 stands on worker 1, but stage 0 .* is placed on worker 0"
    ),
    "0F0 0WAIT_SEND_F7 0B0 / 1F0 1B0": (
        r"op 0WAIT_SEND_F7 on worker 0 has no forward: microbatches are 0 to 0"
    ),
    "0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0": r"0SEND_F0 .* belongs to no message",
    "0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0": r"op 0SEND_F0 stands twice",
    f"0F{'7' * 5000} 0B0": r"'0F7+\.\.\.' is not an op.* at most 9 digits",
    # pairs that wait for each other, in one column and in two
    "0F0 (0F1;0B0)OVERLAP_F_B 0B1 / 1F0 (1F1;1B0)OVERLAP_F_B 1B1": CYCLE_OF_PAIRS,
    "0F0 (0F1;0B0)OVERLAP_F_B 0F2 0B1 0B2 / 1F0 1F2 (1F1;1B0)OVERLAP_F_B 1B1 1B2": CYCLE_OF_PAIRS,
}


@pytest.mark.parametrize("rows", WRONG, ids=lambda rows: rows[:60])
def test_wrong_tables_are_refused(rows):
    with pytest.raises(pj.ScheduleError, match=WRONG[rows]) as caught:
        pj.ScheduleTable.from_rows([row.split() for row in rows.split("/")])
    assert "\n" not in caught.value.reason
    assert isinstance(caught.value, ValueError)


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


EXPLICIT = {
    r"stage 0 of pipe 0 is placed on worker 1": {"placement": np.array([[1, 0]])},
    r"placed on worker 5: .* 0 to 1": {"placement": np.array([[0, 5]])},
    r"op 1F0 .* has no place: stages are 0 to 0": {"placement": np.array([[0]])},
    r"belongs to no pipe: pipes are 0 to 0": {
        "placement": np.array([[0, 1]]),
        "pipe_of_microbatch": [0, 1],
    },
    r"stage_shares": {"placement": np.array([[0, 1]]), "stage_shares": [1, -1]},
    r"slots: unknown phase 'Z'": {"slots": {"Z": 1}},
    r"slots: F must be a finite number above 0": {"slots": {"F": float("inf")}},
    r"pipe_of_microbatch needs the placement": {"pipe_of_microbatch": [0, 1]},
    r"placement must be whole numbers, got": {"placement": [[0.0, 0.9]]},
    r"placement must be whole": {"placement": np.array([[0.0, 1.0]])},
    r"placement must be whole numbers": {"placement": [[False, True]]},
    r"placement must be whole .*\[0, 1\]": {"placement": [[0, 1], [0]]},
    r"placement must be whole numbers of at most": {"placement": [[0, 2**32]]},
    r"pipe_of_microbatch must be whole numbers, got \[0, 0.5\]": {
        "placement": [[0, 1]],
        "pipe_of_microbatch": [0, 0.5],
    },
    r"pipe_of_microbatch has shape": {"placement": [[0, 1]], "pipe_of_microbatch": [[0, 0]]},
    r"stage_shares needs 2 positive numbers": {
        "stage_shares": np.ma.MaskedArray([1.0, 1.0], mask=[False, True])
    },
    r"placement has shape": {"placement": np.array([0, 1])},
}


@pytest.mark.parametrize("message", EXPLICIT)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused(message):
    with pytest.raises(pj.ScheduleError, match=message):
        pj.ScheduleTable.from_rows(TWO, **EXPLICIT[message])


CELLS = {
    "numbers": ((1, 2), "a cell is a text such as '2F0' or a tuple of Op"),
    "an op alone": (pj.Op(pj.Phase.F, 0, 0), "a tuple of Op"),
    "no phase": ((pj.Op("F", 0, 0),), "is one of Phase"),
    "negative stage": ((pj.Op(pj.Phase.F, -2, 0),), "'-2F0' is not an op"),
    "three ops": ((pj.Op(pj.Phase.F, 0, 0),) * 3, "at most a fused pair, got 3 ops"),
    "two forwards": ((pj.Op(pj.Phase.F, 0, 0),) * 2, "not a fused pair"),
}


@pytest.mark.parametrize("what", CELLS)
@pytest.mark.usefixtures("unchecked")
def test_wrong_cells_are_refused(what):
    cell, message = CELLS[what]
    with pytest.raises(pj.ScheduleError, match=f"worker 0, slot 0: .*{message}"):
        pj.ScheduleTable.from_rows([[cell]])


@pytest.mark.usefixtures("unchecked")
def test_the_arrays_of_a_table_hold_whole_numbers():
    table = pj.ScheduleTable.from_rows(TWO)
    halves = table.cells._replace(stage=table.stage + 0.5)
    for arguments, message in (
        ((halves, table.partners, table.placement), "cells must be whole numbers"),
        ((table.cells, table.partners, [[0.0, 0.9]]), "placement must be whole numbers"),
    ):
        with pytest.raises(pj.ScheduleError, match=message):
            pj.ScheduleTable(*arguments)
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
    with pytest.raises(pj.ScheduleError, match="shifted round the workers"):
        pj.ScheduleTable.from_rows([shifted[1], shifted[0], *shifted[2:]])


@pytest.mark.parametrize("phase", CELL_PHASES)
def test_parse_is_the_inverse_of_print(phase):
    text = f"12{phase.name}" + ("" if phase in SHARDING else "345")
    assert format_cell(parse_cell(text)) == text
    pair = "(0F8;7B0)OVERLAP_F_B"
    assert format_cell(parse_cell(f" {pair} ")) == pair
    assert format_cell(parse_cell("")) == ""
