"""Text, page and pictures of a trace."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.base.data_files import load_json
from pipejax.cli.output import remedies
from pipejax.cli.output.files import Output
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import plain
from pipejax.cli.output.report_pages import MeasuredRun, report_page
from pipejax.cli.output.tables import Column, Figure, rows_table
from pipejax.traces.findings.op_times import measured_costs
from pipejax.traces.findings.suspects import MAX_LISTED, MIN_RATIO
from pipejax.traces.record import NONE, StepBudget

if TYPE_CHECKING:
    from pipejax.plots.heat_maps import HeatMap

MAX_OTHERS = 2  # other suspects on the first screen
MAX_SHARES = 8  # shares of a kind in a table
MAX_ROWS = 50  # rows of other tables
EXACT = 5e-5  # mean error of a replay that is called exact
MIN_SHARE = 0.002  # of the step: a share that saves less is not shown
MIN_SAVING = 0.01  # of the step: a remedy that saves less is not on the first screen
BY_MARK = "the median step", "the only step"  # first words of a note on marks of steps
# first words of notes on what is uncertain
DOUBTS = "unit of times", "replicas", "microbatches are", "clocks of"
# noun of a suspect, and an action of its owner, by its kind
ACTIONS: Mapping[str, tuple[str, str]] = load_json(Path(__file__).with_name("suspect_actions.json"))
HARDWARE = ("worker", "replica", "link", "host")  # kinds of suspects that hardware explains
WORDS = {"start": "warm-up", "end": "cool-down", "messages": "exposed messages"}  # of parts


def _action(suspect: "pj.results.Suspect") -> str:
    """Return what the owner of a suspect can do about it."""
    noun = {"host": "worker", "launch": "the launch of"}.get(suspect.kind, suspect.kind)
    return ACTIONS[suspect.kind][1].format(name=f"{noun} {suspect.name}")


def first_remedy(analysis: "pj.results.Analysis", command: str) -> list[dict[str, Any]]:
    """Return a row, as of `remedies_json`, for the repair of the first suspect.

    The list is empty without a suspect, and if moving layers off a slow stage is the first remedy.
    """
    finding, step_time = analysis.finding, float(analysis.attribution.recorded.mean())
    if finding is None or analysis.advice is None:
        return []
    what = _action(finding)
    if finding.kind == "stage":
        if "layers" in [remedy.kind for remedy in analysis.advice.remedies[:1]]:
            return []
        # whole layers are too large; a worker with other stages would slow these too
        name, table = finding.name, analysis.pipelines.table
        part = "head" if int(name) == table.num_stages - 1 else "layers"
        what = f"lighten the {part} or recomputation of stage {name}"
        if table.stages_per_worker == 1:
            what = f"inspect the machine of stage {name}, or lighten its {part} or recomputation"
    if "step" not in finding.place:  # else it is a fault of one step, not of the mean
        step_time -= finding.seconds
    return [
        {
            "what": what,
            "kind": "repair",
            "launchers": [],
            "shelf": "hardware" if finding.kind in HARDWARE else "code",
            "command": command,
            "saves": finding.seconds,
            "bound": None,
            "memory": 1.0,
            "step_time": step_time,
            "fits": True,
            "assumes": f"the {finding.kind} can be as fast as the other ones",
            "launch": {},
        }
    ]


def trace_view(
    analysis: "pj.results.Analysis",
    result: Mapping[str, Any],
    before_command: Sequence[object] = (),
    step_commands: Mapping[str, str] = MappingProxyType({}),
    explain_command: str = "",
) -> Iterator[object]:
    """Yield the first suspect, its cost and the action; other suspects, remedies and evidence."""
    step, advice = float(analysis.attribution.recorded.mean()), analysis.advice
    finding, rows = analysis.finding, result["remedies"]
    yield from _other_run(analysis)
    if advice is None:
        yield plain(f"{seconds(step)} per step; no advice: {analysis.no_advice}")
        yield from _notes(analysis, *BY_MARK)
        yield from _replay_help(analysis)
        yield from _budget(analysis.pipelines.trace.budgets)
        yield _heading(analysis, result)
        yield from _notes(analysis, *DOUBTS)
        return
    if finding is None:
        yield plain(f"{seconds(step)} per step; {remedies.first_fault(advice)}")
    else:
        yield plain(_suspect_text(analysis, finding))
    yield from _notes(analysis, *BY_MARK)
    # rows: perhaps the repair of `first_remedy`, then the remedies of the advice
    advised = named = rows[len(rows) - len(advice.remedies) :]
    if finding is not None and finding.kind == "stage" and rows and rows[0]["kind"] == "layers":
        named = advised[1:]
        layers = rows[0]["what"].removeprefix("layers over stages: ")
        hint = "" if rows[0]["launchers"] else remedies.LAYERS_HINT
        goal = f"if {layers}" if layers.startswith("all ") else f"with {layers} layers"
        saves = seconds(rows[0]["saves"])
        yield plain(f"fix: {_action(finding)}, which saves {saves} of this cost {goal}{hint}")
    elif len(rows) > len(advised):
        yield plain(f"fix: {rows[0]['what']} (saves {seconds(rows[0]['saves'])})")
        if finding is not None and rows[0]["command"] in step_commands.values():
            yield plain(f"the op that was late in step {finding.name}: {rows[0]['command']}")
    lead = "or instead: " if len(named) < len(rows) else ""
    if _has_late_hosts(analysis):  # the times of the advice lack their delays
        lead = "once hosts launch in time: "
    yield from _equal_causes(analysis)
    yield from _other_suspects(analysis)
    if finding is not None and advice.bottleneck.seconds > 2 * finding.seconds:
        yield plain(f"also, in the step at mean times: {remedies.first_fault(advice)}")
    yield from _deal(analysis)
    yield from _budget(analysis.pipelines.trace.budgets)
    yield _mean_step(analysis, advice, step)
    min_saving = MIN_SAVING * advice.step_time
    yield from _ruled_out(advice, explain_command, _has_late_hosts(analysis))
    named = [row for row in named if row["saves"] > min_saving and row["shelf"] != "hardware"]
    yield from remedies.remedies_view(advice, advised, named, before_command, lead)
    yield _heading(analysis, result)
    yield from _notes(analysis, *DOUBTS)


def _other_run(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield the difference from the other run, if there is one, and what explains it."""
    if (shares := analysis.against) is not None:
        other, explained = shares.other or 0.0, float(shares.replayed.mean()) - shares.ideal
        step = float(shares.recorded.mean())
        word, sign = ("slower", 1) if step >= other else ("faster", -1)
        yield plain(
            f"{seconds(step)} per step, {seconds(abs(step - other))} {word} than the other run "
            f"({seconds(other)}); times of ops and messages explain {seconds(sign * explained)}"
        )


