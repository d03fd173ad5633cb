"""Pictures of a trace, and its report as a page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text as Marked

import pipejax as pj
from pipejax.cli.output.files import Output
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.remedies import diagnosis
from pipejax.cli.output.report_pages import Ran, Section, report_page
from pipejax.cli.output.trace_report import (
    ADDS,
    NAMED,
    SAVES,
    against_line,
    alone,
    clock_lines,
    deal_line,
    forecast_line,
    heading_of,
    largest,
    link_lines,
    replay_line,
    step_line,
    suspect_lines,
)
from pipejax.traces.findings.op_times import costs_of
from pipejax.traces.replaying.pipelines import Pipeline, fused_with_last

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipejax.plots.heat_maps import HeatMap, RecordedStep
    from pipejax.traces.findings.analysis import Analysis
    from pipejax.traces.findings.attribution import Attribution

EACH = 8  # shares of a kind on the page
SHOWN = 50  # rows of what is left out, or unexplained


def draw_shares(analysis: "Analysis", figure: Output) -> None:
    """Draw who costs how much, and a step as it ran and as replayed."""
    from pipejax.plots.heat_maps import heat_picture  # matplotlib is an extra, slow to import
    from pipejax.plots.timeline import save

    picture = heat_picture([*_maps(analysis)], _median_step(analysis))
    figure.save(lambda draft: save(picture, draft))


def _maps(analysis: "Analysis") -> "Iterator[HeatMap]":
    """Workers by replicas, or by steps where there is one replica; stages by steps."""
    from pipejax.plots.heat_maps import HeatMap

    shares, table = analysis.attribution, analysis.pipelines.table
    replicas = sorted({one.replica for one in analysis.pipelines.pipelines})
    place = shares.of("place")
    if place:
        cells = [
            [place[f"worker {worker} of replica {replica}"].adds for replica in replicas]
            for worker in range(table.num_workers)
        ]
        rows = [f"worker {worker}" for worker in range(table.num_workers)]
        title = "what a worker of a replica adds alone: only its ops took what they did"
        yield HeatMap(title, "replica", [*map(str, replicas)], rows, np.array(cells))
    elif table.num_stages > table.num_workers:  # of one stage each they would be drawn twice
        yield _by_step(shares, "worker")
    yield _by_step(shares, "stage")


def _by_step(shares: "Attribution", kind: str) -> "HeatMap":
    from pipejax.plots.heat_maps import HeatMap

    order, of_kind = np.argsort(shares.steps), shares.of(kind)
    names = sorted(of_kind, key=int)
    return HeatMap(
        f"what a step saves if ops of a {kind} took what they should",
        "step",
        [str(shares.steps[k]) for k in order],
        [f"{kind} {name}" for name in names],
        np.stack([of_kind[name].by_step[order] for name in names]),
    )


def _median_pipeline(analysis: "Analysis") -> tuple[Pipeline, str]:
    """The slowest replica of the step that is the median, and its name."""
    shares, pipelines = analysis.attribution, analysis.pipelines
    step = shares.steps[int(np.argsort(shares.recorded)[len(shares.steps) // 2])]
    spans = [
        (span, k)
        for k, (one, span) in enumerate(
            zip(pipelines.pipelines, pipelines.spans.tolist(), strict=True)
        )
        if one.step == step
    ]
    slowest = pipelines.pipelines[max(spans)[1]]
    several = len(pipelines.trace.replicas) > 1
    return slowest, f"step {step}" + f", replica {slowest.replica}" * several


def _median_ran(analysis: "Analysis") -> Ran:
    """The median step for the explorer, whose replay has the times of its own ops."""
    one, title = _median_pipeline(analysis)
    costs = costs_of(analysis.replay, pipeline=one)
    run = pj.evaluate(analysis.pipelines.tables[one.table], costs, link=analysis.replay.links)
    return Ran(title, run, analysis.pipelines.starts(one))


def _median_step(analysis: "Analysis") -> "RecordedStep":
    """The median step for a picture."""
    from pipejax.plots.heat_maps import RecordedStep

    trace = analysis.pipelines.trace
    slowest, title = _median_pipeline(analysis)
    slices = slowest.slices
    is_second = fused_with_last(trace, slices)
    several = trace.stages > trace.workers
    labels = [
        f"{stage if several else ''}{trace.phases[phase]}{microbatch}"
        for stage, phase, microbatch in zip(
            *(x[slices].tolist() for x in (trace.stage, trace.phase, trace.microbatch)), strict=True
        )
    ]
    for k in np.flatnonzero(is_second).tolist():
        labels[k - 1] += f" {labels[k]}"
    first = slices[~is_second]
    start = trace.start[first] - trace.start[slices].min()
    return RecordedStep(
        f"{title}: above as it ran, below as replayed",
        trace.worker[first],
        [label for label, second in zip(labels, is_second, strict=True) if not second],
        start,
        start - analysis.replay.residuals[first],
        (trace.end - trace.start)[first],
    )


def trace_page(analysis: "Analysis", result: Mapping[str, Any]) -> str:
    """The report of a trace as one page."""
    advice, shares = analysis.advice, analysis.attribution
    lines = [
        _text(step_line(shares)),
        replay_line(analysis),
        *link_lines(analysis),
        *([] if analysis.against is None else [_text(against_line(analysis.against))]),
        *clock_lines(analysis),
        *suspect_lines(analysis, NAMED),
        *forecast_line(analysis),
        *map(_text, deal_line(analysis)),
        f"the mean pipeline, at mean times: {seconds(advice.step_time)}; {next(diagnosis(advice))}",
        *list(diagnosis(advice))[1:],
    ]
    return report_page(
        advice,
        result["remedies"],
        _text(heading_of(analysis, result)),
        lines,
        sections=[*_sections(analysis)],
        heading="Where the seconds of the mean pipeline go",
        name="mean pipeline",
        ran=_median_ran(analysis),
    )


def _text(markup: str) -> str:
    return Marked.from_markup(markup).plain


def _sections(analysis: "Analysis") -> Iterator[Section]:
    """Shares with their picture, what is left out, stalls, op times, link models."""
    from pipejax.plots.heat_maps import heat_picture

    left = [(each.what, each.why, f"{each.count}") for each in analysis.left_out]
    if left:
        yield Section("Left out", ("what", "why", "times"), left[:SHOWN], 2, _more(left))
    # the step itself is in the explorer, which draws a hundred thousand ops in a few MB
    picture = _svg(heat_picture([*_maps(analysis)]))
    yield _shares(analysis.attribution, "Who costs how much", picture)
    if analysis.against is not None:
        yield _shares(analysis.against, "With times of the other run")
    stalls = [
        (f"{one.step}", f"{one.replica}", f"{one.worker}", one.op, seconds(one.seconds))
        for one in analysis.stalls
    ]
    if stalls:
        head = ("step", "replica", "worker", "op", "later than all that it waits for")
        yield Section("What nothing explains", head, stalls[:SHOWN], 4, _more(stalls))
    yield _op_times(analysis)
    fits = [(name, percent(error)) for name, error in analysis.replay.fits.items()]
    yield Section("Links that were tried", ("links", "mean error of the replay"), fits)


def _op_times(analysis: "Analysis") -> Section:
    rows = [
        (
            row.name,
            f"{row.stage}" if row.stage >= 0 else "",
            f"{row.worker}",
            *map(seconds, (row.low, row.median, row.high)),
        )
        for row in analysis.op_times
        if row.median > 0
    ]
    head = ("what", "stage", "worker", "5 %", "median", "95 %")
    return Section("What ops, messages and collectives took", head, rows, 3)


def _more(rows: Sequence[object]) -> str:
    return f"and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""


def _shares(shares: "Attribution", title: str, picture: str = "") -> Section:
    step = float(shares.recorded.mean())
    rows = [
        (
            f"{one.of} {one.name}",
            seconds(one.saves),
            percent(one.saves / step),
            alone(one.adds),
        )
        for one in largest(shares, EACH)
    ]
    head = ("if", "saves", "of the step", "alone adds")
    note = f"Saves: {SAVES}. Alone adds: {ADDS}."
    return Section(title, head, rows, note=note, picture=picture)


def _svg(picture: "Figure") -> str:
    return picture._repr_svg_()  # type: ignore[attr-defined]  # ours shows itself
