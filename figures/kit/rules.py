"""Rules that a printed figure must keep: drawing reports faults, and tests forbid them.

A caption is the label of its figure: it comes along wherever the figure goes.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, Tick
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox, IdentityTransform

from pipejax.plots import style
from pipejax.typing import Bool, Float, NumpyArray

AXES_DIFFER = "axes differ"  # a caption with these words allows panels of unequal axes
_SLACK = 2.0  # of positions: the white around letters [pixel]
_NO_MARKER = ("None", "none", "", " ")


class _Texts(NamedTuple):
    """Texts that are seen, and where: left, bottom, right, top [pixel]."""

    texts: list[Text]
    boxes: Float[NumpyArray, "texts 4"]


def describe(figure: Figure, caption: str) -> Figure:
    """Give a figure its caption: what is drawn, and what to see.

    Args:
      figure: in the house style.
      caption: whole sentences; blanks and line ends count as one blank.

    Returns:
      The figure.
    """
    figure.set_label(" ".join(caption.split()))
    return figure


def figure_caption(figure: Figure) -> str:
    """Return the caption of a figure."""
    return str(figure.get_label())


def faults(figure: Figure) -> list[str]:
    """List what keeps a figure from being printed as it is.

    Exponents are smaller than the text that they belong to and are not looked at.

    Args:
      figure: in the house style.

    Returns:
      A line for each fault; none if it can be printed.
    """
    figure.draw_without_rendering()
    seen = _texts(figure)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    return [
        *_page_faults(figure),
        *_text_faults(figure, seen),
        *_symbol_faults(figure, shown),
        *_limit_faults(figure, shown),
        *(fault for axes in shown for fault in (*_bar_faults(axes), *_legend_faults(axes))),
    ]


def _page_faults(figure: Figure) -> Iterator[str]:
    width = figure.get_figwidth()
    if width not in (style.COLUMN, style.PAGE):
        yield f"{width:g} inch wide: neither a column ({style.COLUMN}) nor a page ({style.PAGE})"
    if not figure_caption(figure):
        yield "it has no caption"


def _texts(figure: Figure) -> _Texts:
    """All texts but those of ticks beyond the limits of their axis, which are not drawn."""
    ticks = {label for tick in figure.findobj(Tick) for label in (tick.label1, tick.label2)}
    hidden = {child for axes in figure.axes if not axes.get_visible() for child in axes.findobj()}
    shown = {label for axes in figure.findobj(Axes) for label in _tick_labels(axes)}
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible()
        and text.get_text().strip()
        and text not in hidden
        and (text not in ticks or text in shown)
    ]
    boxes = [text.get_window_extent().extents for text in texts]
    return _Texts(texts, np.reshape(boxes, (-1, 4)))


def _tick_labels(axes: Axes) -> Iterator[Text]:
    axis: Axis
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        slack = 1e-9 * (high - low)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if axis.get_visible() and low - slack <= tick.get_loc() <= high + slack:
                yield from (tick.label1, tick.label2)


def _text_faults(figure: Figure, seen: _Texts) -> Iterator[str]:
    """Small text, text outside the canvas, text over text."""
    small = [text for text in seen.texts if float(text.get_fontsize()) < style.LEAST_FONT]
    if small:
        sizes = sorted({f"{text.get_fontsize():g}" for text in small})
        yield (
            f"{len(small)} texts of {', '.join(sizes)} points, {_quoted(small[0])} the first: at "
            f"least {style.LEAST_FONT:g}"
        )
    width, height = figure.bbox.size
    for text, (x_low, y_low, x_high, y_high) in zip(*seen, strict=True):
        if min(x_low, y_low) < -_SLACK or x_high > width + _SLACK or y_high > height + _SLACK:
            yield f"{_quoted(text)} reaches beyond the canvas"
    low, high = seen.boxes[:, :2] + _SLACK, seen.boxes[:, 2:] - _SLACK
    overlaps = np.all((low[:, None] < high[None]) & (low[None] < high[:, None]), axis=-1)
    for first, second in np.argwhere(np.triu(overlaps, 1)):
        yield f"{_quoted(seen.texts[first])} and {_quoted(seen.texts[second])} overlap"


def _quoted(text: Text) -> str:
    return repr(text.get_text())


def _symbol_faults(figure: Figure, shown: list[Axes]) -> Iterator[str]:
    """Markers and colours that no legend names."""
    legends = figure.findobj(Legend)
    named = [handle for legend in legends for handle in legend.legend_handles]
    markers = {mark for handle in named if isinstance(handle, Line2D) for mark in _markers(handle)}
    lines = [line for axes in shown for line in axes.lines if _is_drawn(line)]
    for marker in sorted({mark for line in lines for mark in _markers(line)} - markers):
        yield f"no legend names the marker {marker!r}"
    colours = {to_rgb(handle.get_color()) for handle in named if isinstance(handle, Line2D)}
    colours |= {to_rgb(text.get_color()) for text in figure.findobj(Text)}  # of lines named there
    for colour in sorted({to_rgb(line.get_color()) for line in lines} - colours):
        if len(set(colour)) > 1:  # black and grey are for frames and zero lines
            yield f"no legend and no text has the line's colour {colour}"


def _is_drawn(line: Line2D) -> bool:
    return line.get_visible() and bool(np.isfinite(line.get_xydata()).all(axis=-1).any())


def _markers(line: Line2D) -> list[str]:
    marker = str(line.get_marker())
    return [] if marker in _NO_MARKER else [marker]


def _limit_faults(figure: Figure, shown: list[Axes]) -> Iterator[str]:
    """Panels of one quantity whose axes are not equal, though no caption says so."""
    if AXES_DIFFER in figure_caption(figure):
        return
    for kind in "xy":
        limits: dict[str, list[tuple[float, ...]]] = {}
        for axes in shown:
            limits.setdefault(_quantity(axes, shown, kind), []).append(
                tuple(sorted(getattr(axes, f"get_{kind}lim")()))
            )
        for quantity, ranges in limits.items():
            if quantity and not np.allclose(ranges, ranges[0], rtol=1e-6):
                yield f"panels of {quantity!r} have unequal axes: its caption must say so"


def _quantity(axes: Axes, shown: list[Axes], kind: str) -> str:
    """Return the label of an axis, or of the outer panel of its row or column."""
    label = getattr(axes, f"get_{kind}label")()
    spec = axes.get_subplotspec()
    if label or spec is None:
        return str(label)
    span = "colspan" if kind == "x" else "rowspan"
    outer_labels = [
        str(getattr(other, f"get_{kind}label")())
        for other in shown
        if (at := other.get_subplotspec()) is not None
        and at.get_gridspec() is spec.get_gridspec()
        and getattr(at, span) == getattr(spec, span)
    ]
    return max(outer_labels, key=len)


def _bar_faults(axes: Axes) -> Iterator[str]:
    """Bars on a logarithmic axis, where their length means nothing, and bars that are cut."""
    for bars in (container for container in axes.containers if isinstance(container, BarContainer)):
        is_upright = bars.orientation == "vertical"
        axis = axes.yaxis if is_upright else axes.xaxis
        if axis.get_scale() == "log":
            yield f"bars on a logarithmic axis ({axis.get_label_text()!r})"
        ends = np.array([bar.get_bbox().get_points()[:, int(is_upright)] for bar in bars])
        low, high = sorted(axis.get_view_interval())
        if (_beyond(ends, low, high)).any():
            yield f"bars are cut by the limits of their axis ({axis.get_label_text()!r})"


def _beyond(ends: Float[NumpyArray, "bars 2"], low: float, high: float) -> Bool[NumpyArray, "..."]:
    return (ends < low) | (ends > high)


def _legend_faults(axes: Axes) -> Iterator[str]:
    """Legends that stand over what is drawn."""
    legend = axes.get_legend()
    if legend is None:
        return
    box = Bbox.intersection(legend.get_window_extent(), axes.bbox)
    if box is not None and any(
        path.intersects_bbox(box, filled=is_filled) for path, is_filled in _paths(axes)
    ):
        yield f"the legend {[text.get_text() for text in legend.get_texts()]} hides data"


def _paths(axes: Axes) -> Iterator[tuple[Path, bool]]:
    """Yield outlines of drawn things [pixel], and whether each is filled."""
    for line in filter(_is_drawn, axes.lines):
        points = line.get_transform().transform(line.get_xydata())
        runs = np.split(points, np.flatnonzero(~np.isfinite(points).all(axis=-1)))
        yield from ((Path(run[np.isfinite(run).all(axis=-1)]), False) for run in runs)
    for patch in axes.patches:
        yield patch.get_path().transformed(patch.get_transform()), True
    for group in axes.collections:
        if isinstance(group.get_offset_transform(), IdentityTransform):
            yield from (
                (path.transformed(group.get_transform()), True) for path in group.get_paths()
            )
        else:
            yield Path(group.get_offset_transform().transform(group.get_offsets())), False
