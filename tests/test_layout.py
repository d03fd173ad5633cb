"""Groups by arithmetic against all ranks, laid out and counted."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.costs.model.layout import Layout
from pipejax.costs.model.workload_fields import RANK_ORDERS

# the axes of each group: which degrees it takes part in
GROUPS = {"tensor": "t", "context": "c", "replicas": "cd"}
DEGREES = ((1, 2, 4, 8), (1, 2, 4), (1, 2, 6, 8), (1, 2, 3))


def members(axes, degrees, order):
    """Numbers of all ranks, one row per group (Megatron's: the first degree varies fastest)."""
    names = "tcdp" if order == RANK_ORDERS[0] else "tcpd"
    sizes = [degrees["tcdp".index(name)] for name in names]
    ranks = np.arange(np.prod(sizes)).reshape(sizes[::-1])
    ends = [len(names) - 1 - names.index(name) for name in axes]
    size = np.prod([degrees["tcdp".index(name)] for name in axes])
    return np.moveaxis(ranks, ends, range(len(ends))).reshape(size, -1).T


def expert_members(degrees, expert, *, replicas):
    """Groups of the experts' ranks, which have an order of their own: expert, replica, pipeline."""
    *held, pipeline = degrees
    ranks = np.arange(np.prod(degrees)).reshape(pipeline, np.prod(held) // expert, expert)
    groups = ranks.swapaxes(1, 2) if replicas else ranks
    return groups.reshape(-1, groups.shape[2])


def fit_together(spans, gpus_per_node):
    return all(gpus_per_node % span == 0 or span % gpus_per_node == 0 for span in spans)


def counted(groups, gpus_per_node):
    """Members per node: the same in all nodes of all groups, or this fails."""
    nodes = groups // gpus_per_node
    (count,) = {n for row in nodes for n in np.unique(row, return_counts=True)[1]}
    return groups.shape[1], count


@pytest.mark.parametrize("order", RANK_ORDERS)
def test_groups_are_those_of_all_ranks(order):
    names = "tcdp" if order == RANK_ORDERS[0] else "tcpd"
    cases = [
        (*degrees, gpus)
        for *degrees, gpus in itertools.product(*DEGREES, (4, 8, 72))
        if fit_together(np.cumprod([degrees["tcdp".index(name)] for name in names]), gpus)
    ]
    assert len(cases) > 100
    columns = map(jnp.array, np.array(cases, float).T)
    names = ("tensor", "context", "data", "pipeline")
    *degrees, gpus_per_node = columns
    layout = Layout(**dict(zip(names, degrees, strict=True)), rank_order=order)
    groups = layout.layer_groups | {"replicas": layout.replica_groups[0]}
    for name, axes in GROUPS.items():
        result = groups[name].on(gpus_per_node)
        expected = [counted(members(axes, case[:4], order), case[4]) for case in cases]
        np.testing.assert_array_equal(np.array(result).T, expected, name)


def test_groups_of_experts_are_those_of_all_ranks():
    cases = [
        (*degrees, expert, gpus)
        for *degrees, expert, gpus in itertools.product(*DEGREES, (1, 2, 4, 8, 16), (4, 8))
        if np.prod(degrees[:3]) % expert == 0
        and fit_together((expert, *np.cumprod(degrees)), gpus)
        and fit_together((expert,), degrees[0] * degrees[1])
    ]
    assert len(cases) > 100
    *degrees, expert, gpus_per_node = map(jnp.array, np.array(cases, float).T)
    names = ("tensor", "context", "data", "pipeline")
    layout = Layout(**dict(zip(names, degrees, strict=True)), expert=expert)
    groups = layout.layer_groups["expert"], layout.replica_groups[1]
    for group, replicas in zip(groups, (False, True), strict=True):
        result = group.on(gpus_per_node)
        expected = [
            counted(expert_members(case[:4], case[4], replicas=replicas), case[5]) for case in cases
        ]
        np.testing.assert_array_equal(np.array(result).T, expected)
