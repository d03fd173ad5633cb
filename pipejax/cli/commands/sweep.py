"""`pipejax sweep run|show`: evaluate a declared grid into a dataset, and query it."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.filesize import decimal
from rich.markup import escape

from pipejax.base.checks import resolve_choice
from pipejax.base.printed import cell, display_scale, head, named, span, words
from pipejax.base.progress import if_interrupted
from pipejax.base.ties import TIE
from pipejax.cli.options.line import command_line
from pipejax.cli.options.option import options, parse_percent
from pipejax.cli.output.files import (
    DRAWING,
    GRID,
    NO_OUTPUT,
    POINTS,
    SWEEPS,
    Output,
    check_modules,
    drawing,
)
from pipejax.cli.output.report import Answer, folded, has_details, has_lines, plain, progress
from pipejax.cli.output.tables import grid

if TYPE_CHECKING:
    from pipejax.sweep.results import DistinctPoint, Knee, Points, Regions, SweepResults


@options
def sweep_run(
    file: Annotated[Path, Parameter(name="SWEEP.toml", help="Declaration of the grid.")],
    /,
    *,
    out: Annotated[Output, GRID],
    resume: bool = False,
    scheduler: str | None = None,
) -> Answer:
    """Evaluate a grid of schedules, workloads and systems into a Zarr store, block by block.

    Killed at any moment and resumed, it ends with the same bytes as without a break.
    """
    if resume and out.force:
        raise ValueError("--resume continues a store, --force begins it anew: choose one")
    if scheduler is not None:
        check_modules(f"--scheduler {scheduler}: it needs", ("distributed",), "cluster")
    from pipejax.base.compiled import seconds_compiling
    from pipejax.sweep import read_sweep, run_sweep

    sweep = read_sweep(file)
    path = out.path or Path()  # it has to be given
    done: list[int] = []  # points of an earlier run, then those after each block
    start = time.perf_counter()

    def resume_hint() -> str | None:
        if not done:
            return None
        return f"after {done[-1] - done[0]} points: {path} keeps them, go on with --resume"

    with if_interrupted(resume_hint), progress("sweep", sweep.num_points) as show:

        def tell(points: float, total: float | None, text: str) -> None:
            done.append(int(points))
            show(points, total, text)

        run_sweep(
            sweep, path, resume=resume, replace=out.force, scheduler=scheduler, on_progress=tell
        ).close()
    out.is_saved = True
    return _run_answer(sweep, path, done[0], time.perf_counter() - start, seconds_compiling(start))


def _run_answer(
    sweep: Any, out: Path, earlier_points: int, seconds: float, compile_seconds: float
) -> Answer:
    """Answer with the number of points in a store by status, and the speed of this run."""
    import xarray as xr

    from pipejax.sweep import STATUS

    with xr.open_zarr(out, chunks=None) as data:
        status_counts = np.bincount(data.status.values.ravel(), minlength=len(STATUS)).tolist()
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        reasons = sorted({str(text) for text in np.ravel(data.reason.values)} - {""})
    counts = dict(zip(STATUS, status_counts, strict=True))
    new_points = sweep.num_points - earlier_points
    compile_seconds = min(compile_seconds, seconds)
    result = {
        "points": sweep.num_points,
        "dimensions": sweep.sizes,
        **{name.replace(" ", "_"): count for name, count in counts.items()},
        "evaluated_now": new_points,
        "seconds": seconds,
        "compile_seconds": compile_seconds,
        "points_per_second": new_points / seconds,
        "bytes": size,
        "reasons": reasons,
    }
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    sizes = " x ".join(f"{length} {name}" for name, length in sweep.sizes.items())
    speed = f"{new_points:,} points evaluated in {seconds:.3g} s"
    if compile_seconds > 0:
        speed += f", of which {compile_seconds:.3g} s were spent to compile"
    view = [
        plain(f"{sweep.num_points:,} points in {out} ({decimal(size)}): {parts}"),
        f"grid: {sizes}",
        speed,
        plain(f"next: {command_line('sweep show', {'files': [str(out)]})}"),
    ]
    if reasons:
        view.insert(1, plain(f"illegal: {reasons[0]}"))
    details = {"reasons of illegal points": [*map(plain, reasons)]} if reasons else {}
    return Answer(result, view, details=details)


MAX_ROWS, FIRST_ROWS = 50, 5  # rows of a table, and on the first screen
AXES = "step_time,memory_bytes"
WORK_AXES = ("minibatch", "data_parallel", "model")  # on which the tokens of a step may depend
OTHER_WORK = (
    "these steps differ in their work: add tokens_per_second to the outputs of the sweep to rank "
    "points by it"
)


@options
def sweep_show(
    dataset: Annotated[Path, Parameter(name="STORE.zarr", help="What `sweep run` wrote.")],
    /,
    *,
    best: int = 10,
    by: str | None = None,
    where: list[str] | None = None,
    pareto: bool = False,
    axes: str = AXES,
    knee: str | None = None,
    within: str = "1%",
    map: str | None = None,
    no_memory_limit: bool = False,
    out: Annotated[Output, POINTS] = NO_OUTPUT,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Show the best points and schedules of a sweep, its Pareto front, and knees, where gains end.

    Points that differ only by rounding share a row, which names the axes that do not matter there.
    """
    check_modules(f"{dataset}: datasets need", SWEEPS, "sweeps")
    from pipejax.analysis.step.outputs import TOKENS
    from pipejax.sweep import results as stores

    results = stores.read_results(dataset)
    sides = _pair(axes, results.numbers(), "--axes", AXES)
    percent = parse_percent(within, "--within")
    # masks of points: those that --where keeps, and of these the ones that may be the best
    selected = results.where(where or ())
    candidates = selected & stores.selectable(results, memory_limit=not no_memory_limit)
    default = results.default_measure(candidates)
    rank = default if by is None else resolve_choice(by.strip(), results.numbers(), "--by")
    first = stores.distinct_best(results, candidates, rank, best)
    front = results.front(candidates, sides)
    front = front if pareto else front[:0]
    fronts = stores.distinct_front(results, candidates, sides, front)
    near = {text: value for text in where or () if (value := results.nearest(text)) is not None}
    problem = [] if first else [*_empty_reason(results, selected, near, is_filtered=bool(where))]
    if problem and figure.path is not None:
        raise ValueError(f"{figure.option} {figure.path}: {'; '.join(problem)}")
    more_answers: dict[str, Any] = {}
    view: list[object] = []
    details: dict[str, Iterable[object]] = {}
    if knee is not None:
        axis = resolve_choice(knee, [n for n in results.numbers() if n in results.axes], "--knee")
        knees = [*stores.knees(results, candidates, rank, axis, percent / 100)]
        knee_rows = [row._asdict() for row in knees]
        more_answers["knee"] = {"axis": axis, "within": percent / 100, "rows": knee_rows}
        view += [knee_line(results, rank, axis, knee, percent) for knee in knees[:1]]
        details["knee by axis"] = knee_table(results, rank, axis, knees)
    if map is not None:
        across, up = _pair(map, results.axes, "--map", "network.bandwidth,microbatch_size")
        regions = stores.regions(results, candidates, rank, across, up)
        more_answers["map"] = map_json(results, regions, across, up)
        view += map_lines(results, regions, across, up)
    if figure.path is not None and map is not None:
        draw_map(results, rank, regions, across, up, figure)
    elif figure.path is not None and knee is not None:
        draw_knees(results, candidates, rank, knees, axis, percent, figure)
    elif figure.path is not None:
        draw_front(results, candidates, sides, front, fronts, first[0].place, figure)
    out.save(lambda draft: results.frame(np.flatnonzero(selected)).to_parquet(draft, index=False))
    front_json = {"axes": sides, "pareto": _rows(results, fronts)} if pareto else {}
    nearest = {"nearest": {text: value for text, (_, value, _) in near.items()}} if near else {}
    answers = {"best": _rows(results, first), **front_json, **more_answers, **nearest}
    result = _as_json(dataset, results, selected, rank, answers)
    _add_points(view, details, results, first, fronts, (rank, int(candidates.sum())), sides)
    has_other_work = any(len(results.axes.get(name, ())) > 1 for name in WORK_AXES)
    if by is None and TOKENS not in results.measures and has_other_work:
        view.append(OTHER_WORK)
    view = [*problem, *view, *_counts(result, results.counts(), is_filtered=bool(where))]
    reasons = [f"illegal, {n:,} points: {text}" for text, n in result["reasons"].items()]
    if reasons:
        view.append(reasons[0])
        details["reasons of illegal points"] = [plain(text) for text in reasons[:MAX_ROWS]]
    lines = (plain(part) if isinstance(part, str) else part for part in view)
    return Answer(result, lines, details=details)


