"""Result of a plan: the best layouts, and all others as a table or a dataset."""

import csv
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from pipejax.analysis.scenario import Scenario
from pipejax.analysis.step.evidence import Evidence
from pipejax.analysis.uncertainty.sensitivity import POWER, RESOURCES
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.data_files import load_json
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.files import atomic_write, check_origin, provenance
from pipejax.costs.model.launchers import (
    LAUNCHERS,
    default_overlap,
    find_launcher,
    launcher_defaults,
)
from pipejax.costs.model.stack import AS_THE_SYSTEM, Stack, load_stack
from pipejax.costs.model.workload import Workload
from pipejax.costs.sources import ModelCosts
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.parts import FIELDS, system_number
from pipejax.costs.system.system import System
from pipejax.engine.lowering.program import makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.naming import find
from pipejax.schedules.table.table import ScheduleTable
from pipejax.sweep.plan.layouts import SHARED, Layouts, PlanRequest, program_shape
from pipejax.sweep.plan.programs import exact_times
from pipejax.sweep.plan.search import Estimates, Rows, price, row_groups

# Layouts on other machines: the resource that bounds each, and numbers at which two break even.
#
# A layout is bounded by the resource with the largest share of its step. A step time is a sum of
# times on the critical path: a small change of a rate or latency changes it by the share of that
# resource (Euler's identity). So shares are differences of step times of a few more prices.
#
# Break-even factors are found by exact evaluations of both layouts on machines with one number
# smaller or larger, and refined between the nearest two machines that disagree.

STEP = 1e-4  # by which each resource is changed: far above rounding, and few paths change by it
MAX_FACTOR = 8.0  # by which a number is multiplied or divided
POINTS = 25  # factors on either side, and between two that disagree
ROUNDS = 3  # of refinement between two: to 2e-5 of the factor

Factors = Mapping[str, Float[NumpyArray, " rows"]]
Logarithms = Float[NumpyArray, " factors"]
Bracket = tuple[float, float]  # logarithms of a factor with a lag, and of the next without a lag


@short_repr
class BreakEven(NamedTuple):
    """A number of the machine at which the runner-up is as fast as the best layout."""

    number: str  # its name, as in the system's file
    factor: float  # nearest to 1 at which the runner-up's step is no longer than the best's
    value: float  # what the number is then, in SI units


def scale_systems(system: System, factors: Factors) -> System:
    """Return a batch of systems, one per row, with each number multiplied by its factor."""
    rows = len(next(iter(factors.values())))
    named = {FIELDS[name]: factor for name, factor in factors.items()}

    def scaled(where: Any, leaf: Any) -> Any:
        # entries of an efficiency curve have no name of their own
        path = tuple(key.name for key in where if hasattr(key, "name"))
        return leaf * named.get(path, np.ones(rows))

    return jax.tree_util.tree_map_with_path(scaled, system)


def layout_times(
    request: PlanRequest, layouts: Layouts, factors: Factors
) -> Float[NumpyArray, " rows"]:
    """Return the step times [s] of layouts of one program, each layout on its own machine."""
    shape, count = program_shape(request, layouts, 0), int(layouts.microbatches[0])
    costs = price(request, layouts, scale_systems(request.system, factors)).costs
    return exact_times(shape, count, costs, request.links)


def limiting_resources(request: PlanRequest, layouts: Layouts, rows: Rows) -> list[str]:
    """Return the name of the resource that bounds each layout, as in `sensitivity`."""
    names = [""] * len(rows)
    selected = layouts.take(rows)
    for group in row_groups((*selected[:3], selected.microbatches)):  # one program each
        largest = layout_resource_shares(request, selected.take(group)).argmax(axis=0)
        for place, resource in zip(group.tolist(), largest.tolist(), strict=True):
            names[place] = RESOURCES[resource]
    return names


