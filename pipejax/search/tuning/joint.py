"""Joint tuning of several parts: microbatch size, layers, recomputed layers.

A setting is a microbatch size, with the layers and recomputed layers of each stage. Plain settings
have even layers and equal numbers of recomputed layers. The local method evaluates plain settings,
and improves the best of them by one layer at a time. The exhaustive method evaluates all settings.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import divisors
from pipejax.base.ties import row_classes
from pipejax.costs.model.launchers import machine_launches
from pipejax.costs.model.workload import StageLayers, Workload, with_stage_layers
from pipejax.costs.model.workload_fields import check_recompute
from pipejax.search.tuning.problem import PerConfiguration, TuningProblem
from pipejax.search.tuning.rounding import (
    MAX_EXHAUSTIVE,
    Points,
    TooManyError,
    compositions,
    improve,
    swaps,
)

PARTS = ("size", "layers", "recompute")


class NothingFitsError(ValueError):
    """No legal setting fits in the memory of the accelerators."""


NO_ROOM = 1e12  # replaces the step time of a setting that does not fit [s]
BATCH = 16_384  # settings that are evaluated at once


class Settings(NamedTuple):
    """Settings in integers, one setting in each row."""

    size: Int[NumpyArray, " settings"]  # microbatch size b [sequences]
    layers: Points
    recomputed: Points  # recomputed layers

    def at(self, index: Any) -> "Settings":
        """Select rows."""
        return Settings(*(field[index] for field in self))


class BestSetting(NamedTuple):
    """The best setting of a search."""

    setting: Settings  # without the axis of settings
    step_time: float  # times_and_needs [s]
    memory_bytes: float  # need of the fullest worker [B]
    evaluated: int  # number of evaluated settings
    workload: Workload | None  # workload with this setting; None if no options express it
    is_proven: bool = False  # whether all settings were evaluated
    sizes: Sequence[Mapping[str, Any]] = ()  # results of all sizes, if only the size is tuned


@dataclasses.dataclass(frozen=True, eq=False)
class JointProblem:
    """Parts to tune together, for a model and a system."""

    problem: TuningProblem  # the model on the system under a family of schedules
    parts: tuple[str, ...]  # names of the tuned parts, in the order of `PARTS`
    microbatches: int = 0  # M; 0 if the microbatch size is tuned
    launcher: str | None = None  # launcher that must run a setting; None for any setting
    stack: str = ""  # name of the software; empty if unknown

    def workload(self, setting: "Settings") -> Workload | None:
        """Return the workload with this setting; None if no options express it."""
        workload, (_, layers, recomputed) = self.problem.workload, setting
        if not np.array_equal(layers, self.problem.assigned.layers):
            workload = with_stage_layers(workload, layers.tolist())
        if "recompute" not in self.parts:
            return workload
        # `group` layers are recomputed together; `part` is the recomputation of all other layers
        (_, group, part), count = workload.recomputation, int(recomputed.max())
        if not count:
            return dataclasses.replace(workload, recompute=check_recompute(part))
        is_full = (recomputed == layers).all()
        # launchers recompute the first `count` layers of every stage, or all layers of a stage
        is_same = is_full or (group == 1 and (recomputed == np.minimum(count, layers)).all())
        if part != "none" or not is_same:
            return None
        recompute = f"uniform:{min(group, int(layers.max()))}" if is_full else f"block:{count}"
        return dataclasses.replace(workload, recompute=check_recompute(recompute))

    def refusals(self, settings: "Settings") -> NumpyArray:
        """Return for each setting why the launcher cannot run it; an empty text if it can."""
        # Settings with equal features are all possible or all impossible: one of them is checked.
        layers, recomputed = settings.layers, settings.recomputed
        max_recomputed = recomputed.max(axis=1, keepdims=True)
        features = [
            settings.size,
            max_recomputed.ravel(),
            (recomputed == layers).all(axis=1),
            (recomputed == np.minimum(max_recomputed, layers)).all(axis=1),
            (layers == np.asarray(self.problem.assigned.layers)).all(axis=1),
            (layers == layers[:, :1]).all(axis=1),
        ]
        first_rows, kind = row_classes(features)
        reasons = [self._refusal(settings.at(row)) for row in first_rows.tolist()]
        return np.array(reasons, object)[kind]

    def _refusal(self, setting: "Settings") -> str:
        workload = self.workload(setting)
        if workload is None:
            return f"{self.launcher} lacks numbers of recomputed layers that differ by stage"
        table = self.problem.family.table(workload.minibatch // int(setting.size))
        machine = self.problem.system, self.stack, self.launcher
        return machine_launches(workload, table, *machine)[0].refusal

    @property
    def sizes(self) -> list[int]:
        """List the microbatch sizes: divisors of the minibatch, ascending, or the fixed size."""
        total = self.problem.workload.minibatch
        return [total // self.microbatches] if self.microbatches else list(divisors(total))

    def times_and_needs(self, settings: Settings) -> tuple[PerConfiguration, PerConfiguration]:
        """Return step times [s] and memory needs [B]; infinite if the schedule does not exist."""
        times, needs = np.full((2, len(settings.size)), np.inf)
        counts = self.problem.workload.minibatch // settings.size
        for count in np.unique(counts).tolist():
            if self.problem.family.refusal(count):
                continue
            rows = np.flatnonzero(counts == count)
            if self.launcher is not None:
                rows = rows[self.refusals(settings.at(rows)) == ""]
            num_batches = math.ceil(len(rows) / BATCH)
            for batch_rows in np.array_split(rows, num_batches) if num_batches else ():
                batch = settings.at(batch_rows)
                layers = StageLayers(batch.layers.astype(float), batch.recomputed.astype(float))
                times[batch_rows], needs[batch_rows] = self.problem.evaluate_batch(count, layers)
        return times, needs

    def times(self, settings: Settings) -> PerConfiguration:
        """Return step times [s]; a setting that exceeds memory gets a penalty instead."""
        times, needs = self.times_and_needs(settings)
        usage = needs / self.problem.capacity
        return np.where(usage <= 1, times, NO_ROOM * usage)

    def pick(self, settings: Settings, times: PerConfiguration, evaluated: int) -> BestSetting:
        """Return the setting of least time; raise an error if no setting fits."""
        # `times` come from the method `times`. A setting that exceeds memory has a large time, so
        # if the setting of least time does not fit, none does.
        best = int(times.argmin())
        (step_time,), (need,) = self.times_and_needs(settings.at([best]))
        setting = settings.at(best)
        if not need <= self.problem.capacity:
            if np.isinf(need):
                total = self.problem.workload.minibatch
                reason = self.problem.family.refusal(total)
                if not reason and self.launcher is not None:
                    reason = self.refusals(settings.at([best]))[0]
                raise ValueError(f"no microbatch size divides a minibatch of {total}: {reason}")
            needs = f"{need / 1e9:.1f} GB per accelerator"
            has = f"the system has {self.problem.capacity / 1e9:.1f} GB"
            if self.parts == ("size",):
                raise NothingFitsError(
                    f"no microbatch size fits: the smallest need is {needs}, with a "
                    f"microbatch size of {setting.size}; {has}"
                )
            raise ValueError(f"no setting fits: the smallest need is {needs}; {has}")
        workload = self.workload(setting)
        return BestSetting(setting, step_time.item(), need.item(), evaluated, workload=workload)


def count_settings(joint: JointProblem) -> float:
    """Count the settings that an exhaustive search tries."""
    even_layers = joint.problem.assigned.layers.astype(int)
    stages, total = len(even_layers), int(even_layers.sum())
    count: float = len(joint.sizes)
    has_options = joint.launcher is not None  # launchers recompute equal numbers on all stages
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


NUM_IMPROVED = 20  # number of plain settings that are improved
MAX_JOINT_SETTINGS = 5_000_000  # largest number of settings in an exhaustive search


def plain_settings(joint: JointProblem) -> Settings:
    """Return settings of all sizes with even layers and equal numbers of recomputed layers."""
    if "size" in joint.parts:
        joint.problem.family.check_size(joint.problem.workload.minibatch)
    # a setting with all layers recomputed fits in memory if any setting with even layers does
    layers, recomputed = (np.asarray(stages, int)[None] for stages in joint.problem.assigned)
    recomputed = np.where(recomputed > 0, layers, 0)
    if "recompute" in joint.parts:
        layers, recomputed = _equally_recomputed(layers)
    sizes, count = np.array(joint.sizes), len(layers)
    repeated = (np.tile(points, (len(sizes), 1)) for points in (layers, recomputed))
    return Settings(sizes.repeat(count), *repeated)


def plain_best_settings(joint: JointProblem) -> Iterator[BestSetting]:
    """Evaluate plain settings, few microbatches first; yield each setting that is a new best."""
    plain = plain_settings(joint)
    counts = joint.problem.workload.minibatch // plain.size
    times, best_time = np.full(len(counts), np.inf), NO_ROOM
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        times[rows] = joint.times(plain.at(rows))
        if times.min() < best_time:
            best_time = times.min()
            yield joint.pick(plain, times, int(np.isfinite(times).sum()))


def search_locally(joint: JointProblem) -> BestSetting:
    """Return a good setting, from the best plain settings by moves of one layer."""
    evaluated = 0

    def evaluate(settings: Settings) -> PerConfiguration:
        nonlocal evaluated
        evaluated += len(settings.size)
        return joint.times(settings)

    plain = plain_settings(joint)
    best = evaluate(plain).argsort(kind="stable")[:NUM_IMPROVED]
    settings, times = improve_settings(joint, plain.at(best), evaluate)
    return joint.pick(settings, times, evaluated)


def improve_settings(
    joint: JointProblem, settings: Settings, evaluate: Callable[[Settings], PerConfiguration]
) -> tuple[Settings, PerConfiguration]:
    """Improve all settings at once by moves of one layer until no move helps."""
    # Microbatch sizes do not change. A point is the layers of all stages, then the recomputed
    # layers of all stages; `owner` is the index of its setting.
    stages = settings.layers.shape[1]
    is_recomputed = joint.problem.assigned.recomputed > 0
    tunes_recompute = "recompute" in joint.parts

    def to_settings(points: Points, owner: Int[NumpyArray, " points"]) -> Settings:
        layers, recomputed = np.split(points, 2, axis=1)
        recomputed = recomputed if tunes_recompute else np.where(is_recomputed, layers, 0)
        return settings.at(owner)._replace(layers=layers, recomputed=recomputed)

    def point_times(points: Points, owner: Int[NumpyArray, " points"]) -> PerConfiguration:
        """Return the step times of points [s]; infinite for impossible layers."""
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
    """Return moves of the local search: changes of each stage's layers and recomputed layers."""
    layer_moves, add_one = swaps(stages), np.eye(stages, dtype=int)
    recompute_moves = np.concatenate([-add_one, add_one, layer_moves])
    moves = [np.zeros((0, 2 * stages), int)]
    if "layers" in joint.parts:
        moves.append(np.hstack([layer_moves, 0 * layer_moves]))
    if "recompute" in joint.parts:
        moves.append(np.hstack([0 * recompute_moves, recompute_moves]))
    if "layers" in joint.parts and "recompute" in joint.parts:
        # the moved layer is recomputed on both stages, only on the old, or only on the new stage
        kinds = (layer_moves, np.minimum(layer_moves, 0), np.maximum(layer_moves, 0))
        moves += [np.hstack([layer_moves, recomputed]) for recomputed in kinds]
    return np.concatenate(moves)


