"""The best microbatch size over bandwidth and latency of the network, and its slopes: a dataset.

All points go through the program of each legal number of microbatches as one batch, and come back
with their derivatives. The best step time is the least of those of the sizes, so by the envelope
theorem its derivative is that of the size that is best there. It jumps where the best size changes,
and where the critical path of one size does.

Beside the map stands what checks it at every point: the size and step time that an exhaustive
search finds, and differences of its step times on networks a little faster and slower.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.base.checks import are_positive, divisors
from pipejax.costing import Number
from pipejax.engine.batched.pricing import filled
from pipejax.files import provenance
from pipejax.search.tuning.joint import search_jointly
from pipejax.search.tuning.joint_space import JointProblem, TunedJointly
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem
from pipejax.search.tuning.step_time_objective import Given, Pair
from pipejax.typing import Array, Float, Int, NumpyArray
from sweeps.kit.command import write

SCHEDULE, WORKERS, OPTIONS = "interleaved-1f1b", 8, {"stages_per_worker": 2}
MODEL, SYSTEM, MINIBATCH, TENSOR_PARALLEL, RECOMPUTE = "gpt3-175b", "b200", 128, 8, "full"
POINTS = 100  # on each axis
BANDWIDTHS, LATENCIES = (3e8, 1e11), (1e-5, 1e-1)  # from a slow cloud to 800 Gbit/s; to overseas
NEAR = 1e-4  # relative distance of the networks that a slope is checked by
AXES = ("network.latency", "network.bandwidth")

Grid = tuple[Float[NumpyArray, " networks"], Float[NumpyArray, " networks"]]


class NetworkMap(NamedTuple):
    """The best microbatch size of one workload on many networks.

    Attributes:
      microbatch_size: (networks) b [sequences]; 0 where none fits.
      step_time: (networks) with it [s]; infinite where none fits.
      bandwidth_elasticity: (networks) d log step time / d log bandwidth, at most 0.
      latency_elasticity: (networks) d log step time / d log latency.
      sizes: (sizes) all that are legal, ascending [sequences].
      step_times: (sizes, networks) with each of them [s], infinite where it does not fit.
    """

    microbatch_size: Int[NumpyArray, " networks"]
    step_time: Float[NumpyArray, " networks"]
    bandwidth_elasticity: Float[NumpyArray, " networks"]
    latency_elasticity: Float[NumpyArray, " networks"]
    sizes: Int[NumpyArray, " sizes"]
    step_times: Float[NumpyArray, "sizes networks"]


def map_networks(
    family: ScheduleFamily,
    workload: pj.Workload,
    system: pj.System,
    bandwidth: Float[NumpyArray, " networks"],
    latency: Float[NumpyArray, " networks"],
    *,
    memory_limit: bool = True,
) -> NetworkMap:
    """Find the best microbatch size and its slopes if nodes were joined by these networks.

    Bandwidths [B/s] and latencies [s] are pairs; the other numbers are those of the system.
    """
    for name, values in (("bandwidth", bandwidth), ("latency", latency)):
        if not are_positive(values, len(values)):
            raise ValueError(f"{name} must be finite numbers above 0")
    total = workload.minibatch
    with jax.enable_x64(True):
        problem = TuningProblem.of(family, [workload], [system], memory_limit=memory_limit)
    counts = [total // size for size in divisors(total) if not family.refusal(total // size)]
    if not counts:
        raise ValueError(f"no microbatch size is legal: {family.refusal(total)}")
    slopes_of = functools.partial(_step_times, problem, np.column_stack([bandwidth, latency]))
    # each program compiles once: two at a time
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(slopes_of, counts))
    times, slopes = (np.stack(each) for each in zip(*found, strict=True))
    best, networks = times.argmin(axis=0), np.arange(len(bandwidth))
    sizes, step_time = total // np.array(counts), times[best, networks]
    fits = np.isfinite(step_time)
    by_bandwidth, by_latency = np.where(fits, slopes[best, :, networks].T, 0)
    chosen = np.where(fits, sizes[best], 0)
    return NetworkMap(chosen, step_time, by_bandwidth, by_latency, sizes, times)


def _step_times(
    problem: TuningProblem, networks: Float[NumpyArray, "networks 2"], count: int
) -> tuple[Float[NumpyArray, " networks"], Float[NumpyArray, "2 networks"]]:
    """Step times with so many microbatches [s], infinite without room, and their elasticities."""
    size = len(networks)
    workload, table = problem.workload, problem.family.table(count)
    if pj.memory_bytes(workload, table).max() > problem.capacity[0]:
        return np.full(size, np.inf), np.zeros((2, size))
    with jax.enable_x64(True):  # of this thread
        given = problem.given(np.zeros(size, int), count, limited=False)
        points, given = filled((np.log(networks), given), size)
        found = problem.objective(_on_network, count).value_and_grad(points, given)
    value, slope = (np.asarray(each)[:size] for each in found)
    return value, slope.T / value


def _on_network(logarithms: Array, given: Given) -> tuple[Pair, Number]:
    """The pair on a network of such a bandwidth and latency."""
    bandwidth, latency = jnp.exp(logarithms)
    own = given.pair.system
    network = dataclasses.replace(own.network, bandwidth=bandwidth, latency=latency)
    system = dataclasses.replace(own, network=network)
    return given.pair._replace(system=system), given.size


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
        "exhaustive_microbatch_size": (best.settings.size, "1"),
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
) -> TunedJointly:
    """Evaluate every legal size on every network, each a system of its own."""
    given = pj.load_system(SYSTEM)
    systems = [
        dataclasses.replace(
            given, network=dataclasses.replace(given.network, bandwidth=each, latency=delay)
        )
        for each, delay in zip(bandwidth.tolist(), latency.tolist(), strict=True)
    ]
    with jax.enable_x64(True):
        problem = TuningProblem.of(_family(), [_workload()] * len(systems), systems)
        return search_jointly(JointProblem(problem, ("size",)))


def _off(found: NetworkMap, grid: Grid, best: TunedJointly, axis: int) -> NumpyArray:
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
