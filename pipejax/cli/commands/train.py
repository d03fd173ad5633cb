"""`pipejax train`: how fast a small objective is trained along a timeline."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing, TableChoice
from pipejax.cli.options.objective import ObjectiveOptions, choose_step_sizes
from pipejax.cli.output.files import DATASET, DRAWING, check_out, drawing, write_dataset
from pipejax.cli.output.numbers import console, print_json
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.costs.costs import Costs
    from pipejax.training import Summary, TrainingObjective, TrainingRun


COLUMNS = 60  # of the bars in the terminal, at most
HEIGHTS = "▁▂▃▄▅▆▇█"


class TrainingOptions(NamedTuple):
    """What is run: along a timeline, or Randomized PipeDream."""

    rpd: Annotated[
        bool,
        typer.Option(
            "--rpd",
            help="Randomized PipeDream instead of the timeline: --updates block "
            "updates with the delays of the table, or up to --delta.",
        ),
    ] = False
    updates: Annotated[
        int | None, typer.Option(help="Block updates, for --rpd; a multiple of --times.", min=1)
    ] = None
    delta: Annotated[
        int | None,
        typer.Option(
            help="Largest delay in block updates, for --rpd without a table: then "
            "--workers is the number of stages.",
            min=0,
        ),
    ] = None
    step_sizes: Annotated[
        str | None,
        typer.Option(help="Step sizes, as 0.25,0.125; powers of two from 2 / L down if not given."),
    ] = None
    seeds: Annotated[
        int, typer.Option(help="Runs of each step size, with seeds from 0.", min=1)
    ] = 3
    times: Annotated[
        int, typer.Option(help="Equal parts of the time at whose ends to look.", min=1)
    ] = 100


class Trained(NamedTuple):
    """The runs of a command, and what they are runs of."""

    runs: "TrainingRun"
    summary: "Summary"
    step_sizes: list[float]
    seeds: int
    named: dict[str, Any]
    unit: str | None


def train(
    choice: TableChoice,
    objectives: ObjectiveOptions,
    pricing: Pricing | None,
    links: Links,
    training: TrainingOptions,
    out: Annotated[
        Path | None, typer.Option(help="Draw the gap to this file (.png, .pdf, .svg).")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write all runs to this store (.zarr).")] = None,
    json: JsonFlag = False,
) -> None:
    """Train a small objective as an asynchronous schedule does: gap against time.

    The schedule is pipedream, pipedream-2bw, local-sgd or a table with U cells; in slots without
    times. Every step size is run with every seed.
    """
    check_out(out, DRAWING)
    check_out(save, DATASET, "--save")
    way = _randomized if training.rpd else _timeline
    trained = way(choice, objectives, pricing, links, training)
    if save is not None:
        _save(save, trained)
    if out is not None:
        _draw(out, trained)
    if json:
        print_json(_as_json(trained, out, save))
        return
    _print(trained)
    for what, path in (("drawn to", out), ("runs in", save)):
        if path is not None:
            console().print(f"{what} {path}", markup=False, soft_wrap=True)


def _timeline(
    choice: TableChoice,
    objectives: ObjectiveOptions,
    pricing: Pricing | None,
    links: Links,
    training: TrainingOptions,
) -> Trained:
    from pipejax.training import sweep_replay

    for name, value in {"--updates": training.updates, "--delta": training.delta}.items():
        if value is not None:
            raise ValueError(f"{name} needs --rpd")
    table, costs = _asynchronous(choice, pricing)
    objective = objectives.make(table.num_stages)
    named = {"method": "timeline", **_table(table), **_objective(objectives, objective)}
    named |= _timed(pricing, links)
    run = partial(sweep_replay, objective, table, costs=costs, times=training.times, link=links)
    return _run(run, objective, training, named, "slots" if pricing is None else "s")


def _randomized(
    choice: TableChoice,
    objectives: ObjectiveOptions,
    pricing: Pricing | None,
    links: Links,
    training: TrainingOptions,
) -> Trained:
    from pipejax.analysis.staleness import staleness
    from pipejax.training import sweep_randomized_pipedream

    updates, delta, times = training.updates, training.delta, training.times
    if updates is None:
        raise ValueError("--rpd needs --updates")
    if updates % times:
        raise ValueError(f"--updates must be a multiple of --times {times}, got {updates}")
    law: dict[str, Any]
    named: dict[str, Any]
    if delta is None:
        if not choice.is_given:
            raise ValueError(
                "--rpd needs --delta with --workers, or a table whose delays it takes: --schedule "
                "or --table"
            )
        table, costs = _asynchronous(choice, pricing)
        delays = staleness(table, costs, link=links).delays
        law, stages = {"delays": delays}, table.num_stages
        named = {**_table(table), "delta": None, **_timed(pricing, links)}
    else:
        stages = _stages_of_delta(choice, pricing)
        law, named = {"delta": delta}, {"schedule": None, "delta": delta}
    objective = objectives.make(stages)
    named = {"method": "rpd", **named, **_objective(objectives, objective)}
    every = updates // times
    run = partial(sweep_randomized_pipedream, objective, updates=updates, every=every, **law)
    return _run(run, objective, training, named, None)


def _run(
    sweep: "Callable[..., TrainingRun]",
    objective: "TrainingObjective",
    training: TrainingOptions,
    named: dict[str, Any],
    unit: str | None,
) -> Trained:
    """Run every step size with every seed, with a sign of life on stderr where a person sees it."""
    from pipejax.training import summarise

    sizes, seeds = choose_step_sizes(training.step_sizes, objective), training.seeds
    line = f"compiling, and training {len(sizes) * seeds} runs side by side"
    with Console(stderr=True).status(line):
        runs = sweep(step_sizes=sizes, seeds=range(seeds))
        return Trained(runs, summarise(runs), sizes, seeds, named, unit)


def _asynchronous(
    choice: TableChoice, pricing: Pricing | None
) -> "tuple[ScheduleTable, Costs | None]":
    """Return a table that updates weights, and what its ops cost."""
    table = choice.build()
    if not table.updates_within:
        raise ValueError(
            f"{table.name} is synchronous, no U cell updates its weights: train takes pipedream, "
            "pipedream-2bw, local-sgd or a table with U cells"
        )
    return table, None if pricing is None else pricing.of(table)


def _stages_of_delta(choice: TableChoice, pricing: Pricing | None) -> int:
    """Return the number of stages of a run that has no table; nothing else may say one."""
    stray = {
        "--schedule": choice.schedule,
        "--table": choice.table,
        "--microbatches": choice.microbatches,
        **choice.options.options,
    }
    for name, value in stray.items():
        if value is not None:
            option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} does not go with --delta: delays come from one of them")
    if pricing is not None:
        raise ValueError("times do not go with --delta: they decide the delays of a table")
    if choice.workers is None:
        raise ValueError("--delta needs --workers, the number of stages")
    return choice.workers


def _table(table: ScheduleTable) -> dict[str, Any]:
    return {"schedule": table.name, "microbatches": table.num_microbatches}


def _timed(pricing: Pricing | None, links: Links) -> dict[str, Any]:
    return {} if pricing is None else {"link": links.model}


def _objective(options: ObjectiveOptions, objective: "TrainingObjective") -> dict[str, Any]:
    return {"objective": options.name, "stages": objective.num_stages}


def _as_json(trained: Trained, out: Path | None, save: Path | None) -> dict[str, Any]:
    """Collect what `--json` prints; null wherever a seed diverged."""
    found, runs = trained.summary, trained.runs
    best = found.best
    return {
        **trained.named,
        "seeds": trained.seeds,
        "step_sizes": trained.step_sizes,
        "final_gap": found.final_gap.tolist(),
        "spread": found.spread.tolist(),
        "diverged": found.diverged,
        "best_step_size": None if best is None else trained.step_sizes[best],
        "unit": trained.unit,
        "time": runs.time,
        "updates": runs.update,
        "gap": None if best is None else found.gap[best].tolist(),
        "out": None if out is None else str(out),
        "save": None if save is None else str(save),
    }


def _print(trained: Trained) -> None:
    shown, found, named = console(), trained.summary, trained.named
    schedule = named["schedule"]
    what = {
        "timeline": f"[bold]{escape(schedule or '')}[/]",
        "rpd": "[bold]Randomized PipeDream[/], "
        + (f"delays of {escape(schedule)}" if schedule else f"delta {named['delta']}"),
    }[named["method"]]
    end = trained.runs.update[-1] if trained.runs.time is None else trained.runs.time[-1]
    shown.print(
        f"{what}, {named['stages']} stages, {named['objective']}, {_number(end)} "
        f"{trained.unit or 'block updates'}, seeds: {trained.seeds}"
    )
    grid = Table("step size", "final gap", "spread", "diverged", "")
    for place, size in enumerate(trained.step_sizes):
        count, is_best = int(found.diverged[place]), place == found.best
        numbers = (
            ("diverged", "-")
            if count
            else (f"{found.final_gap[place]:.4g}", _or_dash(found.spread[place]))
        )
        grid.add_row(
            f"{size:g}",
            *numbers,
            f"{count} of {trained.seeds}",
            "best" * is_best,
            style="bold green" if is_best else "",
        )
    shown.print(grid)
    if found.best is None:
        shown.print("every step size diverged: give smaller --step-sizes")
        return
    gap = found.gap[found.best].filled(np.nan)
    over = "block updates" if trained.unit is None else "time"
    shown.print(f"gap of the best over {over}, logarithmic: {gap[0]:.4g} to {gap[-1]:.4g}")
    shown.print(f"[cyan]{_bars(gap)}[/]")
    sizes, best = trained.step_sizes, trained.step_sizes[found.best]
    if len(sizes) > 1 and best in (min(sizes), max(sizes)):
        shown.print(
            f"the best is the {'smallest' if best == min(sizes) else 'largest'} of the "
            "step sizes: one beyond it may be better"
        )


def _number(value: float) -> str:
    return f"{value:.6g}"


def _or_dash(value: Any) -> str:
    return "-" if np.ma.is_masked(value) else f"{value:.2g}"


def _bars(gap: Float[NumpyArray, " samples"]) -> str:
    """Heights of the logarithm of the gap, over what it covers; the lowest where it is no more."""
    chosen = gap[np.linspace(0, len(gap) - 1, min(COLUMNS, len(gap))).round().astype(int)]
    above = chosen[chosen > 0]
    if not len(above):
        return HEIGHTS[0] * len(chosen)
    depth = np.log(np.maximum(chosen, above.min()))
    reach = float(np.ptp(depth)) or 1.0
    height = (depth - depth.min()) / reach * (len(HEIGHTS) - 1)
    return "".join(HEIGHTS[round(float(each))] for each in height)


def _save(save: Path, trained: Trained) -> None:
    from pipejax.training.dataset import training_dataset

    attributes: Mapping[str, Any] = {k: v for k, v in trained.named.items() if v is not None}
    data = training_dataset(
        trained.runs,
        trained.step_sizes,
        range(trained.seeds),
        unit=trained.unit,
        attributes=attributes,
    )
    write_dataset(data, save)


def _draw(out: Path, trained: Trained) -> None:
    from pipejax.plots.training import draw_gaps  # matplotlib is an extra, slow to import

    schedule = trained.named["schedule"] or f"delta {trained.named['delta']}"
    way = "" if trained.named["method"] == "timeline" else "RPD, "
    runs, found = trained.runs, trained.summary
    clock = None if runs.time is None else f"time [{trained.unit or 'slots'}]"
    with drawing(out, 0.5, 2.8) as (_, axes):
        draw_gaps(
            axes,
            runs.update if runs.time is None else runs.time,
            found.gap,
            trained.step_sizes,
            diverged=found.diverged > 0,
            best=found.best,
            time_label=clock or "block updates",
        )
        axes.set_title(f"{way}{schedule}, {trained.named['stages']} stages", loc="left")
