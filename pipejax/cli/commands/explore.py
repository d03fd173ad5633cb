"""`pipejax explore`: schedules on a page of their own, to look at and to price anew."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import pipejax as pj
from pipejax.cli.options.memory import ActivationOptions
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.tables import TableChoice, TableOptions, chosen_tables
from pipejax.cli.options.values import JsonFlag, Text
from pipejax.cli.output.explored import save_page
from pipejax.cli.output.files import PAGE, Output
from pipejax.cli.output.report import (
    grid,
    percent,
    pick,
    print_all,
    print_json,
    print_plain,
    print_written,
    seconds,
)

DEFAULT: Any = Path("explorer.html")


def explore(
    options: TableOptions,
    choice: TableChoice,
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    schedules: Text = None,
    out: Annotated[Output, PAGE] = DEFAULT,
    open: bool = False,
    json: JsonFlag = False,
) -> None:
    """Write a page that shows schedules and prices them anew as sliders move; no server, no net.

    Options:
      schedules: under one time axis.
      out: the page (.html).

    Example:
      pipejax explore -S gpipe,1f1b,zb-h1 -P 4 -M 8 -T F=1,I=1,W=1 --comm 0.1
    """
    tables, missing = chosen_tables(options, choice, pricing, schedules)
    limit = options.options.get("memory_limit")
    runs = save_page(tables, pricing, links, activations, out, limit=limit)
    if json:
        rows = [pick(run, "schedule workers microbatches makespan bubble_ratio") for run in runs]
        print_json({"schedules": rows, "missing": missing} | out.as_json())
    else:
        _print(runs, "s" if pricing is not None else "slots")
        for name, reason in missing.items():
            print_plain(f"{name} is not there: {reason}")
        print_written("the page is", out.written)
    if open and out.written is not None:
        webbrowser.open(out.written.resolve().as_uri())


def _print(runs: list["pj.Evaluation"], unit: str) -> None:
    times = (seconds(r.makespan) if unit == "s" else f"{r.makespan:g} slots" for r in runs)
    print_all(
        grid(
            [
                ("schedule", [run.schedule for run in runs]),
                ("makespan", times),
                ("idle", [percent(run.bubble_ratio) for run in runs]),
            ]
        )
    )
