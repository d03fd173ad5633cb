"""Where each cost stands in the flat cost vector that a program refers to.

```
[ 0 | op times: phase by stage | fused pairs | latency | transmit | latency + transmit ]
                                               each by direction, pipe, stage boundary
```

Nodes and edges of a program hold positions in this vector, so that pricing a program is one
gather and no program depends on the numbers.
"""

import dataclasses

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import TIMED, Phase

ZERO = 0  # position of the constant 0
LINK_COSTS = ("latency", "transmit", "message")  # the last is latency + transmit
_ROW = np.full(len(Phase), -1)
_ROW[list(TIMED)] = np.arange(len(TIMED))

Index = int | Int[NumpyArray, "..."]


@dataclasses.dataclass(frozen=True)
class CostLayout:
    """Positions in the flat cost vector.

    Attributes:
      num_stages: S.
      num_pipes: number of pipes.
      num_pairs: number of distinct fused pairs (stage of F, phase and stage of its backward).
      phases: phases that have cells of their own: each must have a cost.
      paired_phases: phases within fused pairs: each must have a cost, or the pair has one.
    """

    num_stages: int
    num_pipes: int
    num_pairs: int
    phases: tuple[Phase, ...]
    paired_phases: tuple[Phase, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """What each position costs: a phase letter, "pair", "latency", "transmit", "message"."""
        ops = tuple(phase.name for phase in TIMED for _ in range(self.num_stages))
        links = tuple(name for name in LINK_COSTS for _ in range(self.num_boundaries))
        return ("", *ops, *["pair"] * self.num_pairs, *links)

    @property
    def num_boundaries(self) -> int:
        """Stage boundaries over both directions and all pipes."""
        return 2 * self.num_pipes * (self.num_stages - 1)

    def op(self, phase: Index, stage: Index) -> Int[NumpyArray, "..."]:
        """Position of the time of a phase on a stage."""
        row = _ROW[phase]
        return np.where(row < 0, ZERO, 1 + row * self.num_stages + stage)

    def pair(self, pair: Index) -> Int[NumpyArray, "..."]:
        """Position of the time of a fused pair."""
        return np.asarray(1 + len(TIMED) * self.num_stages + pair)

    def link(self, kind: str, messages: Dependencies) -> Int[NumpyArray, " messages"]:
        """Positions of one of the `LINK_COSTS` of messages."""
        first = 1 + len(TIMED) * self.num_stages + self.num_pairs
        first += LINK_COSTS.index(kind) * self.num_boundaries
        pipe = messages.direction * self.num_pipes + messages.pipe
        return first + pipe * (self.num_stages - 1) + messages.boundary
