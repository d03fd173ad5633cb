"""Text, page and pictures of a trace: sentences and tables, which its page has too."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.text import Text as Marked

import pipejax as pj
from pipejax.cli.output.files import Output
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.remedies import diagnosis, remedies_said
from pipejax.cli.output.report import Column, plain, table_of
from pipejax.cli.output.report_pages import Ran, Section, report_page
from pipejax.traces.findings.op_times import measured_costs
from pipejax.traces.findings.suspects import MAX_LISTED, MIN_RATIO
from pipejax.traces.record import NONE
from pipejax.traces.replaying.pipelines import Pipeline, is_second_of_pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipejax.plots.heat_maps import HeatMap, RecordedStep
    from pipejax.traces.findings.analysis import Analysis
    from pipejax.traces.findings.attribution import Attribution, Share

EACH = 3  # shares of a kind that a person reads
LEAST = 0.002  # of the step: a share that saves less is not shown
NAMED = 5  # things that are left out, by name
SAVES = "its ops took what they should"
ADDS = "only its ops took what they did"


def heading_of(analysis: "Analysis", result: Mapping[str, Any]) -> str:
    """What ran, with markup."""
    name = analysis.schedule or "no schedule of the registry"
    several = f", {result['orders']} orders" if result["orders"] > 1 else ""
    return (
        f"[bold]{escape(name)}[/], {result['workers']} workers, {result['stages']} stages, "
        f"{result['microbatches']} microbatches{several}: {_so_many(result['steps'], 'step')} of "
        f"{_so_many(result['replicas'], 'replica')}"
    )


def _so_many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def replay_line(analysis: "Analysis") -> str:
    """How far the replay is off."""
    replayed = analysis.replay
    return (
        f"replayed within {percent(replayed.mean_error)} in the mean, "
        f"{percent(replayed.worst_error)} at most, with {replayed.links.model} links and "
        f"{seconds(replayed.message_time)} a message"
    )


def link_lines(analysis: "Analysis", most: int | None = None) -> Iterator[str]:
    """Which link models explain the replay as well, or how far off the next is; links untold."""
    replayed = analysis.replay
    if replayed.equivalent_models:
        more = len(replayed.equivalent_models[most:]) if most else 0
        names = ", ".join(replayed.equivalent_models[:most]) + (f" and {more} more" if more else "")
        yield f"other link models that these pipelines do not rule out: {names}"
    elif len(replayed.fits) > 1:
        name, error = [*replayed.fits.items()][1]
        yield f"other link models are ruled out: the next, {name}, is off by {percent(error)}"
    for name, longest in [*replayed.unobserved.items()][:most]:
        yield f"nothing waited for a message from {name}: it takes {seconds(longest)} at most"


def step_line(shares: "Attribution") -> str:
    """How long the mean step takes, and would, with markup."""
    return (
        f"the mean step takes [bold]{seconds(float(shares.recorded.mean()))}[/], "
        f"{shares.slowdown:.3f} times the {seconds(shares.ideal)} it would if every op took what "
        "ops of its kind do"
    )


def against_line(shares: "Attribution") -> str:
    """How much slower than the other run, and how much of it times of ops explain, with markup."""
    step, other = float(shares.recorded.mean()), shares.other or 0.0
    word = "slower" if step >= other else "faster"
    explained = float(shares.replayed.mean()) - shares.ideal
    return (
        f"[bold]{seconds(abs(step - other))} {word}[/] than the other run, whose mean step takes "
        f"{seconds(other)}; with its times of ops and messages this one would take "
        f"{seconds(abs(explained))} {'less' if explained >= 0 else 'more'}"
    )


def forecast_line(analysis: "Analysis") -> Iterator[str]:
    """What is predicted, if anything is."""
    one = analysis.forecast
    if one is not None:
        odd = f"step{'s' * (len(one.left_out) > 1)} {', '.join(map(str, one.left_out))}"
        without = f" without {odd}, odd beside the others," if one.left_out else ""
        yield (
            f"the first half of the steps{without} predicts {seconds(one.predicted)} for those to "
            f"come, {100 * one.confidence:g} % between {seconds(one.low)} and {seconds(one.high)}: "
            f"the second half lies there by {100 * one.inside:.0f} %, median error "
            f"{percent(one.median_error)}"
        )


def clock_lines(analysis: "Analysis", most: int | None = None) -> Iterator[str]:
    """Clocks that were set right."""
    for one in [one for one in analysis.offsets if one.step == NONE][:most]:
        yield (
            f"clock of worker {one.worker}, replica {one.replica}: {seconds(abs(one.seconds))} "
            f"{'ahead' if one.seconds > 0 else 'behind'}, set right within {seconds(one.residual)}"
        )


def suspect_lines(analysis: "Analysis", most: int) -> Iterator[str]:
    """What is slower than the others of its kind; clocks have lines of their own."""
    kinds = Counter(one.kind for one in analysis.suspects if one.kind != "clock")
    many = [kind for kind, count in kinds.items() if count >= MAX_LISTED]
    for kind in many:
        are, why = f"{kind}s", "see --json"
        if kind == "microbatch":
            below = ", see what another deal saves below" * any(deal_line(analysis))
            are, why = "microbatches", f"their data differ{below}"
        yield f"suspect: {MAX_LISTED} {are} or more take over {MIN_RATIO} times the others: {why}"
    named = [one for one in analysis.suspects if one.kind in kinds and one.kind not in many]
    for one in named[:most]:
        more = f"{seconds(one.seconds)}, {one.z:.3g} standard errors"
        yield f"suspect: {one.kind} {one.name} {one.why} ({more})"
    if len(named) > most:
        yield f"and {len(named) - most} more suspects, see --json"


def deal_line(analysis: "Analysis") -> Iterator[str]:
    """What another deal of the data saves, if it does, with markup."""
    dealt = analysis.deal
    if dealt is not None and dealt.saves > LEAST:
        yield (
            f"microbatches dealt anew to the replicas, in the best order found: the slowest takes "
            f"{seconds(float(dealt.after.mean()))} in the mean, not "
            f"{seconds(float(dealt.before.mean()))}: [bold]{percent(dealt.saves)}[/] less; no deal "
            f"saves more than {percent(dealt.bound)}"
        )


def alone(adds: float | None) -> str:
    """What a share adds alone; nothing where that is not said."""
    return "" if adds is None else seconds(adds)


def largest(shares: "Attribution", each: int = EACH) -> "Iterator[Share]":
    """The largest shares of every kind."""
    step, count = float(shares.recorded.mean()), dict[str, int]()
    for share in shares.shares:
        count[share.kind] = count.get(share.kind, 0) + 1
        if share.saves > LEAST * step and count[share.kind] <= each:
            yield share


def said(analysis: "Analysis", result: Mapping[str, Any]) -> Iterator[object]:
    """What a person reads of a trace."""
    shares = analysis.attribution
    yield heading_of(analysis, result)
    yield from (plain(f"  {text}") for text in analysis.pipelines.trace.inferred)
    yield from _left_out(analysis)
    yield from (f"  {line}" for line in clock_lines(analysis, NAMED))
    yield f"  {replay_line(analysis)}"
    yield from (f"  {line}" for line in link_lines(analysis, NAMED))
    yield from _stalls(analysis)
    yield from (f"  {line}" for line in suspect_lines(analysis, NAMED))
    yield f"  {step_line(shares)}"
    yield _shares_table(shares, "what the mean step would save")
    if analysis.against is not None:
        yield against_line(analysis.against)
        title = "what the mean step would save with times of the other run"
        yield _shares_table(analysis.against, title)
    yield _op_times(analysis)
    yield from forecast_line(analysis)
    yield from deal_line(analysis)
    yield f"the mean pipeline, at mean times: [bold]{seconds(analysis.advice.step_time)}[/]"
    yield from (f"  {escape(line)}" for line in diagnosis(analysis.advice))
    yield from remedies_said(analysis.advice, result["remedies"])


def _left_out(analysis: "Analysis") -> Iterator[object]:
    left = analysis.left_out
    for each in left[:NAMED]:
        times = f" ({each.count} times)" if each.count > 1 else ""
        yield plain(f"  left out: {each.what}: {each.why}{times}")
    if len(left) > NAMED:
        yield f"  and {len(left) - NAMED} more, see --json"
    if analysis.pipelines.odd_steps:
        odd = ", ".join(map(str, analysis.pipelines.odd_steps[:NAMED]))
        yield f"  another order than most in steps {odd}"


def _stalls(analysis: "Analysis") -> Iterator[object]:
    """What nothing that was recorded explains."""
    stalls = analysis.stalls
    for one in stalls[:NAMED]:
        yield (
            f"  unexplained: step {one.step}, replica {one.replica}, worker {one.worker} starts "
            f"{one.op} {seconds(one.seconds)} after all that it waits for"
        )
    if len(stalls) > NAMED:
        yield f"  and {len(stalls) - NAMED} more that are shorter, see --json"


def _shares_table(shares: "Attribution", title: str) -> object:
    step = float(shares.recorded.mean())
    if not any(largest(shares)):
        return f"{title}: no place alone more than {percent(LEAST)}"
    return table_of(
        [share._asdict() for share in largest(shares)],
        (
            Column("if", lambda row: escape(f"{row['kind']} {row['name']}")),
            Column("saves", "saves", seconds),
            Column("of the step", lambda row: percent(row["saves"] / step)),
            Column("alone adds", lambda row: alone(row["adds"])),
        ),
        title=title,
        caption=f"saves: {SAVES}; alone adds: {ADDS}",
    )


def _what(row: Mapping[str, Any]) -> str:
    """An op of a stage, a message from one to another, a gap, or what a file calls it."""
    of_kind = {"op": f"{row['name']} of stage {row['stage']}", "other": row["name"]}
    return of_kind.get(row["kind"], f"{row['kind']} {row['name']}")


def _op_times(analysis: "Analysis") -> object:
    return table_of(
        [row._asdict() for row in analysis.op_times if row.median > 0],
        (
            Column("what", _what, escape),
            Column("worker", "worker"),
            Column("5 %", "low", seconds),
            Column("median", "median", seconds),
            Column("95 %", "high", seconds),
        ),
        title="what ops, messages and collectives took",
    )


PAGE_SHARES = 8  # shares of a kind on the page
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
    place = shares.by_name("place")
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

    order, of_kind = np.argsort(shares.steps), shares.by_name(kind)
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
    costs = measured_costs(analysis.replay, pipeline=one)
    run = pj.evaluate(analysis.pipelines.tables[one.table], costs, link=analysis.replay.links)
    return Ran(title, run, analysis.pipelines.starts(one))


def _median_step(analysis: "Analysis") -> "RecordedStep":
    """The median step for a picture."""
    from pipejax.plots.heat_maps import RecordedStep

    trace = analysis.pipelines.trace
    slowest, title = _median_pipeline(analysis)
    slices = slowest.slices
    is_second = is_second_of_pair(trace, slices)
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
    yield _op_times_section(analysis)
    fits = [(name, percent(error)) for name, error in analysis.replay.fits.items()]
    yield Section("Links that were tried", ("links", "mean error of the replay"), fits)


def _op_times_section(analysis: "Analysis") -> Section:
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
            f"{one.kind} {one.name}",
            seconds(one.saves),
            percent(one.saves / step),
            alone(one.adds),
        )
        for one in largest(shares, PAGE_SHARES)
    ]
    head = ("if", "saves", "of the step", "alone adds")
    note = f"Saves: {SAVES}. Alone adds: {ADDS}."
    return Section(title, head, rows, note=note, picture=picture)


def _svg(picture: "Figure") -> str:
    return picture._repr_svg_()  # type: ignore[attr-defined]  # ours shows itself
