"""The skill, followed word by word: tasks from public questions, each with one right number.

A task takes the command and the keys under a heading of SKILL.md, and puts its values for the words in
capitals. It adds only options that the skill names.
"""

import csv
import json
import re
import shlex
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
MODEL = {  # a layer has norms, and an MLP with a gate
    **{"source": "a public question", "hidden": 2048, "heads": 16, "kv_heads": 16},
    **{"ffn_hidden": 5504, "vocabulary": 32000, "sequence_tokens": 4096, "gated_mlp": True},
    **{"biases": False, "learned_positions": False, "tied_embeddings": False, "dropout": False},
    "flash_attention": True,
}
LARGE = MODEL | {
    **{"layers": 36, "hidden": 1280, "heads": 20, "kv_heads": 20, "ffn_hidden": 5120},
    **{"vocabulary": 50432, "sequence_tokens": 1024, "gated_mlp": False, "biases": True},
    **{"learned_positions": True, "tied_embeddings": True, "dropout": True},
    "flash_attention": False,
}
# four stages whose next token waits for the last stage: a ring of forwards
RING = {
    **{"format": "pipejax-table", "version": 1, "name": "ring", "placement": [[0, 1, 2, 3]]},
    **{"pipe_of_microbatch": [0] * 12, "slots": dict.fromkeys("FBIWR", 1)},
    **{"stage_shares": [1.0] * 4, "forward_only": True},
    "rows": [[f"{stage}F{m}" for m in range(12)] for stage in range(4)],
    "rules": [f"0F{m + 3} <- 3F{m}" for m in range(9)],
}
SPLIT = "0F0,0F1,0F2,0B0,0W0,0F3,0BW1,0B2,0W2,0BW3\n1F0,1BW0,1F1,1B1,1W1,1F2,1BW2,1F3,1B3,1W3\n"
TITAN = "".join(
    f"[rank0]:2025-01-10 16:07:{6 + 10 * k},580 - root - INFO - step:  {k + 1}  loss: 12.9  "
    f"memory: 22.74GiB(28.73%)  tps: {tps}  mfu: 4.16%\n"
    for k, tps in enumerate((120, 304, 306))
)
LAYOUT = '[["embedding","decoder"],["decoder"],["decoder"],["decoder","loss"]]'


FIRST = {"place": 0, "near": 1e-3}


class Task(NamedTuple):
    """A question with its answer."""

    heading: str  # of the skill
    words: str  # for those in capitals, in their order
    key: str  # that the skill says to read
    value: object  # derived by hand, in the comment above the task
    options: str = ""
    place: int | None = None  # entry of a list
    near: float = 1e-9  # relative


