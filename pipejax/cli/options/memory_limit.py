"""`--memory-limit`: activations, or bytes of a device with a model in it."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.units import read_bytes
from pipejax.cli.options.activations import ActivationOptions
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.numbers import gigabytes
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.table.held_activations import static_bytes
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.costs.workload import Workload


OPTION = "--memory-limit"


class Room(NamedTuple):
    """What activations may take on the workers of a table.

    Attributes:
      limits: (workers) room for activations.
      sizes: (stages) what one takes.
      weight_share: (stages) share of it that W needs after I.
      unit: "activations" or "bytes".
      static: (workers) bytes of parameters, gradients and optimizer beside it, or None.
    """

    limits: Float[NumpyArray, " workers"]
    sizes: Float[NumpyArray, " stages"]
    weight_share: Float[NumpyArray, " stages"]
    unit: str
    static: Float[NumpyArray, " workers"] | None

    @property
    def activations(self) -> float:
        """Activations that fit on any worker, for schedules that count them."""
        return float(self.limits.min() / self.sizes.max())

    def text(self, level: float) -> str:
        """How a level of memory is printed."""
        return gigabytes(level) if self.unit == "bytes" else f"{level:.4g}"


class MemoryLimit(NamedTuple):
    """A limit of all workers, or one for each.

    Attributes:
      values: activations, or bytes of a device.
      in_bytes: which of the two.
    """

    values: list[float]
    in_bytes: bool

    @classmethod
    def read(cls, text: str) -> "MemoryLimit":
        """Read the option.

        Raises:
          ValueError: if it is not a number above 0, with a unit of bytes or without, or several.
        """
        entries = [entry.strip() for entry in text.split(",")]
        given = [read_bytes(entry, OPTION) for entry in entries]
        in_bytes = [value for value in given if value is not None]
        if in_bytes and len(in_bytes) < len(entries):
            raise ValueError(f"{OPTION}: give all entries in bytes or none, got {text!r}")
        values = in_bytes or [parse_seconds(entry, OPTION) for entry in entries]
        if min(values) == 0:
            raise ValueError(f"{OPTION} must be above 0, got {text!r}")
        return cls(values, bool(in_bytes))

    def room(
        self, table: ScheduleTable, activations: ActivationOptions, workload: "Workload | None"
    ) -> Room:
        """Return what it leaves for activations.

        Raises:
          ValueError: if it has not one entry or one for each worker, sizes and stages differ in
            number, or bytes are given without a model or sizes with one.
          InfeasibleError: if the rest of the model fills a device.
        """
        from pipejax.costs.workload import stage_bytes
        from pipejax.search.schedule.problem import InfeasibleError

        limits = _for_each(self.values, table.num_workers, OPTION, "workers")
        if not self.in_bytes:
            sizes = activations.sizes or [1.0]
            each = _for_each(sizes, table.num_stages, "--activation-sizes", "stages")
            given = activations.weight_share
            share = np.full(table.num_stages, WEIGHT_SHARE if given is None else given)
            return Room(limits, each, share, "activations", None)
        if workload is None:
            raise ValueError(f"{OPTION} in bytes needs --model, which says what they hold")
        if activations.sizes is not None:
            raise ValueError("--activation-sizes does not go with --model, which has its own")
        own_bytes, whole, share, _, version = map(np.asarray, stage_bytes(workload, table))
        static = static_bytes(table, own_bytes, version)
        for worker, (limit, own) in enumerate(zip(limits, static, strict=True)):
            if own >= limit:
                raise InfeasibleError(
                    f"parameters, gradients and optimizer of worker {worker} alone take "
                    f"{gigabytes(own)}: infeasible"
                )
        return Room(limits - static, whole, share, "bytes", static)


def _for_each(
    values: list[float], count: int, option: str, what: str
) -> Float[NumpyArray, " entries"]:
    if len(values) not in (1, count):
        raise ValueError(
            f"{option} must be a number or one for each of {count} {what}, got {len(values)}"
        )
    return np.broadcast_to(np.array(values, float), (count,)).copy()
