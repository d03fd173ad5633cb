"""`pipejax tune WHAT`: what to set so that a step takes the least time."""

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, PricedSettings
from pipejax.cli.options.scenario import check_alike, command_line, parse_scenario
from pipejax.cli.options.tables import OF_RUNS, SizedSchedule
from pipejax.cli.options.values import CountIfGiven, Text
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.launches import launch_json, launch_lines
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, Column, TextTable, grid, pick, rows_table
from pipejax.schedules.naming import find, named

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
    parts, schedule = tuned_parts(over), named(schedule)
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
    """Return the sequences of a microbatch that the options set; None if they set none."""
    if microbatches is None:
        return microbatch_size
    option = f"--microbatches {microbatches}"
    if microbatch_size is not None:
        raise ValueError(f"{option} and --microbatch-size say the same: give one of them")
    if "size" in parts:
        raise ValueError(f"{option} does not go with tune {over}, which finds it: leave it out")
    size, rest = divmod(workload.minibatch, microbatches)
    if rest:
        raise ValueError(f"{option} must divide --minibatch {workload.minibatch}")
    return size


def tuned_parts(what: str) -> list[str]:
    """Return the names of the tuned settings, each once."""
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
    """Return the model and the system that are tuned."""
    check_alike(scenario, command)
    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        hint = "; pipejax explain --stage-layers N moves layers whose times are given"
        more = hint if scenario.source.is_per_stage else ""
        raise ValueError(f"{command} needs --model NAME --system NAME --minibatch N{more}")
    return workload, system


def tune_settings(scenario: "pj.Scenario", what: str, **arguments: Any) -> Answer:
    """Tune and answer; if interrupted, answer with the best so far."""
    workload, system = tuned_model(scenario, "tune")
    capacity, start = float(system.memory_available), time.monotonic()

    def report(tuned: "pj.results.Found[pj.results.TunedSetting]") -> Answer:
        best = tuned.best
        result = {
            "what": what,
            "schedule": scenario.schedule,
            "workers": scenario.num_workers,
            "link": scenario.links.model,
            "minibatch": workload.minibatch,
            **pick(best, "method reason microbatch_size microbatches"),
            "relaxed" if best.method == "gradient" else "exhaustive": best.details,
            "step_time": tuned.value,
            "best": {
                **pick(best, "microbatch_size microbatches memory_bytes fits"),
                **best.setting,
            },
            **pick(tuned, FOUND),
            "seconds": time.monotonic() - start,
        }
        is_size = best.over == "size"
        run = scenario.replace(num_microbatches=best.microbatches)
        named, per_node = scenario.files.get("launcher"), float(system.gpus_per_node)
        launches: Any = ()
        if is_size:
            launches = pj.costing.launches(workload, run.table(), named, per_node)
        result |= {"launch": launch_json(launches)} if launches else {}
        details: dict[str, Iterable[object]] = {
            "microbatch sizes" if is_size else "stages": [
                _sizes(tuned, capacity) if is_size else _stages(best)
            ],
            "method": _method(best),
        }
        if launches:
            details["launchers"] = launch_lines(launches)
        able = [launch for launch in launches if not launch.lacks]
        view = chain(_view(tuned, result, capacity), launch_lines(able))
        show = [command_line(run, "show", out="size.html")] if launches else []
        return Answer(result, view, next=tuple(show), details=details)

    with best_so_far(report) as keep:
        tuned = _tune(scenario, on_best=keep, **arguments)
    return report(tuned)


def _view(
    tuned: "pj.results.Found[pj.results.TunedSetting]", result: Mapping[str, Any], capacity: float
) -> Iterator[object]:
    best = tuned.best
    yield (
        f"[bold]{seconds(tuned.value)}[/] per step with {best.microbatches} microbatches of "
        f"{best.microbatch_size}: the best of {tuned.evaluated} settings of {result['schedule']} "
        f"on {result['workers']} workers, minibatch {result['minibatch']}"
    )
    yield f"memory: {gigabytes(best.memory_bytes)} of {gigabytes(capacity)}"
    for name, step in tuned.baselines.items():
        text = "does not fit" if step is None else f"{seconds(step)}, {_longer(step, tuned.value)}"
        yield f"{name} unchanged: {text}"
    if tuned.stopped == "interrupted":
        yield "interrupted: this is the best so far"


def _longer(step: float, best: float) -> str:
    return f"{percent(step / best - 1)} longer" if best and step > best else "as long"


def _tune(*request: Any, **arguments: Any) -> "pj.results.Found[pj.results.TunedSetting]":
    """Tune; if no microbatch size fits, warn and tune without the memory limit."""
    try:  # optax is an extra
        from pipejax.search.tuning.joint import NothingFitsError

    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    with progress("tuning", None) as bar:

        def move(done: float, _: float | None, text: str) -> None:
            bar.move(description=f"tuning: {done:,.0f} {text}")

        arguments["on_progress"] = move
        try:
            return pj.tune(*request, **arguments)
        except NothingFitsError as error:
            if arguments["over"] != ["size"]:
                raise
            Console(stderr=True).print(
                f"warning: {error}: tuned without the memory limit", markup=False, soft_wrap=True
            )
            return pj.tune(*request, **arguments | {"no_memory_limit": True})


def _sizes(tuned: "pj.results.Found[pj.results.TunedSetting]", capacity: float) -> TextTable:
    best, sizes = tuned.best, tuned.best.details["sizes"]
    is_complete = tuned.stopped != "interrupted"
    columns = (
        Column("b", "microbatch_size"),
        Column("M", "microbatches"),
        Column("step time", "step_time", seconds),
        Column(f"memory (of {gigabytes(capacity)})", "memory_bytes", gigabytes),
        Column("fits", "fits", lambda fits: "yes" if fits else "no"),
        Column("chosen", "microbatch_size", lambda b: "yes" if b == best.microbatch_size else ""),
    )
    is_best = [size["microbatch_size"] == best.microbatch_size for size in sizes]
    styles = ["bold green" if is_chosen else "" for is_chosen in is_best]
    title = "every legal microbatch size" if is_complete else "microbatch sizes evaluated"
    return rows_table(sizes, columns, styles=styles, title=title)


def _stages(best: "pj.results.TunedSetting") -> TextTable:
    names = ("layers", "recomputed")
    columns = [(name, best.setting[name]) for name in names]
    if best.method == "gradient":
        columns += [(f"{k}, relaxed", [f"{x:.2f}" for x in best.details[k]]) for k in names]
    return grid([("stage", range(len(best.setting["layers"]))), *columns])


def _method(best: "pj.results.TunedSetting") -> Iterator[str]:
    """Yield the method, the reason for it and what it cost."""
    details = best.details
    yield f"method: {best.method} ({best.reason})"
    yield (
        f"{seconds(details['tuned_step_time'])} after {details['evaluated']} evaluations in "
        f"{details['seconds']:.1f} s"
    )
    if best.method == "gradient":
        yield f"relaxed: b = {details['microbatch_size']:.3g}, {seconds(details['step_time'])}"
