"""Hostile command lines and misuses of the library, with their errors (`data/mistakes.json`)."""

import json
import re
from pathlib import Path

import pytest
from public_names import NAMES, PARTS, public

import pipejax as pj
from pipejax.cli.app import COMMANDS, run

LIST = json.loads((Path(__file__).parent / "data" / "mistakes.json").read_text())


# lists of keys and names that are allowed, behind which a word may have an underscore
KNOWN = re.compile(r"(known are|must be one of|expected|with the keys|\"whole_heads).*")


def shown(mistake):
    return " ".join(mistake["args"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, content in LIST["files"].items():
        (folder / name).write_text(content)
    return folder


def check_command(arguments, says, folder, capsys):
    """Run a command line that must end with code 2 and one error that says these words."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch("error: .+\n(hint: .+\n)?", err), err
    assert out == "" or json.loads(out)["status"] == "infeasible"  # which is an answer
    assert [word for word in says if word not in err] == [], err
    options = " ".join([*arguments, *LIST["files"].values()])
    stray = re.findall(r"[a-z]+(?:_[a-z]+)+", KNOWN.sub("", err))
    assert [word for word in stray if word not in options] == [], err  # names of Python
    assert {path.name for path in folder.iterdir()} == set(LIST["files"])  # nothing was begun


@pytest.mark.parametrize("mistake", LIST["commands"], ids=shown)
def test_a_mistake_is_one_line_that_names_the_door(mistake, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    check_command(mistake["args"], mistake["says"], folder, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", LIST["commands"], ids=shown)
def test_a_mistake_prints_no_object(mistake, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = mistake["args"]
    is_command = arguments[:1] and any(name.split()[0] == arguments[0] for name in COMMANDS)
    more = ["--json"] if is_command and "--json" not in arguments else []
    check_command([*arguments, *more], [], folder, capsys)


@pytest.fixture(scope="module")
def things():
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.0)
    model = pj.load_model("gpt-22b")
    return {
        "pj": pj,
        "table": table,
        "costs": costs,
        "program": pj.lower(table),
        "evaluation": pj.evaluate(table, costs),
        "model": model,
        "workload": pj.Workload(model, minibatch=8),
        "system": pj.load_system("h100"),
    }


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("misuse", LIST["misuses"], ids=lambda misuse: misuse["expression"])
def test_a_misuse_is_refused_at_the_door(misuse, things, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = {"TypeError": TypeError, "ValueError": ValueError}[misuse["error"]]
    with pytest.raises(kind) as raised:
        eval(misuse["expression"], things)
    message = str(raised.value).splitlines()[0]
    assert [word for word in misuse["says"] if word not in message] == [], message
    assert not list(tmp_path.iterdir())


SHARDING = ("schedules.insert_sharding",)  # of schedules, and with numbers of its own


def test_every_command_and_every_door_has_a_mistake():
    lines = [" ".join(mistake["args"]) for mistake in LIST["commands"]]
    assert [name for name in COMMANDS if not any(line.startswith(name) for line in lines)] == []
    rooms = "|".join(room for room in NAMES if room)
    door = re.compile(rf"pj\.((?:(?:{rooms})\.)?\w+)")
    called = {door.match(misuse["expression"])[1] for misuse in LIST["misuses"]}
    results = {"Evaluation", "Program", "ScheduleError", "Model", "Stack", "System"}
    results |= {"search.InfeasibleError", "files.CollectiveRows"}
    results |= {"traces.Offset"}
    results |= {"costing.LatentAttention", "costing.MixtureOfExperts"}  # checked in a model's file
    parts = {"Op", "Phase", *NAMES, "costing.Number"}  # a table looks at its ops
    parts |= {name for name in public() if name.split(".")[-1].isupper()}
    elsewhere = ("results.", "training.", "plots.", "typing.", "schedules.")
    doors = {name for name in public() if not name.startswith(elsewhere)}
    assert (
        called - {"schedules.build", "schedules.Grammar", "schedules.WeightRule", *SHARDING}
        == doors - results - parts - PARTS
    )
