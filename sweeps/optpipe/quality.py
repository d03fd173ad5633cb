"""Quality of schedules against solving time, by problem size.

Of each solve every schedule was noted with its time: the effort so far, which is about the seconds
of one idle core and does not depend on what else is computed. Quality is how much longer it is than
the best known schedule of the problem, which another solve may have found, and than the best known
bound.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pipejax.typing import Float, NumpyArray
from sweeps.kit.journal import Record
from sweeps.optpipe.cases import OPTIMUM, Setting

FIRST = 0.05  # of effort, in about the seconds of one idle core
POINTS = 25  # of time, evenly on a logarithmic axis
SHARES = (0.5, 0.9)  # of the problems that are at least so good


def quality(
    records_by_setting: Mapping[Setting, Mapping[str, Record]], data: xr.Dataset, effort: float
) -> Mapping[str, Any]:
    """Summarise the solves of each size.

    Args:
      records_by_setting: records of each problem by method.
      data: what is known of each problem: lower_bound, and makespan of the optimum.
      effort: of each solve.

    Returns:
      Variables by ops, share and solve_time: excess over the best schedule and over the bound;
      infinite where there is no schedule yet. problems: how many there are of a size.
    """
    times = np.geomspace(FIRST, effort, POINTS)
    by_size: dict[int, list[Setting]] = {}
    for setting in records_by_setting:
        by_size.setdefault(3 * setting.pipe.workers * setting.microbatches, []).append(setting)
    sizes = sorted(by_size)
    excess = {name: np.empty((len(sizes), len(SHARES), POINTS)) for name in ("best", "bound")}
    for k, size in enumerate(sizes):
        curves = np.array(
            [_at(records_by_setting[s][OPTIMUM]["news"], times) for s in by_size[size]]
        )
        places = [_best_and_bound(data, setting) for setting in by_size[size]]
        for name, values in excess.items():
            least = np.array([place[name] for place in places])
            values[k] = np.quantile(curves / least[:, None] - 1, SHARES, axis=0, method="higher")
    dimensions = ("ops", "share", "solve_time")
    return {
        "excess_over_best": (dimensions, np.maximum(excess["best"], 0), {"units": "1"}),
        "excess_over_bound": (dimensions, np.maximum(excess["bound"], 0), {"units": "1"}),
        "problems": ("ops", [len(by_size[size]) for size in sizes]),
        "ops": sizes,
        "share": list(SHARES),
        "solve_time": ("solve_time", times, {"units": "s"}),
    }


def _at(news: Sequence[Sequence[float]], times: Float[NumpyArray, " times"]) -> NumpyArray:
    """Makespan (times) of the best schedule that is there by then."""
    when, makespan = np.array(news).T
    return np.append(np.inf, makespan)[np.searchsorted(when, times, side="right")]


def _best_and_bound(data: xr.Dataset, setting: Setting) -> Mapping[str, float]:
    at = data.sel(
        model=setting.pipe.label,
        microbatches=setting.microbatches,
        limit=setting.limit,
        host_link=setting.host_link,
        sharing=setting.sharing,
    )
    return {
        "best": float(at.makespan.sel(schedule=OPTIMUM)),
        "bound": float(at.lower_bound),
    }
