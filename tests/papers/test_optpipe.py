"""The comparison with OptPipe: its problems, what solves know together, and verdicts that can fail."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import optpipe_data as made
import pytest
import xarray as xr
from contradictions import check_contradictions, scaled, verdicts

from figures.kit.rules import faults
from figures.optpipe import (
    cases as optpipe_cases,
    gaps as optpipe_gaps,
    links as optpipe_links,
    memory as optpipe_memory,
    opponents as optpipe_opponents,
    quality as optpipe_quality,
    refinement as optpipe_refinement,
    timelines as timelines_figure,
)
from sweeps.kit.claims import judge
from sweeps.kit.journal import Journal
from sweeps.optpipe import (
    checks as optpipe_checks,
    claims as optpipe_claims,
    published as optpipe_published,
    refinement as refinement_sweep,
    sweep as optpipe,
    timelines as optpipe_timelines,
    timelines as timelines_sweep,
)
from sweeps.optpipe.cases import (
    METHODS,
    NO_LINK,
    OPTIMA,
    OPTIMUM,
    OPTIMUM_INTERLEAVED,
    OWN,
    SHARED,
    WHOLE,
    Pipe,
    Setting,
    by_method,
)
from sweeps.optpipe.checks import in_its_memory
from sweeps.optpipe.refinement import job_times
from sweeps.published.zero_bubble_tables import MODELS, PROFILES, SEARCHED

SMALL = Pipe("1.5B", 4, 24)


def test_times_and_figures_are_those_of_the_source():
    path = Path(__file__).parents[1] / "data" / "published.json"
    published = {record["id"]: record["value"] for record in json.loads(path.read_text())}
    for model, shape in MODELS.items():
        config = published[f"zb.t3.{model}"]
        assert shape == (config["p"], config["hidden"], config["heads"], config["seq"])
    printed = {key for key in published if key.startswith("zb.prof.")}
    assert len(printed) == 4 * len(PROFILES)
    for (model, m), profile in PROFILES.items():
        names = ("T_F", "T_B", "T_W", "T_comm")
        assert profile[:4] == tuple(published[f"zb.prof.{model}.m{m}.{name}"] for name in names)
        assert profile.searched == tuple(published.get(f"zb.t5.{model}.m{m}.{s}") for s in SEARCHED)


@pytest.mark.usefixtures("unchecked")  # checks of types at every step of a search are slow
def test_a_method_that_does_not_fit_has_no_makespan():
    tight, plain = (Setting(SMALL, 8, limit, NO_LINK) for limit in (0.5, 1.0))
    result = {method: by_method(tight, method) for method in METHODS}
    assert {m for m, record in result.items() if not record["out_of_memory"]} == {"ada-offload"}
    assert math.isnan(result["1f1b"]["makespan"])
    assert (result["1f1b"]["peak"], result["ada-offload"]["peak"]) == (4.0, 2.0)
    fitting = by_method(plain, "1f1b")
    total = sum(SMALL.times.values())
    # P divides M: (M+P-1) T + (2(P-1)(M/P+1) - 2) c
    assert fitting["makespan"] == pytest.approx(11 * total + 16 * SMALL.message, rel=1e-12)
    assert not fitting["out_of_memory"]
    assert plain.work == pytest.approx(8 * total)


@pytest.mark.usefixtures("unchecked")
def test_the_fastest_schedule_that_fits_is_taken():
    """PipeOffload at P = 8 holds 8 with nothing away, and 2 where all of them can go."""
    pipe = Pipe("1.5B", 8, 24)
    assert by_method(Setting(pipe, 16, 0.25, 1.0), "pipe-offload")["peak"] <= 2
    slow = by_method(Setting(pipe, 16, 0.25, 4.0), "pipe-offload")  # the link is too slow for all
    assert slow["out_of_memory"]
    assert slow["peak"] > 2
    assert by_method(Setting(pipe, 16, 1.0, NO_LINK), "pipe-offload")["offloaded"] == 0


def test_a_journal_goes_on_where_it_was(tmp_path):
    path, made_now = tmp_path / "some.jsonl", []

    def make(value):
        made_now.append(value)
        return {"value": value}

    for _ in range(2):
        journal = Journal(path, "code 1")
        for value in (1.0, math.inf):
            record = journal.once(f"case {value}", lambda value=value: make(value))
            assert record == {"value": value}
    assert made_now == [1.0, math.inf]
    path.write_text(path.read_text() + '{"key": "cut sh')  # killed while it wrote
    assert len(Journal(path, "code 1").records) == 2
    assert path.read_text().endswith("\n")
    Journal(path, "code 2").once("case 1.0", lambda: make(3.0))
    assert made_now[2:] == [3.0]


def test_solves_know_more_together():
    """More memory is never worse, nor a faster link, nor one's own; bounds the other way round."""
    limits = itertools.product((NO_LINK, 1.0, 0.5), (0.5, 1.0, 2.0))
    values = [0.4, 0.6, 0.2, 0.5, 0.3, 0.3, 0.3, 0.35]
    strange = {(limit, link): idle for (link, limit), idle in zip(limits, values, strict=False)}
    bounds = {(1.0, NO_LINK): 0.03, (2.0, NO_LINK): 0.1, (0.5, 1.0): 0.2}
    data = made.grid(
        lambda s: 0.25 if s.sharing == SHARED else strange[s.limit, s.host_link],
        lambda s: bounds.get((s.limit, s.host_link), 0.05) * (s.sharing == OWN),
    ).isel(model=0, microbatches=0)
    idle = (data.idle_time / data.work).sel(schedule=OPTIMUM)
    at = idle.sel(sharing=OWN)
    np.testing.assert_allclose(at.sel(host_link=NO_LINK), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(at.sel(host_link=1.0), [0.25, 0.25, 0.2])  # as on the shared one
    np.testing.assert_allclose(at.sel(host_link=0.5), [0.25, 0.25, np.nan])  # that was not asked
    np.testing.assert_allclose(idle.sel(sharing=SHARED, host_link=1.0), [0.25, 0.25, 0.2])
    solve_idle = data.solve_makespan / data.work - 1
    assert float(solve_idle.sel(limit=1.0, host_link=NO_LINK, sharing=OWN)) == pytest.approx(0.6)
    low = data.bound_idle_time / data.work
    np.testing.assert_allclose(low.sel(host_link=NO_LINK, sharing=OWN), [0.2, 0.1, 0.1])
    np.testing.assert_allclose(low.sel(host_link=1.0, sharing=OWN), [0.2, 0.05, 0.05])
    np.testing.assert_allclose(low.sel(host_link=1.0, sharing=SHARED), [0.2, 0.05, 0.05])
    two = (data.idle_time / data.work).sel(schedule=OPTIMUM_INTERLEAVED, sharing=OWN)
    np.testing.assert_allclose(two.sel(host_link=NO_LINK), [0.4, 0.4, 0.2])  # by itself
    np.testing.assert_allclose(two.sel(host_link=1.0), [0.4, 0.3, 0.2])
    assert two.sel(host_link=0.5).isnull().all()  # not asked
    has_makespan = data.makespan.sel(schedule=OPTIMUM, drop=True).notnull()
    assert bool((has_makespan == data.solved).all())
    assert not data.out_of_memory.sel(schedule=OPTIMUM).any()


def test_quality_is_what_there_is_by_then():
    data = made.grid()
    assert data.ops.values.tolist() == [96, 384]  # of P = 4 and 16 with 8 microbatches
    assert data.problems.values.tolist() == [11, 11]
    half = data.excess_over_best.sel(share=0.5, ops=96)
    times = data.solve_time
    assert np.isinf(half[times < made.LAST - 1]).all()
    np.testing.assert_allclose(half[(times >= made.LAST - 1) & (times < made.LAST)], 1.0)
    np.testing.assert_allclose(half[times >= made.LAST], 0.0, atol=1e-12)
    last = data.excess_over_bound.isel(ops=0, solve_time=-1)
    np.testing.assert_allclose(last, 1.18 / 1.05 - 1)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 40])
