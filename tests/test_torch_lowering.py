"""Lowering as PyTorch does it: cell by cell what its own schedule classes make of their tables."""

import json

import numpy as np
import pytest
from legal_sizes import WHOLE

import pipejax as pj
from pipejax.schedules.cells.ops import SHARDING, WAIT_SEND, format_cell
from pipejax.schedules.table.communication_cells import (
    producer_order,
    table_messages,
    with_transfers,
)
from pipejax.schedules.table.table import without


def with_waits(table, order=None):
    """SEND, RECV and waits."""
    return with_transfers(table, order, pj.Links(), waits=True)


def cells(table):
    return [[format_cell(cell) for cell in row if cell] for row in table.rows()]


def split(rows):
    return [[cell.replace("-", "") for cell in row.split()] for row in rows]


@pytest.fixture
def lowered(data):
    return json.loads((data / "torch_lowered.json").read_text())["tables"]


def test_equal_cell_by_cell(lowered):
    for case in lowered:
        table = pj.ScheduleTable.from_rows(split(case["compute"]))
        ours = pj.links.insert_transfers(table, lowering="PyTorch")
        assert cells(ours) == split(case["lowered"]), case["schedule"]


def test_read_written_and_lowered_again(lowered, tmp_path):
    for case in lowered:
        table = pj.ScheduleTable.from_rows(split(case["lowered"]))
        pj.write_table(table, tmp_path / "table.csv")
        read = pj.read_table(tmp_path / "table.csv")
        assert cells(read) == split(case["lowered"])
        # SEND, RECV and waits give way, the rest stays
        assert cells(pj.links.insert_transfers(read, lowering="pytorch")) == cells(read)


@pytest.mark.parametrize("name", WHOLE)
def test_waits_delay_nothing(name):
    built = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.7, offload=0.5)
    free, held = pj.links.insert_transfers(built), with_waits(built)
    assert int(np.isin(held.phase, WAIT_SEND).sum()) == len(table_messages(free).producer)
    for posting in ("early", "program"):
        for queues in ("worker", "pair", "direction"):
            links = pj.Links("rendezvous", queues, posting=posting)
            spans = [pj.evaluate(table, costs, link=links).makespan for table in (free, held)]
            assert spans[0] == spans[1], (name, links)


def test_sharding_cells_cost_nothing_unless_given():
    built = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.5)
    whole = pj.links.insert_transfers(built, lowering="pytorch")
    assert set(np.unique(whole.phase)) >= set(SHARDING)
    bare = with_waits(built, producer_order(built))
    spans = [pj.evaluate(table, costs, link="rendezvous").makespan for table in (whole, bare)]
    assert spans[0] == spans[1]
    assert cells(without(whole, SHARDING)) == cells(with_waits(built))


def test_an_order_is_kept_beside_all_else():
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=4)
    order = producer_order(table)
    ours = pj.links.insert_transfers(table, order, lowering="pytorch")
    assert cells(without(without(ours, SHARDING), WAIT_SEND)) == cells(
        pj.links.insert_transfers(table, order)
    )


def test_unknown_lowerings_and_offloads_are_refused():
    table = pj.ScheduleTable.from_rows([["0F0", "0B0"]])
    with pytest.raises(ValueError, match="unknown lowering 'torch': known are pytorch"):
        pj.links.insert_transfers(table, lowering="torch")
    offloading = pj.schedules.build("pipe-offload", num_workers=2, num_microbatches=4)
    with pytest.raises(ValueError, match="PyTorch offloads nothing, the table has O and L cells"):
        pj.links.insert_transfers(offloading, lowering="pytorch")
