"""Advice of a measured run: late launches, shares of savings, order of commands, long microbatches."""

import dataclasses
import itertools
import json
import shlex

import numpy as np
import pytest
import trace_truth as truth
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.schedules.cells.ops import format_cell
from pipejax.schedules.table.table_files import to_json

STEPS = 5


def record(stalls, table=None, steps=range(STEPS), replicas=1, recorded=STEPS):
    """Return a trace in which ops (worker, phase, microbatch) start so much later in these steps."""
    # F takes 1 s, B 2 s and a message no time
    table = table or pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    shape, runs = (table.num_stages, table.num_microbatches), []
    for step in range(recorded):
        costs = {"F": np.full(shape, 1.0), "B": np.full(shape, 2.0)}
        for (worker, phase, microbatch), seconds in stalls.items() if step in steps else ():
            costs[phase][worker, microbatch] += seconds
        healthy = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
        run = pj.evaluate(table, pj.Costs(forward=costs["F"], backward=costs["B"]))
        runs += [run, *[healthy] * (replicas - 1)]
    trace = pj.traces.record_runs(runs, replicas=replicas)
    start = trace.start.copy()
    for (worker, phase, microbatch), seconds in stalls.items():
        is_op = (trace.worker == worker) & (trace.microbatch == microbatch)
        is_op &= (trace.phase == trace.phases.index(phase)) & (trace.replica == 0)
        start[is_op & np.isin(trace.step, [*steps])] += seconds
    return dataclasses.replace(trace, start=start)


def launches(trace):
    analysis = pj.traces.analyse(trace, schedules=["1f1b"])
    rows = [row for row in analysis.suspects if row.kind == "launch"]
    return analysis, {row.name: row.seconds for row in rows}


# Without a stall, a step takes 3 x (4 + 1) = 15 s. Worker 1 runs F0 at 1 s, B0 at 2 s, F1 at 4 s;
# worker 0 sends F1 at 2 s, so that F1 can start 2 s later, and F2 at 7 s, as worker 1 needs it. No
# op of worker 1 can start later.
@with_cases("op name stall cost", *read_cases("test_a_late_launch_is_named_with_its_cost"))
def test_a_late_launch_is_named_with_its_cost(op, name, stall, cost):
    analysis, rows = launches(record({tuple(op): stall}))
    assert rows == {name: pytest.approx(cost)}
    assert float(analysis.attribution.recorded.mean()) == pytest.approx(15 + cost)
    assert analysis.replay.mean_error == pytest.approx(0, abs=1e-9)
    assert analysis.finding.name == name
    time = {0.5: "500 ms"}.get(stall, f"{stall:g} s")
    assert analysis.finding.why == f"{name} starts {time} late in 5 of 5 steps"
    assert [row.seconds for row in analysis.stalls] == [pytest.approx(stall)] * STEPS
    assert analysis.advice.step_time == pytest.approx(15)


@with_cases(
    "stalls how costs",
    # F2 of worker 0 delays all; of 1 s before B2, which follows it, all is lost
    ({(0, "F", 2): 3.0, (1, "B", 2): 1.0}, {}, {"0F2 on worker 0": 3, "1B2 on worker 1": 1}),
    ({(0, "F", 2): 1.0}, {"steps": [0, 1, 2, 4]}, {"0F2 on worker 0": 0.8}),  # the mean
    ({(0, "F", 2): 3.0}, {"replicas": 2}, {"0F2 on worker 0 of replica 0": 3}),
)
def test_late_launches_cost_the_time_that_each_saves(stalls, how, costs):
    analysis, rows = launches(record(stalls, **how))
    assert rows == pytest.approx(costs)
    assert analysis.replay.mean_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("recorded", "steps"), [(1, "the only step"), (2, "2 of 2 steps")])
def test_a_stall_in_all_of_few_steps_is_a_late_launch(recorded, steps):
    # torchtitan writes one folder for each profiled step
    analysis, rows = launches(record({(0, "F", 2): 3.0}, recorded=recorded))
    assert rows == {"0F2 on worker 0": pytest.approx(3.0)}
    assert analysis.finding.why == f"0F2 on worker 0 starts 3 s late in {steps}"


