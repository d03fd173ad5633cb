"""A world in which all that the tabular-schedule paper says is so, and how to contradict each."""

import numpy as np
import xarray as xr

from sweeps.tabular.checks import FAST, HANAYO, MID_OR_FAST, SLOW, UNEQUAL
from sweeps.tabular.settings import DOUBLE, EQUAL, MAIN, SETTINGS, SYSTEMS

COUNTS = (8, 16, 32, 64, 128, 256)
SCHEDULES = ("gpipe", "1f1b", "chimera", *UNEQUAL.values(), HANAYO)
GRID = {"schedule": SCHEDULES, "workers": (4, 8), "microbatches": COUNTS}
ORDERS = {name: (MAIN[name],) for name in ("drawn", "admission")}
SIZES = {"minibatch": (MAIN["minibatch"],), **ORDERS}
RUNS = {name: (MAIN[name],) for name in SETTINGS} | {"system": SYSTEMS}
LAYOUT = {
    "makespan": GRID | RUNS,
    "bubble_ratio": GRID | RUNS,
    "formula_bubble_ratio": GRID,
    "table_bubble_ratio": GRID | ORDERS | {"measured": (EQUAL, DOUBLE)},
    "peak_in_flight": GRID | ORDERS | {"worker": range(8)},
    "activation_bytes": GRID | SIZES | {"worker": range(8)},
    "stage_activation_bytes": GRID | SIZES | {"stage": range(8)},
    "static_bytes": GRID | {"worker": range(8)},
}
FITTED = {"slots": (EQUAL,), "inequality": (MAIN["inequality"],), "bandwidth": (3.35e12, 34e12)}
FITTED = {f"fitted_{name}": values for name, values in FITTED.items()}
LAYOUT["fitted_saves"] = FITTED | {"system": SYSTEMS}


def published():
    sizes = {name: [len(values) for values in dims.values()] for name, dims in LAYOUT.items()}
    ones = {name: np.ones(size) for name, size in sizes.items()}
    coords = {name: list(values) for dims in LAYOUT.values() for name, values in dims.items()}
    data = xr.Dataset({name: (list(LAYOUT[name]), ones[name]) for name in LAYOUT}, coords=coords)
    data = data.assign(memory_capacity=80e9)
    workers, counts = data.workers, data.microbatches
    formula = (workers - 1) / (counts + workers - 1)
    share = (workers - 2) / (2 * counts + workers - 2)
    data["formula_bubble_ratio"] = formula.broadcast_like(data.formula_bubble_ratio).copy()
    put(data.formula_bubble_ratio, share, schedule="chimera")
    data["table_bubble_ratio"] = formula.broadcast_like(data.table_bubble_ratio).copy()
    put(data.table_bubble_ratio, share + 0.7 * (formula - share), schedule="chimera")
    _times(data)
    _memory(data)
    data["fitted_saves"] += 0.13 - 1
    return data


def put(values, what, **where):
    """Put values, or an array of some of the axes, where labels say."""
    there = values.sel(where)
    filled = xr.DataArray(what).broadcast_like(there).transpose(*there.dims)
    values.loc[where] = np.broadcast_to(filled, there.shape)


