"""`pipejax tune WHAT`: what to set so that a step takes the least time."""

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, PricedSettings
from pipejax.cli.options.scenario import check_alike, command_line, parse_scenario
from pipejax.cli.options.tables import OF_RUNS, SizedSchedule
from pipejax.cli.options.values import CountIfGiven, Text
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import gigabytes, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, Column, grid, pick, table_of
from pipejax.schedules.naming import find, named

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.tuning.tune import TunedSetting

ORDERS = ("messages", "microbatches", "places", "lookahead", "chunks")
SETTINGS = ("size", "layers", "recompute")  # of a model on a system
WHAT = """Size of a microbatch, recompute (layers of each stage), or several as size,layers.
With options of their own: layers alone, messages, microbatches, places, lookahead, chunks."""


@options
def tune(
    over: Annotated[str, Parameter(name="WHAT", help=WHAT)] = "size",
    /,
    *,
    run: PricedSettings = PricedSettings(),
    links: LinkOptions = LinkOptions(),
    workers: CountIfGiven = None,
    schedule: str = "1f1b",
    method: Text = None,
    microbatch_size: CountIfGiven = None,
    microbatches: CountIfGiven = None,
    no_memory_limit: bool = False,
) -> Answer:
    """Find what makes the step shortest: microbatch size, layers, orders, places, and more.

    Options:
      workers: 8, or those of a table, if not given.
      method: default: exhaustive up to 200,000 settings (1,000,000 of several parts), else
        gradient.
      microbatch_size: where it is not tuned; the one that is best alone if not given.
      microbatches: in place of the size of one.

    Example:
      pipejax tune size -s 1f1b -P 8 -m llama3-70b -y b200 --minibatch 256 --tensor-parallel 8
    """
    parts, schedule = parts_of(over), named(schedule)
    workers = workers or (find(schedule).sizes or (8,))[0]
    settings = run.table_options(OF_RUNS)
    if run.memory_limit is not None:
        raise ValueError("--memory-limit does not go with tune: --system says what fits")
    point = SizedSchedule(schedule, workers, None)
    scenario = parse_scenario(run, links.links(), settings=settings, point=point)
    workload, _ = tuned_model(scenario, "tune")
    if run.lookahead or run.residency or run.sharding_lane:
        raise ValueError(
            "--lookahead, --residency and --sharding-lane do not go with tune: tune lookahead "
            "searches how far ahead weights are gathered"
        )
    return tune_settings(
        scenario,
        over,
        over=parts,
        method=method,
        no_memory_limit=no_memory_limit,
        microbatch_size=_size(over, parts, workload, microbatches, microbatch_size),
    )


def _size(
    over: str,
    parts: list[str],
    workload: "pj.Workload",
    microbatches: int | None,
    microbatch_size: int | None,
) -> int | None:
    """Sequences of a microbatch, where options say them or the number of microbatches."""
    if microbatches is None:
        return microbatch_size
    said = f"--microbatches {microbatches}"
    if microbatch_size is not None:
        raise ValueError(f"{said} and --microbatch-size say the same: give one of them")
    if "size" in parts:
        raise ValueError(f"{said} does not go with tune {over}, which finds it: leave it out")
    size, rest = divmod(workload.minibatch, microbatches)
    if rest:
        raise ValueError(f"{said} must divide --minibatch {workload.minibatch}")
    return size


def parts_of(what: str) -> list[str]:
    """Names of what is tuned, each once."""
    parts = [resolve_choice(part.strip(), (*SETTINGS, *ORDERS), "WHAT") for part in what.split(",")]
    if len({*parts}) < len(parts):
        raise ValueError(f"WHAT must name each part once, got {what!r}")
    for part in parts:
        if part in ORDERS and len(parts) > 1:
            raise ValueError(f"WHAT: {part} are searched by themselves, got {what!r}")
        if part in ORDERS or parts == ["layers"]:
            raise ValueError(f"WHAT must stand right behind tune: pipejax tune {part}")
    return parts


def tuned_model(scenario: "pj.Scenario", command: str) -> tuple["pj.Workload", "pj.System"]:
    """The model and the system that are tuned."""
    check_alike(scenario, command)
    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        of_times = "; pipejax explain --stage-layers N moves layers whose times are given"
        more = of_times if scenario.source.is_per_stage else ""
        raise ValueError(f"{command} needs --model NAME --system NAME --minibatch N{more}")
    return workload, system