@pytest.mark.parametrize("steps", [[2], [1, 3]])
def test_a_stall_in_few_steps_is_no_late_launch(steps):
    analysis, rows = launches(record({(0, "F", 2): 1.0}, steps=steps))
    assert rows == {}
    assert len(analysis.stalls) == len(steps)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_layers_do_not_move_away_from_one_machine_of_one_replica(slow):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    factor = np.where(np.arange(4) == slow, 1.4, 1.0)
    healthy = pj.evaluate(table, pj.Costs(forward=[1.0] * 4, backward=[2.0] * 4))
    ill = pj.evaluate(table, pj.Costs(forward=1.0 * factor, backward=2.0 * factor))
    for runs, moves in (([healthy, ill] * STEPS, False), ([ill, ill] * STEPS, True)):
        trace = pj.traces.record_runs(runs, replicas=2)
        analysis = pj.traces.analyse(trace, schedules=["1f1b"], stage_layers=[10] * 4)
        kinds = {remedy.kind for remedy in analysis.advice.remedies}
        assert ("layers" in kinds) == moves
        assert analysis.finding.kind == ("stage" if moves else "worker")


def test_the_report_begins_with_the_late_launch(tmp_path, call):
    truth.write_trace(tmp_path / "run.csv", record({(0, "F", 1): 3.0}))
    _, text, _ = call("trace", str(tmp_path / "run.csv"), "--schedules", "1f1b")
    lines = text.splitlines()
    assert lines[0] == (
        "late launch: 0F1 on worker 0 starts 3 s late in 5 of 5 steps; it costs 1 s of 16 s "
        "per step (6.25 %)"
    )
    assert lines[1].startswith("fix: look at what the host does before the launch of 0F1 on")
    assert "no advice" not in text


def test_savings_are_shares_of_the_step_at_mean_times_and_files_are_written_before_they_are_read(
    tmp_path, call, monkeypatch
):
    """A step takes 15 s and the stall of 3 s; zb-h1 waits F + B - 2 W instead of F + B."""
    monkeypatch.chdir(tmp_path)
    truth.write_trace(tmp_path / "run.csv", record({(0, "F", 2): 3.0}))
    _, text, _ = call("trace", "run.csv", "--schedules", "zb-h1")
    (line,) = [line for line in text.splitlines() if "schedule zb-h1" in line and "saves" in line]
    assert "saves 2 s (13.3 % of the step)" in line
    assert "(measured: 18 s, as ops start late; causes and savings are shares of 15 s)" in text
    commands = [line for line in text.splitlines() if line.startswith("next: ")]
    assert len(commands) == 2
    assert "--save trace" in commands[0]
    assert commands[1].startswith("next: pipejax evaluate ")
    assert "--costs trace/costs.json" in commands[1]


@pytest.mark.parametrize(("stages", "share"), [(8, "all"), (7, "most")])
def test_a_long_microbatch_is_slow_in_all_stages_or_in_most(stages, share):
    table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=12)
    cost = np.ones((8, 12))
    cost[:stages, 5] = 2.0
    run = pj.evaluate(table, pj.Costs(forward=cost, backward=2 * cost))
    analysis = pj.traces.analyse(pj.traces.record_runs([run] * 4), schedules=["1f1b"])
    (suspect,) = (row for row in analysis.suspects if row.kind == "microbatch")
    assert suspect.name == "5"
    assert suspect.why.endswith(f" times the others in {share} stages")


SLOWNESS = 1.25
TIMES = pj.Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0, transmit=0.05)
WITH_TWO_CHUNKS = {"interleaved-1f1b": {"stages_per_worker": 2}}


def record_slow_worker(name, factors):
    """Return a trace in which worker 2 of each replica is slow by its factor, and its table."""
    options = WITH_TWO_CHUNKS.get(name, {})
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)
    costs = [pj.costing.scaled_costs(TIMES, table, workers={2: factor}) for factor in factors]
    runs = [pj.evaluate(table, replica_costs) for replica_costs in costs]
    return pj.traces.record_runs(runs * STEPS, replicas=len(factors)), table


