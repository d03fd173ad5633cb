"""DualPipe and DualPipeV: forwards and backwards of opposite directions run as fused pairs.

DualPipe runs two pipes in opposite directions. DualPipeV is half of it: one pipe goes down the
workers and up again. Direction 1 is the other pipe in DualPipe, the way up in DualPipeV. Worker r
of a half with H workers holds the early stage of direction 0 and the late one of direction 1:

```
  1  F0                            2(H-r-1) times    warm-up
  2  F0 F1                         r+1
  3  I1 W F1                       H-r-1             backwards split: W fills the gap before F1
  4  (F0 B1) (F1 B0)               N-2H+r+1          steady: fused pairs alone
  5  B1 (F1 B0)                    H-r-1
  6  B1 B0                         r+1               the later half of these are split: I1, I0
  7  W I0                          H-r-1
  8  W                             r+1
```

N is the number of microbatches of a direction. The first pair of the last worker is not fused. A W
belongs to the earliest I whose W has not run yet.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.schedules.builders.one_f_one_b import Ops, Turns, check_even, check_groups
from pipejax.schedules.builders.published import BRAIDED, EVEN, PAIRED, published
from pipejax.schedules.cells.cells import EMPTY, Placement, bidirectional, looped, zigzag
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import FOR_W, NETWORK, UNIT_SLOTS, WHOLE, OpKind, Phase, Slots
from pipejax.schedules.table.slot_simulation import table_from_ops
from pipejax.schedules.table.table import ScheduleTable

PlannedOp = tuple[Phase, int]  # phase and direction of an op whose microbatch is not chosen yet
Rows = list[Int[NumpyArray, "cells 2 3"]]  # phase, stage and microbatch of an op and its partner
F, B, I, W = Phase.F, Phase.B, Phase.I, Phase.W  # noqa: E741
ANY_DIRECTION = -1  # direction of a W: it follows from the earliest I without W
NO_OP = EMPTY[:3]


@published("dualpipe", "DeepSeek-AI, DualPipe (arXiv:2412.19437)", legal=f"{EVEN}, {PAIRED}")
def dualpipe(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """Two pipes in opposite directions, whose forwards and backwards run as fused pairs.

    Every worker holds two stages and at most P + 1 activations. Microbatches alternate between
    the pipes.

    Options:
      slots: slot durations of F, B, I and W; a fused pair takes F + B.
    """
    rows, placement, microbatch_pipes = _dualpipe_rows("dualpipe", num_workers, num_microbatches)
    return table_from_ops("dualpipe", rows, slots, placement, pipe_of_microbatch=microbatch_pipes)


def _dualpipe_rows(
    name: str, num_workers: int, num_microbatches: int
) -> tuple[Rows, Placement, list[int]]:
    """Return the rows of DualPipe, its placement, and the pipe of each microbatch."""
    check_even(name, num_workers, "workers", "the two pipes meet in the middle")
    _check_microbatches(name, num_workers, num_microbatches, 2)
    rows, half = [], num_workers // 2
    for worker in range(num_workers):
        pipes = (0, 1) if worker < half else (1, 0)  # pipes of directions 0 and 1
        microbatches = [range(pipe, num_microbatches, 2) for pipe in pipes]
        rows.append(_row(half, min(worker, num_workers - 1 - worker), microbatches))
    return rows, bidirectional(num_workers), [m % 2 for m in range(num_microbatches)]


@published(
    "dualpipe-v",
    "DeepSeek-AI, DualPipeV (deepseek-ai/DualPipe; DualPipe is arXiv:2412.19437)",
    stages_per_worker=2,
    legal=f"any P, {PAIRED}",
)
def dualpipe_v(
    num_workers: int, num_microbatches: int, *, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """DualPipe cut in half: one pipe down the workers and up again, one copy of every stage.

    Every worker holds two stages and at most 2P + 1 activations.

    Options:
      slots: slot durations of F, B, I and W; a fused pair takes F + B.
    """
    rows = _dualpipe_v_rows("dualpipe-v", num_workers, num_microbatches)
    return table_from_ops("dualpipe-v", rows, slots, zigzag(num_workers))


def _dualpipe_v_rows(name: str, num_workers: int, num_microbatches: int) -> Rows:
    _check_microbatches(name, num_workers, num_microbatches, 1)
    microbatches = [range(num_microbatches)] * 2
    return [_row(num_workers, worker, microbatches) for worker in range(num_workers)]


def _check_microbatches(name: str, workers: int, microbatches: int, step: int) -> None:
    """Refuse fewer than 2 microbatches per worker, and counts that are not multiples of `step`."""
    if microbatches % step or microbatches < 2 * workers:
        kind = "an even number of microbatches" if step == 2 else "microbatches"
        raise MismatchError(
            f"{name} needs {kind}, at least twice the workers ({2 * workers}), got {microbatches}: "
            "fewer leave no forward to fuse with a backward"
        )


def _row(half: int, worker: int, microbatches: Sequence[range]) -> Int[NumpyArray, "cells 2 3"]:
    """Return a worker's row as (cells, 2, 3): phase, stage and microbatch of two ops or `NO_OP`."""
    # `microbatches` has the microbatches of direction 0, then of direction 1.
    stages = worker, 2 * half - 1 - worker  # stages of directions 0 and 1
    pending = {
        (phase, direction): iter(members)
        for phase in (F, B)
        for direction, members in enumerate(microbatches)
    }
    without_w: deque[tuple[int, int]] = deque()  # stage and microbatch of every I without W

    def next_op(phase: Phase, direction: int) -> tuple[int, int, int]:
        """Return the next op of a phase in a direction, as phase, stage and microbatch."""
        if phase is W:
            return (W, *without_w.popleft())
        pending_phase = F if phase is F else B  # an I is the backward of the next microbatch, as B
        place = stages[direction], next(pending[pending_phase, direction])
        if phase is I:
            without_w.append(place)
        return (phase, *place)

    cells = [
        [next_op(*planned_op) for planned_op in planned_ops] + [NO_OP] * (2 - len(planned_ops))
        for planned_ops in _planned_cells(half, worker, len(microbatches[0]))
    ]
    return np.array(cells, np.int32)


