"""Which setting has what the tabular-schedule paper says of slow networks: a search.

The paper reports neither link model, minibatch, efficiency nor how Chimera's gradient exchange is
priced. This asks of every combination whether GPipe and 1F1B take the same time, whether Chimera
is slower on slow networks, and how far Hanayo is from Chimera at S = B = 8. All systems and
settings of one table and link model are one batch of costs.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.costing import StageWork, stage_work, work_costs
from pipejax.files import provenance
from pipejax.typing import Array, Float, NumpyArray
from sweeps.kit.command import write
from sweeps.tabular.fit import CHIMERA, FITTED_TO, HANAYO
from sweeps.tabular.settings import (
    H100_BANDWIDTH,
    MODEL,
    PUBLISHED,
    REPORTED,
    SYSTEMS,
    Setting,
    draw,
    systems_at,
)

LINKS = ("delay", "queued", "blocking", "rendezvous")
MINIBATCHES = (256, 1024, 4096)
BANDWIDTHS = (H100_BANDWIDTH, float(REPORTED.memory_bandwidth))
EFFICIENCIES = tuple(np.geomspace(0.1, 1, 11).round(3).tolist())
WORKERS, MICROBATCHES = (4, 8), (8, 32, 128)
Exchanges = Mapping[str, Callable[[int], float]]
# all-reduces of a stage that follow each other at the end of the step, by microbatches; the two
# stages of a worker are one link's business unless they go at once
EXCHANGES: Exchanges = {
    "free": lambda _: 0.0,
    "both stages at once": lambda _: 0.5,
    "one stage after the other": lambda _: 1.0,
    "after every microbatch": lambda microbatches: microbatches / 2,
}
NONE: Exchanges = {"": lambda _: 1.0}  # of schedules with one copy of each stage
SETTING = ("link", "minibatch", "memory_bandwidth", "compute_efficiency")
Times = Float[NumpyArray, "minibatches bandwidths efficiencies exchanges systems"]


def run(
    case: str, workers: int, microbatches: int, link: str, exchanges: Exchanges = NONE
) -> Times:
    """Run one table in all settings at once: makespans [s]."""
    systems = systems_at([Setting(e, bandwidth) for bandwidth in BANDWIDTHS for e in EFFICIENCIES])
    table = draw(case, workers, microbatches)
    times = np.array([each(microbatches) for each in exchanges.values()])
    found = []
    for minibatch in MINIBATCHES:
        workload = pj.Workload(pj.load_model(MODEL), minibatch)
        work = stage_work(workload, table)
        found.append(pj.makespans(pj.lower(table, link=link), _batch(work, systems, times)))
    shape = len(times), len(BANDWIDTHS), len(EFFICIENCIES), len(SYSTEMS)
    return np.moveaxis(np.reshape(found, (len(MINIBATCHES), *shape)), 1, 3)


@jax.jit
def _batch(work: StageWork, systems: pj.System, times: Float[Array, " exchanges"]) -> pj.Costs:
    """Price the work on all systems, with every number of exchanges: (exchanges * systems)."""
    one = jax.vmap(work_costs, in_axes=(None, 0))(work, systems)
    many = jax.tree.map(lambda leaf: jnp.tile(leaf, (len(times), *[1] * (leaf.ndim - 1))), one)
    exchange = jnp.asarray(one.all_reduce)  # (systems, stages)
    factor = jnp.repeat(times, len(exchange))[:, None]
    return dataclasses.replace(many, all_reduce=many.all_reduce * factor)


def _point(link: str, workers: int, microbatches: int) -> dict[str, NumpyArray]:
    """Times of 1F1B and of Chimera over GPipe's, minus 1, in all settings."""
    gpipe, one_f_one_b = (run(name, workers, microbatches, link) for name in ("gpipe", "1f1b"))
    chimera = run(CHIMERA, workers, microbatches, link, EXCHANGES)
    return {"one_f_one_b": (one_f_one_b / gpipe - 1)[:, :, :, 0], "chimera": chimera / gpipe - 1}


