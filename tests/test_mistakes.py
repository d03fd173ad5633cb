"""Hostile command lines and misuses of the library, with their errors (`data/mistakes.json`)."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from legal_sizes import build
from public_names import NAMES, PARTS, public

import pipejax as pj
from pipejax.cli.app import COMMANDS, run
from pipejax.costs.costs import unchecked_costs

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
def things(tmp_path_factory):
    def file(text, name="rows.csv"):
        path = tmp_path_factory.mktemp("files") / name
        path.write_text(text)
        return path

    def changed(source, /, **changes):
        """Write a data file with other entries; a key of two words is an entry of a section."""
        content = json.loads((pj.files.DATA / f"{source}.json").read_text())
        for key, value in changes.items():
            section, _, entry = key.rpartition("__")
            part = content[section] if section else content
            part[entry] = value
            if value is ...:  # without this entry
                del part[entry]
        return file(json.dumps(content), "mine.json")

    def measured(**changes):
        """Write two measured rows, the second with other cells."""
        first, second = LIST["measured"], LIST["measured"] | changes
        lines = [[name, first.get(name, ""), second[name]] for name in second]
        return file("\n".join(map(",".join, zip(*lines, strict=True))))

    table = build("1f1b", 2, 4)
    costs = pj.Costs(forward=1.0, backward=2.0)
    model = pj.load_model("gpt-22b")
    options = {"dimension": 6, "num_batches": 5, "batch_size": 4, "seed": 0}
    grid = {"schedules": "1f1b", "workers": 2, "minibatch": 4, "microbatch_size": 1}
    return {
        "pj": pj,
        "np": np,
        "replace": dataclasses.replace,
        "unchecked_costs": unchecked_costs,
        "build": build,
        "file": file,
        "changed": changed,
        "measured": measured,
        "rows": lambda text: [row.split() for row in text.split("/")],
        "quadratic": pj.training.random_quadratic(3, **options),
        "grid": grid | {"models": "gpt-22b", "systems": ["h100", "a100"]},
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
    with pytest.raises(eval(misuse["error"], {"pj": pj})) as raised:
        eval(misuse["expression"], things)
    message = str(raised.value).splitlines()[0]
    assert message == getattr(raised.value, "reason", message)
    assert [word for word in misuse["says"] if word not in message] == [], message
    assert not list(tmp_path.iterdir())


def test_every_command_and_every_door_has_a_mistake():
    lines = [" ".join(mistake["args"]) for mistake in LIST["commands"]]
    assert [name for name in COMMANDS if not any(line.startswith(name) for line in lines)] == []
    rooms = "|".join(room for room in NAMES if room)
    door = re.compile(rf"pj\.((?:(?:{rooms})\.)?\w+)")
    matches = [door.match(misuse["expression"]) for misuse in LIST["misuses"]]
    results = {"Evaluation", "Program", "ScheduleError", "Model", "Stack", "System"}
    results |= {"search.InfeasibleError", "files.CollectiveRows"}
    results |= {"traces.Offset"}
    results |= {"costing.LatentAttention", "costing.MixtureOfExperts"}  # checked in a model's file
    parts = {"Op", "Phase", *NAMES, "costing.Number"}  # a table looks at its ops
    parts |= {name for name in public() if name.split(".")[-1].isupper()}
    elsewhere = ("results.", "training.", "plots.", "typing.", "schedules.")
    called, doors = (
        {name for name in names if not name.startswith(elsewhere)}
        for names in ({match[1] for match in matches if match}, public())
    )
    assert called - PARTS == doors - results - parts - PARTS
