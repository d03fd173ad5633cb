"""Schedules of the user's own: functions, entry points, tables and folders, wherever a name is."""

import json
import pickle
import sys
from pathlib import Path

import pytest

import pipejax as pj
from pipejax.schedules import naming
from pipejax.search.tuning.problem import ScheduleFamily
from pipejax.sweep.declaration import read_sweep

DATA = Path(__file__).parent / "data"
MINE = (DATA / "own_schedules.txt").read_text()
WRONG = json.loads((DATA / "own_schedule_mistakes.json").read_text())  # names, what is said, why
SIZE = {"num_workers": 2, "num_microbatches": 4}
TIMES = ["--stage-times", "F=1,B=2"]
ONE = ["--workers", 2, "--microbatches", 4, *TIMES]
GRID = {"workers": 2, "minibatch": 4, "models": "tabular-128l", "systems": "fast_nw_slow_cp"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with own functions, a table of 2 x 4, and a folder of two tables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "tables").mkdir()
    built = pj.schedules.build("1f1b", **SIZE)
    pj.write_table(built, "gpipe.csv")  # a name that a built-in schedule has
    pj.write_table(built, "tables/b.json")
    pj.write_table(pj.schedules.build("gpipe", num_workers=3, num_microbatches=3), "tables/a.csv")
    (tmp_path / "tables" / "costs.json").write_text('{"unit": "seconds"}')
    return tmp_path


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(naming, "registered", {})


def fill_and_drain(num_workers, num_microbatches, phases="FB"):
    """Fill and drain."""
    counts = range(num_microbatches)
    return [[f"{w}{p}{m}" for p in phases for m in counts] for w in range(num_workers)]


def test_a_registered_function_is_a_schedule_like_others(registered, call):
    pj.schedules.register("fill", fill_and_drain)
    table = pj.schedules.build("Fill", **SIZE)
    same = pj.schedules.build("gpipe", **SIZE)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    assert pj.evaluate(table, costs).makespan == pj.evaluate(same, costs).makespan
    assert table.name == "fill"
    assert "fill" in pj.schedules.names()
    code, out, _ = call("schedules")
    assert code == 0
    assert "Fill and drain" in out
    with pytest.raises(ValueError, match="fill takes no waves: its options are phases"):
        pj.schedules.build("fill", **SIZE, waves=2)


def test_a_table_of_a_registered_function_bears_its_name(registered):
    pj.schedules.register(
        "mine", lambda num_workers, num_microbatches: pj.schedules.build("gpipe", **SIZE)
    )
    assert pj.schedules.build("mine", **SIZE).name == "mine"


def test_an_entry_point_is_found_when_it_is_asked_for(tmp_path, monkeypatch, answer, call):
    package = tmp_path / "acme_schedules-1.5.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-schedules\nVersion: 1.5\n")
    points = "fill = acme:build\nbroken = acme:no_such\n1f1b = acme:build\n"
    (package / "entry_points.txt").write_text(f"[pipejax.schedules]\n{points}")
    (tmp_path / "acme.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    naming.installed.cache_clear()
    naming.installed_builder.cache_clear()
    try:
        assert pj.schedules.build("1f1b", **SIZE).name == "1f1b"
        assert "acme" not in sys.modules  # a built-in name asks nobody
        assert answer("evaluate", "--schedule", "fill", *ONE)["makespan"] == 15.0
        assert pj.schedules.find("fill").source == "acme-schedules 1.5, acme:build"
        code, out, err = call("schedules", "--json")
        listed = {row["name"]: row for row in json.loads(out)}
        assert (code, listed["fill"]["legal"]) == (0, None)
        assert "broken" not in listed
        assert err.startswith("warning: not loaded: ")
        assert "acme:no_such" in err
        with pytest.raises(ValueError, match=r"broken: entry point acme:no_such: .*AttributeError"):
            pj.schedules.build("broken", **SIZE)
    finally:
        naming.installed.cache_clear()
        sys.modules.pop("acme", None)


def test_a_function_in_a_file(folder, answer, call):
    options = ["--schedule", "mine.py:build", *ONE]
    assert answer("evaluate", *options)["makespan"] == 15.0
    code, out, err = call("evaluate", *options, "--json", "--schedule-options", "depth=2")
    assert (code, err) == (0, "building\n")  # what it prints is not in the answer
    assert '"schedule": "mine.py:build"' in out


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row[0])
def test_what_is_wrong_is_one_line_with_its_place(row, folder, call):
    name, says, *_ = row
    (folder / "broken.py").write_text("x = 1\nbuild(=\n")
    (folder / "raises.py").write_text("import no_such_module\n")
    code, _, err = call("evaluate", "--schedule", *name.split(), *ONE)
    error = err.removeprefix("building\n")
    assert (code, error[:7]) == (2, "error: ")
    assert says in error


