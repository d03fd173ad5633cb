"""Exports of Nsight Systems with content known by construction."""

import sqlite3
from contextlib import closing
from pathlib import Path

import host_runs
import numpy as np
import pytest
from daily import read_cases, with_cases
from nsight_files import COPY_TO_DEVICE, Kernel, Process, Range, run_processes, write_export

import pipejax as pj
from pipejax.traces.readers.reading import READERS

read = pj.traces.read
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
CORE = "megatron.core.pipeline_parallel.schedules."


def pytorch(worker, cell, step):
    """Labels of PyTorch's runtime under emit_nvtx."""
    text = ";".join(f"{op.stage}{op.phase.name}{op.microbatch}" for op in cell)
    return f"PP:({text})OVERLAP_F_B" if len(cell) > 1 else f"PP:{text}, op_id = {step}"


def one_stage(worker, cell, step):
    return f"{'Forward' if cell[0].phase.name == 'F' else 'Backward'} {cell[0].microbatch}"


def megatron(worker, cell, step):
    return f"{CORE}{'forward_step' if cell[0].phase.name == 'F' else 'backward_step'}"


def bare(worker, cell, step):
    return f"{'fwd' if cell[0].phase.name == 'F' else 'bwd'} mb{cell[0].microbatch}"


def ranked(worker, cell, step):
    return f"rank={worker}; pp={worker}/2 {bare(worker, cell, step)}"


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
    times = 0.010 + 0.001 * np.arange(table.num_stages)
    ops = {"forward": times, "backward": 2 * times, "input_grad": times, "weight_grad": times}
    return pj.evaluate(table, pj.Costs(**ops, latency=1e-4, transmit=4e-4))


