"""`pipejax tune WHAT|layers`: settings with the shortest step."""

import dataclasses
import time
import warnings
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.base.progress import Notice
from pipejax.cli.options.option import options, parse_seconds
from pipejax.cli.options.scenario import build, check_alike, command_line, parse_scenario
from pipejax.cli.options.tables import OF_RUNS, PricedSettings, RunOptions, SizedSchedule
from pipejax.cli.output.files import LAYOUT, NO_OUTPUT, Output
from pipejax.cli.output.numbers import gigabytes, seconds
from pipejax.cli.output.plans import launch_json, launch_lines
from pipejax.cli.output.report import (
    SEARCH_FIELDS,
    Answer,
    best_so_far,
    less_than,
    pick,
    progress,
    search_answer,
    table_sizes,
)
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table
from pipejax.schedules.naming import find, named

ORDERS = ("messages", "microbatches", "places", "lookahead", "chunks")
SETTINGS = ("size", "layers", "recompute")  # of a model on a system
WHAT = """size (of a microbatch), recompute, layers (of each stage), or several, as size,layers;
or messages, microbatches, places, lookahead or chunks, which have options of their own."""


@options
def tune(
    over: Annotated[str, Parameter(name="WHAT", help=WHAT)] = "size",
    /,
    *,
    run: PricedSettings = PricedSettings(),
    workers: int | None = None,
    schedule: str = "1f1b",
    method: str | None = None,
    microbatch_size: int | None = None,
    microbatches: int | None = None,
    no_memory_limit: bool = False,
) -> Answer:
    """Find what makes the step shortest: microbatch size, layers, orders, places, and more."""
    parts, schedule = tuned_parts(over), named(schedule)
    workers = workers or (find(schedule).sizes or (8,))[0]
    settings = run.table_options(OF_RUNS)
    if run.memory_limit is not None:
        raise ValueError("--memory-limit has no effect on tune: --system sets the limit")
    point = SizedSchedule(schedule, workers, None)
    scenario = parse_scenario(run, settings=settings, point=point)
    workload, _ = tuned_model(scenario, "tune")
    if run.lookahead or run.residency or run.sharding_lane:
        raise ValueError(
            "--lookahead, --residency and --sharding-lane do not go with tune: tune lookahead "
            "searches how far ahead weights are gathered"
        )
    if microbatches is not None:
        option = f"--microbatches {microbatches}"
        if microbatch_size is not None:
            raise ValueError(f"{option} and --microbatch-size set the same: give one of them")
        if "size" in parts:
            raise ValueError(f"{option} does not go with tune {over}, which finds it: leave it out")
        microbatch_size = _microbatch_size(workload, microbatches)
    arguments = {"microbatch_size": microbatch_size, "no_memory_limit": no_memory_limit}
    return tune_settings(scenario, over, over=parts, method=method, **arguments)


def _microbatch_size(workload: "pj.Workload", microbatches: int) -> int:
    """Return the sequences of one of so many microbatches."""
    size, remainder = divmod(workload.minibatch, microbatches)
    if remainder:
        raise ValueError(
            f"--microbatches {microbatches} must divide --minibatch {workload.minibatch}"
        )
    return size


def tuned_parts(what: str) -> list[str]:
    """Return the names of the tuned settings, each once."""
    parts = [resolve_choice(part.strip(), (*SETTINGS, *ORDERS), "WHAT") for part in what.split(",")]
    if len({*parts}) < len(parts):
        raise ValueError(f"WHAT must name each part once, got {what!r}")
    for part in parts:
        if part in ORDERS and len(parts) > 1:
            raise ValueError(f"WHAT: {part} cannot be tuned with other parts, got {what!r}")
        if part in ORDERS or parts == ["layers"]:
            raise ValueError(f"WHAT must be the word after tune: pipejax tune {part}")
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
    from pipejax.costs.model.launchers import machine_launches

    workload, system = tuned_model(scenario, "tune")
    capacity, start = float(system.memory_available), time.monotonic()
    launcher = scenario.files.get("launcher")

    def report(tuned: "pj.results.Found[pj.results.TunedSetting]") -> Answer:
        best = tuned.best
        sizes = pick(best, "microbatch_size microbatches memory_bytes fits")
        result = {
            "what": what,
            "schedule": scenario.schedule,
            "workers": scenario.num_workers,
            "link": scenario.links.model,
            "minibatch": workload.minibatch,
            **pick(best, "method reason microbatch_size microbatches"),
            best.method: best.details,
            "step_time": tuned.value,
            "best": {**sizes, **best.setting},
            **pick(tuned, SEARCH_FIELDS),
            "seconds": time.monotonic() - start,
        }
        details: dict[str, Iterable[object]] = {}
        if best.over == "size":
            details["microbatch sizes"] = [_sizes(tuned, capacity)]
        else:
            columns = [(name, best.setting[name]) for name in ("layers", "recomputed")]
            details["stages"] = [grid([("stage", range(len(best.setting["layers"]))), *columns])]
        details["method"] = [f"method: {best.method} ({best.reason})"]
        next_commands: tuple[str, ...] = ()
        launches: tuple[Any, ...] = ()
        if best.workload is not None:  # options can write the setting
            run = _with_setting(scenario, best)
            stack = scenario.source.stack
            launches = machine_launches(best.workload, run.table(), system, stack, launcher)
            result["launch"] = launch_json(launches)
            details["launchers"] = launch_lines(launches)
            next_commands = (command_line(run, "show", out="size.html"),)
        lines = [
            f"[bold]{seconds(tuned.value)}[/] per step with microbatch size {best.microbatch_size} "
            f"({best.microbatches} microbatches of a minibatch of {workload.minibatch}), "
            f"{scenario.schedule} on {scenario.num_workers} workers",
            f"memory: {gigabytes(best.memory_bytes)} of {gigabytes(capacity)}",
        ]
        nouns = "setting", "settings tried"
        last = launch_lines((launch for launch in launches if not launch.lacks), short=True)
        return search_answer(
            lines, result, tuned, nouns, last_lines=last, next=next_commands, details=details
        )

    with best_so_far(report) as keep:
        tuned = _tune(scenario, on_best=keep, launcher=launcher, **arguments)
    return report(tuned)


