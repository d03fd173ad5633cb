"""Microbatches in slices: slice k of K is priced as a part of a shorter sequence.

Slice k has s / K tokens, which attend to (k + 1/2) s / K tokens on average, like the tokens of a
sequence of (2k + 1) s / K. So the slice is priced as 1 / (2k + 1) of such a sequence. All slices
together have the tokens of a microbatch, and its pairs of tokens that attend to each other.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pipejax.base.checks import MismatchError
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload import Workload
from pipejax.schedules.table.table import ScheduleTable


def sliced_model(model: Model, part: int, slices: int) -> Model:
    """Return the model with the sequence length and window at which slice `part` is priced."""
    if not model.causal:
        raise MismatchError(
            f"{model.name or 'a model'} is not causal: a slice cannot go before those that it "
            "attends to"
        )
    sequence = (2 * part + 1) * model.sequence / slices
    if model.window is None:
        return dataclasses.replace(model, sequence=sequence)
    window, ends = model.window, model.sequence * np.array([part, part + 1]) / slices
    # the first n tokens attend to n^2 / 2 tokens up to the window w, then to w each
    pairs = np.where(ends < window, ends**2 / 2, window * (ends - window / 2))
    attended = np.diff(pairs).item() * slices / model.sequence  # per token of the slice
    # solve w - w^2 / 2s = attended, the mean in a sequence of length s with window w
    new_window = sequence * (1 - np.sqrt(max(0.0, 1 - 2 * attended / sequence)))
    return dataclasses.replace(model, sequence=sequence, window=new_window)


def by_slice(
    workload: Workload, table: ScheduleTable, compute: Callable[[Model, float], dict[str, Any]]
) -> dict[str, Any]:
    """Compute values for each slice of a microbatch: {name: array (..., slices of the step)}."""
    # `compute` takes a model with a sequence length, and the number of such sequences in a slice;
    # it returns {name: array}, without the axis of slices.
    slices, size = table.grammar.slices, workload.microbatch_size(table)
    results = []
    for part in range(slices):
        # the sequence is as long as 2 part + 1 slices, so a slice has 1 / (2 part + 1) of it
        results.append(compute(sliced_model(workload.model, part, slices), size / (2 * part + 1)))
    count = table.num_microbatches // slices  # the table numbers slices as microbatches
    stacks = {name: np.stack([result[name] for result in results], axis=-1) for name in results[0]}
    return {name: np.tile(stack, count) for name, stack in stacks.items()}


def check_whole(table: ScheduleTable, what: str) -> None:
    """Refuse a table whose microbatches are cut into slices; `what` needs whole microbatches."""
    if table.grammar.slices > 1:
        raise MismatchError(
            f"{what} takes whole microbatches, those of {table.name} are in "
            f"{table.grammar.slices} slices"
        )
