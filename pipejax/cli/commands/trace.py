"""`pipejax trace`: a measured run, replayed, explained and improved."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.given import Line
from pipejax.cli.options.values import Text, parse_counts
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, check_modules
from pipejax.cli.output.kinds import DRAWING, PAGE, SWEEPS, TABLES
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.remedies import diagnosis, remedies_json, remedies_said
from pipejax.cli.output.report import Column, plain, table_of
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table_files import is_csv, text_for

if TYPE_CHECKING:
    from pipejax.traces.findings.analysis import Analysis
    from pipejax.traces.findings.attribution import Attribution
    from pipejax.traces.findings.suspects import Suspect

SAVED = "trace"  # the folder that commands read from where none is given
EACH = 3  # shares of a kind that a person reads
LEAST = 0.002  # of the step: a share that saves less is not shown
NAMED = 5  # things that are left out, by name


def trace(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES...", help="Files of one run, or folders of them."),
    ],
    columns: Text = None,
    against: list[str] | None = None,
    stage_layers: Text = None,
    schedules: Text = None,
    search: bool = False,
    save: Annotated[Output, TABLES] = NO_OUTPUT,
    out: Annotated[Output, PAGE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Replay a measured run, say who makes it slow, and what would make it faster.

    Reads columns (Parquet, CSV), lists of starts and ends by rank (JSON), and traces of PyTorch's
    profiler (one file a rank); the content says which.

    Options:
      columns: names of a table's columns where they are others, as replica=dp,start=begin_ms.
      against: files of another run of the same stages; may be given several times.
      stage_layers: one number for all stages, or one each; layers are moved whole then.
      schedules: only these are tried; all if not given.
      search: schedules in the memory of now, and schedules that take long to plan.
      save: table, costs, dataset and a trace for Perfetto, into a new folder.
      out: a report as one page (.html).
      figure: who costs how much: workers by replicas, stages by steps (.png, .pdf or .svg).

    Example:
      pipejax trace run.parquet --save trace
    """
    if save.path is not None:
        check_modules("--save: datasets need", SWEEPS, "sweeps")
    named = None if columns is None else _columns(columns)
    with progress("reading", None) as bar:
        found = pj.traces.read(files, columns=named, on_progress=bar.tell)
        other = None
        if against:
            other = pj.traces.read(against, columns=named, on_progress=bar.tell)
    with progress("replaying", None) as bar:
        analysis = pj.traces.analyse(
            found,
            against=other,
            stage_layers=_layers(stage_layers, found.stages),
            schedules=None if schedules is None else [n.strip() for n in schedules.split(",")],
            search=search,
            on_progress=bar.tell,
        )
    line = _line(analysis, save.path or Path(SAVED))
    result = _as_json(analysis, line)
    save.save(lambda draft: _save(draft, analysis))
    if out.path is not None or figure.path is not None:
        _draw(analysis, result, out, figure)
    written = {
        "wrote table, costs, dataset and Perfetto's trace to": save,
        "wrote the report to": out,
        "drawn to": figure,
    }
    again = " ".join(["pipejax", "trace", *files, "--save", SAVED])
    go_on = (again,) if save.path is None else _next(line, analysis)
    return Answer(result, _said(analysis, result), written, next=go_on)


