"""Measured-like runs whose times are known: an event loop of its own, and files of every form."""

import csv
import json
from typing import NamedTuple

import numpy as np
from daily import read_cases

import pipejax as pj
from pipejax.traces.record import INTEGERS, TIMES

SCHEDULES = read_cases("schedules of planted runs")
FORMS = ("csv", "parquet", "lists", "chrome")
CHANGES = (
    *("nothing", "no chunk", "no step", "no microbatch", "no chunk, no microbatch"),
    *("no step, no microbatch", "unknown phase", "missing rank", "collectives", "pause"),
    *("own zeros", "slow step", "two replicas"),
)
SLOW = 1.6
PAUSE = 8.0  # of an op


class Slice(NamedTuple):
    """Slice of a worker: an op and its time."""

    step: int
    replica: int
    worker: int
    stage: int
    phase: str
    microbatch: int
    start: float
    end: float
    cell: int  # of its worker in its step; ops of a pair share it


def recorded(table, seed, change, steps=4, replicas=1, noise=0.02, op=0.01, message=0.001):
    """Run some steps of a table; return slices and what is planted."""
    draw = np.random.default_rng(seed)
    planted = {}
    slices, begin = [], 0.0
    speed = np.ones(replicas)
    if replicas > 1:
        planted["replica"] = int(draw.integers(replicas))
        speed[planted["replica"]] = SLOW
    if change == "slow step":
        planted["step"] = int(draw.integers(1, steps))
    if change == "pause":
        planted["pause"] = int(draw.integers(steps)), int(draw.integers(table.num_workers))
    for step in range(steps):
        durations = []
        for replica in range(replicas):
            factor = op * speed[replica] * (SLOW if planted.get("step") == step else 1.0)
            pause = None
            if planted.get("pause", (None,))[0] == step:
                worker = planted["pause"][1]
                row = [cell for cell in [*table.rows()][worker] if cell]
                pause = worker, int(draw.integers(1, len(row) - 1)), PAUSE * op
            result = _loop(table, draw, factor, noise, message, pause)
            extra = []
            if change == "collectives":
                extra = _collectives(result, table.num_workers, draw, op)
            slices += [
                single._replace(
                    step=step, replica=replica, start=single.start + begin, end=single.end + begin
                )
                for single in (*result, *extra)
            ]
            durations.append(max(single.end for single in (*result, *extra)))
        begin += max(durations) + op * float(draw.uniform(0.2, 0.4))
    return slices, planted


def _loop(table, draw, factor, noise, message, pause, slow=lambda **place: 1.0):
    """Ops in the order of their rows; each starts when its worker is free and its input there.

    `slow` is the factor on an op of a worker, stage and microbatch, or on a message of two workers.
    """
    rows = [[cell for cell in row if cell] for row in table.rows()]
    last = table.num_stages - 1
    usual = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    ended, op_workers = {}, {}
    slices, position, free = [], [0] * len(rows), [0.0] * len(rows)

    def ready(op, worker):
        phase, stage, microbatch = op.phase.name, op.stage, op.microbatch
        if phase == "F":
            needs = [("F", stage - 1)] if stage else []
        elif phase == "W":
            needs = [("D", stage)]
        else:
            needs = [("D", stage + 1)] if stage < last else [("F", stage)]
        times = [0.0]
        for kind, at in needs:
            key = kind, at, microbatch
            if key not in ended:
                return None
            source = op_workers[key]
            delay = message * (source != worker) * slow(source=source, target=worker)
            times.append(ended[key] + delay)
        return max(times)

    while any(place < len(row) for place, row in zip(position, rows, strict=True)):
        before = sum(position)
        for worker, row in enumerate(rows):
            while position[worker] < len(row):
                cell = row[position[worker]]
                times = [ready(op, worker) for op in cell]
                if None in times:
                    break
                start = max([free[worker], *times])
                took = factor * sum(
                    usual[op.phase.name]
                    * slow(worker=worker, stage=op.stage, microbatch=op.microbatch)
                    for op in cell
                )
                end = start + took * float(draw.lognormal(0.0, noise)) + 1e-7
                for op in cell:
                    name = op.phase.name
                    key = "D" if name in "BI" else name, op.stage, op.microbatch
                    ended[key], op_workers[key] = end, worker
                    place = worker, op.stage, name, op.microbatch
                    slices.append(Slice(0, 0, *place, start, end, position[worker]))
                free[worker] = end
                if pause is not None and pause[:2] == (worker, position[worker]):
                    slices.append(Slice(0, 0, worker, -1, "gc", -1, end, end + pause[2], -1))
                    free[worker] += pause[2]
                position[worker] += 1
        assert sum(position) > before, "a deadlock"
    return slices


