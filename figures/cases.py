"""How the schedules of the tabular-schedule paper are drawn: label, colour, marker, dashes."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from pipejax import style

LOOK: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"label": "GPipe", "color": style.GREY, "marker": "s", "linestyle": "-"},
    "1f1b": {"label": "1F1B", "color": style.BLACK, "marker": "o", "linestyle": "--"},
    "chimera": {"label": "Chimera", "color": style.VERMILION, "marker": "^", "linestyle": "-"},
    "chimera-asymmetric": {
        "label": "Chimera 1:2", "color": style.ORANGE, "marker": "v", "linestyle": "-"},
    "hanayo, 1 wave": {
        "label": "Hanayo, 1 wave", "color": style.GREEN, "marker": "x", "linestyle": ":"},
    "hanayo, 2 waves": {
        "label": "Hanayo, 2 waves", "color": style.GREEN, "marker": "X", "linestyle": "-"},
    "hanayo, 4 waves": {
        "label": "Hanayo, 4 waves", "color": style.GREEN, "marker": "+", "linestyle": "--"},
    "interleaved-1f1b": {
        "label": "interleaved 1F1B, V=2", "color": style.BLUE, "marker": "D", "linestyle": "-"},
}  # fmt: skip
MAIN = ("gpipe", "1f1b", "chimera", "chimera-asymmetric", "hanayo, 2 waves", "interleaved-1f1b")
SYSTEM_NAME = "{} network, {} compute"


def system_title(name: str) -> str:
    """Spell a system's name out."""
    network, _, compute, _ = name.split("_")
    return SYSTEM_NAME.format(network, compute)


def microbatch_axis(axes: Axes, counts: Any) -> None:
    """Put microbatch counts on a doubling axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(counts), [str(int(count)) for count in counts])
    axes.minorticks_off()
