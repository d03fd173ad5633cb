"""Work of a schedule's stages: FLOP, memory bytes and message bytes per accelerator.

Work depends on model, layout and schedule, never on the speed of a machine. `stage_work` and
`stage_bytes` take a schedule. `work_of_stages` and `bytes_of_stages` take only numbers, which may
be padded and traced, so that many layouts are one batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs import array_functions as xp
from pipejax.costs.layers import formulas
from pipejax.costs.layers.collectives import (
    Collective,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    whole_layer_collectives,
)
from pipejax.costs.layers.kernels import LayerOp
from pipejax.costs.layers.layer_ops import (
    embedding_ops,
    head_ops,
    layer_ops,
    whole_head,
    whole_layer,
)
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import KINDS, Model, recomputed_modules
from pipejax.costs.model.workload import (
    ParameterCounts,
    PerStage,
    StageLayers,
    Stages,
    Workload,
    all_layers_by_kind,
    find_stages,
    layer_kinds,
    layer_weights,
    layers_by_kind,
    recomputed_mtp,
    stage_parameters,
)
from pipejax.costs.stage.slices import by_slice, check_whole
from pipejax.costs.system.system import Number, Numbers
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import (
    LEDGER_SIZES,
    gathered_peak,
    held_in_rows,
    is_recomputed,
    static_bytes,
)
from pipejax.schedules.table.table import ScheduleTable

PerKind = tuple[PerStage, ...]


class PartWork(NamedTuple):
    """Work of a part of the model (a layer, the embedding or the head) on one accelerator."""

    ops: tuple[LayerOp, ...]  # kernels of the part
    collectives: tuple[Collective, ...]  # exchanges beside and between the kernels
    # for systems that price whole layers: all kernels as one op, and the exchanges of this op
    whole: tuple[LayerOp, ...] = ()
    whole_collectives: tuple[Collective, ...] = ()
    # parameters of one accelerator before replicas split them: all, and those with gradients
    weights: ParameterCounts = ParameterCounts(0.0, 0.0)
    trained: ParameterCounts = ParameterCounts(0.0, 0.0)


class StageWork(NamedTuple):
    """Work of every stage for one microbatch, per accelerator: ops, bytes and messages."""

    layout: Layout  # degrees of parallelism
    stages: Stages  # layers and places of the stages
    layers: PerKind  # (stages) layers of each kind
    recomputed: PerKind  # (stages) layers of each kind whose forward is repeated within I
    kinds: tuple[PartWork, ...]  # work of one layer, by kind
    embedding: PartWork  # work of the embedding
    head: PartWork  # work of the output head and its loss
    heads: PerStage  # (stages) output heads: one on the last stage, and one for each further token
    message_bytes: Numbers  # (1, boundaries) bytes of one message
    parameters: ParameterCounts  # trained parameters of an accelerator, before replicas split them
    gradient_bytes: Number  # bytes per parameter in the gradient exchange
    element_bytes: Number  # bytes per weight
    update_bytes: Number  # bytes per parameter that the optimizer reads and writes
    tied_parameters: Number  # parameters of an embedding that first and last stage both hold
    offload_bytes: Numbers | None  # (stages) bytes to the host; None without offloads
    # 1 if UNSHARD or REDUCE_GRAD cells exchange split weights in this phase; None without such
    # cells
    in_cells: Float[NumpyArray, " phases"] | None = None
    layers_w_recomputes: PerKind | None = None  # (stages) layers of each kind
    # work of one layer by kind without recomputation, if W recomputes parts of layers
    plain_kinds: tuple[PartWork, ...] | None = None

    @property
    def parts(self) -> tuple[PartWork, ...]:
        """Work of a layer of each kind, then of the embedding and of the head."""
        return (*self.kinds, self.embedding, self.head)


def stage_work(
    workload: Workload,
    table: ScheduleTable,
    *,
    assigned: StageLayers | Stages | None = None,
    microbatch_size: Number | None = None,
    offloads: bool = False,
) -> StageWork:
    """Count the work of every stage: FLOP, memory traffic and bytes of messages.

    For microbatches in slices, give the size of a slice. `offloads` counts the bytes of O even if
    the schedule has no O.
    """
    if microbatch_size is None:
        check_whole(table, "counting the work of one size")
    return work_of_stages(
        workload.model,
        workload.layout(table, microbatch_size),
        find_stages(workload, table, assigned),
        recompute=workload.recomputation.in_layer,
        offloads=offloads or table.offloads,
        has_r=is_recomputed(table).max(axis=1),
    )._replace(in_cells=in_cells(table))


def in_cells(table: ScheduleTable) -> Float[NumpyArray, " phases"] | None:
    """Return 1 for each phase whose cells exchange split weights, else 0; None if none do."""
    phases = Phase.UNSHARD, Phase.UNSHARD, Phase.REDUCE_GRAD
    in_table = np.isin(phases, table.phase).astype(float)
    return in_table if in_table.any() else None


def work_of_stages(
    model: Model,
    layout: Layout,
    stages: Stages,
    *,
    recompute: str = "none",
    offloads: bool = False,
    has_r: Any = np.False_,
) -> StageWork:
    """Count the work of stages from plain numbers, which may be traced, instead of a table."""
    # `recompute` names the parts that a layer recomputes within I; whole layers to recompute are in
    # `stages`. `has_r` (stages) says whether the table has R cells, which recompute the layers
    # instead of I. `offloads` counts the bytes of O.
    trained = layout.trains_base
    offload = bytes_of_stages(model, layout, stages, recompute).activations if offloads else None
    element = model.element_bytes
    head = ParameterCounts(model.head_parameters / layout.tensor, 0.0)
    # first and last stage both hold the embedding if the head or MTP layers use it
    has_copies = model.tied_embeddings or 1.0 * (model.mtp_layers > 0)
    tied = trained * has_copies * model.head_parameters / layout.tensor
    all_layers = all_layers_by_kind(model, layout, stages)
    recomputed = layers_by_kind(
        model, layout, stages, stages.recomputed, recomputed_mtp(model, stages)
    )
    layers_w_recomputes, plain_kinds = None, None
    if layout.recompute_again:  # W repeats the recomputation of R or I
        pairs = zip(all_layers, recomputed, strict=True)
        layers_w_recomputes = tuple(xp.where(has_r, *pair) for pair in pairs)
        if recomputed_modules(recompute):
            plain_kinds = _layer_work(model, layout, "none")
    # t accelerators split a message with sequence parallelism, or if each sends a part
    is_split = 1 - (1 - layout.sequence_parallel) * (1 - layout.scatter_gather)
    split_by = 1 + (layout.tensor - 1) * is_split
    message = formulas.boundary_bytes(model, layout) * layout.shared_by / split_by
    num_outputs = 1 + model.mtp_layers * stages.mtp_before  # hidden states in a message
    return StageWork(
        layout=layout,
        stages=stages,
        layers=all_layers,
        recomputed=recomputed,
        kinds=_layer_work(model, layout, recompute),
        embedding=PartWork(embedding_ops(model, layout), embedding_collectives(model, layout)),
        head=PartWork(
            ops=head_ops(model, layout),
            collectives=head_collectives(model, layout),
            whole=whole_head(model, layout),
            weights=head,
            trained=ParameterCounts(trained * head.dense, 0.0),
        ),
        heads=stages.last * (1 + model.mtp_layers) * (model.vocabulary > 0),
        message_bytes=message * num_outputs,
        parameters=stage_parameters(model, layout, stages, base=trained),
        gradient_bytes=model.accumulated_bytes,
        element_bytes=element,
        update_bytes=2 * element + 2 * model.optimizer_bytes,
        tied_parameters=tied,
        offload_bytes=offload,
        layers_w_recomputes=layers_w_recomputes,
        plain_kinds=plain_kinds,
    )


def _layer_work(model: Model, layout: Layout, recompute: str) -> tuple[PartWork, ...]:
    """Return the work of a layer of each kind, whose I recomputes the parts in `recompute`."""
    return tuple(
        PartWork(
            ops=layer_ops(model, kind_layout, kind, recompute),
            collectives=layer_collectives(model, kind_layout, kind, recompute=recompute),
            whole=whole_layer(model, kind_layout, kind, recompute),
            whole_collectives=whole_layer_collectives(model, kind_layout, kind),
            weights=layer_weights(model, layout)[kind],
            trained=layer_weights(model, layout, base=layout.trains_base)[kind],
        )
        for kind, kind_layout in layer_kinds(model, layout)
    )


class StageBytes(NamedTuple):
    """Memory [B] that each stage needs, per accelerator of a worker that holds it."""

    weights: Numbers  # (stages) [B]
    gradients: Numbers  # (stages) [B]
    optimizer: Numbers  # (stages) optimizer state that is not in the host's memory [B]
    gathered: Numbers  # (stages) gathered weights of running layers, if replicas split weights [B]
    buffers: Numbers  # (stages) share of the buffers that its worker's backwards use [B]
    activations: Numbers  # (stages) of a microbatch, or (stages, microbatches) with slices [B]
    weight_share: Numbers  # (stages) share of activations for W after I; above 1 if I recomputes
    checkpoint: Numbers  # (stages) part of activations that is kept between F and R [B]
    # (stages) more memory while B, I or W runs: B for a layer or group, I for all that W needs [B]
    at_work: tuple[Numbers, Numbers, Numbers]
    version: Numbers  # (stages) one more version of trained weights [B]

    @property
    def static(self) -> Numbers:
        """Return the memory that is held for the whole step: all but activations (stages) [B]."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.buffers

    @property
    def parts(self) -> tuple[Numbers, ...]:
        """Return the sizes [B] of an activation's parts, in the order of `PARTS` of the ledger."""
        needed_by_w = self.weight_share * self.activations
        return self.activations, needed_by_w, self.checkpoint, *self.at_work

    @property
    def ledger_sizes(self) -> dict[str, NumpyArray]:
        """Return the activation sizes (stages, ..) as arguments of `activation_memory`."""
        sizes = self.activations, self.weight_share, self.checkpoint, self.at_work
        return dict(zip(LEDGER_SIZES, map(np.asarray, sizes), strict=True))


