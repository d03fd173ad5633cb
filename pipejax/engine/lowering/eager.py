"""Eager messages: which ones lie below `Links.eager_below`, and whether costs agree with a program.

They are buffered where larger ones meet in a rendezvous, so which messages they are decides about
nodes and edges: a program holds for costs with the same ones, and others are refused by name.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from pipejax.base.array_types import Bool, NumpyArray
from pipejax.base.remembered import remembered
from pipejax.costs.costs import Costs
from pipejax.engine.lowering.link_models import RENDEZVOUS
from pipejax.engine.lowering.program import Program
from pipejax.schedules.cells.dependencies import BACKWARD, Dependencies
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

Smaller = Bool[NumpyArray, "batch directions pipes boundaries microbatches"]


def eager_messages(
    found: Dependencies, table: ScheduleTable, links: Links, costs: Costs | None
) -> bytes:
    """Find the messages that are buffered, those under rendezvous with a transmit time below it.

    Returns booleans (messages), as bytes: a program is remembered by them.
    """
    if costs is None:
        raise ValueError(
            f"eager_below = {links.eager_below:g} s needs known costs: which messages lie below it "
            "follows from their transmit times, got costs=None"
        )
    costs.check_shapes(table.num_stages, table.num_pipes, table.num_microbatches)
    smaller = below_threshold(costs.transmit, links.eager_below, 0)[0]
    shape = 2, table.num_pipes, max(table.num_stages - 1, 0), table.num_microbatches
    place = found.direction, found.pipe, found.boundary, found.microbatch
    ends = found.producer // table.num_slots, found.consumer // table.num_slots
    meets = links.models_of(table.num_workers, *ends) == RENDEZVOUS
    eager: bytes = (meets & np.broadcast_to(smaller, shape)[place]).tobytes()
    return eager


def below_threshold(transmit: Any, eager_below: float, batch_axes: int) -> Smaller:
    """Which transmit times lie below a time; axes of one entry stand for all.

    `batch_axes` (0 or 1) stand before all others.
    """
    try:
        smaller = np.asarray(transmit < eager_below)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            "transmit is traced: which messages lie below eager_below cannot be seen within jit "
            "or vmap. Close over transmit times that are numbers, or give makespans the batch"
        ) from error
    if not (batch_axes and smaller.ndim):
        smaller = smaller[None]
    per_microbatch = smaller.ndim == 5
    shape = smaller.shape[1:] if per_microbatch else (*smaller.shape[1:], 1)
    return smaller.reshape(len(smaller), *(1,) * (4 - len(shape)), *shape)


def check_eager(program: Program, transmit: Any, batch_axes: int = 0) -> None:
    """Refuse transmit times with which other messages are eager than those of a program."""
    sent, links = program.messages, program.links
    smaller = below_threshold(transmit, links.eager_below, batch_axes)
    backward = (np.asarray(sent.phase) == Phase.SEND_B).astype(int) * BACKWARD
    place = (
        backward,
        np.asarray(program.pipe)[sent.carrier],  # a fused pair that makes it may be of two pipes
        np.asarray(sent.stage) - backward,
        np.asarray(sent.microbatch),
    )
    layout = program.layout
    shape = 2, layout.num_pipes, layout.num_stages - 1, layout.num_microbatches
    some, every = (np.broadcast_to(x, shape)[place] for x in (smaller.any(0), smaller.all(0)))
    meets = links.models_of(program.num_workers, sent.sender, sent.receiver) == RENDEZVOUS
    wrong = np.flatnonzero(meets & np.where(sent.eager, ~every, some))
    if len(wrong):
        send = sent.cells(int(wrong[0]))[0]
        is_eager = sent.eager[wrong[0]]
        raise ValueError(
            f"the transmit time of {send} is {'not ' if is_eager else ''}below eager_below = "
            f"{links.eager_below:g} s, and the program is for one that is"
            f"{' not' if not is_eager else ''}: lower the table for these costs (lower(costs=..))"
        )


@remembered
def settled(program: Program) -> Program:
    """Return a program whose costs were checked: there is nothing left to check."""
    return dataclasses.replace(program, links=dataclasses.replace(program.links, eager_below=0.0))
