"""The work of one schedule on many systems: costs, and shares of the critical path by resource.

A sweep prices thousands of systems for each of a few schedules, once. So what is compiled serves
all schedules (`distinct_stages`), and where few systems are priced in all, quick compilation counts
more than quick code. Systems go through in chunks whose prices stay in cache.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.analysis.uncertainty.sensitivity import POWER
from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.machine import cpu_options
from pipejax.costs.costs import Costs, unchecked_costs
from pipejax.costs.scaling import ON_WORKERS, factors_of_ops
from pipejax.costs.stage.distinct_stages import distinct_stages
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageWork
from pipejax.costs.system.parts import FIELDS
from pipejax.costs.system.system import System
from pipejax.engine.batched.makespans import Found, makespans_and_grad
from pipejax.engine.lowering.program import Program
from pipejax.schedules.table.table import ScheduleTable

CHUNK = 1024  # systems that are priced at once
# compiles in a fifth of the time; the code takes up to four times as long
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Slowed(NamedTuple):
    """Slow workers in a batch of costs.

    Attributes:
      factors: (stages), or (stages, microbatches) where copies of a stage differ.
    """

    factors: Float[NumpyArray, "..."]

    @classmethod
    def of(cls, table: ScheduleTable, stragglers: Mapping[int, float]) -> "Slowed":
        """Find the factors of a table's ops."""
        found = factors_of_ops(table, stragglers)
        return cls(found if stragglers else np.ones(table.num_stages))

    @property
    def differ(self) -> bool:
        """Whether copies of a stage differ, so that costs are by microbatch."""
        return self.factors.ndim == 2

    def costs(self, costs: Costs) -> Costs:
        """Costs (batch, stages) with the factors, (batch, stages, microbatches) if they differ."""
        return self._each(
            lambda leaf, factors: (leaf[..., None] if self.differ else leaf) * factors, costs
        )

    def counts(self, counts: Costs) -> Costs:
        """Counts of those costs as counts of the costs without factors (batch, stages)."""

        def back(leaf: Any, factors: Any) -> Any:
            return (leaf * factors).sum(axis=-1) if self.differ else leaf * factors

        return self._each(back, counts)

    def _each(self, function: Callable[[Any, Any], Any], costs: Costs) -> Costs:
        if np.all(self.factors == 1):
            return costs
        leaves = {name: getattr(costs, name) for name in ON_WORKERS}
        return unchecked_costs(
            vars(costs)
            | {
                name: function(np.asarray(leaf), self.factors.astype(leaf.dtype))
                for name, leaf in leaves.items()
                if leaf is not None
            }
        )


def system_costs(
    work: StageWork, systems: System, *, dtype: Any = float, quickly: bool = False
) -> Costs:
    """Price work on a batch of systems: Costs with the batch axis first [s].

    `quickly` is for few systems: it compiles quickly, and computes slowly.
    """
    distinct, places = distinct_stages(work)
    costs = _compiled(work_costs, quickly)(distinct, systems)
    return places.spread(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), costs))


def resource_shares(
    program: Program,
    work: StageWork,
    systems: System,
    costs: Costs,
    *,
    slowed: Slowed | None = None,
    quickly: bool = False,
) -> tuple[Found, Float[NumpyArray, "batch resources"]]:
    """Step times, and shares of the critical path by resource, for a batch of systems.

    `costs` are the work's on these systems (`system_costs`), slowed. Returns (batch) step times
    [s], and (batch, resources) shares in the order of `RESOURCES`, which sum to 1.
    """
    times, counts = makespans_and_grad(program, costs)
    # no system has the factor of fused pairs; it is in the counts of their ops
    counts = unchecked_costs({**vars(counts), "pair_factor": None})
    distinct, places = distinct_stages(work)
    of_work = places.gather(counts if slowed is None else slowed.counts(counts))
    on_path = _compiled(_seconds_on_path, quickly)(distinct, systems, of_work)
    return times, np.asarray(on_path) / np.asarray(times)[:, None]


@functools.cache
def _compiled(function: Callable[..., Any], quickly: bool) -> Callable[..., Any]:
    """Compile a function of work and rows of batches for whole batches."""

    def in_chunks(work: StageWork, *batch: Any) -> Any:
        size = max(map(len, jax.tree.leaves(batch)))
        width = -(-size // -(-size // CHUNK))  # of equal chunks
        rows = np.minimum(np.arange(-(-size // width) * width), size - 1).reshape(-1, width)
        of_chunk = jax.vmap(functools.partial(function, work))
        found = jax.lax.map(
            lambda chunk: of_chunk(*chunk), jax.tree.map(lambda leaf: leaf[rows], batch)
        )
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], found)

    return jax.jit(in_chunks, compiler_options=cpu_options(**QUICKLY) if quickly else {})


def _seconds_on_path(work: StageWork, system: System, counts: Costs) -> Float[Array, " resources"]:
    """Seconds that each resource takes of a path with so many of each cost."""

    def step_time(system: System) -> Float[Array, ""]:
        parts = jax.tree.map(
            lambda count, cost: (count * cost).sum(), counts, work_costs(work, system)
        )
        return sum(jax.tree.leaves(parts), jnp.zeros(()))

    slopes = jax.grad(step_time)(system)
    return jnp.stack(
        [
            power * _get(slopes, FIELDS[name]) * _get(system, FIELDS[name])
            for name, power in POWER.items()
        ]
    )


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, tree)
