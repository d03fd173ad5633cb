"""Measured runs, and separately measured collectives and messages, as one array per column.

Columns are NumPy arrays, so fits and predictions need no loop over rows. `rows_file` reads runs
from a CSV file.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax import schedules
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, is_number, resolve_choice, resolve_name
from pipejax.base.display import with_short_repr
from pipejax.base.file_fields import (
    POSITIVE,
    TEXT,
    FieldKind,
    FileField,
    choice,
    form_kind,
    read_cells,
    whole,
    with_defaults,
)
from pipejax.costs.layers.collectives import DIRECT, PASSES
from pipejax.costs.model.model import Model
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.stack import OF_WORKLOAD
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS, check_recompute
from pipejax.costs.system.parts import file_fields
from pipejax.schedules.table.links import LINKS

STEP = "step"
OPS = ("F", "B", "I", "W")  # a row may have the time of one of these, for one microbatch
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")


def _named(read: Callable[[Any], Any]) -> FieldKind:
    return FieldKind(lambda value, _: read(value), TEXT.schema)


def _in_bytes(unit: str = "") -> FieldKind:
    return form_kind(
        lambda value: is_number(value, least=1e5), f"1e5 bytes{unit} or more", "number"
    )


_SWITCH = FieldKind(lambda value, where: bool(whole(0, 1).read(value, where)), whole(0, 1).schema)
MESSAGE = "message"
KINDS = (*PASSES, *DIRECT, MESSAGE)
_COLUMNS = file_fields(
    "measured_columns",
    {
        **dict.fromkeys(OF_WORKLOAD, FileField(_SWITCH)),
        **{
            name: FileField(WORKLOAD_FIELDS[name].values)
            for name in OF_WORKLOAD
            if WORKLOAD_FIELDS[name].kind != "flag"
        },
        "count or 0": FileField(whole(0)),
        "count from 2": FileField(whole(2)),
        "0 or 1": FileField(whole(0, 1)),
        "1 to 4": FileField(whole(1, 4)),
        "ZeRO stage": FileField(whole(0, 3)),
        "switch": FileField(_SWITCH),
        "bytes per second": FileField(_in_bytes(" per second")),
        "schedule": FileField(
            _named(lambda name: resolve_name(name, schedules.names(), "schedule"))
        ),
        "link": FileField(choice(LINKS)),
        "recompute": FileField(_named(check_recompute)),
        "precision": FileField(choice(PRECISIONS)),
        "layout": FileField(_named(lambda text: str(PipelineLayout.parse(text)))),
        "op": FileField(choice((STEP, *OPS))),
        "collective": FileField(choice(KINDS)),
    },
)
# columns that set sizes of the model; a target is the path of a field in `Model`
SIZES: Mapping[str, FileField] = _COLUMNS["sizes"]
COUNTS: Mapping[str, FileField] = _COLUMNS["counts"]
# measured bandwidths of one accelerator, within a node and between nodes
BANDWIDTHS = ("node_bandwidth", "network_bandwidth")
# columns that describe a run; rows with equal values in all of them repeat the same run
CONFIGURATION: Mapping[str, FileField] = {
    "model": FileField(TEXT, None),
    **SIZES,
    **COUNTS,
    **_COLUMNS["run"],
}
MEASURED: Mapping[str, FileField] = {
    "seconds": FileField(POSITIVE, math.nan),
    "memory_bytes": FileField(_in_bytes(), math.nan),
}
COLUMNS: Mapping[str, FileField] = {
    **CONFIGURATION,
    "accelerators": FileField(whole(), None),
    **_COLUMNS["spread"],
    **MEASURED,
    **_COLUMNS["origin"],
}


@with_short_repr("file models system schedule seconds memory_bytes")
@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Measured training runs, one per row; columns are attributes, such as `seconds`.

    Attributes:
      models: the models that are trained, each once.
      columns: (rows) array of each column of `COLUMNS` except the sizes of models, `accelerators`,
        `n` and `spread`. `model` is the index in `models`, `model_file` its name or path.
        `variance` is relative to the square of the mean, and 0 without a spread. `row` and `file`
        say where the row was read. A missing cell is NaN for a measured number, empty for a text,
        0 for a bandwidth.
    """

    models: tuple[Model, ...]
    columns: Mapping[str, NumpyArray]

    def __getattr__(self, name: str) -> NumpyArray:
        columns = vars(self).get("columns", {})  # a copy that is being made has none yet
        if name not in columns:
            raise AttributeError(f"{type(self).__name__} has no column {name!r}")
        return columns[name]

    def __len__(self) -> int:
        return len(self.model)

    @property
    def microbatches(self) -> Int[NumpyArray, " rows"]:
        """Return each run's number of microbatches M, per pipeline and step."""
        return self.global_batch // (self.data * self.microbatch_size)

    @property
    def accelerators(self) -> Int[NumpyArray, " rows"]:
        """Return each run's number of accelerators, t c d P."""
        return self.tensor * self.context * self.data * self.pipeline

    def column(self, name: str) -> NumpyArray:
        """Return a column by its name in the file; model sizes come from each row's model."""
        if name in SIZES:
            # a target is a field of the model, "layers", or of its experts, "moe.top_k"
            section, _, field = SIZES[name].target.rpartition(".")
            if section:
                experts = [getattr(model, section) for model in self.models]
                sizes = [getattr(record, field, None) or 0 for record in experts]  # 0: no experts
            else:
                sizes = [getattr(model, field) for model in self.models]
            return np.array(sizes)[self.model]
        if name == "model":
            return np.array([model.name for model in self.models])[self.model]
        return getattr(self, resolve_choice(name, COLUMNS, "column"))

    def take(self, rows: NumpyArray) -> "MeasuredRows":
        """Select rows by a mask or by their indices."""
        return MeasuredRows(self.models, {n: column[rows] for n, column in self.columns.items()})

    def with_columns(self, **columns: NumpyArray) -> "MeasuredRows":
        """Replace some columns."""
        return MeasuredRows(self.models, {**self.columns, **columns})


