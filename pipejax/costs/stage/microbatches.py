"""Microbatches of different lengths: costs by number of tokens, and their order.

The length of a microbatch is its number of tokens, or a list with the lengths of the sequences
packed into it. Packed sequences do not attend to each other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types, is_number, whole_numbers, wrong
from pipejax.base.data_files import parse_json
from pipejax.base.display import ResultList, abbreviated
from pipejax.base.files import read_file
from pipejax.costs.costs import Costs, differs_by_microbatch, unchecked_costs
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import Workload
from pipejax.costs.scaling import check_count
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.schedules.table.table import ScheduleTable

Lengths = Sequence[float | Sequence[float]] | Float[NumpyArray, " microbatches"]


def length_bytes(workload: Workload, table: ScheduleTable, lengths: Lengths) -> dict[str, Any]:
    """Return activation sizes [B] by name, whose last axis is microbatches of these lengths."""

    def compute_sizes(model: Model, microbatch_size: float) -> dict[str, Any]:
        sized = dataclasses.replace(workload, model=model)
        return stage_bytes(sized, table, microbatch_size=microbatch_size).ledger_sizes

    return by_length(workload, table, lengths, compute_sizes)


def by_length(
    workload: Workload,
    table: ScheduleTable,
    lengths: Lengths,
    compute: Callable[[Model, float], dict[str, Any]],
) -> dict[str, Any]:
    """Compute values for microbatches of these lengths: {name: array (..., microbatches)}."""
    # `compute` takes a model with a sequence length, and the number of such sequences in a
    # microbatch; it returns {name: array}, without the axis of microbatches.
    packed = Packed.from_lengths(lengths)
    check_count("lengths", lengths, table.num_microbatches)
    # A packed microbatch of 8 tokens and equivalent length 4 counts as 2 sequences of 4. A
    # microbatch that is not packed has the workload's number of sequences, of fewer or more tokens.
    usual_size = float(workload.microbatch_size(table))
    sizes = np.where(packed.is_packed, packed.tokens / packed.sequence, usual_size)
    keys = list(zip((packed.tokens / sizes).tolist(), sizes.tolist(), strict=True))
    results = {}
    for sequence, size in {*keys}:  # equal microbatches once
        model = dataclasses.replace(workload.model, sequence=sequence)
        results[sequence, size] = compute(model, size)
    names = results[keys[0]]
    return {name: np.stack([results[key][name] for key in keys], axis=-1) for name in names}


class Packed(NamedTuple):
    """Microbatches as numbers of tokens, and as equivalent lengths of equal sequences."""

    tokens: Float[NumpyArray, " microbatches"]
    sequence: Float[NumpyArray, " microbatches"]  # sum of squares of sequence lengths / tokens
    is_packed: NumpyArray  # (microbatches) whether the length is a list of sequences

    @classmethod
    def from_lengths(cls, lengths: Lengths) -> "Packed":
        """Convert lengths: each is a number of tokens, or a list of packed sequence lengths."""
        entries: list[Any] = lengths.tolist() if isinstance(lengths, np.ndarray) else [*lengths]
        if not entries:
            raise ValueError("there are no lengths")
        tokens, squares, is_packed = [], [], []
        for entry in entries:
            is_list = isinstance(entry, list | tuple)
            row = [*entry] if is_list else [entry]
            if not row or not all(is_number(length) and length > 0 for length in row):
                raise wrong(
                    "lengths",
                    f"must be finite numbers above 0, or lists of them, got {abbreviated(row)}",
                )
            tokens.append(float(sum(row)))
            squares.append(float(sum(length**2 for length in row)))
            is_packed.append(is_list)
        # [2, 6]: 8 tokens, which attend to as many tokens as in sequences of 40 / 8 = 5 tokens
        sequence = np.array(squares) / np.array(tokens)
        return cls(np.array(tokens), sequence, np.array(is_packed))


def read_lengths(path: str | Path) -> list[float | list[float]]:
    r"""Read the lengths of microbatches from a file.

    Text has a line for each microbatch: its tokens, or several numbers, the lengths of the
    sequences that are packed into it. JSON is a list of those, or an object with such a list under
    "lengths", as `pipejax tune microbatches` writes it.

    Args:
      path: the file.

    Returns:
      For each microbatch, its tokens or the list of the lengths of its sequences.

    Raises:
      ValueError: if the file holds anything else.
      OSError: if it cannot be read.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "lengths.txt"
      >>> _ = path.write_text("4096\n1024 512 512\n")
      >>> pj.files.read_lengths(path)
      [4096.0, [1024.0, 512.0, 512.0]]
    """
    check_types(path=(path, str, Path))
    try:
        text = read_file(Path(path)).decode("utf-8-sig")
        if text.lstrip()[:1] in ("[", "{"):
            data = parse_json(text)
            lengths = data.get("lengths") if isinstance(data, dict) else data
            if not isinstance(lengths, list):
                raise ValueError('must be a list of lengths, or an object with it under "lengths"')
        else:
            lines = [(line, text) for line, text in enumerate(text.splitlines(), 1) if text.strip()]
            lengths = ResultList(_line_lengths(line, text) for line, text in lines)
        Packed.from_lengths(lengths)
    except (ValueError, TypeError) as error:  # also a UnicodeDecodeError
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    return lengths


def _line_lengths(line: int, text: str) -> float | list[float]:
    try:
        lengths = [float(word) for word in text.split()]
    except ValueError:
        reason = f"line {line}: expected numbers separated by spaces, got {text.strip()!r}"
        raise ValueError(reason) from None
    return lengths if len(lengths) > 1 else lengths[0]


def check_order(order: Sequence[int], count: int, where: str = "order") -> Int[NumpyArray, " m"]:
    """Check that an order names each of `count` microbatches once."""
    places = whole_numbers(order, where)
    if sorted(places.tolist()) != list(range(count)):
        text = f"must name each of {count} microbatches once, 0 to {count - 1}, got "
        raise wrong(where, text + abbreviated(order))
    return places


def in_order(costs: Costs, order: Int[NumpyArray, "*batch microbatches"]) -> Costs:
    """Reorder costs: microbatch k of the result has the costs of microbatch order[k]."""
    # A batch of orders gives costs with a leading batch axis: of the batch's length for costs with
    # an axis of microbatches, of length 1 for other arrays.
    if order.ndim == 1:
        return map_microbatches(lambda time: time[..., order], costs)
    leaves = dict(vars(costs))
    for name, time in leaves.items():
        if differs_by_microbatch(name, time):
            # (stages, microbatches) -> (stages, batch, microbatches) -> batch first
            leaves[name] = np.moveaxis(time[..., order], -2, 0)
        elif np.ndim(time):
            leaves[name] = time[None]
    return unchecked_costs(leaves)


def map_microbatches(function: Callable[[Any], Any], costs: Costs) -> Costs:
    """Apply a function to each cost whose last axis is that of the microbatches."""
    times = {
        name: function(time) if differs_by_microbatch(name, time) else time
        for name, time in vars(costs).items()
    }
    return unchecked_costs(times, getattr(costs, "filled_in", None))
