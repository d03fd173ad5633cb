"""Scenarios: a schedule with its costs, links and changes, which all analyses start from."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.cached_method import cached_method, share_results
from pipejax.base.checks import check_types, wrong
from pipejax.base.display import with_short_repr
from pipejax.costs.costs import Costs
from pipejax.costs.edits import KINDS, Edit, Microbatches, PairFactor, ScaledTimes, SlowWorkers
from pipejax.costs.model.workload import Workload
from pipejax.costs.planning import for_times
from pipejax.costs.sources import CostSource, MeasuredCosts, SlotCosts, TableFile
from pipejax.costs.system.system import System
from pipejax.costs.topology import PlacedCosts, nodes_from_levels, place_levels, places_on
from pipejax.schedules.builders.published import Builder
from pipejax.schedules.naming import find
from pipejax.schedules.registry import BUILT_IN
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import read_table

SLOTS = SlotCosts()
SIZE = "num_workers", "num_microbatches"
TABLE_FIELDS = {"schedule", "options", *SIZE}  # fields that determine the table, besides edits
EditKind = TypeVar("EditKind", bound=Edit)


@with_short_repr("schedule num_workers num_microbatches costs link edits")
@dataclasses.dataclass(frozen=True)
class Scenario:
    """A schedule with its costs, its links, and changes (edits) of table and costs.

    A schedule whose builder orders ops by their times gets the times of this scenario.

    Args:
      schedule: name of a schedule, as for `pj.schedules.build`, or a table.
      num_workers: P of a named schedule.
      num_microbatches: M of a named schedule.
      options: further options of a named schedule, as for `pj.schedules.build`.
      costs: measured `Costs`; `pj.costing.ModelCosts(workload, system)`; or another source of
        `pj.costing`. Default: the slots of the table.
      link: link model, or `Links`.
      edits: changes of table and costs, from `pj.costing`, in the order in which they apply.
      files: names or files of model, system, stack and lengths, for command lines.

    Example:
      >>> import pipejax as pj
      >>> costs = pj.Costs(forward=1.0, backward=2.0)
      >>> run = pj.Scenario("1f1b", num_workers=4, num_microbatches=8, costs=costs)
      >>> run.evaluate().makespan, run.replace(num_microbatches=16).evaluate().makespan
      (33.0, 57.0)
    """

    schedule: str | TableFile | ScheduleTable
    num_workers: int | None = None
    num_microbatches: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    costs: CostSource | Costs = SLOTS
    link: str | Links = "delay"
    edits: tuple[Edit, ...] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(
            schedule=(self.schedule, str, TableFile, ScheduleTable),
            costs=(self.costs, Costs, CostSource),
        )
        if isinstance(self.costs, Costs):
            object.__setattr__(self, "costs", MeasuredCosts(costs=self.costs))
        object.__setattr__(self, "link", Links.resolve(self.link))

    @property
    def source(self) -> CostSource:
        """Return the source that prices tables, such as measured costs or a model."""
        assert isinstance(self.costs, CostSource)
        return self.costs

    @property
    def links(self) -> Links:
        """Return the links as a record."""
        return Links.resolve(self.link)

    @property
    def has_times(self) -> bool:
        """Return whether costs are in seconds rather than in slots."""
        return not isinstance(self.costs, SlotCosts)

    @property
    def size(self) -> dict[str, int]:
        """Return the numbers of workers and microbatches; a table in a file has its own."""
        size: dict[str, int] = {}
        for name, count in zip(SIZE, self._builder.sizes or (None, None), strict=True):
            size[name] = getattr(self, name) or count or 0
            if not size[name]:
                raise wrong(name, f"is missing: {self.schedule} is of any size")
        return size

    @cached_method
    def table(self) -> ScheduleTable:
        """Return the schedule's table with all edits; it is cached."""
        if isinstance(self.schedule, ScheduleTable):
            table = self.schedule
        elif isinstance(self.schedule, TableFile) and self.num_workers is None:
            table = read_table(self.schedule.path, repair=self.schedule.repair)
        else:
            table = self._builder.function(**self.size, **self.plan_options())
        for edit in self.edits:
            table = edit.change_table(table)
        return table

    @property
    def _builder(self) -> Builder:
        if isinstance(self.schedule, str):
            return find(self.schedule)
        assert isinstance(self.schedule, TableFile)
        return find(self.schedule.path, repair=self.schedule.repair)

    def plan_options(self) -> Mapping[str, Any]:
        """Return the schedule's options; builders that order ops by op times get these times."""
        if not isinstance(self.schedule, str) or not self.has_times:
            return self.options
        builder, options, workload = find(self.schedule), dict(self.options), self.source.workload
        share = None if workload is None else workload.weight_share
        if share is not None and "weight_share" in builder.takes:
            options.setdefault("weight_share", share)
        return for_times(builder, self.size, options, self.price)

    def pinned(self) -> "Scenario":
        """Fix the planned order of ops, so that further changes of costs keep the table."""
        options = self.plan_options()
        return self if options == self.options else self.replace(options=options)

    def price(self, table: ScheduleTable) -> Costs:
        """Return the costs [s] that a table has in this scenario, edits included."""
        if not self.source.sizes:
            return self._levels(table)[0]
        places = places_on(table, self.source.worker_places, "worker_places")
        return self._placed_costs(table).at(places)

    @cached_method
    def table_costs(self) -> Costs:
        """Return the costs of the table [s]; they are cached."""
        return self.price(self.table())

    @cached_method
    def evaluate(self) -> Evaluation:
        """Evaluate the table at its costs; the result is cached."""
        return evaluate(self.table(), self.table_costs(), link=self.links)

    def replace(self, **changes: Any) -> "Scenario":
        """Return the scenario with some fields replaced."""
        # If the table stays the same, both scenarios share it.
        other = dataclasses.replace(self, **changes)
        builder = BUILT_IN.get(self.schedule) if isinstance(self.schedule, str) else None
        if builder is None or builder.planned:  # a file may change, and a plan follows from costs
            return other
        if TABLE_FIELDS.isdisjoint(changes) and self._table_edits == other._table_edits:
            share_results(Scenario.table, self, other)
        return other

    @property
    def _table_edits(self) -> tuple[Edit, ...]:
        return tuple(e for e in self.edits if type(e).change_table is not Edit.change_table)

    def find_edit(self, kind: type[EditKind]) -> EditKind | None:
        """Return the scenario's edit of this class; None if it has no such edit."""
        return next((edit for edit in self.edits if isinstance(edit, kind)), None)

    def with_edit(self, edit: Edit) -> "Scenario":
        """Return the scenario with an edit, which replaces any edit of the same class."""
        edits = [*(old for old in self.edits if type(old) is not type(edit)), edit]
        return self.replace(edits=tuple(sorted(edits, key=lambda edit: KINDS.index(type(edit)))))

    def with_table(self, table: ScheduleTable) -> "Scenario":
        """Return the scenario with this table, without its schedule and without edits of tables."""
        edits = tuple(e for e in self.edits if e not in self._table_edits)
        return self.replace(
            schedule=table, num_workers=None, num_microbatches=None, options={}, edits=edits
        )

    def with_workload(self, workload: Workload) -> "Scenario":
        """Replace the workload of a scenario whose costs come from a model."""
        return self.replace(costs=dataclasses.replace(self.source, workload=workload))

    @property
    def microbatches(self) -> Microbatches:
        """Return the lengths, scale and order of the microbatches as one edit."""
        edit = self.find_edit(Microbatches) or Microbatches()
        lengths = self.source.lengths
        return edit if lengths is None else dataclasses.replace(edit, lengths=tuple(lengths))

    @property
    def system(self) -> System | None:
        """Return the system on which a model is priced. Return None if costs are of no model."""
        return self.source.system

    @property
    def model_workload(self) -> Workload | None:
        """Return the model's workload before edits."""
        # It is None without a model, or if microbatches have different lengths.
        return self.source.workload if self.microbatches == Microbatches() else None

    @property
    def workload(self) -> Workload | None:
        """Return the workload with all edits. Return None if it cannot express `ScaledTimes`."""
        workload = self.model_workload
        if workload is None or self.find_edit(ScaledTimes):
            return None
        pairs, slow = self.find_edit(PairFactor), self.find_edit(SlowWorkers)
        changes: dict[str, Any] = {} if pairs is None else {"pair_factor": pairs.factor}
        if slow is not None:
            changes["stragglers"] = slow.factors
        return dataclasses.replace(workload, **changes) if changes else workload

    @property
    def slow_workers(self) -> Mapping[int, float]:
        """Return {slow worker: factor} of the source and of an edit."""
        edit, factors = self.find_edit(SlowWorkers), dict(self.source.slow_workers)
        for worker, factor in ({} if edit is None else edit.factors).items():
            factors[worker] = factors.get(worker, 1.0) * factor
        return factors

    @property
    def placed(self) -> Callable[[ScheduleTable], PlacedCosts] | None:
        """Return a function that prices a table for any places of workers."""
        # It is None if all links are equal.
        return self._placed_costs if self.source.sizes or self.workload is not None else None

    def place_nodes(self, table: ScheduleTable) -> Int[NumpyArray, " places"]:
        """Return the node of each place at which a worker of the table can run."""
        workload, system = self.workload, self.system
        if workload is None or system is None:  # measured costs, with numbers of workers per node
            return nodes_from_levels(place_levels(self.source.sizes, table.num_workers))
        from pipejax.costs.stage.model_topology import model_levels

        return nodes_from_levels(model_levels(workload, system, table))

    def _levels(self, table: ScheduleTable) -> list[Costs]:
        """Return a table's costs once per link level, with all messages on links of that level."""
        levels = self.source.levels(table)
        for edit in self.edits:
            levels = [edit.apply(costs, table) for costs in levels]
        return levels

    def _placed_costs(self, table: ScheduleTable) -> PlacedCosts:
        """Return a table's costs as a function of workers' places, with all edits in `base`."""
        workload, system = self.workload, self.system
        if workload is None or system is None:
            return PlacedCosts.from_levels(self._levels(table), table, self.source.sizes)
        from pipejax.costs.stage.model_topology import model_placements

        by_place = model_placements(workload, system, table)
        return by_place._replace(base=self._levels(table)[0])
