"""`pipejax sensitivity`: what the step time depends on, and how strongly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.options.run import RunOptions
from pipejax.cli.options.scenario import build, check_alike, required
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.report import TextTable, grid, has_details, percent, pick, seconds

Ends = tuple[float | None, float | None]  # step times at both factors; None if one is impossible
BAR = 8  # columns of the longest bar
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
    """Show elasticities of the step time, what bounds it, and a tornado of exact re-evaluations.

    Options:
      factor: The tornado chart shows both.
      figure: the tornado chart.

    Example:
      pipejax sensitivity -s 1f1b -P 8 -M 64 -m gpt-22b -y a100 --minibatch 64
    """
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
    model = workload.model
    step_times = swings(table, workload, system, factors=factors, link=link)
    low, high = factors
    ends: dict[str, Ends] = {}
    for name, times in step_times.items():
        at_low = times[0] if is_possible(model, name, low) else None
        at_high = times[1] if is_possible(model, name, high) else None
        ends[name] = at_low, at_high
    if figure.path is not None:
        _draw(figure, table.name, sensitivities.step_time, ends, factors)
    result = {
        "schedule": table.name,
        **pick(sensitivities, "step_time bound_by share elasticity"),
        "factors": factors,
        "swings": ends,
    }
    bound_by = sensitivities.bound_by
    strongest = max(sensitivities.elasticity, key=lambda name: abs(sensitivities.elasticity[name]))
    view = [
        f"[bold]{seconds(sensitivities.step_time)}[/] per step, bound by {bound_by} "
        f"({percent(sensitivities.share[bound_by])} of the critical path)",
        f"1 % more of {strongest} changes the step by {sensitivities.elasticity[strongest]:+.3g} %",
    ]
    rows = _ranked(sensitivities)

    def first_rows(count: int) -> TextTable:
        return _table(sensitivities, rows[:count], ends, factors)

    return _answer(result, view, first_rows, len(rows), "all parameters")


def _answer(
    result: dict[str, Any],
    view: Sequence[str],
    table: Callable[[int], TextTable],
    count: int,
    title: str,
) -> Answer:
    """Answer with the first of `count` rows of a table; all of them are a detail."""
    first_rows = [] if has_details() else [table(MAX_ROWS)]
    details = {title: [table(count)]} if count > MAX_ROWS or has_details() else {}
    return Answer(result, [*view, *first_rows], details=details)


def _answer_by_place(run: "pj.Evaluation", factors: tuple[float, float], figure: Output) -> Answer:
    """Answer for measured times: by stage, worker and boundary."""
    from pipejax.analysis.uncertainty.sensitivity import place_sensitivity

    places = place_sensitivity(run, factors)
    ends: dict[str, Ends] = {
        f"{place.what} {place.place}": (place.step_times[0], place.step_times[1])
        for place in places
    }
    if figure.path is not None:
        _draw(figure, run.schedule, run.step_time, ends, factors)
    result = {
        "schedule": run.schedule,
        "step_time": run.step_time,
        "factors": factors,
        "places": [place._asdict() for place in places],
    }
    ranked = sorted(places, key=lambda place: -place.step_times[-1])
    first = ranked[0]
    view = [
        f"[bold]{seconds(run.step_time)}[/] per step; {first.what} of {first.place} matters most: "
        f"{factors[1]:g} times as long makes it {seconds(first.step_times[-1])}",
        f"{first.place} is {percent(first.share)} of the critical path",
    ]

    def table(count: int) -> TextTable:
        rows = ranked[:count]
        return grid(
            [
                ("place", [place.place for place in rows]),
                ("what", [place.what for place in rows]),
                ("share of path", [percent(place.share) for place in rows]),
                *(
                    (f"step time at x {factor:g}", [seconds(place.step_times[k]) for place in rows])
                    for k, factor in enumerate(factors)
                ),
            ]
        )

    return _answer(result, view, table, len(ranked), "all places")


def _ranked(sensitivities: "pj.results.Sensitivity") -> list[tuple[str, float]]:
    """Return the parameters that change the step, the strongest first, with elasticities."""
    ranked = sorted(sensitivities.elasticity.items(), key=lambda item: -abs(item[1]))
    return [(name, value) for name, value in ranked if abs(value) >= MIN_ELASTICITY] or ranked[:1]


def _table(
    sensitivities: "pj.results.Sensitivity",
    rows: Sequence[tuple[str, float]],
    ends: Mapping[str, Ends],
    factors: tuple[float, float],
) -> TextTable:
    """Make a row for each parameter: elasticity, and step times at the two factors."""
    strongest = max(map(abs, sensitivities.elasticity.values())) or 1.0
    others = len(sensitivities.elasticity) - len(rows)
    bars = [
        f"[{'green' if value < 0 else 'red'}]{'█' * round(BAR * abs(value) / strongest)}[/]"
        for _, value in rows
    ]
    return grid(
        [
            ("parameter", (name for name, _ in rows)),
            ("elasticity", (f"{value:+.3g}" for _, value in rows)),
            ("", bars),
            *(
                (f"step at x {factor:g}", [_step(ends.get(n, (None, None))[end]) for n, _ in rows])
                for end, factor in enumerate(factors)
            ),
        ],
        caption=f"elasticity: % of step time per % of the parameter; {others} others change less",
    )


def _step(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _draw(
    out: Output, name: str, step_time: float, ends: Mapping[str, Ends], factors: tuple[float, float]
) -> None:
    from pipejax.plots.charts import draw_tornado, tornado_entries  # matplotlib is an extra, slow

    with drawing(out, 2, 3.6) as (figure, axes):
        draw_tornado(axes, step_time, ends)
        axes.set_title(f"{name}: {seconds(step_time)} per step", loc="left")
        figure.legend(handles=tornado_entries(factors), loc="outside lower center", ncols=2)
