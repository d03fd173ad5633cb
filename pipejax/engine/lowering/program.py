"""The program: a lowered schedule as a graph whose nodes and edges index a flat cost vector.

```
[ 0 | op times: phase by stage | fused pairs | latency | transmit | latency + transmit ]
                                               each by direction, pipe, stage boundary
```

Nodes and edges hold positions in this vector, so programs do not depend on costs. If costs differ
by microbatch, each entry of an op or a message becomes one for each microbatch.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from pipejax.base import longest_path
from pipejax.base.array_types import Array, Bool, Float, Index, Int, NumpyArray
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.jax_on_demand import register
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import (
    STEP_END,
    TIMED,
    WORKER,
    AnyPhase,
    CustomPhase,
    Op,
    Phase,
    matching_receive,
)
from pipejax.schedules.table.links import Links

SOURCE = 0  # node 0 ends at time 0; a node without a predecessor waits for it
NO_WORKER = -1
ZERO = 0  # position of the constant 0
LINK_COSTS = ("latency", "transmit", "message")  # the last is latency + transmit

Places = int | Int[NumpyArray, "..."]
Sizes = tuple[int, int, int, int, tuple[tuple[str, int], ...]]  # as `Costs.check_shapes` takes
IntArray = Int[Array, "..."] | Int[NumpyArray, "..."]
Messages = Int[NumpyArray, " messages"]


@short_repr
@dataclasses.dataclass(frozen=True)
class CostLayout:
    """Position of each time in a program's flat cost vector: ops, then fused pairs, then links."""

    num_stages: int  # S
    num_pipes: int  # number of pipes
    num_pairs: int  # distinct fused pairs; all fused pairs if costs differ by microbatch
    num_microbatches: int  # M
    phases: tuple[AnyPhase, ...]  # phases of cells that are no fused pairs: each needs a cost
    paired_phases: tuple[AnyPhase, ...]  # phases in fused pairs: each, or the pair, needs a cost
    per_microbatch: bool = False  # whether costs differ by microbatch
    has_pair_times: bool = False  # whether each distinct fused pair has a time
    num_workers: int = 0  # P if the table defines kinds of ops that workers do, else 0
    custom_phases: tuple[CustomPhase, ...] = ()  # phases with a time that the table defines
    graph: tuple[tuple[int, int], ...] = ()  # edges between stages; empty for a chain

    @property
    def timed(self) -> tuple[AnyPhase, ...]:
        """All phases that have a time."""
        return (*TIMED, *self.custom_phases)

    @property
    def num_boundaries(self) -> int:
        """Number of edges between stages: S - 1 for a chain of S stages."""
        return len(self.graph) or self.num_stages - 1

    @property
    def sizes(self) -> Sizes:
        """Lengths of the axes of costs, as `Costs.check_shapes` takes them."""
        places = tuple(
            (p.kind.time, self.num_workers) for p in self.custom_phases if p.kind.scope == WORKER
        )
        microbatches = self.num_microbatches
        return self.num_stages, self.num_pipes, microbatches, self.num_boundaries, places

    def num_places(self, phase: AnyPhase) -> int:
        """Number of stages, or of workers, that a phase has separate times for."""
        return self.num_workers if phase.kind.scope == WORKER else self.num_stages

    @functools.cached_property
    def _phase_offsets(self) -> Int[NumpyArray, " codes"]:
        """First position of each phase's times, by phase code; 0 for a phase without times."""
        sizes = [self.num_places(phase) * self.times_per_place for phase in self.timed]
        offsets = np.zeros(max(self.timed) + 1, np.int64)
        offsets[list(self.timed)] = 1 + np.cumsum([0, *sizes[:-1]])
        return offsets

    @property
    def times_per_place(self) -> int:
        """Number of times per stage or boundary: M if costs differ by microbatch, else 1."""
        return self.num_microbatches if self.per_microbatch else 1

    @property
    def op_shape(self) -> tuple[int, int]:
        """Shape of the times of a phase that stages run: (stages, columns)."""
        return self.num_stages, self.times_per_place

    def phase_shape(self, phase: AnyPhase) -> tuple[int, int]:
        """Shape of the times of any phase: (stages or workers, columns)."""
        return self.num_places(phase), self.times_per_place

    @property
    def link_shape(self) -> tuple[int, int, int, int]:
        """Shape of each of the `LINK_COSTS`: (directions, pipes, boundaries, columns)."""
        return 2, self.num_pipes, self.num_boundaries, self.times_per_place

    @property
    def cost_names(self) -> tuple[str, ...]:
        """Name of the cost at each position: a phase, "pair" or one of the `LINK_COSTS`."""
        sizes = [("", 1), *((p.name, math.prod(self.phase_shape(p))) for p in self.timed)]
        sizes.append(("pair", self.num_pairs))
        sizes += [(name, math.prod(self.link_shape)) for name in LINK_COSTS]
        return tuple(name for name, size in sizes for _ in range(size))

    @functools.cached_property
    def first_pair(self) -> int:
        """Position of the first fused pair."""
        return 1 + sum(math.prod(self.phase_shape(phase)) for phase in self.timed)

    @property
    def first_link(self) -> int:
        """Position of the first of the `LINK_COSTS`."""
        return self.first_pair + self.num_pairs

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.first_link + len(LINK_COSTS) * math.prod(self.link_shape)

    def op_position(self, phase: Places, stage: Places) -> Int[NumpyArray, "..."]:
        """Return the position of a phase's time on a stage (or worker), for microbatch 0."""
        phase, offsets = np.asarray(phase), self._phase_offsets
        # codes beyond the last phase with a time have none; % only keeps the index legal
        offset = np.where(phase < len(offsets), offsets[phase % len(offsets)], 0)
        return np.where(offset == 0, ZERO, offset + np.asarray(stage) * self.times_per_place)

    def op_at(
        self, position: Int[NumpyArray, "..."]
    ) -> tuple[Int[NumpyArray, "..."], Int[NumpyArray, "..."]]:
        """Return the phase and stage of the time at a position; it inverts `op_position`."""
        offsets = self._phase_offsets[list(self.timed)]
        index = np.searchsorted(offsets, position, "right") - 1
        return np.array(self.timed, int)[index], (position - offsets[index]) // self.times_per_place

    def pair_position(self, pair: Places) -> Int[NumpyArray, "..."]:
        """Position of the time of a fused pair."""
        return np.asarray(self.first_pair + pair)

    def link_position(self, kind: str, messages: Dependencies) -> Int[NumpyArray, " messages"]:
        """Return each message's position of a link cost `kind`, for microbatch 0 (messages)."""
        offset = self.first_link + LINK_COSTS.index(kind) * math.prod(self.link_shape)
        pipe = messages.direction * self.num_pipes + messages.pipe
        index = pipe * self.num_boundaries + messages.boundary(self.graph)
        return offset + index * self.times_per_place


