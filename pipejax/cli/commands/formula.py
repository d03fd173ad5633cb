"""`pipejax formula`: the makespan of a table as an exact form in a few parameters."""

import json as json_text
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.declared import JsonFlag, Text
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.files import CERTIFICATE, NO_OUTPUT, Output
from pipejax.cli.output.numbers import percent, print_json
from pipejax.cli.output.report import facts, grid, print_all, print_plain, print_written
from pipejax.schedules.cells.ops import STEP_END

SHOWN = 12  # facets and borders that a person reads


def formula(
    table: pj.ScheduleTable,
    links: pj.Links,
    parameters: Text = None,
    per_worker: bool = False,
    box: Text = None,
    max_facets: Annotated[int, typer.Option(min=1)] = 200,
    out: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Show the exact closed form of the makespan: a maximum of sums, with regimes and proof.

    Options:
      parameters: What it is a function of, as F,B,c_F,c_B: phases, each also with _first, _mid,
        _last or the number of a stage; c, latency and transmit of messages, also with _F or _B.
      per_worker: Let phases take what one microbatch takes on one worker, as --worker-times.
      box: Ranges of parameters in seconds, as F=1:2,c_F=0:0.5; the others are at least 0.
      max_facets: Sums at which the search ends; the gap to the makespan is certified.
      out: Write the form and its certificate to this file (.json), for `pipejax verify`.
    """
    names = None if parameters is None else [name.strip() for name in parameters.split(",")]
    ends = {phase.name for phase in STEP_END}
    step_end = any(name.partition("_")[0] in ends for name in names or ())
    program = pj.lower(table, link=links, step_end=step_end)
    chosen = _weights(program, table, names) if per_worker else names
    form = pj.formula(program, chosen, box=_parse_box(box), max_facets=max_facets)
    result = form.as_json() | {"certificate": form.certificate(table)}
    text = json_text.dumps(result, allow_nan=False)
    out.save(lambda draft: write_file(draft, text), lambda: text)
    if json:
        return print_json(result | out.as_json() if out.path is not None else result)
    _print(form, table)
    print_written("wrote the form and its certificate to", out.written)


def _weights(
    program: "pj.Program", table: pj.ScheduleTable, names: Sequence[str] | None
) -> "dict[str, pj.Costs]":
    from pipejax.analysis.formula.parameters import default_parameters, named_parameters

    return named_parameters(
        program, default_parameters(program) if names is None else names, table.worker_parts
    )


def _parse_box(text: str | None) -> dict[str, tuple[float, float]]:
    """Read ranges, as F=1:2,c=0:0.5."""
    found: dict[str, tuple[float, float]] = {}
    for entry in text.split(",") if text is not None else ():
        name, _, bounds = (part.strip() for part in entry.partition("="))
        low, colon, high = bounds.partition(":")
        if not colon or name in found:
            raise ValueError(f"--box must be as F=1:2,c=0:0.5, each once, got {text!r}")
        where = f"--box: {name}"
        found[name] = parse_seconds(low, where), parse_seconds(high, where)
    return found


def _print(form: "pj.Formula", table: pj.ScheduleTable) -> None:
    shown = len(form.facets) <= SHOWN
    rows = [
        ("makespan", escape(form.text) if shown else f"the largest of {len(form.facets)} sums"),
        ("is", "exact" if form.exact else f"at most {percent(form.gap)} more"),
        ("found with", f"{form.evaluations} evaluations"),
    ]
    title = (
        f"[bold]{escape(table.name)}[/], {table.num_workers} workers, {table.num_stages} stages, "
        f"{table.num_microbatches} microbatches, {form.program.links.model} links"
    )
    print_all(title, facts(rows), _regimes(form))
    for border in form.borders[:SHOWN]:
        print_plain(
            f"{border.one} | {border.other}: {border.one} is the larger where {border.text}"
        )
    if form.borders[SHOWN:]:
        print_plain(f"and {len(form.borders) - SHOWN} more borders: --json lists all")


def _regimes(form: "pj.Formula") -> Table:
    """The first facets, each with what bounds the step where it is the largest."""
    count = min(SHOWN, len(form.facets))
    columns: list[tuple[str, Any]] = [("regime", range(count))]
    columns += [
        (name, [facet[k] for facet in form.facets[:count]])
        for k, name in enumerate(form.parameters)
    ]
    return grid([*columns, ("bound by", form.bound_by[:count])])
