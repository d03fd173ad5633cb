"""What rounding costs at most: a bound on every real, hence every whole number of layers.

At one microbatch size and one system a stage's costs are convex in its layers and in those that
are recomputed: sums over layers, and the longer of accelerator and host. The makespan is a maximum
of sums of costs, so it is convex too, and every tangent lies below it; so does every tangent of the
memory of the fullest worker. The least maximum of some tangents over all real layers that fit is
therefore a lower bound: a linear program. Tangents are added at its optimum (Kelley's cutting
planes) until the bound meets the step time there, or shows that no setting of that size beats the
one that was found.

That costs are convex is checked along whole numbers of layers. Where they are not (a collective
that changes its algorithm, an efficiency that jumps), and where stages depend on each other (layers
of several kinds), there is no bound.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.model.workload import StageLayers
from pipejax.engine.batched.pricing import filled
from pipejax.search.tuning.joint_space import JointProblem, TunedJointly
from pipejax.search.tuning.problem import as_they_are
from pipejax.search.tuning.step_time_objective import Given
from pipejax.search.tuning.system_design import bought

ROUNDS = 40
CLOSE = 1e-4  # of the step time: a relaxed optimum that is known so well is not refined
SLACK = 1e-6  # of a bound: what a linear program may be off by its tolerances
ROUNDING = 1e-9  # of costs, below which a second difference is 0


class RoundingBound(NamedTuple):
    """How short a step could be at best, for each pair.

    Attributes:
      lower_bound: (pairs) no setting of any size, with the same shares of the budget, has a shorter
        step [s]; NaN where costs are not convex.
      at_same_size: (pairs) the same for the size that was found [s].
      evaluated: points where tangents were taken.
    """

    lower_bound: Float[NumpyArray, " pairs"]
    at_same_size: Float[NumpyArray, " pairs"]
    evaluated: int


class _Cell:
    """One microbatch size of one pair: tangents so far, and the bound that they give.

    Columns of the linear program are layers, recomputed layers, and the step time in the unit of
    the best one.
    """

    def __init__(self, joint: JointProblem, found: TunedJointly, pair: int, size: int) -> None:
        even = joint.problem.pairs.assigned
        self.pair, self.size, self.logits = pair, size, found.settings.logits[pair]
        self.best, self.capacity = found.step_time[pair], joint.problem.capacity[pair]
        self.even, self.always = even.layers[pair], even.recomputed[pair] > 0
        self.tunes_layers = "layers" in joint.parts
        self.recomputes = "recompute" in joint.parts
        settings = found.settings
        self.point = np.concatenate([settings.layers[pair], settings.recomputed[pair]]) + 0.0
        self.bound, self.is_open = 0.0, True
        self.rows: list[Float[NumpyArray, " columns"]] = []
        self.limits: list[float] = []

    def cut(self, value: float, slope: Float[NumpyArray, " columns"], need: float) -> bool:
        """Add the tangent of the step time, unless the bound meets it where memory is enough."""
        fits = need <= self.capacity
        if fits and self.bound >= value * (1 - CLOSE):
            self.is_open = False
        self.rows.append(np.append(slope / self.best, -1.0))
        self.limits.append((slope @ self.point - value) / self.best)
        return bool(fits)

    def cut_memory(self, need: float, slope: Float[NumpyArray, " columns"]) -> None:
        """Add the tangent of a need that is too large."""
        self.rows.append(np.append(slope / self.capacity, 0.0))
        self.limits.append(1.0 + (slope @ self.point - need) / self.capacity)

    def solve(self) -> None:
        """Minimise the largest tangent; close the cell if it beats nothing, or if nothing fits."""
        from scipy.optimize import linprog  # at first use: the import takes a while

        stages, total = len(self.even), self.even.sum()
        one, none = np.eye(stages), np.zeros((stages, 1))
        if self.recomputes:  # at most all layers of a stage
            upper, equal = np.hstack([-one, one, none]), np.zeros((0, 2 * stages + 1))
        else:
            upper, equal = np.zeros((0, 2 * stages + 1)), np.hstack([-one * self.always, one, none])
        sums = np.concatenate([np.ones(stages), np.zeros(stages + 1)])
        layers = [(1.0, total) if self.tunes_layers else (each, each) for each in self.even]
        found = linprog(
            np.append(np.zeros(2 * stages), 1.0),
            A_ub=np.vstack([*self.rows, upper]),
            b_ub=np.append(self.limits, np.zeros(len(upper))),
            A_eq=np.vstack([sums, equal]),
            b_eq=np.append(total, np.zeros(len(equal))),
            bounds=[*layers, *[(0.0, total)] * stages, (None, None)],
        )
        if found.status == 2:  # nothing fits at this size
            self.bound, self.is_open = np.inf, False
        elif found.status == 0:
            self.bound = max(self.bound, found.fun * self.best * (1 - SLACK))
            self.point = found.x[:-1]
            self.is_open = self.bound < self.best
        else:  # what was proved so far stands
            self.is_open = False


def bound_rounding(joint: JointProblem, found: TunedJointly) -> RoundingBound:
    """Bound from below what any layers of any size could reach, with the shares that were found."""
    pairs = range(len(joint.problem.capacity))
    cells = [
        _Cell(joint, found, pair, size)
        for pair in pairs
        for size in joint.sizes(pair)
        if not joint.problem.family.refusal(joint.count(pair, size))
    ]
    convex = _are_convex(joint, cells)
    working = [cell for cell, is_convex in zip(cells, convex, strict=True) if is_convex]
    evaluated = 0
    for _ in range(ROUNDS):
        evaluated += len(working)
        groups: dict[int, list[_Cell]] = {}
        for cell in working:
            groups.setdefault(joint.count(cell.pair, cell.size), []).append(cell)
        for count, own in groups.items():
            _cut(joint, count, own)
        working = [cell for cell in working if cell.is_open]
        if not working:
            break
    lower, same = np.full((2, len(pairs)), np.inf)
    for cell, is_convex in zip(cells, convex, strict=True):
        bound = min(cell.bound, cell.best) if is_convex else np.nan
        lower[cell.pair] = np.minimum(lower[cell.pair], bound)  # NaN stays
        if cell.size == found.settings.size[cell.pair]:
            same[cell.pair] = bound
    return RoundingBound(lower, same, evaluated)


def _given(joint: JointProblem, cells: list[_Cell]) -> Given:
    """Fixed inputs of cells, on the systems that their shares buy."""
    given = joint.given(np.array([cell.pair for cell in cells]))
    sizes: Any = np.array([float(cell.size) for cell in cells])
    given = given._replace(size=sizes)
    if "system" not in joint.parts:
        return given
    logits = np.stack([cell.logits for cell in cells])
    pair, _ = jax.vmap(bought)(jnp.asarray(logits), given)
    return given._replace(pair=jax.tree.map(np.asarray, pair))


def _cut(joint: JointProblem, count: int, cells: list[_Cell]) -> None:
    """One round of cells with so many microbatches: tangents, then the linear programs."""
    objective, size = joint.problem.objective(as_they_are, count), len(cells)
    points = StageLayers(*np.split(np.stack([cell.point for cell in cells]), 2, axis=1))
    given = _given(joint, cells)
    values, slopes = objective.value_and_grad(*filled((points, given), size))
    needs, uses = objective.need_and_grad(points, given)
    slope, use = (np.concatenate([np.asarray(x) for x in each], axis=1) for each in (slopes, uses))
    for row, cell in enumerate(cells):
        if not cell.cut(float(values[row]), slope[row], needs[row]):
            cell.cut_memory(needs[row], use[row])
        if cell.is_open:
            cell.solve()


def _are_convex(joint: JointProblem, cells: list[_Cell]) -> Bool[NumpyArray, " cells"]:
    """Whether costs of each cell are convex in layers and recomputed layers, stage by stage.

    Along whole numbers of layers, with none and with all of them recomputed, and along whole
    numbers that are recomputed of all: no second difference is below 0.
    """
    if joint.problem.workload.model.moe is not None or not cells:
        return np.zeros(len(cells), bool)
    objective, given = joint.problem.objective(as_they_are), _given(joint, cells)
    convex = np.ones(len(cells), bool)
    most = int(max(cell.even.sum() for cell in cells))
    count = np.arange(1.0, most + 1)
    stages = len(cells[0].even)
    for line in ((count, 0 * count), (count, count), (0 * count + most, count)):
        # all stages alike: what a stage costs does not depend on the others
        points = StageLayers(*(np.tile(x[:, None], (len(cells), stages)) for x in line))
        of_all = jax.tree.map(lambda leaf: np.repeat(leaf, most, axis=0), given)
        for leaf in jax.tree.leaves(objective.costs(points, of_all)):
            values = leaf.reshape(len(cells), most, -1)
            bend = np.diff(values, 2, axis=1)
            straight = -ROUNDING * np.abs(values).max(axis=1, keepdims=True)
            convex &= (bend >= straight).all(axis=(1, 2))
    return convex
