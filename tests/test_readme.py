"""The README as a newcomer takes it: its commands print what it shows, and it stays short."""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipejax.cli.app import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# a block of commands and what they print, as a terminal shows them
BLOCKS = re.findall(r"^```console\n(.*?)^```$", README, re.M | re.S)
LONGEST = 900  # words: a stranger reads that in four minutes


def shown():
    """Each command of the README, with the lines that stand below it, in the order of the page."""
    result = []
    for block in BLOCKS:
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            result.append((" ".join(command.split()), output))
    return result


def as_read(text):
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


def is_shown(printed, page):
    """Return whether the page shows what is printed; `...` on the page stands for whatever is left out."""
    return doctest.OutputChecker().check_output(as_read(page), as_read(printed), doctest.ELLIPSIS)


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """A folder with the examples of the repository, and an ordinary terminal's width."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def targets():
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^([A-Z]+) :?\??= (.*)$", text, re.M))
    rules = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", text, re.M)
    return {
        name: re.sub(r"\$\(([A-Z]+)\)", lambda match: variables.get(match[1], ""), lines)
        for name, lines in rules
    }


def test_the_first_block_is_two_commands_for_a_fresh_clone():
    block = re.search(r"^```\w+\n(.*?)^```$", README, re.M | re.S)[1]
    begun = [line.split("#")[0].split() for line in block.splitlines()]
    assert begun == [["make", "demo"], ["make", "test"]]
    assert README.index(block) < README.index("\n## ")
    assert {"demo", "test"} <= set(targets())


def test_the_demo_writes_a_picture_and_a_page(examples, capsys):
    commands = re.findall(r"bin/pipejax (.*)", targets()["demo"])
    (examples / "demo").mkdir()
    for command in commands:
        assert run(shlex.split(command)) == 0, (command, capsys.readouterr().err)
    assert "751 ms per step" in capsys.readouterr().out
    assert (examples / "demo/timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<canvas" in (examples / "demo/explorer.html").read_text()


def test_readme_is_short():
    assert len(README.split()) <= LONGEST


def test_commands_print_what_the_readme_shows(examples, capsys):
    commands = shown()
    assert len(commands) >= 3
    for command, page in commands:
        program, *arguments = shlex.split(command)
        assert program == "pipejax", command
        assert run(arguments) == 0, (command, capsys.readouterr().err)
        assert is_shown(capsys.readouterr().out, page), command


@pytest.mark.slow
def test_commands_run_as_a_script(examples, monkeypatch):
    """As a user pastes them: one shell, the installed program, stdout in a file."""
    programs = Path(sys.executable).parent  # of this environment, whether or not it is active
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for command, page in shown():
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        assert is_shown(done.stdout, page), command