def _collectives(slices, workers, draw, op):
    """Gradients are reduced behind the last op of each worker, all together."""
    ends = [max(p.end for p in slices if p.worker == worker) for worker in range(workers)]
    done = max(ends) + op * float(draw.uniform(0.5, 1.0))
    return [
        Slice(0, 0, worker, -1, "grads-reduce-scatter", -1, end, done, -1)
        for worker, end in enumerate(ends)
    ]


def write(folder, form, slices, table, change, seed):
    """Write a run into a folder; return what is missing of it."""
    draw = np.random.default_rng(seed + 1)
    shift = {}
    if change == "own zeros":
        shift = {worker: float(draw.uniform(-1, 1)) for worker in range(table.num_workers)}
    if form == "lists":
        keys = {(op.step, op.worker) for op in slices}
        shift = {key: min(op.start for op in slices if (op.step, op.worker) == key) for key in keys}
    moved = []
    for op in slices:
        by = shift.get((op.step, op.worker), shift.get(op.worker, 0.0))
        moved.append(op._replace(start=op.start - by, end=op.end - by))
    missing = table.num_workers - 1 if change == "missing rank" else None
    moved = [op for op in moved if op.worker != missing]
    writer = {"csv": _columns, "parquet": _columns, "lists": _lists, "chrome": _chrome}[form]
    writer(folder, moved, table, change, form)


