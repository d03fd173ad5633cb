"""Encoders of other modalities before a language model: a graph of stages that leads into a chain.

Encoders have workers of their own, each a pipeline that feeds the first stage of the model; or
every worker takes part in both. Then a copy of the encoders lies on each group of so many workers
as an encoder has stages, microbatches go round these groups, and the work of encoders is run where
workers would wait for the model: while its pipe fills and empties, and in between.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.checks import MismatchError, positive
from pipejax.schedules.builders.one_f_one_b import Ops, alternate, phase_ops
from pipejax.schedules.cells.grammar import Edge, Grammar
from pipejax.schedules.cells.ops import UNIT_SLOTS, Phase, Slots
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

F, B = Phase.F, Phase.B
FOREVER = float("inf")
NONE = (FOREVER, 0, 0)
Key = tuple[int, int, int]  # phase, stage and microbatch
Queue = list[Key]
# in which order a worker takes what can start at once: ops of the model, backwards and forwards of
# encoders; which is best depends on times
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 1, 0))


class _Stages(NamedTuple):
    """Stages of encoders, one after the other, and behind them those of the model."""

    encoders: int  # how many there are
    per_encoder: int  # stages of one
    model: int  # stages of the model

    @property
    def first(self) -> int:
        return self.encoders * self.per_encoder

    @property
    def total(self) -> int:
        return self.first + self.model

    @property
    def graph(self) -> list[Edge]:
        """Edges: from a stage to the next, from the last of every encoder to the model."""
        ends = range(self.per_encoder - 1, self.first, self.per_encoder)
        return [(s, self.first if s in ends else s + 1) for s in range(self.total - 1)]

    def num_following(self, stage: int) -> int:
        """Return the number of stages after a stage."""
        if stage >= self.first:
            return self.total - 1 - stage
        return self.per_encoder - 1 - stage % self.per_encoder + self.model


def encoders_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    encoders: int = 2,
    encoder_stages: int = 1,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B of a model behind encoders, each on workers of its own, side by side.

    A worker warms up with a forward for each stage behind its own, as if its encoder and the model
    were one chain.

    Options:
      num_workers: P: those of the encoders, then those of the model.
      encoders: E, that lead to the model.
      encoder_stages: K of each encoder, one on each worker.
    """
    model = num_workers - encoders * encoder_stages
    if model < 1:
        raise MismatchError(
            f"encoders-1f1b needs more workers than the {encoders * encoder_stages} stages of its "
            f"encoders, got {num_workers}",
            "num_workers",
        )
    stages, microbatches = _Stages(encoders, encoder_stages, model), range(num_microbatches)
    rows = [_alternating_ops(s, microbatches, stages.num_following(s)) for s in range(num_workers)]
    return spread_rows("encoders-1f1b", rows, slots, grammar=Grammar(graph=stages.graph))


