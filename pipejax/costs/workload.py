"""What is trained under a schedule: layers of every stage, and bytes on every worker.

Layers are assigned to stages by the table's stage shares, in whole layers.
"""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakValueDictionary

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import (
    MAX_COUNT,
    MismatchError,
    check_types,
    legal_divisors,
    share,
    whole_number,
)
from pipejax.base.short_repr import short_repr
from pipejax.costs.activations import (
    edge_activation_bytes,
    layer_activation_bytes,
    layer_weight_grad_bytes,
)
from pipejax.costs.layout import Layout
from pipejax.costs.model import Model, check_recompute
from pipejax.costs.precision import as_float, is_traced
from pipejax.costs.system import Number
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.held_activations import held_in_rows, static_bytes
from pipejax.schedules.table.table import ScheduleTable

PerStage = Float[NumpyArray, " stages"] | Float[Array, " stages"]


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Workload:
    """What is trained, and on how many accelerators.

    Attributes:
      model: the transformer.
      minibatch: sequences per step and pipeline.
      tensor_parallel: accelerators that make up one worker.
      sequence_parallel: whether they split norms, dropout and messages too.
      data_parallel: replicas of the whole pipeline, each with its own minibatch.
      recompute: "none", "selective" or "full".
      weight_share: share of an activation that W needs after I; what the layers need if None.

    Raises:
      ValueError: if a number is below 1 or above `MAX_COUNT`, recompute is unknown, or weight_share
        is not in [0, 1].

    Example:
      >>> import pipejax as pj
      >>> pj.Workload(pj.load_model("gpt-22b"), minibatch=0)
      Traceback (most recent call last):
      ...
      ValueError: minibatch must be a whole number of at least 1, got 0
    """

    model: Model
    minibatch: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    recompute: str = "none"
    weight_share: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_types(model=(self.model, Model))
        check_types(sequence_parallel=(self.sequence_parallel, bool))
        for name in ("minibatch", "tensor_parallel", "data_parallel"):
            count = whole_number(getattr(self, name), name, most=MAX_COUNT)
            object.__setattr__(self, name, count)
        object.__setattr__(self, "recompute", check_recompute(self.recompute))
        if self.weight_share is not None:
            share(self.weight_share, "weight_share")

    def layout(self, table: ScheduleTable, microbatch_size: Number | None = None) -> Layout:
        """The numbers of the layout on the workers of a schedule."""
        size = self.microbatch_size(table) if microbatch_size is None else microbatch_size
        return Layout(
            tensor=self.tensor_parallel,
            data=self.data_parallel,
            pipeline=table.num_workers,
            sequence_parallel=float(self.sequence_parallel),
            microbatch_size=size,
        )

    @property
    def recompute_in_layer(self) -> str:
        """What a layer itself recomputes: "none" or "selective"."""
        return "selective" if self.recompute == "selective" else "none"

    def microbatch_size(self, table: ScheduleTable) -> int:
        """Sequences of one microbatch.

        Args:
          table: the schedule, with its number of microbatches.

        Returns:
          b, minibatch / M [sequences].

        Raises:
          ValueError: if the microbatches do not divide the minibatch.

        Example:
          >>> import pipejax as pj
          >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
          >>> pj.Workload(pj.load_model("gpt-22b"), minibatch=8).microbatch_size(table)
          2
        """
        size, rest = divmod(self.minibatch, table.num_microbatches)
        if rest:
            raise MismatchError(
                f"{table.num_microbatches} microbatches do not divide a minibatch of "
                f"{self.minibatch}: {legal_divisors(self.minibatch, table.num_microbatches)}"
            )
        return size


def stage_layers(model: Model, table: ScheduleTable) -> Int[NumpyArray, " stages"]:
    """Assign the layers to stages in proportion to their shares, in whole layers.

    Each stage gets its share rounded down; layers left over go to the largest remainders, at a
    tie to the stages in the middle, for the first and the last also hold embedding and head.

    Returns (stages) layers.
    """
    if is_traced(model.layers):
        raise ValueError(
            "the model's number of layers is traced: whole layers are assigned to stages outside "
            "of jit; close over the model, as in jax.jit(lambda system: ...)"
        )
    shares = np.asarray(table.stage_shares)
    exact = shares / shares.sum() * model.layers
    layers = np.floor(exact + 1e-9).astype(int)
    edge = np.abs(np.arange(table.num_stages) - (table.num_stages - 1) / 2)
    order = np.lexsort((edge, -np.round(exact - layers, 9)))
    layers[order[: model.layers - layers.sum()]] += 1
    if layers.min() < 1:
        raise MismatchError(
            f"{model.name} has {model.layers} layers, too few for {table.num_stages} stages"
        )
    return layers


class StageLayers(NamedTuple):
    """A layer assignment.

    Attributes:
      layers: (stages) layers of each stage.
      recomputed: (stages) those of them whose forward is run again within the backward.
    """

    layers: PerStage
    recomputed: PerStage


