"""`pipejax tune`: what to set so that a step takes the least time."""

import dataclasses
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pipejax.cli.options.groups import JsonFlag, Pricing
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.options.schedule import TableOptions
from pipejax.cli.output.numbers import console, gigabytes, percent, print_json, seconds
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.links import Links

if TYPE_CHECKING:
    from pipejax.costs.system import System
    from pipejax.costs.workload import Workload


NUMBERS = ("microbatch_size", "microbatches", "step_time", "memory_bytes")


class Task(NamedTuple):
    """What is tuned, under which schedule; `tuning` is the library, which needs optax."""

    tuning: ModuleType
    schedule: str
    workers: int
    options: dict[str, Any]
    links: Links
    workload: "Workload"
    system: "System"
    memory_limit: bool
    microbatch_size: int | None
    prices: str | None
    budget: str | None

    def family(self) -> Any:
        """A family that has built nothing yet, so that no way finds what another has made."""
        return self.tuning.ScheduleFamily(self.schedule, self.workers, self.options, self.links)

    def problem(self) -> Any:
        """The pair, under such a family."""
        return self.tuning.TuningProblem.of(
            self.family(), [self.workload], [self.system], memory_limit=self.memory_limit
        )


def tune(
    options: TableOptions,
    pricing: Pricing | None,
    links: Links,
    workers: Annotated[int, typer.Option(help="Workers P.", min=1)] = 8,
    schedule: Annotated[str, typer.Option(help="Schedule, see `pipejax schedules`.")] = "1f1b",
    what: Annotated[
        str,
        typer.Option(
            help="What to tune: microbatch (size), layers (of each stage), recompute "
            "(layers of each stage) or system (how to spend --budget)."
        ),
    ] = "microbatch",
    microbatch_size: Annotated[
        int | None,
        typer.Option(help="For the others than microbatch; the tuned one if not given.", min=1),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            help="For system, as peak=20,memory=2,node=10,network=50,capacity=20: per "
            "TFLOP/s, three times per GB/s, per GB."
        ),
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
    """Find what makes the step shortest, by gradient and by exhaustive search."""
    workload, system = _modelled(pricing)
    if schedule not in REGISTRY:
        raise ValueError(f"unknown schedule {schedule!r}: known are {', '.join(REGISTRY)}")
    if what not in WAYS:
        raise ValueError(f"--what must be one of {', '.join(WAYS)}, got {what!r}")
    strays = {
        "--microbatch-size": (microbatch_size, what != "microbatch"),
        "--prices": (prices, what == "system"),
        "--budget": (budget, what == "system"),
    }
    for option, (value, belongs) in strays.items():
        if value is not None and not belongs:
            raise ValueError(f"{option} does not go with --what {what}")
    task = Task(
        _tuning(),
        schedule,
        workers,
        options.options,
        links,
        workload,
        system,
        not no_memory_limit,
        microbatch_size,
        prices,
        budget,
    )
    result, show = WAYS[what](task)
    named = {
        "what": what,
        "schedule": schedule,
        "workers": workers,
        "link": links.model,
        "minibatch": workload.minibatch,
    }
    if json:
        print_json(named | result)
        return
    out = console()
    out.print(
        f"[bold]{schedule}[/], {workers} workers, minibatch {workload.minibatch}, "
        f"{result['microbatches']} microbatches of {result['microbatch_size']}: "
        f"[bold]{seconds(result['step_time'])}[/]"
    )
    show(out, result)
    _print_searches(out, result)


def _modelled(pricing: Pricing | None) -> "tuple[Workload, System]":
    """Return model and system, without which there is nothing to tune."""
    if pricing is None or pricing.workload is None or pricing.system is None:
        raise ValueError("tune needs --model NAME --system NAME --minibatch N")
    return pricing.workload, pricing.system


def _tuning() -> ModuleType:
    """Import what needs optax only where it is needed."""
    try:
        from pipejax.search import tuning
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    return tuning


def _timed(name: str, way: Callable[[], Any]) -> tuple[Any, float]:
    """Run one way of tuning, with a sign of life on stderr where a person sees it."""
    with Console(stderr=True).status(f"{name}: compiling and evaluating"):
        began = time.perf_counter()
        found = way()
        return found, time.perf_counter() - began


Shown = tuple[dict[str, Any], Callable[[Console, dict[str, Any]], None]]


def _microbatch(task: Task) -> Shown:
    """Tune the microbatch size; where none fits, say so and tune without the memory limit."""
    try:
        return _sizes(task)
    except task.tuning.NothingFitsError as error:
        Console(stderr=True).print(
            f"warning: {error}: tuned without the memory limit", markup=False, soft_wrap=True
        )
        return _sizes(task._replace(memory_limit=False))


def _sizes(task: Task) -> Shown:
    """Tune the microbatch size."""
    given = ([task.workload], [task.system])
    limit = {"memory_limit": task.memory_limit}
    tuned, took = _timed(
        "gradient", lambda: task.tuning.tune_microbatches(task.family(), *given, **limit)
    )
    best, search_took = _timed(
        "exhaustive", lambda: task.tuning.search_microbatches(task.family(), *given, **limit)
    )
    names = {
        "size": "microbatch_size",
        "microbatches": "microbatches",
        "step_time": "step_time",
        "memory_bytes": "memory_bytes",
    }
    legal = best.sizes.is_legal
    columns = [getattr(best.sizes, name)[legal].tolist() for name in names]
    sizes = [dict(zip(names.values(), row, strict=True)) for row in zip(*columns, strict=True)]
    for size in sizes:  # also where the limit was lifted
        size["fits"] = size["memory_bytes"] <= float(task.system.memory_capacity)
    need = tuned.memory_bytes[0].item()
    result = {
        **_first(tuned, NUMBERS),
        "fits": need <= float(task.system.memory_capacity),
        "seconds": took,
        "ratio": took / search_took,
        "evaluated": int(tuned.sizes.is_known.sum()),
        "relaxed": _first(tuned.relaxed, tuned.relaxed._fields),
        "exhaustive": {
            **_first(best, NUMBERS),
            "seconds": search_took,
            "evaluated": len(sizes),
            "sizes": sizes,
        },
    }
    return result, lambda out, found: _print_sizes(out, found, task.system)


def _first(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Take the first pair's numbers."""
    return {name: getattr(found, name)[0].item() for name in names}


def _print_sizes(out: Console, result: dict[str, Any], system: "System") -> None:
    room = gigabytes(float(system.memory_capacity))
    grid = Table(
        "b", "M", "step time", f"memory (of {room})", "fits", title="every legal microbatch size"
    )
    for size in result["exhaustive"]["sizes"]:
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
    out.print(f"relaxed optimum: b = {result['relaxed']['microbatch_size']:.3g}")


def _count(task: Task) -> int:
    """Microbatches for what is tuned at a given microbatch size."""
    if task.microbatch_size is None:
        given = ([task.workload], [task.system])
        found, _ = _timed(
            "microbatch size",
            lambda: task.tuning.tune_microbatches(
                task.family(), *given, memory_limit=task.memory_limit
            ),
        )
        return int(found.microbatches[0])
    count, rest = divmod(task.workload.minibatch, task.microbatch_size)
    if rest:
        raise ValueError(
            f"--microbatch-size {task.microbatch_size} does not divide the minibatch "
            f"of {task.workload.minibatch}"
        )
    return count


def _layers(task: Task) -> Shown:
    """Tune the layers of each stage."""
    count = _count(task)
    return _assigned(task, count, task.tuning.tune_layers, task.tuning.search_layers, ("even",))


def _recompute(task: Task) -> Shown:
    """Tune the recomputed layers of each stage."""
    # the size must fit with some recomputation, not with that of the command line
    count = _count(task._replace(workload=dataclasses.replace(task.workload, recompute="full")))

    def search(problem: Any, count: int) -> Any:
        try:
            return task.tuning.search_recompute(problem, count)
        except task.tuning.TooManyError:
            return task.tuning.search_recompute(problem, count, common=True)

    return _assigned(task, count, task.tuning.tune_recompute, search, ("none", "full"))


def _assigned(task: Task, count: int, tune_: Any, search: Any, baselines: tuple[str, ...]) -> Shown:
    """Tune layers by stage, search them, and evaluate what would be set without."""
    from pipejax.costs.workload import StageLayers

    size = task.workload.minibatch // count
    numbers = {"microbatch_size": size, "microbatches": count}
    problem = task.problem()
    tuned, took = _timed("gradient", lambda: tune_(problem, count))
    try:
        best, search_took = _timed("exhaustive", lambda: search(task.problem(), count))
        every = {**numbers, **_stages(best), "seconds": search_took, "evaluated": best.evaluated}
    except task.tuning.TooManyError as error:
        search_took, every = math.nan, {**numbers, "refused": str(error)}
    even = problem.pairs.assigned.layers
    assigned = {
        "even": problem.pairs.assigned,
        "none": StageLayers(even, 0 * even),
        "full": StageLayers(even, even),
    }
    assignment, owner = task.tuning.LayerAssignment(problem, count), np.zeros(1, int)
    times = {name: float(assignment.step_times(assigned[name], owner)[0]) for name in baselines}
    result = {
        **numbers,
        **_stages(tuned),
        "seconds": took,
        "ratio": None if math.isnan(search_took) else took / search_took,
        "evaluated": tuned.evaluated,
        "relaxed": {
            **numbers,
            "step_time": tuned.relaxed_step_time[0],
            "layers": tuned.relaxed_layers[0],
            "recomputed": tuned.relaxed_recomputed[0],
        },
        "exhaustive": every,
        "baseline": {name: step if math.isfinite(step) else None for name, step in times.items()},
    }
    return result, _print_stages


def _stages(found: Any) -> dict[str, Any]:
    return {
        name: getattr(found, name)[0]
        for name in ("step_time", "memory_bytes", "layers", "recomputed")
    }


def _print_stages(out: Console, result: dict[str, Any]) -> None:
    grid = Table("stage", "layers", "relaxed", "recomputed", "relaxed")
    columns = (
        result["layers"],
        result["relaxed"]["layers"],
        result["recomputed"],
        result["relaxed"]["recomputed"],
    )
    for stage, (layers, soft, again, soft_again) in enumerate(zip(*columns, strict=True)):
        grid.add_row(str(stage), str(layers), f"{soft:.2f}", str(again), f"{soft_again:.2f}")
    out.print(grid)
    for name, step in result["baseline"].items():
        out.print(f"{name}: {'does not fit' if step is None else seconds(step)}")


def _design(task: Task) -> Shown:
    """Divide a budget over the parts of an accelerator."""
    if task.prices is None:
        raise ValueError(
            "--what system needs --prices, as peak=20,memory=2,node=10,network=50,capacity=20"
        )
    prices = task.tuning.PartPrices(*_parse_prices(task.prices))
    own = task.tuning.price_of(task.system, prices)
    budget = own if task.budget is None else parse_seconds(task.budget, "--budget")
    count = _count(task)
    numbers = {"microbatch_size": task.workload.minibatch // count, "microbatches": count}

    def of(found: Any) -> dict[str, Any]:
        parts = prices._fields
        return {
            **numbers,
            "step_time": found.step_time[0],
            "evaluated": found.evaluated,
            "shares": dict(zip(parts, found.shares[0].tolist(), strict=True)),
            "quantities": dict(zip(parts, found.quantities[0].tolist(), strict=True)),
        }

    problem = task.problem()
    tuned, took = _timed(
        "gradient", lambda: task.tuning.design_systems(problem, count, prices, [budget])
    )
    best, search_took = _timed(
        "exhaustive", lambda: task.tuning.search_designs(task.problem(), count, prices, [budget])
    )
    assignment = task.tuning.LayerAssignment(problem, count)
    memory = assignment.memory_bytes(problem.pairs.assigned, np.zeros(1, int))[0]
    base = assignment.step_times(problem.pairs.assigned, np.zeros(1, int))[0]
    result = {
        **of(tuned),
        "memory_bytes": memory,
        "budget": budget,
        "seconds": took,
        "ratio": took / search_took,
        "relaxed": of(tuned),
        "exhaustive": {**of(best), "seconds": search_took},
        "baseline": {task.system.name: base if math.isfinite(base) else None, "price": own},
    }
    return result, _print_design


def _parse_prices(text: str) -> list[float]:
    names = ("peak", "memory", "node", "network", "capacity")
    pairs = [entry.partition("=") for entry in text.split(",")]
    found = {
        name.strip(): parse_seconds(value.strip(), f"--prices: {name.strip()}")
        for name, _, value in pairs
    }
    if len(pairs) != len(names) or set(found) != set(names):
        raise ValueError(f"--prices: expected {', '.join(names)} once each, got {text!r}")
    return [found[name] for name in names]


def _print_design(out: Console, result: dict[str, Any]) -> None:
    grid = Table("part", "share of the budget", "buys", title=f"budget {result['budget']:g}")
    shown = {"peak_flops": (1e12, "TFLOP/s"), "memory_capacity": (1e9, "GB")}
    for part, share in result["shares"].items():
        factor, unit = shown.get(part, (1e9, "GB/s"))
        amount = result["quantities"][part] / factor
        grid.add_row(part.replace("_", " "), percent(share), f"{amount:.4g} {unit}")
    out.print(grid)
    (name, base), (_, price) = result["baseline"].items()
    out.print(
        f"{name} as it is: {'does not fit' if base is None else seconds(base)}, price {price:g}"
    )


def _print_searches(out: Console, result: dict[str, Any]) -> None:
    best = result["exhaustive"]
    if "refused" in best:
        out.print(f"exhaustive search: {best['refused']}")
        return
    out.print(
        f"exhaustive search: {seconds(best['step_time'])} in {best['seconds']:.1f} s with "
        f"{best['evaluated']} evaluations; by gradient {seconds(result['step_time'])} in "
        f"{result['seconds']:.1f} s with {result['evaluated']}"
    )


WAYS: dict[str, Callable[[Task], Shown]] = {
    "microbatch": _microbatch,
    "layers": _layers,
    "recompute": _recompute,
    "system": _design,
}
