"""`--memory-limit`: activations, or bytes of a device with a model in it."""

from typing import NamedTuple

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.data_files import read_quantity
from pipejax.cli.options.activations import ActivationOptions, StageSizes, for_each
from pipejax.cli.options.numbers import parse_list
from pipejax.cli.output.numbers import gigabytes

OPTION = "--memory-limit"


class Room(NamedTuple):
    """What activations may take on the workers of a table.

    Attributes:
      limits: (workers) room for activations.
      stages: what they take, and what is static beside them.
    """

    limits: Float[NumpyArray, " workers"]
    stages: StageSizes

    @property
    def activations(self) -> float:
        """Activations that fit on any worker, for schedules that count them."""
        return float(self.limits.min() / self.stages.sizes.max())


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
        given = [read_quantity(entry, "B", OPTION) for entry in entries]
        in_bytes = [value for value in given if value is not None]
        if in_bytes and len(in_bytes) < len(entries):
            raise ValueError(f"{OPTION}: give all entries in bytes or none, got {text!r}")
        values = in_bytes or parse_list(text, OPTION)
        if min(values) == 0:
            raise ValueError(f"{OPTION} must be above 0, got {text!r}")
        return cls(values, bool(in_bytes))

    def room(
        self,
        table: pj.ScheduleTable,
        activations: ActivationOptions,
        workload: "pj.Workload | None",
    ) -> Room:
        """Return what it leaves for activations.

        Raises:
          ValueError: if it has not one entry or one for each worker, sizes and stages differ in
            number, or bytes are given without a model or sizes with one.
          InfeasibleError: if the rest of the model fills a device.
        """
        limits = for_each(self.values, table.num_workers, OPTION, "workers")
        if self.in_bytes and workload is None:
            raise ValueError(f"{OPTION} in bytes needs --model, which says what they hold")
        stages = activations.of(table, workload if self.in_bytes else None)
        if stages.static is None:
            return Room(limits, stages)
        for worker, (limit, own) in enumerate(zip(limits, stages.static, strict=True)):
            if own >= limit:
                raise pj.InfeasibleError(
                    f"parameters, gradients and optimizer of worker {worker} alone take "
                    f"{gigabytes(own)}: infeasible"
                )
        return Room(limits - stages.static, stages)

    def levels(
        self,
        table: pj.ScheduleTable,
        shown: StageSizes,
        activations: ActivationOptions,
        workload: "pj.Workload | None",
    ) -> Float[NumpyArray, " workers"]:
        """Return it in the unit in which memory curves are shown; raises as `room` does."""
        limits = self.room(table, activations, workload).limits
        counts_in_bytes = shown.unit == "bytes" and not self.in_bytes
        return limits * shown.sizes.max() if counts_in_bytes else limits
