"""Findings about training: closed forms of delays, ends of single runs, claims that can fail."""

import jax
import numpy as np
import pytest
import xarray as xr

from figures.findings import gradient_noise as figure_of_noise
from figures.kit.rules import faults
from pipejax.training import replay
from sweeps.findings import delays, gradient_noise
from sweeps.kit.claims import COUNTED, judge
from sweeps.pipedream.schemes import build_until, make_objectives
from sweeps.pipedream.settings import Problem, Setting


def test_counted_delays_are_those_of_the_closed_forms():
    counted = delays.sweep(stages=(2, 5, 8))
    rows = judge(delays.CLAIMS, {"finding_delays": counted})
    assert {row["verdict"] for row in rows if row["kind"] in COUNTED} == {"holds"}


@pytest.mark.parametrize("name", gradient_noise.SCHEMES)
def test_ends_are_those_of_the_best_single_run(name):
    tried, until = gradient_noise.SCHEMES[name], 80.0
    problem = Problem("logistic regression", 8, num_batches=5, batch_size=2)
    setting = Setting(4, problem, until, (), seeds=(0,))
    result = gradient_noise._ends(tried, setting, [0.0]).sel(noise=0.0, read="last model")
    objective = jax.tree.map(lambda leaf: leaf[0], make_objectives(setting))
    table = build_until(tried.method, 4, until, **tried.options)
    runs = [
        replay(objective, table, step_size=size, seed=0, times=[0.0, until], batches="cyclic")
        for size in 2.0**tried.exponents
    ]
    ends = [float(run.value[-1]) for run in runs]
    assert float(result.end.item()) == pytest.approx(min(ends), rel=1e-9)
    assert float(result.step_size) == 2.0 ** tried.exponents[np.argmin(ends)]


def longer(data, case, name):
    data["finding_delays"][name].loc[{"case": case, "stages": 9}] += 1


def crossed(data, scheme, **where):
    data["finding_gradient_noise"]["end"].loc[{"scheme": scheme, "seed": 0, **where}] *= 20


def flat(data):
    end = data["finding_gradient_noise"]["end"]
    at = {"scheme": gradient_noise.LOCAL_SGD, "noise": 0.0}
    end.loc[{**at, "stages": 64}] = end.sel({**at, "stages": 32}).values


MUTATIONS = {
    "e1": lambda data: longer(data, "first stage limited", "max_delay"),
    "e2": lambda data: longer(data, "free messages", "mean_delay"),
    "e3": lambda data: longer(data, "message 3/4", "max_delay"),
    "e4": lambda data: longer(data, "message 4", "mean_delay"),
    "c1": lambda data: crossed(data, gradient_noise.PIPEDREAM, noise=0.0, stages=16),
    "c2": lambda data: crossed(data, gradient_noise.LOCAL_SGD, noise=0.2, stages=32),
    "c3": flat,
}
CLAIMS = (*delays.CLAIMS, *gradient_noise.CLAIMS)


def found_so():
    """Data in which every claim holds."""
    stages = np.arange(2, 10)
    largest, mean = delays.largest(stages), delays.mean(stages)
    free = dict.fromkeys((*delays.FREE, *delays.ELSEWHERE), (largest, mean))
    short = dict.fromkeys(delays.SHORT, (delays.largest(stages, ties=False), mean))
    late = (delays.largest(stages, ties=False), delays.mean(stages, late=True))
    counts = free | short | dict.fromkeys(delays.LONG, late)
    axes = ("case", "stages")
    counts = xr.Dataset(
        {
            "max_delay": (axes, np.stack([values for values, _ in counts.values()])),
            "mean_delay": (axes, np.stack([values for _, values in counts.values()])),
        },
        coords={"case": list(counts), "stages": stages},
    )
    depth, noise = np.array([4, 8, 16, 32, 64]), np.array(gradient_noise.NOISES)
    pipedream = np.tile(1e-3 + 0.03 * noise, (len(depth), 1))
    falls = 1.5e-3 + 1e-5 * depth[:, None] + 1e-4 * noise * (64 - depth[:, None])
    ends = np.stack([pipedream, falls])[None, ..., None] * np.ones((2, 1, 1, 1, 3))
    trained = xr.Dataset(
        {
            "end": (("read", "scheme", "stages", "noise", "seed"), ends),
            "crossing": (("read", "stages"), np.full((2, len(depth)), 0.05)),
        },
        coords={
            "read": list(gradient_noise.READS),
            "scheme": list(gradient_noise.SCHEMES),
            "stages": depth,
            "noise": noise,
            "seed": [0, 1, 2],
        },
        attrs={"slots": 3180.0},
    )
    return {"finding_delays": counts, "finding_gradient_noise": trained}


def test_all_claims_hold_where_they_were_found():
    rows = judge(CLAIMS, found_so())
    assert {row["verdict"] for row in rows if row["kind"] in COUNTED} == {"holds"}
    assert {row["number"] for row in rows if row["kind"] in COUNTED} == set(MUTATIONS)


@pytest.mark.parametrize("number", MUTATIONS)
def test_a_claim_fails_when_its_data_contradict_it(number):
    data = found_so()
    MUTATIONS[number](data)
    (row,) = judge([claim for claim in CLAIMS if claim.number == number], data)
    assert row["verdict"] == "fails"
    assert row["reason"]


def test_noise_at_which_both_end_alike():
    lead, noises = np.log([1.5, 1.2, 0.8]), np.array([0.0, 0.1, 0.3])
    share = np.log(1.2) / np.log(1.2 / 0.8)
    assert gradient_noise._crossing(lead, noises) == pytest.approx(0.1 + 0.2 * share)
    assert np.isnan(gradient_noise._crossing(lead[:2], noises[:2]))


def test_figure_of_gradient_noise():
    data = found_so()["finding_gradient_noise"]
    figure = figure_of_noise.draw(data)["finding_gradient_noise"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    median = data.end.sel(read="last model", stages=8, scheme="pipedream").median("seed")
    np.testing.assert_array_equal(lines["PipeDream"].get_ydata(), median)
    assert lines["both end alike"].get_xdata() == [0.05, 0.05]
    assert not faults(figure)