@short_repr
class MessageTable(NamedTuple):
    """The messages of a program, for reports and drawings; the recurrence does not need them."""

    producer: Messages  # node that makes the message
    carrier: Messages  # node that transmits it, or the source where it uses no resource
    consumer: Messages  # node that waits for the message
    lag_index: Messages  # cost position of the lag from carrier (or producer) to consumer
    phase: Messages  # SEND_F or SEND_B
    stage: Messages  # stage that sends
    microbatch: Messages
    sender: Messages  # worker
    receiver: Messages  # worker
    eager: Bool[NumpyArray, " messages"]  # whether it is buffered: below `Links.eager_below`
    direction: Messages  # index into message times
    boundary: Messages  # index into message times

    def cells(self, message: Index) -> tuple[Op, Op]:
        """Return the SEND op and the RECV op of a message."""
        phase, stage, microbatch = (
            int(field[message]) for field in (self.phase, self.stage, self.microbatch)
        )
        send = Op(Phase(phase), stage, microbatch)
        return send, matching_receive(send)


@with_short_repr("name num_workers num_microbatches num_nodes max_preds links messages")
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A lowered schedule: each node's predecessors and cost positions, in topological order.

    A program has no costs: it can be priced with any number of cost vectors. Padding nodes have the
    source as predecessor and the constant 0 as cost.

    Attributes:
      preds: (nodes, max_preds) nodes to wait for; unused entries are the source.
      lag_index: (nodes, max_preds) position of the lag of each such edge in the cost vector.
      duration_index: (nodes) position of the duration in the cost vector.
      pair_index: (pairs, 2) positions of the forward and backward that a fused pair joins.
      pair_stage: (pairs) stage of the forward of a fused pair, which is the stage of its costs.
      fused: (fused, 2) node of each fused pair, and microbatch of its backward.
      phase: (nodes) phase code; SEND_F or SEND_B for a message, IDLE for source and padding.
      stage: (nodes) stage of the op, or of the producer of a message.
      microbatch: (nodes) microbatch.
      pipe: (nodes) pipe.
      worker: (nodes) worker whose compute the node occupies, or `NO_WORKER`.
      sender: (nodes) worker that sends a message, or `NO_WORKER`.
      receiver: (nodes) worker that receives it, or `NO_WORKER`.
      node_of_cell: (workers, slots) node of each cell of the table; the source if it has none.
      first_node: (workers) first op of each worker, not counting sharding cells.
      last_node: (workers) last op of each worker.
      messages: messages between workers.
      layout: positions in the cost vector.
      num_microbatches: M.
      name: schedule name.
      links: links for which the table was lowered.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> pj.lower(table, step_end=False).preds.tolist()  # source, 0F0, 1F0, 1B0, 0B0
      [[0, 0], [0, 0], [1, 0], [2, 0], [1, 3]]
    """

    preds: IntArray
    lag_index: IntArray
    duration_index: IntArray
    pair_index: IntArray
    pair_stage: IntArray
    fused: IntArray
    phase: IntArray
    stage: IntArray
    microbatch: IntArray
    pipe: IntArray
    worker: IntArray
    sender: IntArray
    receiver: IntArray
    node_of_cell: IntArray
    first_node: IntArray
    last_node: IntArray
    messages: MessageTable
    layout: CostLayout = dataclasses.field(metadata={"static": True})
    num_microbatches: int = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    links: Links = dataclasses.field(metadata={"static": True})

    @property
    def transfer_order(self) -> Messages:
        """Indices of all messages in an order that agrees with the order in every queue."""
        return np.argsort(self.messages.carrier, kind="stable")

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including the source and padding."""
        return self.preds.shape[0]

    @property
    def beside_cells(self) -> Int[NumpyArray, " some"]:
        """Nodes of all-reduces and updates without a table cell, in topological order."""
        is_step_end = np.isin(self.phase, STEP_END)
        is_step_end[np.ravel(self.node_of_cell)] = False
        return np.flatnonzero(is_step_end)

    @property
    def max_preds(self) -> int:
        """Largest number of predecessors of a node."""
        return self.preds.shape[1]

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.node_of_cell.shape[0]


