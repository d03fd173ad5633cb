"""Exports of Nsight Systems with content known by construction."""

import numpy as np
import pytest
from nsight_files import run_processes, write_export

import pipejax as pj

read = pj.traces.read
CORE = "megatron.core.pipeline_parallel.schedules."


def pytorch(worker, cell, step):
    """Labels of PyTorch's runtime under emit_nvtx."""
    text = ";".join(f"{op.stage}{op.phase.name}{op.microbatch}" for op in cell)
    return f"PP:({text})OVERLAP_F_B" if len(cell) > 1 else f"PP:{text}, op_id = {step}"


def one_stage(worker, cell, step):
    return f"{'Forward' if cell[0].phase.name == 'F' else 'Backward'} {cell[0].microbatch}"


def megatron(worker, cell, step):
    return f"{CORE}{'forward_step' if cell[0].phase.name == 'F' else 'backward_step'}"


def timers(worker, cell, step):
    return f"{'forward' if cell[0].phase.name == 'F' else 'backward'}-compute"


def pithtrain(workers, prefix=False):
    def label(worker, cell, step):
        names = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
        parts = [
            f"{names[op.phase.name]} chunk"
            + (f" {op.microbatch} (phase{op.stage // workers})" if op.phase.name != "W" else "")
            for op in cell
        ]
        text = " ".join(parts)
        if prefix:
            text = f"rank {worker} " + ("overlapped " if len(cell) > 1 else "") + text
        return text

    return label


def planted(run):
    """Start and end [s] of every op of a run, by stage, phase and microbatch."""
    times = {}
    for worker, row in enumerate(run.table.rows()):
        for slot, cell in enumerate(row):
            for op in cell:
                key = op.stage, op.phase.name, op.microbatch
                times[key] = float(run.start[worker, slot]), float(run.finish[worker, slot])
    return times


def recorded(trace, step):
    rows = np.flatnonzero((trace.step == step) & trace.has_phase("FBIW"))
    start = trace.start[rows].min()
    return {
        (int(trace.stage[k]), trace.phases[trace.phase[k]], int(trace.microbatch[k])): (
            trace.start[k] - start,
            trace.end[k] - start,
        )
        for k in rows
    }


def evaluated(name, workers, microbatches, **options):
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches, **options)
    stages = np.arange(table.num_stages)
    costs = pj.Costs(
        forward=0.010 + 0.001 * stages,
        backward=0.020 + 0.002 * stages,
        input_grad=0.010 + 0.001 * stages,
        weight_grad=0.010 + 0.001 * stages,
        latency=1e-4,
        transmit=4e-4,
    )
    return pj.evaluate(table, costs)


GRAMMARS = {
    "PyTorch": ("interleaved-1f1b", pytorch, {"stages_per_worker": 2}, {}),
    "PyTorch, pairs": ("dualpipe-v", pytorch, {}, {}),
    "PyTorch, one stage a rank": ("1f1b", one_stage, {}, {}),
    "Megatron-LM": ("1f1b", megatron, {}, {"steps": 2, "stages_per_worker": 1}),
    "Megatron-LM, interleaved": (
        "interleaved-1f1b",
        megatron,
        {"stages_per_worker": 2},
        {"steps": 2, "stages_per_worker": 2},
    ),
    "Megatron-LM, timers": ("gpipe", timers, {}, {"steps": 2, "stages_per_worker": 1}),
    "PithTrain": ("dualpipe-v", pithtrain(2), {}, {}),
    "PithTrain, older": ("dualpipe-v", pithtrain(2, prefix=True), {}, {}),
}


@pytest.mark.parametrize("files", ["one file", "a file a rank"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_labels_of_frameworks_name_the_planted_ops(grammar, files, tmp_path):
    name, label, options, arguments = GRAMMARS[grammar]
    run = evaluated(name, 2, 6, **options)
    processes = run_processes(run, label)
    if files == "one file":
        write_export(tmp_path / "node.sqlite", processes, types=(59, 60))
    else:
        for rank, process in enumerate(processes):
            write_export(tmp_path / f"rank{rank}.sqlite", [process], old=True)
    trace = read(tmp_path, **arguments)
    assert (trace.steps, trace.workers) == ([0, 1], 2)
    assert trace.left_out == ()
    expected = planted(run)
    for step in trace.steps:
        times = recorded(trace, step)
        assert sorted(times) == sorted(expected)
        for op, (start, end) in expected.items():
            assert times[op] == pytest.approx((start, end), abs=2e-9), op
