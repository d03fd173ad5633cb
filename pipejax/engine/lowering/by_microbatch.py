"""A program in which every microbatch has costs of its own.

Lowering lets all microbatches of a stage read one position of the cost vector. Here each position
becomes one for each microbatch: position p of a cost is p * M + m of them, so nodes and edges are
renumbered and nothing else of the program changes.
"""

import dataclasses

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.engine.lowering.cost_layout import ZERO, CostLayout
from pipejax.engine.lowering.program import SOURCE, MessageTable, Program
from pipejax.schedules.cells.ops import Phase

Positions = Int[NumpyArray, "..."]


@remembered
def by_microbatch(program: Program) -> Program:
    """Give every microbatch costs of its own; a program keeps the result.

    Fused pairs are of two microbatches, so each becomes a kind of its own.
    """
    old, fused = program.layout, np.asarray(program.fused)
    if old.per_microbatch:
        return program
    new = dataclasses.replace(old, num_pairs=len(fused), per_microbatch=True)
    node, backward = fused.T
    of_node, lasts = _microbatch_of_nodes(program), np.asarray(program.duration_index)
    kind = lasts[node] - old.first_pair
    both = np.stack([of_node[node], backward], axis=1)
    duration = _spread(lasts, of_node, old, new)
    duration[node] = new.pair(np.arange(len(fused)))
    sent, lags = program.messages, np.asarray(program.lag_index)
    of_edge = np.zeros(lags.shape, np.int64)
    late = np.flatnonzero(sent.lag_index != ZERO)
    of_edge[tuple(message_edges(program, late))] = sent.microbatch[late]
    return dataclasses.replace(
        program,
        duration_index=duration.astype(np.int32),
        lag_index=_spread(lags, of_edge, old, new).astype(np.int32),
        pair_index=_spread(np.asarray(program.pair_index)[kind], both, old, new).astype(np.int32),
        pair_stage=np.asarray(program.pair_stage)[kind] * new.columns + of_node[node],
        messages=sent._replace(lag_index=_spread(sent.lag_index, sent.microbatch, old, new)),
        layout=new,
    )


def _microbatch_of_nodes(program: Program) -> Int[NumpyArray, " nodes"]:
    """Microbatch of each node; of an update behind the rows the first that its copy meets."""
    fields = program.microbatch, program.worker, program.stage, program.phase
    microbatch, worker, stage, phase = map(np.asarray, fields)
    copy = worker * program.layout.num_stages + stage
    first = np.full((program.num_workers, program.layout.num_stages), -1).ravel()
    meets = np.flatnonzero((microbatch >= 0) & (worker >= 0))
    meets = meets[np.argsort(-microbatch[meets], kind="stable")]  # of several the last is kept
    first[copy[meets]] = microbatch[meets]
    is_behind = (phase == Phase.U) & (microbatch < 0)
    return np.where(is_behind, first[np.where(is_behind, copy, 0)], microbatch)


def _spread(
    position: Positions, microbatch: Positions, old: CostLayout, new: CostLayout
) -> Positions:
    """Positions of ops and messages for a microbatch each; what has none reads the first."""
    place, column = np.asarray(position).astype(np.int64), np.maximum(microbatch, 0)
    op, link = place - 1, place - old.first_link
    found = np.where(
        link >= 0, new.first_link + link * new.columns + column, 1 + op * new.columns + column
    )
    return np.where(place == ZERO, ZERO, found)


def message_edges(program: Program, which: Int[NumpyArray, " some"]) -> Int[NumpyArray, "2 some"]:
    """Node, and position among its predecessors, of the edge that each of some messages delays."""
    sent = MessageTable(*(np.asarray(field)[which] for field in program.messages))
    preds, lags = np.asarray(program.preds), np.asarray(program.lag_index)
    leaves = np.where(sent.carrier == SOURCE, sent.producer, sent.carrier)
    size = np.int64(program.layout.size)

    def key(head: NumpyArray, tail: NumpyArray, lag: NumpyArray) -> Int[NumpyArray, " edges"]:
        return (head.astype(np.int64) * program.num_nodes + tail) * size + lag

    head, place = np.nonzero(lags != ZERO)
    found = key(head, preds[head, place], lags[head, place])
    order = np.argsort(found)
    wanted = key(np.asarray(sent.consumer), leaves, np.asarray(sent.lag_index))
    edge = order[np.searchsorted(found, wanted, sorter=order)]
    return np.stack([head[edge], place[edge]])
