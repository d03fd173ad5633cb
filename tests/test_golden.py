"""The JSON of every command on a small case: keys, order, text and numbers, as recorded."""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from pipejax.cli.app import COMMANDS, run

GOLDEN = Path(__file__).parent / "data" / "golden.json"
EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = "-P 2 -M 3 -T F=1,B=2 --comm 0.25"
MODEL = "-m llama3-8b -y h100 --minibatch 4 --tensor-parallel 8"
ROWS = "model,accelerators,tensor,pipeline,data,microbatch_size,global_batch,seconds\n"
ROWS += "gpt-22b,8,8,1,1,4,4,1.42\ngpt-22b,8,8,1,1,2,4,1.5\n"
FILES = {"rows.csv": ROWS, "lengths.json": "[3, 1, 2]"}
LINES = {
    "evaluate": f"-s 1f1b {SIZES}",
    "show": f"-s 1f1b {SIZES}",
    "compare": f"-S gpipe,1f1b --diff {SIZES}",
    "formula": "-s 1f1b -P 2 -M 3",
    "jitter": f"-S 1f1b {SIZES} --op lognormal:0.1 --samples 16",
    "staleness": "-s pipedream -P 2 -M 6",
    "explain": f"-s 1f1b {SIZES}",
    "sensitivity": f"-s 1f1b {SIZES}",
    "tune": "size -s 1f1b -P 2 -m llama3-8b -y h100 --minibatch 4 --tensor-parallel 8",
    "tune messages": f"-s 1f1b {SIZES}",
    "tune microbatches": "-s 1f1b -P 2 -M 3 -T F=1,B=2 --lengths lengths.json",
    "tune places": "-s chimera -P 4 -M 4 -T F=1,B=2 --workers-per-node 2 --comm 0,1",
    "tune lookahead": "-s interleaved-1f1b -P 2 -M 2 -V 2 -T F=1,B=2,UNSHARD=1,REDUCE_GRAD=1",
    "tune chunks": "-P 2 --prompt 64 -T a=2ms,b=5us,c=0.7ns,g=10ns",
    "tune layers": f"-s 1f1b -P 2 -M 4 {MODEL}",
    "optimize": "-s 1f1b -P 2 -M 3 -T F=1,I=1,W=1 --memory-limit 2 --effort 1 --time-limit 100",
    "plan": "-m llama3-8b -y h100 --gpus 8 --minibatch 8 -S gpipe --pipeline 2 --tensor 4",
    "sweep run": f"{EXAMPLES / 'grid.toml'} --out grid.zarr --force",
    "sweep show": "grid.zarr --best 1",
    "trace": f"{EXAMPLES / 'production_job.parquet'}",
    "validate": "rows.csv -y a100",
    "calibrate": "rows.csv -y a100 --out system.json",
    "verify": f"{EXAMPLES / 'schedule.csv'} -T F=1,B=2",
    "export": f"-s 1f1b {SIZES} --format json --out table.json",
    "run": "-s 1f1b -P 2 -M 3",
    "init": "model --model gpt-22b --out model.json",
    "schedules": "",
    "schema": "",
}
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
