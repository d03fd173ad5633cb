"""Parameters of closed forms, such as F: which costs each sets; and closed forms as text."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.formula.facets import INT64_LIMIT, Whole
from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.checks import ArgumentError, check_types, unknown, wrong
from pipejax.base.display import short_repr
from pipejax.costs.costs import FIELDS, PHASE_FIELDS, Costs, unchecked_costs
from pipejax.engine.lowering.program import LINK_COSTS, Program
from pipejax.engine.pricing import check_known, cost_vector, program_for
from pipejax.schedules.cells.ops import BACKWARDS, MICROBATCH, STAGE, WORKER, Phase

MAX_DENOMINATOR = 10**4  # largest denominator of a weight such as 1/3
DIRECTIONS = {"": (0, 1), "_F": (0,), "_B": (1,)}  # {suffix of a parameter: message directions}
MESSAGES = {"c": "transmit", "transmit": "transmit", "latency": "latency"}
PLACES = ("first", "mid", "last")
MAX_SHOWN_DENOMINATOR = 1000  # fractions with a larger denominator are written as decimals
MAX_SHOWN_IF_DECIMAL = 8  # this limit for fractions that six decimals write exactly

Weights = Mapping[str, Costs]  # {parameter: costs if it is 1 and all others are 0}
Counts = Sequence[Fraction]


@short_repr
class LinearCosts(NamedTuple):
    """A program's costs as linear functions of parameters, with integer weights."""

    program: Program  # with costs by microbatch, if costs differ by microbatch
    names: tuple[str, ...]  # names of the parameters
    # (costs, parameters) factor of a parameter in each cost of `CostLayout`, times `units`
    weights: Whole
    units: Whole  # (parameters) common denominator of the factors of each parameter
    costs: tuple[Costs, ...]  # costs if one parameter is 1 and all others are 0


def default_parameters(program: Program) -> tuple[str, ...]:
    """Name parameters that together set all costs of a program: phases, then c_F and c_B."""
    layout = program.layout
    phases = {*layout.phases, *layout.paired_phases}
    # B costs as much as I and W together, and L as much as O, so B and L need no parameter
    if phases & {Phase.I, Phase.W}:
        phases = (phases - {Phase.B}) | {Phase.I, Phase.W}
    phases -= {Phase.L}
    selected = {p for p in phases if p.kind.scope == MICROBATCH or p in layout.custom_phases}
    name_by_field: dict[str, str] = {}
    for phase in layout.timed:  # if phases share a cost, the first phase names it
        if phase in selected:
            name_by_field.setdefault(phase.kind.time, phase.name)
    messages = ("c_F", "c_B") if len(program.messages.producer) else ()
    return (*name_by_field.values(), *messages)


def named_parameters(
    program: Program, names: Sequence[str], stage_shares: Float[NumpyArray, " stages"] | None = None
) -> dict[str, Costs]:
    """Return for each parameter the costs if it is 1 and all other parameters are 0.

    `F` is the time of F on every stage, and `F_0` the time on stage 0. `F_first`, `F_mid` and
    `F_last` are times on the first stage, on all stages between, and on the last stage. `c_F` is
    the transmit time of an activation, `c_B` of a gradient, and `c` of both. `latency_F`,
    `latency_B` and `latency` are their latencies. Phases that a table declares have their letters
    as names; if the scope of a phase is the worker, the number is that of a worker. With
    `stage_shares` a phase is the time of one microbatch on a worker, and each stage has its share.

    Raises:
      ValueError: if a name is unknown, or two names set the same time.
    """
    fields = {phase.kind.time: phase for phase in program.layout.timed}
    worker_fields = {field for field, phase in fields.items() if phase.kind.scope == WORKER}
    shares: dict[str, dict[str, NumpyArray]] = {}
    totals: dict[str, NumpyArray] = {}
    for name in names:
        field, mask = _field_and_mask(program, name)
        if np.any(totals.get(field, 0) * mask) or name in shares:
            raise ValueError(f"{name} sets a time that another of {', '.join(names)} sets, too")
        totals[field] = totals.get(field, 0) + mask
        shares[name] = {field: mask}
    for field, total in totals.items():
        if field not in MESSAGES.values() and not np.all(total):
            index = int(np.flatnonzero(total == 0)[0])
            scope = "worker" if field in worker_fields else "stage"
            raise ValueError(f"{', '.join(names)} do not give {field} of {scope} {index}")
    shares = {name: _add_derived_times(share, totals) for name, share in shares.items()}
    if stage_shares is not None:
        for share in shares.values():
            for field in share.keys() & fields.keys() - worker_fields:
                share[field] = share[field] * stage_shares
    return {name: unchecked_costs(share) for name, share in shares.items()}


