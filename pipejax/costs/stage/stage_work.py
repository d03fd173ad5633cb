"""The work of a schedule's stages: what one accelerator computes, moves and sends.

It depends on model, layout and schedule, never on the speed of a machine. `stage_work` is for one
schedule; `work_of_stages` counts the same from numbers alone, which may be padded and traced, so
that many layouts are one batch.
"""

from typing import NamedTuple

from pipejax.costs import array_functions as xp
from pipejax.costs.layers.formulas import boundary_bytes
from pipejax.costs.layers.kernels import LayerOp
from pipejax.costs.layers.layer_collectives import (
    Collective,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    whole_layer_collectives,
)
from pipejax.costs.layers.layer_ops import (
    embedding_ops,
    head_ops,
    layer_ops,
    whole_head,
    whole_layer,
)
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import Model
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
from pipejax.costs.stage.stage_bytes import bytes_of_stages
from pipejax.costs.system.system import Number
from pipejax.schedules.table.table import ScheduleTable

PerKind = tuple[PerStage, ...]


class PartWork(NamedTuple):
    """Work of one layer, of the embedding or of the head, on one accelerator.

    Attributes:
      ops: its kernels.
      collectives: exchanges beside and between them.
      whole: all kernels as one op, for systems that price layers, not kernels.
      whole_collectives: exchanges that go with it.
      weights: parameters of one accelerator, which replicas may split.
    """

    ops: tuple[LayerOp, ...]
    collectives: tuple[Collective, ...]
    whole: tuple[LayerOp, ...]
    whole_collectives: tuple[Collective, ...]
    weights: ParameterCounts


class StageWork(NamedTuple):
    """What one accelerator of every stage computes, moves and sends for one microbatch.

    Attributes:
      layout: degrees of parallelism.
      stages: where they lie.
      layers: (stages) layers of each kind.
      recomputed: (stages) those of each kind whose forward is run again within I.
      kinds: work of one layer, by kind.
      embedding: work of the embedding.
      head: work of the output head and its loss.
      heads: (stages) output heads: one on the last stage, and one for each further token.
      message_bytes: (1, boundaries) bytes of one message.
      parameters: of one accelerator, before replicas split them.
      gradient_bytes: bytes per parameter in the gradient exchange.
      element_bytes: bytes per weight.
      update_bytes: bytes per parameter that the optimizer reads and writes.
      tied_parameters: of an embedding that first and last stage both hold.
      overlap: 1 where gradients travel beside compute, else 0.
      offload_bytes: (stages) bytes that O takes to the host, if activations may go there.
    """

    layout: Layout
    stages: Stages
    layers: PerKind
    recomputed: PerKind
    kinds: tuple[PartWork, ...]
    embedding: PartWork
    head: PartWork
    heads: PerStage
    message_bytes: Number
    parameters: ParameterCounts
    gradient_bytes: Number
    element_bytes: Number
    update_bytes: Number
    tied_parameters: Number
    overlap: Number
    offload_bytes: Number | None

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
    """Count what every op and message of a schedule computes, moves and sends.

    `offloads` counts what O moves also where the schedule has none.
    """
    return work_of_stages(
        workload.model,
        workload.layout(table, microbatch_size),
        stages_held(workload, table, assigned),
        recompute=workload.recompute_in_layer,
        overlap=float(workload.overlap),
        offloads=offloads or table.offloads,
    )


def work_of_stages(
    model: Model,
    layout: Layout,
    stages: Stages,
    *,
    recompute: str = "none",
    overlap: Number = 0.0,
    offloads: bool = False,
) -> StageWork:
    """Count the work of stages from numbers alone, all of which may be traced.

    Full recomputation is the layers' forward once more, in I or, where the table has R cells for
    the stage, in R; `recompute` is what a layer itself recomputes, "none" or "selective".
    """
    parameters = stage_parameters(model, layout, stages)
    kept = bytes_of_stages(model, layout, stages, recompute).activations if offloads else None
    element = model.element_bytes
    tied = model.head_parameters / layout.tensor if model.tied_embeddings else 0.0
    return StageWork(
        layout=layout,
        stages=stages,
        layers=all_layers_by_kind(model, stages),
        recomputed=layers_by_kind(model, stages, stages.recomputed),
        kinds=tuple(
            PartWork(
                layer_ops(model, layout, kind, recompute),
                layer_collectives(model, layout, kind),
                whole_layer(model, layout, kind, recompute),
                whole_layer_collectives(model, layout, kind),
                weights,
            )
            for kind, weights in layer_weights(model, layout).items()
        ),
        embedding=PartWork(
            embedding_ops(model, layout),
            embedding_collectives(model, layout),
            (),
            (),
            ParameterCounts(0.0, 0.0),
        ),
        head=PartWork(
            head_ops(model, layout),
            head_collectives(model, layout),
            whole_head(model, layout),
            (),
            ParameterCounts(model.head_parameters / layout.tensor, 0.0),
        ),
        heads=stages.last * (1 + model.mtp_layers) * (model.vocabulary > 0),
        message_bytes=_message_bytes(model, layout, stages),
        parameters=parameters,
        gradient_bytes=model.accumulated_bytes,
        element_bytes=element,
        update_bytes=2 * element + 2 * model.optimizer_bytes,
        tied_parameters=tied,
        overlap=overlap,
        offload_bytes=kept,
    )


def _message_bytes(model: Model, layout: Layout, stages: Stages) -> Number:
    """Bytes of a message (1, boundaries): behind layers for further tokens their outputs too."""
    one = boundary_bytes(model, layout) * layout.shared_by / layout.message_shared_by
    return one * (1 + model.mtp_layers * xp.cumsum(stages.mtp)[None, :-1])
