"""Figures of the tabular-schedule paper on made-up values: what they show, and in print."""

import numpy as np
import pytest
import xarray as xr

from figures.kit.cases import LOOK, MAIN
from figures.kit.rules import faults, figure_caption
from figures.tabular import asymmetric, bubble_ratio, hanayo, memory, ranking, run_time
from sweeps.kit.cases import CASES
from sweeps.tabular.claims import CLAIMS
from sweeps.tabular.settings import MAIN as MAIN_SETTING, SETTINGS, SYSTEMS

MICROBATCHES = [8, 16, 32, 256]
# values of each part of a setting: the main one, and another where a figure might take it
PARTS = {name: [MAIN_SETTING[name]] for name in SETTINGS}
PARTS |= {"setting": ["as reported", "calibrated"], "link": ["delay", "blocking"]}
RUNS = {name: len(values) for name, values in PARTS.items()} | {"system": 9}
ORDERS = {name: RUNS[name] for name in ("drawn", "admission")}
GRID = {"schedule": len(CASES), "workers": 2, "microbatches": len(MICROBATCHES)}
LAYOUT = {
    "makespan": GRID | RUNS,
    "bubble_ratio": GRID | RUNS,
    "formula_bubble_ratio": GRID,
    "table_bubble_ratio": GRID | ORDERS | {"measured": 2},
    "activation_bytes": GRID | ORDERS | {"minibatch": 1, "worker": 8},
    "static_bytes": GRID | {"worker": 8},
}


@pytest.fixture(scope="module")
def data():
    """Anything but in two places: 1F1B equals GPipe, and one point fits the memory."""
    rng = np.random.default_rng(0)
    values = {k: (list(d), rng.uniform(0.1, 0.5, list(d.values()))) for k, d in LAYOUT.items()}
    coords = {"schedule": list(CASES), "workers": [4, 8], "microbatches": MICROBATCHES, **PARTS}
    coords |= {"system": list(SYSTEMS), "measured": ["F=1, B=1", "F=1, B=2"]}
    attributes = {f"main {name}": value for name, value in MAIN_SETTING.items()}
    attributes |= {"fitted to": "a published point", "orders": "drawn with F = B"}
    result = xr.Dataset(values, coords, attributes)
    for name in ("makespan", "bubble_ratio", "formula_bubble_ratio", "table_bubble_ratio"):
        result[name].loc[{"schedule": "1f1b"}] = result[name].sel(schedule="gpipe")
    for name in ("activation_bytes", "static_bytes"):
        result[name] = 1e12 * result[name]
        result[name].loc[{"schedule": "1f1b", "workers": 4, "microbatches": 256}] = 1e9
    return result.assign(memory_capacity=80e9)


@pytest.fixture(scope="module")
def all_figures(data):
    scripts = (asymmetric, bubble_ratio, hanayo, memory, ranking, run_time)
    return {name: figure for script in scripts for name, figure in script.draw(data).items()}


def test_every_figure_can_be_printed(all_figures):
    assert not [name for name, figure in all_figures.items() if faults(figure)]


def test_claims_name_figures_that_are_drawn(all_figures):
    assert {claim.figure.removesuffix(".pdf") for claim in CLAIMS} <= set(all_figures)


def test_a_cell_of_the_ranking_has_a_part_for_every_schedule_that_ties(data, all_figures):
    at = data.sel(MAIN_SETTING)
    for axes, workers in zip(all_figures["ranking"].axes, (4, 8), strict=True):
        letters = [[""] * len(MICROBATCHES) for _ in range(11)]
        for text in axes.texts:
            column, row = text.get_position()
            letters[int(row)][int(column)] += text.get_text()
        points = [point for line in axes.lines[:-2] for point in zip(*line.get_data(), strict=True)]
        marks = {(int(x), round(y)) for x, y in points}
        levels = [at.formula_bubble_ratio, at.table_bubble_ratio.sel(measured=ranking.SLOTS)]
        levels += [at.makespan.sel(system=name) for name in SYSTEMS]
        for k, (row, values) in enumerate(zip(letters, levels, strict=True)):
            values = values.sel(workers=workers)
            two = values.sel(schedule=["gpipe", "chimera"])
            is_best = two <= 1.01 * two.min("schedule")
            expected = [
                ("G1" if gpipe else "") + ("C" if chimera else "")  # 1F1B equals GPipe
                for gpipe, chimera in is_best.transpose("microbatches", "schedule").values
            ]
            assert row == expected
            beaten = values.sel(schedule=ranking.HANAYO) < 0.99 * two.min("schedule")
            assert {x for x, y in marks if y == k} == set(np.flatnonzero(beaten.values).tolist())


def test_memory_is_held_against_the_capacity(all_figures):
    figure = all_figures["memory"]
    for axes in figure.axes:
        (level,) = (line for line in axes.lines if "accelerator" in str(line.get_label()))
        assert level.get_ydata()[0] == 80.0
    count = 2 * len(CASES) * len(MICROBATCHES)
    assert f"Of all {count} points 1 fit" in figure_caption(figure)


def test_the_mean_of_hanayo_is_a_point_of_its_own(data, all_figures):
    (axes,) = all_figures["hanayo"].axes
    at = data.sel(MAIN_SETTING).sel(workers=8, microbatches=8).makespan
    gain = 100 * (1 - at.sel(schedule="hanayo, 2 waves") / at.sel(schedule="chimera"))
    lines = {line.get_label(): line for line in axes.lines}
    points = lines["Hanayo, 2 waves"].get_ydata()
    np.testing.assert_allclose(points[:9], gain)
    assert points[9] == pytest.approx(float(gain[3:].mean()))  # without the slow network
    mean = lines["published mean"]
    assert tuple(mean.get_ydata()) == hanayo.PUBLISHED_MEAN
    assert min(mean.get_xdata()) > 8.5
    assert set(lines["published point"].get_ydata()) == set(hanayo.PUBLISHED.values())


def test_equal_systems_are_one_row_of_the_ranking(data):
    same = data.copy(deep=True)
    same["makespan"].loc[{"system": SYSTEMS[4]}] = same.makespan.sel(system=SYSTEMS[0])
    figure = ranking.draw(same)["ranking"]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows[:3] == ["formula", "table", "slow/slow, mid/mid"]
    assert len(rows) == 10


def test_times_are_relative_and_on_equal_axes(data, all_figures):
    figure = all_figures["run_time"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    at = data.sel(MAIN_SETTING)
    points = [(p, system) for p in (4, 8) for system in run_time.SHOWN]
    for axes, (workers, system) in zip(figure.axes, points, strict=True):
        lines = {line.get_label(): line.get_ydata() for line in axes.lines}
        times = at.makespan.sel(system=system, workers=workers)
        for name in MAIN:
            expected = times.sel(schedule=name) / times.sel(schedule="gpipe", microbatches=8)
            np.testing.assert_allclose(lines[LOOK[name]["label"]], expected)
