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
import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.costs.model.workload import StageLayers
from pipejax.search.cutting_planes import Columns, CuttingPlanes, raise_bounds
from pipejax.search.tuning.joint_space import JointProblem, TunedJointly
from pipejax.search.tuning.problem import as_they_are
from pipejax.search.tuning.step_time_objective import Given

ROUNDS = 40
CLOSE = 1e-4  # of the step time: a relaxed optimum that is known so well is not refined
ROUNDING = 1e-9  # of costs, below which a second difference is 0


class RoundingBound(NamedTuple):
    """How short a step could be at best, for each pair.

    Attributes:
      lower_bound: (pairs) no setting of any size has a shorter step [s]; NaN where costs are not
        convex.
      at_same_size: (pairs) the same for the size that was found [s].
      evaluated: points where tangents were taken.
    """

    lower_bound: Float[NumpyArray, " pairs"]
    at_same_size: Float[NumpyArray, " pairs"]
    evaluated: int


class _Cell(CuttingPlanes):
    """One microbatch size of one pair; columns are layers, then recomputed layers."""

    def __init__(self, joint: JointProblem, found: TunedJointly, pair: int, size: int) -> None:
        even, always = (own[pair] for own in joint.problem.pairs.assigned)
        self.pair, self.size = pair, size
        self.best, self.capacity = found.step_time[pair], joint.problem.capacity[pair]
        self.even = even
        stages, total = len(even), float(even.sum())
        one, none = np.eye(stages), np.zeros(stages)
        most = np.full(stages, total)
        layers = (np.ones(stages), most) if "layers" in joint.parts else (even, even)
        super().__init__(
            np.append(layers[0], none), np.append(layers[1], most), unit=self.best, limit=self.best
        )
        if "recompute" in joint.parts:  # at most all layers of a stage
            self.restrict(np.hstack([-one, one]), -np.inf, 0.0)
        self.restrict(np.append(none + 1, none)[None], total, total)
        if "recompute" not in joint.parts:
            self.restrict(np.hstack([-one * (always > 0), one]), 0.0, 0.0)
        settings = found.settings
        self.point = np.concatenate([settings.layers[pair], settings.recomputed[pair]]) + 0.0

    def touch(self, value: float, slope: Columns, need: float, use: Columns) -> None:
        """Add the tangent at the point, and that of memory where too much is needed.

        Close where the bound meets the step time.
        """
        self.cut(slope, float(value - slope @ self.point))
        if need <= self.capacity:
            self.is_open = self.bound < value * (1 - CLOSE)
        else:
            high = 1.0 + (use @ self.point - need) / self.capacity
            self.restrict(use[None] / self.capacity, -np.inf, high)


def bound_rounding(joint: JointProblem, found: TunedJointly) -> RoundingBound:
    """Bound from below what any layers of any size could reach."""
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

    def look(cells: list[_Cell]) -> None:
        nonlocal evaluated
        evaluated += len(cells)
        groups: dict[int, list[_Cell]] = {}
        for cell in cells:
            groups.setdefault(joint.count(cell.pair, cell.size), []).append(cell)
        for count, own in groups.items():
            _touch(joint, count, own)

    look(working)
    raise_bounds(working, look, rounds=ROUNDS)
    lower, same = np.full((2, len(pairs)), np.inf)
    for cell, is_convex in zip(cells, convex, strict=True):
        bound = cell.bound if is_convex else np.nan
        lower[cell.pair] = np.minimum(lower[cell.pair], bound)  # NaN stays
        if cell.size == found.settings.size[cell.pair]:
            same[cell.pair] = bound
    return RoundingBound(lower, same, evaluated)


def _given(joint: JointProblem, cells: list[_Cell]) -> Given:
    """Fixed inputs of cells."""
    given = joint.problem.given(np.array([cell.pair for cell in cells]), limited=False)
    sizes: Any = np.array([float(cell.size) for cell in cells])
    return given._replace(size=sizes)


def _touch(joint: JointProblem, count: int, cells: list[_Cell]) -> None:
    """Add tangents to cells with so many microbatches."""
    objective = joint.problem.objective(as_they_are, count)
    points = StageLayers(*np.split(np.stack([cell.point for cell in cells]), 2, axis=1))
    given = _given(joint, cells)
    values, slopes = objective.value_and_grad(points, given)
    needs, uses = objective.need_and_grad(points, given)
    slope, use = (np.concatenate([np.asarray(x) for x in each], axis=1) for each in (slopes, uses))
    for row, cell in enumerate(cells):
        cell.touch(float(values[row]), slope[row], needs[row], use[row])


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