def joined(parts: Sequence[MeasuredRows]) -> MeasuredRows:
    """Concatenate the measured rows of several files."""
    models: list[Model] = []
    model_columns = []
    for part in parts:
        # a file's rows number its models from 0: shift the numbers past the models of files before
        model_columns.append(part.model + len(models))
        models += part.models
    columns = {n: np.concatenate([part.columns[n] for part in parts]) for n in parts[0].columns}
    return MeasuredRows(tuple(models), columns | {"model": np.concatenate(model_columns)})


TIMED_COLUMNS: Mapping[str, FileField] = {
    **_COLUMNS["collectives"],
    **_COLUMNS["spread"],
    "source": _COLUMNS["origin"]["source"],
}


@with_short_repr("file kind ranks inside volume seconds source")
class CollectiveRows(NamedTuple):
    """Collectives and messages that were measured in isolation.

    Attributes:
      kind: (rows) one of `KINDS`.
      ranks: (rows) number of accelerators that take part.
      inside: (rows) number of accelerators per node.
      volume: (rows) bytes of the whole tensor; for an all-to-all, bytes that an accelerator holds.
      seconds: (rows) mean of all repetitions [s].
      variance: (rows) variance of the mean, divided by its square; 0 without a spread.
      source: text on the origin of the rows.
      file: path of the file.
    """

    kind: tuple[str, ...]
    ranks: Int[NumpyArray, " rows"]
    inside: Int[NumpyArray, " rows"]
    volume: Float[NumpyArray, " rows"]
    seconds: Float[NumpyArray, " rows"]
    variance: Float[NumpyArray, " rows"]
    source: str
    file: str


def read_collectives(path: str | Path) -> CollectiveRows:
    r"""Read measured collectives and messages from a CSV file.

    Columns: `ranks`, `bytes` and `seconds`; `kind` ("all_reduce" if not given; a "message" goes
    from one accelerator to another); `ranks_per_node` (all of them if not given); `n` repetitions
    and their `spread`, a standard deviation [s]; `source`.

    Args:
      path: the file.

    Returns:
      The rows.

    Raises:
      ValueError: if a column is unknown or a cell is wrong; the message names row, column, value
        and what is allowed.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "links.csv"
      >>> _ = path.write_text("kind,ranks,bytes,seconds\nmessage,2,1e6,1e-5\nall_gather,8,1e9,4e-3")
      >>> read_collectives(path).ranks
      array([2, 8])
    """
    check_types(path=(path, str, Path))
    rows = read_cells(Path(path), TIMED_COLUMNS, lambda _, cells: _collective(cells))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    sources = "; ".join(dict.fromkeys(row["source"] for row in rows if row["source"]))
    return CollectiveRows(
        kind=tuple(row["kind"] for row in rows),
        ranks=columns["ranks"],
        inside=columns["ranks_per_node"],
        volume=columns["bytes"],
        seconds=columns["seconds"],
        variance=np.array([relative_variance(row, row["seconds"]) for row in rows]),
        source=sources or str(path),
        file=str(path),
    )


def _collective(cells: dict[str, Any]) -> dict[str, Any]:
    """Check the cells of a measured collective or message; return them with defaults filled in."""
    cells = with_defaults(TIMED_COLUMNS, cells)
    ranks, inside = cells["ranks"], cells["ranks_per_node"] or cells["ranks"]
    if cells["kind"] == MESSAGE and ranks > 2:
        raise ValueError(f"ranks must be at most 2, got {ranks}")
    if inside > ranks:
        raise ValueError(f"ranks_per_node must be at most {ranks}, got {inside}")
    if ranks % inside:
        raise ValueError(f"ranks_per_node must divide {ranks} ranks, got {inside}")
    return cells | {"ranks_per_node": inside}


def relative_variance(cells: Mapping[str, Any], mean: float) -> float:
    """Return the variance of a mean of `n` runs, over mean^2; 0 if a row has no `spread`."""
    if "spread" not in cells:
        return 0.0
    return (cells["spread"] / mean) ** 2 / cells.get("n", 1)
