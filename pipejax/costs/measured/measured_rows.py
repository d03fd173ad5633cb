"""Measured rows, as one array per column: runs of models, and collectives and messages alone.

Columns are NumPy arrays: what fits or predicts rows never loops over them. `rows_file` reads runs
from CSV; collectives are few columns, which are read here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, check_types, resolve_choice
from pipejax.base.data_files import positive_cell, read_each, relative_variance, whole_cell
from pipejax.base.display import with_short_repr
from pipejax.costs.layers.collectives import DIRECT, PASSES
from pipejax.costs.model.model import Model

# columns that say the sizes of a model, or change those of a named one: the field that each sets
MODEL_FIELDS: Mapping[str, str] = {
    "layers": "layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn_hidden",
    "sequence": "sequence",
    "vocabulary": "vocabulary",
    "gradient_bytes": "gradient_bytes",
}
# the same of its mixture of experts
EXPERT_FIELDS = ("experts", "top_k", "dense_layers", "capacity_factor")
MODEL_SWITCHES = ("flash_attention", "dropout", "fused_loss", "tied_embeddings")  # 0 or 1
COUNTS = (  # whole numbers
    "tensor",
    "context",
    "expert",
    "expert_tensor",
    "data",
    "pipeline",
    "stages_per_worker",
    "microbatch_size",
    "global_batch",
    "zero",
    "embedding_units",
    "loss_units",
    "accelerators_per_node",
)
FRACTIONS = ("overlap", "expert_overlap", "graphs", "optimizer_offload")  # shares from 0 to 1
FLAGS = ("sequence_parallel", "contiguous_context", "out_of_memory")  # 0 or 1
NAMES = (
    *("schedule", "link", "recompute", "precision", "attention_precision", "head_precision"),
    *("dispatcher", "system", "stack", "pipeline_layout"),
)
TEXTS = ("group", "release", "source")  # free
RATES = ("network_bandwidth",)  # of the machine while it ran, in SI units
MEASURED = ("seconds", "memory_bytes")
STEP = "step"
OPS = ("F", "B", "I", "W")  # whose seconds a row may give instead: those of one microbatch
# of a file, in the order in which they are written
OF_MODEL = (*MODEL_FIELDS, *EXPERT_FIELDS, *MODEL_SWITCHES)
PROFILED = ("op", "stage", "n", "spread")
COLUMNS = (
    *("model", *OF_MODEL, *COUNTS, *FLAGS, *FRACTIONS, *RATES, "accelerators", *NAMES, *PROFILED),
    *(*MEASURED, *TEXTS),
)
# columns that describe a run: rows with equal ones repeat the same run
CONFIGURATION = (*("model", *OF_MODEL, *COUNTS, *FLAGS, *FRACTIONS, *RATES, *NAMES, "op", "stage"),)
OF_SYSTEM = 0  # accelerators of a node: as many as the system has


@with_short_repr("file models system schedule seconds memory_bytes")
@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredRows:
    """Measured runs, with one array for each column."""

    models: tuple[Model, ...]  # the models that are trained, each once
    model: Int[NumpyArray, " rows"]  # which of them
    tensor: Int[NumpyArray, " rows"]  # tensor-parallel degree t
    context: Int[NumpyArray, " rows"]  # context-parallel degree c
    expert: Int[NumpyArray, " rows"]  # e, of the t c d accelerators of a stage
    expert_tensor: Int[NumpyArray, " rows"]  # that split each expert; 0: as tensor
    data: Int[NumpyArray, " rows"]  # replicas of the pipeline d
    pipeline: Int[NumpyArray, " rows"]  # workers P
    stages_per_worker: Int[NumpyArray, " rows"]  # stages of each worker V
    microbatch_size: Int[NumpyArray, " rows"]  # b [sequences]
    global_batch: Int[NumpyArray, " rows"]  # of the whole job, d M b [sequences]
    zero: Int[NumpyArray, " rows"]  # ZeRO stage, 0 to 3
    embedding_units: Int[NumpyArray, " rows"]  # layers that it stands for in splits
    loss_units: Int[NumpyArray, " rows"]  # layers that the head stands for there
    accelerators_per_node: Int[NumpyArray, " rows"]  # 0 where the system says it
    sequence_parallel: Int[NumpyArray, " rows"]  # 0 or 1
    contiguous_context: Bool[NumpyArray, " rows"]  # holds consecutive tokens
    graphs: Float[NumpyArray, " rows"]  # share of the kernels that start as graphs
    optimizer_offload: Float[NumpyArray, " rows"]  # share that the host has
    out_of_memory: Bool[NumpyArray, " rows"]  # whether the run ended for lack of memory
    # of a ring through all accelerators to another node; 0 where the system says it [B/s]
    network_bandwidth: Float[NumpyArray, " rows"]
    overlap: Float[NumpyArray, " rows"]  # share of gradients and weights that is hidden
    expert_overlap: Float[NumpyArray, " rows"]  # the same of the tokens' way to their experts
    schedule: NumpyArray  # (rows) names
    link: NumpyArray  # (rows) link model of messages, empty where the row does not say it
    recompute: NumpyArray  # (rows) none, selective, full, or parts of layers joined by +
    precision: NumpyArray  # (rows) names
    attention_precision: NumpyArray  # (rows) of attention; empty: 16 bits
    head_precision: NumpyArray  # (rows) names of those of the head's products, empty for 16 bits
    dispatcher: NumpyArray  # (rows) how tokens travel to their experts, by name
    system: NumpyArray  # (rows) name or file of the machine, empty where the row does not say it
    stack: NumpyArray  # (rows) name or file of the software, empty where the row does not say it
    pipeline_layout: NumpyArray  # (rows) Megatron's letters; empty: by schedule
    op: NumpyArray  # (rows) of the seconds: a step, or F, B, I, W
    stage: Int[NumpyArray, " rows"]  # of that op, from 0
    variance: Float[NumpyArray, " rows"]  # relative; 0 without spread
    seconds: Float[NumpyArray, " rows"]  # a step or an op, NaN where it was not measured [s]
    memory_bytes: Float[NumpyArray, " rows"]  # of the fullest worker, or NaN [B]
    group: NumpyArray  # (rows) free text
    release: NumpyArray  # (rows) of the software, or what else was another then, free text
    source: NumpyArray  # (rows) free text
    row: Int[NumpyArray, " rows"]  # number in its file, from 1
    file: NumpyArray  # (rows) the file

    def __len__(self) -> int:
        return len(self.model)

    @property
    def microbatches(self) -> Int[NumpyArray, " rows"]:
        """Return the microbatches M of one pipeline and step."""
        return self.global_batch // (self.data * self.microbatch_size)

    @property
    def accelerators(self) -> Int[NumpyArray, " rows"]:
        """Return the accelerators of the job, t c d P."""
        return self.tensor * self.context * self.data * self.pipeline

    def column(self, name: str) -> NumpyArray:
        """Return any column by its name in the file, also fields of a named model."""
        if name in (*MODEL_FIELDS, *MODEL_SWITCHES):
            field = MODEL_FIELDS.get(name, name)
            values = [getattr(model, field) for model in self.models]
            return np.asarray(values)[self.model]
        if name in EXPERT_FIELDS:  # 0 where there are no experts
            counts = [getattr(model.moe, name, None) or 0 for model in self.models]
            return np.array(counts)[self.model]
        if name == "model":
            return np.array([model.name for model in self.models])[self.model]
        result: NumpyArray = getattr(self, resolve_choice(name, COLUMNS, "column"))
        return result

    def take(self, which: NumpyArray) -> "MeasuredRows":
        """Select rows by a mask or by their indices."""
        return MeasuredRows(self.models, **{k: v[which] for k, v in _columns(self).items()})


def _columns(rows: MeasuredRows) -> dict[str, NumpyArray]:
    names = [field.name for field in dataclasses.fields(rows)]
    return {name: getattr(rows, name) for name in names if name != "models"}


def joined(parts: Sequence[MeasuredRows]) -> MeasuredRows:
    """Put the rows of several files one below the other."""
    offsets = np.cumsum([0, *(len(part.models) for part in parts[:-1])])
    columns = {
        name: np.concatenate([_columns(part)[name] for part in parts])
        for name in _columns(parts[0])
    }
    columns["model"] = np.concatenate(
        [part.model + offset for part, offset in zip(parts, offsets, strict=True)]
    )
    return MeasuredRows(models=tuple(m for part in parts for m in part.models), **columns)


MESSAGE = "message"
KINDS = (*PASSES, *DIRECT, MESSAGE)
TIMED_COLUMNS = ("kind", "ranks", "ranks_per_node", "bytes", "seconds", "n", "spread", "source")


@with_short_repr("file kind ranks inside volume seconds source")
class CollectiveRows(NamedTuple):
    """Collectives and messages that were timed by themselves.

    Attributes:
      kind: (rows) one of `KINDS`.
      ranks: (rows) accelerators that take part.
      inside: (rows) how many of them share a node.
      volume: (rows) of the whole tensor, or for an all-to-all of what one accelerator holds [B].
      seconds: (rows) mean of all repetitions [s].
      variance: (rows) of that mean, relative to its square; 0 where no spread is given.
      source: text.
      file: where they were read from.
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
      ValueError: if the file has a column that is unknown, or a cell that cannot be; the message
        names row, column, value and what is allowed.
      OSError: if the file cannot be read.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "links.csv"
      >>> _ = path.write_text("kind,ranks,bytes,seconds\nmessage,2,1e6,1e-5\nall_gather,8,1e9,4e-3")
      >>> read_collectives(path).ranks
      array([2, 8])
    """
    check_types(path=(path, str, Path))
    rows = read_each(Path(path), TIMED_COLUMNS, lambda _, cells: _row(cells))
    kinds, ranks, inside, volume, seconds, variance, sources = zip(*rows, strict=True)
    return CollectiveRows(
        kind=kinds,
        ranks=np.array(ranks),
        inside=np.array(inside),
        volume=np.array(volume),
        seconds=np.array(seconds),
        variance=np.array(variance),
        source="; ".join(dict.fromkeys(filter(None, sources))) or str(path),
        file=str(path),
    )


def _row(cells: Mapping[str, str]) -> tuple[str, int, int, float, float, float, str]:
    """Return the fields of one measured collective, in the order of `CollectiveRows`."""
    kind = resolve_choice(cells.get("kind", "all_reduce"), KINDS, "kind")
    missing = [name for name in ("ranks", "bytes", "seconds") if name not in cells]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    ranks = whole_cell(cells["ranks"], "ranks", 2, 2 if kind == MESSAGE else MAX_COUNT)
    inside = whole_cell(cells.get("ranks_per_node", str(ranks)), "ranks_per_node", 1, ranks)
    if ranks % inside:
        raise ValueError(f"ranks_per_node must divide {ranks} ranks, got {inside}")
    volume, seconds = positive_cell(cells, "bytes"), positive_cell(cells, "seconds")
    variance = relative_variance(cells, seconds)
    return kind, ranks, inside, volume, seconds, variance, cells.get("source", "")