def stage_bytes(
    workload: Workload,
    table: ScheduleTable,
    assigned: StageLayers | Stages | None = None,
    microbatch_size: Number | None = None,
) -> StageBytes:
    """Compute the memory [B] that each stage needs, per accelerator of a worker that holds it.

    Full recomputation keeps the input of every layer, or of every group of layers. B recomputes one
    layer or group at a time. I recomputes all that W needs, and so does R on stages with R cells.
    If W recomputes again, inputs stay until W. A slice also keeps its keys and values for later
    slices. The backward of a microbatch holds their gradients for all slices but the current one.

    Without backwards, a stage holds weights, all keys and values, and one layer's activations.
    """
    if table.grammar.slices > 1 and microbatch_size is None:
        return _bytes_by_slice(workload, table, assigned)
    layout = workload.layout(table, microbatch_size)
    stages = find_stages(workload, table, assigned)
    if table.grammar.forward_only:
        return _forward_bytes(workload.model, layout, stages)
    has_r = is_recomputed(table).max(axis=1)
    in_layer, slices = workload.recomputation.in_layer, table.grammar.slices
    memory = bytes_of_stages(workload.model, layout, stages, in_layer, slices, has_r=has_r)
    if Phase.UNSHARD in table.used_phases:  # cells gather whole stages: see `gathered_bytes`
        memory = memory._replace(gathered=0.0 * memory.gathered)
    if Phase.REDUCE_GRAD in table.used_phases:  # stages hold whole gradients until REDUCE_GRAD
        unsplit = dataclasses.replace(layout, zero=xp.minimum(layout.zero, 1.0))
        unsplit_memory = bytes_of_stages(workload.model, unsplit, stages, in_layer)
        memory = memory._replace(gradients=unsplit_memory.gradients)
    is_again = layout.recompute_again and (workload.recompute != "none" or has_r.any())
    if workload.weight_share is None or is_again:
        return memory
    # the workload's share is of all memory that I holds, the record's share is of activations
    activations: Any = memory.activations
    _, held_in_input_grad, _ = memory.at_work
    in_input_grad = activations + held_in_input_grad
    share = workload.weight_share * in_input_grad / xp.where(activations == 0, 1.0, activations)
    return memory._replace(weight_share=share)


