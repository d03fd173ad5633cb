"""Times of all exchanges (collectives) of a step, and the part that compute does not hide.

Links and compute are two resources that work at the same time, each on one piece after another. A
path through equal pieces may switch from one resource to the other. The length is linear in the
point of the switch, so the longest path switches at an end or never: a few paths suffice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float
from pipejax.base.checks import MismatchError
from pipejax.base.many_numbers import Many
from pipejax.costs import array_functions as xp
from pipejax.costs.array_functions import Computed, stacked, stacked_trees
from pipejax.costs.costs import Costs, with_leaves
from pipejax.costs.layers.collectives import Collective, collective_time
from pipejax.costs.layers.layer_ops import MODULE_OPS
from pipejax.costs.model.layout import Group
from pipejax.costs.model.workload import PerStage, Workload
from pipejax.costs.precision import as_float
from pipejax.costs.stage.stage_work import StageWork
from pipejax.costs.system.parts import Contention
from pipejax.costs.system.system import Number, Numbers, System
from pipejax.schedules.table.table import ScheduleTable

ByPhase = Float[Computed, " phases"]
PerOp = Float[Computed, "stages *microbatches"]


class Exchanges(NamedTuple):
    """Times [s] of all collectives of a step, before any overlap with compute is subtracted."""

    within_layers: list[ByPhase]  # (phases) of each exchange within a layer, in the order given
    split_weights: list[ByPhase]  # (phases) F and I gather weights, W reduce-scatters gradients
    gradient_parts: PerStage  # (stages) reduce-scatter, after which a replica has its part of sums
    gradients: PerStage  # (stages) all-reduce, after which a replica has all sums
    weights: PerStage  # (stages) all-gather of updated weights
    tied: Number  # all-reduce of the embedding gradients that the first and the last stage share


class _Exchange(NamedTuple):
    """Equal collectives to price at once; its numbers may be arrays that broadcast."""

    kind: str
    volume: Number
    group: Group
    repeats: Number = 1.0
    copies: Number = 0.0


def price_exchanges(
    work: StageWork, system: System, within_layers: Sequence[Collective]
) -> Exchanges:
    """Compute the times of all collectives of a step; messages are not included."""
    # Dense weights and experts are two kinds, with different numbers of replicas. A stage that
    # lies in two pipes (bidirectional schedules) has twice as many replicas of its gradients.
    weight_counts = stacked_trees([part.weights for part in work.parts])
    trained_counts = stacked_trees([part.trained for part in work.parts])
    weights = xp.stack([*weight_counts], axis=1) * work.element_bytes  # (parts, kinds)
    trained = xp.stack([*trained_counts], axis=1) * work.element_bytes
    replicas, by_stage = _replicas(work, system)
    parameters = xp.stack([count + 0 * work.stages.copies for count in work.parameters])
    gradients = parameters * work.gradient_bytes  # (kinds, stages)
    exchanges = [
        *_with_groups(work, system, within_layers),
        _Exchange("all_gather", weights, replicas),
        _Exchange("reduce_scatter", trained, replicas),
        _Exchange("reduce_scatter", gradients, by_stage),
        _Exchange("all_reduce", gradients, by_stage),
        _Exchange("all_gather", parameters * work.element_bytes, by_stage),
        _tied_embedding(work, system),
    ]
    times = _exchange_times(system, exchanges)
    *layers, gather, reduce, scatter, all_reduce, update_gather, tied = times
    gather, reduce = gather.sum(axis=1), reduce.sum(axis=1)  # dense weights + experts
    split_weights = xp.stack([gather, gather, reduce], axis=-1)  # (parts, phases)
    return Exchanges(
        within_layers=layers,
        split_weights=list(split_weights),
        gradient_parts=scatter.sum(axis=0),
        gradients=all_reduce.sum(axis=0),
        weights=update_gather.sum(axis=0),
        tied=tied,
    )


def _with_groups(
    work: StageWork, system: System, exchanges: Sequence[Collective]
) -> list[_Exchange]:
    """Return collectives within layers, with the sizes of their groups on the system's nodes."""
    groups = {
        name: group.count_ranks(system.gpus_per_node)
        for name, group in work.layout.layer_groups.items()
    }
    return [
        _Exchange(
            kind=exchange.kind,
            volume=stacked(exchange.volume),
            group=groups[exchange.group],
            repeats=stacked(exchange.count),
            copies=exchange.copies,
        )
        for exchange in exchanges
    ]


