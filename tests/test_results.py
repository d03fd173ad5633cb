"""The best points of a sweep and its front, against all points one by one."""

import csv
import json
import shutil

import numpy as np
import pytest
import zarr

import pipejax as pj
from pipejax.sweep.results import SweepResults, read_results

pytestmark = pytest.mark.compiles

GRID = {
    "schedules": ["gpipe", "1f1b"],
    "workers": 2,
    "minibatch": 4,
    "microbatch_size": [1, 2, 3],
    "models": "tabular-128l",
    "systems": ["fast_nw_slow_cp", "slow_nw_fast_cp"],
    "system": {"memory": {"capacity_GB": [80, 4000]}},
    "outputs": ["tokens_per_second"],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "out.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipejax.sweep.store.SHAPES", 3)  # of a block: there are two
        pj.run_sweep(GRID, path).close()
    return path


def points(store):
    """All points as rows, from the dataset itself."""
    import xarray as xr

    with xr.open_zarr(store, chunks=None) as data:
        frame = data.drop_vars("block_checksum").to_dataframe().reset_index()
    return frame


def test_best_points_are_those_of_the_dataset(store, answer):
    rows = points(store)
    found = answer("sweep", "show", store, "--best", 3)
    fitting = rows[rows.status == 1].sort_values("step_time", kind="stable")
    assert [row["step_time"] for row in found["best"]] == fitting.step_time.tolist()[:3]
    assert found["best"][0]["schedule"] == fitting.schedule.iloc[0]
    assert (found["points"], found["illegal"], found["not_evaluated"]) == (24, 8, 0)
    assert found["feasible"] + found["out_of_memory"] == 16
    assert found["reasons"] == {"microbatch size 3 does not divide a minibatch of 4": 8}
    unlimited = answer("sweep", "show", store, "--no-memory-limit", "--by", "tokens_per_second")
    fastest = rows[rows.status > 0].tokens_per_second.max()
    assert unlimited["best"][0]["tokens_per_second"] == fastest
    assert len(unlimited["best"]) == 10


def test_the_front_is_what_no_point_beats(store, answer):
    found = answer("sweep", "show", store, "--pareto", "--no-memory-limit")
    rows = points(store).dropna(subset="step_time")
    pairs = list(zip(rows.step_time, rows.memory_bytes, strict=True))
    front = {
        (t, m)
        for t, m in pairs
        if not any((a <= t and b < m) or (a < t and b <= m) for a, b in pairs)
    }
    shown = [(row["step_time"], row["memory_bytes"]) for row in found["pareto"]]
    assert set(shown) == front
    assert shown == sorted(shown)


def made(**measures):
    """Results of points in a row with these measures."""
    count = len(next(iter(measures.values())))
    values = {name: np.array(each, float) for name, each in measures.items()}
    axes = {"workers": np.arange(count)}
    return SweepResults(axes, {}, {}, np.ones(count, int), values, None, np.array([""] * count))


@pytest.mark.parametrize("seed", range(5))
def test_fronts_with_ties(seed):
    draw = np.random.default_rng(seed)
    found = made(step_time=draw.integers(0, 6, 40), tokens_per_second=draw.integers(0, 6, 40))
    time, rate = found.measures["step_time"], found.measures["tokens_per_second"]
    front = found.front(np.ones(40, bool), ("step_time", "tokens_per_second"))
    for place in range(40):
        beaten = np.any((time <= time[place]) & (rate > rate[place]))
        beaten |= np.any((time < time[place]) & (rate >= rate[place]))
        same = (time[front] == time[place]) & (rate[front] == rate[place])
        assert same.sum() == (0 if beaten else 1)