# Factors are those of worker 2 in each replica. All stages cost the same, so the stages of a
# remedy do too. All replicas wait for the slowest.
@with_cases("name factors", *read_cases("test_remedies_leave_a_slow_machine_slow"))
def test_remedies_leave_a_slow_machine_slow(name, factors, tmp_path, answer):
    """Each promised step is that of the remedy's schedule with the same machine slow."""
    trace, table = record_slow_worker(name, factors)
    truth.write_trace(tmp_path / "run.csv", trace)
    folder = tmp_path / "saved"
    schedules = "zb-v,interleaved-1f1b,interleaved-zb,zb-h1"
    result = answer("trace", tmp_path / "run.csv", "--schedules", schedules, "--save", folder)
    assert result["suspects"][0]["kind"] == "worker"
    slowness = max(factors)
    slow_costs = pj.costing.scaled_costs(TIMES, table, workers={2: slowness})
    assert result["pipeline_time"] == pytest.approx(pj.evaluate(table, slow_costs).makespan)
    assert result["pipeline_time"] == pytest.approx(result["step_time"])
    stragglers = json.loads((folder / "costs.json").read_text())["stragglers"]
    assert stragglers == {"2": pytest.approx(slowness)}
    rows = [row for row in result["remedies"] if row["kind"] == "schedule"]
    assert rows
    busy = 8 * table.num_stages / 4 * 3.0  # of a usual worker
    for row in rows:
        what, _, chunks = row["what"].removeprefix("schedule ").partition(", stages per worker ")
        options = {"stages_per_worker": int(chunks)} if chunks else {}
        other = pj.schedules.build(what, num_workers=4, num_microbatches=8, **options)
        # the same layers on more or on fewer stages
        share = table.num_stages / other.num_stages
        ops = ("forward", "backward", "input_grad", "weight_grad")
        scaled = {key: share * getattr(TIMES, key) for key in ops}
        times = pj.Costs(**scaled, transmit=TIMES.transmit)
        times = pj.costing.scaled_costs(times, other, workers={2: slowness})
        step = pj.evaluate(other, times).makespan
        assert row["step_time"] == pytest.approx(step, rel=1e-6)
        assert row["step_time"] > busy * slowness
        arguments = shlex.split(row["command"])[1:]
        assert answer(*arguments)["makespan"] == pytest.approx(step, rel=1e-6)


def test_remedies_take_the_machine_of_a_straggler_with_one_stage_as_slow():
    trace, _ = record_slow_worker("1f1b", [SLOWNESS])
    analysis = pj.traces.analyse(trace, schedules=["zb-h1"])
    assert (analysis.finding.kind, analysis.finding.name) == ("worker", "2")
    (edit,) = analysis.advice.memory.begin.scenario.edits
    assert edit.factors == pytest.approx({2: SLOWNESS})


# workers of the stages
LOOP, V_SHAPE = [0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0]
SLOW_MESSAGE = 1.0  # [s]; others take 0.1 s


def message_times(workers, ways=(0, 1)):
    """Return times of messages (directions, pipes, boundaries) if workers 2 and 3 are far apart."""
    is_slow = np.array([{*pair} == {2, 3} for pair in itertools.pairwise(workers)])
    times = np.full((2, 1, len(workers) - 1), 0.1)
    for way in ways:
        times[way, 0, is_slow] = SLOW_MESSAGE
    return times


@pytest.mark.parametrize("slow_replica", [0, 1])
@with_cases(
    "name options workers ways", *read_cases("test_remedies_leave_a_slow_link_of_one_replica_slow")
)
def test_remedies_leave_a_slow_link_of_one_replica_slow(name, options, workers, ways, slow_replica):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)

    def costs(workers, part, ways):
        half = {"input_grad": part, "weight_grad": part}
        return pj.Costs(part, 2 * part, transmit=message_times(workers, ways), **half)

    slow = pj.evaluate(table, costs(workers, 1.0, ways))
    fast = pj.evaluate(table, costs(workers, 1.0, ()))
    runs = [slow, fast] if slow_replica == 0 else [fast, slow]
    trace = pj.traces.record_runs(runs * STEPS, replicas=2)
    names = ["gpipe", "zb-h1", "1f1b", "interleaved-zb"]
    advice = pj.traces.analyse(trace, schedules=names).advice
    assert advice.step_time == pytest.approx(slow.step_time, rel=1e-6)
    remedies = [remedy for remedy in advice.remedies if remedy.kind == "schedule"]
    for remedy in remedies:
        other = remedy.scenario.table()
        part = table.num_stages / other.num_stages
        places = other.placement[0].tolist()
        again = pj.evaluate(other, costs(places, part, ways if other.num_stages == 4 else (0, 1)))
        assert remedy.step_time == pytest.approx(again.step_time, rel=1e-6), remedy.what
    for run, pipeline in zip(runs, pj.traces.find_pipelines(trace).pipelines, strict=False):
        replayed = pj.traces.replay(pj.traces.find_pipelines(trace))
        again = pj.traces.measured_costs(replayed, pipeline=pipeline)
        step_time = pj.evaluate(table, again, link=replayed.links).step_time
        assert step_time == pytest.approx(run.step_time, rel=1e-6)