def _with_setting(scenario: "pj.Scenario", best: "pj.results.TunedSetting") -> "pj.Scenario":
    assert scenario.source.workload is not None
    names = ("pipeline_layout", "embedding_units", "loss_units", "recompute")
    fields: Any = {name: getattr(best.workload, name) for name in names}
    workload = dataclasses.replace(scenario.source.workload, **fields)
    return scenario.replace(num_microbatches=best.microbatches).with_workload(workload)


def _tune(*request: Any, **arguments: Any) -> "pj.results.Found[pj.results.TunedSetting]":
    """Tune; if no microbatch size fits, warn and tune without the memory limit."""
    from pipejax.search.tuning.joint import NothingFitsError

    with progress("tuning") as show:
        arguments["on_progress"] = lambda done, total, text: show(
            done, total, f"tuning: {done:,.0f} {text}"
        )
        try:
            return pj.tune(*request, **arguments)
        except NothingFitsError as error:
            if arguments["over"] != ["size"]:
                raise
            warnings.warn(f"{error}: tuned without the memory limit", Notice, stacklevel=2)
            return pj.tune(*request, **arguments | {"no_memory_limit": True})


def _sizes(tuned: "pj.results.Found[pj.results.TunedSetting]", capacity: float) -> TextTable:
    """Make a table of the microbatch sizes that were tried."""
    sizes, best_size = tuned.best.details["sizes"], tuned.best.microbatch_size
    columns = (
        Column("b", "microbatch_size"),
        Column("M", "microbatches"),
        Column("step time", "step_time", seconds),
        Column(f"memory (of {gigabytes(capacity)})", "memory_bytes", gigabytes),
        Column("fits", "fits", lambda fits: "yes" if fits else "no"),
        Column("chosen", "microbatch_size", lambda size: "yes" if size == best_size else ""),
    )
    return rows_table(sizes, columns)


@options
def layers(
    *,
    run: RunOptions = RunOptions(),
    method: str | None = None,
    microbatch_size: int | None = None,
    no_memory_limit: bool = False,
    time_limit: str = "60",
    out: Annotated[Output, LAYOUT] = NO_OUTPUT,
) -> Answer:
    """Split a model into the stages that make the step shortest, for Megatron and torchtitan."""
    point = None  # schedule and workers for --method, which also tunes the microbatch size
    if method is not None and run.table is None:
        schedule = run.name or "1f1b"
        workers = run.workers or (find(schedule).sizes or (8,))[0]
        point = SizedSchedule(schedule, workers, None)
    scenario = parse_scenario(run, point=point)
    workload, _ = tuned_model(scenario, "tune layers")
    if run.offload is not None:
        raise ValueError("--offload excludes tune layers: the time of O follows from the split")
    limit = parse_seconds(time_limit, "--time-limit")
    if method is None:
        if microbatch_size is not None:
            raise ValueError("--microbatch-size has no effect without --method")
        build(scenario)  # refuses a schedule that does not exist
        return _search_split(scenario, limit, not no_memory_limit, out)
    if out.path is not None or run.table is not None:
        option = "--out" if run.table is None else "--table"
        raise ValueError(f"{option} does not go with --method: leave one of them out")
    if run.microbatches is not None and microbatch_size is None:
        microbatch_size = _microbatch_size(workload, run.microbatches)
    arguments = {"microbatch_size": microbatch_size, "no_memory_limit": no_memory_limit}
    return tune_settings(scenario, "layers", over=["layers"], method=method, **arguments)


