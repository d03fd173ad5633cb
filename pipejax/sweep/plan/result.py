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
from pipejax.costs.system.parts import FIELDS, POWER, RESOURCES, system_number
from pipejax.costs.system.system import System
from pipejax.engine.lowering.program import makespan_on_host
from pipejax.engine.pricing import lower_and_price
from pipejax.schedules.naming import find
from pipejax.schedules.table.table import ScheduleTable
from pipejax.sweep.plan.layouts import SHARED, Layouts, PlanRequest, program_shape
from pipejax.sweep.plan.programs import exact_times
from pipejax.sweep.plan.search import Estimates, Rows, price, row_groups

# Layouts on other machines: the resource that bounds a layout, and numbers at which two layouts
# break even.
#
# A layout is bounded by the resource with the largest share of its step. A step time is a sum of
# times on the critical path. So a small change of a rate or latency changes the step time by the
# share of this resource (Euler's identity), and differences of step times give the shares.
#
# Break-even factors come from exact step times of the best layout and the runner-up on machines
# with one smaller or larger number. Between the nearest two machines with a different fastest
# layout, the factor is refined. The lag [s] is the runner-up's step time minus the best one.

STEP = 1e-4  # relative change of a resource: far above rounding, and few critical paths change
MAX_FACTOR = 8.0  # largest factor by which a number is multiplied or divided
POINTS = 25  # number of factors on either side, and in a refinement
ROUNDS = 3  # number of refinements, after which the relative error of a factor is 2e-5

Factors = Mapping[str, Float[NumpyArray, " rows"]]  # {number of the system: factors}
Logarithms = Float[NumpyArray, " factors"]
Bracket = tuple[float, float]  # logarithms of two factors: lag > 0 at the first, not at the second


@short_repr
class BreakEven(NamedTuple):
    """A number of the machine at which the runner-up is as fast as the best layout."""

    number: str  # name of the number, as in the system's file
    factor: float  # factor nearest to 1 at which the runner-up's step is no longer than the best's
    value: float  # number of the machine times `factor`, in SI units


def scale_systems(system: System, factors: Factors) -> System:
    """Return a batch of systems, one per row, with each number multiplied by its factor."""
    rows = len(next(iter(factors.values())))
    named = {FIELDS[name]: factor for name, factor in factors.items()}

    def scaled(where: Any, leaf: Any) -> Any:
        # entries of an efficiency curve have no names
        path = tuple(key.name for key in where if hasattr(key, "name"))
        return leaf * named.get(path, np.ones(rows))

    return jax.tree_util.tree_map_with_path(scaled, system)


def layout_times(
    request: PlanRequest, layouts: Layouts, factors: Factors
) -> Float[NumpyArray, " rows"]:
    """Return the step time [s] of each layout of one program, with its factors."""
    shape, count = program_shape(request, layouts, 0), int(layouts.microbatches[0])
    costs = price(request, layouts, scale_systems(request.system, factors)).costs
    return exact_times(shape, count, costs, request.links)


def limiting_resources(request: PlanRequest, layouts: Layouts, rows: Rows) -> list[str]:
    """Return the name of the resource that bounds each layout, as in `sensitivity`."""
    names = [""] * len(rows)
    selected = layouts.take(rows)
    for group in row_groups((*selected[:3], selected.microbatches)):  # layouts of one program
        largest = layout_resource_shares(request, selected.take(group)).argmax(axis=0)
        for row, resource in zip(group.tolist(), largest.tolist(), strict=True):
            names[row] = RESOURCES[resource]
    return names


def layout_resource_shares(
    request: PlanRequest, layouts: Layouts
) -> Float[NumpyArray, "resources layouts"]:
    """Return shares of the step (resources, layouts), for layouts of one program."""
    # (resources, machines): machine 0 is unchanged, machine k has 0.01 % more of resource k - 1
    machines = 1 + len(RESOURCES)
    multipliers = np.where(np.arange(1, machines)[:, None] == np.arange(machines), 1 + STEP, 1.0)
    factors = dict(zip(RESOURCES, np.repeat(multipliers, len(layouts), axis=1), strict=True))
    repeated = layouts.take(np.tile(np.arange(len(layouts)), machines))
    times = layout_times(request, repeated, factors).reshape(machines, -1)
    power = np.array(list(POWER.values()))
    return power[:, None] * (times[1:] / times[0] - 1) / STEP


