"""Encoders of other modalities before a language model: a graph of stages, joined to a chain.

Either each encoder has its own workers, a pipeline that feeds the first stage of the model. Or
every worker runs encoders and model. Then each group of K workers holds a copy of all encoders,
where K is the number of stages of an encoder. Groups take microbatches in turn, and encoders fill
the bubbles.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.checks import MismatchError, positive
from pipejax.schedules.builders.one_f_one_b import row_of_1f1b
from pipejax.schedules.builders.published import PLANNED, published
from pipejax.schedules.cells.grammar import Edge, Grammar
from pipejax.schedules.cells.ops import UNIT_SLOTS, Op, Phase, Slots
from pipejax.schedules.table.slot_simulation import table_from_ops
from pipejax.schedules.table.table import ScheduleTable

F, B = Phase.F, Phase.B
FOREVER = float("inf")
NO_START = (FOREVER, 0, 0)  # start, rank, worker
Queue = list[Op]
# ranks of (model ops, encoder backwards, encoder forwards) that can start at the same time; the
# best order depends on times
ORDERS = ((0, 1, 2), (1, 2, 0), (2, 1, 0))


class _Stages(NamedTuple):
    """Stages of encoders, encoder by encoder, then stages of the model."""

    encoders: int  # number of encoders
    per_encoder: int  # stages of one encoder
    model: int  # stages of the model

    @property
    def first_of_model(self) -> int:
        return self.encoders * self.per_encoder

    @property
    def total(self) -> int:
        return self.first_of_model + self.model

    @property
    def graph(self) -> list[Edge]:
        """Return the edges between stages: each encoder leads to the model's first stage."""
        model_stage = self.first_of_model
        last_stages = range(self.per_encoder - 1, model_stage, self.per_encoder)
        return [(s, model_stage if s in last_stages else s + 1) for s in range(self.total - 1)]

    def num_following(self, stage: int) -> int:
        """Return the number of stages after a stage, on its way to the last stage."""
        if stage >= self.first_of_model:
            return self.total - 1 - stage
        return self.per_encoder - 1 - stage % self.per_encoder + self.model