_SLICE_FIELDS = ("activations", "weight_share", "checkpoint", "at_work", "buffers")


def _bytes_by_slice(
    workload: Workload, table: ScheduleTable, assigned: StageLayers | Stages | None
) -> StageBytes:
    """Return the memory of stages, with activation sizes by slice (stages, microbatches)."""
    slice_bytes: list[StageBytes] = []

    def compute_sizes(model: Model, microbatch_size: float) -> dict[str, NumpyArray]:
        """Return those fields of `StageBytes` that differ by slice, for a single slice."""
        sized = dataclasses.replace(workload, model=model)
        memory = stage_bytes(sized, table, assigned, microbatch_size)
        slice_bytes.append(memory)
        return {name: np.asarray(getattr(memory, name)) for name in _SLICE_FIELDS}

    fields = by_slice(workload, table, compute_sizes)
    fields["buffers"] = fields["buffers"].max(axis=-1)  # one buffer serves all slices
    return slice_bytes[0]._replace(**fields)


def _forward_bytes(model: Model, layout: Layout, stages: Stages) -> StageBytes:
    """Return the memory of stages in inference: weights, caches, activations of a layer."""
    model = dataclasses.replace(model, dropout=False)
    memory, zeros = bytes_of_stages(model, layout, stages), np.zeros(len(stages.last))
    layers = all_layers_by_kind(model, layout, stages)
    largest_layer: Any = zeros
    for (kind, kind_layout), count in zip(layer_kinds(model, layout), layers, strict=True):
        size = formulas.layer_activation_bytes(model, kind_layout, kind=kind)
        largest_layer = xp.maximum(largest_layer, size * (count > 0))
    logits = layout.microbatch_size * formulas.FLOAT32 * model.vocabulary / layout.tensor
    fields: dict[str, Any] = dict.fromkeys(StageBytes._fields, zeros)
    fields["at_work"] = (zeros, zeros, zeros)
    fields["weights"], fields["gathered"] = memory.weights, memory.gathered
    # the stages of a worker share one buffer; logits are on the last stage only
    fields["buffers"] = largest_layer * stages.share + stages.last * logits
    fields["activations"] = sum(layers) * formulas.cache_bytes(model, layout)
    return StageBytes(**fields)


