"""Gain from another deal of the data: microbatches that differ, redistributed."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.progress import OnProgress
from pipejax.costs.costs import Costs
from pipejax.search.orders.deal import deals
from pipejax.traces.findings.op_times import fields_of
from pipejax.traces.replaying.pipelines import Pipeline, PipelineOps
from pipejax.traces.replaying.replay import Replay

ROUNDS = 20  # of the search: more find little
SECONDS = 5.0  # after which no further round starts
# of a round of the search over all steps, in ops that are run; beyond it some steps are left out
MOST_WORK = 5e6
OF_RANK = 0.5  # of what microbatches differ, from which they are taken to differ by replica


@with_short_repr("saves bound of_replica")
@dataclasses.dataclass(frozen=True, eq=False)
class NewDeal:
    """The data of every step dealt anew to the replicas, each in the best order that was found.

    Attributes:
      steps: their numbers; of long steps some, spread evenly, for the search takes its time.
      before: (steps) the slowest pipeline as it is replayed [s].
      after: (steps) the slowest pipeline of the deal that was found [s].
      least: (steps) no deal is faster [s].
      order: (steps, replicas, microbatches) which microbatch of the step is k-th where, numbered
        replica by replica as they ran.
      of_replica: share of what microbatches differ that goes with the replica, not with the data:
        where it is large, another deal takes the slow replica along.
    """

    steps: Sequence[int]
    before: Float[NumpyArray, " steps"]
    after: Float[NumpyArray, " steps"]
    least: Float[NumpyArray, " steps"]
    order: Int[NumpyArray, "steps replicas microbatches"]
    of_replica: float

    @property
    def saves(self) -> float:
        """Share of the mean slowest pipeline."""
        return 1 - float(self.after.mean() / self.before.mean())

    @property
    def bound(self) -> float:
        """Share that no deal saves more than."""
        return 1 - float(self.least.mean() / self.before.mean())


def deal_anew(replayed: Replay, *, on_progress: OnProgress | None = None) -> NewDeal | None:
    """Deal the microbatches of every step anew to the replicas.

    An op's time is taken to belong to its data: it goes along to another replica.

    Args:
      replayed: a replayed trace.
      on_progress: called after each round of the search.

    Returns:
      What that saves, and at most can; None where there is one replica, where replicas ran in
      different orders, or where all microbatches are alike.

    Example:
      >>> import numpy as np, pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> lengths = np.array([[5.0, 4.0], [1.0, 1.0]])
      >>> runs = [pj.evaluate(table, pj.Costs(forward=[x, x], backward=[x, x])) for x in lengths]
      >>> trace = pj.traces.of_runs(runs, replicas=2)
      >>> found = pj.traces.deal_anew(pj.traces.replay(pj.traces.pipelines_of(trace)))
      >>> found.before.tolist(), found.after.tolist()
      ([27.0], [21.0])
    """
    check_types(replayed=(replayed, Replay))
    pipelines = replayed.pipelines
    all_steps = _whole_steps(replayed)
    # as many steps as the search has time for, spread evenly
    apart = -(-len(all_steps) // max(1, int(MOST_WORK / round_work(replayed))))
    whole = {step: all_steps[step] for step in list(all_steps)[:: max(1, apart)]}
    replicas = max(map(len, whole.values()), default=0)
    if replicas < 2 or pipelines.table.num_pipes > 1:
        return None
    costs = [_costs(replayed, members) for members in whole.values()]
    if not all(cost.per_microbatch() for cost in costs):
        return None
    best_deals = deals(
        pipelines.table,
        costs,
        replicas=replicas,
        link=replayed.links,
        iterations=ROUNDS,
        time_limit=SECONDS,
        on_progress=on_progress,
    )
    return NewDeal(
        list(whole),
        np.array([deal.baselines["given"] for deal in best_deals]),
        np.array([deal.value for deal in best_deals]),
        np.array([deal.lower_bound for deal in best_deals]),
        np.stack([deal.best.order for deal in best_deals]),
        share_of_replica(replayed),
    )


def round_work(replayed: Replay) -> float:
    """Count the ops that a round of the search runs for one step."""
    # It pairs a quarter of the replicas, and runs the (2 M)^2 exchanges of every pair.
    pipelines = replayed.pipelines.pipelines
    replicas = len({pipeline.replica for pipeline in pipelines})
    ops = len(pipelines[0].slices)
    return float(replicas * replayed.pipelines.table.num_microbatches**2 * ops)


def _costs(replayed: Replay, replicas: Sequence[Pipeline]) -> Costs:
    """Times of all microbatches of a step, replica by replica (stages, replicas x microbatches)."""
    table = replayed.pipelines.table
    ops, size = PipelineOps.of(replayed.pipelines.trace, replicas), table.num_microbatches
    ops = ops._replace(microbatch=ops.microbatch + ops.run * size)
    fields = fields_of(ops, (table.num_stages, len(replicas) * size))
    transmit = replayed.link_times.reshape(2, 1, -1)
    return Costs(**fields, transmit=transmit if table.num_stages > 1 else 0.0)


def share_of_replica(replayed: Replay) -> float:
    """Share of what microbatches differ that lies between replicas (intraclass correlation)."""
    whole = _whole_steps(replayed).values()
    if not whole:
        return 0.0
    ops = PipelineOps.of(
        replayed.pipelines.trace, [pipeline for step in whole for pipeline in step]
    )
    count = replayed.pipelines.table.num_microbatches
    totals = np.bincount(ops.run * count + ops.microbatch, ops.seconds)
    totals = totals.reshape(len(whole), -1, count)
    within = float(totals.var(axis=(0, 2)).mean())
    # replicas whose data is alike differ by chance, too: by the variance of a mean of so many
    chance = within / (totals.shape[0] * totals.shape[2])
    between = max(0.0, float(totals.mean(axis=(0, 2)).var()) - chance)
    return between / ((between + within) or 1.0)


def _whole_steps(replayed: Replay) -> Mapping[int, Sequence[Pipeline]]:
    """Pipelines of the steps that have all replicas, in the order of most."""
    by_step: dict[int, list[Pipeline]] = {}
    for pipeline in replayed.pipelines.pipelines:
        by_step.setdefault(pipeline.step, []).append(pipeline)
    replicas = max(map(len, by_step.values()))
    return {
        step: members
        for step, members in sorted(by_step.items())
        if len(members) == replicas and not any(pipeline.table for pipeline in members)
    }
