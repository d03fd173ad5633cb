"""Files as other profilers and frameworks write them, each with a planted slow worker."""

import gzip
import json
import re
import sqlite3
from contextlib import closing

import host_runs
import numpy as np
import pytest
from nsight_files import write_export
from test_trace_faults import Case, simulate

import pipejax as pj

NAMES = {"F": "forward", "B": "backward"}


LABELS = {
    "PyTorch": lambda op: f"PP:{op.stage}{op.phase}{op.microbatch}",
    "Megatron": lambda op: f"megatron.core.pipeline_parallel.schedules.{NAMES[op.phase]}_step",
    "DeepSpeed": lambda op: f"PipelineEngine._exec_{NAMES[op.phase]}_pass",
    "passes": lambda op: f"{NAMES[op.phase].title()}Pass",
    "numbers": lambda op: f"{NAMES[op.phase]} mb{op.microbatch}",
    "stages": lambda op: f"{op.phase.lower()}wd_stage{op.stage}_mb{op.microbatch}",
    "stage first": lambda op: f"stage {op.stage} {NAMES[op.phase]} microbatch {op.microbatch}",
}


def slice_event(name, start, end, **more):
    """Return an event whose keys stand in an uncommon order."""
    times = {"dur": 1e6 * (end - start), "ts": 1e6 * start}
    return {"args": {}, **times, "tid": "7", "pid": 12, **more, "name": name, "ph": "X"}


def rank_events(slices, label, mark):
    """Return the events of each rank; `label` is a form, `mark` the name of a step, or None."""
    by_rank = {}
    for op in slices:
        by_rank.setdefault(op.worker, []).append(op)
    for rank, ops in sorted(by_rank.items()):
        events = [slice_event(LABELS[label](op), op.start, op.end) for op in ops]
        for step in sorted({op.step for op in ops}) if mark else ():
            times = [t for op in ops if op.step == step for t in (op.start, op.end)]
            arguments = {"step_num": str(step)} if mark == "train" else {}
            name = mark.format(step)
            events.append(slice_event(name, min(times) - 1e-5, max(times) + 1e-5, args=arguments))
        yield rank, events


def in_files(name):
    def write(folder, ranks):
        for rank, events in ranks:
            path = folder / name.format(rank=rank)
            path.parent.mkdir(exist_ok=True)
            text = json.dumps({"displayTimeUnit": "ns", "traceEvents": events})
            data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
            path.write_bytes(data)

    return write


def in_processes(folder, ranks):
    everything = []
    for rank, events in ranks:
        title = {"name": "process_name", "ph": "M", "pid": 900 - rank}
        everything.append(title | {"args": {"name": f"python: rank {rank}"}})
        everything += [event | {"pid": 900 - rank} for event in events]
    (folder / "trace.json").write_text(json.dumps(everything))


def in_begins_and_ends(folder, ranks):
    for rank, events in ranks:
        parts = []
        for event in events:
            begin = {key: value for key, value in event.items() if key != "dur"} | {"ph": "B"}
            end = {"ph": "E", "ts": event["ts"] + event["dur"], "pid": 12, "tid": "7"}
            parts += [begin, end]
        (folder / f"{rank}.rank{rank}.json").write_text(json.dumps({"traceEvents": parts}))


def in_asynchronous_slices(folder, ranks):
    for rank, events in ranks:
        begins, ends = [], []
        for number, event in enumerate(events):  # all begin before any ends: ids tell them apart
            shared = {"name": event["name"], "cat": "pipeline", "pid": 12, "id": hex(number)}
            begins.append(shared | {"ph": "b", "ts": event["ts"]})
            ends.append(shared | {"ph": "e", "ts": event["ts"] + event["dur"]})
        (folder / f"{rank}.rank{rank}.json").write_text(json.dumps({"traceEvents": begins + ends}))


PROFILERS = {
    "Perfetto, other order of keys": ("PyTorch", None, in_files("rank{rank}.json")),
    "begins and ends": ("PyTorch", None, in_begins_and_ends),
    "asynchronous slices": ("PyTorch", None, in_asynchronous_slices),
    "processes of one file": ("numbers", None, in_processes),
    "DeepSpeed": ("DeepSpeed", "ProfilerStep#{}", in_files("ds_rank_{rank}.json")),
    "passes": ("passes", "train_batch", in_files("rank_{rank}.json")),
    "Megatron in Kineto": (
        "Megatron",
        "ProfilerStep#{}",
        in_files("rank-{rank}.1730000000.pt.trace.json"),
    ),
    "XProf": ("stages", "train", in_files("host{rank}.trace.json.gz")),
    "stage before phase": ("stage first", "iteration {}", in_files("rank{rank}.json")),
    "folders of ranks": ("PyTorch", None, in_files("rank{rank}/trace.json.gz")),
    "folders of iterations": ("PyTorch", None, in_files("iteration_8/rank{rank}_trace.json")),
}


