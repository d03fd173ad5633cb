"""The program: a lowered schedule, as arrays of integers."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Bool, Index, Int, NumpyArray
from pipejax.base.display import short_repr, short_repr_of
from pipejax.engine.lowering.cost_layout import CostLayout
from pipejax.schedules.cells.ops import STEP_END, Op, Phase, receive_of
from pipejax.schedules.table.links import Links

SOURCE = 0  # node 0 ends at time 0; a node without a predecessor waits for it
NO_WORKER = -1

IntArray = Int[Array, "..."] | Int[NumpyArray, "..."]
Messages = Int[NumpyArray, " messages"]


@short_repr
class MessageTable(NamedTuple):
    """The messages of a program, for reports and drawings; the recurrence does not need them.

    Attributes:
      producer: (messages) node that makes the message.
      carrier: (messages) node that transmits it, or the source where it uses no resource.
      consumer: (messages) node that waits for it.
      lag_index: (messages) position of the delay between producer or carrier and consumer.
      phase: (messages) SEND_F or SEND_B.
      stage: (messages) stage that sends.
      microbatch: (messages) microbatch.
      sender: (messages) worker.
      receiver: (messages) worker.
      eager: (messages) whether it is buffered for it lies below `Links.eager_below`.
    """

    producer: Messages
    carrier: Messages
    consumer: Messages
    lag_index: Messages
    phase: Messages
    stage: Messages
    microbatch: Messages
    sender: Messages
    receiver: Messages
    eager: Bool[NumpyArray, " messages"]

    def cells(self, message: Index) -> tuple[Op, Op]:
        """Return the SEND and the RECV of a message."""
        phase, stage, microbatch = (
            int(field[message]) for field in (self.phase, self.stage, self.microbatch)
        )
        send = Op(Phase(phase), stage, microbatch)
        return send, receive_of(send)


@short_repr_of("name num_workers num_microbatches num_nodes max_preds links messages")
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What every node waits for, and where its costs stand; nodes are in topological order.

    Costs are not part of it: the same program is priced with any number of cost vectors.
    Padding, if there is any, has the source as predecessor and the constant 0 as cost.

    Attributes:
      preds: (nodes, max_preds) nodes to wait for; unused entries are the source.
      lag_index: (nodes, max_preds) position of the lag of each such edge in the cost vector.
      duration_index: (nodes) position of the duration in the cost vector.
      pair_index: (pairs, 2) positions of the forward and backward that a fused pair joins.
      pair_stage: (pairs) stage of the forward of a fused pair, its place among those of the costs.
      fused: (fused, 2) node of each fused pair, and microbatch of its backward.
      phase: (nodes) phase code; SEND_F or SEND_B for a message, IDLE for source and padding.
      stage: (nodes) stage of the op, or of the producer of a message.
      microbatch: (nodes) microbatch.
      pipe: (nodes) pipe.
      worker: (nodes) worker whose compute the node occupies, or `NO_WORKER`.
      sender: (nodes) worker that sends a message, or `NO_WORKER`.
      receiver: (nodes) worker that receives it, or `NO_WORKER`.
      node_of_cell: (workers, slots) node of each cell of the table, the source where it has none.
      first_node: (workers) first op of each worker; sharding cells are no ops here.
      last_node: (workers) last op of each worker.
      messages: what is sent between workers.
      layout: positions in the cost vector.
      num_microbatches: M.
      name: schedule name.
      links: what it was lowered under.

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
        """Order of all transfers (messages) that is consistent with every queue."""
        return np.argsort(self.messages.carrier, kind="stable")

    @property
    def num_nodes(self) -> int:
        """Number of nodes, source and padding included."""
        return self.preds.shape[0]

    @property
    def beside_cells(self) -> Int[NumpyArray, " some"]:
        """Nodes of all-reduces and updates that have no cell, in topological order."""
        beside = np.isin(self.phase, STEP_END)
        beside[np.ravel(self.node_of_cell)] = False
        return np.flatnonzero(beside)

    @property
    def max_preds(self) -> int:
        """Width of the predecessor table."""
        return self.preds.shape[1]

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self.node_of_cell.shape[0]


jax.tree_util.register_dataclass(Program)
