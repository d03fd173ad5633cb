"""Options of the activation memory: how large an activation is, and what W needs of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.declared import Text, WeightShare
from pipejax.cli.options.microbatches import Microbatches
from pipejax.cli.options.numbers import parse_list
from pipejax.cli.output.numbers import gigabytes
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.table.held_activations import static_bytes

if TYPE_CHECKING:
    from pipejax.analysis.activation_memory import ActivationMemory


ALIKE = Microbatches()  # nothing is said of them
_ROUNDING = 1e-9  # relative, of sums of sizes


class StageSizes(NamedTuple):
    """What the activations of a table's stages take, and what is static beside them.

    Attributes:
      unit: "activations" or "bytes".
      sizes: (stages) what one takes, or (stages, microbatches).
      weight_share: (stages) share of it that W needs after I, or by microbatch.
      checkpoints: (stages) what F leaves of it where R comes later, or by microbatch.
      static: (workers) bytes that last the whole step, if a model says how many.
    """

    unit: str
    sizes: Float[NumpyArray, "stages *microbatches"]
    weight_share: Float[NumpyArray, "stages *microbatches"]
    checkpoints: Float[NumpyArray, "stages *microbatches"]
    static: Float[NumpyArray, " workers"] | None

    @property
    def text(self) -> Callable[[float], str]:
        """How a level is printed."""
        return gigabytes if self.unit == "bytes" else "{:.4g}".format

    def held(self, evaluation: "pj.Evaluation") -> "HeldMemory":
        """Follow the memory of a run."""
        sizes = {name: getattr(self, name) for name in ("sizes", "weight_share", "checkpoints")}
        return HeldMemory(pj.activation_memory(evaluation, **sizes), self)


class HeldMemory(NamedTuple):
    """The memory of a run, and the sizes that it was counted with.

    Attributes:
      memory: the steps and peaks.
      stages: the sizes.
      limits: (workers) what the activations may take, if that is said.
    """

    memory: "ActivationMemory"
    stages: StageSizes
    limits: Float[NumpyArray, " workers"] | None = None

    @property
    def weight_share(self) -> float | list[Any]:
        """The weight share as `--json` says it: one number, or where stages differ a list."""
        shares = self.stages.weight_share
        different = np.unique(shares)
        one: float | list[Any] = float(different[0]) if len(different) == 1 else shares.tolist()
        return one

    def as_json(self) -> dict[str, Any]:
        """What `--json` says of it."""
        peaks = {"peak": self.memory.peak, "peak_at": self.memory.peak_at}
        limit = {} if self.limits is None else {"memory_limit": self.limits, "fits": not self.over}
        return {"unit": self.stages.unit, "weight_share": self.weight_share, **peaks, **limit}

    @property
    def over(self) -> list[int]:
        """Workers whose peak is above the limit."""
        return (
            []
            if self.limits is None
            else np.flatnonzero(self.memory.peak > (1 + _ROUNDING) * self.limits).tolist()
        )


class ActivationOptions(NamedTuple):
    """How activations are sized."""

    weight_share: float | None
    sizes: list[float] | None

    def of(
        self,
        table: pj.ScheduleTable,
        workload: "pj.Workload | None",
        microbatches: Microbatches = ALIKE,
    ) -> StageSizes:
        """Size the activations of a table: in bytes where a model says how many.

        Raises:
          ValueError: if sizes are given beside a model, or not one for each stage.
        """
        if workload is None and microbatches.workload is None:
            sizes = for_each(self.sizes or [1.0], table.num_stages, "--activation-sizes", "stages")
            share = WEIGHT_SHARE if self.weight_share is None else self.weight_share
            return StageSizes("activations", sizes, np.full(len(sizes), share), sizes, None)
        if self.sizes is not None:
            raise ValueError("--activation-sizes does not go with --model, which has its own")
        if workload is None:
            return StageSizes("bytes", **microbatches.bytes_of(table), static=None)
        from pipejax.costs.stage_bytes import stage_bytes

        memory = stage_bytes(workload, table)
        lasting = static_bytes(table, np.asarray(memory.static), np.asarray(memory.version))
        parts = memory.activations, memory.weight_share, memory.checkpoint
        whole, shares, inputs = map(np.asarray, parts)
        return StageSizes("bytes", whole, shares, inputs, lasting)


def for_each(
    values: list[float], count: int, option: str, what: str
) -> Float[NumpyArray, " entries"]:
    """Read one number for all, or one for each stage or worker."""
    if len(values) not in (1, count):
        raise ValueError(
            f"{option} must be a number or one for each of {count} {what}, got {len(values)}"
        )
    return np.broadcast_to(np.array(values, float), (count,)).copy()


def choose_activations(
    weight_share: WeightShare = None, activation_sizes: Text = None
) -> ActivationOptions:
    """Read how activations are sized.

    Options:
      activation_sizes: a number or one per stage, as 1,1,2.
    """
    sizes = None if activation_sizes is None else parse_list(activation_sizes, "--activation-sizes")
    return ActivationOptions(weight_share, sizes)