TWO = {"stages_per_worker": 2}
GRAMMARS = {
    "PyTorch": ("interleaved-1f1b", pytorch, TWO, {}),
    "PyTorch, pairs": ("dualpipe-v", pytorch, {}, {}),
    "PyTorch, one stage a rank": ("1f1b", one_stage, {}, {}),
    "Megatron-LM": ("1f1b", megatron, {}, {"steps": 2, "stages_per_worker": 1}),
    "Megatron-LM, interleaved": ("interleaved-1f1b", megatron, TWO, TWO | {"steps": 2}),
    "Megatron-LM, timers": ("gpipe", timers, {}, {"steps": 2, "stages_per_worker": 1}),
    "other programs": ("1f1b", bare, {}, {}),
    "other programs, with ranks": ("1f1b", ranked, {}, {}),
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


def test_a_slow_machine_is_named_by_the_rank_of_the_files(tmp_path):
    """Ranks 0 to 3 run one pipeline, 4 to 7 another, whose second worker is rank 5."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    runs = []
    for factor in (1.0, 1.3):
        seconds = np.array([1.0, factor, 1.0, 1.0]) * 1e-3
        runs.append(pj.evaluate(table, pj.Costs(forward=seconds, backward=2 * seconds)))
    processes = [process for run in runs for process in run_processes(run, one_stage)]
    for rank, process in enumerate(processes):
        write_export(tmp_path / f"rank{rank}.sqlite", [process])
    analysis = pj.traces.analyse(read(tmp_path, replicas=2), schedules=["1f1b"])
    assert analysis.finding.name == "1 of replica 1 (rank 5)"
    assert analysis.finding.place == {"worker": 1, "replica": 1, "rank": 5}


# budgets


def budget_process(shift=0.0, pid=100):
    """Two marked steps of 20 ms, each with 6 ms of compute and all kinds of other time."""
    # [ms]: 0 to 2 launch-starved; 2 to 6 compute, at the end beside an exchange; to 7.5 exposed; to
    # 9 stalled, as the kernel was launched at 3; to 11 compute; to 14 blocking; to 15 launch-
    # starved; to 16.5 an exposed copy; to 20 stalled, as the next kernel is of the next step
    ranges, kernels, calls = [], [], []
    for step in range(2):
        base = shift + 20.0 * step
        ranges.append(Range(base, base + 20.0, f"iteration {step + 5}"))
        ranges.append(Range(base + 0.5, base + 2.5, "PP:0F0"))
        ranges.append(Range(base + 2.6, base + 14.5, "PP:0B0"))
        kernels += [
            Kernel(base + 1.99, base + 2.0, base + 4.5),
            Kernel(base + 1.995, base + 4.0, base + 6.0, stream=8),
            Kernel(base + 1.0, base + 5.0, base + 7.5, "ncclDevKernel_AllReduce_Sum_f32", 9),
            Kernel(base + 3.0, base + 9.0, base + 11.0),
            Kernel(base + 14.99, base + 15.0, base + 16.5, COPY_TO_DEVICE),
        ]
        calls.append((base + 10.5, base + 14.0, "cudaStreamSynchronize_v3020", 1))
        calls.append((base + 0.0, base + 20.0, "cudaEventSynchronize_v3020", 77))  # a watchdog
    return Process(ranges, kernels, tuple(calls), pid=pid)


PARTS = ("compute", "exposed", "blocking", "launch_starved", "dependency_stalled")


def test_the_parts_of_a_step_are_those_of_its_hand_made_intervals(tmp_path):
    trace = read(write_export(tmp_path / "rank0.sqlite", [budget_process()]))
    assert [budget.step for budget in trace.budgets] == [5, 6]
    for budget in trace.budgets:
        parts = [1e3 * getattr(budget, name) for name in PARTS]
        assert parts == pytest.approx([6.0, 3.0, 3.0, 3.0, 5.0], abs=0.02)
        assert sum(parts) == pytest.approx(20.0, abs=1e-6)


def test_an_unmarked_step_lasts_from_its_first_to_its_last_op(tmp_path):
    run = evaluated("1f1b", 2, 6)
    write_export(tmp_path / "node.sqlite", run_processes(run, megatron))
    trace = read(tmp_path, steps=2, stages_per_worker=1)
    busy = [1e-9 * round(1e9 * float(seconds)) for seconds in run.busy]
    assert len(trace.budgets) == 4
    for budget in trace.budgets:
        parts = [getattr(budget, name) for name in PARTS]
        assert sum(parts) == pytest.approx(run.makespan, abs=1e-6)
        assert budget.compute == pytest.approx(busy[budget.worker], abs=1e-6)
        assert budget.exposed == budget.blocking == 0
        # the host runs 2 ms ahead: of every gap before an op, the last 2 ms come after the launch
        stalled = sum(min(gap, 0.002 - 5e-6 - 1e-5) for gap in gaps(run, budget.worker))
        # after its last op, a worker waits for the end of the step
        tail = run.makespan - float(np.nanmax(run.finish[budget.worker]))
        assert budget.dependency_stalled == pytest.approx(stalled + tail, abs=2e-5)


def gaps(run, worker):
    """Lengths of the gaps before the ops of a worker [s]."""
    cells = [k for k, cell in enumerate([*run.table.rows()][worker]) if cell]
    starts = run.start[worker][cells].tolist()
    ends = [0.0, *run.finish[worker][cells].tolist()][:-1]
    return [start - end for start, end in zip(starts, ends, strict=True) if start - end > 1e-6]


# clocks

BASE = 1_790_000_000_000_000_000  # [ns], UTC of a session's start
GROUP = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def with_collectives(processes, jitter, groups, name=GROUP):
    """Add collectives to processes: one after each op of a rank's first half; they end together."""
    rng = np.random.default_rng(1)
    for group, communicator in groups:
        last = max(k.end for rank in group for k in processes[rank].kernels)
        for k in range(12):
            end = last * (k + 1) / 13 + 0.3 * communicator
            for rank in group:
                start = end - rng.uniform(0.5, 3.0)
                finish = end + jitter * rng.uniform(-1, 1)
                processes[rank].kernels.append(Kernel(start - 1, start, finish, name, 9))
                if communicator:
                    payload = communicator, 4096
                    call = Range(start - 1.01, start - 1.005, "ncclAllReduce", payload=payload)
                    processes[rank].ranges.append(call)
    return processes


def later(entry, names, by):
    return entry._replace(**{name: getattr(entry, name) + by for name in names})


@pytest.mark.parametrize("form", ["json", "binary", "kineto"])
@pytest.mark.parametrize("groups", [[((0, 1), 0)], [((0, 1), 3)], [((0, 1), 3), ((0,), 5)]])
@pytest.mark.parametrize("lead", [0.0, 7.25, -431.0])
def test_a_planted_clock_is_recovered_from_collectives(lead, groups, form, tmp_path):
    run = evaluated("1f1b", 2, 6)
    processes = with_collectives(run_processes(run, pytorch), 0.002, groups)
    # the clock of rank 1 is ahead, and its session began 1.5 s later
    delay = 0 if form == "kineto" else 1500
    moved = processes[1]._replace(
        ranges=[later(entry, ("start", "end"), lead - delay) for entry in processes[1].ranges],
        kernels=[later(k, ("launch", "start", "end"), lead - delay) for k in processes[1].kernels],
    )
    if form == "kineto":
        host_runs.write_kineto(tmp_path, [processes[0], moved])
    else:
        binary = form == "binary"
        write_export(tmp_path / "rank0.sqlite", processes[:1], utc=BASE, binary=binary)
        write_export(tmp_path / "rank1.sqlite", [moved], utc=BASE + 1_500_000_000, binary=binary)
    trace = read(tmp_path)
    for op, (start, _) in planted(run).items():
        assert recorded(trace, 0)[op][0] == pytest.approx(start, abs=4e-6)
    (note,) = [text for text in trace.inferred if text.startswith("clock of rank1.")]
    assert f"{abs(lead):.3f} ms" in note or abs(lead) < 0.01
    assert "12 collectives end together within 0.00" in note


SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@with_cases(
    "name jitter expected", *read_cases("test_collectives_that_do_not_end_together_move_no_clock")
)
def test_collectives_that_do_not_end_together_move_no_clock(name, jitter, expected, tmp_path):
    run = evaluated("1f1b", 2, 6)
    processes = with_collectives(run_processes(run, pytorch), jitter, [((0, 1), 0)], name)
    for rank, process in enumerate(processes):
        write_export(tmp_path / f"rank{rank}.sqlite", [process], utc=BASE)
    trace = read(tmp_path)
    assert recorded(trace, 0)[0, "F", 0][0] == 0
    assert any(text.startswith(expected) for text in trace.inferred), trace.inferred


@pytest.mark.parametrize("groups", [[((0, 2), 3), ((1, 2), 5)], [((0, 2), 0)]])
def test_clocks_lead_over_files_without_a_common_collective(groups, tmp_path):
    run = evaluated("1f1b", 3, 6)
    processes = with_collectives(run_processes(run, pytorch), 0.002, groups)
    for rank, process in enumerate(processes):
        lead = [0, 40_000_000, -70_000_000][rank]  # of the session's start [ns]
        write_export(tmp_path / f"rank{rank}.sqlite", [process], utc=BASE + lead)
    trace = read(tmp_path)
    if len(groups) == 1:  # rank 1 runs no collective of that name: groups are unknown
        unmatched = (
            "clocks of rank1.sqlite, rank2.sqlite: as recorded, as no collective matches them"
        )
        assert any(text.startswith(unmatched) for text in trace.inferred)
        return
    for op, (start, _) in planted(run).items():
        assert recorded(trace, 0)[op][0] == pytest.approx(start, abs=1e-5)


def test_exchanges_inside_an_op_do_not_time_it(tmp_path):
    run = evaluated("1f1b", 2, 4)
    processes = run_processes(run, pytorch)
    for process in processes:
        first = process.kernels[0]
        late = first._replace(start=first.start + 1, end=first.end + 900, name=GROUP, stream=9)
        process.kernels.append(late)
    trace = read(write_export(tmp_path / "node.sqlite", processes))
    for op, (start, end) in planted(run).items():
        assert recorded(trace, 0)[op] == pytest.approx((start, end), abs=2e-9)


def test_exchanges_of_weights_stand_where_the_device_ran_them(tmp_path):
    run = evaluated("1f1b", 2, 4)
    processes = run_processes(run, pytorch, lead=15.0)
    for worker, process in enumerate(processes):
        first = process.kernels[0]
        post = first.launch - 0.1
        process.ranges.append(Range(post, post + 0.05, f"PP:{worker}UNSHARD"))
        name = "ncclDevKernel_AllGather_RING_LL"
        process.kernels.append(Kernel(post + 0.01, first.start - 3, first.start - 0.5, name, 9))
    trace = read(write_export(tmp_path / "node.sqlite", processes))
    for row in np.flatnonzero(trace.has_phase(["UNSHARD"])):
        forward = trace.has_phase("F") & (trace.worker == trace.worker[row]) & (trace.step == 0)
        first = trace.start[forward].min()
        assert trace.start[row] == pytest.approx(first - 0.003, abs=1e-8)
        assert trace.end[row] == pytest.approx(first - 0.0005, abs=1e-8)
    assert trace.has_phase(["UNSHARD"]).sum() == 2


# files


def test_steps_follow_marks_of_the_host_though_the_device_is_late(tmp_path):
    run = evaluated("1f1b", 2, 4)
    marked = run_processes(run, megatron, lead=15.0, marks=lambda step: f"iteration {step + 7}")
    trace = read(write_export(tmp_path / "node.sqlite", marked), stages_per_worker=1)
    assert trace.steps == [7, 8]
    assert sorted(recorded(trace, 8)) == sorted(planted(run))
    unnumbered = run_processes(run, megatron, lead=15.0, marks=lambda step: "train_step")
    trace = read(write_export(tmp_path / "node.sqlite", unnumbered), stages_per_worker=1)
    assert trace.steps == [0, 1]


PLACES = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}  # replica and worker of each rank


