"""Several things at once: microbatch size, layers, recomputed layers.

Many starts descend at once. Then sizes next to the best minima, with whole layers, are evaluated
exactly, and improved by one layer at a time. The exhaustive twin evaluates all settings, one after
the other.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.base.compiled import compiled
from pipejax.costs import array_functions as xp
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Number, Numbers
from pipejax.search.tuning.problem import TuningProblem, as_they_are
from pipejax.search.tuning.rounding import (
    MOST,
    Points,
    TooManyError,
    compositions,
    improve,
    swaps,
    whole_with_sum,
)
from pipejax.search.tuning.step_time_objective import Inputs, Pair, PerConfiguration, descend


class NothingFitsError(ValueError):
    """No legal setting leaves room on the accelerators."""


NO_ROOM = 1e12  # stands for the step time of a setting that needs all the memory, and more [s]
LANES = 16_384  # settings that are evaluated at once: few batches are compiled for


def any_size(log_size: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """Relax the microbatch size by its logarithm."""
    return inputs.pair, xp.exp(log_size[0])


def real_layers(variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """One layer for each stage, the rest by a softmax; recomputed as the even split is."""
    # At a given number of microbatches step time and memory are functions of layers that make sense
    # in between. Stages that hold embedding or head, or wait for messages, take fewer.
    even, recomputed = inputs.pair.assigned
    layers = 1 + xp.softmax(variables) * (even.sum() - len(even))
    assigned = StageLayers(layers, layers * recomputed / even)
    return inputs.pair._replace(assigned=assigned), inputs.size


def real_recompute(variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """Any share of the layers of each stage recomputed: as few as memory allows."""
    layers = inputs.pair.assigned.layers
    assigned = StageLayers(layers, layers / (1 + xp.exp(-variables)))
    return inputs.pair._replace(assigned=assigned), inputs.size


class _Part(NamedTuple):
    """Relaxation of one part of the settings."""

    relax: Callable[[Any, Inputs], tuple[Pair, Number]]  # what its variables mean
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

    def __call__(self, variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
        """The pair and the microbatch size that the variables stand for."""
        for name, part in self.split(variables, inputs.pair.assigned.layers.shape[-1]).items():
            pair, size = PARTS[name].relax(part * PARTS[name].scale, inputs)
            inputs = inputs._replace(pair=pair, size=size)
        return inputs.pair, inputs.size

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
    """Parts to tune together, for a model and a system."""

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
                inputs = self.problem.inputs(len(at), count, limited=False)
                times[at], need[at] = objective.evaluate(layers, inputs)
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


KEPT = 3  # minima that are rounded
KEPT_SETTINGS = 10  # that are improved
RATE = 0.3
MOST_SETTINGS = 5_000_000  # that are all evaluated


def plain_settings(joint: JointProblem) -> Settings:
    """Every size with even layers; of the size alone these are all settings."""
    if "size" in joint.parts:
        joint.problem.family.check_size(joint.problem.workload.minibatch)
    return _settings(_plain(joint))


def plain_answers(joint: JointProblem) -> Iterator[TunedJointly]:
    """The best of plain settings, from few microbatches on: each is better than the one before."""
    # They come before anything is searched or compiled, once one fits.
    plain = plain_settings(joint)
    counts = joint.problem.workload.minibatch // plain.size
    times, least = np.full(len(counts), np.inf), NO_ROOM
    for count in np.unique(counts).tolist():
        at = np.flatnonzero(counts == count)
        times[at] = joint.times(plain.at(at))
        if times.min() < least:
            least = times.min()
            yield joint.pick(plain, times, int(np.isfinite(times).sum()))


def tune_jointly(joint: JointProblem, *, starts: int = 8, steps: int = 40) -> TunedJointly:
    """Find the best setting, by gradient."""
    relax, family = Jointly(joint.parts), joint.problem.family
    counts = (joint.microbatches,) if joint.microbatches else family.few_microbatches
    first, lower, upper = _starts(joint, starts)
    objective = joint.problem.objective(relax, *counts)
    inputs = joint.problem.inputs(starts, joint.microbatches or 1)
    minima = descend(
        lambda points: objective.value_and_grad(points, inputs),
        first,
        steps=steps,
        rate=RATE,
        lower=lower,
        upper=upper,
    )
    sizes, soft = _relaxed(joint, minima.points[minima.values.argsort()[:KEPT]])
    evaluate = _Counted(joint)
    rounded = _rounded(joint, sizes, soft)
    shortlist = rounded.at(_best(rounded, evaluate(rounded), per_size=len(joint.parts) > 1))
    settings, times = improve_settings(joint, shortlist, evaluate)
    best = StageLayers(*(stages[0] for stages in soft))
    evaluated = evaluate.count + minima.values.size * (steps + 1)
    relaxed = minima.values.min().item(), sizes[0].item(), best
    return joint.pick(settings, times, evaluated, relaxed)


class _Counted:
    """Exact evaluation that counts settings."""

    def __init__(self, joint: JointProblem) -> None:
        self.joint, self.count = joint, 0

    def __call__(self, settings: Settings) -> PerConfiguration:
        self.count += len(settings.size)
        return self.joint.times(settings)


Bounds = Float[NumpyArray, "1 variables"]


def _starts(
    joint: JointProblem, starts: int
) -> tuple[Float[NumpyArray, "starts variables"], Bounds, Bounds]:
    """Points to start from, even shares first, and bounds of the variables."""
    stages = len(joint.problem.pair.assigned.layers)
    rng, parts = np.random.default_rng(0), []
    lower, upper = [], []
    for name in joint.parts:
        part, width = PARTS[name], PARTS[name].width(stages)
        points = rng.normal(0, part.spread, (starts, width))
        points[0] = 0
        low, high = np.full((2, 1, width), [[[-np.inf]], [[np.inf]]])
        if name == "size":
            fewest = joint.problem.family.few_microbatches[0]
            low[:] = 0
            high[:] = np.log(np.maximum(joint.problem.pair.minibatch / fewest, 1.0))
            points = (np.arange(starts)[:, None] + 0.5) / starts * high
        elif name == "recompute":  # the larger the microbatches, the shorter memory is
            points = points / 2 + np.linspace(-part.spread, part.spread, starts)[:, None]
        parts.append(points)
        lower.append(low)
        upper.append(high)
    return np.concatenate(parts, -1), np.concatenate(lower, -1), np.concatenate(upper, -1)


Sizes = Float[NumpyArray, " kept"]  # microbatch sizes


def _relaxed(
    joint: JointProblem, points: Float[NumpyArray, "kept variables"]
) -> tuple[Sizes, StageLayers]:
    inputs = joint.problem.inputs(len(points), joint.microbatches or 1, limited=False)
    size, *layers = map(np.asarray, _read(points, inputs, relax=Jointly(joint.parts)))
    return size, StageLayers(*layers)


@functools.partial(compiled, static_argnames="relax")
def _read(points: Array, inputs: Inputs, *, relax: Jointly) -> tuple[Numbers, ...]:
    def read_point(point: Array, inputs: Inputs) -> tuple[Numbers, ...]:
        pair, size = relax(point, inputs)
        return size + 0.0, pair.assigned.layers, pair.assigned.recomputed

    return jax.vmap(read_point)(points, inputs)


def _rounded(joint: JointProblem, sizes: Sizes, soft: StageLayers) -> Settings:
    """Round relaxed settings in several ways, and add plain ones: one fits if any setting does."""
    even, candidates = joint.problem.pair.assigned, list[tuple[Any, ...]]()
    tunes_layers, recomputes = "layers" in joint.parts, "recompute" in joint.parts
    always = even.recomputed > 0
    for rank, relaxed_size in enumerate(sizes.tolist()):
        layers = np.asarray(soft.layers[rank])
        share = soft.recomputed[rank] / layers
        near = [b for b in joint.sizes if b <= relaxed_size * (1 + 1e-9)][-1:]
        near += [b for b in joint.sizes if b > relaxed_size * (1 + 1e-9)][:1]
        wholes = np.asarray(even.layers, int)[None]
        if tunes_layers:
            wholes = whole_with_sum(layers[None])
        if rank == 0 and tunes_layers:  # the best minimum is rounded in other ways, too
            wholes = np.concatenate([wholes, wholes + swaps(wholes.shape[1])])
        for whole in wholes[wholes.min(axis=1) >= 1]:
            soft_ways = [np.ceil(share * whole - 1e-6), np.floor(share * whole), whole]
            ways = soft_ways if recomputes else [whole * always]
            candidates += [(b, whole, way) for b in near for way in ways]
        if rank == 0:
            candidates += _plain(joint)
    return _settings(candidates)


def _plain(joint: JointProblem) -> list[tuple[Any, ...]]:
    """Settings of every size with even layers: all or none recomputed, or as it is untuned."""
    # One of them fits if any does.
    layers, always = joint.problem.pair.assigned
    ways = [0 * layers, layers] if "recompute" in joint.parts else [layers * (always > 0)]
    return [(size, layers, way) for size in joint.sizes for way in ways]


def _settings(rows: list[tuple[Any, ...]]) -> Settings:
    size, layers, recomputed = map(np.array, zip(*rows, strict=True))
    return Settings(size, layers.astype(int), recomputed.astype(int))


def _best(
    settings: Settings, times: PerConfiguration, *, per_size: bool
) -> Int[NumpyArray, " settings"]:
    """Return the best few settings: the best of each size, if `per_size`."""
    group = settings.size if per_size else np.arange(len(times))
    order = np.lexsort((times, group))  # by group, then time: the first of a group is its best
    first = order[np.unique(group[order], return_index=True)[1]]
    return first[times[first].argsort(kind="stable")][:KEPT_SETTINGS]


def improve_settings(
    joint: JointProblem, settings: Settings, evaluate: Callable[[Settings], PerConfiguration]
) -> tuple[Settings, PerConfiguration]:
    """Move by one layer while there is something better, all settings at once."""
    # Sizes stay: where one does not fit yet, a smaller one would always look better.
    stages = settings.layers.shape[1]
    always = joint.problem.pair.assigned.recomputed > 0
    recomputes = "recompute" in joint.parts

    def moved_settings(points: Points, owner: Int[NumpyArray, " points"]) -> Settings:
        layers, recomputed = np.split(points, 2, axis=1)
        starts = settings.at(owner)
        recomputed = recomputed if recomputes else layers * always
        return starts._replace(layers=layers, recomputed=recomputed)

    def moved_times(points: Points, owner: Int[NumpyArray, " points"]) -> PerConfiguration:
        moved, times = moved_settings(points, owner), np.full(len(points), np.inf)
        layers, recomputed = moved.layers, moved.recomputed
        legal = (layers >= 1) & (recomputed >= 0) & (recomputed <= layers)
        at = np.flatnonzero(legal.all(axis=1))
        if len(at):
            times[at] = evaluate(moved.at(at))
        return times

    points = np.column_stack([settings.layers, settings.recomputed * recomputes])
    owner = np.arange(len(points))
    points, times = improve(points, owner, _moves(joint, stages), moved_times)
    return moved_settings(points, owner), times


def _moves(joint: JointProblem, stages: int) -> Int[NumpyArray, "moves places"]:
    """Changes to a neighbour: of the layers of each stage, and of those recomputed."""
    swap, add_one = swaps(stages), np.eye(stages, dtype=int)
    more = np.concatenate([-add_one, add_one, swap])
    moves = [np.zeros((0, 2 * stages), int)]
    if "layers" in joint.parts:
        moves.append(np.hstack([swap, 0 * swap]))
    if "recompute" in joint.parts:
        moves.append(np.hstack([0 * more, more]))
    if len(moves) > 2:  # where memory is short, what is recomputed changes with a layer
        kinds = (swap, np.minimum(swap, 0), np.maximum(swap, 0))
        moves += [np.hstack([swap, recomputed]) for recomputed in kinds]
    return np.concatenate(moves)


def search_jointly(joint: JointProblem) -> TunedJointly:
    """Evaluate all settings."""
    if joint.parts == ("size",):
        plain = plain_settings(joint)
        times = joint.times(plain)
        return joint.pick(plain, times, int(np.isfinite(times).sum()))
    count = count_settings(joint)
    # of one part, what lists them refuses where they are too many
    if count > MOST_SETTINGS and len(joint.parts) > 1:
        raise TooManyError(f"{count:.3g} settings: at most {MOST_SETTINGS} are tried")
    best: list[tuple[Settings, PerConfiguration]] = []
    for block in every_setting(joint):
        times = joint.times(block)
        least = [times.argmin()]
        best.append((block.at(least), times[least]))
    blocks, least_times = zip(*best, strict=True)
    settings = Settings(*map(np.concatenate, zip(*blocks, strict=True)))
    return joint.pick(settings, np.concatenate(least_times), int(count))


def every_setting(joint: JointProblem) -> Iterator[Settings]:
    """All settings, in blocks of one microbatch size each."""
    layers, recomputed = every_assignment(joint)
    for size in joint.sizes:
        for low in range(0, len(layers), LANES):
            block = slice(low, low + LANES)
            yield Settings(np.full(len(layers[block]), size), layers[block], recomputed[block])


def every_assignment(joint: JointProblem) -> tuple[Points, Points]:
    """All layers (ways, stages), and those that are recomputed."""
    even, again = (np.asarray(stages, int) for stages in joint.problem.pair.assigned)
    layers = even[None]
    if "layers" in joint.parts:
        layers = compositions(int(even.sum()), len(even))
    if "recompute" not in joint.parts:
        return layers, layers * (again > 0)
    if joint.parts == ("recompute",) and (count := math.prod((even + 1).tolist())) > MOST:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MOST} are tried")
    return _with_every_recompute(layers)


def _with_every_recompute(layers: Points) -> tuple[Points, Points]:
    """Every layers (ways, stages) with every number of them recomputed on each stage."""
    choices = layers + 1
    ways = choices.prod(axis=1)
    which = np.repeat(np.arange(len(layers)), ways)
    number: Int[NumpyArray, " ways"] = np.arange(len(which)) - np.repeat(
        np.cumsum(ways) - ways, ways
    )
    recomputed = np.empty((len(which), layers.shape[1]), int)
    for stage in range(layers.shape[1]):
        number, recomputed[:, stage] = np.divmod(number, choices[which, stage])
    return layers[which], recomputed
