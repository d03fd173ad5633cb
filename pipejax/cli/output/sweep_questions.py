"""Where an axis of a sweep stops to pay, and which schedule wins where."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from pipejax.cli.output.files import Output, drawing
from pipejax.cli.output.points import cell, head, named, scale_of, words
from pipejax.cli.output.report import grid, plain, tells_lines

if TYPE_CHECKING:
    from pipejax.sweep.questions import Knee, Regions
    from pipejax.sweep.results import SweepResults

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of names in a map of text
HEIGHT = 3.4  # inches, the legend above included


def knee_table(
    found: "SweepResults", rank: str, axis: str, bends: "Sequence[Knee]", within: float
) -> Iterator[object]:
    """Say between which values of an axis the cost is near its best."""
    if not bends:
        return
    values = found.axes[axis].astype(float).tolist()
    scale, cost = scale_of(found, axis, values), scale_of(found, rank, [abs(e.best) for e in bends])

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
                "all others at their best" if e.axis is None else named(found, e.axis, e.label)
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
        scale = scale_of(found, axis, values)
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


def draw_map(found: "SweepResults", shown: "Regions", across: str, up: str, figure: Output) -> None:
    """Draw which schedule is best over two axes."""
    from pipejax.plots.regions import Side, draw_regions

    sides = []
    for axis in (across, up):
        values = found.axes[axis]
        scale = scale_of(found, axis, values.tolist())
        is_numeric = values.dtype.kind in "iuf"
        shown_as = values / scale[0] if is_numeric else [str(value) for value in values]
        sides.append(Side(head(axis, scale), shown_as))
    with drawing(figure, 1, HEIGHT) as (_, axes):
        draw_regions(axes, sides[0], sides[1], shown.codes, shown.names)