def test_an_edited_file_is_read_again(folder):
    assert pj.schedules.build("mine.py:build", **SIZE).num_slots == 8
    (folder / "mine.py").write_text(MINE.replace('phases = ("F", "B")', 'phases = ("F", "I", "W")'))
    assert pj.schedules.build("mine.py:build", **SIZE).num_slots == 12


def test_own_builders_travel(folder):
    """As to the workers of a cluster, which have neither the files nor the modules."""
    for name in ("mine.py:build", "gpipe.csv"):
        packed = pickle.dumps(pj.schedules.find(name))
        for path in folder.glob("*.*"):
            path.rename(f"{path}.gone")
        table = pickle.loads(packed).function(**SIZE)
        assert (table.name, table.num_microbatches) == (name, 4)
        for path in folder.glob("*.gone"):
            path.rename(str(path).removesuffix(".gone"))


def test_compare_takes_tables_and_functions(folder, answer, call):
    options = ["--schedules", "1f1b,mine.py:build,gpipe.csv,tables/", *TIMES]
    rows = answer("compare", *options, "--workers", 2, "--microbatches", "4,6")["rows"]
    names = ["1f1b", "mine.py:build", "gpipe.csv", "tables/a.csv", "tables/b.json"]
    assert [row["schedule"] for row in rows] == names * 2
    assert [row.get("makespan") for row in rows] == [15, 15, 15, None, 15, 21, 21, None, None, None]
    small = "tables/a.csv is a table of 3 workers and 3 microbatches, not of 2 and 4"
    assert rows[3]["error"] == small
    assert rows[2]["formula_bubble_ratio"] is None  # its name claims nothing
    assert small in call("compare", *options, "--workers", 2, "--microbatches", "4,6")[1]


def test_options_that_are_given_are_in_the_name(folder, answer, mistake):
    options = ["compare", "--schedules", "gpipe,mine.py:build", *ONE]
    rows = answer(*options, "--schedule-options", "depth=2,kind=plain")["rows"]
    assert [row["schedule"] for row in rows] == ["gpipe", "mine.py:build depth=2"]
    rows = answer(*options, "--schedule-options", "depth=2", "--labels", "GPipe,Mine")["rows"]
    assert [row["schedule"] for row in rows] == ["GPipe", "Mine"]
    assert "--labels must be 2 different names, of gpipe, mine.py:build" in mistake(
        *options, "--labels", "one"
    )


def test_options_of_a_function_are_no_flags(folder, mistake):
    line = ["evaluate", "--schedule", "mine.py:build", *ONE, "--schedule-options", "dept=2"]
    assert mistake(*line) == (
        "error: --schedule-options dept: mine.py:build takes no dept: its options are depth, kind; "
        "did you mean depth?\n"
    )
    two = ["compare", "--schedules", "gpipe,mine.py:build", *ONE, "--schedule-options", "dept=2"]
    assert "--schedule-options dept: none of gpipe, mine.py:build has" in mistake(*two)
    assert "did you mean depth?" in mistake(*two)


def test_tables_have_sizes_of_their_own(folder, answer, mistake):
    result = answer("compare", "--tables", "tables", "--tables", "gpipe.csv", *TIMES)
    sizes = [(row["workers"], row["microbatches"]) for row in result["rows"]]
    assert (result["workers"], sizes) == (None, [(3, 3), (2, 4), (2, 4)])
    result = answer("compare", "--schedules", "gpipe", "--tables", "gpipe.csv", *TIMES)
    assert [row["makespan"] for row in result["rows"]] == [15, 15]
    assert answer("evaluate", "--schedule", "gpipe.csv", *TIMES)["workers"] == 2
    line = mistake("compare", "--schedules", "gpipe,tables", *TIMES)
    assert "--workers is missing: gpipe is of any size and the tables differ" in line
    assert "twice" in mistake("compare", "--schedules", "gpipe.csv,gpipe.csv", *TIMES)
    (folder / "empty").mkdir()
    assert "holds no table" in mistake("compare", "--tables", "empty", *TIMES)
    for name in ("nope", "tables/none.csv", "gpipe"):
        assert f"--tables {name}: no such file" in mistake("compare", "--tables", name, *TIMES)
    assert "--workers" in mistake("compare", "--schedules", "gpipe", *TIMES)