def test_a_label_of_a_rank_states_its_replica(tmp_path):
    run = evaluated("dualpipe-v", 2, 6)
    pair = run_processes(run, pithtrain(2))
    processes = []
    for rank, (replica, worker) in PLACES.items():
        label = f"rank={rank}; pp={worker}/2 dp={replica}/2 cp=0/1 ep=0/1; mbs=1 seq=64"
        ranges = [Range(0.0, None, label), *pair[worker].ranges]
        # processes and devices stand in another order than ranks
        processes.append(pair[worker]._replace(ranges=ranges, pid=200 - rank, device=3 - rank))
    trace = read(write_export(tmp_path / "node.sqlite", processes))
    assert (trace.replicas, trace.workers) == ([0, 1], 2)
    for replica in (0, 1):
        pipeline = trace.only(trace.replica == replica)
        assert sorted(recorded(pipeline, 1)) == sorted(planted(run))


VARIANTS = read_cases("schemas of Nsight Systems")


@pytest.mark.parametrize("variant", VARIANTS)
def test_older_and_newer_schemas_are_read(variant, tmp_path):
    run = evaluated("1f1b", 2, 4)
    for rank, process in enumerate(run_processes(run, pytorch)):
        write_export(tmp_path / f"rank-{rank}.sqlite", [process], **VARIANTS[variant])
    assert sorted(recorded(read(tmp_path), 0)) == sorted(planted(run))


