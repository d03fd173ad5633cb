"""Scaling of costs by rules such as "transmit*2", for slow workers and long microbatches.

A rule scales one field, or a group of fields, everywhere or at one stage, worker, microbatch or
stage boundary. A scaled cost gets a further axis if the rule needs one.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Array, Float, Int, Num, NumpyArray
from pipejax.base.checks import (
    MismatchError,
    as_floats,
    check_types,
    is_number,
    positive,
    unknown,
    whole_number,
)
from pipejax.base.data_files import parse_float
from pipejax.base.display import abbreviated
from pipejax.base.jax_on_demand import jnp
from pipejax.costs.costs import (
    DIMENSIONLESS,
    FIELDS,
    MESSAGE_FIELDS,
    OF_STAGES,
    PHASE_FIELDS,
    Costs,
    with_leaves,
)
from pipejax.costs.precision import is_traced
from pipejax.schedules.cells.ops import COMPUTING, COPY, KINDS, MICROBATCH, STAGE, STEP_END, WORKER
from pipejax.schedules.table.table import ScheduleTable

# fields of computing ops of a microbatch, and of fused pairs
_COMPUTED = (
    kind.time for kind in KINDS.values() if (kind.lane, kind.scope) == (COMPUTING, MICROBATCH)
)
GROUPS: Mapping[str, tuple[str, ...]] = {
    "compute": (*filter(None, _COMPUTED), "pair"),
    "message": MESSAGE_FIELDS,
}
# fields that grow with the length of a microbatch
GROWING = tuple(x for x in FIELDS if x not in (*OF_STAGES, *DIMENSIONLESS, "latency"))
ON_WORKERS = (*GROUPS["compute"], "update")  # fields that grow on a slow worker
PLACES = ("stage", "worker", "microbatch", "boundary")
_WORD = {**PHASE_FIELDS, **{field: field for field in FIELDS if field not in DIMENSIONLESS}}
Factors = Sequence[float] | Num[NumpyArray, " workers"] | Num[Array, " workers"]
Stragglers = Mapping[int, Any] | Factors
Scale = Sequence[float] | Num[NumpyArray, " microbatches"] | Num[Array, " microbatches"]
_RULE = re.compile(r"\s*([A-Za-z_]+)\s*(?:@\s*([A-Za-z]+)\s*(\d{1,9}))?\s*\*\s*(\S+)\s*")


class ScaledFields(NamedTuple):
    """Groups of cost fields that are scaled together, with a table's custom kinds of ops."""

    words: Mapping[str, tuple[str, ...]]  # {letter, field or group: fields}
    growing: tuple[str, ...]  # fields that grow with the length of a microbatch
    on_workers: tuple[str, ...]  # fields that grow on a slow worker
    per_worker: frozenset[str]  # fields with an entry per worker, not per stage
    per_stage: frozenset[str]  # fields without an axis of microbatches

    @classmethod
    def from_table(cls, table: ScheduleTable) -> "ScaledFields":
        """Group the cost fields that a table has, also fields of custom kinds of ops."""
        phases = table.grammar.custom_phases
        computed = tuple(p.kind.time for p in phases if p.kind.lane == COMPUTING)
        growing = tuple(p.kind.time for p in phases if p.kind.scope in (MICROBATCH, WORKER))
        per_stage = (p.kind.time for p in phases if p.kind.scope in (STAGE, COPY))
        words: dict[str, tuple[str, ...]] = {word: (field,) for word, field in _WORD.items()}
        words |= {word: (p.kind.time,) for p in phases for word in (p.kind.time, p.name)}
        return cls(
            words={**words, **GROUPS, "compute": (*GROUPS["compute"], *computed)},
            growing=(*GROWING, *growing),
            on_workers=(*ON_WORKERS, *computed),
            per_worker=frozenset(p.kind.time for p in phases if p.kind.scope == WORKER),
            per_stage=frozenset((*OF_STAGES, *per_stage)),
        )


class ScalingRule(NamedTuple):
    """A scaling rule such as compute@stage2*0.5: the fields, the place and the factor."""

    what: str  # name in the rule: a field, its letter or a group
    fields: tuple[str, ...]  # fields of `Costs` that the rule scales
    place: str  # one of `PLACES`, or "" for everywhere
    number: int  # number of the stage, worker, microbatch or boundary
    factor: float  # factor on the times


