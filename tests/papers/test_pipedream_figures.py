"""Figures of PipeDream against other ways to train, on curves made up for the purpose."""

import functools

import numpy as np
import pytest
import xarray as xr

import pipejax as pj
import pipejax.training as pt
from figures.kit.rules import faults, figure_caption
from figures.pipedream import (
    convergence_bound,
    curves as pipedream_curves,
    machines as pipedream_machines,
    match as pipedream_match,
    scaling as pipedream_scaling,
    schedules as pipedream_schedules,
    staleness,
)
from figures.pipedream.schedules import NAMES
from sweeps.pipedream import (
    convergence_bound as bound_sweep,
    schedules as schedules_sweep,
    staleness as staleness_sweep,
)
from sweeps.pipedream.curves import QUANTITY, ends, read
from sweeps.pipedream.settings import AS_RUN, CAPTION

SEEDS, SAMPLES = 3, 7
NEVER = None  # rate of a scheme that diverges with every step size
RATES = {"pipedream": 1.0, "local-sgd H=2": 0.6, "local-sgd H=5": 0.5, "local-sgd H=30": NEVER}
STORES = [f"pipedream_{name}" for name in ("quadratic", "nesterov", "logistic", "language")]
S, UPDATES, STEP_SIZES = 3, 60, (0.01, 0.1, 8.0)
SIZES = {"dimension": 6, "num_batches": 5, "batch_size": 4, "seed": 0}


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


@pytest.fixture(scope="module")
def matched():
    rates = {"pipedream": 1.0, "pipedream, drawn": 0.8, "rpd": 0.7}
    return read(make_input(rates), "pipedream_match")


@pytest.fixture(scope="module")
def scaled():
    rates = {2: 0.5, 4: 0.2, 8: 0.1}
    others = {"pipedream": 1.0, "local-sgd H=5": 0.7}
    depths = {s: make_input(others | {"rpd": rate}) for s, rate in rates.items()}
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


@pytest.mark.parametrize("name", STORES)
def test_curves(name):
    figures = pipedream_curves.draw(store(name))
    is_random = name == "pipedream_quadratic"
    assert list(figures) == ([name] if is_random else [name, f"{name}_updates"])
    axes = figures[name].axes[0]
    quantity = QUANTITY.get(name, "gap")
    lines = get_lines(axes)
    gap = make_input(RATES).gap.sel(scheme="pipedream", step=0).median("seed")
    expected = gap + 1 if quantity == "loss" else gap
    np.testing.assert_allclose(lines["PipeDream (1/4)"].get_ydata(), expected)
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
    winners = ("PipeDream or\nLocalSGD H=5", "LocalSGD H=5 or\nPipeDream")
    assert words == {f"{names}:\nseeds disagree" for names in winners}


def test_all_figures_can_be_printed(matched, scaled, machines):
    figures = {k: v for name in STORES for k, v in pipedream_curves.draw(store(name)).items()}
    figures |= pipedream_match.draw(matched) | pipedream_scaling.draw(scaled)
    figures |= pipedream_machines.draw(machines)
    assert not [f"{name}: {fault}" for name, figure in figures.items() for fault in faults(figure)]


# figures of staleness and of the bound, on tiny datasets that the sweeps themselves make
@pytest.fixture(scope="module")
def stale():
    return staleness_sweep.sweep(stages=(2, 3, 4), shown=(4, 2), messages=(0.0, 1.0))


@pytest.fixture(scope="module")
def runs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_sweep, "STAGES", S)
        patch.setattr(bound_sweep, "DELTAS", (0, 60))
        quadratic, logistic = pt.random_quadratic, pt.random_logistic
        makers = {"random quadratic": quadratic, "logistic regression": logistic}
        objectives = {name: functools.partial(make, S, **SIZES) for name, make in makers.items()}
        patch.setattr(bound_sweep, "OBJECTIVES", objectives)
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
    units = {value.attrs["units"] for value in stale.values()}
    assert units == {"block updates", "updates of the stage", "1"}


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
    how = {"step_size": 0.1, "updates": UPDATES, "delta": 60, "interval": 6, "norms": True}
    runs_alone = [pt.randomized_pipedream(objective, seed=seed, **how) for seed in (0, 1)]
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


