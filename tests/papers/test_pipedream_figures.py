"""Figures of PipeDream against other ways to train, on curves made up for the purpose."""

import numpy as np
import pytest
import xarray as xr

from figures.kit.rules import faults, figure_caption
from figures.pipedream import (
    curves as pipedream_curves,
    machines as pipedream_machines,
    match as pipedream_match,
    scaling as pipedream_scaling,
)
from sweeps.pipedream.curves import QUANTITY, ends, read
from sweeps.pipedream.settings import AS_RUN, CAPTION

SEEDS, SAMPLES = 3, 7
NEVER = None  # rate of a scheme that diverges with every step size


def make_input(rates, until=8.0):
    """Curves exp(-rate * time) with a spread over seeds; the largest step diverges."""
    time = np.tile(np.linspace(0, until, SAMPLES), (len(rates), 1))
    updates = (10 * time).astype(int)
    updates[0] *= 2
    spread = np.linspace(0.9, 1.1, SEEDS)[:, None]
    gap = np.full((len(rates), 3, SEEDS, SAMPLES), np.nan)
    for k, rate in enumerate(rates.values()):
        if rate is not NEVER:
            gap[k, 0] = spread * np.exp(-rate * time[k] / 2)
            gap[k, 1] = spread * np.exp(-rate * time[k])
    axes = ("scheme", "step", "seed", "sample")
    data = {
        "gap": (axes, gap),
        "loss": (axes, gap + 1),
        "diverged": (axes[:3], np.isnan(gap[..., -1])),
        "minimum": ("seed", np.zeros(SEEDS)),
        "step_size": (("scheme", "step"), np.tile([1 / 16, 1 / 4, 1.0], (len(rates), 1))),
        "delta": ("scheme", [60] * len(rates)),
        "time": (("scheme", "sample"), time),
        "updates": (("scheme", "sample"), updates),
    }
    coords = {"scheme": list(rates), "step": [-1, 0, 1], "seed": np.arange(SEEDS)}
    return xr.Dataset(data, coords)


def many(dimension, parts):
    return xr.concat(parts.values(), xr.Variable(dimension, list(parts)))


def get_lines(axes):
    return {line.get_label(): line for line in axes.lines}


RATES = {"pipedream": 1.0, "local-sgd H=2": 0.6, "local-sgd H=5": 0.5, "local-sgd H=30": NEVER}


@pytest.fixture(scope="module")
def matched():
    rates = {"pipedream": 1.0, "pipedream, drawn": 0.8, "rpd": 0.7}
    return read(make_input(rates), "pipedream_match")


@pytest.fixture(scope="module")
def scaled():
    rates = {2: 0.5, 4: 0.2, 8: 0.1}
    depths = {
        s: make_input({"pipedream": 1.0, "rpd": rate, "local-sgd H=5": 0.7})
        for s, rate in rates.items()
    }
    data = many("stages", depths)
    fewer = data.copy(deep=True)
    fewer["gap"].loc[{"stages": 8}] = np.nan  # not run there
    both = many("setting", {AS_RUN: data, CAPTION: fewer}).isel(step=[1, 2])
    return read(both, "pipedream_scaling")


@pytest.fixture(scope="module")
def machines():
    """On a slow network PipeDream wins; else LocalSGD."""
    slow = make_input({"pipedream": 1.0, "local-sgd H=5": 0.5}, 4.0)
    fast = make_input({"pipedream": 0.5, "local-sgd H=5": 1.0}, 4.0)
    speeds = pipedream_machines.SPEEDS
    names = [pipedream_machines.SYSTEM.format(n, c) for n in speeds for c in speeds]
    data = many("system", {name: slow if name.startswith("slow") else fast for name in names})
    return read(many("objective", {"logistic regression": data}), "pipedream_machines")


def store(name, data=None):
    runs = make_input(RATES) if data is None else data
    if name == "pipedream_quadratic":
        runs = many("setting", {AS_RUN: runs, CAPTION: make_input(RATES, until=16.0)})
    return read(runs, name).assign_attrs(store=name)


STORES = [f"pipedream_{name}" for name in ("quadratic", "nesterov", "logistic", "language")]


@pytest.mark.parametrize("name", STORES)
def test_curves(name):
    data = store(name)
    figures = pipedream_curves.draw(data)
    is_random = name == "pipedream_quadratic"
    assert list(figures) == ([name] if is_random else [name, f"{name}_updates"])
    axes = figures[name].axes[0]
    quantity = QUANTITY.get(name, "gap")
    lines = get_lines(axes)
    gap = make_input(RATES).gap.sel(scheme="pipedream", step=0).median("seed")
    np.testing.assert_allclose(
        lines["PipeDream (1/4)"].get_ydata(), gap + 1 if quantity == "loss" else gap
    )
    assert lines["LocalSGD H=30: diverges"].get_xdata().size == 0
    assert len(axes.collections) == 3  # no band of what diverged


def test_captions_have_the_numbers_of_the_table():
    data = store("pipedream_nesterov")
    for x, figure in zip(("time", "updates"), pipedream_curves.draw(data).values(), strict=True):
        result = ends(data, "gap", x)
        low, high = sorted(result[name].median for name in ("pipedream", "local-sgd H=2"))
        assert f"ends lowest, {high / low:.2g} times below" in figure_caption(figure)
    by_time, by_updates = (ends(data, "gap", x)["pipedream"] for x in ("time", "updates"))
    np.testing.assert_allclose(by_time.median, np.exp(-8))
    np.testing.assert_allclose(by_updates.median, np.exp(-4))


def test_map_of_winners(machines):
    figure = pipedream_machines.draw(machines)["pipedream_machines_logistic"]
    table = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in table.texts}
    for (column, _), words in cells.items():
        pipedream = "PipeDream\n7.39 times below\nLocalSGD H=5"
        local_sgd = "LocalSGD H=5\n7.39 times below\nPipeDream"
        assert words == (local_sgd if column else pipedream)
    assert len(cells) == 9


def test_no_winner_is_named_where_seeds_disagree(machines):
    other = machines.copy(deep=True)
    other["wins"] -= 1
    table = pipedream_machines.draw(other)["pipedream_machines_logistic"].axes[0]
    words = {text.get_text() for text in table.texts}
    assert words == {
        "PipeDream or\nLocalSGD H=5:\nseeds disagree",
        "LocalSGD H=5 or\nPipeDream:\nseeds disagree",
    }


def test_all_figures_can_be_printed(matched, scaled, machines):
    figures = {
        **{k: v for name in STORES for k, v in pipedream_curves.draw(store(name)).items()},
        **pipedream_match.draw(matched),
        **pipedream_scaling.draw(scaled),
        **pipedream_machines.draw(machines),
    }
    assert not [f"{name}: {fault}" for name, figure in figures.items() for fault in faults(figure)]