def _add_derived_times(
    share: dict[str, NumpyArray], times: Mapping[str, NumpyArray]
) -> dict[str, NumpyArray]:
    """Add the masks of costs that follow from a parameter, such as L from O."""
    # B = I + W, or I = W = B / 2, and L = O, unless a parameter sets the cost itself. `share` has
    # the field of one parameter, `times` has the fields of all. If no parameter sets I or W,
    # {"backward": 1} becomes {"backward": 1, "input_grad": 0.5, "weight_grad": 0.5}.
    b, i, w = (PHASE_FIELDS[phase.name] for phase in BACKWARDS)
    factors = {}  # {derived field: {field that it follows from: factor}}
    if b in times and i not in times and w not in times:
        factors = {i: {b: 0.5}, w: {b: 0.5}}
    elif b not in times and i in times and w in times:
        factors = {b: {i: 1.0, w: 1.0}}
    if "load" not in times:
        factors["load"] = {"offload": 1.0}
    ((field, mask),) = share.items()
    return share | {name: mask * by[field] for name, by in factors.items() if field in by}


def _field_and_mask(program: Program, name: str) -> tuple[str, NumpyArray]:
    """Return the cost field and the mask of a parameter: "forward", [1 0 0] for "F_first"."""
    # Other names are F, F_mid, F_last, F_3, c, c_F and c_B. The mask is 1 at the stages (or
    # workers) that the parameter sets; for messages it has shape (2, pipes, boundaries).
    layout = program.layout
    phases = {phase.name: phase for phase in layout.timed}
    # A name is PREFIX or PREFIX_SUFFIX. A prefix may contain "_", so the longest prefix counts.
    prefixes = [k for k in (*phases, *MESSAGES) if name == k or name.startswith(f"{k}_")]
    prefix = max(prefixes, key=len, default="")
    suffix = name[len(prefix) :]  # with its "_"
    if prefix in MESSAGES and suffix in DIRECTIONS:
        link_mask = np.zeros(layout.link_shape[:3])
        link_mask[list(DIRECTIONS[suffix])] = 1.0
        return MESSAGES[prefix], link_mask
    stage = suffix.removeprefix("_")
    stages = np.arange(layout.num_places(phases[prefix]) if prefix in phases else 1)
    last = len(stages) - 1
    masks = {"": stages >= 0, "first": stages == 0, "last": stages == last}
    masks["mid"] = ~(masks["first"] | masks["last"])
    if re.fullmatch("[0-9]+", stage) and int(stage) <= last:
        masks[stage] = stages == int(stage)
    if prefix not in phases or suffix == "_" or stage not in masks:
        suffixes = (
            f", each also with _first, _mid, _last or _0 to _{layout.num_stages - 1}; those of "
            "messages with _F, _B (A is the all-reduce of gradients, U the update, O and L offload "
            "and load)"
        )
        raise unknown("parameter", name, [*phases, *MESSAGES], suffixes)
    return phases[prefix].kind.time, masks[stage].astype(float)


def fixed_in(names: Sequence[str], box: Mapping[str, Any]) -> str | None:
    """Return the first parameter that a box fixes at a value above 0, or None."""
    fixed = (name for name in names if name in box and box[name][0] == box[name][1])
    return next((name for name in fixed if box[name][0]), None)


