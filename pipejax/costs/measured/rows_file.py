"""Reader of measured runs from a CSV file, one run per row.

Rows are read one by one, so that a mistake is named with its row, column and value.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import (
    MAX_COUNT,
    check_types,
    legal_divisors,
    resolve_choice,
    resolve_name,
    wrong,
)
from pipejax.base.data_files import (
    positive_cell,
    read_each,
    relative_variance,
    share_cell,
    whole_cell,
)
from pipejax.base.progress import Notice
from pipejax.costs.measured.measured_rows import (
    COLUMNS,
    EXPERT_FIELDS,
    MEASURED,
    MODEL_FIELDS,
    MODEL_SWITCHES,
    OF_MODEL,
    OF_SYSTEM,
    OPS,
    STEP,
    TEXTS,
    MeasuredRows,
)
from pipejax.costs.model.model import (
    MixtureOfExperts,
    Model,
    check_recompute,
    check_shape,
    load_model,
    parse_recompute,
)
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import AS_THE_SYSTEM, Stack, load_stack
from pipejax.costs.model.workload_fields import DISPATCHERS, WORKLOAD_FIELDS
from pipejax.schedules.table.links import LINKS

PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
# below 16 bits nobody trains with separate kernels of attention, or with dropout
NARROW = {"flash_attention": "1", "dropout": "0"}
GPT = "gpt-22b"  # rows that name no model are of this kind, in sizes of their own
GPT_VOCABULARY = 51200  # as Megatron pads it
DEFAULT_STACK = "that of the system's file"
NEEDED = ("layers", "hidden", "heads", "sequence")  # of sizes, where no model is named


class WholeColumn(NamedTuple):
    """Range of a column of whole numbers."""

    default: int | None = 1  # None where it must be given
    least: int = 1  # smallest number
    largest: int = MAX_COUNT  # largest number


WHOLE: Mapping[str, WholeColumn] = {
    "tensor": WholeColumn(),
    "context": WholeColumn(),
    "expert": WholeColumn(),
    "expert_tensor": WholeColumn(0, 0),
    "data": WholeColumn(),
    "pipeline": WholeColumn(),
    "stages_per_worker": WholeColumn(),
    "microbatch_size": WholeColumn(),
    "global_batch": WholeColumn(None),
    "zero": WholeColumn(0, 0, 3),
    "embedding_units": WholeColumn(0, 0),
    "loss_units": WholeColumn(0, 0),
    "accelerators_per_node": WholeColumn(OF_SYSTEM),
}


def read_rows(path: str | Path, stack: str | Path | None = None) -> MeasuredRows:
    r"""Read measured runs from a CSV file.

    A row names a model, or says its sizes and is then a GPT; next to a named model, sizes change
    those of the model. What is not given takes a default, which a warning says: degrees and sizes
    1, a `schedule` of 1f1b (with several stages per worker interleaved-1f1b), `recompute` none,
    `precision` bf16, `zero` 0; `sequence_parallel` is 1 where t > 1 and not all is recomputed;
    exchanges of replicas wait (`overlap` 0), as everywhere. A row with an `op` is of a profile: its
    seconds are those of F, B, I or W of one microbatch on a `stage` (0), and it needs no global
    batch. Below 16 bits attention is fused and has no dropout.

    Args:
      path: the file; its columns are `COLUMNS`, in any order.
      stack: name or file of the software that all rows ran on; the one that each row names if
        None. What it says of exchanges holds where a row has no cell of its own.

    Returns:
      The rows.

    Raises:
      ValueError: if the file has a column that is unknown, or a cell or a row that cannot be; the
        message names the row, the column, the value and what is allowed.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile, warnings
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
      >>> _ = path.write_text("model,tensor,pipeline,global_batch,seconds\ngpt-22b,8,2,4,0.6")
      >>> with warnings.catch_warnings(action="ignore"):  # of what is not given
      ...     rows = read_rows(path)
      >>> rows.microbatches, rows.accelerators, rows.seconds
      (array([4]), array([16]), array([0.6]))
    """
    check_types(path=(path, str, Path), stack=(stack, str, Path, type(None)))
    reader = RowReader(Path(path), stack)
    rows = read_each(Path(path), COLUMNS, reader.read)
    reader.say_defaults()
    columns: dict[str, NumpyArray] = {
        name: np.array([row[name] for row in rows]) for name in rows[0]
    }
    return MeasuredRows(models=tuple(reader.models.values()), **columns)


def read_predictions(path: str | Path, count: int) -> dict[str, NumpyArray]:
    """Read a simulator's predictions: columns `row`, `seconds` and `memory_bytes`."""
    columns = {name: np.full(count, np.nan) for name in MEASURED}
    seen: set[int] = set()

    def read(_: int, cells: dict[str, str]) -> None:
        row = whole_cell(cells.get("row", ""), "row", 1, count)
        if row in seen:
            raise ValueError(f"row {row} is predicted twice")
        seen.add(row)
        for name in MEASURED:
            columns[name][row - 1] = positive_cell(cells, name)

    read_each(Path(path), ("row", *MEASURED), read)
    return columns


