"""Traces: what Perfetto drops or binds elsewhere is no part of one, and busy times are in it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from grammar_tables import TABLES, grammar_table
from trace_rules import busy, faults, slices

import pipejax as pj
from pipejax.schedules.table.links import LINK_MODELS

LINKS = {
    **{name: name for name in LINK_MODELS},
    "by pair": pj.Links("rendezvous", "pair"),
    "by program": pj.Links("rendezvous", "pair", posting="program"),
    "shared": pj.Links("queued", shared_links="pairs"),
}
SCHEDULES = (
    *("1f1b", "interleaved-1f1b", "chimera", "zb-h1", "hanayo", "pipe-offload", "pipedream"),
    *("DualPipeV_4_8.csv", "1F1B_4_8.comms.csv", *TABLES),
)


def make_table(name):
    if name.endswith(".csv"):
        return pj.read_table(Path(__file__).parent / "data" / name)
    if name in TABLES:
        return grammar_table(name)[0]
    return pj.schedules.build(name, num_workers=4, num_microbatches=8)


def evaluated(name, link="delay", scale=1e-3, seed=0):
    """Evaluate a run of uneven costs: no time is a whole number of nanoseconds, messages overlap."""
    table = make_table(name)
    added = {p.kind.time: scale * (0.3 + k) for k, p in enumerate(table.grammar.custom_phases)}
    rng = np.random.default_rng(seed)
    ops = ("forward", "input_grad", "weight_grad", "update", "offload", "load")
    times = {op: scale * rng.uniform(0.5, 1.5, table.num_stages) for op in ops}
    costs = pj.Costs(
        **times,
        backward=times["input_grad"] + times["weight_grad"],
        all_reduce=3 * scale * rng.uniform(0.5, 1.5, table.num_stages),
        latency=scale * rng.uniform(0, 2),
        transmit=scale * rng.uniform(0, 0.5),
        others=added,
    )
    return pj.evaluate(table, costs, link=link)


def make_trace(run):
    return json.loads(pj.files.chrome_trace(run))


@pytest.mark.parametrize(
    ("name", "link"),  # tables of a grammar of their own hold no SENDs that could be posted
    [(n, link) for n in SCHEDULES for link in LINKS if n not in TABLES or link != "by program"],
)
def test_a_trace_follows_the_rules_and_holds_the_busy_times(name, link):
    run = evaluated(name, LINKS[link])
    trace = make_trace(run)
    assert faults(trace) == []
    assert busy(trace, run.workers) == pytest.approx(run.busy * 1e6, rel=0, abs=1)
    assert {part["tid"] for part in slices(trace, "compute")} == {0}
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(run.makespan * 1e6, rel=0, abs=1e-3)


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1.0, 1e4])
def test_rounding_makes_no_overlap(scale):
    for seed in range(5):
        run = evaluated("DualPipeV_4_8.csv", "delay", scale, seed)
        trace = make_trace(run)
        assert faults(trace) == []
        assert busy(trace, run.workers) == pytest.approx(run.busy * 1e6, rel=0, abs=1)


def test_each_thing_is_on_a_track_of_its_name():
    events = make_trace(evaluated("pipe-offload", "rendezvous"))["traceEvents"]
    named = [event for event in events if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    tracks = {
        (event["cat"], names[event["pid"], event["tid"]].split(" (")[0])
        for event in events
        if event["ph"] == "X" and event["pid"] == 1
    }
    assert tracks == {
        ("compute", "compute"),
        ("host link", "host link"),
        ("collective", "collectives"),
        *(("message", f"{way} worker {w}") for way in ("send to", "receive from") for w in (0, 2)),
    }
    ranks = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    order = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert ranks[: len(order) // 4] == sorted(ranks[: len(order) // 4])
    assert order[0] == "compute"
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {**{w: f"worker {w}" for w in range(4)}, 4: "pipeline"}


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_flows_lead_from_producer_to_consumer(latency):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    trace = make_trace(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, latency=latency)))
    events, over = trace["traceEvents"], {0.0: [], 0.5: ["0SEND_F1"]}[latency]
    chain = [event for event in events if event["ph"] in "stf" and event["name"] == "0SEND_F1"]
    around = [
        part["name"]
        for at in chain
        for part in events
        if part["ph"] == "X"
        and (part["pid"], part["tid"]) == (at["pid"], at["tid"])
        and part["ts"] < at["ts"] < part["ts"] + part["dur"]
    ]
    assert around == ["0F1", *over, "1F1"]
    assert len(slices(trace, "message")) == 2 * 4 * bool(latency)  # at both ends, if it takes time
    assert sum(event["ph"] == "s" for event in events) == 4


def test_counters_count_activations_and_idle_workers():
    for name in ("DualPipeV_4_8.csv", "zb-h1", "pipe-offload", "mixed", "braid"):
        run = evaluated(name)
        counts = [event for event in make_trace(run)["traceEvents"] if event["ph"] == "C"]
        for worker, peak in enumerate(run.peak_in_flight.tolist()):
            held = [e["args"]["activations"] for e in counts if e["pid"] == worker]
            assert (max(held), held[-1]) == (peak, 0)
        idle = [(e["ts"], e["args"]["workers"]) for e in counts if e["pid"] == run.workers]
        idle_time = sum((b - a) * n for (a, n), (b, _) in itertools.pairwise(idle))
        finish = idle[-1][0] / 1e6  # collectives may go on
        assert idle_time / 1e6 == pytest.approx(finish * run.workers - run.busy.sum(), abs=1e-6)
        assert idle[-1][1] == run.workers


def test_lanes_of_a_table_are_tracks_and_slices_are_said():
    trace = make_trace(evaluated("mixed"))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names[:4] == ["compute", "collectives", "net", "host link"]
    assert {part["name"] for part in slices(trace, "net")} == {"0D0", "0D1", "1D0", "1D1"}
    compute = slices(make_trace(evaluated("slices")), "compute")
    (part,) = [part for part in compute if part["name"] == "1F1.0"]
    assert (part["args"]["microbatch"], part["args"]["slice"]) == (1, 0)
    compute = slices(make_trace(evaluated("vocabulary")), "compute")
    worker_tracks = [part for part in compute if part["name"] == "S1"]
    assert [p["pid"] for p in worker_tracks] == [0, 1]
    assert "stage" not in worker_tracks[0]["args"]


def test_what_takes_no_time_has_no_flow():
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    trace = make_trace(pj.evaluate(table, pj.Costs(forward=0.0, backward=2.0)))
    assert faults(trace) == []
    flows = [event["name"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert flows == ["1SEND_B0", "1SEND_B1"]


def get_fault(**change):
    """Faults of a trace of two slices and a flow between them, after a change to one event."""
    place = {"pid": 0, "tid": 0}
    flow = {**place, "name": "m", "cat": "message", "id": 0}
    names = [f"{what}_{key}" for what in ("process", "thread") for key in ("name", "sort_index")]
    events = [
        *({**place, "ph": "M", "name": name, "args": {}} for name in names),
        {**place, "ph": "X", "name": "a", "cat": "compute", "ts": 0.0, "dur": 1.0},
        {**place, "ph": "X", "name": "b", "cat": "compute", "ts": 1.0, "dur": 1.0},
        {**flow, "ph": "s", "ts": 0.999},
        {**flow, "ph": "f", "ts": 1.5, "bp": "e"},
    ]
    for event in events:
        if event["ph"] + event["name"] == change.get("at"):
            event.update(change["to"])
    return [fault.split(" {")[0] for fault in faults({"traceEvents": events})]


def test_the_rules_find_what_is_wrong():
    assert get_fault() == []
    assert get_fault(at="Xa", to={"dur": 1.5}) == ["overlap"] * 2
    assert get_fault(at="Xa", to={"dur": 1 + 2**-52}) == ["overlap"]
    assert get_fault(at="Xa", to={"dur": 2.5}) == []  # b lies in it
    assert get_fault(at="fm", to={"ts": 2.0}) == ["nothing around"]
    assert get_fault(at="fm", to={"id": 1})[0].startswith("flow of")
    assert get_fault(at="fm", to={"bp": ""}) == ["not bound to what is around it:"]
    assert get_fault(at="sm", to={"ts": 1.0}) == []  # it binds to b
    assert get_fault(at="Xb", to={"tid": 1})[0].startswith("no thread_name")
    assert get_fault(at="Mthread_name", to={"name": "thread_label"})[0].startswith("no thread_name")
