"""Why a step is slow, and what helps: parts sum to it, planted faults are named, remedies hold."""

import dataclasses
import html
import itertools
import json
import random
import re
import shlex

import justhtml
import numpy as np
import pytest
from daily import daily, read_cases, with_cases
from legal_sizes import build
from markupsafe import escape

import pipejax as pj
from pipejax.analysis.step.faults import find_faults
from pipejax.analysis.step.step_report import WAITS, step_parts, with_equal_stages
from pipejax.cli.output.numbers import seconds
from pipejax.costs.model.workload import with_stage_layers
from pipejax.schedules.table.communication_cells import with_transfers
from pipejax.schedules.table.links import LINK_MODELS
from pipejax.search.remedies.candidates import first_candidate
from pipejax.search.remedies.changes import schedules
from pipejax.search.remedies.explain import shortens

LINKS = list(LINK_MODELS)
OWN_FILE = "your own schedule file or code"
THIN = {"data_parallel": 64, "zero": 1, "expert_parallel": 16, "precision": "mxfp8"}
SPLIT = {"tensor_parallel": 8, "sequence_parallel": True}
BUILT = [
    *(("1f1b", 4, 16, {}), ("gpipe", 3, 7, {}), ("zb-h1", 4, 12, {}), ("chimera", 4, 8, {})),
    *(("dualpipe", 4, 8, {}), ("interleaved-1f1b", 4, 16, {"stages_per_worker": 2})),
    ("zb-v", 4, 8, {}),
]


def built(name, workers, microbatches, options):
    return build(name, workers, microbatches, **options)


def random_costs(table, seed):
    rng = np.random.default_rng(seed)
    stages, between = table.num_stages, table.num_stages - 1
    times = {"forward": rng.uniform(1, 2, stages), "input_grad": rng.uniform(1, 2, stages)}
    times |= {"weight_grad": rng.uniform(0.5, 1, stages)}
    messages = {"latency": 0.02, "transmit": rng.uniform(0, 0.4, between)}
    return pj.Costs(**times, **messages, all_reduce=rng.uniform(0, 3, stages), update=0.5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("schedule", BUILT, ids=lambda entry: entry[0])
def test_parts_sum_to_the_step(schedule, link):
    table = built(*schedule)
    costs = random_costs(table, len(link))
    run = pj.evaluate(table, costs, link=link)
    parts = {part.name: part.seconds for part in step_parts(run)}
    assert sum(parts.values()) == pytest.approx(run.makespan, rel=1e-12)
    alone = pj.evaluate(table, dataclasses.replace(costs, update=0.0))
    assert parts["compute"] == pytest.approx(alone.busy.mean(), rel=1e-12)
    assert all(parts[name] >= -1e-9 for name in ("start", "gaps", "end", *WAITS))


@pytest.mark.parametrize("link", LINKS)
def test_levels_are_runs(link):
    table = built(*BUILT[0])
    costs = dataclasses.replace(random_costs(table, 3), all_reduce=0.0, update=0.0)
    silent = dataclasses.replace(costs, latency=0.0, transmit=0.0)

    def last_end(table, costs, link="delay"):
        return pj.evaluate(table, costs, link=link).makespan

    parts = {part.name: part.seconds for part in step_parts(pj.evaluate(table, costs, link=link))}

    alike = last_end(table, with_equal_stages(silent, table, microbatches=True))
    bubble = parts["start"] + parts["gaps"] + parts["end"]
    assert parts["compute"] + bubble == pytest.approx(alike, rel=1e-12)
    silent_end, sent = last_end(table, silent), last_end(table, costs)
    assert parts["imbalance"] == pytest.approx(silent_end - alike, rel=1e-9)
    assert parts["messages"] == pytest.approx(sent - silent_end, rel=1e-9)
    blocking = last_end(table, costs, link) - sent
    assert parts["blocking"] == pytest.approx(blocking, rel=1e-9, abs=1e-9)


# one fault each, in pipelines that have no other; what is to be named first
HEALTHY = [
    *(("1f1b", 4, 8, {}), ("1f1b", 8, 32, {}), ("zb-h1", 4, 16, {}), ("gpipe", 4, 16, {})),
    *(("interleaved-1f1b", 4, 16, {"stages_per_worker": 2}), ("dualpipe-v", 4, 16, {})),
    ("chimera", 4, 16, {}),
]


def healthy(table, seed, **costs):
    """Costs that differ by 3 %, as measured ones do."""
    rng = np.random.default_rng(seed)
    stages = table.num_stages
    times = {k: rng.uniform(0.97, 1.03, stages) for k in ("forward", "input_grad", "weight_grad")}
    return pj.Costs(**times, **{"transmit": 0.05, **costs})


def slow_stage(table, rng):
    stage = int(rng.integers(table.num_stages))
    costs = pj.costing.scaled_costs(healthy(table, 1), table, f"compute@stage{stage}*1.5")
    return table, costs, {}, lambda fault: fault.stage == stage and fault.kind == "imbalance"


def slow_worker(table, rng):
    worker = int(rng.integers(table.num_workers))
    costs = pj.costing.scaled_costs(healthy(table, 2), table, workers={worker: 1.4})
    return table, costs, {}, lambda fault: fault.worker == worker and fault.kind == "imbalance"


def slow_link(table, rng):
    place = table.placement[0]
    crossing = np.flatnonzero(place[:-1] != place[1:])
    first = int(rng.choice(crossing))
    pair = {*place[first : first + 2].tolist()}
    slow = [{*ends} == pair for ends in itertools.pairwise(place.tolist())]
    costs = healthy(table, 3, transmit=np.where(slow, 1.5, 0.05))
    return table, costs, {}, lambda fault: fault.link is not None and {*fault.link} == pair


def bad_split(table, rng):
    layers = np.where(table.placement[0] < table.num_workers / 2, 1.4, 0.6)
    rules = ",".join(f"compute@stage{s}*{count}" for s, count in enumerate(layers))
    costs = pj.costing.scaled_costs(healthy(table, 4), table, rules)
    return table, costs, {}, lambda fault: fault.kind == "imbalance" and "uneven" in fault.why


def few_microbatches(table, rng):
    few = table.num_workers // 2 if table.stages_per_worker == 1 else table.num_workers
    table = build("1f1b", table.num_workers, few)
    return table, healthy(table, 5), {}, lambda fault: fault.kind == "microbatches"


def dear_exchange(table, rng):
    costs = healthy(table, 6, all_reduce=20.0 * table.num_stages / table.num_workers)
    return table, costs, {}, lambda fault: fault.kind == "exchange"


def blocked_messages(table, rng):
    # PyTorch's order of transfers on one queue of each worker
    name = ["looped-bfs", "interleaved-1f1b", "gpipe", "dualpipe-v"][int(rng.integers(4))]
    plain = build(name, table.num_workers, table.num_microbatches)
    crossed = with_transfers(plain, None, pj.Links(), waits=True)
    costs = healthy(plain, 7, transmit=0.1)
    return crossed, costs, {"link": "rendezvous"}, lambda fault: fault.kind == "blocking"


def little_memory(table, rng):
    table = build("v-min", table.num_workers, table.num_microbatches)
    costs = healthy(table, 8, transmit=0.01)
    peak = pj.analysis.activation_memory(pj.evaluate(table, costs)).peak.max()
    return table, costs, {"memory_limit": float(peak)}, lambda fault: fault.kind == "memory"


FAULTS = [slow_stage, slow_worker, slow_link, bad_split, few_microbatches, dear_exchange]
FAULTS += [blocked_messages, little_memory]
SHELVES = ("launcher", "code", "hardware")
FEW = ("1f1b", "interleaved-1f1b", "zb-h1", "dualpipe-v")  # all others take most of the time
PLANTED = [(fault, schedule) for schedule in HEALTHY for fault in FAULTS]


@pytest.mark.parametrize(
    ("fault", "schedule"),
    daily(PLANTED, always=8, total=24),
    ids=lambda entry: entry.__name__ if callable(entry) else entry[0],
)
def test_a_planted_fault_is_the_first_one(fault, schedule):
    rng = np.random.default_rng(len(fault.__name__) + schedule[1] * schedule[2])
    table, costs, how, is_named = fault(built(*schedule), rng)
    result = pj.explain(table, costs, schedules=FEW, **how)
    assert is_named(result.bottleneck), [(entry.kind, entry.seconds) for entry in result.faults]
    parts = sum(part.seconds for part in result.parts)
    assert parts == pytest.approx(result.step_time, rel=1e-9)
    for remedy in result.remedies:
        again = remedy.scenario.replace().evaluate()
        assert again.step_time == remedy.step_time == result.step_time - remedy.saves
        assert remedy.bound <= remedy.step_time * (1 + 1e-9)
        assert len(remedy.assumes) <= 1
        assert (remedy.shelf == "launcher") == bool(remedy.launchers)
    ranks = [(SHELVES.index(r.shelf), r.kind == "combined", -r.saves) for r in result.remedies]
    assert ranks == sorted(ranks)


def test_a_limit_of_each_worker_that_does_not_suffice():
    table = built(*BUILT[0])
    result = pj.explain(table, pj.Costs(forward=1.0, backward=2.0), memory_limit=[4, 2, 2, 1])
    assert result.bottleneck.why == "it does not fit: worker 1 needs 3 activations of 2 activations"
    assert all(remedy.fits for remedy in result.remedies)


def test_messages_may_be_so_much_slower():
    table = built(*BUILT[0])
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    result = pj.explain(table, costs, schedules=["1f1b"])
    for times, is_longer in ((result.tolerated, False), (result.tolerated * 1.001, True)):
        slower = pj.costing.scaled_costs(costs, table, f"message*{times}")
        assert (pj.evaluate(table, slower).makespan > 1.01 * result.step_time) == is_longer
    silent = dataclasses.replace(costs, transmit=0.0)
    assert pj.explain(table, silent, schedules=["1f1b"]).tolerated is None


def test_nothing_wrong_is_said():
    result = pj.explain(build("1f1b", 2, 64), pj.Costs(forward=1.0, backward=2.0))
    assert [fault.kind for fault in result.faults] == ["memory"]  # that of now is no limit
    assert (result.bottleneck.kind, result.bottleneck.seconds) == ("schedule", 3.0)
    assert "nothing stands out" in result.bottleneck.why


def test_one_stage_on_one_worker_has_nothing_to_be_held_against():
    table = pj.ScheduleTable.from_rows([["0F0", "0B0"]])
    result = pj.explain(table, pj.Costs(forward=1.0, backward=2.0))
    assert result.step_time == 3.0
    assert [part.name for part in result.parts if part.seconds] == ["compute"]


def test_costs_of_other_stages_keep_the_work():
    coarse = build("1f1b", 4, 4)
    costs = pj.Costs(forward=[1.0, 2.0, 3.0, 4.0], backward=2.0, transmit=[0.1, 0.9, 0.3])
    two = built("interleaved-1f1b", 4, 4, {"stages_per_worker": 2})
    halves = pj.costing.restaged_costs(costs, 4, two)
    assert halves.forward.tolist() == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0]
    assert halves.backward.tolist() == [1.0] * 8
    # from worker 3 back to worker 0 nothing was sent: as long as the longest
    assert halves.transmit[0, 0].tolist() == [0.1, 0.9, 0.3, 0.9, 0.1, 0.9, 0.3]
    back = pj.costing.restaged_costs(halves, 8, coarse)
    assert back.forward.tolist() == costs.forward.tolist()
    assert back.transmit[1, 0].tolist() == [0.1, 0.9, 0.3]
    thirds = build("1f1b", 3, 4)
    assert pj.costing.restaged_costs(costs, 4, thirds).forward == pytest.approx([5 / 3, 10 / 3, 5])


