"""Where an axis of a sweep stops to pay, and which schedule wins where."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from pipejax.base.printed import cell, head, named, scale_of, span, words
from pipejax.base.ties import TIE
from pipejax.cli.output.files import Output, drawing
from pipejax.cli.output.report import grid, plain, tells_lines

if TYPE_CHECKING:
    from pipejax.sweep.questions import DistinctPoint, Knee, Regions
    from pipejax.sweep.results import Points, SweepResults

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of names in a map of text
HEIGHT = 3.4  # inches, the legend above included
LONG = {"memory_bytes": "most memory of an accelerator"}  # what a picture calls a measure


def knee_table(
    found: "SweepResults", rank: str, axis: str, bends: "Sequence[Knee]", within: float
) -> Iterator[object]:
    """Say between which values of an axis the cost is near its best."""
    if not bends:
        return
    values = found.axes[axis].astype(float).tolist()
    scale, cost = (
        scale_of(found.units, axis, values),
        scale_of(found.units, rank, [abs(e.best) for e in bends]),
    )

    def between(each: "Knee") -> str:
        low, high = (cell(axis, float(end), scale) for end in (each.low, each.high))
        ends = each.low == min(values), each.high == max(values)
        return {(True, True): "any", (False, True): f">= {low}", (True, False): f"<= {high}"}.get(
            ends, f"{low} to {high}"
        )

    columns = [
        (
            "with",
            [
                "all others at their best"
                if e.axis is None
                else named(found.units, e.axis, e.label)
                for e in bends
            ],
        ),
        (escape(head(axis, scale)), [between(each) for each in bends]),
        (escape(head(f"{rank} at most", cost)), [cell(rank, abs(e.cost), cost) for e in bends]),
        ("at best", [cell(rank, abs(each.best), cost) for each in bends]),
    ]
    yield grid(
        columns, title=f"where {words(rank)} is within {within:g} % of its best along {axis}"
    )


def map_json(found: "SweepResults", shown: "Regions", across: str, up: str) -> dict[str, Any]:
    """Return the map for `--json`: rows of schedules, and of the least values, from the bottom."""
    names = [*shown.names, None]
    costs = np.abs(shown.costs)
    return {
        "axes": [across, up],
        **{axis: found.axes[axis].tolist() for axis in (across, up)},
        "schedule": [[names[code] for code in row] for row in shown.codes.tolist()],
        "value": [[None if np.isnan(v) else v for v in row] for row in costs.tolist()],
    }


def map_lines(found: "SweepResults", shown: "Regions", across: str, up: str) -> Iterator[object]:
    """Show which schedule is best over two axes: a letter for each, or a row where no lines are."""
    if not shown.names:
        return
    heads, cells = [], []
    for axis in (across, up):
        values = found.axes[axis].tolist()
        scale = scale_of(found.units, axis, values)
        heads.append(head(axis, scale))
        cells.append([cell(axis, value, scale) for value in values])
    if not tells_lines():
        places = list(np.ndindex(shown.codes.shape))
        names = [*shown.names, "-"]
        rows = [(cells[0][k], cells[1][j], names[shown.codes[j, k]]) for j, k in places]
        yield grid(zip((*map(escape, heads), "schedule"), zip(*rows, strict=True), strict=True))
        return
    ends = f"from {cells[0][0]} to {cells[0][-1]}"
    yield plain(f"best schedule: {heads[0]} across, {ends}; {heads[1]} up")
    letters = LETTERS[: len(shown.names)].ljust(len(shown.names), "?") + "."
    wide = max(map(len, cells[1]))
    for label, row in zip(reversed(cells[1]), reversed(shown.codes.tolist()), strict=True):
        yield plain(f"  {label:>{wide}}  {''.join(letters[code] for code in row)}")
    for code, name in enumerate(shown.names):
        yield plain(f"  {letters[code]} {name}, {np.mean(shown.codes == code):.0%}")
    if (shown.codes < 0).any():
        yield "  . no point can be chosen"


def draw_map(
    found: "SweepResults", rank: str, shown: "Regions", across: str, up: str, figure: Output
) -> None:
    """Draw which schedule is best over two axes, with lines of equal costs."""
    from pipejax.plots.regions import Height, Side, draw_regions

    sides = []
    for axis in (across, up):
        values = found.axes[axis]
        scale = scale_of(found.units, axis, values.tolist())
        is_numeric = values.dtype.kind in "iuf"
        shown_as = values / scale[0] if is_numeric else [str(value) for value in values]
        sides.append(Side(head(axis, scale), shown_as))
    cost = scale_of(found.units, rank, shown.costs[np.isfinite(shown.costs)].tolist())
    height = Height(head(rank, cost), np.abs(shown.costs) / cost[0])
    with drawing(figure, 1, HEIGHT) as (_, axes):
        draw_regions(axes, sides[0], sides[1], shown.codes, shown.names, height)


def draw_front(
    found: "SweepResults",
    among: Any,
    names: list[str],
    front: "Points",
    named: "Sequence[DistinctPoint]",
    best: int,
    figure: Output,
) -> None:
    """Draw points in two things, by schedule where there are several, the best one ringed."""
    from pipejax.plots.fronts import Shown, draw_results
    from pipejax.sweep.results import MORE_IS_BETTER

    groups = {"points": among}
    if "schedule" in found.axes:
        schedules = found.of("schedule")
        own = {name: among & (schedules == name) for name in found.axes["schedule"].tolist()}
        groups = {name: points for name, points in own.items() if np.any(points)}
    sides = []
    for name in names:
        values = np.asarray(found.of(name), float)
        scale = scale_of(found.units, name, values[among].tolist())
        label = head(name, scale).replace(words(name), LONG.get(name, words(name)))
        sides.append(Shown(label, values / scale[0], name in MORE_IS_BETTER))
    with drawing(figure, 1, HEIGHT) as (_, axes):
        told = _told(found, names, front, named)
        draw_results(axes, sides, groups, front, np.array([best]), told)


def _told(
    found: "SweepResults", names: list[str], front: "Points", rows: "Sequence[DistinctPoint]"
) -> tuple[str, list[str]]:
    """Tell the points of a front apart: by which axes, and each in these, ties as "a = b"."""
    told: dict[str, list[str]] = {}
    heads = []
    for axis, labels in found.axes.items():
        scale = scale_of(found.units, axis, labels.tolist())
        cells = [
            span(axis, e.same[axis], scale, len(labels))
            if axis in e.same
            else cell(axis, found.point(e.place)[axis], scale)
            for e in rows
        ]
        if axis not in names and len({*cells}) > 1:
            told[axis] = cells
            heads.append(head(axis, scale))
    texts = ["; ".join(cells) for cells in zip(*told.values(), strict=True)]
    sides = np.stack([np.asarray(found.of(name), float) for name in names])
    own = sides[:, [each.place for each in rows]]
    tied = [
        np.all(np.isclose(own, at, rtol=TIE, atol=0), axis=0) for at in sides[:, front].T[..., None]
    ]
    joined = [" = ".join(np.array(texts)[each].tolist()) for each in tied] if texts else []
    return "; ".join(heads), joined
