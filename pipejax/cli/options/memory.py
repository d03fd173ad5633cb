"""Options of memory: size of an activation, share that W needs, and limits of workers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.data_files import read_quantity
from pipejax.cli.options.option import for_each, parse_list
from pipejax.cli.output.numbers import gigabytes
from pipejax.schedules.cells.ops import AT_WORK
from pipejax.schedules.table.held_activations import LEDGER_SIZES, WEIGHT_SHARE, static_bytes

_ROUNDING = 1e-9  # relative, of sums of sizes


class StageSizes(NamedTuple):
    """Sizes of the activations of stages, and static memory."""

    unit: str  # "activations" or "bytes"
    # (stages) size of one activation, or (stages, microbatches)
    sizes: Float[NumpyArray, " stages *microbatches"]
    # (stages) share of it that W needs after I, or by microbatch
    weight_share: Float[NumpyArray, " stages *microbatches"]
    # (stages) part that F keeps if R comes later, or by microbatch
    checkpoints: Float[NumpyArray, " stages *microbatches"]
    # (B, I and W, stages) memory that they recompute while they run, or by microbatch
    at_work: Float[NumpyArray, " ops stages *microbatches"]
    # (workers) bytes that last the whole step, if a model says how many
    static: Float[NumpyArray, " workers"] | None

    @property
    def text(self) -> Callable[[float], str]:
        """Return the function that formats an amount of memory."""
        return gigabytes if self.unit == "bytes" else "{:.4g}".format

    def held(self, evaluation: "pj.Evaluation") -> "HeldMemory":
        """Return the memory of the workers over a run, counted with these sizes."""
        sizes = {name: getattr(self, name) for name in LEDGER_SIZES}
        return HeldMemory(pj.analysis.activation_memory(evaluation, **sizes), self)


class HeldMemory(NamedTuple):
    """The memory of a run, and the sizes that it was counted with."""

    memory: "pj.results.ActivationMemory"  # the steps and peaks
    stages: StageSizes  # the sizes
    # (workers) memory that activations may take, if it is limited
    limits: Float[NumpyArray, " workers"] | None = None

    @property
    def weight_share(self) -> float | list[Any]:
        """The weight share as `--json` says it: one number, or where stages differ a list."""
        shares = self.stages.weight_share
        different = np.unique(shares)
        share: float | list[Any] = float(different[0]) if len(different) == 1 else shares.tolist()
        return share

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        peaks = {"peak": self.memory.peak, "peak_at": self.memory.peak_at}
        limit = {} if self.limits is None else {"memory_limit": self.limits, "fits": not self.over}
        return {"unit": self.stages.unit, "weight_share": self.weight_share, **peaks, **limit}

    @property
    def over(self) -> list[int]:
        """Workers whose peak is above the limit."""
        limits = np.inf if self.limits is None else self.limits
        return np.flatnonzero(self.memory.peak > (1 + _ROUNDING) * limits).tolist()


class ActivationOptions(NamedTuple):
    """Options of the sizes of activations."""

    weight_share: float | None
    sizes: list[float] | None

    def scenario_sizes(self, scenario: "pj.Scenario") -> StageSizes:
        """Return the sizes of a scenario's activations: bytes with a model, else activations."""
        model, table = scenario.source.workload, scenario.table()
        if model is None or scenario.model_workload is not None:
            return self.stage_sizes(table, scenario.workload)
        self._check_sizes()
        sizes = scenario.microbatches.ledger_sizes(model, table)
        return StageSizes("bytes", **sizes, static=None)

    def _check_sizes(self) -> None:
        if self.sizes is not None:
            raise ValueError("--activation-sizes does not go with --model, which has its own")

    def stage_sizes(self, table: pj.ScheduleTable, workload: "pj.Workload | None") -> StageSizes:
        """Size the activations of a table, in bytes with a workload, else in whole activations."""
        if workload is None:
            sizes = for_each(self.sizes or [1.0], table.num_stages, "--activation-sizes", "stages")
            share = WEIGHT_SHARE if self.weight_share is None else self.weight_share
            shares, zeros = np.full(len(sizes), share), np.zeros((len(AT_WORK), len(sizes)))
            parts: Any = {"checkpoints": sizes, "at_work": zeros, "static": None}
            return StageSizes("activations", sizes, shares, **parts)
        self._check_sizes()
        from pipejax.costs.stage.stage_work import gathered_bytes, stage_bytes

        memory = stage_bytes(workload, table)
        static = static_bytes(table, np.asarray(memory.static), np.asarray(memory.version))
        static += gathered_bytes(workload, table)
        return StageSizes("bytes", **memory.ledger_sizes, static=static)


