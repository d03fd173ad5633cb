"""Joint tuning of several parts: microbatch size, layers, recomputed layers.

Gradient descent runs from many starts at once. Rounded settings near the best minima are evaluated
exactly, and improved by one layer at a time. The exhaustive twin evaluates all settings.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.costs import array_functions as xp
from pipejax.costs.model.launchers import launches
from pipejax.costs.model.workload import StageLayers, Workload, with_stage_layers
from pipejax.costs.model.workload_fields import check_recompute
from pipejax.costs.system.system import Number
from pipejax.search.tuning.problem import (
    Inputs,
    Pair,
    PerConfiguration,
    TuningProblem,
    descend,
    identity_relaxation,
)
from pipejax.search.tuning.rounding import (
    MAX_EXHAUSTIVE,
    Points,
    TooManyError,
    compositions,
    improve,
    swaps,
    whole_with_sum,
)


class NothingFitsError(ValueError):
    """No legal setting fits in the memory of the accelerators."""


NO_ROOM = 1e12  # replaces the step time of a setting that does not fit [s]
BATCH = 16_384  # settings that are evaluated at once


def relax_size(log_size: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """Relax the microbatch size to a real number, given by its logarithm."""
    return inputs.pair, xp.exp(log_size[0])


def relax_layers(variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """Relax layers per stage: one layer each, and a softmax share of all further layers."""
    even_layers, recomputed = inputs.pair.assigned
    layers = 1 + xp.softmax(variables) * (even_layers.sum() - len(even_layers))
    assigned = StageLayers(layers, layers * recomputed / even_layers)  # the same recomputed share
    return inputs.pair._replace(assigned=assigned), inputs.size


def relax_recompute(variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
    """Relax the recomputed share of the layers of each stage by a sigmoid."""
    layers = inputs.pair.assigned.layers
    assigned = StageLayers(layers, layers / (1 + xp.exp(-variables)))
    return inputs.pair._replace(assigned=assigned), inputs.size


class _Part(NamedTuple):
    """Relaxation of one part of the settings."""

    relax: Callable[[Any, Inputs], tuple[Pair, Number]]  # from variables to pair and size
    width: Callable[[int], int]  # from stages to the number of variables
    scale: float  # of the variables, so that one learning rate suits all parts
    spread: float  # standard deviation of the starts


# in the order of application: recomputed layers are a share of the layers
PARTS: Mapping[str, _Part] = {
    "size": _Part(relax_size, lambda stages: 1, 1.0, 0),
    "layers": _Part(relax_layers, lambda stages: stages, 0.3, 1.0),
    "recompute": _Part(relax_recompute, lambda stages: stages, 1.0, 1.5),
}


@dataclasses.dataclass(frozen=True)
class JointRelaxation:
    """Relaxation of several parts by one vector of variables."""

    parts: tuple[str, ...]  # names, in the order of `PARTS`

    def __call__(self, variables: Array, inputs: Inputs) -> tuple[Pair, Number]:
        """Return the model on the system, and the microbatch size, for these variables."""
        for name, part in self.split(variables, inputs.pair.assigned.layers.shape[-1]).items():
            pair, size = PARTS[name].relax(part * PARTS[name].scale, inputs)
            inputs = inputs._replace(pair=pair, size=size)
        return inputs.pair, inputs.size

    def split(self, variables: Any, stages: int) -> dict[str, Any]:
        """Split the last axis of variables by tuned part."""
        ends = np.cumsum([PARTS[name].width(stages) for name in self.parts]).tolist()
        starts = [0, *ends[:-1]]
        return {
            name: variables[..., low:high]
            for name, low, high in zip(self.parts, starts, ends, strict=True)
        }


class Settings(NamedTuple):
    """Settings in whole numbers, one setting in each row."""

    size: Int[NumpyArray, " settings"]  # b [sequences]
    layers: Points
    recomputed: Points  # recomputed layers

    def at(self, index: Any) -> "Settings":
        """Select rows."""
        return Settings(*(field[index] for field in self))


class BestSetting(NamedTuple):
    """The best setting of a search."""

    setting: Settings  # without the axis of settings
    step_time: float  # exact [s]
    memory_bytes: float  # need of the fullest worker [B]
    evaluated: int  # evaluated settings, with gradients of relaxed ones
    workload: Workload | None  # whose options say the setting, if options can
    # step time [s], microbatch size and layers of the relaxation; None after an exhaustive search
    relaxed: tuple[float, float, StageLayers] | None = None
    is_proven: bool = False  # whether all settings were evaluated
    sizes: Sequence[Mapping[str, Any]] = ()  # all microbatch sizes, if they are tuned alone


@dataclasses.dataclass(frozen=True, eq=False)
class JointProblem:
    """Parts to tune together, for a model and a system."""

    problem: TuningProblem  # the model on the system under its schedule
    parts: tuple[str, ...]  # names, in the order of `PARTS`
    microbatches: int = 0  # M; 0 if the microbatch size is tuned
    launcher: str | None = None  # the only one that must run a setting

    def workload(self, setting: "Settings") -> Workload | None:
        """Return the workload with options for one setting; None if no options express it."""
        workload, (layers, recomputed) = self.problem.workload, setting[1:]
        if not np.array_equal(layers, self.problem.pair.assigned.layers):
            workload = with_stage_layers(workload, layers.tolist())
        if "recompute" not in self.parts:
            return workload
        (_, group, in_layer), count = workload.recomputation, int(recomputed.max())
        recompute = in_layer
        if count:
            is_full = (recomputed == layers).all()
            is_same = is_full or (group == 1 and (recomputed == np.minimum(count, layers)).all())
            if in_layer != "none" or not is_same:
                return None
            recompute = f"uniform:{group}" if is_full else f"block:{count}"
        return dataclasses.replace(workload, recompute=check_recompute(recompute))

    def refusals(self, settings: "Settings") -> NumpyArray:
        """Return for each setting why the launcher cannot run it; an empty text if it can."""
        # A launcher treats settings with equal features alike: check one setting for each.
        layers, recomputed = settings.layers, settings.recomputed
        max_recomputed = recomputed.max(axis=1, keepdims=True)
        features = [
            settings.size,
            max_recomputed.ravel(),
            (recomputed == layers).all(axis=1),
            (recomputed == np.minimum(max_recomputed, layers)).all(axis=1),
            (layers == np.asarray(self.problem.pair.assigned.layers)).all(axis=1),
            (layers == layers[:, :1]).all(axis=1),
        ]
        _, first_rows, kind = np.unique(
            np.stack(features, axis=1), axis=0, return_index=True, return_inverse=True
        )
        reasons = [self._refusal(settings.at(row)) for row in first_rows.tolist()]
        return np.array(reasons, object)[kind.ravel()]

    def _refusal(self, setting: "Settings") -> str:
        """Return why the launcher cannot run a setting; an empty text if it can."""
        workload = self.workload(setting)
        if workload is None:
            return f"{self.launcher} lacks numbers of recomputed layers that differ by stage"
        table = self.problem.family.table(workload.minibatch // int(setting.size))
        return launches(workload, table, self.launcher)[0].refusal

    @property
    def sizes(self) -> list[int]:
        """List the microbatch sizes that divide the minibatch, ascending, or the fixed size."""
        total = self.problem.workload.minibatch
        return [total // self.microbatches] if self.microbatches else list(divisors(total))

    def exact(self, settings: Settings) -> tuple[PerConfiguration, PerConfiguration]:
        """Return step times [s] and memory needs [B]; infinite if the schedule does not exist."""
        times, needs = np.full((2, len(settings.size)), np.inf)
        counts = self.problem.workload.minibatch // settings.size
        for count in np.unique(counts).tolist():
            if self.problem.family.refusal(count):
                continue
            objective = self.problem.objective(identity_relaxation, count)
            rows = np.flatnonzero(counts == count)
            if self.launcher is not None:
                rows = rows[self.refusals(settings.at(rows)) == ""]
            num_batches = math.ceil(len(rows) / BATCH)
            for batch_rows in np.array_split(rows, num_batches) if num_batches else ():
                batch = settings.at(batch_rows)
                layers = StageLayers(batch.layers.astype(float), batch.recomputed.astype(float))
                inputs = self.problem.inputs(len(batch_rows), count, limited=False)
                times[batch_rows], needs[batch_rows] = objective.evaluate(layers, inputs)
        return times, needs

    def times(self, settings: Settings) -> PerConfiguration:
        """Return step times [s]; a setting that exceeds memory gets a penalty instead."""
        times, needs = self.exact(settings)
        usage = needs / self.problem.capacity
        return np.where(usage <= 1, times, NO_ROOM * usage)

    def pick(
        self,
        settings: Settings,
        times: PerConfiguration,
        evaluated: int,
        relaxed: tuple[float, float, StageLayers] | None = None,
    ) -> BestSetting:
        """Return the setting of least time, penalties included; fail if it exceeds memory."""
        best = int(times.argmin())
        (step_time,), (need,) = self.exact(settings.at([best]))
        setting = settings.at(best)
        if not need <= self.problem.capacity:
            if np.isinf(need):
                total = self.problem.workload.minibatch
                reason = self.problem.family.refusal(total)
                if not reason and self.launcher is not None:
                    reason = self.refusals(settings.at([best]))[0]
                raise ValueError(
                    f"no microbatch size is legal for a minibatch of {total}: {reason}"
                )
            needs = f"{need / 1e9:.1f} GB per accelerator"
            has = f"the system has {self.problem.capacity / 1e9:.1f} GB"
            if self.parts == ("size",):
                raise NothingFitsError(
                    f"no microbatch size fits: the smallest need is {needs}, with a "
                    f"microbatch size of {setting.size}; {has}"
                )
            raise ValueError(f"nothing fits: the smallest need found is {needs}; {has}")
        numbers = step_time.item(), need.item(), evaluated
        return BestSetting(setting, *numbers, self.workload(setting), relaxed)


def count_settings(joint: JointProblem) -> float:
    """Count the settings that an exhaustive search tries."""
    even_layers = joint.problem.pair.assigned.layers.astype(int)
    stages, total = len(even_layers), int(even_layers.sum())
    count: float = len(joint.sizes)
    has_options = joint.launcher is not None  # one number, the same for all stages
    if "layers" in joint.parts and "recompute" in joint.parts and not has_options:
        # a stage of n layers has n + 1 choices, so the count is the coefficient of x^total in
        # (2 x + 3 x^2 + 4 x^3 + ..)^stages = (1 / (1 - x)^2 - 1)^stages
        count *= sum(
            (-1) ** (stages - k) * math.comb(stages, k) * math.comb(total + 2 * k - 1, total)
            for k in range(1, stages + 1)
        )
        return count
    if "layers" in joint.parts:
        count *= math.comb(total - 1, stages - 1)
    if "recompute" in joint.parts and has_options:
        count *= 1 + (total - stages + 1 if "layers" in joint.parts else int(even_layers.max()))
    elif "recompute" in joint.parts:
        count *= math.prod((even_layers + 1).tolist())
    return count


NUM_ROUNDED = 3  # minima that are rounded
NUM_IMPROVED = 10  # rounded settings that are improved
RATE = 0.3  # learning rate of the descent
MAX_JOINT_SETTINGS = 5_000_000  # of an exhaustive search


def plain_settings(joint: JointProblem) -> Settings:
    """Return the settings of all microbatch sizes with layers split evenly."""
    if "size" in joint.parts:
        joint.problem.family.check_size(joint.problem.workload.minibatch)
    return _settings(_even_settings(joint))


def plain_answers(joint: JointProblem) -> Iterator[BestSetting]:
    """Yield the best plain setting each time it improves, beginning with few microbatches."""
    plain = plain_settings(joint)
    counts = joint.problem.workload.minibatch // plain.size
    times, best_time = np.full(len(counts), np.inf), NO_ROOM
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        times[rows] = joint.times(plain.at(rows))
        if times.min() < best_time:
            best_time = times.min()
            yield joint.pick(plain, times, int(np.isfinite(times).sum()))


def tune_jointly(joint: JointProblem, *, starts: int = 8, steps: int = 40) -> BestSetting:
    """Find the best setting by gradient descent, rounding and local search."""
    relax, family = JointRelaxation(joint.parts), joint.problem.family
    counts = (joint.microbatches,) if joint.microbatches else family.few_microbatches
    points, lower, upper = _starts(joint, starts)
    objective = joint.problem.objective(relax, *counts)
    inputs = joint.problem.inputs(starts, joint.microbatches or 1)
    minima, values = descend(
        lambda points: objective.value_and_grad(points, inputs),
        points,
        steps=steps,
        rate=RATE,
        lower=lower,
        upper=upper,
    )
    relaxed_sizes, relaxed_layers = _relaxed_settings(joint, minima[values.argsort()[:NUM_ROUNDED]])
    evaluated = values.size * (steps + 1)

    def evaluate(settings: Settings) -> PerConfiguration:
        nonlocal evaluated
        evaluated += len(settings.size)
        return joint.times(settings)

    rounded = _round_settings(joint, relaxed_sizes, relaxed_layers)
    shortlist = rounded.at(_best(rounded, evaluate(rounded), per_size=len(joint.parts) > 1))
    settings, times = improve_settings(joint, shortlist, evaluate)
    best = StageLayers(*(stages[0] for stages in relaxed_layers))  # the minima are sorted
    relaxed = values.min().item(), relaxed_sizes[0].item(), best
    return joint.pick(settings, times, evaluated, relaxed)


Bounds = Float[NumpyArray, "1 variables"]


def _starts(
    joint: JointProblem, starts: int
) -> tuple[Float[NumpyArray, "starts variables"], Bounds, Bounds]:
    """Return start points, the first with even shares, and bounds of the variables."""
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
        elif name == "recompute":  # more recomputation for larger microbatches
            points = points / 2 + np.linspace(-part.spread, part.spread, starts)[:, None]
        parts.append(points)
        lower.append(low)
        upper.append(high)
    return np.concatenate(parts, -1), np.concatenate(lower, -1), np.concatenate(upper, -1)


Sizes = Float[NumpyArray, " minima"]  # microbatch sizes


def _relaxed_settings(
    joint: JointProblem, points: Float[NumpyArray, "minima variables"]
) -> tuple[Sizes, StageLayers]:
    """Return the relaxed microbatch sizes, and layers of stages, at points of the search."""
    inputs = joint.problem.inputs(1, joint.microbatches or 1, limited=False)
    inputs = jax.tree.map(lambda leaf: leaf[0], inputs)
    pairs, sizes = zip(*(JointRelaxation(joint.parts)(p, inputs) for p in points), strict=True)
    assigned = zip(*(pair.assigned for pair in pairs), strict=True)
    return np.array(sizes, float), StageLayers(*(np.array(stages, float) for stages in assigned))


def _round_settings(joint: JointProblem, sizes: Sizes, relaxed: StageLayers) -> Settings:
    """Round relaxed settings in several ways, and add settings with even layers."""
    even, candidates = joint.problem.pair.assigned, list[tuple[Any, ...]]()
    tunes_layers, tunes_recompute = "layers" in joint.parts, "recompute" in joint.parts
    is_recomputed = even.recomputed > 0
    for rank, relaxed_size in enumerate(sizes.tolist()):
        relaxed_layers = np.asarray(relaxed.layers[rank])
        share = relaxed.recomputed[rank] / relaxed_layers
        near_sizes = [b for b in joint.sizes if b <= relaxed_size * (1 + 1e-9)][-1:]
        near_sizes += [b for b in joint.sizes if b > relaxed_size * (1 + 1e-9)][:1]
        layer_rows = np.asarray(even.layers, int)[None]
        if tunes_layers:
            layer_rows = whole_with_sum(relaxed_layers[None])
            if rank == 0:  # also neighbours of the best minimum
                neighbours = layer_rows + swaps(layer_rows.shape[1])
                layer_rows = np.concatenate([layer_rows, neighbours])
        for layers in layer_rows[layer_rows.min(axis=1) >= 1]:
            options = [layers * is_recomputed]
            if tunes_recompute:
                options = [np.ceil(share * layers - 1e-6), np.floor(share * layers), layers]
            candidates += [(size, layers, option) for size in near_sizes for option in options]
        if rank == 0:
            candidates += _even_settings(joint)
    return _settings(candidates)


def _even_settings(joint: JointProblem) -> list[tuple[Any, ...]]:
    """List each microbatch size with even layers and, if tuned, all or no layers recomputed."""
    # If any setting fits in memory, one of these does.
    layers, recomputed = joint.problem.pair.assigned
    options = [layers * (recomputed > 0)]
    if "recompute" in joint.parts:
        options = [0 * layers, layers]
        if joint.launcher is not None:
            options = [*_equally_recomputed(np.asarray(layers, int)[None])[1]]
    return [(size, layers, option) for size in joint.sizes for option in options]


def _settings(rows: list[tuple[Any, ...]]) -> Settings:
    """Stack rows of (size, layers, recomputed layers) as settings."""
    size, layers, recomputed = map(np.array, zip(*rows, strict=True))
    return Settings(size, layers.astype(int), recomputed.astype(int))


def _best(
    settings: Settings, times: PerConfiguration, *, per_size: bool
) -> Int[NumpyArray, " settings"]:
    """Return the row numbers of the best settings; with `per_size`, at most one row per size."""
    group = settings.size if per_size else np.arange(len(times))
    order = np.lexsort((times, group))  # by group, then time: the first of a group is its best
    group_best = order[np.unique(group[order], return_index=True)[1]]
    return group_best[times[group_best].argsort(kind="stable")][:NUM_IMPROVED]


def improve_settings(
    joint: JointProblem, settings: Settings, evaluate: Callable[[Settings], PerConfiguration]
) -> tuple[Settings, PerConfiguration]:
    """Improve all settings at once by moves of one layer until no move helps; sizes stay."""
    # A point is the layers of all stages, then the recomputed ones; `owner` is its setting.
    stages = settings.layers.shape[1]
    is_recomputed = joint.problem.pair.assigned.recomputed > 0
    tunes_recompute = "recompute" in joint.parts

    def to_settings(points: Points, owner: Int[NumpyArray, " points"]) -> Settings:
        layers, recomputed = np.split(points, 2, axis=1)
        recomputed = recomputed if tunes_recompute else layers * is_recomputed
        return settings.at(owner)._replace(layers=layers, recomputed=recomputed)

    def point_times(points: Points, owner: Int[NumpyArray, " points"]) -> PerConfiguration:
        """Return the step times of points [s]; infinite for illegal points."""
        new_settings, times = to_settings(points, owner), np.full(len(points), np.inf)
        layers, recomputed = new_settings.layers, new_settings.recomputed
        is_legal = (layers >= 1) & (recomputed >= 0) & (recomputed <= layers)
        rows = np.flatnonzero(is_legal.all(axis=1))
        if len(rows):
            times[rows] = evaluate(new_settings.at(rows))
        return times

    points = np.column_stack([settings.layers, settings.recomputed * tunes_recompute])
    owner = np.arange(len(points))
    points, times = improve(points, owner, _moves(joint, stages), point_times)
    return to_settings(points, owner), times


def _moves(joint: JointProblem, stages: int) -> Int[NumpyArray, "moves layers_and_recomputed"]:
    """Return the moves to a point's neighbours, as changes of layers and recomputed layers."""
    layer_moves, add_one = swaps(stages), np.eye(stages, dtype=int)
    recompute_moves = np.concatenate([-add_one, add_one, layer_moves])
    moves = [np.zeros((0, 2 * stages), int)]
    if "layers" in joint.parts:
        moves.append(np.hstack([layer_moves, 0 * layer_moves]))
    if "recompute" in joint.parts:
        moves.append(np.hstack([0 * recompute_moves, recompute_moves]))
    if "layers" in joint.parts and "recompute" in joint.parts:
        # a recomputed layer moves, or a layer that is recomputed on one of both stages alone
        kinds = (layer_moves, np.minimum(layer_moves, 0), np.maximum(layer_moves, 0))
        moves += [np.hstack([layer_moves, recomputed]) for recomputed in kinds]
    return np.concatenate(moves)