def bytes_of_stages(
    model: Model,
    layout: Layout,
    stages: Stages,
    recompute: str = "none",
    slices: int = 1,
    has_r: Any = np.False_,
) -> StageBytes:
    """Compute the memory of stages without a table, as `work_of_stages` counts their work."""
    # A layer keeps `after_f` bytes after F, or its input if it is recomputed; W needs `for_w`
    # bytes.
    first, last = stages.first, stages.last
    embedding_bytes, head_bytes = formulas.edge_activation_bytes(model, layout)
    keys = (slices > 1) * formulas.key_bytes(model, layout)
    layer_input = formulas.layer_activation_bytes(model, layout, "full") + keys
    heads = last * (1 + model.mtp_layers)  # every loss keeps its logits until the backward
    # an MTP layer keeps an embedding for its norm, h, and a product's input, 2 h, also for W
    again = recomputed_mtp(model, stages)
    mtp_input = layout.trains_base * (stages.mtp * model.mtp_layers - again)
    mtp_input = mtp_input * formulas.boundary_bytes(model, layout)
    edges = first * embedding_bytes + heads * head_bytes + 3 * mtp_input
    layers = all_layers_by_kind(model, layout, stages)
    recomputed = layers_by_kind(model, layout, stages, stages.recomputed, again)
    group, has_w = layout.recompute_group, layout.trains_layers

    def checkpoint_bytes(counts: tuple[PerStage, ...]) -> Numbers:
        """Return the bytes of a checkpoint for each group of layers; the last may be smaller."""
        rounded_up = -xp.floor(-sum(counts) / group)
        return xp.where(group > 1, rounded_up, sum(counts)) * layer_input

    checkpoints = checkpoint_bytes(recomputed)
    activations, checkpoint = checkpoints + edges, checkpoint_bytes(layers) + edges
    held_in_i, needed_by_w = -checkpoints, 0.0 * last  # change in I; bytes for W
    layer_peak = layer_peak_in_i = 0.0 * last  # added by one layer or group while it runs
    kinds = layer_kinds(model, layout)
    for (kind, kind_layout), count, num_recomputed in zip(kinds, layers, recomputed, strict=True):
        num_kept = count - num_recomputed
        # bytes of a layer while it runs, after its F, and for its W
        running = formulas.layer_activation_bytes(model, kind_layout, kind=kind)
        after_f = formulas.layer_activation_bytes(model, kind_layout, recompute, kind)
        for_w = formulas.layer_weight_grad_bytes(model, kind_layout, kind)
        added_by_i = xp.maximum(for_w - after_f, 0.0)
        activations = activations + num_kept * after_f
        needed_by_w = needed_by_w + count * for_w
        held_in_i = held_in_i + num_recomputed * running + num_kept * added_by_i
        # at least one layer, also if a sensitivity analysis scales the number of layers
        group_layers = xp.minimum(group, xp.maximum(num_recomputed, 1.0))
        group_peak = (num_recomputed > 0) * (group_layers * running - layer_input)
        layer_peak = xp.maximum(layer_peak, group_peak)
        layer_peak = xp.maximum(layer_peak, (num_kept > 0) * (running - after_f))
        kept_peak = (num_kept > 0) * (running - after_f - added_by_i)
        layer_peak_in_i = xp.maximum(layer_peak_in_i, kept_peak)
    held_in_i = held_in_i + layer_peak_in_i if has_w else layer_peak
    head_for_w = heads * formulas.head_weight_grad_bytes(model, layout) + 2 * mtp_input
    needed_by_w, held_in_w = has_w * needed_by_w + head_for_w, 0.0 * last
    if layout.recompute_again:  # W starts from the checkpoints, as I does
        is_again = (has_r + stages.recomputed + len(recomputed_modules(recompute))) > 0
        until_w = xp.where(has_r, checkpoint, activations) - edges + head_for_w
        needed_by_w = xp.where(is_again, until_w, needed_by_w)
        held_in_i = xp.where(is_again, layer_peak, held_in_i)
        held_in_w = is_again * xp.where(has_r, activations - checkpoint, layer_peak)
    return StageBytes(
        **_parameter_bytes(model, layout, stages),
        buffers=_buffers(model, layout, layers, stages) + (slices - 1) * sum(layers) * keys,
        activations=activations,
        # a stage with only the embedding may keep nothing
        weight_share=needed_by_w / xp.where(activations == 0, 1.0, activations),
        checkpoint=checkpoint,
        at_work=(layer_peak, held_in_i, held_in_w),
    )


