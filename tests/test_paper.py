"""The sweep of the tabular-schedule paper on a corner of its grid, its claims and its figures."""

import numpy as np
import pytest
import xarray as xr

import pipejax as pj
from figures import asymmetric, bubble_ratio, hanayo, memory, ranking, run_time
from pipejax.plots import style
from sweeps import tabular_claims
from sweeps.cases import CASES, build
from sweeps.claims import judge
from sweeps.tabular_schedules import MINIBATCH, MODEL, RUN_SLOTS, SLOTS, SYSTEMS, sweep

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def few():
    return sweep(workers=(4, 8), microbatches=(8, 16))


@pytest.fixture(scope="module")
def data(few):
    """With many microbatches only the schedules that the claims look at there."""
    cases = tuple(
        case for case in CASES if case.split(",")[0] not in ("hanayo", "interleaved-1f1b")
    )
    many = sweep(workers=(4, 8), microbatches=(128, 256), cases=cases)
    return xr.concat([few, many.reindex(schedule=few.schedule)], "microbatches")


def test_the_grid_is_full(few):
    assert few.makespan.shape == (len(CASES), 2, 2, len(SYSTEMS))
    assert not few.makespan.isnull().any()
    assert {"pipejax", "commit", "dtype", "model", "minibatch"} <= set(few.attrs)
    assert all("units" in few[name].attrs for name in few.data_vars)
    assert float(abs(few.path_share.sum("cost") - 1).max()) < 1e-9


@pytest.mark.parametrize(
    ("case", "p", "m", "system"),
    [
        ("gpipe", 4, 8, "mid_nw_mid_cp"),
        ("chimera", 8, 16, "slow_nw_fast_cp"),
        ("hanayo, 2 waves", 8, 8, "fast_nw_fast_cp"),
        ("chimera-asymmetric", 4, 16, "slow_nw_slow_cp"),
    ],
)
def test_the_batch_equals_one_evaluation(data, case, p, m, system):
    table = build(case, p, m, SLOTS[RUN_SLOTS])
    workload = pj.Workload(pj.load_model(MODEL), MINIBATCH)
    costs = pj.stage_costs(workload, pj.load_system(system), table)
    import dataclasses

    alone = pj.evaluate(table, dataclasses.replace(costs, update=0.0))
    point = data.sel(schedule=case, workers=p, microbatches=m, system=system)
    assert float(point.makespan) == pytest.approx(alone.makespan, rel=1e-9)
    assert float(point.bubble_ratio) == pytest.approx(alone.bubble_ratio, abs=1e-9)
    assert float(point.path_share.sel(cost="F")) == pytest.approx(alone.path_share["F"], abs=1e-9)


def test_the_published_points_in_slots(data):
    slots = data.table_bubble_ratio.sel(measured="F=1, B=2")
    published = slots.sel(drawn="F=1, B=1", schedule="chimera", workers=8)
    assert float(published.sel(microbatches=8)) == pytest.approx(1 - 24 / 36)
    assert float(published.sel(microbatches=16)) == pytest.approx(0.26, abs=0.005)
    waves = slots.sel(drawn="F=1, B=2", workers=8, microbatches=8)
    for name, total in (
        ("hanayo, 1 wave", 38),
        ("hanayo, 2 waves", 31.5),
        ("hanayo, 4 waves", 27.75),
    ):
        assert float(waves.sel(schedule=name)) == pytest.approx(1 - 24 / total)


VERDICTS = {
    "1a": "differs",
    "1b": "reproduced",
    "2a": "differs",
    "2b": "reproduced",
    "3a": "reproduced",
    "3b": "differs",
    "3c": "reproduced",
    "3d": "differs",
    "3e": "differs",
    "4": "reproduced",
    "5a": "differs",
    "5b": "reproduced",
    "5c": "differs",
    "5d": "differs",
    "6a": "reproduced",
    "6b": "reproduced",
    "6c": "differs",
    "7": "reproduced",
}


def test_claims(data):
    rows = judge(tabular_claims.CLAIMS, data)
    assert {row["number"]: row["verdict"] for row in rows} == VERDICTS
    for row in rows:
        assert row["reason"] or row["verdict"] == "reproduced"
        assert row["ours"]


def test_a_claim_can_fail(data):
    spoiled = data.copy(deep=True)
    spoiled["peak_in_flight"].loc[{"schedule": "1f1b"}] += 1
    spoiled["static_bytes"].loc[{"schedule": "chimera"}] *= 1.1
    spoiled["table_bubble_ratio"].loc[{"schedule": "chimera"}] -= 0.02
    verdicts = {row["number"]: row["verdict"] for row in judge(tabular_claims.CLAIMS, spoiled)}
    assert [verdicts[number] for number in ("1b", "4", "2b")] == ["differs"] * 3


def test_figures_draw(data):
    style.use()
    drawn = {}
    wider = data.reindex(microbatches=[8, 16, 32, 128, 256], method="nearest")
    for script in (asymmetric, bubble_ratio, hanayo, memory, ranking, run_time):
        drawn |= script.draw(wider)
    cited = {claim.figure.removesuffix(".pdf") for claim in tabular_claims.CLAIMS}
    assert cited <= set(drawn)
    for figure in drawn.values():
        assert figure.axes
        assert all(np.isfinite(axes.get_ylim()).all() for axes in figure.axes)
