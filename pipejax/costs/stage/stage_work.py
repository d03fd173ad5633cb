"""Work of a schedule's stages: FLOP, bytes of memory and messages of one accelerator.

It depends on model, layout and schedule, never on the speed of a machine. `stage_work` and
`stage_bytes` are for one schedule; `work_of_stages` and `bytes_of_stages` count the same from
numbers alone, which may be padded and traced, so that many layouts are one batch.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs import array_functions as xp
from pipejax.costs.layers.collectives import (
    Collective,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    whole_layer_collectives,
)
from pipejax.costs.layers.formulas import (
    FLOAT32,
    boundary_bytes,
    buffer_bytes,
    cache_bytes,
    edge_activation_bytes,
    head_weight_grad_bytes,
    key_bytes,
    layer_activation_bytes,
    layer_weight_grad_bytes,
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
from pipejax.costs.model.model import KINDS, Model
from pipejax.costs.model.workload import (
    ParameterCounts,
    PerStage,
    StageLayers,
    Stages,
    Workload,
    all_layers_by_kind,
    layer_weights,
    layers_by_kind,
    stage_parameters,
    stages_held,
)
from pipejax.costs.stage.slices import by_slice, check_whole
from pipejax.costs.system.system import Number, Numbers
from pipejax.schedules.cells.memory_ledger import LEDGER_SIZES, is_recomputed
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import gathered_peak, held_in_rows, static_bytes
from pipejax.schedules.table.table import ScheduleTable

PerKind = tuple[PerStage, ...]


class PartWork(NamedTuple):
    """Work of one layer, of the embedding or of the head, on one accelerator."""

    ops: tuple[LayerOp, ...]  # its kernels
    collectives: tuple[Collective, ...]  # exchanges beside and between them
    whole: tuple[LayerOp, ...]  # all kernels as one op, for systems that price layers, not kernels
    whole_collectives: tuple[Collective, ...]  # exchanges that go with it
    weights: ParameterCounts  # parameters of one accelerator, which replicas may split
    trained: ParameterCounts  # those of them that have gradients


class StageWork(NamedTuple):
    """Work, bytes and messages of one accelerator of every stage for one microbatch."""

    layout: Layout  # degrees of parallelism
    stages: Stages  # where they lie
    layers: PerKind  # (stages) layers of each kind
    recomputed: PerKind  # (stages) those of each kind whose forward is run again within I
    kinds: tuple[PartWork, ...]  # work of one layer, by kind
    embedding: PartWork  # work of the embedding
    head: PartWork  # work of the output head and its loss
    heads: PerStage  # (stages) output heads: one on the last stage, and one for each further token
    message_bytes: Numbers  # (1, boundaries) bytes of one message
    parameters: ParameterCounts  # trained ones of one accelerator, before replicas split them
    gradient_bytes: Number  # bytes per parameter in the gradient exchange
    element_bytes: Number  # bytes per weight
    update_bytes: Number  # bytes per parameter that the optimizer reads and writes
    tied_parameters: Number  # of an embedding that first and last stage both hold
    offload_bytes: Numbers | None  # (stages) to the host, if activations may go
    # 1 where UNSHARD or REDUCE_GRAD cells exchange what replicas split; None without
    in_cells: Float[NumpyArray, " phases"] | None = None
    again: PerKind | None = None  # (stages) layers of each kind that W runs again

    @property
    def parts(self) -> tuple[PartWork, ...]:
        """Work of one layer of each kind, of the embedding and of the head."""
        return (*self.kinds, self.embedding, self.head)


def stage_work(
    workload: Workload,
    table: ScheduleTable,
    *,
    assigned: StageLayers | Stages | None = None,
    microbatch_size: Number | None = None,
    offloads: bool = False,
) -> StageWork:
    """Count FLOP, memory traffic and message bytes of every op and message.

    Microbatches in slices have a size for each slice, which must be given. `offloads` counts what
    O moves also where the schedule has none.
    """
    if microbatch_size is None:
        check_whole(table, "counting the work of one size")
    work = work_of_stages(
        workload.model,
        workload.layout(table, microbatch_size),
        stages_held(workload, table, assigned),
        recompute=workload.recompute_in_layer,
        offloads=offloads or table.offloads,
    )._replace(in_cells=in_cells(table))
    if not workload.recompute_again:
        return work
    has_r = is_recomputed(table).max(axis=1)  # of these R brings all layers back
    pairs = zip(work.layers, work.recomputed, strict=True)
    return work._replace(again=tuple(xp.where(has_r, *pair) for pair in pairs))


def in_cells(table: ScheduleTable) -> Float[NumpyArray, " phases"] | None:
    """Return which exchanges of split weights are cells of a table (phases); None without any."""
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
) -> StageWork:
    """Count the work of stages from numbers alone, all of which may be traced."""
    # Full recomputation is the layers' forward once more, in I or, where the table has R cells for
    # the stage, in R; `recompute` is what a layer itself recomputes, never "full".
    trained = layout.trains_base
    offload = bytes_of_stages(model, layout, stages, recompute).activations if offloads else None
    element = model.element_bytes
    head = ParameterCounts(model.head_parameters / layout.tensor, 0.0)
    has_copies = model.tied_embeddings or 1.0 * (model.mtp_layers > 0)
    tied = trained * has_copies * model.head_parameters / layout.tensor
    return StageWork(
        layout=layout,
        stages=stages,
        layers=all_layers_by_kind(model, stages),
        recomputed=layers_by_kind(model, stages, stages.recomputed),
        kinds=tuple(
            PartWork(
                layer_ops(model, layout, kind, recompute),
                layer_collectives(model, layout, kind, recompute=recompute),
                whole_layer(model, layout, kind, recompute),
                whole_layer_collectives(model, layout, kind),
                weights,
                layer_weights(model, layout, base=trained)[kind],
            )
            for kind, weights in layer_weights(model, layout).items()
        ),
        embedding=PartWork(
            embedding_ops(model, layout),
            embedding_collectives(model, layout),
            (),
            (),
            ParameterCounts(0.0, 0.0),
            ParameterCounts(0.0, 0.0),
        ),
        head=PartWork(
            head_ops(model, layout),
            head_collectives(model, layout),
            whole_head(model, layout),
            (),
            head,
            ParameterCounts(trained * head.dense, 0.0),
        ),
        heads=stages.last * (1 + model.mtp_layers) * (model.vocabulary > 0),
        message_bytes=_message_bytes(model, layout, stages),
        parameters=stage_parameters(model, layout, stages, base=trained),
        gradient_bytes=model.accumulated_bytes,
        element_bytes=element,
        update_bytes=2 * element + 2 * model.optimizer_bytes,
        tied_parameters=tied,
        offload_bytes=offload,
    )


def _message_bytes(model: Model, layout: Layout, stages: Stages) -> Number:
    """Bytes of a message (1, boundaries): behind layers for further tokens their outputs too."""
    boundary = boundary_bytes(model, layout) * layout.shared_by / layout.message_shared_by
    return boundary * (1 + model.mtp_layers * xp.cumsum(stages.mtp)[None, :-1])


class StageBytes(NamedTuple):
    """Memory of one copy of each stage, per accelerator."""

    weights: Numbers  # (stages) [B]
    gradients: Numbers  # (stages) [B]
    optimizer: Numbers  # (stages) optimizer state that is not in the host's memory [B]
    gathered: Numbers  # (stages) of the layers at work, where replicas split weights [B]
    buffers: Numbers  # (stages) what the backward needs once per worker, spread over its stages [B]
    activations: Numbers  # (stages), or (stages, microbatches) of slices [B]
    weight_share: Numbers  # (stages) needed by W after I; above 1 where I recomputes
    checkpoint: Numbers  # (stages) left between F and R [B]
    # (stages) held while B, I and W run: B one layer or group at a time, I all that W needs [B]
    at_work: tuple[Numbers, Numbers, Numbers]
    version: Numbers  # (stages) one more version of trained weights [B]

    @property
    def static(self) -> Numbers:
        """Weights, gradients, optimizer state, what is gathered, and buffers (stages) [B]."""
        lasting = self.weights + self.gradients + self.optimizer
        return lasting + self.gathered + self.buffers

    @property
    def parts(self) -> tuple[Numbers, ...]:
        """Sizes of an activation's parts, in the order of the memory ledger's `PARTS` [B]."""
        held = self.activations, self.weight_share * self.activations, self.checkpoint
        return *held, *self.at_work

    @property
    def ledger_sizes(self) -> dict[str, NumpyArray]:
        """The same as arguments of `activation_memory`."""
        sizes = self.activations, self.weight_share, self.checkpoint, self.at_work
        return dict(zip(LEDGER_SIZES, map(np.asarray, sizes), strict=True))


def stage_bytes(
    workload: Workload,
    table: ScheduleTable,
    assigned: StageLayers | Stages | None = None,
    microbatch_size: Number | None = None,
) -> StageBytes:
    """Memory of one copy of each stage, per accelerator.

    Full recomputation leaves the input of every layer, or of every group of them. B brings back one
    layer or group at a time; I brings back all that W needs, as R does on stages that the table
    recomputes in cells; where W recomputes again, the inputs stay until W. A slice keeps its keys
    and values too, which later ones are recomputed with, and while a microbatch goes back there are
    gradients of them for all slices but the one at work.

    Without backwards there are weights, keys and values of all tokens so far, and one layer's
    activations at work.
    """
    if table.grammar.slices > 1 and microbatch_size is None:
        return _bytes_by_slice(workload, table, assigned)
    layout = workload.layout(table, microbatch_size)
    stages = stages_held(workload, table, assigned)
    if table.grammar.forward_only:
        return _forward_bytes(workload.model, layout, stages)
    memory = bytes_of_stages(
        workload.model,
        layout,
        stages,
        workload.recompute_in_layer,
        table.grammar.slices,
        has_r=is_recomputed(table).max(axis=1),
    )
    exchanged = in_cells(table)
    if exchanged is not None and exchanged[0]:  # whole stages, for as long as their cells say
        memory = memory._replace(gathered=0.0 * memory.gathered)
    if exchanged is not None and exchanged[-1]:  # gradients add up as a whole until then
        apart = dataclasses.replace(layout, zero=xp.minimum(layout.zero, 1.0))
        whole = bytes_of_stages(workload.model, apart, stages, workload.recompute_in_layer)
        memory = memory._replace(gradients=whole.gradients)
    if workload.weight_share is None or layout.recompute_again:
        return memory
    # a share of all that is there when I runs
    held: Any = memory.activations
    share = workload.weight_share * (held + memory.at_work[1]) / (held + (held == 0))
    return memory._replace(weight_share=share)


_OF_SLICES = ("activations", "weight_share", "checkpoint", "at_work", "buffers")


def _bytes_by_slice(
    workload: Workload, table: ScheduleTable, assigned: StageLayers | Stages | None
) -> StageBytes:
    """Return memory of stages in slices, which differ where scores are stored."""
    slices: list[StageBytes] = []

    def price(model: Model, size: float) -> dict[str, NumpyArray]:
        sized = dataclasses.replace(workload, model=model)
        slices.append(stage_bytes(sized, table, assigned, size))
        return {name: np.asarray(getattr(slices[-1], name)) for name in _OF_SLICES}

    stacked = by_slice(workload, table, price)
    return slices[0]._replace(**stacked | {"buffers": stacked["buffers"].max(axis=-1)})


def _forward_bytes(model: Model, layout: Layout, stages: Stages) -> StageBytes:
    """Memory of stages that run forwards alone: weights, caches, and one layer at work."""
    model = dataclasses.replace(model, dropout=False)
    memory, none = bytes_of_stages(model, layout, stages), 0.0 * stages.last
    layers = all_layers_by_kind(model, stages)
    whole = [layer_activation_bytes(model, layout, kind=kind) for kind in model.layers_by_kind]
    widest = functools.reduce(xp.maximum, (w * (n > 0) for w, n in zip(whole, layers, strict=True)))
    # of the last token of each sequence
    logits = layout.microbatch_size * FLOAT32 * model.vocabulary / layout.tensor
    numbers: dict[str, Any] = dict.fromkeys(StageBytes._fields, none)
    numbers |= {"weights": memory.weights, "gathered": memory.gathered}
    numbers["buffers"] = widest * stages.share + stages.last * logits
    numbers["activations"] = sum(layers) * cache_bytes(model, layout)
    return StageBytes(**numbers | {"at_work": (none, none, none)})


def bytes_of_stages(
    model: Model,
    layout: Layout,
    stages: Stages,
    recompute: str = "none",
    slices: int = 1,
    has_r: Numbers = 0.0,
) -> StageBytes:
    """Memory of stages from numbers alone, all of which may be traced and padded."""
    first, last = stages.first, stages.last
    mask, head = edge_activation_bytes(model, layout)
    keys = (slices > 1) * key_bytes(model, layout)
    inputs = layer_activation_bytes(model, layout, "full") + keys
    edges = first * mask + last * head
    layers = all_layers_by_kind(model, stages)
    recomputed = layers_by_kind(model, stages, stages.recomputed)
    group, has_w = layout.recompute_group, layout.trains_layers  # or nothing stays after I
    # inputs of groups, of which the last may be smaller
    checkpoints, all_checkpoints = (
        xp.where(group > 1, -xp.floor(-sum(counts) / group), sum(counts)) * inputs
        for counts in (recomputed, layers)
    )
    activations, checkpoint = checkpoints + edges, all_checkpoints + edges
    in_i, needed = -checkpoints, 0.0 * last
    at_once = in_layer = 0.0 * last
    # A layer holds `whole` while it runs, `residue` after F; of `w_bytes` for W, I adds `for_w`
    for kind, count, again in zip(model.layers_by_kind, layers, recomputed, strict=True):
        rest = count - again
        whole = layer_activation_bytes(model, layout, kind=kind)
        residue = layer_activation_bytes(model, layout, recompute, kind)
        w_bytes = layer_weight_grad_bytes(model, layout, kind)
        for_w = xp.maximum(w_bytes - residue, 0.0)
        activations = activations + rest * residue
        needed = needed + count * w_bytes
        in_i = in_i + again * whole + rest * for_w
        # at least one layer, also of a relaxed number: a descent then sees what more of them save
        group_of_kind = xp.minimum(group, xp.maximum(again, 1.0)) * whole - inputs
        at_once = xp.maximum(at_once, (again > 0) * group_of_kind)
        at_once = xp.maximum(at_once, (rest > 0) * (whole - residue))
        in_layer = xp.maximum(in_layer, (rest > 0) * (whole - residue - for_w))
    in_i = in_i + in_layer if has_w else at_once
    head_needs = last * head_weight_grad_bytes(model, layout)
    needed_by_w, in_w = has_w * needed + head_needs, 0.0 * last
    if layout.recompute_again:  # W starts where I did
        needed_by_w = xp.where(has_r, checkpoint, activations) - edges + head_needs
        in_i, in_w = at_once, xp.where(has_r, activations - checkpoint, at_once)
    parameters = stage_parameters(model, layout, stages)
    trained = stage_parameters(model, layout, stages, base=layout.trains_base)
    sharing = layout.replicas, layout.expert_replicas

    def shared(parameters: ParameterCounts, size: Number, level: int) -> Numbers:
        dense, experts = (1 + (count - 1) * (layout.zero >= level) for count in sharing)
        return size * (parameters.dense / dense + parameters.experts / experts)

    layer_sizes = [sum(part) for part in layer_weights(model, layout).values()]
    biggest = functools.reduce(xp.maximum, layer_sizes)
    return StageBytes(
        weights=shared(parameters, model.element_bytes, 3),
        gradients=shared(trained, model.accumulated_bytes, 2),
        optimizer=(1 - layout.optimizer_offload) * shared(trained, model.optimizer_bytes, 1),
        gathered=2 * model.element_bytes * biggest * (layout.zero >= 3) * stages.share,
        buffers=_buffers(model, layout, layers, stages) + (slices - 1) * sum(layers) * keys,
        activations=activations,
        # a stage that holds the embedding alone may leave nothing
        weight_share=needed_by_w / (activations + (activations == 0)),
        checkpoint=checkpoint,
        at_work=(at_once, in_i, in_w),
        version=model.element_bytes * (trained.dense + trained.experts),
    )


def _buffers(model: Model, layout: Layout, layers: tuple[PerStage, ...], stages: Stages) -> Numbers:
    """Buffers of the backward (stages): stages of one worker share those of their layers [B]."""
    kinds = dict(zip(model.layers_by_kind, layers, strict=True))
    dense, moe = (1.0 * (kinds.get(kind, 0.0 * stages.last) > 0) for kind in KINDS)
    without_head, with_head = (
        buffer_bytes(model, layout, dense=dense, moe=moe, head=head) for head in (0.0, stages.last)
    )
    return without_head * stages.share + (with_head - without_head)


def memory_bytes(
    workload: Workload, table: ScheduleTable, assigned: StageLayers | None = None
) -> Float[NumpyArray, " workers"]:
    """Memory that each worker needs per accelerator: static, and activations at their peak.

    An activation is taken at the start of F; the end of B frees it, the end of I all but the share
    that W needs, and the end of W that share. Offloads count as ending at once: `activation_memory`
    of a run follows them in time.

    Args:
      workload: model, minibatch and parallelism.
      table: the schedule.
      assigned: layers by stage, assigned by the table's shares if None.

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
    memory = stage_bytes(workload, table, assigned)
    parts = np.broadcast_arrays(*map(np.asarray, memory.parts))
    held = held_in_rows(table, by_microbatch=parts[0].ndim == 2, at_work=True)
    peaks = held.peaks(np.stack([part.ravel() for part in parts]), table.num_workers)
    lasting = static_bytes(table, np.asarray(memory.static), np.asarray(memory.version))
    return lasting + peaks + gathered_bytes(workload, table)


