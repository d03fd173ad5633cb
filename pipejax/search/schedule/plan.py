"""A plan: when every op starts, in units of the problem."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.search.schedule.problem import Problem

NEVER = -1  # start of an offload that does not happen

PerOp = Int[NumpyArray, "stages microbatches"]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Starts of all ops.

    Attributes:
      forward: (stages, microbatches) start of F.
      input_grad: (stages, microbatches) start of I, or of B where the backward is whole.
      weight_grad: (stages, microbatches) start of W; where the backward is whole, its end.
      whole: (stages, microbatches) whether the backward is whole.
      offload: (stages, microbatches) start of O, or `NEVER`.
      load: (stages, microbatches) start of L, or `NEVER`.
    """

    forward: PerOp
    input_grad: PerOp
    weight_grad: PerOp
    whole: Bool[NumpyArray, "stages microbatches"]
    offload: PerOp
    load: PerOp

    @classmethod
    def of(cls, starts: Mapping[str, PerOp], whole: NumpyArray | None = None) -> "Plan":
        """Make a plan from the starts by phase letter; by default it is split, and all stays."""
        nowhere = np.full_like(starts["F"], NEVER)
        return cls(
            forward=starts["F"],
            input_grad=starts["I"],
            weight_grad=starts["W"],
            whole=np.zeros(nowhere.shape, bool) if whole is None else whole,
            offload=starts.get("O", nowhere),
            load=starts.get("L", nowhere),
        )

    @property
    def starts(self) -> Mapping[str, PerOp]:
        """Starts of all ops by phase letter; a whole backward starts where its I would."""
        return {
            "F": self.forward,
            "I": self.input_grad,
            "W": self.weight_grad,
            "O": self.offload,
            "L": self.load,
        }

    def moved(self, move: Callable[[PerOp], PerOp]) -> "Plan":
        """Return the plan with other starts; what never starts still does not."""
        moved = {p: np.where(at == NEVER, NEVER, move(at)) for p, at in self.starts.items()}
        return Plan.of(moved, self.whole)

    @property
    def offloaded(self) -> int:
        """Number of activations that go to the host and back."""
        return int((self.offload != NEVER).sum())


def gradient_end(problem: Problem, plan: Plan) -> PerOp:
    """Return when the whole gradient of each op is there: the end of W, or of B.

    Returns (stages, microbatches) units.
    """
    lasts = np.where(plan.whole, 0, problem.weight_grad[:, None])
    return plan.weight_grad + lasts


def input_grad_end(problem: Problem, plan: Plan) -> PerOp:
    """Return when the input gradient of each op is there: the end of I, or of B.

    Returns (stages, microbatches) units.
    """
    lasts = np.where(plan.whole, problem.backward[:, None], problem.input_grad[:, None])
    return plan.input_grad + lasts


def objective_of(problem: Problem, plan: Plan) -> int:
    """Return what the problem asks to be least: the makespan, or the longest span of a worker."""
    end = gradient_end(problem, plan)
    if problem.objective == "span":
        worker = problem.worker
        return max(
            int(end[worker == w].max() - plan.forward[worker == w].min())
            for w in range(problem.num_workers)
        )
    row_end = np.array([end[problem.worker == w].max() for w in range(problem.num_workers)])
    after = end.max(axis=1) + problem.step_end
    held = _copies(problem)
    return int(max(after.max(), (row_end + held @ problem.update).max()))


def _copies(problem: Problem) -> Int[NumpyArray, "workers stages"]:
    """Which stages a worker has a copy of."""
    workers = np.arange(problem.num_workers)
    return (problem.placement[:, :, None] == workers).any(axis=0).T.astype(np.int64)
