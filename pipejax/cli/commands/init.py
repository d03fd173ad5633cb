"""`pipejax init`: a starter file for a case that no shipped example covers."""

import csv
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from pipejax.base.checks import resolve_choice
from pipejax.cli.options.line import command_line
from pipejax.cli.options.option import options, parse_pairs
from pipejax.cli.options.scenario import explain_commands
from pipejax.cli.output.files import NO_OUTPUT, TEMPLATE, Output
from pipejax.cli.output.report import Answer, plain
from pipejax.costs.model.model import load_model, read_model
from pipejax.costs.system.system import load_system, read_named

_RUN = (
    "pipejax evaluate --schedule 1f1b --workers 8 --microbatches 16 --model {} --system {} "
    "--minibatch 16 --tensor-parallel 8"
)
USED_BY = {  # kinds of files, and commands that read them
    "model": _RUN.format("FILE", "h100"),
    "system": _RUN.format("llama3-70b", "FILE"),
    "rows": "pipejax validate FILE",
}
COPIED = {"model": "llama3-70b", "system": "h100"}


@options
def init(
    kind: Annotated[str, Parameter(name="|".join(USED_BY), help="kind of the file")],
    /,
    *,
    model: str | None = None,
    system: str | None = None,
    from_: str | None = None,
    columns: str | None = None,
    out: Annotated[Output, TEMPLATE] = NO_OUTPUT,
) -> Answer:
    """Write a file of a model, a system or measured rows to begin with.

    It can be read as it is. A model may come from a file: `init model --from config.json` of
    Hugging Face, or `--from train.log` of Megatron, whose times make rows. Logs of torchtitan,
    DeepSpeed, NeMo, nanotron and Hugging Face make rows too, with `--columns` for their layout.
    """
    kind = resolve_choice(kind, USED_BY, "what to begin")
    is_read = from_ is not None
    if kind == "rows" and not is_read:
        raise ValueError("init rows needs --from: a log, or several as a.log,b.log")
    legal = {"model": ["from"] if is_read else ["from", "model"], "system": ["system"]}.get(kind)
    values = {"model": model, "system": system, "from": from_, "columns": columns}
    for name, value in values.items():
        if value is not None and legal is not None and name not in legal:
            other = f"{kind} --from" if is_read and name != "from" else kind
            raise ValueError(f"--{name} {value} does not go with {other}")
    suffix = ".csv" if kind == "rows" else ".json"
    if out.path is None:
        out.path = Path(f"{kind}{suffix}")
    out.check(TEMPLATE._replace(suffixes=(suffix,)))
    notes: list[str] = []
    if from_ is None:
        text = _copy(kind, model or system or COPIED[kind], out.path.stem)
    elif kind == "model":
        text, notes = _model_from(Path(from_), out.path.stem)
    else:
        text, notes = _rows_from(from_.split(","), model, system, columns or "", out.path)
    out.save_text(text)
    commands = [USED_BY[kind].replace("FILE", str(out.path))]
    if kind == "model" and from_ is not None and not from_.endswith(".json"):
        commands = [command_line("init rows", {"from_": from_, "model": str(out.path)})]
    result = {"kind": kind, "used_by": commands[0]} | ({"notes": notes} if is_read else {})
    view = [plain(f"  {note}") for note in notes]
    if kind == "rows" and "system" not in text.partition("\n")[0].split(","):
        result["used_by"] = f"{commands.pop()} --system SYSTEM"
        ask = "the log does not say SYSTEM, one of `pipejax schedules --systems`; then"
        view.append(plain(f"{ask}: {result['used_by']}"))
    elif kind == "rows" and out.written:
        commands += _explanation(out.written)
    return Answer(result, view, next=tuple(commands))


def _explanation(path: Path) -> tuple[str, ...]:
    """Return the command that explains the last run of a file of measured rows, if options can."""
    from pipejax.costs.measured.rows_file import read_rows

    with warnings.catch_warnings():  # `validate` says which values it assumes
        warnings.simplefilter("ignore")
        rows = read_rows(path)
        return explain_commands(rows.take(np.array([len(rows) - 1])), None)


def _copy(kind: str, original: str, name: str) -> str:
    """Return the text of a model's or system's file under another name, which its source states."""
    load, folder = {"model": (load_model, "models"), "system": (load_system, "hardware")}[kind]
    load(original)  # checks its values
    data = read_named(folder, original, kind)[0]
    source = f"A copy of {data['name']}, to be changed. {data['source']}"
    return json.dumps({**data, "name": name, "source": source}, indent=2) + "\n"


def _model_from(path: Path, name: str) -> tuple[str, list[str]]:
    """Return the text of a model's file from a config.json or a log, with notes on its gaps."""
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
    paths: Sequence[str], model: str | None, system: str | None, columns: str, out: Path
) -> tuple[str, list[str]]:
    """Return the text of a table of measured rows from logs, and notes on their gaps."""
    from pipejax.base.file_fields import read_cell
    from pipejax.costs.measured.measured_rows import COLUMNS
    from pipejax.costs.measured.megatron_log import MegatronLog, read_log
    from pipejax.costs.measured.rows_file import RowReader, file_beside

    if model is None:
        MegatronLog.read(paths[0])  # an error if the log says no sizes of a model
        raise ValueError(
            f"--from {','.join(paths)} needs --model; write that of the log by `pipejax init model "
            f"--from {paths[0]}`"
        )
    trained_model = load_model(file_beside(out, model))
    cells = parse_pairs(columns, "--columns must be as tensor=2,pipeline=4") if columns else {}
    for name in cells:
        resolve_choice(name, COLUMNS, "--columns")
    if system is not None:
        if "system" in cells:
            raise ValueError("--system and --columns system=.. say the same: give one")
        load_system(file_beside(out, system))
        cells["system"] = system
    rows: list[dict[str, str]] = []
    notes: list[str] = []
    for path in map(str.strip, paths):
        records, log_notes = read_log(path).rows(model, trained_model, cells)
        notes += log_notes
        for record in records:
            row = {name: str(value) for name, value in record.items()}
            try:  # as `validate` reads it
                values = {name: read_cell(COLUMNS[name].kind, row[name], name) for name in row}
                RowReader(out).read(len(rows) + 1, values)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, {n: "" for row in rows for n in row}, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue(), notes
