"""Tables for PyTorch's runtime, and refusals; tests/runtimes runs it."""

import importlib.util

import numpy as np
import pytest
from legal_sizes import WHOLE, build

import pipejax as pj
from pipejax.runtimes.exports import add_runtime_cells, check_exportable
from pipejax.runtimes.gloo import runtime
from pipejax.runtimes.processes import RuntimeJob
from pipejax.schedules.cells.ops import SHARDING, WAIT_SEND, Phase
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
