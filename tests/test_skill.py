"""The skill, followed word by word: tasks from public questions, each with one right number.

A task takes the command and the keys under a heading of SKILL.md, and puts its values for the words in
capitals. It adds only options that the skill names.
"""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from test_hugging_face import KIMI
from test_megatron_log import PLAIN, log

from pipejax.cli.app import COMMANDS, SKILL
from pipejax.cli.options.assertions import inner_schema, read_schema, split_path

TEXT = SKILL.read_text()
HEADINGS = dict(
    re.findall(r"^### ([^\n]+\?)\n\n(.*?)(?=^##)", TEXT + "\n##", re.MULTILINE | re.DOTALL)
)
WORD = re.compile(r"\b[A-Z]{2,}\b")
# files, and tasks with their answers, derived by hand
DATA = json.loads((Path(__file__).parent / "data" / "skill_tasks.json").read_text())


class Task(NamedTuple):
    """A question with its answer."""

    why: str  # derivation of the value by hand
    heading: str  # of the skill
    words: str  # for those in capitals, in their order
    key: str  # that the skill says to read
    value: object
    options: str = ""
    place: int | None = None  # entry of a list
    near: float = 1e-9  # relative


LOG, ROWS = "What does this log say about the model?", "What run is in this log?"
TASKS = {name: Task(**task) for name, task in DATA["tasks"].items()}
STEPS = [(1, 9100.5), (2, 4000.5), (3, 4000.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        f" iteration {k:8d}/ 100 | consumed samples: 64 | elapsed time per iteration (ms): {ms} | "
        "learning rate: 1.000E-04 | global batch size: 128 |"
        for k, ms in STEPS
    ]
    for name, content in DATA["files"].items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "config.json").write_text(json.dumps(KIMI))
    log(folder / "equal.log", lines, **PLAIN)
    old = {"checkpoint_activations": True, "checkpoint_num_layers": 1}
    old |= {"recompute_granularity": "left out"}
    log(folder / "old.log", lines, **PLAIN, **old)
    queries = dict.fromkeys(("group_query_attention", "num_query_groups"), "left out")
    queries |= {"num_key_value_heads": 4, "zero_stage": 1}
    log(folder / "deepspeed.log", lines, **PLAIN, **queries, num_experts="[1]")
    return folder


def command(heading, words, options):
    """The command under a heading, with words for those in capitals."""
    line = re.search(r"^    (pipejax .+)$", HEADINGS[heading], re.MULTILINE)[1]
    values = iter(words.split())
    filled = [WORD.sub(lambda _: next(values), part) for part in line.split()]
    assert next(values, None) is None
    assert all(option in TEXT for option in re.findall(r"--[a-z-]+", options))
    return [*filled[1:], *shlex.split(options)]


def read(key, heading, answer, out):
    """The value of a key that stands under the heading, in the answer or in the file it wrote."""
    assert f"`{key}`" in HEADINGS[heading]
    if out is None:
        for part in key.split("."):
            answer = answer[part]
        return answer
    if out.suffix == ".json":
        return json.loads(out.read_text())[key]
    return next(csv.DictReader(out.read_text().splitlines()))[key]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_solved_from_the_skill_alone(name, folder, monkeypatch, call):
    monkeypatch.chdir(folder)
    task = TASKS[name]
    if "kimi.json" in task.words:
        assert call(*command(LOG, "config.json kimi.json", "--force"))[0] == 0
    is_file = task.heading in (LOG, ROWS)
    line = command(task.heading, task.words, f"{task.options}{' --force' * is_file}")
    code, out, err = call(*line)
    assert code == 0, err
    written = folder / task.words.split()[-1] if is_file else None
    value = read(task.key, task.heading, json.loads(out), written)
    value = value if task.place is None else value[task.place]
    if isinstance(task.value, float) and isinstance(value, str):
        value = float(value)
    expected = task.value
    assert value == (
        pytest.approx(expected, rel=task.near) if isinstance(expected, float | int) else expected
    )


def test_there_are_twenty_tasks():
    assert len(TASKS) == 20


def test_the_skill_is_short():
    assert len(TEXT.splitlines()) < 200
    assert len(re.findall(r"[A-Za-z]{1,6}|\d|[^\sA-Za-z\d]", TEXT)) <= 4000  # about as many tokens


def test_every_command_and_key_of_the_skill_is_there():
    """Commands are parsed by the tests of the documentation; keys are those of the schemas."""
    for heading, text in HEADINGS.items():
        line = re.search(r"^    pipejax (.+)$", text, re.MULTILINE)[1]
        names = sorted(COMMANDS, key=len, reverse=True)
        called = next(name for name in names if line.startswith(f"{name} "))
        if called == "init":
            continue
        prose = text.partition(line)[2].split("Read ")[1].split(". ")[0]
        for key in re.findall(r"`([a-z_.\[\]\d]+)`", prose):
            path = split_path(key.replace("[]", ""))
            assert inner_schema(read_schema(called), path) is not None, (heading, key)


def test_the_program_prints_it(call):
    assert call("--skill") == (0, TEXT, "")
    assert (SKILL.parents[1] / "skills" / "pipejax" / "SKILL.md").read_text() == TEXT