def _planned_cells(half: int, worker: int, microbatches: int) -> Iterator[tuple[PlannedOp, ...]]:
    """Yield a tuple for each cell of a worker, with (phase, direction) of its one or two ops."""
    # The eight lines of the module docstring's table; `half`, `worker`, `microbatches` are H, r, N.
    num_later = half - worker - 1  # workers of the half that follow
    weight = (W, ANY_DIRECTION)
    yield from [((F, 0),)] * (2 * num_later)
    yield from [((F, 0),), ((F, 1),)] * (worker + 1)
    yield from [((I, 1),), (weight,), ((F, 1),)] * num_later
    for k in range(microbatches - 2 * half + worker + 1):
        if k == 0 and num_later == 0:  # the first pair of the last worker is not fused
            yield from [((F, 0),), ((B, 1),)]
        else:
            yield (F, 0), (B, 1)
        yield (F, 1), (B, 0)
    yield from [((B, 1),), ((F, 1), (B, 0))] * num_later
    for k in range(2 * (worker + 1)):
        phase = B if k < worker + 1 else I
        yield ((phase, 1 - k % 2),)  # directions 1 0 1 0 ..
    yield from [(weight,), ((I, 0),)] * num_later
    yield from [(weight,)] * (worker + 1)


# Forwards braided with backwards: experts exchange tokens while another microbatch computes.
#
# A stage with experts is four ops each way: attention, the dispatch of tokens to their experts,
# the experts, and the combine that brings tokens back. In a pair, the exchanges of a forward (on
# lane `net`) run beside the compute of a backward and vice versa:
#
#     compute Fa Bm Fm Ba        net Bc Fd Bd Fc

