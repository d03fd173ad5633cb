"""The seconds of kinds that are parts of a layer with experts, as braids have them.

A layer is attention, with all up to the router and the sorting of tokens before they leave; an
exchange that takes tokens to their experts; the experts, shared ones and the MLPs of dense layers
too; and an exchange that brings tokens back. The embedding counts as attention, the head as
experts.
"""

from collections.abc import Mapping

from pipejax.base.array_types import Float
from pipejax.base.checks import MismatchError
from pipejax.costs.array_functions import Computed
from pipejax.costs.costs import Costs, with_leaves
from pipejax.costs.layers.layer_ops import OF_MODULE
from pipejax.costs.model.workload import Workload
from pipejax.costs.stage.stage_work import StageWork
from pipejax.costs.system.system import System
from pipejax.schedules.table.table import ScheduleTable

ATTENTION, EXCHANGE, EXPERTS = range(3)
# of the cost of each kind, the field of `Costs` that it is of, and which part of it
OF_LAYERS: Mapping[str, tuple[str, int]] = {
    **{"fa": ("forward", ATTENTION), "fm": ("forward", EXPERTS)},
    **{"fd": ("forward", EXCHANGE), "fc": ("forward", EXCHANGE)},
    **{"ba": ("backward", ATTENTION), "bm": ("backward", EXPERTS)},
    **{"bd": ("backward", EXCHANGE), "bc": ("backward", EXCHANGE)},
    **{"ia": ("input_grad", ATTENTION), "im": ("input_grad", EXPERTS)},
    **{"wa": ("weight_grad", ATTENTION), "wm": ("weight_grad", EXPERTS)},
}
BEFORE_EXPERTS = ("router", "routing", "dispatch")
_EXPERTS = {*OF_MODULE["moe"], *OF_MODULE["mlp"], "mlp_residual"} - {*BEFORE_EXPERTS}
PerStage = Float[Computed, " stages"]


def kinds_of_layers(
    table: ScheduleTable, workload: Workload, system: System
) -> dict[str, tuple[str, int]]:
    """Costs of a table's own kinds that are parts of layers."""
    own = [p for p in table.grammar.own if p.kind.time in OF_LAYERS and p in table.used_phases]
    if not own:
        return {}
    has = f"{table.name} has {own[0].name} ({own[0].kind.name}), a part of layers with experts"
    if workload.model.moe is None:
        raise MismatchError(f"{has}, and {workload.model.name or 'the model'} has no experts")
    if workload.expert_overlap:
        raise MismatchError(
            f"{has}, whose exchanges run where the table has them: expert_overlap must be 0, got "
            f"{workload.expert_overlap}",
            "expert_overlap",
        )
    if system.kernels.priced is not True:
        raise MismatchError(f"{has}, and {system.name or 'the system'} prices layers as a whole")
    return {phase.kind.time: OF_LAYERS[phase.kind.time] for phase in own}


def attention_alone(work: StageWork) -> StageWork:
    """The work of stages without experts and head, whose exchanges stay."""
    kinds = tuple(
        kind._replace(ops=tuple(op for op in kind.ops if op.name not in _EXPERTS))
        for kind in work.kinds
    )
    return work._replace(kinds=kinds, head=work.head._replace(ops=()))


def with_kinds(
    costs: Costs,
    kinds: Mapping[str, tuple[str, int]],
    attention: Mapping[str, PerStage],
    exchanges: Mapping[str, PerStage],
) -> Costs:
    """Costs, and those of kinds that are parts of them."""
    own = {}
    for name, (field, part) in kinds.items():
        share, exchange = attention[field], exchanges[field]
        others = getattr(costs, field) - exchange
        own[name] = (share * others, exchange / 2, (1 - share) * others)[part]
    return with_leaves(costs, own) if own else costs
