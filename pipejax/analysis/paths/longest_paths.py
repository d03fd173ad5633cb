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
      counts: number of each cost on the path: letters of phases, `c_F` and `c_B` for messages
        forth and back (under `queued` and `blocking` their transmissions), `latency_F` and
        `latency_B` if those links have a latency, `pair` for fused pairs with their own time;
        other pairs count as two ops.
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
    paths with other counts show which costs become critical next.

    Args:
      evaluation: a run.
      count: largest number of paths.
      distinct_counts: whether to list only one path, the longest, of those with equal counts.

    Returns:
      Paths, the longest first; the first one is as long as the makespan. Of equals, the one that
      the recurrence prefers (its first predecessor) comes first.

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
        tails = preds[path.nodes, path.columns]
        lags = program.lag_index[path.nodes, path.columns]
        costs = [*program.duration_index[path.nodes].tolist(), *lags.tolist()]
        counts = counted[costs].sum(axis=0).tolist()
        edges = zip(tails.tolist(), path.nodes, lags.tolist(), strict=True)
        texts = [message_text.get(key) for edge in edges for key in (edge, edge[1])]
        paths.append(
            LongPath(
                length=path.length,
                shorter_by=evaluation.makespan - path.length,
                counts=dict(zip(names, counts, strict=True)),
                ops=tuple(labels[node] for node in path.nodes if node in labels),
                messages=tuple(text for text in texts if text is not None),
                nodes=tuple(path.nodes),
            )
        )
    return ResultList(paths)


def _counted(
    evaluation: Evaluation, program: Program, vector: Float[NumpyArray, " costs"]
) -> tuple[list[str], Int[NumpyArray, "costs names"]]:
    """Return names of costs, and how often an entry of the vector counts for each of them.

    The vector has entries "F F B B pair latency latency ..": an F counts (1, 0, ..), a pair
    without its own time as its F and its B.
    """
    layout = program.layout
    groups = np.array(layout.groups, object)
    num_boundaries = math.prod(layout.link_shape) // 2  # of one direction, and the first half is F
    for name in LINK_COSTS:
        ways = np.repeat(["_F", "_B"], num_boundaries).tolist()
        groups[groups == name] = [_MESSAGE[name] + way for way in ways]
    parts = [[group] for group in groups.tolist()]
    if evaluation.costs.pair is None and evaluation.costs.pair_factor is None:
        entries = np.flatnonzero(groups == "pair")
        for entry, pair in zip(entries, program.pair_index, strict=True):
            parts[entry] = groups[pair].tolist()
    used = np.union1d(program.duration_index, program.lag_index)
    used = used[(vector[used] > 0) | ~np.isin(groups[used], ("latency_F", "latency_B"))]
    present = {name for entry in used.tolist() for name in parts[entry]}
    messages = (f"{name}_{way}" for name in ("c", "latency") for way in "FB")
    order = (*(phase.name for phase in layout.timed), "pair", *messages)
    names = [name for name in order if name in present]
    counted = np.array([[part.count(name) for name in names] for part in parts], int)
    return names, counted.reshape(len(parts), len(names))


# names of message costs: on a link that queues, c is the transmit time, and latency is apart
_MESSAGE = {"latency": "latency", "transmit": "c", "message": "c"}


def _kinds(program: Program, counted: Int[NumpyArray, "costs names"]) -> Kinds:
    """Write the counts of nodes and edges as one number each: a digit for every name."""
    # With base 1000, 3 F and 2 B are 2003. Numbers add up along a path, as no digit overflows.
    base = 4 * program.num_nodes  # above twice the nodes and edges of a path, of two ops each
    powers = [base**k for k in range(counted.shape[1])]
    numbers = [sum(map(operator.mul, row, powers)) for row in counted.tolist()]
    return Kinds(
        [numbers[entry] for entry in program.duration_index.tolist()],
        [[numbers[entry] for entry in row] for row in program.lag_index.tolist()],
    )


def _last_nodes(program: Program) -> Int[NumpyArray, " some"]:
    """List the nodes that no other waits for, without padding."""
    is_last = program.phase != Phase.IDLE
    is_last[program.preds] = False
    return np.flatnonzero(is_last)


def _messages(
    program: Program, text: Callable[[Cell], str]
) -> dict[int | tuple[int, int, int], str]:
    """Return the text of each message by the node that carries it, or by its edge.

    An edge is (producer, consumer, index of its lag in the cost vector).
    """
    sent = program.messages
    edges = zip(*(x.tolist() for x in (sent.producer, sent.consumer, sent.lag_index)), strict=True)
    keys = [
        edge if node == SOURCE else node
        for node, edge in zip(sent.carrier.tolist(), edges, strict=True)
    ]
    return {key: text(sent.cells(message)[:1]) for message, key in enumerate(keys)}
