"""Several things at once: microbatch size, layers, recomputed layers.

All pairs descend at once from many starts. Then sizes next to the best minima, with whole layers,
are evaluated exactly, and improved by one layer at a time. The exhaustive twin evaluates all
settings, one after the other.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.compiled import compiled
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.system.system import Numbers
from pipejax.search.tuning.joint_space import (
    LANES,
    NO_ROOM,
    PARTS,
    Jointly,
    JointProblem,
    Settings,
    TunedJointly,
    count_settings,
    joined,
)
from pipejax.search.tuning.problem import Owners
from pipejax.search.tuning.rounding import (
    MOST,
    Points,
    TooManyError,
    compositions,
    improve,
    swaps,
    whole_with_sum,
)
from pipejax.search.tuning.step_time_objective import Given, PerConfiguration

KEPT = 3  # minima of a pair that are rounded
KEPT_SETTINGS = 10  # of a pair, that are improved
RATE = 0.3
MOST_SETTINGS = 5_000_000  # that are all evaluated


def plain_settings(joint: JointProblem) -> Settings:
    """Every size of every pair with even layers; of the size alone these are all settings."""
    if "size" in joint.parts:
        joint.problem.family.check_size(int(joint.problem.pairs.minibatch.max()))
    pairs = range(len(joint.problem.capacity))
    return _settings([row for pair in pairs for row in _plain(joint, pair)])


def plain_answers(joint: JointProblem) -> Iterator[TunedJointly]:
    """The best of plain settings, from few microbatches on: each is better than the one before."""
    # They come before anything is searched or compiled, once each pair has one that fits.
    pairs, plain = range(len(joint.problem.capacity)), plain_settings(joint)
    counts = joint.problem.pairs.minibatch[plain.pair].astype(int) // plain.size
    times, least = np.full(len(counts), np.inf), np.inf
    for count in np.unique(counts).tolist():
        at = np.flatnonzero(counts == count)
        times[at] = joint.times(plain.at(at))
        best = np.full(len(pairs), np.inf)
        np.minimum.at(best, plain.pair, times)
        if best.max() < NO_ROOM and best.sum() < least:
            least = best.sum()
            yield joint.pick(plain, times, int(np.isfinite(times).sum()))


def tune_jointly(joint: JointProblem, *, starts: int = 8, steps: int = 40) -> TunedJointly:
    """Find the best setting of each pair, by gradient."""
    relax, family = Jointly(joint.parts), joint.problem.family
    counts = (joint.microbatches,) if joint.microbatches else family.few_microbatches
    pairs = len(joint.problem.capacity)
    first, lower, upper = _starts(joint, starts)
    found = joint.problem.objective(relax, *counts).minima(
        first,
        joint.problem.given(np.arange(pairs), joint.microbatches or 1),
        steps=steps,
        rate=RATE,
        lower=lower,
        upper=upper,
    )
    order = found.values.argsort(axis=0)[:KEPT]
    soft = _relaxed(joint, found.points[order, np.arange(pairs)])
    evaluate = _Counted(joint)
    rounded = _rounded(joint, soft)
    kept = rounded.at(_best(rounded, evaluate(rounded), of_sizes=len(joint.parts) > 1))
    settings, times = improve_settings(joint, kept, evaluate)
    best = found.points[order[0], np.arange(pairs)]
    size, layers = _relaxed(joint, best[None])
    return joint.pick(
        settings,
        times,
        evaluate.count + found.values.size * (steps + 1),
        relaxed_step_time=found.values.min(axis=0),
        relaxed=(size[0], StageLayers(*(each[0] for each in layers))),
    )


class _Counted:
    """Exact evaluation that counts settings."""

    def __init__(self, joint: JointProblem) -> None:
        self.joint, self.count = joint, 0

    def __call__(self, settings: Settings) -> PerConfiguration:
        self.count += len(settings.pair)
        return self.joint.times(settings)


Bounds = Float[NumpyArray, "pairs variables"]


def _starts(
    joint: JointProblem, starts: int
) -> tuple[Float[NumpyArray, "starts pairs variables"], Bounds, Bounds]:
    """Points to start from, even shares first, and bounds of the variables."""
    pairs, stages = joint.problem.pairs.assigned.layers.shape
    rng, parts = np.random.default_rng(0), []
    lower, upper = [], []
    for name in joint.parts:
        part, width = PARTS[name], PARTS[name].width(stages)
        own = rng.normal(0, part.spread, (starts, pairs, width))
        own[0] = 0
        low, high = np.full((2, pairs, width), [[[-np.inf]], [[np.inf]]])
        if name == "size":
            fewest = joint.problem.family.few_microbatches[0]
            low[:] = 0
            high[:] = np.log(np.maximum(joint.problem.pairs.minibatch / fewest, 1.0))[:, None]
            own = (np.arange(starts)[:, None, None] + 0.5) / starts * high
        elif name == "recompute":  # the larger the microbatches, the shorter memory is
            own = own / 2 + np.linspace(-part.spread, part.spread, starts)[:, None, None]
        parts.append(own)
        lower.append(low)
        upper.append(high)
    return np.concatenate(parts, -1), np.concatenate(lower, -1), np.concatenate(upper, -1)


Soft = tuple[Float[NumpyArray, "kept pairs"], StageLayers]  # microbatch sizes and layers


def _relaxed(joint: JointProblem, points: Float[NumpyArray, "kept pairs variables"]) -> Soft:
    """What relaxed points stand for."""
    kept, pairs, _ = points.shape
    owner = np.tile(np.arange(pairs), kept)
    given = joint.problem.given(owner, joint.microbatches or 1, limited=False)
    found = _read(points.reshape(kept * pairs, -1), given, relax=Jointly(joint.parts))
    size, *layers = (np.asarray(each) for each in found)
    assigned = StageLayers(*(each.reshape(kept, pairs, -1) for each in layers))
    return size.reshape(kept, pairs), assigned


@functools.partial(compiled, static_argnames="relax")
def _read(points: Array, given: Given, *, relax: Jointly) -> tuple[Numbers, ...]:
    def of_one(point: Array, given: Given) -> tuple[Numbers, ...]:
        pair, size = relax(point, given)
        return size + 0.0, pair.assigned.layers, pair.assigned.recomputed

    return jax.vmap(of_one)(points, given)


def _rounded(joint: JointProblem, soft: Soft) -> Settings:
    """Whole settings next to relaxed ones, and plain ones of which one fits if any does."""
    size, assigned = soft
    even, found = joint.problem.pairs.assigned, []
    tunes_layers, recomputes = "layers" in joint.parts, "recompute" in joint.parts
    for kept in range(len(size)):
        of = StageLayers(*(each[kept] for each in assigned))
        layers = (
            whole_with_sum(np.asarray(of.layers)) if tunes_layers else np.asarray(even.layers, int)
        )
        share = of.recomputed / of.layers
        for pair, own in enumerate(size[kept].tolist()):
            sizes = joint.sizes(pair)
            near = [b for b in sizes if b <= own * (1 + 1e-9)][-1:]
            near += [b for b in sizes if b > own * (1 + 1e-9)][:1]
            always, wholes = even.recomputed[pair] > 0, layers[pair][None]
            if kept == 0 and tunes_layers:  # the best minimum is rounded in other ways, too
                wholes = np.concatenate([wholes, wholes + swaps(wholes.shape[1])])
            for one in wholes[wholes.min(axis=1) >= 1]:
                soft_ways = [np.ceil(share[pair] * one - 1e-6), np.floor(share[pair] * one), one]
                ways = soft_ways if recomputes else [one * always]
                found += [(pair, b, one, way) for b in near for way in ways]
            if kept == 0:
                found += _plain(joint, pair)
    return _settings(found)


def _plain(joint: JointProblem, pair: int) -> list[tuple[Any, ...]]:
    """Settings of every size with even layers: all or none recomputed, or as it is untuned."""
    # One of them fits if any does.
    layers, always = (each[pair] for each in joint.problem.pairs.assigned)
    ways = [0 * layers, layers] if "recompute" in joint.parts else [layers * (always > 0)]
    return [(pair, size, layers, way) for size in joint.sizes(pair) for way in ways]


def _settings(rows: list[tuple[Any, ...]]) -> Settings:
    pair, size, layers, recomputed = map(np.array, zip(*rows, strict=True))
    return Settings(pair, size, layers.astype(int), recomputed.astype(int))


def _best(
    settings: Settings, times: PerConfiguration, *, of_sizes: bool
) -> Int[NumpyArray, " settings"]:
    """The best few settings of each pair: one of each size, if these differ."""
    group = settings.size if of_sizes else np.arange(len(times))
    order = np.lexsort((times, group, settings.pair))
    key = np.column_stack([settings.pair, group])[order]
    first = order[np.unique(key, axis=0, return_index=True)[1]]
    first = first[np.lexsort((times[first], settings.pair[first]))]
    _, start, count = np.unique(settings.pair[first], return_index=True, return_counts=True)
    rank = np.arange(len(first)) - np.repeat(start, count)
    return first[rank < KEPT_SETTINGS]


def improve_settings(
    joint: JointProblem, settings: Settings, evaluate: Callable[[Settings], PerConfiguration]
) -> tuple[Settings, PerConfiguration]:
    """Move by one layer while there is something better, all settings at once."""
    # Sizes stay: where one does not fit yet, a smaller one would always look better.
    stages = settings.layers.shape[1]
    always = joint.problem.pairs.assigned.recomputed > 0
    recomputes = "recompute" in joint.parts

    def settings_of(points: Points, owner: Owners) -> Settings:
        layers, recomputed = np.split(points, 2, axis=1)
        of = settings.at(owner)
        recomputed = recomputed if recomputes else layers * always[of.pair]
        return of._replace(layers=layers, recomputed=recomputed)

    def times_of(points: Points, owner: Owners) -> PerConfiguration:
        found, times = settings_of(points, owner), np.full(len(points), np.inf)
        layers, recomputed = found.layers, found.recomputed
        legal = (layers >= 1) & (recomputed >= 0) & (recomputed <= layers)
        at = np.flatnonzero(legal.all(axis=1))
        if len(at):
            times[at] = evaluate(found.at(at))
        return times

    points = np.column_stack([settings.layers, settings.recomputed * recomputes])
    owner = np.arange(len(points))
    points, times = improve(points, owner, _moves(joint, stages), times_of)
    return settings_of(points, owner), times


def _moves(joint: JointProblem, stages: int) -> Int[NumpyArray, "moves places"]:
    """Changes to a neighbour: of the layers of each stage, and of those recomputed."""
    swap, one = swaps(stages), np.eye(stages, dtype=int)
    more = np.concatenate([-one, one, swap])
    found = [np.zeros((0, 2 * stages), int)]
    if "layers" in joint.parts:
        found.append(np.hstack([swap, 0 * swap]))
    if "recompute" in joint.parts:
        found.append(np.hstack([0 * more, more]))
    if len(found) > 2:  # where memory is short, what is recomputed changes with a layer
        kinds = (swap, np.minimum(swap, 0), np.maximum(swap, 0))
        found += [np.hstack([swap, own]) for own in kinds]
    return np.concatenate(found)


def search_jointly(joint: JointProblem) -> TunedJointly:
    """Evaluate all settings of every pair."""
    if joint.parts == ("size",):  # with many pairs at once
        plain = plain_settings(joint)
        times = joint.times(plain)
        return joint.pick(plain, times, int(np.isfinite(times).sum()))
    pairs = range(len(joint.problem.capacity))
    counts = [count_settings(joint, pair) for pair in pairs]
    # of one part, what lists them refuses where they are too many
    if max(counts) > MOST_SETTINGS and len(joint.parts) > 1:
        raise TooManyError(f"{max(counts):.3g} settings: at most {MOST_SETTINGS} are tried")
    best: list[tuple[Settings, Float[NumpyArray, " settings"]]] = []
    for pair in pairs:
        for block in every_setting(joint, pair):
            times = joint.times(block)
            least = [times.argmin()]
            best.append((block.at(least), times[least]))
    settings, least_times = zip(*best, strict=True)
    return joint.pick(joined(list(settings)), np.concatenate(least_times), int(sum(counts)))


def every_setting(joint: JointProblem, pair: int) -> Iterator[Settings]:
    """All settings of one pair, in blocks of one microbatch size each."""
    layers, recomputed = every_assignment(joint, pair)
    for size in joint.sizes(pair):
        for low in range(0, len(layers), LANES):
            block = slice(low, low + LANES)
            count = len(layers[block])
            yield Settings(
                np.full(count, pair), np.full(count, size), layers[block], recomputed[block]
            )


def every_assignment(joint: JointProblem, pair: int) -> tuple[Points, Points]:
    """All layers (ways, stages) of a pair, and those that are recomputed."""
    even, again = (np.asarray(each[pair], int) for each in joint.problem.pairs.assigned)
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
