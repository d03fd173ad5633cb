"""`pipejax trace`: a measured run, replayed, explained and improved."""

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

import pipejax as pj
from pipejax.base.data_files import load_json
from pipejax.base.files import write_file
from pipejax.cli.options.line import command_line, written, written_but
from pipejax.cli.options.option import options, parse_layers, parse_pairs
from pipejax.cli.options.scenario import command_line as command_of_scenario, scenario_options
from pipejax.cli.output import trace_report
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, PAGE, SWEEPS, TABLES, Output, check_modules
from pipejax.cli.output.remedies import REMEDY_OPTIONS, remedies_json
from pipejax.cli.output.report import Answer, pick, plain, progress
from pipejax.cli.output.tables import facts
from pipejax.schedules.table.table_files import is_csv, text_for

# files that --save writes, and their content and use
FILES: Mapping[str, str] = load_json(Path(__file__).with_name("saved_files.json"))
MAX_LINES = 13  # of the first screen
DEFAULT_FOLDER = "trace"  # folder of the saved files in commands, without --save


@options
def trace(
    *files: Annotated[str, Parameter(name="FILES", help="Files of one run, or folders of them.")],
    columns: str | None = None,
    stages_per_worker: int | None = None,
    microbatches: int | None = None,
    steps: int | None = None,
    world: int | None = None,
    replicas: int | None = None,
    only_steps: str | None = None,
    all_steps: bool = False,
    against: list[str] | None = None,
    stage_layers: str | None = None,
    schedules: str | None = None,
    launcher: str | None = None,
    search: bool = False,
    save: Annotated[Output, TABLES] = NO_OUTPUT,
    out: Annotated[Output, PAGE] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Replay a measured run, say who makes it slow, and what would make it faster.

    Reads columns (Parquet, CSV), lists of starts and ends by rank (JSON), traces of PyTorch's
    profiler (one file a rank) and SQLite exports of Nsight Systems; the content says which.
    """
    if not files:
        raise ValueError("FILES are missing: give the files of one run, or a folder of them")
    if save.path is not None:
        check_modules("--save: datasets need", SWEEPS, "sweeps")
    if out.path is not None:
        check_modules("--out: pictures need", DRAWING.modules, "figures")
    form = "--columns must be as replica=dp,start=begin"
    column_names = None if columns is None else parse_pairs(columns, form)
    with progress("reading") as on_progress:
        sizes = {"stages_per_worker": stages_per_worker, "microbatches": microbatches}
        sizes |= {"steps": steps, "world": world, "replicas": replicas}
        arguments: dict[str, Any] = {"columns": column_names, **sizes, "on_progress": on_progress}
        measured = pj.traces.read(files, **arguments)
        other = pj.traces.read(against, **arguments) if against else None
    with progress("replaying") as on_progress:
        analysis = pj.traces.analyse(
            measured if only_steps is None else measured.only(_in_steps(only_steps, measured)),
            against=other,
            stage_layers=parse_layers(stage_layers, measured.stages),
            schedules=None if schedules is None else [n.strip() for n in schedules.split(",")],
            launcher=launcher,
            search=search,
            all_steps=all_steps,
            on_progress=on_progress,
        )
    folder = save.path or _free_folder()
    # the scenario of the mean pipeline, once the files are saved
    table = pj.costing.TableFile(str(folder / _table_name(analysis)))
    costs = pj.costing.CostsFile(str(folder / "costs.json"))
    saved = pj.Scenario(table, costs=costs, link=analysis.replay.links)
    odd = analysis.finding
    selected = {"only_steps": odd.name} if odd is not None and odd.kind == "step" else {}
    command = command_line("trace", written_but("save") | selected)
    step_commands = _step_commands(analysis)
    result = _as_json(analysis, saved, command)
    save.save(lambda draft: _save(draft, analysis))
    if figure.path is not None:
        trace_report.draw_shares(analysis, figure)
    if out.path is not None:
        text = trace_report.trace_page(analysis, result, step_commands)
        out.save(lambda draft: write_file(draft, text))
    next_commands: tuple[str, ...] = ()
    before_command: list[object] = []
    if analysis.advice is not None and save.path is None:
        next_commands = (command_line("trace", written_but("save") | {"save": folder}),)
        note = f"to try a remedy: save the measured times in {folder}/, then evaluate with them"
        before_command = [plain(note), plain(f"next: {next_commands[0]}")]
    elif analysis.advice is not None:
        next_commands = _next_commands(saved, analysis)
    more = {"launcher": measured.launcher} if measured.launcher else {}
    more |= written(*REMEDY_OPTIONS)
    texts = before_command, step_commands, command_of_scenario(saved, "explain", **more)
    view = [*trace_report.trace_view(analysis, result, *texts)]
    if save.written is not None:
        names = {path.name for path in save.written.iterdir()}
        view.append(facts((name, use) for name, use in FILES.items() if name in names))
    if command not in step_commands.values() and len(view) < MAX_LINES:
        view += [plain(f"next: {line}") for line in [*step_commands.values()][:1]]
    details = trace_report.trace_details(analysis, result, step_commands)
    return Answer(result, view, next=next_commands, details=details)


def _step_commands(analysis: "pj.results.Analysis") -> dict[str, str]:
    """Return commands that find the op for which a step is odd, unless its sentence names one."""
    steps = (suspect for suspect in analysis.suspects if suspect.kind == "step")
    names = [step.name for step in steps if step.ratio is not None and "; " not in step.why]
    line = written_but("save")
    return {name: command_line("trace", line | {"only_steps": name}) for name in names}


def _free_folder() -> Path:
    """Return the first default folder that does not exist: NAME, NAME-2, NAME-3, .."""
    names = (f"{DEFAULT_FOLDER}-{k}" if k > 1 else DEFAULT_FOLDER for k in itertools.count(1))
    return next(path for path in map(Path, names) if not os.path.lexists(path))


def _in_steps(text: str, measured: "pj.traces.Trace") -> Any:
    """Return whether each slice is in the selected steps: a range with both ends, or a list."""
    first, colon, last = text.partition(":")
    numbers = [part.strip() for part in ([first, last] if colon else text.split(","))]
    if not all(part.isdecimal() or (colon and not part) for part in numbers):
        raise ValueError(f"--only-steps must be as 2:20, 5: or 3,4,7, got {text!r}")
    if colon:
        low, high = int(numbers[0] or 0), int(numbers[1] or measured.steps[-1])
        selected_steps = [step for step in measured.steps if low <= step <= high]
    else:
        selected_steps = [int(part) for part in numbers]
    missing = sorted({*selected_steps} - {*measured.steps})
    if missing or not selected_steps:
        lacking = f" and not {', '.join(map(str, missing))}" if selected_steps else ""
        recorded = f"{measured.steps[0]} to {measured.steps[-1]}"
        raise ValueError(f"--only-steps {text}: the files have steps {recorded}{lacking}")
    return np.isin(measured.step, selected_steps)


def _table_name(analysis: "pj.results.Analysis") -> str:
    return "table.csv" if is_csv(analysis.pipelines.table) else "table.json"


def _save(folder: Path, analysis: "pj.results.Analysis") -> None:
    """Write files for other commands and programs."""
    folder.mkdir()
    table = folder / _table_name(analysis)
    write_file(table, text_for(analysis.pipelines.table, table))
    advice = analysis.advice
    slow = advice and advice.memory.begin.scenario.find_edit(pj.costing.SlowWorkers)
    factors = dict(slow.factors) if slow else None
    write_file(folder / "costs.json", pj.traces.costs_text(analysis.usual, stragglers=factors))
    write_file(folder / "perfetto.json", pj.traces.perfetto(analysis.replay))
    if analysis.deal is not None:
        orders = dict(zip(analysis.deal.steps, analysis.deal.order.tolist(), strict=True))
        content = {"order": orders, "saves": analysis.deal.saves}
        write_file(folder / "deal.json", json.dumps(content))
    pj.traces.dataset(analysis).to_zarr(folder / "dataset.zarr", zarr_format=2)


def _next_commands(saved: "pj.Scenario", analysis: "pj.results.Analysis") -> tuple[str, ...]:
    """Return commands on the saved files; with `jitter` if times of ops scatter."""
    from pipejax.analysis.uncertainty.distributions import SMALLEST_SPREAD

    evaluate_command, spread = command_of_scenario(saved), analysis.op_spread
    if spread < SMALLEST_SPREAD:
        return (evaluate_command,)
    options = scenario_options(saved)
    jitter_options = {"tables": options.pop("table"), "op": f"lognormal:{spread:.3g}"}
    return evaluate_command, command_line("jitter", jitter_options | options)


def _as_json(analysis: "pj.results.Analysis", saved: "pj.Scenario", command: str) -> dict[str, Any]:
    """Return the object of `--json`; `saved` is the mean pipeline in saved files."""
    pipelines, replay, shares = analysis.pipelines, analysis.replay, analysis.attribution
    forecast, advice, links = analysis.forecast, analysis.advice, replay.links
    step_errors = [{"step": k, "error": 100 * error} for k, error in replay.by_step.items()]
    unobserved = [{"link": name, "at_most": time} for name, time in replay.unobserved.items()]
    forecast_json = None
    if forecast is not None:
        names = "predicted low high confidence median_error inside has_failed"
        forecast_json = pick(forecast, names) | {"median_error": 100 * forecast.median_error}
    remedies: list[dict[str, Any]] = []
    if advice is not None:
        first = trace_report.first_remedy(analysis, command)
        remedies = [*first, *remedies_json(advice, {}, saved)]
    return {
        "steps": len({pipeline.step for pipeline in pipelines.pipelines}),
        "replicas": len({pipeline.replica for pipeline in pipelines.pipelines}),
        "workers": pipelines.table.num_workers,
        "stages": pipelines.table.num_stages,
        "microbatches": pipelines.table.num_microbatches,
        "schedule": analysis.schedule,
        "orders": len(pipelines.tables),
        "odd_steps": pipelines.odd_steps,
        "inferred": list(pipelines.trace.inferred),
        "left_out": [vars(part) for part in analysis.left_out],
        "replay": {
            "mean_error": 100 * replay.mean_error,
            "worst_error": 100 * replay.worst_error,
            "per_step": step_errors,
        },
        "offsets": [offset._asdict() for offset in analysis.offsets],
        "stalls": [stall._asdict() for stall in analysis.stalls],
        "suspects": [suspect._asdict() for suspect in analysis.suspects],
        "finding": None if analysis.finding is None else analysis.finding._asdict(),
        "step_time": float(shares.recorded.mean()),
        **pick(shares, "slowdown replayed_slowdown ideal"),
        "attribution": _by_kind(shares),
        "against": None if analysis.against is None else _against_json(analysis.against),
        "links": {
            "link": links.model,
            **pick(links, "queues posting"),
            "message_time": replay.message_time,
            "fits": {name: 100 * error for name, error in replay.fits.items()},
            "alike": replay.equivalent_models,
            "untold": unobserved,
        },
        "op_times": [row._asdict() for row in analysis.op_times],
        "budgets": [budget._asdict() for budget in pipelines.trace.budgets],
        "forecast": forecast_json,
        "deal": None if analysis.deal is None else _deal_json(analysis.deal),
        "pipeline_time": None if advice is None else advice.step_time,
        "bottleneck": None if advice is None else advice.bottleneck._asdict(),
        "no_advice": analysis.no_advice,
        "remedies": remedies,
    }


def _by_kind(shares: "pj.results.Attribution") -> dict[str, list[dict[str, Any]]]:
    shares_by_kind: dict[str, list[dict[str, Any]]] = {}
    for share in shares.shares:
        shares_by_kind.setdefault(share.kind, []).append(pick(share, "name saves adds"))
    return shares_by_kind


def _against_json(shares: "pj.results.Attribution") -> dict[str, Any]:
    """Return the comparison with another run for `--json`: parts of the difference by kind."""
    return {
        "step_time": float(shares.recorded.mean()),
        "other_step_time": shares.other,
        "replayed": float(shares.replayed.mean()),
        "as_there": shares.ideal,  # this run, if its ops took their times in the other run
        "attribution": _by_kind(shares),
    }


def _deal_json(deal: "pj.results.NewDeal") -> dict[str, Any]:
    """Return the times before and after a redistribution of microbatches for `--json`."""
    times = (seconds.tolist() for seconds in (deal.before, deal.after, deal.least))
    return {
        "before": float(deal.before.mean()),
        "after": float(deal.after.mean()),
        **pick(deal, "saves bound"),
        "of_replica": deal.replica_share,
        "per_step": [
            {"step": step, "before": before, "after": after, "least": least}
            for step, before, after, least in zip(deal.steps, *times, strict=True)
        ],
    }