def search_jointly(joint: JointProblem) -> BestSetting:
    """Find the best setting by evaluating all settings."""
    count = count_settings(joint)
    # for one part, `all_assignments` checks the number
    if count > MAX_JOINT_SETTINGS and len(joint.parts) > 1:
        raise TooManyError(f"{count:.3g} settings: at most {MAX_JOINT_SETTINGS} are tried")
    block_bests: list[Settings] = []
    best_times: list[PerConfiguration] = []
    evaluated = 0
    for block in all_settings(joint):
        times = joint.times(block)
        evaluated += len(times)
        row = [times.argmin()]
        block_bests.append(block.at(row))
        best_times.append(times[row])
    settings = Settings(*map(np.concatenate, zip(*block_bests, strict=True)))
    best = joint.pick(settings, np.concatenate(best_times), evaluated)
    return best._replace(is_proven=True)


def all_settings(joint: JointProblem) -> Iterator[Settings]:
    """Yield all settings, in blocks of one microbatch size each."""
    layers, recomputed = all_assignments(joint)
    for size in joint.sizes:
        for low in range(0, len(layers), BATCH):
            block = slice(low, low + BATCH)
            yield Settings(np.full(len(layers[block]), size), layers[block], recomputed[block])


def all_assignments(joint: JointProblem) -> tuple[Points, Points]:
    """Return all layer assignments and their recomputed layers, both (assignments, stages)."""
    even_layers, recomputed = (np.asarray(stages, int) for stages in joint.problem.pair.assigned)
    layers = even_layers[None]
    if "layers" in joint.parts:
        layers = compositions(int(even_layers.sum()), len(even_layers))
    if "recompute" not in joint.parts:
        return layers, layers * (recomputed > 0)
    if joint.launcher is not None:
        return _equally_recomputed(layers)
    count = math.prod((even_layers + 1).tolist())
    if joint.parts == ("recompute",) and count > MAX_EXHAUSTIVE:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MAX_EXHAUSTIVE} are tried")
    return _all_recomputed(layers)


def _all_recomputed(layers: Points) -> tuple[Points, Points]:
    """Combine each row of layers with all numbers of recomputed layers on each stage."""
    num_choices = layers + 1
    row, choice = _repeat_rows(num_choices.prod(axis=1))
    recomputed = np.empty((len(row), layers.shape[1]), int)
    for stage in range(layers.shape[1]):  # digits of the choice, one per stage
        choice, recomputed[:, stage] = np.divmod(choice, num_choices[row, stage])
    return layers[row], recomputed


def _equally_recomputed(layers: Points) -> tuple[Points, Points]:
    """Combine each row of layers with each equal number of recomputed layers on all stages."""
    row, choice = _repeat_rows(layers.max(axis=1) + 1)
    return layers[row], np.minimum(choice[:, None], layers[row])


def _repeat_rows(
    counts: Int[NumpyArray, " rows"],
) -> tuple[Int[NumpyArray, " choices"], Int[NumpyArray, " choices"]]:
    """Return each choice's row and its number there: counts 2 3 give 0 0 1 1 1 and 0 1 0 1 2."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
