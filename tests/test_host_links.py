"""Offloads and loads: when they run, what waits for them, who shares a host link."""

import dataclasses

import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, settings

import pipejax as pj
from pipejax.analysis.runs.timeline import bars
from pipejax.schedules.cells.ops import HOST
from pipejax.schedules.table.communication_cells import without_transfers
from pipejax.schedules.table.slot_simulation import slot_times, spread

F, B, O, L = 1.0, 2.0, 4.0, 3.0  # noqa: E741
COSTS = pj.Costs(forward=F, backward=B, recompute=F, offload=O, load=L)


def run(rows, costs=COSTS, **links):
    return pj.evaluate(pj.ScheduleTable.from_rows(rows), costs, link=pj.Links(**links))


def times(result, text):
    """Start and finish of an op."""
    return next((bar.start, bar.finish) for bar in bars(result) if bar.label == text)


SHARED = [["0F0", "0O0", "", "0L0", "0B0"], ["1F0", "1O0", "1L0", "1B0"]]


def test_workers_may_share_a_host_link():
    alone, shared = run(SHARED), run(SHARED, host_links=[[0, 1]])
    assert times(alone, "1O0") == (2 * F, 2 * F + O)
    assert alone.makespan == 2 * F + O + L + 2 * B
    # 0O0 and 1O0 stand in one column: worker 0 comes first; 1L0 stands before 0L0
    assert [times(shared, op)[0] for op in ("0O0", "1O0", "1L0", "0L0")] == [
        F,
        F + O,
        F + 2 * O,
        F + 2 * O + L,
    ]
    assert shared.makespan == F + 2 * O + 2 * L + B
    assert run(SHARED, host_links=[[1], [0]]).makespan == alone.makespan


CROSSED = [
    ["", "0F1", "0O1", "0WAIT_O1", "0F0", "0B0", "0L1", "0B1"],
    ["1F0", "1O0", "1L0", "1B0", "1F1", "1B1"],
]


def test_a_deadlock_on_a_shared_link_names_the_cycle():
    table = pj.ScheduleTable.from_rows(CROSSED)
    assert pj.evaluate(table, COSTS).makespan > 0
    message = r"deadlock on a shared host link.*1O0 \(worker 1\) -> 0O1 \(worker 0\)"
    for act in (
        lambda: pj.lower(table, link=pj.Links(host_links=[[0, 1]])),
        lambda: slot_times(table, link=pj.Links(host_links=[[0, 1]])),
    ):
        with pytest.raises(pj.ScheduleError, match=message) as caught:
            act()
        assert ">" in caught.value.grid
    with pytest.raises(reference.DeadlockError):
        reference.Run(CROSSED, [0, 0], reference.Costs({}, {}, {}), host_links=[[0, 1]])


@settings(max_examples=30)
@given(case=strategies.cases())
def test_a_drawing_keeps_the_rows_and_fits_every_shared_link(case):
    drawing = spread(case.table)
    rows = [[[x for x in row if x] for row in table.rows()] for table in (case.table, drawing)]
    assert rows[0] == rows[1]
    everyone = [list(range(drawing.num_workers))]
    # no deadlock
    assert pj.evaluate(drawing, case.costs, link=pj.Links(host_links=everyone)).makespan >= 0
    start, finish = slot_times(drawing)
    on_host = np.isin(drawing.phase, HOST)
    assert np.array_equal(start[on_host], finish[on_host])


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "shared.csv"
    pj.write_table(pj.ScheduleTable.from_rows(SHARED), path)
    return path


TIMES = ["--stage-times", f"F={F},B={B},O={O},L={L}"]


def test_the_command_line_shares_host_links(answer, written):
    arguments = ["evaluate", "--table", written, *TIMES]
    assert answer(*arguments)["makespan"] == 2 * F + O + L + 2 * B
    assert answer(*arguments, "--host-links", "0+1")["makespan"] == F + 2 * O + 2 * L + B
    assert answer(*arguments, "--host-links", "1, 0")["makespan"] == 2 * F + O + L + 2 * B


def test_an_export_for_pytorch_has_no_offloads(call, written, tmp_path):
    out = tmp_path / "torch.csv"
    code, _, err = call("export", "--table", written, "--format", "torch-csv", "--out", out)
    assert code == 0
    assert (
        err == "warning: 2 O, 2 L cells are left out, PyTorch has none; --format json keeps them\n"
    )
    assert out.read_bytes() == b"0F0,,,,0B0\r\n,1F0,1B0,,\r\n"


def test_the_order_on_a_shared_link_stays_without_transfers():
    """Rows close up by different numbers of cells; who loads first may not change by that."""
    table = pj.ScheduleTable.from_rows(
        [
            ["1F0", "1O0", "", "", "1L0", "1B0"],
            ["2F0", "2O0", "2L0", "2B0"],
            ["0F0", "0O0", "0L0", "0WAIT_O0", "", "0B0"],
        ]
    )
    links = pj.Links("rendezvous", host_links=((0, 1, 2),))
    costs = pj.Costs.uniform(table, forward=4.0, backward=1.0, transfer=1.0, offload=3.0, load=2.0)
    cells = pj.links.insert_transfers(table, link=links)
    free = dataclasses.replace(links, model="delay")
    expected = pj.evaluate(table, costs, link=free).makespan
    assert pj.evaluate(cells, costs, link=free).makespan == expected == 29.0
    assert pj.evaluate(without_transfers(cells), costs, link=free).makespan == expected
    result = pj.search.messages(cells, costs, link=links, iterations=1)
    assert result.best.free_bound == expected <= result.baselines["own"]


def test_what_waits_on_a_shared_link_has_run_as_soon_as_it_can():
    """0O0 is issued behind 1O0 of the other row: 0WAIT_O0 goes on when that has run, not later."""
    rows = [
        ["1F0", "1O0", "2F0", "2B0", "1L0", "1B0"],
        ["0F0", "0O0", "0WAIT_O0", "0L0", "3F0", "3B0", "0B0"],
    ]
    table = pj.ScheduleTable.from_rows(rows, placement=[[1, 0, 0, 1]])
    links = pj.Links("rendezvous", "pair", host_links=((0, 1),), posting="program")
    result = [str(x[0]) for x in [*pj.links.insert_transfers(table, link=links).rows()][1] if x]
    assert result[2:5] == ["0O0", "0WAIT_O0", "3RECV_F0"]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0, offload=1.0)
    assert pj.evaluate(table, costs, link=links).makespan == 18.0
