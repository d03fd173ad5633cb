"""Exact regions where one schedule beats another, with systems as points on them."""

from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from figures.design.best_schedule import CELLS
from figures.kit.cases import LOOK
from figures.kit.rules import describe
from pipejax.plots import palette, style

MOST = 30.0  # of the colours [%]
# both ends differ in lightness from the middle and from each other
COLOURS = LinearSegmentedColormap.from_list("faster", (palette.BLUE, "#FFFFFF", palette.ORANGE))
MARKERS = {"slow": "o", "mid": "s", "fast": "^"}
NAMES = {"slow": "slow network", "mid": "mid network", "fast": "fast network"}


def draw(data: xr.Dataset) -> dict[str, Figure]:
    """Draw a map for each pair of schedules."""
    figure, panels = plt.subplots(1, 2, figsize=(style.PAGE, 3.4), sharex=True, sharey=True)
    for axes, letter, pair in zip(panels, "ab", data.pair.values, strict=True):
        at = data.sel(pair=pair)
        mesh = draw_map(axes, at)
        _systems(axes, at)
        names = f"{_label(at.one)} against {_label(at.other)}"
        axes.set_title(
            f"({letter}) {names}, {int(at.workers)} x {int(at.microbatches)}", loc="left"
        )
        axes.set_xlabel("message / forward, c / F")
        axes.set_xscale("log")
    panels[0].set_ylabel("backward / forward, B / F")
    bar = figure.colorbar(mesh, ax=panels, location="right", extend="both", aspect=24)
    bar.set_label("the first is faster by [%]")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return {"regimes": describe(figure, _caption(data))}


def _label(case: xr.DataArray) -> str:
    return str(LOOK[str(case.values)]["label"])


def draw_map(axes: Axes, at: xr.Dataset) -> Any:
    """Draw how much faster the first is, and where both take equally long; return the mesh."""
    gain = 100 * (1 - at.ratio)
    norm = TwoSlopeNorm(0, -MOST, MOST)
    mesh = axes.pcolormesh(at.message, at.backward, gain, cmap=COLOURS, norm=norm, **CELLS)
    axes.contour(at.message, at.backward, gain, levels=[0], colors=palette.BLACK, linewidths=1.2)
    axes.plot([], [], color=palette.BLACK, label="equally fast")
    return mesh


def _systems(axes: Axes, at: xr.Dataset) -> None:
    """Put the systems on the map: those of the paper by network, and accelerators."""
    names = [str(name) for name in at.system.values]
    look: dict[str, Any] = {
        "markeredgecolor": palette.BLACK,
        "color": palette.YELLOW,
        "linestyle": "",
        "zorder": 3,
    }
    for network, marker in MARKERS.items():
        chosen = at.isel(system=[k for k, name in enumerate(names) if name.startswith(network)])
        axes.plot(chosen.message_of, chosen.backward_of, marker, label=NAMES[network], **look)
    others = at.isel(system=[k for k, name in enumerate(names) if "_" not in name])
    axes.plot(others.message_of, others.backward_of, "*", label="accelerators", **{**look, "ms": 7})


def _caption(data: xr.Dataset) -> str:
    systems = [str(name) for name in data.system.values if "_" not in str(name)]
    low, high = float(data.ratio.min()), float(data.ratio.max())
    border = float(data.border.sel(pair="hanayo"))
    return (
        "Where one schedule beats another, from exact closed forms in F and B of a microbatch on a "
        f"worker and the message time c, {data.attrs['link']} links, as in the claims; ratios from "
        f"{low:.2f} to {high:.2f}. (a) At B = 2F no message takes Chimera's lead: what makes it "
        "slower on slow networks (claim 3e) is the exchange of gradients, which is not counted "
        f"here. (b) At B = 2F Hanayo is as fast up to c = {border:.3f} F. Orders are drawn for B = "
        f"2F in (a), for B = F in (b). Points: systems of the paper, calibrated, and "
        f"{', '.join(systems)}."
    )