STEP, TABLE = "How long does a step take?", "How long does a step of this table take?"
WEIGHTS, ACTIVATIONS = (
    f"How {text}?"
    for text in ("many parameters has an accelerator", "much memory do activations take")
)
PARAMETERS, KEPT = "memory_parts.parameters", "memory_parts.activations"
LAYERS, ROWS = "How are layers spread over stages?", "What run is in this log?"
LOG = "What does this log say about the model?"
TASKS = {
    # letters of PyTorch in 2024: B is the gradient of the input, BW the whole backward; by event loop
    "a table of 2024": Task(TABLE, "split.csv F=1,I=1,W=1", "makespan", 14.0),
    # F0 0-1, F1 1-2; stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7; stage 0: B0 4-6, B1 7-9
    "rows of an issue": Task(TABLE, "pasted.csv F=1,B=2", "makespan", 9.0),
    # 12 forwards, 3 to reach the last stage, and 3 that the ring holds up
    "decoding in a ring": Task(TABLE, "ring.json F=1", "makespan", 18.0),
    # W recomputes again: 16 times F, I, W and R twice, and 3 to reach the last stage
    "two recomputations": Task(
        STEP, "zb-h1 4 16 F=1,I=1,W=1,R=1", "makespan", 83.0, "--recompute-cells --recompute-again"
    ),
    # attention (2 h h + 2 h kv)/t, experts 8 x 3 h f / etp, 2 h of norms, 8 h of the router, V h/t
    "experts cut by tensor parallelism": Task(
        WEIGHTS, "1f1b 2 8 mixtral-8x7b h100 8 8", PARAMETERS, 2 * 2919497728, place=0
    ),
    # the same with t 2, e 4, and experts cut in 2
    "experts over replicas": Task(
        *(WEIGHTS, "1f1b 2 8 mixtral-8x7b h100 16 2", PARAMETERS, 2 * 3220307968),
        "--expert-parallel 4 --data-parallel 4",
        place=0,
    ),
    # a layer 12 h h/2 + (3 h + 4 h)/2 + 2 h + 4 h, 18 of them; V h/2 and 1024 h of positions: as a
    # public log of this layout prints it
    "parameters that a rank prints": Task(
        WEIGHTS, "1f1b 2 4 large.json a100 4 2", PARAMETERS, 2 * 210753280, place=0
    ),
    # the last rank: a copy of the embedding, and 2 h of the last norm
    "parameters of the last rank": Task(
        WEIGHTS, "1f1b 2 4 large.json a100 4 2", PARAMETERS, 2 * 209445120, place=1
    ),
    # F keeps c, I adds a - c, W frees a, along the row; c 0.537 GB, a 9.127, head 4.33 and 2.17
    "recomputation of split backwards": Task(
        *(ACTIVATIONS, "zb-h1 4 16 llama3-8b h100 16 full", KEPT, 47.35e9),
        **FIRST | {"place": 3},
    ),
    # 8 x 4 checkpoints of 2 x 65536 x 4096 B, and one layer whole: 9.127 - 0.537 GB
    "the layer at work": Task(
        *(ACTIVATIONS, "1f1b 8 16 llama3-8b h100 16 full", KEPT, 25.77e9),
        "--sequence 65536",
        **FIRST,
    ),
    # 4 in flight of 7 checkpoints (0.0671 GB) and a whole layer (1.141), and one layer at work
    "some layers recomputed": Task(
        *(ACTIVATIONS, "1f1b 4 16 llama3-8b h100 16 block:7", KEPT),
        4 * (7 * 0.0671e9 + 1.141e9) + 1.141e9 - 0.0671e9,
        **FIRST,
    ),
    # a server keeps weights alone: 10 layers of 70 billion parameters
    "a stage of a server": Task(
        "Does it fit in memory?",
        *("chunked-prefill 8 1 llama3-70b h100 1", "fits", True, "--slices 8"),
    ),
    # 30 layers, embedding and head on the first and last stage
    "layers that do not divide": Task(
        LAYERS, "1f1b 4 8 thirty.json h100 8", "layers_of_stages", [7, 8, 8, 7]
    ),
    # lists as Megatron-Bridge hands them over: Et|t|t|tL
    "a layout as lists": Task(
        *(LAYERS, "1f1b 4 4 four.json h100 4", "layers_of_stages", [1, 1, 1, 1]),
        f"--pipeline-layout '{LAYOUT}'",
    ),
    # published: 1.026e12 parameters; 2 bytes of each on one accelerator
    "parameters of a config": Task(
        *(WEIGHTS, "1f1b 1 1 kimi.json h100 1 1", PARAMETERS, 2 * 1.026e12),
        **FIRST,
    ),
    # num_key_value_heads of Megatron-DeepSpeed is what groups of queries are elsewhere
    "groups of queries in a log": Task(LOG, "deepspeed.log out.json", "kv_heads", 4),
    # zero_stage is its name for a split state of the optimizer
    "a split optimizer in a log": Task(ROWS, "deepspeed.log gpt-22b out.csv", "zero", "1"),
    # checkpoint_activations of 2020: every layer is recomputed
    "recomputation in an old log": Task(ROWS, "old.log gpt-22b out.csv", "recompute", "full"),
    # two steps of 4000.5 ms after the first
    "equal times in a log": Task(ROWS, "equal.log gpt-22b out.csv", "seconds", "4.0005"),
    # 16 x 8192 tokens over 8 accelerators at 304 and 306 tokens a second
    "a step of torchtitan": Task(
        *(ROWS, "titan.log llama3-8b out.csv", "seconds", (16384 / 304 + 16384 / 306) / 2),
        "--columns accelerators=8,tensor=1,pipeline=1,data=8,global_batch=16,microbatch_size=2,"
        "recompute=full",
        near=1e-5,
    ),
}
STEPS = [(1, 9100.5), (2, 4000.5), (3, 4000.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        f" iteration {k:8d}/ 100 | consumed samples: 64 | elapsed time per iteration (ms): {ms} | "
        "learning rate: 1.000E-04 | global batch size: 128 |"
        for k, ms in STEPS
    ]
    models = {"thirty": MODEL | {"layers": 30}, "four": MODEL | {"layers": 4}, "large": LARGE}
    for name, content in models.items():
        (folder / f"{name}.json").write_text(json.dumps({"name": name} | content))
    (folder / "ring.json").write_text(json.dumps(RING))
    (folder / "split.csv").write_text(SPLIT)
    (folder / "pasted.csv").write_text("0F0 0F1 . 0B0 . 0B1\n. 1F0 1B0 1F1 1B1 .\n")
    (folder / "titan.log").write_text(TITAN)
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
        called = next(
            name for name in sorted(COMMANDS, key=len, reverse=True) if line.startswith(f"{name} ")
        )
        if called == "init":
            continue
        prose = text.partition(line)[2].split("Read ")[1].split(". ")[0]
        for key in re.findall(r"`([a-z_.\[\]\d]+)`", prose):
            path = split_path(key.replace("[]", ""))
            assert inner_schema(read_schema(called), path) is not None, (heading, key)


def test_the_program_prints_it(call):
    assert call("--skill") == (0, TEXT, "")
    assert (SKILL.parents[1] / "skills" / "pipejax" / "SKILL.md").read_text() == TEXT
