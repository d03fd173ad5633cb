"""`pipejax formula`: the makespan of a table as an exact form in a few parameters."""

import dataclasses
import json as json_text
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from rich.markup import escape

import pipejax as pj
from pipejax.base.checks import resolve_choice
from pipejax.base.data_files import parse_float
from pipejax.base.file_fields import read_cell, whole
from pipejax.checker.form import box_text
from pipejax.cli.options.option import options, parse_pairs, parse_seconds
from pipejax.cli.options.tables import LinkOptions, PaperSettings, TableFields, with_labels
from pipejax.cli.output.files import DRAWING, JSON, NO_OUTPUT, Output, drawing
from pipejax.cli.output.numbers import percent
from pipejax.cli.output.report import Answer, heading, pick, plain, progress, table_sizes
from pipejax.cli.output.tables import facts, grid
from pipejax.schedules.cells.ops import STEP_END, Phase
from pipejax.schedules.naming import named
from pipejax.schedules.table.links import LINK_TEXTS

if TYPE_CHECKING:
    from pipejax.analysis.formula.versus import RegimeMap
    from pipejax.plots.style import Paper


NAMES = "F forward,B backward,I input gradient,W weight gradient,c message,c_F message after F"
LETTERS = f"{NAMES},c_B message after B".split(",")
MAX_SUMS = 12  # sums, and regions, that are printed


# by schedule and letter, times that it was planned for; its form keeps this order of ops
Plans = Mapping[str, Mapping[str, Any]]


def _plan_lines(plans: Plans) -> Iterator[str]:
    """Yield, for each schedule that plans its order, the op times for which it was planned."""
    for name, times in plans.items():
        offload = ", --planned-offload" if "O" in times else ""
        yield (
            f"{name}: the order was planned for {_times_text(times)} (--slots, --planned-comm"
            f"{offload}); evaluate and compare plan it for the times of a run, which may be faster"
        )


def _times_text(times: Mapping[str, Any]) -> str:
    """Format times as `F=I=W=1, c=0`; different times of stages have / between them."""
    texts = {key: "/".join(f"{t:g}" for t in np.ravel(time)) for key, time in times.items()}
    if len({texts.get(letter) for letter in "FIW"}) == 1:
        texts = {"F=I=W": texts["F"], **texts}
        for letter in "FIW":
            del texts[letter]
    return ", ".join(f"{key}={text}" for key, text in texts.items())


def form_view(
    table: pj.ScheduleTable, form: "pj.results.Formula", plans: Plans
) -> Iterator[object]:
    """Yield the makespan as a formula and its exactness."""
    text = f"the largest of {len(form.facets)} sums"
    if len(form.facets) <= MAX_SUMS:
        text = escape(form.text)
    yield f"step time of {escape(table.name)} = {text}, {escape(_quality(form))}"
    names = {*re.findall(r"[A-Zc]\w*", form.text)}
    yield ", ".join(text for text in LETTERS if text.split()[0] in names)
    yield f"{heading(table_sizes(table))}; {LINK_TEXTS[form.program.links.model]}"
    yield from map(plain, _plan_lines(plans))


def form_details(form: "pj.results.Formula") -> dict[str, Iterable[object]]:
    """Return the sums of a form, where each is the largest, and how the form was derived."""
    borders = (
        plain(f"sum {border.facet} is larger than sum {border.neighbour} where {border.text}")
        for border in form.borders
    )
    rows = [("step time", escape(form.text)), ("exactness", escape(_quality(form)))]
    rows.append(("derived from", f"{form.evaluations} evaluations"))
    sums = zip(form.parameters, zip(*form.facets, strict=True), strict=True)
    columns = [("sum", range(len(form.facets))), *sums, ("bound by", form.bound_by)]
    sums_table = grid(columns, caption="bound by: amid the times for which the sum is the largest")
    details: dict[str, Iterable[object]] = {"sums": [sums_table]}
    if form.borders:
        details["which sum is the largest where"] = borders
    return details | {"derivation": [facts(rows, {form.text: form.latex})]}


def _quality(form: "pj.results.Formula") -> str:
    quality = "exact" if form.exact else f"at most {percent(form.gap)} too small"
    return f"{quality} for {form.where}" if form.where else quality


def family_lines(family: "pj.results.Family", per_worker: float = 0) -> Iterator[str]:
    """Yield a family of forms and the numbers that it was fitted to and checked on."""
    ratio = f", M = {per_worker:.3g}P" if family.symbol == "P" else ""
    yield f"step time = {family}{ratio}"
    checked = ", ".join(map(str, family.verified_on))
    yield (
        f"fitted to {family.symbol} = {family.found_on[0]} to {family.found_on[-1]}"
        + (f", checked on {family.symbol} = {checked}" if checked else "")
    )


