"""Look of training schemes: label, colour, marker; median and range of the seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures.kit.cases import plain_numbers
from pipejax.plots import palette

SHADE = 0.15  # opacity of bands
DECADES = 3  # a shorter logarithmic axis has plain numbers
MARKS = 8  # markers of a curve, about
OBJECTIVES: Mapping[str, str] = {
    "quadratic": "random quadratic",
    "nesterov": "Nesterov's quadratic",
    "logistic": "logistic regression",
    "language": "small language model",
    "tridiagonal quadratic": "Nesterov's quadratic",
}
QUANTITIES: Mapping[str, str] = {
    "gap": r"gap $f - f^*$",
    "value": "objective $f$",
    "loss": "training loss [nats]",
}
X_LABELS: Mapping[str, str] = {
    "time": "time [slots of one forward or backward]",
    "updates": "block updates",
}
NAMES: Mapping[str, str] = {
    "pipedream-2bw": "PipeDream-2BW",
    "pipedream": "PipeDream",
    "local-sgd": "LocalSGD",
    "rpd": "RPD",
    "naive": "naive pipeline",
}
LOOKS: Mapping[str, Sequence[tuple[str, str]]] = {  # of each family, by its settings in their order
    "pipedream": ((palette.BLACK, "o"), (palette.BLUE, "D")),
    "pipedream-2bw": ((palette.BLUE, "s"),),
    "naive": ((palette.GREY, "x"),),
    "local-sgd": ((palette.SKY, "^"), (palette.GREEN, "D"), (palette.PURPLE, "v")),
    "rpd": (
        (palette.VERMILION, "s"),
        (palette.ORANGE, "^"),
        (palette.PURPLE, "D"),
        (palette.GREEN, "v"),
        (palette.BLUE, "X"),
    ),
}


def scheme_label(scheme: str) -> str:
    """Spell a scheme's name out.

    Args:
      scheme: as in the dataset.

    Returns:
      The name for people.

    Example:
      >>> label_of("local-sgd H=5"), label_of("pipedream-2bw"), label_of("rpd delta=60")
      ('LocalSGD H=5', 'PipeDream-2BW', 'RPD δ=60')
    """
    family = _family(scheme)
    return scheme.replace(family, NAMES.get(family, family), 1).replace("delta=", "δ=")


def looks(schemes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give each scheme a colour, and a marker that tells it apart in grey.

    Args:
      schemes: all that the dataset holds.

    Returns:
      Colour and marker by scheme.
    """
    families: dict[str, list[str]] = {}
    for scheme in schemes:
        families.setdefault(_family(scheme), []).append(scheme)
    return {
        scheme: dict(zip(("color", "marker"), LOOKS[family][k % len(LOOKS[family])], strict=True))
        for family, members in families.items()
        for k, scheme in enumerate(members)
    }


def _family(scheme: str) -> str:
    return scheme.split(",")[0].split(" ")[0]


def as_published(data: xr.Dataset) -> xr.Dataset:
    """Take the setting that was run, where there are two: of the other no curves are published."""
    return data.isel(setting=0) if "setting" in data.dims else data


def who_ends_lowest(case: xr.Dataset, seeds: int) -> str:
    """Say who ends lowest and by how much.

    Args:
      case: as from `sweeps.pipedream.curves.read`, of one case and by one of what is equal.
      seeds: how many there are.

    Returns:
      As "At equal time PipeDream ends lowest, 7 times below LocalSGD H=2, with every seed.".
    """
    first, second = (str(case[name].item()) for name in ("first", "second"))
    equal = "At equal time" if str(case.by.item()) == "time" else "After as many updates"
    if not second:
        return f"{equal} {scheme_label(first)} alone does not diverge."
    agree = "with every seed" if int(case.wins) == seeds else f"with {int(case.wins)} of the seeds"
    return (
        f"{equal} {scheme_label(first)} ends lowest, {float(case.lead):.2g} times below "
        f"{scheme_label(second)}, {agree}."
    )


def plot_seeds(
    axes: Axes,
    x: xr.DataArray,
    shown: xr.DataArray,
    label: str,
    look: Mapping[str, Any],
    spacing: int | None = None,
) -> None:
    """Draw the median of the seeds as a line and their range as a light band.

    Args:
      axes: to draw on.
      x: place of each sample.
      shown: by seed and sample; nothing is drawn if all is missing.
      label: of the legend.
      look: of the line.
      spacing: samples from one marker to the next; about `MARKS` of them if None.
    """
    median = shown.median("seed", skipna=False)
    if median.isnull().all():
        return
    is_drawn = median.notnull()
    step = max(1, median.size // MARKS) if spacing is None else spacing
    axes.plot(x, median, label=label, markevery=step, markersize=3, **look)
    band = {"color": look["color"], "alpha": SHADE, "linewidth": 0}
    axes.fill_between(
        x, shown.min("seed").where(is_drawn), shown.max("seed").where(is_drawn), **band
    )


def log_axis(axes: Axes) -> None:
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
    return Patch(color=palette.BLACK, alpha=SHADE, linewidth=0, label="range of seeds")


def panels(count: int, width: float, height: float) -> tuple[Figure, Sequence[Axes]]:
    """Make panels side by side with one vertical axis."""
    figure, axes = plt.subplots(1, count, figsize=(width, height), sharey=True, squeeze=False)
    return figure, list(axes[0])
