"""Microbatches in slices: slice k of K is priced as a part of a shorter sequence.

A slice has s / K tokens, which attend to (k + 1/2) s / K tokens in the mean, those of all slices
before it among them: as the tokens of a sequence of (2k + 1) s / K do. So it is priced as the
(2k + 1)-th part of one, as sequences of a packed microbatch are priced as some of one length. All
slices together have the tokens of a microbatch, and its pairs of tokens that meet.
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
    """Return a model with a sequence length at which tokens attend to as many as in a slice."""
    if not model.causal:
        raise MismatchError(
            f"{model.name or 'a model'} is not causal: a slice cannot go before those that it "
            "attends to"
        )
    sequence = (2 * part + 1) * model.sequence / slices
    if model.window is None:
        return dataclasses.replace(model, sequence=sequence)
    window, ends = model.window, model.sequence * np.array([part, part + 1]) / slices
    # pairs of the first tokens, up to each end of the slice, and the tokens that they attend to
    pairs = np.where(ends < window, ends**2 / 2, window * (ends - window / 2))
    attended = np.diff(pairs).item() * slices / model.sequence  # per token of the slice
    # solve w - w^2 / 2s = attended, the mean in a sequence of length s with window w
    new_window = sequence * (1 - np.sqrt(max(0.0, 1 - 2 * attended / sequence)))
    return dataclasses.replace(model, sequence=sequence, window=new_window)


def by_slice(
    workload: Workload, table: ScheduleTable, price: Callable[[Model, float], dict[str, Any]]
) -> dict[str, Any]:
    """Price the slices of a microbatch; return arrays whose last axis is all slices of a step."""
    slices, size = table.grammar.slices, workload.microbatch_size(table)
    slice_prices = [
        price(sliced_model(workload.model, k, slices), size / (2 * k + 1)) for k in range(slices)
    ]
    count = table.num_microbatches // slices  # the table numbers slices as microbatches
    return {
        name: np.tile(np.stack([prices[name] for prices in slice_prices], axis=-1), count)
        for name in slice_prices[0]
    }


def check_whole(table: ScheduleTable, what: str) -> None:
    """Refuse a table whose microbatches are cut into slices."""
    if table.grammar.slices > 1:
        raise MismatchError(
            f"{what} takes whole microbatches, those of {table.name} are in "
            f"{table.grammar.slices} slices: stage_costs prices them"
        )
