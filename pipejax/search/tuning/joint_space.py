"""What is tuned together: the relaxation of several parts as one, and whole settings of them.

What is tuned together is one vector of real numbers, each part by the relaxation that tunes it
alone. Whole settings are evaluated exactly, with the program of their own M.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.costs import array_functions as xp
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Number
from pipejax.search.tuning.problem import Owners, TuningProblem, as_they_are
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
    """Whole settings of pairs."""

    pair: Owners
    size: Int[NumpyArray, " settings"]  # b [sequences]
    layers: Points
    recomputed: Points  # those of them that are recomputed

    def at(self, index: Any) -> "Settings":
        """Take some of them."""
        return Settings(*(field[index] for field in self))


class TunedJointly(NamedTuple):
    """The best setting of each pair."""

    settings: Settings  # one for each pair
    step_time: Float[NumpyArray, " pairs"]  # exact [s]
    memory_bytes: Float[NumpyArray, " pairs"]  # need of the fullest worker [B]
    evaluated: int  # settings that were evaluated, over all pairs, slopes of relaxed ones included
    # of the relaxation [s]; None after an exhaustive search
    relaxed_step_time: Float[NumpyArray, " pairs"] | None = None
    # its microbatch size and layers; None likewise
    relaxed: tuple[Float[NumpyArray, " pairs"], StageLayers] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class JointProblem:
    """What is tuned together, for which pairs."""

    problem: TuningProblem  # the pairs under their schedule
    parts: tuple[str, ...]  # names, in the order of `PARTS`
    microbatches: int = 0  # M where the microbatch size is given; 0 where it is tuned

    def sizes(self, pair: int) -> list[int]:
        """Microbatch sizes that may be legal, ascending."""
        total = int(self.problem.pairs.minibatch[pair])
        return [total // self.microbatches] if self.microbatches else list(divisors(total))

    def count(self, pair: int, size: int) -> int:
        """Number of microbatches of such a size."""
        return int(self.problem.pairs.minibatch[pair]) // size

    def assigned(self, settings: Settings) -> StageLayers:
        """Layers as real numbers."""
        return StageLayers(settings.layers.astype(float), settings.recomputed.astype(float))

    def exact(self, settings: Settings) -> tuple[PerConfiguration, PerConfiguration]:
        """Step times [s] and needs [B], infinite where the schedule does not exist."""
        times, need = np.full((2, len(settings.pair)), np.inf)
        counts = self.problem.pairs.minibatch[settings.pair].astype(int) // settings.size
        for count in np.unique(counts).tolist():
            if self.problem.family.refusal(count):
                continue
            objective = self.problem.objective(as_they_are, count)
            mine = np.flatnonzero(counts == count)
            for at in np.array_split(mine, -(-len(mine) // LANES)):
                own = settings.at(at)
                given = self.problem.given(own.pair, count, limited=False)
                times[at], need[at] = objective.evaluate(self.assigned(own), given)
        return times, need

    def times(self, settings: Settings) -> PerConfiguration:
        """Step times [s]; where there is no room, more than any, and the more the less room."""
        # So a search that starts where nothing fits is led to where something does.
        times, need = self.exact(settings)
        over = need / self.problem.capacity[settings.pair]
        return np.where(over <= 1, times, NO_ROOM * over)

    def pick(
        self, settings: Settings, times: PerConfiguration, evaluated: int, **relaxed: Any
    ) -> TunedJointly:
        """Pick each pair's best setting."""
        order = np.lexsort((times, settings.pair))
        best = settings.at(order[np.unique(settings.pair[order], return_index=True)[1]])
        step, need = self.exact(best)
        for pair in np.flatnonzero(~(need <= self.problem.capacity)).tolist():
            which = f"pair {pair}: " if len(need) > 1 else ""
            if np.isinf(need[pair]):
                total = int(self.problem.pairs.minibatch[pair])
                raise ValueError(
                    f"{which}no microbatch size is legal for a minibatch of {total}: "
                    f"{self.problem.family.refusal(total)}"
                )
            needs = f"{need[pair] / 1e9:.1f} GB per accelerator"
            has = f"the system has {self.problem.capacity[pair] / 1e9:.1f} GB"
            if self.parts == ("size",):
                raise NothingFitsError(
                    f"{which}no microbatch size fits: the smallest need is {needs}, with a "
                    f"microbatch size of {best.size[pair]}; {has}"
                )
            raise ValueError(f"{which}nothing fits: the smallest need found is {needs}; {has}")
        return TunedJointly(best, step, need, evaluated, **relaxed)


def joined(settings: list[Settings]) -> Settings:
    """All settings of a list, one after the other."""
    return Settings(*(np.concatenate(each) for each in zip(*settings, strict=True)))


def count_settings(joint: JointProblem, pair: int) -> float:
    """How many settings an exhaustive search of one pair tries."""
    even = joint.problem.pairs.assigned.layers[pair].astype(int)
    stages, total = len(even), int(even.sum())
    ways: float = len(joint.sizes(pair))
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
