"""Timelines of schedules that update weights within the table, with what their stages hold."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.design.timelines import draw_run, read_run
from figures.kit.rules import describe
from pipejax.plots import bar_entries, style

NAMES: Mapping[str, str] = {
    "naive": "Naive pipeline",
    "pipedream": "PipeDream, stage s limited to S - s",
    "pipedream, first stage": "PipeDream, first stage limited to S",
    "local-sgd, H=1": "LocalSGD, four runs, H = 1",
}
HEIGHT = 1.05  # of a panel [inch]


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw one panel per schedule on one scale of slots."""
    names = [str(name) for name in data.schedule.values]
    figure, panels = plt.subplots(
        len(names), 1, figsize=(style.PAGE, HEIGHT * len(names) + 0.4), sharex=True
    )
    all_bars = []
    for axes, name in zip(panels, names, strict=True):
        run = read_run(data, name)
        bars = [bar._replace(is_critical=False) for bar in run.bars]
        draw_run(axes, data, name, run._replace(bars=bars, upward=set()))
        all_bars += bars
        schedule = data.sel(schedule=name)
        held = ", ".join(str(int(count)) for count in schedule.in_flight)
        versions = ", ".join(str(int(count)) for count in schedule.weight_versions)
        axes.set_title(
            f"{NAMES[name]}: in flight {held}; weight versions {versions}; largest delay "
            f"{int(schedule.max_delay)}",
            loc="left",
        )
    panels[-1].set_xlabel("slot")
    figure.legend(handles=bar_entries(all_bars), loc="outside lower center", ncols=4)
    caption = (
        f"Four schedules that update weights within the table: {data.workers} stages, "
        f"{data.microbatches} microbatches (numbers), one slot for a forward or a backward. In "
        "titles, from the first stage to the last: the most microbatches in flight, the most "
        "weight versions held, and the largest delay of the steady state in block updates. Where "
        "only the first stage of PipeDream is limited, later stages run ahead while the pipe "
        "fills: they hold more, and nothing ends earlier. LocalSGD runs empty after each round."
    )
    return {"pipedream_schedules": describe(figure, caption)}
