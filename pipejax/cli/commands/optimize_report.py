"""How `pipejax optimize` reports what it found."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from pipejax.cli.options.activations import HeldMemory
from pipejax.cli.options.memory_limit import Room
from pipejax.cli.output.numbers import console, gigabytes, percent, seconds
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.analysis.evaluate import Evaluation
    from pipejax.search.schedule.solution import Solution


class Outcome(NamedTuple):
    """What was asked and found.

    Attributes:
      given: the table that said where stages are.
      best: the last solution.
      run: its schedule at the real costs.
      held: its activation memory.
      room: what activations may take.
      objective: what was to be least.
      stopped: what ended the search; None if nothing was left to find.
      store: folder of solved problems, or None.
      out: file that the schedule was written to, or None.
    """

    given: ScheduleTable
    best: "Solution"
    run: "Evaluation"
    held: HeldMemory
    room: Room
    objective: str
    stopped: str | None
    store: Path | None
    out: Path | None

    @property
    def value(self) -> float:
        """What was to be least [s]."""
        return self.run.makespan if self.objective == "makespan" else self.run.max_span

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The fastest of the schedules compared with that keep the limit."""
        known = [(name, time) for name, time in self.best.baseline.items() if time is not None]
        return min(known, key=lambda entry: entry[1], default=None)

    @property
    def idle_saved(self) -> float | None:
        """Share of the best baseline's idle time that is gone."""
        if self.best_baseline is None:
            return None
        busy, workers = float(self.run.busy.sum()), self.run.workers
        idle = workers * self.best_baseline[1] - busy
        return 1 - (workers * self.value - busy) / idle if idle > 0 else 0.0


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Collect what `--json` prints.

    Args:
      outcome: what was found.

    Returns:
      Results by name; times in seconds.
    """
    best, run, room = outcome.best, outcome.run, outcome.room
    return {
        "schedule": outcome.given.name,
        "workers": run.workers,
        "stages": run.stages,
        "microbatches": run.microbatches,
        "link": run.links.model,
        "objective": outcome.objective,
        "status": best.status,
        "stopped": outcome.stopped,
        "makespan": run.makespan,
        "max_span": run.max_span,
        "lower_bound": best.lower_bound,
        "gap": best.gap,
        "rounding": best.rounding,
        "bubble_ratio": run.bubble_ratio,
        "span_bubble_ratio": run.span_bubble_ratio,
        "idle_saved": outcome.idle_saved,
        "peak_in_flight": run.peak_in_flight,
        "peak_memory": outcome.held.memory.peak,
        "memory_limit": room.limits,
        "memory_unit": room.stages.unit,
        "weight_share": outcome.held.weight_share,
        "static_bytes": room.stages.static,
        "offloaded": best.offloaded,
        "seconds": best.seconds,
        "source": best.source,
        "baseline": dict(best.baseline),
        "store": None if outcome.store is None else str(outcome.store),
        "out": None if outcome.out is None else str(outcome.out),
    }


def print_report(outcome: Outcome) -> None:
    """Print the result for a person.

    Args:
      outcome: what was found.
    """
    best, run = outcome.best, outcome.run
    out = console()
    out.print(
        f"[bold]{escape(outcome.given.name)}[/] optimised, {run.workers} workers, "
        f"{run.stages} stages, {run.microbatches} microbatches, "
        f"{run.links.model} links"
    )
    totals = Table(show_header=False, box=None, padding=(0, 2))
    totals.add_row(
        "status", best.status + (f", ended by {outcome.stopped}" if outcome.stopped else "")
    )
    totals.add_row("makespan", f"[bold]{seconds(run.makespan)}[/]")
    if outcome.objective == "span":
        totals.add_row("largest span", f"[bold]{seconds(run.max_span)}[/], which was to be least")
    totals.add_row("lower bound", f"{seconds(best.lower_bound)}, gap {percent(best.gap)}")
    if best.rounding:
        totals.add_row("rounding", f"{seconds(best.rounding)}  times are whole units here")
    totals.add_row("bubble ratio", percent(run.bubble_ratio) + "  idle / all")
    if outcome.best_baseline is not None and outcome.idle_saved is not None:
        name, time = outcome.best_baseline
        less = f"{percent(outcome.idle_saved)} less than {name} ({seconds(time)})"
        totals.add_row("idle", less)
    totals.add_row("offloaded", f"{best.offloaded} activations")
    totals.add_row("found by", f"{best.source}, in {seconds(best.seconds)}")
    out.print(totals)
    out.print(_workers(outcome))
    if best.baseline:
        out.print(_baselines(outcome))
    if outcome.out is not None:
        out.print(f"wrote the table to {outcome.out}", markup=False, soft_wrap=True)


def _workers(outcome: Outcome) -> Table:
    run, room = outcome.run, outcome.room
    grid = Table("worker", "busy", "idle", "peak in flight", "peak memory", "limit")
    if room.stages.static is not None:
        grid.add_column("beside it")
        grid.caption = "beside it: parameters, gradients and optimizer, taken off first"
    for worker in range(run.workers):
        row = [
            str(worker),
            seconds(run.busy[worker]),
            percent(1 - run.busy[worker] / (run.makespan or 1)),
            str(run.peak_in_flight[worker]),
            room.stages.text(outcome.held.memory.peak[worker]),
            room.stages.text(room.limits[worker]),
        ]
        if room.stages.static is not None:
            row.append(gigabytes(room.stages.static[worker]))
        grid.add_row(*row)
    return grid


def _baselines(outcome: Outcome) -> Table:
    grid = Table("other schedules", outcome.objective, "longer by")
    known = sorted(outcome.best.baseline.items(), key=lambda e: (e[1] is None, e[1] or 0.0))
    for name, time in known:
        if time is None:
            grid.add_row(name, "does not fit", "-")
        else:
            more = time / outcome.value - 1 if outcome.value else 0.0
            grid.add_row(name, seconds(time), percent(more))
    return grid