def _as_json(
    dataset: Path, results: "SweepResults", selected: Any, rank: str, answers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the object of `--json`; `answers` are its parts that options ask for."""
    return {
        "store": dataset,
        "points": len(results.status),
        **{name.replace(" ", "_"): count for name, count in results.counts().items()},
        "selected": int(selected.sum()),
        "by": rank,
        **answers,
        "reasons": dict(Counter(str(text) for text in results.reasons if text).most_common()),
    }


def _add_points(
    view: list[object],
    details: dict[str, Iterable[object]],
    results: "SweepResults",
    first: "Sequence[DistinctPoint]",
    fronts: "Sequence[DistinctPoint]",
    ranking: tuple[str, int],
    sides: list[str],
) -> None:
    """Add the Pareto front and the best points of a `ranking` to the view and the details."""
    if fronts:
        view.append(f"front of {words(sides[0])} against {words(sides[1])}: {len(fronts)} points")
        view += () if has_details() else _table(results, fronts, FIRST_ROWS)
        details["whole front"] = _table(results, fronts)
    if first:
        is_alone, (rank, count) = not view, ranking
        view.append(f"best of {count:,} points by {words(rank)}: {_point(results, first[0])}")
        view += _table(results, first, FIRST_ROWS) if is_alone and not has_details() else ()
        details[f"best {len(first)} points"] = _table(results, first)


def _point(results: "SweepResults", point: "DistinctPoint") -> str:
    """Return a point in words: its measure first, then the axes that matter."""
    row = {name: value for name, value in results.point(point.place).items() if name != "fits"}
    names = [n for n in row if n not in results.axes and n != "bubble_ratio"]
    names += [n for n, labels in results.axes.items() if len(labels) > 1 and n not in point.same]
    return ", ".join(named(results.units, name, row[name]) for name in names)


def _empty_reason(
    results: "SweepResults",
    selected: Any,
    near: Mapping[str, tuple[str, float, str]],
    *,
    is_filtered: bool,
) -> Iterator[str]:
    """Yield, line by line, why no point can be chosen, and the option that helps."""
    # `near` has, by the text of a condition that holds for no point, its axis and the axis value
    # nearest to it. `selected` is the mask of the points that all conditions keep.
    from pipejax.sweep.results import selectable

    for text, (axis, value, _) in near.items():
        nearest = named(results.units, axis, value)
        yield f"{text} holds for no point: the nearest is {nearest}"
    yield "no point can be chosen" + (" where these conditions hold" if is_filtered else "")
    if np.any(selected & selectable(results, memory_limit=False)):
        yield "--no-memory-limit shows points that need more memory than the machine has"


def _rows(results: "SweepResults", points: "Sequence[DistinctPoint]") -> list[dict[str, Any]]:
    """Return points for `--json`, with the values of axes that do not matter there."""
    return [results.point(p.place) | ({"same": p.same} if p.same else {}) for p in points]


def _pair(text: str, valid_names: Any, option: str, example: str) -> list[str]:
    """Read two different names."""
    names = [str(resolve_choice(name.strip(), valid_names, option)) for name in text.split(",")]
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(f"{option} must be two different names, as {example}, got {text!r}")
    return names


def _counts(
    result: Mapping[str, Any], counts: Mapping[str, int], *, is_filtered: bool
) -> Iterator[str]:
    """Yield the number of points by status, and how to complete the sweep."""
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    selected = f"; {result['selected']:,} keep the conditions" if is_filtered else ""
    yield f"{result['store']}: {result['points']:,} points: {parts}{selected}"
    if counts["not evaluated"]:
        yield "the sweep is not complete: go on with it by pipejax sweep run --resume"


def _table(
    results: "SweepResults", points: "Sequence[DistinctPoint]", max_rows: int = MAX_ROWS
) -> Iterator[object]:
    """Show points by column; `folded` puts equal columns below, `fits` shows if one does not."""
    listed = points[:max_rows] if has_lines() else points
    rows = [results.point(point.place) for point in listed]
    columns: list[tuple[str, list[str]]] = []
    for name in [name for name in rows[0] if name != "fits"]:
        scale = display_scale(results.units, name, [row[name] for row in rows])
        cells = [_cell(results, name, point, scale) for point in listed]
        columns.append((head(name, scale), cells))
    if not has_lines() or not all(row["fits"] for row in rows):
        columns.append(("fits", ["yes" if row["fits"] else "[red]no" for row in rows]))
    yield folded(grid(columns))
    if len(points) > len(listed):
        yield f"and {len(points) - len(listed):,} more"


def _cell(
    results: "SweepResults", name: str, point: "DistinctPoint", scale: tuple[float, str]
) -> str:
    """Return a point's value, or the range of its values on an axis that does not matter there."""
    if name in point.same:
        return span(name, point.same[name], scale, len(results.axes[name]))
    return cell(name, results.point(point.place)[name], scale)


HEIGHT = 3.4  # inches, the legend above included
LONG_NAMES = {"memory_bytes": "most memory of an accelerator"}  # of measures, in a picture


def knee_line(results: "SweepResults", rank: str, axis: str, knee: "Knee", within: float) -> str:
    """Write a knee as a sentence: axis values whose cost is at most `within` % above the best."""
    scale = display_scale(results.units, axis, results.axes[axis].tolist())
    # costs of quantities that are better if larger are negative
    cost_scale = display_scale(results.units, rank, [abs(knee.best)])
    ends = (cell(rank, abs(value), cost_scale) for value in (knee.cost, knee.best))
    cost, best = (f"{end} {cost_scale[1]}".rstrip() for end in ends)
    values = f"{words(axis)} {_between(results, axis, knee, scale)} {scale[1]}".rstrip()
    return f"{values} keeps {words(rank)} within {within:g} % of its best: {cost} instead of {best}"


def _between(results: "SweepResults", axis: str, knee: "Knee", scale: tuple[float, str]) -> str:
    """Write the range of axis values of a knee: "2 to 8", or ">= 2" up to the end of the axis."""
    low, high = (cell(axis, float(end), scale) for end in (knee.low, knee.high))
    values = results.axes[axis].astype(float)
    if knee.low == values.min():
        return "any" if knee.high == values.max() else f"<= {high}"
    return f">= {low}" if knee.high == values.max() else f"{low} to {high}"


def knee_table(
    results: "SweepResults", rank: str, axis: str, knees: "Sequence[Knee]"
) -> Iterator[object]:
    """Yield a table of knees: axis values whose cost is at most the share above the best."""
    # The first row has all other axes at their best, a further row one value of another axis.
    if not knees:
        return
    scale = display_scale(results.units, axis, results.axes[axis].astype(float).tolist())
    cost_scale = display_scale(results.units, rank, [abs(knee.best) for knee in knees])
    labels = (
        "all others at their best" if k.axis is None else named(results.units, k.axis, k.label)
        for k in knees
    )
    costs = [cell(rank, abs(knee.cost), cost_scale) for knee in knees]
    yield grid(
        [
            ("with", labels),
            (head(axis, scale), [_between(results, axis, k, scale) for k in knees]),
            (head(f"{rank} at the knee", cost_scale), costs),
            ("at best", [cell(rank, abs(knee.best), cost_scale) for knee in knees]),
        ]
    )


def map_json(results: "SweepResults", regions: "Regions", across: str, up: str) -> dict[str, Any]:
    """Return the map for `--json`: rows of schedules, and of the least values, from the bottom."""
    names = [*regions.names, None]  # code -1: no point can be chosen
    costs = np.abs(regions.costs)
    return {
        "axes": [across, up],
        **{axis: results.axes[axis].tolist() for axis in (across, up)},
        "schedule": [[names[code] for code in row] for row in regions.codes.tolist()],
        "value": [[None if np.isnan(v) else v for v in row] for row in costs.tolist()],
    }


def map_lines(
    results: "SweepResults", regions: "Regions", across: str, up: str
) -> Iterator[object]:
    """Yield the share of the map in which each schedule is best, and the map as a table."""
    if not regions.names:
        return
    names = [*regions.names, "-"]  # the last one is for code -1: no point can be chosen
    shares = (f"{name} on {np.mean(regions.codes == k):.0%}" for k, name in enumerate(names[:-1]))
    yield plain(f"best schedule, by share of the map: {', '.join(shares)}")
    heads, cells = [], []
    for axis in (across, up):
        values = results.axes[axis].tolist()
        scale = display_scale(results.units, axis, values)
        heads.append(head(axis, scale))
        cells.append([cell(axis, value, scale) for value in values])
    columns = [(heads[1], cells[1])]
    for value, codes in zip(cells[0], regions.codes.T, strict=True):
        columns.append((value, [names[code] for code in codes]))
    title = f"best schedule by {heads[0]} (columns) and {heads[1]} (rows)"
    yield grid(columns, title=escape(title))


def draw_map(
    results: "SweepResults", rank: str, regions: "Regions", across: str, up: str, figure: Output
) -> None:
    """Draw the best schedule over two axes, with lines of equal costs."""
    from pipejax.plots.heat_maps import Height, Side, draw_regions

    sides = []
    for axis in (across, up):
        values = results.axes[axis]
        scale = display_scale(results.units, axis, values.tolist())
        is_numeric = values.dtype.kind in "iuf"
        ticks = values / scale[0] if is_numeric else [str(value) for value in values]
        sides.append(Side(head(axis, scale), ticks))
    costs = regions.costs
    cost_scale = display_scale(results.units, rank, costs[np.isfinite(costs)].tolist())
    height = Height(head(rank, cost_scale), np.abs(costs) / cost_scale[0])
    with drawing(figure, 1, HEIGHT) as (_, axes):
        draw_regions(axes, sides[0], sides[1], regions.codes, regions.names, height)


def draw_knees(
    results: "SweepResults",
    candidates: Any,
    rank: str,
    knees: "Sequence[Knee]",
    axis: str,
    within: float,
    figure: Output,
) -> None:
    """Draw the least cost along an axis for each schedule, all other axes at their best."""
    from pipejax.plots.fronts import Shown, draw_knee
    from pipejax.sweep.results import least_along

    has_schedules = len(results.axes.get("schedule", ())) > 1
    curves = least_along(results, candidates, rank, axis, "schedule" if has_schedules else None)
    scale = display_scale(results.units, axis, results.axes[axis].tolist())
    cost_scale = display_scale(results.units, rank, [abs(knees[0].best)])
    named_curves = {
        str(name or "best"): np.abs(curve) / cost_scale[0]
        for name, curve in curves.items()
        if np.isfinite(curve).any()
    }
    along = Shown(head(axis, scale), results.axes[axis] / scale[0])
    near = knees[0].low / scale[0], knees[0].high / scale[0]
    with drawing(figure, 1, HEIGHT) as (_, axes):
        text = f"within {within:g} % of the best"
        draw_knee(axes, along, head(rank, cost_scale), named_curves, near, text)


def draw_front(
    results: "SweepResults",
    candidates: Any,
    names: list[str],
    front: "Points",
    fronts: "Sequence[DistinctPoint]",
    best: int,
    figure: Output,
) -> None:
    """Draw points by their two objectives and by schedule, with a ring around the best."""
    from pipejax.analysis.step.outputs import MORE_IS_BETTER
    from pipejax.plots.fronts import Shown, draw_results

    groups = {"points": candidates}
    if "schedule" in results.axes:
        schedules = results.column("schedule")
        names_of_schedules = results.axes["schedule"].tolist()
        members = {name: candidates & (schedules == name) for name in names_of_schedules}
        groups = {name: points for name, points in members.items() if np.any(points)}
    objectives = []
    for name in names:
        values = np.asarray(results.column(name), float)
        scale = display_scale(results.units, name, values[candidates].tolist())
        label = head(name, scale).replace(words(name), LONG_NAMES.get(name, words(name)))
        objectives.append(Shown(label, values / scale[0], name in MORE_IS_BETTER))
    with drawing(figure, 1, HEIGHT) as (_, axes):
        point_names = _front_names(results, names, front, fronts)
        draw_results(axes, objectives, groups, front, np.array([best]), point_names)


def _front_names(
    results: "SweepResults", names: list[str], front: "Points", points: "Sequence[DistinctPoint]"
) -> tuple[str, list[str]]:
    """Name the points of a front of these objectives by the axes in which they differ."""
    # Returns the heads of these axes and a name for each point of the front. `front` are positions
    # in the flattened results; points of `points` with the same objectives share a name, "a = b".
    heads, columns = [], []
    for axis, labels in results.axes.items():
        scale = display_scale(results.units, axis, labels.tolist())
        cells = [_cell(results, axis, point, scale) for point in points]
        if axis not in names and len({*cells}) > 1:
            heads.append(head(axis, scale))
            columns.append(cells)
    texts = ["; ".join(cells) for cells in zip(*columns, strict=True)]
    if not texts:
        return "", []
    objectives = np.stack([np.asarray(results.column(name), float) for name in names])
    point_objectives = objectives[:, [point.place for point in points]]
    joined = []
    for objective in objectives[:, front].T:
        is_tied = np.isclose(point_objectives, objective[:, None], rtol=TIE, atol=0).all(axis=0)
        joined.append(" = ".join(itertools.compress(texts, is_tied)))
    return "; ".join(heads), joined