def linear_costs(program: Program, parameters: Sequence[str] | Weights | None) -> LinearCosts:
    """Express a program's costs as sums of parameters times weights."""
    parameters = default_parameters(program) if parameters is None else parameters
    if isinstance(parameters, str):
        raise wrong("parameters", f"must be a sequence of names, got {parameters!r}")
    check_types(parameters=(parameters, Sequence, Mapping))
    if not isinstance(parameters, Mapping):
        parameters = named_parameters(program, tuple(parameters))
    for name, costs in parameters.items():
        check_types(**{f"parameters[{name!r}]": (costs, Costs)})
        costs.check_values()
        if costs.pair_factor is not None:
            raise ValueError(
                f"parameters[{name!r}]: a closed form is a sum of costs, and has no pair_factor: "
                "give pair"
            )
    if not parameters:
        raise wrong("parameters", "must name at least one, got none")
    all_costs = [vars(costs) for costs in parameters.values()]
    all_fields = dict.fromkeys((*FIELDS, *(field for costs in all_costs for field in costs)))
    fields = [f for f in all_fields if any(costs.get(f) is not None for costs in all_costs)]
    check_known(program, unchecked_costs(dict.fromkeys(fields, 0.0)))
    if program.links.eager_below:
        raise ArgumentError(
            "eager_below",
            program.links.eager_below,
            "a closed form knows no eager_below, because it has no message times. Name pairs of "
            "workers whose messages are buffered, as pair_links={(0, 1): 'queued'}",
        )
    for costs in parameters.values():
        program = program_for(program, costs)
    is_read = _read_costs(program)
    columns, units, directions = [], [], []
    for costs in parameters.values():
        values: dict[str, Any] = dict.fromkeys(fields, 0.0)  # costs of other parameters are 0
        values |= {field: value for field, value in vars(costs).items() if value is not None}
        directions.append(unchecked_costs(values))
        vector = np.asarray(cost_vector(program, directions[-1]), np.float64) * is_read
        unit, column = _to_whole(vector)
        units.append(unit)
        columns.append(column)
    weights = np.stack(columns, axis=1)
    return LinearCosts(program, tuple(parameters), weights, np.array(units, object), (*directions,))


def _read_costs(program: Program) -> Bool[NumpyArray, " costs"]:
    """Mark the entries of the cost vector that a program reads, also within sums."""
    # The vector is [phases.., pairs.., latencies.., transmit times.., messages..]. A node that
    # reads message 3 also reads latency 3 and transmit time 3. A node that reads a pair also reads
    # its F and B.
    layout = program.layout
    is_read = np.zeros(layout.size, bool)
    is_read[program.duration_index] = is_read[program.lag_index] = True
    latency, transmit, message = is_read[layout.first_link :].reshape(len(LINK_COSTS), -1)
    latency |= message
    transmit |= message
    pairs = is_read[layout.first_pair : layout.first_link]
    is_read[np.asarray(program.pair_index)[pairs]] = True
    return is_read


def _to_whole(weights: NumpyArray) -> tuple[int, Whole]:
    """Return the least factor that makes weights integers, and the integers."""
    # [0.5, 1.0] gives 2, [1, 2]
    distinct, indices = np.unique(weights, return_inverse=True)
    fractions = [_fraction(weight) for weight in distinct.tolist()]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * unit) for fraction in fractions]
    return unit, np.array(numbers, np.int64 if max(numbers) < INT64_LIMIT else object)[indices]


def _fraction(weight: float) -> Fraction:
    """Convert a float to a fraction of small integers if such a fraction rounds to it."""
    simple = Fraction(weight).limit_denominator(MAX_DENOMINATOR)
    return simple if float(simple) == weight else Fraction(weight)


