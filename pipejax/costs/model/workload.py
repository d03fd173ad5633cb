"""Workload of a schedule: model, parallelism, and the layers and parameters of each stage.

Layers are assigned to stages by the table's stage shares, in whole layers.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.cached_method import cached_method
from pipejax.base.checks import (
    MAX_COUNT,
    MismatchError,
    check_types,
    legal_divisors,
    positive,
    share,
    whole_number,
)
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import mapped
from pipejax.costs import array_functions as xp
from pipejax.costs.model.layout import Layout, Workers
from pipejax.costs.model.model import Model, check_sizes
from pipejax.costs.model.pipeline_layout import PipelineLayout
from pipejax.costs.model.workload_fields import (
    DISPATCHERS,
    MODULES,
    OF_EXPERTS,
    PRECISIONS,
    RANK_ORDERS,
    WIDE,
    WORKLOAD_FIELDS,
    Recomputation,
    parse_recompute,
)
from pipejax.costs.precision import as_float, is_traced
from pipejax.costs.system.system import Number, Numbers
from pipejax.costs.topology import check_places, places_on
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.table.held_activations import is_recomputed
from pipejax.schedules.table.table import ScheduleTable

# fields that `Workload` and `Layout` share by name
_SHARED_FIELDS = [field for field in dataclasses.fields(Layout) if field.name in WORKLOAD_FIELDS]
PerStage = Float[NumpyArray, " stages"] | Float[xp.Computed, " stages"]
Stragglers = Mapping[int, float] | tuple[tuple[int, float], ...]


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Workload:
    """A training job: the model, its batch, and how accelerators share the work.

    Attributes:
      model: the transformer.
      minibatch: sequences per step and pipeline.
      tensor_parallel: accelerators that split every layer.
      sequence_parallel: whether these accelerators split norms, dropout and messages too.
      scatter_gather: whether each of these accelerators sends only its part of a message, and the
        receivers gather the parts.
      context_parallel: accelerators that split every sequence, beside tensor_parallel.
      expert_parallel: accelerators over which experts are spread, among those that hold a stage.
      expert_tensor_parallel: accelerators that split each expert; as tensor_parallel if 0, which is
        Megatron's default.
      data_parallel: replicas of the whole pipeline, each with its own minibatch.
      zero: what the replicas split: 0 nothing, 1 optimizer state (the distributed optimizer), 2
        gradients too, which every backward then reduces, 3 weights too (FSDP).
      overlap: share of the gradient and weight exchanges that runs beside compute, layer by layer,
        of those that fit there; False is 0, True 1.
      tensor_overlap: share of tensor-parallel exchanges beside the products of a backward.
      expert_overlap: share of the exchanges that send tokens to their experts and back.
      dispatcher: "all-to-all" sends a copy of a token to each of its experts, "per-node" one copy
        to each node with such an expert, which passes it on.
      contiguous_context: whether accelerators that split a sequence hold consecutive tokens; if
        not, all have equally many pairs of tokens under a causal mask.
      graphs: share of the kernels that start as graphs, not one by one.
      optimizer_offload: share of the optimizer's state, and of its update, on the host.
      precision: format of the matrix products: "bf16", "fp16", "fp8", "mxfp8" or "nvfp4".
      attention_precision: format of attention's products, forward and backward; 16 bits if empty.
      head_precision: format of the output head's products; 16 bits if empty.
      wide_first: first layers whose products stay in 16 bits.
      wide_last: last layers whose products stay in 16 bits.
      rank_order: axes of the ranks, the nearest first: "tp-cp-ep-dp-pp" or "tp-pp-dp".
      embedding_units: layers that the embedding counts as when layers are assigned to stages.
      loss_units: layers that the head and its loss count as.
      pipeline_layout: layers of each stage in Megatron's notation, as "Ettt|(tt|)*29m|L", or as
        lists of words; if empty, the table's stage shares assign layers.
      recompute: "none"; "selective", the same as "core_attn", whatever the kernel; "full";
        "block:N", N layers of a stage; "uniform:N", all layers with a checkpoint every N; or parts
        of layers joined by +, as "core_attn+mlp" (`MODULES`).
      recompute_layers: N, which turns recompute "full" into "block:N"; 0 for all layers.
      recompute_again: whether W recomputes like I, so that only checkpoints are kept between them.
      frozen: whether the model's weights have no gradients: then only adapters have W and U.
      lora_rank: r of the adapters A (r x inputs) and B (outputs x r) beside every linear layer of
        attention, MLPs and experts, whose own weights are frozen (LoRA, arXiv:2106.09685); 0 for
        none.
      weight_share: share of an activation that W needs after I; None to compute it from the layers.
      stragglers: {slow worker: factor} on the time of all its ops, as {3: 1.2}.
      worker_places: place of each worker on the machine, numbered node by node; in order if empty.
      pair_factor: k: a fused pair takes max(F, B) + k min(F, B), the sum if k is 1.

    Raises:
      ValueError: if a number is below 1 or above `MAX_COUNT`, a name is unknown, zero is not 0 to
        3, the experts are spread over more accelerators than a stage has, weight_share is not
        in [0, 1], or a pipeline layout is invalid or combined with units.
    """

    model: Model
    minibatch: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    recompute_again: bool = False
    weight_share: float | None = None
    scatter_gather: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    zero: int = 0
    overlap: float = 0.0
    precision: str = PRECISIONS[0]
    rank_order: str = RANK_ORDERS[0]
    embedding_units: int = 0
    loss_units: int = 0
    pipeline_layout: str | Sequence[Any] = ""
    stragglers: Stragglers = ()
    worker_places: Sequence[int] = ()
    pair_factor: float = 1.0
    expert_overlap: float = 0.0
    dispatcher: str = DISPATCHERS[0]
    contiguous_context: bool = False
    graphs: float = 0.0
    tensor_overlap: float = 0.0
    optimizer_offload: float = 0.0
    attention_precision: str = ""
    head_precision: str = ""
    wide_first: int = 0
    wide_last: int = 0
    frozen: bool = False
    lora_rank: int = 0
    expert_tensor_parallel: int = 0

    def __post_init__(self) -> None:
        """Check all fields, and store them in one form: whole numbers, tuples, and texts."""
        check_types(model=(self.model, Model))
        count = whole_number(self.minibatch, "minibatch", maximum=MAX_COUNT)
        object.__setattr__(self, "minibatch", count)
        for name, field in WORKLOAD_FIELDS.items():
            value = getattr(self, name)
            if field.kind == "flag":
                check_types(**{name: (value, bool)})
            elif field.kind != "text":
                object.__setattr__(self, name, field.values.read(value, name))
        if self.recompute == "full" and self.recompute_layers:
            object.__setattr__(self, "recompute", f"block:{self.recompute_layers}")
            object.__setattr__(self, "recompute_layers", 0)
        if count := self.recompute_layers:
            refusal = f"recompute_layers {count} needs recompute 'full', got {self.recompute!r}"
            raise MismatchError(refusal, "recompute_layers")
        if self.weight_share is not None:
            share(self.weight_share, "weight_share")
        check_types(pipeline_layout=(self.pipeline_layout, str, list, tuple))
        if self.pipeline_layout != "":
            if self.embedding_units or self.loss_units:
                raise MismatchError(
                    "pipeline_layout says what each stage holds: units of embedding and loss do "
                    "not go with it",
                    "pipeline_layout",
                )
            layout = str(PipelineLayout.parse(self.pipeline_layout))  # one text for equal layouts
            object.__setattr__(self, "pipeline_layout", layout)
        factors = {}
        for worker, factor in dict(self.stragglers).items():
            worker = whole_number(worker, "stragglers: a worker", minimum=0)
            factors[worker] = positive(factor, f"stragglers: {worker}")
        object.__setattr__(self, "stragglers", tuple(sorted(factors.items())))
        object.__setattr__(self, "worker_places", check_places(self.worker_places, "worker_places"))
        self._check_model()
        self._check_experts()

    def _check_model(self) -> None:
        """Refuse 16-bit layers and recomputed parts of layers that the model does not have."""
        model = self.model
        wide = self.wide_first + self.wide_last
        if not is_traced(model.layers) and np.any(np.asarray(wide > model.layers)):
            raise MismatchError(
                f"wide_first {self.wide_first} and wide_last {self.wide_last} are more than the "
                f"model's {model.layers} layers",
                "wide_last",
            )
        if missing := ", ".join(missing_parts(model, self.recompute)):
            parts = ", ".join(model_parts(model))
            refusal = f"{model.name or 'the model'} has no {missing}; known are {parts}"
            raise MismatchError(f"recompute {self.recompute}: {refusal}", "recompute")

    def _check_experts(self) -> None:
        """Refuse settings of experts that the model or the accelerators of a stage do not allow."""
        for name, neutral in OF_EXPERTS.items():
            if (value := getattr(self, name)) not in neutral and not self.has_experts:
                model = self.model.name or "the model"
                raise MismatchError(f"{name} {value}: {model} has no experts", name)
        accelerators = self.accelerators_per_worker * self.data_parallel
        divided = (
            f"must divide the {accelerators} accelerators that hold a stage "
            "(tensor_parallel x context_parallel x data_parallel)"
        )
        if accelerators % self.expert_parallel:
            raise MismatchError(
                f"expert_parallel {self.expert_parallel} {divided}", "expert_parallel"
            )
        if self.has_experts and accelerators % (self.expert_tensor * self.expert_parallel):
            default = "" if self.expert_tensor_parallel else " (tensor_parallel, by default)"
            raise MismatchError(
                f"expert_tensor_parallel {self.expert_tensor}{default} x expert_parallel "
                f"{self.expert_parallel} {divided}; expert_tensor_parallel 1 leaves experts whole",
                "expert_tensor_parallel",
            )

    @property
    def has_experts(self) -> bool:
        """Return whether the model has routed experts."""
        return self.model.moe is not None

    @property
    def expert_tensor(self) -> int:
        """Count the accelerators that split each expert; by default the tensor parallelism."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def uneven_splits(self) -> list[str]:
        """List, as sentences, sizes of the model that a degree of parallelism does not divide."""
        model, tensor, context = self.model, self.tensor_parallel, self.context_parallel
        # by default, an accelerator holds two chunks of a sequence, one of each half
        has_pairs = context > 1 and not self.contiguous_context
        halves = 2 if has_pairs and model.sequence % context == 0 else 1
        tokens = f"tokens of {'half ' if halves > 1 else ''}a sequence"
        local = tensor if self.sequence_parallel else 1
        # (degree, name of its axis, number to divide, meaning of this number)
        splits = [
            (tensor, "tensor", model.heads, "heads"),
            (context, "context", model.sequence / halves, tokens),
            (local, "sequence", model.sequence // context, "tokens of an accelerator"),
        ]
        if tensor % model.kv_heads:  # else equally many accelerators hold a copy of each head
            splits.append((tensor, "tensor", model.kv_heads, "heads of keys and values"))
        if model.moe is None:
            splits.append((tensor, "tensor", model.ffn_hidden, "columns of the MLP"))
        else:
            splits.append((self.expert_parallel, "expert", model.moe.experts, "experts"))
        return [
            f"{degree}-way {axis} parallelism does not divide {size:.12g} {name}"
            for degree, axis, size, name in splits
            if size % degree
        ]

    @property
    def accelerators_per_worker(self) -> int:
        """Count the accelerators of each pipeline worker: t c."""
        return self.tensor_parallel * self.context_parallel

    @property
    def precisions(self) -> tuple[str, str, str]:
        """Return three precisions: of products with weights, of attention, of the output head."""
        attention, head = self.attention_precision, self.head_precision
        return self.precision, attention or PRECISIONS[0], head or PRECISIONS[0]

    def layout(self, table: ScheduleTable, microbatch_size: Number | None = None) -> Layout:
        """Return parallelism, precisions and microbatch size on the workers of a schedule.

        `microbatch_size` [sequences]: by default the minibatch over the table's microbatches.
        """
        size = self.microbatch_size(table) if microbatch_size is None else microbatch_size
        values: dict[str, Any] = {}
        for field in _SHARED_FIELDS:
            value = getattr(self, field.name)
            is_static = bool(field.metadata)  # a text, or a flag that decides which ops exist
            values[field.name] = value if is_static else float(value)
        layers, attention, head = self.precisions
        values |= {"precision": layers, "attention_precision": attention, "head_precision": head}
        return Layout(
            **values,
            tensor=self.tensor_parallel,
            context=self.context_parallel,
            expert=self.expert_parallel,
            expert_tensor=self.expert_tensor,
            data=self.data_parallel,
            pipeline=table.num_workers,
            microbatch_size=size,
            dispatch_per_node=float(self.dispatcher == "per-node"),
            wide_layers=(0, 0) if layers in WIDE else (self.wide_first, self.wide_last),
            recompute_group=self.recomputation.group,
        )

    @property
    def recomputation(self) -> Recomputation:
        """Return which layers, groups of layers or parts of layers the backward recomputes."""
        return parse_recompute(self.recompute)

    def microbatch_size(self, table: ScheduleTable) -> int:
        """Return the sequences of one microbatch, minibatch / M, which M must divide."""
        count = table.num_microbatches // table.grammar.slices
        size, remainder = divmod(self.minibatch, count)
        if remainder:
            raise MismatchError(
                f"{count} microbatches do not divide a minibatch of {self.minibatch}: "
                f"{legal_divisors(self.minibatch, count)}"
            )
        return size


def model_parts(model: Model) -> list[str]:
    """List the parts of layers (`MODULES`) that a model has."""
    sizes: dict[str, Number] = {"mla_up_proj": model.mla is not None}  # 0 if a part is missing
    if model.moe is None:
        sizes |= {"moe": 0, "moe_act": 0, "shared_experts": 0}
    else:
        sizes |= {"mlp": model.moe.dense_layers, "shared_experts": model.moe.shared_experts}
    absent = {part for part, size in sizes.items() if not is_traced(size) and not np.any(size)}
    return [part for part in MODULES if part not in absent]


def missing_parts(model: Model, recompute: str) -> list[str]:
    """List the parts of layers that a recomputation names and a model lacks."""
    parts = {*parse_recompute(recompute).in_layer.split("+")} & {*MODULES}
    return sorted(parts.difference(model_parts(model))) if parts else []


def stage_layers(
    model: Model, table: ScheduleTable, edge_units: tuple[int, int] = (0, 0)
) -> Int[NumpyArray, " stages"]:
    """Assign whole layers to stages (stages), as close to the stages' shares as possible."""
    # Each stage gets its share rounded down. Remaining layers go to the stages with the largest
    # remainders, at a tie to those in the middle, because first and last also hold embedding and
    # head. `edge_units` are the layers that embedding and head count as: they replace layers.
    #   10 layers on 4 equal stages: 2.5 each, rounded down 2 2 2 2; of the 2 that remain one goes
    #   to each of the two stages in the middle: 2 3 3 2
    _check_not_traced(model)
    shares, units = np.asarray(table.stage_shares), int(model.layers) + sum(edge_units)
    exact = shares / shares.sum() * units
    layers = np.floor(exact + 1e-9).astype(int)
    distance = np.abs(np.arange(table.num_stages) - (table.num_stages - 1) / 2)  # from the middle
    # by remainder, the largest first, then by distance: lexsort takes the last key first
    order = np.lexsort((distance, -np.round(exact - layers, 9)))
    layers[order[: units - layers.sum()]] += 1
    layers[0] -= edge_units[0]
    layers[-1] -= edge_units[1]
    min_layers = np.ones(len(layers), int)
    min_layers[[0, -1]] = [edge == 0 for edge in edge_units]  # a stage may hold only an end
    if (layers < min_layers).any():
        raise MismatchError(
            f"{model.name} has {model.layers} layers, too few for {table.num_stages} stages"
        )
    return layers


def _check_not_traced(model: Model) -> None:
    if is_traced(model.layers):
        raise ValueError(
            "the model's number of layers is traced: whole layers are assigned to stages outside "
            "of jit; close over the model, as in jax.jit(lambda system: ...)"
        )


class StageLayers(NamedTuple):
    """Number of layers, and of recomputed layers, of each stage."""

    layers: PerStage  # (stages) layers of each stage
    recomputed: PerStage  # (stages) layers whose forward is repeated within the backward


def assign_layers(workload: Workload, table: ScheduleTable) -> StageLayers:
    """Assign layers by the pipeline layout or by stage shares, and count recomputed layers."""
    if not is_traced(workload.model):
        check_sizes(workload.model)
    if not workload.pipeline_layout:
        units = workload.embedding_units, workload.loss_units
        layers = stage_layers(workload.model, table, units).astype(float)
    else:
        _check_not_traced(workload.model)
        layout = PipelineLayout.parse(workload.pipeline_layout)
        layout.check(workload.model, table.num_stages)
        layers = layout.count("t").astype(float)
    max_layers, group, _ = workload.recomputation  # "full": inf, 1
    named_layers, largest = group if max_layers == math.inf else max_layers, int(layers.max())
    if named_layers > largest:
        refusal = f"recompute {workload.recompute}: no stage has more than {largest} layers"
        raise MismatchError(f"{refusal}; full recomputes all layers", "recompute")
    # the backward of a stage with R cells recomputes nothing
    is_repeated = recomputed_stages(workload, table)
    return StageLayers(layers, np.where(is_repeated, np.minimum(layers, max_layers), 0.0))


def with_stage_layers(workload: Workload, layers: Sequence[int]) -> Workload:
    """Return a workload with `layers` on its stages; its MTP layers are on the last stage."""
    mtp = [0] * (len(layers) - 1) + [int(workload.model.mtp_layers)]
    is_even = len({*layers}) == 1  # launchers split equal layers by default
    layout = "" if is_even else str(PipelineLayout.with_layers(layers, mtp))
    return dataclasses.replace(workload, pipeline_layout=layout, embedding_units=0, loss_units=0)


def recomputed_stages(workload: Workload, table: ScheduleTable) -> Bool[NumpyArray, " stages"]:
    """Return whether the backward of each stage recomputes layers (stages)."""
    in_cells = is_recomputed(table).max(axis=1)
    return (workload.recomputation.layers > 0) & ~in_cells


def mtp_shares(workload: Workload, num_stages: int) -> PerStage:
    """Return each stage's share of multi-token prediction layers; by default the last has all."""
    # `assign_layers` checks the layout; in this function the model's numbers may be traced.
    if workload.pipeline_layout:
        counts = PipelineLayout.parse(workload.pipeline_layout).count("m")
        if counts.any():
            return counts / counts.sum()
    return np.eye(num_stages)[-1]


class Stages(NamedTuple):
    """Layers and workers of a schedule's stages, as arrays that may be padded."""

    layers: PerStage  # (stages) number of layers
    recomputed: PerStage  # (stages) number of layers whose forward is run again within I
    before: PerStage  # (stages) number of layers on all earlier stages
    mtp: PerStage  # (stages) share of the layers that predict further tokens
    first: PerStage  # (stages) 1 on the stage of the embedding, 0 elsewhere
    last: PerStage  # (stages) 1 on the stage of the output head, 0 elsewhere
    ends_step: PerStage  # (stages) 1 on the last stage that a worker updates, 0 elsewhere
    copies: PerStage  # (stages) workers that hold the stage: one for each pipe, or fewer
    nearest: PerStage  # (stages) smallest place of the workers that hold the stage
    farthest: PerStage  # (stages) largest place of the workers that hold the stage
    senders: Workers  # (pipes, boundaries) places of workers that send activations
    receivers: Workers  # (pipes, boundaries) places of workers that receive activations
    share: PerStage | float = 1.0  # (stages) 1 / number of stages on the stage's worker
    mtp_before: PerStage | float = 0.0  # (1, boundaries) sum of `mtp` before each boundary


def build_stages(
    table: ScheduleTable,
    assigned: StageLayers,
    mtp: PerStage | None = None,
    places: Sequence[int] = (),
) -> Stages:
    """Describe the stages of a schedule by their layers and their workers' places."""
    # By default, layers that predict further tokens are on the last stage (shares `mtp`), and
    # worker k is at place k.
    ends = np.eye(table.num_stages)  # rows: 1 0 .. 0 for the first stage, 0 .. 0 1 for the last
    is_held = np.zeros((table.num_workers, table.num_stages))
    for pipe in table.placement:
        is_held[pipe, np.arange(table.num_stages)] = 1
    num_held = is_held.sum(axis=1)  # stages of each worker
    # place of the worker of each stage: (pipes, stages)
    stage_places = np.array(places_on(table, places, "worker_places"))[table.placement]
    mtp = ends[-1] if mtp is None else mtp
    return Stages(
        layers=assigned.layers,
        recomputed=assigned.recomputed,
        before=xp.cumsum(assigned.layers) - assigned.layers,
        mtp=mtp,
        first=ends[0],
        last=ends[-1],
        ends_step=_ends_step(table).copy(),  # a copy, because JAX caches the type of a constant
        copies=np.array([float(len(np.unique(column))) for column in stage_places.T]),
        nearest=stage_places.min(axis=0).astype(float),
        farthest=stage_places.max(axis=0).astype(float),
        senders=stage_places[:, :-1].astype(float),
        receivers=stage_places[:, 1:].astype(float),
        share=1 / num_held[table.placement].max(axis=0),
        mtp_before=xp.cumsum(mtp)[None, :-1],
    )


@cached_method
def _ends_step(table: ScheduleTable) -> Float[NumpyArray, " stages"]:
    """Return 1 for each stage that computes a worker's last gradient, and 0 for the others."""
    cells = table.backward_end_cells  # (stages, microbatches)
    # cells are numbered row by row: with 10 slots, cells 3 and 7 are on worker 0, 7 is the last
    last_cells = np.full(table.num_workers, NOWHERE)
    np.maximum.at(last_cells, cells // table.num_slots, cells)
    return np.isin(cells, last_cells).any(axis=1).astype(float)


def find_stages(
    workload: Workload, table: ScheduleTable, assigned: StageLayers | Stages | None
) -> Stages:
    """Return `assigned` if these are stages already, else build the stages of a schedule."""
    # `assigned` may also be the layers of the stages; if None, `assign_layers` assigns them.
    if isinstance(assigned, Stages):
        return assigned
    layers = assign_layers(workload, table) if assigned is None else assigned
    mtp = mtp_shares(workload, table.num_stages)
    return build_stages(table, layers, mtp, workload.worker_places)


def layer_kinds(model: Model, layout: Layout) -> tuple[tuple[str, Layout], ...]:
    """List kinds of layers with their layouts; layers kept in 16 bits are listed last."""
    layouts = [layout]
    if any(layout.wide_layers):
        layouts.append(dataclasses.replace(layout, precision=PRECISIONS[0], wide_layers=(0, 0)))
    return tuple((kind, kind_layout) for kind_layout in layouts for kind in model.layers_by_kind)


def layers_by_kind(
    model: Model, layout: Layout, stages: Stages, layers: PerStage, extra: PerStage | float = 0.0
) -> tuple[PerStage, ...]:
    """Count the first `layers` of each stage by kind: (stages) for each of `layer_kinds`."""
    # A model's first layers are dense, the others may have experts. `extra` layers of a stage
    # have the last of these two kinds. If first and last layers of the model ("wide" ones) stay in
    # 16 bits, each kind comes twice: narrow layers first, then wide layers.
    # 4 layers on 2 stages, 1 dense, last wide: dense 1 0, MoE 1 1, wide dense 0 0, wide MoE 0 1
    layers = as_float(layers)
    counts: tuple[PerStage, ...]
    if model.moe is None:
        dense_layers: Number = xp.sum(stages.layers)
        counts = (layers + extra,)
    else:
        dense_layers = model.moe.dense_layers
        dense = xp.clip(dense_layers - stages.before, 0, layers)
        counts = (dense, layers - dense + extra)
    num_first, num_last = layout.wide_layers
    if not (num_first or num_last):
        return counts

    def count_between(low: Number, high: Number) -> PerStage:
        """Return how many layers of each stage lie between two positions, with shape (stages)."""
        end = xp.minimum(stages.before + layers, high)
        return xp.clip(end - xp.maximum(stages.before, low), 0, layers)

    start_of_last = xp.sum(stages.layers) - num_last
    wide = count_between(0, num_first) + count_between(start_of_last, math.inf)
    wide_dense = count_between(0, xp.minimum(num_first, dense_layers))
    wide_dense = wide_dense + count_between(start_of_last, dense_layers)
    wide_counts = (wide,) if model.moe is None else (wide_dense, wide - wide_dense)
    narrow_counts = (count - wide for count, wide in zip(counts, wide_counts, strict=True))
    return *narrow_counts, *wide_counts


def all_layers_by_kind(model: Model, layout: Layout, stages: Stages) -> tuple[PerStage, ...]:
    """Count each stage's layers by kind, multi-token prediction included: (stages) each."""
    return layers_by_kind(model, layout, stages, stages.layers, stages.mtp * model.mtp_layers)


def recomputed_mtp(model: Model, stages: Stages) -> PerStage:
    """Count each stage's recomputed MTP layers: all, if it recomputes all its other layers."""
    # so does Megatron's full recomputation; its `block` keeps MTP layers
    is_full = (stages.recomputed >= stages.layers) * (stages.layers > 0)
    return is_full * stages.mtp * model.mtp_layers


class ParameterCounts(NamedTuple):
    """Number of parameters on one accelerator, before data-parallel replicas split them."""

    dense: Numbers  # split by tensor parallelism, or whole on every accelerator
    experts: Numbers  # routed experts; split by expert and expert-tensor parallelism


def layer_weights(model: Model, layout: Layout, *, base: bool = True) -> dict[str, ParameterCounts]:
    """Return {kind of layer: parameters per accelerator}; without `base`, of adapters only."""
    # Adapters of rank r have r (inputs + outputs) parameters for each linear layer. As in Megatron,
    # tensor parallelism splits both factors of an adapter, by rank or inputs and by outputs.
    t, r, is_counted, moe = layout.tensor, layout.lora_rank, 1 if base else 0, model.moe
    # output biases of an expert, after the sum over its parts, are not split
    num_experts, width = (0, 0) if moe is None else (moe.experts, moe.expert_hidden)
    biases = is_counted * model.biases * model.hidden * num_experts
    split = is_counted * model.expert_parameters - biases + r * num_experts * model.mlp_sides(width)
    experts = (biases + split / layout.expert_tensor) / layout.expert
    counts = {}
    for kind in model.layers_by_kind:
        total = model.shared_parameters if kind == "moe" else model.layer_parameters
        sides = model.shared_sides if kind == "moe" else model.active_sides()
        unsplit = model.whole_parameters(kind)
        dense = is_counted * unsplit + (is_counted * (total - unsplit) + r * sides) / t
        counts[kind] = ParameterCounts(dense, experts if kind == "moe" else 0.0)
    return counts


def stage_parameters(
    model: Model, layout: Layout, stages: Stages, *, base: bool = True
) -> ParameterCounts:
    """Count each stage's parameters per accelerator (stages); without `base`, of adapters only."""
    # Stages with MTP layers hold a copy of the embedding, to look up tokens. A tied head shares
    # the embedding of its stage; on a stage without an embedding, the head is a further copy.
    weights = layer_weights(model, layout, base=base)
    num_layers = all_layers_by_kind(model, layout, stages)
    dense: Numbers = 0.0
    experts: Numbers = 0.0
    for (kind, _), count in zip(layer_kinds(model, layout), num_layers, strict=True):
        dense = dense + weights[kind].dense * count
        experts = experts + weights[kind].experts * count
    mtp_layers = stages.mtp * model.mtp_layers
    embeddings = xp.maximum(stages.first, 1.0 * (mtp_layers > 0))  # 1 on stages that look up tokens
    heads = stages.last * (1 - embeddings) if model.tied_embeddings else stages.last
    split = (embeddings + heads) * model.head_parameters + mtp_layers * model.mtp_projection
    unsplit = embeddings * model.position_parameters + stages.last * model.last_norm_parameters
    unsplit = unsplit + mtp_layers * 3 * model.norm_parameters
    return ParameterCounts(dense + base * (split / layout.tensor + unsplit), experts)


_tables: WeakValueDictionary[Hashable, ScheduleTable] = WeakValueDictionary()


class PricingShape(NamedTuple):
    """Static argument of compiled functions that compute costs: all inputs that are not numbers."""

    workload: Workload  # parallelism and recomputation; its model and minibatch are placeholders
    table: ScheduleTable  # the schedule; the same object for tables of equal content

    @classmethod
    def from_workload(cls, workload: Workload, table: ScheduleTable) -> "PricingShape":
        """Replace a workload's numbers by placeholders, and share one object for equal tables."""
        # So JAX compiles once for all models of one kind on equal tables.
        model = dataclasses.replace(workload.model, name="", source="")
        num_wide = workload.wide_first + workload.wide_last  # `Workload` refuses fewer layers
        model = dataclasses.replace(mapped(lambda _: 1, model), layers=num_wide)
        layout = workload.pipeline_layout
        if mtp_shares(workload, table.num_stages)[-1] == 1:  # then numbers of layers suffice
            layout = ""
        placeholders = dataclasses.replace(workload, model=model, minibatch=1)
        placeholders = dataclasses.replace(placeholders, pipeline_layout=layout)
        arrays = (*table.cells, *table.partners, table.placement)
        contents = tuple((array.shape, array.tobytes()) for array in arrays)
        key = contents, table.stage_shares, table.grammar
        return cls(placeholders, _tables.setdefault(key, table))
