"""Link models on tables small enough to do by hand; expected values are the sums that explain."""

import dataclasses

import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, settings

import pipejax as pj
from pipejax.analysis.runs.timeline import bars
from pipejax.cli.options.catalogue import CATALOGUE
from pipejax.cli.options.tables import LinkOptions
from pipejax.schedules.cells.ops import HOST
from pipejax.schedules.table.communication_cells import without_transfers
from pipejax.schedules.table.links import LINK_MODELS, LINK_OPTIONS, LinkModel
from pipejax.schedules.table.slot_simulation import slot_times, with_idle_slots
from pipejax.sweep.declaration import AXES

F, B, L, X = 1.0, 2.0, 0.25, 3.0
COSTS = pj.Costs(forward=F, backward=B, latency=L, transmit=X)
GPIPE = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
CROSSED = [
    ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
    ["1RECV_F1", "1RECV_F0", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
]
OFFLOAD, LOAD = 4.0, 3.0
OFFLOAD_COSTS = pj.Costs(forward=F, backward=B, recompute=F, offload=OFFLOAD, load=LOAD)
SHARED = [["0F0", "0O0", "", "0L0", "0B0"], ["1F0", "1O0", "1L0", "1B0"]]
CROSSED_OFFLOADS = [
    ["", "0F1", "0O1", "0WAIT_O1", "0F0", "0B0", "0L1", "0B1"],
    ["1F0", "1O0", "1L0", "1B0", "1F1", "1B1"],
]
TIMES = ["--stage-times", f"F={F},B={B},O={OFFLOAD},L={LOAD}"]


def makespan(table, link, queues="worker"):
    return pj.evaluate(table, COSTS, link=pj.Links(link, queues)).makespan


def test_the_table_of_options_has_all_fields_and_their_texts():
    """Command line and sweeps take what the table has; a text is read back as its value."""
    assert [*LINK_OPTIONS] == [field.name for field in dataclasses.fields(pj.Links)]
    names = {*LINK_OPTIONS} - {"model"} | {"link"}
    fields = {field.name for field in dataclasses.fields(LinkOptions)}
    assert names <= {*AXES} & {*CATALOGUE} & fields
    pairs = ((0, 1), (1, 0))
    links = pj.Links("rendezvous", "pair", ((0, 1),), "program", (pairs,), {(0, 1): "queued"}, 2.0)
    assert links.changed() == links.written()
    values = {name: LINK_OPTIONS[name].parse(text, name) for name, text in links.changed().items()}
    assert pj.Links(**values) == links


def test_delay():  # a message uses no resource: the second forward hides behind the first message
    forward = F + (L + X) + 2 * F
    assert makespan(GPIPE, "delay") == forward + 2 * B + (L + X) + B


def test_queued():  # the link is busy for X per message: microbatch 1 leaves when 0 is through
    # 1F0 at F+X+L; 1F1 waits for the second transmission; backwards B apart leave X apart
    second_forward = F + X + X + L
    first_backward = second_forward + F
    last_gradient = max(first_backward + B + X, first_backward + 2 * B) + X + L
    assert makespan(GPIPE, "queued") == last_gradient + B


def test_blocking():  # worker 0 cannot start 0F1 before the message of 0F0 is transmitted
    second_forward = (F + X) + F + X + L
    first_backward = second_forward + F
    second_backward = first_backward + B + X
    assert makespan(GPIPE, "blocking") == second_backward + B + X + L + B


@pytest.mark.parametrize("queues", ["worker", "pair", "direction"])
def test_rendezvous(queues):  # both queues are held for L + X, so transfers follow one another
    second_forward = F + 2 * (L + X)
    first_backward = second_forward + F
    last = max(first_backward + B + (L + X), first_backward + 2 * B) + (L + X)
    assert makespan(GPIPE, "rendezvous", queues) == last + B


def test_head_of_line_blocking():
    # worker 0's queue has the RECV of the gradient of microbatch 0 before the SEND of microbatch
    # 1, so with one queue the second activation waits for the whole round trip of the first
    early = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
    ]
    late = [
        ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    first, second = (pj.ScheduleTable.from_rows(rows) for rows in (early, late))
    round_trip = F + (L + X) + F + B + (L + X)
    assert makespan(second, "rendezvous") == round_trip + (L + X) + F + B + (L + X) + B
    assert makespan(first, "rendezvous") < makespan(second, "rendezvous")
    assert makespan(second, "rendezvous", "direction") < makespan(second, "rendezvous")
    assert makespan(second, "delay") == makespan(first, "delay")  # the others ignore the cells


@pytest.mark.parametrize("queues", ["worker", "pair", "direction"])
def test_deadlock_names_the_cycle(queues):
    table = pj.ScheduleTable.from_rows(CROSSED)  # legal rows: only their transfers cross
    message = r"deadlock under rendezvous with one queue per .*0SEND_F0/1RECV_F0.*0SEND_F1/1RECV_F1"
    with pytest.raises(pj.ScheduleError, match=message) as caught:
        pj.lower(table, link=pj.Links("rendezvous", queues))
    assert ">" in caught.value.grid
    pj.lower(table, link="queued")
    costs = reference.Costs({}, {}, {})
    with pytest.raises(reference.DeadlockError):
        reference.Run(CROSSED, [0, 0], costs, "rendezvous", queues)


@pytest.mark.parametrize("like", ["queued", "blocking"])
def test_a_link_model_is_a_record(monkeypatch, like):
    """One that holds its link for the latency, too, is another with slower messages."""
    model = LinkModel("store-and-forward", "message", "", blocks=LINK_MODELS[like].blocks)
    monkeypatch.setitem(LINK_MODELS, model.name, model)
    table = pj.schedules.build("gpipe", num_workers=3, num_microbatches=5)
    costs = pj.Costs(forward=1.0, backward=2.0, latency=0.75, transmit=1.5)
    run = pj.evaluate(table, costs, link=model.name)
    slower = dataclasses.replace(costs, latency=0.0, transmit=2.25)
    expected = pj.evaluate(table, slower, link=like)
    np.testing.assert_array_equal(run.finish, expected.finish)
    assert run.makespan > pj.evaluate(table, costs, link=like).makespan
    # of one pair alone, and on links that are shared
    mixed = pj.Links("delay", pair_links={(0, 1): model.name}, shared_links="pairs")
    as_mixed = pj.Links("delay", pair_links={(0, 1): like}, shared_links="pairs")
    result = pj.evaluate(table, costs, link=mixed)
    expected = pj.evaluate(table, slower, link=as_mixed)
    np.testing.assert_array_equal(result.finish, expected.finish)
    with pytest.raises(ValueError, match="posting 'program' needs the link model rendezvous"):
        pj.Links(model.name, posting="program")


def test_spans_leave_sharding_cells_out():
    rows = [["0F0", "0B0"], ["1UNSHARD", "1F0", "1I0", "1W0"]]
    table = pj.ScheduleTable.from_rows(rows)
    costs = pj.Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=9.0)
    assert pj.evaluate(table, costs).max_span == 1.0 + 1.0 + 9.0


