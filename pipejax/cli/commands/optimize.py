"""`pipejax optimize`: the fastest schedule that keeps a memory limit, and a bound on all others."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import pipejax as pj
from pipejax.base.files import check_writable
from pipejax.cli.options.costs import COST_OPTIONS
from pipejax.cli.options.line import command_line, written, written_but
from pipejax.cli.options.memory import (
    LIMIT_OPTION,
    HeldMemory,
    MemoryLimit,
    Room,
)
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, SizedRunOptions
from pipejax.cli.options.scenario import parse_scenario, required
from pipejax.cli.options.values import CountIfGiven, TimeLimit, parse_seconds
from pipejax.cli.output.answer import Answer, best_so_far
from pipejax.cli.output.files import NO_OUTPUT, Output, certify, check_modules, save_table
from pipejax.cli.output.kinds import CERTIFICATE, TABLE
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import FOUND, facts, grid, heading, is_json, pick, plain, print_json
from pipejax.schedules.cells.ops import format_cell

if TYPE_CHECKING:
    from pipejax.search.found import Found
    from pipejax.search.schedule.plan import Optimum
    from pipejax.search.schedule.store import SolvedProblems


# what ended a search that had something left to find
ENDED = {"time": "time limit", "effort": "effort", "interrupted": "interrupted"}


@options
class StoreOptions:
    """Where solved problems are kept.

    Attributes:
      store: $PIPEJAX_CACHE or the user's if not given.
    """

    store: Path | None = None
    no_store: bool = False

    def open(self) -> "SolvedProblems | None":
        """Open the store; a folder that was named has to be one that can be written."""
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
    """A run under a memory limit.

    Attributes:
      memory_limit: activations, or with --model bytes of the device, as 40GB; one number or one per
        worker.
    """

    memory_limit: str = dataclasses.field()  # required here, unlike in its base


@options
def optimize(
    *,
    run: OptimizedRun,
    links: LinkOptions = LinkOptions(),
    stored: StoreOptions = StoreOptions(),
    minimize: str = "makespan",
    time_limit: TimeLimit = "60",
    effort: float | None = None,
    threads: CountIfGiven = None,
    out: Annotated[Output, TABLE] = NO_OUTPUT,
    certificate: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
) -> Answer:
    """Find the fastest schedule that keeps a memory limit, and how far from the best it can be.

    Options:
      effort: about as many seconds of one idle core. On one thread, as it is unless --threads says
        more, the answer is the same whatever else the machine does, if time is not up first.
      certificate: for `pipejax verify`.
      out: the best table (.csv or .json).

    Example:
      pipejax optimize -s 1f1b -P 4 -M 8 -T F=1,I=1,W=1 --memory-limit 3 --time-limit 30s
    """
    from pipejax.search.schedule.problem import LINKS_OF_SEARCH, OBJECTIVES

    limit, link = MemoryLimit.read(run.memory_limit), links.links()
    if not (within := parse_seconds(time_limit, "--time-limit")):
        raise ValueError(f"--time-limit must be above 0 seconds, got {time_limit!r}")
    for option, value, known in (
        ("--link", link.model, LINKS_OF_SEARCH),
        ("--minimize", minimize, OBJECTIVES),
    ):
        if value not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)} here, got {value!r}")
    _check_solver()
    kept = stored.open()

    def report(found: "Found[Optimum]") -> Answer:
        save_table(found.best.table, out)
        best = pj.evaluate(found.best.table, task.costs, link=link)
        held, folder = task.room.stages.held(best), None if kept is None else kept.path
        outcome = Outcome(task.table, found, best, held, task.room, minimize, folder)
        if found.stopped != "interrupted" or certificate.path is not None:
            certify(as_certificate(outcome, task.may_offload), certificate)
        files = {"wrote the table to": out, "wrote the certificate to": certificate}
        result = as_json(outcome)
        slower = _under_rendezvous(outcome, task.costs)
        go_on = () if slower is None else _next_commands(out.path)
        result |= {} if slower is None else {"rendezvous_makespan": slower}
        text = chain(_said(outcome, result), _blocked(best, slower))
        return Answer(result, text, files, next=go_on)

    try:
        task = _pose(run, link, limit)
        with best_so_far(report) as keep, _shown() as show:

            def tell(found: "Found[Optimum]") -> None:
                keep(found)
                show(found)

            found = pj.optimize(
                task.table,
                task.costs,
                memory_limit=task.room.of_search(task.table).tolist(),
                sizes=task.room.stages.sizes.tolist(),
                weight_share=task.room.stages.weight_share.tolist(),
                offload=task.may_offload,
                link=link,
                objective=minimize,
                time_limit=within,
                effort=effort,
                num_threads=threads,
                store=kept,
                on_best=tell,
            )
    except pj.search.InfeasibleError as error:
        if is_json():
            print_json({"status": "infeasible", "makespan": None, "memory_limit": run.memory_limit})
        if error.argument and not limit.in_bytes:  # its text names the option, and the value
            raise
        room = error.text.replace("memory_limit", "room")  # what the model leaves of the limit
        raise pj.search.InfeasibleError(f"{LIMIT_OPTION} {run.memory_limit}: {room}") from None
    return report(found)


def _under_rendezvous(outcome: "Outcome", costs: "pj.Costs") -> float | None:
    """What the schedule takes where transfers meet, as on NCCL; None if that is no longer [s]."""
    run = outcome.run
    if outcome.found.stopped == "interrupted":  # little time is left to say what was found
        return None
    links = pj.Links("rendezvous", host_links=run.links.host_links)
    longer = pj.evaluate(run.table, costs, link=links).makespan
    return longer if longer > run.makespan * (1 + 1e-9) else None


def _blocked(run: "pj.Evaluation", slower: float | None) -> Iterator[object]:
    """Say what is lost where transfers wait for each other, and what finds a better order."""
    if slower is not None:
        yield plain(
            f"under rendezvous links, as on NCCL, this table takes {seconds(slower)}, "
            f"{percent(slower / run.makespan - 1)} more: tune messages finds a better order of its "
            "transfers"
        )


def _next_commands(out: Path | None) -> tuple[str, ...]:
    """Write the table, if that is not done, and order its messages."""
    table = out or "best.csv"
    costs = written(*COST_OPTIONS, "host_links")
    order = command_line("tune messages", {"table": table, **costs, "out": "ordered.csv"})
    again = command_line("optimize", written_but() | {"out": table})
    return (order,) if out else (again, order)


class _PosedTask(NamedTuple):
    table: pj.ScheduleTable
    costs: "pj.Costs"
    room: Room
    may_offload: bool


def _pose(
    run: OptimizedRun,
    links: pj.Links,
    limit: MemoryLimit,
) -> _PosedTask:
    """Build the table, which may itself be planned for the limit, and its costs."""
    from pipejax.costs.edits import HostTimes, has_host_times

    settings, activations = run.settings.without("memory_limit"), run.activations
    builder = None if run.name is None else pj.schedules.find(run.name)
    if builder is not None and "memory_limit" in builder.options and run.workers is not None:
        like = pj.schedules.build(
            "1f1b", num_workers=run.workers, num_microbatches=run.microbatches or 1
        )
        room = limit.room(like, activations, run.cost_fields.costs.workload)
        options = settings.options | {
            "memory_limit": MemoryLimit([room.activations], in_bytes=False),
            "weight_share": float(room.stages.weight_share.max()),
        }
        settings = settings._replace(options=options)
    scenario = required(parse_scenario(run, links, settings=settings))
    # times of O and L may be used even if the table has none: the search may offload
    table, costs = scenario.table(), scenario.table_costs()
    room = limit.room(table, activations, scenario.workload)
    # a model's times of O and L stand there whether or not activations are to go to the host
    is_said = has_host_times(costs) if scenario.workload is None else table.offloads
    return _PosedTask(table, costs, room, scenario.find_edit(HostTimes) is not None or is_said)


def _check_solver() -> None:
    from pipejax.search.schedule.optimize import NO_SOLVER

    try:
        importlib.import_module("ortools")
    except ModuleNotFoundError:
        raise ValueError(NO_SOLVER) from None


@contextmanager
def _shown() -> "Iterator[Callable[[Found[Optimum]], None]]":
    """Show the best so far, and each improvement."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with progress("looking for a first schedule", None, *columns) as bar:
        last: list[float] = []

        def show(found: "Found[Optimum]") -> None:
            line = (
                f"best {seconds(found.value)}, bound {seconds(found.lower_bound)}, gap "
                f"{percent(found.gap)}, from {found.best.source}"
            )
            bar.move(description=line)
            if last != [found.value]:
                bar.note(f"{found.best.seconds:7.1f} s  {line}")
            last[:] = [found.value]

        yield show


