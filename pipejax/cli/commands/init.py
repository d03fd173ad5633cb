"""`pipejax init`: a file to begin with, which can be read as it is and says what its keys mean.

Models and systems are copies of those that come with pipejax, sources included.
"""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape

from pipejax.base.checks import one_of
from pipejax.cli.options.values import Text, parse_columns
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import TEMPLATE
from pipejax.cli.output.report import facts, plain
from pipejax.costs.model.model import load_model, read_model
from pipejax.costs.system.system import load_system, read_named

COSTS = """\
{
  "unit": "milliseconds",
  "F": 10.2,
  "B": 20.9,
  "message": {"latency": 0.01, "bytes": 33554432, "bandwidth": 2.5e10}
}
"""

SWEEP = """\
# A grid of points: `pipejax sweep run` evaluates it into a store, `sweep show` lists the best.
# A key takes a value, or a list of them: then the dataset has an axis for it.
title = "Llama-3 70B: schedule, microbatch size, recomputation and network"

# a name, a table ("mine.csv"), a folder of tables, "mine.py:build", or a name with options
schedules = ["1f1b", { name = "interleaved-1f1b", stages_per_worker = 2 }, "zb-h1"]
models = "llama3-70b"       # names, or paths of JSON files: `pipejax init model`
systems = ["h100", "b200"]  # likewise: `pipejax init system`

workers = 4                 # workers of a pipeline
minibatch = 32              # sequences per step of one pipeline
microbatch_size = [1, 2, 4] # sequences of a microbatch; or their number: microbatches = [8, 16]
tensor_parallel = 8         # accelerators of a worker
recompute = ["none", "full"]
link = "delay"              # or queued, blocking, rendezvous

# further keys, with what they are if left out:
# context_parallel = 1
# expert_parallel = 1
# data_parallel = 1
# zero = 0                  # what replicas split: 0 to 3
# precision = "bf16"
# dtype = "float64"
outputs = ["bubble_ratio", "tokens_per_second"]  # or tokens_per_second_per_gpu, and others

# fields of all systems, each with its unit as in a system's file
[system]
network.bandwidth_GB_per_s = { from = 10, to = 100, points = 4, scale = "log" }
"""


COSTS_TABLE = """\
stage,F_ms,B_ms,latency_us,bytes,bandwidth_GB_per_s
0,13.1,24.7,10,33554432,25
1,10.2,20.9,10,33554432,25
2,10.2,20.9,10,33554432,25
3,14.8,29.6,,,
"""

ROWS = """\
model,tensor,data,pipeline,stages_per_worker,microbatch_size,global_batch,recompute,zero,seconds
gpt3-175b,8,1,8,3,1,64,full,0,18.13
"""


class Template(NamedTuple):
    """A kind of file that can be begun."""

    file: str  # its name if none is given
    meanings: Mapping[str, str]  # of its keys, the most important ones first
    page: str  # of the documentation, which lists all keys
    used_by: str  # the command that reads it, with FILE in place of its name
    # makes its text from the name of the file and of what is copied
    text: Callable[[str, str], str]
    copied: str = ""  # what is copied if nothing else is asked for, or ""
    table: str = ""  # its text as CSV, or ""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of its file."""
        return (Path(self.file).suffix, *([".csv"] if self.table else []))


def _copy(folder: str, kind: str) -> Callable[[str, str], str]:
    """Copy a file of data under another name, with its source and where it is from."""

    def text(name: str, copied: str) -> str:
        data = read_named(folder, copied, kind)[0]
        begun = f"A copy of {data['name']}, to be changed. {data['source']}"
        return json.dumps({**data, "name": name, "source": begun}, indent=2) + "\n"

    return text


_RUN = "pipejax evaluate --schedule 1f1b --workers {} --microbatches 16"
_MODEL = "--model {} --system {} --minibatch 16 --tensor-parallel 8"

TEMPLATES: Mapping[str, Template] = {
    "costs": Template(
        "costs.json",
        {
            "unit": "of all times: seconds, milliseconds or microseconds",
            "F, B": "forward and backward of one microbatch on one stage; a number for all stages, "
            "or a list with one for each",
            "I, W": "the two halves of a backward that is split; half of B each if left out",
            "message": "from stage to stage: latency [time], and transmit [time] or bytes [B] and "
            "bandwidth [B/s]",
            "A, U": "gradient all-reduce and optimizer update of a stage; 0 if left out",
        },
        "Own costs",
        f"{_RUN.format(4)} --costs FILE",
        lambda name, copied: COSTS,
        table=COSTS_TABLE,
    ),
    "model": Template(
        "model.json",
        {
            "source": "where the numbers are from",
            "layers, hidden, heads, kv_heads": "sizes of the transformer [counts]",
            "ffn_hidden, gated_mlp": "width of the MLP, and whether it has a gate",
            "vocabulary, sequence_tokens": "entries, and tokens of a sequence",
            "bytes_per_element": "of an activation and a weight [B]",
            "optimizer_bytes_per_parameter": "of what the optimizer keeps [B]",
            "gradient_bytes": "of an accumulated gradient [B], 4 by Megatron's defaults; "
            "bytes_per_element if left out",
        },
        "Models",
        f"{_RUN.format(8)} {_MODEL.format('FILE', 'h100')}",
        _copy("models", "model"),
        "llama3-70b",
    ),
    "system": Template(
        "system.json",
        {
            "source": "where the numbers are from",
            "compute": "peak of one accelerator [TFLOP/s], share of it that products reach, time "
            "that a kernel takes at least",
            "memory": "capacity and reserve [GB], bandwidth [TB/s] and the share of it by size",
            "node": "accelerators of a node, and their links [GB/s each way, us]",
            "network": "links between nodes, of one accelerator [GB/s each way, us]",
            "collectives": "algorithms and latencies of all-reduce and all-gather",
            "host_link": "to the memory of the host, for offloads",
        },
        "Systems",
        f"{_RUN.format(8)} {_MODEL.format('llama3-70b', 'FILE')}",
        _copy("hardware", "system"),
        "h100",
    ),
    "sweep": Template(
        "sweep.toml",
        {"all keys": "the file explains them in comments"},
        "Sweeps",
        "pipejax sweep run FILE --out results.zarr",
        lambda name, copied: SWEEP,
    ),
    "rows": Template(
        "rows.csv",
        {
            "model": "name or file of what was trained",
            "tensor, data, pipeline": "degrees of parallelism; accelerators may stand for data",
            "global_batch": "sequences of a step of the whole job",
            "recompute, zero": "what is recomputed, and what replicas split",
            "seconds, memory_bytes": "measured: a step [s], and the fullest worker [B]",
        },
        "Measured runs",
        "pipejax validate FILE --system a100",
        lambda name, copied: ROWS,
    ),
}
READERS = {"model": load_model, "system": load_system}  # that check what is copied


