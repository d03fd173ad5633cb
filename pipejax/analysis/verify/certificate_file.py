"""What a certificate holds, and reading one: what has not its form is refused."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pipejax.analysis.verify.event_run import Seconds
from pipejax.analysis.verify.memory import ActivationSizes
from pipejax.base.checks import number, one_of
from pipejax.schedules.cells.ops import TIMED, ScheduleError
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import check_json, from_json

FORMAT = "pipejax-certificate"
VERSION = 1
PARTS = ("table", "links", "costs", "memory", "question", "claims")
SIZES = ("sizes", "weight_share", "checkpoints")
QUESTION = ("objective", "limits", "offload")
CLAIMS = (
    *("makespan", "max_span", "busy", "peak_in_flight", "offloaded", "ops", "transfers"),
    *("peak_memory", "held_from", "held", "lower_bounds"),
)
LINK_FIELDS = (
    "model",
    "queues",
    "host_links",
    "posting",
    "shared_links",
    "pair_links",
    "eager_below",
)  # that the checker's run knows
MESSAGE = ("latency", "transmit")
OBJECTIVES = ("makespan", "span")
OF_STAGES = ("A", "UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")  # no microbatch
OF_BOUNDS = ("F", "B", "I", "W", "A", "U")  # times that bounds of all orders add up


class CertificateContent(NamedTuple):
    """A certificate that was read.

    Attributes:
      table: the schedule.
      links: how messages travel.
      costs: seconds as lists: phase letter, "pair" and the number "pair_factor" (stages),
        "latency" and "transmit" (2, pipes, stages - 1); with a last axis of microbatches where
        they differ by them.
      sizes: what activations take, by stage, or by stage and microbatch.
      objective: what was to be least: "makespan" or "span".
      limits: (workers) memory for activations, or None.
      offload: whether activations may go to the host and back.
      claims: what is claimed.
    """

    table: ScheduleTable
    links: Links
    costs: Seconds
    sizes: ActivationSizes
    objective: str
    limits: Sequence[float] | None
    offload: bool
    claims: Mapping[str, Any]


def read_certificate(data: Mapping[str, Any], name: str = "certificate") -> CertificateContent:
    """Read a certificate; a `ScheduleError` says that its table cannot run."""
    if data.get("format") != FORMAT or repr(data.get("version")) != repr(VERSION):
        raise ValueError(
            f'{name} is not a certificate: expected "format": "{FORMAT}" and "version": {VERSION}, '
            f"got {data.get('format')!r} and {data.get('version')!r}"
        )
    check_keys(data, ("format", "version", *PARTS), name)
    links = read_links(data["links"], f"{name}: links")
    memory = check_keys(data["memory"], SIZES, f"{name}: memory")
    question = check_keys(data["question"], QUESTION, f"{name}: question")
    one_of(question["objective"], OBJECTIVES, f"{name}: objective")
    one_of(question["offload"], (True, False), f"{name}: offload")
    claims = check_keys(data["claims"], CLAIMS, f"{name}: claims")
    bounds = claims["lower_bounds"]
    for given in bounds if isinstance(bounds, list) else [None]:
        bound = check_keys(given, ("by", "value"), f"{name}: a lower bound")
        number(bound["value"], f"{name}: a lower bound")
        if not isinstance(bound["by"], str):
            raise ValueError(f"{name}: what a bound rests on must be text, got {bound['by']!r}")
    table = read_table_of(data["table"], f"{name}: table")
    _check_costs(data["costs"], table, OF_BOUNDS if bounds else (), f"{name}: costs")
    for key in SIZES:
        shape = _of_microbatches(memory[key], (table.num_stages,), table)
        _check_numbers(memory[key], shape, f"{name}: {key}")
    if question["limits"] is not None:
        _check_numbers(question["limits"], (table.num_workers,), f"{name}: limits")
    sizes = ActivationSizes(*(memory[key] for key in SIZES))
    return CertificateContent(table, links, data["costs"], sizes, **question, claims=claims)


def read_table_of(data: Any, where: str) -> ScheduleTable:
    """Read the table of a certificate; a `ScheduleError` says that it cannot run."""
    try:
        check_json(check_keys(data, {*getattr(data, "keys", tuple)()}, where))
    except ScheduleError as error:  # no table at all: nothing that could be wrong of it
        raise ValueError(f"{where}: {error.reason}") from None
    return from_json(data)


def check_keys(section: Any, keys: Collection[str], where: str) -> Mapping[str, Any]:
    """Return a section, which has exactly these keys."""
    if not isinstance(section, Mapping) or set(section) != set(keys):
        got = sorted(section) if isinstance(section, Mapping) else section
        raise ValueError(f"{where} must have the keys {', '.join(keys)}, got {got!r}")
    return section


def _check_numbers(value: Any, shape: tuple[int, ...], where: str) -> None:
    """A value is a finite number of at least 0, or a list of lists of them of a shape."""
    if not shape:
        number(value, where)
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise ValueError(f"{where} must be {shape[0]} numbers or lists, got {value!r}")
    for entry in value:
        _check_numbers(entry, shape[1:], where)


def _check_costs(costs: Any, table: ScheduleTable, more: Collection[str], where: str) -> None:
    """Every time has its shape; there is one of all that the table holds and that bounds add up."""
    known = [*(phase.name for phase in TIMED), "pair", "pair_factor"]
    given = {key for key in known if isinstance(costs, Mapping) and key in costs}
    cells = [cell for row in table.rows() for cell in row]
    priced = [cell for cell in cells if len(cell) == 1 or "pair" not in given]
    needs = {op.phase.name for cell in priced for op in cell if op.phase in TIMED}
    for key, value in check_keys(costs, given | needs | {*more, *MESSAGE}, where).items():
        shape: tuple[int, ...] = (table.num_stages,)
        if key in MESSAGE:
            shape = 2, table.num_pipes, table.num_stages - 1
        if key not in OF_STAGES:
            shape = _of_microbatches(value, shape, table)
        _check_numbers(value, shape, f"{where}: {key}")


def _of_microbatches(value: Any, shape: tuple[int, ...], table: ScheduleTable) -> tuple[int, ...]:
    """Return the shape of numbers, with an axis of microbatches if they have one more."""
    return (*shape, table.num_microbatches) if depth(value) > len(shape) else shape


def depth(value: Any) -> int:
    """How many lists stand in each other, along the first entries."""
    return 1 + depth(value[0]) if isinstance(value, list) and value else 0


def read_links(record: Any, where: str) -> Links:
    """Read the links; what the checker's run does not know must be as it is by default."""
    fields = [field.name for field in dataclasses.fields(Links)]
    if isinstance(record, Mapping):  # certificates of earlier versions lack what was added since
        record = {"pair_links": [], "eager_below": 0.0, **record}
    links = Links(**check_keys(record, fields, where))
    known = {name: getattr(links, name) for name in LINK_FIELDS}
    if links != Links(**known):
        raise ValueError(f"{where}: the checker knows {', '.join(LINK_FIELDS)} alone, got {links}")
    return links