@with_cases("lacks expected", *read_cases("what Nsight Systems did not trace"))
def test_what_was_not_traced_is_named_with_the_flag_that_records_it(lacks, expected, tmp_path):
    processes = run_processes(evaluated("1f1b", 2, 4), pytorch)
    path = write_export(tmp_path / "node.sqlite", processes, lacks=lacks)
    with pytest.raises(ValueError, match=expected):
        read(path)
    if len(lacks) == 1:  # a table without rows was not traced, too
        with pytest.raises(ValueError, match=expected):
            read(change(write_export(path, processes), f"DELETE FROM {lacks[0]}"))


def change(path, statement):
    with closing(sqlite3.connect(path)) as database:
        database.execute(statement)
        database.commit()
    return path


@pytest.mark.parametrize("value", ["'x'", "NULL", "x'00'", "1.5"])
def test_a_start_that_is_no_number_is_not_stated(value, tmp_path):
    for rank, process in enumerate(run_processes(evaluated("1f1b", 2, 4), pytorch)):
        path = write_export(tmp_path / f"rank{rank}.sqlite", [process])
        change(path, f"UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = {value}")
    trace = read(tmp_path)
    assert any("no file states when its clock began" in note for note in trace.inferred)


@with_cases("change_of_one why", *read_cases("kernels that time no op"))
def test_kernels_that_time_no_op_are_counted(change_of_one, why, tmp_path):
    run = evaluated("1f1b", 2, 4)
    path = write_export(tmp_path / "rank0.sqlite", run_processes(run, pytorch, steps=1)[:1])
    change(path, f"UPDATE {KERNELS} SET {change_of_one} WHERE correlationId = 2")
    trace = read(path, world=2)
    # kernel 2 is the second half of 0F0
    start, end = planted(run)[0, "F", 0]
    assert trace.end[0] - trace.start[0] == pytest.approx((end - start) / 2)
    assert ("kernels of rank 0", 1) in [(entry.what, entry.count) for entry in trace.left_out]
    assert any(why in entry.why for entry in trace.left_out)


