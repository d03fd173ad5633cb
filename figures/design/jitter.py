"""Step time under jitter: its distribution for each schedule."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.figure import Figure

from figures.kit.cases import LOOK
from figures.kit.rules import describe
from pipejax.plots import draw_violins, palette, style, violin_entries


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the step time of each schedule, and how much longer jitter makes it."""
    figure, (times_axes, slowdown_axes) = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharey=True)
    factor, unit = (1e3, "ms") if float(data.makespan.max()) < 1 else (1.0, "s")
    slowdown = data.makespan / data.deterministic
    names = [str(name) for name in data.schedule.values]
    looks = {name: LOOK.get(name, {"label": name, "color": palette.GREY}) for name in names}
    colours = {look["label"]: look["color"] for look in looks.values()}
    panels = (
        (times_axes, factor * data.makespan, factor * data.deterministic),
        (
            slowdown_axes,
            slowdown,
            xr.ones_like(data.deterministic),
        ),
    )
    for axes, values, without in panels:
        samples = {looks[name]["label"]: values.sel(schedule=name).values for name in names}
        marks = {looks[name]["label"]: float(without.sel(schedule=name)) for name in names}
        draw_violins(axes, samples, marks, colours)
    times_axes.set_xlabel(f"step time [{unit}]")
    slowdown_axes.set_xlabel("step time / that without jitter")
    slowdown_axes.tick_params(left=False)
    figure.legend(handles=violin_entries(), loc="outside lower center", ncols=2)
    return {"jitter": describe(figure, _caption(data, slowdown))}


def _caption(data: xr.Dataset, slowdown: xr.DataArray) -> str:
    median = slowdown.median("sample")
    rare = slowdown.quantile(0.99, "sample")
    shortest, longest = (str(at.item()) for at in (median.idxmin(), median.idxmax()))
    return (
        f"Step time under jitter: {data.workers} workers, {data.microbatches} microbatches, "
        f"{data.sizes['sample']} samples. A step "
        "waits for the last of many ops, so jitter makes it longer: the median by "
        f"{100 * (float(median.max()) - 1):.1f} % with {LOOK[longest]['label']}, by "
        f"{100 * (float(median.min()) - 1):.1f} % with {LOOK[shortest]['label']}. One step in a "
        f"hundred takes at least {100 * (float(rare.min()) - 1):.0f} to "
        f"{100 * (float(rare.max()) - 1):.0f} % longer."
    )
