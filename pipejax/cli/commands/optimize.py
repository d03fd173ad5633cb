"""`pipejax optimize`: the fastest schedule that keeps a memory limit, and a bound on all others."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.files import check_writable
from pipejax.cli.options import line
from pipejax.cli.options.memory import LIMIT_OPTION, HeldMemory, MemoryLimit, Room
from pipejax.cli.options.option import options, parse_seconds
from pipejax.cli.options.scenario import check_used, command_line, parse_scenario, required
from pipejax.cli.options.tables import SizedRunOptions
from pipejax.cli.output.files import JSON, NO_OUTPUT, TABLE, Output, check_modules
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.report import (
    SEARCH_FIELDS,
    Answer,
    best_so_far,
    is_json,
    less_than,
    pick,
    print_json,
    progress,
    savings,
    search_end,
)
from pipejax.cli.output.tables import TextTable, grid
from pipejax.schedules.cells.ops import format_cell

if TYPE_CHECKING:
    from pipejax.search.schedule.store import SolvedProblems


@options
class StoreOptions:
    """Folder of solved problems."""

    store: Path | None = None
    no_store: bool = False

    def open(self) -> "SolvedProblems | None":
        """Open the store; raise if its folder cannot be written."""
        from pipejax.search.schedule.store import SolvedProblems

        folder = self.store
        if self.no_store:
            if folder is not None:
                raise ValueError(f"--store {folder} and --no-store: choose one")
            return None
        check_modules("--store needs", ("filelock", "platformdirs"), "optimize")
        if folder is not None:
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"--store {folder} is no folder")
            try:
                check_writable(folder / "any.json" if folder.is_dir() else folder)
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise ValueError(f"--store {folder} cannot be written: {error.strerror}") from None
        return SolvedProblems(folder)


@options
class OptimizedRun(SizedRunOptions):
    """A run under a memory limit."""

    memory_limit: str = dataclasses.field()  # required here, unlike in its base


@options
def optimize(
    *,
    run: OptimizedRun,
    stored: StoreOptions = StoreOptions(),
    minimize: str = "makespan",
    time_limit: str = "60",
    effort: float | None = None,
    threads: int | None = None,
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    certificate: Annotated[Output, JSON] = NO_OUTPUT,
) -> Answer:
    """Find the fastest schedule within a memory limit, and a bound on any better one."""
    limit, link = MemoryLimit.read(run.memory_limit), run.links()
    limit_seconds = parse_seconds(time_limit, "--time-limit")
    check_modules("optimize needs", ("ortools",), "optimize")
    _check_links(link)
    store = stored.open()

    def report(result: "pj.results.Found[pj.results.Optimum]") -> Answer:
        out.save_table(result.best.table)
        best = pj.evaluate(result.best.table, scenario.table_costs(), link=link)
        folder = None if store is None else store.path
        held = room.stages.held(best)
        outcome = Outcome(scenario.table(), result, best, held, room, minimize, folder)
        if result.stopped != "interrupted" or certificate.path is not None:
            claim: Any = {"memory": held.memory, "limits": room.limits, "objective": minimize}
            bounds = {result.best.bound_by: result.lower_bound}
            claim |= {"offload": may_offload, "lower_bounds": bounds}
            certificate.save_certificate(pj.certificate(best, **claim))
        rendezvous = _rendezvous_makespan(outcome, scenario.table_costs())
        baselines = savings("schedule", minimize, result.baselines, result.value)
        data, view = as_json(outcome), _view(outcome, rendezvous)
        details = {"workers": [_workers(outcome)], "other schedules": [baselines]}
        if rendezvous is None:
            return Answer(data, view, details=details)
        data["rendezvous_makespan"] = rendezvous
        return Answer(data, view, next=_next_commands(scenario, out.path), details=details)

    try:
        scenario, room, may_offload = _read_problem(run, limit)
        with best_so_far(report) as keep, progress("looking for a first schedule") as show:

            def on_best(result: "pj.results.Found[pj.results.Optimum]") -> None:
                keep(result)
                text = f"best {seconds(result.value)}, bound {seconds(result.lower_bound)}"
                show(0, None, f"{text}, gap {percent(result.gap)}, from {result.best.source}")

            result = pj.optimize(
                scenario,
                memory_limit=room.search_limits(scenario.table()).tolist(),
                sizes=room.stages.sizes.tolist(),
                weight_share=room.stages.weight_share.tolist(),
                offload=may_offload,
                objective=minimize,
                time_limit=limit_seconds,
                effort=effort,
                num_threads=threads,
                store=store,
                on_best=on_best,
            )
    except pj.search.InfeasibleError as error:
        if is_json():
            print_json({"status": "infeasible", "makespan": None, "memory_limit": run.memory_limit})
        if error.argument and not limit.in_bytes:  # its text names the option, and the value
            raise
        text = error.text.replace("memory_limit", "room")  # the limit less the model's weights
        raise pj.search.InfeasibleError(f"{LIMIT_OPTION} {run.memory_limit}: {text}") from None
    return report(result)


def _rendezvous_makespan(outcome: "Outcome", costs: "pj.Costs") -> float | None:
    """Return the makespan under rendezvous links [s]; None if it is not longer."""
    run = outcome.run
    if outcome.result.stopped == "interrupted":  # too little time remains
        return None
    links = pj.Links("rendezvous", host_links=run.links.host_links)
    makespan = pj.evaluate(run.table, costs, link=links).makespan
    return makespan if makespan > run.makespan * (1 + 1e-9) else None


def _next_commands(scenario: "pj.Scenario", out: Path | None) -> tuple[str, ...]:
    """Return commands that write the table, and order its messages."""
    table = str(out or "best.csv")
    best = scenario.with_table(scenario.table()).replace(schedule=pj.costing.TableFile(table))
    order = command_line(best, "tune messages", ("link",), out="ordered.csv")
    save = line.command_line("optimize", line.written_but() | {"out": table})
    return (order,) if out else (save, order)


def _read_problem(run: OptimizedRun, limit: MemoryLimit) -> "tuple[pj.Scenario, Room, bool]":
    """Return the run, which may be planned for the limit, its memory, and whether it offloads."""
    from pipejax.costs.edits import HostTimes, has_host_times

    settings, activations = run.settings.without("memory_limit"), run.activations
    builder = None if run.name is None else pj.schedules.find(run.name)
    if builder is not None and "memory_limit" in builder.options and run.workers is not None:
        # the memory limit of activations, from a table of the same workers
        sizes = {"num_workers": run.workers, "num_microbatches": run.microbatches or 1}
        table = pj.schedules.build("1f1b", **sizes)
        room = limit.room(table, activations, run.cost_fields.costs.workload)
        planned = MemoryLimit([room.activations], in_bytes=False)
        limits = {"memory_limit": planned, "weight_share": float(room.stages.weight_share.max())}
        settings = settings._replace(options=settings.options | limits)
    scenario = required(parse_scenario(run, settings=settings))
    # times of O and L may be used even if the table has none: the search may offload
    table, costs = scenario.table(), scenario.table_costs()
    check_used(scenario, [table], letters=["pair"])  # the search may put in O and L
    room = limit.room(table, activations, scenario.workload)
    # a model always has times of O and L, also where activations do not go to the host
    offloads = has_host_times(costs) if scenario.workload is None else table.offloads
    return scenario, room, scenario.find_edit(HostTimes) is not None or offloads


def _check_links(link: pj.Links) -> None:
    """Refuse links that the search lacks."""
    from pipejax.search.schedule.problem import LINKS_OF_SEARCH

    if link.model not in LINKS_OF_SEARCH:
        others = ", ".join(LINKS_OF_SEARCH)
        raise ValueError(
            f"--link must be one of {others} here, got {link.model!r}: choose delay; the report "
            "also gives the time under rendezvous, and tune messages improves it"
        )


class Outcome(NamedTuple):
    """Problem and result of a search."""

    table: pj.ScheduleTable  # its placement of stages was searched
    result: "pj.results.Found[pj.results.Optimum]"
    run: "pj.Evaluation"  # of the best schedule, at the real costs
    held: HeldMemory  # its activation memory
    room: Room  # of activations
    objective: str
    store: Path | None  # folder of solved problems

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """Return the fastest other schedule within the limit, and its value [s]."""
        times = [(name, t) for name, t in self.result.baselines.items() if t is not None]
        return min(times, key=lambda entry: entry[1], default=None)

    @property
    def idle_saved(self) -> float | None:
        """Return the saved share of the best baseline's idle time; None without baselines."""
        if self.best_baseline is None:
            return None
        busy, workers = float(self.run.busy.sum()), self.run.workers
        idle = workers * self.best_baseline[1] - busy
        return 1 - (workers * self.result.value - busy) / idle if idle > 0 else 0.0


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the object of `--json`; times in seconds."""
    result, run, room = outcome.result, outcome.run, outcome.room
    return {
        "schedule": outcome.table.name,
        **pick(run, "workers stages microbatches"),
        "link": run.links.model,
        **pick(outcome, "objective idle_saved store"),
        "best": {"rows": [[*map(format_cell, row)] for row in result.best.table.rows()]},
        **pick(result, SEARCH_FIELDS),
        **pick(result.best, "status bound_by rounding offloaded seconds effort found_after source"),
        "baseline": result.baselines,
        **pick(run, "makespan max_span bubble_ratio span_bubble_ratio peak_in_flight"),
        "peak_memory": outcome.held.memory.peak,
        "memory_limit": room.limits,
        "memory_unit": room.stages.unit,
        "weight_share": outcome.held.weight_share,
        "static_bytes": room.stages.static,
    }


def _view(outcome: Outcome, rendezvous: float | None) -> Iterator[object]:
    """Yield the makespan, its gain and gap, the memory, and a longer makespan under rendezvous."""
    result, run, stages = outcome.result, outcome.run, outcome.room.stages
    word, value = "", run.makespan
    if outcome.objective == "span":
        word, value = " of the longest worker", run.max_span
    saved = ""
    if outcome.best_baseline is not None:
        name, other = outcome.best_baseline
        saved = f": {less_than(name, other, result.value)} ({seconds(other)})"
    yield f"[bold]{seconds(value)}[/] per step{word} within the memory limit{saved}"
    yield from search_end(result, "orders of these stages on these workers tried")
    unit = "" if stages.unit == "bytes" else f" {stages.unit}"
    worker = int(np.argmax(np.asarray(outcome.held.memory.peak) / outcome.room.limits))
    yield (
        f"fullest worker {worker}: {stages.text(outcome.held.memory.peak[worker])} of "
        f"{stages.text(outcome.room.limits[worker])}{unit}; bubble ratio "
        f"{percent(run.bubble_ratio)}; {result.best.offloaded} activations offloaded"
    )
    if rendezvous is not None:
        yield (
            f"with transfers as on NCCL (--link rendezvous): {seconds(rendezvous)}, "
            f"{percent(rendezvous / run.makespan - 1)} more, because its transfers block each other"
        )


def _workers(outcome: Outcome) -> TextTable:
    """Make a table of the workers: idle time and peak memory against the limit."""
    run, stages = outcome.run, outcome.room.stages
    columns: list[tuple[str, Iterable[object]]] = [
        ("worker", range(run.workers)),
        ("busy", map(seconds, run.busy)),
        ("idle", (percent(1 - busy / (run.makespan or 1)) for busy in run.busy)),
        ("peak in flight", run.peak_in_flight),
        ("peak memory", map(stages.text, outcome.held.memory.peak)),
        ("limit", map(stages.text, outcome.room.limits)),
    ]
    if stages.static is None:
        return grid(columns)
    caption = "fixed: parameters, gradients and optimizer, outside the limit of activations"
    return grid([*columns, ("fixed", map(gigabytes, stages.static))], caption=caption)
