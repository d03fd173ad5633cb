"""Shared by the tests of jitter: schedules, costs, and factors of every kind."""

import numpy as np

import pipejax as pj
from pipejax.analysis.uncertainty import jitter
from pipejax.engine.pricing import NodeCosts

LINKS = [("delay", "worker"), ("queued", "worker"), ("blocking", "worker")]
LINKS += [("rendezvous", queues) for queues in ("worker", "pair", "direction")]
D, S = pj.analysis.Distribution, pj.analysis.Straggler
ALL = pj.analysis.Jitter(
    D("lognormal", 0.2), D("uniform", 0.1), D("gamma", 0.5), S(0.2, 2.0), S(0.05, 3.0)
)
ONE = pj.ScheduleTable.from_rows([["0F0", "0B0"]])  # where F takes 1 s, a makespan is a factor


def make_costs(table):
    """Unequal costs, none of which is a round number."""
    rng = np.random.default_rng(0)
    stages, links = table.num_stages, (2, table.num_pipes, table.num_stages - 1)
    names = ("forward", "backward", "input_grad", "weight_grad")
    ops = {name: 1 + rng.random(stages) for name in names}
    return pj.Costs(
        **ops,
        latency=rng.random(links) / 9,
        transmit=rng.random(links) / 3,
        all_reduce=rng.random(stages),
        update=rng.random(stages),
        offload=rng.random(stages) / 2,
        load=rng.random(stages) / 2,
    )


def sample_costs(run, costs, sample):
    """Durations and lags of one sample: those of its slowest replica."""
    program = run.evaluation.program
    per_op = jitter.per_op_costs(program, jitter.price(program, costs))
    group, column = divmod(int(run.draws[sample]), jitter.GROUP)
    times = jitter._durations(per_op, run.jitter, run.evaluation.workers, run.seed, group)
    row = times[:, column]
    return NodeCosts(row[per_op.program.duration_index], row[per_op.program.lag_index])
