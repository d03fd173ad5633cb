"""Tables for PyTorch's runtime, and refusals; tests/runtimes runs it."""

import importlib.util
import json

import numpy as np
import pytest
from legal_sizes import WHOLE, build

import pipejax as pj
from pipejax.runtimes.exports import add_runtime_cells, check_exportable
from pipejax.runtimes.gloo import runtime
from pipejax.runtimes.processes import RuntimeJob
from pipejax.schedules.cells.ops import SHARDING, WAIT_SEND, Phase, format_cell
from pipejax.schedules.table.communication_cells import (
    producer_order,
    table_messages,
    with_transfers,
)
from pipejax.schedules.table.table import without
from pipejax.schedules.table.table_files import RepairNotice, to_csv

SENT = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def table(*rows, **more):
    return pj.ScheduleTable.from_rows([row.split() for row in rows], name="it", **more)


REFUSED = {
    "stage 0 is on workers 0 and 1, it has one rank each": build("chimera", 2, 2),
    r"\d+ O cells, it offloads nothing": build("pipe-offload", 2, 8),
    "cells, it updates after the whole table": build("pipedream", 2, 4),
    "2 R cells, it recomputes within the backward": table("0F0 0R0 0B0 0F1 0R1 0B1"),
    "0F1 stands before 0F0, but the runtime takes the losses": table("0F1 0F0 0B0 0B1"),
    # activations cross the other way round, and the runtime would mix them up
    "worker 1 posts 1RECV_F1 where worker 0 sends for 1RECV_F0": table(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_said_is_refused_with_the_reason(reason):
    with pytest.raises(ValueError, match=f"PyTorch's runtime cannot run .*{reason}"):
        check_exportable(REFUSED[reason])


@pytest.mark.parametrize("name", WHOLE)
def test_all_others_can_be_said(name):
    built = pj.schedules.build(name, num_workers=2, num_microbatches=4)
    placed_once = (built.placement == built.placement[0]).all()
    is_expressible = not built.offloads and not built.updates_within and Phase.R not in built.phase
    if placed_once and is_expressible:
        check_exportable(built)


def test_waits_are_put_in_and_said():
    with pytest.warns(RepairNotice, match="it: 1 WAIT_SEND_F, 1 WAIT_SEND_B cells are put in"):
        whole = add_runtime_cells(table(*SENT), sharding=False)
    assert int(np.isin(whole.phase, WAIT_SEND).sum()) == 2
    assert add_runtime_cells(whole, sharding=False).phase.tolist() == whole.phase.tolist()
    with pytest.warns(RepairNotice, match="2 UNSHARD, 2 RESHARD, 2 REDUCE_GRAD, 2 WAIT_REDUCE"):
        sharded = add_runtime_cells(whole, sharding=True)
    order = [op for op in sharded.phase[0].tolist() if op not in SHARDING and op]
    assert order == [op for op in whole.phase[0].tolist() if op]
    bare = table("0F0 0B0", "1F0 1B0")
    assert add_runtime_cells(bare, sharding=True) is bare


def test_no_idle_cells_beside_communication():
    short = table(SENT[0], SENT[1] + " 1WAIT_SEND_B0")
    assert short.num_slots == 5
    lines = to_csv(short).splitlines()
    assert [len(line.split(",")) for line in lines] == [4, 5]
    idle = pj.ScheduleTable.from_rows([["", "0F0", "0B0"]])  # nothing refuses them here
    assert to_csv(idle).splitlines() == [",0F0,0B0"]


def test_export_puts_in_what_the_runtime_needs(call, tmp_path):
    pj.write_table(table(*SENT), tmp_path / "sent.csv")
    out = tmp_path / "whole.csv"
    options = ("--table", str(tmp_path / "sent.csv"), "--format", "torch-csv", "--out", str(out))
    code, _, err = call("export", *options)
    assert code == 0
    assert "1 WAIT_SEND_F, 1 WAIT_SEND_B cells are put in, PyTorch's runtime needs them" in err
    assert out.read_text().splitlines()[0] == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD"
    )


def test_a_lowered_table_is_what_export_makes_of_its_transfers():
    built = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    lowered = pj.links.insert_transfers(built, lowering="pytorch")
    assert add_runtime_cells(lowered, sharding=True).phase.tolist() == lowered.phase.tolist()


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_without_pytorch_the_extra_is_named(mistake):
    options = ("run", "-s", "1f1b", "-P", "2", "-M", "2", "--runtime", "torch")
    assert "pip install 'pipejax[torch]'" in mistake(*options)


@pytest.mark.parametrize("more", [("--runtime", "jax", "--steps", "2"), ("--runtime", "torch")])
def test_a_trace_needs_pytorch_and_steps(more, mistake, tmp_path):
    options = ("run", "-s", "1f1b", "-P", "2", "-M", "2", "--trace", str(tmp_path / "new"))
    assert "--trace needs --runtime torch, and --steps" in mistake(*options, *more)


def test_the_prediction_is_the_run_of_the_lowered_table():
    built = pj.schedules.build("gpipe", num_workers=2, num_microbatches=5)
    times = {"F": [1.0, 1.0], "B": [2.0, 2.0]}
    result = runtime.predicted(built, times, np.full((2, 1), 0.5))
    assert result == 1 + 5 * 1.5 + 2 + 5 * 2.5  # the next RECV is posted after an op
    early = pj.Links("rendezvous", "pair")
    assert runtime.predicted(built, times, np.full((2, 1), 0.5), early) < result


def test_times_that_ops_and_links_are_to_take():
    built = pj.schedules.build("zb-h1", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=np.array([2.0, 4.0]), latency=0.25, transmit=0.5)
    job = RuntimeJob(built, costs=costs)
    assert runtime.op_seconds(job)["I"].tolist() == [[1.0] * 4, [2.0] * 4]
    by_microbatch = np.array([[1.0, 1.0, 3.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    uneven = RuntimeJob(built, costs=pj.Costs(forward=by_microbatch, backward=2.0))
    assert runtime.op_seconds(uneven)["F"].tolist() == by_microbatch.tolist()
    assert runtime.message_seconds(job).tolist() == [[0.75], [0.75]]
    assert not runtime.message_seconds(RuntimeJob(built)).any()


# Lowering as PyTorch does it: cell by cell what its own schedule classes make of their tables


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


# Action tables as PyTorch's schedules write them, against the checker, under every link model

FILES = [
    *("1F1B_4_8.comms", "Interleaved1F1B_4_8.comms", "InterleavedZeroBubble_4_8"),
    *("ZBVZeroBubble_4_8", "DualPipeV_4_8", "DualPipeV_4_8.comms"),
]
LINKS = [
    ("delay", "worker"),
    ("queued", "worker"),
    ("blocking", "worker"),
    ("rendezvous", "worker"),
    ("rendezvous", "pair"),
    ("rendezvous", "direction"),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("link", "queues"), LINKS)
def test_agrees_with_the_checker(name, link, queues, data):
    table = pj.read_table(data / f"{name}.csv")
    stages = np.arange(table.num_stages)
    transmit = np.stack([0.5 + 0.25 * (stages[:-1] % 2), 0.75 + 0.125 * (stages[:-1] % 3)])[:, None]
    costs = pj.Costs(
        forward=1 + 0.25 * (stages % 3),
        input_grad=1 + 0.5 * (stages % 2),
        weight_grad=0.5 + 0.125 * (stages % 4),
        backward=1.5 + 0.625 * (stages % 2),
        latency=0.125,
        transmit=transmit,
    )
    run = pj.evaluate(table, costs, link=pj.Links(link, queues))
    assert pj.verify(pj.certificate(run)).problems == ()


def test_interleaved_zb_is_pytorchs(data):  # cell by cell; columns of idle cells are not its times
    files = [(4, 8, pj.read_table(data / "InterleavedZeroBubble_4_8.csv").rows())]
    for case in json.loads((data / "torch_lowered.json").read_text())["tables"]:
        if case["schedule"] == "InterleavedZeroBubble":
            cells = [row.replace("-", "").split() for row in case["compute"]]
            table = pj.ScheduleTable.from_rows(cells)
            files.append((case["workers"], case["microbatches"], table.rows()))
    assert len(files) == 2
    for workers, microbatches, rows in files:
        ours = build("interleaved-zb", workers, microbatches)
        theirs = [[cell for cell in row if cell] for row in rows]
        assert [[cell for cell in row if cell] for row in ours.rows()] == theirs


def test_two_pipes_are_not_written_for_pytorch(tmp_path):
    table = pj.schedules.build("dualpipe", num_workers=4, num_microbatches=8)
    with pytest.raises(ValueError, match="stage 0 is on workers 0 and 3, it has one rank each"):
        pj.write_table(table, tmp_path / "dual.csv", format="torch-csv")
