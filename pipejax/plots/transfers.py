"""Messages on axes: as lines between rows, or as transfers in a lane of both their workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from pipejax.analysis.runs.timeline import Arrow
from pipejax.plots import palette, style

MAX_SHAPES = 5000  # more than this are pixels in a pdf or svg, which would take long to show
_BEHIND = 0.8  # order: over the line of idle time, behind ops, so that no line crosses a number
_FRAME, _EDGE = 0.9, 0.2  # widths of lines around transfers [point]


def draw_messages(axes: Axes, sent: Sequence[Arrow], *, top: float, bottom: float) -> None:
    """Lines from the edge of the sender's ops to the edge of the receiver's, behind other rows."""
    lines = []
    for a in sent:
        leaves, arrives = (bottom, top) if a.receiver > a.sender else (top, bottom)
        lines.append([(a.start, a.sender + leaves), (a.finish, a.receiver + arrives)])
    colours = [palette.CRITICAL if a.is_critical else palette.MESSAGE for a in sent]
    widths = [1.0 if a.is_critical else 0.5 for a in sent]
    look: dict[str, Any] = {
        "colors": colours,
        "linewidths": widths,
        "rasterized": len(lines) > MAX_SHAPES,
    }
    axes.add_collection(LineCollection(lines, zorder=_BEHIND, **look))


def draw_transfers(axes: Axes, sent: Sequence[Arrow], top: float, height: float) -> None:
    """Draw messages as bars in a lane of both workers, those of the critical path framed."""
    for critical in (False, True):
        boxes: Any = np.array(
            [
                (a.start, a.finish, worker + top, worker + top + height)
                for a in sent
                if a.is_critical is critical and a.finish > a.start
                for worker in (a.sender, a.receiver)
            ]
        ).reshape(-1, 4)
        corners = boxes[:, [[0, 2], [1, 2], [1, 3], [0, 3]]]
        edge = {"edgecolor": palette.CRITICAL if critical else palette.WHITE}
        widest = _FRAME if critical else _EDGE
        widths = style.line_widths(axes, boxes[:, 1] - boxes[:, 0], widest)
        look: dict[str, Any] = {"facecolor": palette.MESSAGE, "linewidths": widths, **edge}
        rasterized = len(boxes) > MAX_SHAPES
        axes.add_collection(
            PolyCollection(corners, zorder=3 if critical else 1, rasterized=rasterized, **look)
        )
