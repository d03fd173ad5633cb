"""Microbatch numbers in ops: all of a lane or none, as the axes are when they are drawn."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.text import Text

from pipejax.plots import palette, style
from pipejax.schedules.cells.ops import Op

_DIGIT = 0.66  # width of a digit, relative to the size of its font


class DrawnOp(NamedTuple):
    """An op of a bar, where it is drawn: a fused pair has two, one above the other."""

    op: Op
    number: str  # text of its microbatch
    start: float  # [s]
    finish: float  # [s]
    top: float  # in rows
    height: float  # in rows
    depth: float = 0.0  # how deep the colour of its phase is, from 0 to 1


class DigitRoom(NamedTuple):
    """DigitRoom of an op, or the least of several: for each digit [s], and its height in rows."""

    digit: float
    height: float


class _Number(Text):
    """A number that is drawn only where all of its row have room."""

    def __init__(self, axes: Axes, part: DrawnOp, room: DigitRoom, ends: Any, **look: Any) -> None:
        middle = sum(ends) / 2, part.top + part.height / 2
        super().__init__(*middle, part.number, ha="center", va="center", **look)
        self._room = room
        self._of = axes
        self.set_transform(axes.transData)
        self.set_in_layout(False)

    def get_visible(self) -> bool:
        """Whether the row's numbers fit as the axes are now."""
        axes, size = self._of, float(self.get_fontsize())
        box, limits = axes.bbox, (axes.get_xlim(), axes.get_ylim())
        (left, right), (low, high) = limits
        points = 72 / axes.figure.dpi
        width = self._room.digit / abs(right - left) * box.width * points
        height = self._room.height / abs(high - low) * box.height * points
        return bool(super().get_visible() and width >= _DIGIT * size and height >= 0.8 * size)


def number(
    axes: Axes,
    parts: Sequence[DrawnOp],
    looks: Mapping[str, palette.Look],
    hatched: Collection[Op],
) -> None:
    """Write microbatch numbers, in the middle of what is seen of an op."""
    since, until = axes.get_xlim()
    size = style.small()
    numbered = [part for part in parts if part.number]
    rows: dict[tuple[int, str], list[DrawnOp]] = {}
    for part in numbered:
        rows.setdefault((round(part.top), part.op.phase.kind.lane), []).append(part)
    for row in rows.values():
        # an op that the window cuts speaks for itself only
        whole = [p for p in row if p.start >= since and p.finish <= until] or row
        least = DigitRoom(
            *map(min, zip(*(_room(p, p.start, p.finish) for p in whole), strict=True))
        )
        for part in row:
            ends = max(part.start, since), min(part.finish, until)
            room = DigitRoom(*map(min, zip(least, _room(part, *ends), strict=True)))
            look = looks[part.op.phase.name].deepened(part.depth)
            ground = {"facecolor": look.fill, "edgecolor": "none", "pad": 0.3}
            box: dict[str, Any] = {"bbox": ground} if part.op in hatched else {}
            more: dict[str, Any] = {"zorder": 4, "fontsize": size, "clip_on": True, **box}
            axes.add_artist(_Number(axes, part, room, ends, color=look.ink, **more))


def _room(part: DrawnOp, start: float, finish: float) -> DigitRoom:
    return DigitRoom((finish - start) / len(part.number), part.height)
