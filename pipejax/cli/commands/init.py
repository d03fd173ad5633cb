"""`pipejax init`: a starter file for a case that no shipped example covers."""

import csv
import dataclasses
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.line import command_line
from pipejax.cli.options.option import options, parse_pairs
from pipejax.cli.options.scenario import command_line as command_of_scenario
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
    if kind == "rows":
        commands += _explain_command(out.path)
        if "system" not in text.partition("\n")[0].split(","):  # the log does not name it
            commands = [f"{command} --system SYSTEM" for command in commands]
    result = {"kind": kind, "used_by": commands[0]} | ({"notes": notes} if is_read else {})
    return Answer(result, [plain(f"  {note}") for note in notes], next=tuple(commands))


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
    from pipejax.costs.measured.megatron_log import read_log
    from pipejax.costs.measured.rows_file import RowReader, file_beside

    if model is None:
        raise ValueError(
            f"--from {','.join(paths)} needs --model: pipejax init model --from {paths[0]} writes "
            "the model of the log"
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


def _explain_command(path: Path) -> list[str]:
    """Return the command that explains the first measured row of a file; [] if no options say it.

    Software settings that the row does not state have the defaults of its stack.
    """
    from pipejax.analysis.step.step_time import row_workloads
    from pipejax.costs.measured.rows_file import file_beside, read_rows
    from pipejax.costs.model.launchers import launcher_defaults

    with path.open(encoding="utf-8", newline="") as file:
        cells = {name: cell for name, cell in next(csv.DictReader(file)).items() if cell}
    names = ("model", "system", "stack")
    files = {name: file_beside(path, cells[name]) for name in names if name in cells}
    with warnings.catch_warnings():  # the printed commands say what they assume
        warnings.simplefilter("ignore")
        rows = read_rows(path)
        workload, microbatches = row_workloads(rows)[0], int(rows.microbatches[0])
        workers, per_worker = int(rows.pipeline[0]), int(rows.stages_per_worker[0])
        system = load_system(files.get("system", COPIED["system"]))
        _, stack, defaults = launcher_defaults(
            None, workload.model, system, files.get("stack"), workers
        )
        unstated = {name: value for name, value in defaults.items() if name not in cells}
        scenario = pj.Scenario(
            str(rows.schedule[0]),
            num_workers=workers,
            num_microbatches=microbatches,
            options={"stages_per_worker": per_worker} if per_worker > 1 else {},
            costs=pj.costing.ModelCosts(
                dataclasses.replace(workload, **unstated), stack.on(system), stack=stack.name
            ),
            link=str(rows.link[0]) or "delay",
            files=files,
        )
        without = () if "system" in files else ("system",)
        try:
            return [command_of_scenario(scenario, "explain", without)]
        except ValueError:
            return []