class RowReader:
    """Reader of rows, which collects the models and defaults that rows share."""

    def __init__(self, path: Path, stack: str | Path | None = None) -> None:
        self.path = path
        self.models: dict[tuple[str, ...], Model] = {}
        self.stack = "" if stack is None else str(stack)
        self.stacks: dict[str, Stack] = {"": AS_THE_SYSTEM}
        self.defaults: dict[str, object] = {}

    def say_defaults(self) -> None:
        """Warn in one line which cells are missing, and which values stand in for them."""
        if self.defaults:
            listed = ", ".join(f"{name} = {value}" for name, value in self.defaults.items())
            warnings.warn(f"{self.path}: not given in all rows, taken as {listed}", Notice, 5)

    def read(self, number: int, cells: dict[str, str]) -> dict[str, Any]:
        """Read one row into the columns of `MeasuredRows`."""
        columns: dict[str, Any] = {}
        for name, column in WHOLE.items():
            columns[name] = self._count(cells, name, column)
        columns["model"], model = self._model(cells)
        if "expert_tensor" not in cells and model.moe is not None and columns["tensor"] > 1:
            self.defaults["expert_tensor"] = "tensor"
        columns |= self._names(cells, columns)
        _check_spread(columns, model, cells)
        columns |= _profiled(columns, cells)
        measured = {name: positive_cell(cells, name) for name in MEASURED}
        is_over = bool(whole_cell(cells.get("out_of_memory", "0"), "out_of_memory", 0, 1))
        if is_over != all(map(math.isnan, measured.values())):
            raise ValueError(
                f"out_of_memory is 1, but {next(iter(set(MEASURED) & set(cells)))} is given"
                if is_over
                else "seconds is missing, and so is memory_bytes: give one"
            )
        measured["network_bandwidth"] = (
            positive_cell(cells, "network_bandwidth") if "network_bandwidth" in cells else 0.0
        )
        measured["out_of_memory"] = is_over
        columns["variance"] = relative_variance(cells, measured["seconds"])
        texts = {name: cells.get(name, "") for name in ("system", *TEXTS)}
        return columns | measured | texts | {"row": number, "file": str(self.path)}

    def _count(self, cells: dict[str, str], name: str, column: WholeColumn) -> int:
        """Read a whole number of a row; note its default if the cell is missing."""
        if name in cells:
            return whole_cell(cells[name], name, column.least, column.largest)
        if name == "data" and "accelerators" in cells:
            return self._replicas(cells)
        if name == "global_batch" and cells.get("op", STEP) != STEP:
            return 0  # of any step
        if column.default is None:
            raise ValueError(f"{name} is missing")
        if name != "expert_tensor":  # only for models with experts: noted with the model
            is_system = name == "accelerators_per_node"
            self.defaults[name] = "of the system" if is_system else column.default
        return column.default

    def _replicas(self, cells: dict[str, str]) -> int:
        """Return the number of replicas, where only accelerators are given."""
        total = whole_cell(cells["accelerators"], "accelerators", 1, MAX_COUNT)
        degrees = ("tensor", "context", "pipeline")
        needed = math.prod(whole_cell(cells.get(name, "1"), name, 1, MAX_COUNT) for name in degrees)
        if total % needed:
            raise ValueError(
                f"accelerators must be a multiple of tensor x context x pipeline, {needed}, "
                f"got {total}"
            )
        return total // needed

    def _names(self, cells: dict[str, str], counts: dict[str, Any]) -> dict[str, Any]:
        """Read the columns of a row that hold names, and its fields of software."""
        default_schedule = "interleaved-1f1b" if counts["stages_per_worker"] > 1 else "1f1b"
        shown = "1f1b (interleaved-1f1b where stages_per_worker > 1)"
        schedule = self._cell(cells, "schedule", default_schedule, shown)
        recompute = check_recompute(self._cell(cells, "recompute", "none"))
        is_split = counts["tensor"] > 1 and not parse_recompute(recompute).layers
        shown = "1 where tensor > 1 and no whole layers are recomputed, else 0"
        parallel = self._cell(cells, "sequence_parallel", str(int(is_split)), shown)
        link, layout = cells.get("link", ""), cells.get("pipeline_layout", "")
        return {
            "pipeline_layout": str(PipelineLayout.parse(layout)) if layout else "",
            "link": resolve_choice(link, LINKS, "link") if link else "",
            "schedule": resolve_name(schedule, schedules.names(), "schedule"),
            "recompute": recompute,
            "precision": resolve_choice(
                self._cell(cells, "precision", "bf16"), PRECISIONS, "precision"
            ),
            "sequence_parallel": whole_cell(parallel, "sequence_parallel", 0, 1),
            **self._software_fields(cells),
        }

    def _software_fields(self, cells: dict[str, str]) -> dict[str, Any]:
        """Return fields of exchanges and of the host: of the row, of its stack, or by default."""
        name = self.stack or file_beside(self.path, self._cell(cells, "stack", "", DEFAULT_STACK))
        if name not in self.stacks:
            self.stacks[name] = load_stack(name)
        stack = self.stacks[name]
        defaults = {  # value, and text in a warning
            "overlap": (0.0, "0"),
            "expert_overlap": (0.0, "0"),
            "dispatcher": (DISPATCHERS[0], DISPATCHERS[0]),
            "contiguous_context": (False, "0"),
            "graphs": (0.0, "0"),
            "optimizer_offload": (0.0, "0"),
            "attention_precision": ("", "16 bits"),
            "head_precision": ("", "16 bits"),
        }
        fields: dict[str, Any] = {"stack": name}
        for key, (value, shown) in defaults.items():
            if key in cells:
                fields[key] = _workload_cell(cells, key)
            elif key in stack.workload:
                fields[key] = stack.workload[key]
            else:
                fields[key] = value
                if key == "overlap":  # the other defaults mean that a feature is not used
                    self.defaults[key] = shown
        return fields

    def _cell(self, cells: dict[str, str], name: str, default: str, shown: str = "") -> str:
        if name not in cells:
            self.defaults[name] = shown or default
        return cells.get(name, default)

    def _model(self, cells: dict[str, str]) -> tuple[int, Model]:
        """Return the model of a row and its index; rows with equal sizes share one."""
        is_narrow = cells.get("precision", "").lower() in PRECISIONS[1:]
        cells = (NARROW if is_narrow else {}) | cells
        key = tuple(cells.get(name, "") for name in ("model", *OF_MODEL))
        if key not in self.models:
            self.models[key] = self._new_model(cells)
        self._say_gpt(cells)
        return list(self.models).index(key), self.models[key]

    def _say_gpt(self, cells: dict[str, str]) -> None:
        if "model" in cells:
            return
        shown = {"kv_heads": "heads", "ffn": "4 hidden", "vocabulary": GPT_VOCABULARY}
        self.defaults |= {name: value for name, value in shown.items() if name not in cells}

    def _new_model(self, cells: dict[str, str]) -> Model:
        """Make the model of a row: a named model with changed sizes, or a GPT."""
        sizes = {name: _size(cells, name) for name in OF_MODEL if name in cells}
        changes: dict[str, Any] = {}
        if "model" in cells:
            model = load_model(file_beside(self.path, cells["model"]))
            if "heads" in sizes and model.kv_heads == model.heads:
                changes["kv_heads"] = sizes["heads"]
        else:
            model = load_model(GPT)
            for name in NEEDED:
                if name not in sizes:
                    raise ValueError(f"{name} is missing: give it, or a model")
            changes = {
                "name": "GPT",
                "source": str(self.path),
                "kv_heads": sizes["heads"],
                "ffn_hidden": 4 * sizes["hidden"],
                "vocabulary": GPT_VOCABULARY,
            }
        changes |= {MODEL_FIELDS[name]: sizes[name] for name in MODEL_FIELDS if name in sizes}
        changes |= {name: bool(sizes[name]) for name in MODEL_SWITCHES if name in sizes}
        model = dataclasses.replace(model, **changes)
        complete = dataclasses.replace(model, moe=_experts(model, sizes))
        check_shape(complete, "model")
        return complete