def gathered_bytes(workload: Workload, table: ScheduleTable) -> Float[NumpyArray, " workers"]:
    """Return the largest memory (workers) [B] of weights that cells gather, in row order."""
    if Phase.UNSHARD not in table.used_phases:  # most tables: nothing to size
        return np.zeros(table.num_workers)
    sizes = gathered_sizes(workload, table)
    if np.array_equal(sizes, np.asarray(stage_bytes(workload, table).weights, float)):
        return np.zeros(table.num_workers)  # nothing is split: weights are there all the time
    return gathered_peak(table, sizes)


def gathered_sizes(workload: Workload, table: ScheduleTable) -> Float[NumpyArray, " stages"]:
    """Weights of a stage once they are gathered (stages) [B]."""
    whole = dataclasses.replace(workload, zero=0)
    return np.asarray(stage_bytes(whole, table).weights, float)


def static_parts(
    workload: Workload, table: ScheduleTable
) -> dict[str, Float[NumpyArray, " workers"]]:
    """Memory that lasts the whole step, by part: (workers) bytes per accelerator."""
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
    parts |= {"gathered weights": gathered} if gathered.any() else {}
    older = static_bytes(table, np.zeros(table.num_stages), np.asarray(memory.version))
    return parts | {"parameters": parts["parameters"] + older}
