"""Makers of costs, and what they are made of."""

from pipejax.costs.chunks import chunk_costs as chunk_costs
from pipejax.costs.edits import (
    HostTimes as HostTimes,
    Microbatches as Microbatches,
    PairFactor as PairFactor,
    RecomputeCells as RecomputeCells,
    RecomputedAgain as RecomputedAgain,
    ScaledTimes as ScaledTimes,
    ShardingCells as ShardingCells,
    SlowWorkers as SlowWorkers,
)
from pipejax.costs.model.launchers import (
    launches as launches,
    pipeline_launches as pipeline_launches,
)
from pipejax.costs.model.model import (
    LatentAttention as LatentAttention,
    MixtureOfExperts as MixtureOfExperts,
)
from pipejax.costs.model.pipeline_layout import PipelineLayout as PipelineLayout
from pipejax.costs.scaling import restaged_costs as restaged_costs, scaled_costs as scaled_costs
from pipejax.costs.sources import (
    CostsFile as CostsFile,
    GivenTimes as GivenTimes,
    MeasuredCosts as MeasuredCosts,
    ModelCosts as ModelCosts,
    SlotCosts as SlotCosts,
    TableFile as TableFile,
)
from pipejax.costs.stage.stage_costs import work_costs as work_costs
from pipejax.costs.stage.stage_work import (
    StageWork as StageWork,
    stage_bytes as stage_bytes,
    stage_work as stage_work,
)
from pipejax.costs.system.parts import Efficiency as Efficiency, Number as Number
from pipejax.costs.topology import topology_costs as topology_costs
from pipejax.engine.lowering.program import LINK_COSTS as LINK_COSTS
from pipejax.engine.pricing import NodeCosts as NodeCosts, cost_vector as cost_vector
