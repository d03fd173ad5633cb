"""Costs in seconds: times of ops by stage, and times of messages by stage boundary.

The leaves of `Costs` are arrays, so costs can be batched, differentiated and optimised. JAX does
not recompile when the values of costs change.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.base.array_types import Num, NumpyArray
from pipejax.base.checks import UnknownNameError, check_types, unknown
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import is_array, jnp, register
from pipejax.costs.array_functions import Computed
from pipejax.costs.precision import checked_seconds, float_type
from pipejax.schedules.cells.ops import COPY, KINDS, MICROBATCH, TIMED, AnyPhase, Phase
from pipejax.schedules.table.table import ScheduleTable

Seconds = float | np.number | Sequence[Any] | Num[Computed, "..."] | Num[NumpyArray, "..."]

PHASE_FIELDS: Mapping[str, str] = {phase.name: KINDS[phase].time for phase in TIMED}
CONTRADICTION = 0.01  # share by which B may differ from I + W in files and options
MESSAGE_FIELDS = ("latency", "transmit")
TIME_FIELDS: Mapping[str, str] = {**PHASE_FIELDS, "pair": "pair"}  # times of ops and fused pairs
DIMENSIONLESS = ("pair_factor",)  # fields that are no times
OF_STAGES = tuple(KINDS[phase].time for phase in TIMED if KINDS[phase].scope != MICROBATCH)
# fields of ops that every copy of a stage runs by itself
OF_COPIES = tuple(KINDS[phase].time for phase in TIMED if KINDS[phase].scope == COPY)
# ways to give a missing time, by field
_WAYS = dict.fromkeys(
    ("backward", "input_grad", "weight_grad"), "backward (B), or input_grad (I) and weight_grad (W)"
) | {
    "offload": "offload (O) in seconds, as F=1,B=2,O=1; a model has it on a system whose file says "
    "what its host_link is",
    "load": "load (L), or offload (O)",
}


class _FilledIn:
    """Times that a record of costs derived from other times, stored outside of its fields."""

    __slots__ = ("filled_in",)


@short_repr
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Costs(_FilledIn):
    """Times of all ops and messages of a schedule, in seconds.

    An op time is a number for all stages, or an array (stages) or (stages, microbatches), which is
    (1, microbatches) if stages are equal. A message time is a number, an array (stages - 1), or
    any array that broadcasts to (2, pipes, stages - 1). The axis of length 2 is the direction:
    first activations, then input gradients. A fourth axis is that of the microbatches. For
    `makespans`, a batch axis comes before all other axes. Times of sharding and of A have no axis
    of microbatches. U may have a second axis, if the copies of a stage differ: each copy reads the
    entry of the first microbatch that it runs.

    A time that is not given is unknown, not 0: a program that needs it cannot be priced. Some
    times follow from others: I = W = B / 2, or B = I + W, I = B - W, W = B - I; and L = O.
    Messages, A, U and sharding cost 0 by default. Lists become arrays, and whole numbers become
    float64. Arrays of float32 and float64 keep their type, which is also the type of `makespans`.
    float16 and bfloat16 become float32, because they are too coarse to add up a step.

    Attributes:
      forward: F [s].
      backward: B, the whole backward [s].
      input_grad: I [s].
      weight_grad: W [s].
      recompute: R [s].
      all_reduce: A, gradient all-reduce of a stage [s].
      update: U, optimizer update of a stage [s].
      unshard: UNSHARD [s].
      reshard: RESHARD [s].
      reduce_grad: REDUCE_GRAD [s].
      wait_reduce_grad: WAIT_REDUCE_GRAD [s].
      latency: L of a message [s].
      transmit: X of a message, bytes / bandwidth [s].
      offload: O, an activation to the host [s].
      load: L, an activation back from the host; as offload if None [s].
      pair: duration of a fused pair, by the stage of its forward [s].
      pair_factor: k, by the stage of the pair's forward: a fused pair takes
        max(F, B) + k min(F, B). 0 is perfect overlap; 1 is no overlap, and so is None.
      others: mapping from name to cost, for kinds of ops that a table defines [s]. Each cost
        becomes an attribute. Costs of ops that belong to a worker have one entry per worker.

    Raises:
      ValueError: if a time is not a finite number of at least 0, I or W is larger than B, or both
        pair and pair_factor are given.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
      >>> costs = pj.Costs(forward=1, backward=2)
      >>> costs
      Costs(forward=1, backward=2, input_grad=1, weight_grad=1)
      >>> pj.evaluate(table, costs).makespan
      27.0
    """

    forward: "Seconds | None" = None
    backward: "Seconds | None" = None
    input_grad: "Seconds | None" = None
    weight_grad: "Seconds | None" = None
    recompute: "Seconds | None" = None
    all_reduce: "Seconds" = 0.0
    update: "Seconds" = 0.0
    unshard: "Seconds" = 0.0
    reshard: "Seconds" = 0.0
    reduce_grad: "Seconds" = 0.0
    wait_reduce_grad: "Seconds" = 0.0
    latency: "Seconds" = 0.0
    transmit: "Seconds" = 0.0
    offload: "Seconds | None" = None
    load: "Seconds | None" = None
    pair: "Seconds | None" = None
    pair_factor: "Seconds | None" = None
    others: dataclasses.InitVar[Any] = None  # Mapping[str, Seconds] | None
    _filled: dataclasses.InitVar[Any] = None  # times that the replaced record had filled in

    def __new__(cls, *args: Any, **times: Any) -> "Costs":
        """Refuse an unknown cost name, and suggest the nearest valid name."""
        for name in times:
            if name not in (*FIELDS, "others", "_filled"):
                raise unknown_cost(name)
        return super().__new__(cls)

    def __post_init__(self, others: Any, _filled: Any) -> None:
        """Check the costs, and fill in those that follow from others, such as I from B."""
        # `others` are costs of custom kinds of ops; `_filled` are costs that an older record filled
        # in, or this older record.
        check_types(others=(others, Mapping, type(None)))
        values = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(_filled, Costs):
            old, _filled = vars(_filled), None
            for names in (("backward", "input_grad", "weight_grad"), ("offload", "load")):
                stale = [name for name in names if values.get(name) is old[name]]
                if 0 < len(stale) < len(names) and values.keys() >= {*names}:
                    why = f"costs of jax.tree.map or jit would keep their old {' and '.join(stale)}"
                    raise ValueError(f"{why}: give these too, or None to derive them")
        # `dataclasses.replace` passes all times of the old record: forget times that this record
        # had filled in, such as I = 1 from B = 2, because they follow from the new times
        for name, old_value in (_filled or {}).items():
            if values.get(name) is old_value:
                del values[name]
                vars(self)[name] = None
        others = others or {}
        if repeated_names := values.keys() & others:
            name = min(repeated_names)
            raise ValueError(f"others: {name} is a field of Costs: give {name}=")
        values |= others
        if "pair" in values and "pair_factor" in values:
            raise ValueError("pair and pair_factor both set the time of a fused pair: give one")
        checked = {name: checked_seconds(name, value) for name, value in values.items()}
        stated = {**_OPTIONAL, **checked}
        times = _fill_in(stated)
        vars(self).update(times)
        filled_in = {name: times[name] for name in times.keys() - stated.keys()}
        object.__setattr__(self, "filled_in", filled_in)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the given times; derived times follow from them again."""
        filled_in, times = getattr(self, "filled_in", {}), vars(self)
        stated = {name: times[name] for name in FIELDS if name not in filled_in}
        others = {name: times[name] for name in times.keys() - {*FIELDS}} or None
        return functools.partial(Costs, **stated, others=others), ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Costs) or vars(self).keys() != vars(other).keys():
            return False
        return all(np.array_equal(value, vars(other)[name]) for name, value in vars(self).items())

    def __hash__(self) -> int:
        costs = ((name, value) for name, value in vars(self).items() if value is not None)
        return hash(frozenset((name, np.shape(value) or float(value)) for name, value in costs))

    @classmethod
    def uniform(
        cls,
        table: ScheduleTable,
        *,
        forward: "Seconds | None" = None,
        transfer: "Seconds | None" = None,
        **others: "Seconds | Mapping[str, Any] | None",
    ) -> "Costs":
        """Make costs with equal op times on every stage and equal times of all messages.

        Args:
          table: the schedule to price; it decides which times are required.
          forward: F [s]. Each argument is a number, or an array with a batch of numbers.
          transfer: transmit time of a message; `transmit=` is the same.
          **others: further fields of `Costs`, such as `backward`, `input_grad`, `weight_grad` and
            `latency`. Missing times follow from others as in `Costs`.

        Returns:
          The costs. If an argument is a batch of shape (N,), all leaves are batches for
          `makespans`: op times of shape (N, 1), message times of shape (N, 1, 1, 1).

        Raises:
          ValueError: if a cost is negative or not finite, or neither B nor I and W are given.

        Example:
          >>> import pipejax as pj
          >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
          >>> pj.Costs.uniform(table, forward=1.0, backward=3.0).input_grad
          1.5
        """
        times: dict[str, Any] = {"forward": forward, **others}
        return cls._from_numbers(table, transfer=transfer, **times)

    @classmethod
    def per_worker(
        cls,
        table: ScheduleTable,
        *,
        forward: "Seconds | None" = None,
        transfer: "Seconds | None" = None,
        **others: "Seconds | Mapping[str, Any] | None",
    ) -> "Costs":
        """Make costs from a worker's times per microbatch, divided over the stages of the worker.

        Schedules with several stages per worker then do the same work as those with one. An
        interleaved stage takes 1 / V of the time, a stage of a Hanayo wave 1 / (2 * waves). In
        Chimera a microbatch runs on one stage per worker. A stage with a larger share of the layers
        takes more. If a microbatch has K slices, each slice and its message take 1 / K of the time.

        The arguments are those of `uniform`. Op times are divided by stage, message times are not.
        Op times have the shape (stages,), or (N, stages) for a batch.

        Example:
          >>> import pipejax as pj
          >>> options = {"num_workers": 2, "num_microbatches": 8}
          >>> for name in ("1f1b", "interleaved-1f1b", "hanayo"):
          ...     table = pj.schedules.build(name, **options)
          ...     costs = pj.Costs.per_worker(table, forward=1.0, backward=2.0)
          ...     print(name, costs.forward, pj.evaluate(table, costs).busy)
          1f1b [1. 1.] [24. 24.]
          interleaved-1f1b [0.5 0.5 0.5 0.5] [24. 24.]
          hanayo [0.5 0.5 0.5 0.5] [24. 24.]
        """
        times: dict[str, Any] = {"forward": forward, **others}
        return cls._from_numbers(table, transfer=transfer, by_worker=True, **times)

    @classmethod
    def _from_numbers(
        cls,
        table: ScheduleTable,
        *,
        transfer: Any,
        by_worker: bool = False,
        others: Mapping[str, Any] | None = None,
        **times: Any,
    ) -> "Costs":
        """Make costs from times per stage or, if `by_worker`, from times per worker to divide."""
        check_types(table=(table, ScheduleTable), others=(others, Mapping, type(None)))
        for name in times:
            if name not in FIELDS:
                raise unknown_cost(name)
        if transfer is not None:
            if times.get("transmit") is not None:
                raise ValueError("transfer and transmit are the same cost: give one")
            times["transmit"] = checked_seconds("transfer", transfer)
        if Phase.F in required_phases(table):
            checked_seconds("forward", times["forward"])  # None is refused: F has a cost
        times |= others or {}  # costs of custom kinds are checked and divided in the same way
        times = {name: value for name, value in times.items() if value is not None}
        times = {name: checked_seconds(name, value) for name, value in times.items()}
        times = _broadcast_batches(times)
        if by_worker:
            times = _divide_among_stages(times, table)
        custom_times = {name: times.pop(name) for name in others or {}}
        costs = cls(**times, others=custom_times)
        costs.check_known(required_phases(table))
        return costs

    def check_known(self, phases: Iterable[AnyPhase]) -> None:
        """Check that each phase has a cost; the ValueError names the field to give."""
        for phase in phases:
            field = phase.kind.time
            if self.time(phase) is None and field not in _OPTIONAL:
                custom = f"others={{{field!r}: ..}}, in seconds"
                argument = f"{field} ({phase.name})" if field in FIELDS else custom
                way = _WAYS.get(field, argument)
                raise ValueError(f"phase {phase.name} has no cost: give {way}")

    def time(self, phase: AnyPhase) -> Any:
        """Return the time of ops of a phase [s], or None if it is unknown."""
        return vars(self).get(phase.kind.time)

    def check_values(self, fields: Iterable[str] | None = None) -> None:
        """Check that the costs in `fields` (default: all) are finite and at least 0."""
        for name in vars(self) if fields is None else fields:
            value = getattr(self, name)
            if value is not None:
                checked_seconds(name, value)

    def per_microbatch(self, batch_axes: int = 0) -> bool:
        """Return whether any cost has an axis of microbatches, after `batch_axes` batch axes."""
        return any(
            differs_by_microbatch(name, value, batch_axes) for name, value in vars(self).items()
        )

    def check_shapes(
        self,
        num_stages: int,
        num_pipes: int,
        num_microbatches: int,
        num_boundaries: int | None = None,
        places: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Check that each cost is a number, or has an entry per stage or boundary (and microbatch).

        `places` is ((cost with an entry per worker, number of entries), ..).
        """
        boundaries = num_stages - 1 if num_boundaries is None else num_boundaries
        worker_counts = dict(places)
        expected: tuple[int, ...]
        for name, value in vars(self).items():
            shape = getattr(value, "shape", ())
            if not shape:
                continue
            if name in worker_counts:
                expected, sizes = (worker_counts[name],), f"{worker_counts[name]} workers"
            elif name in MESSAGE_FIELDS:
                expected = (2, num_pipes, boundaries)
                sizes = f"{boundaries} stage boundaries (or {expected})"
            else:
                expected, sizes = (num_stages,), f"{num_stages} stages"
            # Microbatches are the second axis of an op, (1, M) for equal stages, and the fourth
            # axis of a message. U differs by copy of a stage only if it has one entry per stage.
            entries = shape
            has_equal_stages = name in OF_COPIES and shape[0] != num_stages
            if differs_by_microbatch(name, value) and not has_equal_stages:
                sizes += f" and {num_microbatches} microbatches"
                entries = shape[:-1] if shape[-1] == num_microbatches else shape
            try:
                fits = np.broadcast_shapes(entries, expected) == expected
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"{name} has shape {shape}, the table has {sizes}; for a batch use makespans "
                    "or jax.vmap"
                )


def with_leaves(costs: Costs, leaves: Mapping[str, Any]) -> Costs:
    """Replace costs by name: a field of `Costs`, or the cost of a custom kind of op."""
    fields = {name: value for name, value in leaves.items() if name in FIELDS}
    custom = {name: value for name, value in leaves.items() if name not in FIELDS}
    old_custom = {name: value for name, value in vars(costs).items() if name not in FIELDS}
    return dataclasses.replace(costs, **fields, others={**old_custom, **custom})


def required_phases(table: ScheduleTable) -> tuple[Phase, ...]:
    """Return the phases that need times: F and B; only F in forward-only tables; none without F."""
    if Phase.F not in table.used_phases:
        return ()
    return (Phase.F,) if table.grammar.forward_only else (Phase.F, Phase.B)


def differs_by_microbatch(field: str, value: Any, batch_axes: int = 0) -> bool:
    """Return whether a cost has an axis of microbatches, which its number of axes tells."""
    axes = getattr(value, "ndim", 0) - batch_axes
    if axes < 2:  # the usual case, for speed
        return False
    is_per_stage = field in OF_STAGES and field not in OF_COPIES
    return axes == (4 if field in MESSAGE_FIELDS else 2) and not is_per_stage


FIELDS = tuple(field.name for field in dataclasses.fields(Costs))
# `dataclasses.replace` reads these constructor arguments as attributes of the old record
Costs.others = property(  # type: ignore[attr-defined]  # mypy sees only an argument
    lambda costs: {n: value for n, value in vars(costs).items() if n not in FIELDS} or None
)
Costs._filled = property(  # type: ignore[attr-defined]  # mypy sees only an argument
    # JAX's tree functions make records without `filled_in`: then the old record itself is passed
    lambda costs: getattr(costs, "filled_in", costs)
)
# names of costs in files and options, with the argument in Python
_FILE_NAMES = {
    **{letter: field for letter, field in PHASE_FIELDS.items() if field != letter},
    **dict.fromkeys(("c", "comm", "message", "transfer"), "transmit"),
}


def unknown_cost(name: str) -> UnknownNameError:
    """Build the error about an unknown cost name; if files use the name, name the argument."""
    if name not in _FILE_NAMES:
        return unknown("cost", name, FIELDS)
    argument = _FILE_NAMES[name]
    return UnknownNameError("cost", name, f"unknown cost {name!r}: give {argument}=, in seconds")


# optional times, 0 by default
_OPTIONAL = {field.name: 0.0 for field in dataclasses.fields(Costs) if field.default is not None}


def unchecked_costs(leaves: Mapping[str, Any], filled_in: Iterable[str] | None = None) -> Costs:
    """Make costs from a mapping of fields without any check; missing fields become None."""
    # `filled_in` names fields that follow from others, as I = 1 from B = 2; None if unknown.
    costs = object.__new__(Costs)
    vars(costs).update({**dict.fromkeys(FIELDS), **leaves})
    if filled_in is not None:
        object.__setattr__(costs, "filled_in", {name: leaves[name] for name in filled_in})
    return costs


# JAX may put derivatives, axes or tracers into a tree of costs, so the functions that build the
# tree neither check nor complete values.
register(
    Costs,
    lambda costs: (tuple(vars(costs)), tuple(vars(costs).values()), tuple(vars(costs))),
    lambda names, leaves: unchecked_costs(dict(zip(names, leaves, strict=True))),
)


def _broadcast_batches(times: Mapping[str, Any]) -> dict[str, Any]:
    """Give all times the same batch axis, then axes of length 1; change nothing without batch."""
    # With forward (5,) and transmit a number: forward (5, 1), with an axis of stages, and transmit
    # (5, 1, 1, 1), with axes of directions, pipes and boundaries.
    batch = np.broadcast_shapes(*map(np.shape, times.values()))
    if not batch:
        return dict(times)
    times = {**_OPTIONAL, **times}
    dtype = float_type(*times.values())
    batches = {}
    for name, value in times.items():
        last_axes = (1, 1, 1) if name in MESSAGE_FIELDS else (1,)
        xp: Any = jnp if is_array(value) else np
        array = value if hasattr(value, "dtype") else np.asarray(value, dtype)
        array = array.reshape(*array.shape, *last_axes)
        batches[name] = xp.broadcast_to(array, (*batch, *last_axes))
    return batches


def _divide_among_stages(times: Mapping[str, Any], table: ScheduleTable) -> dict[str, Any]:
    """Convert times of a microbatch on a worker to times of one stage and one slice."""
    # A worker with 2 equal stages and 4 slices of a sequence: forward 8 s is 1 s per op.
    slices = table.grammar.slices
    # phases that a worker runs for all its stages at once; other times are a stage's part
    worker_fields = {phase.kind.time for phase in table.grammar.worker_phases}
    divided = dict(times)
    for name in times.keys() - {*MESSAGE_FIELDS, *DIMENSIONLESS}:
        factor = (1 if name in worker_fields else table.worker_parts) / slices
        divided[name] = times[name] * factor
    if slices > 1 and "transmit" in times:
        divided["transmit"] = times["transmit"] / slices
    return divided


def _fill_in(times: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in missing op times: B, I or W from the other two, or I = W = B / 2; and L = O."""
    b, i, w = (times.get(name) for name in ("backward", "input_grad", "weight_grad"))
    added: dict[str, Any] = {}
    if b is None and i is not None and w is not None:
        added["backward"] = _combine("backward (I + W)", operator.add, i, w)
    elif b is not None and i is None and w is None:
        added = dict.fromkeys(("input_grad", "weight_grad"), b / 2)
    elif b is not None and i is None:
        added["input_grad"] = _combine("I = B - W (input_grad)", operator.sub, b, w)
    elif b is not None and w is None:
        added["weight_grad"] = _combine("W = B - I (weight_grad)", operator.sub, b, i)
    if times.get("load") is None and times.get("offload") is not None:
        added["load"] = times["offload"]
    return {**times, **added}


def check_backward(times: Mapping[str, Any]) -> None:
    """Refuse times of B, I and W, if all are given and B differs from I + W by over 1 %."""
    # `Costs` itself does not check this, because a fused backward may be faster than I + W.
    backwards = [times.get(name) for name in ("backward", "input_grad", "weight_grad")]
    if any(time is None for time in backwards):
        return
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(time)) for time in backwards))
    backward, input_grad, weight_grad = arrays
    total = input_grad + weight_grad
    differs = np.abs(backward - total) > CONTRADICTION * np.maximum(backward, total)
    if differs.any():
        first = np.argwhere(differs)[0]  # [stage] or [stage, microbatch]
        axes = ("stage", "microbatch")[: np.squeeze(backward).ndim]  # none for plain numbers
        places = [f"{axis} {index}" for axis, index in zip(axes, first, strict=False)]
        where = f" on {', '.join(places)}" if places else ""
        b, i, w = (float(array[tuple(first)]) for array in arrays)
        raise ValueError(
            f"B contradicts I + W: {b:g} is not {i:g} + {w:g}{where}: give B, or I and W"
        )


def _combine(what: str, combine: Any, first: Any, second: Any) -> Any:
    """Add or subtract costs of matching shapes; `what` names the result in error messages."""
    shapes = np.shape(first), np.shape(second)
    # different numbers of axes are refused: NumPy would broadcast (N, 1) and (N,) to (N, N)
    matches = not all(shapes) or len(shapes[0]) == len(shapes[1])
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        matches = False
    if not matches:
        raise ValueError(f"{what}: shapes {shapes[0]} and {shapes[1]} do not go together")
    return checked_seconds(what, combine(first, second))
