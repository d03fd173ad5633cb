"""Where each cost stands in the flat cost vector that a program refers to.

```
[ 0 | op times: phase by stage | fused pairs | latency | transmit | latency + transmit ]
                                               each by direction, pipe, stage boundary
```

Nodes and edges of a program hold positions in this vector, so that pricing a program is one
gather and no program depends on the numbers. Where every microbatch has costs of its own
(`by_microbatch`), each entry of an op or a message becomes one for each microbatch.
"""

import dataclasses
import math

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.schedules.cells.dependencies import Dependencies
from pipejax.schedules.cells.ops import TIMED, Phase

ZERO = 0  # position of the constant 0
LINK_COSTS = ("latency", "transmit", "message")  # the last is latency + transmit
_ROW = np.full(len(Phase), -1)
_ROW[list(TIMED)] = np.arange(len(TIMED))

Index = int | Int[NumpyArray, "..."]


@short_repr
@dataclasses.dataclass(frozen=True)
class CostLayout:
    """Positions in the flat cost vector.

    Attributes:
      num_stages: S.
      num_pipes: number of pipes.
      num_pairs: number of distinct fused pairs (stage of F, phase and stage of its backward), or
        of all where every microbatch has costs of its own.
      num_microbatches: M.
      phases: phases that have cells of their own: each must have a cost.
      paired_phases: phases within fused pairs: each must have a cost, or the pair has one.
      per_microbatch: whether every microbatch has costs of its own.
      pairs_apart: whether every kind of fused pair has a time of its own, instead of the stage of
        its forward.
    """

    num_stages: int
    num_pipes: int
    num_pairs: int
    num_microbatches: int
    phases: tuple[Phase, ...]
    paired_phases: tuple[Phase, ...]
    per_microbatch: bool = False
    pairs_apart: bool = False

    @property
    def columns(self) -> int:
        """Entries of a stage or boundary: M where every microbatch has costs of its own, else 1."""
        return self.num_microbatches if self.per_microbatch else 1

    @property
    def op_shape(self) -> tuple[int, int]:
        """Shape of the times of a phase: (stages, columns)."""
        return self.num_stages, self.columns

    @property
    def pair_shape(self) -> tuple[int, int]:
        """Shape of the times of fused pairs: as of a phase, or (pairs, 1)."""
        return (self.num_pairs, 1) if self.pairs_apart else self.op_shape

    @property
    def link_shape(self) -> tuple[int, int, int, int]:
        """Shape of one of the `LINK_COSTS`: (directions, pipes, stages - 1, columns)."""
        return 2, self.num_pipes, self.num_stages - 1, self.columns

    @property
    def groups(self) -> tuple[str, ...]:
        """What each position costs: a phase letter, "pair", "latency", "transmit", "message"."""
        ops = tuple(phase.name for phase in TIMED for _ in range(math.prod(self.op_shape)))
        links = tuple(name for name in LINK_COSTS for _ in range(math.prod(self.link_shape)))
        return ("", *ops, *["pair"] * self.num_pairs, *links)

    @property
    def first_pair(self) -> int:
        """Position of the first fused pair."""
        return 1 + len(TIMED) * math.prod(self.op_shape)

    @property
    def first_link(self) -> int:
        """Position of the first of the `LINK_COSTS`."""
        return self.first_pair + self.num_pairs

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.first_link + len(LINK_COSTS) * math.prod(self.link_shape)

    def op(self, phase: Index, stage: Index) -> Int[NumpyArray, "..."]:
        """Position of the time of a phase on a stage; of its first microbatch."""
        row = _ROW[phase]
        return np.where(row < 0, ZERO, 1 + (row * self.num_stages + stage) * self.columns)

    def op_at(
        self, position: Int[NumpyArray, "..."]
    ) -> tuple[Int[NumpyArray, "..."], Int[NumpyArray, "..."]]:
        """Phase and stage of the time of an op; the inverse of `op`."""
        row, stage = np.divmod((position - 1) // self.columns, self.num_stages)
        return np.array(TIMED)[row], stage

    def pair(self, pair: Index) -> Int[NumpyArray, "..."]:
        """Position of the time of a fused pair."""
        return np.asarray(self.first_pair + pair)

    def link(self, kind: str, messages: Dependencies) -> Int[NumpyArray, " messages"]:
        """Positions of one of the `LINK_COSTS` of messages; of the first microbatch."""
        first = self.first_link + LINK_COSTS.index(kind) * math.prod(self.link_shape)
        pipe = messages.direction * self.num_pipes + messages.pipe
        place = pipe * (self.num_stages - 1) + messages.boundary
        return first + place * self.columns
