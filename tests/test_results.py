"""The best points of a sweep and its front, against all points one by one."""

import csv
import json
import re
import shlex
import shutil

import numpy as np
import pytest
import zarr
from daily import read_cases

import pipejax as pj
from pipejax.base.printed import four_digits, named
from pipejax.base.ties import least_named
from pipejax.sweep.results import SweepResults, distinct_best, distinct_front, knees, read_results

GRID = read_cases("GRID of test_results")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "out.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipejax.sweep.store.SHAPES", 3)  # of a block: there are two
        pj.run_sweep(GRID, path).close()
    return path


def points(store):
    import xarray as xr

    with xr.open_zarr(store, chunks=None) as data:
        frame = data.drop_vars("block_checksum").to_dataframe().reset_index()
    return frame


@pytest.mark.parametrize("outputs", [["tokens_per_second"], []])
@pytest.mark.parametrize("axes", [{"minibatch": [2, 4]}, {"data_parallel": [1, 2]}, {}])
def test_points_are_ranked_by_tokens_per_second_where_steps_differ_in_tokens(
    axes, outputs, answer_and_text, tmp_path
):
    """The shortest step is that of the least work: 2 sequences, or as many on fewer replicas."""
    grid = {"microbatch_size": [1, 2], "system": {"memory": {"capacity_GB": 4000}}}
    pj.run_sweep(GRID | grid | {"outputs": outputs} | axes, tmp_path / "out.zarr").close()
    result, text = answer_and_text("sweep", "show", tmp_path / "out.zarr")
    measure = "tokens_per_second" if axes and outputs else "step_time"
    column = points(tmp_path / "out.zarr")[measure]
    best = column.min() if measure == "step_time" else column.max()
    assert (result["by"], result["best"][0][measure]) == (measure, best)
    asks = "add tokens_per_second to the outputs" in " ".join(text.split())
    assert asks == bool(axes and not outputs)


def test_points_are_written_as_parquet(store, answer, tmp_path):
    import pandas as pd

    path = tmp_path / "points.parquet"
    line = "--where", "schedule=1f1b", "--out", path
    assert answer("sweep", "show", store, *line)["out"] == str(path)
    rows, all_points = pd.read_parquet(path), points(store)
    ones = all_points[all_points.schedule == "1f1b"]
    assert len(rows) == len(ones) == 12
    np.testing.assert_array_equal(np.sort(rows.step_time), np.sort(ones.step_time))
    assert set(rows.status) == {"feasible", "out of memory", "illegal"}
    assert rows[rows.status == "illegal"].reason.unique().tolist() == [
        "microbatch size 3 does not divide a minibatch of 4"
    ]


def test_best_points_are_those_of_the_dataset(store, answer):
    rows = points(store)
    result = answer("sweep", "show", store, "--best", 3)
    fitting = rows[rows.status == 1].sort_values("step_time", kind="stable")
    distinct = fitting.step_time[fitting.step_time.diff().fillna(1) > 1e-5 * fitting.step_time]
    assert [row["step_time"] for row in result["best"]] == distinct.tolist()[:3]
    assert result["best"][0]["schedule"] == fitting.schedule.iloc[0]
    assert (result["points"], result["illegal"], result["not_evaluated"]) == (24, 8, 0)
    assert result["feasible"] + result["out_of_memory"] == 16
    assert result["reasons"] == {"microbatch size 3 does not divide a minibatch of 4": 8}
    unlimited = answer("sweep", "show", store, "--no-memory-limit", "--by", "tokens_per_second")
    fastest = rows[rows.status > 0].tokens_per_second.max()
    assert unlimited["best"][0]["tokens_per_second"] == fastest
    assert len(unlimited["best"]) < 10  # of 16: each at two capacities, which do not matter
    assert all(row["same"]["memory.capacity"] == [80e9, 4000e9] for row in unlimited["best"])