def _hanayo(link: str) -> Times:
    """Share of time that Hanayo saves against Chimera at S = B = 8."""
    return 1 - run(HANAYO, 8, 8, link) / run(CHIMERA, 8, 8, link, EXCHANGES)


def sweep() -> xr.Dataset:
    """Search all settings.

    Returns:
      The dataset: 1F1B and Chimera against GPipe, Hanayo against Chimera, in every setting.
    """
    points = [(link, p, m) for link in LINKS for p in WORKERS for m in MICROBATCHES]
    found = [_point(*each) for each in track(points, "searching", console=Console(stderr=True))]
    grid = len(LINKS), len(WORKERS), len(MICROBATCHES)
    ours = {}
    for name in found[0]:
        whole = np.reshape([each[name] for each in found], (*grid, *found[0][name].shape))
        ours[name] = np.moveaxis(whole, (1, 2), (-3, -2))  # links, settings, grid, systems
    ends = ("workers", "microbatches", "system")
    return xr.Dataset(
        {
            "one_f_one_b": ((*SETTING, *ends), ours["one_f_one_b"], {"units": "1"}),
            "chimera": ((*SETTING, "exchange", *ends), ours["chimera"], {"units": "1"}),
            "hanayo_saves": (
                (*SETTING, "exchange", "system"),
                np.array([_hanayo(link) for link in LINKS]),
                {"units": "1"},
            ),
        },
        coords={
            "link": list(LINKS),
            "minibatch": list(MINIBATCHES),
            "memory_bandwidth": list(BANDWIDTHS),
            "compute_efficiency": list(EFFICIENCIES),
            "exchange": list(EXCHANGES),
            "workers": list(WORKERS),
            "microbatches": list(MICROBATCHES),
            "system": list(SYSTEMS),
        },
        attrs={
            "title": "Settings of arXiv:2605.24006",
            "drawn": PUBLISHED,
            "dtype": "float64",
            **provenance(),
        },
    )


def fitted(search: xr.Dataset) -> xr.Dataset:
    """Hanayo at all systems where e_c brings the published gain at one of them.

    Returns by link model, minibatch, bandwidth and exchange e_c (NaN where none does), between
    the two of the search, and what Hanayo saves there.
    """
    ((system, published),) = FITTED_TO.items()
    saves = search.hanayo_saves.transpose(..., "compute_efficiency", "system")
    missed = saves.sel(system=system) - published
    efficiency = search.compute_efficiency
    after = missed.shift(compute_efficiency=-1)
    part = missed / (missed - after)  # of the way to the next efficiency
    crosses = (missed * after <= 0) & after.notnull()

    def at(values: xr.DataArray) -> xr.DataArray:
        between = values + part * (values.shift(compute_efficiency=-1) - values)
        return between.where(crosses).mean("compute_efficiency")

    return xr.Dataset({"compute_efficiency": at(efficiency), "hanayo_saves": at(saves)})


def slower(search: xr.Dataset) -> xr.DataArray:
    """Share of the points on slow networks at which Chimera is slower than GPipe, by setting."""
    slow = [name for name in SYSTEMS if name.startswith("slow_nw")]
    return (search.chimera.sel(system=slow) > 0).mean(["workers", "microbatches", "system"])


def widest_gap(search: xr.Dataset) -> xr.DataArray:
    """Largest difference between 1F1B and GPipe, by setting."""
    return abs(search.one_f_one_b).max(["workers", "microbatches", "system"])


def main() -> None:
    """Write the dataset."""
    # jax leaves this function without annotations
    jax.config.update("jax_enable_x64", True)
    write(__doc__ or "", sweep, lambda data: f"{data.chimera.size} times of Chimera against GPipe")


if __name__ == "__main__":
    main()
