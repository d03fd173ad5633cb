"""`pipejax formula`: the makespan of a table as an exact form in a few parameters."""

import json as json_text
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.checks import MAX_COUNT, one_of
from pipejax.base.data_files import whole_cell
from pipejax.cli.options.tables import TableChoice
from pipejax.cli.options.values import Count, Text, parse_seconds
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, drawing
from pipejax.cli.output.kinds import CERTIFICATE, DRAWING
from pipejax.cli.output.numbers import percent
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import facts, grid, heading, pick, plain, sizes_of
from pipejax.schedules.cells.ops import STEP_END
from pipejax.schedules.naming import named

if TYPE_CHECKING:
    from pipejax.analysis.formula.regime_map import RegimeMap

HEIGHT = 3.4  # inches, the legend above included
SHOWN = 12  # facets and borders that a person reads


def formula(
    choice: TableChoice,
    links: pj.Links,
    parameters: Text = None,
    family: Text = None,
    versus: Text = None,
    per_worker: bool = False,
    box: Text = None,
    max_facets: Count = 200,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
    out: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
) -> Answer:
    """Show the exact closed form of the makespan: a maximum of sums, with regimes and proof.

    Options:
      parameters: phases, each also with _first, _mid, _last or the number of a stage; c, latency
        and transmit of messages, also with _F or _B.
      family: on M for multiples of P, or on P with M as many times P as here; messages are c if no
        parameters are given, and M is 4 P if it is not; on numbers of yours as M=8,16,24,32 or
        M=8:80:8, of which the last one is only checked.
      versus: or several, as gpipe,chimera; of the same workers and microbatches.
      per_worker: what one microbatch takes on one worker.
      box: in seconds, or with units; the others are at least 0; with --figure in times of the
        first parameter, which is 1.
      figure: with --versus, who is fastest where the second and third parameter, F,B,c if none are
        given, vary in times of the first (.png, .pdf or .svg).
      max_facets: the gap to the makespan is certified.
      out: the form and its certificate (.json), for `pipejax verify`.

    Example:
      pipejax formula -s 1f1b -P 8 -M 32
    """
    names = None if parameters is None else [name.strip() for name in parameters.split(",")]
    symbol, numbers = (None, []) if family is None else _parse_family(family)
    if symbol and choice.workers is not None and choice.microbatches is None:
        choice = choice._replace(microbatches=4 * choice.workers)
    if figure.path is not None and versus is None:
        raise ValueError("--figure needs --versus: it draws which schedule is fastest where")
    if figure.path is not None and names is None:
        names = ["F", "B", "c"]
    chosen = _Chosen(choice, links, names, per_worker, _parse_box(box), max_facets)
    table = choice.build()
    if symbol and names is None:
        chosen = chosen._replace(names=_messages_alike(chosen.program(table)))
    found = None if symbol is None else _family(chosen, symbol, numbers)
    with waiting("looking for the closed form"):
        form = chosen.form(table)
    rivals = [] if versus is None else [chosen.other(name.strip()) for name in versus.split(",")]
    others = [chosen.form(rival) for rival in rivals]
    against = [pj.analysis.versus(form, other) for other in others]
    shown = None if figure.path is None else _drawn([form, *others], figure)
    result = form.as_json() | {"certificate": form.certificate(table)}
    if found is not None:
        result["family"] = {"text": str(found)} | pick(found, "first period found_on verified_on")
    if against:
        every = [each.as_json() for each in against]
        result["versus"] = every if every[1:] else every[0]
    if shown is not None:
        result["map"] = {"parameters": list(shown.parameters), "shares": shown.shares}
    out.save_text(json_text.dumps(result, allow_nan=False))
    written = {"wrote the form and its certificate to": out} if out.path is not None else {}

    def said() -> Iterator[object]:
        yield from _said(table, form, found)
        for each in against:
            yield from map(plain, _versus_lines(each))
        if not per_worker and len({t.stages_per_worker for t in (table, *rivals)}) > 1:
            yield "stages per worker differ: with --per-worker all do the same work"
        if shown is not None:
            areas = ", ".join(f"{name} {share:.0%}" for name, share in shown.shares.items())
            yield plain(f"\nfastest on the map: {areas}")

    return Answer(result, said(), {**written, "drawn to": figure})