@pytest.mark.parametrize("slots", [{}, {"F": 1.0, "I": 1.3, "W": 0.7}])
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "zb-2p", "zero-bubble"])
def test_rows_of_a_planned_schedule_are_named(name, slots, tmp_path):
    """Exported for equal ops, or planned for the times of the run, and read from a file."""
    options = {"slots": {**slots, "B": 2.0}} if slots else {}
    table = pj.schedules.build(name, num_workers=4, num_microbatches=10, **options)
    (tmp_path / "ops.json").write_text(to_json(table))
    seconds = {"F": 1.0, "I": 1.3, "W": 0.7}  # in both cases the times of the run
    costs = pj.Costs(seconds["F"], 2.0, input_grad=seconds["I"], weight_grad=seconds["W"])
    run = pj.Scenario(pj.costing.TableFile(str(tmp_path / "ops.json")), costs=costs)
    begin = pj.explain(run, schedules=["1f1b"]).memory.begin.scenario
    rows = [[[*filter(None, row)] for row in item.rows()] for item in (begin.table(), table)]
    assert isinstance(begin.schedule, str)
    assert rows[0] == rows[1]
    trace = pj.traces.record_runs([pj.evaluate(table, costs)] * 3)
    assert pj.traces.analyse(trace, schedules=["1f1b"]).schedule is not None


RECOMPUTED = {"forward": 10.0, "recompute": 7.0}
WHOLE_BACKWARD = RECOMPUTED | {"backward": 15.0}
SPLIT_BACKWARD = RECOMPUTED | {"input_grad": 8.0, "weight_grad": 7.0}


@with_cases("name options times other", *read_cases("test_recomputations_of_a_trace_are_ops"))
def test_recomputations_of_a_trace_are_ops(name, options, times, other, tmp_path, answer):
    def recomputed(name):
        built = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)
        return built.with_recomputation()

    table, costs = recomputed(name), pj.Costs(**times)
    run = pj.evaluate(table, costs)
    result = pj.traces.analyse(pj.traces.record_runs([run] * 4), schedules=[other])
    assert result.schedule.startswith(name)
    assert result.advice.step_time == pytest.approx(run.makespan)
    measured = pj.traces.measured_costs(result.replay)
    assert measured.recompute.tolist() == pytest.approx([7.0] * table.num_stages)
    # another schedule recomputes, too
    step = pj.evaluate(recomputed(other), costs).makespan
    saving = [remedy for remedy in result.advice.remedies if remedy.kind == "schedule"]
    assert [remedy.step_time for remedy in saving] == pytest.approx([step] * len(saving))
    assert bool(saving) is (step < run.makespan)
    # and so it does beside the table's file
    path = tmp_path / "table.json"
    path.write_text(to_json(table))
    letters = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
    text = ",".join(f"{letters.get(field, 'R')}={seconds}" for field, seconds in times.items())
    report = answer("explain", "-t", path, "-T", text, "--schedules", other)
    steps = [row["step_time"] for row in report["remedies"] if row["what"].startswith("schedule")]
    assert steps == pytest.approx([step] * len(steps))
    assert bool(steps) is (step < run.makespan)


HEAD = "step,rank,stage,phase,microbatch,start_ms,end_ms\n"


def rows_of_a_recomputed_run(phase, columns):
    """Return a CSV of two steps in which each backward has a recomputation by this name."""
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4).with_recomputation()
    trace = pj.traces.record_runs([pj.evaluate(table, pj.Costs(**WHOLE_BACKWARD))] * 2)
    names = HEAD.strip().split(",")
    lines = [",".join(columns)]
    for row in range(len(trace)):
        letter = trace.phases[trace.phase[row]]
        values = [trace.step[row], trace.worker[row], trace.stage[row]]
        values += [phase if letter == "R" else letter, trace.microbatch[row]]
        values += [10 * trace.start[row], 10 * trace.end[row]]
        cells = dict(zip(names, map(str, values), strict=True))
        lines.append(",".join(cells[name] for name in columns))
    return "\n".join([*lines, ""])


