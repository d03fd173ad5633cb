"""`pipejax jitter`: step times of schedules when durations vary."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Annotated, Any

from rich.markup import escape

import pipejax as pj
from pipejax.analysis.uncertainty.distributions import DISTRIBUTIONS
from pipejax.base.checks import share
from pipejax.base.data_files import parse_ratio, time_unit
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import memory_room, required
from pipejax.cli.options.tables import ListedRunOptions, naming
from pipejax.cli.output.files import DATASET, DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import Answer, has_lines, pick, plain, progress
from pipejax.cli.output.runs import op_rows, values_by_phase
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table
from pipejax.schedules.table.links import LINK_OPTIONS

HEIGHT, ROW = 1.0, 0.45  # inches: of a picture beside its rows, and of a row
KINDS = ", ".join(DISTRIBUTIONS)
VARYING = ("op", "worker", "message")
SLOW = ("straggler", "op_straggler")
# default number of samples: so many draws over all replicas, within these limits
DRAWS, MAX_SAMPLES, MIN_SAMPLES = 200_000, 10_000, 500


@options
class SamplingOptions:
    """Distributions of durations, and the number of samples."""

    op: str = "lognormal:0"
    worker: str = "lognormal:0"
    message: str = "lognormal:0"
    straggler: str = "0:1"
    op_straggler: str = "0:1"
    samples: int | None = None
    seed: int = 0
    replicas: int | None = None

    def complete(self, scenario: "pj.Scenario") -> "SamplingOptions":
        """Fill in the numbers of replicas and samples that options leave open."""
        workload = scenario.source.workload
        replicas = self.replicas or (1 if workload is None else workload.data_parallel)
        default = min(MAX_SAMPLES, max(MIN_SAMPLES, DRAWS // replicas))
        return dataclasses.replace(self, replicas=replicas, samples=self.samples or default)

    def factors(self) -> "pj.analysis.Jitter":
        """Read the distributions."""
        spread, slow = f"NAME:SPREAD with a name of {KINDS}", "PROBABILITY:SLOWDOWN, as 0.01:2"
        return pj.analysis.Jitter(
            **{name: self._read(name, pj.analysis.Distribution, str, spread) for name in VARYING},
            **{name: self._read(name, pj.analysis.Straggler, parse_ratio, slow) for name in SLOW},
        )

    def _read(
        self, name: str, make: Callable[..., Any], parse_first: Callable[[str], Any], form: str
    ) -> Any:
        """Make an object of the two parts of an option, such as lognormal:0.05."""
        # `parse_first` reads the first part, `make` takes both; errors cite `form`.
        text = getattr(self, name)
        head, colon, value = (part.strip() for part in text.partition(":"))
        first, number = parse_first(head), parse_ratio(value)
        if not colon or first != first:  # NaN: no number
            raise ValueError(f"{flag(name)} must be {form}, got {text!r}")
        if math.isnan(number):
            raise ValueError(f"{flag(name)} {text}: {value!r} is no number, as 0.05 or 5%")
        try:
            return make(first, number)
        except ValueError as error:
            raise ValueError(f"{flag(name)} {text}: {error}") from None


@options
def jitter(
    *,
    run: ListedRunOptions = ListedRunOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    microbatches: int | None = None,
    quantile: float = 0.95,
    ops: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
    out: Annotated[Output, DATASET] = NO_OUTPUT,
) -> Answer:
    """Rank schedules under random op times: quantiles, and which is robust."""
    from pipejax.analysis.uncertainty.jitter import jitter_dataset

    listed, link = run.listed, run.links()
    factors = sampling.factors()
    share(quantile, "--quantile")
    listed.options.check(listed.names)
    points = listed.sized(None if microbatches is None else [microbatches])
    sizes = {(point.workers, point.microbatches) for point in points}
    if len(sizes) > 1:
        raise ValueError("--tables and --schedules differ in size: jitter ranks those of one size")
    ((workers, microbatches),) = sizes
    scenarios, missing = listed.build(run, points)
    if not scenarios:
        raise ValueError(next(iter(missing.values())))
    sampling = sampling.complete(required(next(iter(scenarios.values()))))
    listed.check_used(scenarios.values())
    runs = _sample_runs(scenarios, factors, sampling)
    needs = [memory_room(scenario, scenario.table()) for scenario in scenarios.values()]
    fits = [need.get("fits", True) for need in needs]
    ranked = pj.analysis.robustness(list(runs.values()), quantile=quantile, fits=fits)
    if out.path is not None:
        out.save_dataset(jitter_dataset(runs))
    if figure.path is not None:
        _draw(runs, figure)
    parts = zip(runs.values(), ranked, needs, strict=True)
    rows = [_row(run, rank, ops) | need for run, rank, need in parts]
    failed = [{"schedule": name, "error": why} for name, why in missing.items()]
    result = {
        "workers": workers,
        "microbatches": microbatches,
        "link": link.model,
        **pick(link, " ".join(name for name in LINK_OPTIONS if name != "model")),
        "jitter": {name: str(value) for name, value in vars(factors).items()},
        **pick(sampling, "samples seed replicas"),
        "quantile": quantile,
        "rows": rows + failed,
    }
    details: dict[str, Iterable[object]] = {"quantiles": [_quantiles(rows, runs)]}
    if ops:
        details["critical ops"] = [
            values_by_phase(run.evaluation, "share", run.node_share, percent)._replace(
                title=f"{name}: share of samples in which ops are on the critical path"
            )
            for name, run in runs.items()
        ]
    if failed and not has_lines():
        columns = Column("schedule", "schedule"), Column("reason", "error", escape)
        details["failures"] = [rows_table(failed, columns)]
    failures = (plain(f"{row['schedule']}: not evaluated: {row['error']}") for row in failed)
    return Answer(result, chain(_view(runs, ranked, quantile), failures), details=details)


def _sample_runs(
    scenarios: "dict[str, pj.Scenario]", factors: "pj.analysis.Jitter", sampling: SamplingOptions
) -> "dict[str, pj.results.Jittered]":
    """Sample the run of every schedule, and show the progress over all of them."""
    numbers = pick(sampling, "samples seed replicas")
    with progress("sampling", numbers["samples"] * len(scenarios)) as show:
        runs: dict[str, pj.results.Jittered] = {}
        for name, scenario in scenarios.items():
            before = len(runs) * numbers["samples"]
            options: dict[str, Any] = {"link": scenario.links, **numbers}
            options["on_progress"] = lambda done, _, text, before=before: show(
                before + done, None, text
            )
            with naming(table := scenario.table()):
                runs[name] = pj.jitter(table, scenario.table_costs(), factors, **options)
        return runs


def _draw(runs: "dict[str, pj.results.Jittered]", figure: Output) -> None:
    """Draw the step times of all samples, a violin for each schedule."""
    from pipejax.plots import draw_violins, palette, violin_entries
    from pipejax.plots.style import legend

    factor, unit = time_unit(max(run.worst for run in runs.values()))
    with drawing(figure, 1, HEIGHT + ROW * len(runs)) as (picture, axes):
        draw_violins(
            axes,
            {name: run.makespans / factor for name, run in runs.items()},
            {name: run.deterministic / factor for name, run in runs.items()},
            dict.fromkeys(runs, palette.SKY),
        )
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(f"step time [{unit}]")
        entries = violin_entries()
        texts = [str(entry.get_label()) for entry in entries]
        legend(picture, "lower left", (entries, texts))


def _row(
    jittered: "pj.results.Jittered", rank: "pj.results.Robustness", ops: bool
) -> dict[str, Any]:
    """Return the row of a schedule in `--json`; times in seconds."""
    from pipejax.analysis.uncertainty.jitter import QUANTILES

    row = {
        "schedule": rank.schedule,
        **pick(jittered, "deterministic mean"),
        "quantiles": {_percentile(level): jittered.quantile(level) for level in QUANTILES},
        "slowdowns": {_percentile(level): jittered.slowdown(level) for level in QUANTILES},
        **pick(jittered, "worst worst_sample"),
        **pick(rank, "makespan_rank slowdown_rank fastest_share"),
    }
    if ops:
        row["ops"] = op_rows(jittered.evaluation, "critical_share", jittered.node_share)
    return row


def _percentile(level: float) -> str:
    return f"p{100 * level:g}"


def _view(
    runs: "dict[str, pj.results.Jittered]", ranked: "list[pj.results.Robustness]", quantile: float
) -> Iterator[object]:
    """Yield the schedule that is best under jitter, and the ranking of all schedules."""
    level = _percentile(quantile)
    allowed = [rank for rank in ranked if rank.fits] or ranked
    best = min(allowed, key=lambda rank: rank.makespan_rank)
    run = next(iter(runs.values()))
    replicas = f", each the slowest of {run.replicas} replicas" if run.replicas > 1 else ""
    verdict = " is the fastest under jitter" if len(ranked) > 1 else " under jitter"
    yield (
        f"[bold]{best.schedule}[/]{verdict}: {100 * quantile:g} % of steps take at most "
        f"{seconds(best.makespan)}, {percent(best.slowdown - 1)} longer than without jitter"
    )
    yield f"{len(run.makespans)} sampled runs of each schedule{replicas}, seed {run.seed}"
    marks = ["[bold green]" if rank.makespan_rank == 1 and rank.fits else "" for rank in ranked]
    times = [seconds(rank.makespan) for rank in ranked]
    columns = [
        ("schedule", runs),
        (f"{level} time", map(operator.add, marks, times)),
        (f"{level} slowdown", (percent(rank.slowdown - 1) for rank in ranked)),
    ]
    if len(ranked) > 1:
        columns.insert(2, ("rank by time", (rank.makespan_rank for rank in ranked)))
        columns.append(("rank by slowdown", (rank.slowdown_rank for rank in ranked)))
        columns.append(("fastest in samples", (percent(rank.fastest_share) for rank in ranked)))
    if not all(rank.fits for rank in ranked):
        columns.append(("fits", ("yes" if rank.fits else "[red]no" for rank in ranked)))
    yield grid(columns)


def _quantiles(rows: list[dict[str, Any]], runs: "dict[str, pj.results.Jittered]") -> TextTable:
    """Make a table of quantiles of the step time, a row for each schedule."""
    columns = [
        Column("schedule", "schedule"),
        Column("no jitter", "deterministic", seconds),
        Column("mean", "mean", seconds),
        *(Column(name, name, seconds) for name in rows[0]["quantiles"]),
        Column("worst", "worst", seconds),
    ]
    title = f"step time over {len(next(iter(runs.values())).makespans)} samples"
    return rows_table([row | row["quantiles"] for row in rows], columns, title=title)