def _workload_cell(cells: Mapping[str, str], name: str) -> Any:
    """Read a cell of a field of a workload: a share, a switch or a name."""
    field = WORKLOAD_FIELDS[name]
    if field.kind == "name":
        return resolve_name(cells[name], field.names, name)
    if field.kind == "flag":
        return bool(whole_cell(cells[name], name, 0, 1))
    return share_cell(cells, name)


def _profiled(columns: dict[str, Any], cells: dict[str, str]) -> dict[str, Any]:
    """Read the op and stage of a profile row; its global batch is the smallest that fits."""
    op = resolve_choice(cells.get("op", STEP), (STEP, *OPS), "op")
    stages = columns["pipeline"] * columns["stages_per_worker"]
    stage = whole_cell(cells.get("stage", "0"), "stage", 0, stages - 1)
    if op == STEP and "stage" in cells:
        raise ValueError(f"stage is of an op, got stage {stage} of a step")
    smallest = columns["data"] * columns["microbatch_size"] * columns["pipeline"]
    return {"op": op, "stage": stage, "global_batch": columns["global_batch"] or smallest}


def _experts(model: Model, sizes: Mapping[str, float]) -> MixtureOfExperts | None:
    """Return the experts of a row: the model's with changes, or new ones as wide as its MLP."""
    changes: dict[str, Any] = {name: sizes[name] for name in EXPERT_FIELDS if name in sizes}
    if not changes or (model.moe is None and not sizes.get("experts")):
        return model.moe
    if model.moe is not None:
        return dataclasses.replace(model.moe, **changes)
    return MixtureOfExperts(**{"top_k": 1, **changes}, expert_hidden=model.ffn_hidden)