def tune_settings(scenario: "pj.Scenario", what: str, **how: Any) -> Answer:
    """Tune and answer; if interrupted, what was found by then."""
    workload, system = tuned_model(scenario, "tune")
    capacity, began = float(system.memory_available), time.monotonic()

    def report(found: "Found[TunedSetting]") -> Answer:
        best = found.best
        contract = pick(best, "method reason microbatch_size microbatches")
        own = pick(best, "microbatch_size microbatches memory_bytes fits")
        result = {
            "what": what,
            "schedule": scenario.schedule,
            "workers": scenario.num_workers,
            "link": scenario.links.model,
            "minibatch": workload.minibatch,
            **contract,
            "relaxed" if best.method == "gradient" else "exhaustive": best.details,
            "step_time": found.value,
            "best": {**own, **best.setting},
            **pick(found, FOUND),
            "seconds": time.monotonic() - began,
        }
        tuned = scenario.replace(num_microbatches=best.microbatches)
        told = pj.costing.launches(workload, tuned.table()) if best.over == "size" else ()
        result |= {"launch": launch_json(told)} if told else {}
        said = chain(_said(found, result, capacity), launch_lines(told))
        shown = [command_line(tuned, "show", out="size.html")] if told else []
        return Answer(result, said, next=tuple(shown))

    with best_so_far(report) as keep:
        found = _tuned(scenario, on_best=keep, **how)
    return report(found)


def _said(
    found: "Found[TunedSetting]", result: Mapping[str, Any], capacity: float
) -> Iterator[object]:
    best = found.best
    yield (
        f"[bold]{result['schedule']}[/], {result['workers']} workers, minibatch "
        f"{result['minibatch']}, {best.microbatches} microbatches of {best.microbatch_size}: "
        f"[bold]{seconds(found.value)}[/]"
    )
    if best.over == "size":
        yield _sizes(found, capacity)
    else:
        yield _stages(best)
    for name, step in found.baselines.items():
        yield f"{name} as it is: {'does not fit' if step is None else seconds(step)}"
    yield from _ways(found)
    if found.stopped == "interrupted":
        yield "interrupted: this is the best so far"


def _tuned(*given: Any, **how: Any) -> "Found[TunedSetting]":
    """Tune; where no microbatch size fits, say so and tune without the memory limit."""
    try:  # what needs optax is imported only where it is needed
        from pipejax.search.tuning.joint import NothingFitsError

    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    with progress("tuning", None) as bar:

        def tell(done: float, _: float | None, text: str) -> None:
            bar.move(description=f"tuning: {done:,.0f} {text}")

        how["on_progress"] = tell
        try:
            return pj.tune(*given, **how)
        except NothingFitsError as error:
            if how["over"] != ["size"]:
                raise
            Console(stderr=True).print(
                f"warning: {error}: tuned without the memory limit", markup=False, soft_wrap=True
            )
            return pj.tune(*given, **how | {"no_memory_limit": True})


def _sizes(found: "Found[TunedSetting]", capacity: float) -> Table:
    best = found.best
    is_all = found.stopped != "interrupted"
    title = "every legal microbatch size" if is_all else "microbatch sizes evaluated exactly"
    sizes = best.details["sizes"]
    chosen = [size["microbatch_size"] == best.microbatch_size for size in sizes]
    columns = (
        Column("b", "microbatch_size"),
        Column("M", "microbatches"),
        Column("step time", "step_time", seconds),
        Column(f"memory (of {gigabytes(capacity)})", "memory_bytes", gigabytes),
        Column("fits", "fits", lambda fits: "yes" if fits else "no"),
        Column("chosen", "microbatch_size", lambda b: "tuned" * (b == best.microbatch_size)),
    )
    styles = ["bold green" * is_chosen for is_chosen in chosen]
    return table_of(sizes, columns, styles=styles, title=title)


def _stages(best: "TunedSetting") -> Table:
    names = ("layers", "recomputed")
    columns = [(name, best.setting[name]) for name in names]
    if best.method == "gradient":
        columns += [(f"{k}, relaxed", [f"{x:.2f}" for x in best.details[k]]) for k in names]
    return grid([("stage", range(len(best.setting["layers"]))), *columns])


def _ways(found: "Found[TunedSetting]") -> Iterator[str]:
    """Say which method was taken and why, and what it found and took."""
    best, details = found.best, found.best.details
    yield f"method: {best.method} ({best.reason})"
    name = "by gradient" if best.method == "gradient" else "exhaustive search"
    yield (
        f"{name}: {seconds(details['tuned_step_time'])} in {details['seconds']:.1f} s with "
        f"{details['evaluated']} evaluations"
    )
    if best.method == "gradient":
        yield f"relaxed: b = {details['microbatch_size']:.3g}, {seconds(details['step_time'])}"
