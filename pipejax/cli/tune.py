"""`pipejax tune`: what to set so that a step takes the least time."""

import time
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipejax.cli.options import JsonFlag, Links, Pricing, TableOptions
from pipejax.cli.report import console, gigabytes, print_json, seconds
from pipejax.hardware import System
from pipejax.schedules import REGISTRY
from pipejax.workload import Workload


def tune(
    options: TableOptions,
    pricing: Pricing | None,
    links: Links,
    workers: Annotated[int, typer.Option(help="Workers P.", min=1)],
    schedule: Annotated[str, typer.Option(help="Schedule, see `pipejax schedules`.")] = "1f1b",
    no_memory_limit: Annotated[
        bool, typer.Option("--no-memory-limit", help="Let workers need more than they have.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Find the microbatch size with the shortest step, by gradient and by exhaustive search."""
    workload, system = _modelled(pricing)
    if schedule not in REGISTRY:
        raise ValueError(f"unknown schedule {schedule!r}: known are {', '.join(REGISTRY)}")
    tuning = _tuning()
    family = tuning.Family(schedule, workers, options.options, links.link, links.queues)
    result, sizes = _microbatch(tuning, family, workload, system, not no_memory_limit)
    if json:
        print_json(result)
        return
    _print(result, sizes, system)


def _modelled(pricing: Pricing | None) -> tuple[Workload, System]:
    """Return model and system, without which there is nothing to tune."""
    if pricing is None or pricing.workload is None or pricing.system is None:
        raise ValueError("tune needs --model NAME --system NAME --minibatch N")
    return pricing.workload, pricing.system


def _tuning() -> ModuleType:
    """Import what needs optax only where it is needed."""
    try:
        from pipejax import tuning
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    return tuning


def _microbatch(
    tuning: ModuleType, family: Any, workload: Workload, system: System, memory_limit: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tune both ways; return what `--json` prints, and all legal sizes."""
    ways = {"tuned": tuning.tune_microbatches, "exhaustive": tuning.search_microbatches}
    found, took = {}, {}
    progress = Console(stderr=True)
    for name, way in ways.items():
        # each way starts from nothing, so that neither finds tables that the other has built
        own = tuning.Family(family.schedule, family.num_workers, family.options, family.link,
                            family.queues)  # fmt: skip
        with progress.status(f"{name}: compiling and evaluating"):
            began = time.perf_counter()
            found[name] = way(own, [workload], [system], memory_limit=memory_limit)
            took[name] = time.perf_counter() - began
    tuned, best = found["tuned"], found["exhaustive"]
    sizes = [
        {"microbatch_size": size, "microbatches": count, "step_time": step, "memory_bytes": memory,
         "fits": fits}
        for size, count, step, memory, fits, legal in zip(
            *(getattr(best.sizes, name).tolist() for name in
              ("size", "microbatches", "step_time", "memory_bytes", "fits", "is_legal")),
            strict=True)
        if legal
    ]  # fmt: skip
    result = {
        "what": "microbatch",
        "schedule": family.schedule,
        "workers": family.num_workers,
        "link": family.link,
        "minibatch": workload.minibatch,
        **_numbers(tuned, ("microbatch_size", "microbatches", "step_time", "memory_bytes")),
        "seconds": took["tuned"],
        "ratio": took["tuned"] / took["exhaustive"],
        "evaluated": int(tuned.sizes.is_known.sum()),
        "relaxed": _numbers(tuned.relaxed, tuned.relaxed._fields),
        "exhaustive": {
            **_numbers(best, ("microbatch_size", "microbatches", "step_time", "memory_bytes")),
            "seconds": took["exhaustive"],
            "sizes": sizes,
        },
    }
    return result, sizes


def _numbers(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Take the first pair's numbers."""
    return {name: getattr(found, name)[0].item() for name in names}


def _print(result: dict[str, Any], sizes: list[dict[str, Any]], system: System) -> None:
    out = console()
    grid = Table(
        "b", "M", "step time", f"memory (of {gigabytes(float(system.memory_capacity))})", "fits",
        title=f"{result['schedule']}, {result['workers']} workers, minibatch "
              f"{result['minibatch']}: every legal microbatch size",
    )  # fmt: skip
    for size in sizes:
        is_chosen = size["microbatch_size"] == result["microbatch_size"]
        style, mark = ("bold green", "  tuned") if is_chosen else ("", "")
        grid.add_row(
            str(size["microbatch_size"]), str(size["microbatches"]), seconds(size["step_time"]),
            gigabytes(size["memory_bytes"]), ("yes" if size["fits"] else "no") + mark, style=style,
        )  # fmt: skip
    out.print(grid)
    relaxed, best = result["relaxed"], result["exhaustive"]
    same = best["microbatch_size"] == result["microbatch_size"]
    out.print(f"relaxed optimum: b = {relaxed['microbatch_size']:.3g}, "
              f"{seconds(relaxed['step_time'])}")  # fmt: skip
    out.print(f"exhaustive search: {'the same' if same else 'b = ' + str(best['microbatch_size'])}"
              f", {best['seconds']:.1f} s; by gradient {result['seconds']:.1f} s with "
              f"{result['evaluated']} of {len(sizes)} sizes evaluated")  # fmt: skip