def scaled_costs(
    costs: Costs,
    table: ScheduleTable,
    rules: str | None = None,
    *,
    workers: Stragglers | None = None,
    microbatches: Scale | None = None,
) -> Costs:
    """Scale costs for microbatches of different lengths, for slow workers, and by rules.

    Microbatches: the factor of a microbatch multiplies all its times except latencies,
    all-reduces, updates and sharding.

    Workers: the factor of a slow worker multiplies the times of all ops that run on it: F, B, I,
    W, R, fused pairs and U. If pipes place a stage on several workers, each copy has the factor of
    its own worker. Messages, all-reduces and host transfers keep their times. Put microbatches in
    order before.

    Rules describe a slow link, a hot accelerator, a long microbatch. A rule is `WHAT*FACTOR` or
    `WHAT@PLACE*FACTOR`; several are separated by commas and multiply. WHAT is a letter (F, B, I, W,
    R, A, U, O, L), a field of `Costs`, `compute` (F, B, I, W, R and fused pairs) or `message`
    (latency and transmit). PLACE is a stage, worker or microbatch with its number, as `worker3`;
    for messages a `boundary` (0 lies between stages 0 and 1), a worker that sends or receives, or a
    microbatch.

    Args:
      costs: unbatched costs [s].
      table: the schedule; it tells which worker holds which stage.
      rules: text such as "transmit*2, compute@worker3*1.3"; None for no rules.
      workers: {slow worker: factor}, as {3: 1.2}, or an array (workers) of all factors; JAX may
        trace the factors.
      microbatches: (microbatches) factors of at least 0: tokens of each microbatch over the tokens
        for which `costs` hold; JAX may trace the factors.

    Returns:
      Costs. Scaled op times are (stages) or (stages or 1, microbatches) if the factors differ
      there. Scaled message times are (directions, pipes, boundaries), then with an axis of
      microbatches if the factors differ by microbatch.

    Raises:
      ValueError: if a rule has another form, its place does not exist or does not fit its field,
        or it scales what the table does not have; if a worker does not exist; if a factor is
        negative or not finite, or 0 for a worker; if microbatches differ and a fused pair, which
        holds two of them, has a cost of its own.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.5)
      >>> hot = pj.costing.scaled_costs(costs, table, "compute@worker1*1.5, transmit*2")
      >>> hot.backward.tolist(), float(hot.transmit)
      ([2.0, 3.0], 1.0)
      >>> slow = pj.costing.scaled_costs(costs, table, workers={1: 1.5})
      >>> slow.backward.tolist(), pj.evaluate(table, slow).busy.tolist()
      ([2.0, 3.0], [9.0, 13.5])
      >>> pj.costing.scaled_costs(costs, table, microbatches=[1.0, 2.0, 0.5]).forward.tolist()
      [[1.0, 2.0, 0.5]]
    """
    check_types(costs=(costs, Costs), table=(table, ScheduleTable), rules=(rules, str, type(None)))
    leaves, scaled = dict(vars(costs)), ScaledFields.from_table(table)

    def scale(fields: Iterable[str], field_factors: Callable[[str], Any]) -> None:
        """Multiply each of these costs with the factors of its field."""
        for field in dict.fromkeys(fields):  # several kinds of ops may share a cost
            if leaves.get(field) is not None:
                leaves[field] = _multiply(leaves[field], field_factors(field), field)

    if microbatches is not None:
        row = _microbatch_factors(microbatches, costs)
        row, message_row = row[None, :], row[None, None, None, :]
        scale(scaled.growing, lambda field: message_row if field in MESSAGE_FIELDS else row)
    if workers is not None:
        by_op, by_worker = op_factors(table, workers), _worker_factors(workers, table)
        scale(scaled.on_workers, lambda field: by_worker if field in scaled.per_worker else by_op)
    for text in () if rules is None else rules.split(","):
        rule = _read_rule(text, scaled)
        _check_rule(rule, costs, table, scaled)
        scale(rule.fields, functools.partial(_rule_factors, rule, table, scaled))
    return with_leaves(costs, leaves)


def _microbatch_factors(factors: Any, costs: Costs) -> Any:
    """Check the factors (microbatches), and return them; arrays that JAX traces have no values."""
    if not is_traced(factors):
        array = as_floats(factors, "scale")
        if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(
                "scale must be one finite number of at least 0 for each microbatch, got "
                f"{abbreviated(factors)}"
            )
        factors = array
    if costs.pair is not None:
        raise ValueError(
            "pair is one time of a fused pair for all microbatches, but their lengths differ: "
            "leave it out, and it is the sum of the forward and the backward"
        )
    return factors


