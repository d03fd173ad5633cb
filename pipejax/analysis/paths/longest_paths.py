"""The longest paths of a run with their counts: what becomes critical next."""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import bars
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.display import ResultList, with_short_repr
from pipejax.base.path_ranking import Kinds, PathRanking
from pipejax.engine.lowering.program import LINK_COSTS, SOURCE, Program
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.cells.ops import Cell, Phase


@with_short_repr("length shorter_by counts ops messages")
class LongPath(NamedTuple):
    """One of the longest paths of a run.

    Attributes:
      length: sum of its costs [s].
      shorter_by: difference to the longest path [s].
      counts: by cost, how often the path has it: letters of phases, `c_F` and `c_B` for messages
        forth and back (under `queued` and `blocking` their transmissions), `latency_F` and
        `latency_B` where those links have a latency, `pair` for fused pairs with a time of their
        own; others count as the two ops that they are.
      ops: ops and fused pairs on it, in order.
      messages: messages on it, each by its SEND, in order.
      nodes: nodes of the program on it, in order.
    """

    length: float
    shorter_by: float
    counts: Mapping[str, int]
    ops: tuple[str, ...]
    messages: tuple[str, ...]
    nodes: tuple[int, ...]


def longest_paths(
    evaluation: Evaluation, count: int, *, distinct_counts: bool = False
) -> list[LongPath]:
    """Find the longest paths of a run, from its first op to its last.

    Paths differ in at least one op or message. Equal costs make very many of them equally long;
    those that differ in what they count tell what becomes critical next.

    Args:
      evaluation: a run.
      count: how many paths.
      distinct_counts: whether to list only one path, the longest, of those with equal counts.

    Returns:
      At most so many paths, the longest first; the first one is as long as the makespan. Of
      equals, one that the recurrence prefers (its first predecessor) comes first.

    Raises:
      ValueError: if count is no whole number of at least 1.

    Cost:
      Beside one run, about the ops on the paths that are listed; with `distinct_counts` more,
      where many paths have equal counts. Nothing is compiled.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.125)
      >>> run = pj.evaluate(table, costs)
      >>> for path in pj.analysis.longest_paths(run, 3, distinct_counts=True):
      ...     print(path.length, *(f"{count} {name}" for name, count in path.counts.items()))
      16.875 4 F 6 B 3 c_F 4 c_B
      16.75 4 F 6 B 3 c_F 3 c_B
      16.75 4 F 6 B 2 c_F 4 c_B

    References:
      Jimenez and Marzal: Computing the K shortest paths (1999).
    """
    check_types(evaluation=(evaluation, Evaluation), distinct_counts=(distinct_counts, bool))
    count = whole_number(count, "count")
    program, vector = lower_and_price(evaluation.table, evaluation.costs, evaluation.links)
    names, counted = _counted(evaluation, program, vector)
    kinds = _kinds(program, counted) if distinct_counts else None
    duration, lag = vector[program.duration_index], vector[program.lag_index]
    preds = np.asarray(program.preds)
    ranking = PathRanking(preds, duration, lag, _last_nodes(program), kinds)
    labels = {bar.node: bar.label for bar in bars(evaluation)}
    message_text = _messages(program, evaluation.table.grammar.text)
    paths: list[LongPath] = []
    for path in itertools.islice(ranking.paths(), count):
        before = preds[path.nodes, path.columns]
        lags = program.lag_index[path.nodes, path.columns]
        spent = [*program.duration_index[path.nodes].tolist(), *lags.tolist()]
        how_often = counted[spent].sum(axis=0).tolist()
        sent = (
            message_text.get(key)
            for edge in zip(before.tolist(), path.nodes, lags.tolist(), strict=True)
            for key in (edge, edge[1])
        )
        paths.append(
            LongPath(
                length=path.length,
                shorter_by=evaluation.makespan - path.length,
                counts=dict(zip(names, how_often, strict=True)),
                ops=tuple(labels[node] for node in path.nodes if node in labels),
                messages=tuple(text for text in sent if text is not None),
                nodes=tuple(path.nodes),
            )
        )
    return ResultList(paths)


def _counted(
    evaluation: Evaluation, program: Program, vector: Float[NumpyArray, " costs"]
) -> tuple[list[str], Int[NumpyArray, "costs names"]]:
    """Name the costs that paths count, and how often each position of the vector counts."""
    # names, (costs, names) counts: a fused pair may be two ops of one phase
    layout = program.layout
    groups = np.array(layout.groups, object)
    each_way = math.prod(layout.link_shape) // 2
    for name in LINK_COSTS:
        is_link = groups == name
        groups[is_link] = [_MESSAGE[name] + way for way in ("_F", "_B") for _ in range(each_way)]
    parts = [[group] for group in groups.tolist()]
    if evaluation.costs.pair is None and evaluation.costs.pair_factor is None:
        # a pair lasts as long as its two ops, and counts as they do
        for position, pair in zip(
            np.flatnonzero(groups == "pair"), program.pair_index, strict=True
        ):
            parts[position] = groups[pair].tolist()
    spent = np.union1d(program.duration_index, program.lag_index)
    spent = spent[(vector[spent] > 0) | ~np.isin(groups[spent], ("latency_F", "latency_B"))]
    present = {name for position in spent.tolist() for name in parts[position]}
    ways = (f"{name}_{way}" for name in ("c", "latency") for way in "FB")
    order = (*(phase.name for phase in layout.timed), "pair", *ways)
    names = [name for name in order if name in present]
    counted = np.array([[part.count(name) for name in names] for part in parts], int)
    return names, counted.reshape(len(parts), len(names))


# how messages are counted: on a link that queues, what holds it; the latency behind it by itself
_MESSAGE = {"latency": "latency", "transmit": "c", "message": "c"}


def _kinds(program: Program, counted: Int[NumpyArray, "costs names"]) -> Kinds:
    """Write the counts of nodes and edges as one number each: a digit for every name."""
    base = 4 * program.num_nodes  # a path has fewer nodes than that, and edges, of two ops each
    digits = [base**k for k in range(counted.shape[1])]
    number = [sum(map(operator.mul, row, digits)) for row in counted.tolist()]
    return Kinds(
        [number[position] for position in program.duration_index.tolist()],
        [[number[position] for position in row] for row in program.lag_index.tolist()],
    )


def _last_nodes(program: Program) -> Int[NumpyArray, " some"]:
    """List the nodes that nothing waits for; padding is none of them."""
    last = program.phase != Phase.IDLE
    last[program.preds] = False
    return np.flatnonzero(last)


def _messages(
    program: Program, text: Callable[[Cell], str]
) -> dict[int | tuple[int, int, int], str]:
    """Name messages by the node that carries them, or by the edge: tail, head, lag position."""
    sent = program.messages
    edges = zip(*(x.tolist() for x in (sent.producer, sent.consumer, sent.lag_index)), strict=True)
    return {
        edge if carrier == SOURCE else carrier: text(sent.cells(number)[:1])
        for number, (carrier, edge) in enumerate(zip(sent.carrier.tolist(), edges, strict=True))
    }