Orders = Mapping[tuple[Phase, ...], str]  # {phases of a cell: letters of its parts in order}

FORWARD_KINDS = {
    "Fa": OpKind("attention", "fa", at_start={WHOLE: 1}, look=("#A6D4F5",)),
    "Fd": OpKind("dispatch", "fd", NETWORK, look=("#D9A2CB",)),
    "Fm": OpKind("experts", "fm", look=("#6EBDEE",)),
    "Fc": OpKind("combine", "fc", NETWORK, look=("#C186B2",)),
}
ALONE = "Fa Fd Fm Fc"
FORWARD_RULES = ("Fd <- Fa", "Fm <- Fd", "Fc <- Fm", "Fa <- Fc@-1 [message]", "Bc@last <- Fc@last")
COMBINED = Grammar(
    kinds={
        **FORWARD_KINDS,
        "Bc": OpKind("combine back", "bc", NETWORK, look=("#B06500",)),
        "Bm": OpKind("experts back", "bm", look=("#D87C00",)),
        "Bd": OpKind("dispatch back", "bd", NETWORK, look=("#8A5A14",)),
        "Ba": OpKind("attention back", "ba", at_end={WHOLE: -1}, look=("#F2A93B",)),
    },
    rules=(*FORWARD_RULES, "Bm <- Bc", "Bd <- Bm", "Ba <- Bd", "Bc <- Ba@+1 [message]"),
)
COMBINED_ORDERS: Orders = {
    (Phase.F,): ALONE,
    (Phase.B,): "Bc Bm Bd Ba",
    (Phase.F, Phase.B): "Fa Bc Bm Fd Fm Bd Ba Fc",
}
SPLIT = Grammar(  # backwards in two halves: of inputs and of weights
    kinds={
        **FORWARD_KINDS,
        "Bc": OpKind("combine back", "bc", NETWORK, look=("#B06500",)),
        "Im": OpKind("experts, of inputs", "im", look=("#00875F",)),
        "Wm": OpKind("experts, of weights", "wm", look=("#F9F08F",)),
        "Bd": OpKind("dispatch back", "bd", NETWORK, look=("#8A5A14",)),
        "Ia": OpKind("attention, of inputs", "ia", at_end={WHOLE: -1, FOR_W: 1}, look=("#006B4B",)),
        "Wa": OpKind("attention, of weights", "wa", at_end={FOR_W: -1}, look=("#AC9C38",)),
    },
    rules=(
        *(*FORWARD_RULES, "Im <- Bc", "Wm <- Im", "Bd <- Im", "Ia <- Bd", "Wa <- Ia"),
        "Bc <- Ia@+1 [message]",
    ),
)
SPLIT_ORDERS: Orders = {
    (Phase.F,): ALONE,
    (Phase.B,): "Bc Im Wm Bd Ia Wa",
    (Phase.I,): "Bc Im Bd Ia",
    (Phase.W,): "Wm Wa",
    (Phase.F, Phase.B): "Fa Bc Im Fd Wm Fm Bd Ia Fc Wa",
}


@published(
    "combined-1f1b",
    "NVIDIA, Megatron-LM's combined_1f1b.py; interleaving is arXiv:2104.04473",
    bytes_per_op=BRAIDED,
    extends_grammar=True,
)
def combined_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 1,
    group_size: int | None = None,
) -> ScheduleTable:
    """1F1B with braided pairs: experts exchange tokens while another microbatch computes.

    This is Megatron-LM's `--overlap-moe-expert-parallel-comm`. The order of ops within a pair is
    that of `TransformerLayerSchedulePlan.run`. The order of pairs is that of interleaved 1F1B with
    one more warm-up forward, because the ops of a pair must not be of one microbatch. Megatron-LM
    has it with V of at least 2, or on one worker.

    Options:
      stages_per_worker: V.
      group_size: microbatches of a group, from P to M, as in `interleaved-1f1b`.
    """
    if group_size is not None:
        check_groups(num_workers, num_microbatches, group_size)
    turns = Turns.from_sizes(num_workers, num_microbatches, stages_per_worker, group_size)
    rows = []
    for r in range(num_workers):
        warmup = 2 * (num_workers - r - 1) + turns.turns_before_last_stage + 1
        cells = _paired_cells(turns.forwards(r), turns.backwards(Phase.B, r), warmup)
        rows.append(braided_row(cells, COMBINED, COMBINED_ORDERS))
    placement = looped(num_workers, stages_per_worker)
    return table_from_ops("combined-1f1b", rows, UNIT_SLOTS, placement, grammar=COMBINED)


