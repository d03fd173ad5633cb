"""Look of schedules in all figures: label, colour, marker, dashes."""

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter

from pipejax.plots import palette

_OWN: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {  # broad: seen below what equals it
        "label": "GPipe",
        "color": palette.GREY,
        "marker": "s",
        "linestyle": "-",
        "linewidth": 3.0,
        "markersize": 7.5,
    },
    "1f1b": {"label": "1F1B", "color": palette.BLACK, "marker": "o", "linestyle": "--"},
    "chimera": {"label": "Chimera", "color": palette.VERMILION, "marker": "^", "linestyle": "-"},
    "chimera-asymmetric": {
        "label": "Chimera 1:2",
        "color": palette.ORANGE,
        "marker": "v",
        "linestyle": "-",
    },
    "hanayo, 1 wave": {
        "label": "Hanayo, 1 wave",
        "color": palette.PURPLE,
        "marker": "P",
        "linestyle": ":",
    },
    "hanayo, 2 waves": {
        "label": "Hanayo, 2 waves",
        "color": palette.GREEN,
        "marker": "X",
        "linestyle": "-",
    },
    "hanayo, 4 waves": {
        "label": "Hanayo, 4 waves",
        "color": palette.VIOLET,
        "marker": "D",
        "linestyle": "--",
    },
    "interleaved-1f1b": {
        "label": "interleaved 1F1B, V=2",
        "color": palette.BLUE,
        "marker": "D",
        "linestyle": "-",
    },
    "interleaved-1f1b, 5 stages": {
        "label": "interleaved 1F1B, V=5",
        "color": palette.SKY,
        "marker": "d",
        "linestyle": "-",
    },
}
# names that `pipejax sweep` gives to schedules with options
_DECLARED: Mapping[str, str] = {
    "interleaved-1f1b stages_per_worker=2": "interleaved-1f1b",
    "interleaved-1f1b stages_per_worker=5": "interleaved-1f1b, 5 stages",
    "hanayo waves=1": "hanayo, 1 wave",
    "hanayo waves=2": "hanayo, 2 waves",
    "hanayo waves=4": "hanayo, 4 waves",
}
LOOK: Mapping[str, Mapping[str, Any]] = {
    **_OWN,
    **{name: _OWN[same] for name, same in _DECLARED.items()},
}
MAIN = ("gpipe", "1f1b", "chimera", "chimera-asymmetric", "hanayo, 2 waves", "interleaved-1f1b")
POINTS: Mapping[str, Any] = {  # small and open, where there are many
    "linestyle": "",
    "markersize": 2.6,
    "markerfacecolor": "none",
    "markeredgewidth": 0.7,
}
SYSTEM_NAME = "{} network, {} compute"


def main_setting(data: xr.Dataset) -> xr.Dataset:
    """Select the setting in which the tabular paper's claims are read."""
    start = "main "
    return data.sel(
        {name[len(start) :]: at for name, at in data.attrs.items() if name.startswith(start)}
    )


def setting_words(data: xr.Dataset) -> str:
    """Say in a caption which setting that is."""
    setting, link, exchange, minibatch = (
        data.attrs[f"main {name}"] for name in ("setting", "link", "exchange", "minibatch")
    )
    return (
        f"{setting.capitalize()} setting, {link} links, gradients exchanged {exchange}, minibatch "
        f"{minibatch}."
    )


def system_title(name: str) -> str:
    """Spell a system's name out."""
    network, _, compute, _ = name.split("_")
    return SYSTEM_NAME.format(network, compute)


def count_axis(axes: Axes, counts: Any) -> None:
    """Put counts of microbatches or stages on a doubling axis, each with its label."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(int(count)) for count in counts])
    axes.minorticks_off()


def network_axes(axes: Axes) -> None:
    """Put bandwidth [GB/s] and latency [us] of the network on logarithmic axes."""
    axes.set(xscale="log", yscale="log")
    plain_numbers(axes.xaxis, (1,))
    plain_numbers(axes.yaxis, (1,))
    axes.set_xlabel("network bandwidth [GB/s]")
    axes.set_ylabel("network latency [µs]")


def plain_numbers(axis: Axis, steps: Sequence[float] = (1, 1.5, 2, 3, 5, 7)) -> None:
    """Label a logarithmic axis with plain numbers, at these steps of each decade."""
    axis.set_major_locator(LogLocator(subs=list(steps)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def network_label(data: xr.Dataset) -> str:
    """Name the network of a point of a sweep."""
    bandwidth, latency = data["network.bandwidth"].item(), data["network.latency"].item()
    return f"{bandwidth / 1e9:.3g} GB/s, {1e6 * latency:.3g} µs"