def parse_stragglers(text: str, where: str) -> dict[int, float]:
    """Parse the factors of slow workers from text such as 3=1.2,5=2, which may be empty."""
    stragglers: dict[int, float] = {}
    if not text.strip():
        return stragglers
    for entry in text.split(","):
        worker, equals, factor = (part.strip() for part in entry.partition("="))
        if not (equals and worker.isdecimal() and worker.isascii()):
            raise ValueError(f"{where}: expected workers and factors, as 3=1.2,5=2, got {text!r}")
        if int(worker) in stragglers:
            raise ValueError(f"{where} names worker {worker} twice")
        label = f"{where}: factor of worker {worker}"
        stragglers[int(worker)] = positive(_read_factor(factor, label), label)
    return stragglers


def check_workers(workers: Iterable[Any], table: ScheduleTable, where: str) -> None:
    """Refuse worker numbers that a table does not have."""
    for worker in workers:
        if whole_number(worker, f"{where}: a worker", minimum=0) >= table.num_workers:
            raise MismatchError(
                f"{where}: there is no worker {worker}, the table has {table.num_workers}", where
            )


def check_count(name: str, values: Sized, count: int) -> None:
    """Refuse a list whose length is not the number of microbatches."""
    if len(values) != count:
        text = f"{name} has {len(values)} entries, the table has {count} microbatches"
        raise MismatchError(text, name)


def op_factors(table: ScheduleTable, factors: Stragglers) -> Any:
    """Return factors of op times: (stages), or (stages, microbatches) if pipes differ."""
    return _worker_factors(factors, table)[op_workers(table)]


def _worker_factors(factors: Stragglers, table: ScheduleTable) -> Any:
    """Check the factors of slow workers; return the factors of all workers, by default 1."""
    if not isinstance(factors, Mapping):
        values = factors if is_traced(factors) else np.asarray(factors, float)
        if np.shape(values) != (table.num_workers,):
            raise MismatchError(
                f"factors have shape {np.shape(values)}, the table has {table.num_workers} workers"
            )
        factors = dict(enumerate(values))
    check_workers(factors, table, "factors")
    full = [factors.get(worker, 1.0) for worker in range(table.num_workers)]
    if is_traced(*full):
        return jnp.stack(full)
    array = as_floats(full, "factors")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if wrong.size:
        text = f"factor of worker {wrong[0]} must be finite and above 0"
        raise ValueError(f"{text}, got {array[wrong[0]]}")
    return array


def op_workers(table: ScheduleTable) -> Int[NumpyArray, "..."]:
    """Return the worker of each op: (stages), or (stages, microbatches) if pipes differ."""
    placement = table.placement
    if (placement == placement[0]).all():
        return placement[0]
    return placement[table.pipe_of_microbatch].T


def _read_rule(text: str, scaled: ScaledFields) -> ScalingRule:
    """Parse a scaling rule such as "compute@worker3*1.3"."""
    match = _RULE.fullmatch(text)
    if match is None:
        form = "WHAT*FACTOR or WHAT@PLACE*FACTOR, as transmit*2 or compute@worker3*1.3"
        raise ValueError(f"{text.strip()!r} is not {form}")
    what, place, number, factor_text = match.groups(default="")
    fields = scaled.words.get(what, ())
    if not fields:
        custom = (word for word in scaled.words if word not in (*_WORD, *GROUPS))
        raise unknown("cost", what, [*PHASE_FIELDS, "pair", *MESSAGE_FIELDS, *GROUPS, *custom])
    if place and place not in PLACES:
        raise unknown("place", place, PLACES)
    factor = _read_factor(factor_text, f"factor of {what}")
    return ScalingRule(what, fields, place, int(number or 0), factor)


def _read_factor(text: str, where: str) -> float:
    factor = parse_float(text)
    if not is_number(factor):
        raise ValueError(f"{where} must be a number of at least 0, got {text!r}")
    return factor


