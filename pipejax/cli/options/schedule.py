"""Options of schedules: what a table is built with besides workers and microbatches."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.checks import share
from pipejax.cli.options.activations import ActivationOptions
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.declared import CountIfGiven, Text, WeightShare
from pipejax.cli.options.memory_limit import MemoryLimit
from pipejax.cli.options.numbers import parse_list, parse_number
from pipejax.cli.options.pricing import Pricing
from pipejax.schedules import Builder, find
from pipejax.schedules.naming import told_options

PLANNED = {  # options of builders that the command line calls otherwise: runs have these names too
    "transfer": "planned_comm",
    "offload": "planned_offload",
    "load": "planned_load",
}
OF_RUNS = ("weight_share",)  # options that say something of a run too, under any schedule


class TableOptions(NamedTuple):
    """Options of schedules that build tables for given workers and microbatches.

    Attributes:
      options: those that are given.
      of_runs: those that the command reads too, under any schedule.
      repair: what is known to be wrong with tables, see `read_table`.
      recomputes: whether every backward recomputes its forward first.
    """

    options: dict[str, Any]
    of_runs: tuple[str, ...] = ()
    repair: str | None = None
    recomputes: bool = False

    def builder(self, schedule: str) -> Builder:
        """Return what builds a schedule."""
        return find(schedule, repair=self.repair)

    def build(
        self,
        schedule: str,
        workers: int,
        microbatches: int,
        pricing: Pricing | None = None,
    ) -> pj.ScheduleTable:
        """Build a table; options that the schedule does not have are an error.

        A schedule that is planned for times is planned for those of the run, if they are known
        and no slots are given.

        Raises:
          ValueError: if the schedule does not exist for these numbers.
        """
        self.check([schedule])
        size = {"num_workers": workers, "num_microbatches": microbatches}
        builder = self.builder(schedule)
        given = self.of_table(schedule)
        like = functools.partial(
            _with_stages, given.get("stages_per_worker", builder.stages_per_worker), size
        )
        if "memory_limit" in given:
            sized = ActivationOptions(given.get("weight_share"), None)
            workload = None if pricing is None else pricing.workload
            given["memory_limit"] = given["memory_limit"].room(like(), sized, workload).activations
        if builder.planned and pricing and "slots" not in given:
            times = times_of(pricing.of(like()))
            given = {k: v for k, v in times.items() if k in ("slots", *builder.options)} | given
        return self.finished(builder.function(**size, **given))

    def finished(self, table: pj.ScheduleTable) -> pj.ScheduleTable:
        """Put into a table what options put into any."""
        return table.with_recomputation() if self.recomputes else table

    def of_table(self, schedule: str) -> dict[str, Any]:
        """Leave out what says something of the run alone: the schedule does not have it."""
        takes = self.builder(schedule).takes
        return {k: v for k, v in self.options.items() if k in takes or k not in self.of_runs}

    def check(self, schedules: Sequence[str]) -> None:
        """Refuse an option that none of the schedules has.

        Raises:
          ValueError: if there is one.
        """
        builders = {name: self.builder(name) for name in schedules}
        for option in self.options:
            if option in self.of_runs or any(option in own.takes for own in builders.values()):
                continue
            words = option.replace("_", " ")
            if len(builders) > 1:
                raise ValueError(
                    f"{written(option)}: none of {', '.join(builders)} has this option"
                )
            ((name, builder),) = builders.items()
            raise ValueError(
                f"{written(option)}: {name} takes no {words}: {told_options(builder, written)}"
            )

    def of(self, schedule: str) -> "TableOptions":
        """Keep the options that a schedule has."""
        takes = self.builder(schedule).takes
        own = {k: v for k, v in self.options.items() if k in takes}
        return self._replace(options=own, of_runs=())


def _with_stages(stages_per_worker: int, size: Mapping[str, int]) -> pj.ScheduleTable:
    """Return any table with so many stages per worker: costs depend on nothing else of it."""
    if stages_per_worker == 1:
        return pj.schedules.build("1f1b", **size)
    given = {**size, "stages_per_worker": stages_per_worker}
    return pj.schedules.build("interleaved-1f1b", **given)


def times_of(costs: "pj.Costs") -> dict[str, Any]:
    """Return what a schedule is planned for: means, but O and L of each stage.

    Args:
      costs: what the run costs [s].

    Returns:
      Options of builders: slots, transfer, offload, load.
    """
    from pipejax.costs.costs import PHASE_FIELDS

    def mean(name: str) -> float:
        values = np.asarray(0.0 if getattr(costs, name) is None else getattr(costs, name), float)
        return float(values.mean()) if values.size else 0.0

    def by_stage(time: Any) -> Any:
        values = np.asarray(0.0 if time is None else time, float)
        return (values.mean(axis=1) if values.ndim == 2 else values).tolist()

    host = {"offload": costs.offload, "load": costs.load}
    return {
        "slots": {letter: mean(PHASE_FIELDS[letter]) for letter in "FBIW"},
        "transfer": mean("latency") + mean("transmit"),
        **{name: by_stage(time) for name, time in host.items()},
    }


class ScheduleSettings(NamedTuple):
    """What a schedule takes besides workers and microbatches.

    Attributes:
      admission: each-stage (if not given) or first-stage.
      slots: with I and W as F=1,I=1,W=1; schedules planned for times take those of the run if not
        given.
      memory_limit: that zero-bubble and ada-offload are planned for.
      planned_comm: that of the run if not given.
      planned_offload: a number or one per stage, for ada-offload and pipe-offload; that of the run
        if not given.
      planned_load: as O.
      group_size: from 1 to P.
      recompute_cells: under any schedule, and into a table of --table.
    """

    stages_per_worker: CountIfGiven = None
    waves: CountIfGiven = None
    pipes: CountIfGiven = None
    accumulation: CountIfGiven = None
    admission: Text = None
    runs: CountIfGiven = None
    local_steps: CountIfGiven = None
    stage_shares: Text = None
    slots: Text = None
    memory_limit: Text = None
    weight_share: WeightShare = None
    planned_comm: float | None = None
    planned_offload: Text = None
    planned_load: Text = None
    offload_share: float | None = None
    group_size: CountIfGiven = None
    schedule_options: Text = None
    recompute_cells: bool = False

    def chosen(self) -> TableOptions:
        """Keep what is given."""
        options = {name: value for name, value in self._asdict().items() if value is not None}
        recomputes = options.pop("recompute_cells")
        if self.schedule_options is not None:
            own = _parse_options(options.pop("schedule_options"))
            for name in own:
                if name in self._fields:
                    raise ValueError(f"--schedule-options {name}: it has an option, {flag(name)}")
            options |= own
        if self.weight_share is not None:
            share(self.weight_share, "--weight-share")
        if self.stage_shares is not None:
            options["stage_shares"] = parse_list(self.stage_shares, "--stage-shares")
        for name in ("planned_offload", "planned_load"):
            if name in options:
                times = parse_list(options[name], flag(name))
                options[name] = times if len(times) > 1 else times[0]
        for name, written_as in PLANNED.items():
            if written_as in options:
                options[name] = options.pop(written_as)
        if self.memory_limit is not None:
            options["memory_limit"] = MemoryLimit.read(self.memory_limit)
        if self.slots is not None:
            options["slots"] = _parse_slots(self.slots)
        return TableOptions(options, recomputes=recomputes)


def _parse_options(text: str) -> dict[str, Any]:
    """Read options of a schedule of the user's own: numbers, true, false, or texts."""
    found: dict[str, Any] = {}
    for entry in text.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not (name.isidentifier() and equals and value) or name in found:
            raise ValueError(f"--schedule-options must be as depth=2,kind=wide, got {text!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def written(option: str) -> str:
    """Return how an option of builders is written on the command line."""
    return flag(PLANNED.get(option, option))


def _parse_slots(text: str) -> dict[str, float]:
    slots: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        duration = parse_number(value, f"--slots: {letter}")
        if letter not in "FBIW" or letter in slots or duration == 0:
            raise ValueError(f"--slots: expected F, B, I, W once each, above 0, got {text!r}")
        slots[letter] = duration
    if {"I", "W"} <= set(slots):
        slots.setdefault("B", slots["I"] + slots["W"])
    if not {"F", "B"} <= set(slots):
        raise ValueError(f"--slots: expected F and B, or F, I and W, as F=1,B=2, got {text!r}")
    half = slots["B"] / 2  # of a backward that is split, as in costs
    return {"I": half, "W": half, **slots}