def test_figures_of_staleness_can_be_printed(stale, runs, updating):
    figures = staleness.draw(stale) | convergence_bound.draw(runs)
    figures |= pipedream_schedules.draw(updating)
    assert not [f"{name}: {fault}" for name, figure in figures.items() for fault in faults(figure)]


def test_figure_of_staleness(stale):
    figure = staleness.draw(stale)["staleness"]
    depth, _, messages = figure.axes
    law, counted = depth.lines[0], depth.lines[1]
    np.testing.assert_array_equal(law.get_ydata(), stale.max_delay_law)
    np.testing.assert_array_equal(counted.get_ydata(), stale.max_delay)
    lines = {line.get_label(): line.get_ydata() for line in messages.lines}
    for link in stale.link.values:
        np.testing.assert_array_equal(lines[link], stale.mean_delay_under_messages.sel(link=link))


def test_figure_of_the_bound(runs):
    figure = convergence_bound.draw(runs)["convergence_bound"]
    scatter, terms, _ = figure.axes
    points = [line for line in scatter.lines if line.get_linestyle() == "None"]
    late, cut = points[-2:]
    x = np.concatenate([line.get_xdata() for line in points[:-2]])
    y = np.concatenate([line.get_ydata() for line in points[:-2]])
    assert np.isfinite(y).sum() == int(runs.measured.notnull().sum())
    assert (y <= x)[np.isfinite(y)].all()
    np.testing.assert_array_equal(late.get_xdata(), runs.late_total)
    np.testing.assert_array_equal(cut.get_xdata(), runs.late_total_without_delay)
    lines = {line.get_label(): line for line in terms.lines}
    case = runs.sel(convergence_bound.CASE)
    np.testing.assert_array_equal(lines["bound"].get_ydata(), case.total)
    np.testing.assert_array_equal(lines["delay"].get_ydata(), case.delay)
    assert float(np.squeeze(lines["least bound"].get_xdata())) == float(case.best_step_size)
    assert float(np.squeeze(lines["least measured"].get_xdata())) == float(case.best_measured)


def test_a_step_size_at_the_edge_is_said():
    data = store("pipedream_nesterov", make_input({"pipedream": 1.0}).isel(step=[1, 2]))
    figure = pipedream_curves.draw(data)["pipedream_nesterov"]
    assert set(get_lines(figure.axes[0])) == {"PipeDream (1/4*)"}
    assert figure_caption(figure).endswith("A star marks" + pipedream_curves.EDGE.split("marks")[1])


def test_match(matched):
    figure = pipedream_match.draw(matched)["pipedream_match"]
    (axes,) = figure.axes
    lines = get_lines(axes)
    assert list(lines) == list(pipedream_match.LABELS.values())
    gap = matched.shown.sel(scheme="rpd").median("seed")
    np.testing.assert_array_equal(lines["RPD, batches drawn"].get_ydata(), gap)
    turn, chance = (float(matched.apart.sel(scheme=s)) for s in ("pipedream", "pipedream, drawn"))
    words = figure_caption(figure)
    assert f"at most {turn:.2g} times apart" in words
    assert f"at most {chance:.2g} times where" in words


def test_scaling(scaled):
    (axes,) = pipedream_scaling.draw(scaled)["pipedream_scaling"].axes
    (curve,) = [line for line in axes.lines if line.get_label() == "RPD"]
    np.testing.assert_allclose(curve.get_ydata(), np.exp([-4, -1.6, -0.8]))
    assert "PipeDream ends lowest with every seed at S = 2, 4, 8." in figure_caption(axes.figure)
