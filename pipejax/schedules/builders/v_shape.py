"""V schedules: two stages per worker, placed down the workers and up again, in limited memory.

A building block gives the starts of the ops of one microbatch; the other microbatches repeat it at
an interval of six ops, the number of ops of a microbatch on each worker (arXiv:2405.15362).
Published blocks assume ops of one length (F = I = W). A repeated block leaves workers idle while
the pipe fills and empties. So the list scheduler runs the ops in the block's order without gaps,
and reorders ops if the memory limit allows it. For other times, several orders are tried.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, number, resolve_choice, share
from pipejax.schedules.builders.one_f_one_b import Ops, one_f_one_b, phase_ops
from pipejax.schedules.builders.published import CONTROLLABLE, PLANNED, ZERO_BUBBLE, published
from pipejax.schedules.cells.cells import zigzag
from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.cells.ops import (
    INPUT_GRADS,
    NETWORK,
    NO_STAGE,
    SPLIT,
    UNIT_SLOTS,
    WORKER,
    AnyPhase,
    OpKind,
    Phase,
    Slots,
)
from pipejax.schedules.heuristics.building_block import (
    BuildingBlock,
    Order,
    Waits,
    block_rows,
    building_block,
    least_interval,
    rows_keep_limits,
)
from pipejax.schedules.heuristics.list_scheduling import Rules, list_schedule
from pipejax.schedules.heuristics.timeline import (
    FOREVER,
    ROUNDING,
    TimedOps,
    Timeline,
    Work,
    run_rows,
)
from pipejax.schedules.table.held_activations import WEIGHT_SHARE
from pipejax.schedules.table.slot_simulation import cell_durations, slot_times, table_from_ops
from pipejax.schedules.table.table import ScheduleTable

# Search for the run of building blocks with the shortest span of a worker.
#
# If no op fills a gap exactly, a worker that has idled less than another may wait. Other workers
# start an op although it makes the next one late. Idle times are known after a run, so each order
# runs again with these times (Qi et al., arXiv:2401.10241, 3.1), as long as spans get shorter.

MAX_RUNS = 3  # runs of one order
SAMPLE_MICROBATCHES = 3  # per worker, in short runs that select orders
SELECTED_ORDERS = 4  # best orders of short runs, which are run in full
# (delay, has_weights_last, runs_ahead, prefers_weights, overrun_phases), fields of `Order`
ORDER_RULES: tuple[tuple[float, bool, bool, bool, tuple[Phase, ...]], ...] = (
    (0.0, True, True, False, (Phase.W,)),
    (FOREVER, True, True, False, (Phase.W,)),
    (FOREVER, True, True, False, SPLIT),
    (FOREVER, True, True, True, SPLIT),
)


def shortest_run(work: Work, blocks: Sequence[BuildingBlock]) -> Timeline | None:
    """Run blocks in several orders; return the run with the least span of its slowest worker."""
    # Return None if no run keeps the limits. With many microbatches, short runs select orders.
    orders = [Order(block, *rule) for block, rule in itertools.product(blocks, ORDER_RULES)]
    sample = SAMPLE_MICROBATCHES * len(work.limits)
    if len(work.microbatch_pipes) > sample + sample // 2:  # else the sample saves nothing
        short = work._replace(microbatch_pipes=work.microbatch_pipes[:sample])
        spans = [min((span for _, span in _runs(short, o)), default=FOREVER) for o in orders]
        orders = [orders[k] for k in np.argsort(spans, kind="stable")[:SELECTED_ORDERS]]
    best, best_span = None, FOREVER
    lower_bound = least_interval(work) * len(work.microbatch_pipes)
    for run, span in itertools.chain.from_iterable(_runs(work, order) for order in orders):
        if span < best_span:
            best, best_span = run, span
        if span <= lower_bound:
            break
    return best


def _runs(work: Work, order: Order) -> Iterator[tuple[Timeline, float]]:
    """Yield (run, longest span of a worker) for the runs of an order."""
    # Each run knows the idle times of the previous run. Runs end when no span gets shorter.
    block, shortest = order.block, FOREVER
    offsets = block.offsets[: len(work.microbatch_pipes)]
    order = order._replace(block=block._replace(offsets=offsets))
    for _ in range(MAX_RUNS):
        run = list_schedule(work, Rules(order=order))
        if run is None:
            return
        ops, workers = TimedOps.from_tuples(run.log), len(run.clock)
        spans = ops.spans(workers)
        span = float(spans.max())
        yield run, span
        if span >= shortest:
            return
        # the next run may let a worker wait longer, until it idles as much as the idlest one
        idle = spans - np.bincount(ops.worker, ops.end - ops.start, workers)
        shortest, order = span, order._replace(spare=(idle.max() - idle).tolist())


INTERVAL = 6  # ops: F, I and W of two stages
ZB_V = Waits(forward=[3, 1], gradient=[1, 3], turns=[2, 0, 2])
DENSE_ZB_V = ZB_V._replace(turns=[0, 0, 0])  # without waits between the two stages of a worker


@published("v-half", CONTROLLABLE, planned=True, bytes_per_op=PLANNED, stages_per_worker=2)
def v_half(
    num_workers: int, num_microbatches: int, *, transfer: float = 0.0, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """V schedule with half the memory of 1F1B and, at F = I = W, about half of its bubble.

    Forwards and gradients go down at every second op, up at every op: a worker holds P // 2 + 1
    microbatches. For other times several orders are tried in this memory, also the one of
    F = I = W; the order with the shortest span of a worker is used.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      transfer: time of a message, in slots.

    Example:
      >>> print(v_half(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12
        worker 0  0F0  0F1   .   3F0  3I0  3F1  3I1  0I0  3W0  0I1  0W0  3W1  0W1
        worker 1   .   1F0  2F0  1F1  2F1  2I0  1I0  2I1  1I1  1W0  2W0  1W1  2W1
    """
    limits = [2 * (num_workers // 2 + 1)] * num_workers
    return _v_table("v-half", num_microbatches, _half_waits(num_workers), limits, slots, transfer)


@published("v-min", CONTROLLABLE, planned=True, bytes_per_op=PLANNED, stages_per_worker=2)
def v_min(
    num_workers: int, num_microbatches: int, *, transfer: float = 0.0, slots: Slots = UNIT_SLOTS
) -> ScheduleTable:
    """V schedule with a third of 1F1B's memory and, at F = I = W, about 2/3 of its bubble.

    A microbatch never waits on its way: a worker holds (P + 4) // 3 microbatches. Other slots are
    planned as in `v_half`.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      transfer: time of a message, in slots.

    Example:
      >>> print(v_min(2, 2))
                   0    1    2    3    4    5    6    7    8    9   10   11   12   13   14
        worker 0  0F0   .    .   3F0  3I0  0F1  3W0  0I0  0W0  3F1  3I1  3W1   .   0I1  0W1
        worker 1   .   1F0  2F0   .    .   2I0  1I0  1F1  2F1  1W0  2W0  2I1  1I1  1W1  2W1
    """
    limits = [2 * ((num_workers + 4) // 3)] * num_workers
    return _v_table("v-min", num_microbatches, _min_waits(num_workers), limits, slots, transfer)


@published("zb-v", ZERO_BUBBLE, planned=True, bytes_per_op=PLANNED, stages_per_worker=2)
def zb_v(
    num_workers: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    weight_share: float = WEIGHT_SHARE,
    transfer: float = 0.0,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """V schedule with the memory of 1F1B and, at F = I = W, no bubble in a worker's span.

    With equal F, I and W and free messages this is the published building block, with P
    microbatches on a worker. For other times or limits, building blocks are run in many orders,
    and the run with the shortest span of a worker is used.

    Options:
      num_workers: P; each holds stages w and 2 P - 1 - w.
      memory_limit: activations of one stage that a worker may hold, at least 2; 2 P if None.
      weight_share: share of an activation that W frees; I frees the rest.
      transfer: time of a message, in slots.
    """
    numbers = number(transfer, "transfer"), share(weight_share, "weight_share")
    usual_limit = 2.0 * num_workers
    limit = usual_limit if memory_limit is None else number(memory_limit, "memory_limit")
    if limit * (1 + ROUNDING) < 2:
        raise MismatchError(
            f"the memory limit of a worker is {limit:g}: a microbatch on its two stages takes 2",
            "memory_limit",
        )
    unit_work = _unit_work(num_microbatches, [limit] * num_workers)
    if limit == usual_limit and _has_equal_ops(slots, transfer):
        run: Timeline | None = _repeat_block(unit_work, ZB_V)
    else:
        run = shortest_run(_with_times(unit_work, slots, *numbers), _published_blocks(unit_work))
    assert run is not None  # at least one block keeps the limit
    return table_from_ops("zb-v", run.rows(), slots, zigzag(num_workers))


def _published_blocks(work: Work) -> list[BuildingBlock]:
    """Return the published building blocks, at the shortest intervals that keep memory limits."""
    workers = len(work.limits)
    if min(work.limits) >= 2 * workers:
        return [building_block(work, waits, INTERVAL) for waits in (ZB_V, DENSE_ZB_V)]
    blocks = []
    for waits in (ZB_V, _half_waits(workers), _min_waits(workers)):
        slower = (building_block(work, waits, interval) for interval in itertools.count(INTERVAL))
        blocks.append(next(b for b in slower if rows_keep_limits(work, block_rows(work, b)[0])))
    return blocks


def _with_times(work: Work, slots: Slots, transfer: float, weight_share: float) -> Work:
    """Return `Work` of the same size, with op times from slots, and a time for messages."""
    stages = len(work.sizes)
    times = {phase: [slots[phase.name]] * stages for phase in SPLIT}
    return Work.from_placement(
        np.array(work.placement),
        work.microbatch_pipes,
        times,
        transfer,
        sizes=work.sizes,
        weight_sizes=[weight_share] * stages,
        limits=[limit * (1 + ROUNDING) for limit in work.limits],
    )


def _half_waits(workers: int) -> Waits:
    gap = 0 if workers % 2 else 3  # without it, ops of even P would overlap
    return Waits(forward=[1, 0], gradient=[0, 1], turns=[1, gap, 0])


def _min_waits(workers: int) -> Waits:
    gap = 0 if workers % 3 else 2  # without it, ops of P = 3, 6, 9, .. would overlap
    return Waits(forward=[0, 0], gradient=[0, 0], turns=[0, gap, 0])


def _v_table(
    name: str,
    microbatches: int,
    waits: Waits,
    limits: Sequence[float],
    slots: Slots,
    transfer: float,
) -> ScheduleTable:
    """Build the published table or, at unequal op times, the one with the shortest worker span."""
    # The span of a worker is the time from its first start to its last end. Three orders are tried,
    # because none is always the best: W half an interval after its place in the block, as
    # published; W in the first gap; and the best order of several blocks (`shortest_run`).
    transfer, unit_work = number(transfer, "transfer"), _unit_work(microbatches, limits)
    rows = _repeat_block(unit_work, waits).rows()
    if not _has_equal_ops(slots, transfer):
        timed_work = _with_times(unit_work, slots, transfer, weight_share=1.0)
        shortest = shortest_run(timed_work, _published_blocks(unit_work))
        orders = [rows, _repeat_block(unit_work, waits, delay=0).rows()]
        if shortest is not None:
            orders.append(shortest.rows())
        rows = min(orders, key=lambda rows: run_rows(timed_work, rows).spans(len(limits)).max())
    return table_from_ops(name, rows, slots, zigzag(len(limits)))


def _has_equal_ops(slots: Slots, transfer: float) -> bool:
    """Return whether F, I and W have one duration, and messages take no time."""
    return not transfer and len({slots[phase.name] for phase in SPLIT}) == 1


def _repeat_block(work: Work, waits: Waits, delay: float = INTERVAL / 2) -> Timeline:
    """Run the repetition of a building block, in which every op takes one slot."""
    # `delay` is the time after its place in the block at which a weight gradient is due [slots].
    block = building_block(work, waits, INTERVAL)
    runs_ahead = any(any(wait) for wait in waits)  # without any wait, later ops would overlap
    order = Order(block, delay, has_weights_last=True, runs_ahead=runs_ahead, prefers_weights=False)
    run = list_schedule(work, Rules(order=order))
    assert run is not None  # the block keeps these limits
    return run


def _unit_work(microbatches: int, limits: Sequence[float]) -> Work:
    """Return the work on a V placement: one slot per op, free messages, W frees all memory."""
    placement = zigzag(len(limits))
    ones = [1] * placement.shape[1]
    times = dict.fromkeys(SPLIT, ones)
    return Work.from_placement(
        placement, [0] * microbatches, times, sizes=ones, weight_sizes=ones, limits=limits
    )


# Vocabulary parallelism: every worker computes a part of the output layer.
#
# The output of the last stage is broadcast (X). Every worker computes its part of the logits (S),
# a reduction combines them (Y), and a second pass (T) computes gradients. In variant 2, S also
# computes the gradient of the input, Y sums it, and T computes the gradient of the weights alone.
# In variant 1, T computes both gradients, and a second reduction (Z) precedes the backward of the
# last stage.
#
# So any schedule that repeats a block can be extended: backwards come one interval later for each
# reduction. Passes of the input layer are short, and only the first forward waits: left out.

_KINDS = {
    "X": OpKind("broadcast", "x", NETWORK, WORKER, is_collective=True, look=("#C186B2",)),
    "S": OpKind("vocabulary", "s", scope=WORKER, look=("#F9F08F",)),
    "Y": OpKind("reduce", "y", NETWORK, WORKER, is_collective=True, look=("#87647E",)),
    "T": OpKind("vocabulary back", "t", scope=WORKER, look=("#AC9C38",)),
}
_SECOND_REDUCTION = {
    "Z": OpKind("reduce gradient", "z", NETWORK, WORKER, is_collective=True, look=("#5A4153",))
}
_RULES = ("X <- F@last", "S <- X", "Y <- S", "T <- Y")


# {kind of pass (vocabulary op): (due times on a worker [slots], rank among ops due at a time)}
Passes = Mapping[AnyPhase, tuple[Float[NumpyArray, " microbatches"], int]]


def _vocabulary_grammars(
    kinds: Mapping[str, OpKind], rules: tuple[str, ...], reduction: str
) -> Mapping[Phase, Grammar]:
    """Return a grammar for backwards B and one for I, whose last stage waits for a reduction."""
    return {
        phase: Grammar(kinds=kinds, rules=(*_RULES, *rules, f"{phase.name}@last <- {reduction}"))
        for phase in INPUT_GRADS
    }


VARIANTS = {  # grammars, and number of reductions before a backward: Y and Z, or Y
    1: (_vocabulary_grammars({**_KINDS, **_SECOND_REDUCTION}, ("Z <- T",), "Z"), 2),
    2: (_vocabulary_grammars(_KINDS, (), "Y"), 1),
}


@published(
    "vocabulary-1f1b",
    "Yeung et al., Vocabulary Parallelism (arXiv:2411.05288)",
    extends_grammar=True,
)
def vocabulary_1f1b(
    num_workers: int,
    num_microbatches: int,
    *,
    variant: int = 2,
    overlap: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """1F1B with the vocabulary split over workers; each worker holds 1 or 2 more microbatches.

    Options:
      variant: 1 has two reductions before a backward and holds two more microbatches, 2 has one.
      overlap: whether passes follow a backward of the last stage, T beside the next S, as in the
        authors' schedules, so that compute hides exchanges; otherwise S follows its forward, and T
        of variant 2 follows the backward of its worker.
      slots: slot durations of F and B, for which the order is made.
    """
    table = one_f_one_b(num_workers, num_microbatches, slots=slots)
    return _with_vocabulary("vocabulary-1f1b", table, Phase.B, variant, overlap)


@published(
    "vocabulary-v-half",
    "Yeung et al., Vocabulary Parallelism (arXiv:2411.05288)",
    bytes_per_op=PLANNED,
    stages_per_worker=2,
    extends_grammar=True,
)
def vocabulary_v_half(
    num_workers: int,
    num_microbatches: int,
    *,
    variant: int = 2,
    overlap: bool = False,
    slots: Slots = UNIT_SLOTS,
) -> ScheduleTable:
    """V-Half with the vocabulary split over workers; each worker holds 1 or 2 more microbatches.

    Options:
      variant: as for `vocabulary-1f1b`.
      overlap: as for `vocabulary-1f1b`.
      slots: slot durations of F, I and W, for which the order is made.
    """
    table = v_half(num_workers, num_microbatches, slots=slots)
    return _with_vocabulary("vocabulary-v-half", table, Phase.I, variant, overlap)


def _with_vocabulary(
    name: str, table: ScheduleTable, gradient: Phase, variant: int, overlap: bool
) -> ScheduleTable:
    """Add passes of the vocabulary to a table, and delay its backwards (`gradient`) for them."""
    # Passes are a broadcast X, logits S, their reduction Y, gradients T, and in variant 1 a second
    # reduction Z. Each reduction delays the backwards by an interval, the time of a microbatch.
    grammars, reductions = VARIANTS[resolve_choice(variant, tuple(VARIANTS), "variant")]
    grammar, (start, finish) = grammars[gradient], slot_times(table)
    interval = cell_durations(table)[0].sum() / table.num_microbatches
    delay = reductions * interval
    due, cell_ends = start + delay * (table.phase != Phase.F), finish.ravel()
    last_gradients = table.op_cells[gradient][-1]  # (microbatches) cells of the last stage
    pass_due = cell_ends[table.op_cells[Phase.F][-1]]
    if overlap:  # the passes follow the next backward of the last stage
        pass_due = pass_due + (cell_ends[last_gradients] - start.ravel()[last_gradients])
    rows = []
    for w in range(table.num_workers):
        # (due times, rank) of each pass. At one time passes stand before ops by ascending rank: T
        # before S, because it frees memory.
        passes = {"X": (pass_due, 0), "S": (pass_due, 2), "Y": (pass_due, 4)}
        passes |= {"T": (pass_due + interval, 1), "Z": (pass_due + interval, 3)}
        if reductions == 1:
            del passes["Z"]
            if not overlap:
                backward_cells = table.backward_end_cells[table.placement[0] == w]
                passes["T"] = (cell_ends[backward_cells].max(axis=0) + delay, 4)
        phase_passes = {grammar.by_letters[letter]: item for letter, item in passes.items()}
        rows.append(_merge_passes(table, w, due[w], phase_passes))
    return table_from_ops(name, rows, table.slots, table.placement, grammar=grammar)


def _merge_passes(
    table: ScheduleTable, worker: int, due: Float[NumpyArray, " slots"], passes: Passes
) -> Ops:
    """Order a worker's ops and its passes of the vocabulary by due time [slots]."""
    # Rows are phase, stage and microbatch; `due` are the times of the table's slots.
    slots = np.flatnonzero(table.phase[worker])
    ops = [np.stack([field[worker, slots] for field in table.cells[:3]], axis=1)]
    last_rank = len(Phase)  # above the ranks of all passes
    sort_keys = [np.stack([due[slots], np.full(len(slots), last_rank)])]
    for phase, (pass_due, rank) in passes.items():
        ops.append(phase_ops(phase, NO_STAGE, range(len(pass_due))))
        sort_keys.append(np.stack([pass_due, np.full(len(pass_due), rank)]))
    time, rank = np.concatenate(sort_keys, axis=1)
    return np.concatenate(ops)[np.lexsort((rank, time))]