def layout_resource_shares(
    request: PlanRequest, layouts: Layouts
) -> Float[NumpyArray, "resources layouts"]:
    """Return the share of the step that each resource bounds, for layouts of one program."""
    # machine 0 is unchanged, machine k has 0.01 % more of resource k - 1: (resources, machines)
    machines = 1 + len(RESOURCES)
    multipliers = np.where(np.arange(1, machines)[:, None] == np.arange(machines), 1 + STEP, 1.0)
    factors = dict(zip(RESOURCES, np.repeat(multipliers, len(layouts), axis=1), strict=True))
    repeated = layouts.take(np.tile(np.arange(len(layouts)), machines))
    times = layout_times(request, repeated, factors).reshape(machines, -1)
    power = np.array(list(POWER.values()))
    return power[:, None] * (times[1:] / times[0] - 1) / STEP


def break_even_factors(request: PlanRequest, layouts: Layouts, rows: Rows) -> tuple[BreakEven, ...]:
    """List changes of machine numbers after which the runner-up is as fast as the best; or none."""
    if len(rows) < 2:
        return ()
    pair = layouts.take(rows)
    log_grid = np.log(np.geomspace(1, MAX_FACTOR, POINTS))
    smaller_and_larger = np.concatenate([-log_grid, log_grid])
    lags = _runner_up_lag(request, pair, dict.fromkeys(RESOURCES, smaller_and_larger))
    lag_now = lags[RESOURCES[0]][0]  # the first factor of every grid is 1
    if lag_now <= 0:
        return ()
    brackets: dict[str, Bracket] = {}
    for name, lag in lags.items():
        down = _first_sign_change(-log_grid, lag[:POINTS])
        up = _first_sign_change(log_grid, lag[POINTS:])
        sign_changes = [bracket for bracket in (down, up) if bracket is not None]
        if sign_changes:  # take the one nearer to factor 1
            brackets[name] = min(sign_changes, key=lambda bracket: abs(bracket[1]))
    factors = _refined_factors(request, pair, brackets)
    results = [
        BreakEven(name, factor, factor * float(system_number(request.system, name)))
        for name, factor in factors.items()
    ]
    return tuple(sorted(results, key=lambda result: abs(np.log(result.factor))))


def _first_sign_change(logarithms: Logarithms, lags: Logarithms) -> Bracket | None:
    """Return the logarithms around the first factor that closes the lag; None if none does."""
    if not (lags <= 0).any():
        return None
    first = int(np.argmax(lags <= 0))
    return logarithms[first - 1], logarithms[first]


def _refined_factors(
    request: PlanRequest, pair: Layouts, brackets: dict[str, Bracket]
) -> dict[str, float]:
    """Return the factor on each number of the system at which the runner-up catches up."""
    # A bracket has the logarithms of a factor at which the runner-up is slower, and of one at
    # which it is not. On a grid between them, the first of these and the one before are the next.
    if not brackets:
        return {}
    for _ in range(ROUNDS):
        grids = {name: np.linspace(*ends, POINTS) for name, ends in brackets.items()}
        lags = _runner_up_lag(request, pair, grids)
        brackets = {
            name: _first_sign_change(grids[name], lags[name]) or ends
            for name, ends in brackets.items()
        }
    return {name: float(np.exp(without_lag)) for name, (_, without_lag) in brackets.items()}


def _runner_up_lag(
    request: PlanRequest, pair: Layouts, grids: Mapping[str, Logarithms]
) -> dict[str, Float[NumpyArray, " factors"]]:
    """Return the time by which the runner-up is slower [s], for each factor on each number."""
    # `pair` are the best layout and the runner-up; `grids` has logarithms of factors by number.
    # one machine for each factor of each grid: it has that factor on that number alone
    sizes = [len(grid) for grid in grids.values()]
    number = np.repeat(np.arange(len(grids)), sizes)
    factor = np.exp(np.concatenate([*grids.values()]))
    factors = {name: np.where(number == place, factor, 1.0) for place, name in enumerate(grids)}
    best, runner_up = (
        layout_times(request, pair.take(np.full(sum(sizes), row)), factors) for row in (0, 1)
    )
    return dict(zip(grids, np.split(runner_up - best, np.cumsum(sizes)[:-1]), strict=True))


if TYPE_CHECKING:
    import xarray as xr