def assign_layers(workload: Workload, table: ScheduleTable) -> StageLayers:
    """Assign the layers by the table's stage shares, and decide which are recomputed.

    Under full recomputation all are, but on stages that the table itself recomputes in R cells.
    """
    layers = stage_layers(workload.model, table).astype(float)
    in_cells = np.isin(np.arange(table.num_stages), table.stage[table.phase == Phase.R])
    return StageLayers(layers, layers * ((workload.recompute == "full") & ~in_cells))


def stage_parameters(model: Model, layers: PerStage) -> PerStage:
    """Parameters of one copy of each stage; a tied head is a second copy on another stage.

    Returns (stages) parameters.
    """
    layers = as_float(layers)
    first, last = (np.arange(len(layers)) == end for end in (0, len(layers) - 1))
    is_copy = len(layers) > 1 or not model.tied_embeddings
    return (
        layers * model.layer_parameters
        + first * model.embedding_parameters
        + last * is_copy * model.head_parameters
    )


class StageBytes(NamedTuple):
    """Memory of one copy of each stage, per accelerator.

    Attributes:
      static: (stages) parameters, gradients and optimizer state [B].
      activations: (stages) what one microbatch leaves there until its backward [B].
      weight_share: (stages) share of that which W needs after I.
      checkpoint: (stages) what it leaves between F and R, where the table recomputes it [B].
      version: (stages) one more version of the weights, which asynchronous tables keep [B].
    """

    static: PerStage
    activations: PerStage
    weight_share: PerStage
    checkpoint: PerStage
    version: PerStage

    @property
    def parts(self) -> tuple[PerStage, PerStage, PerStage]:
        """Sizes of an activation's parts, in the order of the memory ledger's `PARTS` [B]."""
        return self.activations, self.weight_share * self.activations, self.checkpoint


def stage_bytes(
    workload: Workload,
    table: ScheduleTable,
    assigned: StageLayers | None = None,
    microbatch_size: Number | None = None,
) -> StageBytes:
    """Memory of one copy of each stage, per accelerator.

    Full recomputation leaves the input of every layer, all of it until W, or, on stages that the
    table recomputes in R cells, the same until R and all activations after it.
    """
    model = workload.model
    layout = workload.layout(table, microbatch_size)
    layers, recomputed = assign_layers(workload, table) if assigned is None else assigned
    kept = layer_activation_bytes(model, layout, workload.recompute_in_layer)
    inputs = layer_activation_bytes(model, layout, "full")
    mask, head = edge_activation_bytes(model, layout)
    first, last = (np.arange(len(layers)) == end for end in (0, len(layers) - 1))
    edges = first * mask + last * head
    activations = (layers - recomputed) * kept + recomputed * inputs + edges
    # the head's product needs what the final norm puts out and the logits' gradient
    head_needs = last * (head - inputs * (model.vocabulary > 0))
    needed = (layers - recomputed) * layer_weight_grad_bytes(model, layout)
    parameters = stage_parameters(model, layers) / workload.tensor_parallel
    weight_share = (needed + recomputed * inputs + head_needs) / activations
    if workload.weight_share is not None:
        weight_share = np.full(len(layers), float(workload.weight_share))
    return StageBytes(
        static=(2 * model.element_bytes + model.optimizer_bytes) * parameters,
        activations=activations,
        weight_share=weight_share,
        checkpoint=layers * inputs + edges,
        version=model.element_bytes * parameters,
    )


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
      100.6 GB
    """
    check_types(workload=(workload, Workload), table=(table, ScheduleTable))
    memory = stage_bytes(workload, table, assigned)
    peaks = held_in_rows(table).peaks(np.stack(memory.parts), table.num_workers)
    return static_bytes(table, np.asarray(memory.static), np.asarray(memory.version)) + peaks


_tables: WeakValueDictionary[Hashable, ScheduleTable] = WeakValueDictionary()


class PricingShape(NamedTuple):
    """What prices depend on besides numbers: the static argument of compiled prices.

    Numbers are arguments of their own: equal workloads and tables compile once.

    Attributes:
      workload: parallelism and recomputation; its model and minibatch are placeholders.
      table: the schedule; the same object for tables of equal content.
    """

    workload: Workload
    table: ScheduleTable

    @classmethod
    def of(cls, workload: Workload, table: ScheduleTable) -> "PricingShape":
        """Strip a workload of its numbers, and find the table that represents all equal ones."""
        model = dataclasses.replace(workload.model, name="", source="")
        model = jax.tree.map(lambda _: 0, model)
        arrays = (*table.cells, *table.partners, table.placement)
        content = (*((array.shape, array.tobytes()) for array in arrays), table.stage_shares)
        return cls(
            dataclasses.replace(workload, model=model, minibatch=1),
            _tables.setdefault(content, table),
        )
