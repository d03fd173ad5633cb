"""Figures of staleness and of the bound, on tiny datasets that the sweeps themselves make."""

import numpy as np
import pytest

import pipejax as pj
import pipejax.training as pt
from figures.kit.rules import faults
from figures.pipedream import convergence_bound, schedules as pipedream_schedules, staleness
from figures.pipedream.schedules import NAMES
from sweeps.pipedream import (
    convergence_bound as bound_sweep,
    schedules as schedules_sweep,
    staleness as staleness_sweep,
)

S, UPDATES, STEP_SIZES = 3, 60, (0.01, 0.1, 8.0)
SIZES = {"dimension": 6, "num_batches": 5, "batch_size": 4, "seed": 0}


@pytest.fixture(scope="module")
def stale():
    return staleness_sweep.sweep(stages=(2, 3, 4), shown=(4, 2), messages=(0.0, 1.0))


@pytest.fixture(scope="module")
def runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_sweep, "STAGES", S)
        patch.setattr(bound_sweep, "DELTAS", (0, 60))
        patch.setattr(
            bound_sweep,
            "OBJECTIVES",
            {
                "random quadratic": lambda: pt.random_quadratic(S, **SIZES),
                "logistic regression": lambda: pt.random_logistic(S, **SIZES),
            },
        )
        return bound_sweep.sweep(UPDATES, STEP_SIZES, seeds=(0, 1), late_updates=50)


def test_staleness_is_that_of_the_tables(stale):
    for stages in (2, 3, 4):
        table = pj.schedules.build("pipedream", num_workers=stages, num_microbatches=40 * stages)
        expected = pj.staleness(table)
        at = stale.sel(stages=stages)
        assert (at.max_delay, at.mean_delay) == (expected.max_delay, expected.mean_delay)
        if stages != 3:  # the law is that of even depths
            assert (at.max_delay, at.mean_delay) == (at.max_delay_law, at.mean_delay_law)
    np.testing.assert_allclose(stale.share.sum("delay"), 1)
    assert stale.sizes["delay"] == 1 + 14
    assert stale.share.sel(shown=2).values[:5].tolist() == [0, 0.25, 0.5, 0.25, 0]
    assert stale.own_lag.values.tolist() == [3, 2, 1, 0]
    assert stale.weight_versions.values.tolist() == [4, 3, 2, 1]
    assert {value.attrs["units"] for value in stale.values()} == {
        "block updates",
        "updates of the stage",
        "1",
    }


def test_staleness_under_messages(stale):
    table = pj.schedules.build("pipedream", num_workers=4, num_microbatches=160)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    for link in staleness_sweep.LINKS:
        expected = pj.staleness(table, costs, link=link)
        at = stale.sel(link=link, message=1.0)
        assert at.max_delay_under_messages == expected.max_delay
        assert at.mean_delay_under_messages == expected.mean_delay


def test_divergence_is_data_and_never_a_number(runs):
    quadratic = runs.sel(objective="random quadratic")
    assert quadratic.diverged.sel(step_size=8.0, delta=0).all()
    assert not quadratic.diverged.sel(step_size=0.01).any()
    assert (runs.mean_squared_gradient.isnull() == runs.diverged).all()
    for name in ("measured", "largest_squared_gradient", "start", "noise", "delay", "total"):
        assert (runs[name].isnull() == runs.diverged.any("seed")).all()
    assert runs.diverged.dtype == bool


def test_the_bound_is_that_of_single_runs(runs):
    at = runs.sel(objective="random quadratic", delta=60, step_size=0.1)
    objective = pt.random_quadratic(S, **SIZES)
    runs_alone = [
        pt.randomized_pipedream(
            objective, step_size=0.1, seed=seed, updates=UPDATES, delta=60, interval=6, norms=True
        )
        for seed in (0, 1)
    ]
    norms = [float(run.mean_squared_gradient) for run in runs_alone]
    largest = max(float(run.largest_squared_gradient) for run in runs_alone)
    np.testing.assert_allclose(at.mean_squared_gradient, norms, rtol=1e-10)
    np.testing.assert_allclose(at.measured, np.mean(norms), rtol=1e-10)
    options = {"smoothness": pt.smoothness(objective), "delta": 60, "gap": runs_alone[0].gap[0]}
    bound = pt.convergence_bound(S, UPDATES, 0.1, gradient_bound=largest**0.5, **options)
    for name, value in bound._asdict().items():
        np.testing.assert_allclose(at[name], value, rtol=1e-10)
    np.testing.assert_allclose(at.total_without_delay, bound.start + bound.noise, rtol=1e-10)


def test_what_is_measured_is_below_the_bound(runs):
    is_measured = runs.measured.notnull()
    assert (runs.measured <= runs.total).values[is_measured].all()
    assert (runs.late_measured <= runs.late_total).all()
    assert (runs.least_bound <= runs.total.min("step_size")).all()
    best = runs.measured.sel(step_size=runs.best_measured)
    assert (best == runs.measured.min("step_size")).all()


def test_the_law_has_power_four(runs):
    last = runs.law_delay.isel(law_stages=[-2, -1])
    ratio = last.isel(law_stages=1) / last.isel(law_stages=0)
    np.testing.assert_allclose(ratio, 16, rtol=0.02)
    by_updates = runs.law_delay.isel(law_stages=0) * runs.law_updates
    np.testing.assert_allclose(by_updates, by_updates[0])
    assert (runs.law_delay_tuned < runs.law_delay).all()


@pytest.fixture(scope="module")
def updating():
    return schedules_sweep.sweep()


def test_what_schedules_hold_that_update_within_the_table(updating):
    held = {str(name): updating.in_flight.sel(schedule=name).values.tolist() for name in NAMES}
    assert held == {
        "naive": [1, 1, 1, 1],
        "pipedream": [4, 3, 2, 1],
        "pipedream, first stage": [4, 4, 3, 1],
        "local-sgd, H=1": [4, 3, 2, 1],
    }
    assert updating.max_delay.values.tolist() == [0, 14, 14, 0]
    assert updating.makespan.values.tolist() == [64, 22, 22, 28]


def test_all_figures_can_be_printed(stale, runs, updating):
    figures = {
        **staleness.draw(stale),
        **convergence_bound.draw(runs),
        **pipedream_schedules.draw(updating),
    }
    assert not [f"{name}: {fault}" for name, figure in figures.items() for fault in faults(figure)]