def break_even_factors(request: PlanRequest, layouts: Layouts, rows: Rows) -> tuple[BreakEven, ...]:
    """List the numbers of the machine at which the runner-up is as fast as the best layout."""
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
        if sign_changes:  # take the bracket nearer to factor 1
            brackets[name] = min(sign_changes, key=lambda bracket: abs(bracket[1]))
    factors = _refined_factors(request, pair, brackets)
    results = [
        BreakEven(name, factor, factor * float(system_number(request.system, name)))
        for name, factor in factors.items()
    ]
    return tuple(sorted(results, key=lambda result: abs(np.log(result.factor))))


def _first_sign_change(logarithms: Logarithms, lags: Logarithms) -> Bracket | None:
    """Return the bracket of the first factor without a lag; None if no factor closes the lag."""
    if not (lags <= 0).any():
        return None
    first = int(np.argmax(lags <= 0))
    return logarithms[first - 1], logarithms[first]


def _refined_factors(
    request: PlanRequest, pair: Layouts, brackets: dict[str, Bracket]
) -> dict[str, float]:
    """Return {number of the system: factor at which the runner-up catches up}."""
    # Each round evaluates a grid of factors within a bracket. The next bracket is the first factor
    # without a lag, and the factor before it.
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
    """Return {number of the system: (factors) lag of the runner-up [s]}."""
    # `pair` has the best layout and the runner-up; `grids` is {number: logarithms of factors}.
    # There is a machine for each factor on each number, whose other numbers do not change.
    sizes = [len(grid) for grid in grids.values()]
    number = np.repeat(np.arange(len(grids)), sizes)
    factor = np.exp(np.concatenate([*grids.values()]))
    factors = {name: np.where(number == index, factor, 1.0) for index, name in enumerate(grids)}
    rows = (np.full(sum(sizes), row) for row in (0, 1))
    best, runner_up = (layout_times(request, pair.take(row), factors) for row in rows)
    return dict(zip(grids, np.split(runner_up - best, np.cumsum(sizes)[:-1]), strict=True))


if TYPE_CHECKING:
    import xarray as xr

_MEANING: Mapping[str, str] = load_json(Path(__file__).with_name("layout_columns.json"))


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class PlannedLayout:
    """A layout, evaluated exactly."""

    layout: Mapping[str, Any]  # degrees, schedule and sizes, named as columns of measured runs
    step_time: float  # [s]
    # widest error band of the step time [s]; None if the calibration has no runs of the regime
    band: tuple[float, float] | None
    band_percent: float | None  # percentage of steps inside the band
    mfu: float  # model FLOP per second over the peak
    tokens_per_second: float  # tokens per second of the complete job
    memory_bytes: float  # memory need of the fullest worker, per accelerator [B]
    memory_left: float  # memory for tensors minus this need [B]
    bound_by: str  # the resource with the largest share of the critical path, as in `sensitivity`
    regime: str
    # measured runs of this regime on the machine, and errors of predictions; None without runs
    evidence: Evidence | None
    # layouts of the same idea within 1 % of the step: fields that differ, and step times [s]
    also: tuple[Mapping[str, Any], ...]
    scenario: Scenario  # scenario of a pipeline

    @property
    def workload(self) -> Workload:
        """Return the workload of each pipeline."""
        assert self.scenario.source.workload is not None
        return self.scenario.source.workload

    @property
    def table(self) -> ScheduleTable:
        """Return the schedule table."""
        return self.scenario.table()


