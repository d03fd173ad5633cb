"""Certificates as files: one form for all kinds, how it is written, and how it is read.

What has not the form of its kind is refused; what is claimed is judged elsewhere.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from pipejax.analysis.verify.event_run import ActivationSizes, Seconds
from pipejax.base.checks import number, share
from pipejax.base.display import ResultDict
from pipejax.schedules.cells.ops import TIMED, ScheduleError
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import check_json, from_json, to_json

VERSION = 2
KEYS = ("kind", "version", "table", "costs", "claim", "proof")


class Keys(NamedTuple):
    """What stands in three parts of a certificate, by its kind."""

    costs: tuple[str, ...]
    claim: tuple[str, ...]
    proof: tuple[str, ...]


PRICED = ("links", "seconds", "memory")
QUESTION = ("objective", "limits", "offload")
REACHED = ("makespan", "max_span", "busy", "peak_in_flight", "offloaded", "peak_memory")
KINDS: Mapping[str, Keys] = {
    # one run of the table, and bounds on others
    "run": Keys(
        PRICED,
        (*QUESTION, *REACHED, "lower_bounds"),
        ("ops", "transfers", "held_from", "held"),
    ),
    # the best known answer to a search of the schedule, in whole units of time and memory
    "optimum": Keys(
        PRICED,
        (*QUESTION, "value", "lower_bounds"),
        ("starts", "prover", "seconds", "source", "checksum"),
    ),
    # the makespan as a maximum of linear forms
    "formula": Keys(("links", "parameters", "box"), ("facets", "gap"), ("points", "rays", "cells")),
}
FORMATS_1 = {"pipejax-certificate": "run", "pipejax-formula-certificate": "formula"}
SECTIONS_1 = ("question", "claims")  # of the first version, whose keys are in `KINDS` as they are

FREE = (None, None)  # bounds of a parameter without a range
OUTER = ("parameters", "facets", "exact", "gap")  # what a report says that holds a certificate
SIZES = ("sizes", "weight_share", "checkpoints")
AT_WORK = "at_work"  # beside them, where B, I or W recompute by themselves
# that the checker's run knows
LINK_FIELDS = (
    *("model", "queues", "host_links", "posting", "shared_links", "pair_links", "eager_below"),
)
MESSAGE = ("latency", "transmit")
STEP_END = ("A", "U")
OBJECTIVES = ("makespan", "span")
OF_STAGES = ("A", "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")  # no microbatch
OF_BOUNDS = ("F", "B", "I", "W", "A", "U")  # times that bounds of all orders add up
Row = list[int]


class RunContent(NamedTuple):
    """A certificate of a run, or of the best known answer to a search, that was read.

    Attributes:
      kind: "run" or "optimum".
      table: the schedule.
      links: how messages travel.
      costs: seconds as lists: phase letter, "pair" and the number "pair_factor" (stages),
        "latency" and "transmit" (2, pipes, stages - 1); with a last axis of microbatches where
        they differ by them.
      sizes: what activations take, by stage, or by stage and microbatch.
      objective: what was to be least: "makespan" or "span".
      limits: (workers) memory for activations, or None.
      offload: whether activations may go to the host and back.
      claims: what is claimed, and what proves it.
    """

    kind: str
    table: ScheduleTable
    links: Links
    costs: Seconds
    sizes: ActivationSizes
    objective: str
    limits: Sequence[float] | None
    offload: bool
    claims: Mapping[str, Any]


class FormulaContent(NamedTuple):
    """A certificate of a closed form that was read.

    Attributes:
      table: the schedule.
      links: how messages travel.
      names: of the parameters.
      units: of the parameters: parts of which the counts are whole numbers.
      weights: of each parameter, by phase letter or message part: whole numbers in its units.
      box: range of each parameter that has one, as it is written.
      domain: rows with row . x >= 0 for all x = (parameters in their units.., and 1 with a box
        that fixes none of them).
      facets: counts.
      points: of each facet, where it is the count of a longest path.
      rays: points x of the domain.
      cells: facet and rays of each.
      gap: 1 - form / makespan, at most.
      report: what the file says around the certificate.
    """

    table: ScheduleTable
    links: Links
    names: list[str]
    units: list[int]
    weights: list[Seconds]
    box: Mapping[str, Any]
    domain: list[Row]
    facets: list[Row]
    points: list[Row]
    rays: list[Row]
    cells: list[Row]
    gap: Fraction
    report: Mapping[str, Any]


def new_certificate(
    kind: str,
    table: ScheduleTable,
    links: Links,
    *,
    costs: Mapping[str, Any],
    claim: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a certificate, which JSON can hold."""
    written = json.loads(to_json(table))
    costs = {"links": dataclasses.asdict(links), **costs}
    parts = {"costs": costs, "claim": dict(claim), "proof": dict(proof)}
    return ResultDict({"kind": kind, "version": VERSION, "table": written, **parts})


