"""The order of communication: what waits, cells put in, and a better order found."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import reference
import strategies
from daily import daily
from hypothesis import given, settings, strategies as st
from legal_sizes import WHOLE, at_least, build

import pipejax as pj
from pipejax.analysis.paths.head_of_line_blocking import queue_makespans
from pipejax.schedules.cells.ops import COMMUNICATION, format_cell
from pipejax.schedules.table.communication_cells import producer_order, without_transfers
from pipejax.schedules.table.links import QUEUES
from pipejax.search.orders.transfers import (
    WaitsFor,
    heads_and_tails,
    order_makespan,
    priority_order,
    queue_bound,
    transfer_graph,
)

SCOPES = st.sampled_from(QUEUES)
TABLE = build("interleaved-1f1b", 8, 16, stages_per_worker=2)
COSTS = pj.Costs(forward=1.0, input_grad=1.5, weight_grad=0.7, transmit=0.95)
CROSSED = [
    ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
    ["1RECV_F1", "1RECV_F0", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
]


def by_reference(table, costs, queues, host_links=()):
    pipes = table.pipe_of_microbatch.tolist()
    texts = [[format_cell(cell) for cell in row] for row in table.rows()]
    return reference.Run(texts, pipes, costs, "rendezvous", queues, host_links)


@st.composite
def make_links(draw, table):
    groups = draw(strategies.host_links(table.num_workers))
    links = pj.Links("rendezvous", draw(SCOPES), groups)
    try:
        pj.lower(without_transfers(table), link=links)
    except pj.ScheduleError:
        return dataclasses.replace(links, host_links=())
    return links


def get_ops(table):
    rows = [[op for cell in row for op in cell] for row in table.rows()]
    return [[op for op in row if op.phase not in COMMUNICATION] for row in rows]


def get_transfers(table):
    rows = [[op for cell in row for op in cell] for row in table.rows()]
    return [[str(op) for op in row if op.phase in COMMUNICATION] for row in rows]


@pytest.fixture(scope="module")
def result_case():
    return pj.search.messages(TABLE, COSTS, iterations=20)


@pytest.mark.slow
def test_interleaved_with_one_communicator_per_worker(result_case):
    assert round(result_case.best.free_bound) == 153
    assert round(result_case.baselines["by producer"]) == 356
    assert result_case.value <= 0.55 * 356  # at least 45 % down
    assert result_case.value < result_case.baselines["by need"] <= 188
    assert result_case.best.free_bound < result_case.lower_bound < result_case.value
    assert result_case.gap == pytest.approx(1 - result_case.lower_bound / result_case.value)
    assert result_case.stopped == "iterations"
    assert get_ops(result_case.best.table) == get_ops(TABLE)


@pytest.mark.slow
def test_queue_scopes_in_one_table(result_case):
    makespans = queue_makespans(TABLE, COSTS)
    queued = {"worker": 271, "pair": 191, "direction": 249}
    rounded = {name: round(value) for name, value in makespans.items()}
    assert rounded == queued | {"delay": 153, "no messages": 125}
    assert queue_makespans(pj.links.insert_transfers(TABLE), COSTS)["worker"] == pytest.approx(
        355.75
    )
    better = queue_makespans(result_case.best.table, COSTS)
    assert better["worker"] == result_case.value
    assert better["delay"] == makespans["delay"] == pytest.approx(result_case.best.free_bound)


@pytest.mark.parametrize("name", ["Interleaved1F1B_4_8", "1F1B_4_8", "DualPipeV_4_8"])
def test_producer_by_producer_is_how_pytorch_lowers(name, data):
    lowered = pj.read_table(data / f"{name}.comms.csv")
    ours = pj.links.insert_transfers(without_transfers(lowered))
    assert list(ours.rows()) == list(lowered.rows())


def random_orders(graph, count, seed):
    """Greedy orders with random priorities, built forwards and backwards."""
    rng, waits = np.random.default_rng(seed), WaitsFor.from_preds(graph.preds)
    for k in range(count):
        edges = waits if k % 2 else WaitsFor(waits.successors, waits.preds)
        tails = rng.random(len(graph.program.messages.producer))
        order, _ = priority_order(graph, edges, tails, rng.random())
        yield order if k % 2 else order[::-1]


@given(case=strategies.cases(), communication=st.booleans(), data=st.data(), seed=st.integers(0))
@settings(max_examples=25)
def test_legal_orders_are_run_as_their_tables_are(case, communication, data, seed):
    links = data.draw(make_links(case.table))
    table = pj.links.insert_transfers(case.table, link=links) if communication else case.table
    graph = transfer_graph(table, case.costs, links)
    order = producer_order(table, links)
    if len(order) == 0:
        return
    for order in random_orders(graph, 3, seed):
        ordered = pj.links.insert_transfers(table, order)  # refuses an illegal order
        assert get_ops(ordered) == get_ops(table)
        makespan = order_makespan(graph, order)
        assert pj.evaluate(ordered, case.costs, link=links).makespan == makespan


def test_random_orders_find_more_than_greedy_ones():
    table = pj.schedules.build("interleaved-1f1b", num_workers=8, num_microbatches=16)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    links = pj.Links("rendezvous", "direction")
    result = pj.search.messages(table, costs, link=links, iterations=20)
    assert result.value < result.baselines["by need"]


@given(case=strategies.cases(pairs=True, step_end=True), data=st.data())
@settings(max_examples=25)
def test_found_orders_hold_what_they_promise(case, data):
    table, links = case.table, data.draw(make_links(case.table))
    shared = links.queues, links.host_links
    if data.draw(st.booleans()):  # cells in an order that may deadlock
        table = pj.links.insert_transfers(table, link=links)
    result = pj.search.messages(table, case.costs, link=links, iterations=3)
    assert pj.evaluate(result.best.table, case.costs, link=links).makespan == result.value
    assert by_reference(result.best.table, case.theirs, *shared).makespan == result.value
    assert all(result.value <= value for value in result.baselines.values())
    free = dataclasses.replace(links, model="delay")
    assert result.best.free_bound == pj.evaluate(table, case.costs, link=free).makespan
    assert result.best.free_bound <= result.lower_bound <= result.value
    assert get_ops(result.best.table) == get_ops(table)
    assert result.baselines["own"] == pj.evaluate(table, case.costs, link=links).makespan
    naive = by_reference(pj.links.insert_transfers(table, link=links), case.theirs, *shared)
    assert result.baselines["by producer"] == naive.makespan


def test_waits_that_would_hold_up_the_end_of_a_step_are_left_out():
    """The all-reduces of a worker follow its row, and the last SEND is awaited there."""
    table = pj.ScheduleTable.from_rows(
        [["0F0", "2F0", "4F0", "4B0", "2B0", "0B0"], ["1F0", "3F0", "3B0", "1B0"]]
    )
    last = np.array([2.75, 4.75, 4.0, 4.0, 0.25])
    costs = pj.Costs(forward=3.0, backward=1.0, transmit=2.0, all_reduce=last, update=last)
    result_case = pj.search.messages(table, costs, link="rendezvous", iterations=3)
    assert result_case.value <= result_case.baselines["own"] < result_case.baselines["pytorch"]


@given(case=strategies.cases(pairs=True, step_end=True), data=st.data(), urgency=st.floats(0, 1))
def test_greedy_orders_are_legal_from_either_end(case, data, urgency):
    links = data.draw(make_links(case.table))
    graph = transfer_graph(case.table, case.costs, links)
    times, waits = heads_and_tails(graph), WaitsFor.from_preds(graph.preds)
    forth, forth_end = priority_order(graph, waits, times.tail, urgency)
    back, back_end = priority_order(
        graph, WaitsFor(waits.successors, waits.preds), times.head, urgency
    )
    runs = [
        pj.evaluate(pj.links.insert_transfers(case.table, order), case.costs, link=links).makespan
        for order in (forth, back[::-1])
    ]
    assert runs[0] == forth_end
    assert runs[1] <= back_end * (1 + 1e-12)  # each op as early as it can, not as late


@given(case=strategies.cases(), queues=SCOPES)
def test_queue_bound_is_the_largest_over_sets_of_transfers(case, queues):
    graph = transfer_graph(case.table, case.costs, pj.Links("rendezvous", queues))
    times = heads_and_tails(graph)
    length = graph.duration[graph.program.messages.carrier]
    largest = times.makespan
    for queue in range(graph.queues.max(initial=-1) + 1):
        is_own = (graph.queues == queue).any(axis=0)
        for head, tail in itertools.product(times.head[is_own], times.tail[is_own]):
            chosen = is_own & (times.head >= head) & (times.tail >= tail)
            if chosen.any():
                largest = max(largest, head + length[chosen].sum() + tail)
    assert queue_bound(graph, times) == largest


@given(case=strategies.cases(communication=True), queues=SCOPES)
def test_waits_are_those_of_the_event_loop(case, queues):
    theirs = by_reference(case.table, case.theirs, queues)
    links = pj.Links("rendezvous", queues)
    waits = pj.links.transfer_waits(pj.evaluate(case.table, case.costs, link=links))
    expected = {}
    for send in theirs.messages:
        (maker, _), *_ = theirs.waits[send]  # a message waits for its producer first
        times = theirs.end[maker], theirs.start[send], theirs.end[send]
        expected[f"{send[1]}{send[0]}{send[2]}"] = times
    assert {str(w.send): (w.ready, w.start) for w in waits.transfers} == {
        name: times[:2] for name, times in expected.items()
    }
    lengths = [w.wait for w in waits.transfers]
    assert lengths == sorted(lengths, reverse=True)
    assert sum(lengths) == sum(start - ready for ready, start, _ in expected.values())
    assert sum(waits.by_front.values()) == waits.by_worker.sum() == sum(lengths)
    rows = [[str(op) for cell in row for op in cell] for row in case.table.rows()]
    for waited in waits.transfers:
        if waited.wait == 0:
            assert waited.front is None
            continue
        # the one in front ends when this one starts, and both cells stand in that worker's row
        row = rows[waited.worker]
        assert row.index(str(waited.front)) < row.index(str(waited.cell))
        letter = waited.front.phase.name[-1]
        step = 0 if "SEND" in waited.front.phase.name else {"F": -1, "B": 1}[letter]
        front = f"{waited.front.stage + step}SEND_{letter}{waited.front.microbatch}"
        _, begins, ends = expected[front]
        assert ends == waited.start
        assert waited.blocked == max(0.0, begins - waited.ready) <= waited.wait
    assert any(key[0] == "queue" for key in theirs.queues) == bool(expected)


def test_a_receive_blocks_a_ready_send():
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
    table = pj.ScheduleTable.from_rows(rows)
    waits = pj.links.transfer_waits(pj.evaluate(table, costs, link="rendezvous"))
    worst = waits.transfers[0]
    assert (str(worst.cell), str(worst.front), worst.worker) == ("0SEND_F1", "0RECV_B0", 0)
    # ready at 2; the gradient leaves at 1 + 0.5 + 1 + 2 and arrives 0.5 later
    assert (worst.ready, worst.blocked, worst.wait) == (2.0, 2.5, 3.0)
    assert waits.by_worker.tolist() == [3.0, 0.0]
    better = pj.search.messages(table, costs, iterations=5)
    assert better.value == better.lower_bound < better.baselines["own"]
    assert better.stopped == "optimal"


@pytest.mark.parametrize("queues", QUEUES)
def test_the_search_leaves_a_deadlock(queues):
    table = pj.ScheduleTable.from_rows(CROSSED)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
    assert queue_makespans(table, costs)[queues] is None
    result = pj.search.messages(table, costs, link=pj.Links("rendezvous", queues))
    assert result.baselines["own"] is None
    assert pj.evaluate(result.best.table, costs, link=pj.Links("rendezvous", queues)).makespan == (
        result.value
    )


@pytest.mark.parametrize(("name", "queues"), daily(itertools.product(WHOLE, QUEUES)))
def test_every_schedule_gets_an_order(name, queues, tmp_path):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=at_least(name, 4, 4))
    costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.75, offload=0.5)
    result = pj.search.messages(table, costs, link=pj.Links("rendezvous", queues), iterations=4)
    pj.write_table(result.best.table, tmp_path / "table.json")
    read = pj.read_table(tmp_path / "table.json")
    run = pj.evaluate(read, costs, link=pj.Links("rendezvous", queues))
    assert run.makespan == result.value <= result.baselines["by producer"]


def test_rounding_is_no_wait():
    """Nothing waits in the order found, but sums of these costs differ in the last bits."""
    table = pj.schedules.build("gpipe", num_workers=4, num_microbatches=7)
    costs = pj.Costs(forward=1.1e-3, backward=2.3e-3, transmit=0.3e-3)
    result_case = pj.search.messages(table, costs, link="rendezvous", iterations=300)
    run = pj.evaluate(result_case.best.table, costs, link="rendezvous")
    assert any(run.message_start > run.node_finish[run.program.messages.producer])
    waits = pj.links.transfer_waits(run)
    assert (waits.by_worker.tolist(), waits.by_front) == ([0.0] * 4, {})
    assert {(waited.wait, waited.front) for waited in waits.transfers} == {(0.0, None)}


def test_one_worker_has_nothing_to_order():
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=3)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    result = pj.search.messages(table, costs)
    assert (result.value, result.gap, result.best.free_bound) == (9.0, 0.0, 9.0)
    assert (result.stopped, result.best.order.tolist()) == ("optimal", [])
    assert pj.links.transfer_waits(pj.evaluate(table, costs, link="rendezvous")).transfers == ()


def test_costs_of_nothing_are_no_division_by_zero():
    result = pj.search.messages(
        pj.ScheduleTable.from_rows([["0F0", "0B0"]]), pj.Costs(forward=0.0, backward=0.0)
    )
    assert (result.value, result.gap, result.best.free_bound) == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_the_seed_decides():
    search = functools.partial(pj.search.messages, TABLE, COSTS, iterations=4)
    first, same, other = (search(seed=seed) for seed in (1, 1, 2))
    assert first.best.order.tolist() == same.best.order.tolist()
    assert first.best.order.tolist() != other.best.order.tolist()


def test_an_interrupt_returns_the_best_so_far():
    seen = []

    def stop(iteration, iterations, text):
        assert iterations == 1000
        seen.append(float(text.removeprefix("best ").removesuffix(" s")))
        if iteration == 3:
            raise KeyboardInterrupt

    result = pj.search.messages(TABLE, COSTS, on_progress=stop)
    assert result.stopped == "interrupted"
    assert seen[-1] == float(f"{result.value:.6g}")  # as a text says it
    assert len(seen) == 3
    assert seen == sorted(seen, reverse=True)


def test_the_time_ends_the_search():
    result = pj.search.messages(TABLE, COSTS, time_limit=0.0)
    assert result.stopped == "time"
    assert result.value == result.baselines["by need"]


def test_an_order_that_is_not_legal_is_refused():
    with pytest.raises(ValueError, match=r"order: \w+ waits for \w+, which comes later"):
        pj.links.insert_transfers(TABLE, producer_order(TABLE)[::-1].copy())


def test_orders_of_programs_agree_with_their_queues():
    ordered = pj.links.insert_transfers(TABLE)
    order = pj.lower(ordered, link="rendezvous").transfer_order
    assert get_transfers(pj.links.insert_transfers(TABLE, order)) == get_transfers(ordered)


SMALL = ["tune", "messages", "--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
TIMES = ["--stage-times", "F=1,B=2", "--comm", "1"]


def test_command_reports_and_writes(answer, call, tmp_path):
    out = tmp_path / "better.csv"
    result = answer(*SMALL, *TIMES, "--iterations", 3, "--out", out)
    assert result["value"] <= min(result["baselines"].values())
    assert result["makespans"]["found"]["worker"] == result["value"]
    assert set(result["makespans"]) == {"own", "by producer", "found"}
    assert sum(result["waits_by_worker"]) == pytest.approx(sum(w["wait"] for w in result["waits"]))
    assert all(w["wait"] > 0 for w in result["waits"])
    assert result["gain"] == 1 - result["value"] / result["baselines"]["own"]
    assert result["own_order"] == "default"
    assert result["wait"]["own"] == pytest.approx(sum(result["waits_by_worker"]))
    read = pj.read_table(out)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    assert pj.evaluate(read, costs, link="rendezvous").makespan == result["value"]
    picture = tmp_path / "both.svg"
    code, text, _ = call(*SMALL, *TIMES, "--iterations", 3, "--figure", picture, "--details")
    drawn_text = picture.read_text()
    assert (code, ">before: " in drawn_text, ">after: " in drawn_text) == (0, True, True)
    texts = "the order in which they are computed", "messages wait"
    for part in (*texts, "if no message blocked another: "):
        assert part in text


def test_command_looks_past_a_deadlock(answer_and_text, tmp_path):
    path = tmp_path / "crossed.csv"
    path.write_text("\n".join(",".join(row) for row in CROSSED))
    result, text = answer_and_text("tune", "messages", "--table", path, *TIMES)
    assert result["baselines"]["own"] is None
    assert result["waits_of"] == "by producer"
    assert (result["gain"], result["own_order"]) == (None, "cells")
    assert "while the file's own order deadlocks" in text


@pytest.mark.slow
def test_the_gain_is_that_over_the_own_order(call, answer, data):
    path = data / "1F1B_4_8.comms.csv"
    words = ["--stage-times", "F=1,I=1.5,W=0.7", "--comm", 0.9, "--iterations", 20]
    costs = pj.Costs(forward=1.0, input_grad=1.5, weight_grad=0.7, transmit=0.9)
    default = pj.evaluate(pj.read_table(path), costs, link="rendezvous").makespan
    plan = pj.search.messages(pj.read_table(path), costs, iterations=20)
    assert answer("tune", "messages", "--table", path, *words)["gain"] == 1 - plan.value / default
    _, out, _ = call("tune", "messages", "--table", path, *words)
    text, gain = " ".join(out.split()), 100 * (1 - plan.value / default)
    assert f"in the best order of messages, {gain:.3g} % less than in the file's own order" in text
    run = pj.evaluate(pj.read_table(path), costs, link="rendezvous")
    worst = pj.links.transfer_waits(run).transfers[0]
    names = [str(worst.cell), str(worst.front)]  # such as 1RECV_F3: stage, op, microbatch
    cell, front = (f"{n[1:5]} ({n[6]} of microbatch {n[7:]}, stage {n[0]})" for n in names)
    assert f"{worst.wait:.3g} s on worker {worst.worker}, {cell} behind {front}" in text


def test_a_search_ends_at_the_gap_that_is_asked_for(call, answer):
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=4)
    costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=1.7)
    result_case = pj.search.messages(table, costs, gap=0.05)
    assert (result_case.stopped, result_case.gap <= 0.05) == ("gap", True)
    at_once = pj.search.messages(table, costs, gap=0.2)
    assert (at_once.stopped, 0.05 < at_once.gap <= 0.2) == ("gap", True)
    further = pj.search.messages(table, costs, iterations=3)  # to 0.1 %
    assert (further.stopped, further.gap > 0.001) == ("iterations", True)
    line = ["tune", "messages", "-s", "interleaved-1f1b", "-P", 4, "-M", 4, "-V", 2]
    line += ["-T", "F=1,B=2", "--comm", 1.7]
    text = answer(*line, "--gap", "5%")
    assert (text["stopped"], text["value"]) == ("gap", result_case.value)
    assert "tried; stopped by --gap)" in call(*line, "--gap", 0.2, "--details")[1]
