"""Parameters of closed forms, each a direction in the space of costs; forms in them as text."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.cone import LARGEST, Whole
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.checks import ArgumentError, check_types, unknown, wrong
from pipejax.base.display import short_repr
from pipejax.costs.costs import FIELDS, PHASE_FIELDS, Costs, unchecked_costs
from pipejax.engine.lowering.program import LINK_COSTS, Program
from pipejax.engine.pricing import check_known, cost_vector, program_for
from pipejax.schedules.cells.ops import MICROBATCH, STAGE, WORKER, Phase

MOST_PARTS = 10**4  # into which a weight such as a third divides a unit
DIRECTIONS = {"": (0, 1), "_F": (0,), "_B": (1,)}  # of messages, by suffix
MESSAGES = {"c": "transmit", "transmit": "transmit", "latency": "latency"}
PLACES = ("first", "mid", "last")
BACKWARDS = ("B", "I", "W")
READABLE = 1000  # largest denominator that is written as one; of decimals
DECIMAL = 8  # a smaller one

Weights = Mapping[str, Costs]  # by parameter: the costs where it is 1 and all others are 0
Counts = Sequence[Fraction]


@short_repr
class LinearCosts(NamedTuple):
    """Costs as linear functions of parameters, in whole numbers."""

    # what they are the costs of, spread over microbatches where they differ by them
    program: Program
    names: tuple[str, ...]  # of the parameters
    weights: Whole  # (costs, parameters) of each cost, in the order of `CostLayout`
    units: Whole  # (parameters) parts into which the weights divide the unit of a parameter
    costs: tuple[Costs, ...]  # what the costs are where one parameter is 1 and all others are 0


def default_parameters(program: Program) -> tuple[str, ...]:
    """Name the parameters that a program needs: its phases, and messages forth and back."""
    layout = program.layout
    phases = {*layout.phases, *layout.paired_phases}
    backward = {Phase.I, Phase.W} if phases & {Phase.I, Phase.W} else phases & {Phase.B}
    # an activation comes back from the host in the time in which it left
    usual = phases - {Phase[letter] for letter in BACKWARDS} - {Phase.L} | backward
    chosen = {p for p in usual if p.kind.scope == MICROBATCH} | (phases & {*layout.custom_phases})
    named: dict[str, str] = {}
    for phase in layout.timed:  # of kinds that share a cost the first names it
        if phase in chosen:
            named.setdefault(phase.kind.time, phase.name)
    messages = ("c_F", "c_B") if len(program.messages.producer) else ()
    return (*named.values(), *messages)


def named_parameters(
    program: Program, names: Sequence[str], parts: Float[NumpyArray, " stages"] | None = None
) -> dict[str, Costs]:
    """Parameters by name: phases, of all stages or some, and messages, both ways or one.

    A phase of a table's own goes by its letters; of one of workers, places are workers. `F` is the
    time of F on every stage, `F_0` that of stage 0, `F_first`, `F_mid` and `F_last`
    those of the first stage, of all between and of the last; `c_F` is what a message takes forth
    (its transmit time, as --comm says), `c_B` back, `c` both ways; `latency_F`, `transmit_F`, ...
    its parts. With `parts` a phase is what one microbatch takes on a worker, and each stage takes
    its part of it.

    Raises:
      ValueError: if a name is unknown, or two give the same time.
    """
    fields = {phase.kind.time: phase for phase in program.layout.timed}
    worker_fields = {field for field, phase in fields.items() if phase.kind.scope == WORKER}
    shares: dict[str, dict[str, NumpyArray]] = {}
    totals: dict[str, NumpyArray] = {}
    for name in names:
        field, where = _direction(program, name)
        if np.any(totals.get(field, 0) * where) or name in shares:
            raise ValueError(f"{name} gives a time that another of {', '.join(names)} gives too")
        totals[field] = totals.get(field, 0) + where
        shares[name] = {field: where}
    for field, where in totals.items():
        if field not in MESSAGES.values() and not np.all(where):
            place = int(np.flatnonzero(where == 0)[0])
            place_kind = "worker" if field in worker_fields else "stage"
            raise ValueError(f"{', '.join(names)} do not give {field} of {place_kind} {place}")
    shares = {name: _completed(share, totals) for name, share in shares.items()}
    if parts is not None:
        divided = fields.keys() - worker_fields
        shares = {
            name: {k: v * parts if k in divided else v for k, v in share.items()}
            for name, share in shares.items()
        }
    return {name: unchecked_costs(share) for name, share in shares.items()}


def _completed(
    share: dict[str, NumpyArray], times: Mapping[str, NumpyArray]
) -> dict[str, NumpyArray]:
    """Add times that follow from others: B is I + W, I = W = B / 2, L is O."""
    b, i, w = (PHASE_FIELDS[phase] for phase in BACKWARDS)
    more = {}
    if b in times and i not in times and w not in times:
        more = {i: {b: 0.5}, w: {b: 0.5}}
    elif b not in times and i in times and w in times:
        more = {b: {i: 1.0, w: 1.0}}
    if "load" not in times:
        more["load"] = {"offload": 1.0}
    ((field, weight),) = share.items()
    return share | {name: weight * parts[field] for name, parts in more.items() if field in parts}


def _direction(program: Program, name: str) -> tuple[str, NumpyArray]:
    """Return the field of `Costs` that a parameter gives, and where it does: 1, elsewhere 0."""
    layout = program.layout
    phases = {phase.name: phase for phase in layout.timed}
    # letters may hold a _ themselves: the longest that a name begins with are meant
    kind = max(
        (k for k in (*phases, *MESSAGES) if f"{name}_".startswith(f"{k}_")), key=len, default=""
    )
    suffix = name[len(kind) :]
    if kind in MESSAGES and suffix in DIRECTIONS:
        share = np.zeros(layout.link_shape[:3])
        share[list(DIRECTIONS[suffix])] = 1.0
        return MESSAGES[kind], share
    place, places = suffix[1:], layout.num_places(phases[kind]) if kind in phases else 1
    stages, last = np.arange(places), places - 1
    masks = {"": stages >= 0, "first": stages == 0, "last": stages == last}
    masks["mid"] = ~(masks["first"] | masks["last"])
    if re.fullmatch("[0-9]+", place) and int(place) <= last:
        masks[place] = stages == int(place)
    if kind not in phases or suffix == "_" or place not in masks:
        more = (
            f", each also with _first, _mid, _last or _0 to _{last}; those of messages with _F, _B"
        )
        raise unknown("parameter", name, [*phases, *MESSAGES], more)
    return phases[kind].kind.time, masks[place].astype(float)


def fixed_in(names: Sequence[str], box: Mapping[str, Any]) -> str | None:
    """Return the first parameter that a box fixes above 0, if any: it scales all others."""
    fixed = (name for name in names if name in box and box[name][0] == box[name][1])
    return next((name for name in fixed if box[name][0]), None)


def linear_costs(program: Program, parameters: Sequence[str] | Weights | None) -> LinearCosts:
    """Read parameters; check that they are all that a program costs."""
    chosen = default_parameters(program) if parameters is None else parameters
    if isinstance(chosen, str):
        raise wrong("parameters", f"must be a sequence of names, got {chosen!r}")
    check_types(parameters=(chosen, Sequence, Mapping))
    if not isinstance(chosen, Mapping):
        chosen = named_parameters(program, tuple(chosen))
    for name, costs in chosen.items():
        check_types(**{f"parameters[{name!r}]": (costs, Costs)})
        costs.check_values()
        if costs.pair_factor is not None:
            raise ValueError(
                f"parameters[{name!r}]: pair_factor makes no sum of costs, which a form is of: "
                "give pair"
            )
    if not chosen:
        raise wrong("parameters", "must name at least one, got none")
    fields = dict.fromkeys(
        (*FIELDS, *(field for costs in chosen.values() for field in vars(costs)))
    )
    parameter_fields = {
        field for costs in chosen.values() for field in fields if vars(costs).get(field) is not None
    }
    check_known(program, unchecked_costs(dict.fromkeys(parameter_fields, 0.0)))
    if program.links.eager_below:
        raise ArgumentError(
            "eager_below",
            program.links.eager_below,
            "a closed form knows no eager_below: its parameters say which messages are buffered. "
            "Name pairs of workers whose messages are, as pair_links={(0, 1): 'queued'}",
        )
    for costs in chosen.values():
        program = program_for(program, costs)
    is_used = _positions_read(program)
    columns, units, directions = [], [], []
    for costs in chosen.values():
        # costs of other parameters are 0 along this one
        along = {field: vars(costs).get(field) for field in fields if field in parameter_fields}
        along = {field: 0.0 if value is None else value for field, value in along.items()}
        directions.append(unchecked_costs(along))
        vector = np.asarray(cost_vector(program, directions[-1]), np.float64) * is_used
        unit, column = _whole(vector)
        units.append(unit)
        columns.append(column)
    weights = np.stack(columns, axis=1)
    return LinearCosts(program, tuple(chosen), weights, np.array(units, object), (*directions,))


def _positions_read(program: Program) -> Bool[NumpyArray, " costs"]:
    """Mark the costs that a program reads (costs), also as parts of messages or fused pairs."""
    layout = program.layout
    is_read = np.zeros(layout.size, bool)
    is_read[program.duration_index] = is_read[program.lag_index] = True
    latency, transmit, message = is_read[layout.first_link :].reshape(len(LINK_COSTS), -1)
    latency |= message
    transmit |= message
    pairs = is_read[layout.first_pair : layout.first_link]
    is_read[np.asarray(program.pair_index)[pairs]] = True
    return is_read


def _whole(weights: NumpyArray) -> tuple[int, Whole]:
    """Write weights as whole numbers of the largest unit that allows it."""
    kinds, which = np.unique(weights, return_inverse=True)
    parts = [_fraction(weight) for weight in kinds.tolist()]
    unit = math.lcm(*(part.denominator for part in parts))
    whole = [int(part * unit) for part in parts]
    return unit, np.array(whole, np.int64 if max(whole) < LARGEST else object)[which]


def _fraction(weight: float) -> Fraction:
    """Read a weight as the nearest fraction of small numbers, or exactly as it is stored."""
    simple = Fraction(weight).limit_denominator(MOST_PARTS)
    return simple if float(simple) == weight else Fraction(weight)


def weights_by_key(program: Program, costs: Costs, unit: int) -> dict[str, Any]:
    """Weights of one parameter as nested lists of whole numbers, by phase and message part."""
    # (stages), or (workers) of a phase of these; (2, pipes, boundaries) of messages;
    # with a last axis of microbatches where costs differ by them
    layout = program.layout
    microbatch_axis = (layout.num_microbatches,) if layout.per_microbatch else ()
    codes = {*np.unique(program.phase).tolist(), *map(int, layout.paired_phases)}
    phases = {phase.name: phase for phase in layout.timed if int(phase) in codes}
    shapes: dict[str, tuple[int, ...]] = {
        name: (layout.num_places(phase),) for name, phase in phases.items()
    }
    shapes |= {"pair": (layout.num_stages,)}
    shapes |= dict.fromkeys(("latency", "transmit"), layout.link_shape[:3])
    weights = {}
    for key, shape in shapes.items():
        value = costs.time(phases[key]) if key in phases else getattr(costs, key)
        if value is not None and np.any(np.asarray(value)):
            array = np.asarray(value, np.float64)
            if microbatch_axis and not (key in phases and phases[key].kind.scope == STAGE):
                shape = (*shape, *microbatch_axis)
                array = array if array.ndim == len(shape) else array[..., None]
            whole = np.frompyfunc(lambda weight: int(_fraction(weight) * unit), 1, 1)
            weights[key] = whole(np.broadcast_to(array, shape)).tolist()
    return weights


def as_text(names: Sequence[str], facets: Sequence[Counts]) -> str:
    """Write a form as `max(6F + 4B, 4F + 6B)`, or as one sum where there is one facet."""
    sums = [linear_text(names, counts) for counts in facets]
    return sums[0] if len(sums) == 1 else f"max({', '.join(sums)})"


def as_latex(names: Sequence[str], facets: Sequence[Counts]) -> str:
    r"""Write a form as `\max\left(6 F + 4 B,\; 4 F + 6 B\right)`."""
    symbols = [latex_symbol(name) for name in names]
    sums = [_sum(symbols, counts, _latex_factor) for counts in facets]
    joined = r",\; ".join(sums)
    return joined if len(sums) == 1 else rf"\max\left({joined}\right)"


def linear_text(names: Sequence[str], counts: Counts) -> str:
    """Write a sum as `6F + 4B - c`."""
    return _sum(names, counts, _text_factor)


def comparison_text(names: Sequence[str], counts: Counts, relation: str = ">=") -> str:
    """Write that `counts . theta >= 0` with positive terms on both sides, as `2F + c >= 3B`."""
    positive = [max(count, Fraction(0)) for count in counts]
    negative = [max(-count, Fraction(0)) for count in counts]
    return f"{linear_text(names, positive)} {relation} {linear_text(names, negative)}"


def latex_symbol(name: str) -> str:
    """Write a parameter as a symbol, a word and a long index upright."""
    kind, _, index = name.partition("_")
    symbol = kind if len(kind) == 1 else rf"\mathrm{{{kind}}}"
    if not index:
        return symbol
    return f"{symbol}_{index}" if len(index) == 1 else rf"{symbol}_{{\mathrm{{{index}}}}}"


def polynomial_text(symbol: str, coefficients: Counts) -> str:
    """Write a polynomial, its constant given first, as `7/4 M + 12`."""
    powers = ["", symbol, *(f"{symbol}^{k}" for k in range(2, len(coefficients)))]
    constant, *others = coefficients
    text = _sum(powers[:0:-1], others[::-1], _text_factor)
    if not constant:
        return text
    if text == "0":
        return str(constant)
    return f"{text} {'-' if constant < 0 else '+'} {abs(constant)}"


def _sum(symbols: Sequence[str], counts: Counts, factor: Callable[[Fraction], str]) -> str:
    text = ""
    for symbol, count in zip(symbols, counts, strict=True):
        if count:
            plus, minus = (" + ", " - ") if text else ("", "-")  # the first term has no plus
            sign = minus if count < 0 else plus
            text += f"{sign}{'' if abs(count) == 1 else factor(abs(count))}{symbol}"
    return text or "0"


def _is_decimal(size: Fraction) -> bool:
    """Return whether a number reads better as 39.52 than as 988/25."""
    whole = 10**6 % size.denominator == 0
    return size.denominator > (DECIMAL if whole else READABLE)


def _text_factor(size: Fraction) -> str:
    if _is_decimal(size):
        return f"{float(size):g} "
    return str(size) if size.denominator == 1 else f"{size} "


def _latex_factor(size: Fraction) -> str:
    if size.denominator == 1 or _is_decimal(size):
        return f"{float(size):g} "
    return rf"\tfrac{{{size.numerator}}}{{{size.denominator}}} "