def file_beside(path: Path, name: str) -> str:
    """Return the path of a file by name; if it does not exist, the path beside the rows."""
    is_elsewhere = name.endswith(".json") and not Path(name).exists()
    return str(path.parent / name) if is_elsewhere else name


def _size(cells: Mapping[str, str], name: str) -> float:
    if name == "capacity_factor":
        return positive_cell(cells, name)
    least = name not in ("vocabulary", *EXPERT_FIELDS, *MODEL_SWITCHES)
    return whole_cell(cells[name], name, int(least), 1 if name in MODEL_SWITCHES else MAX_COUNT)


def _check_spread(columns: dict[str, Any], model: Model, cells: dict[str, str]) -> None:
    """Check the number of accelerators against the degrees, and that all numbers divide."""
    per_stage = columns["tensor"] * columns["context"] * columns["data"]
    if "accelerators" in cells:
        total = per_stage * columns["pipeline"]
        if whole_cell(cells["accelerators"], "accelerators", 1, MAX_COUNT) != total:
            raise ValueError(
                f"accelerators must be tensor x context x data x pipeline, {total}, "
                f"got {cells['accelerators']}"
            )
    at_once = columns["data"] * columns["microbatch_size"]
    if columns["global_batch"] % at_once:
        raise ValueError(
            f"global_batch must be a multiple of data x microbatch_size, {at_once}, "
            f"got {columns['global_batch']}"
        )
    stages = columns["pipeline"] * columns["stages_per_worker"]
    units = model.layers + columns["embedding_units"] + columns["loss_units"]
    if layout := columns["pipeline_layout"]:
        if units > model.layers:
            raise ValueError("pipeline_layout does not go with embedding_units and loss_units")
        PipelineLayout.parse(layout).check(model, stages)
    elif units < stages:
        raise ValueError(
            f"pipeline x stages_per_worker must be at most the {units} layers, got {stages}"
        )
    split = (columns["expert_tensor"] or columns["tensor"]) if model.moe else 1
    columns = columns | {"expert_tensor": split}
    divided: list[tuple[str, Any, str]] = [
        ("tensor", model.heads, "heads"),
        ("context", model.sequence, "sequence"),
        ("expert", per_stage, "tensor x context x data"),
        ("expert", 0 if model.moe is None else model.moe.experts, "experts"),
        ("expert_tensor", per_stage // columns["expert"], "tensor x context x data / expert"),
    ]
    for name, total, what in divided:
        if total % columns[name]:
            legal = legal_divisors(total, columns[name])
            raise ValueError(f"{name} must divide {what}, {total}: {legal}, got {columns[name]}")
    if columns["expert"] > 1 and model.moe is None:
        raise wrong("expert", f"must be 1 for a model without experts, got {columns['expert']}")