def test_the_front_is_what_no_point_beats(store, answer):
    result = answer("sweep", "show", store, "--pareto", "--no-memory-limit")
    rows = points(store).dropna(subset="step_time")
    pairs = list(zip(rows.step_time, rows.memory_bytes, strict=True))
    seconds, sizes = np.array(pairs).T
    no_worse = (seconds[:, None] <= seconds) & (sizes[:, None] <= sizes)
    better = (seconds[:, None] < seconds) | (sizes[:, None] < sizes)
    front = {pairs[k] for k in np.flatnonzero(~(no_worse & better).any(axis=0))}
    shown = [(row["step_time"], row["memory_bytes"]) for row in result["pareto"]]
    assert set(shown) == front
    assert shown == sorted(shown)


def make_input(**measures):
    count = len(next(iter(measures.values())))
    values = {name: np.array(numbers, float) for name, numbers in measures.items()}
    axes = {"workers": np.arange(count)}
    return SweepResults(axes, {}, {}, np.ones(count, int), values, None, np.array([""] * count))


@pytest.mark.parametrize("seed", range(5))
def test_fronts_with_ties(seed):
    draw = np.random.default_rng(seed)
    data = make_input(step_time=draw.integers(0, 6, 40), tokens_per_second=draw.integers(0, 6, 40))
    time, rate = data.measures["step_time"], data.measures["tokens_per_second"]
    front = data.front(np.ones(40, bool), ("step_time", "tokens_per_second"))
    for place in range(40):
        beaten = np.any((time <= time[place]) & (rate > rate[place]))
        beaten |= np.any((time < time[place]) & (rate >= rate[place]))
        same = (time[front] == time[place]) & (rate[front] == rate[place])
        assert same.sum() == (0 if beaten else 1)


def test_conditions_on_shares():
    data = make_input(bubble_ratio=[0.1, 0.2, 0.3])._replace(units={"bubble_ratio": "1"})
    for text in ("bubble_ratio<25%", "bubble_ratio < 25 %", "bubble_ratio<0.25"):
        assert data.where([text]).tolist() == [True, True, False]
    for text, message in (("20", "at most 1, or 100%"), ("few", "expected a number")):
        with pytest.raises(ValueError, match=message):
            data.where([f"bubble_ratio<{text}"])


def test_conditions(store, answer, mistake):
    rows = points(store)
    where = shlex.split("--where systems=SLOW_nw_fast_cp --where microbatch_size<=1")
    result = answer("sweep", "show", store, *where)
    assert result["selected"] == 4
    assert {row["system"] for row in result["best"]} == {"slow_nw_fast_cp"}
    limit = float(rows.memory_bytes.median())
    result = answer("sweep", "show", store, "--where", f"memory_bytes<{limit}", "--no-memory-limit")
    assert result["selected"] == int((rows.memory_bytes < limit).sum())
    fitting = answer("sweep", "show", store, "--where", "memory.capacity=80GB", "--no-memory-limit")
    capacities = {row["memory.capacity"] for row in fitting["best"]}
    assert (fitting["selected"], capacities) == (12, {80e9})
    assert "unknown unit 'ms'" in mistake("sweep", "show", store, "--where", "memory_bytes<3ms")
    assert answer("sweep", "show", store, "--where", "workers=3")["best"] == []  # all have 2
    line = "sweep", "show", store, "--where", "system=fast_nw_slow"
    assert "did you mean fast_nw_slow_cp" in mistake(*line)
    assert "unknown axis 'systm'" in mistake("sweep", "show", store, "--where", "systm=a")
    assert "--where" in mistake("sweep", "show", store, "--where", "h100")
    assert "expected a number" in mistake("sweep", "show", store, "--where", "step_time<fast")
    assert "compared by = or !=" in mistake("sweep", "show", store, "--where", "system<a")
    assert "--by" in mistake("sweep", "show", store, "--by", "speed")
    assert "--axes" in mistake("sweep", "show", store, "--axes", "step_time")


def gridded(times, **axes):
    labels = {name.replace("__", "."): np.array(values) for name, values in axes.items()}
    values = np.array(times, float).ravel()
    status = np.where(np.isnan(values), 0, 1)
    units = {"network.bandwidth": "B/s", "step_time": "s"}
    empty = np.array([""] * len(values))
    return SweepResults(labels, {}, units, status, {"step_time": values}, None, empty)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_points_alike_are_grids_that_hold_each_point_once(seed):
    draw = np.random.default_rng(seed)
    shape = 3, 4, 5
    axes = dict(zip("abc", (np.arange(size) for size in shape), strict=True))
    result = gridded(draw.integers(1, 4, shape), **axes)
    rows = distinct_best(result, np.ones(60, bool), "step_time", 60)
    times = result.measures["step_time"].reshape(shape)
    seen = np.zeros(shape, int)
    for row in rows:
        point = result.point(row.place)
        grid = np.ix_(*[row.same.get(axis, [point[axis]]) for axis in axes])
        assert np.all(times[grid] == point["step_time"])
        seen[grid] += 1
    assert np.all(seen == 1)
    costs = [result.measures["step_time"][row.place] for row in rows]
    assert costs == sorted(costs)