def test_jobs_step_by_step(steps):
    clock = made.NEWS[0].seconds
    for _ in range(steps):
        clock += [new for new in made.NEWS if new.seconds <= clock][-1].makespan
    result = job_times(made.NEWS, 20.0, [steps])
    assert result["refine"] == [pytest.approx(clock)]
    assert result["wait"] == [pytest.approx(20 + steps * 1.1)]
    assert result["stay"] == [pytest.approx(1.0 + steps * 1.5)]


@pytest.mark.usefixtures("unchecked")
def test_the_rows_of_the_published_table():
    asked = list(optpipe_published.rows())
    assert len(asked) == 23
    assert {row.setting.activations / row.setting.pipe.workers for row in asked} == {1.0, 2.0}
    large = [row for row in asked if row.setting.pipe.workers == 32]
    assert len(large) == 6
    for row in (asked[0], large[1]):  # one that is searched, one that is left to the heuristic
        record = optpipe_published._solved(row, 0.3)
        assert record["ours"] <= row.published + optpipe_checks.PRINTED.value
        assert record["bound"] <= record["ours"]


@pytest.mark.usefixtures("unchecked")
def test_a_small_comparison(tmp_path):
    optpipe.main(["--out", str(tmp_path), "--small", "--effort", "0.2"])
    assert not list(tmp_path.glob("*.jsonl"))
    with xr.open_zarr(tmp_path / "optpipe_grid.zarr") as store:
        grid = store.load()
    ours = grid.makespan.sel(schedule=OPTIMUM)
    least = grid.makespan.sel(schedule=list(optpipe_checks.ONE_STAGE)).min("schedule")
    assert not bool((least < ours * (1 - 1e-9)).any())
    assert not bool((grid.lower_bound > ours).any())
    # two limits, each without a link, with one, with half of one
    assert int(grid.solved.sum()) == 6
    assert grid.attrs["effort of a solve"] == 0.2
    with xr.open_zarr(tmp_path / "optpipe_timelines.zarr") as store:
        runs = store.load()
    limit = runs.attrs["activations"]
    assert (runs.peak.max("worker_index").values <= limit + 1e-9).tolist() == [False, True, True]
    for name in optpipe_timelines.SHOWN:
        ends = runs.finish[(runs.case_of_op == name).values]
        assert float(ends.max()) == runs.makespan.sel(schedule=name)
    with xr.open_zarr(tmp_path / "optpipe_refinement.zarr") as store:
        assert bool((store.time.sel(policy="refine") <= store.time.sel(policy="wait")).all())