def versus_lines(
    versus: "pj.results.Versus", form: "pj.results.Formula", plans: Plans
) -> Iterator[str]:
    """Yield which of two schedules is faster, and where, in the ranges of the parameters."""
    # `form` is the closed form of the first schedule, `plans` are {schedule: op times of its plan}.
    first, second = (f"{name} as planned" if name in plans else name for name in versus.names)
    verdict = {
        "one is never slower": f"{first} is never slower",
        "other is never slower": f"{second} is never slower",
        "it depends": f"it depends on the times: {first} is up to "
        f"{percent(versus.one_slower[1] - 1)} slower, or {second} up to "
        f"{percent(versus.other_slower[1] - 1)} slower",
    }.get(versus.verdict, versus.verdict)
    box = f", for {form.where}" if form.where else ""
    plan_texts = {name: f" for {_times_text(times)}" for name, times in plans.items()}
    plan_times = (plan_texts.get(name, "") for name in versus.names)
    names = map("".join, zip((first, second), plan_times, strict=True))
    yield f"{' against '.join(names)}: {verdict}{box}"
    sides = (
        (first, second, versus.one_at_most, versus.one_slower),
        (second, first, versus.other_at_most, versus.other_slower),
    )
    for name, rival, regions, (at, ratio) in sides:
        if ratio <= 1:
            continue  # as the first line says
        yield f"{name} is at most {percent(ratio - 1)} slower than {rival}, {_place_text(at, form)}"
        for k, region in enumerate(regions[:MAX_SUMS]):
            where = f"where {' and '.join(region.texts)}" if region.texts else "everywhere"
            yield f"  or {where}" if k else f"{name} is as fast or faster {where}"
        if regions[MAX_SUMS:]:
            yield f"  or in {len(regions) - MAX_SUMS} more regions: --json lists all"


def _place_text(at: Mapping[str, float], form: "pj.results.Formula") -> str:
    """Write the parameter values `at` which one schedule is slower by the largest ratio."""
    # Without ranges of parameters, any multiple of these values gives the same ratio.
    if not form.box:
        return f"for {' : '.join(at)} = {' : '.join(f'{value:.3g}' for value in at.values())}"
    values = ", ".join(f"{key}={value:.3g}" for key, value in at.items())
    ranges = ((at[name], *form.box[name]) for name in form.box)
    inside = all(low - 1e-9 * low <= value <= high * (1 + 1e-9) for value, low, high in ranges)
    return f"at {values}" if inside else f"approached at many times {values}"


HEIGHT = 3.4  # inches, the legend above included


def _rival_table(rival: TableFields) -> pj.ScheduleTable:
    with progress(f"building {rival.schedule}"):
        return rival.scenario(settings=rival.settings.only(rival.name or "")).table()


