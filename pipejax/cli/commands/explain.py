"""`pipejax explain`: why a step takes so long, what would make it shorter, and the commands."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options import line
from pipejax.cli.options.memory import MemoryLimit
from pipejax.cli.options.option import for_each, options, parse_layers
from pipejax.cli.options.scenario import build, required, scenario_options
from pipejax.cli.options.tables import SHARED, RunOptions
from pipejax.cli.output import remedies
from pipejax.cli.output.files import NO_OUTPUT, PAGE, TABLES, Output
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.plans import layout_json
from pipejax.cli.output.report import Answer, heading, plain, progress, table_sizes
from pipejax.cli.output.report_pages import report_page
from pipejax.schedules.naming import find
from pipejax.schedules.table.links import LINK_TEXTS

# options of a run that `plan` has too
LINKS = ("link", "queues", "posting", "shared_links", "pair_links", "eager_below")
PLAN_OPTIONS = ("model", "system", "stack", "launcher", "sequence", *LINKS, *SHARED)


@options
class ExplainedRun(RunOptions):
    """A run that is explained."""

    memory_limit: str | None = None


@options
def explain(
    *,
    run: ExplainedRun = ExplainedRun(),
    stage_layers: str | None = None,
    schedules: str | None = None,
    search: bool = False,
    out: Annotated[Output, PAGE] = NO_OUTPUT,
    write_tables: Annotated[Output, TABLES] = NO_OUTPUT,
) -> Answer:
    """Say why a step takes so long, and what would make it shorter, with the commands.

    Every cause is undone and every remedy applied, and the run repeated.
    """
    if run.repair is not None:
        raise ValueError(f"--repair {run.repair}: write the schedule with `pipejax export` first")
    has_limit = run.memory_limit is not None and run.schedule is not None
    # a schedule may be planned for the limit too
    is_planned_for_limit = has_limit and "memory_limit" in find(run.schedule or "").options
    settings = run.settings if is_planned_for_limit else run.settings.without("memory_limit")
    scenario = run.scenario(settings)
    table = build(scenario)
    names = None if schedules is None else [name.strip() for name in schedules.split(",")]
    with progress("explaining") as on_progress:
        explanation = pj.explain(
            required(scenario),
            memory_limit=_limit(run.memory_limit, scenario),
            stage_layers=parse_layers(stage_layers, table.num_stages),
            schedules=names,
            launcher=run.launcher,
            search=search,
            on_progress=on_progress,
        )
    files = dict(remedies.table_files(explanation, write_tables.path))
    result = table_sizes(table) | {"link": scenario.links.model} | _as_json(explanation, files)
    result |= layout_json(scenario.model_workload, table, run.launcher)
    write_tables.save(lambda draft: remedies.write_table_files(draft, explanation, files))
    details = remedies.advice_details(explanation, result["remedies"])
    details["limits"] = [*_limits(explanation, result)]
    if out.path is not None:
        title = f"{table.name}: why a step takes {seconds(explanation.step_time)}"
        text = report_page(explanation, title, _view(explanation, result), details)
        out.save(lambda draft: write_file(draft, text))
    first = remedies.shown_first(explanation, result["remedies"])
    view, next_commands = _view(explanation, result), _plan_command(scenario, first)
    return Answer(result, view, next=next_commands, details=details)


def _plan_command(scenario: "pj.Scenario", first: "pj.results.Remedy | None") -> tuple[str, ...]:
    """Return the command that searches other layouts of the job; empty where a file names none."""
    # the settings of all layouts, such as overlaps, are those that the first remedy advises
    workload = scenario.workload
    if workload is None or scenario.microbatches != pj.costing.Microbatches():
        return ()
    advised = scenario
    if first is not None:
        files, costs = first.scenario.files, first.scenario.source
        advised = scenario.replace(files=files, costs=costs)
    options = {k: v for k, v in scenario_options(advised).items() if k in PLAN_OPTIONS}
    limit = line.written("memory_limit")
    options |= {} if "," in limit.get("memory_limit", "") else limit
    workers = workload.accelerators_per_worker * scenario.table().num_workers
    options["gpus"] = workers * workload.data_parallel
    options["minibatch"] = workload.minibatch * workload.data_parallel
    return (line.command_line("plan", options),)


def _limit(text: str | None, scenario: "pj.Scenario") -> list[float] | None:
    """Return the memory limit of each worker, in the unit of the needs; None if not limited."""
    if text is None:
        return None
    limit, workers = MemoryLimit.read(text), scenario.table().num_workers
    if limit.in_bytes != (scenario.model_workload is not None):
        unit = "activations" if limit.in_bytes else "bytes, as 80GB"
        raise ValueError(f"--memory-limit {text}: memory is counted in {unit} here")
    return for_each(limit.values, workers, "--memory-limit", "workers").tolist()


def _as_json(explanation: "pj.results.Explanation", files: Mapping[int, Path]) -> dict[str, Any]:
    """Return an explanation for `--json`; `files` has the table's file of a remedy, by number."""
    # JSON has no infinity: null if any time is tolerated
    is_finite = math.isfinite(explanation.tolerated or math.inf)
    names = "name", "seconds", "of"
    return {
        "step_time": explanation.step_time,
        "parts": [dict(zip(names, part, strict=True)) for part in explanation.parts],
        "bottleneck": explanation.bottleneck._asdict(),
        "effects": [effect._asdict() for effect in explanation.effects],
        "faults": [fault._asdict() for fault in explanation.faults],
        "tolerated": explanation.tolerated if is_finite else None,
        "memory": {
            "unit": explanation.memory.unit,
            "needs": explanation.memory.begin_needs,
            "limit": explanation.memory.limit,
            "fits": explanation.memory.fits(explanation.memory.begin),
        },
        "remedies": remedies.remedies_json(explanation, files),
    }


def _view(explanation: "pj.results.Explanation", result: Mapping[str, Any]) -> Iterator[object]:
    """Yield the step time and its first cause, the sizes of the run, and advice."""
    yield plain(f"{seconds(explanation.step_time)} per step; {remedies.first_fault(explanation)}")
    schedule = explanation.memory.begin.scenario.schedule  # of a table's rows, if one has them
    is_named = isinstance(schedule, str) and not result["schedule"].startswith(schedule)
    note = f" (same rows as {schedule})" if is_named else ""
    yield f"{heading(result, note)}; {LINK_TEXTS[result['link']]}"
    if explanation.bottleneck.kind == "imbalance":  # perhaps of a split that torchtitan lacks
        yield from (plain(text) for text in result.get("notes", ()) if "torchtitan itself" in text)
    yield from remedies.advice_view(explanation, result["remedies"])


def _limits(explanation: "pj.results.Explanation", result: Mapping[str, Any]) -> Iterator[object]:
    """Yield notes on layers, how much slower messages may be, and what remedies may need."""
    yield from map(plain, result.get("notes", ()))
    if explanation.tolerated is not None and math.isinf(explanation.tolerated):
        yield "messages: no op waits for them"
    elif explanation.tolerated is not None:
        yield f"messages: {explanation.tolerated:.3g} times as long makes the step 1 % longer"
    memory = explanation.memory
    if memory.limit is not None and not np.ndim(memory.limit):
        limit = memory.text(float(np.asarray(memory.limit)))
        yield plain(f"remedies may need {limit} (--memory-limit)")