def _mean_step(
    analysis: "pj.results.Analysis", advice: "pj.results.Explanation", step: float
) -> object:
    """Return the step time at mean times of ops, and its parts; `step` is measured [s]."""
    mean, runs = advice.step_time, analysis.pipelines.pipelines
    over = "mean time over all steps" if len(runs) > 1 else "time in the only step"
    if len(runs) > 1 and len({run.step for run in runs}) == 1:
        over = "mean time over the replicas"
    parts = (part for part in advice.parts if abs(part.seconds) > MIN_SHARE * mean)
    texts = (f"{WORDS.get(part.name, part.name)} {percent(part.seconds / mean)}" for part in parts)
    is_shorter = step > (1 + MIN_SAVING) * mean
    has_means = len(runs) > 1 and not _has_late_hosts(analysis)
    cause = "times of ops vary" if has_means else "ops start late"
    basis = f"causes and savings are shares of {seconds(mean)}"
    why = f" (measured: {seconds(step)}, as {cause}; {basis})" if is_shorter else ""
    lead = f"shares of a step of {seconds(mean)}, in which each op takes its {over}{why}"
    return plain(f"{lead}: {', '.join(texts)}")


def _has_late_hosts(analysis: "pj.results.Analysis") -> bool:
    """Return whether hosts delay ops; the advice holds for the run without these delays."""
    return any(suspect.kind in ("host", "launch") for suspect in analysis.suspects)