def _check_rule(
    rule: ScalingRule, costs: Costs, table: ScheduleTable, scaled: ScaledFields
) -> None:
    """Refuse a rule that scales no cost, or names a place that the table does not have."""
    counts = {
        "stage": table.num_stages,
        "worker": table.num_workers,
        "microbatch": table.num_microbatches,
        "boundary": len(table.grammar.edges(table.num_stages)),
    }
    field = rule.fields[0]
    illegal_places = set()
    if field in {*MESSAGE_FIELDS, *scaled.per_worker}:
        illegal_places.add("stage")
    if field not in MESSAGE_FIELDS:
        illegal_places.add("boundary")
    if rule.place in illegal_places:
        legal = ", ".join(place for place in PLACES if place not in illegal_places)
        raise ValueError(f"{rule.what} has no {rule.place} of its own: legal places are {legal}")
    if rule.place and rule.number >= counts[rule.place]:
        plural = "boundaries" if rule.place == "boundary" else f"{rule.place}s"
        place = f"{rule.what}@{rule.place}{rule.number}"
        raise ValueError(f"{place}: the table has {counts[rule.place]} {plural}")
    if rule.place == "microbatch" and field in scaled.per_stage:
        raise ValueError(f"{rule.what} is of no microbatch")
    if rule.what in GROUPS:
        return
    if vars(costs).get(field) is None:
        raise ValueError(f"{rule.what} has no time that could be scaled")
    used_fields = {phase.kind.time for phase in (*STEP_END, *table.used_phases)}
    # a field without a phase, such as latency, applies to any table
    if field not in used_fields and field in {p.kind.time for p in table.grammar.timed_phases}:
        raise ValueError(f"{rule.what} is in no cell of the table: nothing to scale")


def _rule_factors(
    rule: ScalingRule, table: ScheduleTable, scaled: ScaledFields, field: str
) -> Float[NumpyArray, "..."]:
    """Return factors for a field: the rule's factor at the rule's place, 1 elsewhere."""
    # The shape of factors is (), (stages), (stages, microbatches), (workers) for a cost of workers,
    # or for messages (2, pipes, boundaries).
    is_scaled: Any
    edges = np.array(table.grammar.edges(table.num_stages), int).reshape(-1, 2)  # pairs of stages
    if rule.place == "":
        is_scaled = True
    elif rule.place == "microbatch":
        is_scaled = np.arange(table.num_microbatches) == rule.number
        is_scaled = is_scaled.reshape((1, 1, 1, -1) if field in MESSAGE_FIELDS else (1, -1))
    elif rule.place == "stage":
        is_scaled = np.arange(table.num_stages) == rule.number
    elif rule.place == "boundary":
        is_scaled = np.arange(len(edges)) == rule.number
    elif field in scaled.per_worker:
        is_scaled = np.arange(table.num_workers) == rule.number
    elif field in MESSAGE_FIELDS:  # messages that the worker sends or receives
        on_worker = table.placement == rule.number  # (pipes, stages)
        is_scaled = np.stack([on_worker[:, edges[:, 0]] | on_worker[:, edges[:, 1]]] * 2)
    else:
        is_scaled = op_workers(table) == rule.number
        has_one_time = field in scaled.per_stage and field not in scaled.on_workers
        if is_scaled.ndim == 2 and has_one_time:  # pipes hold the stage on several workers
            on_worker = table.placement == rule.number
            stage = int(np.flatnonzero((on_worker != on_worker[0]).any(axis=0))[0])
            raise ValueError(f"{rule.what} has one time for all workers that hold stage {stage}")
    return np.where(is_scaled, rule.factor, 1.0)


def _multiply(value: Any, factors: Float[NumpyArray, "..."], field: str) -> Any:
    """Multiply a cost by factors; cost or factors may lack the last axis, microbatches."""
    # A cost by stage, (S), and factors by microbatch, (1, M), need a cost of (S, 1).
    num_axes = 4 if field in MESSAGE_FIELDS else 2  # axes of messages, ops
    has_microbatches = max(np.ndim(value), factors.ndim) == num_axes
    if not has_microbatches or np.ndim(value) == factors.ndim:
        return value * factors

    def with_all_axes(array: Any) -> Any:
        """Add missing leading axes and a last axis of microbatches, except to a plain number."""
        if np.ndim(array) in (0, num_axes):
            return array
        leading_axes = [1] * (num_axes - 1 - array.ndim)
        return array.reshape(*leading_axes, *array.shape, 1)

    return with_all_axes(value) * with_all_axes(factors)


