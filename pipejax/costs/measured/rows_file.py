"""Reader of measured training runs from a CSV file with a run per row.

Rows are read one by one, so that a mistake is named with its row, column and value.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import check_types, legal_divisors, whole_number, wrong
from pipejax.base.file_fields import FileField, read_cells, whole, with_defaults
from pipejax.base.progress import Notice
from pipejax.costs.measured.measured_rows import (
    BANDWIDTHS,
    COLUMNS,
    COUNTS,
    MEASURED,
    PRECISIONS,
    SIZES,
    STEP,
    MeasuredRows,
    relative_variance,
)
from pipejax.costs.model.model import MixtureOfExperts, Model, check_shape, load_model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import AS_THE_SYSTEM, OF_WORKLOAD, Stack, fields_for, load_stack
from pipejax.costs.model.workload import Workload
from pipejax.costs.model.workload_fields import parse_recompute

# defaults of rows below 16 bits: such runs have fused attention and no dropout
NARROW = {"flash_attention": True, "dropout": False}
GPT = "gpt-22b"  # a row without a model is this model, with the sizes of the row
GPT_VOCABULARY = 51200  # as Megatron pads it
NO_STACK = "kernels run at the system's rates, and no communication overlaps with compute"
DEFAULT_TEXTS = {
    "accelerators_per_node": "as in the system",
    "embedding_units": "0 (the embedding counts as no layer)",
    "loss_units": "0 (the head counts as no layer)",
}
NEEDED_SIZES = ("layers", "hidden", "heads", "sequence")  # required without a model
TEXTS = ("system", "group", "release", "source")
_SOFTWARE = {field.name: field.default for field in dataclasses.fields(Workload)}


def read_rows(path: str | Path, stack: str | Path | None = None) -> MeasuredRows:
    r"""Read measured runs from a CSV file.

    A row names a model, or gives the sizes of a GPT. If a row has both, its sizes replace those of
    the model. A missing cell takes a default, which a warning lists. A row with an `op` comes from
    a profile: its seconds are the time of F, B, I or W for one microbatch on a `stage`.

    Args:
      path: the file; its columns are `COLUMNS`, in any order.
      stack: name or file of the software stack of all rows; if None, each row names its stack. The
        stack's settings of exchanges apply if a row has no cell for them.

    Returns:
      The rows.

    Raises:
      ValueError: if a column is unknown, or a cell or a row is wrong; the message names the row,
        the column, the value and what is allowed.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile, warnings
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
      >>> _ = path.write_text("model,tensor,pipeline,global_batch,seconds\ngpt-22b,8,2,4,0.6")
      >>> with warnings.catch_warnings(action="ignore"):  # warnings about defaults
      ...     rows = read_rows(path)
      >>> rows.microbatches, rows.accelerators, rows.seconds
      (array([4]), array([16]), array([0.6]))
    """
    check_types(path=(path, str, Path), stack=(stack, str, Path, type(None)))
    reader = RowReader(Path(path), stack)
    rows = read_cells(Path(path), COLUMNS, reader.read)
    reader.warn_of_defaults()
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return MeasuredRows(tuple(reader.models.values()), columns)


def read_predictions(path: str | Path, count: int) -> dict[str, NumpyArray]:
    """Read a simulator's CSV of predictions; return {"seconds" or "memory_bytes": (count)}."""
    # The column `row` has the number of the measured row, from 1. No prediction is NaN.
    fields = {"row": FileField(whole(1, count)), **MEASURED}
    predictions = read_cells(Path(path), fields, lambda _, cells: with_defaults(fields, cells))
    columns = {name: np.full(count, np.nan) for name in MEASURED}
    predicted_rows: set[int] = set()
    for number, values in enumerate(predictions, 1):
        row = values["row"]
        if row in predicted_rows:
            raise ValueError(f"{path}, row {number}: row {row} is predicted twice")
        predicted_rows.add(row)
        for name, column in columns.items():
            column[row - 1] = values[name]
    return columns