_MEANING: Mapping[str, str] = load_json(Path(__file__).with_name("layout_columns.json"))


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class PlannedLayout:
    """A layout, evaluated exactly."""

    layout: Mapping[str, Any]  # degrees, schedule and sizes by name, as columns of measured runs
    step_time: float  # [s]
    # widest error band of the step time [s], if the calibration has runs of the regime
    band: tuple[float, float] | None
    band_percent: float | None  # percent of such steps inside the band
    mfu: float  # share of the peak used by the model's FLOP
    tokens_per_second: float  # of the complete job
    memory_bytes: float  # need of the fullest worker, per accelerator [B]
    memory_left: float  # memory for tensors minus this need [B]
    bound_by: str  # the resource with the largest share of the critical path, as in `sensitivity`
    regime: str
    # measured runs of this regime on the machine, and errors of predictions; None if there are none
    evidence: Evidence | None
    # layouts of the same idea within 1 % of the step: fields that differ, and step times [s]
    also: tuple[Mapping[str, Any], ...]
    scenario: Scenario  # each of its pipelines

    @property
    def workload(self) -> Workload:
        """Return the workload of each pipeline."""
        assert self.scenario.source.workload is not None
        return self.scenario.source.workload

    @property
    def table(self) -> ScheduleTable:
        """Return its schedule."""
        return self.scenario.table()


@short_repr
class UnderLaunchers(NamedTuple):
    """The best layout, evaluated under launcher defaults that differ from those assumed."""

    launchers: tuple[str, ...]  # their names
    stack: str  # of measured runs of the launcher that the request names; empty if it names none
    gradient_bytes: float  # of an accumulated gradient
    step_time: float  # of the layout then [s]
    memory_bytes: float  # need of the fullest worker, per accelerator [B]
    fits: bool  # whether there is room for it


def under_launchers(request: PlanRequest, scenario: Scenario) -> tuple[UnderLaunchers, ...]:
    """Evaluate a layout under the defaults of each launcher."""
    # Launchers with equal costs share one result; those with the costs of the scenario have none.
    # If the request names a launcher, it is evaluated with the stack of its measured runs alone.
    workload, names_by_source = scenario.source.workload, dict[Any, list[str]]()
    schedule = scenario.schedule
    assert workload is not None
    assert isinstance(schedule, str)
    has_software = bool(request.stack) or request.system.calibration is not None
    stack: Stack | None = AS_THE_SYSTEM if has_software else None
    launchers = (*LAUNCHERS,)
    if request.launcher:
        measured = find_launcher(request.launcher).measured
        stack = load_stack(measured) if measured else AS_THE_SYSTEM
        can_change = measured and not has_software and stack.is_known_on(request.system)
        launchers = (request.launcher,) if can_change else ()
    for name in launchers:
        model, software, defaults = launcher_defaults(name, workload.model, request.system, stack)
        defaults = default_overlap(name, workload.zero) | defaults
        fields = {k: v for k, v in defaults.items() if k in SHARED and k not in request.shared}
        source = ModelCosts(
            dataclasses.replace(workload, model=model, **fields),
            software.on(request.system),
            stack=software.name or request.stack,
        )
        if source != scenario.source:
            names_by_source.setdefault(source, []).append(name)
    results = []
    for source, names in names_by_source.items():
        other = scenario.replace(costs=source)
        if not find(schedule).planned:
            other = other.with_table(scenario.table())  # with the program that it has
        memory = float(memory_bytes(source.workload, other.table()).max())
        results.append(
            UnderLaunchers(
                launchers=tuple(names),
                stack=source.stack if request.launcher else "",
                gradient_bytes=float(source.workload.model.accumulated_bytes),
                step_time=makespan_on_host(
                    *lower_and_price(other.table(), other.table_costs(), other.links)
                ),
                memory_bytes=memory,
                fits=memory <= request.room,
            )
        )
    return tuple(results)


