"""Headlines and captions of runs, for pictures and the terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import Window
from pipejax.base.checks import resolve_choice
from pipejax.base.data_files import UNITS, time_unit
from pipejax.schedules.cells.ops import SHARDING, STEP_END
from pipejax.schedules.table.links import LINK_OPTIONS

Run = TypeVar("Run")
SLOTS = "slots"
TIME_UNITS = ("s", "ms", "us", "ns")
_OPTIONAL = (*STEP_END, *SHARDING)  # phases whose default time is 0


class TimeUnit(NamedTuple):
    """Unit in which times are written."""

    seconds: float  # seconds of one unit; 1 for the slots of a table
    name: str

    def text(self, time: float) -> str:
        """Format a time, given in seconds, with this unit."""
        return f"{time / self.seconds:.5g} {self.name}"


def choose_unit(runs: Sequence[Evaluation], unit: str | None = None) -> TimeUnit:
    """Return the requested unit; by default, the most readable unit for the longest run."""
    if unit is None:
        return TimeUnit(*time_unit(max(run.makespan for run in runs)))
    name = resolve_choice(unit, (*TIME_UNITS, SLOTS), "unit")
    return TimeUnit(1.0 if name == SLOTS else UNITS[name][1], name)


def named(runs: Iterable[tuple[str, Run]]) -> dict[str, Run]:
    """Return {name: run}, with numbers after repeated names."""
    runs_by_name: dict[str, Run] = {}
    counts = Counter[str]()
    for name, run in runs:
        counts[name] += 1
        runs_by_name[f"{name} ({counts[name]})" if counts[name] > 1 else name] = run
    return runs_by_name


def headlines(name: str, run: Evaluation, unit: TimeUnit) -> list[str]:
    """Return three headlines of a run, from full (step time, idle share, links) to short."""
    facts = [f"idle {100 * run.bubble_ratio:.1f} %", f"link model {run.links.model}"]
    start = f"{name}: {unit.text(run.makespan)}"
    return [", ".join([start, *facts[:count]]) for count in (2, 1, 0)]


def caption_of_runs(
    runs: Mapping[str, Evaluation],
    unit: TimeUnit,
    *,
    setting: str = "",
    window: Window | None = None,
) -> str:
    """Write the caption of runs: first the facts that all runs share, then the other facts."""
    facts = [_facts(run, unit) for run in runs.values()]
    shared = [fact for fact in facts[0] if len(runs) > 1 and all(fact in other for other in facts)]
    sentences = [", ".join([setting, *shared] if setting else shared)]
    for (name, run), run_facts in zip(runs.items(), facts, strict=True):
        details = [fact for fact in run_facts if fact not in shared]
        details += [f"makespan {unit.text(run.makespan)}", f"bubble ratio {run.bubble_ratio:.4g}"]
        sentences.append(f"{name}: {', '.join(details)}")
    if window is not None:
        low, high = (f"{time / unit.seconds:.5g}" for time in window)
        sentences.append(f"Shown: {low} to {high} {unit.name}")
    return " ".join(f"{sentence}." for sentence in sentences if sentence)


def _facts(run: Evaluation, unit: TimeUnit) -> list[str]:
    """List the facts of a run for a caption: workers, microbatches, op times and links."""
    costs = run.costs
    timed = [phase for phase in run.table.used_phases if phase.kind.time]
    timed += [phase for phase in _OPTIONAL if np.any(costs.time(phase))]
    texts = {phase.name: _range(costs.time(phase), unit) for phase in timed}
    times = [f"{letter} {text}" for letter, text in texts.items() if text]
    if costs.pair_factor is not None and run.table.is_fused.any():
        low, high = np.min(costs.pair_factor), np.max(costs.pair_factor)
        factor = f"{low:g}" if low == high else f"({low:g} to {high:g})"
        times.append(f"fused pair max(F, B) + {factor} min(F, B)")
    elif costs.pair is not None:
        times.append(f"fused pair {_range(costs.pair, unit)}")
    message_times = [
        f"{name} {_range(cost, unit)}"
        for name, cost in (("latency", costs.latency), ("transmit", costs.transmit))
        if np.any(np.asarray(cost))
    ]
    settings = link_settings(run.links)
    return [
        f"{run.workers} workers",
        f"{run.microbatches} microbatches",
        *times,
        f"messages {' + '.join(message_times) or 'free'}",
        f"link model {run.links.model}{f' ({settings})' if settings else ''}",
    ]


def _range(cost: Any, unit: TimeUnit) -> str:
    """Write a cost as a number or as "low to high"; "" if the cost has no values."""
    if cost is None:
        return ""
    values = np.asarray(cost, float)
    if not values.size:
        return ""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return unit.text(low)
    return f"{low / unit.seconds:.5g} to {unit.text(high)}"


def link_settings(links: Any) -> str:
    """Write all settings of links that differ from their defaults, except the link model."""
    changed = {name: value for name, value in links.changed().items() if name != "model"}
    return ", ".join(LINK_OPTIONS[name].caption.format(value) for name, value in changed.items())
