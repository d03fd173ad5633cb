"""Numbers that files do not say: the readings that fit the counts, and those that can be.

A reading says what step, worker, stage and microbatch the k-th op of a worker is. It can be if no
two ops of a worker overlap, steps follow each other, and every op starts after all that it waits
for has ended: by the clocks as recorded, or else by clocks that differ.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.builders.one_f_one_b import Turns
from pipejax.schedules.registry import REGISTRY
from pipejax.traces.readers.parts import Columns, group_of, turn_in
from pipejax.traces.record import NONE

KINDS = {"F": 0, "B": 1, "W": 2, "I": 3}
_LACKING = ("step", "worker", "stage", "microbatch")
_OPTIONS = {"steps": "steps", "stages": "stages-per-worker", "microbatches": "microbatches"}
_EXACT, _ROUNDED = 5e-5, 0.1  # [s], and of the median op: by how much ops may start too early
_SPARSE = 4  # numbers of cells per op beyond which stages or microbatches are none
_MOST = 512  # readings that are tried
_LISTED = 4


class Sizes(NamedTuple):
    """Sizes of a run that a file or the user says; 0 where nobody does.

    Attributes:
      workers: of a pipeline.
      stages: of a worker.
      microbatches: of a pipeline in a step.
      steps: in all files.
      world: ranks of the run, of those that there are files of.
    """

    workers: int = 0
    stages: int = 0
    microbatches: int = 0
    steps: int = 0
    world: int = 0


class _Reading(NamedTuple):
    """One way to number the ops.

    Attributes:
      steps: how many.
      stages: of a worker.
      microbatches: of a pipeline.
      order: in which a worker runs stages and microbatches where nothing says it.
      is_v: whether stages go down the workers and up again, and not round.
    """

    steps: int
    stages: int
    microbatches: int
    order: str
    is_v: bool

    def text(self) -> str:
        """Name its numbers."""
        counts = zip(self[:3], ("step", "stage per worker", "microbatch"), strict=True)
        text = ", ".join(_plural(count, what) for count, what in counts if count)
        return text + (f" ({self.order})" if self.order else "") + " in a V" * self.is_v


def _plural(count: int, what: str) -> str:
    noun, *rest = what.split(" ", 1)
    many = {"microbatch": "microbatches"}.get(noun, f"{noun}s")
    return " ".join([str(count), many if count != 1 else noun, *rest])


def complete(columns: Columns, kind: NumpyArray, sizes: Sizes, *, by_step: bool) -> list[str]:
    """Put in the step, worker, stage and microbatch of ops that no column says.

    Args:
      columns: whole numbers and times by role; what it lacks is put in.
      kind: (rows) in `KINDS`, -1 of what is no op.
      sizes: that are not to be inferred.
      by_step: whether clocks differ by step.

    Returns:
      Sentences that say what was inferred, and from what.

    Raises:
      ValueError: if several readings can be, or of several none.
    """
    lacks = [name for name in _LACKING if name not in columns]
    rows = np.flatnonzero(kind >= 0)
    if "replica" not in columns:
        columns["replica"] = np.zeros(len(kind), np.int64)
    if not lacks or not len(rows):
        columns.update({name: np.full(len(kind), NONE) for name in lacks})
        return []
    doubled = group_of(kind[rows], *(values[rows] for values in columns.values()))
    _, first, again = np.unique(doubled, return_index=True, return_inverse=True)
    ops = {name: values[rows[first]] for name, values in columns.items()}
    ops["is_split"] = kind[rows[first]] == KINDS["I"]
    ops["kind"] = np.where(ops["is_split"], 1, kind[rows[first]])  # B and I take turns
    turns = _Turns.of(ops, sizes)
    readings = list(itertools.islice(turns.readings(lacks, sizes), _MOST))
    tried: dict[bytes, tuple[_Reading, Columns]] = {}
    for reading in readings:
        columns_read = turns.read(reading, lacks)
        if columns_read is not None:
            key = np.stack([columns_read[name] for name in _LACKING]).tobytes()
            tried.setdefault(key, (reading, columns_read))
    possible = [*tried.values()]
    what = ", ".join(lacks)
    if len(possible) > 1:
        possible = _consistent(possible, ops, is_ordered="step" in lacks, by_step=by_step)
    if len(possible) != 1:
        raise wrong("files", _why_not(what, readings, [reading for reading, _ in possible]))
    reading, columns_read = possible[0]
    for name in lacks:
        columns[name] = np.full(len(kind), NONE)
        columns[name][rows] = columns_read[name][again]
    if "step" in lacks:
        _put_others_into_steps(columns, kind)
    if len(tried) == 1:
        return [f"{what}: by order in time, no file says it; {reading.text()}"]
    why = "under which every op starts after what it waits for"
    return [
        f"{what}: inferred, no file says it; {reading.text()}, the only one of "
        f"{len(tried)} readings {why}"
    ]


def _why_not(what: str, readings: list[_Reading], possible: list[_Reading]) -> str:
    """Say which readings can be, and what tells them apart."""
    some = possible or readings
    listed = "; ".join(dict.fromkeys(reading.text() for reading in some[:_LISTED]))
    more = f"; and {len(some) - _LISTED} more" * (len(some) > _LISTED)
    options = [
        f"--{option} {getattr(some[-1], name)}"
        for name, option in _OPTIONS.items()
        if len({getattr(reading, name) for reading in some}) > 1
    ]
    ask = f"say which by {' or '.join(options)}, or by " if options else "say it by "
    if possible:
        why = (
            f"{len(possible)} readings let every op start after what it waits for ({listed}{more})"
        )
    elif readings:
        why = f"none of {len(readings)} readings lets every op start after what it waits for"
    else:
        why = "no reading has these sizes"
    return f"must say {what}: {why}; {ask}--columns {what.split(', ')[-1]}=NAME"


def _put_others_into_steps(columns: Columns, kind: NumpyArray) -> None:
    """Give what is no op the step of the op that began before it on its worker."""
    place = group_of(columns["replica"], columns["worker"])
    for number in np.unique(place):
        mine = np.flatnonzero(place == number)
        mine = mine[np.argsort(columns["start"][mine], kind="stable")]
        ops = mine[kind[mine] >= 0]
        if len(ops):
            at = np.searchsorted(columns["start"][ops], columns["start"][mine], "right") - 1
            columns["step"][mine] = columns["step"][ops][np.maximum(at, 0)]


class _Turns(NamedTuple):
    """Ops, and the how-manieth of its like each is.

    Attributes:
      ops: columns of the ops.
      turn: (ops) from 0, among ops of one worker and kind whose columns are the same.
      total: how many such ops there are, mostly.
      workers: of a pipeline.
    """

    ops: Columns
    turn: Int[NumpyArray, " ops"]
    total: int
    workers: int

    @classmethod
    def of(cls, ops: Columns, sizes: Sizes) -> "_Turns":
        """Count ops by what is known of them."""
        names = ("replica", "step", "worker", "stage", "chunk", "microbatch", "kind")
        group = group_of(*(ops[name] for name in names if name in ops))
        turn = turn_in(group, ops["start"], ops["end"])
        # where some backwards are whole, the k-th W is that of the k-th I
        place = group_of(*(ops[name] for name in names[:-1] if name in ops))
        first, second = (
            rows[np.lexsort([turn[rows], place[rows]])]
            for rows in map(np.flatnonzero, (ops["is_split"], ops["kind"] == KINDS["W"]))
        )
        if np.array_equal(place[first], place[second]):
            turn[second] = turn[first]
        total = Counter(np.bincount(group).tolist()).most_common(1)[0][0]
        workers = sizes.workers or int(ops.get("worker", np.zeros(1)).max()) + 1
        return cls(ops, turn, int(total), workers)

    def readings(self, lacks: list[str], sizes: Sizes) -> Iterator[_Reading]:
        """Yield all that fit the counts."""
        is_free = "stage" in lacks and "chunk" not in self.ops
        for steps in _divisors(self.total, sizes.steps) if "step" in lacks else [1]:
            count = self.total // steps
            if "worker" in lacks:
                parts = _divisors(int(self.ops["stage"].max()) + 1, sizes.stages)
            elif "stage" not in lacks:
                parts = [0]
            elif "chunk" in self.ops:
                parts = [int(self.ops["chunk"].max()) + 1]
            elif "microbatch" in lacks:
                parts = _divisors(count, sizes.stages)
            else:
                parts = [count]
            for stages in parts:
                each = count // stages if is_free else count
                if "microbatch" not in lacks and each != 1:
                    continue
                if "microbatch" in lacks and sizes.microbatches not in (0, each):
                    continue
                if sizes.stages and stages and stages != sizes.stages:
                    continue
                orders = [""]
                if is_free and "microbatch" in lacks and stages > 1:
                    orders = ["turns", "breadth first", "breadth first, last first"]
                    orders += [name for name, one in REGISTRY.items() if not one.planned]
                for order in orders:
                    for is_v in (False, True)[: 1 + (stages > 1 and order not in REGISTRY)]:
                        count_of = each if "microbatch" in lacks else 0
                        number = steps if "step" in lacks else 0
                        yield _Reading(number, stages, count_of, order, is_v)

    def read(self, reading: _Reading, lacks: list[str]) -> Columns | None:
        """Number the ops; None where the order is not that of the rows."""
        ops, columns = self.ops, dict(self.ops)
        count = self.total // max(1, reading.steps)
        turn = np.minimum(self.turn, self.total * max(1, reading.steps) - 1)
        beyond = self.turn >= self.total
        if "step" in lacks:
            columns["step"], turn = np.divmod(turn, count)
        turn = np.minimum(turn, count - 1)
        is_back = ops["kind"] > 0
        if "worker" in lacks:
            workers = (int(ops["stage"].max()) + 1) // reading.stages
            chunk, place = np.divmod(ops["stage"], workers)
            columns["worker"] = _turned(place, chunk, workers, is_v=reading.is_v)
        if "microbatch" in lacks and not {"stage", "chunk"}.isdisjoint(ops):
            columns["microbatch"] = turn + self._pipe() * count
        if "stage" in lacks:
            stages, size = reading.stages, reading.microbatches
            if reading.order in REGISTRY:
                return self._read_table(reading, columns, turn)
            if "chunk" in ops:
                chunk = ops["chunk"]
            elif reading.order or "microbatch" in lacks:
                loop, microbatch = _order(reading, self.workers)
                chunk = np.where(is_back, stages - 1 - loop[turn], loop[turn])
                columns["microbatch"] = microbatch[turn]
                if reading.order.endswith("last first"):
                    columns["microbatch"] = (
                        np.where(is_back, size - 1, 0) + np.where(is_back, -1, 1) * microbatch[turn]
                    )
            else:
                chunk = np.where(is_back, stages - 1 - turn, turn)
            place = _turned(ops["worker"], chunk, self.workers, is_v=reading.is_v)
            columns["stage"] = chunk * self.workers + place
        columns["microbatch"] = np.where(beyond, NONE, columns["microbatch"])
        return columns

    def _pipe(self) -> Int[NumpyArray, " ops"]:
        """Pipe of each op: 1 where a stage is on two workers, and not on that of its number."""
        if "worker" not in self.ops or "stage" not in self.ops:
            return np.zeros(len(self.turn), np.int64)
        stage, worker = self.ops["stage"], self.ops["worker"]
        pairs = np.unique(np.stack([stage, worker]), axis=1)
        both = pairs[0][np.flatnonzero(np.diff(pairs[0]) == 0)]
        return np.where(np.isin(stage, both) & (worker != stage), 1, 0)

    def _read_table(
        self, reading: _Reading, columns: Columns, turn: Int[NumpyArray, " ops"]
    ) -> Columns | None:
        """Number ops as the rows of a registered schedule, if each worker ran those phases."""
        builder = REGISTRY[reading.order]
        if "stages_per_worker" not in builder.options and builder.stages_per_worker == 1:
            return None
        option = {"stages_per_worker": reading.stages}
        option = option if "stages_per_worker" in builder.options else {}
        try:
            table = builder.function(
                num_workers=self.workers, num_microbatches=reading.microbatches, **option
            )
        except (ValueError, TypeError):
            return None
        cells = [
            [(KINDS.get(op.phase.name, 3), op) for c in row for op in c] for row in table.rows()
        ]
        if table.num_stages != reading.stages * self.workers:
            return None
        columns["stage"], columns["microbatch"] = np.full((2, len(turn)), NONE)
        pipeline = group_of(columns["replica"], columns["step"])
        for number, worker in itertools.product(np.unique(pipeline), range(self.workers)):
            mine = np.flatnonzero((pipeline == number) & (columns["worker"] == worker))
            keys = (columns["kind"][mine], columns["end"][mine], columns["start"][mine])
            mine = mine[np.lexsort(keys)]
            if [kind for kind, _ in cells[worker]] != columns["kind"][mine].tolist():
                return None
            columns["stage"][mine] = [op.stage for _, op in cells[worker]]
            columns["microbatch"][mine] = [op.microbatch for _, op in cells[worker]]
        return columns


def _divisors(number: int, given: int) -> list[int]:
    numbers = [given] if given else range(1, number + 1)
    return [count for count in numbers if number % count == 0]


def _turned(
    place: Int[NumpyArray, " ops"], chunk: Int[NumpyArray, " ops"], workers: int, *, is_v: bool
) -> Int[NumpyArray, " ops"]:
    """Place of a worker's stage among those of its loop, and the reverse."""
    return np.where((chunk % 2 == 1) & is_v, workers - 1 - place, place)