def _parameter_bytes(model: Model, layout: Layout, stages: Stages) -> dict[str, Numbers]:
    """Return those fields of `StageBytes` that depend on parameters only (stages) [B]."""
    parameters = stage_parameters(model, layout, stages)
    trained = stage_parameters(model, layout, stages, base=layout.trains_base)
    optimizer = _split_bytes(layout, trained, model.optimizer_bytes, 1)
    layer_sizes = [sum(counts) for counts in layer_weights(model, layout).values()]
    largest_layer = functools.reduce(xp.maximum, layer_sizes)
    return {
        "weights": _split_bytes(layout, parameters, model.element_bytes, 3),
        "gradients": _split_bytes(layout, trained, model.accumulated_bytes, 2),
        "optimizer": (1 - layout.optimizer_offload) * optimizer,
        "gathered": 2 * model.element_bytes * largest_layer * (layout.zero >= 3) * stages.share,
        "version": model.element_bytes * (trained.dense + trained.experts),
    }


def _split_bytes(layout: Layout, parameters: ParameterCounts, size: Number, level: int) -> Numbers:
    """Return the bytes of parameters of `size` bytes, which replicas split from a ZeRO level on."""
    is_split = layout.zero >= level
    dense_parts = 1 + (layout.replicas - 1) * is_split
    expert_parts = 1 + (layout.expert_replicas - 1) * is_split
    return size * (parameters.dense / dense_parts + parameters.experts / expert_parts)