class RowReader:
    """Reader of a file's rows, with the models that rows share and the defaults that it used."""

    def __init__(self, path: Path, stack: str | Path | None = None) -> None:
        self.path = path
        self.models: dict[tuple[Any, ...], Model] = {}
        self.stack = "" if stack is None else str(stack)
        self.stacks: dict[str, Stack] = {"": AS_THE_SYSTEM}
        self.defaults: dict[str, object] = {}
        self.without_stack: list[int] = []  # numbers of rows that name no stack

    def warn_of_defaults(self) -> None:
        """Warn about rows without a software stack, and about the defaults of missing cells."""
        if self.without_stack:
            count, first = len(self.without_stack), self.without_stack[0]
            warnings.warn(
                f"{self.path}: rows without a software stack: {count} (first: row {first}); then "
                f"{NO_STACK}; add a column stack, or --stack, see `pipejax schedules --stacks`",
                Notice,
                5,
            )
        if self.defaults:
            listed = "; ".join(f"{name} = {value}" for name, value in self.defaults.items())
            warnings.warn(f"{self.path}: values assumed where a row has none: {listed}", Notice, 5)

    def read(self, number: int, cells: dict[str, Any]) -> dict[str, Any]:
        """Convert the cells of row `number`, from 1, to a value for each column, with defaults."""
        columns: dict[str, Any] = {name: self._count(cells, name) for name in COUNTS}
        stack_name = self.stack or file_beside(self.path, cells.get("stack", ""))
        if not stack_name:
            self.without_stack.append(number)
        if stack_name not in self.stacks:
            self.stacks[stack_name] = load_stack(stack_name)
        stack = self.stacks[stack_name]
        if stack.unfused:
            cells = {"unfused": stack.unfused, **cells}
        columns["model"], model = self._model(cells)
        columns["model_file"] = file_beside(self.path, cells.get("model", ""))
        if "expert_tensor" not in cells and model.moe is not None and columns["tensor"] > 1:
            self.defaults["expert_tensor"] = "tensor"
        columns |= self._text_columns(cells, columns) | {"stack": stack_name}
        columns |= self._software(cells, fields_for(model, stack.workload))
        _check_degrees(columns, model, cells)
        columns |= _profiled_op(columns, cells)
        names = (*MEASURED, *BANDWIDTHS, "out_of_memory", "steps_overlap", *TEXTS)
        columns |= {name: cells.get(name, COLUMNS[name].default) for name in names}
        measured = [name for name in MEASURED if name in cells]
        if columns["out_of_memory"] and measured:
            raise ValueError(f"out_of_memory is 1, but {measured[0]} is given")
        if not columns["out_of_memory"] and not measured:
            raise ValueError("seconds is missing, and so is memory_bytes: give one")
        columns["variance"] = relative_variance(cells, columns["seconds"])
        return columns | {"row": number, "file": str(self.path)}

    def _value(
        self, cells: dict[str, Any], name: str, default: Any, default_text: str | None = None
    ) -> Any:
        """Return a cell of a row, or its default, which a warning then lists as `default_text`."""
        if name not in cells:
            self.defaults[name] = default if default_text is None else default_text
        return cells.get(name, default)

    def _count(self, cells: dict[str, Any], name: str) -> int:
        """Return the whole number in a row's column `name`, or its default."""
        default = COUNTS[name].default
        if name in cells or name == "expert_tensor":  # `read` notes its default, for experts only
            return cells.get(name, default)
        if name == "data" and "accelerators" in cells:
            return self._replicas(cells)
        if name == "global_batch":
            if cells.get("op", STEP) == STEP:
                raise ValueError(f"{name} is missing")
            return 0  # a row of a single op: `_profiled_op` replaces it
        return self._value(cells, name, default, DEFAULT_TEXTS.get(name))

    def _replicas(self, cells: dict[str, Any]) -> int:
        """Compute a row's number of data-parallel replicas from its number of accelerators."""
        total = cells["accelerators"]
        per_replica = math.prod(cells.get(name, 1) for name in ("tensor", "context", "pipeline"))
        if total % per_replica:
            raise ValueError(
                f"accelerators must be a multiple of tensor x context x pipeline, {per_replica}, "
                f"got {total}"
            )
        return total // per_replica

    def _text_columns(self, cells: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of schedule, layout, link, recomputation, precision and others."""
        columns = {name: cells.get(name, "") for name in ("pipeline_layout", "link")}
        schedule = "interleaved-1f1b" if counts["stages_per_worker"] > 1 else "1f1b"
        rule = "1f1b (interleaved-1f1b where stages_per_worker > 1)"
        columns["schedule"] = self._value(cells, "schedule", schedule, rule)
        for name in ("recompute", "precision"):
            columns[name] = self._value(cells, name, COLUMNS[name].default)
        is_split = counts["tensor"] > 1 and not parse_recompute(columns["recompute"]).layers
        rule = "1 where tensor > 1 and no whole layers are recomputed, else 0"
        columns["sequence_parallel"] = self._value(cells, "sequence_parallel", int(is_split), rule)
        return columns

    def _software(self, cells: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """Return workload fields that depend on software: from the row, its stack, or defaults."""
        values = defaults | cells
        if "overlap" not in values:
            self.defaults["overlap"] = 0  # other features are off by default, without a warning
        return {name: values.get(name, _SOFTWARE[name]) for name in OF_WORKLOAD}

    def _model(self, cells: dict[str, Any]) -> tuple[int, Model]:
        """Return (index, model) of a row; rows with the same name and sizes share a model."""
        if cells.get("precision", PRECISIONS[0]) != PRECISIONS[0]:  # below 16 bits
            cells = {**NARROW, **cells}
        key = tuple(cells.get(name) for name in ("model", *SIZES))
        if key not in self.models:
            self.models[key] = self._new_model(cells)
        if "model" not in cells:
            defaults = {"kv_heads": "heads", "ffn": "4 hidden", "vocabulary": GPT_VOCABULARY}
            self.defaults |= {name: text for name, text in defaults.items() if name not in cells}
        return list(self.models).index(key), self.models[key]

    def _new_model(self, cells: dict[str, Any]) -> Model:
        """Build a row's model: a named model with changed sizes, or a GPT of the row's sizes."""
        # {field of the model, as "layers", or of its experts, as "moe.top_k": size of the row}
        sizes = {SIZES[name].target: cells[name] for name in SIZES if name in cells}
        changes: dict[str, Any] = {}
        if "model" in cells:
            model = load_model(file_beside(self.path, cells["model"]))
            if "heads" in sizes and model.kv_heads == model.heads:
                changes["kv_heads"] = sizes["heads"]
        else:
            model = load_model(GPT)
            for name in NEEDED_SIZES:
                if name not in sizes:
                    raise ValueError(f"{name} is missing: give it, or a model")
            changes = {
                "name": "GPT",
                "source": str(self.path),
                "kv_heads": sizes["heads"],
                "ffn_hidden": 4 * sizes["hidden"],
                "vocabulary": GPT_VOCABULARY,
            }
        changes |= {name: size for name, size in sizes.items() if not name.startswith("moe.")}
        model = dataclasses.replace(model, **changes)
        complete = dataclasses.replace(model, moe=_model_experts(model, sizes))
        check_shape(complete, "model")
        return complete


def _profiled_op(columns: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    """Return the columns op, stage, global_batch; an op without a batch gets the smallest one."""
    op, stage = cells.get("op", STEP), cells.get("stage", 0)
    stages = columns["pipeline"] * columns["stages_per_worker"]
    whole_number(stage, "stage", minimum=0, maximum=stages - 1)
    if op == STEP and "stage" in cells:
        raise ValueError(f"stage needs an op, got stage {stage} of a whole step")
    smallest = columns["data"] * columns["microbatch_size"] * columns["pipeline"]
    return {"op": op, "stage": stage, "global_batch": columns["global_batch"] or smallest}


def _model_experts(model: Model, sizes: Mapping[str, Any]) -> MixtureOfExperts | None:
    """Return the model's experts with a row's sizes; for a dense model, experts like its MLP."""
    # `sizes` is {field of `Model`: size}; fields of experts begin with "moe.". A dense model stays
    # dense if the row has no number of experts.
    in_moe = {name: size for name, size in sizes.items() if name.startswith("moe.")}
    changes = {name.removeprefix("moe."): size for name, size in in_moe.items()}
    if model.moe is not None:
        return dataclasses.replace(model.moe, **changes)
    if not changes.get("experts"):
        return None
    return MixtureOfExperts(**{"top_k": 1, **changes}, expert_hidden=model.ffn_hidden)


def file_beside(path: Path, name: str) -> str:
    """Return the name; a JSON path that does not exist is moved to the folder of `path`."""
    is_elsewhere = name.endswith(".json") and not Path(name).exists()
    return str(path.parent / name) if is_elsewhere else name


def _check_degrees(columns: dict[str, Any], model: Model, cells: dict[str, Any]) -> None:
    """Check that a row's degrees of parallelism match its accelerators, batch and model."""
    per_stage = columns["tensor"] * columns["context"] * columns["data"]
    if "accelerators" in cells:
        total = per_stage * columns["pipeline"]
        if cells["accelerators"] != total:
            raise ValueError(
                f"accelerators must be tensor x context x data x pipeline, {total}, "
                f"got {cells['accelerators']}"
            )
    sequences = columns["data"] * columns["microbatch_size"]
    if columns["global_batch"] % sequences:
        raise ValueError(
            f"global_batch must be a multiple of data x microbatch_size, {sequences}, "
            f"got {columns['global_batch']}"
        )
    stages = columns["pipeline"] * columns["stages_per_worker"]
    units = model.layers + columns["embedding_units"] + columns["loss_units"]
    if layout := columns["pipeline_layout"]:
        if units > model.layers:
            raise ValueError("pipeline_layout excludes embedding_units and loss_units")
        PipelineLayout.parse(layout).check(model, stages)
    elif units < stages:
        raise ValueError(
            f"pipeline x stages_per_worker must be at most the {units} layers, got {stages}"
        )
    t, c, e = columns["tensor"], columns["context"], columns["expert"]
    expert_tensor = (columns["expert_tensor"] or t) if model.moe else 1
    # column, its degree, number that the degree must divide, meaning of that number
    divisions: list[tuple[str, int, Any, str]] = [
        ("tensor", t, model.heads, "heads"),
        ("context", c, model.sequence, "sequence"),
        ("expert", e, per_stage, "tensor x context x data"),
        ("expert", e, 0 if model.moe is None else model.moe.experts, "experts"),
        ("expert_tensor", expert_tensor, per_stage // e, "tensor x context x data / expert"),
    ]
    for name, degree, total, what in divisions:
        if total % degree:
            legal = legal_divisors(total, degree)
            raise ValueError(f"{name} must divide {what} ({total}): {legal}, got {degree}")
    if e > 1 and model.moe is None:
        raise wrong("expert", f"must be 1 for a model without experts, got {e}")
