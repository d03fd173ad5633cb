"""Costs of one table in many settings of the tabular-schedule paper at once.

Every leaf has the axes of `AXES` before its own: settings of compute and memory, what is not equal
in a machine, how gradients are exchanged, and systems are one batch.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pipejax as pj
from pipejax.costing import StageWork, stage_work, work_costs
from pipejax.typing import Array, Float, NumpyArray
from sweeps.tabular.settings import (
    DEAR_STAGE,
    SLOW_LINK,
    SLOWER,
    Setting,
    system_in,
    workload,
)

ALL = slice(None)
AXES = "minibatch", "exchange", "inequality", "free", "system"
Open = Float[NumpyArray, "minibatches exchanges inequalities free"]


def price(
    table: pj.ScheduleTable,
    minibatches: Sequence[int],
    times: Sequence[float],
    inequalities: Sequence[str],
    systems: Sequence[str],
    efficiency: Open,
    bandwidth: Open,
) -> pj.Costs:
    """Price a table in all settings.

    Args:
      table: of the schedule.
      minibatches: sizes.
      times: gradient exchanges at the end of the step, one entry each way.
      inequalities: what is not equal, as in `SETTINGS`.
      systems: names.
      efficiency: e_c of each setting; the last axis is the caller's own.
      bandwidth: of memory, of each setting [B/s].

    Returns:
      Costs, every leaf with the axes of `AXES` first.
    """
    works = [stage_work(workload(minibatch), table) for minibatch in minibatches]
    work = jax.tree.map(lambda *leaves: np.stack(leaves), *works)
    machines = stack([pj.load_system(name) for name in systems])
    by_minibatch = (
        np.reshape(values, (len(minibatches), -1)) for values in (efficiency, bandwidth)
    )
    priced = _priced(work, machines, *by_minibatch)
    shape = *efficiency.shape, len(systems)
    costs = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(*shape, *leaf.shape[3:]), priced)
    factor = _factors(table, times, inequalities)
    scaled = {name: getattr(costs, name) * factors for name, factors in factor.items()}
    return dataclasses.replace(costs, input_grad=None, weight_grad=None, **scaled)


def flat(costs: pj.Costs, where: slice = ALL) -> pj.Costs:
    """Make one batch of costs: all axes of `AXES` become one; `where` selects along `free`."""
    leaves = jax.tree.map(lambda leaf: leaf[:, :, :, where], costs)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(AXES) :]), leaves)


def stack(systems: Sequence[pj.System]) -> pj.System:
    """Stack systems along the first axis of every field."""
    alike = [dataclasses.replace(system, name="grid", source="grid") for system in systems]
    return jax.tree.map(lambda *leaves: jnp.array(leaves), *alike)


@jax.jit
def _priced(
    work: StageWork,
    systems: pj.System,
    efficiency: Float[Array, "minibatches settings"],
    bandwidth: Float[Array, "minibatches settings"],
) -> pj.Costs:
    """Price equal machines with one exchange: leaves (minibatches, settings, systems, ...)."""

    def price_setting(
        work: StageWork,
        system: pj.System,
        efficiency: Float[Array, ""],
        bandwidth: Float[Array, ""],
    ) -> pj.Costs:
        return work_costs(work, system_in(system, Setting(efficiency, bandwidth)))

    by_system = jax.vmap(price_setting, in_axes=(None, 0, None, None))
    by_setting = jax.vmap(by_system, in_axes=(None, None, 0, 0))
    return jax.vmap(by_setting, in_axes=(0, None, 0, 0))(work, systems, efficiency, bandwidth)


def _factors(
    table: pj.ScheduleTable, times: Sequence[float], inequalities: Sequence[str]
) -> dict[str, Float[NumpyArray, "..."]]:
    """Return factors of costs, by field: the axes of `AXES` but the first, then the field's."""
    rows = np.array(table.placement)  # (pipes, stages)
    ends = np.sort([rows[:, :-1], rows[:, 1:]], axis=0)  # of every message
    copies = np.sort(rows[[0, -1]], axis=0)  # of every stage: one copy is on no link
    middle = np.reshape([table.num_workers // 2 - 1, table.num_workers // 2], (2, 1))
    slow = {
        "messages": np.where((ends == middle[..., None]).all(0), SLOWER, 1.0),
        "exchange": np.where((copies == middle).all(0), SLOWER, 1.0),
    }
    dear = np.ones(table.num_stages)
    # an output head on top of the last stage takes about as long as one layer more
    dear[-1] += 1 / np.sum(stage_work(workload(), table).layers, axis=0)[-1]
    message, exchange, compute = (
        np.stack([np.where(np.array(name == which), values, 1.0) for name in inequalities])
        for which, values in (
            (SLOW_LINK, slow["messages"]),
            (SLOW_LINK, slow["exchange"]),
            (DEAR_STAGE, dear),
        )
    )
    new_axes = [None, None]  # free and system
    exchanged = np.multiply.outer(np.asarray(times, float), exchange)
    return {
        "forward": compute[None, :, *new_axes],
        "backward": compute[None, :, *new_axes],
        "latency": message[None, :, *new_axes, None],  # both ways alike
        "transmit": message[None, :, *new_axes, None],
        "all_reduce": exchanged[:, :, *new_axes],
    }
