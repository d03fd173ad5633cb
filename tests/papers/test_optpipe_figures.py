"""Figures of the comparison with OptPipe, on results that are made up."""

import numpy as np
import optpipe_data as made
import pytest

from figures.kit.rules import faults
from figures.optpipe import (
    cases as optpipe_cases,
    gaps as optpipe_gaps,
    links as optpipe_links,
    memory as optpipe_memory,
    opponents as optpipe_opponents,
    quality as optpipe_quality,
    refinement as optpipe_refinement,
    timelines as optpipe_timelines,
)
from sweeps.optpipe import refinement as refinement_sweep, timelines as timelines_sweep
from sweeps.optpipe.cases import METHODS, OPTIMA, OPTIMUM


@pytest.fixture(scope="module")
def grid():
    return made.grid()


def curve(axes, method):
    look = optpipe_cases.LOOK[method]
    (line,) = [
        single
        for single in axes.lines
        if all(getattr(single, f"get_{name}")() == look[name] for name in ("color", "marker"))
        and single.get_linestyle() == look["linestyle"]
    ]
    return line.get_ydata()


def fills(data, idle):
    """Idle time in works of a worker, in fills of the pipe of P = 4."""
    work = float(data.work.isel(model=0, microbatches=0).max())
    return np.array(idle) * work / (3 * float(data.forward[0]))


def test_every_method_has_a_look():
    assert list(optpipe_cases.LOOK) == [*METHODS, *OPTIMA]
    assert set(optpipe_cases.SHOWN) < set(optpipe_cases.LOOK)
    looks = [(o["color"], o["marker"], o["linestyle"]) for o in optpipe_cases.LOOK.values()]
    assert len(set(looks)) == len(looks)
    assert optpipe_refinement.SEARCHES == refinement_sweep.SEARCHES
    assert {*optpipe_cases.POLICIES, "refine"} == set(refinement_sweep.POLICIES)


def test_idle_time_by_memory_limit(grid):
    figure = optpipe_memory.draw(grid)["optpipe_memory"]
    axes = figure.axes[0]
    np.testing.assert_allclose(curve(axes, "zb-2p"), fills(grid, [np.nan, np.nan, 0.45]))
    np.testing.assert_allclose(curve(axes, "1f1b"), fills(grid, [np.nan, 1.0, 1.0]))
    np.testing.assert_allclose(curve(axes, OPTIMUM), fills(grid, [0.18, 0.18, 0.05]))
    np.testing.assert_allclose(axes.lines[0].get_ydata(), fills(grid, 0.05))  # the bound


def test_what_is_gained_on_each_opponent(grid):
    figure = optpipe_opponents.draw(grid)["optpipe_opponents"]
    idle, tight, ample = figure.axes
    split, whole = (line.get_xdata() for line in idle.lines[:2])
    np.testing.assert_allclose([split.min(), whole.min()], [82, 85])  # 1 - 0.18 / 1.0, / 1.2
    assert [axes.lines[2].get_xdata()[0] for axes in figure.axes] == [50, 20, 30]
    np.testing.assert_allclose(np.unique(tight.lines[0].get_xdata()), 100 * (2 / 1.18 - 1))
    np.testing.assert_allclose(np.unique(ample.lines[1].get_xdata()), 100 * (2.2 / 1.05 - 1))
    assert (tight.lines[0].get_ydata()[0], tight.lines[0].get_ydata()[-1]) == (100, 0)


def test_gaps_and_times(grid):
    figure = optpipe_gaps.draw(grid)["optpipe_gaps"]
    remaining, times = figure.axes
    solved = int(grid.solved.sum())
    closed = int((grid.solve_status == "optimal").sum())
    assert 0 < closed < solved
    assert remaining.get_title(loc="left") == f"{closed} of {solved} problems have a gap of 0"
    # what may be offloaded, and what may not
    assert len(remaining.lines) == 2 * grid.sizes["limit"]
    gaps = np.concatenate([line.get_xdata() for line in remaining.lines])
    np.testing.assert_allclose(np.unique(gaps.round(6)), [0, round(100 * (1 - 1.05 / 1.18), 6)])
    assert all(line.get_ydata()[-1] == 100 for line in remaining.lines)
    result, proven = times.lines[:2]
    assert result.get_ydata().max() == 100
    assert 0 < proven.get_ydata().max() < 100


@pytest.fixture(scope="module")
def runs():
    with pytest.MonkeyPatch.context() as patch:  # a greedy schedule in the place of the optimum
        patch.setattr(
            timelines_sweep,
            "_table",
            lambda name, seconds: next(
                METHODS["ada-offload" if name == OPTIMUM else name](timelines_sweep.SETTING)
            ),
        )
        return timelines_sweep.sweep(None, 1.0)


def test_all_can_be_printed(grid, runs):
    figures = [
        optpipe_opponents.draw(grid),
        optpipe_memory.draw(grid),
        optpipe_links.draw(grid),
        optpipe_gaps.draw(grid),
        optpipe_quality.draw(grid),
        optpipe_refinement.draw(made.refinement()),
        optpipe_timelines.draw(runs),
    ]
    for label, figure in (pair for group in figures for pair in group.items()):
        assert faults(figure) == [], label