def write_rows(path, rows):
    """Write a CSV file, and return its path."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def write_trace(path, trace):
    """Write all columns of a trace as CSV."""
    columns = {name: getattr(trace, name).tolist() for name in (*INTEGERS, *TIMES)}
    columns["phase"] = [trace.phases[code] for code in columns["phase"]]
    write_rows(path, [[*INTEGERS, "start_s", "end_s"], *zip(*columns.values(), strict=True)])


def _columns(folder, slices, table, change, form):
    several = len({piece.replica for piece in slices}) > 1
    names = ["step", "worker", "stage", "phase", "microbatch", "start", "end"]
    names += ["replica"] * several
    for name, column in {"step": "step", "chunk": "stage", "microbatch": "microbatch"}.items():
        if f"no {name}" in change:
            names.remove(column)
    called = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    if change == "unknown phase":
        called["W" if any(piece.phase == "W" for piece in slices) else "B"] = "param_grad"
    rows = [
        [
            called.get(piece.phase, piece.phase) if name == "phase" else getattr(piece, name)
            for name in names
        ]
        for piece in sorted(slices, key=lambda piece: (piece.start, piece.worker))
    ]
    if form == "csv":
        write_rows(folder / "run.csv", [names, *rows])
        return
    import pyarrow
    from pyarrow import parquet

    data = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    parquet.write_table(pyarrow.table(data), folder / "run.parquet")


def _lists(folder, slices, table, change, form):
    stage_chunks = {}
    for worker in range(table.num_workers):
        chunks = {piece.stage for piece in slices if piece.worker == worker and piece.stage >= 0}
        stages = sorted(chunks)
        stage_chunks |= {(worker, stage): k for k, stage in enumerate(stages)}
    names = {"F": "fwd", "B": "bwd", "I": "bwd", "W": "wgrad"}
    for worker in sorted({piece.worker for piece in slices}):
        data = {}
        for piece in sorted(slices, key=lambda piece: (piece.start, piece.end)):
            if piece.worker != worker or piece.phase not in names:
                continue
            lists, name = data.setdefault(str(piece.step + 1), {}), names[piece.phase]
            values = {"start": 1e3 * piece.start, "end": 1e3 * piece.end}
            if "no microbatch" not in change:
                values["minibatch"] = piece.microbatch
            if "no chunk" not in change:
                values["chunk"] = stage_chunks[worker, piece.stage]
            for key, value in values.items():
                lists.setdefault(f"{name}_{key}", []).append(value)
        (folder / f"pp_rank_{worker}.json").write_text(json.dumps(data))
    sizes = {"pp_size": table.num_workers}
    if "no chunk" not in change and "no microbatch" not in change:
        sizes |= {"vp_size": table.num_stages // table.num_workers}
        sizes |= {"num_mbs": table.num_microbatches}
    (folder / "config.json").write_text(json.dumps(sizes))


def _annotation(name, start, end):
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "name": name} | times


def _chrome(folder, slices, table, change, form):
    replicas = 1 + max(op.replica for op in slices)
    ranks = {}
    for op in slices:
        ranks.setdefault(op.worker * replicas + op.replica, []).append(op)
    for rank, ops in ranks.items():
        events, cells = [], {}
        for op in ops:
            if op.stage >= 0:
                cells.setdefault((op.step, op.cell), []).append(op)
        for cell in cells.values():
            labels = [f"{op.stage}{op.phase}{op.microbatch}" for op in cell]
            label = labels[0] if len(labels) == 1 else f"({';'.join(labels)})OVERLAP_F_B"
            events.append(_annotation(f"PP:{label}", cell[0].start, cell[0].end))
        if change == "collectives":
            label = f"PP:{min(op.stage for op in ops if op.stage >= 0)}REDUCE_GRAD"
            events += [_annotation(label, op.start, op.end) for op in ops if op.stage < 0]
        events.sort(key=lambda event: event["ts"])
        for step in sorted({op.step for op in ops} if "no step" not in change else ()):
            times = [t for op in ops if op.step == step for t in (op.start, op.end)]
            ends = min(times) - 1e-6, max(times) + 1e-6
            events.append(_annotation(f"ProfilerStep#{step}", *ends))
        header = {"distributedInfo": {"rank": rank, "world_size": replicas * table.num_workers}}
        header |= {"baseTimeNanoseconds": 10**18}
        (folder / f"rank{rank}.json").write_text(json.dumps(header | {"traceEvents": events}))


def applies(name, form, change):
    """Return whether a form can be changed so."""
    if form == "chrome":
        return not (
            "no microbatch" in change
            or "no chunk" in change
            or change in ("unknown phase", "pause", "own zeros")
        )
    if form == "lists":
        if name in ("chimera", "dualpipe"):  # its two stages of a worker are no chunks
            return False
        return change not in ("unknown phase", "pause", "two replicas", "collectives") and (
            "no step" not in change
        )
    return True


def outcome(folder, slices, table, change):
    """Read a run; return right, wrong, stated or refused, why, and the trace."""
    try:
        trace = pj.traces.read(folder)
        aligned, offsets = pj.traces.aligned(trace)
        pipelines = pj.traces.find_pipelines(aligned)
    except ValueError as error:
        return "refused", str(error), None
    return judge(slices, aligned, pipelines), "; ".join(trace.inferred), (pipelines, offsets)


def judge(slices, trace, pipelines):
    """Compare every op's step, place and time with the truth."""
    ops = [op for op in slices if op.stage >= 0]
    first = min(op.step for op in ops)
    truth = {(op.step - first, *op[1:6]): op for op in ops}
    rows = np.flatnonzero(trace.has_phase("FBIW"))
    steps, names = trace.step - trace.step[rows].min(), np.array(trace.phases)[trace.phase]
    columns = steps, trace.replica, trace.worker, trace.stage, names, trace.microbatch
    keys = zip(*(column[rows].tolist() for column in columns), strict=True)
    read = dict(zip(keys, rows, strict=True))
    is_right = read.keys() == truth.keys() and all(
        abs((trace.end[k] - trace.start[k]) - (truth[key].end - truth[key].start)) < 2e-6
        for key, k in read.items()
    )
    steps = {(op.step, op.replica) for op in ops}
    if is_right and len(pipelines.pipelines) == len(steps):
        return "right"
    return "stated" if trace.inferred else "wrong"
