"""Figures of the comparison with OptPipe, on results that are made up."""

import matplotlib.pyplot as plt
import numpy as np
import optpipe_data as made
import pytest
from matplotlib.text import Text

from figures import (
    __main__ as command,
    optpipe_cases,
    optpipe_gaps,
    optpipe_links,
    optpipe_memory,
    optpipe_refinement,
    optpipe_timelines,
)
from pipejax.plots import style
from sweeps import optpipe_refinement as refinement_sweep, optpipe_timelines as timelines_sweep
from sweeps.optpipe_cases import METHODS, OPTIMUM

pytestmark = pytest.mark.solver


@pytest.fixture(scope="module", autouse=True)
def _style():
    style.use()
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def grid():
    return made.grid()


def curves_of(axes, colour):
    """Lines of a colour with more than one place, crosses left out."""
    return [line for line in axes.lines if line.get_color() == colour and line.get_marker() != "x"]


def crosses_of(axes, colour):
    return [
        x
        for line in axes.lines
        if line.get_marker() == "x" and line.get_color() == colour
        for x in line.get_xdata()
    ]


def test_every_method_has_a_look():
    assert list(optpipe_cases.LOOK) == [*METHODS, OPTIMUM]
    colours = [look["color"] for look in (*optpipe_cases.LOOK.values(), optpipe_cases.IN_MEMORY)]
    assert len(set(colours)) == len(colours)
    assert optpipe_refinement.SEARCHES == refinement_sweep.SEARCHES
    assert {*optpipe_cases.POLICIES, "refine"} == set(refinement_sweep.POLICIES)


def test_idle_share_by_memory_limit(grid):
    figure = optpipe_memory.draw(grid)["optpipe_memory"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "1.5B, P=4, M=8",
        "14.6B, P=16, M=8",
    ]
    axes = figure.axes[0]
    look = optpipe_cases.LOOK
    (zb_2p,) = curves_of(axes, look["zb-2p"]["color"])
    np.testing.assert_allclose(zb_2p.get_ydata(), [np.nan, np.nan, 30.0])
    (best,) = curves_of(axes, look[OPTIMUM]["color"])
    np.testing.assert_allclose(best.get_ydata(), [15.0, 15.0, 5.0])
    assert crosses_of(axes, look["zb-2p"]["color"]) == [0.5, 1.0]
    assert crosses_of(axes, look["1f1b"]["color"]) == [0.5]
    assert not crosses_of(axes, look["ada-offload"]["color"])
    bounds = curves_of(axes, style.GREY)
    assert [line.get_linestyle() for line in bounds] == ["-", ":"]
    np.testing.assert_allclose(bounds[0].get_ydata(), 5.0)
    assert axes.get_ylim()[0] == 0


def test_crosses_stand_above_all_curves(grid):
    figure = optpipe_memory.draw(grid)["optpipe_memory"]
    for axes in figure.axes:
        high = max(np.nanmax(line.get_ydata()) for line in axes.lines if line.get_marker() != "x")
        top = axes.transAxes.inverted().transform(axes.transData.transform((0, high)))[1]
        lowest = min(y for line in axes.lines if line.get_marker() == "x" for y in line.get_ydata())
        assert top < lowest


def test_idle_share_by_host_link(grid):
    figure = optpipe_links.draw(grid)["optpipe_links"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "1.5B, P=4, limit 0.5",
        "14.6B, P=16, limit 0.5",
        "1.5B, P=4, limit 1",
        "14.6B, P=16, limit 1",
    ]
    ticks = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
    assert ticks == ["none", "1", "0.5"]
    (ours,) = curves_of(figure.axes[0], optpipe_cases.LOOK[OPTIMUM]["color"])
    np.testing.assert_allclose(ours.get_ydata(), 15.0)


def test_gaps_and_times(grid):
    figure = optpipe_gaps.draw(grid)["optpipe_gaps"]
    left, right = figure.axes
    solved = int(grid.solved.sum())
    closed = int((grid.solve_status == "optimal").sum())
    assert 0 < closed < solved
    assert left.get_title(loc="left").startswith(f"{closed} of {solved} problems have a gap of 0")
    assert sum(len(line.get_xdata()) for line in left.lines) == solved
    gaps = np.concatenate([line.get_ydata() for line in left.lines])
    np.testing.assert_allclose(np.unique(gaps.round(6)), [0, round(100 * (1 - 0.85 / 0.95), 6)])
    found, proven = right.lines[:2]
    assert found.get_ydata().max() == 100
    assert 0 < proven.get_ydata().max() < 100
    assert "8 s" in right.get_title(loc="left")


def test_solutions_that_get_better():
    drawn = optpipe_refinement.draw(made.refinement())
    first, second = drawn["optpipe_anytime"].axes
    assert first.get_title(loc="left").endswith(
        "no host link:\nno schedule is more than 9.1 % shorter"
    )
    assert second.get_title(loc="left").endswith("proven to be the best after 20 s")
    by_colour = {
        line.get_color(): line.get_xdata() for line in first.lines if line.get_marker() == "o"
    }
    assert by_colour[optpipe_refinement.HEURISTIC].tolist() == [0.1, 1.0]
    assert by_colour[optpipe_refinement.SEARCHED].tolist() == [4.0, 9.0]
    none = [line for line in second.lines if line.get_color() == optpipe_refinement.SEARCHED]
    assert not len(none[0].get_xdata())
    job, _ = drawn["optpipe_training"].axes
    data = made.refinement()
    lines = {line.get_color(): line.get_ydata() for line in job.lines}
    expected = 100 * (data.time.isel(case=0) / data.time.isel(case=0).sel(policy="refine") - 1)
    for policy, look in optpipe_cases.POLICIES.items():
        np.testing.assert_allclose(lines[look["color"]], expected.sel(policy=policy))
    assert "at 1000 steps waiting costs 1." in job.get_title(loc="left")


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


def test_timelines(runs):
    figure = optpipe_timelines.draw(runs)["optpipe_timelines"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0].startswith("1F1B: ")
    assert titles[0].endswith("; out of memory: it holds 4 of 3")
    assert titles[2].startswith("AdaOffload: ")
    assert "out of memory" not in titles[2]
    assert titles[1] == "activations held, peak 4"
    assert titles[3] == "activations held, peak 3"
    ops = int((runs.case_of_op == "1f1b").sum())
    assert ops == 4 * 8 * 2
    assert len({axes.get_xlim()[1] for axes in figure.axes}) == 1


def test_command_names_what_is_missing(grid, tmp_path, capsys):
    grid.to_zarr(tmp_path / "optpipe_grid.zarr", zarr_format=2)
    assert command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for name in ("memory", "links", "gaps"):
        assert (tmp_path / "out" / f"optpipe_{name}.png").exists()
    store = tmp_path / "optpipe_refinement.zarr"
    assert (
        f"no {store}: `python -m sweeps.optpipe --only refinement --out {tmp_path}` writes it"
        in capsys.readouterr().out
    )


def test_no_text_is_smaller_than_six_points(grid):  # but microbatches on the bars of timelines
    drawn = [
        optpipe_memory.draw(grid),
        optpipe_links.draw(grid),
        optpipe_gaps.draw(grid),
        optpipe_refinement.draw(made.refinement()),
    ]
    for figure in (figure for each in drawn for figure in each.values()):
        assert figure.get_figwidth() == style.PAGE
        sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()]
        assert min(sizes) >= 6