def _replicas(work: StageWork, system: System) -> tuple[Group, Group]:
    """Return the sizes of data-parallel groups, for dense weights and for expert weights."""
    # The first group (1, kinds) is within a pipe. In the second (kinds, stages), a stage that two
    # pipes hold has twice the replicas.
    stages, layout = work.stages, work.layout
    near = layout.is_near(stages.nearest, stages.farthest, system.gpus_per_node)
    ranks = [group.count_ranks(system.gpus_per_node) for group in layout.replica_groups]
    size, per_node = stacked_trees(ranks)
    by_stage = Group(
        size[:, None] * stages.copies[None, :],
        per_node[:, None] * xp.where(near, stages.copies, 1.0)[None, :],
    )
    return Group(size[None, :], per_node[None, :]), by_stage


def _tied_embedding(work: StageWork, system: System) -> _Exchange:
    """Return the all-reduce of embedding gradients between the first and the last stage."""
    stages = work.stages
    first, last = (xp.sum(end * stages.nearest) for end in (stages.first, stages.last))
    near = work.layout.is_near(first, last, system.gpus_per_node)
    volume = work.tied_parameters * work.gradient_bytes
    return _Exchange("all_reduce", volume, Group(2.0, 1.0 + near))


def _exchange_times(system: System, exchanges: Sequence[_Exchange]) -> list[Float[Computed, "..."]]:
    """Compute the time [s] of each exchange, in the shape to which its numbers broadcast."""
    # One array has all exchanges of a kind. In a batch of systems with different networks,
    # exchanges inside a node have another array, because their times are equal on all networks.
    leaves = [(item.volume, *item.group, item.repeats, item.copies) for item in exchanges]
    shapes = [np.broadcast_shapes(*map(np.shape, arrays)) for arrays in leaves]
    has_many_networks = isinstance(system.network.rate, Many)
    indices_by_kind: dict[tuple[str, bool], list[int]] = {}
    for index, item in enumerate(exchanges):
        size, inside = map(np.asarray, item.group) if has_many_networks else (0, 0)
        varies = bool(np.any(np.greater(size, inside)))  # the group crosses nodes
        indices_by_kind.setdefault((item.kind, varies), []).append(index)
    times: dict[int, Float[Computed, ...]] = {}
    for (kind, _), indices in indices_by_kind.items():
        # Join all numbers of these exchanges: shapes (2, 3) and (4,) make a row of 10. Split after.
        rows = [
            [(np.ones(shapes[index]) * xp.asarray(leaf, float)).ravel() for leaf in leaves[index]]
            for index in indices
        ]
        volume, size, inside, repeats, copies = map(xp.concatenate, zip(*rows, strict=True))
        seconds = collective_time(system, kind, volume, Group(size, inside), repeats, copies)
        seconds = xp.where(volume > 0, seconds, 0.0)
        ends = np.cumsum([np.prod(shapes[index], dtype=int) for index in indices])
        for index, part in zip(indices, xp.split(seconds, ends[:-1]), strict=True):
            times[index] = part.reshape(shapes[index])
    return [times[index] for index in range(len(exchanges))]


def hidden_buckets(
    contention: Contention, exchange: Numbers, compute: Number, layers: Number
) -> Numbers:
    """Return the time [s] that overlapping exchanges with the compute of equal layers saves."""
    # The exchange of a layer's gradients follows its compute and the exchanges of earlier layers.
    # With c and a the seconds of compute and exchange of one of L layers, the longest path is
    #     L c + a                            compute never rests
    #     c + L a                            links never rest
    # so L - 1 exchanges travel beside compute. In reverse this holds for weights gathered before
    # compute, as in FSDP's forward.
    exchange, compute, layers = map(as_float, (exchange, compute, layers))
    return (1 - 1 / layers) * contention.saved(exchange, compute)


