"""Figures of the design space, on tiny datasets that the sweeps themselves make."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PolyCollection

from figures import __main__ as command
from figures.design import (
    best_schedule,
    jitter,
    pareto,
    run_time as design_run_time,
    timelines,
    tornado,
)
from figures.kit import captions
from figures.kit.cases import LOOK
from figures.kit.overview import TARGETS, overview
from figures.kit.rules import faults
from figures.tabular import schedule_tables
from pipejax.analysis.uncertainty.sensitivity import EFFICIENCIES
from pipejax.sweep import STATUS, read_sweep, run_sweep
from sweeps.design import (
    jitter as jitter_sweep,
    sensitivity as sensitivity_sweep,
    timelines as timelines_sweep,
)

DATA = Path(__file__).parents[1] / "data"
DRAWN = {"tornado"}  # of sensitivity.zarr
ALL_DRAWN = DRAWN | {"best_schedule", "design_run_time", "jitter", "pareto", "timelines"}


@pytest.fixture(scope="session")
def space_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "design_space.zarr"
    run_sweep(DATA / "design_corner.toml", path)
    return path


@pytest.fixture(scope="session")
def space(space_store):
    """A small grid with points that fit, that do not, and that are illegal."""
    with xr.open_zarr(space_store) as store:
        data = store.load()
    assert set(np.unique(data.status)) == {1, 2, 3}
    return data


@pytest.fixture(scope="session")
def elasticity():
    name, setting = list(sensitivity_sweep.SETTINGS.items())[-1]
    small = dataclasses.replace(setting, workers=2, minibatch=4, microbatches=4)
    return sensitivity_sweep.sweep({name: small})


@pytest.fixture(scope="session")
def runs():
    return timelines_sweep.sweep(microbatches=4, slots={"F": 1, "B": 1}, delay=0.0)


@pytest.fixture(scope="session")
def shaken():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jitter_sweep, "SHOWN", ("1f1b", "hanayo, 1 wave"))
        return jitter_sweep.sweep(samples=50)


def test_the_declared_design_space():
    sweep = read_sweep("sweeps/design/design_space.toml")
    axes = {axis.name: axis for axis in sweep.axes}
    names = [str(choice) for choice in axes["schedule"].values]
    assert {*names} <= LOOK.keys()
    assert len({LOOK[name]["color"] for name in names}) == len(names)  # or no map could be read
    assert {*pareto.PLAN, "network.bandwidth", "network.latency"} == set(sweep.sizes)
    assert axes["memory.capacity"].values == (axes["system"].values[0].memory_capacity,)
    assert "bound_by" in sweep.outputs
    assert set(timelines_sweep.SHOWN) | set(jitter_sweep.SHOWN) <= LOOK.keys()


def by_hand(data, bandwidth, latency):
    """Least step time of the feasible plans of a point, with its schedule and resource."""
    result = []
    point = data.isel({"network.bandwidth": bandwidth, "network.latency": latency})
    names = ("schedule", "microbatch_size", "recompute")
    for plan in itertools.product(*(data[name].values for name in names)):
        at = point.sel(dict(zip(names, plan, strict=True)))
        if STATUS[int(at.status)] == "feasible":
            resource = data.bound_by.attrs["flag_meanings"].split()[int(at.bound_by)]
            result.append((float(at.step_time), *map(str, plan), resource))
    best = min(result)
    return *best, min(time[0] for time in result if time[1] != best[1]) / best[0] - 1


def test_the_fastest_schedule_of_every_network(space):
    best = best_schedule.fastest(space)
    winners = set()
    for b, k in np.ndindex(*(space.sizes[f"network.{x}"] for x in ("bandwidth", "latency"))):
        at = best.isel({"network.bandwidth": b, "network.latency": k})
        expected = by_hand(space, b, k)
        names = (str(at[n].item()) for n in (*best_schedule.PLAN, "bound_by"))
        assert (float(at.step_time), *names, float(at.lead)) == expected
        winners.add(expected[1])
    assert len(winners) > 1


def test_the_map_shows_the_fastest(space):
    figure = best_schedule.draw(space)["best_schedule"]
    mesh = figure.axes[0].collections[0]
    colours = mesh.cmap(mesh.norm(mesh.get_array())).reshape(4, 5, 4)
    for b, k in ((0, 0), (4, 0), (0, 3), (4, 3)):  # rows are latencies
        expected = LOOK[by_hand(space, b, k)[1]]["color"]
        assert tuple(colours[k, b]) == pytest.approx(plt.matplotlib.colors.to_rgba(expected))
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert labels == {LOOK[by_hand(space, b, k)[1]]["label"] for b in range(5) for k in range(4)}


def test_where_nothing_fits_the_map_is_empty(space):
    none = space.copy(deep=True)
    slowest = {"network.bandwidth": none["network.bandwidth"][0]}
    none["status"].loc[slowest] = STATUS.index("out of memory")
    best = best_schedule.fastest(none)
    assert best.step_time.isel({"network.bandwidth": 0}).isnull().all()
    assert (best.schedule.isel({"network.bandwidth": 0}) == "").all()
    assert best.step_time.isel({"network.bandwidth": 1}).notnull().all()
    mesh = best_schedule.draw(none)["best_schedule"].axes[0].collections[0]
    assert np.ma.getmaskarray(mesh.get_array()).reshape(4, 5)[:, 0].all()


@pytest.mark.parametrize("seed", range(5))
def test_the_front_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    time, memory = rng.integers(0, 8, (2, 30))  # with ties
    is_at_most = (time[:, None] <= time) & (memory[:, None] <= memory)
    is_less = (time[:, None] < time) | (memory[:, None] < memory)
    expected = (~(is_at_most & is_less).any(axis=0)).tolist()
    assert pareto.front(time.astype(float), memory.astype(float)).tolist() == expected
    assert any(expected)
    assert not all(expected)


def test_strokes_mark_what_runs_from_the_last_worker_to_the_first(runs):
    """The second pipe of Chimera, the second leg of Hanayo's wave, nothing of a loop."""
    up = runs.is_upward.astype(bool)
    pipe_or_leg = {"chimera": runs.microbatch % 2 == 1, "hanayo, 1 wave": runs.stage >= 4}
    for name in runs.schedule.values:
        is_case = (runs.case == name).values
        expected = pipe_or_leg.get(name.removesuffix("-asymmetric"), np.zeros(len(is_case), bool))
        np.testing.assert_array_equal(up[is_case], expected[is_case])