def test_a_row_says_which_axes_do_not_matter(call, monkeypatch, store):
    monkeypatch.setenv("COLUMNS", "150")
    _, out, _ = call("sweep", "show", store, "--no-memory-limit", "--best", 2)
    assert "memory.capacity [GB] any" in out
    assert re.search(r"step time \[m?s\]", out)


@pytest.mark.parametrize("seed", range(4))
def test_knees_are_those_of_every_point_one_by_one(seed):
    draw = np.random.default_rng(seed)
    bandwidth = np.array([1e9, 2e9, 4e9, 8e9, 16e9])
    times = 1 + draw.random((3, 5)) * 0.02 + 1e9 / bandwidth * draw.random((3, 1))
    times[draw.random((3, 5)) < 0.2] = np.nan
    result = gridded(times, schedule=["a", "b", "c"], network__bandwidth=bandwidth)
    among = result.status == 1
    rows = [*knees(result, among, "step_time", "network.bandwidth", 0.01)]
    curves = {None: np.nanmin(np.where(np.isnan(times), np.inf, times), axis=0)}
    curves |= {name: np.where(np.isnan(t), np.inf, t) for name, t in zip("abc", times, strict=True)}
    assert [row.label for row in rows] == [*curves]
    for row in rows:
        curve = curves[row.label]
        best = int(np.argmin(curve))
        assert (row.best, row.best_at) == (curve[best], bandwidth[best])
        inside = (bandwidth >= row.low) & (bandwidth <= row.high)
        assert inside[best]
        assert row.cost == curve[inside].max() <= 1.01 * curve[best]
        for nearby in (np.flatnonzero(inside)[0] - 1, np.flatnonzero(inside)[-1] + 1):
            assert not 0 <= nearby < 5 or curve[nearby] > 1.01 * curve[best]


def test_knees_and_maps_are_said_and_drawn(store, answer, call, mistake, tmp_path):
    knee = answer("sweep", "show", store, "--knee", "memory.capacity", "--within", 2)["knee"]
    assert (knee["axis"], knee["within"]) == ("memory.capacity", 0.02)
    assert knee["rows"][0]["axis"] is None
    options = "sweep", "show", store, "--knee", "microbatch_size", "--no-memory-limit"
    asked = *options, "--map", "microbatch_size,system"
    result = answer(*asked)["map"]
    rows = points(store).dropna(subset="step_time")
    for j, system in enumerate(result["system"]):
        for k, size in enumerate(result["microbatch_size"]):
            subset = rows[(rows.system == system) & (rows.microbatch_size == size)]
            if subset.empty:
                assert result["schedule"][j][k] is result["value"][j][k] is None
                continue
            assert result["value"][j][k] == subset.step_time.min()
            near = subset[subset.step_time <= subset.step_time.min() * (1 + 1e-9)]
            assert {*result["schedule"][j][k].split(" = ")} == {*near.schedule}
    plot = tmp_path / "map.svg"
    code, out, err = call(*asked, "--figure", plot)
    assert (code, err) == (0, "")
    assert out.startswith("microbatch size <= 1 keeps step time within 1 % of its best: ")
    assert "best schedule by microbatch size (columns) and system (rows)" in " ".join(out.split())
    assert "all others at their best" in call(*asked, "--details")[1]
    assert "microbatch size" in plot.read_text()
    _, out, _ = call(*asked, "--best", 1, "-f", "csv")
    assert "system,1,2,3\n" in out
    assert "--knee must be one of microbatch_size" in mistake(*options[:3], "--knee", "schedule")
    line = mistake(*options[:3], "--map", "microbatch_size,workers")
    assert "--map must be one of schedule, microbatch_size" in line
    assert "--map needs an axis schedule of several" not in line
    assert "--within must be a percentage" in mistake(*options, "--within", -1)
    signed = answer("sweep", "show", store, "--knee", "memory.capacity", "--within", "2%")["knee"]
    assert signed == knee