@with_cases("label", ranked, lambda worker, *op: f"rank {worker} {bare(worker, *op)}")
@pytest.mark.parametrize("thread", [0, 1])
def test_ranks_of_one_process_are_refused(thread, label, tmp_path):
    first, second = run_processes(evaluated("1f1b", 2, 4), label)
    ranges = [entry._replace(thread=entry.thread + 5 * thread) for entry in second.ranges]
    merged = first._replace(ranges=[*first.ranges, *ranges])
    with pytest.raises(ValueError, match=r"a process for each rank: .* state ranks 0 and 1"):
        read(write_export(tmp_path / "node.sqlite", [merged]))


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path):
    processes = run_processes(evaluated("1f1b", 2, 4), lambda *_: "layer")
    path = write_export(tmp_path / "node.sqlite", processes)
    with pytest.raises(ValueError, match="it has no op of PyTorch, PithTrain, Megatron-LM"):
        read(path)
    (tmp_path / "cut.sqlite").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="it is no sound export: database disk image is malformed"):
        read(tmp_path / "cut.sqlite")
    (tmp_path / "report.nsys-rep").write_bytes(b"\x00\x01" * 500)
    with pytest.raises(ValueError, match="give nsys export --type sqlite"):
        read(tmp_path / "report.nsys-rep")
    processes = run_processes(evaluated("1f1b", 2, 4), pytorch)
    with pytest.raises(ValueError, match="CUPTI_ACTIVITY_KIND_KERNEL has no globalPid"):
        read(write_export(path, processes, lacks=("globalPid",)))
    wrong = run_processes(evaluated("1f1b", 2, 6), pithtrain(2))
    wrong[0].ranges.append(Range(0.5, 0.6, "weight chunk"))
    with pytest.raises(ValueError, match="runs step 0 in another order than DualPipeV"):
        read(write_export(path, wrong))


def test_ranges_without_an_end_and_around_others_are_counted(tmp_path):
    run = evaluated("1f1b", 2, 4)
    processes = run_processes(run, pytorch)
    first = processes[0].ranges[0]
    around = first._replace(start=first.start - 0.001, end=first.end + 0.001)
    processes[0].ranges.extend([around, Range(900.0, None, "PP:0F3")])
    trace = read(write_export(tmp_path / "node.sqlite", processes))
    assert sorted(recorded(trace, 0)) == sorted(planted(run))
    assert [(entry.what, entry.why, entry.count) for entry in trace.left_out] == [
        ("ranges of rank 0", "they have no end", 1),
        ("ranges of rank 0", "others of their phase lie inside", 1),
    ]


def test_ranges_of_layers_are_no_ops(tmp_path):
    run = evaluated("1f1b", 2, 4)
    processes = run_processes(run, megatron)
    for process in processes:
        for entry in [*process.ranges]:
            middle = (entry.start + entry.end) / 2
            for name in ("megatron.core.fusions.fused_bias_swiglu.forward", "layer03.stage2_f"):
                process.ranges.append(Range(entry.start + 0.001, middle, name))
                process.ranges.append(Range(middle, entry.end - 0.001, name, thread=2))
    trace = read(write_export(tmp_path / "a.sqlite", processes), steps=2, stages_per_worker=1)
    assert sorted(recorded(trace, 0)) == sorted(planted(run))
    assert trace.left_out == ()


def test_the_file_is_not_written(tmp_path):
    path = write_export(tmp_path / "rank0.sqlite", [budget_process()])
    content, path_mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o444)
    read(path)
    assert (path.read_bytes(), [p.name for p in tmp_path.iterdir()]) == (content, [path.name])
    path.chmod(path_mode)


def test_the_manual_has_a_row_for_every_reader():
    rows = (Path(__file__).parents[1] / "docs" / "traces.md").read_text().splitlines()
    for reader in READERS:
        assert f"| {reader.form} | {reader.writers} | {reader.content} |" in rows


