"""`pipejax sweep run` and `sweep show`: a declared grid into a dataset, and its best points."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from pipejax.base.progress import if_interrupted
from pipejax.cli.options.values import Count
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, check_modules, drawing
from pipejax.cli.output.kinds import DRAWING, GRID, SWEEPS
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import facts, grid, plain, tells_lines


def sweep_run(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Declaration of the grid.")],
    out: Annotated[Output, GRID],
    resume: bool = False,
    scheduler: str | None = None,
) -> Answer:
    """Evaluate a grid of schedules, workloads and systems into a Zarr store, block by block.

    Killed at any moment and resumed, it ends with the same bytes as without a break.

    Options:
      out: a Zarr store; with --force a sweep's that is there is begun anew.
      scheduler: as tcp://host:8786.

    Example:
      pipejax sweep run grid.toml --out results.zarr --resume
    """
    if resume and out.force:
        raise ValueError("--resume goes on with a store, --force begins it anew: choose one")
    if scheduler is not None:
        check_modules(f"--scheduler {scheduler}: it needs", ("distributed",), "cluster")
    from pipejax.sweep import read_sweep, run_sweep

    grid = read_sweep(file)
    path = out.path or Path()  # it has to be given
    done: list[int] = []  # points of an earlier run, then those after each block
    began = time.perf_counter()

    def say() -> str | None:
        if not done:
            return None
        return f"after {done[-1] - done[0]} points: {path} keeps them, go on with --resume"

    columns = (*Progress.get_default_columns(), _Rate(), TimeElapsedColumn())
    with (
        if_interrupted(say),
        progress("sweep", grid.num_points, *columns, transient=False) as bar,
    ):

        def on_progress(points: float, total: float | None, text: str) -> None:
            done.append(int(points))
            bar.tell(points, total, text)

        run_sweep(
            grid,
            path,
            resume=resume,
            replace=out.force,
            scheduler=scheduler,
            on_progress=on_progress,
        ).close()
    return _answer(grid, path, done[0], time.perf_counter() - began)


class _Rate(ProgressColumn):
    """Points per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("-" if speed is None else f"{speed:,.0f} points/s")


def _answer(grid: Any, out: Path, from_before: int, seconds: float) -> Answer:
    import xarray as xr

    from pipejax.sweep import STATUS

    with xr.open_zarr(out, chunks=None) as data:
        counted = np.bincount(data.status.values.ravel(), minlength=len(STATUS))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        reasons = sorted({str(text) for text in np.ravel(data.reason.values)} - {""})
    new = grid.num_points - from_before
    rate = new / seconds
    result = {
        "out": out,
        "points": grid.num_points,
        "dimensions": grid.sizes,
        **{name.replace(" ", "_"): int(n) for name, n in zip(STATUS, counted, strict=True)},
        "evaluated_now": new,
        "seconds": seconds,
        "points_per_second": rate,
        "bytes": size,
        "reasons": reasons,
    }
    sizes = ", ".join(f"{name} {size}" for name, size in grid.sizes.items())
    points = [(n, f"{count:,}") for n, count in zip(STATUS, counted, strict=True) if count]
    earlier = f"; {from_before:,} were there" if from_before else ""
    said = [
        plain(f"{grid.num_points:,} points ({sizes}) in {out}, {decimal(size)}"),
        f"evaluated {new:,} in {seconds:.1f} s: {rate:,.0f} points/s{earlier}",
        facts(points),
        *(plain(f"  illegal: {reason}") for reason in reasons[:REASONS]),
    ]
    if len(reasons) > REASONS:
        said.append(f"  and {len(reasons) - REASONS} further reasons, in the variable `reason`")
    return Answer(result, said)


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


def sweep_show(
    dataset: Annotated[Path, typer.Argument(metavar="STORE.zarr", help="What `sweep run` wrote.")],
    best: Count = 10,
    by: str = "step_time",
    where: list[str] | None = None,
    pareto: bool = False,
    axes: str = AXES,
    no_memory_limit: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
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
      pipejax sweep show results.zarr --best 5 --where systems=h100 --pareto --figure front.png
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
    best_points, front_points = (_as_points(found, places) for places in (first, front))
    reasons = Counter(str(text) for text in found.reasons if text)
    result = {
        "store": dataset,
        "points": len(found.status),
        **{name.replace(" ", "_"): count for name, count in found.counts().items()},
        "selected": int(kept.sum()),
        "by": rank,
        "best": best_points,
        **({"axes": sides, "pareto": front_points} if pareto else {}),
        "reasons": dict(reasons.most_common()),
    }

    def said() -> Iterator[object]:
        yield from map(plain, _counts(result, found.counts(), is_filtered=bool(where)))
        if best_points:
            yield from _table(found, best_points, f"best {len(first)} by {_words(rank)}")
        else:
            yield "no point can be chosen" + " where these conditions hold" * bool(where)
            if np.any(kept & selectable(found, memory_limit=False)):
                yield "  those that need more memory than there is are shown by --no-memory-limit"
        if pareto and front_points:
            title = f"front of {_words(sides[0])} against {_words(sides[1])}"
            yield from _table(found, front_points, title)

    return Answer(result, said(), {"drawn to": figure})


def _as_points(found: "SweepResults", places: "Points") -> list[dict[str, Any]]:
    return [found.point(place) for place in places.tolist()]


def _counts(
    result: Mapping[str, Any], counts: Mapping[str, int], *, is_filtered: bool
) -> Iterator[str]:
    """Say how many points there are, and how many are illegal or not there yet."""
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    chosen = f"; {result['selected']:,} keep the conditions" if is_filtered else ""
    yield f"{result['store']}: {result['points']:,} points: {told}{chosen}"
    if counts["not evaluated"]:
        yield "  the sweep is not complete: go on with it by pipejax sweep run --resume"
    reasons = result["reasons"]
    for reason, count in islice(reasons.items(), REASONS):
        yield f"  illegal, {count:,} points: {reason}"
    if len(reasons) > REASONS:
        yield f"  and {len(reasons) - REASONS} further reasons: --json lists all"


def _table(
    found: "SweepResults", points: Sequence[Mapping[str, Any]], title: str
) -> Iterator[object]:
    """Show points; axes that are the same in all of them are told once, below."""
    is_short = tells_lines()
    rows = points[:LONGEST] if is_short else points
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
    yield grid(columns, title=title)
    if len(points) > LONGEST:
        yield f"and {len(points) - LONGEST:,} more: --json lists all"
    if alike:
        texts = [
            f"{_words(n)} {_cell(found, n, v)} {_scale(found, n)[1]}" for n, v in alike.items()
        ]
        yield plain("all: " + ", ".join(map(str.rstrip, texts)))


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