def test_conditions(store, answer, mistake):
    rows = points(store)
    found = answer(
        "sweep",
        "show",
        store,
        "--where",
        "systems=SLOW_nw_fast_cp",
        "--where",
        "microbatch_size<=1",
    )
    assert found["selected"] == 4
    assert {row["system"] for row in found["best"]} == {"slow_nw_fast_cp"}
    limit = float(rows.memory_bytes.median())
    found = answer("sweep", "show", store, "--where", f"memory_bytes<{limit}", "--no-memory-limit")
    assert found["selected"] == int((rows.memory_bytes < limit).sum())
    fitting = answer("sweep", "show", store, "--where", "memory.capacity=80GB", "--no-memory-limit")
    assert (fitting["selected"], {row["memory.capacity"] for row in fitting["best"]}) == (
        12,
        {80e9},
    )
    assert "unknown unit 'ms'" in mistake("sweep", "show", store, "--where", "memory_bytes<3ms")
    assert answer("sweep", "show", store, "--where", "workers=3")["best"] == []  # all have 2
    assert "did you mean fast_nw_slow_cp" in mistake(
        "sweep", "show", store, "--where", "system=fast_nw_slow"
    )
    assert "unknown axis 'systm'" in mistake("sweep", "show", store, "--where", "systm=a")
    assert "--where" in mistake("sweep", "show", store, "--where", "h100")
    assert "expected a number" in mistake("sweep", "show", store, "--where", "step_time<fast")
    assert "compared by = or !=" in mistake("sweep", "show", store, "--where", "system<a")
    assert "--by" in mistake("sweep", "show", store, "--by", "speed")
    assert "--axes" in mistake("sweep", "show", store, "--axes", "step_time")


def test_conditions_on_rates_have_units():
    rates = np.array([25e9, 50e9, 100e9])
    units = {"network.bandwidth": "B/s", "compute.peak": "FLOP/s"}
    axes = {"network.bandwidth": rates, "compute.peak": np.array([1e15])}
    found = SweepResults(axes, {}, units, np.ones(3, int), {}, None, np.array([""] * 3))
    kept = {
        "network.bandwidth>50GB/s": [False, False, True],
        "network.bandwidth=50 GB/s": [False, True, False],
        "network.bandwidth<5e10": [True, False, False],  # a plain number is in B/s
        "compute.peak>=990TFLOP/s": [True, True, True],
    }
    assert {text: found.where([text]).tolist() for text in kept} == kept
    with pytest.raises(ValueError, match="did you mean GB/s"):  # a size is no rate
        found.where(["network.bandwidth>50GB"])


def test_what_is_not_written_to_its_end_is_not_there(store, tmp_path, answer, call):
    part = shutil.copytree(store, tmp_path / "part.zarr")
    sums = zarr.open_group(str(part), mode="r+")["block_checksum"]
    assert sums.shape == (2,)
    sums[1] = 0
    assert read_results(part).status.tolist()[12:] == [0] * 12
    assert 0 not in read_results(part).status[:12]
    sums[0] = 0
    found = answer("sweep", "show", part)
    assert (found["not_evaluated"], found["best"]) == (24, [])
    code, out, _ = call("sweep", "show", part)
    assert code == 0
    assert "24 not evaluated" in out
    assert "go on with it by pipejax sweep run --resume" in out


def test_only_stores_of_sweeps_are_read(tmp_path, mistake):
    (tmp_path / "other.zarr").mkdir()
    (tmp_path / "other.zarr" / ".zattrs").write_text("{}")
    assert "no store that was written here" in mistake("sweep", "show", tmp_path / "other.zarr")
    (tmp_path / "other.zarr" / ".zattrs").write_text(json.dumps({"pipejax": "0"}))
    assert "no store of a sweep" in mistake("sweep", "show", tmp_path / "other.zarr")


def test_what_is_printed_and_drawn(store, tmp_path, call):
    plot = tmp_path / "front.svg"
    code, out, err = call("sweep", "show", store, "--pareto", "--no-memory-limit", "--figure", plot)
    assert (code, err) == (0, "")
    assert "24 points" in out
    assert "illegal, 8 points: microbatch size 3 does not divide a minibatch of 4" in out
    assert "front of step time against memory" in out
    drawn = plot.read_text()
    for word in ("step time [s]", "most memory of an accelerator [GB]", "1f1b", "front"):
        assert word in drawn


def test_a_csv_has_all_columns_and_rows(store, call, monkeypatch):
    monkeypatch.setattr("pipejax.cli.commands.sweep.LONGEST", 1)
    _, out, _ = call(
        "sweep", "show", store, "--best", 2, "--where", "system=slow_nw_fast_cp", "-f", "csv"
    )
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
    assert "--figure is given twice" in mistake(
        "sweep", "show", ".", "--plot=a.png", "--figure", "b.png"
    )
