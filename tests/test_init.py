"""Files to begin with: each is accepted as it is by the command that its report names."""

import json
import shlex

import pytest

import pipejax as pj
from pipejax.cli.app import run
from pipejax.cli.commands.init import TEMPLATES
from pipejax.sweep.declaration import read_sweep


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind not in ("sweep", "rows")])
def test_a_template_evaluates_as_it_is(kind, tmp_path, monkeypatch, answer, capsys):
    monkeypatch.chdir(tmp_path)
    made = answer("init", kind)
    assert (tmp_path / made["out"]).exists()
    program, *arguments = shlex.split(made["used_by"])
    assert program == "pipejax"
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


def test_costs_to_begin_with_may_be_a_table(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    made = answer("init", "costs", "--out", "times.csv")
    _, *arguments = shlex.split(made["used_by"])
    assert answer(*arguments)["makespan"] > 0
    assert pj.read_costs("times.csv", pj.schedules.build("1f1b", num_workers=4, num_microbatches=2))


def test_a_sweep_is_declared_as_it_is(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    made = answer("init", "sweep", "--out", "mine.toml")
    assert made["used_by"] == "pipejax sweep run mine.toml --out results.zarr"
    sweep = read_sweep("mine.toml")
    assert sweep.num_points == 3 * 3 * 2 * 2 * 4
    # what is commented out, too, stands there as it would be taken
    text = (tmp_path / "mine.toml").read_text()
    more = [line[2:] for line in text.splitlines() if line.startswith("# ") and " = " in line]
    assert len(more) == 6
    head, _, tail = text.partition("outputs =")
    (tmp_path / "more.toml").write_text("\n".join([head, *more, f"outputs ={tail}"]))
    assert read_sweep("more.toml").to_json() == sweep.to_json()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_keys_mean_is_told_in_full(kind, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    told = " ".join(call("init", kind)[1].split())  # lines are broken where they are long
    for meaning in TEMPLATES[kind].meanings.values():
        assert meaning in told


def test_rows_to_begin_with_are_of_the_machine_that_is_named(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    found = answer(*shlex.split(answer("init", "rows")["used_by"])[1:])
    assert found["mape"] < 2


@pytest.mark.slow
def test_a_sweep_runs_as_it_is(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    made = answer("init", "sweep")
    found = answer(*shlex.split(made["used_by"])[1:])
    assert found["feasible"] > 0
    assert answer("sweep", "show", "results.zarr")["best"]


def test_copies_keep_numbers_and_source(tmp_path, answer, call):
    path = tmp_path / "ours.json"
    assert answer("init", "system", "--system", "B200", "--out", path)["out"] == str(path)
    ours, b200 = pj.load_system(path), pj.load_system("b200")
    assert (ours.name, ours.peak_flops, ours.network) == ("ours", b200.peak_flops, b200.network)
    assert ours.source == f"A copy of b200, to be changed. {b200.source}"
    code, _, err = call("init", "system", "--out", path)
    assert (code, "exists" in err) == (2, True)
    code, out, _ = call("init", "model", "--model", "gpt-22b", "--out", path, "--force")
    assert code == 0
    assert pj.load_model(path).layers == pj.load_model("gpt-22b").layers
    for word in ("wrote", "layers, hidden", "[B]", "--model"):
        assert word in out
