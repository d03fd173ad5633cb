"""Models on systems, many at once: their numbers as arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.model import Model
from pipejax.costs.system import System
from pipejax.costs.workload import StageLayers, Workload, assign_layers
from pipejax.schedules.table.table import ScheduleTable


class Pair(NamedTuple):
    """A model on a system, or a batch of them: numbers only, so that pairs are mapped over.

    Attributes:
      model: the transformer; every number with a leading pair axis.
      system: the machine, likewise.
      assigned: (pairs, stages) layers of each stage, and those recomputed.
      minibatch: (pairs) sequences per step and pipeline.
    """

    model: Model
    system: System
    assigned: StageLayers
    minibatch: Float[NumpyArray, " pairs"]


def stack_pairs(
    workloads: Sequence[Workload], systems: Sequence[System], table: ScheduleTable
) -> Pair:
    """Lay the numbers of many workloads and systems out as arrays."""
    if len(workloads) != len(systems) or not workloads:
        raise ValueError(
            f"pairs need as many workloads as systems, got {len(workloads)} and {len(systems)}"
        )
    first = workloads[0]
    how = [dataclasses.replace(first, model=w.model, minibatch=w.minibatch) for w in workloads]
    if any(
        ours is not theirs and ours != theirs for ours, theirs in zip(how, workloads, strict=True)
    ):
        raise ValueError("workloads of one batch must have the same parallelism and recompute")
    model = _stacked([workload.model for workload in workloads], "models")
    _, kinds, which = np.unique(model.layers, return_index=True, return_inverse=True)
    examples = [workloads[k].model for k in kinds]  # one for each number of layers
    assigned = [assign_layers(dataclasses.replace(first, model=each), table) for each in examples]
    return Pair(
        model=model,
        system=_stacked(systems, "systems"),
        assigned=StageLayers(*(np.stack(each)[which] for each in zip(*assigned, strict=True))),
        minibatch=np.array([workload.minibatch for workload in workloads], float),
    )


def _stacked(things: Sequence[Any], what: str) -> Any:
    """Turn a list of trees of numbers into a tree of arrays, whose name compiles nothing anew."""
    first = things[0]
    alike = [dataclasses.replace(thing, name="", source="") for thing in things]
    structures: list[Any] = [jax.tree.structure(thing) for thing in alike]
    for thing, structure in zip(things, structures, strict=True):
        if structure != structures[0]:
            raise ValueError(
                f"{what} of one batch may differ in their numbers only: {thing.name} and "
                f"{first.name} differ in more"
            )
    columns = np.array([jax.tree.leaves(thing) for thing in things], float).T
    return jax.tree.unflatten(structures[0], columns)