def _drawn(forms: "Sequence[pj.results.Formula]", figure: Output) -> "RegimeMap":
    """Draw who is fastest where two parameters vary in times of the first."""
    from pipejax.analysis.formula.regime_map import regime_map
    from pipejax.plots.regions import Side, draw_regions

    shown = regime_map({form.program.name: form for form in forms})
    unit, *others = shown.parameters
    sides = [
        Side(f"{name} / {unit}", values)
        for name, values in zip(others, (shown.across, shown.up), strict=True)
    ]
    with drawing(figure, 1, HEIGHT) as (_, axes):
        draw_regions(axes, sides[0], sides[1], shown.codes, shown.names)
    return shown


class _Chosen(NamedTuple):
    """What the options choose: a form of any table of theirs."""

    choice: TableChoice
    links: pj.Links
    names: list[str] | None
    per_worker: bool
    box: dict[str, tuple[float, float]]
    max_facets: int

    def program(self, table: pj.ScheduleTable) -> "pj.Program":
        ends = {phase.name for phase in STEP_END}
        step_end = any(name.partition("_")[0] in ends for name in self.names or ())
        return pj.lower(table, link=self.links, step_end=step_end)

    def parameters(self, table: pj.ScheduleTable) -> "list[str] | dict[str, pj.Costs] | None":
        """Names, or with --per-worker the costs that they stand for."""
        from pipejax.analysis.formula.parameters import default_parameters, named_parameters

        if not self.per_worker:
            return self.names
        program = self.program(table)
        names = self.names or default_parameters(program)
        return named_parameters(program, names, table.worker_parts)

    def form(self, table: pj.ScheduleTable) -> "pj.results.Formula":
        parameters = self.parameters(table)
        return pj.formula(self.program(table), parameters, box=self.box, max_facets=self.max_facets)

    def other(self, schedule: str) -> pj.ScheduleTable:
        """Build another schedule of the same size, with those of the options that it has."""
        if self.choice.schedule is None:
            raise ValueError("--versus needs --schedule: a table file is of one size")
        name = named(schedule)
        options = self.choice.options.of(name)
        return self.choice._replace(schedule=name, options=options).build()


def _messages_alike(program: "pj.Program") -> list[str]:
    """Parameters that a program needs, with one for messages both ways."""
    from pipejax.analysis.formula.parameters import default_parameters

    names = default_parameters(program)
    return [name for name in names if name[:2] != "c_"] + ["c"] * ("c_F" in names)


def _parse_family(text: str) -> tuple[str, list[int]]:
    """Read the symbol of a family, and the numbers that it is looked for on, if they are given."""
    symbol, equals, given = (part.strip() for part in text.partition("="))
    symbol = one_of(symbol, ("M", "P"), "--family")
    if not equals:
        return symbol, []
    words = given.split(":") if ":" in given else given.split(",")
    try:
        numbers = [whole_cell(word.strip(), "", 1, MAX_COUNT) for word in words]
        if ":" in given:
            low, high, step = numbers
            numbers = list(range(low, high + 1, step))
    except ValueError:
        numbers = []
    if len(numbers) < 2:
        form = f"{symbol}=8,16,24,32 or {symbol}=8:80:8, numbers of at least 1"
        raise ValueError(f"--family must be {symbol}, or with several numbers {form}, got {text!r}")
    return symbol, numbers


