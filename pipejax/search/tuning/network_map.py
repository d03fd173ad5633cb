"""The best microbatch size on every network: a map over bandwidth and latency, and its slopes.

All points go through the program of each legal number of microbatches as one batch, and come back
with their derivatives. The best step time is the least of those of the sizes, so by the envelope
theorem its derivative is that of the size that is best there. It jumps where the best size changes,
and where the critical path of one size does.
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import are_positive, divisors
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_bytes import memory_bytes
from pipejax.costs.system.system import Number, System
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem
from pipejax.search.tuning.step_time_objective import Given, Pair, in_bucket


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
    workload: Workload,
    system: System,
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
    if memory_bytes(workload, table).max() > problem.capacity[0]:
        return np.full(size, np.inf), np.zeros((2, size))
    with jax.enable_x64(True):  # of this thread
        given = problem.given(np.zeros(size, int), count, limited=False)
        points, given = in_bucket((np.log(networks), given), size)
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