def _ruled_out(
    advice: "pj.results.Explanation", explain_command: str, has_late_hosts: bool
) -> Iterator[object]:
    """Yield a line if memory rules out a schedule."""
    for fault in advice.faults:
        is_large = fault.seconds > MIN_SAVING * advice.step_time
        if fault.kind == "memory" and is_large and fault is not advice.bottleneck:
            text, _, limit = fault.why.partition(" (--memory-limit ")
            how = "a trace does not say how much memory is free"
            if limit and explain_command:
                command = f"{explain_command} --memory-limit {limit.partition(' ')[0]}"
                how = f"if more memory is free, try (after --save): {command}"
            begin = "also, once hosts launch in time" if has_late_hosts else "also"
            yield plain(f"{begin}: {text}; {how}")


def _notes(analysis: "pj.results.Analysis", *beginnings: str) -> Iterator[object]:
    """Yield the sentences of the reader that begin so."""
    texts = analysis.pipelines.trace.inferred
    yield from (plain(text) for text in texts if text.startswith(beginnings))


def _suspect_text(analysis: "pj.results.Analysis", suspect: "pj.results.Suspect") -> str:
    """Write a suspect as a sentence: its noun, name, evidence and cost."""
    step, table = float(analysis.attribution.recorded.mean()), analysis.pipelines.table
    subject = f"{suspect.kind} {suspect.name} " if suspect.z else ""  # else `why` names it
    why, places = suspect.why, _paired_places(table, suspect) if subject else {}
    if places:
        why = why.removesuffix(" in all its stages")  # it has one
        same_place = {"worker": "stage", "stage": "worker"}[suspect.kind]
        subject += f"({same_place} {places[same_place]}) "
    cost = seconds(suspect.seconds)
    if suspect.kind == "step" and suspect.place["step"] not in analysis.attribution.steps:
        cost += ", which the means leave out"
    elif "step" not in suspect.place:
        cost += f" of {seconds(step)} per step ({percent(suspect.seconds / step)})"
    return f"{ACTIONS[suspect.kind][0]}: {subject}{why}; it costs {cost}"


def _paired_places(table: pj.ScheduleTable, suspect: "pj.results.Suspect") -> dict[str, int]:
    """Return the stage and worker of a suspect if every worker has one stage, its own; else {}."""
    workers = table.placement[0].tolist()
    is_place = suspect.kind in ("worker", "stage")
    if not is_place or len(table.placement) > 1 or len(workers) > table.num_workers:
        return {}  # two pipes, or several stages on a worker
    place = suspect.place[suspect.kind]
    stage = place if suspect.kind == "stage" else workers.index(place)
    return {"stage": stage, "worker": workers[stage]}


