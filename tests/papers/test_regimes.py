"""Regime maps: exact at every point, with their borders, and drawn."""

import jax
import numpy as np
import pytest

import pipejax as pj
from figures.kit.rules import faults, figure_caption
from figures.tabular import regimes as drawing
from sweeps.tabular import regimes as sweep
from sweeps.tabular.settings import H100_BANDWIDTH, MAIN, Setting, draw


@pytest.fixture(scope="module")
def data():
    with jax.enable_x64(True):
        return sweep.sweep(points=9, setting=Setting(0.36, H100_BANDWIDTH))


def test_the_map_is_that_of_runs(data):
    for name, pair in sweep.PAIRS.items():
        tables = [draw(case, pair.workers, pair.microbatches) for case in pair[:2]]
        for b, c in ((0, 0), (4, 5), (8, 8), (3, 7)):
            at = {"backward": float(data.backward[b]), "transfer": float(data.message[c])}
            costs = pj.Costs.per_worker
            runs = [pj.evaluate(x, costs(x, forward=1.0, **at), link=MAIN["link"]) for x in tables]
            first, second = (run.makespan for run in runs)
            ratio = float(data.ratio.sel(pair=name)[b, c])
            assert ratio == pytest.approx(first / second, rel=1e-12)


def test_the_published_outliers_lie_on_both_sides(data):
    """Hanayo against Chimera at 8 x 8: faster on slow_nw_mid_cp, slower on slow_nw_fast_cp."""
    border = data.attrs["hanayo: one at most"]
    assert border.endswith("6B >= F + 112c and 5B >= 108c")
    assert data.border.sel(pair="hanayo") == pytest.approx(10 / 108)
    assert np.isnan(data.border.sel(pair="chimera"))
    place = data.sel(pair="hanayo")
    for system, wins in (("slow_nw_mid_cp", True), ("slow_nw_fast_cp", False)):
        b, c = (float(place[name].sel(system=system)) for name in ("backward_of", "message_of"))
        assert (6 * b >= 1 + 112 * c and 5 * b >= 108 * c) == wins


def test_the_figure_can_be_printed(data):
    figure = drawing.draw(data)["regimes"]
    assert faults(figure) == []
    assert f"up to c = {10 / 108:.3f} F" in figure_caption(figure)
    assert "claim 3e" in figure_caption(figure)
    assert np.isfinite(data.message_of.values).all()
