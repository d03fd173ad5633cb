"""`pipejax export`: a table for other programs."""

import warnings
from collections.abc import Callable, Mapping
from typing import Annotated

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.base.files import write_file
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.output.files import ANY, Output
from pipejax.cli.output.numbers import print_json
from pipejax.cli.output.report import print_written
from pipejax.runtimes.torch_tables import absent, complete
from pipejax.schedules.table.slot_simulation import spread
from pipejax.schedules.table.table import without
from pipejax.schedules.table.table_files import LossWarning, to_csv, to_json


def _trace(table: pj.ScheduleTable, costs: "pj.Costs", links: pj.Links) -> str:

    return pj.chrome_trace(pj.evaluate(table, costs, link=links))


def _for_pytorch(table: pj.ScheduleTable) -> pj.ScheduleTable:
    """Leave out what PyTorch's runtime does not know, put in what it needs, and say so."""
    count = absent(table)
    found = ", ".join(f"{number} {phase.name}" for phase, number in count.items())
    if found:
        later = ": it updates after the whole table" * table.updates_within
        warnings.warn(
            f"{found} cells are left out, PyTorch has none{later}; --format json keeps them",
            LossWarning,
            stacklevel=2,
        )
        table = spread(without(table, tuple(count)))
    return complete(table, sharding=True)


FORMATS: "Mapping[str, Callable[[pj.ScheduleTable, pj.Costs, pj.Links], str]]" = {
    "torch-csv": lambda table, costs, links: to_csv(_for_pytorch(table)),
    "json": lambda table, costs, links: to_json(table),
    "chrome-trace": _trace,
}


def export(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    format: str,
    out: Annotated[Output, ANY],
    json: JsonFlag = False,
) -> None:
    """Write a table as PyTorch's CSV, as JSON, or its run as a Chrome trace for Perfetto.

    Options:
      out: a table, or a trace for Perfetto.

    Example:
      pipejax export -s 1f1b -P 4 -M 8 --format torch-csv --out table.csv
    """
    format = one_of(format, FORMATS, "--format")
    text = FORMATS[format](table, or_slots(pricing, table), links)
    out.save(lambda draft: write_file(draft, text), lambda: text)
    result = {"format": format, **out.as_json(), "bytes": len(text.encode())}
    if json:
        print_json(result)
    else:
        print_written(f"wrote {format}, {result['bytes']} bytes, to", out.written)