class Outcome(NamedTuple):
    """What was asked and found."""

    given: pj.ScheduleTable  # the table that said where stages are
    found: "Found[Optimum]"  # the last solution
    run: "pj.Evaluation"  # its schedule at the real costs
    held: HeldMemory  # its activation memory
    room: Room  # what activations may take
    objective: str  # what was to be least
    store: Path | None  # folder of solved problems, or None

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The fastest of the schedules compared with that keep the limit."""
        known = [(name, time) for name, time in self.found.baselines.items() if time is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    @property
    def idle_saved(self) -> float | None:
        """Share of the best baseline's idle time that is gone."""
        if self.best_baseline is None:
            return None
        busy, workers = float(self.run.busy.sum()), self.run.workers
        idle = workers * self.best_baseline[1] - busy
        return 1 - (workers * self.found.value - busy) / idle if idle > 0 else 0.0


def as_certificate(outcome: Outcome, may_offload: bool) -> dict[str, Any]:
    """Claim the plan, that it keeps the limits, and the bound on all others."""
    return pj.certificate(
        outcome.run,
        memory=outcome.held.memory,
        limits=outcome.room.limits,
        objective=outcome.objective,
        offload=may_offload,
        lower_bounds={outcome.found.best.bound_by: outcome.found.lower_bound},
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Collect what `--json` prints: results by name, times in seconds."""
    found, run, room = outcome.found, outcome.run, outcome.room
    return {
        "schedule": outcome.given.name,
        **pick(run, "workers stages microbatches"),
        "link": run.links.model,
        **pick(outcome, "objective idle_saved store"),
        "best": {"rows": [[*map(format_cell, row)] for row in found.best.table.rows()]},
        **pick(found, FOUND),
        **pick(found.best, "status bound_by rounding offloaded seconds effort found_after source"),
        "baseline": found.baselines,
        **pick(run, "makespan max_span bubble_ratio span_bubble_ratio peak_in_flight"),
        "peak_memory": outcome.held.memory.peak,
        "memory_limit": room.limits,
        "memory_unit": room.stages.unit,
        "weight_share": outcome.held.weight_share,
        "static_bytes": room.stages.static,
    }


def _said(outcome: Outcome, result: Mapping[str, Any]) -> Iterator[object]:
    found, run, best = outcome.found, outcome.run, outcome.found.best
    ended = f", ended by {ENDED[found.stopped]}" if found.stopped in ENDED else ""
    bound = f"{seconds(found.lower_bound)}, gap {percent(found.gap)}, by {best.bound_by}"
    totals = [("status", best.status + ended), ("makespan", f"[bold]{seconds(run.makespan)}[/]")]
    if outcome.objective == "span":
        totals.append(("largest span", f"{seconds(run.max_span)}, which was to be least"))
    totals.append(("lower bound", bound))
    if best.rounding:
        totals.append(("rounding", f"{seconds(best.rounding)}  times are whole units here"))
    totals.append(("bubble ratio", percent(run.bubble_ratio) + "  idle / all"))
    if outcome.best_baseline is not None and outcome.idle_saved is not None:
        name, time = outcome.best_baseline
        less = f"{percent(outcome.idle_saved)} less than {name} ({seconds(time)})"
        totals.append(("idle", less))
    totals.append(("offloaded", f"{best.offloaded} activations"))
    when = f"after {seconds(best.found_after)} of {seconds(best.seconds)}"
    totals.append(("found by", f"{best.source}, {when}"))
    yield f"{heading(result, ' optimised')}, {run.links.model} links"
    yield facts(totals)
    yield _workers(outcome)
    if found.baselines:
        yield _baselines(outcome)


def _workers(outcome: Outcome) -> Table:
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
    beside = "beside it: parameters, gradients and optimizer, taken off first"
    return grid([*columns, ("beside it", map(gigabytes, stages.static))], caption=beside)


def _baselines(outcome: Outcome) -> Table:
    known = sorted(outcome.found.baselines.items(), key=lambda e: (e[1] is None, e[1] or 0.0))
    value = outcome.found.value
    longer = (None if t is None else t / value - 1 if value else 0.0 for _, t in known)
    return grid(
        [
            ("other schedules", (name for name, _ in known)),
            (outcome.objective, ("does not fit" if t is None else seconds(t) for _, t in known)),
            ("longer by", map(percent, longer)),
        ]
    )
