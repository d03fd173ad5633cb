"""`pipejax sensitivity`: what the step time depends on, and how strongly."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build, check_alike, required
from pipejax.cli.options.tables import RunOptions
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import Answer, has_details, pick
from pipejax.cli.output.tables import Column, rows_table

Factors = tuple[float, float]  # by which each parameter is divided and multiplied
Ends = tuple[float | None, float | None]  # step times at both factors; None if one is impossible
MIN_ELASTICITY = 5e-5  # parameters with less are not listed
MAX_FACTOR = 1e6  # beyond it no number of a machine means anything
MAX_ROWS = 5  # on the first screen


@options
def sensitivity(
    *,
    run: RunOptions = RunOptions(),
    factor: float = 2.0,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Show how the step time changes with each time and bandwidth, and which of them limit it."""
    from pipejax.analysis.uncertainty.sensitivity import is_possible, swings

    scenario = run.scenario()
    table, link = build(scenario), scenario.links
    check_alike(required(scenario), "sensitivity")
    if not 1 < factor <= MAX_FACTOR:
        limits = "above 1" if factor <= 1 else f"above 1 and at most {MAX_FACTOR:g}"
        raise ValueError(f"--factor must be {limits}, got {factor:g}")
    factors = 1 / factor, factor
    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        return _answer_by_place(scenario.evaluate(), factors, figure)
    sensitivities = pj.sensitivity(table, workload, system, link=link)
    ends: dict[str, Ends] = {}
    for name, times in swings(table, workload, system, factors=factors, link=link).items():
        can_have = [is_possible(workload.model, name, factor) for factor in factors]
        ends[name] = times[0] if can_have[0] else None, times[1] if can_have[1] else None
    if figure.path is not None:
        _draw(figure, table.name, sensitivities.step_time, ends, factors)
    result = {
        "schedule": table.name,
        **pick(sensitivities, "step_time bound_by share elasticity"),
        "factors": factors,
        "swings": ends,
    }
    bound_by = sensitivities.bound_by
    ranked = sorted(sensitivities.elasticity.items(), key=lambda item: -abs(item[1]))
    strongest, largest = ranked[0]
    view = [
        f"[bold]{seconds(sensitivities.step_time)}[/] per step, bound by {bound_by} "
        f"({percent(sensitivities.share[bound_by])} of the critical path)",
        f"1 % more of {strongest} changes the step by {largest:+.3g} %",
    ]
    listed = [item for item in ranked if abs(item[1]) >= MIN_ELASTICITY] or ranked[:1]
    rows = [
        {"name": name, "elasticity": value, "step_times": ends.get(name, (None, None))}
        for name, value in listed
    ]
    elasticity = Column("elasticity", "elasticity", "{:+.3g}".format)
    columns = Column("parameter", "name"), elasticity, *_end_columns(factors)
    caption = "elasticity: change of the step time [%] if the parameter is 1 % larger"
    return _answer(result, view, rows, columns, "all parameters", caption)


def _end_columns(factors: Factors) -> Iterator[Column]:
    """Yield the columns of the step times at both factors."""
    for place, factor in enumerate(factors):
        yield Column(f"step time at {factor:g} times", partial(_step_time, place))


def _step_time(place: int, row: Mapping[str, Any]) -> str:
    time = row["step_times"][place]
    return "" if time is None else seconds(time)


def _answer(
    result: dict[str, Any],
    view: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    title: str,
    caption: str = "",
) -> Answer:
    """Answer with the first `MAX_ROWS` rows of a table; `--details` prints all rows instead."""
    first_rows = [] if has_details() else [rows_table(rows[:MAX_ROWS], columns, caption=caption)]
    has_more = len(rows) > MAX_ROWS or has_details()
    details = {title: [rows_table(rows, columns, caption=caption)]} if has_more else {}
    return Answer(result, [*view, *first_rows], details=details)


def _answer_by_place(run: "pj.Evaluation", factors: Factors, figure: Output) -> Answer:
    """Answer for times without a model: how the step depends on each stage, worker and boundary."""
    from pipejax.analysis.uncertainty.sensitivity import place_sensitivity

    rows = [place._asdict() for place in place_sensitivity(run, factors)]
    if figure.path is not None:
        ends = {f"{row['what']} {row['place']}": row["step_times"] for row in rows}
        _draw(figure, run.schedule, run.step_time, ends, factors)
    result = {**pick(run, "schedule step_time"), "factors": factors, "places": rows}
    ranked = sorted(rows, key=lambda row: -row["step_times"][-1])
    first = ranked[0]
    view = [
        f"[bold]{seconds(run.step_time)}[/] per step; {first['what']} of {first['place']} matters "
        f"most: if it takes {factors[1]:g} times as long, the step takes "
        f"{seconds(first['step_times'][-1])}",
        f"{first['place']} takes {percent(first['share'])} of the critical path",
    ]
    share = Column("share of path", "share", percent)
    columns = Column("place", "place"), Column("what", "what"), share, *_end_columns(factors)
    return _answer(result, view, ranked, columns, "all places")


def _draw(
    out: Output, name: str, step_time: float, ends: Mapping[str, Ends], factors: Factors
) -> None:
    """Draw the step times at both factors of each parameter as a tornado chart."""
    from pipejax.plots.charts import draw_tornado, tornado_entries  # matplotlib is an extra, slow

    with drawing(out, 2, 3.6) as (figure, axes):
        draw_tornado(axes, step_time, ends)
        axes.set_title(f"{name}: {seconds(step_time)} per step", loc="left")
        figure.legend(handles=tornado_entries(factors), loc="outside lower center", ncols=2)