def _search_split(scenario: "pj.Scenario", limit: float, memory_limit: bool, out: Output) -> Answer:
    """Search the best split and answer; if interrupted, answer with the best so far."""
    from pipejax.costs.model.launchers import machine_launches

    table, links, start = scenario.table(), scenario.links, time.monotonic()
    workload, system = tuned_model(scenario, "tune layers")

    def report(result: "pj.results.Found[pj.results.Partition]") -> Answer:
        """Save a split, and answer with it, its proof and the launchers' options."""
        best = result.best
        launcher, stack = scenario.files.get("launcher"), scenario.source.stack
        launches = machine_launches(best.workload, table, system, stack, launcher)
        data = _split_json(table, links, result) | {"seconds": time.monotonic() - start}
        data["launch"] = launch_json(launches)
        if out.path is not None and out.path.suffix == ".txt":
            out.save_text(f"{best.layout}\n")
        else:
            out.save_json(data)
        # a layout says where embedding and loss are: `Workload` takes no units beside it
        units: Any = {"embedding_units": 0, "loss_units": 0, "pipeline_layout": str(best.layout)}
        assert scenario.source.workload is not None
        split = scenario.with_workload(dataclasses.replace(scenario.source.workload, **units))
        need, available = best.memory_bytes.max(), float(system.memory_available)
        stages = _split_stages(table, system, result)
        layers = " + ".join(map(str, best.layout.count("t")))
        lines = [
            f"[bold]{seconds(result.value)}[/] per step with {layers} layers on the stages "
            f"({best.layout}){_saving(result)}",
            f"memory: {gigabytes(need)} of {gigabytes(available)}",
        ]
        return search_answer(
            lines,
            data,
            result,
            ("split", "splits tried"),
            last_lines=launch_lines((x for x in launches if not x.lacks), short=True),
            next=(command_line(split, "show", out="layers.html"),),
            details={"stages": [stages], "launchers": launch_lines(launches, full=True)},
            too_large=[name for name, split in best.defaults.items() if not split.fits],
        )

    with best_so_far(report) as keep, progress("splitting") as on_progress:
        limits: dict[str, Any] = {"no_memory_limit": not memory_limit, "time_limit": limit}
        result = pj.search.layers(
            table, workload, system, link=links, **limits, on_progress=on_progress, on_best=keep
        )
    return report(result)


def _split_json(
    table: pj.ScheduleTable, links: pj.Links, result: "pj.results.Found[pj.results.Partition]"
) -> dict[str, Any]:
    """Return a split of a model into stages, and default splits, for `--json`."""
    layout, best = result.best.layout, result.best
    has_mtp = layout.count("m").any()
    return {
        **table_sizes(table),
        "link": links.model,
        "what": "layers",
        "best": {
            "layers": layout.count("t").tolist(),
            "mtp": layout.count("m").tolist(),
            "pipeline_layout": str(layout),
            # torchtitan has no layers for further tokens in pipelines
            "module_fqns_per_model_part": None if has_mtp else layout.module_fqns(),
            "memory_bytes": best.memory_bytes.tolist(),
            "fits": best.fits,
        },
        **pick(result, SEARCH_FIELDS),
        "defaults": {
            name: {**split._asdict(), "layout": str(split.layout)}
            for name, split in best.defaults.items()
        },
    }


def _saving(result: "pj.results.Found[pj.results.Partition]") -> str:
    """Return the saving of the split over the fastest default split that fits in memory."""
    times = {name: split.step_time for name, split in result.best.defaults.items() if split.fits}
    if not times:
        return ": no default split fits in memory" if result.best.fits else ""
    name = min(times, key=lambda name: times[name])
    return f": {less_than(name, times[name], result.value)}"


def _split_stages(
    table: pj.ScheduleTable, system: "pj.System", result: "pj.results.Found[pj.results.Partition]"
) -> object:
    """Make a table of the stages: layers, times of F and B, and memory of the fullest worker."""
    best = result.best
    costs = pj.stage_costs(best.workload, system, table)
    room = float(system.memory_available)
    holders = [sorted(set(workers)) for workers in table.placement.T.tolist()]
    needs = [best.memory_bytes[workers].max() for workers in holders]
    return grid(
        [
            ("stage", range(table.num_stages)),
            ("worker", [" ".join(map(str, workers)) for workers in holders]),
            ("holds", map(_contents, best.layout.stages)),
            ("F", map(seconds, np.asarray(costs.forward))),
            ("B", map(seconds, np.asarray(costs.backward))),
            (f"memory (of {gigabytes(room)})", map(gigabytes, needs)),
        ]
    )


def _contents(stage: str) -> str:
    """Return the content of a stage in words: "Ett" is "embedding, 2 layers"."""
    words = {"E": "embedding", "t": "layers", "m": "MTP", "L": "head"}
    counts = {letter: stage.count(letter) for letter in words if letter in stage}
    texts = (
        words[letter] if letter in "EL" else f"{count} {words[letter]}"
        for letter, count in counts.items()
    )
    return ", ".join(texts) or "nothing"