def _equal_causes(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield other causes that would look the same in these files, and how to distinguish them."""
    finding, trace = analysis.finding, analysis.pipelines.trace
    if finding is None or finding.kind not in ("worker", "stage", "link"):
        return
    is_replica = "replica" in finding.place or len(trace.replicas) > 1
    places = _paired_places(analysis.pipelines.table, finding) if finding.z else {}
    slow_stages = [row.place.get("stage") for row in analysis.suspects if row.kind == "stage"]
    if places and not is_replica:
        slow = {"worker": "its machine", "stage": "the stage"}[finding.kind]
        yield plain(
            f"one replica does not tell stage {places['stage']} from the machine of its worker; "
            f"the remedies here assume that {slow} is slow: to be sure, record more replicas (with "
            "--replicas if labels lack them), or exchange two machines and record again"
        )
    elif places and "replica" not in finding.place:
        yield plain(f"the stage is slow in all {len(trace.replicas)} replicas, so no rank alone is")
    elif places and places["stage"] not in slow_stages:
        yield plain(f"stage {places['stage']} is not slow in all replicas, so the machine is")
    if not trace.budgets and not (finding.kind == "stage" and is_replica):
        yield plain(
            f"a slow host would look like this {finding.kind}: traces with CUDA calls distinguish "
            "them"
        )


def _other_suspects(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield kinds with many suspects as counts, then the next suspects except those of clocks."""
    suspects = [suspect for suspect in analysis.suspects if suspect.kind != "clock"]
    counts = Counter(suspect.kind for suspect in suspects)
    for kind, count in counts.items():
        if count >= MAX_LISTED:
            kinds = {"microbatch": "microbatches"}.get(kind, f"{kind}s")
            yield plain(f"also: {count} {kinds} or more take over {MIN_RATIO} times the others")
    first = [] if analysis.finding is None else [analysis.finding]
    few = [suspect for suspect in suspects if counts[suspect.kind] < MAX_LISTED]
    # a worker and its only stage are one place of one cost: the first of them is named
    distinct: dict[tuple[object, ...], pj.results.Suspect] = {}
    for suspect in [*first, *few]:
        is_place = suspect.kind in ("worker", "stage")
        key = (suspect.seconds,) if is_place else (suspect.kind, suspect.name)
        distinct.setdefault(key, suspect)
    others = [*distinct.values()][len(first) :]
    for suspect in others[:MAX_OTHERS]:
        yield plain(f"also: {_suspect_text(analysis, suspect)}")
    if others[MAX_OTHERS:]:
        yield f"and {len(others) - MAX_OTHERS} more suspects: --json"


def _replay_help(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield advice for a closer replay."""
    for stall in analysis.stalls[:1]:
        yield plain(
            f"launch-starved or paused: worker {stall.worker} of replica {stall.replica} idles "
            f"{seconds(stall.seconds)} before {stall.op} in step {stall.step} although its inputs "
            f"are ready ({len(analysis.stalls)} in all); record slices of the work in that time"
        )
    trace = analysis.pipelines.trace
    is_stated = trace.known_workers and not any(t.startswith("ranks:") for t in trace.inferred)
    if not is_stated or trace.left_out:
        yield plain("if these are files of some ranks only, give the files of all ranks")


def trace_details(
    analysis: "pj.results.Analysis", result: Mapping[str, Any], step_commands: Mapping[str, str]
) -> dict[str, Iterable[object]]:
    """Return costs of parts, stalls, the reading and replay of files, and the advice.

    `step_commands` find the late ops of odd steps, by step.
    """

    def draw_maps() -> str:
        from pipejax.plots.heat_maps import heat_picture

        # the step itself is in the explorer, which draws many ops in a few MB
        return heat_picture([*_maps(analysis)])._repr_svg_()

    pipelines = analysis.pipelines
    dropped = [vars(part) for part in analysis.left_out]
    reading: list[object] = [*map(plain, pipelines.trace.inferred), *_table(dropped, LEFT_OUT)]
    if pipelines.odd_steps:
        odd = ", ".join(map(str, pipelines.odd_steps[:MAX_ROWS]))
        reading.append(f"steps with another order of ops: {odd}")
    times = [row._asdict() for row in analysis.op_times if row.median]
    late_ops = (f"the op that was late in step {k}: {line}" for k, line in step_commands.items())
    details: dict[str, list[object]] = {
        "cost of each part": [_shares(analysis.attribution), Figure(draw_maps)],
        "costs against the other run": [_shares(analysis.against)] if analysis.against else [],
        "files": [*reading, *_clocks(analysis)],
        "time of devices": _table([row._asdict() for row in pipelines.trace.budgets], BUDGETS),
        "odd steps": [*map(plain, late_ops)],
        "launch-starved ops": _table([stall._asdict() for stall in analysis.stalls], STALLS),
        "replay": [*_replay(analysis), *_forecast(analysis)],
        "times of ops and messages": _table(times, TIMES, len(times)),
    }
    if analysis.advice is not None:
        rows = result["remedies"]
        advised = rows[len(rows) - len(analysis.advice.remedies) :]
        details |= remedies.advice_details(analysis.advice, advised)
    return {name: parts for name, parts in details.items() if parts}


def _heading(analysis: "pj.results.Analysis", result: Mapping[str, Any]) -> str:
    """Return the schedule, sizes and fit of the replay on which a report rests."""
    name = analysis.schedule or "no schedule of the registry"
    orders = f", {result['orders']} orders" if result["orders"] > 1 else ""
    num_parts = len(analysis.left_out)
    left_out = f"; {_count(num_parts, 'part')} of the files left out" if num_parts else ""
    replay, error = analysis.replay, analysis.replay.mean_error
    fit = "exactly as measured" if error < EXACT else f"{percent(error)} off on average"
    # under these models, messages do not wait for the receiver
    others = [name for name in replay.equivalent_models if name not in ("delay", "queued")]
    if others and replay.message_time > 0 and replay.links.model in ("delay", "queued"):
        fit += f" with link model {replay.links.model}; with {others[0]}, which fits as well, "
        fit += "remedies may save less"
    return (
        f"based on [bold]{escape(name)}[/], "
        f"{result['workers']} workers, {result['stages']} stages, "
        f"{result['microbatches']} microbatches{orders}: {_count(result['steps'], 'step')} of "
        f"{_count(result['replicas'], 'replica')}; replayed op by op, they are {fit}{left_out}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _replay(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield the errors of the replay, and the link models that fit as well."""
    replay = analysis.replay
    yield (
        f"mean error {percent(replay.mean_error)}, largest {percent(replay.worst_error)}, with "
        f"link model {replay.links.model} and {_time(replay.message_time)} per message"
    )
    if replay.equivalent_models:
        yield f"these link models fit as well: {', '.join(replay.equivalent_models)}"
    for name, longest in replay.unobserved.items():
        yield f"messages {name} never delay an op: each takes under {seconds(longest)}"
    fits = [{"links": name, "error": error} for name, error in replay.fits.items()]
    yield rows_table(fits, (Column("link model", "links"), Column("mean error", "error", percent)))


def _time(value: float) -> str:
    """Write a time, or that clocks do not resolve it, as of a message that arrives too early."""
    return seconds(value) if value > 0 else "below the clocks' resolution"


def _forecast(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield the step time that the first half of the steps predicts for the second half."""
    forecast = analysis.forecast
    if forecast is not None:
        title, only = ("failed forecast", "only ") if forecast.has_failed else ("forecast", "")
        yield plain(
            f"{title}: the first half of the steps predicts {seconds(forecast.predicted)}, with "
            f"{100 * forecast.confidence:g} % of later steps from {seconds(forecast.low)} to "
            f"{seconds(forecast.high)}; {only}{100 * forecast.inside:.0f} % of the second half "
            f"fell inside, median error {percent(forecast.median_error)}"
        )


def _clocks(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield how far the clock of each worker was off over all steps."""
    for offset in analysis.offsets:
        if offset.step == NONE:
            yield plain(
                f"clock of worker {offset.worker}, replica {offset.replica}, was "
                f"{seconds(abs(offset.seconds))} {'ahead' if offset.seconds > 0 else 'behind'}; "
                f"corrected within {seconds(offset.residual)}"
            )


def _deal(analysis: "pj.results.Analysis") -> Iterator[object]:
    """Yield the time that another distribution of microbatches over replicas saves."""
    deal = analysis.deal
    is_first = analysis.finding is not None and analysis.finding.kind == "data"
    if deal is not None and deal.saves > MIN_SAVING and not is_first:
        yield plain(
            "also: microbatches distributed anew over the replicas save "
            f"{percent(deal.saves)} of the slowest replica's "
            f"{seconds(float(deal.before.mean()))}; none saves more than {percent(deal.bound)}"
        )


def _shares(shares: "pj.results.Attribution") -> object:
    """Show the largest shares of each kind."""
    counts, rows = Counter[str](), list[dict[str, Any]]()
    for share in shares.shares:
        counts[share.kind] += 1
        is_large = share.saves > MIN_SHARE * float(shares.recorded.mean())
        if is_large and counts[share.kind] <= MAX_SHARES:
            rows.append(share._asdict())
    if not rows:
        return f"no part alone costs more than {percent(MIN_SHARE)}"
    return rows_table(
        rows,
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
    rows: Sequence[Mapping[str, Any]], columns: Iterable[Column], count: int = MAX_ROWS
) -> list[object]:
    """Make a table of the first rows, and count the others; nothing without rows."""
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
        times = [[getattr(budget, name) for name in BUDGET_PARTS] for budget in budgets]
        parts = np.sum(times, axis=0)  # over steps and ranks
        shares = zip(BUDGET_PARTS.values(), (parts / parts.sum()).tolist(), strict=True)
        texts = ", ".join(f"{name} {percent(share)}" for name, share in shares)
        yield plain(f"time of devices: {texts}")


BUDGET_PARTS = {name: name.replace("_", "-") for name in StepBudget._fields[3:8]}  # sum to a step
LEFT_OUT = (
    Column("part", "what", escape),
    Column("reason", "why", escape),
    Column("times", "count"),
)
STALLS = (
    *(Column(name, name) for name in ("step", "replica", "worker", "op")),
    Column("idle although its inputs were there", "seconds", seconds),
)
BUDGETS = (
    *(Column(name, name) for name in StepBudget._fields[:3]),
    *(Column(name, key, seconds) for key, name in BUDGET_PARTS.items()),
)
TIMES = (
    Column("part", _name),
    Column("worker", "worker"),
    Column("5 %", "low", _time),
    Column("median", "median", _time),
    Column("95 %", "high", _time),
    Column("samples", "slices"),
)


def draw_shares(analysis: "pj.results.Analysis", figure: Output) -> None:
    """Draw who costs how much."""
    from pipejax.plots.heat_maps import heat_picture  # matplotlib is an extra, slow to import

    figure.save_picture(heat_picture([*_maps(analysis)]))


def _maps(analysis: "pj.results.Analysis") -> "Iterator[HeatMap]":
    """Yield heat maps of workers and stages: added time by replica or, of one replica, by step."""
    from pipejax.plots.heat_maps import HeatMap

    shares, table = analysis.attribution, analysis.pipelines.table
    replicas = sorted({pipeline.replica for pipeline in analysis.pipelines.pipelines})
    place = shares.by_name("place")  # empty if there is one replica, or too many places
    if place:
        cells = [
            [place[f"worker {worker} of replica {replica}"].adds for replica in replicas]
            for worker in range(table.num_workers)
        ]
        rows = [f"worker {worker}" for worker in range(table.num_workers)]
        title = "time that one slow machine adds to an ideal step"
        yield HeatMap(title, "replica", [*map(str, replicas)], rows, np.array(cells))
    elif table.num_stages > table.num_workers:  # else both maps would be the same
        yield _by_step(shares, "worker")
    yield _by_step(shares, "stage")


def _by_step(shares: "pj.results.Attribution", kind: str) -> "HeatMap":
    """Return a heat map of the cost of each worker or stage (`kind`), by step."""
    from pipejax.plots.heat_maps import HeatMap

    order, shares_by_name = np.argsort(shares.steps), shares.by_name(kind)
    names = sorted(shares_by_name, key=int)
    return HeatMap(
        title=f"cost of a slow {kind} by step",
        x_label="step",
        columns=[str(shares.steps[k]) for k in order],
        rows=[f"{kind} {name}" for name in names],
        seconds=np.stack([shares_by_name[name].by_step[order] for name in names]),
    )


def _median_ran(analysis: "pj.results.Analysis") -> MeasuredRun:
    """Return the slowest replica of the median step, replayed with its own times."""
    shares, pipelines = analysis.attribution, analysis.pipelines
    step = shares.steps[int(np.argsort(shares.recorded)[len(shares.steps) // 2])]
    in_step = [k for k, pipeline in enumerate(pipelines.pipelines) if pipeline.step == step]
    slowest = pipelines.pipelines[max(in_step, key=lambda k: (float(pipelines.spans[k]), k))]
    replica = f", replica {slowest.replica}" if len(pipelines.trace.replicas) > 1 else ""
    costs = measured_costs(analysis.replay, pipeline=slowest)
    run = pj.evaluate(pipelines.tables[slowest.table], costs, link=analysis.replay.links)
    return MeasuredRun(f"step {step}{replica}", run, pipelines.starts(slowest))


def trace_page(
    analysis: "pj.results.Analysis", result: Mapping[str, Any], step_commands: Mapping[str, str]
) -> str:
    """Return the report of a trace as one page."""
    if analysis.advice is None:
        raise ValueError(f"--out: {analysis.no_advice}")
    return report_page(
        analysis.advice,
        f"{analysis.schedule or 'a schedule'}: a measured run",
        trace_view(analysis, result, step_commands=step_commands),
        trace_details(analysis, result, step_commands),
        name="mean pipeline",
        ran=_median_ran(analysis),
    )
