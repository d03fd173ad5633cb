"""Forwards braided with backwards: experts exchange tokens while another microbatch computes.

A stage with experts is four ops each way: attention, the dispatch of tokens to their experts, the
experts, and the combine that brings tokens back. Dispatch and combine run on the lane `net`. Alone
an op and its exchanges follow each other; a forward and a backward that meet in a pair are laid so
that each one's exchanges run beside what the other one computes:

```
  compute  Fa     Bm Fm     Ba
  net      Bc     Fd Bd     Fc
```

A stage counts as one layer. Where layers are braided one by one, pairs of alike layers take as
long in all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.schedules.builders.dualpipe import one_pipe, two_pipes
from pipejax.schedules.builders.one_f_one_b import Ops, Turns, check_groups
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import FOR_W, NETWORK, UNIT_SLOTS, WHOLE, OpKind, Phase
from pipejax.schedules.cells.placement import looped, zigzag
from pipejax.schedules.table.slot_simulation import spread_rows
from pipejax.schedules.table.table import ScheduleTable

Orders = Mapping[tuple[Phase, ...], str]  # of the phases of a cell the letters it is made of

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
        "Ia": OpKind(
            "attention, of inputs",
            "ia",
            at_end={WHOLE: -1, FOR_W: 1},
            look=("#006B4B",),
        ),
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


def combined_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    stages_per_worker: int = 1,
    group_size: int | None = None,
) -> ScheduleTable:
    """1F1B whose pairs are braided: experts exchange tokens beside another microbatch's compute.

    Megatron-LM's `--overlap-moe-expert-parallel-comm`: the order of ops within a pair is that of
    `TransformerLayerSchedulePlan.run`, the order of pairs that of interleaved 1F1B, in which every
    worker warms up with a forward more, as the two of a pair may not be of one microbatch.
    Megatron-LM has it with V of at least 2, or on one worker.

    Options:
      stages_per_worker: V.
      group_size: microbatches of a group, from P to M, as in `interleaved-1f1b`.

    Example:
      >>> " ".join(str(op) for cell in next(combined_1f1b(1, 2).rows()) for op in cell)
      '0Fa0 0Fd0 0Fm0 0Fc0 0Fa1 0Bc0 0Bm0 0Fd1 0Fm1 0Bd0 0Ba0 0Fc1 0Bc1 0Bm1 0Bd1 0Ba1'
    """
    if group_size is not None:
        check_groups(num_workers, num_microbatches, group_size)
    turns = Turns.of(num_workers, num_microbatches, stages_per_worker, group_size)
    rows = []
    for r in range(num_workers):
        warmup = 2 * (num_workers - r - 1) + turns.of_others + 1
        cells = _paired(turns.forwards(r), turns.backwards(Phase.B, r), warmup)
        rows.append(woven(cells, COMBINED, COMBINED_ORDERS))
    placement = looped(num_workers, stages_per_worker)
    return spread_rows("combined-1f1b", rows, UNIT_SLOTS, placement, grammar=COMBINED)


def _paired(forwards: Ops, backwards: Ops, warmup: int) -> Sequence[Sequence[Sequence[int]]]:
    """Cells of a worker: `warmup` forwards, then pairs, then the backwards that are left."""
    ahead, back = forwards.tolist(), backwards.tolist()
    pairs = [list(pair) for pair in zip(ahead[warmup:], back, strict=False)]
    return [[op] for op in ahead[:warmup]] + pairs + [[op] for op in back[len(pairs) :]]


def braided_dualpipe(num_workers: int, num_microbatches: int) -> ScheduleTable:
    """DualPipe whose pairs are braided: what is fused there is ops on compute and network here.

    The order within a pair is that of figure 4 of the report on DeepSeek-V3: on compute MLP and
    attention of the backward, each with its weight gradient, around the MLP of the forward, and on
    the network dispatches and combines in turn.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(braided_dualpipe(4, 8)).tolist()
      [5, 5, 5, 5]
    """
    name = "braided-dualpipe"
    rows, placement, pipe_of = two_pipes(name, num_workers, num_microbatches)
    cells = [woven(_without_empty(row), SPLIT, SPLIT_ORDERS) for row in rows]
    size = cells, UNIT_SLOTS, placement
    return spread_rows(name, *size, pipe_of_microbatch=pipe_of, grammar=SPLIT)


def braided_dualpipe_v(num_workers: int, num_microbatches: int) -> ScheduleTable:
    """DualPipeV whose pairs are braided: what is fused there is ops on compute and network here.

    Example:
      >>> from pipejax.schedules.table.held_activations import peak_in_flight
      >>> peak_in_flight(braided_dualpipe_v(4, 8)).tolist()
      [9, 9, 9, 9]
    """
    rows = one_pipe("braided-dualpipe-v", num_workers, num_microbatches)
    cells = [woven(_without_empty(row), SPLIT, SPLIT_ORDERS) for row in rows]
    placement = zigzag(num_workers)
    return spread_rows("braided-dualpipe-v", cells, UNIT_SLOTS, placement, grammar=SPLIT)


def _without_empty(row: NumpyArray) -> Iterator[Sequence[Sequence[int]]]:
    """Cells of a worker without the partner that is no op."""
    return ([op for op in cell if op[0] != Phase.IDLE] for cell in row.tolist())


def woven(cells: Iterable[Sequence[Sequence[int]]], grammar: Grammar, orders: Orders) -> NumpyArray:
    """Lay the parts of each cell in their order: what begins with F is of its first op."""
    codes = {
        phases: [(int(grammar.by_letters[x]), 0 if x[0] == "F" else -1) for x in order.split()]
        for phases, order in orders.items()
    }
    found = [
        (code, *cell[which][1:])
        for cell in cells
        for code, which in codes[tuple(Phase(op[0]) for op in cell)]
    ]
    return np.array(found, np.int32)