def search_jointly(joint: JointProblem) -> BestSetting:
    """Evaluate all settings, and return the best."""
    count = count_settings(joint)
    limit = MAX_JOINT_SETTINGS if len(joint.parts) > 1 else MAX_EXHAUSTIVE
    if count > limit and joint.parts != ("layers",):  # `compositions` checks the layers
        raise TooManyError(f"{count:.3g} settings: at most {limit} are tried")
    best, best_times, evaluated = None, np.array([np.inf]), 0
    for block in all_settings(joint):
        times = joint.times(block)
        evaluated += len(times)
        row = [times.argmin()]
        if best is None or times[row] < best_times:
            best, best_times = block.at(row), times[row]
    assert best is not None  # a model has a microbatch size and layers
    return joint.pick(best, best_times, evaluated)._replace(is_proven=True)


def all_settings(joint: JointProblem) -> Iterator[Settings]:
    """Yield all settings in blocks of equal microbatch size."""
    layers, recomputed = all_assignments(joint)
    for size in joint.sizes:
        for low in range(0, len(layers), BATCH):
            block = slice(low, low + BATCH)
            yield Settings(np.full(len(layers[block]), size), layers[block], recomputed[block])


def all_assignments(joint: JointProblem) -> tuple[Points, Points]:
    """Return all layer assignments (assignments, stages), and their recomputed layers."""
    even_layers, recomputed = (np.asarray(stages, int) for stages in joint.problem.assigned)
    layers = even_layers[None]
    if "layers" in joint.parts:
        layers = compositions(int(even_layers.sum()), len(even_layers))
    if "recompute" not in joint.parts:
        return layers, np.where(recomputed > 0, layers, 0)
    if joint.launcher is not None:
        return _equally_recomputed(layers)
    return _all_recomputed(layers)


