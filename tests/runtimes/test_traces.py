"""Traces of real steps, whose stages sleep: op times, message times and slow workers."""

import gzip
import json
import shutil
from pathlib import Path

import late_process
import numpy as np
import pytest

import pipejax as pj
from pipejax.cli.app import run as command
from pipejax.runtimes.gloo import runtime
from pipejax.runtimes.gloo.runtime import op_seconds, run_tables
from pipejax.runtimes.processes import RuntimeJob

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "v-half")
OP, MESSAGE, SLOW, STEPS = 0.06, 0.03, 1.3, 4
GLOO = 0.00075  # what gloo and Python take of a message besides


def built(name, workers):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=2 * workers)


def costs(table, factor=1.0, message=1.0):
    """Times of ops (stages, microbatches) and of messages (directions, pipes, boundaries)."""
    op = OP * np.ones((table.num_stages, table.num_microbatches)) * factor
    transmit = MESSAGE * np.ones((2, 1, table.num_stages - 1)) * message
    return pj.Costs(forward=op, input_grad=op, weight_grad=2 / 3 * op, transmit=transmit)


def analysed(files):
    trace, offsets = pj.traces.aligned(pj.traces.read(files))
    pipelines = pj.traces.find_pipelines(trace)
    assert not pipelines.left_out
    replayed = pj.traces.replay(pipelines)
    return replayed, pj.traces.suspects(replayed, offsets)


@pytest.mark.parametrize("workers", [2, 4])
def test_times_are_recovered(workers, tmp_path):
    tables = [built(name, workers) for name in NAMES]
    slower = [1 + 0.1 * (np.arange(t.num_stages) % 3)[:, None] for t in tables]
    jobs = [
        RuntimeJob(t, costs=costs(t, factor), steps=STEPS, trace=tmp_path / name)
        for name, t, factor in zip(NAMES, tables, slower, strict=True)
    ]
    run_tables(jobs)
    for name, job in zip(NAMES, jobs, strict=True):
        options = {phase: seconds[:, 0].copy() for phase, seconds in op_seconds(job).items()}
        options["W"][0] += options["I"][0]  # of stage 0 in PyTorch
        replayed, _ = analysed([tmp_path / name])
        schedule = pj.traces.registered(replayed.pipelines.table)
        assert schedule is None or schedule[0] == name
        off = [
            row.median / options[row.name][row.stage] - 1
            for row in pj.traces.op_times(replayed.pipelines)
            if row.kind == "op" and (row.name, row.stage) != ("I", 0)
        ]
        across = np.diff(job.table.placement[0]) != 0
        took = replayed.link_times.reshape(2, -1)[:, across].ravel()
        print(
            f"{name:16s} P={workers}: ops {np.min(off):+.2%} to {np.max(off):+.2%}, messages "
            f"{took.min() * 1e3:.1f} to {took.max() * 1e3:.1f} ms, replay {replayed.mean_error:.2%}"
        )
        assert np.abs(off).max() < 0.03, name
        # of some links all messages stand behind another: not all links are as the median
        assert abs(replayed.message_time / (MESSAGE + GLOO) - 1) < 0.03, name


def faults(table):
    """Faults by kind: the name that is suspect, and costs."""
    placement, link = table.placement[0], np.ones((2, 1, table.num_stages - 1))
    ends = placement[:-1], placement[1:]
    for direction, (source, target) in enumerate((ends, ends[::-1])):
        link[direction, 0, (source == 0) & (target == 1)] = SLOW
    stages, count = np.arange(table.num_stages)[:, None], np.arange(table.num_microbatches)
    yield None, None, costs(table)
    yield "worker", "1", costs(table, np.where(placement[:, None] == 1, SLOW, 1))
    yield "stage", "2", costs(table, np.where(stages == 2, SLOW, 1))
    yield "link", "worker 0 to 1", costs(table, message=link)
    yield "microbatch", "2", costs(table, np.where(count == 2, SLOW, 1))


@pytest.mark.parametrize("workers", [2, 4])
def test_a_fault_is_named(workers, tmp_path):
    table = built("interleaved-1f1b", workers)
    faults_to_plant = list(faults(table))
    run_tables(
        [
            RuntimeJob(table, costs=times, steps=STEPS, trace=tmp_path / str(kind))
            for kind, _, times in faults_to_plant
        ]
    )
    ahead(tmp_path / "None", tmp_path / "clock", SLOW * OP)
    for kind, name in [*(fault[:2] for fault in faults_to_plant), ("clock", "1")]:
        _, suspects = analysed([tmp_path / str(kind)])
        print(
            workers,
            kind,
            [(suspect.kind, suspect.name, suspect.ratio, suspect.z) for suspect in suspects],
        )
        names = [suspect.name for suspect in suspects if suspect.kind == kind]
        assert names[:1] == [name] if kind else not suspects, suspects


def ahead(folder: Path, wrong: Path, seconds: float):
    """Copy a trace; the clock of the second rank is ahead."""
    shutil.copytree(folder, wrong)
    path = wrong / "rank1.json.gz"
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["baseTimeNanoseconds"] += round(seconds * 1e9)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_a_late_step_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "MODULE", late_process.__name__)
    monkeypatch.setenv("PYTHONPATH", str(Path(late_process.__file__).parent))
    table = built("1f1b", 2)
    run_tables([RuntimeJob(table, costs=costs(table), steps=STEPS, trace=tmp_path / "late")])
    _, suspects = analysed([tmp_path / "late"])
    assert [suspect.name for suspect in suspects if suspect.kind == "step"][:1] == [
        str(late_process.STEP)
    ]


def test_the_command_writes_what_trace_reads(tmp_path, capsys):
    options = ["-s", "1f1b", "-P", "2", "-M", "2", "--runtime", "torch", "--steps", "2"]
    assert command(["run", *options, "--trace", str(tmp_path / "new")]) == 0
    assert f"pipejax trace {tmp_path / 'new'}" in capsys.readouterr().out
    trace = pj.traces.read([tmp_path / "new"])
    assert (trace.steps, trace.workers, trace.stages) == ([0, 1], 2, 2)
    assert len(pj.traces.find_pipelines(trace).pipelines) == 2
