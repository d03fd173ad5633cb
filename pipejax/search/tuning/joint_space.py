"""What is tuned together: the relaxation of several parts as one, and whole settings of them.

What is tuned together is one vector of real numbers, each part by the relaxation that tunes it
alone. Whole settings are evaluated exactly, with the program of their own M.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.costs import array_functions as xp
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Number
from pipejax.search.tuning.problem import TuningProblem, as_they_are
from pipejax.search.tuning.rounding import Points
from pipejax.search.tuning.step_time_objective import Given, Pair, PerConfiguration


class NothingFitsError(ValueError):
    """No legal setting leaves room on the accelerators."""


NO_ROOM = 1e12  # stands for the step time of a setting that needs all the memory, and more [s]
LANES = 16_384  # settings that are evaluated at once: few batches are compiled for


def any_size(log_size: Array, given: Given) -> tuple[Pair, Number]:
    """Relax the microbatch size by its logarithm."""
    return given.pair, xp.exp(log_size[0])


def real_layers(variables: Array, given: Given) -> tuple[Pair, Number]:
    """One layer for each stage, the rest by a softmax; recomputed as the even split is."""
    # At a given number of microbatches step time and memory are functions of layers that make sense
    # in between. Stages that hold embedding or head, or wait for messages, take fewer.
    even, recomputed = given.pair.assigned
    layers = 1 + xp.softmax(variables) * (even.sum() - len(even))
    assigned = StageLayers(layers, layers * recomputed / even)
    return given.pair._replace(assigned=assigned), given.size


def real_recompute(variables: Array, given: Given) -> tuple[Pair, Number]:
    """Any share of the layers of each stage recomputed: as few as memory allows."""
    layers = given.pair.assigned.layers
    assigned = StageLayers(layers, layers / (1 + xp.exp(-variables)))
    return given.pair._replace(assigned=assigned), given.size


class _Part(NamedTuple):
    """How one part is relaxed."""

    relax: Callable[[Any, Given], tuple[Pair, Number]]  # what its variables mean
    width: Callable[[int], int]  # stages -> number of its variables
    scale: float  # its step size against that of the others
    spread: float  # of its starts


# in the order in which they are applied: recomputed layers are a share of the layers
PARTS: Mapping[str, _Part] = {
    "size": _Part(any_size, lambda stages: 1, 1.0, 0),
    "layers": _Part(real_layers, lambda stages: stages, 0.3, 1.0),
    "recompute": _Part(real_recompute, lambda stages: stages, 1.0, 1.5),
}


@dataclasses.dataclass(frozen=True)
class Jointly:
    """The relaxation of some parts, by one vector."""

    parts: tuple[str, ...]  # names, in the order of `PARTS`

    def __call__(self, variables: Array, given: Given) -> tuple[Pair, Number]:
        """The pair and the microbatch size that the variables stand for."""
        for name, own in self.split(variables, given.pair.assigned.layers.shape[-1]).items():
            pair, size = PARTS[name].relax(own * PARTS[name].scale, given)
            given = given._replace(pair=pair, size=size)
        return given.pair, given.size

    def split(self, variables: Any, stages: int) -> dict[str, Any]:
        """Cut (..., variables) into those of each part."""
        ends = np.cumsum([PARTS[name].width(stages) for name in self.parts]).tolist()
        starts = [0, *ends[:-1]]
        return {
            name: variables[..., low:high]
            for name, low, high in zip(self.parts, starts, ends, strict=True)
        }


class Settings(NamedTuple):
    """Whole settings."""

    size: Int[NumpyArray, " settings"]  # b [sequences]
    layers: Points
    recomputed: Points  # those of them that are recomputed

    def at(self, index: Any) -> "Settings":
        """Take some of them."""
        return Settings(*(field[index] for field in self))


class TunedJointly(NamedTuple):
    """The best setting."""

    setting: Settings  # without the axis of settings
    step_time: float  # exact [s]
    memory_bytes: float  # need of the fullest worker [B]
    evaluated: int  # settings that were evaluated, slopes of relaxed ones included
    # step time [s], microbatch size and layers of the relaxation; None after an exhaustive search
    relaxed: tuple[float, float, StageLayers] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class JointProblem:
    """What is tuned together, for which model and system."""

    problem: TuningProblem  # the model on the system under its schedule
    parts: tuple[str, ...]  # names, in the order of `PARTS`
    microbatches: int = 0  # M where the microbatch size is given; 0 where it is tuned

    @property
    def sizes(self) -> list[int]:
        """Microbatch sizes that may be legal, ascending."""
        total = self.problem.workload.minibatch
        return [total // self.microbatches] if self.microbatches else list(divisors(total))

    def exact(self, settings: Settings) -> tuple[PerConfiguration, PerConfiguration]:
        """Step times [s] and needs [B], infinite where the schedule does not exist."""
        times, need = np.full((2, len(settings.size)), np.inf)
        counts = self.problem.workload.minibatch // settings.size
        for count in np.unique(counts).tolist():
            if self.problem.family.refusal(count):
                continue
            objective = self.problem.objective(as_they_are, count)
            rows = np.flatnonzero(counts == count)
            for at in np.array_split(rows, -(-len(rows) // LANES)):
                part = settings.at(at)
                layers = StageLayers(part.layers.astype(float), part.recomputed.astype(float))
                given = self.problem.given(len(at), count, limited=False)
                times[at], need[at] = objective.evaluate(layers, given)
        return times, need

    def times(self, settings: Settings) -> PerConfiguration:
        """Step times [s]; where there is no room, more than any, and the more the less room."""
        # So a search that starts where nothing fits is led to where something does.
        times, need = self.exact(settings)
        over = need / self.problem.capacity
        return np.where(over <= 1, times, NO_ROOM * over)

    def pick(
        self,
        settings: Settings,
        times: PerConfiguration,
        evaluated: int,
        relaxed: tuple[float, float, StageLayers] | None = None,
    ) -> TunedJointly:
        """Pick the best setting."""
        best = int(times.argmin())
        (step,), (need,) = self.exact(settings.at([best]))
        setting = settings.at(best)
        if not need <= self.problem.capacity:
            if np.isinf(need):
                total = self.problem.workload.minibatch
                raise ValueError(
                    f"no microbatch size is legal for a minibatch of {total}: "
                    f"{self.problem.family.refusal(total)}"
                )
            needs = f"{need / 1e9:.1f} GB per accelerator"
            has = f"the system has {self.problem.capacity / 1e9:.1f} GB"
            if self.parts == ("size",):
                raise NothingFitsError(
                    f"no microbatch size fits: the smallest need is {needs}, with a "
                    f"microbatch size of {setting.size}; {has}"
                )
            raise ValueError(f"nothing fits: the smallest need found is {needs}; {has}")
        return TunedJointly(setting, step.item(), need.item(), evaluated, relaxed)


def count_settings(joint: JointProblem) -> float:
    """Count the settings that an exhaustive search tries."""
    even = joint.problem.pair.assigned.layers.astype(int)
    stages, total = len(even), int(even.sum())
    ways: float = len(joint.sizes)
    if "layers" in joint.parts and "recompute" in joint.parts:
        # coefficient of x^total in (2 x + 3 x^2 + 4 x^3 + ..)^stages = (1 / (1 - x)^2 - 1)^stages
        ways *= sum(
            (-1) ** (stages - k) * math.comb(stages, k) * math.comb(total + 2 * k - 1, total)
            for k in range(1, stages + 1)
        )
    elif "layers" in joint.parts:
        ways *= math.comb(total - 1, stages - 1)
    elif "recompute" in joint.parts:
        ways *= math.prod((even + 1).tolist())
    return ways