def test_schedule_tables(runs):
    """The literature counts this idle time at equal slots."""
    figure = schedule_tables.draw(runs)["schedule_tables"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:2] == [f"{name}: 14 slots, idle 42.9 %" for name in ("GPipe", "1F1B")]
    assert "Chimera: 10 slots, idle 20.0 %" in titles


@pytest.fixture
def stores(space_store, elasticity, runs, shaken, tmp_path):
    # the drawing takes long
    two = runs.isel(schedule=[0, 1], op=np.isin(runs.case, runs.schedule[:2]))
    for name, data in {"sensitivity": elasticity, "timelines": two, "jitter": shaken}.items():
        data.to_zarr(tmp_path / f"{name}.zarr", zarr_format=2)
    shutil.copytree(space_store, tmp_path / "design_space.zarr")
    return tmp_path


@pytest.mark.parametrize("names", [DRAWN, pytest.param(ALL_DRAWN, marks=pytest.mark.slow)])
def test_command(names, stores, tmp_path, capsys):
    out = tmp_path / "out"
    for name in ("design_space", "jitter", "timelines") if names == DRAWN else ():
        shutil.rmtree(stores / f"{name}.zarr")
    assert command.main(["--data", str(stores), "--out", str(out)]) == 0
    files = {f"{name}.{suffix}" for name in names for suffix in ("pdf", "png")}
    assert {path.name for path in out.iterdir()} == files | {"captions.md", "captions.tex"}
    latex = (out / "captions.tex").read_text()
    for name in names:
        assert f"\\includegraphics{{{name}.pdf}}" in latex
        assert f"\\label{{fig:{name}}}" in latex
    assert latex.count("\\begin{figure}") == latex.count("\\caption{") == len(names)
    printed = capsys.readouterr()
    missing = stores / "tabular_schedules.zarr"
    command_text = f"python -m sweeps.tabular.schedules --out {missing}"
    assert f"no {missing}: `{command_text}` writes it" in printed.out
    absent = [name for name in command.STORES if not (stores / name).exists()]
    assert printed.out.count("writes it") == len(absent)
    assert "figures" in printed.err