def weights_by_key(program: Program, weights: Costs, denominator: int) -> dict[str, Any]:
    """Return {phase or message cost: weights of a parameter times `denominator`, as integers}."""
    # `weights` holds the parameter's coefficient in each cost. The integers are nested lists
    # (stages), (workers) for phases of workers, or (2, pipes, boundaries) for messages. If costs
    # differ by microbatch, the lists have a last axis of microbatches. Phases of whole stages such
    # as UNSHARD belong to no microbatch and lack this axis.
    layout = program.layout
    microbatch_axis = (layout.num_microbatches,) if layout.per_microbatch else ()
    codes = {*np.unique(program.phase).tolist(), *map(int, layout.paired_phases)}
    phases = {phase.name: phase for phase in layout.timed if int(phase) in codes}
    shapes: dict[str, tuple[int, ...]] = {
        name: (layout.num_places(phase),) for name, phase in phases.items()
    }
    shapes |= {"pair": (layout.num_stages,)}
    shapes |= dict.fromkeys(("latency", "transmit"), layout.link_shape[:3])
    whole_weights = {}
    for key, shape in shapes.items():
        value = weights.time(phases[key]) if key in phases else getattr(weights, key)
        if value is not None and np.any(np.asarray(value)):
            array = np.asarray(value, np.float64)
            is_by_stage = key in phases and phases[key].kind.scope == STAGE
            if microbatch_axis and not is_by_stage:
                shape = (*shape, *microbatch_axis)
                array = array if array.ndim == len(shape) else array[..., None]
            to_whole = np.frompyfunc(lambda weight: int(_fraction(weight) * denominator), 1, 1)
            whole_weights[key] = to_whole(np.broadcast_to(array, shape)).tolist()
    return whole_weights


def as_text(names: Sequence[str], facets: Sequence[Counts]) -> str:
    """Write a closed form as `max(6F + 4B, 4F + 6B)`, or as a sum if it has one facet."""
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
    """Write `counts . theta >= 0` with positive terms on both sides, as `2F + c >= 3B`."""
    positive = [max(count, Fraction(0)) for count in counts]
    negative = [max(-count, Fraction(0)) for count in counts]
    return f"{linear_text(names, positive)} {relation} {linear_text(names, negative)}"


def latex_symbol(name: str) -> str:
    r"""Write a parameter as LaTeX, `c_F` as `c_F` and `F_mid` as `F_{\mathrm{mid}}`."""
    kind, _, index = name.partition("_")
    symbol = kind if len(kind) == 1 else rf"\mathrm{{{kind}}}"
    if not index:
        return symbol
    return f"{symbol}_{index}" if len(index) == 1 else rf"{symbol}_{{\mathrm{{{index}}}}}"


def polynomial_text(symbol: str, coefficients: Counts) -> str:
    """Write a polynomial as `7/4 M + 12`; the first coefficient is the constant."""
    powers = ["", symbol, *(f"{symbol}^{k}" for k in range(2, len(coefficients)))]
    constant, *higher = coefficients  # written from the highest power down
    text = _sum(powers[:0:-1], higher[::-1], _text_factor)  # M^2, M
    if not constant:
        return text
    if text == "0":
        return str(constant)
    return f"{text} {'-' if constant < 0 else '+'} {abs(constant)}"


def _sum(symbols: Sequence[str], counts: Counts, factor: Callable[[Fraction], str]) -> str:
    """Write counts times symbols as `6F + 4B - c`; `factor` formats a count other than 1."""
    text = ""
    for symbol, count in zip(symbols, counts, strict=True):
        if count:
            plus, minus = (" + ", " - ") if text else ("", "-")  # the first term has no plus
            sign = minus if count < 0 else plus
            text += f"{sign}{'' if abs(count) == 1 else factor(abs(count))}{symbol}"
    return text or "0"


def _is_decimal(size: Fraction) -> bool:
    """Return whether a number is written as a decimal, 39.52, rather than as 988/25."""
    whole = 10**6 % size.denominator == 0
    return size.denominator > (MAX_SHOWN_IF_DECIMAL if whole else MAX_SHOWN_DENOMINATOR)


def _text_factor(size: Fraction) -> str:
    if _is_decimal(size):
        return f"{float(size):g} "
    return str(size) if size.denominator == 1 else f"{size} "


def _latex_factor(size: Fraction) -> str:
    if size.denominator == 1 or _is_decimal(size):
        return f"{float(size):g} "
    return rf"\tfrac{{{size.numerator}}}{{{size.denominator}}} "