def _all_recomputed(layers: Int[NumpyArray, "rows stages"]) -> tuple[Points, Points]:
    """Combine each row of layers with all numbers of recomputed layers on each stage."""
    # Layers 1 2 have 2 x 3 choices, 0 to 5. Choice 3 = 1 + 2 * 1 recomputes 1 layer on each stage.
    num_choices = layers + 1
    row, choice = _repeat_rows(num_choices.prod(axis=1))
    recomputed = np.empty((len(row), layers.shape[1]), int)
    for stage in range(layers.shape[1]):
        choice, recomputed[:, stage] = np.divmod(choice, num_choices[row, stage])
    return layers[row], recomputed


def _equally_recomputed(layers: Int[NumpyArray, "rows stages"]) -> tuple[Points, Points]:
    """Combine each row of layers with each number of recomputed layers, equal on all stages."""
    row, choice = _repeat_rows(layers.max(axis=1) + 1)
    return layers[row], np.minimum(choice[:, None], layers[row])


def _repeat_rows(
    counts: Int[NumpyArray, " rows"],
) -> tuple[Int[NumpyArray, " choices"], Int[NumpyArray, " choices"]]:
    """Number the choices of each row: counts 2 3 give rows 0 0 1 1 1, numbers 0 1 0 1 2."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