@pytest.mark.parametrize("order", ["by turns", "by blocks"])
@pytest.mark.parametrize("labels", [megatron, one_stage, pytorch])
def test_replicas_are_dealt_as_ops_follow_their_inputs(labels, order, tmp_path):
    run = evaluated("1f1b", 3, 4)
    processes = run_processes(run, labels, marks=lambda step: f"iteration {step}")
    for rank in range(6):
        worker = rank // 2 if order == "by turns" else rank % 3
        write_export(tmp_path / f"rank{rank}.sqlite", [processes[worker]])
    options = {} if labels is pytorch else {"replicas": 2}
    trace = read(tmp_path, stages_per_worker=1, **options)
    assert (trace.replicas, trace.workers) == ([0, 1], 3)
    for replica in (0, 1):
        pipeline = trace.only(trace.replica == replica)
        assert sorted(recorded(pipeline, 1)) == sorted(planted(run))
    if labels is megatron:
        why = r"of 6 ranks, ops would start before their inputs; give --replicas 2( or|, or)"
        with pytest.raises(ValueError, match=why):
            read(tmp_path, stages_per_worker=1)
        with pytest.raises(ValueError, match="replicas must divide the 6 ranks of the run, got 4"):
            read(tmp_path, stages_per_worker=1, replicas=4)


def test_one_rank_of_each_tensor_parallel_group_is_a_pipeline(tmp_path):
    run = evaluated("1f1b", 2, 4)
    for rank, process in zip((0, 8), run_processes(run, megatron), strict=True):
        write_export(tmp_path / f"rank{rank}.sqlite", [process])
    trace = read(tmp_path, steps=2, stages_per_worker=1)
    assert (trace.workers, trace.replicas) == (2, [0])
    assert "ranks: only every 8th has a file, and is a worker of one pipeline" in trace.inferred
    write_export(tmp_path / "rank12.sqlite", run_processes(run, megatron)[:1])
    with pytest.raises(ValueError, match="of 4 there is no sound file of 1: rank 1"):
        read(tmp_path, steps=2, stages_per_worker=1)


@pytest.mark.parametrize(("workers", "microbatches"), [(4, 8), (2, 8), (4, 16)])
def test_an_interleaved_run_is_asked_for_its_stages_not_for_replicas(
    workers, microbatches, tmp_path
):
    run = evaluated("interleaved-1f1b", workers, microbatches, **TWO)
    processes = run_processes(run, megatron, marks=lambda step: f"iteration {step}")
    write_export(tmp_path / "node.sqlite", processes)
    with pytest.raises(ValueError, match="--stages-per-worker 2") as error:
        read(tmp_path)
    assert "replicas" not in str(error.value)
    trace = read(tmp_path, **TWO)
    assert sorted(recorded(trace, trace.steps[0])) == sorted(planted(run))


LABELS = {  # launcher: labels of forwards and backwards
    "DeepSpeed": ("_exec_forward_pass", "_exec_backward_pass"),
    "Megatron-LM": (f"{CORE}forward_step", f"{CORE}backward_step"),
}


@pytest.mark.parametrize("launcher", LABELS)
def test_labels_of_a_launcher_put_its_remedies_first(launcher, tmp_path, answer_and_text):
    """DeepSpeed has 1f1b alone, Megatron-LM also interleaved-1f1b."""
    run = evaluated("interleaved-1f1b", 2, 4, stages_per_worker=2)
    if launcher == "DeepSpeed":
        run = evaluated("1f1b", 4, 4)
    names = LABELS[launcher]
    processes = run_processes(run, lambda worker, cell, step: names[cell[0].phase.name != "F"])
    write_export(tmp_path / "node.sqlite", processes)
    sizes = ["--steps", 1, "--stages-per-worker", run.table.stages_per_worker]
    result, text = answer_and_text("trace", tmp_path, *sizes)
    assert {name for row in result["remedies"] for name in row["launchers"]} <= {launcher}
    assert "torchtitan" not in text
    assert f"no option of {launcher} does it" in text
    able = [row for row in result["remedies"] if row["launchers"]]
    lines = [line for line in text.splitlines() if line.startswith("next: pipejax evaluate")]
    assert lines == [f"next: {row['command']}" for row in able[:1]]
    other = answer_and_text("trace", tmp_path, *sizes, "--launcher", "torchtitan")[0]
    assert launcher not in {name for row in other["remedies"] for name in row["launchers"]}