@options
def formula(
    *,
    run: TableFields = TableFields(),
    links: LinkOptions = LinkOptions(),
    printed: PaperSettings = PaperSettings(),
    parameters: str | None = None,
    family: str | None = None,
    versus: str | None = None,
    per_worker: bool = False,
    box: str | None = None,
    max_facets: int = 200,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
    labels: str | None = None,
    out: Annotated[Output, JSON] = NO_OUTPUT,
) -> Answer:
    """Show the step time as an exact formula: the largest of a few sums, with a proof.

    It is of one order of ops: zb-v and others that are planned for times are planned once, for
    --slots and --planned-comm.
    """
    names = None if parameters is None else [name.strip() for name in parameters.split(",")]
    symbol, numbers = (None, []) if family is None else _parse_family(family)
    if symbol and run.workers is not None and run.microbatches is None:
        run = dataclasses.replace(run, microbatches=4 * run.workers)
    if figure.path is not None and versus is None:
        raise ValueError("--figure needs --versus: it draws which schedule is fastest where")
    if figure.path is not None and names is None:
        names = ["F", "B", "c"]
    ranges = _parse_box(box, names[0] if names else "F")
    settings = _FormOptions(run, links.links(), names, per_worker, ranges, max_facets)
    paper = None if figure.path is None else printed.paper("column")
    if labels is not None and paper is None:
        raise ValueError("--labels has no effect without --figure")
    table = run.scenario().table()
    if symbol and names is None:
        settings = settings._replace(names=_family_parameters(settings.program(table)))
    form_family = None if symbol is None else _family(settings, symbol, numbers)
    rivals = [] if versus is None else [settings.rival(name.strip()) for name in versus.split(",")]
    schedule_labels = with_labels(labels, [table.name, *(rival.schedule or "" for rival in rivals)])
    tables = [table, *map(_rival_table, rivals)]
    runs = zip([run, *rivals], tables, strict=True)
    times_by_table = {table.name: run.planned_for(table) for run, table in runs}
    plans = {name: times for name, times in times_by_table.items() if times}
    if rivals and names is None and len({Phase.W in table.used_phases for table in tables}) > 1:
        settings = settings._replace(names=["F", "I", "W", "c"])  # times that all of them have
    form, *others = map(settings.form, tables)
    with progress("comparing"):
        comparisons = [pj.analysis.versus(form, other) for other in others]
    regimes = None
    if paper is not None:
        forms = dict(zip(schedule_labels, [form, *others], strict=True))
        regimes = _draw(forms, [plans.get(table.name) for table in tables], paper, figure)
    result = form.as_json() | {"planned_for": plans, "certificate": form.certificate(table)}
    if form_family is not None:
        fit = pick(form_family, "first period found_on verified_on")
        result["family"] = {"text": str(form_family)} | fit
    if comparisons:
        versus_json = [comparison.as_json() for comparison in comparisons]
        result["versus"] = versus_json if versus_json[1:] else versus_json[0]
    if regimes is not None:
        result["map"] = pick(regimes, "parameters box shares")
    out.save_text(json_text.dumps(result, allow_nan=False))

    def view() -> Iterator[object]:
        for comparison in comparisons:
            yield from map(plain, versus_lines(comparison, form, plans))
        if not per_worker and len({table.stages_per_worker for table in tables}) > 1:
            yield "stages per worker differ: with --per-worker all do the same work"
        if regimes is not None:
            areas = (f"{name} {share:.0%}" for name, share in regimes.shares.items())
            box_of_map = box_text(regimes.parameters, regimes.box)
            yield plain(f"fastest on the map, {box_of_map}: {', '.join(areas)}")
        if form_family is not None:
            ratio = table.num_microbatches / table.num_workers
            yield from map(plain, family_lines(form_family, ratio))
        yield from form_view(table, form, plans)

    return Answer(result, view(), details=form_details(form))


def _draw(
    forms: "Mapping[str, pj.results.Formula]",
    plans: Sequence[Mapping[str, Any] | None],
    paper: "Paper",
    figure: Output,
) -> "RegimeMap":
    """Draw the fastest schedule over two parameters, in times of the first."""
    from pipejax.analysis.formula.versus import regime_map
    from pipejax.plots.heat_maps import Side, draw_regions

    regimes = regime_map(forms)
    unit, *others = regimes.parameters
    axis_values = zip(others, (regimes.x_values, regimes.y_values), strict=True)
    sides = [Side(f"{name} / {unit}", values) for name, values in axis_values]
    named_plans = zip(forms, plans, strict=True)
    texts = (f"{label} planned for {_times_text(times)}" for label, times in named_plans if times)
    caption = "; ".join(texts)
    with drawing(figure, 1, HEIGHT, paper) as (picture, axes):
        draw_regions(axes, sides[0], sides[1], regimes.codes, regimes.names)
        picture.supxlabel("\n".join(paper.wrapped(caption)), fontsize=paper.small, parse_math=False)
    return regimes


class _FormOptions(NamedTuple):
    """Options of the command, which apply to the closed form of each of its tables."""

    run: TableFields
    links: pj.Links
    names: list[str] | None
    per_worker: bool
    box: dict[str, tuple[float, float]]
    max_facets: int

    def program(self, table: pj.ScheduleTable) -> "pj.Program":
        """Lower a table, with the end of the step if a parameter is of one of its phases."""
        end_phases = {phase.name for phase in STEP_END}
        step_end = any(name.partition("_")[0] in end_phases for name in self.names or ())
        return pj.lower(table, link=self.links, step_end=step_end)

    def parameters(self, table: pj.ScheduleTable) -> "list[str] | dict[str, pj.Costs] | None":
        """Return the names of parameters, or with `--per-worker` their costs."""
        from pipejax.analysis.formula.parameters import default_parameters, named_parameters

        if not self.per_worker:
            return self.names
        program = self.program(table)
        names = self.names or default_parameters(program)
        return named_parameters(program, names, table.worker_parts)

    def form(self, table: pj.ScheduleTable) -> "pj.results.Formula":
        with progress(f"looking for the closed form of {table.name}"):
            program, parameters = self.program(table), self.parameters(table)
            return pj.formula(program, parameters, box=self.box, max_facets=self.max_facets)

    def rival(self, schedule: str) -> TableFields:
        """Choose another schedule of the same size."""
        if self.run.schedule is None:
            raise ValueError("--versus needs --schedule NAME, not a file, because it builds both")
        return dataclasses.replace(self.run, schedule=named(schedule))


