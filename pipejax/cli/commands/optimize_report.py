"""How `pipejax optimize` reports what it found."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

import pipejax as pj
from pipejax.cli.options.memory import HeldMemory, Room
from pipejax.cli.output.files import Output
from pipejax.cli.output.report import (
    facts,
    gigabytes,
    grid,
    heading,
    percent,
    pick,
    print_all,
    print_written,
    seconds,
)

if TYPE_CHECKING:
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
      out: where the schedule was to be written.
      certificate: where its certificate was to be written.
    """

    given: pj.ScheduleTable
    best: "Solution"
    run: "pj.Evaluation"
    held: HeldMemory
    room: Room
    objective: str
    stopped: str | None
    store: Path | None
    out: Output
    certificate: Output

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


def as_certificate(outcome: Outcome, may_offload: bool) -> dict[str, Any]:
    """Claim the plan, that it keeps the limits, and the bound on all others."""
    return pj.certificate(
        outcome.run,
        memory=outcome.held.memory,
        limits=outcome.room.limits,
        objective=outcome.objective,
        offload=may_offload,
        lower_bounds={outcome.best.bound_by: outcome.best.lower_bound},
    )


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
        **pick(run, "workers stages microbatches"),
        "link": run.links.model,
        **pick(outcome, "objective stopped idle_saved store"),
        **outcome.out.as_json(),
        **outcome.certificate.as_json(),
        **pick(best, "status lower_bound bound_by gap rounding offloaded seconds source baseline"),
        **pick(run, "makespan max_span bubble_ratio span_bubble_ratio peak_in_flight"),
        "peak_memory": outcome.held.memory.peak,
        "memory_limit": room.limits,
        "memory_unit": room.stages.unit,
        "weight_share": outcome.held.weight_share,
        "static_bytes": room.stages.static,
    }


def print_report(outcome: Outcome) -> None:
    """Print the result for a person.

    Args:
      outcome: what was found.
    """
    best, run = outcome.best, outcome.run
    ended = f", ended by {outcome.stopped}" if outcome.stopped else ""
    totals = [
        ("status", best.status + ended),
        ("makespan", f"[bold]{seconds(run.makespan)}[/]"),
        (
            "lower bound",
            f"{seconds(best.lower_bound)}, gap {percent(best.gap)}, by {best.bound_by}",
        ),
        ("bubble ratio", percent(run.bubble_ratio) + "  idle / all"),
        ("offloaded", f"{best.offloaded} activations"),
        ("found by", f"{best.source}, in {seconds(best.seconds)}"),
    ]
    if outcome.best_baseline is not None and outcome.idle_saved is not None:
        name, time = outcome.best_baseline
        less = f"{percent(outcome.idle_saved)} less than {name} ({seconds(time)})"
        totals.insert(4, ("idle", less))
    if best.rounding:
        totals.insert(3, ("rounding", f"{seconds(best.rounding)}  times are whole units here"))
    if outcome.objective == "span":
        totals.insert(2, ("largest span", f"{seconds(run.max_span)}, which was to be least"))
    print_all(
        heading(run, f"{run.links.model} links", outcome.given.name),
        facts(totals),
        _workers(outcome),
    )
    if best.baseline:
        print_all(_baselines(outcome))
    print_written("wrote the table to", outcome.out.written)
    print_written("wrote the certificate to", outcome.certificate.written)


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
    known = sorted(outcome.best.baseline.items(), key=lambda e: (e[1] is None, e[1] or 0.0))
    value = outcome.value
    return grid(
        [
            ("other schedules", (name for name, _ in known)),
            (outcome.objective, ("does not fit" if t is None else seconds(t) for _, t in known)),
            (
                "longer by",
                ("-" if t is None else percent(t / value - 1 if value else 0.0) for _, t in known),
            ),
        ]
    )
