"""Inference of steps, workers, stages and microbatches that files do not state.

A reading is a numbering of all ops. It is possible if no two ops of a worker overlap, steps follow
each other, and every op starts after its inputs end. If no reading is possible, clocks are
corrected.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.builders.one_f_one_b import Turns
from pipejax.schedules.registry import REGISTRY
from pipejax.traces.clocks import aligned
from pipejax.traces.readers.parts import Columns, number_groups, rank_in_group
from pipejax.traces.record import NONE, OP_INPUTS, Dependencies, Trace, transfers

KINDS = {"F": 0, "B": 1, "W": 2, "I": 3}
_MERGED_KINDS = np.array([0, 1, 2, 1])  # for each kind: B and I have the same number
_INFERABLE = ("step", "worker", "stage", "microbatch")
_OPTIONS = {"steps": "steps", "stages": "stages-per-worker", "microbatches": "microbatches"}
# how much earlier than its inputs an op may start: [s], and relative to the median op
_CLOCK_ERROR, _ROUNDING = 5e-5, 0.1
_INPUTS: Dependencies = (*OP_INPUTS, ("F", "BI", 0), ("BI", "W", 0))
_MAX_LISTED = 4  # readings in an error
_MAX_STAGES = 4  # stages per worker up to which registered schedules are tried
Numbers = Int[NumpyArray, " ops"]


class RunSizes(NamedTuple):
    """Sizes of a run as stated by a file or the user; a size that nobody states is 0."""

    workers: int = 0  # of a pipeline
    stages: int = 0  # of a worker
    microbatches: int = 0  # of a pipeline in a step
    steps: int = 0  # in all files
    world: int = 0  # ranks of the run
    replicas: int = 0  # copies of the pipeline


class _Reading(NamedTuple):
    """Numbering of all ops: sizes, and complete columns; a size of None is unused."""

    steps: int | None
    stages: int | None
    microbatches: int | None
    order: str
    columns: Columns

    def text(self) -> str:
        names = ("steps", "stages per worker", "microbatches", "order")
        parts = zip(names, self[:4], strict=True)
        return ", ".join(f"{name} {value}" for name, value in parts if value)


def complete(columns: Columns, kind: NumpyArray, sizes: RunSizes, *, by_step: bool) -> list[str]:
    """Add the missing columns step, worker, stage and microbatch; return notes on them."""
    # `kind` is each row's code in `KINDS`, below 0 for a slice that is no op. With `by_step`, the
    # clock of a worker restarts in each step. Exactly one reading (numbers of all ops) may exist.
    missing = [name for name in _INFERABLE if name not in columns]
    rows = np.flatnonzero(kind >= 0)
    columns.setdefault("replica", np.zeros(len(kind), np.int64))
    if not missing or not len(rows):
        columns.update({name: np.full(len(kind), NONE) for name in missing})
        return []
    # rows that are equal in all columns are one op: `row_ops` is the op of each row
    content = number_groups(kind[rows], *(values[rows] for values in columns.values()))
    _, first_rows, row_ops = np.unique(content, return_index=True, return_inverse=True)
    ops = {name: values[rows[first_rows]] for name, values in columns.items()}
    ops["kind"] = kind[rows[first_rows]]
    distinct: dict[bytes, _Reading] = {}
    for reading in _list_readings(ops, missing, sizes):
        key = np.stack([reading.columns[name] for name in _INFERABLE]).tobytes()
        distinct[key] = distinct.pop(key, reading)  # of equal readings the first, at the end
    possible = candidates = [*distinct.values()]
    if len(candidates) > 1:
        possible = _consistent_readings(candidates, by_step=by_step)
    missing_text = ", ".join(missing)
    if len(possible) != 1:
        raise wrong("files", _why_ambiguous(missing, candidates, possible), possible)
    for name in missing:
        columns[name] = np.full(len(kind), NONE)
        columns[name][rows] = possible[0].columns[name][row_ops]
    if "step" in missing:
        _assign_other_steps(columns, kind)
    how, count = "by order in time, the only reading that fits the counts", len(candidates)
    if count > 1:
        how = f"the only one of {count} readings in which ops start after their inputs"
    return [f"no file states {missing_text}: {possible[0].text()} is {how}"]


def _why_ambiguous(
    missing: Sequence[str], candidates: Sequence[_Reading], possible: Sequence[_Reading]
) -> str:
    """Return the error text if no reading (numbering of all ops) or several are possible."""
    listed = "; ".join(reading.text() for reading in possible[:_MAX_LISTED])
    if len(possible) > _MAX_LISTED:
        listed += f"; and {len(possible) - _MAX_LISTED} more"
    why = f"{len(possible)} of {len(candidates)} readings are possible ({listed})"
    if not candidates:
        why = "no reading has these sizes"
    elif not possible:
        why = f"in each of {len(candidates)} readings some op starts before its inputs end"
    options = [
        f"--{option} {getattr(possible[-1], name)}"
        for name, option in _OPTIONS.items()
        if len({getattr(reading, name) for reading in possible}) > 1
    ]
    options.append(f"--columns {missing[-1]}=NAME")
    return f"must state {', '.join(missing)}: {why}; to choose, give {' or '.join(options)}"


def _assign_other_steps(columns: Columns, kind: NumpyArray) -> None:
    """Assign to each non-op slice, in place, the step of the previous op on its worker."""
    worker_number = number_groups(columns["replica"], columns["worker"])
    for number in np.unique(worker_number):
        rows = np.flatnonzero(worker_number == number)
        rows = rows[np.argsort(columns["start"][rows], kind="stable")]
        ops = rows[kind[rows] >= 0]
        previous = np.searchsorted(columns["start"][ops], columns["start"][rows], "right") - 1
        if len(ops):
            columns["step"][rows] = columns["step"][ops][np.maximum(previous, 0)]


def _number_turns(ops: Columns) -> tuple[Numbers, int]:
    """Number the ops of equal columns and kind by start; return numbers and the usual count."""
    # Forwards of a worker at 0, 4 and 7 s that no column distinguishes have turns 0, 1 and 2. B and
    # I are numbered together; the k-th W belongs to the k-th I.
    is_split, is_weight = ops["kind"] == KINDS["I"], ops["kind"] == KINDS["W"]
    is_backward = is_split | (ops["kind"] == KINDS["B"])
    names = ("replica", "step", "worker", "stage", "chunk", "microbatch")
    place = number_groups(*(ops[name] for name in names if name in ops))
    is_numbered = "microbatch" in ops and not {"stage", "chunk"}.isdisjoint(ops)
    group = number_groups(place, is_backward, is_weight)
    turn = rank_in_group(group, ops["start"], ops["end"])
    input_grads, weight_grads = (
        rows[np.lexsort([turn[rows], place[rows]])]
        for rows in map(np.flatnonzero, (is_split, is_weight))
    )
    num_places = int(place.max()) + 1
    weight_count = np.bincount(place[is_weight], minlength=num_places)
    backward_count = np.bincount(place[is_backward], minlength=num_places)
    if np.array_equal(place[input_grads], place[weight_grads]):
        turn[weight_grads] = turn[input_grads]
    elif not is_numbered and ((weight_count > 0) & (weight_count < backward_count)).any():
        raise wrong("files", "must state stage and microbatch: some backwards lack a W")
    counts = Counter(np.bincount(group[~is_weight]).tolist())
    return turn, int(counts.most_common(1)[0][0])


def _list_readings(ops: Columns, missing: Sequence[str], sizes: RunSizes) -> Iterator[_Reading]:
    """Yield all possible numberings of the ops (readings); `missing` names columns to infer."""
    # Two steps of three forwards that no column tells apart have the turns 0 to 5 and `total` 6.
    turn, total = _number_turns(ops)
    lane = number_groups(ops["replica"], ops["worker" if "worker" in ops else "stage"])
    rows = np.lexsort([ops["start"], lane])
    step_counts: list[int | None] = [None]  # None: the file numbers its steps
    if "step" in missing:  # a worker begins a step after the end of the previous one
        is_same_lane = np.diff(lane[rows]) == 0
        step_counts = [
            steps
            for steps in _divisors(total, sizes.steps)
            if (np.diff(turn[rows] // (total // steps))[is_same_lane] >= 0).all()
            and (total // steps) % max(sizes.microbatches, 1) == 0
        ]
    if len(step_counts) > 1 and "microbatch" in missing and not sizes.microbatches:
        stages = sizes.stages if "stage" in missing and "chunk" not in ops else 1
        counts = {steps: total // steps for steps in filter(None, step_counts)}
        # nothing relates steps and microbatches: all numbers of steps that fit are possible
        ambiguous = [
            _Reading(steps, sizes.stages or None, turns // stages if stages else 0, "", {})
            for steps, turns in counts.items()
            if turns % max(stages, 1) == 0
        ]
        raise wrong("files", _why_ambiguous(missing, ambiguous, possible=ambiguous))
    for steps in step_counts:
        turns_per_step, columns, step_turn = total, dict(ops), turn
        if steps is not None:
            turns_per_step = total // steps
            columns["step"], step_turn = np.divmod(turn, turns_per_step)
        # more ops than a step can have: the others get no microbatch, and are counted as left out
        is_surplus = step_turn >= turns_per_step
        step_turn = np.minimum(step_turn, turns_per_step - 1)
        for reading in _step_readings(columns, step_turn, turns_per_step, missing, sizes):
            # a stated number of microbatches excludes readings with other numbers
            if sizes.microbatches in (0, reading.microbatches) or "microbatch" not in missing:
                microbatch = np.where(is_surplus, NONE, reading.columns["microbatch"])
                new_columns = reading.columns | {"microbatch": microbatch}
                yield reading._replace(steps=steps, columns=new_columns)


def _step_readings(
    columns: Columns, turn: Numbers, turns: int, missing: Sequence[str], sizes: RunSizes
) -> Iterator[_Reading]:
    """Yield possible numberings (readings) of worker, stage and microbatch."""
    # `turn` is the number of each op among the `turns` ops of a step with equal columns and kind.
    is_backward = columns["kind"] > 0
    # if the file has no microbatches, only turns distinguish equal ops: turns become microbatches
    turn_column = {"microbatch": turn} if "microbatch" in missing else {}
    microbatches = turns if turn_column else None
    workers = sizes.workers or int(columns.get("worker", np.zeros(1)).max()) + 1
    if "stage" in missing and "chunk" not in columns and turn_column:
        by_microbatches = turns // sizes.microbatches if sizes.microbatches else 0
        for stages in _divisors(turns, sizes.stages or by_microbatches):
            yield from _order_readings(columns, turn, stages, turns // stages, workers)
    elif "stage" in missing:
        stages = int(columns["chunk"].max()) + 1 if "chunk" in columns else turns
        if "chunk" not in columns and stages > 1 and _has_ambiguous_weights(columns):
            size = int(columns.get("microbatch", turn).max()) + 1
            return (yield from _registered_readings(columns, stages, size, workers))
        chunk = columns.get("chunk", np.where(is_backward, stages - 1 - turn, turn))
        yield from _placement_readings(columns | turn_column, chunk, stages, microbatches, workers)
    elif "worker" in missing:
        num_stages = int(columns["stage"].max()) + 1
        for stages in _divisors(num_stages, sizes.stages):
            loop, position = np.divmod(columns["stage"], num_stages // stages)
            for order in ("", "in a V") if stages > 1 else ("",):
                is_up = bool(order) & (loop % 2 == 1)
                worker = np.where(is_up, num_stages // stages - 1 - position, position)
                new_columns = columns | turn_column | {"worker": worker}
                yield _Reading(None, stages, microbatches, order, new_columns)
    elif turn_column:
        pipe = _find_pipes(columns)
        pipes = int(pipe.max()) + 1
        microbatch = turn * pipes + pipe
        yield _Reading(None, None, turns * pipes, "", columns | {"microbatch": microbatch})
    elif turns == 1:
        yield _Reading(None, None, None, "", columns)


def _has_ambiguous_weights(columns: Columns) -> bool:
    """Return whether a W of some worker and microbatch starts after all its backwards."""
    # Then it can belong to any stage of the worker.
    group = number_groups(*(columns[name] for name in ("replica", "step", "worker", "microbatch")))
    merged_kind = _MERGED_KINDS[columns["kind"]]
    is_backward, is_weight = merged_kind == KINDS["B"], merged_kind == KINDS["W"]
    last_backward = np.full(int(group.max()) + 1, -np.inf)
    first_weight = np.full(int(group.max()) + 1, np.inf)
    np.maximum.at(last_backward, group[is_backward], columns["end"][is_backward])
    np.minimum.at(first_weight, group[is_weight], columns["start"][is_weight])
    return bool((np.isfinite(first_weight) & (first_weight >= last_backward)).any())


def _placement_readings(
    columns: Columns, chunk: Numbers, stages: int, microbatches: int | None, workers: int
) -> Iterator[_Reading]:
    """Yield a numbering of stages (a reading) for each placement: looped, V, or two pipes."""
    # `chunk` is the number of an op's stage among the `stages` of its worker; `microbatches` is
    # None if the file states them. Two pipes are possible only then, and if a worker has one stage.
    microbatch, worker = columns["microbatch"], columns["worker"]
    # which ops run in the pipe from the last worker to the first
    placements = {"": np.zeros(chunk.shape, bool), "in a V": chunk % 2 == 1}
    if stages == 1 and microbatches is None:
        placements["in two pipes"] = microbatch % 2 == 1
        placements["in two pipes, half and half"] = microbatch > microbatch.max() // 2
    for name, is_up in placements.items():
        position = np.where(is_up, workers - 1 - worker, worker)
        new_columns = columns | {"stage": chunk * workers + position}
        yield _Reading(None, stages, microbatches, name, new_columns)


def _order_readings(
    columns: Columns, turn: Numbers, stages: int, microbatches: int, workers: int
) -> Iterator[_Reading]:
    """Yield a reading (all ops, numbered) for each order in which schedules count ops."""
    # `stages` is the number per worker, `turn` the number of an op among those of its kind in its
    # step and worker. In an order, a group of microbatches passes all stages of a worker before the
    # next group does: interleaved, breadth first, or as a registered schedule.
    orders: list[tuple[str, int | None, bool]] = [("by turns", None, False)]
    if stages > 1:
        orders.append(("breadth first", microbatches, False))
        orders.append(("breadth first, last first", microbatches, True))
    is_backward = columns["kind"] > 0
    for name, group_size, is_reversed in orders:
        turns = Turns.from_sizes(workers, microbatches, stages, group_size)
        loop, microbatch = turns.loop[turn], turns.microbatch[turn]
        chunk = np.where(is_backward, stages - 1 - loop, loop)
        if is_reversed:  # backwards begin with the last microbatch
            microbatch = np.where(is_backward, microbatches - 1 - microbatch, microbatch)
        new_columns = columns | {"microbatch": microbatch}
        for reading in _placement_readings(new_columns, chunk, stages, microbatches, workers):
            yield reading._replace(order=" ".join([name, reading.order]) if stages > 1 else "")
    if stages <= _MAX_STAGES:
        yield from _registered_readings(columns, stages, microbatches, workers)


def _registered_readings(
    columns: Columns, stages: int, microbatches: int, workers: int
) -> Iterator[_Reading]:
    """Yield a numbering of all ops for each registered schedule with the recorded phases."""
    rows = np.lexsort([columns[key] for key in ("kind", "end", "start", "worker")])
    pipeline = number_groups(columns["replica"], columns["step"])[rows]
    pipeline_rows = [rows[pipeline == number] for number in range(int(pipeline.max()) + 1)]
    keys = [key for key in ("worker", "kind", "microbatch") if key in columns]
    recorded = columns | {"kind": _MERGED_KINDS[columns["kind"]]}
    for name, builder in REGISTRY.items():
        options = {"stages_per_worker": stages, "waves": stages // 2}
        options = {key: options[key] for key in builder.options if options.get(key)}
        try:
            table = builder.function(num_workers=workers, num_microbatches=microbatches, **options)
        except (ValueError, TypeError):
            continue  # it does not exist for these numbers
        ops = np.array(  # (worker kind microbatch stage, ops)
            [
                (worker, _MERGED_KINDS[KINDS[op.phase.name]], op.microbatch, op.stage)
                for worker, row in enumerate(table.rows())
                for cell in row
                for op in cell
                if op.phase.name in KINDS
            ]
        ).T
        if table.grammar.slices > 1 or not all(
            np.array_equal(ops[: len(keys)], [recorded[key][run] for key in keys])
            for run in pipeline_rows
        ):
            continue
        if stages > 1 or len(table.placement) > 1:
            numbers = {key: np.zeros(len(rows), np.int64) for key in ("microbatch", "stage")}
            for run in pipeline_rows:
                numbers["microbatch"][run], numbers["stage"][run] = ops[2:]
            yield _Reading(None, stages, microbatches, f"that of {name}", columns | numbers)


def _divisors(number: int, stated: int) -> list[int]:
    candidates = [stated] if stated else range(1, number + 1)
    return [divisor for divisor in candidates if number % divisor == 0]


def _find_pipes(columns: Columns) -> Numbers:
    """Return each op's pipe: 1 if two workers run its stage and its worker has another number."""
    stage, worker = columns["stage"], columns["worker"]
    pairs = np.unique(np.stack([stage, worker]), axis=1)
    shared_stages = pairs[0][np.flatnonzero(np.diff(pairs[0]) == 0)]
    return np.where(np.isin(stage, shared_stages) & (worker != stage), 1, 0)