@published(
    "encoders-1f1b",
    "Jang et al., Cornstarch's modality parallelism (arXiv:2503.11367)",
    legal="P at least 3, any M",
    extends_grammar=True,
)
def encoders_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    encoders: int = 2,
    encoder_stages: int = 1,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B of a model after several encoders, with each encoder on its own workers.

    A worker warms up with a forward for each stage after its own, as if its encoder and the model
    were one chain.

    Options:
      num_workers: P: workers of the encoders, then workers of the model.
      encoders: E, encoders that lead to the model.
      encoder_stages: K, stages of each encoder, one on each worker.
    """
    model = num_workers - encoders * encoder_stages
    if model < 1:
        raise MismatchError(
            f"encoders-1f1b needs more workers than the {encoders * encoder_stages} stages of its "
            f"encoders, got {num_workers}",
            "num_workers",
        )
    stages, microbatches = _Stages(encoders, encoder_stages, model), range(num_microbatches)
    rows = [row_of_1f1b(s, microbatches, stages.num_following(s)) for s in range(num_workers)]
    return table_from_ops("encoders-1f1b", rows, slots, grammar=Grammar(graph=stages.graph))


@published(
    "filled-encoders",
    "Feng et al., Optimus (arXiv:2408.03505)",
    bytes_per_op=PLANNED,
    extends_grammar=True,
)
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

    Each worker takes the op that can start first. Of several orders for ops that can start at the
    same time, the one with the shortest step is used.

    Options:
      num_workers: P; each holds one stage of the model, and one of every encoder.
      encoders: E, encoders that lead to the model.
      encoder_stages: K, stages of each encoder; K workers hold a copy of all encoders.
      encoder_share: time of an encoder's stage, in times of a stage of the model.
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
    # the last workers wait longest for the model, so they get the first microbatches
    microbatch_pipes = [copies - 1 - m % copies for m in range(num_microbatches)]
    encoder = np.arange(num_workers).reshape(copies, encoder_stages)
    model = np.tile(np.arange(num_workers), (copies, 1))
    placement = np.concatenate([*[encoder] * encoders, model], axis=1).astype(np.int32)
    relative_time = positive(encoder_share, "encoder_share")
    shares = np.array([relative_time] * stages.first_of_model + [1.0] * num_workers)
    durations = [{p: slots[p.name] * share for p in (F, B)} for share in shares.tolist()]
    filling = _Filling(stages, placement[microbatch_pipes].tolist(), durations, max_held * copies)
    runs = [filling.run(order) for order in ORDERS]  # (rows, end of the step) of each
    rows, _ = min(runs, key=lambda run: run[1])
    return table_from_ops(
        "filled-encoders",
        [np.array(row, np.int32) for row in rows],
        slots,
        placement,
        pipe_of_microbatch=microbatch_pipes,
        stage_shares=(shares / shares.mean()).tolist(),
        grammar=Grammar(graph=stages.graph),
    )


class _Filling(NamedTuple):
    """List scheduling of a model and its encoders on the same workers."""

    stages: _Stages  # stages of encoders and model
    stage_workers: list[list[int]]  # (microbatches, stages) worker of each op
    durations: Sequence[Mapping[Phase, float]]  # (stages) {phase: slots}
    max_in_flight: int  # microbatches that all copies of an encoder may hold

    def run(self, order: Sequence[int]) -> tuple[list[Queue], float]:
        """Repeatedly run the op that can start first; return (rows of workers, last end)."""
        # three queues per worker, in `order`: at equal starts, the op of the first queue runs
        queues = [[row[order.index(rank)] for rank in range(3)] for row in self._worker_queues()]
        workers, ends = range(len(queues)), dict[Op, float]()
        free, rows = [0.0] * len(queues), [Queue() for _ in workers]
        candidates: list[tuple[float, int, int]] = [NO_START] * len(queues)  # each worker's next op
        changed_workers = {*workers}
        while True:
            for w in changed_workers:
                heads = ((rank, queue[-1]) for rank, queue in enumerate(queues[w]) if queue)
                starts = ((self._earliest_start(op, free[w], ends), rank, w) for rank, op in heads)
                candidates[w] = min(starts, default=NO_START)
            start, rank, w = min(candidates)
            if start == FOREVER:
                return rows, max(free)
            op = queues[w][rank].pop()
            rows[w].append(op)
            free[w] = ends[op] = start + self.durations[op.stage][op.phase]
            changed_workers = {w, *self._consumer_workers(op)}  # only these have new candidates

    def _worker_queues(self) -> list[list[Queue]]:
        """Return each worker's queues, last op first: model, encoder backwards, and forwards."""
        first, microbatches = self.stages.first_of_model, range(len(self.stage_workers))
        queues = []
        for r in range(self.stages.model):
            stage = first + r
            warmup = self.stages.num_following(stage)
            model_ops = [Op(*op) for op in row_of_1f1b(stage, microbatches, warmup).tolist()]
            encoder_ops = [
                (e, m) for m in microbatches for e in range(first) if self.stage_workers[m][e] == r
            ]
            backwards, forwards = ([Op(phase, *op) for op in encoder_ops] for phase in (B, F))
            queues.append([model_ops[::-1], backwards[::-1], forwards[::-1]])
        return queues

    def _earliest_start(self, op: Op, free: float, ends: Mapping[Op, float]) -> float:
        """Return the earliest start of an op, on a worker that is free from time `free` on."""
        # `ends` are the ends of ops that have run; the start is `FOREVER` if an input is missing.
        _, stage, m = op
        graph = self.stages.graph
        if op.phase == F:
            producers = [Op(F, source, m) for source, target in graph if target == stage]
            if not producers and m >= self.max_in_flight:
                producers = [Op(B, stage, m - self.max_in_flight)]
        else:  # backwards reverse the graph
            producers = [Op(B, target, m) for source, target in graph if source == stage]
            producers.append(Op(F, stage, m))
        return max([free, *(ends.get(producer, FOREVER) for producer in producers)])

    def _consumer_workers(self, op: Op) -> Iterator[int]:
        """Yield the workers of the ops on other stages that wait for an op."""
        phase, stage, m = op
        for source, target in self.stages.graph:
            if phase == F and source == stage:
                yield self.stage_workers[m][target]
            elif phase == B and target == stage:
                yield self.stage_workers[m][source]