def hidden_ring(
    contention: Contention, exchange: Number, compute: Numbers, steps: Number
) -> Numbers:
    """Return the time [s] that overlapping a ring exchange with attention on its data saves."""
    # `compute` is the seconds of all c = `steps` steps, `exchange` of the c - 1 transfers.
    # Ring attention: in each of c steps an accelerator works on one part of the keys and values,
    # and passes it on. Step k + 1 waits for step k and for the transfer that started with it, and
    # transfers follow one another. The longest path has k transfers and c - k steps of compute,
    # with k = 0 or k = c - 1.
    exchange, compute, steps = map(as_float, (exchange, compute, steps))
    return contention.saved(exchange, (steps - 1) / steps * compute)


ATTENTION, EXCHANGE, EXPERTS = range(3)
# In braided schedules a layer with experts is four ops: attention, with the router and the sorting
# of tokens; an exchange that takes tokens to their experts; the experts, with shared ones and MLPs
# of dense layers; and an exchange that brings tokens back. The embedding counts as attention, the
# head as experts.
# {kind of op: (field of `Costs` with the time of a whole layer, part that the op runs)}
LAYER_PARTS: Mapping[str, tuple[str, int]] = {
    **{"fa": ("forward", ATTENTION), "fm": ("forward", EXPERTS)},
    **{"fd": ("forward", EXCHANGE), "fc": ("forward", EXCHANGE)},
    **{"ba": ("backward", ATTENTION), "bm": ("backward", EXPERTS)},
    **{"bd": ("backward", EXCHANGE), "bc": ("backward", EXCHANGE)},
    **{"ia": ("input_grad", ATTENTION), "im": ("input_grad", EXPERTS)},
    **{"wa": ("weight_grad", ATTENTION), "wm": ("weight_grad", EXPERTS)},
}
BEFORE_EXPERTS = ("router", "routing", "dispatch")
_EXPERT_OPS = {*MODULE_OPS["moe"], *MODULE_OPS["mlp"], "mlp_residual"} - {*BEFORE_EXPERTS}


def layer_part_kinds(
    table: ScheduleTable, workload: Workload, system: System
) -> dict[str, tuple[str, int]]:
    """Return {cost of a custom kind of op: (cost field of whole layers, part of a layer)}."""
    # Raises if the table has such kinds, and the workload or the system cannot be split into parts.
    custom_phases, used_phases = table.grammar.custom_phases, table.used_phases
    phases = [p for p in custom_phases if p.kind.time in LAYER_PARTS and p in used_phases]
    if not phases:
        return {}
    phase = phases[0]
    has = f"{table.name} has {phase.name} ({phase.kind.name}), a part of layers with experts"
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
    return {phase.kind.time: LAYER_PARTS[phase.kind.time] for phase in phases}


def attention_alone(work: StageWork) -> StageWork:
    """Return the work of stages without the ops of experts and of the head; exchanges stay."""
    kinds = tuple(
        kind._replace(ops=tuple(op for op in kind.ops if op.name not in _EXPERT_OPS))
        for kind in work.kinds
    )
    return work._replace(kinds=kinds, head=work.head._replace(ops=()), plain_kinds=None)


def with_kinds(
    costs: Costs,
    kinds: Mapping[str, tuple[str, int]],
    attention: Mapping[str, PerStage],
    exchanges: Mapping[str, PerOp],
) -> Costs:
    """Add costs for custom kinds of ops that run attention, experts or their exchanges."""
    # `kinds` has entries of `LAYER_PARTS`. {cost field: (stages)}: `attention` is the share of
    # attention in the compute of layers, `exchanges` the seconds of their exchanges with experts.
    kind_costs = {}
    for name, (field, part) in kinds.items():
        compute = getattr(costs, field) - exchanges[field]
        if part == EXCHANGE:  # one of two: to the experts, or back
            kind_costs[name] = exchanges[field] / 2
        else:
            share = attention[field] if part == ATTENTION else 1 - attention[field]
            kind_costs[name] = share * compute
    return with_leaves(costs, kind_costs) if kind_costs else costs
