"""Costs of the same model in another number of stages: what was measured is merged or divided."""

import dataclasses
import itertools

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, check_types, whole_number
from pipejax.costs.costs import FIELDS, MESSAGE_FIELDS, Costs
from pipejax.schedules.table.table import ScheduleTable

RATIOS = ("pair_factor",)  # of ops, whatever these take


def restaged_costs(costs: Costs, stages: int, table: ScheduleTable) -> Costs:
    """Give a table the costs of the same model, measured in another number of stages.

    Every measured stage is taken as an equal share of the model whose time lies evenly in it: a
    new stage takes the sum of what lies in it. Messages go between the same workers as before, one
    measured stage after the other on workers 0, 1, .. and round, the longest of several counts;
    between workers that sent each other none they take as long as the longest of all.

    Args:
      costs: unbatched costs [s] for so many stages; one number is the time of each of them.
      stages: how many stages they are of.
      table: the schedule that is to be priced.

    Returns:
      Costs of the table's stages: the same where it has as many.

    Raises:
      ValueError: if costs have another number of stages, or messages differ between pipes.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4,
      ...     stages_per_worker=2)
      >>> pj.costing.restaged_costs(pj.Costs(forward=[1.0, 3.0], backward=2.0), 2, table).forward
      array([0.5, 0.5, 1.5, 1.5])
    """
    check_types(costs=(costs, Costs), table=(table, ScheduleTable))
    stages = whole_number(stages, "stages")
    if stages == table.num_stages:
        return costs
    share = shares_of_stages(stages, table.num_stages)
    leaves = {}
    for name in FIELDS:
        value = getattr(costs, name)
        if value is None:
            continue
        if name in MESSAGE_FIELDS:
            leaves[name] = _messages(name, np.asarray(value, float), stages, table)
            continue
        each = np.asarray(value, float)
        if each.ndim and each.shape[0] not in (1, stages):
            raise MismatchError(
                f"{name} has {each.shape[0]} entries, the costs are of {stages} stages"
            )
        # one number, or one for each microbatch, is of every stage
        of_stages = np.broadcast_to(each if each.ndim else each[None], (stages, *each.shape[1:]))
        weights = share / share.sum(axis=1, keepdims=True) if name in RATIOS else share
        leaves[name] = weights @ of_stages
    return dataclasses.replace(costs, **leaves)


def shares_of_stages(old: int, new: int) -> Float[NumpyArray, "new old"]:
    """Which share of each old stage lies in each new one."""
    # stage s of n covers [s / n, (s + 1) / n] of the model: in units of 1 / (old new) all ends are
    # whole, so what lies in both is too
    low, high = np.arange(new) * old, np.arange(1, new + 1) * old
    begin, end = np.arange(old) * new, np.arange(1, old + 1) * new
    both = np.minimum(high[:, None], end) - np.maximum(low[:, None], begin)
    return np.maximum(both, 0) / new


def _messages(
    name: str, value: Float[NumpyArray, "..."], stages: int, table: ScheduleTable
) -> Float[NumpyArray, "..."]:
    """Times of messages (2, 1, boundaries, ..) between the workers of the table's stages."""
    if np.ndim(value) == 0:
        return value
    while value.ndim < 3:
        value = value[None]
    if value.shape[1] != 1 and (value != value[:, :1]).any():
        raise ValueError(f"{name} differs between pipes: costs of other stages do not follow")
    value = np.broadcast_to(value[:, :1], (2, 1, stages - 1, *value.shape[3:]))
    workers = (np.arange(stages) % table.num_workers).tolist()
    sent: dict[tuple[int, int], list[Float[NumpyArray, ...]]] = {}
    for boundary, pair in enumerate(itertools.pairwise(workers)):
        each = value[:, :, boundary]
        # from the other worker, activations go the way on which gradients come here
        for ends, way in ((pair, each), (pair[::-1], each[::-1])):
            sent.setdefault(ends, []).append(way)
    longest = [value.max(axis=(0, 2), keepdims=True)[:, :, 0] + np.zeros_like(value[:, :, 0])]
    placement = table.placement[0].tolist()
    return np.stack(
        [np.max(sent.get(pair, longest), axis=0) for pair in itertools.pairwise(placement)], axis=2
    )
