"""The experiments of the tabular-schedule paper (arXiv:2605.24006) as one dataset.

Schedules x stages x microbatches x nine systems, at three levels: published formula, idealised
table in slots, communication-aware run. Runs are there in every one of the `SETTINGS`, with e_c
fitted anew in each. One program per table and link model; all systems in all settings are one batch
of costs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pipejax as pj
from pipejax.analysis import closed_form
from pipejax.costing import stage_bytes
from pipejax.files import provenance
from pipejax.schedules import held_in_rows, peak_in_flight, slot_times, static_bytes
from pipejax.typing import Float
from sweeps.kit.cases import CASES
from sweeps.kit.command import write
from sweeps.tabular.fit import AT_MAIN, FIT, FITTED_TO, MICROBATCHES as FITTED_AT, fit
from sweeps.tabular.pricing import flat, price
from sweeps.tabular.settings import (
    ADMITTED,
    CALIBRATED,
    EXCHANGES,
    H100_BANDWIDTH,
    MAIN,
    MODEL,
    REPORTED,
    SETTINGS,
    SLOTS,
    SYSTEMS,
    draw,
    slots_drawn_with,
    workload,
)

WORKERS = (4, 8)
MICROBATCHES = (8, 16, 32, 64, 128, 256)
GRID = ("schedule", "workers", "microbatches")
RUNS = (*SETTINGS, "system")
AS_FITTED = ("minibatch", "link", "inequality")  # these parts of settings are those of fits
ORDERS = ("drawn", "admission")
DIMS = {  # behind those of the grid
    "makespan": RUNS,
    "bubble_ratio": RUNS,
    "formula_bubble_ratio": (),
    "table_bubble_ratio": (*ORDERS, "measured"),
    "peak_in_flight": (*ORDERS, "worker"),
    "activation_bytes": ("minibatch", *ORDERS, "worker"),
    "stage_activation_bytes": ("minibatch", *ORDERS, "stage"),
    "static_bytes": ("worker",),
}
UNITS = {
    "makespan": "s",
    "activation_bytes": "byte",
    "stage_activation_bytes": "byte",
    "static_bytes": "byte",
    "peak_in_flight": "stage activations",
    "fitted_efficiency": "1",
}
Values = dict[str, Float[np.ndarray, "..."]]
Settings = Mapping[str, Sequence[Any]]


def sweep(
    workers: Sequence[int] = WORKERS,
    microbatches: Sequence[int] = MICROBATCHES,
    cases: Sequence[str] = tuple(CASES),
    settings: Settings = SETTINGS,
    fits: xr.Dataset | None = None,
) -> xr.Dataset:
    """Evaluate the whole grid.

    Args:
      workers: numbers of workers.
      microbatches: numbers of microbatches; each divides every minibatch.
      cases: schedules, by their names in `CASES`.
      settings: values of each part of a setting, as in `SETTINGS`.
      fits: e_c by setting, as from `fit`; fitted here if None.

    Returns:
      The dataset; every variable states its unit. NaN where no e_c brings the published number.
    """
    if fits is None:
        fits = fit({**FIT, **{name: settings[name] for name in AS_FITTED}})
    efficiency = _efficiency(fits, settings)
    coords: dict[str, list[Any]] = {
        "schedule": list(cases),
        "workers": list(workers),
        "microbatches": list(microbatches),
        **{name: list(values) for name, values in settings.items()},
        "system": list(SYSTEMS),
        "measured": list(SLOTS),
        "worker": list(range(max(workers))),
        "stage": list(range(max(workers))),
    }
    ours = {
        name: np.full([len(coords[dim]) for dim in (*GRID, *dims)], np.nan)
        for name, dims in DIMS.items()
    }
    points = [
        (c, w, m)
        for c in range(len(cases))
        for w in range(len(workers))
        for m in range(len(microbatches))
    ]
    with _progress() as progress:
        for c, w, m in progress.track(points, description="schedules in all settings"):
            tables = _tables(cases[c], workers[w], microbatches[m], settings)
            values = _runs(tables, efficiency, settings) | _in_table(tables)
            for name, value in (values | _in_memory(tables, settings, max(workers))).items():
                ours[name][c, w, m] = value
    return _label(ours, coords, fits)


def _efficiency(fits: xr.Dataset, settings: Settings) -> xr.Dataset:
    """Look up e_c and memory bandwidth of every setting; e_c is NaN where nothing is fitted."""
    square = [slots_drawn_with(slots, FITTED_AT, FITTED_AT) for slots in settings["drawn"]]
    times = [EXCHANGES[name](FITTED_AT, FITTED_AT) for name in settings["exchange"]]
    efficiency = (
        fits.compute_efficiency.sel({name: list(settings[name]) for name in AS_FITTED})
        .sel(
            bandwidth=H100_BANDWIDTH,
            slots=xr.DataArray(square, dims="drawn"),
            exchanges=xr.DataArray(times, dims="exchange"),
        )
        .drop_vars(["bandwidth", "slots", "exchanges"])
    )
    fitted = xr.DataArray([name == CALIBRATED for name in settings["setting"]], dims="setting")
    order = ("link", "minibatch", "exchange", "inequality", "drawn", "setting")
    return xr.Dataset(
        {
            "efficiency": efficiency.where(fitted, REPORTED.compute_efficiency).transpose(*order),
            "bandwidth": (fitted * 0.0 + H100_BANDWIDTH).where(fitted, REPORTED.memory_bandwidth),
        }
    )


Tables = list[list[pj.ScheduleTable]]  # by slots drawn with, by admission


def _tables(case: str, workers: int, microbatches: int, settings: Settings) -> Tables:
    """Draw every order: (drawn, admissions), the same object where they are one table."""
    tables: dict[Any, pj.ScheduleTable] = {}

    def draw_once(name: str, admission: str) -> pj.ScheduleTable:
        admission = admission if case in ADMITTED else MAIN["admission"]
        key = slots_drawn_with(name, workers, microbatches), admission
        if key not in tables:
            tables[key] = draw(case, workers, microbatches, *key)
        return tables[key]

    return [
        [draw_once(name, admission_rule) for admission_rule in settings["admission"]]
        for name in settings["drawn"]
    ]


class Orders(NamedTuple):
    """Orders that are one program.

    Attributes:
      program: lowered.
      at: their places among the slots drawn with and the admissions.
    """

    program: pj.Program
    at: list[tuple[int, int]]


def _distinct(tables: Tables, link: str) -> list[Orders]:
    """Lower the orders under a link model; equal programs run once."""
    lowered: dict[int, pj.Program] = {}
    orders: dict[Any, Orders] = {}
    for d, row in enumerate(tables):
        for a, table in enumerate(row):
            if id(table) not in lowered:
                lowered[id(table)] = pj.lower(table, link=link)
            program = lowered[id(table)]
            key = program.preds.tobytes(), program.duration_index.tobytes()
            orders.setdefault(key, Orders(program, [])).at.append((d, a))
    return list(orders.values())


def _runs(tables: Tables, efficiencies: xr.Dataset, settings: Settings) -> Values:
    """Run every order in all settings: axes as in `RUNS`."""
    first = tables[0][0]
    times = [
        EXCHANGES[name](first.num_workers, first.num_microbatches) for name in settings["exchange"]
    ]
    shape = {name: len(values) for name, values in settings.items()} | {"system": len(SYSTEMS)}
    results = {
        name: xr.DataArray(np.full([shape[dim] for dim in RUNS], np.nan), dims=RUNS)
        for name in ("makespan", "bubble_ratio")
    }
    for at, link in enumerate(settings["link"]):
        here = efficiencies.isel(link=at)
        fitted = here.efficiency.notnull()
        free = [  # slots drawn with and setting are one axis
            values.broadcast_like(fitted)
            .transpose(*fitted.dims)
            .values.reshape(*fitted.shape[:3], -1)
            for values in (here.efficiency.fillna(1), here.bandwidth)
        ]
        costs = price(first, settings["minibatch"], times, settings["inequality"], SYSTEMS, *free)
        for orders in _distinct(tables, link):
            for d in dict.fromkeys(d for d, _ in orders.at):
                where = slice(d * shape["setting"], (d + 1) * shape["setting"])
                values = _run(first, orders.program, flat(costs, where))
                for name, value in values.items():
                    dims = [*fitted.isel(drawn=d).dims, "system"]
                    labelled = xr.DataArray(value.reshape([shape[dim] for dim in dims]), dims=dims)
                    for a in (a for other, a in orders.at if other == d):
                        to = {"link": at, "drawn": d, "admission": a}
                        results[name][to] = labelled.where(fitted.isel(drawn=d))
    return {name: result.values for name, result in results.items()}


def _run(table: pj.ScheduleTable, program: pj.Program, costs: pj.Costs) -> Values:
    """Run one program with a batch of costs: makespans [s] and bubble ratios."""
    makespan = np.asarray(pj.makespans(program, costs))
    forward, backward, update = (
        np.asarray(leaf).sum(-1) for leaf in (costs.forward, costs.backward, costs.update)
    )
    # every microbatch passes every stage once, and every copy of a stage is updated
    busy = table.num_microbatches * (forward + backward) + table.num_pipes * update
    return {"makespan": makespan, "bubble_ratio": 1 - busy / (table.num_workers * makespan)}


def _in_table(tables: Tables) -> Values:
    """Bubble ratios by the published formula, and of the idealised tables: (..., measured)."""
    form, arguments = closed_form(tables[0][0])
    formula = np.nan if form.bubble_ratio is None else form.bubble_ratio[1](arguments)
    return {
        "formula_bubble_ratio": np.array(formula, float),
        "table_bubble_ratio": _once(tables, _idle),
    }


def _idle(table: pj.ScheduleTable) -> Float[np.ndarray, " measured"]:
    times = [slot_times(table, slots) for slots in SLOTS.values()]
    busy = [(finish - start).sum() for start, finish in times]
    total = [table.num_workers * finish.max() for _, finish in times]
    return 1 - np.divide(busy, total)


def _once(
    tables: Tables, look: Callable[[pj.ScheduleTable], Float[np.ndarray, "..."]]
) -> Float[np.ndarray, "drawn admissions ..."]:
    """Look at every table once."""
    seen = {id(table): look(table) for table in {id(t): t for row in tables for t in row}.values()}
    return np.array([[seen[id(table)] for table in row] for row in tables])


def _in_memory(tables: Tables, settings: Settings, width: int) -> Values:
    """Activations in flight and bytes of workers and stages, NaN where there are fewer."""
    first = tables[0][0]
    sizes = [stage_bytes(workload(minibatch), first) for minibatch in settings["minibatch"]]
    # where two pipes give a worker two stages: one stage at a time
    stages = np.eye(first.num_stages)[: first.num_stages * (first.num_pipes - 1)]

    def held(table: pj.ScheduleTable) -> Float[np.ndarray, "minibatches both"]:
        """Peaks of the workers, and where a worker has two stages those of each, side by side."""
        rows = held_in_rows(table)
        parts = [np.stack(memory.parts) for memory in sizes]
        peaks = [
            [
                *rows.peaks(part, table.num_workers),
                *(rows.peaks(part * stage, table.num_workers).max() for stage in stages),
            ]
            for part in parts
        ]
        return np.array(peaks)

    both = np.moveaxis(_once(tables, held), 2, 0)  # (minibatches, drawn, admissions, both)
    results = {
        "peak_in_flight": _once(tables, peak_in_flight),
        "activation_bytes": both[..., : first.num_workers],
        "stage_activation_bytes": both[..., first.num_workers :],
        "static_bytes": static_bytes(first, np.asarray(sizes[0].static)),
    }
    return {
        name: np.concatenate(
            [values, np.full((*values.shape[:-1], width - values.shape[-1]), np.nan)], axis=-1
        )
        for name, values in results.items()
    }


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _label(ours: Values, coords: Mapping[str, list[Any]], fits: xr.Dataset) -> xr.Dataset:
    ((fitted_to, published),) = FITTED_TO.items()
    capacity = pj.load_system(SYSTEMS[0]).memory_capacity
    main = fits.sel(AT_MAIN)
    # settings of fits are other ones: only what matters at S = B = 8
    apart = fits.rename({name: f"fitted_{name}" for name in FIT})
    return xr.Dataset(
        {
            name: ((*GRID, *DIMS[name]), values, {"units": UNITS.get(name, "1")})
            for name, values in ours.items()
        }
        | {
            "memory_capacity": ((), float(capacity), {"units": "byte"}),
            "fitted_efficiency": apart.compute_efficiency.assign_attrs(units="1"),
            "fitted_saves": apart.hanayo_saves.assign_attrs(units="1"),
        },
        coords=coords,
        attrs={
            "title": "Schedules of arXiv:2605.24006 at three levels",
            "model": MODEL,
            "80 heads": "do not divide 4096; only FLOP and bytes count, no head has a size",
            "recomputation": "none: unfused attention keeps the scores of all heads",
            "gradient exchange": "on the network, at the end of the step",
            "optimizer update": "Adam, at memory bandwidth",
            "memory bandwidth as reported [B/s]": REPORTED.memory_bandwidth,
            "memory bandwidth calibrated [B/s]": H100_BANDWIDTH,
            "compute efficiency as reported": REPORTED.compute_efficiency,
            "compute efficiency calibrated": float(main.compute_efficiency),
            "fitted to": f"Hanayo saves {100 * published} % against Chimera at {fitted_to}, S=B=8",
            "fit residual": float(main.residual),
            "orders": "drawn with F = B where B = S, the one that is published; by our list "
            "scheduler with B = 2F elsewhere",
            **{f"main {name}": value for name, value in MAIN.items()},
            "dtype": "float64",
            **provenance(),
        },
    )


def main() -> None:
    """Write the dataset."""
    # jax leaves this function without annotations
    jax.config.update("jax_enable_x64", True)
    write(__doc__ or "", sweep, _count)


def _count(data: xr.Dataset) -> str:
    fitted = data.attrs["compute efficiency calibrated"]
    return (
        f"e_c = {fitted:.4f} (residual {data.attrs['fit residual']:.1e}), {data.makespan.size} runs"
    )


if __name__ == "__main__":
    main()
