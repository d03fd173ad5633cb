"""System design: how to divide a budget over compute, memory bandwidth and links.

The workload fixes how much memory a step takes, and more of it makes nothing faster, so memory is
paid first. The rest is divided by a softmax and descended; money is continuous, so nothing is
rounded.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.costs import array_functions as xp
from pipejax.costs.system.system import Number, System
from pipejax.search.tuning.problem import TuningProblem
from pipejax.search.tuning.rounding import compositions
from pipejax.search.tuning.step_time_objective import Given, Pair


class PartPrices(NamedTuple):
    """What parts of one accelerator cost, in any currency.

    Attributes:
      peak_flops: of a TFLOP/s of peak.
      memory_bandwidth: of a GB/s.
      node_bandwidth: of a GB/s of the link inside a node.
      network_bandwidth: of a GB/s of the link between nodes.
      memory_capacity: of a GB.
    """

    peak_flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    memory_capacity: float


UNITS = np.array([1e12, 1e9, 1e9, 1e9, 1e9])  # of what is priced, in the order of `PartPrices`
DIVIDED = 4  # parts that the budget is divided over once memory is paid


class SystemDesigns(NamedTuple):
    """The best system for each budget.

    Attributes:
      budget: (budgets) what may be spent.
      shares: (budgets, parts) of the budget, in the order of `PartPrices`; they sum to 1.
      quantities: (budgets, parts) what that buys [FLOP/s, B/s, B/s, B/s, B].
      step_time: (budgets) exact [s].
      evaluated: systems that were evaluated, over all budgets.
    """

    budget: Float[NumpyArray, " budgets"]
    shares: Float[NumpyArray, "budgets parts"]
    quantities: Float[NumpyArray, "budgets parts"]
    step_time: Float[NumpyArray, " budgets"]
    evaluated: int


def price_of(system: System, prices: PartPrices) -> float:
    """What a system costs, memory included."""
    links = system.node.bandwidth, system.network.bandwidth
    has = (system.peak_flops, system.memory_bandwidth, *links, system.memory_capacity)
    return float(np.dot(np.array(has) / UNITS, prices))


def design_systems(
    problem: TuningProblem,
    num_microbatches: int,
    prices: PartPrices,
    budgets: Sequence[float] | Float[NumpyArray, " budgets"],
    *,
    starts: int = 8,
    steps: int = 150,
    seed: int = 0,
    divisions: int | None = None,
) -> SystemDesigns:
    """Divide each budget so that the step is shortest; all budgets and starts at once."""
    if len(problem.capacity) != 1:
        raise ValueError(f"one pair is designed for, got {len(problem.capacity)}")
    costs, budget = np.array(prices, float), np.asarray(budgets, float)
    for name, values in (("prices", costs), ("budgets", budget)):
        if not are_positive(values, len(values)):
            raise ValueError(f"{name} must be finite numbers above 0, got {tuple(values.tolist())}")
    one, count = np.zeros(1, int), len(budget)
    _, need = problem.evaluate(num_microbatches, problem.pairs.assigned, one)
    paid = float(need[0]) / UNITS[-1] * costs[-1]  # for memory
    if budget.min() <= paid:
        raise ValueError(
            f"a budget of {budget.min():g} buys nothing but memory: {need[0] / 1e9:.1f} GB "
            f"are needed, which cost {paid:g}"
        )
    spendable = budget[:, None] - paid
    given = problem.given(np.zeros(count, int), num_microbatches, limited=False)._replace(
        bought=spendable / costs[:-1] * UNITS[:-1]
    )
    objective = problem.objective(bought, num_microbatches)
    if divisions is None:
        noise = np.random.default_rng(seed).normal(0, 1, (starts, count, DIVIDED))
        noise[0] = 0
        found = objective.minima(noise, given, steps=steps, rate=0.2)
        points, values = found.points, found.values
        evaluated = values.size * (steps + 1)
    else:
        grid = np.log(compositions(divisions, DIVIDED) / divisions)
        points = np.repeat(grid[:, None], count, axis=1)
        of_all = jax.tree.map(lambda leaf: np.concatenate([leaf] * len(grid)), given)
        values = objective.evaluate(points.reshape(-1, DIVIDED), of_all)[0].reshape(-1, count)
        evaluated = values.size
    best = points[values.argmin(axis=0), np.arange(count)]
    weights = np.exp(best - best.max(axis=1, keepdims=True))
    spent = spendable * weights / weights.sum(axis=1, keepdims=True)
    spent = np.column_stack([spent, np.full(count, paid)])
    shares, quantities = spent / budget[:, None], spent / costs * UNITS
    return SystemDesigns(budget, shares, quantities, values.min(axis=0), evaluated)


def bought(logits: Array, given: Given) -> tuple[Pair, Number]:
    """Return the system that softmax shares of the budget buy."""
    peak, bandwidth, node, network = xp.softmax(logits) * given.bought
    own = given.pair.system
    system = dataclasses.replace(
        own,
        peak_flops=peak,
        memory_bandwidth=bandwidth,
        node=dataclasses.replace(own.node, bandwidth=node),
        network=dataclasses.replace(own.network, bandwidth=network),
    )
    return given.pair._replace(system=system), given.size
