"""`pipejax explain`: why a step takes so long, what would make it shorter, and the commands."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.markup import escape
from rich.text import Text as Marked

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.memory import MemoryLimit
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build, required
from pipejax.cli.options.values import Text, parse_counts
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import PAGE, TABLES
from pipejax.cli.output.launches import layout_json
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.remedies import (
    diagnosis,
    remedies_json,
    remedies_said,
    tables_of,
    takes_limit,
    write_tables_of,
)
from pipejax.cli.output.report import Column, heading, plain, sizes_of, table_of
from pipejax.cli.output.report_pages import ROUNDING, report_page

if TYPE_CHECKING:
    from pipejax.search.remedies.explain import Explanation


@options
class ExplainedRun(RunOptions):
    """A run that is explained.

    Attributes:
      memory_limit: remedies that need more are left out; what the system has if not given. Without
        any limit, those that need more than the run now.
    """

    memory_limit: Text = None


@options
def explain(
    *,
    run: ExplainedRun = ExplainedRun(),
    links: LinkOptions = LinkOptions(),
    stage_layers: Text = None,
    schedules: Text = None,
    search: bool = False,
    out: Annotated[Output, PAGE] = NO_OUTPUT,
    write_tables: Annotated[Output, TABLES] = NO_OUTPUT,
) -> Answer:
    """Say why a step takes so long, and what would make it shorter, with the commands.

    Every cause is undone and every remedy applied, and the run repeated.

    Options:
      schedules: only these are tried; all if not given.
      stage_layers: one number for all stages, or one each; layers are moved whole then.
      out: a report as one page (.html), with the explorer in it.
      write_tables: of every remedy that has another, for `--table`.
      search: schedules in the memory of now, layers over stages, schedules that take long to plan.

    Example:
      pipejax explain -s 1f1b -P 4 -M 16 --stage-times F=10ms,B=20ms --comm 2ms
      --stragglers 2=1.4
    """
    if run.repair is not None:
        raise ValueError(f"--repair {run.repair}: write the table with `pipejax export` first")
    is_planned_for_limit = run.memory_limit is not None and takes_limit(run.schedule)
    # a schedule may be planned for the limit too
    settings = run.settings if is_planned_for_limit else run.settings.without("memory_limit")
    scenario = run.scenario(links.links(), settings)
    table = build(scenario)
    layers = None if stage_layers is None else _stage_layers(stage_layers, table.num_stages)
    names = None if schedules is None else [name.strip() for name in schedules.split(",")]
    with progress("explaining", None) as bar:
        found = pj.explain(
            required(scenario),
            memory_limit=_limit(run.memory_limit, scenario),
            stage_layers=layers,
            schedules=names,
            search=search,
            on_progress=bar.tell,
        )
    files = dict(tables_of(found, write_tables.path))
    result = (
        sizes_of(table)
        | {"link": scenario.links.model}
        | _as_json(found, files)
        | layout_json(scenario.model_workload, table)
        | write_tables.as_json()
    )
    write_tables.save(lambda draft: write_tables_of(draft, found, files))
    if out.path is not None:
        text = _page(found, result)
        out.save(lambda draft: write_file(draft, text))
    return Answer(
        result, _said(found, result), {"wrote the report to": out, "wrote tables to": write_tables}
    )


def _stage_layers(text: str, stages: int) -> list[int]:
    counts = parse_counts(text, "--stage-layers")
    return counts * stages if len(counts) == 1 else counts


def _limit(text: Text, scenario: "pj.Scenario") -> list[float] | None:
    """What each worker may hold, in the unit in which needs are counted."""
    if text is None:
        return None
    read, workers = MemoryLimit.read(text), scenario.table().num_workers
    if read.in_bytes != (scenario.model_workload is not None):
        wanted = "activations" if read.in_bytes else "bytes, as 80GB"
        raise ValueError(f"--memory-limit {text}: memory is counted in {wanted} here")
    if len(read.values) not in (1, workers):
        raise ValueError(f"--memory-limit must have one entry or {workers}, got {text!r}")
    return read.values * (workers // len(read.values))


def _as_json(found: "Explanation", files: Mapping[int, Path]) -> dict[str, Any]:
    first = found.memory.begin
    worst = found.bottleneck
    return {
        "step_time": found.step_time,
        "parts": [dict(zip(("name", "seconds", "of"), part, strict=True)) for part in found.parts],
        "bottleneck": worst._asdict(),
        "faults": [fault._asdict() for fault in found.faults],
        # JSON has no infinity: what tolerates any time has none
        "tolerated": found.tolerated if math.isfinite(found.tolerated or math.inf) else None,
        "memory": {
            "unit": found.memory.unit,
            "needs": found.memory.begin_needs,
            "limit": found.memory.limit,
            "fits": found.memory.fits(first),
        },
        "remedies": remedies_json(found, files),
    }


def _page(found: "Explanation", result: Mapping[str, Any]) -> str:
    """The report, with the run as it is and with the first remedy."""
    title = Marked.from_markup(f"{heading(result)}: {seconds(found.step_time)}").plain
    lines = [*diagnosis(found), *filter(None, (_slower(found), _room(found)))]
    return report_page(found, result["remedies"], title, lines)


def _slower(found: "Explanation") -> str:
    """How much slower messages may be."""
    if found.tolerated is None:
        return ""
    if math.isinf(found.tolerated):
        return "messages may take any time: none is waited for"
    return f"messages may take {found.tolerated:.3g} times as long before the step is 1 % longer"


def _room(found: "Explanation") -> str:
    """What remedies may need, where the system says it and no option."""
    from pipejax.costs.system.parts import HEADROOM

    memory = found.memory
    if memory.limit is None or np.ndim(memory.limit):
        return ""
    whole = float(np.asarray(memory.limit))
    left = f"--memory-limit {(1 - HEADROOM) * whole / 1e9:.1f}GB"
    return (
        f"remedies may need {memory.text(whole)}, all that tensors can have; plan leaves "
        f"{100 * HEADROOM:g} % of it free: {left}"
    )


def _said(found: "Explanation", result: Mapping[str, Any]) -> Iterator[object]:
    yield f"{heading(result)}: [bold]{seconds(found.step_time)}[/]"
    first, *others = diagnosis(found)
    yield f"  [bold]{escape(first)}[/]"
    yield from (f"  {escape(line)}" for line in others)
    least = ROUNDING * found.step_time
    parts = [part for part in result["parts"] if abs(part["seconds"]) > least]
    yield table_of(
        parts,
        (
            Column("part", "name"),
            Column("time", "seconds", seconds),
            Column("of the step", lambda row: percent(row["seconds"] / found.step_time)),
            Column("what it is", "of"),
        ),
    )
    yield from map(plain, result.get("notes", ()))
    yield from map(plain, filter(None, (_slower(found), _room(found))))
    yield from remedies_said(found, result["remedies"])
