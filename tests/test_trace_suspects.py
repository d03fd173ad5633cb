"""Suspects of a measured run: one fault at a time is named, and nothing in healthy runs."""

import dataclasses
import json

import faulty_runs
import numpy as np
import pytest
import trace_truth as truth
from daily import daily, read_cases, with_cases
from test_trace_faults import Case, simulate

import pipejax as pj

SEEDS = 2  # of ten tables


@pytest.mark.parametrize("kind", daily([None, *faulty_runs.KINDS]))
def test_a_fault_is_named_in_20_of_20_runs_and_nothing_else(kind):
    runs = 0
    for table in faulty_runs.tables():
        for seed in range(SEEDS):
            trace, name = faulty_runs.run(table, kind, seed)
            suspects = faulty_runs.find_suspects(trace)
            first = {}
            for suspect in suspects:
                first.setdefault(suspect.kind, suspect.name)
            # of one stage a worker, a slow stage is a slow worker
            alike = {"worker", "stage"} if kind in ("worker", "stage") else {kind}
            assert first.get(kind) == (None if kind is None else name), (table.name, seed)
            assert set(first) <= alike, (table.name, seed, suspects)
            runs += 1
    assert runs == 20


def test_what_is_said_of_a_slow_stage_and_of_a_clock():
    table = next(faulty_runs.tables())
    trace, _ = faulty_runs.run(table, None, 0)
    slow = trace.stage == 1
    later = dataclasses.replace(trace, start=trace.start + 2.0 * slow, end=trace.end + 2.0 * slow)
    (clock,) = faulty_runs.find_suspects(later)
    assert (clock.kind, clock.name) == ("clock", "1")
    assert clock.seconds == pytest.approx(2.0, abs=0.05)
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    cost = np.array([1, 1, 1, 1.3, 1, 1, 1, 1])
    run = pj.evaluate(table, pj.Costs(forward=cost, backward=2 * cost))
    (stage,) = faulty_runs.find_suspects(pj.traces.record_runs([run] * 2))
    assert (stage.kind, stage.name, stage.why) == ("stage", "3", "takes 1.3 times the other stages")
    assert stage.seconds == pytest.approx(0.3 * 3 * 8)  # eight microbatches in a step
    assert stage.ratio == pytest.approx(1.3)


@pytest.mark.parametrize(("workers", "replicas"), [(2, 3), (4, 2), (4, 8)])
def test_a_stage_that_is_slow_in_all_replicas_is_no_slow_worker(workers, replicas):
    # other machines hold it in each replica, and all of them cannot be slow
    table = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=8)
    factor = np.ones(workers)
    factor[1] = 1.5
    slow = pj.evaluate(table, pj.Costs(forward=factor, backward=2 * factor))
    result = faulty_runs.find_suspects(pj.traces.record_runs([slow] * replicas, replicas=replicas))
    assert [(suspect.kind, suspect.name) for suspect in result] == [("stage", "1")]


@with_cases("schedule letter stage microbatch worker", *read_cases("slow ops of odd steps"))
def test_an_odd_step_names_the_op_that_took_its_time(schedule, letter, stage, microbatch, worker):
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=8)
    fields = {"F": "forward", "B": "backward", "W": "weight_grad"}
    times = {"forward": 1.0, "backward": 2.0}
    if letter == "W":
        times = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
    usual = pj.evaluate(table, pj.Costs(**times))
    name = fields[letter]
    slow = np.full((table.num_stages, 8), times[name])
    slow[stage, microbatch] += 20
    late = pj.evaluate(table, pj.Costs(**times | {name: slow}))
    (suspect,) = faulty_runs.find_suspects(pj.traces.record_runs([usual] * 3 + [late] + [usual]))
    assert (suspect.kind, suspect.name) == ("step", "3")
    assert suspect.seconds == pytest.approx(late.makespan - usual.makespan)
    words = f"; {stage}{letter}{microbatch} on worker {worker} took 20 s longer than usual"
    assert suspect.why.endswith(words)
    # a step that is slow everywhere has no such op
    wide = pj.evaluate(table, pj.Costs(**{key: 2 * value for key, value in times.items()}))
    (suspect,) = faulty_runs.find_suspects(pj.traces.record_runs([usual] * 3 + [wide] + [usual]))
    assert suspect.why.endswith("times the median step")