def _family(chosen: _Chosen, symbol: str, given: list[int]) -> "pj.results.Family":
    """Find the family that a schedule belongs to.

    M takes the multiples of P, for most schedules repeat themselves after these, and where that
    shows no family every number, of which periods up to 2P show; P takes 2 to 13.
    """
    from pipejax.analysis.formula.family import NoFamilyError  # loads JAX

    workers, microbatches = chosen.choice.workers, chosen.choice.microbatches
    if chosen.choice.schedule is None or workers is None or microbatches is None:
        raise ValueError("--family needs --schedule: a table file is of one size")
    if symbol == "P" and microbatches % workers:
        raise ValueError(
            f"--family P needs as many microbatches as a multiple of {workers} workers, got "
            f"{microbatches}"
        )

    def table(number: int) -> pj.ScheduleTable:
        if symbol == "M":
            return chosen.choice._replace(microbatches=number).build()
        size = number * (microbatches // workers)
        return chosen.choice._replace(workers=number, microbatches=size).build()

    def find(numbers: Sequence[int], later: Sequence[int]) -> "pj.results.Family":
        return pj.analysis.formula_family(
            lambda number: chosen.program(table(number)),
            numbers,
            lambda number: chosen.parameters(table(number)),
            verify_on=later,
            symbol=symbol,
            degree=1 if symbol == "M" else 2,
        )

    step = workers if symbol == "M" else 2 if workers % 2 == 0 else 1
    with waiting("looking for the family"):
        if given:
            return find(given[:-1], given[-1:])
        if symbol == "P":
            return find(range(2, 2 + 7 * step, step), [18 * step])
        try:
            return find(range(step, 11 * step, step), [13 * step, 16 * step])
        except NoFamilyError:
            pass
        try:
            return find(range(1, 10 * step + 1), [13 * step, 16 * step])
        except NoFamilyError as error:
            more = f"--family M=1:{30 * step}:1 looks on more"
            raise NoFamilyError(f"{error} ({more})") from None


def _parse_box(text: str | None) -> dict[str, tuple[float, float]]:
    """Read ranges, as F=1:2,c=0:0.5."""
    found: dict[str, tuple[float, float]] = {}
    for entry in text.split(",") if text is not None else ():
        name, _, bounds = (part.strip() for part in entry.partition("="))
        low, colon, high = bounds.partition(":")
        if not colon or name in found:
            raise ValueError(f"--box must be as F=1:2,c=0:0.5, each once, got {text!r}")
        where = f"--box: {name}"
        found[name] = parse_seconds(low.strip(), where), parse_seconds(high.strip(), where)
    return found


def _said(
    table: pj.ScheduleTable,
    form: "pj.results.Formula",
    family: "pj.results.Family | None",
) -> Iterator[object]:
    shown = len(form.facets) <= SHOWN
    rows = [
        ("makespan", escape(form.text) if shown else f"the largest of {len(form.facets)} sums"),
        ("is", "exact" if form.exact else f"at most {percent(form.gap)} too small"),
        ("found with", f"{form.evaluations} evaluations"),
    ]
    yield f"{heading(sizes_of(table))}, {form.program.links.model} links"
    yield facts(rows)
    yield _regimes(form)
    for border in form.borders[:SHOWN]:
        larger = f"{border.one} is the larger where {border.text}"
        yield plain(f"{border.one} | {border.other}: {larger}")
    if form.borders[SHOWN:]:
        yield f"and {len(form.borders) - SHOWN} more borders: --json lists all"
    if family is not None:
        yield from map(plain, _family_lines(family))


def _regimes(form: "pj.results.Formula") -> Table:
    """The first facets, each with what bounds the step where it is the largest."""
    count = min(SHOWN, len(form.facets))
    columns: list[tuple[str, Any]] = [("regime", range(count))]
    columns += [
        (name, [facet[k] for facet in form.facets[:count]])
        for k, name in enumerate(form.parameters)
    ]
    return grid([*columns, ("bound by", form.bound_by[:count])])


def _family_lines(found: "pj.results.Family") -> Iterator[str]:
    yield from ("", str(found))
    last = f", checked on {', '.join(map(str, found.verified_on))}" * bool(found.verified_on)
    yield f"found on {found.symbol} = {found.found_on[0]} to {found.found_on[-1]}{last}"


def _versus_lines(found: "pj.results.Versus") -> Iterator[str]:
    names = dict(zip(("one", "other"), found.names, strict=True))
    verdict = found.verdict
    for role, name in names.items():
        verdict = verdict.replace(role, name)
    yield from ("", f"{' against '.join(found.names)}: {verdict}")
    sides = (found.one_at_most, found.one_slower), (found.other_at_most, found.other_slower)
    for name, (regions, (at, ratio)) in zip(found.names, sides, strict=True):
        rival = next((n for n in found.names if n != name), name)
        for region in regions[:SHOWN]:
            where = f"where {' and '.join(region.texts)}" if region.texts else "everywhere"
            yield f"{name} is as fast or faster {where}"
        at_most = ", ".join(f"{key}={value:.3g}" for key, value in at.items())
        yield (
            f"{name} takes up to {ratio:.4g} times as long as {rival}, at {at_most}"
            if ratio > 1
            else f"{name} never takes longer than {rival}"
        )
