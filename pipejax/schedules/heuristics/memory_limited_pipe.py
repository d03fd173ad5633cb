"""A pipe with times and memory limits, the input of memory-aware heuristics."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, as_floats, share, whole_number
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.cells.ops import SPLIT
from pipejax.schedules.heuristics.list_scheduling import ROUNDING
from pipejax.schedules.heuristics.timeline import Work

Numbers = float | Sequence[float] | Float[NumpyArray, "..."]


class LimitedPipe(NamedTuple):
    """One stage per worker: times of its ops and messages, sizes and limits of its activations.

    Attributes:
      num_microbatches: M.
      forward: (stages) time of F, in any unit.
      input_grad: (stages) time of I.
      weight_grad: (stages) time of W.
      there: (boundaries) time of a message from a stage to the next one.
      back: (boundaries) time of a message from the next stage back.
      sizes: (stages) memory that an activation takes at F.
      limits: (stages) memory for activations on the worker of each stage.
      weight_share: share of an activation that only W frees; I frees the rest.
    """

    num_microbatches: int
    forward: Float[NumpyArray, " stages"]
    input_grad: Float[NumpyArray, " stages"]
    weight_grad: Float[NumpyArray, " stages"]
    there: Float[NumpyArray, " boundaries"]
    back: Float[NumpyArray, " boundaries"]
    sizes: Float[NumpyArray, " stages"]
    limits: Float[NumpyArray, " stages"]
    weight_share: float

    @classmethod
    def of(
        cls,
        num_stages: int,
        num_microbatches: int,
        *,
        weight_share: float = WEIGHT_SHARE,
        **given: Numbers,
    ) -> "LimitedPipe":
        """Check the numbers; a single one stands for every stage or boundary.

        Messages take no time, or back as long as there, and activations have size 1, where nothing
        else is given.
        """
        stages, there = whole_number(num_stages, "num_workers"), given.get("there", 0.0)
        given = {"there": there, "back": there, "sizes": 1.0, **given}
        entries = dict.fromkeys(given, stages) | {"there": stages - 1, "back": stages - 1}
        pipe = cls(
            num_microbatches=whole_number(num_microbatches, "num_microbatches"),
            weight_share=share(weight_share, "weight_share"),
            **{name: per_entry(value, entries[name], name) for name, value in given.items()},
        )
        for worker, (limit, size) in enumerate(zip(pipe.limits, pipe.sizes, strict=True)):
            if limit * (1 + ROUNDING) < size:
                raise MismatchError(
                    f"the memory limit of worker {worker} is {limit:g}: one activation of its "
                    f"stage takes {size:g}"
                )
        return pipe

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    def work(self) -> Work:
        """Return the work for a scheduler; limits leave room for the rounding of sums."""
        times = self.forward, self.input_grad, self.weight_grad
        lag = [[self.there.tolist()], [self.back.tolist()]]
        return Work(
            placement=[list(range(self.num_stages))],
            pipe_of=[0] * self.num_microbatches,
            lasts=dict(zip(SPLIT, np.stack(times).tolist(), strict=True)),
            lag=lag,
            transmit=np.zeros_like(lag).tolist(),
            sizes=self.sizes.tolist(),
            kept=(self.sizes * self.weight_share).tolist(),
            limits=(self.limits * (1 + ROUNDING)).tolist(),
        )


def per_entry(value: Numbers, count: int, name: str) -> Float[NumpyArray, " entries"]:
    """Read one number for all, or a sequence: (entries) numbers."""
    array = as_floats(value, name)
    if array.ndim == 0:
        array = np.full(count, float(array))
    if array.shape != (count,) or not np.all(np.isfinite(array)) or (array < 0).any():
        raise ValueError(f"{name} must be {count} finite numbers of at least 0, got {value!r}")
    return array