def test_captions_are_escaped_for_latex():
    text = captions.in_latex({"a_b": r"5 % of x_1 & #2 {$y^2$} ~ 3 µs \ < >"})
    assert (
        r"\caption{5 \% of x\_1 \& \#2 \{\$y\textasciicircum{}2\$\} \textasciitilde{} 3 \textmu{}s "
        r"\textbackslash{} \textless{} \textgreater{}}"
    ) in text
    assert r"\includegraphics{a_b.pdf}" in text  # names are no text
    assert r"\label{fig:a_b}" in text


def test_nothing_to_draw(tmp_path, capsys):
    assert command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = f"error: --data {tmp_path} holds none of tabular_schedules.zarr, "
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_script_has_a_store():
    scripts = {script.__name__ for source in command.STORES.values() for script in source.scripts}
    paths = [path.with_suffix("") for path in Path("figures").rglob("*.py")]
    files = {".".join(path.parts) for path in paths if path.name != "__init__"}
    assert files - scripts == {
        *("figures.__main__", "figures.kit.captions", "figures.kit.cases", "figures.kit.overview"),
        *("figures.kit.rules", "figures.optpipe.cases", "figures.pipedream.cases"),
    }
    assert jitter.__name__ in scripts


def test_the_page_of_papers_is_that_of_the_stores():
    page = Path("sweeps/README.md").read_text()
    assert page == overview(command.STORES)
    papers = {path.parent.name for path in Path("sweeps").glob("*/__init__.py")} - {"kit"}
    assert papers == set(TARGETS)
    targets = Path("Makefile").read_text()
    assert all(f"\n{target.split()[1]}: " in targets for target, _ in TARGETS.values())


def test_every_figure_can_be_printed(space, elasticity, runs, shaken):
    figures = timelines.draw(runs) | schedule_tables.draw(runs)
    for script in (design_run_time, best_schedule, pareto):
        figures |= script.draw(space)
    figures |= tornado.draw(elasticity) | jitter.draw(shaken)
    assert not [name for name, figure in figures.items() if faults(figure)]


def test_timelines(runs):
    units = {name: runs[name].attrs["units"] for name in timelines_sweep.COLUMNS}
    assert units == dict(timelines_sweep.COLUMNS)
    figure = timelines.draw(runs)["timelines"]
    ordered = runs.sortby("makespan", ascending=False)
    for axes, name in zip(figure.axes, ordered.schedule.values, strict=True):
        is_case = (runs.case == name).values
        more = int(runs.is_critical.values[is_case].sum() + runs.is_upward.values[is_case].sum())
        collections = [c for c in axes.collections if isinstance(c, PolyCollection)]
        # frames and strokes
        assert sum(len(c.get_paths()) for c in collections) == is_case.sum() + more


def test_both_ops_of_a_fused_pair_are_drawn(runs):
    two = runs.isel(op=[0, 1]).assign(part=("op", [0, 1]), is_pair=("op", [True, True]))
    (bar,), _ = timelines.read_run(two, runs.schedule.values[0])
    assert [op.microbatch for op in bar.ops] == runs.microbatch.values[:2].tolist()


def test_tornado(elasticity):
    assert elasticity.swing.attrs["units"] == "s"
    assert elasticity.swing.isnull().any("factor").sum() == len(EFFICIENCIES)
    np.testing.assert_allclose(elasticity.share.sum("resource"), 1)
    axes = tornado.draw(elasticity)["tornado"].axes[0]
    assert axes.get_title(loc="left").startswith(f"{elasticity.setting.item()}\n")
    assert axes.get_xlabel() == "change of the step time [%]"
    row = [text.get_text() for text in axes.get_yticklabels()].index("network bandwidth")
    ends = elasticity.swing.sel(parameter="network.bandwidth") / elasticity.step_time
    widths = [bars.patches[row].get_width() for bars in axes.containers]
    np.testing.assert_allclose(widths, 100 * (ends.values.ravel() - 1))
    three = elasticity.isel(setting=[0, 0, 0]).assign_coords(setting=["a", "b", "c"])
    visible = [axes.get_visible() for axes in tornado.draw(three)["tornado"].axes]
    assert visible == [True, True, True, False]
