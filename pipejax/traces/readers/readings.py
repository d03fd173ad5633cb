"""Numbers that files do not say: the readings that fit the counts, and those that can be.

A reading says what step, worker, stage and microbatch the k-th op of a worker is. It can be if no
two ops of a worker overlap, steps follow each other, and every op starts after all that it waits
for has ended: by the clocks as recorded, or else by clocks that differ.
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
from pipejax.traces.readers.parts import Columns, number_groups, turn_in
from pipejax.traces.record import NONE, OF_OPS, Trace, Ways, transfers

KINDS = {"F": 0, "B": 1, "W": 2, "I": 3}
_KIND_OF = np.array([0, 1, 2, 1])  # B and I take turns
_LACKING = ("step", "worker", "stage", "microbatch")
_OPTIONS = {"steps": "steps", "stages": "stages-per-worker", "microbatches": "microbatches"}
_EXACT, _ROUNDED = 5e-5, 0.1  # [s], and of the median op: by how much ops may start too early
_WAYS: Ways = (*OF_OPS, ("F", "BI", 0), ("BI", "W", 0))  # what ops wait for
_LISTED, _MOST_STAGES = 4, 4  # readings that are listed; stages of a worker in known orders


class RunSizes(NamedTuple):
    """RunSizes of a run that a file or the user says; 0 where nobody does."""

    workers: int = 0  # of a pipeline
    stages: int = 0  # of a worker
    microbatches: int = 0  # of a pipeline in a step
    steps: int = 0  # in all files
    world: int = 0  # ranks of the run, of those that there are files of


class _Reading(NamedTuple):
    """One way to number the ops: how many there are of what, and columns with all numbers."""

    steps: int
    stages: int
    microbatches: int
    order: str
    columns: Columns

    def text(self) -> str:
        names = ("steps", "stages per worker", "microbatches", "order")
        parts = zip(names, self[:4], strict=True)
        return ", ".join(f"{name} {value}" for name, value in parts if value)


def complete(columns: Columns, kind: NumpyArray, sizes: RunSizes, *, by_step: bool) -> list[str]:
    """Put in the step, worker, stage and microbatch of ops that no column says."""
    lacks = [name for name in _LACKING if name not in columns]
    rows = np.flatnonzero(kind >= 0)
    columns.setdefault("replica", np.zeros(len(kind), np.int64))
    if not lacks or not len(rows):
        columns.update({name: np.full(len(kind), NONE) for name in lacks})
        return []
    doubled = number_groups(kind[rows], *(values[rows] for values in columns.values()))
    _, first, again = np.unique(doubled, return_index=True, return_inverse=True)
    ops = {name: values[rows[first]] for name, values in columns.items()}
    ops["kind"] = kind[rows[first]]
    readings = {
        np.stack([reading.columns[name] for name in _LACKING]).tobytes(): reading
        for reading in reversed([*_readings(ops, lacks, sizes)])
    }
    possible = tried = [*readings.values()][::-1]
    if len(tried) > 1:
        possible = _consistent(tried, by_step=by_step)
    what = ", ".join(lacks)
    if len(possible) != 1:
        raise wrong("files", _why_not(what, tried, possible))
    for name in lacks:
        columns[name] = np.full(len(kind), NONE)
        columns[name][rows] = possible[0].columns[name][again]
    if "step" in lacks:
        _put_others_into_steps(columns, kind)
    how = "by order in time, the only reading that fits the counts"
    if len(tried) > 1:
        how = f"the only one of {len(tried)} readings in which ops start after what they wait for"
    return [f"no file says {what}: {possible[0].text()} is {how}"]


def _why_not(what: str, tried: Sequence[_Reading], possible: Sequence[_Reading]) -> str:
    """Say which readings can be, and what tells them apart."""
    listed = "; ".join(reading.text() for reading in possible[:_LISTED])
    more = f"; and {len(possible) - _LISTED} more" * (len(possible) > _LISTED)
    why = f"{len(possible)} of {len(tried)} readings can be ({listed}{more})"
    if not tried:
        why = "no reading has these sizes"
    elif not possible:
        why = f"in none of {len(tried)} readings every op starts after what it waits for"
    options = [
        f"--{option} {getattr(possible[-1], name)}"
        for name, option in _OPTIONS.items()
        if len({getattr(reading, name) for reading in possible}) > 1
    ]
    options.append(f"--columns {what.split(', ')[-1]}=NAME")
    return f"must say {what}: {why}; {' or '.join(options)} says it"


def _put_others_into_steps(columns: Columns, kind: NumpyArray) -> None:
    """Give what is no op the step of the op that began before it on its worker."""
    place = number_groups(columns["replica"], columns["worker"])
    for number in np.unique(place):
        row = np.flatnonzero(place == number)
        row = row[np.argsort(columns["start"][row], kind="stable")]
        ops = row[kind[row] >= 0]
        at = np.searchsorted(columns["start"][ops], columns["start"][row], "right") - 1
        if len(ops):
            columns["step"][row] = columns["step"][ops][np.maximum(at, 0)]


def _turns(ops: Columns) -> tuple[Int[NumpyArray, " ops"], int]:
    """Number each op among equal ones of its worker and kind, and count them."""
    # Whole backwards and those for the input take turns; then the k-th W is that of the k-th I.
    is_split, kind = ops["kind"] == KINDS["I"], ops["kind"] % 2
    names = ("replica", "step", "worker", "stage", "chunk", "microbatch")
    place = number_groups(*(ops[name] for name in names if name in ops))
    is_weight = ops["kind"] == KINDS["W"]
    is_numbered = "microbatch" in ops and not {"stage", "chunk"}.isdisjoint(ops)
    group = number_groups(place, kind, is_weight)
    turn = turn_in(group, ops["start"], ops["end"])
    halves, weights = (
        rows[np.lexsort([turn[rows], place[rows]])]
        for rows in map(np.flatnonzero, (is_split, is_weight))
    )
    size = int(place.max()) + 1
    ran = [np.bincount(place[which], minlength=size) for which in (is_weight, kind == 1)]
    if np.array_equal(place[halves], place[weights]):
        turn[weights] = turn[halves]
    elif not is_numbered and ((ran[0] > 0) & (ran[0] < ran[1])).any():
        raise wrong("files", "must say stage and microbatch: which backwards have a W is not said")
    counts = Counter(np.bincount(group[~is_weight]).tolist())
    return turn, int(counts.most_common(1)[0][0])


def _readings(ops: Columns, lacks: Sequence[str], sizes: RunSizes) -> Iterator[_Reading]:
    """Yield all readings that fit the counts."""
    turn, total = _turns(ops)
    lane = number_groups(ops["replica"], ops["worker" if "worker" in ops else "stage"])
    rows = np.lexsort([ops["start"], lane])
    lane = lane[rows]
    possible = [0]
    if "step" in lacks:  # no worker begins a step before it has ended the one before
        same = np.diff(lane) == 0
        possible = [
            steps
            for steps in _divisors(total, sizes.steps)
            if (np.diff(turn[rows] // (total // steps))[same] >= 0).all()
        ]
    if len(possible) > 1 and "microbatch" in lacks:
        asked = [_Reading(steps, 0, 0, "", {}) for steps in possible]
        raise wrong("files", _why_not(", ".join(lacks), asked, asked))
    for steps in possible:
        count, columns, place = total // (steps or 1), dict(ops), turn
        if steps:
            columns["step"], place = np.divmod(turn, count)
        beyond, place = place >= count, np.minimum(place, count - 1)
        for reading in _places(columns, place, count, lacks, sizes):
            if sizes.microbatches in (0, reading.microbatches) or "microbatch" not in lacks:
                microbatch = np.where(beyond, NONE, reading.columns["microbatch"])
                read = reading.columns | {"microbatch": microbatch}
                yield reading._replace(steps=steps, columns=read)


def _places(
    columns: Columns,
    place: Int[NumpyArray, " ops"],
    count: int,
    lacks: Sequence[str],
    sizes: RunSizes,
) -> Iterator[_Reading]:
    """Yield readings of a step: place is the turn of each op in it."""
    is_back, by_turn = columns["kind"] > 0, {"microbatch": place} if "microbatch" in lacks else {}
    workers = sizes.workers or int(columns.get("worker", np.zeros(1)).max()) + 1
    if "stage" in lacks and "chunk" not in columns and by_turn:
        for stages in _divisors(count, sizes.stages):
            yield from _orders(columns, place, stages, count // stages, workers)
    elif "stage" in lacks:
        stages = int(columns["chunk"].max()) + 1 if "chunk" in columns else count
        if "chunk" not in columns and stages > 1 and _are_weights_alike(columns):
            size = int(columns.get("microbatch", place).max()) + 1
            return (yield from _registered(columns, stages, size, workers))
        chunk = columns.get("chunk", np.where(is_back, stages - 1 - place, place))
        yield from _layouts(columns | by_turn, chunk, stages, count * bool(by_turn), workers)
    elif "worker" in lacks:
        size = int(columns["stage"].max()) + 1
        for stages in _divisors(size, sizes.stages):
            loop, turn = np.divmod(columns["stage"], size // stages)
            for is_v in (False, True)[: 1 + (stages > 1)]:
                worker = np.where(is_v & (loop % 2 == 1), size // stages - 1 - turn, turn)
                read = columns | by_turn | {"worker": worker}
                yield _Reading(0, stages, count * bool(by_turn), "in a V" * is_v, read)
    elif by_turn:
        pipe = _pipe(columns)
        pipes = int(pipe.max()) + 1
        yield _Reading(0, 0, count * pipes, "", columns | {"microbatch": place * pipes + pipe})
    elif count == 1:
        yield _Reading(0, 0, 0, "", columns)


def _are_weights_alike(columns: Columns) -> bool:
    """Return whether weight gradients of two stages of a worker can be of either."""
    group = number_groups(*(columns[name] for name in ("replica", "step", "worker", "microbatch")))
    ready, first = np.full((2, int(group.max()) + 1), [[-np.inf], [np.inf]])
    is_back, is_weight = (_KIND_OF[columns["kind"]] == k for k in (KINDS["B"], KINDS["W"]))
    np.maximum.at(ready, group[is_back], columns["end"][is_back])
    np.minimum.at(first, group[is_weight], columns["start"][is_weight])
    return bool((np.isfinite(first) & (first >= ready)).any())


def _layouts(
    columns: Columns, chunk: Int[NumpyArray, " ops"], stages: int, microbatches: int, workers: int
) -> Iterator[_Reading]:
    """Yield stages that go round the workers, down and up again, or both ways at once."""
    microbatch, worker = columns["microbatch"], columns["worker"]
    ups = {"": chunk < 0, "in a V": chunk % 2 == 1}
    if stages == 1 and not microbatches:
        ups |= {"in two pipes": microbatch % 2 == 1}
        ups["in two pipes, half and half"] = microbatch > microbatch.max() // 2
    for name, is_up in ups.items():
        turn = np.where(is_up, workers - 1 - worker, worker)
        read = columns | {"stage": chunk * workers + turn}
        yield _Reading(0, stages, microbatches, name, read)


def _orders(
    columns: Columns, place: Int[NumpyArray, " ops"], stages: int, count: int, workers: int
) -> Iterator[_Reading]:
    """Yield the orders of interleaved and of breadth-first schedules, and those of the registry."""
    orders = {"by turns": None, "breadth first": count, "breadth first, last first": count}
    for name, group in [*orders.items()][: 1 if stages == 1 else 3]:
        turns, is_back = Turns.from_sizes(workers, count, stages, group), columns["kind"] > 0
        loop, microbatch = turns.loop[place], turns.microbatch[place]
        chunk = np.where(is_back, stages - 1 - loop, loop)
        if name.endswith("last first"):
            microbatch = np.where(is_back, count - 1 - microbatch, microbatch)
        read = columns | {"microbatch": microbatch}
        for reading in _layouts(read, chunk, stages, count, workers):
            yield reading._replace(order=" ".join([name, reading.order]) if stages > 1 else "")
    if stages <= _MOST_STAGES:
        yield from _registered(columns, stages, count, workers)


def _registered(columns: Columns, stages: int, count: int, workers: int) -> Iterator[_Reading]:
    """Yield the order of every registered schedule whose rows have these phases."""
    rows = np.lexsort([columns[key] for key in ("kind", "end", "start", "worker")])
    pipeline = number_groups(columns["replica"], columns["step"])[rows]
    runs = [rows[pipeline == number] for number in range(int(pipeline.max()) + 1)]
    names = [name for name in ("worker", "kind", "microbatch") if name in columns]
    ran = columns | {"kind": _KIND_OF[columns["kind"]]}
    for name, builder in REGISTRY.items():
        options = {"stages_per_worker": stages, "waves": stages // 2}
        options = {key: options[key] for key in builder.options if options.get(key)}
        try:
            table = builder.function(num_workers=workers, num_microbatches=count, **options)
        except (ValueError, TypeError):
            continue  # it does not exist for these numbers
        cells = np.array(
            [
                (worker, _KIND_OF[KINDS[op.phase.name]], op.microbatch, op.stage)
                for worker, row in enumerate(table.rows())
                for cell in row
                for op in cell
                if op.phase.name in KINDS
            ]
        ).T
        if table.grammar.slices > 1 or not all(
            np.array_equal(cells[: len(names)], [ran[key][run] for key in names]) for run in runs
        ):
            continue
        if stages > 1 or len(table.placement) > 1:
            read = {key: np.zeros(len(rows), np.int64) for key in ("microbatch", "stage")}
            for run in runs:
                read["microbatch"][run], read["stage"][run] = cells[2:]
            yield _Reading(0, stages, count, f"that of {name}", columns | read)


def _divisors(number: int, count: int) -> list[int]:
    numbers = [count] if count else range(1, number + 1)
    return [divisor for divisor in numbers if number % divisor == 0]


def _pipe(columns: Columns) -> Int[NumpyArray, " ops"]:
    """Pipe of each op: 1 where a stage is on two workers, and not on that of its number."""
    stage, worker = columns["stage"], columns["worker"]
    pairs = np.unique(np.stack([stage, worker]), axis=1)
    both = pairs[0][np.flatnonzero(np.diff(pairs[0]) == 0)]
    return np.where(np.isin(stage, both) & (worker != stage), 1, 0)


def _consistent(readings: Sequence[_Reading], *, by_step: bool) -> list[_Reading]:
    """Keep readings that can be, by the strictest measure by which any can."""
    traces = [
        Trace.of(
            reading.columns | {"phase": reading.columns["kind"]}, (*KINDS,), has_step_clocks=by_step
        )
        for reading in readings
    ]
    rounded = _ROUNDED * float(np.median(traces[0].end - traces[0].start))
    for is_right in (False, True):
        traces = [aligned(trace)[0] for trace in traces] if is_right else traces
        early = np.array([_early(trace) for trace in traces])
        for tolerance in (min(_EXACT, rounded), rounded):
            if (early <= tolerance).any():
                return [readings[k] for k in np.flatnonzero(early <= tolerance).tolist()]
    return []


def _early(trace: Trace) -> float:
    """Return by how much an op starts too early [s]; infinite where ops lack or come twice."""
    pipeline, kind = number_groups(trace.replica, trace.step), _KIND_OF[trace.phase]
    count = np.bincount(pipeline)
    usual = count == Counter(count.tolist()).most_common(1)[0][0]
    op = np.stack([pipeline, kind, trace.stage, trace.microbatch])[:, usual[pipeline] & (kind < 2)]
    size = usual.sum() * len(np.unique(op[1])) * trace.stages * (int(op[3].max()) + 1)
    if op.shape[1] != size or np.unique(op, axis=1).shape[1] != size or op[3].min() < 0:
        return np.inf
    rows = np.lexsort(
        [trace.end, trace.start, trace.step * trace.has_step_clocks, trace.worker, trace.replica]
    )
    start, end = trace.start[rows], trace.end[rows]
    lane = number_groups(trace.replica, trace.worker, trace.step * trace.has_step_clocks)[rows]
    is_next = lane[1:] == lane[:-1]
    is_next &= (start[1:] != start[:-1]) | (end[1:] != end[:-1])  # a pair runs at once
    producers, consumers = transfers(trace, _WAYS)
    late = [(end[:-1] - start[1:])[is_next], trace.end[producers] - trace.start[consumers]]
    return float(np.concatenate(late).max(initial=0.0))