FILE = {"unit": "seconds", "F": [1, 1, 1.5, 1], "B": 2, "message": {"transmit": [0.1, 0.5, 0.1]}}
UNEVEN = ["--microbatch-scale", "1,3,1,2", "--microbatch-order", "1,0,3,2"]
LINES = [
    ["-s", "1f1b", "-P", 4, "-M", 16],
    ["-s", "zb-v", "-P", 4, "-M", 8, "--measured-stages", 4],
    ["-s", "interleaved-1f1b", "-P", 4, "-M", 8, "-V", 2, "--measured-stages", 4],
    ["-s", "gpipe", "-P", 4, "-M", 4, "-l", "rendezvous", "--scale", "F*1.5"],
    ["-t", "schedule.csv", "--stragglers", "1=1.3"],
    ["-s", "zero-bubble", "-P", 4, "-M", 8, "--memory-limit", 5],
    ["-t", "schedule.csv", "-l", "rendezvous", "--posting", "program"],
    ["-t", "schedule.csv", "--stage-layers", "6,5,7,6", "--schedules", "zb-h1,dualpipe-v"],
    ["-s", "1f1b", "-P", 4, "-M", 4, *UNEVEN],
]
LINES = [[*line, "-C", "m.json"] for line in LINES]


def random_line(seed):
    """Draw a run: schedule, source of the costs, links and edits."""
    pick = random.Random(seed).choice
    line = ["-P", 4, "-M", pick([4, 8]), "--link", pick(["delay", "queued", "rendezvous"])]
    name = pick(["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "v-half"])
    line += ["-s", name, *(["-V", 2] if name == "interleaved-1f1b" else [])]
    way = pick(["model", "file", "-T", "-W"])
    if way == "model":
        line += ["-m", "llama3-8b", "-y", pick(["h100", "a100"]), "--minibatch", 16]
        line += ["--tensor-parallel", pick([1, 2, 8])]
        share = ["--weight-share", 0.5] if name == "zb-v" else []
        zero = ["--data-parallel", 2, "--zero", 1]
        line += pick([[], zero, ["--recompute", "full"], share])
    elif way == "file":
        line += ["-C", "m.json", "--measured-stages", 4]
    else:
        cells = pick([[], ["--recompute-cells"]] if name in ("1f1b", "gpipe", "chimera") else [[]])
        times = pick(["F=1,B=2", "F=10ms,I=11ms,W=7ms"]) + (",R=1" if cells else "")
        line += [way, times, *cells, "--comm", pick([0, 0.3, "4ms"])]
        line += pick([[], ["--workers-per-node", 2, "--worker-places", "0,2,1,3"]])
    line += pick([[], ["--scale", "compute@worker1*1.5"], ["--stragglers", "2=1.4"]])
    return line + pick([[], ["--schedules", "zb-h1,1f1b,zb-v"]])


RUNS = daily([*LINES, *map(random_line, range(100))], total=20)


@pytest.mark.parametrize("line", RUNS, ids=lambda line: " ".join(map(str, line)))
def test_commands_repeat_what_remedies_say(answer, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    pj.write_table(built(*BUILT[0]), tmp_path / "schedule.csv")
    result = answer("explain", *line)
    assert sum(part["seconds"] for part in result["parts"]) == pytest.approx(result["step_time"])
    assert result["remedies"] or line not in LINES
    for remedy in result["remedies"]:
        for command in remedy["command"].split(" && "):
            words = shlex.split(command)
            assert words[0] == "pipejax"
            again = answer(*words[1:], *(["--force"] if "--out" in words else []))
        step = again.get("makespan", again.get("value"))
        assert step == pytest.approx(remedy["step_time"], rel=1e-12), remedy["command"]


def test_workers_are_put_on_other_nodes(answer):
    line = ["-s", "interleaved-1f1b", "-P", 4, "-M", 8, "-V", 2, "-T", "F=1,B=2", "--comm", "0,0.9"]
    line += ["--workers-per-node", 2, "--worker-places", "0,2,1,3"]
    result = answer("explain", *line, "--schedules", "1f1b")
    (remedy,) = (candidate for candidate in result["remedies"] if candidate["kind"] == "places")
    assert "--worker-places 0,1,2,3" in remedy["command"]
    again = answer(*shlex.split(remedy["command"])[1:])
    assert again["makespan"] == remedy["step_time"] < result["step_time"]


def test_tables_of_remedies_are_written(answer, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    line = ["-s", "gpipe", "-P", 4, "-M", 4, "-C", "m.json", "-l", "rendezvous"]
    result = answer("explain", *line, "--write-tables", "tables")
    assert result["write-tables"] == "tables"
    searched = [entry for entry in result["remedies"] if "order of messages" in entry["what"]]
    assert searched
    for remedy in searched:
        assert "--table tables/" in remedy["command"]
        again = answer(*shlex.split(remedy["command"])[1:])
        assert again["makespan"] == pytest.approx(remedy["step_time"], rel=1e-12)
    code, _, error = call("explain", *line, "--write-tables", "tables")
    assert code == 2
    assert error == "error: --write-tables tables exists\nhint: give a folder that does not\n"


def test_a_slow_stage_is_named_beside_longer_ends():
    table = built("interleaved-1f1b", 4, 16, {"stages_per_worker": 2})
    forward = np.array([9.2, 8.0, 8.1, 8.0, 8.0, 11.6, 8.1, 9.6])
    result = pj.explain(table, pj.Costs(forward=forward, backward=2 * forward, transmit=1.0))
    assert (result.bottleneck.kind, result.bottleneck.stage) == ("imbalance", 5)
    assert "stage 5 (worker 1) as fast as the others" in [remedy.what for remedy in result.remedies]


@with_cases(
    "schedule times stage",
    *read_cases("test_a_place_that_costs_more_than_the_uneven_split_is_named"),
)
def test_a_place_that_costs_more_than_the_uneven_split_is_named(schedule, times, stage):
    table = built(*schedule)

    def step(forward):
        return pj.evaluate(table, pj.Costs(forward=forward, backward=2 * forward)).makespan

    def saved_by(place):
        median = np.median(np.delete(times, place))
        return step(times) - step(np.where(np.arange(len(times)) == place, median, times))

    times = np.array(times, float)
    saved = [saved_by(place) for place in range(len(times)) if times[place] > 1]
    even = step(times) - step(np.full(len(times), times.mean()))
    assert saved_by(stage) == max(saved) > even
    run = pj.evaluate(table, pj.Costs(forward=times, backward=2 * times))
    (fault,) = (fault for fault in find_faults(run) if fault.kind == "imbalance")
    assert fault.stage == stage
    assert fault.seconds == pytest.approx(max(saved), rel=1e-9)
    assert fault.why.startswith(f"stage {stage} ")


def test_microbatches_that_differ_are_named():
    table = built(*BUILT[0])
    costs = pj.Costs(forward=1.0, backward=2.0)
    lengths = np.r_[np.ones(15), 6.0]
    scaled = pj.costing.scaled_costs(costs, table, microbatches=lengths)
    result = pj.explain(table, scaled, schedules=["1f1b"])
    assert result.bottleneck.kind == "uneven microbatches"
    assert "microbatch 15 takes 4.57 times the mean" in result.bottleneck.why
    (order,) = (remedy for remedy in result.remedies if remedy.kind == "order")
    assert order.scenario.replace().evaluate().makespan == order.step_time < result.step_time


@pytest.mark.parametrize(("transmit", "step", "saved"), [(0.0, 10.0, 1.0), (1.0, 12.0, 1.0)])
def test_microbatches_cost_what_their_means_save(transmit, step, saved):
    # by hand: 0F0 0-1, 0F1 1-4, 1F0 1-2, 1F1 4-7, 1B0 7-8, 1B1 8-9, 0B0 8-9, 0B1 9-10;
    # with F of 2 and 2: 0F 0-2-4, 1F 2-4-6, 1B 6-7-8, 0B 7-8-9; two messages make either 2 longer
    table = build("gpipe", 2, 2)
    costs = pj.Costs(forward=[[1.0, 3.0]] * 2, backward=[[1.0, 1.0]] * 2, transmit=transmit)
    result = pj.explain(table, costs, schedules=["gpipe"])
    assert result.step_time == step
    assert [f.seconds for f in result.faults if f.kind == "uneven microbatches"] == [saved]


@pytest.mark.parametrize("link", ["delay", "rendezvous", "blocking"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_cost_of_microbatches_is_that_of_means_in_the_whole_run(schedule, link):
    table = build(schedule, 4, 12)
    lengths = np.r_[np.ones(3), 2.4, np.ones(5), 2.6, np.ones(2)] * np.c_[[1.0, 1.1, 0.9, 1.2]]
    even = np.full(4, (10 + 2.4 + 2.6) / 12) * [1.0, 1.1, 0.9, 1.2]
    names = ("forward", "input_grad", "weight_grad")
    costs = pj.Costs(**dict.fromkeys(names, lengths), transmit=0.4, update=1.0)
    run = pj.evaluate(table, costs, link=link)
    means = pj.Costs(**dict.fromkeys(names, even), transmit=0.4, update=1.0)
    equal = pj.evaluate(table, means, link=link)
    (fault,) = (f for f in find_faults(run) if f.kind == "uneven microbatches")
    assert fault.seconds == pytest.approx(run.makespan - equal.makespan, rel=1e-9)
    (part,) = (part for part in step_parts(run) if part.name == "uneven microbatches")
    assert fault.seconds != pytest.approx(part.seconds, rel=0.01)  # what they add before messages


def test_layers_are_moved_whole():
    table = built("1f1b", 4, 16, {})
    costs = pj.Costs(forward=[8.0, 8.0, 8.0, 12.0], backward=[16.0, 16.0, 16.0, 24.0])
    result = pj.explain(table, costs, stage_layers=[8, 8, 8, 8], schedules=["1f1b"])
    (moved,) = (remedy for remedy in result.remedies if remedy.kind == "layers")
    # a layer takes 1 and 2: stage 3 with 5 keeps its head and 5 layers, as long as the others with 9
    assert moved.what == "layers over stages: 9,9,9,5"
    even = pj.Costs(forward=9.0, backward=18.0)
    assert moved.step_time == pytest.approx(pj.evaluate(table, even).makespan, rel=1e-12)


@pytest.mark.parametrize("layers", [None, [2] * 8])
@with_cases(
    "forward parts",
    # of 8 measured stages, and of the 16 halves
    ([6] * 7 + [9], [3] * 15 + [6]),
    ([8] + [6] * 7, [5] + [3] * 15),
    ([8] + [6] * 6 + [9], [5] + [3] * 14 + [6]),
    ([6] * 3 + [9] + [6] * 4, [3] * 6 + [4.5] * 2 + [3] * 8),  # no head: a slow stage
)
def test_embedding_and_head_are_whole_where_stages_are_divided(forward, parts, layers):
    table = build("interleaved-1f1b", 4, 8, stages_per_worker=2)
    finer = build("interleaved-1f1b", 4, 8, stages_per_worker=4)
    measured, halves = (np.array(t, float) for t in (forward, parts))
    costs = pj.Costs(forward=measured, backward=1.5 * measured + 1, transmit=0.01)
    begin = first_candidate(pj.Scenario(table, costs=costs), layers)
    others = {other.what: other for other in schedules(begin, ["interleaved-1f1b"])}
    change = others["schedule interleaved-1f1b, stages per worker 4"]
    # 1.5 x + 1 of a stage: half of the one for each half of the layers
    real = pj.Costs(forward=halves, backward=1.5 * halves + 0.5, transmit=0.01)
    assert change.step_time == pytest.approx(pj.evaluate(finer, real).step_time, rel=1e-12)


def test_of_two_measured_stages_the_slower_one_has_the_head():
    table = build("1f1b", 2, 8)
    begin = first_candidate(pj.Scenario(table, costs=pj.Costs(forward=[6.0, 12.0], backward=12.0)))
    (change,) = (c for c in schedules(begin, ["interleaved-1f1b"]) if c.what.endswith("worker 2"))
    costs = pj.Costs(forward=[3.0, 3.0, 3.0, 9.0], backward=6.0)
    assert change.step_time == pytest.approx(pj.evaluate(change.table, costs).step_time)


def test_rules_for_places_of_other_stages_scale_no_divided_stages():
    # stage 1 of 4 is no stage 1 of 8
    table = build("1f1b", 4, 8)
    costs = pj.Costs(forward=[6.0, 6.0, 6.0, 9.0], backward=12.0)
    for rules, count in ("compute@stage1*1.2", 0), ("compute@worker1*1.2", 3):
        edit = pj.costing.ScaledTimes(rules)
        begin = first_candidate(pj.Scenario(table, costs=costs).with_edit(edit))
        assert len([*schedules(begin, ["interleaved-1f1b"])]) == count


def test_memory_costs_what_lies_beyond_the_best_that_fits(answer):
    line = ["-s", "zero-bubble", "-P", 4, "-M", 12, "-T", "F=1,I=1,W=1", "--memory-limit", 3]
    result = answer("explain", *line)
    fault = next(fault for fault in result["faults"] if fault["kind"] == "memory")
    best = max(remedy["saves"] for remedy in result["remedies"] if remedy["kind"] == "schedule")
    gain = r"save ([\d.]+) % of the step more than the best"
    words = rf"schedule (\S+), stages per worker (\d+) .* {gain}"
    name, stages, percent = re.search(words, fault["why"]).groups()
    table = build(name, 4, 12, stages_per_worker=int(stages))
    times = dict.fromkeys(("forward", "input_grad", "weight_grad"), 1 / int(stages))
    beyond = result["step_time"] - best - pj.evaluate(table, pj.Costs(**times)).step_time
    assert fault["seconds"] == pytest.approx(beyond, rel=1e-9)
    assert float(percent) == pytest.approx(100 * beyond / result["step_time"], rel=1e-2)


@with_cases("text settings", *read_cases("settings of printed plans"))
def test_the_printed_plan_has_the_settings_of_the_first_remedy(text, settings, answer):
    """A plan at other settings would compare layouts of another run."""
    line = ["-s", "1f1b", "-m", "llama3-8b", "-y", "h100", *text.split()]
    result = answer("explain", *line)
    (job,) = result["next"]
    first = next(row for row in result["remedies"] if row["kind"] == "combined")
    for name, value in settings.items():
        assert f"--{name} {value}" in job
        assert (f"--{name} {value}" in first["command"]) == (name != "memory-limit")


def test_a_cause_that_costs_more_than_settings_save_says_why(answer_and_text):
    line = ["-s", "interleaved-1f1b", "-P", 8, "-M", 16, "-V", 5, "-m", "llama3-70b", "-y", "h100"]
    line += ["--minibatch", 16, "--tensor-parallel", 8, "--sequence-parallel", "--schedules"]
    line += ["1f1b", "--tensor-overlap", 1, "--stragglers", "2=1.3", "--launcher", "Megatron-LM"]
    result, text = answer_and_text("explain", *line)
    saved = max(row["saves"] for row in result["remedies"] if row["shelf"] != "hardware")
    assert 0 < saved < result["faults"][0]["seconds"]
    words = (
        f"settings and schedules save at most {seconds(saved)} of it: launchers move whole layers"
    )
    assert words in text


def test_a_modelled_run_that_does_not_fit_says_what_does(answer, answer_and_text, call):
    line = ["-s", "1f1b", "-P", 8, "-M", 8, "-m", "gpt3-175b", "-y", "h100", "--minibatch", 8]
    line += ["--tensor-parallel", 8]
    more = ["--schedules", "1f1b", "--details"]
    result, text = answer_and_text("explain", *line, *more)
    assert result["bottleneck"]["why"].startswith("it does not fit: worker 0 needs")
    assert result["memory"]["unit"] == "bytes"
    job = "pipejax plan --model gpt3-175b --system h100 --gpus 64 --minibatch 8"
    assert result["next"] == [job]
    assert all(remedy["fits"] for remedy in result["remedies"])
    # sequence parallelism alone needs 0.93 of the memory, more than the limit of `plan`
    what = "recomputation selective with sequence parallelism"
    assert "sequence parallelism" not in [row["what"] for row in result["remedies"]]
    workload = pj.Workload(pj.load_model("gpt3-175b"), 8, tensor_parallel=8, sequence_parallel=True)
    need = pj.memory_bytes(workload, build("1f1b", 8, 8))
    assert 0.9 < need.max() / float(pj.load_system("h100").memory_available) < 1
    (remedy,) = (candidate for candidate in result["remedies"] if candidate["what"] == what)
    assert answer(*shlex.split(remedy["command"])[1:])["makespan"] == remedy["step_time"]
    assert "remedies may need 75.2 GB" in " ".join(text.split())
    smaller = [*line[:-1], 16]  # fits: remedies leave a tenth of the memory free, as plan does
    text = " ".join(call("explain", *smaller, *more)[1].split())
    assert "remedies may need 75.2 GB (--memory-limit)" in text


@with_cases("kind line", *read_cases("test_exchanges_inside_layers_are_a_cause"))
def test_exchanges_inside_layers_are_a_cause(answer, kind, line):
    run = [*["-s", "gpipe", "-P", "1", "-M", "4", "-y", "h100", "--minibatch", "4"], *line.split()]
    more = ["--memory-limit", "1000TB", "--schedules", "gpipe"]
    faults = answer("explain", *run, *more)["faults"]
    (fault,) = (fault for fault in faults if fault["kind"] == kind)
    step = answer("evaluate", *run)
    # a single worker waits for nobody, so that the step is the sum of its parts
    assert fault["seconds"] == pytest.approx(step["breakdown"][kind], rel=1e-9)
    assert fault["seconds"] >= 0.25 * step["makespan"]


def test_a_report_is_one_page_with_the_explorer_in_it(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(FILE))
    few = ["--schedules", ",".join(FEW)]
    result = answer("explain", *LINES[0], *few, "--out", "report.html")
    assert result["out"] == "report.html"
    text = (tmp_path / "report.html").read_text()
    justhtml.JustHTML(text, strict=True)
    for remedy in result["remedies"]:
        assert escape(remedy["command"]) in text
    (parts,) = re.findall(r"<h2>Parts of the step</h2>(.*?)<h2>", text, re.DOTALL)
    shares = [float(share) for share in re.findall(r">(-?[\d.]+) %<", parts)]
    assert sum(shares) == pytest.approx(100.0, abs=0.3)  # three digits of each
    (inside,) = re.findall(r'srcdoc="([^"]*)"', text)
    assert html.unescape(inside).startswith("<!doctype html>")
    assert "://" not in text.replace("http://www.w3.org/", "")


# rules of a table, and runs without backwards
def ring(workers, requests, in_flight, message=""):
    """Build forwards of which the first stage waits for the last one: a next token of a request."""
    rows = [[f"{stage}F{m}" for m in range(requests)] for stage in range(workers)]
    rules = [f"0F{m} <- {workers - 1}F{m - in_flight}{message}" for m in range(in_flight, requests)]
    grammar = pj.schedules.Grammar(rules=rules, forward_only=True)
    return pj.ScheduleTable.from_rows(rows, grammar=grammar, name="ring")


RINGS = {  # table, costs, step time, without rules, the requests in flight that bring that
    # a round of 3 takes 4: the rounds begin at 0, 4, 8, 12, the last one ends at 12 + 2 + 4; else
    # 12 + 3
    "four stages": (ring(4, 12, 3), {"forward": 1.0}, 18.0, 15.0, 4),
    # one after the other, 4 x 2; else 4 + 1
    "two stages": (ring(2, 4, 1), {"forward": 1.0}, 8.0, 5.0, 2),
    # a message on the way there: 4 x (1 + 0.5 + 1); else 4 + 0.5 + 1. Two in flight: 0F2 waits
    # for 1F0 until 2.5, 0F3 begins at 3.5 and 1F3 ends at 6
    "messages there": (ring(2, 4, 1), {"forward": 1.0, "latency": 0.5}, 10.0, 5.5, 3),
    # and one on the way back: 3 x 3 + 2.5
    "both ways": (ring(2, 4, 1, " [message]"), {"forward": 1, "latency": 0.5}, 11.5, 5.5, 3),
}


@pytest.mark.parametrize("case", RINGS)
def test_rules_of_a_ring_are_a_cause_and_more_requests_the_remedy(case):
    table, costs, step_time, without, requests = RINGS[case]
    result = pj.explain(table, pj.Costs(**costs))
    assert result.step_time == step_time
    assert (result.bottleneck.kind, result.bottleneck.seconds) == ("rules", step_time - without)
    assert "ops wait by rules of the table, as 0F" in result.bottleneck.why
    remedy = next(remedy for remedy in result.remedies if remedy.kind == "in flight")
    assert remedy.what.startswith(f"{requests} requests in flight in place of ")
    assert remedy.step_time == without
    assert sum(part.seconds for part in result.parts) == pytest.approx(step_time)
    parts = {part.name: part for part in result.parts}
    assert parts["rules"].seconds > 0
    assert not parts["gaps"].seconds
    assert not any("backward" in parts[name].meaning for name in ("start", "gaps", "end"))


def test_rules_that_cost_nothing_are_no_cause():
    """With 4 requests in flight 3F0 ends at 4, just when 0F4 may begin: 12 + 3 s as without."""
    result = pj.explain(ring(4, 12, 4), pj.Costs(forward=1.0))
    assert result.step_time == 15
    assert not result.faults
    assert not result.remedies


def test_rules_of_a_table_with_backwards_are_a_cause():
    """A rule makes a step of 9 take longer; more requests are no remedy for training."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    grammar = pj.schedules.Grammar(rules=["0F1 <- 1F0"])
    table = pj.ScheduleTable.from_rows(rows, grammar=grammar)
    result = pj.explain(table, pj.Costs(forward=1.0, backward=2.0))
    faults = {fault.kind: fault.seconds for fault in result.faults}
    assert (result.step_time, faults["rules"]) == (10, 1)
    assert "warm-up" in next(part.meaning for part in result.parts if part.name == "start")
    assert not any(remedy.kind == "in flight" for remedy in result.remedies)


def test_rules_of_kinds_of_a_tables_own_order_data_and_stay():
    table = build("vocabulary-1f1b", 2, 4)
    others = {phase.kind.time: 0.1 for phase in table.grammar.custom_phases}
    result = pj.explain(table, pj.Costs(forward=1.0, backward=2.0, others=others))
    assert "rules" not in {part.name for part in result.parts}


def test_a_prefill_is_explained_in_its_own_words():
    """Worker s is idle for s before its first forward and 3 - s after its last: 1.5 in the mean."""
    table = build("chunked-prefill", 4, 1, slices=8)
    parts = {part.name: part for part in pj.explain(table, pj.Costs(forward=1.0)).parts}
    assert [parts[name].seconds for name in ("start", "gaps", "end")] == [1.5, 0.0, 1.5]
    assert parts["start"].meaning == "warm-up bubble, with equal stages"
    assert parts["end"].meaning == "idle after its last forward"


def test_the_command_of_more_requests_writes_the_table_first(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pj.write_table(ring(4, 12, 3), tmp_path / "ring.json")
    (remedy,) = answer("explain", "--table", "ring.json", "--stage-times", "F=1")["remedies"]
    for command in remedy["command"].split(" && "):
        result = answer(*shlex.split(command)[1:])
    assert result["makespan"] == remedy["step_time"] == 15


@with_cases(
    "options",
    ["-T", "F=1,I=1,W=1"],
    ["-W", "F=1,I=1,W=1"],
    ["-C", '{"unit": "seconds", "F": 1, "I": 1, "W": 1}'],
    ["-C", "stage,F_s,I_s,W_s\n" + "\n".join(f"{k},1,1,1" for k in range(4))],
)
def test_equal_halves_that_are_given_are_no_assumption(answer, options, tmp_path):
    """Measured I and W may be equal; only halves of B that nobody measured are assumed."""
    if options[0] == "-C":
        path = tmp_path / ("costs.json" if options[1].startswith("{") else "costs.csv")
        path.write_text(options[1])
        options = ["-C", path]
    line = ["explain", "-s", "1f1b", "-P", 4, "-M", 16, "--launcher", "torchtitan"]
    line += ["--schedules", "gpipe,interleaved-1f1b,looped-bfs,interleaved-zb"]
    remedy = answer(*line, *options)["remedies"][0]
    assert remedy["what"] == "schedule interleaved-zb, stages per worker 2"
    assert remedy["launchers"] == ["torchtitan"]
    table = build("interleaved-zb", 4, 16, stages_per_worker=2)
    after = pj.evaluate(table, pj.Costs(forward=0.5, input_grad=0.5, weight_grad=0.5))
    assert remedy["step_time"] == pytest.approx(after.step_time, rel=1e-12)


def test_halves_of_a_backward_are_said(answer, tmp_path):
    """Nobody measured I and W: what rests on them says so."""
    (tmp_path / "costs.json").write_text('{"unit": "seconds", "F": 1, "B": 2}')
    for option, value in ("-T", "F=1,B=2"), ("-W", "F=1,B=2"), ("-C", tmp_path / "costs.json"):
        size = ["-P", 4, "-M", 16, option, value]
        names = [] if option == "-T" else ["--schedules", "zb-h1,interleaved-1f1b"]
        for row in answer("explain", "-s", "1f1b", *size, *names)["remedies"]:
            is_split = row["what"] == "schedule zb-h1"
            halves = "input gradient (I) and weight gradient (W) each take half of the backward (B)"
            assert (row["assumes"] == halves) == is_split
        assumes = answer("evaluate", "-s", "zb-h1", *size)["assumes"]
        assert assumes.startswith("input gradient (I) and weight")
        assert "assumes" not in answer("evaluate", "-s", "1f1b", *size)


@with_cases("size option launcher", *read_cases("test_the_memory_of_now_says_what_it_rules_out"))
def test_the_memory_of_now_says_what_it_rules_out(answer, answer_and_text, size, option, launcher):
    fields = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    pairs = (part.split("=") for part in option.split(","))
    times = {fields[letter]: float(value) for letter, value in pairs}
    line = ["explain", "-s", "1f1b", "-P", size[0], "-M", size[1], "-T", option]
    line += ["--launcher", launcher] if launcher else []
    result, text = answer_and_text(*line)
    assert result["memory"]["limit"] is None
    assert result["bottleneck"]["kind"] != "memory"
    (fault,) = (fault for fault in result["faults"] if fault["kind"] == "memory")
    words = (
        r"(.*) \(an option of (.*)\) would save .* % of the step.*, but needs (.*) times the memory "
        r"of now \(--memory-limit (.*) allows it\)"
    )
    what, names, ratio, limit = re.match(words, fault["why"]).groups()
    assert launcher in (None, names)
    text = " ".join(text.split())
    saved = f"would save {seconds(fault['seconds'])},"
    assert f"also: {fault['why'].replace('would save', saved)}" in text
    # the limit admits it, as an option of the launcher
    admitted = answer(*line, "--memory-limit", limit)["remedies"]
    (remedy,) = (row for row in admitted if row["what"] == what)
    assert remedy["launchers"] if launcher is None else remedy["launchers"] == [launcher]
    assert remedy["memory"] == pytest.approx(float(ratio), rel=5e-3)
    table = build("1f1b", size[0], size[1])
    name, _, options = what.removeprefix("schedule ").partition(", stages per worker ")
    other = build(name, size[0], size[1], stages_per_worker=int(options))
    stages = int(options)
    before = pj.evaluate(table, pj.Costs(**times))
    after = pj.evaluate(other, pj.Costs(**{k: time / stages for k, time in times.items()}))
    assert remedy["saves"] == pytest.approx(before.step_time - after.step_time, rel=1e-9)
    assert fault["seconds"] == pytest.approx(remedy["saves"], rel=1e-9)  # nothing else fits
    ratio_of_peaks = max(after.peak_in_flight) / stages / max(before.peak_in_flight)
    assert remedy["memory"] == pytest.approx(ratio_of_peaks, rel=1e-9)


@with_cases(
    "size link slow_stage long is_hidden",
    *read_cases("test_causes_that_hide_each_other_are_named_with_the_saving_of_both"),
)
def test_causes_that_hide_each_other_are_named_with_the_saving_of_both(
    answer_and_text, tmp_path, size, link, slow_stage, long, is_hidden
):
    workers, microbatches = size
    forward, transmit = np.full(workers, 21.0), np.full(workers - 1, 0.9)
    forward[slow_stage] *= 1.17
    slow = {"F": forward, "X": transmit.copy()}
    slow["X"][workers // 2 - 1] *= long
    table = build("1f1b", workers, microbatches)

    def step(stages, messages):
        costs = pj.Costs(forward=stages, backward=2 * stages, transmit=messages)
        return pj.evaluate(table, costs, link=link).step_time

    normal = np.full(workers, 21.0)
    begin = step(slow["F"], slow["X"])
    repaired = (normal, transmit), (normal, slow["X"]), (slow["F"], transmit)
    both, stage, message = (begin - step(*times) for times in repaired)
    assert (both > 1.2 * (stage + message) + 0.01 * begin) == is_hidden
    path = tmp_path / "costs.json"
    times = {"unit": "seconds", "F": slow["F"].tolist(), "B": (2 * slow["F"]).tolist()}
    path.write_text(json.dumps(times | {"message": {"latency": 0, "transmit": slow["X"].tolist()}}))
    line = ("explain", "-s", "1f1b", "-P", workers, "-M", microbatches, "-C", path, "--link", link)
    result, text = answer_and_text(*line)
    joint = [fault for fault in result["faults"] if fault["kind"] == "joint"]
    assert bool(joint) == is_hidden
    first = result["bottleneck"]
    if first["kind"] == "schedule":  # start and end save more than the two together
        assert first["seconds"] > both
    else:
        assert first["kind"] in ("link", "imbalance")
    text = " ".join(text.split())
    if not joint:
        assert "hide each other" not in text
        return
    assert joint[0]["seconds"] == pytest.approx(both, rel=1e-6)
    shares = [f"{100 * seconds / begin:.3g} %" for seconds in (both, stage, message)]
    pair = f"workers {workers // 2 - 1} and {workers // 2}"
    words = f"also: stage {slow_stage} and the link between {pair}"
    assert words in text
    without = "hide each other, without both the step is {} shorter, without the first {}, "
    assert (without + "without the second {}; ").format(*shares) in text


@with_cases(
    "model schedule size fields is_slow",
    *read_cases("test_a_host_that_starts_kernels_late_is_a_cause"),
)
def test_a_host_that_starts_kernels_late_is_a_cause(model, schedule, size, fields, is_slow):
    system = pj.load_system("h100")
    table = build(schedule, size[0], size[1])
    short = dataclasses.replace(pj.load_model(model), sequence=1024)
    model = pj.load_model(model) if model == "llama3-70b" else short
    workload = pj.Workload(model, size[1], **fields)
    result = pj.explain(table, workload, system=system, schedules=["1f1b"])
    hosts = [fault for fault in result.faults if fault.kind == "host"]
    assert bool(hosts) == is_slow
    # the same run beside a host that starts kernels in no time
    quick = dict.fromkeys(("launch", "collective", "layer", "microbatch"), 0.0)
    system = dataclasses.replace(system, host=dataclasses.replace(system.host, **quick))
    step = pj.evaluate(table, pj.stage_costs(workload, system, table)).step_time
    saved = result.step_time - step
    assert (saved > 0.01 * result.step_time) == is_slow
    if is_slow:
        assert hosts[0].seconds == pytest.approx(saved, rel=1e-6)
        assert hosts == sorted(result.faults, key=lambda fault: -fault.seconds)[:1]
        assert "CUDA graphs" in hosts[0].why


@with_cases(
    "model system workers fields",
    *read_cases("test_less_recomputation_is_tried_with_settings_that_save_memory"),
)
def test_less_recomputation_is_tried_with_settings_that_save_memory(model, system, workers, fields):
    table = build("1f1b", workers, 32)
    system = pj.load_system(system)
    workload = pj.Workload(pj.load_model(model), recompute="full", **fields)
    result = pj.explain(table, workload, system=system, schedules=["1f1b"])
    zeros = (0, 1, 2, 3) if workload.data_parallel > 1 else (0,)
    seconds = []
    for recompute, sequence, zero in itertools.product(("none", "selective"), (False, True), zeros):
        changes = {"recompute": recompute, "sequence_parallel": sequence, "zero": zero}
        other = dataclasses.replace(workload, **changes)
        if np.all(pj.memory_bytes(other, table) <= result.memory.limit):
            seconds.append(pj.evaluate(table, pj.stage_costs(other, system, table)).step_time)
    remedy = next(r for r in result.remedies if r.what.startswith("recomputation"))
    assert " with " in remedy.what
    assert remedy.step_time == pytest.approx(min(seconds), rel=2e-3)
    assert result.bottleneck.kind == "recompute"
    assert remedy.what in result.bottleneck.why


@with_cases("forward text", *read_cases("test_all_workers_of_the_largest_load_are_named"))
def test_all_workers_of_the_largest_load_are_named(forward, text):
    table = build("1f1b", len(forward), 16)
    costs = pj.Costs(forward=forward, backward=forward)
    result = pj.explain(table, costs, schedules=["1f1b"])
    assert f"uneven: {text} as long as the mean worker" in result.bottleneck.why


# start and end of the pipeline among other causes
@with_cases("exchange names first", *read_cases("test_start_and_end_that_save_most_come_first"))
def test_start_and_end_that_save_most_come_first(answer_and_text, tmp_path, exchange, names, first):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"unit": "seconds", "F": 1, "I": 1, "W": 1, "A": exchange}))
    line = ("explain", "-s", "1f1b", "-P", 4, "-M", 8, "-C", path, "--schedules", ",".join(names))
    result, text = answer_and_text(*line)
    lines, step = text.splitlines(), 33 + exchange
    assert result["step_time"] == pytest.approx(step)
    cause = result["bottleneck"]
    assert (cause["kind"], cause["seconds"]) == (first[0], pytest.approx(first[1]))
    share = f"start and end of the pipeline take {100 * 9 / step:.3g} % of the step"
    if first[0] == "schedule":
        assert cause["why"] == f"{share}, and schedule zb-h1 would save {100 * 6 / step:.3g} %"
        assert lines[0].endswith(cause["why"])
    elif names == ["1f1b"]:
        text = f"start and end of the pipeline take 9 s ({100 * 9 / step:.3g} % of the step)"
        assert f"also: {text}; no schedule that fits makes the step shorter" in lines
    else:
        half = f"{exchange / 2:.3g} s ({100 * exchange / 2 / step:.3g} % of the step)"
        what = "exchange of gradients twice as fast"
        text = f"the first remedy does not shorten this cause; {what} does, and saves {half}"
        assert text in lines


@with_cases("line", *read_cases("runs with several causes"))
def test_the_text_has_causes_of_the_json_in_their_order_and_each_share_once(answer_and_text, line):
    line = ("explain", *line.split(), "--schedules", "1f1b,interleaved-1f1b,zb-h1")
    result, text = answer_and_text(*line)
    lines = text.splitlines()
    whys = [fault["why"].partition("; ")[0] for fault in result["faults"]]
    first, *others = (text for text in lines if text.startswith((lines[0], "also: ")))
    if result["bottleneck"] in result["faults"]:
        assert result["faults"][0] == result["bottleneck"]
        assert whys[0] in first
    ranks = [k for text in others for k, why in enumerate(whys) if text.startswith(f"also: {why}")]
    assert ranks == sorted(ranks)
    shares = re.findall(r"([\d.]+) %", first)
    assert len(shares) == len({*shares})
    # the parts of the sentence are those of the details
    parts = {part["name"]: part["seconds"] for part in result["parts"]}
    part = r"(start[a-z, ]*) of the pipeline take (?:[^(\n]*\()?([\d.e+]+) % of the step"
    sentences = re.findall(part, "\n".join(lines))
    for names, share in sentences:
        total = sum(parts[name] for name in re.split(", | and ", names))
        assert float(share) == pytest.approx(100 * total / result["step_time"], rel=6e-3)


def with_less_in_flight(workers, microbatches, limits):
    """Return the order of 1F1B with fewer microbatches in flight on each worker."""
    rows = []
    for worker, limit in enumerate(limits):
        row = [f"{worker}F{m}" for m in range(limit)]
        for m in range(microbatches):
            following = [f"{worker}F{m + limit}"] if m + limit < microbatches else []
            row += [f"{worker}B{m}", *following]
        rows.append(row)
    return pj.ScheduleTable.from_rows(rows, name="few in flight")


@with_cases(
    "workers microbatches limits",
    *read_cases("test_gaps_of_an_order_come_first_and_a_built_in_order_fills_them"),
)
def test_gaps_of_an_order_come_first_and_a_built_in_order_fills_them(
    answer, answer_and_text, tmp_path, workers, microbatches, limits
):
    table = with_less_in_flight(workers, microbatches, limits)
    forward = np.ones(workers)
    forward[1] = 1.1
    path, costs = tmp_path / "few.csv", tmp_path / "costs.json"
    pj.write_table(table, path)
    times = {"unit": "seconds", "F": forward.tolist(), "B": (2 * forward).tolist()}
    costs.write_text(json.dumps(times))
    line = ("explain", "-t", path, "-C", costs)
    result, text = answer_and_text(*line, "--details")
    lines = text.splitlines()
    times = pj.Costs(forward=forward, backward=2 * forward)
    usual = build("1f1b", workers, microbatches)
    before, after = (pj.evaluate(t, times).step_time for t in (table, usual))
    gaps = next(part["seconds"] for part in result["parts"] if part["name"] == "gaps")
    cause, remedy = result["bottleneck"], result["remedies"][0]
    assert (cause["kind"], cause["seconds"]) == ("gaps", min(gaps, remedy["saves"]))
    assert cause == result["faults"][0]
    assert remedy["what"] == "schedule 1f1b"
    assert remedy["saves"] == pytest.approx(before - after, rel=1e-12)
    assert remedy["memory"] == workers / limits[0]
    text = f"the order of ops leaves gaps between first backwards and last forwards, which costs {seconds(cause['seconds'])}"
    assert text in lines[0]
    saved, more = "schedule 1f1b: saves ", f" with {workers / limits[0]:.3g} times the memory; "
    assert any(text.startswith(saved) and more in text for text in lines)
    # under a limit only orders that fit count
    limited = answer(*line, "--memory-limit", limits[0])
    assert all(remedy["fits"] for remedy in limited["remedies"])


def test_a_launcher_is_not_blamed_for_recomputation_that_it_cannot_change():
    """DeepSpeed has no selective recomputation, MaxText's is full; Megatron-LM has both."""
    a100, h200 = pj.load_system("a100"), pj.load_system("h200")
    many = {"minibatch": 32, "recompute": "full", "data_parallel": 4, "zero": 1}
    for launcher, name, system, schedule in (
        ("DeepSpeed", "gpt-22b", a100, "1f1b"),
        ("MaxText", "llama3-8b", h200, "gpipe"),
        ("Megatron-LM", "gpt-22b", a100, "1f1b"),
        ("torchtitan", "llama3-8b", h200, "1f1b"),
    ):
        workload = pj.Workload(pj.load_model(name), **many)
        table = build(schedule, 4, 32)
        how = {"system": system, "schedules": ["1f1b"], "launcher": launcher}
        result = pj.explain(table, workload, **how)
        can_change = False
        for recompute, zero in itertools.product(("none", "selective"), (1, 2, 3)):
            other = dataclasses.replace(workload, recompute=recompute, zero=zero)
            lacks = pj.costing.launches(other, table, launcher)[0].lacks
            fits = pj.memory_bytes(other, table).max() <= result.memory.limit
            can_change |= bool(fits and not lacks)
        assert any(fault.kind == "recompute" for fault in result.faults) == can_change


@with_cases(
    "schedule stage factor", *read_cases("test_a_slow_stage_has_one_number_as_cause_and_as_repair")
)
def test_a_slow_stage_has_one_number_as_cause_and_as_repair(schedule, stage, factor):
    """It costs what the step is longer than with this stage at the median of the others."""
    table = built(*schedule)
    rng = np.random.default_rng(stage)
    forward = rng.uniform(0.98, 1.02, table.num_stages)
    forward[stage] *= factor

    def step(times):
        costs = pj.Costs(forward=times, input_grad=1.1 * times, weight_grad=0.9 * times)
        return costs, pj.evaluate(table, costs).step_time

    repaired = forward.copy()
    repaired[stage] = np.median(np.delete(forward, stage))
    costs, before = step(forward)
    result = pj.explain(table, costs, schedules=["1f1b"])
    (cause,) = (fault for fault in result.faults if fault.kind == "imbalance")
    (remedy,) = (remedy for remedy in result.remedies if remedy.kind == "repair")
    assert cause.stage == stage
    assert cause.seconds == remedy.saves == pytest.approx(before - step(repaired)[1], rel=1e-9)


@pytest.mark.parametrize(("workers", "count"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)])
def test_reports_count_single_things_in_the_singular(call, workers, count):
    run = ("-s", "1f1b", "-P", workers, "-M", count, "-W", "F=1ms,B=2ms")
    for command in "evaluate", "explain":
        text = call(command, *run)[1]
        numbers = {"worker": workers, "stage": workers, "microbatch": count}
        for noun, number in numbers.items():
            ending = ("es" if noun == "microbatch" else "s") if number > 1 else ""
            assert f"{number} {noun}{ending}" in text
        assert not re.search(r"(?<![\d.])1 (workers|stages|microbatche)|microbatche\b", text)


@with_cases("options place", *read_cases("test_a_slow_worker_of_a_single_stage_has_no_stages"))
def test_a_slow_worker_of_a_single_stage_has_no_stages(call, options, place):
    worker = options[3] - 1
    slow = ("--stragglers", f"{worker}=1.5", "-W", "F=1ms,B=2ms", "-M", 8)
    text = " ".join(call("explain", *options, *slow, "--details")[1].split())
    assert f"{place} takes 1.5 times" in text


@with_cases("schedule options", *read_cases("test_a_table_with_the_rows_of_a_schedule_says_so"))
def test_a_table_with_the_rows_of_a_schedule_says_so(call, tmp_path, schedule, options):
    table = tmp_path / "mine.csv"
    export = ("export", "-s", schedule, "-P", 4, "-M", 8, *options, "-f", "torch-csv", "-o", table)
    assert call(*export)[0] == 0
    times = ("-T", "F=1ms,I=1ms,W=1ms", "-c", "0.1ms", "--schedules", "1f1b")
    second = call("explain", "-t", table, *times)[1].splitlines()[1]
    assert f"(same rows as {schedule})" in second
    table.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    assert "same rows" not in call("explain", "-t", table, *times)[1].splitlines()[1]


# F 1 s, I 1 s, W 1 s: of 3 x 64 + 9 + 4 = 205 s, start and end take 9 s under 1f1b, and the exchange
# 4 s. With V stages per worker both take a V-th, as only the last exchange is waited for; under
# zb-h1, start and end take 9 - 6 s. torchtitan has V = 2 without names of modules.
@with_cases("launcher name schedule saves", *read_cases("schedules that shorten ends"))
def test_the_schedule_that_shortens_ends_is_named(call, tmp_path, launcher, name, schedule, saves):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"unit": "seconds", "F": 1, "I": 1, "W": 1, "A": 4}))
    line = ["explain", "-s", "1f1b", "-P", 4, "-M", 64, "-C", path, "--schedules", name]
    line += ["--memory-limit", 20, *([] if launcher is None else ["--launcher", launcher])]
    text = call(*line)[1]
    end = f"no schedule{schedule} that fits makes the step shorter"
    if saves is not None:
        end = f"schedule {schedule} saves {saves:.3g} s ({100 * saves / 205:.3g} % of the step)"
    assert f"also: start and end of the pipeline take 9 s (4.39 % of the step); {end}\n" in text


@pytest.mark.parametrize(("limit", "more"), [("4", " and no more memory"), ("20", None)])
def test_no_change_helps_only_within_the_memory(call, limit, more):
    """Two stages per worker save half of start and end, but hold 4 + 3 / 2 activations."""
    line = ("explain", "-s", "1f1b", "-P", 4, "-M", 8, "-T", "F=1,B=2", "--memory-limit", limit)
    text = call(*line, "--schedules", "interleaved-1f1b")[1]
    nothing = f"no change with the same number of workers{more} makes the step shorter\n"
    assert (nothing in text) == (more is not None)
    assert ("times the memory of now" in text) == (more is not None)


@with_cases("stage factor", (1, 1.7), (2, 1.7), (4, 1.5), (6, 1.7), (7, 2.0), (8, 1.7))
def test_a_slow_stage_is_a_cause_where_an_even_split_would_help_less(data, stage, factor):
    # an order of 5 workers with 10 stages in a V that leaves gaps; both ends are long, too
    table = pj.read_table(data / "gaps.csv")
    forward = np.array([7.5, *[6.0] * 8, 8.0])
    backward = np.array([13.0, *[11.0] * 8, 15.0])

    def costs(factors):
        return pj.Costs(forward=factors * forward, backward=factors * backward, latency=0.8)

    slow = costs(np.where(np.arange(10) == stage, factor, 1.0))
    causes = pj.explain(table, slow, schedules=["1f1b"]).faults
    (cause,) = (fault for fault in causes if fault.kind == "imbalance")
    saved = pj.evaluate(table, slow).step_time - pj.evaluate(table, costs(np.ones(10))).step_time
    assert (cause.stage, cause.seconds) == (stage, pytest.approx(saved))


@with_cases(
    "base names limit ruled_out fitting",
    *read_cases("test_memory_costs_only_what_nothing_that_fits_saves"),
)
def test_memory_costs_only_what_nothing_that_fits_saves(base, names, limit, ruled_out, fitting):
    def step_time(name, stages):
        more = {"stages_per_worker": stages} if name == "looped-bfs" else {}
        part = 4 / (build(name, 4, 8, **more).num_stages)
        phases = ("forward", "input_grad", "weight_grad")
        costs = pj.Costs(**dict.fromkeys(phases, part), transmit=0.01)
        return pj.evaluate(build(name, 4, 8, **more), costs).step_time

    table = build(base, 4, 8)
    costs = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, transmit=0.01)
    result = pj.explain(table, costs, schedules=names, memory_limit=limit)
    faults = [fault for fault in result.faults if fault.kind == "memory"]
    if ruled_out is None:
        assert not faults
        assert step_time(fitting, 2) < min(step_time(name, 4) for name in names if name != fitting)
        return
    name, stages, needs = ruled_out
    assert re.search(rf"schedule {name}.* \({needs}\) would save .*, but needs ", faults[0].why)
    saved = step_time(base, 1) - step_time(name, stages)
    assert faults[0].seconds == pytest.approx(saved, rel=1e-9)


def test_memory_rules_out_no_schedule_that_saves_less_than_another_option():
    # eight stages per worker need 2 % more than the limit; moved layers and overlap fit
    model, system = pj.load_model("llama3-8b"), pj.load_system("h100")
    workload = pj.Workload(model, 16, tensor_parallel=2, sequence_parallel=True)
    table = build("1f1b", 4, 16)
    limit = 1.001 * max(pj.memory_bytes(workload, table))
    how = {"schedules": ["interleaved-1f1b"], "launcher": "Megatron-LM", "memory_limit": limit}
    result = pj.explain(table, workload, system=system, **how)
    other = build("interleaved-1f1b", 4, 16, stages_per_worker=8)
    assert max(pj.memory_bytes(workload, other)) > limit
    ruled_out = pj.evaluate(other, pj.stage_costs(workload, system, other)).step_time
    overlapped = dataclasses.replace(workload, tensor_overlap=1.0)
    fitting = with_stage_layers(overlapped, (8, 9, 9, 6))
    step = pj.evaluate(table, pj.stage_costs(fitting, system, table)).step_time
    assert step < ruled_out < 0.9 * result.step_time
    assert max(pj.memory_bytes(fitting, table)) <= limit
    assert not any(fault.kind == "memory" for fault in result.faults)


@with_cases("launcher schedule precision fields", *read_cases("test_remedies_fit_as_plans_do"))
def test_remedies_fit_as_plans_do(answer, answer_and_text, launcher, schedule, precision, fields):
    available, factors = float(pj.load_system("h100").memory_available), []
    if launcher == "torchtitan":
        rows = pj.validate(pj.files.DATA / "measured" / "torchtitan_h100.csv")
        ratios = rows.measured.memory_bytes / rows.predicted.memory_bytes
        factors = ratios[rows.measured.precision == precision]
        factors = sorted(factors[np.isfinite(factors)])
    name, stages = schedule
    line = ["explain", "-s", name, "-P", 8, "-M", 16, "-m", "llama3-70b", "-y", "h100"]
    line += ["--minibatch", 16, "--data-parallel", 16, "--zero", 1, "--precision", precision]
    line += ["-V", stages] if stages > 1 else []
    line += ["--launcher", launcher] if launcher else []
    for field, value in fields.items():
        line += ["--" + field.replace("_", "-"), value]
    result, text = answer_and_text(*line)
    text = " ".join(text.split())
    need = max(result["memory"]["needs"])
    sure = min(0.9 * available, available / max(factors, default=1.0))
    limit = max(sure, need) if need <= available else sure
    assert result["memory"]["limit"] == pytest.approx(limit, rel=2e-4)
    assert result["memory"]["fits"] == (need <= available)
    for remedy in (row for row in result["remedies"] if row["shelf"] != "hardware"):
        again = answer(*shlex.split(remedy["command"])[1:])
        assert max(again["memory_bytes"]) <= limit * (1 + 2e-4)
    in_doubt = need <= available < need * max(factors, default=0.0)
    words = "measured runs of torchtitan needed 1.04 to 1.1 times as much"
    assert (f"this run fits by {100 * (1 - need / available):.3g} %; {words}" in text) == in_doubt
    if need > available:
        assert f"needs {need / 1e9:.1f} GB of {available / 1e9:.1f} GB" in text


LEVELS = ("none", "selective", "full", "layernorm", "mlp", "moe", "moe_act", "half_products")
SIZED = [  # launcher, model, system, fields; most do not fit without recomputation
    ("Megatron-Bridge", "qwen3-235b-a22b", "gb200", THIN),
    ("Megatron-LM", "mixtral-8x7b", "h100", {"expert_parallel": 8, "data_parallel": 8}),
    ("Megatron-LM", "gpt3-175b", "h100", SPLIT | {"data_parallel": 16, "zero": 1}),
    ("torchtitan", "llama3-8b", "h100", {"data_parallel": 8, "zero": 1}),
]


def interleaved(workload, system, microbatches):
    """Return a modelled run of two stages on each of four workers."""
    how = {"options": {"stages_per_worker": 2}, "costs": pj.costing.ModelCosts(workload, system)}
    return pj.Scenario("interleaved-1f1b", 4, microbatches, **how)


def fastest_level(launcher, workload, system, table, limit):
    """The fastest recomputation that the launcher has and that fits, of all that there are."""
    steps = {}
    for level in (*LEVELS, *(f"block:{count}" for count in range(1, 24))):
        try:
            other = dataclasses.replace(workload, recompute=level)
            (launch,) = pj.costing.launches(other, table, launcher)
        except ValueError:  # the model has no such part
            continue
        if not launch.lacks and max(pj.memory_bytes(other, table)) <= limit:
            steps[level] = pj.evaluate(table, pj.stage_costs(other, system, table)).step_time
    return min(steps.items(), key=lambda item: item[1], default=(None, None))


@pytest.mark.parametrize("case", SIZED, ids=lambda case: case[0])
@pytest.mark.parametrize("doubled", [False, True])
def test_no_recomputation_of_the_launcher_that_fits_is_faster(case, doubled):
    launcher, model, name, fields = case
    system = pj.load_system(name)
    workload = pj.Workload(pj.load_model(model), minibatch=32, **fields)
    table = build("interleaved-1f1b", 4, 16, stages_per_worker=2)
    start = interleaved(workload, system, 16 * (1 + doubled))
    result = pj.explain(start, launcher=launcher, schedules=["interleaved-1f1b"])
    limit = result.memory.limit
    level, step = fastest_level(launcher, workload, system, table, limit)
    rows = {row.what: row.step_time for row in result.remedies if row.shelf == "launcher"}
    name = f"recomputation {level}"
    if doubled:
        name = f"2 times the microbatch size (16 microbatches) with {name}"
    if doubled and step > result.step_time and result.memory.fits(result.memory.begin):
        assert name not in rows
        return
    assert rows[name] == pytest.approx(step, rel=1e-12)
    remedy = next(row for row in result.remedies if row.what == name)
    assert remedy.fits == (remedy.memory * result.memory.begin_needs.max() <= limit)


def test_a_remedy_against_a_slow_host_shortens_the_time_that_the_host_takes():
    system = pj.load_system("gb200")
    slow = system.host
    quick = dict.fromkeys(("launch", "collective", "layer", "microbatch"), 0.0)
    quick = dataclasses.replace(system, host=dataclasses.replace(slow, **quick))
    model = pj.load_model("qwen3-235b-a22b")
    start = interleaved(pj.Workload(model, minibatch=16, **THIN), system, 16)
    names = ["interleaved-1f1b", "combined-1f1b"]
    result = pj.explain(start, launcher="Megatron-Bridge", schedules=names)
    assert result.bottleneck.kind == "host"

    def host_seconds(scenario):
        source = dataclasses.replace(scenario.source, system=quick)
        return scenario.evaluate().step_time - scenario.replace(costs=source).evaluate().step_time

    now = host_seconds(result.memory.begin.scenario)
    assert result.bottleneck.seconds == pytest.approx(now, rel=1e-9)
    verdicts = {
        shortens(row, result): host_seconds(row.scenario) < 0.9 * now
        for row in result.remedies
        if row.kind in ("schedule", "microbatches")
    }
    assert verdicts == {True: True, False: False}  # larger microbatches, and combined-1f1b


@with_cases(
    "base slow", *read_cases("test_a_slow_link_stays_between_its_workers_in_other_schedules")
)
def test_a_slow_link_stays_between_its_workers_in_other_schedules(base, slow):
    more = {"stages_per_worker": 2} if base == "interleaved-1f1b" else {}
    table = build(base, 4, 12, **more)

    def message_times(place):
        pairs = itertools.pairwise(place.tolist())
        times = [0.0 if a == b else 1.2 if {a, b} == {*slow} else 0.1 for a, b in pairs]
        return np.array(times)

    stage = 4 / table.num_stages
    phases = dict.fromkeys(("forward", "input_grad", "weight_grad"), stage)
    costs = pj.Costs(**phases, transmit=message_times(table.placement[0]))
    names = ["1f1b", "zb-v", "v-half", "dualpipe-v"]
    names += ["interleaved-1f1b", "looped-bfs"] if base in ("1f1b", "interleaved-1f1b") else []
    run = first_candidate(pj.Scenario(table, costs=costs))
    assert [fault.link for fault in run.faults if fault.kind == "link"] == [tuple(slow)]
    others = [other for other in schedules(run, names) if other.table.num_stages <= 8]
    assert len(others) >= 3
    for other in others:
        stage = 4 / other.table.num_stages
        phases = dict.fromkeys(("forward", "input_grad", "weight_grad"), stage)
        alike = pj.Costs(**phases, transmit=message_times(other.table.placement[0]))
        step = pj.evaluate(other.table, alike).step_time
        assert other.step_time == pytest.approx(step, rel=1e-9), other.what


@pytest.mark.parametrize(("recompute", "stages"), [("full", 2), ("full", 1), ("selective", 2)])
def test_a_combined_remedy_names_one_recomputation_that_of_its_command(answer, recompute, stages):
    line = ["-P", 8, "-M", 16, "-m", "gpt3-175b", "-y", "h200", "--minibatch", 16]
    line += ["-s", "interleaved-1f1b", "-V", stages] if stages > 1 else ["-s", "1f1b"]
    line += ["--tensor-parallel", 4, "--sequence-parallel", "--recompute", recompute]
    line += ["--data-parallel", 4, "--zero", 1, "--precision", "fp8", "--launcher", "Megatron-LM"]
    rows = answer("explain", *line, "--schedules", "interleaved-1f1b")["remedies"]
    combined = [row for row in rows if row["kind"] == "combined"]
    assert combined
    for row in combined:
        names = re.findall(r"recomputation ([\w:+]+)", row["what"])
        words = shlex.split(row["command"])
        used = words[words.index("--recompute") + 1] if "--recompute" in words else "none"
        assert names == [used] or (used == recompute and not names)
