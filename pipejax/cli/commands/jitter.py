"""`pipejax jitter`: step times of schedules when durations vary."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pipejax.analysis.distributions import DISTRIBUTIONS
from pipejax.base.checks import is_number
from pipejax.cli.commands.compare import check_options, schedule_names
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing, required
from pipejax.cli.options.schedule import TableOptions
from pipejax.cli.output.files import DATASET, check_out, write_dataset
from pipejax.cli.output.numbers import console, percent, print_json, seconds
from pipejax.cli.output.op_values import op_values, values_by_phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.analysis.distributions import Distribution, Jitter, Straggler
    from pipejax.analysis.jitter import Jittered
    from pipejax.analysis.robustness import Robustness


KINDS = ", ".join(DISTRIBUTIONS)


class SamplingOptions(NamedTuple):
    """What varies, and how many samples are drawn of it."""

    op: Annotated[str, typer.Option(help=f"Jitter of each op, as NAME:SPREAD; names: {KINDS}.")] = (
        "lognormal:0"
    )
    worker: Annotated[
        str, typer.Option(help="Jitter of each worker, the same for all of its ops.")
    ] = "lognormal:0"
    message: Annotated[str, typer.Option(help="Jitter of each message.")] = "lognormal:0"
    straggler: Annotated[
        str, typer.Option(help="A worker is slow in a sample, as PROBABILITY:SLOWDOWN.")
    ] = "0:1"
    op_straggler: Annotated[str, typer.Option(help="An op is slow, as PROBABILITY:SLOWDOWN.")] = (
        "0:1"
    )
    samples: Annotated[int, typer.Option(help="Samples.", min=1)] = 10_000
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)] = 0

    def factors(self) -> "Jitter":
        """Read the distributions."""
        from pipejax.analysis.distributions import Jitter

        return Jitter(
            op=_distribution(self.op, "--op"),
            worker=_distribution(self.worker, "--worker"),
            message=_distribution(self.message, "--message"),
            straggler=_straggler(self.straggler, "--straggler"),
            op_straggler=_straggler(self.op_straggler, "--op-straggler"),
        )


def jitter(
    options: TableOptions,
    pricing: Pricing | None,
    links: Links,
    schedules: Annotated[str, typer.Option(help="Schedules, as gpipe,1f1b,chimera.")],
    workers: Annotated[int, typer.Option(help="Workers P.", min=1)],
    microbatches: Annotated[int, typer.Option(help="Microbatches M.", min=1)],
    sampling: SamplingOptions,
    quantile: Annotated[float, typer.Option(help="Quantile that ranks.")] = 0.95,
    ops: Annotated[
        bool, typer.Option("--ops", help="Show how often ops are on the critical path.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write all samples to this store (.zarr).")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Run schedules with random durations: quantiles of the step time, and who is robust."""
    from pipejax.analysis.robustness import jitter_dataset, robustness

    priced = required(pricing)
    factors = sampling.factors()
    if not is_number(quantile) or quantile > 1:
        raise ValueError(f"--quantile must be from 0 to 1, got {quantile}")
    check_out(out, DATASET)
    names = schedule_names(schedules)
    check_options(options, names)
    if len(set(names)) < len(names):
        raise ValueError(f"--schedules names a schedule twice: {schedules}")
    tables, missing = _build(names, workers, microbatches, options, priced)
    runs = _run(tables, priced, links, factors, sampling)
    ranked = robustness(list(runs.values()), quantile=quantile)
    if out is not None:
        write_dataset(jitter_dataset(runs), out)
    if json:
        settings = {name: str(value) for name, value in vars(factors).items()}
        rows = [_row(r, rank, ops) for r, rank in zip(runs.values(), ranked, strict=True)]
        rows += [{"schedule": name, "error": why} for name, why in missing.items()]
        print_json(
            {
                "workers": workers,
                "microbatches": microbatches,
                "link": links.model,
                "queues": links.queues,
                "host_links": links.host_links,
                "jitter": settings,
                "samples": sampling.samples,
                "seed": sampling.seed,
                "quantile": quantile,
                "out": None if out is None else str(out),
                "rows": rows,
            }
        )
        return
    _print(runs, ranked, quantile, ops)
    for name, why in missing.items():
        console().print(f"  {name}: not evaluated: {why}", soft_wrap=True, markup=False)
    if out is not None:
        console().print(f"samples in {out}", markup=False, soft_wrap=True)


