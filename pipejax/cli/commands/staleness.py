"""`pipejax staleness`: with which weights an asynchronous table computes its gradients."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build
from pipejax.cli.options.tables import RunOptions
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.numbers import gigabytes
from pipejax.cli.output.report import Answer, heading, pick
from pipejax.cli.output.tables import TextTable, grid
from pipejax.schedules.table.links import LINK_TEXTS


@options
def staleness(
    *, run: RunOptions = RunOptions(), figure: Annotated[Output, DRAWING] = NO_OUTPUT
) -> Answer:
    """Show how many updates old the gradients of an asynchronous schedule are."""
    from pipejax.costs.stage.stage_work import stage_bytes

    scenario = run.scenario()
    table, link, workload = build(scenario), scenario.links, scenario.workload
    costs = scenario.table_costs() if scenario.has_times else None
    staleness_result = pj.staleness(table, costs, link=link)
    names = "schedule workers stages microbatches weight_versions own_lag max_delay mean_delay"
    result = pick(staleness_result, names)
    counts = staleness_result.histogram()
    result["histogram"] = [
        {"delay": delay, "count": count, "share": count / counts.sum()}
        for delay, count in enumerate(counts)
    ]
    if scenario.has_times:
        result["link"] = link.model
    if workload is not None:
        version = np.asarray(stage_bytes(workload, table).version)
        result["weight_bytes"] = staleness_result.versions @ version
    if figure.path is not None:
        _draw(figure, staleness_result)
    workers = _workers(staleness_result, result.get("weight_bytes"))
    view = _view(table, staleness_result, result)
    return Answer(result, view, details={"workers": [workers]})


def _view(
    table: pj.ScheduleTable, staleness: "pj.results.Staleness", data: Mapping[str, Any]
) -> Iterator[object]:
    """Yield the delay of gradients, the largest number of weight versions, and the sizes."""
    links = LINK_TEXTS[data["link"]] if "link" in data else "every op takes one slot"
    if table.updates_within:
        yield (
            f"a gradient is [bold]{staleness.mean_delay:.3g}[/] updates old on average, at most "
            f"[bold]{staleness.max_delay}[/] (each is of one stage, and those of all stages count)"
        )
        versions = int(np.max(staleness.weight_versions))
        worker = int(np.argmax(staleness.weight_versions))
        yield f"worker {worker} holds the most versions of a stage's weights: {versions}"
    else:
        yield "gradients are never stale: no cell updates weights before the end of the step"
    yield f"{heading(data)}; {links}"


def _workers(
    staleness: "pj.results.Staleness", memory: Float[NumpyArray, " workers"] | None
) -> TextTable:
    """Make a table of the workers: weight versions, their delay and their bytes."""
    columns: list[tuple[str, Iterable[object]]] = [
        ("worker", range(staleness.workers)),
        ("stages", (" ".join(map(str, np.flatnonzero(row))) for row in staleness.versions)),
        ("weight versions", staleness.weight_versions),
        ("delay within the stage [updates]", staleness.own_lag),
    ]
    return grid(columns if memory is None else [*columns, ("weights", map(gigabytes, memory))])


def _draw(figure: Output, staleness: "pj.results.Staleness") -> None:
    from pipejax.plots.charts import draw_delays  # matplotlib is an extra, slow to import

    with drawing(figure, 1, 2.4) as (_, axes):
        draw_delays(axes, staleness.histogram(), staleness.mean_delay)
        axes.set_title(f"{staleness.schedule}, {staleness.stages} stages", loc="left")
