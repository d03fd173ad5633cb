"""Files to begin with: each is accepted as it is by the command that its report names."""

import json
import shlex

import pytest

import pipejax as pj
from pipejax.cli.app import run


@pytest.mark.parametrize("kind", ["model", "system"])
def test_a_copy_evaluates_as_it_is(kind, tmp_path, monkeypatch, answer, capsys):
    monkeypatch.chdir(tmp_path)
    built = answer("init", kind)
    assert (tmp_path / built["out"]).exists()
    program, *arguments = shlex.split(built["used_by"])
    assert program == "pipejax"
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


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
    for word in ("wrote", "next: pipejax evaluate", "--model"):
        assert word in out