def test_recomputations_are_named_and_numbered(tmp_path, answer, mistake):
    columns = HEAD.strip().split(",")
    path = tmp_path / "run.csv"
    path.write_text(rows_of_a_recomputed_run("again", columns))
    assert "W=again or R=again (recomputation)" in mistake("trace", path)
    report = answer("trace", path, "--columns", "R=again")
    # (10 + 15 + 7) x 4 microbatches on the last worker, and F and B of one on the first
    assert report["step_time"] == pytest.approx((32 * 4 + 25) / 100)
    assert {row["name"] for row in report["op_times"] if row["kind"] == "op"} == {"F", "B", "R"}
    path.write_text(rows_of_a_recomputed_run("R", [name for name in columns if name != "stage"]))
    assert "must state stage and microbatch of 16 recomputations (R)" in mistake("trace", path)


@pytest.mark.parametrize("times", ["R=7", "UNSHARD=8"])
def test_other_schedules_without_the_cells_of_a_table_are_no_remedies(
    times, tmp_path, answer_and_text
):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    if times == "R=7":  # on the first stage only
        rows = [
            [cell for cell in row if not (cell and cell[0].phase.name == "R" and cell[0].stage)]
            for row in table.with_recomputation().rows()
        ]
        table = table.with_rows(rows)
    else:
        rows = [[f"{k}UNSHARD", *map(format_cell, row)] for k, row in enumerate(table.rows())]
        table = pj.ScheduleTable.from_rows(rows)
    path = tmp_path / "table.json"
    path.write_text(to_json(table))
    line = ("explain", "-t", path, "-T", f"F=10,B=15,{times}", "--schedules", "zb-h1")
    report, text = answer_and_text(*line)
    assert "; no built-in schedule has the same ops" in text
    assert not [row for row in report["remedies"] if row["what"].startswith("schedule")]


def loop_one_message_at_a_time(table, op_seconds, slow):
    """Step of a table without fused pairs; link 1 to 2 takes `slow` [s], the others take no time.

    Each direction of two workers transmits one message at a time.
    """
    rows = [[op for cell in row for op in cell] for row in table.rows()]
    arrival, link_free, free, position = {}, {}, [0.0] * len(rows), [0] * len(rows)
    placement, last = table.placement[0].tolist(), table.num_stages - 1
    while any(place < len(row) for place, row in zip(position, rows, strict=True)):
        # the op that can start first sends first
        starts = []
        for worker, place in enumerate(position):
            if place < len(rows[worker]):
                op = rows[worker][place]
                key = op.phase.name, op.stage, op.microbatch
                is_first = key[:2] == ("F", 0)
                if is_first or key in arrival:
                    starts.append((max(free[worker], arrival.get(key, 0.0)), worker, *key))
        start, worker, phase, stage, microbatch = min(starts)
        free[worker] = start + op_seconds[phase]
        position[worker] += 1
        to = stage + 1 if phase == "F" and stage < last else stage
        to, kind = (to, "F") if to > stage else (stage - (phase == "B"), "B")
        if to >= 0:
            pair = worker, placement[to]
            sent = max(free[worker], link_free.get(pair, 0.0))
            link_free[pair] = arrival[kind, to, microbatch] = sent + slow * (pair == (1, 2))
    return max(free)


def test_savings_hold_if_messages_of_a_link_wait_for_each_other():
    """A message takes 0.9 F: in 1f1b none waits, with two stages per worker most do."""
    sizes = {"num_workers": 4, "num_microbatches": 8}
    table = pj.schedules.build("1f1b", **sizes)
    links = np.zeros((2, 1, 3))
    links[0, 0, 1] = 0.9
    run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=links))
    assert run.makespan == loop_one_message_at_a_time(table, {"F": 1.0, "B": 2.0}, 0.9)
    analysis = pj.traces.analyse(pj.traces.record_runs([run] * 2), schedules=["interleaved-1f1b"])
    assert "delay" in analysis.replay.equivalent_models
    (fault,) = (fault for fault in analysis.advice.faults if fault.kind == "memory")
    chunks = int(fault.why.partition(" per worker ")[2].partition(" ")[0])
    other = pj.schedules.build("interleaved-1f1b", **sizes, stages_per_worker=chunks)
    op_seconds = {"F": 1.0 / chunks, "B": 2.0 / chunks}
    step = loop_one_message_at_a_time(other, op_seconds, 0.9)
    assert fault.seconds == pytest.approx(run.makespan - step)