def _buffers(model: Model, layout: Layout, layers: tuple[PerStage, ...], stages: Stages) -> Numbers:
    """Return each stage's share of the buffers [B] that its worker's backwards use (stages)."""
    counts = dict.fromkeys(KINDS, 0.0 * stages.last)
    for (kind, _), count in zip(layer_kinds(model, layout), layers, strict=True):
        counts[kind] = counts[kind] + count
    has_dense, has_moe = 1.0 * (counts["dense"] > 0), 1.0 * (counts["moe"] > 0)
    without_head = formulas.buffer_bytes(model, layout, dense=has_dense, moe=has_moe, head=0.0)
    with_head = formulas.buffer_bytes(model, layout, dense=has_dense, moe=has_moe, head=stages.last)
    return without_head * stages.share + (with_head - without_head)


def memory_bytes(
    workload: Workload, table: ScheduleTable, assigned: StageLayers | None = None
) -> Float[NumpyArray, " workers"]:
    """Return the peak memory of each worker, per accelerator: static memory and activations.

    F allocates an activation at its start. The end of B frees it. The end of I frees all but the
    share that W needs, and the end of W frees that share. Offloads count as ending at once:
    `activation_memory` of a run follows them in time.

    Args:
      workload: model, minibatch and parallelism.
      table: the schedule.
      assigned: layers of each stage, as tuning has them; None to assign them by the workload's
        `pipeline_layout` or the table's shares.

    Returns:
      (workers) bytes.

    Raises:
      ValueError: if the microbatches do not divide the minibatch, or layers are too few.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=8)
      >>> workload = pj.Workload(pj.load_model("gpt3-175b"), minibatch=8, tensor_parallel=8)
      >>> print(f"{pj.memory_bytes(workload, table)[0] / 1e9:.1f} GB")
      100.9 GB
    """
    check_types(workload=(workload, Workload), table=(table, ScheduleTable))
    check_types(assigned=(assigned, StageLayers, type(None)))
    memory = stage_bytes(workload, table, assigned)
    # bytes of each part of an activation: (stages), or (stages, microbatches)
    parts = np.broadcast_arrays(*map(np.asarray, memory.parts))
    counts = held_in_rows(table, by_microbatch=parts[0].ndim == 2, at_work=True)
    peaks = counts.peaks(np.stack([part.ravel() for part in parts]), table.num_workers)
    static = static_bytes(table, np.asarray(memory.static), np.asarray(memory.version))
    return static + peaks + gathered_bytes(workload, table)


def gathered_bytes(workload: Workload, table: ScheduleTable) -> Float[NumpyArray, " workers"]:
    """Return each worker's peak memory [B] of weights that UNSHARD cells gather (workers)."""
    if Phase.UNSHARD not in table.used_phases:  # most tables: nothing to size
        return np.zeros(table.num_workers)
    sizes = gathered_sizes(workload, table)
    if np.array_equal(sizes, np.asarray(stage_bytes(workload, table).weights, float)):
        return np.zeros(table.num_workers)  # unsplit weights need no gathers
    return gathered_peak(table, sizes)


def gathered_sizes(workload: Workload, table: ScheduleTable) -> Float[NumpyArray, " stages"]:
    """Return the size of each stage's weights when they are not split (stages) [B]."""
    unsplit = dataclasses.replace(workload, zero=0)
    return np.asarray(stage_bytes(unsplit, table).weights, float)


def static_parts(
    workload: Workload, table: ScheduleTable
) -> dict[str, Float[NumpyArray, " workers"]]:
    """Return {part, such as "optimizer": static memory per accelerator (workers) [B]}."""
    memory = stage_bytes(workload, table)
    if table.grammar.forward_only:
        by_part = {"parameters": memory.weights, "activations": memory.gathered + memory.buffers}
    else:
        by_part = {
            "parameters": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "buffers": memory.gathered + memory.buffers,
        }
    parts = {name: static_bytes(table, np.asarray(part)) for name, part in by_part.items()}
    gathered = gathered_bytes(workload, table)
    if gathered.any():
        parts["gathered weights"] = gathered
    stashed = static_bytes(table, np.zeros(table.num_stages), np.asarray(memory.version))
    return parts | {"parameters": parts["parameters"] + stashed}
