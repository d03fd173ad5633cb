"""Options of schedules: what a table is built with besides workers and microbatches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from pipejax import schedules
from pipejax.cli.options.activations import WeightShare
from pipejax.cli.options.numbers import parse_seconds
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.costs.costs import Costs


Text = str | None
OF_RUNS = ("weight_share",)  # options that say something of a run too, under any schedule


class TableOptions(NamedTuple):
    """Options of schedules that build tables for given workers and microbatches."""

    options: dict[str, Any]

    def build(
        self,
        schedule: str,
        workers: int,
        microbatches: int,
        costs_of: "Callable[[ScheduleTable], Costs] | None" = None,
    ) -> ScheduleTable:
        """Build a table; options that the schedule does not have are an error.

        A schedule that is planned for times is planned for those of the run, if they are known
        and no slots are given.

        Raises:
          ValueError: if the schedule does not exist for these numbers.
        """
        size = {"num_workers": workers, "num_microbatches": microbatches}
        builder = schedules.REGISTRY.get(schedule)
        given = self.of_table(schedule)
        if builder is not None and builder.planned and costs_of and "slots" not in given:
            like = schedules.build("1f1b", **size)  # one stage per worker, as all of these
            times = times_of(costs_of(like))
            given = {k: v for k, v in times.items() if k in ("slots", *builder.options)} | given
        return schedules.build(schedule, **size, **given)

    def of_table(self, schedule: str) -> dict[str, Any]:
        """Leave out what says something of the run alone: the schedule does not have it."""
        builder = schedules.REGISTRY.get(schedule)
        takes = () if builder is None else builder.options
        return {k: v for k, v in self.options.items() if k in takes or k not in OF_RUNS}

    def of(self, schedule: str) -> "TableOptions":
        """Keep the options that a schedule has."""
        takes = {*schedules.REGISTRY[schedule].options, "slots"}
        return TableOptions({k: v for k, v in self.options.items() if k in takes})


def times_of(costs: "Costs") -> dict[str, Any]:
    """Return what a schedule is planned for, in means over stages and boundaries.

    Args:
      costs: what the run costs [s].

    Returns:
      Options of builders: slots, transfer, offload, load.
    """
    from pipejax.costs.costs import PHASE_FIELDS

    def mean(name: str) -> float:
        values = np.asarray(0.0 if getattr(costs, name) is None else getattr(costs, name), float)
        return float(values.mean()) if values.size else 0.0

    return {
        "slots": {letter: mean(PHASE_FIELDS[letter]) for letter in "FBIW"},
        "transfer": mean("latency") + mean("transmit"),
        "offload": mean("offload"),
        "load": mean("load"),
    }


def choose_options(
    *,
    stages_per_worker: Annotated[
        int | None, typer.Option(help="Stages per worker V, for interleaved schedules.", min=1)
    ] = None,
    waves: Annotated[int | None, typer.Option(help="Waves of hanayo.", min=1)] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Microbatches of an update, for pipedream-2bw.", min=1)
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="Runs R that share the pipeline of local-sgd.", min=1)
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Local steps H between averages of local-sgd.", min=1)
    ] = None,
    stage_shares: Annotated[
        Text, typer.Option(help="Layer share of each stage, as 1,1,2,2, for chimera-asymmetric.")
    ] = None,
    slots: Annotated[
        Text,
        typer.Option(
            help="Slot durations that the table is drawn with, as F=1,B=2 or F=1,I=1,W=1; "
            "schedules planned for times take those of the run if not given."
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Activations a worker may hold, for zero-bubble and ada-offload."),
    ] = None,
    weight_share: WeightShare = None,
    transfer: Annotated[
        float | None, typer.Option(help="Slots of a message that a schedule is planned for.")
    ] = None,
    offload: Annotated[
        float | None, typer.Option(help="Slots of O that ada-offload is planned for.")
    ] = None,
    load: Annotated[
        float | None, typer.Option(help="Slots of L that ada-offload is planned for; as O.")
    ] = None,
    offload_share: Annotated[
        float | None, typer.Option(help="Share of microbatches that pipe-offload offloads.")
    ] = None,
) -> TableOptions:
    """Read what a schedule takes besides workers and microbatches."""
    numbers = {
        "stages_per_worker": stages_per_worker,
        "waves": waves,
        "accumulation": accumulation,
        "runs": runs,
        "local_steps": local_steps,
        "memory_limit": memory_limit,
        "weight_share": weight_share,
        "transfer": transfer,
        "offload": offload,
        "load": load,
        "offload_share": offload_share,
    }
    options: dict[str, Any] = {name: n for name, n in numbers.items() if n is not None}
    if stage_shares is not None:
        options["stage_shares"] = [
            parse_seconds(share.strip(), "--stage-shares") for share in stage_shares.split(",")
        ]
    if slots is not None:
        options["slots"] = _parse_slots(slots)
    return TableOptions(options)


def _parse_slots(text: str) -> dict[str, float]:
    slots: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        duration = parse_seconds(value, f"--slots: {letter}")
        if letter not in "FBIW" or letter in slots or duration == 0:
            raise ValueError(f"--slots: expected F, B, I, W once each, above 0, got {text!r}")
        slots[letter] = duration
    if {"I", "W"} <= set(slots):
        slots.setdefault("B", slots["I"] + slots["W"])
    if not {"F", "B"} <= set(slots):
        raise ValueError(f"--slots: expected F and B, or F, I and W, as F=1,B=2, got {text!r}")
    half = slots["B"] / 2  # of a backward that is split, as in costs
    return {"I": half, "W": half, **slots}