def test_all_reduce_runs_beside_compute_and_update_waits_for_it():
    table = pj.schedules.build("chimera", num_workers=2, num_microbatches=2)
    plain = pj.evaluate(table, pj.Costs(forward=F, backward=B))
    assert plain.makespan == 2 * F + 2 * B
    reduced = pj.evaluate(table, pj.Costs(forward=F, backward=B, all_reduce=1.5))
    # stage 1 is reduced while the backward of stage 0 runs; stage 0 after it
    assert reduced.makespan == 2 * F + 2 * B + 1.5
    hidden = pj.evaluate(table, pj.Costs(forward=F, backward=B, all_reduce=np.array([0.0, 2.0])))
    assert hidden.makespan == plain.makespan
    updated = pj.evaluate(table, pj.Costs(forward=F, backward=B, all_reduce=1.5, update=0.5))
    assert updated.makespan == 2 * F + 2 * B + 1.5 + 0.5
    assert updated.busy.tolist() == [2 * F + 2 * B + 2 * 0.5] * 2
    assert reduced.busy.tolist() == plain.busy.tolist()
    assert plain.program.num_nodes < reduced.program.num_nodes  # left out where they cost nothing


# offloads and loads: when they run, what waits for them, who shares a host link
def run(rows, costs=OFFLOAD_COSTS, **links):
    return pj.evaluate(pj.ScheduleTable.from_rows(rows), costs, link=pj.Links(**links))


