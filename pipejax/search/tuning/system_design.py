"""System design: how to divide a budget over compute, memory bandwidth and links.

What memory a step needs is given by the workload, and more of it makes nothing faster: it is paid
first. The rest is divided by a softmax, and descended; nothing has to be rounded, for money is
continuous.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import are_positive
from pipejax.costs.costs import Costs
from pipejax.costs.system import System
from pipejax.search.tuning.descent import descend
from pipejax.search.tuning.layer_assignment import LayerAssignment
from pipejax.search.tuning.microbatch_sizes import TuningProblem
from pipejax.search.tuning.rounding import compositions
from pipejax.search.tuning.step_time_objective import StepTimeObjective, in_bucket
from pipejax.search.tuning.workload_system_pairs import Pair, pair_costs

UNITS = {
    "peak_flops": 1e12,
    "memory_bandwidth": 1e9,
    "node_bandwidth": 1e9,
    "network_bandwidth": 1e9,
    "memory_capacity": 1e9,
}
DIVIDED = tuple(UNITS)[:-1]  # what the budget is divided over once memory is paid


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
    has = (
        system.peak_flops,
        system.memory_bandwidth,
        system.node.bandwidth,
        system.network.bandwidth,
        system.memory_capacity,
    )
    parts = zip(has, prices, UNITS.values(), strict=True)
    return float(sum(amount / unit * price for amount, price, unit in parts))


def design_systems(
    problem: TuningProblem,
    num_microbatches: int,
    prices: PartPrices,
    budgets: Sequence[float] | Float[NumpyArray, " budgets"],
    *,
    starts: int = 8,
    steps: int = 150,
    seed: int = 0,
) -> SystemDesigns:
    """Divide each budget so that the step is shortest; all budgets and starts at once.

    Args:
      problem: one pair under a schedule; its system gives what is not bought: latencies,
        efficiencies, accelerators of a node.
      num_microbatches: M, which divides the minibatch.
      prices: of the parts of an accelerator, all above 0.
      budgets: what may be spent on one accelerator.
      starts: starts for each budget: equal shares, and random ones.
      steps: gradients to take.
      seed: of the random starts.

    Returns:
      The best system for each budget.

    Raises:
      ValueError: if a price or budget is not above 0, a budget does not even pay for the memory
        that is needed, M does not divide the minibatch, or there is more than one pair.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.search.tuning.schedule_family import ScheduleFamily
      >>> workload = Workload(load_model("gpt-22b"), minibatch=32, tensor_parallel=8)
      >>> problem = TuningProblem.of(ScheduleFamily("1f1b", 4), [workload], [load_system("h100")])
      >>> found = design_systems(problem, 32, PartPrices(20.0, 2.0, 10.0, 50.0, 20.0), [30e3, 60e3])
      >>> found.shares.argmax(axis=1).tolist()  # most of it buys compute
      [0, 0]
    """
    design = _Design.of(problem, num_microbatches, prices, np.asarray(budgets, float))
    count = len(design.budget)
    noise = np.random.default_rng(seed).normal(0, 1, (starts, count, len(DIVIDED)))
    noise[0] = 0
    variables = noise.reshape(starts * count, -1)
    first, given = in_bucket((variables, design.given(starts)), len(variables))
    objective = design.objective()
    found = descend(lambda x: objective.value_and_grad(x, given), first, steps=steps, rate=0.2)
    values = found.values[: len(variables)].reshape(starts, count)
    best = values.argmin(axis=0)
    points = found.points[: len(variables)].reshape(starts, count, -1)[best, np.arange(count)]
    return design.result(_softmax(points), values.min(axis=0), starts * count * (steps + 1))


def search_designs(
    problem: TuningProblem,
    num_microbatches: int,
    prices: PartPrices,
    budgets: Sequence[float] | Float[NumpyArray, " budgets"],
    *,
    divisions: int = 40,
) -> SystemDesigns:
    """Evaluate a grid of shares for each budget, none of which is 0.

    Args:
      problem: as for `design_systems`.
      num_microbatches: likewise.
      prices: likewise.
      budgets: likewise.
      divisions: parts of equal size into which a budget is cut, once memory is paid.

    Returns:
      The best system of the grid for each budget.

    Raises:
      ValueError: as `design_systems`, or if the grid is too large.

    Example:
      >>> from pipejax import Workload, load_model, load_system
      >>> from pipejax.search.tuning.schedule_family import ScheduleFamily
      >>> workload = Workload(load_model("gpt-22b"), minibatch=32, tensor_parallel=8)
      >>> problem = TuningProblem.of(ScheduleFamily("1f1b", 4), [workload], [load_system("h100")])
      >>> prices = PartPrices(20.0, 2.0, 10.0, 50.0, 20.0)
      >>> search_designs(problem, 32, prices, [30e3], divisions=10).evaluated
      84
    """
    design = _Design.of(problem, num_microbatches, prices, np.asarray(budgets, float))
    count = len(design.budget)
    grid = compositions(divisions, len(DIVIDED)) / divisions
    shares = np.repeat(grid, count, axis=0)
    values = np.asarray(design.objective().values(np.log(shares), design.given(len(grid))))
    best = values.reshape(len(grid), count).argmin(axis=0)
    found = values.reshape(len(grid), count).min(axis=0)
    return design.result(grid[best], found, len(shares))


@dataclasses.dataclass(frozen=True, eq=False)
class _Design:
    """One pair whose system is to be bought."""

    problem: TuningProblem
    num_microbatches: int
    prices: Float[NumpyArray, " parts"]
    budget: Float[NumpyArray, " budgets"]
    memory: float  # bytes that are needed

    @classmethod
    def of(
        cls, problem: TuningProblem, num_microbatches: int, prices: PartPrices, budget: NumpyArray
    ) -> "_Design":
        if len(problem.capacity) != 1:
            raise ValueError(f"one pair is designed for, got {len(problem.capacity)}")
        for name, values in (("prices", prices), ("budgets", budget)):
            if not are_positive(np.asarray(values, float), len(values)):
                raise ValueError(f"{name} must be finite numbers above 0, got {tuple(values)}")
        assignment = LayerAssignment(problem, num_microbatches)
        memory = float(assignment.memory_bytes(problem.pairs.assigned, np.zeros(1, int))[0])
        least = memory / UNITS["memory_capacity"] * prices.memory_capacity
        if budget.min() <= least:
            raise ValueError(
                f"a budget of {budget.min():g} buys nothing but memory: {memory / 1e9:.1f} GB "
                f"are needed, which cost {least:g}"
            )
        return cls(problem, num_microbatches, np.array(prices, float), budget, memory)

    @property
    def spendable(self) -> Float[NumpyArray, " budgets"]:
        """What is left of each budget once memory is paid."""
        return self.budget - self.memory / UNITS["memory_capacity"] * self.prices[-1]

    def given(self, times: int) -> tuple[Pair, NumpyArray, NumpyArray]:
        """The pair, what each share of 1 buys, for all budgets so many times over."""
        count = times * len(self.budget)
        pair = jax.tree.map(
            lambda leaf: np.broadcast_to(leaf, (count, *leaf.shape[1:])), self.problem.pairs
        )
        units = np.array([UNITS[name] for name in DIVIDED])
        buys = self.spendable[:, None] / self.prices[:-1] * units
        return pair, np.tile(buys, (times, 1)), np.full(count, self.memory)

    def objective(self) -> StepTimeObjective:
        """Step time by logits of the shares."""
        family, count = self.problem.family, self.num_microbatches
        table, workload = family.table(count), self.problem.workload

        def price(logits: Array, given: tuple[Pair, Array, Array]) -> Costs:
            pair, buys, memory = given
            peak, bandwidth, node, network = jax.nn.softmax(logits) * buys
            system = dataclasses.replace(
                pair.system,
                peak_flops=peak,
                memory_bandwidth=bandwidth,
                memory_capacity=memory,
                node=dataclasses.replace(pair.system.node, bandwidth=node),
                network=dataclasses.replace(pair.system.network, bandwidth=network),
            )
            bought = pair._replace(system=system)
            return pair_costs(workload, table, bought, pair.minibatch / count)

        def value(logits: Array, ends: Array, given: Any) -> Array:
            del logits, given
            return ends[0]

        return self.problem.once(
            ("design", count), lambda: StepTimeObjective((family.program(count),), price, value)
        )

    def result(
        self, shares: Float[NumpyArray, "budgets divided"], step_time: NumpyArray, evaluated: int
    ) -> SystemDesigns:
        """Add the memory to the shares of the rest."""
        spent = shares * self.spendable[:, None]
        spent = np.column_stack([spent, self.budget - self.spendable])
        units = np.array(list(UNITS.values()))
        return SystemDesigns(
            self.budget,
            spent / self.budget[:, None],
            spent / self.prices * units,
            np.asarray(step_time),
            evaluated,
        )


def _softmax(logits: Float[NumpyArray, "batch parts"]) -> Float[NumpyArray, "batch parts"]:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