def _times(data):
    times, idle = data.makespan, data.bubble_ratio
    gpipe = 100 * (1 + (data.workers - 1) / data.microbatches)
    data["makespan"] = times = gpipe.broadcast_like(times).transpose(*times.dims).copy()
    rising = 300 + 30 * np.log2(data.microbatches)
    idle[:] = 0.45
    for name in ("chimera", *UNEQUAL.values(), HANAYO):
        put(times, rising, schedule=name, system=list(SLOW))
        few = {"schedule": name, "microbatches": [8, 16], "system": list(MID_OR_FAST)}
        times.loc[few] *= 0.85
        idle.loc[few] = 0.35
    times.loc[{"schedule": UNEQUAL["1:2"], "workers": 4, "system": list(FAST)}] *= 0.95
    times.loc[{"schedule": UNEQUAL["1:2"], "workers": 8, "microbatches": [128, 256]}] *= 1.02
    times.loc[{"schedule": HANAYO, "system": list(MID_OR_FAST)}] *= 0.87
    times.loc[{"schedule": HANAYO, "system": "slow_nw_mid_cp"}] *= 1 - 0.0233
    times.loc[{"schedule": HANAYO, "system": "slow_nw_fast_cp"}] *= 1 + 0.1232
    idle.loc[{"schedule": HANAYO, "system": list(MID_OR_FAST)}] = 0.25
    idle.loc[{"schedule": HANAYO, "system": "slow_nw_fast_cp"}] = 0.5


def _memory(data):
    worker, peak, uneven = data.worker, data.peak_in_flight, UNEQUAL["1:2"]
    data["peak_in_flight"] = data.microbatches.broadcast_like(peak).transpose(*peak.dims).copy()
    limit = np.minimum(data.workers - worker, data.microbatches)
    put(data.peak_in_flight, limit, schedule="1f1b")
    for name in ("activation_bytes", "static_bytes"):
        data[name] *= 1e12
    data["activation_bytes"] *= 1 + 0.5 * (worker == 0)
    data["stage_activation_bytes"] *= 1 + data.stage
    put(data.activation_bytes, 1.5e12 - 1e10 * worker, schedule=uneven)
    put(data.stage_activation_bytes, 1.0, schedule=uneven)
    data.static_bytes.loc[{"schedule": ["chimera", *UNEQUAL.values()]}] *= 2
    for name in ("peak_in_flight", "activation_bytes", "static_bytes"):
        data[name] = data[name].where(worker < data.workers)


def _scaled(name, factor, **where):
    def change(data):
        data[name].loc[where] *= factor

    return change


def _sized(name, factor, workers, microbatches, schedule="chimera", **where):
    at = {"workers": workers, "microbatches": microbatches}
    return _scaled(name, factor, schedule=schedule, **at, **where)


# one change of the world for each claim that is counted, which contradicts it
MUTATIONS = {
    "1a": _scaled("makespan", 1.04, schedule="1f1b", workers=4, system="mid_nw_slow_cp"),
    "2a": _sized("table_bubble_ratio", 0.3, 4, 256),
    "2b": _sized("table_bubble_ratio", 0.85, 8, 16),
    "2d": _sized("table_bubble_ratio", 1.5, 8, 64),
    "3a": _sized("makespan", 1.2, 4, 8),
    "3b": _sized("makespan", 0.95, 8, 16),
    "3c": _sized("bubble_ratio", 1.4, 8, 16),
    "3d": _sized("makespan", 0.95, 4, 64),
    "3e": _sized("makespan", 0.2, 8, 32, system="slow_nw_slow_cp"),
    "3f": _sized("makespan", 0.6, 4, 256, system="slow_nw_mid_cp"),
    "3g": _sized("makespan", 1.04, 8, 128, system=FAST[0]),
    "5b": _scaled("bubble_ratio", 1.2, schedule=HANAYO, system=list(MID_OR_FAST)),
    "5c": _scaled("makespan", 0.95, schedule=HANAYO, system="slow_nw_fast_cp"),
    "6a": _scaled("activation_bytes", 0.9, schedule=UNEQUAL["1:2"], workers=4, microbatches=8),
    "6b": _scaled("activation_bytes", 2.0, schedule=UNEQUAL["1:2"], worker=0, microbatches=8),
    "6c": _scaled("makespan", 1.1, schedule=UNEQUAL["1:2"], workers=4, system=list(FAST)),
    "6d": _sized("makespan", 0.9, 8, 256, UNEQUAL["1:2"], system=SLOW[0]),
    "8": lambda data: data["memory_capacity"].values.fill(1e18),
}