@pytest.fixture(scope="module")
def planted():
    """Return the slices of a run with a slow worker, its cost and its step [s]."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    case = Case(table, "chrome", 0.01, 1, "worker", {"worker": 2}, 1.6, 5)
    slices, times = simulate(case)
    return slices, (times - simulate(case._replace(factor=1.0))[1]).mean()


def first_finding(call, folder, *options):
    code, text, error = call("trace", str(folder), "--schedules", "1f1b", *options)
    assert code == 0, error
    first, second, *_ = text.splitlines()
    assert "fix: inspect or replace the machine of worker" in second
    value, unit = re.search(r"costs ([\d.]+) (ms|s)\b", first).groups()
    return first, float(value) * {"s": 1.0, "ms": 1e-3}[unit], text


@pytest.mark.parametrize("profiler", PROFILERS)
def test_a_slow_worker_is_named_in_files_of_other_profilers(profiler, planted, tmp_path, call):
    label, mark, write = PROFILERS[profiler]
    slices, cost = planted
    write(tmp_path, rank_events(slices, label, mark))
    first, seconds, _ = first_finding(call, tmp_path)
    assert first.startswith("straggler: worker 2 (stage 2) takes 1.6 times")
    assert seconds == pytest.approx(cost, rel=0.02)


@pytest.mark.parametrize("mark", ["ProfilerStep#{}", "train", "iteration {}", None])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.3), (0.25, 0.05), (0.0, 0.0)])
def test_the_rest_of_a_marked_step_is_said(mark, before, after, planted, tmp_path, call):
    slices = [op._replace(start=op.start + op.step, end=op.end + op.step) for op in planted[0]]
    ranks = []
    for rank, events in rank_events(slices, "PyTorch", mark):
        for event in events:
            if not event["name"].startswith("PP:"):
                event["ts"] -= 1e6 * before
                event["dur"] += 1e6 * (before + after)
        ranks.append((rank, events))
    in_files("rank{rank}.json")(tmp_path, ranks)
    _, text, _ = call("trace", str(tmp_path), "--schedules", "1f1b")
    _, line, *_ = text.splitlines()
    assert line.startswith("the median step takes ") == bool(mark and after)
    if mark and after:
        marked, pipeline, rest = map(float, re.findall(r"([\d.]+) s\b", line))
        starts, ends = ([getattr(op, x) for op in slices if not op.step] for x in ("start", "end"))
        assert pipeline == pytest.approx(max(ends) - min(starts), rel=0.01)
        assert marked == pytest.approx(pipeline + rest, rel=0.01)


@pytest.mark.parametrize("steps", [[3], [1], [2, 3, 4], [0, 1, 2, 3, 4]])
def test_the_rest_is_that_of_the_selected_steps(steps, planted, tmp_path, call):
    slices = [
        op._replace(start=op.start + 2 * op.step, end=op.end + 2 * op.step) for op in planted[0]
    ]
    ranks, lengths = [], []
    for rank, events in rank_events(slices, "PyTorch", "ProfilerStep#{}"):
        for event in events:
            if not event["name"].startswith("PP:"):
                step = int(event["name"].partition("#")[2])
                event["dur"] += 2e5 * step  # 0.2 s more from step to step
                lengths += [1e-6 * event["dur"]] * (step in steps)
        ranks.append((rank, events))
    in_files("rank{rank}.json")(tmp_path, ranks)
    selected = ",".join(map(str, steps))
    _, text, _ = call("trace", str(tmp_path), "--schedules", "1f1b", "--only-steps", selected)
    _, line, *_ = text.splitlines()
    assert line.startswith(f"the {'only' if len(steps) == 1 else 'median'} step takes ")
    marked, pipeline, rest = map(float, re.findall(r"([\d.]+) s\b", line))
    starts, ends = ([getattr(op, x) for op in slices if not op.step] for x in ("start", "end"))
    assert pipeline == pytest.approx(max(ends) - min(starts), rel=0.01)
    usual = float(np.median(lengths))
    assert (marked, rest) == pytest.approx((usual, usual - pipeline), rel=0.01)


def test_columns_of_another_recorder_and_json_lines(planted, tmp_path, call):
    slices, cost = planted
    rows = [
        {"rank": op.worker, "iteration_id": op.step, "microbatch_index": op.microbatch}
        | {"event_type": f"{NAMES[op.phase]}_step", "begin_time_ms": 1e3 * op.start}
        | {"end_time_ms": 1e3 * op.end}
        for op in slices
    ]
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    texts = {"csv": lines, "jsonl": [json.dumps(row) for row in rows] + ['{"rank": 1, "iter']}
    for form, lines in texts.items():
        (tmp_path / form).write_text("\n".join(lines))
        first, seconds, text = first_finding(call, tmp_path / form)
        assert first.startswith("straggler: worker 2 (stage 2) takes 1.6 times")
        assert seconds == pytest.approx(cost, rel=0.02)
        assert ("1 part of the files left out" in text) == (form == "jsonl")


def test_a_newer_export_with_more_tables_and_two_jobs_on_a_node(tmp_path, call):
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    run, spans = host_runs.host_run(table, slow={1: 1.4})
    other, usual = host_runs.host_run(table)
    path = write_export(tmp_path / "node.sqlite", run)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        database.execute("CREATE TABLE ENUM_NVTX_DOMAIN_TYPE (id INTEGER, name TEXT)")
        database.execute("ALTER TABLE NVTX_EVENTS ADD COLUMN category INTEGER")
        database.commit()
    first, seconds, text = first_finding(call, path)
    assert first.startswith("straggler: worker 1 (stage 1) takes 1.4 times")
    assert seconds == pytest.approx(1e-3 * (spans[0] - usual[0]), rel=0.02)
    assert "two jobs" not in text
    other = [process._replace(pid=process.pid + 50, device=process.device + 4) for process in other]
    _, _, text = first_finding(call, write_export(path, [*run, *other]))
    assert "replicas do not wait for each other: clocks differ, or these are two jobs" in text