def _build(
    names: list[str], workers: int, microbatches: int, options: TableOptions, pricing: Pricing
) -> tuple[dict[str, ScheduleTable], dict[str, str]]:
    """Build every schedule; one that does not exist for these numbers says why instead."""
    tables, missing = {}, {}
    for name in names:
        try:
            tables[name] = options.of(name).build(name, workers, microbatches, pricing.of)
        except ValueError as error:
            missing[name] = str(error)
    if not tables:
        raise ValueError(next(iter(missing.values())))
    return tables, missing


def _run(
    tables: dict[str, ScheduleTable],
    pricing: Pricing,
    links: Links,
    factors: "Jitter",
    sampling: SamplingOptions,
) -> "dict[str, Jittered]":
    """Run every table, with progress on stderr where a person sees it."""
    from pipejax.analysis.jitter import jitter as run

    drawn: dict[str, Any] = {"samples": sampling.samples, "seed": sampling.seed, "link": links}
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("sampling", total=sampling.samples * len(tables))
        drawn["on_progress"] = partial(progress.advance, task)
        return {
            name: run(table, pricing.of(table), factors, **drawn) for name, table in tables.items()
        }


def _split(text: str, option: str, form: str) -> tuple[str, float]:
    """Read NAME:NUMBER."""
    name, colon, value = (part.strip() for part in text.partition(":"))
    try:
        if colon:
            return name, float(value)
    except ValueError:
        pass  # said below
    raise ValueError(f"{option} must be {form}, got {text!r}")


def _distribution(text: str, option: str) -> "Distribution":
    from pipejax.analysis.distributions import Distribution

    name, spread = _split(text, option, f"NAME:SPREAD with a name of {KINDS}")
    try:
        return Distribution(name, spread)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None


def _straggler(text: str, option: str) -> "Straggler":
    from pipejax.analysis.distributions import Straggler

    form = "PROBABILITY:SLOWDOWN, as 0.01:2"
    first, slowdown = _split(text, option, form)
    try:
        probability = float(first)
    except ValueError:
        raise ValueError(f"{option} must be {form}, got {text!r}") from None
    try:
        return Straggler(probability, slowdown)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None


def _row(jittered: "Jittered", rank: "Robustness", ops: bool) -> dict[str, Any]:
    """Collect what `--json` prints of a schedule; times in seconds."""
    from pipejax.analysis.jitter import QUANTILES

    row = {
        "schedule": rank.schedule,
        "deterministic": jittered.deterministic,
        "mean": jittered.mean,
        "quantiles": {_percentile(level): jittered.quantile(level) for level in QUANTILES},
        "slowdowns": {_percentile(level): jittered.slowdown(level) for level in QUANTILES},
        "worst": float(jittered.makespans.max()),
        "worst_sample": jittered.worst,
        "makespan_rank": rank.makespan_rank,
        "slowdown_rank": rank.slowdown_rank,
        "fastest_share": rank.fastest_share,
    }
    if ops:
        row["ops"] = [
            {"op": v.op, "worker": v.worker, "critical_share": v.value}
            for v in op_values(jittered.evaluation, jittered.node_share)
        ]
    return row


def _percentile(level: float) -> str:
    return f"p{100 * level:g}"


def _print(
    runs: "dict[str, Jittered]", ranked: "list[Robustness]", quantile: float, ops: bool
) -> None:
    from pipejax.analysis.jitter import QUANTILES

    first = next(iter(runs.values()))
    times = Table(
        "schedule",
        "no jitter",
        "mean",
        *map(_percentile, QUANTILES),
        "worst",
        title=f"step time over {len(first.makespans)} samples, seed {first.seed}",
    )
    level = _percentile(quantile)
    ranks = Table(
        "schedule",
        f"{level} time",
        "rank",
        f"{level} slowdown",
        "rank",
        "fastest in",
        title="who is fastest, and whom jitter slows least",
    )
    for (name, jittered), rank in zip(runs.items(), ranked, strict=True):
        times.add_row(
            name,
            seconds(rank.deterministic),
            seconds(jittered.mean),
            *(seconds(jittered.quantile(level)) for level in QUANTILES),
            seconds(float(jittered.makespans.max())),
        )
        style = "[bold green]" if rank.makespan_rank == 1 else ""
        ranks.add_row(
            name,
            f"{style}{seconds(rank.makespan)}",
            str(rank.makespan_rank),
            f"{rank.slowdown:.4f}",
            str(rank.slowdown_rank),
            percent(rank.fastest_share),
        )
    out = console()
    out.print(times)
    out.print(ranks)
    if ops:
        for name, jittered in runs.items():
            out.print(f"{name}: share of samples in which ops are on the critical path")
            values = op_values(jittered.evaluation, jittered.node_share)
            out.print(values_by_phase(values, "often", percent))
