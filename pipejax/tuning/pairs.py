"""Models on systems, many at once: their numbers as arrays, their costs and bytes in one go."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.costs import Costs
from pipejax.hardware import Number, System
from pipejax.memory import HeldCounts
from pipejax.shapes import Float, NumpyArray
from pipejax.table import ScheduleTable
from pipejax.transformer import Model
from pipejax.work import stage_work, work_costs
from pipejax.workload import StageBytes, StageLayers, Workload, deal_layers, stage_bytes

PerPair = Float[NumpyArray, " pairs"]


class Pair(NamedTuple):
    """A model on a system, or a batch of them: numbers only, so that pairs are mapped over.

    Attributes:
      model: the transformer; every number with a leading pair axis.
      system: the machine, likewise.
      dealt: (pairs, stages) layers of each stage, and those recomputed.
      minibatch: (pairs) sequences per step and pipeline.

    Example:
      >>> from pipejax import load_model, load_system, schedules
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> workload = Workload(load_model("gpt-22b"), minibatch=64)
      >>> pair = stack_pairs([workload] * 2, [load_system("h100")] * 2, table)
      >>> pair.minibatch.tolist(), pair.dealt.layers.shape
      ([64.0, 64.0], (2, 4))
    """

    model: Model
    system: System
    dealt: StageLayers
    minibatch: PerPair


def stack_pairs(
    workloads: Sequence[Workload], systems: Sequence[System], table: ScheduleTable
) -> Pair:
    """Lay the numbers of many workloads and systems out as arrays.

    Args:
      workloads: one for each pair; alike in parallelism, recomputation and kind of model.
      systems: one for each pair; alike in accelerators per node and steps of efficiencies.
      table: the schedule, for the layers of each stage.

    Returns:
      The pairs.

    Raises:
      ValueError: if there are not as many of both, there are none, they differ in what is not a
        number, or a stage would get no layer.

    Example:
      >>> from pipejax import load_model, load_system, schedules
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> workload = Workload(load_model("gpt-22b"), minibatch=64)
      >>> stack_pairs([workload], [load_system("h100")], table).system.peak_flops.tolist()
      [989000000000000.0]
    """
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
    dealt = [deal_layers(dataclasses.replace(first, model=each), table) for each in examples]
    layers, recomputed = (np.stack([getattr(d, name) for d in dealt])[which].astype(float)
                          for name in StageLayers._fields)  # fmt: skip
    return Pair(
        model=model,
        system=_stacked(systems, "systems"),
        dealt=StageLayers(layers, recomputed),
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


def pair_costs(workload: Workload, table: ScheduleTable, pair: Pair, size: Number) -> Costs:
    """Price one pair at any microbatch size; traceable.

    Args:
      workload: parallelism and recomputation.
      table: the schedule, for its placement.
      pair: model, system and layers.
      size: b [sequences], any number above 0.

    Returns:
      Costs per stage and boundary [s].

    Example:
      >>> from pipejax import load_model, load_system, schedules
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> workload = Workload(load_model("gpt-22b"), minibatch=64)
      >>> pairs = stack_pairs([workload], [load_system("h100")], table)
      >>> pair = jax.tree.map(lambda leaf: leaf[0], pairs)
      >>> print(f"{float(pair_costs(workload, table, pair, 1.5).forward[0]) * 1e3:.0f} ms")
      38 ms
    """
    described = dataclasses.replace(workload, model=pair.model)
    work = stage_work(
        described,
        table,
        gpus_per_node=pair.system.gpus_per_node,
        dealt=pair.dealt,
        microbatch_size=size,
    )
    return work_costs(work, pair.system)


def pair_bytes(workload: Workload, table: ScheduleTable, pair: Pair, size: Number) -> StageBytes:
    """Memory of each stage of one pair at any microbatch size; traceable.

    Args:
      workload: parallelism and recomputation.
      table: the schedule, for its stages.
      pair: model, system and layers.
      size: b [sequences], any number above 0.

    Returns:
      (stages) bytes.

    Example:
      >>> from pipejax import load_model, load_system, schedules
      >>> table = schedules.build("1f1b", num_workers=4, num_microbatches=4)
      >>> workload = Workload(load_model("gpt-22b"), minibatch=64)
      >>> pairs = stack_pairs([workload], [load_system("h100")], table)
      >>> pair = jax.tree.map(lambda leaf: leaf[0], pairs)
      >>> (pair_bytes(workload, table, pair, 1.0).persistent / 1e9).round(1).tolist()
      [92..., 87..., 87..., 92...]
    """
    described = dataclasses.replace(workload, model=pair.model)
    return stage_bytes(described, table, pair.dealt, size)


def peak_bytes(held: HeldCounts, memory: StageBytes) -> Float[NumpyArray, "pairs workers"]:
    """Activations of each worker at their peak, for microbatches of the size that is given.

    Args:
      held: what the workers hold, as counts.
      memory: (pairs, stages) bytes.

    Returns:
      (pairs, workers) bytes.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.memory import held_counts
      >>> held = held_counts(schedules.build("1f1b", num_workers=2, num_microbatches=8))
      >>> one = np.array([[1.0, 10.0]])
      >>> peak_bytes(held, StageBytes(one, one, one, one)).tolist()  # two microbatches, and one
      [[2.0, 10.0]]
    """
    moments = np.asarray(memory.activations) @ np.moveaxis(held.activations, -1, 1)
    checkpoints = np.asarray(memory.checkpoint) @ np.moveaxis(held.checkpoints, -1, 1)
    return (moments + checkpoints).max(axis=-1).T


def lasting_bytes(held: HeldCounts, memory: StageBytes) -> Float[NumpyArray, "pairs workers"]:
    """Parameters, gradients and optimizer state of each worker, and versions of weights.

    Args:
      held: what the workers hold, as counts.
      memory: (pairs, stages) bytes.

    Returns:
      (pairs, workers) bytes.

    Example:
      >>> from pipejax import schedules
      >>> from pipejax.memory import held_counts
      >>> held = held_counts(schedules.build("chimera", num_workers=2, num_microbatches=2))
      >>> one = np.array([[1.0, 10.0]])
      >>> lasting_bytes(held, StageBytes(one, one, one, one)).tolist()  # a copy of both on each
      [[11.0, 11.0]]
    """
    lasting = np.asarray(memory.persistent) @ held.copies.T
    return lasting + np.asarray(memory.version) @ held.stashed.T