def filled_encoders(
    num_workers: int,
    num_microbatches: int,
    *,
    encoders: int = 2,
    encoder_stages: int = 1,
    encoder_share: float = 0.5,
    held: int | None = None,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B of a model on all workers, whose bubbles are filled with the work of its encoders.

    Each worker takes what can start first; of several orders at one moment the one with the
    shortest step is taken.

    Options:
      num_workers: P; one stage of the model each, and one of every encoder.
      encoders: E, that lead to the model.
      encoder_stages: K of each encoder; on K workers lies a copy of all encoders.
      encoder_share: what a stage of an encoder takes, in times of a stage of the model.
      held: microbatches, at least K, that a copy of an encoder may hold; all of them if None, which
        fills most.
      slots: slot durations of F and B of the model, for which the order is made.
    """
    if num_workers % encoder_stages:
        raise MismatchError(
            f"filled-encoders needs encoder_stages that divide the workers ({num_workers}), got "
            f"{encoder_stages}: copies of the encoders lie side by side",
            "encoder_stages",
        )
    copies = num_workers // encoder_stages
    max_held = num_microbatches if held is None else held
    if held is not None and held < encoder_stages:
        raise MismatchError(
            f"held must be at least encoder_stages ({encoder_stages}), or the model's pipe cannot "
            f"fill, got {held}",
            "held",
        )
    stages = _Stages(encoders, encoder_stages, num_workers)
    # the last workers wait longest for the model, so the first microbatches are theirs
    microbatch_pipes = [copies - 1 - m % copies for m in range(num_microbatches)]
    first = np.arange(num_workers).reshape(copies, encoder_stages)
    model = np.tile(np.arange(num_workers), (copies, 1))
    placement = np.concatenate([*[first] * encoders, model], axis=1).astype(np.int32)
    part = positive(encoder_share, "encoder_share")
    shares = np.array([part] * stages.first + [1.0] * num_workers)
    durations = [{p: slots[p.name] * share for p in (F, B)} for share in shares.tolist()]
    filling = _Filling(stages, placement[microbatch_pipes].tolist(), durations, max_held * copies)
    rows = min((filling.rows(order) for order in ORDERS), key=lambda run: run[1])[0]
    return spread_rows(
        "filled-encoders",
        [np.array(row, np.int32) for row in rows],
        slots,
        placement,
        pipe_of_microbatch=microbatch_pipes,
        stage_shares=(shares / shares.mean()).tolist(),
        grammar=Grammar(graph=stages.graph),
    )


def _alternating_ops(stage: int, microbatches: range, warmup: int) -> Ops:
    forwards, backwards = (phase_ops(phase, stage, microbatches) for phase in (F, B))
    return alternate(forwards, backwards, warmup)


class _Filling(NamedTuple):
    """Ops, their workers and times, and limits of what encoders hold."""

    stages: _Stages  # of encoders and model
    home: list[list[int]]  # (microbatches, stages) worker of each op
    durations: Sequence[Mapping[Phase, float]]  # by stage, then by phase, in slots
    apart: int  # microbatches from one that an encoder takes to the one whose backward comes before

    def rows(self, order: Sequence[int]) -> tuple[list[Queue], float]:
        """Let every worker take what can start first, in this order; rows and the last end."""
        queues = self._queues()
        workers, end = range(len(queues)), dict[Key, float]()
        free, rows = [0.0] * len(queues), [Queue() for _ in workers]
        best: list[tuple[float, int, int]] = [NONE] * len(queues)
        stale = {*workers}
        while True:
            for w in stale:
                heads = ((rank, q[-1]) for rank, q in zip(order, queues[w], strict=True) if q)
                candidates = ((self._start(op, free[w], end), rank) for rank, op in heads)
                best[w] = min(((*candidate, w) for candidate in candidates), default=NONE)
            start, rank, w = min(best)
            if start == FOREVER:
                return rows, max(free)
            op = queues[w][order.index(rank)].pop()
            rows[w].append(op)
            free[w] = end[op] = start + self.durations[op[1]][Phase(op[0])]
            stale = {w, *self._waiting(op)}

    def _queues(self) -> list[list[Queue]]:
        """Queues of each worker, last op first: model, encoder backwards, encoder forwards."""
        first, microbatches = self.stages.first, range(len(self.home))
        queues = []
        for r in range(self.stages.model):
            s = first + r
            model_ops = _alternating_ops(s, microbatches, self.stages.num_following(s)).tolist()
            here = [(m, e) for m in microbatches for e in range(first) if self.home[m][e] == r]
            encoder_ops = ([(int(phase), e, m) for m, e in here] for phase in (B, F))
            queues.append([q[::-1] for q in ([tuple(op) for op in model_ops], *encoder_ops)])
        return queues

    def _start(self, op: Key, free: float, end: Mapping[Key, float]) -> float:
        """Return the start of an op on a worker; `FOREVER` if an input is missing."""
        phase, stage, m = op
        ends = 1 if phase == F else 0
        waits = [(phase, pair[1 - ends], m) for pair in self.stages.graph if pair[ends] == stage]
        if phase == B:
            waits.append((int(F), stage, m))
        elif not waits and m >= self.apart:
            waits.append((int(B), stage, m - self.apart))
        return max([free, *(end.get(producer, FOREVER) for producer in waits)])

    def _waiting(self, op: Key) -> Iterator[int]:
        phase, stage, m = op
        ends = 0 if phase == F else 1
        for pair in self.stages.graph:
            if pair[ends] == stage:
                yield self.home[m][pair[1 - ends]]
