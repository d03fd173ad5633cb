"""Figures of PipeDream against other ways to train, on curves made up for the purpose."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.text import Text

from figures import (
    __main__ as command,
    pipedream_cases,
    pipedream_curves,
    pipedream_machines,
    pipedream_match,
    pipedream_scaling,
)
from pipejax.plots import style
from sweeps.pipedream_schemes import best

pytestmark = pytest.mark.compiles

STEP_SIZES = (1.0, 0.25, 1 / 16)
SEEDS, SAMPLES = 3, 7
NEVER = None  # rate of a scheme that diverges with every step size


@pytest.fixture(scope="module", autouse=True)
def _style():
    style.use()


def made(rates, ends=None):
    """Curves exp(-rate * time) that spread by seed; the largest step diverges, 1/4 is best."""
    time = np.stack(
        [np.linspace(0, 8.0 if ends is None else ends[name], SAMPLES) for name in rates]
    )
    spread = np.linspace(0.9, 1.1, SEEDS)[:, None]
    gap = np.full((len(rates), len(STEP_SIZES), SEEDS, SAMPLES), np.nan)
    for k, rate in enumerate(rates.values()):
        if rate is not NEVER:
            gap[k, 1] = spread * np.exp(-rate * time[k])
            gap[k, 2] = spread * np.exp(-rate * time[k] / 2)
    data = {
        "gap": (("scheme", "step_size", "seed", "sample"), gap),
        "diverged": (("scheme", "step_size", "seed"), np.isnan(gap[..., -1])),
        "time": (("scheme", "sample"), time),
        "updates": (("scheme", "sample"), (10 * time).astype(int)),
    }
    coords = {"scheme": list(rates), "step_size": list(STEP_SIZES), "seed": np.arange(SEEDS)}
    return xr.Dataset(data, coords)


def lines_of(axes):
    return {line.get_label(): line for line in axes.lines}


RATES = {
    "pipedream": 1.0,
    "local-sgd H=5": 0.5,
    "local-sgd H=5, own models": 0.4,
    "local-sgd H=30": NEVER,
}


def many(dimension, values, parts):
    return xr.concat(parts, xr.Variable(dimension, list(values)))


@pytest.fixture(scope="module")
def matched():
    return many("stages", (4, 8), [made({"pipedream": 1.0, "rpd": rate}) for rate in (0.9, NEVER)])


@pytest.fixture(scope="module")
def scaled():
    parts = [made({"pipedream": 1.0, "rpd": rate}).isel(sample=-1) for rate in (0.5, 0.2, NEVER)]
    data = many("stages", (2, 4, 8), parts)
    data["diverged"] = data.diverged & (
        data.stages < 8
    )  # not run there: neither gap nor divergence
    return data.isel(step_size=[0, 1])


@pytest.fixture(scope="module")
def machines():
    """On a slow network PipeDream wins; else LocalSGD, which has more time than the others."""
    slow = made({"pipedream": 1.0, "local-sgd H=5": 0.5}, {"pipedream": 4.0, "local-sgd H=5": 8.0})
    fast = made({"pipedream": 0.5, "local-sgd H=5": 1.0}, {"pipedream": 4.0, "local-sgd H=5": 8.0})
    names = [
        pipedream_machines.SYSTEM.format(n, c)
        for n in ("slow", "mid", "fast")
        for c in ("slow", "mid", "fast")
    ]
    one = many("system", names, [slow if name.startswith("slow") else fast for name in names])
    gamma = ("step_size", list(STEP_SIZES))
    return many("objective", ["logistic"], [one.assign_coords(gamma=gamma).drop_vars("step_size")])


def test_step_sizes_are_those_of_the_sweeps():
    data = made(RATES)
    chosen, known = pipedream_cases.tuned(data), best(data)
    some = [name for name, rate in RATES.items() if rate is not NEVER]
    assert chosen.step_size.sel(scheme=some).values.tolist() == [0.25] * len(some)
    xr.testing.assert_equal(chosen.gap.sel(scheme=some), known.gap.sel(scheme=some))
    assert chosen.hopeless.values.tolist() == [False, False, False, True]
    assert not chosen.edge.sel(scheme=some).any()


def test_one_diverged_seed_rules_a_step_size_out():
    data = made({"pipedream": 1.0})
    data.diverged.loc[{"step_size": 0.25, "seed": 0}] = True
    data.gap.loc[{"step_size": 0.25, "seed": 0}] = np.nan
    assert pipedream_cases.tuned(data).step_size == 1 / 16
    data.diverged[:, :, 0] = True
    assert pipedream_cases.tuned(data).gap.isnull().all()


def test_step_sizes_are_chosen_by_geometric_means():
    data = made({"pipedream": 1.0}).isel(step_size=[1, 2])
    at = data.gap.isel(scheme=0, sample=-1)
    at[:] = [[1e-6, 1e-6, 1e-2], [1e-3, 1e-3, 1e-3]]  # the arithmetic mean of the latter is less
    assert pipedream_cases.tuned(data).step_size == best(data).step_size == 0.25
    at[0, 2] = 1e5
    assert pipedream_cases.tuned(data).step_size == best(data).step_size == 1 / 16


def test_looks():
    look = pipedream_cases.looks(list(RATES))
    assert look["local-sgd H=5"]["color"] == look["local-sgd H=5, own models"]["color"]
    assert look["local-sgd H=5, own models"]["linestyle"] == "--"
    assert len({each["color"] for each in look.values()}) == 3


@pytest.mark.parametrize("store", list(pipedream_curves.VIEWS))
def test_curves(store):
    data = made(RATES).assign_attrs(store=store)
    ((name, figure),) = pipedream_curves.draw(data).items()
    (axes,) = figure.axes
    assert name == store
    language = store == "pipedream_language"
    assert axes.get_ylabel() == (
        "loss on held-out text [nats]" if language else pipedream_cases.GAP
    )
    assert axes.get_yscale() == ("linear" if language else "log")
    assert axes.get_xlabel() == (
        "block updates"
        if store == "pipedream_quadratic"
        else "time [slots of one forward or backward]"
    )
    drawn = lines_of(axes)
    mean = np.exp(np.log(data.gap.sel(scheme="pipedream", step_size=0.25)).mean("seed"))
    np.testing.assert_allclose(drawn["PipeDream, 1/4"].get_ydata(), mean)
    assert drawn["LocalSGD H=5, own models, 1/4"].get_linestyle() == "--"
    assert drawn["LocalSGD H=30: diverges"].get_xdata().size == 0
    assert len(axes.collections) == 3  # no band of what diverged
    by = f"{float(mean[-1] * (np.exp(4) - 1)):.2g} nats" if language else "55 times"
    assert f"Lowest at the end: PipeDream, {by} below LocalSGD H=5" in axes.get_title(loc="left")
    assert "overlap" not in axes.get_title(loc="left")


def test_a_step_size_at_the_edge_is_said():
    data = made({"pipedream": 1.0, "rpd delta=60": 0.99}).isel(step_size=[1, 2])
    axes = pipedream_curves.draw(data.assign_attrs(store="pipedream_quadratic"))[
        "pipedream_quadratic"
    ].axes[0]
    assert set(lines_of(axes)) == {
        "PipeDream, 1/4 (edge of the grid)",
        "RPD δ=60, 1/4 (edge of the grid)",
    }
    assert axes.get_title(loc="left").endswith("; their ranges overlap")


def test_match(matched):
    left, right = pipedream_match.draw(matched)["pipedream_match"].axes
    assert left.get_title(loc="left") == "S = 4, δ = 14:\nat most 2.2 times apart"  # exp(0.1 * 8)
    assert right.get_title(loc="left") == "S = 8, δ = 60:\none of them diverges"
    assert set(lines_of(left)) == {"PipeDream", "RPD"}
    assert set(lines_of(right)) == {"PipeDream"}
    assert (left.get_xlabel(), left.get_ylabel()) == ("block updates", pipedream_cases.GAP)
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    mean = lines_of(left)["PipeDream"].get_ydata()
    np.testing.assert_allclose((band.min(), band.max()), (mean.min() / 10, mean.max() * 10))


def test_scaling(scaled):
    axes = pipedream_scaling.draw(scaled)["pipedream_scaling"].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "stages S",
        f"{pipedream_cases.GAP} at the end",
    )
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "gap after 8 slots" in axes.get_title(loc="left")
    drawn = lines_of(axes)
    assert np.isfinite(drawn["PipeDream"].get_ydata()).all()
    assert np.isnan(drawn["RPD"].get_ydata()).tolist() == [False, False, True]
    assert any(name.startswith("open: ") for name in drawn)  # 1/4 is the smallest that is left


def test_winners(machines):
    best_ones = pipedream_cases.tuned(machines).sel(objective="logistic")
    slow, fast = (
        pipedream_machines.winner(best_ones.sel(system=f"{n}_nw_mid_cp")) for n in ("slow", "fast")
    )
    assert (slow.scheme, slow.second, slow.seeds) == ("pipedream", "local-sgd H=5", SEEDS)
    assert (fast.scheme, fast.second, fast.seeds) == ("local-sgd H=5", "pipedream", SEEDS)
    for found in (slow, fast):
        np.testing.assert_allclose(found.lead, np.exp(0.5 * 4))  # at 4 s, when PipeDream ends


def test_map_of_winners(machines):
    figure = pipedream_machines.draw(machines)["pipedream_machines_logistic"]
    table, *curves = figure.axes
    cells = {text.get_position(): text.get_text() for text in table.texts}
    for (column, _), words in cells.items():
        pipedream = "PipeDream\n7.39 times below LocalSGD H=5\nin 3 of 3 seeds"
        local_sgd = "LocalSGD H=5\n7.39 times below PipeDream\nin 3 of 3 seeds"
        assert words == (local_sgd if column else pipedream)
    assert len(cells) == 9
    assert table.get_title(loc="left").startswith("Logistic regression: least gap at equal time")
    titles = [axes.get_title(loc="left") for axes in curves]
    assert titles == [f"{network} network, mid compute" for network in ("slow", "mid", "fast")]
    assert {axes.get_xlabel() for axes in curves} == {"time [s]"}


def test_who_diverges_never_wins():
    one = pipedream_cases.tuned(made({"pipedream": NEVER, "rpd": 0.1}))
    assert pipedream_machines.winner(one)[:2] == ("rpd", None)
    none = pipedream_cases.tuned(made({"pipedream": NEVER, "rpd": NEVER}))
    assert pipedream_machines.winner(none).scheme is None


def test_command_names_the_folder_of_stores(tmp_path, capsys):
    made(RATES).to_zarr(tmp_path / "pipedream_nesterov.zarr", zarr_format=2)
    assert command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "pipedream_nesterov.png").exists()
    printed = capsys.readouterr().out
    store = tmp_path / "pipedream_match.zarr"
    assert (
        f"no {store}: `python -m sweeps.pipedream --only match --out {tmp_path}` writes it"
        in printed
    )


def test_no_text_is_smaller_than_six_points(matched, scaled, machines):
    curves = made(RATES).assign_attrs(store="pipedream_logistic")
    drawn = [
        pipedream_curves.draw(curves),
        pipedream_match.draw(matched),
        pipedream_scaling.draw(scaled),
        pipedream_machines.draw(machines),
    ]
    for figure in (figure for each in drawn for figure in each.values()):
        assert figure.get_figwidth() == style.PAGE
        sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text().strip()]
        assert min(sizes) >= 6
