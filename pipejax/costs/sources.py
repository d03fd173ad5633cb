"""Sources of costs, such as a file or a model: each gives the costs of any table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.checks import ArgumentError, wrong
from pipejax.base.display import short_repr
from pipejax.costs.costs import TIME_FIELDS, Costs, required_phases
from pipejax.costs.measured.costs_file import read_halved, read_key, read_levels, slot_costs
from pipejax.costs.model.workload import Workload, find_stages
from pipejax.costs.scaling import restaged_costs
from pipejax.costs.system.system import System
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import is_recomputed
from pipejax.schedules.table.table import ScheduleTable

Places = tuple[int, ...]
HALF_OF_B = "input gradient (I) and weight gradient (W) each take half of the backward (B)"


@short_repr
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CostSource:
    """Base class of cost sources, which return the costs of any table."""

    stages: int | None = None  # number of measured stages; default: as many as the table has
    places: Places = ()  # place of each worker on a machine of nodes; in order if empty
    workload: Workload | None = None  # model and parallelism, if the source is a model
    system: System | None = None  # machine of the model
    stack: str = ""  # software stack; empty for the software that the system's file assumes
    lengths: Sequence[Any] | None = None  # tokens of each microbatch of the model

    @property
    def sizes(self) -> Places:
        """Return the numbers of workers per node, per rack and so on; empty for equal links."""
        return ()

    @property
    def slow_workers(self) -> Mapping[int, float]:
        """Return {slow worker: factor} on the times of its ops."""
        return {} if self.workload is None else dict(self.workload.stragglers)

    @property
    def is_per_stage(self) -> bool:
        """Return whether the times belong to the stages of one table."""
        return isinstance(self, MeasuredCosts | CostsFile)

    @property
    def worker_places(self) -> Places:
        """Return each worker's place on the machine; empty if worker k is at place k."""
        return self.places if self.workload is None else tuple(self.workload.worker_places)

    def with_places(self, places: Places) -> "CostSource":
        """Return the source with the workers at other places on the machine."""
        if self.workload is None:
            return dataclasses.replace(self, places=places)
        workload = dataclasses.replace(self.workload, worker_places=places)
        return dataclasses.replace(self, workload=workload)

    def with_stages(self, count: int) -> "CostSource":
        """Return the source with the number of stages that its times are for, unless it has one."""
        # A source whose times do not belong to stages is returned unchanged.
        if self.stages is not None or not self.is_per_stage:
            return self
        return dataclasses.replace(self, stages=count)

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Return a table's costs once per link level, with all messages on links of that level."""
        raise NotImplementedError

    def halves_backward(self, table: ScheduleTable) -> bool:
        """Return whether the table needs I and W, and the source has only B."""
        return False

    def assumption(self, table: ScheduleTable) -> str:
        """State the assumption on times that the table needs and the source lacks; "" if none."""
        return f"{HALF_OF_B}: give I and W if you know them" if self.halves_backward(table) else ""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeasuredCosts(CostSource):
    """Cost source: costs measured on stages, which are merged or divided to fit a table."""

    costs: Costs

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Merge or divide the measured stages to match the stages of a table."""
        return [restaged_costs(self.costs, self.stages or table.num_stages, table)]

    def halves_backward(self, table: ScheduleTable) -> bool:
        """Return whether the table needs I and W, and both are equal, as if filled in from B."""
        halves = (np.asarray(self.costs.input_grad), np.asarray(self.costs.weight_grad))
        return Phase.I in table.used_phases and np.array_equal(*halves)


@dataclasses.dataclass(frozen=True, repr=False)
class GivenTimes(CostSource):
    """Cost source: one time [s] per kind of op, for all stages or workers, and message times."""

    times: Mapping[str, float]
    messages: tuple[Mapping[str, float], ...] = ({},)
    per_worker: bool = False  # whether times are those of a worker, not of a stage
    nodes: Places = ()  # number of workers per node, per rack of nodes, and so on

    @property
    def sizes(self) -> Places:
        """Return the numbers of workers per node, per rack and so on."""
        return self.nodes

    @property
    def is_per_stage(self) -> bool:
        """Return whether the times are per stage rather than per worker."""
        return not self.per_worker

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Return a table's costs once per link level."""
        # gathers and reductions that run on their own lane, beside compute, need a time
        used = [phase for phase in table.grammar.lane_sharding if phase in table.used_phases]
        missing = [f"{phase.name}=.." for phase in used if phase.kind.time not in self.times]
        argument = "worker_times" if self.per_worker else "stage_times"
        if missing:
            what = "gathers and reductions beside compute take time"
            raise ArgumentError(argument, None, f"{what}: give {', '.join(missing)}, too")
        try:
            levels = [self._level(table, message) for message in self.messages]
        except ValueError as error:
            raise ArgumentError(argument, None, str(error)) from None
        if self.stages is None:
            return levels
        return [restaged_costs(costs, self.stages, table) for costs in levels]

    def _level(self, table: ScheduleTable, message: Mapping[str, float]) -> Costs:
        """Return the costs of a table with the message times [s] of one link level."""
        times = {**self._fields(table), **message}
        if self.per_worker:
            costs = Costs.per_worker(table, **times)
        else:
            costs = Costs(**times)
            costs.check_known(required_phases(table))
        if kinds := _kinds_without_time(costs, table):
            arguments = ", ".join(f"{kind}=.." for kind in kinds)
            raise ValueError(f"{table.name} has kinds of ops of its own: give {arguments}, too")
        return costs

    def halves_backward(self, table: ScheduleTable) -> bool:
        """Return whether the table needs I and W, and only B is given."""
        return Phase.I in table.used_phases and not {"input_grad", "weight_grad"} & {*self.times}

    def _fields(self, table: ScheduleTable) -> dict[str, Any]:
        """Return times by field of `Costs`; times of custom kinds of ops are under `others`."""
        names = [name for name in self.times if name in TIME_FIELDS.values()]
        fields: dict[str, Any] = {name: self.times[name] for name in names}
        fields["others"] = {
            phase.kind.time: self.times[phase.name]
            for phase in table.grammar.custom_phases
            if phase.name in self.times
        }
        return fields