def test_a_value_that_no_point_has_is_told_with_the_nearest(store, answer, call):
    text = "memory.capacity=79GB"
    result = answer("sweep", "show", store, "--where", text)
    assert (result["selected"], result["nearest"]) == (0, {text: 80e9})
    _, out, _ = call("sweep", "show", store, "--where", text)
    assert f"{text} holds for no point: the nearest is memory.capacity 80 GB" in out


def test_a_value_is_meant_as_it_is_printed():
    rates = np.geomspace(1e9, 100e9, 20)  # of which tables show four digits
    axes = {"network.bandwidth": rates, "other": np.array([1.23451, 1.23452, 2.0])}
    units, ones = {"network.bandwidth": "B/s"}, np.ones(60, int)
    result = SweepResults(axes, {}, units, ones, {}, None, np.array([""] * 60))
    at = np.repeat(rates, 3)
    for place in (1, 7, 13):
        text = named(units, "network.bandwidth", rates[place]).partition(" ")[2]
        for sign, meant in {"=": np.equal, "!=": np.not_equal, "<=": np.less_equal}.items():
            matching = result.where([f"network.bandwidth{sign}{text}"])
            assert np.array_equal(matching, meant(at, rates[place]))
        assert result.nearest(f"network.bandwidth={text}") is None
    assert not result.where(["network.bandwidth=50GB/s"]).any()
    with pytest.raises(ValueError, match=r"1\.23451, 1\.23452 all print so"):
        result.where(["other=1.235"])
    assert result.where(["other=1.23452"]).sum() == 20


def test_nothing_to_choose_is_not_drawn(store, tmp_path, call, mistake):
    nothing = "sweep", "show", store, "--where", "memory.capacity=79GB"
    knee = ["--knee", "microbatch_size"]
    for option in (["--pareto"], ["--best", 3], ["--map", "microbatch_size,system"], knee):
        message = mistake(*nothing, *option, "--figure", tmp_path / "none.png")
        assert "the nearest is memory.capacity 80 GB; no point can be chosen" in message
    assert not (tmp_path / "none.png").exists()
    code, out, _ = call("sweep", "show", store, "--where", "step_time<1us")
    assert code == 0
    assert "step_time<1us holds for no point: the nearest is step time" in out


def test_rows_that_print_alike_are_one():
    result = gridded([1.000001, 1.00002, 1.00009], workers=[1, 2, 3])
    ones = np.ones(3, bool)
    rows = distinct_best(result, ones, "step_time", 3)
    assert [row.same for row in rows] == [{"workers": [1, 2]}, {}]
    assert [row.same for row in distinct_best(result, ones, "workers", 3)] == [{}, {}, {}]


def test_numbers_have_four_digits_or_all_before_the_point():
    numbers = 0.123456, 9999.4, 9999.6, 31906.7, 2.5e9
    assert [*map(four_digits, numbers)] == ["0.1235", "9999", "10000", "31907", "2.5e+09"]


def test_what_equals_a_point_of_the_front_is_named():
    result = gridded([[2.0, 3.0], [2.0 * (1 - 1e-15), 1.0], [2.0, 3.0]], a=[1, 2, 3], b=[1, 2])
    ones = np.ones(6, bool)
    front = result.front(ones, ("step_time", "b"))
    assert front.tolist() == [3, 2]
    rows = distinct_front(result, ones, ("step_time", "b"), front)
    assert [(row.place, row.same) for row in rows] == [(3, {}), (0, {"a": [1, 2, 3]})]


def test_the_least_are_named_with_their_ties():
    costs = np.array([[1.0, 2.0, np.inf, -3.0], [1.0 + 1e-12, 1.0, np.inf, -2.0]])
    names, codes = least_named(costs, ["a", "b"])
    assert [names[code] if code >= 0 else None for code in codes] == ["a = b", "b", None, "a"]
    assert least_named(np.full((2, 3), np.inf), ["a", "b"])[0] == []


