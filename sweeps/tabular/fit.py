"""The one number of the tabular-schedule paper's cost model that is fitted: the efficiency e_c.

The paper reports neither its efficiency factors nor the rest of a setting. Its Table I says that
Hanayo is 2.33 % faster than Chimera at S = B = 8 on slow_nw_mid_cp. For every setting the share of
the compute peak is found at which ours is, all of them in one batch that closes in on it: what else
comes out there is then a prediction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.typing import Float, NumpyArray
from sweeps.tabular.pricing import Open, flat, price
from sweeps.tabular.settings import (
    EXCHANGES,
    H100_BANDWIDTH,
    MAIN,
    REPORTED,
    SETTINGS,
    SLOTS,
    SYSTEMS,
    Setting,
    draw,
    slots_drawn_with,
)

WORKERS = MICROBATCHES = 8
CHIMERA, HANAYO = "chimera", "hanayo, 2 waves"
FITTED_TO = {"slow_nw_mid_cp": 0.0233}  # gain of Hanayo over Chimera
OUTLIERS = {**FITTED_TO, "slow_nw_fast_cp": -0.1232}  # its Table I, as far as it is known
BANDWIDTHS = (H100_BANDWIDTH, float(REPORTED.memory_bandwidth))
LEAST, PARTS, ROUNDS = 0.05, 33, 4  # e_c; each round closes in on one part of the last
TIMES = tuple(
    dict.fromkeys(exchange_time(WORKERS, MICROBATCHES) for exchange_time in EXCHANGES.values())
)
FIT: Mapping[str, tuple[Any, ...]] = {
    "minibatch": SETTINGS["minibatch"],
    "bandwidth": BANDWIDTHS,
    "link": SETTINGS["link"],
    "slots": tuple(SLOTS),
    "exchanges": TIMES,
    "inequality": SETTINGS["inequality"],
}
# the fit of the main setting among them
AT_MAIN: Mapping[str, Any] = {
    "minibatch": MAIN["minibatch"],
    "bandwidth": H100_BANDWIDTH,
    "link": MAIN["link"],
    "slots": slots_drawn_with(MAIN["drawn"], WORKERS, MICROBATCHES),
    "exchanges": EXCHANGES[MAIN["exchange"]](WORKERS, MICROBATCHES),
    "inequality": MAIN["inequality"],
}


def fit(grid: Mapping[str, Sequence[Any]] = FIT) -> xr.Dataset:
    """Fit e_c to the published number in every setting.

    Args:
      grid: what settings are made of; `exchanges` are all-reduces of a stage at S = B = 8, by
        which ways to exchange gradients that are equal there are one.

    Returns:
      By setting: e_c, the greatest that meets the number, NaN where none does; what Hanayo saves
      there on every system; how far that is from the number that e_c is fitted to.
    """
    fits = [[_fit(grid, link, slots) for slots in grid["slots"]] for link in grid["link"]]
    dims = ("link", "slots", "minibatch", "exchanges", "inequality", "bandwidth")
    efficiency, saves = (np.array([[fitted[k] for fitted in row] for row in fits]) for k in (0, 1))
    ((system, published),) = FITTED_TO.items()
    coords = {**{name: list(grid[name]) for name in dims}, "system": list(SYSTEMS)}
    data = xr.Dataset(
        {"compute_efficiency": (dims, efficiency), "hanayo_saves": ((*dims, "system"), saves)},
        coords=coords,
    )
    data["residual"] = data.hanayo_saves.sel(system=system, drop=True) - published
    return data


def _fit(
    grid: Mapping[str, Sequence[Any]], link: str, slots: str
) -> tuple[Open, Float[NumpyArray, "minibatches exchanges inequalities bandwidths systems"]]:
    """Fit e_c with one order under one link model; bandwidths are the last axis of settings."""
    shape = [len(grid[name]) for name in ("minibatch", "exchanges", "inequality", "bandwidth")]
    tables = [draw(case, WORKERS, MICROBATCHES, slots) for case in (HANAYO, CHIMERA)]
    programs = [pj.lower(table, link=link) for table in tables]
    rates = np.array(grid["bandwidth"])

    def saves(
        efficiency: Float[NumpyArray, "*settings tried"], systems: Sequence[str]
    ) -> Float[NumpyArray, "*settings tried systems"]:
        free = efficiency.reshape(*shape[:3], -1)  # bandwidths and what is tried are one axis
        tried = efficiency.shape[-1]
        bandwidth = np.broadcast_to(np.repeat(rates, tried), free.shape)
        hanayo, chimera = (
            np.asarray(
                pj.makespans(
                    program,
                    flat(
                        price(
                            table,
                            grid["minibatch"],
                            grid["exchanges"],
                            grid["inequality"],
                            systems,
                            free,
                            bandwidth,
                        )
                    ),
                )
            )
            for program, table in zip(programs, tables, strict=True)
        )
        return (1 - hanayo / chimera).reshape(*shape, tried, len(systems))

    ((system, published),) = FITTED_TO.items()
    low, high = np.full(shape, LEAST), np.ones(shape)
    parts = np.linspace(0, 1, PARTS)
    has_solution = np.ones(shape, bool)
    for _ in range(ROUNDS):
        tried = low[..., None] * (high / low)[..., None] ** parts
        missed = saves(tried, [system])[..., 0] - published
        crosses = missed[..., :-1] * missed[..., 1:] <= 0
        has_solution &= crosses.any(-1)
        last = PARTS - 2 - crosses[..., ::-1].argmax(-1)  # the greatest e_c that meets it
        low, high, below, above = (
            np.take_along_axis(values, (last + k)[..., None], -1)[..., 0]
            for values in (tried, missed)
            for k in (0, 1)
        )
    between = np.where(below == above, 0, below / np.where(below == above, 1, below - above))
    efficiency = np.where(has_solution, low + between * (high - low), np.nan)
    gains = saves(np.where(has_solution, efficiency, 1.0)[..., None], SYSTEMS)[..., 0, :]
    return efficiency, np.where(has_solution[..., None], gains, np.nan)


def calibrated() -> Setting:
    """Fit e_c in the main setting alone.

    Returns:
      The calibrated setting.

    Raises:
      ArithmeticError: if no e_c meets the number.
    """
    fitted = fit({name: (value,) for name, value in AT_MAIN.items()}).squeeze()
    if np.isnan(fitted.compute_efficiency):
        raise ArithmeticError(f"no e_c from {LEAST} to 1 brings {FITTED_TO}")
    return Setting(float(fitted.compute_efficiency), H100_BANDWIDTH)