def text_of(kind: str, out: Path, copied: str | None) -> str:
    """Return the text of a file to begin with."""
    template = TEMPLATES[kind]
    if copied is not None:
        READERS[kind](copied)
    if template.table and out.suffix == ".csv":
        return template.table
    return template.text(out.stem, copied or template.copied)


def init(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(TEMPLATES), help="What the file is to hold.")
    ],
    model: Text = None,
    system: Text = None,
    from_: Text = None,
    columns: Text = None,
    out: Annotated[Output, TEMPLATE] = NO_OUTPUT,
) -> Answer:
    """Write a file of costs, a model, a system, a sweep or measured rows to begin with.

    It can be read as it is. A model and rows may come from a file: `init model --from config.json`
    of Hugging Face, or `--from train.log` of Megatron, whose times make rows. Logs of torchtitan,
    DeepSpeed, NeMo, nanotron and Hugging Face make rows too, with `--columns` for their layout.

    Options:
      model: the one that a model's file is a copy of, llama3-70b if not given; of rows from a log
        the one that was trained.
      system: the one that a system's file is a copy of; h100 if not given.
      from_: of rows several logs, as a.log,b.log.
      columns: cells of every row that the log does not say, as tensor=2,pipeline=4.
      out: costs.json, model.json, system.json, sweep.toml or rows.csv if not given.

    Example:
      pipejax init model --from config.json --out ours.json
    """
    kind = one_of(kind, TEMPLATES, "what to begin")
    template = TEMPLATES[kind]
    is_read = from_ is not None
    for name, given, is_taken in (
        ("model", model, kind == ("rows" if is_read else "model")),
        ("system", system, kind == "system"),
        ("from", from_, kind in ("model", "rows")),
        ("columns", columns, kind == "rows" and is_read),
    ):
        if given is not None and not is_taken:
            what = f"{kind} --from" if is_read and name != "from" else kind
            raise ValueError(f"--{name} {given} does not go with {what}")
    if out.path is None:
        out.path = Path(template.file)
    out.check(TEMPLATE._replace(suffixes=template.suffixes))
    notes: list[str] = []
    if from_ is None:
        text = text_of(kind, out.path, {"model": model, "system": system}.get(kind))
    elif kind == "model":
        text, notes = _model_from(Path(from_), out.path.stem)
    else:
        text, notes = _rows_from(from_.split(","), model, columns or "", out.path)
    out.save_text(text)
    command = template.used_by.replace("FILE", str(out.path))
    said = [
        *([] if out.written is None else [plain(f"wrote {out.written}")]),
        *(plain(f"  {note}") for note in notes),
        facts((key, escape(meaning)) for key, meaning in template.meanings.items()),
        f"All keys are on the page {template.page} of the documentation. Try:",
        plain(f"  {command}"),
    ]
    result = {"kind": kind, **out.as_json(), "keys": template.meanings, "used_by": command}
    return Answer(result | ({"notes": notes} if is_read else {}), said)


def _model_from(path: Path, name: str) -> tuple[str, list[str]]:
    """Text of a model's file from a config.json or a log, and what it leaves open."""
    if path.suffix == ".json":
        from pipejax.costs.model.hugging_face import model_of_config

        content, notes = model_of_config(path)
    else:
        from pipejax.costs.measured.megatron_log import MegatronLog

        log = MegatronLog.read(path)
        content, notes = log.model(), log.notes()
    content = {"name": name, **content}
    read_model(content, str(path))
    return json.dumps(content, indent=2) + "\n", notes


def _rows_from(
    paths: Sequence[str], model: str | None, columns: str, out: Path
) -> tuple[str, list[str]]:
    """Text of a table of measured rows from logs, each read as `validate` reads it."""
    from pipejax.costs.measured.measured_rows import COLUMNS
    from pipejax.costs.measured.megatron_log import read_log
    from pipejax.costs.measured.rows_file import RowReader, file_beside

    if model is None:
        raise ValueError(
            f"--from {','.join(paths)} needs --model: pipejax init model --from {paths[0]} writes "
            "the one of the log"
        )
    trained = load_model(file_beside(out, model))
    cells = parse_columns(columns, "tensor=2,pipeline=4") if columns else {}
    for name in cells:
        one_of(name, COLUMNS, "--columns")
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    for path in map(str.strip, paths):
        records, log_notes = read_log(path).rows(model, trained, cells)
        notes += log_notes
        for record in records:
            row = {name: str(value) for name, value in record.items()}
            try:
                RowReader(out).read(len(rows) + 1, row)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, {n: "" for row in rows for n in row}, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue(), notes
