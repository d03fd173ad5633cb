"""The best microbatch size over bandwidth and latency of the network, as one dataset.

Beside the map and its slopes stands what checks them at every point: the size and step time that an
exhaustive search finds, and differences of its step times on networks a little faster and slower.
"""

import dataclasses
import time

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.provenance import provenance
from pipejax.search.tuning.microbatch import TunedSizes, search_microbatches
from pipejax.search.tuning.network_map import NetworkMap, map_networks
from pipejax.search.tuning.problem import ScheduleFamily
from sweeps.kit.command import write

SCHEDULE, WORKERS, OPTIONS = "interleaved-1f1b", 8, {"stages_per_worker": 2}
MODEL, SYSTEM, MINIBATCH, TENSOR_PARALLEL, RECOMPUTE = "gpt3-175b", "b200", 128, 8, "full"
POINTS = 100  # on each axis
BANDWIDTHS, LATENCIES = (3e8, 1e11), (1e-5, 1e-1)  # from a slow cloud to 800 Gbit/s; to overseas
NEAR = 1e-4  # relative distance of the networks that a slope is checked by
AXES = ("network.latency", "network.bandwidth")

Grid = tuple[Float[NumpyArray, " networks"], Float[NumpyArray, " networks"]]


def sweep(points: int = POINTS) -> xr.Dataset:
    """Map the networks and check the map.

    Args:
      points: on each axis.

    Returns:
      By (network.latency, network.bandwidth): microbatch_size, step_time, its elasticities, the
      same size and step time as an exhaustive search finds them, and how far the elasticities are
      off differences of its step times. By microbatch size too: step_times.
    """
    bandwidth, latency = (np.geomspace(*ends, points) for ends in (BANDWIDTHS, LATENCIES))
    grid = (np.tile(bandwidth, points), np.repeat(latency, points))
    began = time.perf_counter()
    found = map_networks(_family(), _workload(), pj.load_system(SYSTEM), *grid)
    seconds = time.perf_counter() - began
    best = _exhaustive(*grid)
    off = [_off(found, grid, best, axis) for axis in range(2)]
    shape = (len(found.sizes), points, points)
    by_network = {
        "microbatch_size": (found.microbatch_size, "1"),
        "step_time": (found.step_time, "s"),
        "bandwidth_elasticity": (found.bandwidth_elasticity, "1"),
        "latency_elasticity": (found.latency_elasticity, "1"),
        "exhaustive_microbatch_size": (best.microbatch_size, "1"),
        "exhaustive_step_time": (best.step_time, "s"),
        "bandwidth_elasticity_error": (off[0], "1"),
        "latency_elasticity_error": (off[1], "1"),
    }
    return xr.Dataset(
        {
            **{
                name: (AXES, values.reshape(points, points), {"units": unit})
                for name, (values, unit) in by_network.items()
            },
            "step_times": (("size", *AXES), found.step_times.reshape(shape), {"units": "s"}),
        },
        coords={
            "size": found.sizes,
            "network.bandwidth": ("network.bandwidth", bandwidth, {"units": "B/s"}),
            "network.latency": ("network.latency", latency, {"units": "s"}),
        },
        attrs={
            "title": "GPT-3 175B on 8 workers of 8 B200, interleaved 1F1B with V=2",
            "minibatch": MINIBATCH,
            "seconds": seconds,
            **provenance(),
        },
    )


def _family() -> ScheduleFamily:
    return ScheduleFamily(SCHEDULE, WORKERS, OPTIONS)


def _workload() -> pj.Workload:
    model = pj.load_model(MODEL)
    return pj.Workload(model, MINIBATCH, tensor_parallel=TENSOR_PARALLEL, recompute=RECOMPUTE)


def _exhaustive(
    bandwidth: Float[NumpyArray, " networks"], latency: Float[NumpyArray, " networks"]
) -> TunedSizes:
    """Evaluate every legal size on every network, each a system of its own."""
    given = pj.load_system(SYSTEM)
    systems = [
        dataclasses.replace(
            given, network=dataclasses.replace(given.network, bandwidth=each, latency=delay)
        )
        for each, delay in zip(bandwidth.tolist(), latency.tolist(), strict=True)
    ]
    with jax.enable_x64(True):
        return search_microbatches(_family(), [_workload()] * len(systems), systems)


def _off(found: NetworkMap, grid: Grid, best: TunedSizes, axis: int) -> NumpyArray:
    """How far an elasticity is off the range of both one-sided differences: (networks).

    Where regimes meet these differ, and the derivative is that of one path of many.
    """
    slope = (found.bandwidth_elasticity, found.latency_elasticity)[axis]
    factors = {way: float(np.exp(way * NEAR)) for way in (-1, 0, 1)}
    sides = []
    for way in (1, -1):
        bandwidth, latency = (
            grid[0] * factors[way * (axis == 0)],
            grid[1] * factors[way * (axis == 1)],
        )
        change = np.log(_exhaustive(bandwidth, latency).step_time / best.step_time)
        sides.append(way * change / NEAR)
    low, high = np.minimum(*sides), np.maximum(*sides)
    return np.maximum(low - slope, 0) + np.maximum(slope - high, 0)


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.step_time.size} networks")


if __name__ == "__main__":
    main()