register(Program)


# The recurrence on the host, for single runs, without compilation and without JAX. The results are
# those of `recurrence` to the last bit; base/longest_path.py computes them.

Times = Float[NumpyArray, " nodes"]


class HostRun(NamedTuple):
    """Times of one run of a program: start and end of every node, and the costs used [s]."""

    preds: Int[NumpyArray, "nodes max_preds"]
    duration: Times
    lag: Float[NumpyArray, "nodes max_preds"]  # delay from each predecessor
    start: Times
    finish: Times


def run_on_host(program: Program, vector: Float[NumpyArray, " costs"]) -> HostRun:
    """Compute start and finish times of a program for a single cost vector, without JAX."""
    preds = np.asarray(program.preds)
    duration, lag = vector[program.duration_index], vector[program.lag_index]
    finish = longest_path.finish_times(preds, duration, lag)
    start = longest_path.start_times(preds, finish, lag)
    return HostRun(preds, duration, lag, start, finish)


def makespan_on_host(program: Program, vector: Float[NumpyArray, " costs"]) -> float:
    """Return the makespan [s] of a program for a single cost vector, computed without JAX."""
    duration, lag = vector[program.duration_index], vector[program.lag_index]
    return float(longest_path.finish_times(np.asarray(program.preds), duration, lag).max())


def run_many_on_host(program: Program, costs: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """Find the longest path of a program for each column of `costs`, a cost vector."""
    # Return exact path lengths (runs), and counts of each cost on the path (costs, runs).
    preds, duration = np.asarray(program.preds), np.asarray(program.duration_index)
    return longest_path.longest_paths_of_many(preds, duration, np.asarray(program.lag_index), costs)
