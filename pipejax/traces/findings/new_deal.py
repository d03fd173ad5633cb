"""Time saved if microbatches of different lengths are redistributed over the replicas."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.progress import OnProgress
from pipejax.costs.costs import Costs
from pipejax.search.orders.deal import deals
from pipejax.traces.findings.op_times import cost_fields
from pipejax.traces.replaying.pipelines import Pipeline, PipelineOps
from pipejax.traces.replaying.replay import Replay

MAX_ROUNDS = 20  # largest number of rounds of the search; more rounds save little
MAX_WORK = 5e6  # largest number of ops in a round of the search; otherwise some steps are skipped
MAX_REPLICA_SHARE = 0.5  # above this share, replicas differ, and not their data


@with_short_repr("saves bound replica_share")
@dataclasses.dataclass(frozen=True, eq=False)
class NewDeal:
    """Best redistribution of each step's microbatches over the replicas that a search found.

    Attributes:
      steps: numbers of the steps; if steps are long, an evenly spread subset.
      before: (steps) replayed time of the slowest pipeline [s].
      after: (steps) time of the slowest pipeline of the new deal [s].
      least: (steps) lower bound on the time of any deal [s].
      order: (steps, replicas, microbatches) order[step, r, k] is the k-th microbatch that replica r
        runs; numbers count the microbatches replica by replica, as they ran.
      replica_share: share of the variance of microbatch times that lies between replicas. If the
        share is large, replicas are slow and not their data, so no deal helps.
    """

    steps: Sequence[int]
    before: Float[NumpyArray, " steps"]
    after: Float[NumpyArray, " steps"]
    least: Float[NumpyArray, " steps"]
    order: Int[NumpyArray, "steps replicas microbatches"]
    replica_share: float

    @property
    def saves(self) -> float:
        """Return the share of the slowest pipeline's mean time that the new deal saves."""
        return 1 - float(self.after.mean() / self.before.mean())

    @property
    def bound(self) -> float:
        """Return an upper bound on the share that any deal saves."""
        return 1 - float(self.least.mean() / self.before.mean())


def rebalance(replayed: Replay, *, on_progress: OnProgress | None = None) -> NewDeal | None:
    """Redistribute the microbatches of every step over the replicas.

    The time of an op is assumed to depend on its data alone. So a microbatch takes equal times on
    all replicas.

    Args:
      replayed: a replayed trace.
      on_progress: called after each round of the search.

    Returns:
      The new deal, with its gain and a bound. None if there is one replica, if replicas ran
      different orders, or if all microbatches take equal times.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> lengths = np.array([[5.0, 4.0], [1.0, 1.0]])
      >>> runs = [pj.evaluate(table, pj.Costs(forward=[x, x], backward=[x, x])) for x in lengths]
      >>> trace = pj.traces.record_runs(runs, replicas=2)
      >>> result = pj.traces.rebalance(pj.traces.replay(pj.traces.find_pipelines(trace)))
      >>> result.before.tolist(), result.after.tolist()
      ([27.0], [21.0])
    """
    check_types(replayed=(replayed, Replay))
    table, all_steps = replayed.pipelines.table, _complete_steps(replayed)
    # select evenly spread steps, as many as the work limit of the search allows
    max_steps = max(1, int(MAX_WORK / round_work(replayed)))
    stride = max(1, -(-len(all_steps) // max_steps))
    steps = {step: all_steps[step] for step in list(all_steps)[::stride]}
    replicas = max(map(len, steps.values()), default=0)
    if replicas < 2 or table.num_pipes > 1:
        return None
    costs = [_step_costs(replayed, step_pipelines) for step_pipelines in steps.values()]
    if not all(cost.per_microbatch() for cost in costs):
        return None
    best_deals = deals(
        table,
        costs,
        replicas=replicas,
        link=replayed.links,
        iterations=MAX_ROUNDS,
        time_limit=None,  # `MAX_WORK` limits the work of a round
        on_progress=on_progress,
    )
    return NewDeal(
        steps=list(steps),
        before=np.array([deal.baselines["given"] for deal in best_deals]),
        after=np.array([deal.value for deal in best_deals]),
        least=np.array([deal.lower_bound for deal in best_deals]),
        order=np.stack([deal.best.order for deal in best_deals]),
        replica_share=replica_share(replayed),
    )


def round_work(replayed: Replay) -> float:
    """Count the ops that a round of the search in `rebalance` runs for one step."""
    # A round pairs a quarter of the replicas, and runs (2 M)^2 exchanges for every pair.
    pipelines = replayed.pipelines.pipelines
    replicas = len({pipeline.replica for pipeline in pipelines})
    ops = len(pipelines[0].slices)
    return float(replicas * replayed.pipelines.table.num_microbatches**2 * ops)


def _step_costs(replayed: Replay, replicas: Sequence[Pipeline]) -> Costs:
    """Return a step's recorded op times as costs (stages, microbatches of all replicas)."""
    table = replayed.pipelines.table
    ops, size = PipelineOps.select(replayed.pipelines.trace, replicas), table.num_microbatches
    # microbatch m of replica r becomes microbatch r M + m of one long step
    ops = ops._replace(microbatch=ops.microbatch + ops.run * size)
    fields = cost_fields(ops, (table.num_stages, len(replicas) * size))
    transmit = replayed.link_times.reshape(2, 1, -1)  # (directions, pipes, boundaries)
    return Costs(**fields, transmit=transmit if table.num_stages > 1 else 0.0)


def replica_share(replayed: Replay) -> float:
    """Return the share of the variance of microbatch times that lies between replicas."""
    # This is the intraclass correlation of the total time of a microbatch, in [0, 1].
    steps = _complete_steps(replayed).values()
    if not steps:
        return 0.0
    step_pipelines = [pipeline for pipelines in steps for pipeline in pipelines]
    ops = PipelineOps.select(replayed.pipelines.trace, step_pipelines)
    count = replayed.pipelines.table.num_microbatches
    totals = np.bincount(ops.run * count + ops.microbatch, ops.seconds)
    totals = totals.reshape(len(steps), -1, count)  # (steps, replicas, microbatches)
    within = float(totals.var(axis=(0, 2)).mean())
    # the means of replicas with equal data differ by chance; `chance` is the variance of a mean
    chance = within / (totals.shape[0] * totals.shape[2])
    between = max(0.0, float(totals.mean(axis=(0, 2)).var()) - chance)
    return between / ((between + within) or 1.0)


def _complete_steps(replayed: Replay) -> Mapping[int, Sequence[Pipeline]]:
    """Return {step in which all replicas ran the most frequent table: its pipelines}."""
    pipelines, steps = replayed.pipelines.pipelines, replayed.pipelines.complete_steps
    by_step = {step: [pipelines[k] for k in positions] for step, positions in steps.items()}
    return {step: row for step, row in by_step.items() if all(p.table == 0 for p in row)}
