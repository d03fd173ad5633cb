"""Conventions of the command line: one meaning per option, help, letters, files of options."""

import importlib
import inspect
import json
import re
import shlex
from collections import Counter
from typing import get_args

import pytest

from pipejax.cli.app import COMMANDS
from pipejax.cli.options.catalogue import CATALOGUE, EXCEPTIONS, PANELS, SHORT, flag
from pipejax.cli.options.declared import value_kinds
from pipejax.cli.options.given import GivenOptions
from pipejax.cli.options.groups import with_options
from pipejax.cli.output.help import SCREENS

ONE = ["-s", "1f1b", "-P", "4", "-M", "8"]
TIMES = ["-T", "F=1,B=2"]


def command(name):
    return getattr(importlib.import_module(f"pipejax.cli.commands.{name}"), name)


def options(name):
    """Options of a command: types of the value, and what the parser knows."""
    found = inspect.signature(with_options(command(name))).parameters.items()
    return {key: get_args(p.annotation) for key, p in found if key in CATALOGUE}


EVERY = {name: options(name) for name in COMMANDS}


def test_an_option_is_declared_once():
    assert Counter(name for panel in PANELS.values() for name in panel).most_common(1)[0][1] == 1
    letters = [option.short for option in CATALOGUE.values() if option.short]
    assert len(letters) == len(set(letters)) == len(SHORT)
    assert set(CATALOGUE) == set().union(*EVERY.values())


def test_an_option_means_the_same_in_every_command():
    """Kind of value and line of help come from one record; parsers read one kind."""
    parsed = {}
    for name, own in EVERY.items():
        for key, (types, option) in own.items():
            record = CATALOGUE[key]
            assert option.metavar == (record.kind.metavar or None), (name, key)
            assert option.help.casefold().startswith(record.head.casefold()), (name, key)
            if (name, key) not in EXCEPTIONS:
                parsed.setdefault(key, set()).update(value_kinds(types))
    # a number, or several where a command takes several: these are read as a text
    several = {key: kinds for key, kinds in parsed.items() if len(kinds) > 1}
    assert all(kinds == {int, str} for kinds in several.values()), several
    assert set(several) == {"microbatches", "microbatch_size", "stages_per_worker", "zero"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_two_screens(name, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = call(name, "--help")
    lines = text.splitlines()
    assert (code, len(lines) <= SCREENS, max(map(len, lines)) <= 80) == (0, True, True)
    named = set(re.findall(r"--[a-z][\w-]*", text))
    assert named >= {flag(key) for key in EVERY[name]}
    assert "…" not in text
    assert call(name, "-h")[1] == text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_explains_every_option(name, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = call(name, "--help-all")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    plain = " ".join(text.split())
    for _, option in EVERY[name].values():
        assert " ".join(option.help.split()) in plain


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_a_command_line(name):
    found = re.search(r"Example:\n((?:  .*\n?)+)", inspect.getdoc(command(name)))
    program, called, *words = shlex.split(found[1])
    assert (program, called) == ("pipejax", name)
    given = GivenOptions(words, inspect.signature(with_options(command(name))).parameters)
    given.check()
    given.check_effects()
    written = [word.partition("=")[0] for word in given.words if word.startswith("--")]
    assert set(written) <= {flag(key) for key in EVERY[name]}


SPELLED = {
    "long": ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8", "--json"],
    "letters": ["-s", "1f1b", "-P", "4", "-M", "8", "-j"],
    "letters and values": ["-s1f1b", "-P4", "-M8", "-j"],
    "with =": ["--schedule=1f1b", "-P=4", "-M=8", "-j"],
    "a flag before a letter": ["-s1f1b", "-P4", "-jM8"],
}


@pytest.mark.parametrize("how", SPELLED)
def test_options_are_spelled_in_several_ways(call, how):
    code, out, err = call("evaluate", *SPELLED[how], "-T", "F=1,B=2")
    assert (code, err) == (0, "")
    assert json.loads(out)["makespan"] == 33.0


@pytest.mark.parametrize("other", [["-s", "gpipe"], ["-sgpipe"], ["--schedule=gpipe"], ["-jj"]])
def test_an_option_given_twice_is_refused(mistake, other):
    line = mistake("evaluate", *ONE, *TIMES, *other)
    assert "is given twice" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-Q"], "No such option: -Q"),
        (["-jQ"], "No such option: -Q"),
        (["-P"], "--workers must not be empty"),
        (["-P="], "--workers must not be empty"),
        (["-P", "-4"], "got '-4'"),
    ],
)
def test_letters_are_checked(mistake, words, said):
    assert said in mistake("evaluate", "-s", "1f1b", "-M", "8", *TIMES, *words)


CONFIG = """
schedule = "1f1b"
workers = 4
microbatches = 8
stage-times = {F = 1, B = 2}
corner = ["slow:transmit*2", "hot:compute*2"]
json = true
slack = false

[evaluate]
comm = 0.5

[compare]
schedules = ["gpipe", "1f1b"]
"""


def configured(folder, text, suffix=".toml"):
    path = folder / f"options{suffix}"
    path.write_text(text)
    return ["--config", str(path)]


def test_options_come_from_a_file(call, tmp_path):
    code, out, err = call("evaluate", *configured(tmp_path, CONFIG))
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["makespan"] == pytest.approx(11 * 3 + 16 * 0.5)
    assert [corner["name"] for corner in found["corners"]] == ["nominal", "slow", "hot"]
    again = call("evaluate", *configured(tmp_path, CONFIG), "-P", "2", "--comm", "0")[1]
    assert (json.loads(again)["workers"], json.loads(again)["makespan"]) == (2, 27.0)
    as_json = '{"schedule": "1f1b", "workers": 4, "microbatches": 8, "stage_times": "F=1,B=2"}'
    code, out, err = call("evaluate", *configured(tmp_path, as_json, ".json"), "-j")
    assert json.loads(out)["makespan"] == 33.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('schedul = "1f1b"', "evaluate has no option 'schedul'; did you mean schedule?"),
        ("[evaluat]\nworkers = 4", "evaluate has no option 'evaluat'"),
        ("workers = 4\n[evaluate]\nworkers = 2", "workers is given twice"),
        ("stage-times = 'F=1'\nstage_times = 'F=1'", "stage_times is given twice"),
        ("json = 1", "json must be true or false, got 1"),
        ("workers = []", "workers must be a text, a number or a list of them, got []"),
        ("config = 'other.toml'", "no option 'config'"),
        ("workers = two", "is not TOML"),
        ("workers = 0", "'--workers'"),
        ("schedules = 'gpipe'", "evaluate has no option 'schedules'; did you mean schedule?"),
    ],
)
def test_a_file_of_options_is_checked(mistake, tmp_path, text, said):
    assert said in mistake("evaluate", "-M", "8", *configured(tmp_path, text))


def test_a_file_of_options_has_a_known_ending(mistake, tmp_path):
    assert "--config must end in one of .toml, .json" in mistake(
        "evaluate", *configured(tmp_path, "", ".yaml")
    )
    assert "no.toml: No such file" in mistake("evaluate", "--config", "no.toml")