def _order(reading: _Reading, workers: int) -> tuple[NumpyArray, NumpyArray]:
    """Loop and microbatch of every turn of forwards."""
    if reading.order == "turns":
        turns = Turns.of(workers, reading.microbatches, reading.stages)
        return turns.loop, turns.microbatch
    loop, microbatch = np.divmod(
        np.arange(reading.stages * reading.microbatches), reading.microbatches
    )
    return loop, microbatch


def _consistent(
    readings: list[tuple[_Reading, Columns]], ops: Columns, *, is_ordered: bool, by_step: bool
) -> list[tuple[_Reading, Columns]]:
    """Keep readings that can be, by the strictest measure by which any can."""
    rounded = _ROUNDED * float(np.median(ops["end"] - ops["start"]))
    early = np.array(
        [_early(columns, is_ordered=is_ordered, by_step=by_step) for _, columns in readings]
    )
    for clocks, tolerance in itertools.product(range(2), (min(_EXACT, rounded), rounded)):
        possible = np.flatnonzero(early[:, clocks] <= tolerance)
        if len(possible):
            return [readings[k] for k in possible]
    return []


def _early(columns: Columns, *, is_ordered: bool, by_step: bool) -> tuple[float, float]:
    """Return by how much an op starts too early [s], by clocks as they are and by any."""
    never = np.inf, np.inf
    rows = np.lexsort([columns[name] for name in ("end", "start", "worker", "replica")])
    start, end, step = (columns[name][rows] for name in ("start", "end", "step"))
    lane = group_of(columns["replica"], columns["worker"])[rows]
    is_next = lane[1:] == lane[:-1]
    if by_step:
        is_next &= step[1:] == step[:-1]
    elif is_ordered and (step[1:] < step[:-1])[is_next].any():
        return never
    is_pair = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
    local = [(end[:-1] - start[1:])[is_next & ~is_pair]]
    pipeline = group_of(columns["replica"], columns["step"])
    count = np.bincount(pipeline)
    usual = count == Counter(count.tolist()).most_common(1)[0][0]
    number = np.cumsum(usual) - 1
    shape = int(usual.sum()), int(columns["stage"].max()) + 1, int(columns["microbatch"].max()) + 1
    if np.prod(shape, dtype=float) > _SPARSE * len(rows):
        return never
    begin, finish = np.full((2, 3, *shape), np.nan)
    worker = np.zeros((3, *shape), np.int64)
    rows = np.flatnonzero(usual[pipeline] & (columns["microbatch"] >= 0))
    place = (
        columns["kind"][rows],
        number[pipeline[rows]],
        columns["stage"][rows],
        columns["microbatch"][rows],
    )
    if np.bincount(np.ravel_multi_index(place, begin.shape)).max() > 1:
        return never
    begin[place], finish[place] = columns["start"][rows], columns["end"][rows]
    worker[place] = columns["worker"][rows]
    if np.isnan(begin[np.unique(columns["kind"][columns["kind"] < 2])]).any():
        return never
    local += [(finish[0] - begin[1]).ravel(), (finish[1] - begin[2]).ravel()]
    ways = [(0, slice(None, -1), slice(1, None)), (1, slice(1, None), slice(None, -1))]
    sent = [(finish[k][:, a] - begin[k][:, b]).ravel() for k, a, b in ways]
    group = pipeline if by_step else columns["replica"]
    of = np.zeros(shape[0], np.int64)
    of[number[pipeline[rows]]] = group_of(group[rows])
    ends = [
        (
            np.broadcast_to(of[:, None, None], worker[k][:, a].shape),
            worker[k][:, a],
            worker[k][:, b],
        )
        for k, a, b in ways
    ]
    keys = tuple(np.concatenate([each[k].ravel() for each in ends]) for k in range(3))
    late = np.nan_to_num(np.concatenate(sent), nan=-np.inf)
    worst = float(np.nanmax(np.concatenate([np.zeros(1), *local])))
    return max(worst, float(late.max(initial=0.0))), max(worst, _cycle(keys, -late))


def _cycle(keys: tuple[NumpyArray, ...], slack: Float[NumpyArray, " transfers"]) -> float:
    """By how much the worst round of messages is too quick, whatever the clocks [s]."""
    if not len(slack):
        return 0.0
    workers = int(max(key.max() for key in keys[1:])) + 1
    bounds = np.full((int(keys[0].max()) + 1, workers, workers), np.inf)
    np.minimum.at(bounds, keys, slack)
    for middle in range(workers):
        bounds = np.minimum(bounds, bounds[:, :, middle, None] + bounds[:, None, middle])
    return max(0.0, -float(np.diagonal(bounds, axis1=1, axis2=2).min()))