def test_an_interrupted_op_makes_nobody_slow():
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    forward = np.ones((2, 4))
    forward[1, 2] = 1.6
    long = pj.evaluate(table, pj.Costs(forward=forward, backward=2.0))
    usual = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
    assert not faulty_runs.find_suspects(pj.traces.record_runs([usual, usual, long, usual]))


def test_fused_pairs_make_nobody_slow():
    """Each op of a pair has the time it takes alone: microbatches and stages differ in pairs."""
    table = pj.schedules.build("dualpipe-v", num_workers=2, num_microbatches=8)
    for pair in (1.0, 1.3, 1.6):  # as if both ran at once, or one behind the other
        costs = pj.Costs(forward=0.6, input_grad=0.6, weight_grad=0.4, pair=pair, transmit=0.3)
        trace = pj.traces.record_runs([pj.evaluate(table, costs)] * 2)
        assert not faulty_runs.find_suspects(trace), pair


@pytest.mark.parametrize("kind", ["stage", "microbatch"])
def test_what_is_slow_in_fused_pairs_is_named(kind):
    table = pj.schedules.build("dualpipe-v", num_workers=4, num_microbatches=16)
    for slow in (1, 4, 6):
        factor = np.ones((8, 16))
        factor[(slow, slice(None)) if kind == "stage" else (slice(None), slow)] = 1.3
        parts = {"input_grad": 0.6 * factor, "weight_grad": 0.4 * factor}
        run = pj.evaluate(table, pj.Costs(forward=0.6 * factor, **parts))
        result = faulty_runs.find_suspects(pj.traces.record_runs([run] * 2))
        assert [(suspect.kind, suspect.name) for suspect in result] == [(kind, str(slow))]


def test_one_pipeline_of_one_stage_has_nobody_beside():
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=1)
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
    assert not faulty_runs.find_suspects(pj.traces.record_runs([run]))


def test_pytorchs_posting_is_among_the_link_models():
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    links = pj.Links("rendezvous", "pair", posting="program")
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.5), link=links)
    replayed = pj.traces.replay(pj.traces.find_pipelines(pj.traces.record_runs([run])))
    assert replayed.fits["rendezvous pair posting program"] == pytest.approx(0, abs=1e-9)


def test_the_command_names_suspects(answer_and_text, tmp_path):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    cost = np.array([1.0, 1.0, 1.3, 1.0])
    run = pj.evaluate(table, pj.Costs(forward=cost, backward=2 * cost))
    trace = pj.traces.record_runs([run] * 2)
    truth.write_trace(tmp_path / "run.csv", trace)
    result, text = answer_and_text("trace", tmp_path / "run.csv", "--schedules", "gpipe")
    assert text.startswith("straggler: worker 2 (stage 2) takes 1.3 times the others; it costs")
    named = result["suspects"]
    places = [(suspect["kind"], suspect["name"]) for suspect in named]
    assert places == [("worker", "2"), ("stage", "2")]
    assert {*named[0]} == {"kind", "name", "seconds", "ratio", "z", "why", "place"}


@with_cases("replicas slow_replicas layers kind words", *read_cases("readings of a slow place"))
def test_remedies_read_a_slow_place_as_the_first_line_does(
    replicas, slow_replicas, layers, kind, words, tmp_path, answer_and_text
):
    """With a stage on each worker, a slow stage looks like a slow machine."""
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    factors = [np.ones(4) for _ in range(replicas)]
    for factor in factors[:slow_replicas]:
        factor[2] = 1.4
    names = ["forward", "input_grad", "weight_grad"]
    runs = [pj.evaluate(table, pj.Costs(**dict.fromkeys(names, factor))) for factor in factors]
    truth.write_trace(tmp_path / "run.csv", pj.traces.record_runs(runs * 2, replicas=replicas))
    more = [] if layers is None else ["--stage-layers", ",".join(map(str, layers))]
    line = "trace", tmp_path / "run.csv", "--schedules", "interleaved-zb", *more
    result, text = answer_and_text(*line, "--save", tmp_path / "saved")
    assert result["finding"]["kind"] == kind
    assert words in " ".join(text.split())
    if layers is not None:  # other numbers of stages divide these layers
        return
    (remedy,) = (row for row in result["remedies"] if row["what"].endswith("per worker 2"))
    sizes = {"num_workers": 4, "num_microbatches": 8, "stages_per_worker": 2}
    other = pj.schedules.build("interleaved-zb", **sizes)
    slow = np.max(factors, axis=0)  # parts of stage 2 are stages 4 and 5; worker 2 has 2 and 6
    halves = slow[other.placement[0]] if kind == "worker" else np.repeat(slow, 2)
    expected = pj.evaluate(other, pj.Costs(**dict.fromkeys(names, halves / 2)))
    assert remedy["step_time"] == pytest.approx(expected.makespan, rel=1e-9)
    saved = json.loads((tmp_path / "saved" / "costs.json").read_text())
    assert ("stragglers" in saved) == (kind == "worker")