def times(result, text):
    return next((bar.start, bar.finish) for bar in bars(result) if bar.label == text)


def test_workers_may_share_a_host_link():
    alone, shared = run(SHARED), run(SHARED, host_links=[[0, 1]])
    assert times(alone, "1O0") == (2 * F, 2 * F + OFFLOAD)
    assert alone.makespan == 2 * F + OFFLOAD + LOAD + 2 * B
    # 0O0 and 1O0 stand in one column: worker 0 comes first; 1L0 stands before 0L0
    both = F + 2 * OFFLOAD
    starts = [times(shared, op)[0] for op in ("0O0", "1O0", "1L0", "0L0")]
    assert starts == [F, F + OFFLOAD, both, both + LOAD]
    assert shared.makespan == F + 2 * OFFLOAD + 2 * LOAD + B
    assert run(SHARED, host_links=[[1], [0]]).makespan == alone.makespan


def test_a_deadlock_on_a_shared_link_names_the_cycle():
    table = pj.ScheduleTable.from_rows(CROSSED_OFFLOADS)
    assert pj.evaluate(table, OFFLOAD_COSTS).makespan > 0
    message = r"deadlock on a shared host link.*1O0 \(worker 1\) -> 0O1 \(worker 0\)"
    for act in (
        lambda: pj.lower(table, link=pj.Links(host_links=[[0, 1]])),
        lambda: slot_times(table, link=pj.Links(host_links=[[0, 1]])),
    ):
        with pytest.raises(pj.ScheduleError, match=message) as caught:
            act()
        assert ">" in caught.value.grid
    with pytest.raises(reference.DeadlockError):
        reference.Run(CROSSED_OFFLOADS, [0, 0], reference.Costs({}, {}, {}), host_links=[[0, 1]])


@settings(max_examples=30)
@given(case=strategies.cases())
def test_a_drawing_keeps_the_rows_and_fits_every_shared_link(case):
    drawing = with_idle_slots(case.table)
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


def test_the_command_line_shares_host_links(answer, written):
    arguments = ["evaluate", "--table", written, *TIMES]
    assert answer(*arguments)["makespan"] == 2 * F + OFFLOAD + LOAD + 2 * B
    assert answer(*arguments, "--host-links", "0+1")["makespan"] == F + 2 * OFFLOAD + 2 * LOAD + B
    assert answer(*arguments, "--host-links", "1, 0")["makespan"] == 2 * F + OFFLOAD + LOAD + 2 * B


def test_an_export_for_pytorch_has_no_offloads(call, written, tmp_path):
    out = tmp_path / "torch.csv"
    code, _, err = call("export", "--table", written, "--format", "torch-csv", "--out", out)
    assert code == 0
    lost = "2 O, 2 L cells are left out, PyTorch has none; --format json keeps them"
    assert err == f"warning: {lost}\n"
    assert out.read_bytes() == b"0F0,,,,0B0\r\n,1F0,1B0,,\r\n"


def test_the_order_on_a_shared_link_stays_without_transfers():
    """Rows close up by different numbers of cells; who loads first may not change by that."""
    rows = "1F0,1O0,,,1L0,1B0", "2F0,2O0,2L0,2B0", "0F0,0O0,0L0,0WAIT_O0,,0B0"
    table = pj.ScheduleTable.from_rows([row.split(",") for row in rows])
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
    rows = [["1F0", "1O0", "2F0", "2B0", "1L0", "1B0"]]
    rows += [["0F0", "0O0", "0WAIT_O0", "0L0", "3F0", "3B0", "0B0"]]
    table = pj.ScheduleTable.from_rows(rows, placement=[[1, 0, 0, 1]])
    links = pj.Links("rendezvous", "pair", host_links=((0, 1),), posting="program")
    result = [str(x[0]) for x in [*pj.links.insert_transfers(table, link=links).rows()][1] if x]
    assert result[2:5] == ["0O0", "0WAIT_O0", "3RECV_F0"]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0, offload=1.0)
    assert pj.evaluate(table, costs, link=links).makespan == 18.0
