"""`pipejax sensitivity`: what the step time depends on, and how strongly."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build, check_alike, required
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, drawing
from pipejax.cli.output.kinds import DRAWING
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import grid, pick

if TYPE_CHECKING:
    from pipejax.analysis.uncertainty.sensitivity import Sensitivity


Ends = tuple[float | None, float | None]  # step times at both factors; none where nothing has it
BAR = 8  # columns of the longest bar
LEAST = 5e-5  # of an elasticity: smaller ones are written as 0
LARGEST_FACTOR = 1e6  # beyond it no number of a machine means anything


@options
def sensitivity(
    *,
    run: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    factor: float = 2.0,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Show elasticities of the step time, what bounds it, and a tornado of exact re-evaluations.

    Options:
      factor: for the tornado chart.
      figure: the tornado chart (.png, .pdf, .svg).

    Example:
      pipejax sensitivity -s 1f1b -P 8 -M 64 -m gpt-22b -y a100 --minibatch 64
    """
    from pipejax.analysis.uncertainty.sensitivity import is_possible, swings

    scenario = run.scenario(links.links())
    table, link = build(scenario), scenario.links
    check_alike(required(scenario), "sensitivity")
    if not 1 < factor <= LARGEST_FACTOR:
        limits = "above 1" if factor <= 1 else f"above 1 and at most {LARGEST_FACTOR:g}"
        raise ValueError(f"--factor must be {limits}, got {factor:g}")
    factors = 1 / factor, factor
    workload, system = scenario.workload, scenario.system
    if workload is None or system is None:
        return _of_places(scenario.evaluate(), factors, figure)
    sensitivities = pj.sensitivity(table, workload, system, link=link)
    model = workload.model
    step_times = swings(table, workload, system, factors=factors, link=link)
    low, high = factors
    ends: dict[str, Ends] = {
        name: (
            times[0] if is_possible(model, name, low) else None,
            times[1] if is_possible(model, name, high) else None,
        )
        for name, times in step_times.items()
    }
    if figure.path is not None:
        _draw(figure, table.name, sensitivities.step_time, ends, factors)
    result = {
        "schedule": table.name,
        **pick(sensitivities, "step_time bound_by share elasticity"),
        "factors": factors,
        "swings": ends,
    }
    bound_by = sensitivities.bound_by
    bound = f"{bound_by} ({percent(sensitivities.share[bound_by])} of the critical path)"
    headline = f"step time [bold]{seconds(sensitivities.step_time)}[/], bound by {bound}"
    return Answer(result, [headline, _table(sensitivities, ends, factors)], {"drawn to": figure})


def _of_places(run: "pj.Evaluation", factors: tuple[float, float], figure: Output) -> Answer:
    """Where times are given: by stage, worker and boundary."""
    from pipejax.analysis.uncertainty.sensitivity import place_sensitivity

    found = place_sensitivity(run, factors)
    ends: dict[str, Ends] = {
        f"{each.what} {each.place}": (each.step_times[0], each.step_times[1]) for each in found
    }
    if figure.path is not None:
        _draw(figure, run.schedule, run.step_time, ends, factors)
    result = {
        "schedule": run.schedule,
        "step_time": run.step_time,
        "factors": factors,
        "places": [each._asdict() for each in found],
    }
    first = found[0]
    said = (
        f"step time [bold]{seconds(run.step_time)}[/], {percent(first.share)} of it on "
        f"{first.place}; what costs most at x {factors[1]:g} first"
    )
    dearest = sorted(found, key=lambda each: -each.step_times[-1])
    table = grid(
        [
            ("place", [each.place for each in dearest]),
            ("what", [each.what for each in dearest]),
            ("share of path", [percent(each.share) for each in dearest]),
            *(
                (f"step time at x {each:g}", [seconds(one.step_times[k]) for one in dearest])
                for k, each in enumerate(factors)
            ),
        ],
        caption="share of path: % of step time per % of what is there; the rest are exact runs",
    )
    return Answer(result, [said, table], {"drawn to": figure})


def _table(found: "Sensitivity", ends: Mapping[str, Ends], factors: tuple[float, float]) -> Table:
    """One row per parameter that changes anything, the strongest first."""
    strongest = max(map(abs, found.elasticity.values())) or 1.0
    ranked = sorted(found.elasticity.items(), key=lambda item: -abs(item[1]))
    ranked = [(name, value) for name, value in ranked if abs(value) >= LEAST] or ranked[:1]
    left = len(found.elasticity) - len(ranked)
    bars = [
        f"[{'green' if value < 0 else 'red'}]{'█' * round(BAR * abs(value) / strongest)}[/]"
        for _, value in ranked
    ]
    return grid(
        [
            ("parameter", (name for name, _ in ranked)),
            ("elasticity", (f"{value:+.4f}" for _, value in ranked)),
            ("", bars),
            *(
                (
                    f"x {factor:g}",
                    [_step(ends.get(name, (None, None))[end]) for name, _ in ranked],
                )
                for end, factor in enumerate(factors)
            ),
        ],
        caption=f"elasticity: % of step time per % of the parameter; x: the step time with so "
        f"many times of it, where there is such a model; {left} parameters change nothing",
    )


def _step(value: float | None) -> str:
    return "" if value is None else seconds(value)


def _draw(
    out: Output,
    name: str,
    step_time: float,
    ends: Mapping[str, Ends],
    factors: tuple[float, float],
) -> None:
    from pipejax.plots.charts import draw_tornado, tornado_entries  # matplotlib is an extra, slow

    with drawing(out, 2, 3.6) as (figure, axes):
        draw_tornado(axes, step_time, ends)
        axes.set_title(f"{name}: {seconds(step_time)} per step", loc="left")
        figure.legend(handles=tornado_entries(factors), loc="outside lower center", ncols=2)
