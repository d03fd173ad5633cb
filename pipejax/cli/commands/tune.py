"""`pipejax tune`: what to set so that a step takes the least time."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.options.schedule import TableOptions
from pipejax.cli.output.numbers import console, gigabytes, percent, print_json, seconds
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import Links

if TYPE_CHECKING:
    from pipejax.search.tuning.tune import TuningResult

PARTS = {  # of an accelerator: the word of --prices, and what its quantity is shown in
    "peak": (1e12, "TFLOP/s"),
    "memory": (1e9, "GB/s"),
    "node": (1e9, "GB/s"),
    "network": (1e9, "GB/s"),
    "capacity": (1e9, "GB"),
}
EXAMPLE = "peak=20,memory=2,node=10,network=50,capacity=20"
# arguments of the library that are options here, as they stand in its messages
_ARGUMENT = re.compile(r"^(what|method|microbatch_size|prices|budget)\b|\bwhat(?==)")


def tune(
    options: TableOptions,
    pricing: Pricing | None,
    links: Links,
    workers: Annotated[int, typer.Option(help="Workers P.", min=1)] = 8,
    schedule: Annotated[str, typer.Option(help="Schedule, see `pipejax schedules`.")] = "1f1b",
    what: Annotated[
        str,
        typer.Option(
            help="What to tune: microbatch (its size), layers (of each stage), recompute "
            "(layers of each stage) or system (how to spend --budget)."
        ),
    ] = "microbatch",
    method: Annotated[
        str | None,
        typer.Option(help="gradient, exhaustive or both; the faster of the two if not given."),
    ] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option(help="For the others than microbatch; the tuned one if not given.", min=1),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(help=f"For system, as {EXAMPLE}: per TFLOP/s, three times per GB/s, per GB."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="For system: for one accelerator; the price of --system if not given."),
    ] = None,
    no_memory_limit: Annotated[
        bool, typer.Option("--no-memory-limit", help="Let workers need more than they have.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Find what makes the step shortest, by gradient or by evaluating all that is legal."""
    if pricing is None or pricing.workload is None or pricing.system is None:
        raise ValueError("tune needs --model NAME --system NAME --minibatch N")
    if schedule not in REGISTRY:
        raise ValueError(f"unknown schedule {schedule!r}: known are {', '.join(REGISTRY)}")
    if what == "system" and prices is None:
        raise ValueError(f"--what system needs --prices, as {EXAMPLE}")
    minibatch, capacity = pricing.workload.minibatch, float(pricing.system.memory_capacity)
    found = _tuned(
        schedule,
        workers,
        pricing.workload,
        pricing.system,
        what="microbatch_size" if what == "microbatch" else what,
        method=method,
        link=links,
        memory_limit=not no_memory_limit,
        microbatch_size=microbatch_size,
        prices=None if prices is None else _parse_prices(prices),
        budget=None if budget is None else parse_seconds(budget, "--budget"),
        **options.of_table(schedule),
    )
    result = dataclasses.asdict(found) | {"what": what, "schedule": schedule, "workers": workers}
    result |= {"link": links.model, "minibatch": minibatch, **result.pop("setting")}
    if json:
        print_json({name: value for name, value in result.items() if value is not None})
        return
    out = console()
    out.print(
        f"[bold]{schedule}[/], {workers} workers, minibatch {minibatch}, {found.microbatches} "
        f"microbatches of {found.microbatch_size}: [bold]{seconds(found.step_time)}[/]"
    )
    if found.what == "microbatch_size":
        _print_sizes(out, result, capacity)
    elif found.what == "system":
        _print_design(out, result)
    else:
        _print_stages(out, result)
    for name, step in found.baseline.items():
        if name != "price":
            out.print(f"{name} as it is: {'does not fit' if step is None else seconds(step)}")
    _print_ways(out, found)


def _tuned(*given: Any, **how: Any) -> "TuningResult":
    """Tune; where no microbatch size fits, say so and tune without the memory limit."""
    try:  # what needs optax is imported only where it is needed
        from pipejax.search.tuning.microbatch import NothingFitsError
        from pipejax.search.tuning.tune import tune
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    shown = Console(stderr=True)
    with shown.status("tuning: compiling and evaluating"):
        try:
            return tune(*given, **how)
        except NothingFitsError as error:
            if how["what"] != "microbatch_size":
                raise
            shown.print(
                f"warning: {error}: tuned without the memory limit", markup=False, soft_wrap=True
            )
            return tune(*given, **how | {"memory_limit": False})
        except ValueError as error:
            text = _ARGUMENT.sub(lambda name: f"--{name[0].replace('_', '-')}", str(error))
            raise ValueError(text) from None


def _parse_prices(text: str) -> tuple[float, ...]:
    pairs = [entry.partition("=") for entry in text.split(",")]
    found = {
        name.strip(): parse_seconds(value.strip(), f"--prices: {name.strip()}")
        for name, _, value in pairs
    }
    if len(pairs) != len(PARTS) or set(found) != set(PARTS):
        raise ValueError(f"--prices: expected {', '.join(PARTS)} once each, got {text!r}")
    return tuple(found[name] for name in PARTS)


def _print_sizes(out: Console, result: Mapping[str, Any], capacity: float) -> None:
    is_all = result["exhaustive"] is not None
    title = "every legal microbatch size" if is_all else "microbatch sizes evaluated exactly"
    grid = Table("b", "M", "step time", f"memory (of {gigabytes(capacity)})", "fits", title=title)
    for size in (result["exhaustive"] or result["relaxed"])["sizes"]:
        is_chosen = size["microbatch_size"] == result["microbatch_size"]
        grid.add_row(
            str(size["microbatch_size"]),
            str(size["microbatches"]),
            seconds(size["step_time"]),
            gigabytes(size["memory_bytes"]),
            ("yes" if size["fits"] else "no") + ("  tuned" if is_chosen else ""),
            style="bold green" if is_chosen else "",
        )
    out.print(grid)


def _print_stages(out: Console, result: Mapping[str, Any]) -> None:
    columns = {name: [*map(str, result[name])] for name in ("layers", "recomputed")}
    for name in tuple(columns) if result["relaxed"] else ():
        columns[f"{name}, relaxed"] = [f"{each:.2f}" for each in result["relaxed"][name]]
    grid = Table("stage", *columns)
    for stage, row in enumerate(zip(*columns.values(), strict=True)):
        grid.add_row(str(stage), *row)
    out.print(grid)


def _print_design(out: Console, result: Mapping[str, Any]) -> None:
    price = result["baseline"]["price"]
    title = f"budget {result['budget']:g}, price of the system as it is {price:g}"
    grid = Table("part", "share of the budget", "buys", title=title)
    for (part, share), (factor, unit) in zip(result["shares"].items(), PARTS.values(), strict=True):
        amount = result["quantities"][part] / factor
        grid.add_row(part.replace("_", " "), percent(share), f"{amount:.4g} {unit}")
    out.print(grid)


def _print_ways(out: Console, found: "TuningResult") -> None:
    """Say which way was taken and why, and what each found and took."""
    out.print(f"method: {found.method} ({found.reason})")
    ways = {"by gradient": found.relaxed, "exhaustive search": found.exhaustive}
    for name, own in ways.items():
        if own is None:
            continue
        told = own.get("refused") or (
            f"{seconds(own['tuned_step_time'])} in {own['seconds']:.1f} s with "
            f"{own['evaluated']} evaluations"
        )
        out.print(f"{name}: {told}")
    if found.relaxed is not None:
        own = found.relaxed
        out.print(f"relaxed: b = {own['microbatch_size']:.3g}, {seconds(own['step_time'])}")
