"""`pipejax tune`: what to set so that a step takes the least time."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pipejax as pj
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.tables import OF_RUNS, TableOptions
from pipejax.cli.options.values import CountIfGiven, JsonFlag, Text, parse_number
from pipejax.cli.output.report import (
    best_so_far,
    gigabytes,
    grid,
    percent,
    print_all,
    print_json,
    seconds,
    waiting,
)
from pipejax.schedules.naming import find, named
from pipejax.search.found import gap

if TYPE_CHECKING:
    from pipejax.search.tuning.tune import TuningResult

PARTS = {  # of an accelerator: the word of --prices, and what its quantity is shown in
    "peak": (1e12, "TFLOP/s"),
    "memory": (1e9, "GB/s"),
    "node": (1e9, "GB/s"),
    "network": (1e9, "GB/s"),
    "capacity": (1e9, "GB"),
}
PART_NAMES = {"microbatch": "microbatch_size"}  # words of --what that the library spells out
EXAMPLE = "peak=20,memory=2,node=10,network=50,capacity=20"


def tune(
    options: TableOptions,
    pricing: Pricing | None,
    links: pj.Links,
    workers: CountIfGiven = None,
    schedule: str = "1f1b",
    what: str = "microbatch",
    method: Text = None,
    microbatch_size: CountIfGiven = None,
    prices: Text = None,
    budget: Text = None,
    no_memory_limit: bool = False,
    json: JsonFlag = False,
) -> None:
    """Find what makes the step shortest, by gradient or by evaluating all that is legal.

    Options:
      workers: 8, or those of a table, if not given.
      what: microbatch is its size, layers and recompute are those of each stage, system is how to
        spend --budget; several as microbatch,layers.
      method: the faster of the two if not given.
      microbatch_size: where it is not tuned; the one that is best alone if not given.
      prices: for system, as peak=20,memory=2,node=10,network=50,capacity=20: per TFLOP/s, three
        times per GB/s, per GB.
      budget: for one accelerator; the price of --system if not given.

    Example:
      pipejax tune -s 1f1b -P 8 -m llama3-70b -y b200 --minibatch 256 --tensor-parallel 8
    """
    if pricing is not None:
        pricing.check_alike("tune")
    if pricing is None or pricing.workload is None or pricing.system is None:
        raise ValueError("tune needs --model NAME --system NAME --minibatch N")
    schedule = named(schedule)
    workers = workers or (find(schedule).sizes or (8,))[0]
    options = options._replace(of_runs=OF_RUNS)
    options.check([schedule])
    if "memory_limit" in options.options:
        raise ValueError("--memory-limit does not go with tune: --system says what fits")
    parts = [PART_NAMES.get(part.strip(), part.strip()) for part in what.split(",")]
    if "system" in parts and prices is None:
        raise ValueError(f"--what system needs --prices, as {EXAMPLE}")
    minibatch, capacity = pricing.workload.minibatch, float(pricing.system.memory_available)

    def report(found: "TuningResult", stopped: str | None = None) -> None:
        result = dataclasses.asdict(found) | {"what": what, "schedule": schedule}
        result |= {"workers": workers, "link": links.model, "minibatch": minibatch}
        result |= {**result.pop("setting"), "stopped": stopped}
        if json:
            print_json({name: value for name, value in result.items() if value is not None})
        else:
            _print(found, result, capacity)

    with best_so_far(lambda found: report(found, "interrupted")) as keep:
        found = _tuned(
            schedule,
            workers,
            pricing.workload,
            pricing.system,
            what=",".join(parts),
            method=method,
            link=links,
            memory_limit=not no_memory_limit,
            microbatch_size=microbatch_size,
            prices=None if prices is None else _parse_prices(prices),
            budget=None if budget is None else parse_number(budget, "--budget"),
            on_best=keep,
            **options.of_table(schedule),
        )
    report(found)


def _print(found: "TuningResult", result: Mapping[str, Any], capacity: float) -> None:
    print_all(
        f"[bold]{result['schedule']}[/], {result['workers']} workers, minibatch "
        f"{result['minibatch']}, {found.microbatches} microbatches of {found.microbatch_size}: "
        f"[bold]{seconds(found.step_time)}[/]"
    )
    if found.what == "microbatch_size":
        _print_sizes(result, capacity)
    else:
        if "layers" in result:
            _print_stages(result)
        if "shares" in result:
            _print_design(result)
    for name, step in found.baseline.items():
        if name != "price":
            print_all(f"{name} as it is: {'does not fit' if step is None else seconds(step)}")
    _print_ways(found)
    if result["stopped"] is not None:
        print_all(f"{result['stopped']}: this is the best so far")


def _tuned(*given: Any, **how: Any) -> "TuningResult":
    """Tune; where no microbatch size fits, say so and tune without the memory limit."""
    try:  # what needs optax is imported only where it is needed
        from pipejax.search.tuning.microbatch import NothingFitsError

    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    with waiting("tuning: compiling and evaluating") as shown:
        try:
            return pj.tune(*given, **how)
        except NothingFitsError as error:
            if how["what"] != "microbatch_size":
                raise
            shown.print(
                f"warning: {error}: tuned without the memory limit", markup=False, soft_wrap=True
            )
            return pj.tune(*given, **how | {"memory_limit": False})


def _parse_prices(text: str) -> tuple[float, ...]:
    pairs = [entry.partition("=") for entry in text.split(",")]
    found = {
        name.strip(): parse_number(value.strip(), f"--prices: {name.strip()}")
        for name, _, value in pairs
    }
    if len(pairs) != len(PARTS) or set(found) != set(PARTS):
        raise ValueError(f"--prices: expected {', '.join(PARTS)} once each, got {text!r}")
    return tuple(found[name] for name in PARTS)


def _print_sizes(result: Mapping[str, Any], capacity: float) -> None:
    is_all = result["exhaustive"] is not None and result["stopped"] is None
    title = "every legal microbatch size" if is_all else "microbatch sizes evaluated exactly"
    sizes = (result["exhaustive"] or result["relaxed"])["sizes"]
    chosen = [size["microbatch_size"] == result["microbatch_size"] for size in sizes]
    columns: list[tuple[str, Iterable[object]]] = [
        ("b", [size["microbatch_size"] for size in sizes]),
        ("M", [size["microbatches"] for size in sizes]),
        ("step time", [seconds(size["step_time"]) for size in sizes]),
        (f"memory (of {gigabytes(capacity)})", [gigabytes(s["memory_bytes"]) for s in sizes]),
        ("fits", ["yes" if size["fits"] else "no" for size in sizes]),
        ("chosen", ["tuned" * is_chosen for is_chosen in chosen]),
    ]
    styles = ["bold green" * is_chosen for is_chosen in chosen]
    print_all(grid(columns, styles=styles, title=title))


def _print_stages(result: Mapping[str, Any]) -> None:
    names, relaxed = ("layers", "recomputed"), result["relaxed"]
    columns = [(name, result[name]) for name in names]
    for name in names if relaxed else ():
        columns.append((f"{name}, relaxed", [f"{each:.2f}" for each in relaxed[name]]))
    print_all(grid([("stage", range(len(result["layers"]))), *columns]))


def _print_design(result: Mapping[str, Any]) -> None:
    price, shares = result["baseline"]["price"], result["shares"]
    buys = [
        f"{result['quantities'][part] / factor:.4g} {unit}"
        for part, (factor, unit) in zip(shares, PARTS.values(), strict=True)
    ]
    columns = [
        ("part", [part.replace("_", " ") for part in shares]),
        ("share of the budget", map(percent, shares.values())),
        ("buys", buys),
    ]
    title = f"budget {result['budget']:g}, price of the system as it is {price:g}"
    print_all(grid(columns, title=title))


def _print_ways(found: "TuningResult") -> None:
    """Say which way was taken and why, and what each found and took."""
    print_all(f"method: {found.method} ({found.reason})")
    ways = {"by gradient": found.relaxed, "exhaustive search": found.exhaustive}
    for name, own in ways.items():
        if own is None:
            continue
        told = own.get("refused") or (
            f"{seconds(own['tuned_step_time'])} in {own['seconds']:.1f} s with "
            f"{own['evaluated']} evaluations"
        )
        print_all(f"{name}: {told}")
    if found.relaxed is not None:
        own = found.relaxed
        print_all(f"relaxed: b = {own['microbatch_size']:.3g}, {seconds(own['step_time'])}")
        if own.get("lower_bound") is not None:
            most = gap(found.step_time, own["lower_bound"])
            print_all(f"no whole layers save more than {percent(most)} of it")
