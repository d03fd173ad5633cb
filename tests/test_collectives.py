"""Collectives: their steps counted one by one, old systems' seconds, and slopes."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.collectives import PASSES, ROUTES, Spread, collective_time
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.model.workload_fields import RANK_ORDERS
from pipejax.costs.system.parts import ALGORITHMS
from pipejax.costs.system.system import Collectives, data_file, system_names

SYSTEM = pj.load_system("h100")
TERMS = {"latency": 3e-5, "simple_latency": 9e-5, "low_latency_share": 0.92, "copies": 3.4}
LIBRARY = Collectives(**TERMS, halving=0.0)
KINDS = (*PASSES, "all_to_all", "ring")
# the axes of each group: which degrees it takes part in
GROUPS = {"tensor": "t", "context": "c", "replicas": "cd"}
DEGREES = ((1, 2, 4, 8), (1, 2, 4), (1, 2, 6, 8), (1, 2, 3))


def using(*algorithms, system=SYSTEM, **others):
    """A system whose library has these algorithms alone."""
    flags = {name: float(name in algorithms) for name in ALGORITHMS}
    library = dataclasses.replace(LIBRARY, **flags, **others)
    return dataclasses.replace(system, collectives=library)


@pytest.mark.parametrize("inside", [1, 4])
def test_old_systems_have_the_seconds_of_recursive_halving(inside):
    system = pj.load_system("mid_nw_mid_cp")
    link = system.node if inside == 4 else system.network
    volume, r = 1e9, 4.0
    with jax.enable_x64(True):
        result = collective_time(system, "all_reduce", volume, Group(r, inside))
        expected = 2 * jnp.log2(r) * link.latency + 2 * (r - 1) / r * volume / link.rate
        assert float(result) == float(expected)
        half = collective_time(system, "all_gather", volume, Group(r, inside))
    assert float(half) == pytest.approx(float(expected) / 2)


def counted_ring(inside, nodes):
    """One pass of `inside` rings, each for its part of a tensor of 1 byte: what it takes.

    Ring k enters and leaves a node at accelerators k and k - 1. Returns the hops of the part that
    crosses most often, and what the busiest accelerator sends inside and between nodes.
    """
    size = inside * nodes
    sent = np.zeros((2, size))
    worst = 0
    for k in range(inside):
        order = [m * inside + (k + i) % inside for m in range(nodes) for i in range(inside)]
        far = [order[i] // inside != order[(i + 1) % size] // inside for i in range(size)]
        for start in range(size):  # the part that starts here passes all hops but the last
            hops = [(start + i) % size for i in range(size - 1)]
            worst = max(worst, sum(far[hop] for hop in hops))
            for hop in hops:
                sent[int(far[hop]), order[hop]] += 1 / size / inside
    return size - 1 - worst, worst, *sent.max(axis=1)


@pytest.mark.parametrize(("inside", "nodes"), [(1, 5), (2, 3), (4, 1), (4, 2), (8, 4)])
def test_rings_are_what_their_steps_add_up_to(inside, nodes):
    route = ROUTES["ring"](Spread.over(Group(inside * nodes, inside), 1.0))
    assert [float(number) for number in route[:4]] == pytest.approx(counted_ring(inside, nodes))


def test_hierarchies_are_a_ring_inside_and_one_between():
    inner, outer = (ROUTES["ring"](Spread.over(Group(n, q), 1.0)) for n, q in ((4, 4), (3, 1)))
    route = ROUTES["hierarchical"](Spread.over(Group(12, 4), 1.0))
    assert float(route.near_hops) == inner.near_hops
    assert float(route.far_hops) == outer.far_hops
    assert float(route.near_bytes) == pytest.approx(float(inner.near_bytes))
    assert float(route.far_bytes) == pytest.approx(float(outer.far_bytes) / 4)


def test_the_fastest_algorithm_is_taken():
    best = using("ring", "tree", "hierarchical")
    winners = []
    for volume, group in ((1e3, Group(512.0, 8.0)), (1e10, Group(16.0, 8.0))):
        alone = {
            name: float(collective_time(using(name), "all_reduce", volume, group))
            for name in ("ring", "tree", "hierarchical")
        }
        winners.append(min(alone, key=alone.get))
        assert float(collective_time(best, "all_reduce", volume, group)) == min(alone.values())
    assert winners == ["tree", "ring"]


def test_where_trees_reduce_rings_gather():
    group = Group(16.0, 8.0)
    tree, ring = (collective_time(using(a), "all_gather", 1e9, group) for a in ("tree", "ring"))
    assert float(tree) == float(ring) < np.inf


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_exchanges_nothing(kind):
    slope = jax.grad(lambda n: collective_time(using("ring", "tree"), kind, 1e9, Group(n, n)))
    assert float(collective_time(using("ring"), kind, 1e9, Group(1, 1))) == 0
    assert np.isfinite(slope(1.0))


def test_one_accelerator_of_a_ring_has_the_nic_to_itself():
    """With 2 accelerators per NIC, and shares given per accelerator, it is twice as fast alone."""
    free = using("ring", latency=0.0, simple_latency=0.0, copies=0.0, low_latency_share=1.0)
    free = dataclasses.replace(free, gpus_per_nic=2.0)
    silent = dataclasses.replace(free, network=dataclasses.replace(free.network, latency=0.0))
    share = SYSTEM.network.rate
    alone = collective_time(silent, "ring", 1e9, Group(16, 8))
    nearby = collective_time(silent, "ring", 1e9, Group(16, 2))
    assert float(alone) == pytest.approx(15 / 16 * 1e9 / (2 * share))
    assert float(nearby) == pytest.approx(15 / 16 * 1e9 / share)


def test_all_arguments_are_batched_and_have_slopes():
    system = using("ring", "tree", "hierarchical")

    def total(numbers):
        volume, size, inside, bandwidth, latency, copies = numbers
        network = dataclasses.replace(system.network, latency=latency)
        node = dataclasses.replace(system.node, bandwidth=bandwidth)
        library = dataclasses.replace(system.collectives, copies=copies)
        built = dataclasses.replace(system, node=node, network=network, collectives=library)
        group = Group(size, inside)
        return sum(collective_time(built, kind, volume, group, 2.0) for kind in KINDS)

    with jax.enable_x64(True):
        at = np.array([3e7, 32.0, 4.0, 4.5e11, 2e-5, 3.4])
        steps = 1e-5 * np.diag(at)
        points = jnp.array([at, *(at + steps), *(at - steps)])
        values, slopes = jax.jit(jax.vmap(jax.value_and_grad(total)))(points)
        assert float(values[0]) == pytest.approx(float(total(tuple(at))), rel=1e-12)
    rises = (values[1:7] - values[7:]) / (2e-5 * at)
    np.testing.assert_allclose(slopes[0], rises, rtol=1e-6)


# bus bandwidth of all-reduces by rings [GB/s] at a size [GiB], accelerators, of them in a node
RINGS = {
    "h200": [(363.3, 8, 4, 4), (365.1, 8, 6, 6), (365.6, 8, 8, 8), (364.65, 4, 32, 8)],
    "b200": [(673.8, 8, 4, 4), (677.8, 8, 6, 6), (682.2, 8, 8, 8), (381.8, 16, 32, 8)],
    "a100": [(234.6, 8, 8, 8)],  # another node than that of the table
    "mi300x": [(312.9, 4, 8, 8)],
}


@pytest.mark.parametrize("name", RINGS)
def test_large_rings_are_measured_ones(name):
    """Source: github.com/stas00/ml-engineering (744d01e), network/README.md, NVLS switched off."""
    measured, size, n, inside = map(np.array, zip(*RINGS[name], strict=True))
    volume = size * 2.0**30
    result = collective_time(pj.load_system(name), "all_reduce", volume, Group(n, inside))
    np.testing.assert_allclose(2 * (n - 1) / n * volume / result / 1e9, measured, rtol=0.012)


def test_few_accelerators_of_a_mesh_have_few_links():
    """2 of 8 MI300X share one link of 64 GB/s: 47.7 GB/s measured where all 8 reach 312.9."""
    system = pj.load_system("mi300x")
    times = {n: float(collective_time(system, "all_reduce", 2**32, Group(n, n))) for n in (2, 8)}
    pair, all_eight = (2 * (n - 1) / n * 2**32 / seconds for n, seconds in times.items())
    assert pair / all_eight == pytest.approx(1 / 7, rel=2e-3)  # and hops
    assert pair / 1e9 == pytest.approx(47.7, rel=0.07)
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=2)
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    transmit = np.asarray(pj.stage_costs(workload, system, table).transmit)
    np.testing.assert_allclose(transmit, 2048 * 6144 * 2 / (64e9 * system.node.efficiency))


@pytest.mark.parametrize("name", system_names())
def test_systems_say_what_they_have(name):
    system = pj.load_system(name)
    is_grid = name.endswith("_cp")  # the cost model of a paper
    assert (system.host_link.bandwidth > 0) != is_grid
    assert (system.collectives.ring > 0) != is_grid
    assert len(system.source) > 80
    peaks = (system.peak_flops, *(p for p in vars(system.narrow_peaks).values() if p))
    assert list(peaks) == sorted(peaks)


def test_files_say_how_collectives_run(tmp_path):
    described = json.loads(data_file("hardware", "h100", "system").read_text())
    described["network"]["gpus_per_nic"] = 2
    described["collectives"] = {"algorithms": ["ring", "tree"], "latency_us": 30, "copies": 3}
    path = tmp_path / "system.json"
    path.write_text(json.dumps(described))
    system = pj.load_system(path)
    assert system.gpus_per_nic == 2
    assert system.collectives == Collectives(halving=0, ring=1, tree=1, latency=3e-5, copies=3)
    assert pj.load_system("fast_nw_fast_cp").collectives == Collectives()


# groups of ranks by arithmetic against all ranks, laid out and counted
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

    def spans(degrees):
        return np.cumprod([degrees["tcdp".index(x)] for x in names])

    points = itertools.product(*DEGREES, (4, 8, 72))
    cases = [point for point in points if fit_together(spans(point[:4]), point[4])]
    assert len(cases) > 100
    columns = map(jnp.array, np.array(cases, float).T)
    names = ("tensor", "context", "data", "pipeline")
    *degrees, gpus_per_node = columns
    layout = Layout(**dict(zip(names, degrees, strict=True)), rank_order=order)
    groups = layout.layer_groups | {"replicas": layout.replica_groups[0]}
    for name, axes in GROUPS.items():
        result = groups[name].count_ranks(gpus_per_node)
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
        result = group.count_ranks(gpus_per_node)
        groups = [expert_members(case[:4], case[4], replicas=replicas) for case in cases]
        expected = [counted(ranks, case[5]) for ranks, case in zip(groups, cases, strict=True)]
        np.testing.assert_array_equal(np.array(result).T, expected)