def test_a_part_that_was_cut_short_goes_on(tmp_path, monkeypatch, capsys):
    asked = []

    def part(journal, effort, small):
        for case in range(3):
            if len(asked) == 2 and case == 2:
                asked.append("cut")
                raise KeyboardInterrupt
            journal.once(f"case {case}", lambda case=case: asked.append(case) or {"value": case})
        return xr.Dataset({"value": ("case", [r["value"] for r in journal.records.values()])})

    monkeypatch.setattr(optpipe, "PARTS", {"quick": part})
    with pytest.raises(KeyboardInterrupt):
        optpipe.main(["--out", str(tmp_path)])
    optpipe.main(["--out", str(tmp_path)])
    assert asked == [0, 1, "cut", 2]
    optpipe.main(["--out", str(tmp_path)])
    assert "is there: --only quick makes it anew" in capsys.readouterr().err
    optpipe.main(["--out", str(tmp_path), "--only", "quick"])
    assert asked == [0, 1, "cut", 2, 0, 1, 2]
    with xr.open_zarr(tmp_path / "optpipe_quick.zarr") as data:
        assert data.value.values.tolist() == [0, 1, 2]
        assert "code" in data.attrs


def test_effort_must_be_above_0(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        optpipe.main(["--out", str(tmp_path), "--effort", "0"])
    assert stop.value.code == 2
    assert "--effort must be above 0, got 0" in capsys.readouterr().err


def everything():
    return {"grid": made.grid(), "published": made.published(), "refinement": made.refinement()}


def test_figures_that_hold_are_reproduced():
    result = verdicts(optpipe_claims.CLAIMS, everything())
    assert {n for n, holds in result.items() if not holds} == set()


def at_most(data, values, factor, **where):
    theirs = data["grid"].makespan.sel(schedule=values, **where)
    data["grid"].makespan.loc[{"schedule": OPTIMUM, **where}] = theirs * factor


def idles(data):
    theirs = data["grid"].idle_time.sel(schedule="pipe-offload")
    data["grid"].idle_time.loc[{"schedule": OPTIMUM}] = 0.7 * theirs


def shares(data):
    """A link of its own is worth more to the optimum than to AdaOffload."""
    labels = {"sharing": OWN, "host_link": 1.0}
    at_most(data, "ada-offload", 0.7, **labels)
    at_most(data, "ada-offload", 1.0, **labels | {"sharing": SHARED})


# what contradicts each claim that is counted; split and whole backwards of the opponent at once
MUTATIONS = {
    "1": idles,
    "2, tight": lambda data: at_most(data, "pipe-offload", 1 / 1.05, limit=0.5),
    "2, ample": lambda data: at_most(data, "pipe-offload", 1 / 1.05, limit=2.0),
    "4, interleaved": lambda data: at_most(data, "1f1b, interleaved", 1.001, limit=2.0),
    "6, wait": scaled("refinement", "time", 0.5, policy="wait"),
    "6, stay": scaled("refinement", "time", 0.5, policy="stay"),
    "8": shares,
    "9": scaled("grid", "excess_over_best", more=0.06),
    **{
        f"7, {row.words}": scaled("published", "ours", more=1e-4, row=row.words)
        for row in optpipe_published.rows()
    },
}


def test_every_verdict_can_fail():
    check_contradictions(optpipe_claims.CLAIMS, MUTATIONS, everything)


def test_a_claim_that_the_opponent_decides_says_so():
    data = everything()
    at_most(data, "pipe-offload", 1 / 1.15, limit=0.5)  # 15 % on split backwards, 26 on whole ones
    numbers = ("2, tight", "2, tight, split", "2, tight, whole")
    rows = judge([claim for claim in optpipe_claims.CLAIMS if claim.number in numbers], data)
    verdicts = {row["number"]: row["verdict"] for row in rows}
    expected = ("depends on the opponent", "fails so read", "holds so read")
    assert verdicts == dict(zip(numbers, expected, strict=True))


def test_gains_in_the_memory_that_the_opponent_holds():
    """PipeOffload holds half of 1F1B's memory at every limit: the optimum there has that limit."""
    data = everything()
    gain = in_its_memory(data, "pipe-offload")
    grid = data["grid"].sel(model="1.5B, P=4", microbatches=8, host_link=1.0, sharing=OWN)
    theirs, best = grid.makespan.sel(schedule="pipe-offload"), grid.makespan.sel(schedule=OPTIMUM)
    tight = theirs / float(best.sel(limit=0.5))
    result = gain.gain.sel(model="1.5B, P=4", microbatches=8, host_link=1.0, sharing=OWN)
    np.testing.assert_allclose(result, tight - 1)
    data["grid"].peak.loc[{"schedule": "pipe-offload"}] /= 2  # less than any limit
    assert in_its_memory(data, "pipe-offload").gain.isnull().all()


def test_whole_backwards_take_as_long_and_come_as_one():
    split, whole = SMALL, SMALL._replace(whole=True)
    assert sum(whole.times.values()) == pytest.approx(sum(split.times.values()))
    assert whole.times["W"] < 1e-5 * whole.times["I"]
    result = {method: by_method(Setting(SMALL, 8, 1.0, NO_LINK), method) for method in METHODS}
    assert result[WHOLE]["makespan"] == pytest.approx(result["1f1b"]["makespan"], rel=1e-5)
    assert result[WHOLE]["makespan"] > result["pipe-offload"]["makespan"]


# figures of the comparison, on results that are made up
@pytest.fixture(scope="module")
def grid():
    return made.grid()


def curve(axes, method):
    look = optpipe_cases.LOOK[method]
    names = ("color", "marker", "linestyle")
    looks = [[getattr(line, f"get_{name}")() for name in names] for line in axes.lines]
    assert looks.count([look[name] for name in names]) == 1
    return axes.lines[looks.index([look[name] for name in names])].get_ydata()


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

        def greedy(name):
            return "ada-offload" if name == OPTIMUM else name

        def table(name, _):
            return next(METHODS[greedy(name)](timelines_sweep.SETTING))

        patch.setattr(timelines_sweep, "_table", table)
        return timelines_sweep.sweep(None, 1.0)


def test_all_can_be_printed(grid, runs):
    scripts = optpipe_opponents, optpipe_memory, optpipe_links, optpipe_gaps, optpipe_quality
    figures = [script.draw(grid) for script in scripts]
    figures += [optpipe_refinement.draw(made.refinement()), timelines_figure.draw(runs)]
    for label, figure in (pair for group in figures for pair in group.items()):
        assert faults(figure) == [], label


def test_idle_time_by_host_link(grid):
    figure = optpipe_links.draw(grid)["optpipe_links"]
    np.testing.assert_allclose(curve(figure.axes[0], OPTIMUM), fills(grid, 0.18))


def test_quality_against_solving_time(grid):
    figure = optpipe_quality.draw(grid)["optpipe_quality"]
    best, bound = figure.axes[:2]
    assert len(best.lines) == grid.sizes["ops"]
    assert best.lines[0].get_ydata()[-1] == pytest.approx(0)
    assert bound.lines[0].get_ydata()[-1] == pytest.approx(100 * (1.18 / 1.05 - 1))


def test_solutions_that_get_better():
    figures = optpipe_refinement.draw(made.refinement())
    first, second = figures["optpipe_anytime"].axes
    heuristic, search = (optpipe_refinement.FOUND[which]["marker"] for which in (False, True))
    assert heuristic != search  # in grey too
    by_marker = {line.get_marker(): line.get_xdata() for line in first.lines}
    assert by_marker[heuristic].tolist() == [0.1, 1.0]
    assert by_marker[search].tolist() == [4.0, 9.0]
    none = [line for line in second.lines if line.get_marker() == search]
    assert not len(none[0].get_xdata())
    job, _ = figures["optpipe_training"].axes
    data = made.refinement()
    lines = {line.get_color(): line.get_ydata() for line in job.lines}
    expected = 100 * (data.time.isel(case=0) / data.time.isel(case=0).sel(policy="refine") - 1)
    for policy, look in optpipe_cases.POLICIES.items():
        np.testing.assert_allclose(lines[look["color"]], expected.sel(policy=policy))


def test_timelines(runs):
    figure = timelines_figure.draw(runs)["optpipe_timelines"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0].endswith("; out of memory: it holds 4 of 3")
    assert "out of memory" not in titles[2]
    assert int((runs.case_of_op == "1f1b").sum()) == 4 * 8 * 2
