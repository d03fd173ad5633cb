"""`pipejax export`: a table for other programs."""

from collections.abc import Callable, Mapping
from typing import Annotated

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.base.files import write_file
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.options.values import JsonFlag
from pipejax.cli.output.files import ANY, Output
from pipejax.cli.output.report import print_json, print_written
from pipejax.runtimes.torch_tables import ABSENT, complete
from pipejax.runtimes.writers.jaxpp import to_jaxpp
from pipejax.runtimes.writers.mpmd_rows import with_known_cells
from pipejax.runtimes.writers.shardy import to_shardy
from pipejax.schedules.table.table_files import to_csv, to_json


def _trace(table: pj.ScheduleTable, costs: "pj.Costs", links: pj.Links) -> str:

    return pj.chrome_trace(pj.evaluate(table, costs, link=links))


def _for_pytorch(table: pj.ScheduleTable, costs: "pj.Costs", links: pj.Links) -> str:
    """Leave out what PyTorch's runtime does not know, put in what it needs, and say so."""
    return to_csv(complete(with_known_cells(table, tuple(ABSENT), "PyTorch"), sharding=True))


FORMATS: "Mapping[str, Callable[[pj.ScheduleTable, pj.Costs, pj.Links], str]]" = {
    "torch-csv": _for_pytorch,
    "jaxpp": lambda table, costs, links: to_jaxpp(table),
    "shardy": lambda table, costs, links: to_shardy(table),
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
    """Write a table for PyTorch, JaxPP or Shardy, as JSON, or its run as a trace for Perfetto.

    Options:
      out: a CSV for PyTorch, a module of Python for JaxPP and Shardy, JSON otherwise.

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