LIMIT_OPTION = "--memory-limit"


class Room(NamedTuple):
    """Memory of workers that is left for activations."""

    limits: Float[NumpyArray, " workers"]  # (workers) room for activations
    stages: StageSizes  # what they take, and what is static beside them

    @property
    def activations(self) -> float:
        """Number of activations that fit on every worker, for schedules that limit it."""
        stages = self.stages  # what W needs may be more than what F leaves
        whole = stages.sizes * np.maximum(stages.weight_share, 1.0)
        return float((self.limits.min() - stages.at_work[0].max()) / whole.max())

    def search_limits(self, table: pj.ScheduleTable) -> Float[NumpyArray, " workers"]:
        """Return the limit of each worker, less the memory that its B, I and W need as they run."""
        work = self.stages.at_work
        if work.any() and (self.stages.weight_share > 1).any():
            raise ValueError(
                f"{LIMIT_OPTION} in bytes: optimize does not search a backward that recomputes "
                "what W needs: give --recompute none, or a limit in activations"
            )
        reserve = np.zeros(table.num_workers)
        np.maximum.at(reserve, table.placement, work.max(axis=0))
        return self.limits - reserve


class MemoryLimit(NamedTuple):
    """A limit of all workers, or one for each."""

    values: list[float]  # activations, or bytes of a device
    in_bytes: bool  # which of the two

    @classmethod
    def read(cls, text: str, option: str = LIMIT_OPTION) -> "MemoryLimit":
        """Read a limit such as "3", "3,4" for two workers, or "80GB"."""
        entries = [entry.strip() for entry in text.split(",")]
        sizes = [read_quantity(entry, "B", option) for entry in entries]
        in_bytes = [size for size in sizes if size is not None]
        if in_bytes and len(in_bytes) < len(entries):
            raise ValueError(f"{option} {text!r} mixes units: give all in bytes or none")
        values = in_bytes or parse_list(text, option)
        if min(values) == 0:
            raise ValueError(f"{option} must be above 0, got {text!r}")
        return cls(values, bool(in_bytes))

    def room(
        self, table: pj.ScheduleTable, sizes: ActivationOptions, workload: "pj.Workload | None"
    ) -> Room:
        """Return the memory of each worker for activations: the limit less static memory."""
        # Raises InfeasibleError if the static memory of a worker alone reaches the limit.
        limits = for_each(self.values, table.num_workers, LIMIT_OPTION, "workers")
        if self.in_bytes and workload is None:
            raise ValueError(f"{LIMIT_OPTION} in bytes needs --model for the bytes of stages")
        stages = sizes.stage_sizes(table, workload if self.in_bytes else None)
        if stages.static is None:
            return Room(limits, stages)
        for worker, (limit, static) in enumerate(zip(limits, stages.static, strict=True)):
            if static >= limit:
                raise pj.search.InfeasibleError(
                    f"parameters, gradients and optimizer of worker {worker} alone take "
                    f"{gigabytes(static)}: infeasible"
                )
        return Room(limits - stages.static, stages)

    def levels(
        self,
        table: pj.ScheduleTable,
        shown: StageSizes,
        activations: ActivationOptions,
        workload: "pj.Workload | None",
    ) -> Float[NumpyArray, " workers"]:
        """Return the limit in the unit of the shown memory curves; raises as `room` does."""
        limits = self.room(table, activations, workload).limits
        counts_in_bytes = shown.unit == "bytes" and not self.in_bytes
        return limits * shown.sizes.max() if counts_in_bytes else limits