def test_many_microbatches_are_one_line(answer_and_text, tmp_path):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=64)
    usual = np.random.default_rng(0).normal(1.0, 0.01, (4, 64))
    runs = []
    for long in (range(12), range(24, 36)):
        factor = np.where(np.isin(np.arange(64), long), 3.0, 1.0)
        seconds = usual * factor
        runs.append(pj.evaluate(table, pj.Costs(forward=seconds[:2], backward=2 * seconds[2:])))
    truth.write_trace(tmp_path / "run.csv", pj.traces.record_runs(runs))
    result, text = answer_and_text("trace", tmp_path / "run.csv", "--schedules", "gpipe")
    message = [line for line in text.splitlines() if "also:" in line]
    assert [" ".join(line.split()) for line in message] == [
        "also: 10 microbatches or more take over 1.1 times the others"
    ]
    assert [suspect["kind"] for suspect in result["suspects"]] == ["microbatch"] * 10


@with_cases("name replicas slow text", *read_cases("slow phases"))
def test_a_slow_place_names_its_phase_if_only_one_is_slow(name, replicas, slow, text):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=12)
    times = {"forward": 1.0, "backward": 2.0, "input_grad": 1.0, "weight_grad": 1.0}
    healthy = {phase: np.full(table.num_stages, seconds) for phase, seconds in times.items()}
    stages = np.arange(table.num_stages) == 2
    factor = {phase: np.where(stages, slow.get(phase, 1), 1) for phase in times}
    faulty = {phase: row * factor[phase] for phase, row in healthy.items()}
    runs = [pj.evaluate(table, pj.Costs(**rows)) for rows in [healthy] * (replicas - 1) + [faulty]]
    trace = pj.traces.record_runs(runs * 4, replicas=replicas)
    result = pj.traces.analyse(trace, schedules=["1f1b"])
    kind = "worker" if replicas > 1 else result.finding.kind
    assert result.finding.place.items() >= {kind: 2}.items()
    assert result.finding.why.partition(", as ")[2] == text.removeprefix(", as ")


@with_cases(
    "factors names",
    ([{1: 1.3}, {2: 1.3}], ["1 of replica 0", "2 of replica 1"]),
    ([{1: 1.3}, {2: 1.2}, {}], ["1 of replica 0", "2 of replica 1"]),
    ([{1: 1.3}, {1: 1.3}, {}, {}], ["1 of replica 0", "1 of replica 1"]),
)
def test_machines_of_two_replicas_that_mask_each_other_are_named_together(factors, names):
    """Replicas wait for the slowest: the repair of one machine leaves the other."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    runs = []
    for slow in factors:
        times = np.array([slow.get(worker, 1.0) for worker in range(4)])
        runs.append(pj.evaluate(table, pj.Costs(forward=times, backward=2 * times)))
    trace = pj.traces.record_runs(runs * 4, replicas=len(runs))
    analysis = pj.traces.analyse(trace, schedules=["zb-h1"])
    finding, step = analysis.finding, max(run.makespan for run in runs)
    assert (finding.kind, finding.name.split(" and ")) == ("worker", names)
    assert finding.seconds == pytest.approx(step - 33.0)  # 8 (F + B), and 3 (F + B) at both ends
    assert analysis.advice.step_time == pytest.approx(step)


def test_a_machine_that_is_slow_in_all_replicas_has_all_its_ranks(tmp_path, call):
    sizes = {"num_workers": 4, "num_microbatches": 8, "stages_per_worker": 2}
    table = pj.schedules.build("interleaved-1f1b", **sizes)
    case = Case(table, "chrome", 0.01, 2, "worker", {"worker": 1}, 1.4, 3)
    truth.write(tmp_path, "chrome", simulate(case)[0], table, "nothing", 3)
    _, text, _ = call("trace", str(tmp_path), "--schedules", "1f1b")
    assert text.startswith("straggler: worker 1 (ranks 2, 3) takes ")
    assert "fix: inspect or replace the machine of worker 1 (ranks 2, 3) " in text
