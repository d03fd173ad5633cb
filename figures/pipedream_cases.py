"""How ways to train are drawn: label, colour, dashes, tuned step size, mean and range of seeds."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.cases import plain_numbers
from pipejax.plots import style
from sweeps.pipedream_schemes import best_place, geometric_mean

GAP = r"gap $f - f^*$"
SHADE = 0.15  # opacity of bands
DECADES = 3  # a shorter logarithmic axis has plain numbers
OBJECTIVES: Mapping[str, str] = {
    "quadratic": "Random quadratic",
    "nesterov": "Nesterov's quadratic",
    "logistic": "Logistic regression",
    "language": "Small language model",
}
NAMES: Mapping[str, str] = {
    "pipedream-2bw": "PipeDream-2BW",
    "pipedream": "PipeDream",
    "local-sgd": "LocalSGD",
    "rpd": "RPD",
}
COLOURS: Mapping[str, Sequence[str]] = {  # of each family, by its settings in their order
    "pipedream-2bw": (style.BLUE,),
    "pipedream": (style.BLACK,),
    "local-sgd": (style.SKY, style.GREEN, style.PURPLE, style.ORANGE),
    "rpd": (style.VERMILION, style.ORANGE, style.PURPLE, style.GREEN, style.BLUE),
}
DASHES: Mapping[str, str] = {"": "-", "own models": "--", "epochs": ":"}  # by variant


def label_of(scheme: str) -> str:
    """Spell a scheme's name out.

    Args:
      scheme: as in the dataset.

    Returns:
      The name for people.

    Example:
      >>> label_of("local-sgd H=5, own models"), label_of("pipedream-2bw"), label_of("rpd delta=60")
      ('LocalSGD H=5, own models', 'PipeDream-2BW', 'RPD δ=60')
    """
    family = _family(scheme)
    return scheme.replace(family, NAMES.get(family, family), 1).replace("delta=", "δ=")


def looks(schemes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each scheme a colour; variants of one setting share it and differ in dashes.

    Args:
      schemes: all that the dataset holds.

    Returns:
      Colour and line style by scheme.
    """
    settings: dict[str, list[str]] = {}
    found = {}
    for scheme in schemes:
        setting, _, variant = scheme.partition(", ")
        known = settings.setdefault(_family(scheme), [])
        if setting not in known:
            known.append(setting)
        colours = COLOURS.get(_family(scheme), (style.GREY,))
        colour = colours[known.index(setting) % len(colours)]
        found[scheme] = {"color": colour, "linestyle": DASHES.get(variant, "-.")}
    return found


def tuned(data: xr.Dataset) -> xr.Dataset:
    """Take the step size that `sweeps.pipedream_schemes.best_place` chooses, as the claims do.

    Args:
      data: gap and diverged by scheme, step_size, seed and perhaps further axes.

    Returns:
      The data without the axis of step sizes; `step_size` is a coordinate, and `gap` is missing
      where some seed diverged with every step size. `hopeless` says where that is so; `edge`,
      where the step size is the smallest or largest that was tried.
    """
    place = best_place(data)
    chosen = data.isel(step_size=place)
    hopeless = data.diverged.any("seed").all("step_size")
    return chosen.assign(
        gap=chosen.gap.where(~hopeless),
        hopeless=hopeless,
        edge=place.isin([0, data.sizes["step_size"] - 1]),
    )


def power_of_two(step_size: float) -> str:
    """Write a step size as a fraction.

    Args:
      step_size: a power of two.

    Returns:
      The fraction.

    Example:
      >>> power_of_two(0.0625), power_of_two(2.0)
      ('1/16', '2')
    """
    return str(Fraction(step_size).limit_denominator(2**30))


def plot_gap(
    axes: Axes, x: xr.DataArray, gap: xr.DataArray, label: str, look: Mapping[str, Any]
) -> None:
    """Draw the geometric mean over seeds as a line and their range as a light band.

    Args:
      axes: to draw on.
      x: place of each sample.
      gap: by seed and sample; nothing is drawn if all is missing.
      label: of the legend.
      look: of the line.
    """
    mean = geometric_mean(gap)
    if mean.isnull().all():
        return
    known = mean.notnull()
    axes.plot(x, mean, label=label, **look)
    axes.fill_between(
        x,
        gap.min("seed").where(known),
        gap.max("seed").where(known),
        color=look["color"],
        alpha=SHADE,
        linewidth=0,
    )


def log_gap_axis(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with labels enough on a short one.

    Args:
      axes: all is drawn on them.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < low * 10**DECADES:
        plain_numbers(axes.yaxis, (1, 2, 5))


def range_of_seeds() -> Patch:
    """Return the legend's entry of the bands."""
    return Patch(color=style.BLACK, alpha=SHADE, linewidth=0, label="range of seeds")


def _family(scheme: str) -> str:
    return scheme.split(",")[0].split(" ")[0]