def read_envelope(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the parts of a certificate of today's form; their content is not looked at."""
    data = _from_version_1(data, name)
    kind = data.get("kind")
    if not (isinstance(kind, str) and kind in KINDS) or repr(data.get("version")) != repr(VERSION):
        kinds = ", ".join(f'"{known}"' for known in KINDS)
        raise ValueError(
            f'{name} is not a certificate: expected "kind" {kinds} and "version" {VERSION}, '
            f"got {kind!r} and {data.get('version')!r}"
        )
    check_keys(data, KEYS, name)
    for part, keys in KINDS[kind]._asdict().items():
        check_keys(data[part], keys, f"{name}: {part}")
    return data


def _from_version_1(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Certificates of the first version in today's form: the next release goes without."""
    kind = FORMATS_1.get(str(data.get("format")))
    if kind is None or repr(data.get("version")) != "1":
        return data
    found = {key: value for key, value in data.items() if key not in ("format", "version")}
    if isinstance(found.get("links"), Mapping):  # the first files lack what was added since
        found["links"] = {"pair_links": [], "eager_below": 0.0, **found["links"]}
    if "costs" in found:
        found["seconds"] = found.pop("costs")
    for section in SECTIONS_1:
        found |= _section(found.pop(section, {}), f"{name}: {section}")
    parts = KINDS[kind]._asdict()
    check_keys(found, ("table", *(key for keys in parts.values() for key in keys)), name)
    nested = {part: {key: found[key] for key in keys} for part, keys in parts.items()}
    return {"kind": kind, "version": VERSION, "table": found["table"], **nested}


def is_formula(data: Any) -> bool:
    """Return whether what a file holds is a closed form or its certificate."""
    inner = data.get("certificate", data) if isinstance(data, Mapping) else data
    if not isinstance(inner, Mapping):
        return False
    return "formula" in (inner.get("kind"), FORMATS_1.get(str(inner.get("format"))))


def read_certificate(
    data: Mapping[str, Any], name: str = "certificate"
) -> RunContent | FormulaContent:
    """Read a certificate, or a report of `pipejax formula --json` that holds one.

    Raises:
      ValueError: if a key is missing or unknown, or what it holds has the wrong form.
      ScheduleError: if the table cannot run.
    """
    if is_formula(data):
        return read_formula_certificate(data, name)
    return read_run(data, name)


def read_run(data: Mapping[str, Any], name: str = "certificate") -> RunContent:
    """Read a certificate of a run or of an optimum; errors are those of `read_certificate`."""
    parts = read_envelope(data, name)
    costs, claims = parts["costs"], {**parts["claim"], **parts["proof"]}
    links = read_links(costs["links"], f"{name}: links")
    has_work = isinstance(costs["memory"], dict) and AT_WORK in costs["memory"]
    keys = (*SIZES, AT_WORK) if has_work else SIZES
    memory = check_keys(costs["memory"], keys, f"{name}: memory")
    question = {key: claims.pop(key) for key in QUESTION}
    _check_word(question["objective"], OBJECTIVES, f"{name}: objective")
    if not isinstance(question["offload"], bool):
        raise ValueError(f"{name}: offload must be true or false, got {question['offload']!r}")
    bounds = claims["lower_bounds"]
    for given in bounds if isinstance(bounds, list) else [None]:
        bound = check_keys(given, ("by", "value"), f"{name}: a lower bound")
        number(bound["value"], f"{name}: a lower bound")
        if not isinstance(bound["by"], str):
            raise ValueError(f"{name}: what a bound rests on must be text, got {bound['by']!r}")
    table = read_table_of(parts["table"], f"{name}: table")
    _check_links_of(links, table, f"{name}: links")
    time = _whole_number if parts["kind"] == "optimum" else number
    more = OF_BOUNDS if bounds and table.grammar.is_usual else ()
    _check_costs(costs["seconds"], table, more, f"{name}: seconds", time)
    for key in SIZES:
        shape = _of_microbatches(memory[key], (table.num_stages,), table)
        size = share if key == "weight_share" and not has_work else number
        _check_numbers(memory[key], shape, f"{name}: {key}", size)
    if has_work:
        shape = _of_microbatches(memory[AT_WORK], (3, table.num_stages), table)
        _check_numbers(memory[AT_WORK], shape, f"{name}: {AT_WORK}")
    if question["limits"] is not None:
        _check_numbers(question["limits"], (table.num_workers,), f"{name}: limits")
    sizes = ActivationSizes(*(memory[key] for key in keys))
    return RunContent(
        parts["kind"], table, links, costs["seconds"], sizes, **question, claims=claims
    )


def read_formula_certificate(data: Mapping[str, Any], name: str) -> FormulaContent:
    """Read a certificate of a closed form; errors are those of `read_certificate`."""
    report = data if "certificate" in data else {}
    parts = read_envelope(data.get("certificate", data), name)
    costs, claim, proof = parts["costs"], parts["claim"], parts["proof"]
    table = read_table_of(parts["table"], f"{name}: table")
    links = read_links(costs["links"], f"{name}: links")
    _check_links_of(links, table, f"{name}: links")
    if links.eager_below:  # which messages are buffered would depend on the parameters
        raise ValueError(
            f"{name}: eager_below must be 0 in a closed form, got {links.eager_below!r}"
        )
    parameters, box = costs["parameters"], costs["box"]
    if not isinstance(parameters, list) or not parameters:
        raise ValueError(f"{name}: parameters must be a list, got {parameters!r}")
    for each in parameters:
        check_keys(each, ("name", "unit", "weights"), f"{name}: a parameter")
        _check_whole(each["unit"], (), f"{name}: unit", least=1)
    names, units = ([each[key] for each in parameters] for key in ("name", "unit"))
    if not all(isinstance(each, str) for each in names) or len(set(names)) < len(names):
        raise ValueError(f"{name}: parameters must have names of their own, got {names!r}")
    domain = _domain(names, units, box, f"{name}: box")
    dims, count = len(domain[0]), _length(claim["facets"])
    _check_whole(claim["facets"], (count, len(names)), f"{name}: facets")
    _check_whole(proof["points"], (count, len(names)), f"{name}: points")
    _check_whole(proof["rays"], (_length(proof["rays"]), dims), f"{name}: rays")
    _check_whole(proof["cells"], (_length(proof["cells"]), dims + 1), f"{name}: cells")
    _check_whole(claim["gap"], (2,), f"{name}: gap")
    if claim["gap"][0] >= claim["gap"][1]:
        raise ValueError(f"{name}: gap must be a fraction below 1, got {claim['gap']!r}")
    weights = _weights(parameters, table, name)
    gap, facets = Fraction(*claim["gap"]), claim["facets"]
    return FormulaContent(
        table, links, names, units, weights, box, domain, facets, **proof, gap=gap, report=report
    )


def read_table_of(data: Any, where: str) -> ScheduleTable:
    """Read the table of a certificate; a `ScheduleError` says that it cannot run."""
    try:
        check_json(_section(data, where))
    except ScheduleError as error:  # no table at all: nothing that could be wrong of it
        raise ValueError(f"{where}: {error.reason}") from None
    table, pipes = from_json(data), data["pipe_of_microbatch"]
    if len(pipes) > table.num_microbatches:  # a table does without those of which it has no op
        raise ScheduleError(
            f"pipe_of_microbatch names {len(pipes)} microbatches, the rows hold "
            f"{table.num_microbatches}"
        )
    return table


def checksum_of(parts: Mapping[str, Any]) -> str:
    """SHA-256 of a certificate without its own checksum: it tells a file that was damaged."""
    proof = {key: value for key, value in parts["proof"].items() if key != "checksum"}
    text = json.dumps({**parts, "proof": proof}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _section(data: Any, where: str) -> Mapping[str, Any]:
    """Return what is an object, with whatever keys."""
    return check_keys(data, {*getattr(data, "keys", tuple)()}, where)


def check_keys(section: Any, keys: Collection[str], where: str) -> Mapping[str, Any]:
    """Return a section, which has exactly these keys."""
    if not isinstance(section, Mapping) or set(section) != set(keys):
        got = sorted(section) if isinstance(section, Mapping) else section
        raise ValueError(f"{where} must have the keys {', '.join(keys)}, got {got!r}")
    return section


def _check_numbers(
    value: Any,
    shape: tuple[int, ...],
    where: str,
    check: Callable[[Any, str], object] = number,
) -> None:
    """A value is a finite number of at least 0, or a list of lists of them of a shape."""
    if not shape:
        check(value, where)
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ValueError(f"{where} must be {shape[0]} numbers or lists, got {value!r}")
    for entry in value:
        _check_numbers(entry, shape[1:], where, check)


def _check_whole(value: Any, shape: tuple[int, ...], where: str, least: int = 0) -> None:
    """As `_check_numbers`, of whole numbers."""
    _check_numbers(value, shape, where, functools.partial(_whole_number, least=least))


def _whole_number(value: Any, where: str, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where} must be whole numbers of at least {least}, got {value!r}")


def _length(value: Any) -> int:
    """How many entries there are in a list; no other value has one."""
    return len(value) if isinstance(value, list) else 0


def _check_word(value: Any, known: Collection[str], where: str) -> None:
    """A word is one of those that are known, letter for letter."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{where} must be one of {', '.join(known)}, got {value!r}")


def _check_costs(
    costs: Any,
    table: ScheduleTable,
    more: Collection[str],
    where: str,
    check: Callable[[Any, str], object],
) -> None:
    """Every time has its shape; there is one of all that the table holds and that bounds add up."""
    shapes = {**_shapes(table), "pair_factor": (table.num_stages,)}
    given = {key for key in shapes if isinstance(costs, Mapping) and key in costs}
    cells = [cell for row in table.rows() for cell in row]
    priced = [cell for cell in cells if len(cell) == 1 or "pair" not in given]
    needs = {op.phase.name for cell in priced for op in cell if op.phase.kind.time}
    needs |= {*STEP_END, *more, *MESSAGE}
    if given >= {"pair", "pair_factor"}:
        raise ValueError(f"{where}: pair and pair_factor both say what a fused pair takes")
    for key, value in check_keys(costs, given | needs, where).items():
        shape = shapes[key]
        if key not in _of_stages(table):
            shape = _of_microbatches(value, shape, table)
        _check_numbers(value, shape, f"{where}: {key}", check)


def _shapes(table: ScheduleTable) -> dict[str, tuple[int, ...]]:
    """Shapes of times without an axis of microbatches, by letters, "pair" and message part."""
    stages, workers = (table.num_stages,), (table.num_workers,)
    found: dict[str, tuple[int, ...]] = dict.fromkeys((phase.name for phase in TIMED), stages)
    for letters, kind in table.grammar.kinds.items():
        found[letters] = workers if kind.of == "worker" else stages
    found["pair"] = stages
    boundaries = len(table.grammar.graph) or table.num_stages - 1
    return found | dict.fromkeys(MESSAGE, (2, table.num_pipes, boundaries))


def _of_stages(table: ScheduleTable) -> set[str]:
    """Letters of what is of a stage as a whole, and of no microbatch."""
    return {*OF_STAGES, *(k for k, kind in table.grammar.kinds.items() if kind.of == "stage")}


def _of_microbatches(value: Any, shape: tuple[int, ...], table: ScheduleTable) -> tuple[int, ...]:
    """Return the shape of numbers, with an axis of microbatches if they have one more."""
    return (*shape, table.num_microbatches) if depth(value) > len(shape) else shape


def depth(value: Any) -> int:
    """How many lists stand in each other, along the first entries."""
    return 1 + depth(value[0]) if isinstance(value, list) and value else 0


def read_links(record: Any, where: str) -> Links:
    """Read the links; what the checker's run does not know must be as it is by default."""
    fields = [field.name for field in dataclasses.fields(Links)]
    links = Links(**check_keys(record, fields, where))
    if not isinstance(record["pair_links"], list | tuple):
        raise ValueError(f"{where}: pair_links must be a list, got {record['pair_links']!r}")
    pairs = [*map(list, record["pair_links"])]  # in any order; all else is as it is written
    given, read = ({**own, "pair_links": None} for own in (record, dataclasses.asdict(links)))
    listed = [[list(pair), model] for pair, model in links.named_pairs]
    if _plain(given) != _plain(read) or not all(each in listed for each in _plain(pairs)):
        raise ValueError(f"{where} must be as {_plain(dataclasses.asdict(links))}, got {record!r}")
    known = {name: getattr(links, name) for name in LINK_FIELDS}
    if links != Links(**known):
        raise ValueError(f"{where}: the checker knows {', '.join(LINK_FIELDS)} alone, got {links}")
    return links


def _plain(value: Any) -> Any:
    """What JSON makes of a value."""
    return json.loads(json.dumps(value))


def _check_links_of(links: Links, table: ScheduleTable, where: str) -> None:
    """The links name workers of the table, which says where transfers are posted if that counts."""
    pairs = [pair for group in links.shared_groups for pair in group]
    pairs += [pair for pair, _ in links.named_pairs]
    for worker in (w for group in (*links.host_links, *pairs) for w in group):
        if worker >= table.num_workers:
            last = table.num_workers - 1
            raise ValueError(f"{where}: workers are 0 to {last}, got {worker}")
    homes = [table.placement[pipe].tolist() for pipe in {*table.pipe_of_microbatch.tolist()}]
    sends = any(one != other for row in homes for one, other in itertools.pairwise(row))
    if links.posting == "program" and sends and not table.has_communication:
        raise ValueError(f"{where}: posting by program needs a table with SEND and RECV cells")


def _weights(parameters: list[Any], table: ScheduleTable, name: str) -> list[Seconds]:
    """Weights of each parameter, with those that are 0 filled in."""
    shapes = _shapes(table)
    given = [each["weights"] for each in parameters]
    for weights in given:
        if not isinstance(weights, Mapping) or not set(weights) <= set(shapes):
            known = ", ".join(shapes)
            raise ValueError(f"{name}: weights may have the keys {known}, got {weights!r}")
    if not any("pair" in weights for weights in given):  # then a pair lasts as long as both
        del shapes["pair"]
    for key in shapes.keys() - _of_stages(table):
        if any(depth(weights.get(key)) > len(shapes[key]) for weights in given):
            shapes[key] = *shapes[key], table.num_microbatches
    for each in parameters:
        for key, value in each["weights"].items():
            _check_whole(value, shapes[key], f"{name}: {each['name']}: {key}")
    return [{k: weights.get(k, _zeros(shape)) for k, shape in shapes.items()} for weights in given]


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _domain(names: Collection[str], units: list[int], box: Any, where: str) -> list[Row]:
    """Rows of what the parameters may be: at least 0, and within the ranges that are given."""
    if not isinstance(box, Mapping) or not set(box) <= set(names):
        raise ValueError(f"{where} must give ranges of {', '.join(names)}, got {box!r}")
    for name, bounds in box.items():
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise ValueError(f"{where}: {name} must be two numbers, got {bounds!r}")
        for bound in bounds:
            if bound is not None:  # no bound on this side
                number(bound, f"{where}: {name}")
    unit = fixed_in(names, box)
    dims = len(units) + (bool(box) and unit is None)
    rows = [[int(row == column) for column in range(dims)] for row in range(dims)]
    for k, name in enumerate(names):
        for bound, sign in zip(box.get(name, ()), (1, -1), strict=False):
            if bound is not None and name != unit:
                part, size = Fraction(str(bound)), Fraction(1)  # as written: 0.1 is a tenth
                row = [0] * dims
                if unit is not None:
                    at = [*names].index(unit)
                    size = units[at] / Fraction(str(box[unit][0]))
                row[k] = sign * units[k] * part.denominator * size.denominator
                row[-1 if unit is None else at] = -sign * part.numerator * size.numerator
                rows.append(row)
    return rows


def fixed_in(names: Iterable[str], box: Mapping[str, Any]) -> str | None:
    """Return the first parameter that a box fixes, if any: it says how large all others are."""
    found = (name for name in names if name in box and box[name][0] == box[name][1])
    return next((name for name in found if box[name][0]), None)


def box_text(names: Iterable[str], box: Mapping[str, Any]) -> str:
    """Say where parameters lie, as `F = 1, B from 1 to 3`; nothing where they are free."""
    said = []
    for name in names:
        low, high = (
            (0, math.inf)[k] if b is None else b for k, b in enumerate(box.get(name, FREE))
        )
        if low == high:
            said.append(f"{name} = {low:g}")
        elif high < math.inf:
            said.append(f"{name} from {low:g} to {high:g}")
        elif low > 0:
            said.append(f"{name} at least {low:g}")
    return ", ".join(said)
