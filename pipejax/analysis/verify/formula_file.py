"""Certificates of closed forms as files: what they hold, and what is wrong with them."""

from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from pipejax.analysis.verify.certificate_file import (
    OF_STAGES,
    check_keys,
    depth,
    read_links,
    read_table_of,
)
from pipejax.analysis.verify.event_run import Seconds
from pipejax.base.checks import number
from pipejax.schedules.cells.ops import TIMED
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

FORMAT, VERSION = "pipejax-formula-certificate", 1
PARTS = ("table", "links", "parameters", "box", "facets", "points", "rays", "cells", "gap")
MESSAGE = ("latency", "transmit")
OUTER = ("parameters", "facets", "exact", "gap")  # what a report says that holds a certificate

Row = list[int]


class FormulaContent(NamedTuple):
    """A certificate of a closed form that was read.

    Attributes:
      table: the schedule.
      links: how messages travel.
      names: of the parameters.
      units: of the parameters: parts of which the counts are whole numbers.
      weights: of each parameter, by phase letter or message part: whole numbers in its units.
      domain: rows with row . x >= 0 for all x = (parameters in their units.., and 1 with a box).
      facets: counts.
      points: of each facet, where it is the count of a longest path.
      rays: points x of the domain.
      cells: facet and rays of each.
      gap: by how much of the form the makespan may be longer.
      report: what the file says around the certificate.
    """

    table: ScheduleTable
    links: Links
    names: list[str]
    units: list[int]
    weights: list[Seconds]
    domain: list[Row]
    facets: list[Row]
    points: list[Row]
    rays: list[Row]
    cells: list[Row]
    gap: Fraction
    report: Mapping[str, Any]


def is_formula(data: Any) -> bool:
    """Return whether what a file holds is a closed form or its certificate."""
    if not isinstance(data, Mapping):
        return False
    inner = data.get("certificate", data)
    return isinstance(inner, Mapping) and inner.get("format") == FORMAT


def read_formula_certificate(data: Mapping[str, Any], name: str) -> FormulaContent:
    """Read a certificate, or a report of `pipejax formula --json` that holds one.

    Raises:
      ValueError: if a key is missing or unknown, or what it holds has the wrong form.
      ScheduleError: if the table cannot run.
    """
    report = data if "certificate" in data else {}
    data = data.get("certificate", data)
    if repr(data.get("version")) != repr(VERSION):
        raise ValueError(f"{name}: version must be {VERSION}, got {data.get('version')!r}")
    check_keys(data, ("format", "version", *PARTS), name)
    table = read_table_of(data["table"], f"{name}: table")
    links = read_links(data["links"], f"{name}: links")
    parameters = data["parameters"]
    if not isinstance(parameters, list) or not parameters:
        raise ValueError(f"{name}: parameters must be a list, got {parameters!r}")
    for each in parameters:
        check_keys(each, ("name", "unit", "weights"), f"{name}: a parameter")
        _check_whole(each["unit"], (), f"{name}: unit", least=1)
    names, units = ([each[key] for each in parameters] for key in ("name", "unit"))
    size, domain = len(names), _domain(names, units, data["box"], f"{name}: box")
    dims, count = len(domain[0]), len(data["facets"])
    _check_whole(data["facets"], (count, size), f"{name}: facets")
    _check_whole(data["points"], (count, size), f"{name}: points")
    _check_whole(data["rays"], (len(data["rays"]), dims), f"{name}: rays")
    _check_whole(data["cells"], (len(data["cells"]), dims + 1), f"{name}: cells")
    _check_whole(data["gap"], (2,), f"{name}: gap")
    if data["gap"][1] == 0:
        raise ValueError(f"{name}: gap must be a fraction, got {data['gap']!r}")
    return FormulaContent(
        table,
        links,
        names,
        units,
        _weights(parameters, table, name),
        domain,
        facets=data["facets"],
        points=data["points"],
        rays=data["rays"],
        cells=data["cells"],
        gap=Fraction(*data["gap"]),
        report=report,
    )


def _weights(parameters: list[Any], table: ScheduleTable, name: str) -> list[Seconds]:
    """Weights of each parameter, with those that are 0 filled in."""
    stages, pipes = table.num_stages, table.num_pipes
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        [*(phase.name for phase in TIMED), "pair"], (stages,)
    )
    shapes |= dict.fromkeys(MESSAGE, (2, pipes, stages - 1))
    given = [each["weights"] for each in parameters]
    for weights in given:
        if not isinstance(weights, Mapping) or not set(weights) <= set(shapes):
            known = ", ".join(shapes)
            raise ValueError(f"{name}: weights may have the keys {known}, got {weights!r}")
    if not any("pair" in weights for weights in given):  # then a pair lasts as long as both
        del shapes["pair"]
    for key in shapes.keys() - OF_STAGES:
        if any(depth(weights.get(key)) > len(shapes[key]) for weights in given):
            shapes[key] = *shapes[key], table.num_microbatches
    for each in parameters:
        for key, value in each["weights"].items():
            _check_whole(value, shapes[key], f"{name}: {each['name']}: {key}")
    return [{k: weights.get(k, _zeros(shape)) for k, shape in shapes.items()} for weights in given]


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


def _check_whole(value: Any, shape: tuple[int, ...], where: str, least: int = 0) -> None:
    """A value is a whole number of at least 0, or a list of lists of them of a shape."""
    if not shape:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{where} must be whole numbers of at least {least}, got {value!r}")
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ValueError(f"{where} must be {shape[0]} numbers or lists, got {value!r}")
    for entry in value:
        _check_whole(entry, shape[1:], where, least)


def _domain(names: Collection[str], units: list[int], box: Any, where: str) -> list[Row]:
    """Rows of what the parameters may be: at least 0, and within the ranges that are given."""
    if not isinstance(box, Mapping) or not set(box) <= set(names):
        raise ValueError(f"{where} must give ranges of {', '.join(names)}, got {box!r}")
    dims = len(units) + bool(box)
    rows = [[int(row == column) for column in range(dims)] for row in range(dims)]
    for name, bounds in box.items():
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise ValueError(f"{where}: {name} must be two numbers, got {bounds!r}")
        for bound, sign in zip(bounds, (1, -1), strict=True):
            if bound is None:  # no bound on this side
                continue
            part = Fraction(str(number(bound, f"{where}: {name}")))  # as written: 0.1 is a tenth
            row = [0] * dims
            row[[*names].index(name)] = sign * units[[*names].index(name)] * part.denominator
            row[-1] = -sign * part.numerator
            rows.append(row)
    return rows