def _family_parameters(program: "pj.Program") -> list[str]:
    """Return the parameters that a program needs, with c for messages both ways."""
    from pipejax.analysis.formula.parameters import default_parameters

    names = default_parameters(program)
    op_names = [name for name in names if not name.startswith("c_")]
    return [*op_names, "c"] if "c_F" in names else op_names


def _parse_family(text: str) -> tuple[str, list[int]]:
    """Read the symbol of a family and the numbers to fit it to; none is an empty list."""
    symbol, equals, numbers_text = (part.strip() for part in text.partition("="))
    symbol = resolve_choice(symbol, ("M", "P"), "--family")
    if not equals:
        return symbol, []
    words = numbers_text.split(":") if ":" in numbers_text else numbers_text.split(",")
    try:
        numbers = [read_cell(whole(), word.strip(), "") for word in words]
        if ":" in numbers_text:
            low, high, step = numbers
            numbers = list(range(low, high + 1, step))
    except ValueError:
        numbers = []
    if len(numbers) < 2:
        form = f"{symbol}=8,16,24,32 or {symbol}=8:80:8, numbers of at least 1"
        raise ValueError(f"--family must be {symbol}, or with several numbers {form}, got {text!r}")
    return symbol, numbers


def _family(settings: _FormOptions, symbol: str, numbers: list[int]) -> "pj.results.Family":
    """Fit one closed form to the sizes `numbers` of M or P, and check it on further sizes."""
    # Without `numbers`, sizes up to 10 steps are fitted, where a step is P for M.
    from pipejax.analysis.formula.family import NoFamilyError  # loads JAX

    workers, microbatches = settings.run.workers, settings.run.microbatches
    if settings.run.schedule is None or workers is None or microbatches is None:
        raise ValueError("--family needs --schedule NAME, not a file, because it changes P or M")
    if symbol == "P" and microbatches % workers:
        needs = f"a multiple of {workers} microbatches"
        raise ValueError(f"--family P needs {needs}, got {microbatches}")

    def build_table(number: int) -> pj.ScheduleTable:
        if symbol == "M":
            return dataclasses.replace(settings.run, microbatches=number).scenario().table()
        size = number * (microbatches // workers)
        run = dataclasses.replace(settings.run, workers=number, microbatches=size)
        return run.scenario().table()

    def fit_and_check(numbers: Sequence[int], check_on: Sequence[int]) -> "pj.results.Family":
        """Fit a family to these numbers and check it on further numbers."""
        return pj.analysis.formula_family(
            lambda number: settings.program(build_table(number)),
            numbers,
            lambda number: settings.parameters(build_table(number)),
            verify_on=check_on,
            symbol=symbol,
            degree=1 if symbol == "M" else 2,
        )

    # M takes multiples of P; P takes even numbers if it is even
    step = workers if symbol == "M" else 2 - workers % 2
    with progress("looking for the family"):
        if numbers:
            return fit_and_check(numbers[:-1], numbers[-1:])
        if symbol == "P":
            return fit_and_check(range(2, 2 + 7 * step, step), [18 * step])
        try:
            return fit_and_check(range(step, 11 * step, step), [13 * step, 16 * step])
        except NoFamilyError:
            pass
        try:
            return fit_and_check(range(1, 10 * step + 1), [13 * step, 16 * step])
        except NoFamilyError as error:
            more = f"--family M=1:{30 * step}:1 tries more numbers"
            raise NoFamilyError(f"{error} ({more})") from None


def _parse_box(text: str | None, unit: str) -> dict[str, tuple[float, float]]:
    """Read ranges, as F=1:2,c=0:0.5; without fixed parameters, `unit` is fixed at 1."""
    ranges: dict[str, tuple[float, float]] = {}
    has_unit = False
    form = "--box must be as F=1:2,c=0:0.5 or F=1, each once"
    for name, bounds in ({} if text is None else parse_pairs(text, form)).items():
        low, colon, high = bounds.partition(":")
        ends = [end.strip() for end in (low, high if colon else low)]
        low_end, high_end = (parse_seconds(end, f"--box: {name}") for end in ends)
        ranges[name] = low_end, high_end
        has_unit |= any(math.isnan(parse_float(end)) for end in ends)  # NaN: a text such as 5ms
    is_fixed = any(low == high for low, high in ranges.values())
    if not ranges or unit in ranges or is_fixed:
        return ranges
    if has_unit:
        raise ValueError(
            f"--box {text} has a time in a unit, but ranges in times of {unit}, which is 1: give "
            f"a range of {unit} too, or numbers alone"
        )
    return {unit: (1.0, 1.0), **ranges}
