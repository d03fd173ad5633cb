"""Prices and memory of many layouts at once: one compilation serves all of them.

Layouts with the same stages differ in numbers only: degrees, microbatch size, layers of each stage.
The axis of stages is filled up, the axis of layouts cut into chunks of one size: whatever is
searched has one shape, and compiling, which takes longer than all else, is done once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.costs.costs import MESSAGE_FIELDS, Costs
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model, parse_recompute
from pipejax.costs.model.workload import Stages, Workload, assign_layers, stages_of
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import StageBytes, bytes_of_stages, work_of_stages
from pipejax.costs.system.system import System
from pipejax.engine.batched.pricing import PART, in_parts, priced
from pipejax.schedules.table.table import ScheduleTable
from pipejax.sweep.plan.layouts import Layouts
from pipejax.sweep.plan.programs import ProgramShape, table_of
from pipejax.sweep.plan.request import PlanRequest

LENGTH = 128  # stages are filled up to a multiple of it


class Priced(NamedTuple):
    """Layouts of one shape with their prices."""

    costs: Costs  # (layouts, stages) seconds; messages (layouts, 2, pipes, stages - 1)
    memory: StageBytes  # (layouts, stages) bytes


def workload_of(request: PlanRequest, layouts: Layouts, place: int) -> Workload:
    """The workload of one layout, as any other command takes it."""
    one = layouts.described(request, place)
    is_default = request.model.moe is None or one["expert_tensor"] == one["tensor"]
    return Workload(
        request.model,
        one["microbatch_size"] * one["microbatches"],
        tensor_parallel=one["tensor"],
        data_parallel=one["data"],
        sequence_parallel=one["sequence_parallel"],
        recompute=one["recompute"],
        context_parallel=one["context"],
        expert_parallel=one["expert"],
        expert_tensor_parallel=0 if is_default else one["expert_tensor"],
        zero=one["zero"],
        embedding_units=one["embedding_units"],
        loss_units=one["loss_units"],
        **request.shared,
    )


def price(
    request: PlanRequest, shape: ProgramShape, layouts: Layouts, systems: System | None = None
) -> Priced:
    """Price layouts of one shape in float64, each on its own system (layouts) where they differ."""
    machine = systems if systems is not None else request.system
    numbers = (
        dataclasses.replace(
            jax.tree.map(lambda leaf: np.broadcast_to(leaf, len(layouts)), machine),
            name="",
            source="",
        ),
        _layout_numbers(request, shape, layouts),
        _stages(request, shape, layouts),
    )
    in_layer = np.where(_whole_layers(request, layouts)[0], 0, layouts.recompute)
    modes = np.unique(in_layer).tolist()
    model = dataclasses.replace(request.model, name="", source="")
    parts = []
    with jax.enable_x64(True):
        for mode in modes:
            own = jax.tree.map(lambda leaf, m=mode: leaf[in_layer == m], numbers)
            price_part = functools.partial(priced, _Layouts(request.recomputations[mode]), model)
            parts.append(in_parts(price_part, own, PART))
    order = np.argsort(np.concatenate([np.flatnonzero(in_layer == mode) for mode in modes]))
    joined: Priced = jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *parts)
    return _cut(joined, shape.stages)


@dataclasses.dataclass(frozen=True)
class _Layouts:
    """Prices of a layout on its system, for what a layer itself recomputes."""

    recompute: str

    def __call__(self, model: Model, at: tuple[System, Layout, Stages], _: tuple[()]) -> Priced:
        system, layout, stages = at
        work = work_of_stages(model, layout, stages, recompute=self.recompute)
        memory = bytes_of_stages(model, layout, stages, self.recompute)
        whole = jnp.zeros(len(stages.layers))
        wide = jax.tree.map(lambda leaf: leaf + whole if leaf.ndim < 2 else leaf, memory)
        return Priced(work_costs(work, system), wide)


def _layout_numbers(request: PlanRequest, shape: ProgramShape, layouts: Layouts) -> Layout:
    """The layouts as one whose numbers are columns."""
    one = workload_of(request, layouts, 0).layout(_short_table(shape), 1.0)
    names = ("tensor", "context", "expert", "expert_tensor", "data", "zero", "microbatch_size")
    columns = {name: getattr(layouts, name).astype(float) for name in names}
    columns["sequence_parallel"] = (layouts.tensor > 1).astype(float)
    columns["recompute_group"] = _whole_layers(request, layouts)[1]
    every = dataclasses.replace(one, **columns)
    found: Layout = jax.tree.map(lambda leaf: np.broadcast_to(leaf, len(layouts)), every)
    return found


def _whole_layers(request: PlanRequest, layouts: Layouts) -> Int[NumpyArray, "two layouts"]:
    """Say whether layouts recompute whole layers, and how many share a checkpoint: (2, layouts)."""
    modes = map(parse_recompute, request.recomputations)
    numbers = np.array([(mode.layers > 0, mode.group) for mode in modes])
    return numbers[layouts.recompute].T


def _short_table(shape: ProgramShape) -> ScheduleTable:
    """A table of the shape: where stages lie does not depend on the microbatches."""
    return table_of(shape, 2 * shape.workers)


def _stages(request: PlanRequest, shape: ProgramShape, layouts: Layouts) -> Stages:
    """What the stages of each layout hold: (layouts, length), padded with empty stages."""
    table = _short_table(shape)
    more = -shape.stages % LENGTH
    whole_layers = layouts.recompute * _whole_layers(request, layouts)[0]
    _, first, kind = np.unique(
        np.stack([layouts.edge_units, whole_layers], axis=1),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    found = []
    for place in first.tolist():
        workload = workload_of(request, layouts, place)
        stages = stages_of(table, assign_layers(workload, table))
        found.append(jax.tree.map(functools.partial(_padded, more=more), stages))
    each: Stages = jax.tree.map(lambda *leaves: np.stack(leaves)[kind.ravel()], *found)
    return each


def _padded(leaf: NumpyArray, more: int) -> Float[NumpyArray, "..."]:
    """Add empty stages, or boundaries between them, on the last axis."""
    return np.pad(np.asarray(leaf, float), [(0, 0)] * (np.ndim(leaf) - 1) + [(0, more)])


def _cut(priced: Priced, stages: int) -> Priced:
    messages = {name: getattr(priced.costs, name)[..., : stages - 1] for name in MESSAGE_FIELDS}
    memory = jax.tree.map(lambda leaf: leaf[:, :stages], priced.memory)
    ops = {
        name: leaf[:, :stages]
        for name, leaf in vars(priced.costs).items()
        if name not in messages and np.ndim(leaf) == 2
    }
    return Priced(dataclasses.replace(priced.costs, **ops, **messages), memory)
