"""The best microbatch size on every network, what the step time then hangs on, and a curve."""

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures.design.best_schedule import CELLS
from figures.kit.cases import network_axes, plain_numbers
from figures.kit.rules import AXES_DIFFER, describe
from pipejax.plots import palette, style

DASHES = ("-", "--", "-.", ":")
CURVE = 1.5e-2  # latency of the curve [s]
WORST = 1.25  # of the best step time, up to which sizes are drawn
ELASTICITIES = {
    "bandwidth": ("(c) % less time for 1 % more bandwidth", -1.0),
    "latency": ("(d) % less time for 1 % less latency", 1.0),
}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw the map of sizes, step times along one latency, and both elasticities."""
    figure, panels = plt.subplots(2, 2, figsize=(style.PAGE, 5.6))
    at = data.sel({"network.latency": CURVE}, method="nearest")
    used = {int(size): colour for size, colour in zip(_used(data), palette.ORDERED, strict=False)}
    _sizes(panels[0, 0], data, used)
    panels[0, 0].axhline(1e6 * float(at["network.latency"]), color=palette.BLACK, linewidth=0.8)
    _curve(panels[0, 1], at, used)
    for axes, (name, (title, sign)) in zip(panels[1], ELASTICITIES.items(), strict=True):
        values = sign * data[f"{name}_elasticity"]
        mesh = axes.pcolormesh(*_centres(data), values, cmap="cividis_r", vmin=0, **CELLS)
        figure.colorbar(mesh, ax=axes, location="bottom", aspect=24)
        axes.set_title(title, loc="left")
    for axes in (panels[0, 0], *panels[1]):
        network_axes(axes)
    return {"network_map": describe(figure, _caption(data, at))}


def _used(data: xr.Dataset) -> list[int]:
    """Sizes that are the best somewhere, ascending."""
    return sorted({*data.microbatch_size.values.ravel().tolist()} - {0})


def _sizes(axes: Axes, data: xr.Dataset, used: dict[int, str]) -> None:
    sizes = list(used)
    codes = data.microbatch_size.where(data.microbatch_size > 0)
    codes = xr.apply_ufunc(lambda each: sum((each > size) * 1.0 for size in sizes), codes)
    colours = ListedColormap(list(used.values()))
    axes.pcolormesh(*_centres(data), codes, cmap=colours, vmin=-0.5, vmax=len(sizes) - 0.5, **CELLS)
    axes.set_title("(a) best microbatch size", loc="left")
    axes.legend(
        handles=[Patch(facecolor=colour, label=str(size)) for size, colour in used.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(sizes),
    )


def _curve(axes: Axes, at: xr.Dataset, used: dict[int, str]) -> None:
    """Step time of each size relative to the best, along the line in the map."""
    bandwidth = at["network.bandwidth"] / 1e9
    for (size, colour), dash in zip(used.items(), DASHES * 2, strict=False):
        ratio = at.step_times.sel(size=size) / at.step_time
        axes.plot(bandwidth, ratio.where(ratio <= WORST), color=colour, ls=dash, label=str(size))
    kinks = bandwidth.values[1:][at.microbatch_size.values[1:] != at.microbatch_size.values[:-1]]
    for kink in kinks:
        axes.axvline(kink, color=palette.GREY, linewidth=0.6, zorder=0)
    axes.set(xscale="log", xlim=(bandwidth.min(), bandwidth.max()), ylim=(0.99, WORST))
    plain_numbers(axes.xaxis, (1,))
    axes.set(xlabel="network bandwidth [GB/s]", ylabel="step time / that of the best size")
    axes.set_title(f"(b) at {1e3 * float(at['network.latency']):.3g} ms", loc="left")
    axes.legend(
        title="microbatch size", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(used)
    )


def _caption(data: xr.Dataset, at: xr.Dataset) -> str:
    equal = data.exhaustive_microbatch_size == data.microbatch_size
    errors = [float(data[f"{name}_elasticity_error"].max()) for name in ELASTICITIES]
    return (
        f"{data.title}, minibatch {data.minibatch}: the microbatch size of the shortest step on "
        f"every network ({AXES_DIFFER}). (a) The best size; the line is the latency of (b), "
        f"{1e3 * float(at['network.latency']):.3g} ms. (b) Step times of the sizes there: where "
        "the best one changes (grey), the best step time has a kink. (c, d) Its derivative by the "
        "envelope theorem is that of the best size alone; it jumps where that size changes, and "
        "where its critical path does. An exhaustive search finds the same size at "
        f"{100 * float(equal.mean()):.4g} % of {data.step_time.size} points, and differences of "
        f"its step times are off the derivatives by {max(errors):.1g} at most."
    )


def _centres(data: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Bandwidths [GB/s] and latencies [us]."""
    return data["network.bandwidth"] / 1e9, data["network.latency"] * 1e6
