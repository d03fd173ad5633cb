"""Measured collectives and messages from a CSV file, a row each."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import MAX_COUNT, check_types, one_of
from pipejax.base.data_files import positive_cell, read_cells, relative_variance, whole_cell
from pipejax.base.display import short_repr_of
from pipejax.costs.collectives import DIRECT, PASSES

MESSAGE = "message"
KINDS = (*PASSES, *DIRECT, MESSAGE)
COLUMNS = ("kind", "ranks", "ranks_per_node", "bytes", "seconds", "n", "spread", "source")


@short_repr_of("file kind ranks inside volume seconds source")
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
    found = []
    for number, cells in enumerate(read_cells(Path(path), COLUMNS), 1):
        try:
            found.append(_row(cells))
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    kinds, ranks, inside, volume, seconds, variance, sources = zip(*found, strict=True)
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
    kind = one_of(cells.get("kind", "all_reduce"), KINDS, "kind")
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
