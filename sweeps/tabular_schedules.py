"""The experiments of the tabular-schedule paper (arXiv:2605.24006) as one dataset.

Schedules x stages x microbatches x nine systems at a fixed minibatch, at three levels: published
formula, idealised table in slots, communication-aware run. One program per table, all nine
systems in one vmapped call.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import pipejax as pj
from pipejax.analysis.closed_forms import closed_form
from pipejax.analysis.evaluate import bubble_ratio, op_counts
from pipejax.base.array_types import Array, Float, Int
from pipejax.base.provenance import provenance
from pipejax.costs.model import load_model
from pipejax.costs.roofline import stage_work, work_costs
from pipejax.costs.system import System, load_system
from pipejax.costs.workload import Workload, stage_bytes
from pipejax.engine.pricing import NodeCosts, cost_vector
from pipejax.engine.recurrence import critical_path
from pipejax.schedules.table.held_activations import (
    held_in_rows,
    peak_in_flight,
    static_bytes,
)
from pipejax.schedules.table.slot_simulation import slot_times
from pipejax.schedules.table.table import ScheduleTable
from sweeps.cases import CASES, build
from sweeps.command import write

WORKERS = (4, 8)
MICROBATCHES = (8, 16, 32, 64, 128, 256)
MINIBATCH = 256
MODEL = "tabular-128l"
LEVELS = ("slow", "mid", "fast")
SYSTEMS = tuple(f"{network}_nw_{compute}_cp" for network in LEVELS for compute in LEVELS)
SLOTS: Mapping[str, Mapping[str, float]] = {
    "F=1, B=1": {"F": 1, "B": 1},
    "F=1, B=2": {"F": 1, "B": 2},
}
RUN_SLOTS = "F=1, B=2"  # a backward of this model takes about twice its forward
SHARES = ("F", "B", "message", "A")


def run(
    table: ScheduleTable, systems: System, workload: Workload
) -> dict[str, Float[np.ndarray, "systems ..."]]:
    """Run one table on all systems at once.

    Args:
      table: the schedule.
      systems: systems stacked along the first axis of every field.
      workload: model and minibatch.

    Returns:
      (systems) makespan [s] and bubble ratio; (systems, shares) share of the critical path.
    """
    program = pj.lower(table)
    size = 1 << (program.num_nodes - 1).bit_length()
    widths = [(0, size - program.num_nodes), (0, max(0, 4 - program.max_preds))]
    preds, duration_index, lag_index = (  # one compiled shape for many programs
        np.pad(part, widths[: np.ndim(part)])
        for part in (program.preds, program.duration_index, program.lag_index)
    )
    group = np.array(
        [SHARES.index(g) if g in SHARES else len(SHARES) for g in program.layout.groups]
    )
    counts = op_counts(program)

    work = stage_work(workload, table, gpus_per_node=systems.gpus_per_node)
    # the optimizer update is no part of the paper's experiment, the exchange of copies is
    costs = dataclasses.replace(
        _price(work, systems), update=np.zeros(np.shape(systems.peak_flops))
    )
    vectors = jax.vmap(lambda one: jnp.asarray(cost_vector(program, one)))(costs)
    makespan, seconds = _run(
        preds,
        duration_index,
        lag_index,
        group[duration_index],
        group[lag_index],
        vectors,
    )
    busy = np.asarray(vectors) @ counts.T
    return {
        "makespan": np.asarray(makespan),
        "bubble_ratio": np.array([bubble_ratio(b, t) for b, t in zip(busy, makespan, strict=True)]),
        "path_share": np.asarray(seconds) / np.asarray(makespan)[:, None],
    }


_price = jax.jit(jax.vmap(work_costs, in_axes=(None, 0)))


@jax.jit
def _run(
    preds: Int[Array, "nodes preds"],
    duration_index: Int[Array, " nodes"],
    lag_index: Int[Array, "nodes preds"],
    duration_group: Int[Array, " nodes"],
    lag_group: Int[Array, "nodes preds"],
    vectors: Float[Array, "systems costs"],
) -> tuple[Float[Array, " systems"], Float[Array, "systems shares"]]:
    """Makespan, and seconds on the critical path by kind of cost."""

    def one(vector: Float[Array, " costs"]) -> tuple[Float[Array, ""], Float[Array, " shares"]]:
        costs = NodeCosts(vector[duration_index], vector[lag_index])
        path = critical_path(preds, costs)
        seconds = jnp.zeros(len(SHARES) + 1, vector.dtype)
        seconds = seconds.at[duration_group].add(jnp.where(path.nodes, costs.duration, 0))
        seconds = seconds.at[lag_group].add(jnp.where(path.edges, costs.lag, 0))
        return path.finish.max(), seconds[: len(SHARES)]

    return jax.vmap(one)(vectors)


def stack(systems: list[System]) -> System:
    """Stack systems along the first axis of every field."""
    alike = [dataclasses.replace(system, name="grid", source="grid") for system in systems]
    return jax.tree.map(lambda *leaves: jnp.array(leaves), *alike)


def sweep(
    workers: tuple[int, ...] = WORKERS,
    microbatches: tuple[int, ...] = MICROBATCHES,
    cases: tuple[str, ...] = tuple(CASES),
) -> xr.Dataset:
    """Evaluate the whole grid.

    Args:
      workers: numbers of workers.
      microbatches: numbers of microbatches; each divides the minibatch.
      cases: schedules, by their names in `CASES`.

    Returns:
      The dataset; every variable states its unit.
    """
    systems = stack([load_system(name) for name in SYSTEMS])
    workload = Workload(load_model(MODEL), MINIBATCH)
    shape = len(cases), len(workers), len(microbatches)
    ours = {
        "makespan": np.full((*shape, len(SYSTEMS)), np.nan),
        "bubble_ratio": np.full((*shape, len(SYSTEMS)), np.nan),
        "path_share": np.full((*shape, len(SYSTEMS), len(SHARES)), np.nan),
        "formula_bubble_ratio": np.full(shape, np.nan),
        "table_bubble_ratio": np.full((*shape, len(SLOTS), len(SLOTS)), np.nan),
        "peak_in_flight": np.full((*shape, max(workers)), np.nan),
        "activation_bytes": np.full((*shape, max(workers)), np.nan),
        "static_bytes": np.full((*shape, max(workers)), np.nan),
    }
    points = [
        (c, w, m)
        for c in range(len(cases))
        for w in range(len(workers))
        for m in range(len(microbatches))
    ]
    with _progress() as progress:
        for c, w, m in progress.track(points, description="tables on nine systems"):
            case, p, count = cases[c], workers[w], microbatches[m]
            tables = {name: build(case, p, count, slots) for name, slots in SLOTS.items()}
            table = tables[RUN_SLOTS]
            for name, values in run(table, systems, workload).items():
                ours[name][c, w, m] = values
            form, arguments = closed_form(table)
            if form.bubble_ratio is not None:
                ours["formula_bubble_ratio"][c, w, m] = form.bubble_ratio[1](arguments)
            for d, drawn in enumerate(SLOTS):
                for k, measured in enumerate(SLOTS):
                    start, finish = slot_times(tables[drawn], SLOTS[measured])
                    total = finish.max() * p
                    idle = (total - (finish - start).sum()) / total
                    ours["table_bubble_ratio"][c, w, m, d, k] = idle
            memory = stage_bytes(workload, table)
            ours["peak_in_flight"][c, w, m, :p] = peak_in_flight(table)
            ours["activation_bytes"][c, w, m, :p] = held_in_rows(table).peaks(
                np.stack(memory.parts), p
            )
            ours["static_bytes"][c, w, m, :p] = static_bytes(table, np.asarray(memory.static))
    return _label(ours, workers, microbatches, cases)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _label(
    ours: dict[str, np.ndarray[Any, Any]],
    workers: tuple[int, ...],
    microbatches: tuple[int, ...],
    cases: tuple[str, ...],
) -> xr.Dataset:
    grid = ("schedule", "workers", "microbatches")
    dims = {
        "makespan": (*grid, "system"),
        "bubble_ratio": (*grid, "system"),
        "path_share": (*grid, "system", "cost"),
        "formula_bubble_ratio": grid,
        "table_bubble_ratio": (*grid, "drawn", "measured"),
        "peak_in_flight": (*grid, "worker"),
        "activation_bytes": (*grid, "worker"),
        "static_bytes": (*grid, "worker"),
    }
    units = {
        "makespan": "s",
        "activation_bytes": "byte",
        "static_bytes": "byte",
        "peak_in_flight": "stage activations",
    }
    return xr.Dataset(
        {
            name: (dims[name], values, {"units": units.get(name, "1")})
            for name, values in ours.items()
        },
        coords={
            "schedule": list(cases),
            "workers": list(workers),
            "microbatches": list(microbatches),
            "system": list(SYSTEMS),
            "cost": list(SHARES),
            "drawn": list(SLOTS),
            "measured": list(SLOTS),
            "worker": list(range(max(workers))),
        },
        attrs={
            "title": "Schedules of arXiv:2605.24006 at three levels",
            "model": MODEL,
            "minibatch": MINIBATCH,
            "run_slots": RUN_SLOTS,
            "link": "delay",
            "dtype": "float64",
            **provenance(),
        },
    )


def main() -> None:
    """Write the dataset."""
    # jax leaves this function without annotations
    jax.config.update("jax_enable_x64", True)
    write(__doc__ or "", sweep, lambda data: f"{data.makespan.size} runs")


if __name__ == "__main__":
    main()