def _paired_cells(forwards: Ops, backwards: Ops, warmup: int) -> Sequence[Sequence[Sequence[int]]]:
    """Return a worker's cells: `warmup` forwards, then fused pairs, then the other backwards."""
    forward_ops, backward_ops = forwards.tolist(), backwards.tolist()
    pairs = [list(pair) for pair in zip(forward_ops[warmup:], backward_ops, strict=False)]
    warmup_cells = [[op] for op in forward_ops[:warmup]]
    return warmup_cells + pairs + [[op] for op in backward_ops[len(pairs) :]]


@published(
    "braided-dualpipe",
    "DeepSeek-AI, DeepSeek-V3, figure 4 (arXiv:2412.19437)",
    bytes_per_op=BRAIDED,
    legal=f"{EVEN}, {PAIRED}",
    extends_grammar=True,
)
def braided_dualpipe(num_workers: int, num_microbatches: int) -> ScheduleTable:
    """DualPipe whose fused pairs are braided: split into ops on compute and on the network."""
    name = "braided-dualpipe"
    rows, placement, pipes = _dualpipe_rows(name, num_workers, num_microbatches)
    cells = map(_braid, rows)
    return table_from_ops(
        name, [*cells], UNIT_SLOTS, placement, pipe_of_microbatch=pipes, grammar=SPLIT
    )


@published(
    "braided-dualpipe-v",
    "DeepSeek-AI, DualPipeV (deepseek-ai/DualPipe; the pair is arXiv:2412.19437, figure 4)",
    bytes_per_op=BRAIDED,
    stages_per_worker=2,
    legal=f"any P, {PAIRED}",
    extends_grammar=True,
)
def braided_dualpipe_v(num_workers: int, num_microbatches: int) -> ScheduleTable:
    """DualPipeV whose fused pairs are braided: split into ops on compute and on the network."""
    name, placement = "braided-dualpipe-v", zigzag(num_workers)
    cells = map(_braid, _dualpipe_v_rows(name, num_workers, num_microbatches))
    return table_from_ops(name, [*cells], UNIT_SLOTS, placement, grammar=SPLIT)


def _braid(row: NumpyArray) -> NumpyArray:
    """Replace each op of a DualPipe row by its parts (ops, 3) on compute and network."""
    cells = ([op for op in cell if op[0] != Phase.IDLE] for cell in row.tolist())
    return braided_row(cells, SPLIT, SPLIT_ORDERS)


def braided_row(
    cells: Iterable[Sequence[Sequence[int]]], grammar: Grammar, orders: Orders
) -> NumpyArray:
    """Replace each cell of a row by its parts in order: (ops, 3) phase, stage and microbatch."""
    # The parts of a cell are the letters in `orders` for its phases. Parts of the forward begin
    # with F; all others belong to the last op of the cell. The pair 0F8 and 7B0 becomes
    # 0Fa8 7Bc0 7Bm0 0Fd8 and so on.
    parts = []
    for cell in cells:
        phases = tuple(Phase(phase) for phase, _, _ in cell)
        for letters in orders[phases].split():
            _, stage, microbatch = cell[0] if letters[0] == "F" else cell[-1]
            parts.append((int(grammar.by_letters[letters]), stage, microbatch))
    return np.array(parts, np.int32)