@with_short_repr("best runners_up outside enumerated fitting evaluated programs seconds")
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PlanResult:
    """The best layouts of a job, and the estimates of all others.

    Attributes:
      best: the layout of the shortest step, among regimes that are measured best on the machine.
      runners_up: the next ones of these regimes.
      outside: the best layout of each other regime, an extrapolation; and faster ones that may not
        fit, as measured runs needed more memory than predicted.
      tied: layouts, with the best, that predictions cannot tell from the best; 0 if unknown.
      under_launchers: the best layout under other launchers' defaults than those assumed.
      break_even_factors: numbers of the machine, each with the factor on it alone that makes the
        first runner-up as fast as the best; the nearest to 1 first.
      enumerated: number of legal layouts.
      fitting: number of legal layouts that fit in memory.
      evaluated: number of layouts evaluated exactly; the lower bounds of all others are beyond the
        runners-up.
      programs: number of evaluated programs; layouts with one schedule table share a program.
      seconds: time of the search.
      request: the job, and the layouts that it may use.
      layouts: all legal layouts as columns.
      estimates: bounds, memory and step times of all layouts.
      place: row of the best layout.
      apart: (layouts) whether a layout is ranked apart: an extrapolation, or one that may not fit.
      front: (layouts) whether no other layout has both less memory and a shorter step; only where
        it was asked for.
    """

    best: PlannedLayout
    runners_up: tuple[PlannedLayout, ...]
    outside: tuple[PlannedLayout, ...]
    tied: int
    under_launchers: tuple[UnderLaunchers, ...]
    break_even_factors: tuple[BreakEven, ...]
    enumerated: int
    fitting: int
    evaluated: int
    programs: int
    seconds: float
    request: PlanRequest
    layouts: Layouts
    estimates: Estimates
    place: int
    apart: Bool[NumpyArray, " layouts"]
    front: Bool[NumpyArray, " layouts"] | None = None

    def columns(self) -> dict[str, NumpyArray]:
        """Return all layouts by column, with names instead of numbers where there are names.

        Returns:
          (layouts) degrees, memory, lower bound and step time, NaN where it is not known.
        """
        return layout_columns(self.request, self.layouts, self.estimates)

    def save(self, path: str | Path, *, replace: bool = False) -> None:
        """Write all layouts as a CSV or, where the name ends in .zarr, a Zarr store.

        Args:
          path: file or store.
          replace: whether to replace one that is there.

        Raises:
          OSError: if it cannot be written, or is there and may not be replaced.
        """
        save_columns(Path(path), self.request, self.columns(), replace=replace)


def layout_columns(
    request: PlanRequest, layouts: Layouts, estimates: Estimates
) -> dict[str, NumpyArray]:
    """Return all layouts by column, with names instead of codes."""
    named: dict[str, NumpyArray] = dict(layouts._asdict())
    named["schedule"] = np.array(request.schedules)[layouts.schedule]
    named["recompute"] = np.array(request.recomputations)[layouts.recompute]
    return named | estimates._asdict()


def as_dataset(request: PlanRequest, columns: Mapping[str, NumpyArray]) -> "xr.Dataset":
    """Return columns of layouts as a labelled dataset, with the request."""
    import xarray as xr  # an extra

    units = {"memory_bytes": "B", "lower_bound": "s", "step_time": "s"}
    data = {
        name: ("layout", column, {"units": units.get(name, "1")})
        for name, column in columns.items()
        if name not in _MEANING
    }
    degrees = {
        name: ("layout", columns[name], {"long_name": meaning})
        for name, meaning in _MEANING.items()
    }
    return xr.Dataset(data, degrees, {"request": as_text(request)} | provenance())


def as_text(request: PlanRequest) -> str:
    """Return a text of everything that decides a plan: equal texts are equal requests."""
    return json.dumps(dataclasses.asdict(request), default=float, sort_keys=True)


def save_columns(
    path: Path, request: PlanRequest, columns: Mapping[str, NumpyArray], *, replace: bool
) -> None:
    """Write columns atomically, as a CSV file or, for a name in .zarr, as a Zarr store."""
    with atomic_write(path, replace=replace) as draft:
        if path.suffix == ".zarr":
            as_dataset(request, columns).to_zarr(draft, zarr_format=2)
            return
        with draft.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(columns)
            rows.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def stored_step_times(path: Path, request: PlanRequest) -> Float[NumpyArray, " layouts"]:
    """Read the step times of layouts [s] that an earlier run of the same request stored."""
    import xarray as xr

    try:
        with xr.open_zarr(path, chunks=None) as data:
            attributes, times = dict(data.attrs), data["step_time"].values
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{path} is not the dataset of a plan: {error}") from None
    if attributes.get("request") != as_text(request):
        raise ValueError(
            f"{path} is of another request: give another --out, or --force to begin anew"
        )
    check_origin(path, attributes)
    return np.array(times, float)