def test_jitter_takes_tables(folder, answer, mistake):
    options = ["--schedules", "gpipe,mine.py:build,gpipe.csv,tables/a.csv", *ONE, "--samples", 8]
    rows = answer("jitter", *options, "--op", "lognormal:0.1")["rows"]
    names = ["gpipe", "mine.py:build", "gpipe.csv", "tables/a.csv"]
    assert [row["schedule"] for row in rows] == names
    assert rows[0]["mean"] == rows[1]["mean"]
    assert "not of 2 and 4" in rows[3]["error"]
    line = mistake("jitter", "--tables", "tables", *TIMES, "--samples", 8)
    assert "jitter ranks those of one size" in line


def test_a_sweep_keeps_a_label_for_each_table(folder, tmp_path):
    listed = ["gpipe", "tables/", {"name": "mine.py:build", "depth": 2}]
    grid = {**GRID, "schedules": listed, "microbatch_size": 1}
    data = pj.run_sweep(grid, tmp_path / "out.zarr")
    labels = ["gpipe", "tables/a.csv", "tables/b.json", "mine.py:build depth=2"]
    assert data.schedule.values.tolist() == labels
    assert data.status.values.tolist() == [2, 3, 2, 2]
    reason = "tables/a.csv is a table of 3 workers and 3 microbatches, not of 2 and 4"
    assert str(data.reason.sel(schedule="tables/a.csv").item()) == reason
    time = data.step_time
    assert time.sel(schedule="gpipe") == time.sel(schedule="mine.py:build depth=2")


def test_a_changed_table_is_another_grid(folder):
    grid = {**GRID, "schedules": "gpipe.csv", "microbatch_size": 1}
    before = read_sweep(grid).to_json()
    assert read_sweep(grid).to_json() == before
    pj.write_table(pj.schedules.build("gpipe", **SIZE), "gpipe.csv")
    assert read_sweep(grid).to_json() != before


def test_tune_takes_a_table(folder, answer, mistake):
    model = ["--model", "tabular-128l", "--system", "fast_nw_slow_cp", "--no-memory-limit"]
    result = answer("tune", "--schedule", "gpipe.csv", *model, "--minibatch", 8)
    assert (result["workers"], result["microbatches"], result["microbatch_size"]) == (2, 4, 2)
    assert [size["microbatches"] for size in result["exhaustive"]["sizes"]] == [4]
    line = mistake("tune", "--schedule", "gpipe.csv", *model, "--minibatch", 8, "--workers", 3)
    assert "gpipe.csv is a table of 2 workers and 4 microbatches" in line


def test_a_family_of_an_own_schedule_knows_what_does_not_exist(folder):
    family = ScheduleFamily("mine.py:build", 2, {"depth": 2})
    assert family.usual_microbatches == 8
    assert family.refusal(3).endswith("ValueError: depth 2 does not divide 3")


def test_a_plan_refuses_a_single_table(folder, mistake):
    options = ["--model", "gpt-22b", "--system", "h100", "--gpus", 8, "--minibatch", 8]
    line = mistake("plan", *options, "--schedules", "gpipe.csv")
    assert "gpipe.csv is one table: a plan takes schedules of any size" in line


OFF_BY_ONE = (
    "0F0,0F1,0B0,0B1\n1F1,1B0,1F2,1B1\n"  # as PyTorch's own 1F1B: the last rank counts from 1
)


def test_tables_of_a_list_are_repaired(folder, answer, call, mistake):
    (folder / "torch").mkdir()
    (folder / "torch" / "1f1b.csv").write_text(OFF_BY_ONE)
    options = ["compare", "--schedules", "gpipe,torch,tables/b.json", *TIMES]
    assert "--repair torch-1f1b" in mistake(*options)
    mended = [*options, "--repair", "torch-1f1b", *ONE[:4], "--json"]
    code, out, err = call(*mended)
    assert (code, err.count("\n")) == (0, 1)
    assert "torch-1f1b: rank 1, 2 cells: 1F1 is read as 1F0" in err
    rows = json.loads(out)["rows"]
    assert [row["schedule"] for row in rows] == ["gpipe", "torch/1f1b.csv", "tables/b.json"]
    assert "is a table of 2 workers and 2 microbatches" in rows[1]["error"]
    assert answer("compare", "--tables", "torch", *TIMES, "--repair", "torch-1f1b")["rows"]
    line = mistake("compare", "--schedules", "gpipe", *ONE, "--repair", "torch-1f1b")
    assert "--repair torch-1f1b has no effect without a table" in line
