"""Text, page and pictures of a trace."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.cli.output.files import Output
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.remedies import advice_details, advice_view, first_fault
from pipejax.cli.output.report import Column, Figure, plain, rows_table
from pipejax.cli.output.report_pages import Ran, report_page
from pipejax.traces.findings.op_times import measured_costs
from pipejax.traces.findings.suspects import MAX_LISTED, MIN_RATIO
from pipejax.traces.record import NONE, StepBudget
from pipejax.traces.replaying.pipelines import Pipeline, is_second_of_pair

if TYPE_CHECKING:
    from pipejax.plots.heat_maps import HeatMap, RecordedStep
    from pipejax.traces.findings.analysis import Analysis
    from pipejax.traces.findings.attribution import Attribution, Share

NAMED = 3  # suspects on the first screen
SHARES = 8  # shares of a kind in a table
OUTLIER = 2.0  # times the median: a step that takes longer is not in a map
ROWS = 50  # rows of other tables
MIN_SHARE = 0.002  # of the step: a share that saves less is not shown
CULPRITS = ("place", "stage", "worker", "replica", "link")  # places, from the most specific
MEAN_RATIO = 1.05  # of the mean to the median: from here on both are named
ALIKE = 0.9  # of the largest share: a more specific part that costs so much is named
BAD_REPLAY = 0.1  # mean error from which a replay is of something else than the run


def trace_view(analysis: "Analysis", result: Mapping[str, Any]) -> Iterator[object]:
    """Yield what makes the step slow, what that costs, and how sure it is."""
    shares, advice = analysis.attribution, analysis.advice
    worst, step = _culprit(shares), float(shares.recorded.mean())
    fault = f"no part alone costs more than {percent(MIN_SHARE)}"
    if worst is not None:
        name = (
            f"the machine of {worst.name}"
            if worst.kind == "place"
            else f"{worst.kind} {worst.name}"
        )
        fault = f"{name} costs {seconds(worst.saves)} ({percent(worst.saves / step)})"
    median = float(np.median(shares.recorded))
    mean = f" (the median is {seconds(median)})" if step > MEAN_RATIO * median else ""
    yield plain(f"{seconds(step)} per step{mean}; {fault}")
    yield _heading(analysis, result)
    if worst is not None and worst.kind == "place":
        yield plain(f"first repair or replace this machine: saves {seconds(worst.saves)}")
    if analysis.replay.mean_error > BAD_REPLAY:
        yield plain(
            f"warning: the replay is {percent(analysis.replay.mean_error)} off; these may be files "
            "of some ranks only: give those of all, or their folder"
        )
    if analysis.left_out:
        yield f"parts of the files that were left out: {len(analysis.left_out)}"
    yield from _suspects(analysis)
    if analysis.against is not None:
        yield _against(analysis.against)
    yield from _outlying_steps(analysis)
    yield from _deal(analysis)
    yield from _budget(analysis.pipelines.trace.budgets)
    yield plain(f"the mean pipeline takes {seconds(advice.step_time)}: {first_fault(advice)}")
    yield from advice_view(advice, result["remedies"])


def trace_details(analysis: "Analysis", result: Mapping[str, Any]) -> dict[str, Iterable[object]]:
    """Return costs of parts, stalls, the reading and replay of files, and the advice."""
    pipelines = analysis.pipelines
    dropped = [vars(part) for part in analysis.left_out]
    reading: list[object] = [*map(plain, pipelines.trace.inferred), *_table(dropped, LEFT_OUT)]
    if pipelines.odd_steps:
        odd = ", ".join(map(str, pipelines.odd_steps[:ROWS]))
        reading.append(f"steps with another order of ops: {odd}")
    times = [row._asdict() for row in analysis.op_times if row.median > 0]
    details: dict[str, list[object]] = {
        "cost of each part": [_shares(analysis.attribution), Figure(lambda: _svg(analysis))],
        "costs against the other run": [
            *map(_shares, [analysis.against] if analysis.against else [])
        ],
        "files": [*reading, *_clocks(analysis)],
        "time of devices": _table([row._asdict() for row in pipelines.trace.budgets], BUDGETS),
        "unexplained stalls": _table([stall._asdict() for stall in analysis.stalls], STALLS),
        "replay": [*_replay(analysis), *_forecast(analysis)],
        "times of ops and messages": _table(times, TIMES, len(times)),
    }
    advice = advice_details(analysis.advice, result["remedies"])
    return {name: parts for name, parts in (details | advice).items() if parts}


def _culprit(shares: "Attribution") -> "Share | None":
    """Return the place that costs most; of places that cost about as much, the most specific."""
    largest = [*_largest(shares, 1)]
    parts = [share for share in largest if share.kind in CULPRITS] or largest[:1]
    largest_cost = max((share.saves for share in parts), default=0.0)
    return min(
        (share for share in parts if share.saves >= ALIKE * largest_cost),
        key=lambda share: [*CULPRITS, share.kind].index(share.kind),
        default=None,
    )


def _heading(analysis: "Analysis", result: Mapping[str, Any]) -> str:
    name = analysis.schedule or "no schedule of the registry"
    several = f", {result['orders']} orders" if result["orders"] > 1 else ""
    return (
        f"[bold]{escape(name)}[/], {result['workers']} workers, {result['stages']} stages, "
        f"{result['microbatches']} microbatches{several}: {_count(result['steps'], 'step')} of "
        f"{_count(result['replicas'], 'replica')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _replay(analysis: "Analysis") -> Iterator[object]:
    """Yield how far the replay is off, and which link models it rules out."""
    replay = analysis.replay
    yield (
        f"mean error {percent(replay.mean_error)}, largest {percent(replay.worst_error)}, with "
        f"{replay.links.model} links and {seconds(replay.message_time)} per message"
    )
    if replay.equivalent_models:
        yield f"these link models fit as well: {', '.join(replay.equivalent_models)}"
    for name, longest in replay.unobserved.items():
        yield f"messages {name} never delay an op: each takes under {seconds(longest)}"
    fits = [{"links": name, "error": error} for name, error in replay.fits.items()]
    yield rows_table(fits, (Column("links", "links"), Column("mean error", "error", percent)))


def _against(shares: "Attribution") -> object:
    """Return how much slower than the other run this one is, and what times of ops explain."""
    step, other = float(shares.recorded.mean()), shares.other or 0.0
    word = "slower" if step >= other else "faster"
    explained = float(shares.replayed.mean()) - shares.ideal
    return plain(
        f"{seconds(abs(step - other))} {word} than the other run ({seconds(other)} per step); "
        f"times of ops and messages explain {seconds(explained)}"
    )


def _outlying_steps(analysis: "Analysis") -> Iterator[object]:
    """Yield steps that the forecast leaves out, and how to leave them out of everything."""
    forecast = analysis.forecast
    if forecast is not None and forecast.left_out:
        steps = [*forecast.left_out]
        hint = f"; --only-steps {max(steps) + 1}: leaves it out" if len(steps) == 1 else ""
        yield plain(f"outliers: step {', '.join(map(str, steps))}{hint}")


def _forecast(analysis: "Analysis") -> Iterator[object]:
    forecast = analysis.forecast
    if forecast is not None:
        yield plain(
            f"the first half of the steps predicts {seconds(forecast.predicted)}, with "
            f"{100 * forecast.confidence:g} % of later steps from {seconds(forecast.low)} to "
            f"{seconds(forecast.high)}; {100 * forecast.inside:.0f} % of the second half fell "
            f"inside, median error {percent(forecast.median_error)}"
        )


def _clocks(analysis: "Analysis") -> Iterator[object]:
    for offset in analysis.offsets:
        if offset.step == NONE:
            yield plain(
                f"clock of worker {offset.worker}, replica {offset.replica}, was "
                f"{seconds(abs(offset.seconds))} {'ahead' if offset.seconds > 0 else 'behind'}; "
                f"corrected within {seconds(offset.residual)}"
            )


def _suspects(analysis: "Analysis") -> Iterator[object]:
    """Yield what is slower than the others of its kind; clocks are details."""
    suspects = [suspect for suspect in analysis.suspects if suspect.kind != "clock"]
    counts = Counter(suspect.kind for suspect in suspects)
    for kind, count in counts.items():
        if count >= MAX_LISTED:
            kinds = {"microbatch": "microbatches"}.get(kind, f"{kind}s")
            yield plain(f"suspect: {count} {kinds} or more take over {MIN_RATIO} times the others")
    single = [suspect for suspect in suspects if counts[suspect.kind] < MAX_LISTED]
    for suspect in single[:NAMED]:
        yield plain(
            f"suspect: {suspect.kind} {suspect.name} {suspect.why} ({seconds(suspect.seconds)})"
        )
    if single[NAMED:]:
        yield f"and {len(single) - NAMED} more suspects: --json"


def _deal(analysis: "Analysis") -> Iterator[object]:
    """Yield what another distribution of the microbatches over the replicas saves."""
    deal = analysis.deal
    if deal is not None and deal.saves > MIN_SHARE:
        yield plain(
            f"microbatches distributed anew over the replicas save {percent(deal.saves)} of the "
            f"slowest replica's {seconds(float(deal.before.mean()))}; none saves more than "
            f"{percent(deal.bound)}"
        )


def _largest(shares: "Attribution", count: int) -> "Iterator[Share]":
    """Yield the largest shares of each kind."""
    step, counts = float(shares.recorded.mean()), Counter[str]()
    for share in shares.shares:
        counts[share.kind] += 1
        if share.saves > MIN_SHARE * step and counts[share.kind] <= count:
            yield share


def _shares(shares: "Attribution") -> object:
    rows = [*_largest(shares, SHARES)]
    if not rows:
        return f"no part alone costs more than {percent(MIN_SHARE)}"
    return rows_table(
        (share._asdict() for share in rows),
        (
            Column("part", _name),
            Column("saves", "saves", seconds),
            Column("of the step", lambda row: percent(row["saves"] / shares.recorded.mean())),
            Column("adds", "adds", seconds),
        ),
        caption="saves: with only this part at normal speed; adds: to an ideal step with only this "
        "part as recorded",
    )


def _table(
    rows: Sequence[Mapping[str, Any]], columns: Iterable[Column], count: int = ROWS
) -> list[object]:
    """Make a table of the first rows, and count the others."""
    more = [f"and {len(rows) - count} more: --json"] if len(rows) > count else []
    return [rows_table(rows[:count], columns), *more] if rows else []


def _name(row: Mapping[str, Any]) -> str:
    """Return the name of a part with its kind, or with its stage, or as files have it."""
    if row["kind"] == "op":
        return f"{row['name']} of stage {row['stage']}"
    return escape(f"{row['kind']} {row['name']}" if row["kind"] != "other" else row["name"])


def _budget(budgets: Sequence[StepBudget]) -> Iterator[object]:
    """Yield the parts of a mean step of all ranks."""
    if budgets:
        parts = np.sum([budget[3:] for budget in budgets], axis=0)
        shares = zip(BUDGET_PARTS.values(), (parts / parts.sum()).tolist(), strict=True)
        texts = ", ".join(f"{name} {percent(share)}" for name, share in shares)
        yield plain(f"time of devices: {texts}")


BUDGET_PARTS = {name: name.replace("_", "-") for name in StepBudget._fields[3:]}
LEFT_OUT = (
    Column("part", "what", escape),
    Column("reason", "why", escape),
    Column("times", "count"),
)
STALLS = (
    Column("step", "step"),
    Column("replica", "replica"),
    Column("worker", "worker"),
    Column("op", "op"),
    Column("idle although its inputs were there", "seconds", seconds),
)
BUDGETS = (
    *(Column(name, name) for name in StepBudget._fields[:3]),
    *(Column(name, key, seconds) for key, name in BUDGET_PARTS.items()),
)
TIMES = (
    Column("part", _name),
    Column("worker", "worker"),
    Column("5 %", "low", seconds),
    Column("median", "median", seconds),
    Column("95 %", "high", seconds),
    Column("samples", "slices"),
)


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
    replicas = sorted({pipeline.replica for pipeline in analysis.pipelines.pipelines})
    place = shares.by_name("place")
    if place:
        cells = [
            [place[f"worker {worker} of replica {replica}"].adds for replica in replicas]
            for worker in range(table.num_workers)
        ]
        rows = [f"worker {worker}" for worker in range(table.num_workers)]
        title = "time that one slow machine adds to an ideal step"
        yield HeatMap(title, "replica", [*map(str, replicas)], rows, np.array(cells))
    elif table.num_stages > table.num_workers:  # of one stage each they would be drawn twice
        yield _by_step(shares, "worker")
    yield _by_step(shares, "stage")


def _by_step(shares: "Attribution", kind: str) -> "HeatMap":
    from pipejax.plots.heat_maps import HeatMap

    order, shares_by_name = np.argsort(shares.steps), shares.by_name(kind)
    # a warm-up step would take all the colours
    is_usual = shares.recorded[order] <= OUTLIER * np.median(shares.recorded)
    outliers = ", ".join(f"{shares.steps[k]}" for k in order[~is_usual])
    order = order[is_usual]
    names = sorted(shares_by_name, key=int)
    return HeatMap(
        f"cost of a slow {kind} by step" + (f", without {outliers}" if outliers else ""),
        "step",
        [str(shares.steps[k]) for k in order],
        [f"{kind} {name}" for name in names],
        np.stack([shares_by_name[name].by_step[order] for name in names]),
    )


def _median_pipeline(analysis: "Analysis") -> tuple[Pipeline, str]:
    """The slowest replica of the step that is the median, and its name."""
    shares, pipelines = analysis.attribution, analysis.pipelines
    step = shares.steps[int(np.argsort(shares.recorded)[len(shares.steps) // 2])]
    spans = [
        (span, k)
        for k, (pipeline, span) in enumerate(
            zip(pipelines.pipelines, pipelines.spans.tolist(), strict=True)
        )
        if pipeline.step == step
    ]
    slowest = pipelines.pipelines[max(spans)[1]]
    several = len(pipelines.trace.replicas) > 1
    return slowest, f"step {step}" + f", replica {slowest.replica}" * several


def _median_ran(analysis: "Analysis") -> Ran:
    """The median step for the explorer, whose replay has the times of its own ops."""
    pipeline, title = _median_pipeline(analysis)
    costs = measured_costs(analysis.replay, pipeline=pipeline)
    run = pj.evaluate(analysis.pipelines.tables[pipeline.table], costs, link=analysis.replay.links)
    return Ran(title, run, analysis.pipelines.starts(pipeline))


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
    """Return the report of a trace as one page."""
    return report_page(
        analysis.advice,
        f"{analysis.schedule or 'a schedule'}: a measured run",
        trace_view(analysis, result),
        trace_details(analysis, result),
        name="mean pipeline",
        ran=_median_ran(analysis),
    )


def _svg(analysis: "Analysis") -> str:
    """Draw the maps; the step itself is in the explorer, which draws many ops in a few MB."""
    from pipejax.plots.heat_maps import heat_picture

    return heat_picture([*_maps(analysis)])._repr_svg_()  # type: ignore[attr-defined]
