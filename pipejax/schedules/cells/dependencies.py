"""Dependencies: the rules as data, and the edges that they make in a table."""

from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.schedules.cells.cells import NOWHERE, Content
from pipejax.schedules.cells.ops import Phase

FORWARD, BACKWARD = 0, 1  # direction of a message: activation, input gradient


class Rule(NamedTuple):
    """An op waits for an op of the same microbatch, `stage_offset` stages away.

    The producers are alternatives, of which a table holds at most one.

    Attributes:
      consumer: phase of the op that waits.
      producers: phases of the op that it waits for.
      stage_offset: stage of the producer minus stage of the consumer.
    """

    consumer: Phase
    producers: tuple[Phase, ...]
    stage_offset: int


RULES = (
    Rule(Phase.F, (Phase.F,), -1),
    Rule(Phase.R, (Phase.F,), 0),
    Rule(Phase.B, (Phase.F,), 0),
    Rule(Phase.I, (Phase.F,), 0),
    Rule(Phase.B, (Phase.R,), 0),
    Rule(Phase.I, (Phase.R,), 0),
    Rule(Phase.B, (Phase.I, Phase.B), 1),
    Rule(Phase.I, (Phase.I, Phase.B), 1),
    Rule(Phase.W, (Phase.I,), 0),
    Rule(Phase.U, (Phase.W, Phase.B), 0),
    Rule(Phase.O, (Phase.F,), 0),
    Rule(Phase.L, (Phase.O,), 0),
    Rule(Phase.WAIT_O, (Phase.O,), 0),
    Rule(Phase.WAIT_SEND_F, (Phase.SEND_F,), 0),
    Rule(Phase.WAIT_SEND_B, (Phase.SEND_B,), 0),
    Rule(Phase.R, (Phase.L,), 0),
    Rule(Phase.B, (Phase.L,), 0),
    Rule(Phase.I, (Phase.L,), 0),
)


class Dependencies(NamedTuple):
    """Edges between cells of a table; a cell is worker * slots + slot.

    Attributes:
      producer: (edges) cell that must end first.
      consumer: (edges) cell that waits.
      from_stage: (edges) stage of the producing op.
      to_stage: (edges) stage of the waiting op.
      microbatch: (edges) microbatch of both.
      pipe: (edges) pipe of both.
      direction: (edges) `FORWARD` or `BACKWARD`.
      crosses: (edges) whether the two cells are on different workers.
    """

    producer: Int[NumpyArray, " edges"]
    consumer: Int[NumpyArray, " edges"]
    from_stage: Int[NumpyArray, " edges"]
    to_stage: Int[NumpyArray, " edges"]
    microbatch: Int[NumpyArray, " edges"]
    pipe: Int[NumpyArray, " edges"]
    direction: Int[NumpyArray, " edges"]
    crosses: Bool[NumpyArray, " edges"]

    def messages(self) -> "Dependencies":
        """Return only the edges between different workers."""
        return self.take(self.crosses)

    def take(self, which: NumpyArray) -> "Dependencies":
        """Return some of the edges, chosen by a mask or by their numbers."""
        return Dependencies(*(field[which] for field in self))

    @property
    def boundary(self) -> Int[NumpyArray, " edges"]:
        """Stage boundary that an edge crosses: b lies between stages b and b + 1."""
        return np.minimum(self.from_stage, self.to_stage)


@remembered
def find_dependencies(content: Content) -> Dependencies:
    """Apply the rules to every op of a schedule."""
    where, pipe_of, num_stages = content.where, content.pipe_of_microbatch, content.num_stages
    found = []
    for consumer, phases, offset in RULES:
        producers = np.full_like(where[consumer], NOWHERE)
        inside = slice(max(0, -offset), num_stages - max(0, offset))
        source = slice(max(0, offset), num_stages - max(0, -offset))
        for phase in phases:
            producers[inside] = np.maximum(producers[inside], where[phase][source])
        place = stage, microbatch = np.nonzero(
            (where[consumer] != NOWHERE) & (producers != NOWHERE)
        )
        pipe, direction = pipe_of[microbatch], BACKWARD if offset > 0 else FORWARD
        crosses = content.placement[pipe, stage + offset] != content.placement[pipe, stage]
        ends = producers[place], where[consumer][place], stage + offset, stage
        found.append((*ends, microbatch, pipe, np.full_like(stage, direction), crosses))
    return Dependencies(*(np.concatenate(column) for column in zip(*found, strict=True)))