# Costs of the same model in another number of stages: stages are merged or divided.


def restaged_costs(costs: Costs, stages: int, table: ScheduleTable) -> Costs:
    """Convert costs that were measured on a number of stages to the stages of a table.

    Every measured stage counts as an equal share of the model, with its time spread evenly. A new
    stage takes the time of its share of the model. Measured stages count as on workers 0, 1, ..,
    then 0 again. Messages between two workers keep their time, the longest if there are several.
    Messages between workers that had none take the longest time of all.

    Args:
      costs: unbatched costs [s] of the measured stages; a single number holds for every stage.
      stages: number of measured stages.
      table: the schedule to price.

    Returns:
      Costs of the table's stages; unchanged if the number of stages is the same.

    Raises:
      ValueError: if costs have another number of stages, or messages differ between pipes.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4,
      ...     stages_per_worker=2)
      >>> pj.costing.restaged_costs(pj.Costs(forward=[1.0, 3.0], backward=2.0), 2, table).forward
      array([0.5, 0.5, 1.5, 1.5])
    """
    check_types(costs=(costs, Costs), table=(table, ScheduleTable))
    stages = whole_number(stages, "stages")
    if stages == table.num_stages:
        return costs
    share = stage_overlaps(stages, table.num_stages)
    leaves = {}
    for name in FIELDS:
        value = getattr(costs, name)
        if value is None:
            continue
        time = np.asarray(value, float)
        if name in MESSAGE_FIELDS:
            leaves[name] = _restaged_messages(name, time, stages, table)
            continue
        if time.ndim and time.shape[0] not in (1, stages):
            raise MismatchError(
                f"{name} has {time.shape[0]} entries, the costs are of {stages} stages"
            )
        # a number, or a row of microbatches, holds for every stage
        by_stage = np.broadcast_to(time if time.ndim else time[None], (stages, *time.shape[1:]))
        leaves[name] = share @ by_stage
        if name in DIMENSIONLESS:  # the mean over stages, not the sum
            leaves[name] = (leaves[name].T / share.sum(axis=1)).T
    return dataclasses.replace(costs, **leaves)


def stage_overlaps(old: int, new: int) -> Float[NumpyArray, "new old"]:
    """Return the share of each old stage that lies in each new stage: (new, old)."""
    # Stage s of n covers [s / n, (s + 1) / n] of the model. From 2 to 3 stages, in sixths: old ends
    # are 0 3 6, new ends 0 2 4 6; new stage 1, from 2 to 4, has a third of each old stage.
    new_start, new_end = np.arange(new) * old, np.arange(1, new + 1) * old
    old_start, old_end = np.arange(old) * new, np.arange(1, old + 1) * new
    overlap = np.minimum(new_end[:, None], old_end) - np.maximum(new_start[:, None], old_start)
    return np.maximum(overlap, 0) / new


def _restaged_messages(
    name: str, times: Float[NumpyArray, "..."], stages: int, table: ScheduleTable
) -> Float[NumpyArray, "..."]:
    """Convert message times [s] from `stages` stages to a table's: (2, 1, boundaries, ..)."""
    # A pair of workers keeps its longest message time, a new pair gets the longest time of all.
    if np.ndim(times) == 0:
        return times
    while times.ndim < 3:
        times = times[None]
    if times.shape[1] != 1 and (times != times[:, :1]).any():
        raise ValueError(f"{name} differs between pipes: costs of other stages do not follow")
    times = np.broadcast_to(times[:, :1], (2, 1, stages - 1, *times.shape[3:]))
    workers = (np.arange(stages) % table.num_workers).tolist()
    pair_times: dict[tuple[int, int], list[Float[NumpyArray, ...]]] = {}
    for boundary, pair in enumerate(itertools.pairwise(workers)):
        boundary_times = times[:, :, boundary]  # (2 directions, 1, ..)
        pair_times.setdefault(pair, []).append(boundary_times)
        # in the opposite direction of the pair, activations take the time of gradients
        pair_times.setdefault(pair[::-1], []).append(boundary_times[::-1])
    longest = np.broadcast_to(times.max(axis=(0, 2)), times[:, :, 0].shape)
    pairs = itertools.pairwise(table.placement[0].tolist())
    return np.stack([np.max(pair_times.get(pair, [longest]), axis=0) for pair in pairs], axis=2)