def _consistent_readings(readings: Sequence[_Reading], *, by_step: bool) -> list[_Reading]:
    """Return the readings (numberings of all ops) in which no op starts before its inputs end."""
    # Tolerances are the clock error, then the rounding of times; the first that leaves a reading
    # is used. Times are as recorded or, if no reading is left, by corrected clocks.
    traces = [
        Trace.from_columns(
            reading.columns | {"phase": reading.columns["kind"]}, (*KINDS,), has_step_clocks=by_step
        )
        for reading in readings
    ]
    rounding = _ROUNDING * float(np.median(traces[0].end - traces[0].start))
    for is_corrected in (False, True):
        traces = [aligned(trace)[0] for trace in traces] if is_corrected else traces
        violations = np.array([_violation(trace) for trace in traces])
        for tolerance in (min(_CLOCK_ERROR, rounding), rounding):
            if (violations <= tolerance).any():
                return [readings[k] for k in np.flatnonzero(violations <= tolerance).tolist()]
    return []


def _violation(trace: Trace) -> float:
    """Return the largest time by which an op starts early [s]; inf if an op misses or repeats."""
    # An op is too early if it starts before the end of an input or of its worker's previous op.
    pipeline, kind = number_groups(trace.replica, trace.step), _MERGED_KINDS[trace.phase]
    op_count = np.bincount(pipeline)
    has_usual_count = op_count == Counter(op_count.tolist()).most_common(1)[0][0]
    # usual pipelines must hold F and B of every stage and microbatch exactly once
    keys = np.stack([pipeline, kind, trace.stage, trace.microbatch])
    keys = keys[:, has_usual_count[pipeline] & (kind < 2)]
    size = has_usual_count.sum() * len(np.unique(keys[1])) * trace.stages * (int(keys[3].max()) + 1)
    if keys.shape[1] != size or np.unique(keys, axis=1).shape[1] != size or keys[3].min() < 0:
        return np.inf
    clock = trace.step if trace.has_step_clocks else np.zeros_like(trace.step)
    rows = np.lexsort([trace.end, trace.start, clock, trace.worker, trace.replica])
    start, end = trace.start[rows], trace.end[rows]
    lane = number_groups(trace.replica, trace.worker, clock)[rows]
    is_next = lane[1:] == lane[:-1]
    is_next &= (start[1:] != start[:-1]) | (end[1:] != end[:-1])  # both ops of a fused pair
    overlaps = (end[:-1] - start[1:])[is_next]
    producers, consumers = transfers(trace, _INPUTS)
    leads = trace.end[producers] - trace.start[consumers]
    return float(np.concatenate([overlaps, leads]).max(initial=0.0))
