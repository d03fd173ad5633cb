"""The map of best microbatch sizes against single evaluations, differences and its drawing."""

import dataclasses

import numpy as np
import pytest

import pipejax as pj
from figures.design import network_map as drawing
from figures.kit.rules import caption_of, faults
from pipejax.plots import style
from pipejax.search.tuning.problem import ScheduleFamily
from sweeps.design import network_map as sweep
from sweeps.design.network_map import map_networks

pytestmark = pytest.mark.compiles

SYSTEM = pj.load_system("h100")
FAMILY = ScheduleFamily("1f1b", 4)
WORKLOAD = pj.Workload(
    dataclasses.replace(pj.load_model("gpt-22b"), layers=8), minibatch=16, tensor_parallel=8
)
NETWORKS = np.array([[1e8, 1e-6], [1e10, 1e-4], [3e9, 2e-3], [1e11, 3e-2], [1e9, 1.0]])
NEAR = 1e-5


def one_by_one(workload, system, bandwidth, latency):
    """Step times of all legal sizes, each evaluated by itself."""
    network = dataclasses.replace(system.network, bandwidth=bandwidth, latency=latency)
    system = dataclasses.replace(system, network=network)
    times = []
    for count in (16, 8, 4, 2, 1):
        table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=count)
        fits = pj.memory_bytes(workload, table).max() <= system.memory_available
        run = pj.evaluate(table, pj.stage_costs(workload, system, table))
        times.append(run.step_time if fits else np.inf)
    return np.array(times)


@pytest.mark.takes_turns
def test_a_map_is_that_of_single_evaluations():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=4)
    most = float(pj.memory_bytes(WORKLOAD, table).max())  # size 4 fits, larger ones may not
    system = dataclasses.replace(SYSTEM, memory_capacity=most, memory_reserve=0.0)
    found = map_networks(FAMILY, WORKLOAD, system, *NETWORKS.T)
    times = np.stack([one_by_one(WORKLOAD, system, *each) for each in NETWORKS], axis=1)
    assert np.isinf(times[-1]).all()
    np.testing.assert_allclose(found.step_times, times, rtol=1e-12)
    assert found.sizes.tolist() == [1, 2, 4, 8, 16]
    assert found.microbatch_size.tolist() == found.sizes[times.argmin(axis=0)].tolist()
    assert len({*found.microbatch_size.tolist()}) > 1
    np.testing.assert_array_equal(found.step_time, found.step_times.min(axis=0))
    for axis, slope in enumerate((found.bandwidth_elasticity, found.latency_elasticity)):
        for network, own in zip(NETWORKS, slope, strict=True):
            sides = [network * np.exp(way * NEAR * (np.arange(2) == axis)) for way in (1, -1)]
            up, down = (np.log(one_by_one(WORKLOAD, system, *each).min()) for each in sides)
            assert own == pytest.approx((up - down) / (2 * NEAR), abs=1e-6)


def test_a_map_where_nothing_fits_is_empty():
    small = dataclasses.replace(SYSTEM, memory_capacity=1e9, memory_reserve=0.0)
    found = map_networks(FAMILY, WORKLOAD, small, *NETWORKS.T)
    assert not found.microbatch_size.any()
    assert np.isinf(found.step_time).all()
    assert not found.latency_elasticity.any()


def test_networks_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="latency must be finite numbers above 0"):
        map_networks(FAMILY, WORKLOAD, SYSTEM, np.ones(2), np.array([1.0, -1.0]))


@pytest.mark.slow
def test_the_sweep_is_checked_and_drawn():
    style.use()
    data = sweep.sweep(points=5)
    assert (data.microbatch_size == data.exhaustive_microbatch_size).all()
    np.testing.assert_allclose(data.step_time, data.exhaustive_step_time, rtol=1e-12)
    assert len(np.unique(data.microbatch_size)) > 2
    for name in ("bandwidth", "latency"):
        assert float(data[f"{name}_elasticity_error"].max()) < 1e-4
    figure = drawing.draw(data)["network_map"]
    assert faults(figure) == []
    assert "100 % of 25 points" in caption_of(figure)
    assert [axes.get_title(loc="left")[:3] for axes in figure.axes[:4]] == [
        "(a)",
        "(b)",
        "(c)",
        "(d)",
    ]
