"""`pipejax results`: the best points of a sweep, and its front."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from pipejax.cli.options.values import Count, JsonFlag
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, SWEEPS, Output, check_modules, drawing
from pipejax.cli.output.report import (
    gigabytes,
    grid,
    percent,
    print_all,
    print_json,
    print_plain,
    print_written,
    seconds,
    tells_lines,
)

if TYPE_CHECKING:
    from pipejax.sweep.results import Points, SweepResults

HEIGHT = 3.4  # inches, the legend above included
REASONS = 5  # that are listed
LONGEST = 50  # rows of a table
AXES = "step_time,memory_bytes"
SHOWN: dict[str, Callable[[Any], str]] = {
    "step_time": seconds,
    "memory_bytes": gigabytes,
    "bubble_ratio": percent,
}
# in which unit a table shows what a dataset holds in SI units
IN_TABLES: dict[str, tuple[float, str]] = {
    "B/s": (1e9, "GB/s"),
    "B": (1e9, "GB"),
    "FLOP/s": (1e12, "TFLOP/s"),
    "s": (1e-6, "us"),
}


def results(
    dataset: Annotated[Path, typer.Argument(metavar="STORE.zarr", help="What sweep wrote.")],
    best: Count = 10,
    by: str = "step_time",
    where: list[str] | None = None,
    pareto: bool = False,
    axes: str = AXES,
    no_memory_limit: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Show the best points of a sweep, the front that no point beats, and what was not evaluated.

    Options:
      by: step_time, memory_bytes, an output that the sweep kept, or an axis of numbers.
      where: an axis or a measure, then =, !=, <, <=, > or >=, as memory_bytes<50GB or
        network.bandwidth>50GB/s; numbers without a unit are in SI units, bandwidths in B/s; of
        several conditions all must hold.
      pareto: and equals in the other.
      axes: the less the better, but for tokens_per_second.
      figure: all points in these two axes (.png, .pdf or .svg).

    Example:
      pipejax results results.zarr --best 5 --where systems=h100 --pareto --figure front.png
    """
    check_modules(f"{dataset}: datasets need", SWEEPS, "sweeps")
    from pipejax.sweep.results import check_measure, read_results, selectable

    found = read_results(dataset)
    rank = check_measure(by, found, "--by")
    sides = [check_measure(name, found, "--axes") for name in axes.split(",")]
    if len(sides) != 2 or sides[0] == sides[1]:
        raise ValueError(f"--axes must be two different names, as {AXES}, got {axes!r}")
    kept = found.where(where or ())
    among = kept & selectable(found, memory_limit=not no_memory_limit)
    first, front = found.best(among, rank, best), found.front(among, sides)
    if figure.path is not None:
        _draw(found, among, sides, front if pareto else front[:0], first[:1], figure)
    if json:
        print_json(
            {
                "store": dataset,
                "points": len(found.status),
                **{name.replace(" ", "_"): count for name, count in found.counts().items()},
                "selected": int(kept.sum()),
                "by": rank,
                "best": [found.point(place) for place in first.tolist()],
                **({"axes": sides, "pareto": _points(found, front)} if pareto else {}),
                "reasons": dict(_reasons(found).most_common()),
                **figure.as_json(),
            }
        )
        return
    _print_counts(found, dataset, int(kept.sum()), bool(where))
    if len(first) == 0:
        print_plain("no point can be chosen" + " where these conditions hold" * bool(where))
        if np.any(kept & selectable(found, memory_limit=False)):
            print_plain(
                "  those that need more memory than there is are shown by --no-memory-limit"
            )
    else:
        _print_table(found, first, f"best {len(first)} by {_words(rank)}")
    if pareto and len(front):
        _print_table(found, front, f"front of {_words(sides[0])} against {_words(sides[1])}")
    print_written("drawn to", figure.written)


def _points(found: "SweepResults", places: "Points") -> list[dict[str, Any]]:
    return [found.point(place) for place in places.tolist()]


def _reasons(found: "SweepResults") -> Counter[str]:
    return Counter(str(text) for text in found.reasons if text)


def _print_counts(found: "SweepResults", dataset: Path, kept: int, is_filtered: bool) -> None:
    """Say how many points there are, and how many are illegal or not there yet."""
    counts = found.counts()
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    chosen = f"; {kept:,} keep the conditions" if is_filtered else ""
    print_plain(f"{dataset}: {len(found.status):,} points: {told}{chosen}")
    if counts["not evaluated"]:
        print_plain("  the sweep is not complete: go on with it by pipejax sweep --resume")
    reasons = _reasons(found)
    for reason, count in reasons.most_common(REASONS):
        print_plain(f"  illegal, {count:,} points: {reason}")
    if len(reasons) > REASONS:
        print_plain(f"  and {len(reasons) - REASONS} further reasons: --json lists all")


def _print_table(found: "SweepResults", places: "Points", title: str) -> None:
    """Print points; axes that are the same in all of them are told once, above."""
    is_short = tells_lines()
    rows = _points(found, places[:LONGEST] if is_short else places)
    alike = {
        name: rows[0][name]
        for name in found.axes
        if is_short and len(rows) > 1 and len({row[name] for row in rows}) == 1
    }
    columns: list[tuple[str, list[str]]] = []
    for name in rows[0]:
        if name != "fits" and name not in alike:
            unit = _scale(found, name)[1]
            head = f"{_words(name)} [{unit}]" if unit else _words(name)
            columns.append((escape(head), [_cell(found, name, row[name]) for row in rows]))
    if not is_short or not all(row["fits"] for row in rows):
        columns.append(("fits", ["yes" if row["fits"] else "[red]no" for row in rows]))
    print_all(grid(columns, title=title))
    if len(places) > LONGEST:
        print_plain(f"and {len(places) - LONGEST:,} more: --json lists all")
    if alike:
        texts = [
            f"{_words(n)} {_cell(found, n, v)} {_scale(found, n)[1]}" for n, v in alike.items()
        ]
        print_plain("all: " + ", ".join(map(str.rstrip, texts)))


def _words(name: str) -> str:
    return name.replace("_bytes", "").replace("_", " ")


def _scale(found: "SweepResults", name: str) -> tuple[float, str]:
    """Find what the numbers of an axis or a measure are divided by, and the unit they then have."""
    if name in SHOWN:
        return 1.0, ""  # its texts hold the unit
    unit = found.units.get(name, "")
    return IN_TABLES.get(unit, (1.0, unit.replace("1", "")))


def _cell(found: "SweepResults", name: str, value: Any) -> str:
    """Write one value of an axis or a measure, in the unit of `_scale`."""
    if name in SHOWN:
        return SHOWN[name](value)
    return f"{value / _scale(found, name)[0]:.4g}" if isinstance(value, float) else str(value)


def _draw(
    found: "SweepResults",
    among: Any,
    sides: list[str],
    front: "Points",
    best: "Points",
    figure: Output,
) -> None:
    """Draw the points, by schedule where there are several."""
    from pipejax.plots.fronts import Shown, draw_results

    groups = {"points": among}
    if "schedule" in found.axes:
        names = found.of("schedule")
        groups = {name: among & (names == name) for name in found.axes["schedule"].tolist()}
        groups = {name: own for name, own in groups.items() if np.any(own)} or {"points": among}
    shown = [Shown(name, found.of(name), found.units[name]) for name in sides]
    with drawing(figure, 1, HEIGHT) as (_, axes):
        draw_results(axes, shown, groups, front, best)