@short_repr
class UnderLaunchers(NamedTuple):
    """The best layout, evaluated with defaults of launchers that the plan did not assume."""

    launchers: tuple[str, ...]  # names of the launchers
    stack: str  # stack of the requested launcher's measured runs; empty without a launcher
    gradient_bytes: float  # bytes of an accumulated gradient
    step_time: float  # [s]
    memory_bytes: float  # memory need of the fullest worker, per accelerator [B]
    fits: bool  # whether the need fits in memory


def under_launchers(request: PlanRequest, scenario: Scenario) -> tuple[UnderLaunchers, ...]:
    """Evaluate a layout under the defaults of each launcher."""
    # Launchers with equal costs share one result. Launchers with the costs of the scenario have no
    # result. If the request names a launcher, only the stack of its measured runs is evaluated.
    workload, names_by_source = scenario.source.workload, dict[Any, list[str]]()
    schedule = scenario.schedule
    assert workload is not None
    assert isinstance(schedule, str)
    has_software = bool(request.stack) or request.system.calibration is not None
    stack: Stack | None = AS_THE_SYSTEM if has_software else None  # None: the launcher's own
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
            other = other.with_table(scenario.table())  # keeps the table's program
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
                fits=memory <= request.usable_memory,
            )
        )
    return tuple(results)


@with_short_repr("best runners_up outside enumerated fitting evaluated programs seconds")
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class PlanResult:
    """The best layouts of a job, and the estimates of all others.

    Attributes:
      best: the layout with the shortest step, in the regimes that are measured best on the machine.
      runners_up: the next best layouts in these regimes.
      outside: the best layout of each other regime, which is an extrapolation; and faster layouts
        that may not fit, because measured runs needed more memory than predicted.
      tied: number of layouts, including the best, that tie with the best within prediction errors;
        0 if unknown.
      under_launchers: the best layout with the defaults of other launchers.
      break_even_factors: numbers of the machine with a factor. If only this number changes by the
        factor, the first runner-up is as fast as the best. The factor nearest to 1 is first.
      enumerated: number of legal layouts.
      fitting: number of legal layouts that fit in memory.
      evaluated: number of layouts evaluated exactly; all others have lower bounds beyond the
        runners-up.
      programs: number of evaluated programs; layouts with one schedule table share a program.
      seconds: time of the search.
      request: the job, and the layouts that it may use.
      layouts: all legal layouts as columns.
      estimates: bounds, memory and step times of all layouts.
      place: row of the best layout.
      apart: (layouts) whether a layout is an extrapolation, or may not fit.
      front: (layouts) whether no other layout has both less memory and a shorter step; None if the
        front was not requested.
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
        """Return {column: values of all layouts}, with names of schedules and recomputations.

        Returns:
          (layouts) degrees, memory, lower bound and step time; NaN for unknown step times.
        """
        return layout_columns(self.request, self.layouts, self.estimates)

    def save(self, path: str | Path, *, replace: bool = False) -> None:
        """Write all layouts as a CSV file or, if the name ends in .zarr, as a Zarr store.

        Args:
          path: file or store.
          replace: whether to replace an existing file or store.

        Raises:
          OSError: if the path cannot be written, or exists and may not be replaced.
        """
        save_columns(Path(path), self.request, self.columns(), replace=replace)


def layout_columns(
    request: PlanRequest, layouts: Layouts, estimates: Estimates
) -> dict[str, NumpyArray]:
    """Return {column: values of all layouts}, with names instead of indices."""
    named: dict[str, NumpyArray] = dict(layouts._asdict())
    named["schedule"] = np.array(request.schedules)[layouts.schedule]
    named["recompute"] = np.array(request.recomputations)[layouts.recompute]
    return named | estimates._asdict()


def as_dataset(request: PlanRequest, columns: Mapping[str, NumpyArray]) -> "xr.Dataset":
    """Return columns of layouts as a labelled dataset, with the request."""
    import xarray as xr  # an optional dependency

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
    """Return a text of all that determines a plan; equal texts mean equal requests."""
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
        raise ValueError(f"{path} holds another request: give another --out, or --force")
    check_origin(path, attributes)
    return np.array(times, float)