@dataclasses.dataclass(frozen=True, repr=False)
class CostsFile(CostSource):
    """Cost source: a file of measured costs."""

    path: str

    @property
    def sizes(self) -> Places:
        """Return the numbers of workers per node, per rack and so on."""
        sizes: Places = read_key(self.path, "workers_per_node")
        return sizes

    @property
    def slow_workers(self) -> Mapping[int, float]:
        """Return {slow worker: factor} of the file."""
        factors: Mapping[int, float] = read_key(self.path, "stragglers")
        return factors

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Read a table's costs once per link level."""
        return read_levels(self.path, table, self.stages)

    def halves_backward(self, table: ScheduleTable) -> bool:
        """Return whether the table needs I and W, and the file has only B."""
        return read_halved(self.path, table)


@dataclasses.dataclass(frozen=True, repr=False)
class ModelCosts(CostSource):
    """Cost source: a model priced on a system."""

    workload: Workload = dataclasses.field(kw_only=False)
    system: System = dataclasses.field(kw_only=False)

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Price a table; the list has one entry, because the system determines all links."""
        from pipejax.costs.stage.stage_costs import stage_costs  # a late import, for fast starts

        if table.grammar.lane_sharding and self.workload.zero < 2:
            raise ArgumentError(
                "zero",
                self.workload.zero,
                "gathers and reductions beside compute need split weights: give zero 3, or 2 for "
                f"gradients alone, got {self.workload.zero}",
            )
        # tables share costs if they agree in all properties on which costs depend
        dependencies = (
            *find_stages(self.workload, table, None),
            *(table.placement, is_recomputed(table).max(axis=1)),
            *(table.offloads, table.num_microbatches, table.grammar.slices),
            *(phase in table.used_phases for phase in (Phase.UNSHARD, Phase.REDUCE_GRAD)),
        )
        key = tuple(np.asarray(item).tobytes() for item in dependencies)
        costs_by_key = vars(self).setdefault("_costs_by_key", {})
        can_share = self.lengths is None and table.grammar.is_usual
        if key not in costs_by_key or not can_share:
            costs_by_key[key] = stage_costs(self.workload, self.system, table, lengths=self.lengths)
        costs = costs_by_key[key]
        if kinds := _kinds_without_time(costs, table):
            text = f"says nothing of kinds {', '.join(kinds)} of {table.name}: give their times"
            raise wrong("model", text)
        return [costs]


@dataclasses.dataclass(frozen=True, repr=False)
class SlotCosts(CostSource):
    """Cost source in which ops take their slots as seconds, or one unit for all tables."""

    in_units: bool = False

    def levels(self, table: ScheduleTable) -> list[Costs]:
        """Return a list with a single entry, the costs that equal the slots."""
        return [slot_costs(table, table.grammar.unit_slots if self.in_units else table.slots)]


def _kinds_without_time(costs: Costs, table: ScheduleTable) -> list[str]:
    """List the custom kinds of ops in a table that need a time but have none."""
    used = set(table.used_phases)
    custom = [phase for phase in table.grammar.custom_phases if phase.kind.time and phase in used]
    return [phase.name for phase in custom if costs.time(phase) is None]


@short_repr
class TableFile(NamedTuple):
    """Path of a schedule table's file, and how to repair the table."""

    path: str
    repair: str | None = None  # known fault of the file that `read_table` repairs
