"""The JSON of every command on a small case: keys, order, text and numbers, as recorded."""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from pipejax.cli.app import COMMANDS, run

GOLDEN = Path(__file__).parent / "data" / "golden.json"
EXAMPLES = Path(__file__).parents[1] / "examples"
ROWS = "model,accelerators,tensor,pipeline,data,microbatch_size,global_batch,seconds\n"
ROWS += "gpt-22b,8,8,1,1,4,4,1.42\ngpt-22b,8,8,1,1,2,4,1.5\n"
FILES = {"rows.csv": ROWS, "lengths.json": "[3, 1, 2]"}
LINES = tomllib.loads(GOLDEN.with_suffix(".toml").read_text().replace("EXAMPLES", str(EXAMPLES)))
CLOCK = {"seconds", "store", "compile_seconds", "rate", "evaluated", "effort", "trace"}
CLOCK |= {"found_after", "points_per_second", "source", "bytes"}  # a store names its commit
LONG = 8  # entries of a list above which its head and its length are recorded


def clean(value):
    """Cut long lists; drop what a clock or a machine says."""
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if key not in CLOCK}
    if isinstance(value, list):
        cut = [clean(item) for item in value[: 2 if len(value) > LONG else None]]
        return [*cut, f"{len(value)} in all"] if len(value) > LONG else cut
    return value.replace(str(EXAMPLES), "examples") if isinstance(value, str) else value


def answer(name):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run([*name.split(), *shlex.split(LINES[name]), "--json"])
    assert code in (0, 1), name
    return clean(json.loads(out.getvalue()))


def differences(new, old, at=""):
    """Name the places at which two answers differ; numbers by 1e-6, as draws depend on the precision."""
    if isinstance(old, dict) and isinstance(new, dict):
        if [*new] != [*old]:
            return [f"{at}: keys {[*new]}, recorded {[*old]}"]
        return [text for key in old for text in differences(new[key], old[key], f"{at}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(new) == len(old):
        pairs = enumerate(zip(new, old, strict=True))
        return [text for k, (a, b) in pairs for text in differences(a, b, f"{at}[{k}]")]
    if isinstance(old, float) and isinstance(new, float):
        return [] if new == pytest.approx(old, rel=1e-6, abs=1e-12) else [f"{at}: {new}, not {old}"]
    return [] if new == old else [f"{at}: {new!r}, recorded {old!r}"]


def keep_close(new, old):
    """Return a new answer with the recorded number where the two differ by rounding only."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: keep_close(item, old.get(key)) for key, item in new.items()}
    if isinstance(old, list) and isinstance(new, list) and len(new) == len(old):
        return [keep_close(a, b) for a, b in zip(new, old, strict=True)]
    return new if differences(new, old) else old


def test_every_command_is_here():
    assert {*LINES} == {*COMMANDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", LINES)
def test_the_answer_is_as_recorded(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    if name == "sweep show":
        answer("sweep run")
    assert differences(answer(name), json.loads(GOLDEN.read_text())[name], name) == []


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    os.environ["PIPEJAX_CACHE"] = os.getcwd()
    for path, text in FILES.items():
        Path(path).write_text(text)
    answers = {name: answer(name) for name in LINES}
    answers = keep_close(answers, json.loads(GOLDEN.read_text()))
    GOLDEN.write_text(json.dumps(answers, indent=1) + "\n")
    sys.exit(0)