def test_conditions_on_rates_have_units():
    rates = np.array([25e9, 50e9, 100e9])
    units = {"network.bandwidth": "B/s", "compute.peak": "FLOP/s"}
    axes = {"network.bandwidth": rates, "compute.peak": np.array([1e15])}
    result = SweepResults(axes, {}, units, np.ones(3, int), {}, None, np.array([""] * 3))
    matching = {
        "network.bandwidth>50GB/s": [False, False, True],
        "network.bandwidth=50 GB/s": [False, True, False],
        "network.bandwidth<5e10": [True, False, False],  # a plain number is in B/s
        "compute.peak>=990TFLOP/s": [True, True, True],
    }
    assert {text: result.where([text]).tolist() for text in matching} == matching
    with pytest.raises(ValueError, match="did you mean GB/s"):  # a size is no rate
        result.where(["network.bandwidth>50GB"])
    for bits in ("300Gb/s", "300Gbps", "300 Gbit/s"):
        with pytest.raises(ValueError, match="bits per second are no unit here: divide by 8"):
            result.where([f"network.bandwidth>{bits}"])


def test_what_is_not_written_to_its_end_is_not_there(store, tmp_path, answer, call):
    part = shutil.copytree(store, tmp_path / "part.zarr")
    sums = zarr.open_group(str(part), mode="r+")["block_checksum"]
    assert sums.shape == (2,)
    sums[1] = 0
    assert read_results(part).status.tolist()[12:] == [0] * 12
    assert 0 not in read_results(part).status[:12]
    sums[0] = 0
    result = answer("sweep", "show", part)
    assert (result["not_evaluated"], result["best"]) == (24, [])
    code, out, _ = call("sweep", "show", part)
    assert code == 0
    assert "24 not evaluated" in out
    assert "go on with it by pipejax sweep run --resume" in out


def test_only_stores_of_sweeps_are_read(tmp_path, mistake):
    (tmp_path / "other.zarr").mkdir()
    (tmp_path / "other.zarr" / ".zattrs").write_text("{}")
    assert "no store that was written here" in mistake("sweep", "show", tmp_path / "other.zarr")
    (tmp_path / "other.zarr" / ".zattrs").write_text(json.dumps({"pipejax": "0"}))
    assert "of another command, not of a sweep" in mistake("sweep", "show", tmp_path / "other.zarr")


def test_what_is_printed_and_drawn(store, tmp_path, call):
    plot = tmp_path / "front.svg"
    code, out, err = call("sweep", "show", store, "--pareto", "--no-memory-limit", "--figure", plot)
    assert (code, err) == (0, "")
    assert "24 points" in out
    reason = "illegal, 8 points: microbatch size 3 does not divide a minibatch of 4"
    assert reason in call("sweep", "show", store, "--details")[1]
    assert "front of step time against memory" in out
    picture = plot.read_text()
    for word in ("step time [s]", "most memory of an accelerator [GB]", "1f1b", "front"):
        assert word in picture


def test_a_csv_has_all_columns_and_rows(store, call, monkeypatch):
    monkeypatch.setattr("pipejax.cli.commands.sweep.MAX_ROWS", 1)
    line = "--best", 2, "--where", "system=slow_nw_fast_cp", "-f", "csv"
    _, out, _ = call("sweep", "show", store, *line)
    rows = list(csv.DictReader(out.strip().splitlines()))
    assert [row["system"] for row in rows] == ["slow_nw_fast_cp"] * 2
    assert {"schedule", "microbatch size", "memory.capacity [GB]", "fits"} <= {*rows[0]}


def test_what_to_give_where_nothing_fits(store, call):
    _, out, _ = call("sweep", "show", store, "--where", "memory.capacity=80GB")
    assert "no point can be chosen where these conditions hold" in out
    assert "--no-memory-limit" in out
    _, out, _ = call("sweep", "show", store, "--where", "workers=3")
    assert "--no-memory-limit" not in out  # it would show none


def test_another_word_for_a_figure(tmp_path, mistake):
    assert "--figure must end in" in mistake("sweep", "show", tmp_path, "--plot", "x.gif")
    line = "sweep", "show", ".", "--plot=a.png", "--figure", "b.png"
    assert "--figure is given twice" in mistake(*line)