def _columns(text: str) -> dict[str, str]:
    """Read names of columns, as replica=dp,start=begin_ms."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(ours.strip() and theirs.strip() for ours, _, theirs in pairs):
        raise ValueError(f"--columns must be as replica=dp,start=begin_ms, got {text!r}")
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _layers(text: Text, stages: int) -> list[int] | None:
    if text is None:
        return None
    counts = parse_counts(text, "--stage-layers")
    return counts * stages if len(counts) == 1 else counts


def _table_name(analysis: "Analysis") -> str:
    return "table.csv" if is_csv(analysis.pipelines.table) else "table.json"


def _line(analysis: "Analysis", folder: Path) -> Line:
    """Options that evaluate the mean pipeline from the files that are saved."""
    links, default = analysis.replay.links, Links()
    given = {
        "table": str(folder / _table_name(analysis)),
        "costs": str(folder / "costs.json"),
        "link": links.model,
    }
    for name in ("queues", "posting"):
        if getattr(links, name) != getattr(default, name):
            given[name] = getattr(links, name)
    return Line(given)


def _save(folder: Path, analysis: "Analysis") -> None:
    """Write what other commands and programs take."""
    folder.mkdir()
    table = folder / _table_name(analysis)
    write_file(table, text_for(analysis.pipelines.table, table))
    write_file(folder / "costs.json", pj.traces.costs_text(analysis.replay))
    write_file(folder / "perfetto.json", pj.traces.perfetto(analysis.replay))
    pj.traces.dataset(analysis).to_zarr(folder / "dataset.zarr", zarr_format=2)


def _next(line: Line, analysis: "Analysis") -> tuple[str, ...]:
    """Commands that go on from the files."""
    spread = analysis.op_spread
    jittered = {k: v for k, v in line.given.items() if k != "table"}
    tables = {"tables": line.given["table"], "op": f"lognormal:{spread:.3g}"}
    return (
        line.command("evaluate", {}, ()),
        Line(tables | jittered).command("jitter", {}, ()),
    )


def _as_json(analysis: "Analysis", line: Line) -> dict[str, Any]:
    pipelines, replayed, shares = analysis.pipelines, analysis.replay, analysis.attribution
    known, forecast, advice = analysis.schedule, analysis.forecast, analysis.advice
    links = replayed.links
    return {
        "steps": len({one.step for one in pipelines.pipelines}),
        "replicas": len({one.replica for one in pipelines.pipelines}),
        "workers": pipelines.table.num_workers,
        "stages": pipelines.table.num_stages,
        "microbatches": pipelines.table.num_microbatches,
        "schedule": known,
        "orders": len(pipelines.tables),
        "odd_steps": pipelines.odd_steps,
        "left_out": [vars(each) for each in analysis.left_out],
        "replay": {
            "mean_error": 100 * replayed.mean_error,
            "worst_error": 100 * replayed.worst_error,
            "per_step": [
                {"step": step, "error": 100 * error} for step, error in replayed.by_step.items()
            ],
        },
        "stalls": [stall._asdict() for stall in analysis.stalls],
        "suspects": [_suspect_json(one) for one in analysis.suspects],
        "step_time": float(shares.recorded.mean()),
        "slowdown": shares.slowdown,
        "replayed_slowdown": shares.replayed_slowdown,
        "ideal": shares.ideal,
        "attribution": _by_kind(shares),
        "against": None if analysis.against is None else _against_json(analysis.against),
        "links": {
            "link": links.model,
            "queues": links.queues,
            "posting": links.posting,
            "message_time": replayed.message_time,
            "fits": {name: 100 * error for name, error in replayed.fits.items()},
        },
        "op_times": [row._asdict() for row in analysis.op_times],
        "forecast": None
        if forecast is None
        else {
            "predicted": forecast.predicted,
            "low": forecast.low,
            "high": forecast.high,
            "confidence": forecast.confidence,
            "median_error": 100 * forecast.median_error,
            "inside": forecast.inside,
        },
        "pipeline_time": advice.step_time,
        "bottleneck": advice.bottleneck._asdict(),
        "remedies": remedies_json(advice, line, {}),
    }


def _suspect_json(one: "Suspect") -> dict[str, Any]:
    return one._asdict() | {"ratio": None if math.isnan(one.ratio) else one.ratio}


def _by_kind(shares: "Attribution") -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for share in shares.shares:
        own = {"name": share.name, "saves": share.saves, "adds": share.adds}
        found.setdefault(share.of, []).append(own)
    return found


def _against_json(shares: "Attribution") -> dict[str, Any]:
    return {
        "step_time": float(shares.recorded.mean()),
        "as_there": shares.ideal,
        "attribution": _by_kind(shares),
    }


def _said(analysis: "Analysis", result: Mapping[str, Any]) -> Iterator[object]:
    replayed, shares = analysis.replay, analysis.attribution
    name = analysis.schedule or "no schedule of the registry"
    several = f", {result['orders']} orders" if result["orders"] > 1 else ""
    yield (
        f"[bold]{escape(name)}[/], {result['workers']} workers, {result['stages']} stages, "
        f"{result['microbatches']} microbatches{several}: {result['steps']} steps of "
        f"{result['replicas']} replicas"
    )
    yield from _left_out(analysis)
    yield (
        f"  replayed within {percent(replayed.mean_error)} in the mean, "
        f"{percent(replayed.worst_error)} at most, with {replayed.links.model} links and "
        f"{seconds(replayed.message_time)} a message"
    )
    yield from _stalls(analysis)
    yield from _suspects(analysis)
    step = float(shares.recorded.mean())
    yield (
        f"  the mean step takes [bold]{seconds(step)}[/], {shares.slowdown:.3f} times the "
        f"{seconds(shares.ideal)} it would if every op took what ops of its kind do"
    )
    yield _shares_table(shares, step, "what the mean step would save")
    if analysis.against is not None:
        yield from _against_said(analysis.against, step)
    yield _op_times(analysis)
    if analysis.forecast is not None:
        one = analysis.forecast
        yield (
            f"the first half of the steps predicts {seconds(one.predicted)} for those to come, "
            f"{one.confidence:.0%} between {seconds(one.low)} and {seconds(one.high)}: "
            f"the second half lies there by {one.inside:.0%}, median error "
            f"{percent(one.median_error)}"
        )
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


def _suspects(analysis: "Analysis") -> Iterator[object]:
    """What is slower than the others of its kind."""
    for one in analysis.suspects[:NAMED]:
        more = f"{seconds(one.seconds)}, {one.z:.3g} standard errors"
        yield f"  suspect: {one.kind} {one.name} {one.why} ({more})"
    if len(analysis.suspects) > NAMED:
        yield f"  and {len(analysis.suspects) - NAMED} more, see --json"


def _shares_table(shares: "Attribution", step: float, title: str) -> object:
    rows: list[dict[str, Any]] = []
    count = dict[str, int]()
    for share in shares.shares:
        count[share.of] = count.get(share.of, 0) + 1
        if share.saves > LEAST * step and count[share.of] <= EACH:
            own = {"of": share.of, "name": share.name, "saves": share.saves, "adds": share.adds}
            rows.append(own)
    return table_of(
        rows,
        (
            Column("if", lambda row: escape(f"{row['of']} {row['name']}")),
            Column("saves", "saves", seconds),
            Column("of the step", lambda row: percent(row["saves"] / step)),
            Column("alone adds", "adds", seconds),
        ),
        title=title,
        caption="saves: its ops took what they should; alone adds: only its ops took what they did",
    )


def _against_said(shares: "Attribution", step: float) -> Iterator[object]:
    slower = step - shares.ideal
    word = "slower" if slower > 0 else "faster"
    yield (
        f"[bold]{seconds(abs(slower))} {word}[/] than the other run: with its times the step "
        f"takes {seconds(shares.ideal)}"
    )
    yield _shares_table(shares, step, "what the mean step would save with times of the other run")


def _op_times(analysis: "Analysis") -> object:
    return table_of(
        [row._asdict() for row in analysis.op_times if row.median > 0],
        (
            Column("what", "name", escape),
            Column("stage", lambda row: row["stage"] if row["stage"] >= 0 else ""),
            Column("worker", "worker"),
            Column("5 %", "low", seconds),
            Column("median", "median", seconds),
            Column("95 %", "high", seconds),
        ),
        title="what ops, messages and collectives took",
    )


def _draw(analysis: "Analysis", result: Mapping[str, Any], out: Output, figure: Output) -> None:
    """The heat maps, and the page of the report."""
    from pipejax.cli.output.trace_pictures import draw_shares, trace_page

    if figure.path is not None:
        draw_shares(analysis, figure)
    if out.path is not None:
        text = trace_page(analysis, result)
        out.save(lambda draft: write_file(draft, text))
