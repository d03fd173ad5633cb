"""Sharded weights beside compute: by hand, against the event loop, and what is refused."""

import json
import re

import grammar_cases
import numpy as np
import pytest
import reference

import pipejax as pj
from pipejax.schedules.table.communication_cells import TorchLowering
from pipejax.schedules.table.sharding import on_lane
from pipejax.schedules.table.table_files import to_json

LANES = {"UNSHARD": "net", "REDUCE_GRAD": "net"}
ROW = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 1WAIT_REDUCE_GRAD"


def table_of(*rows, **grammar):
    own = pj.schedules.Grammar(**{"lanes": LANES, **grammar})
    return pj.ScheduleTable.from_rows([row.split() for row in rows], grammar=own)


def lanes_of(run):
    return [(x.lane, x.busy.tolist(), x.exposed.tolist()) for x in pj.analysis.lane_times(run)]


def test_a_row_by_hand():
    """Gathers end at 0.5 and 1; 1REDUCE_GRAD runs from 4.5 to 7.5 beside 0B0, the next one behind."""
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0)
    run = pj.evaluate(table_of(ROW), costs)
    assert run.makespan == 10.5
    assert run.finish[0].tolist() == [0.5, 1.0, 1.5, 2.5, 4.5, 7.5, 4.5, 6.5, 10.5, 7.5]
    assert (run.busy.tolist(), lanes_of(run)) == ([6.0], [("net", [7.0], [4.5])])
    usual = pj.evaluate(table_of(ROW, lanes={}), costs)
    assert (usual.makespan, usual.busy.tolist(), lanes_of(usual)) == (13.0, [13.0], [])


def test_a_gather_waits_for_what_is_dropped_before():
    """1UNSHARD stands behind 0RESHARD: it cannot run beside 0F0, whatever the lane does."""
    row = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    run = pj.evaluate(table_of(row), pj.Costs(forward=1.0, backward=2.0, unshard=0.5))
    assert run.makespan == 3 * 0.5 + 6.0


def test_updates_wait_for_reductions():
    """U of stage 1 in the row waits until 7.5, and the all-reduce behind a row until 10.5."""
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0, update=0.25)
    row = ROW.replace("1WAIT_REDUCE_GRAD", "1U0 0U0")
    assert pj.evaluate(table_of(row), costs).makespan == 10.5 + 0.25
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0, all_reduce=1.0)
    assert pj.evaluate(table_of(ROW), costs).makespan == 10.5 + 1.0


def test_a_circle_is_named():
    """A kind on the same lane, before the gather, waits for the backward of what it gathers."""
    kinds = {"N": pj.schedules.OpKind("note", "note", lane="net")}
    circle = {"0UNSHARD (worker 0)", "0B0 (worker 0)", "0N0 (worker 0)"}
    with pytest.raises(pj.ScheduleError, match="deadlock: no op of this cycle can start") as error:
        table_of("0N0 0UNSHARD 0F0 0B0", kinds=kinds, rules=["N <- B"])
    names = re.sub(".*can start: ", "", str(error.value).splitlines()[0]).split(" -> ")
    assert {*names} == circle


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0F0 0UNSHARD 0B0", "0F0 on worker 0 needs weights, and no 0UNSHARD before it"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "0B0 on worker 0 needs weights, and no 0UNSHARD"),
        ("0UNSHARD 0UNSHARD 0F0 0B0", "0UNSHARD on worker 0 gathers weights that are there"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "0RESHARD on worker 0 drops weights that are not there"),
    ],
)
def test_weights_out_of_turn_are_refused(row, why):
    table_of(row, lanes={})  # as it was where they stand in the row
    with pytest.raises(pj.ScheduleError, match=why):
        table_of(row)


@pytest.mark.parametrize(
    ("lanes", "why"),
    [
        ({"F": "net"}, "lanes must be one of UNSHARD, REDUCE_GRAD, got 'F'"),
        ({"UNSHARD": "host"}, "UNSHARD must be on a lane beside compute and host"),
    ],
)
def test_other_lanes_are_refused(lanes, why):
    with pytest.raises(ValueError, match=why):
        pj.schedules.Grammar(lanes=lanes)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("posting", ["early", "program"])
def test_what_pytorch_runs_is_the_event_loop(name, posting):
    """SEND and RECV cells beside gathers, one communication queue or several."""
    built = pj.schedules.build(name, num_workers=3, num_microbatches=6)
    lowering = TorchLowering(max_active_stages=2, defer_reduce_grad_wait=True)
    table = on_lane(pj.links.insert_transfers(built, lowering=lowering), "net")
    data = json.loads(to_json(table)) | {"kinds": [], "graph": []}
    data["rows"] = [[cell or "" for cell in row] for row in data["rows"]]
    for seed, queues in enumerate(("worker", "pair", "direction")):
        case = grammar_cases.price(data, np.random.default_rng(seed))
        links = pj.Links("rendezvous", queues, posting=posting)
        given = data["rows"], data["pipe_of_microbatch"], case.theirs, "rendezvous", queues
        run = reference.Run(*given, posting=posting, grammar=case.grammar)
        assert pj.evaluate(table, case.costs, link=links).makespan == run.makespan
