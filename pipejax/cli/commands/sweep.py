"""`pipejax sweep run`: a declared grid becomes a dataset."""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.filesize import decimal
from rich.progress import Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.text import Text

from pipejax.base.progress import if_interrupted
from pipejax.cli.options.line import command_line
from pipejax.cli.options.option import options
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import Output, check_modules
from pipejax.cli.output.kinds import GRID
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import plain


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
    from pipejax.base.compiled import seconds_compiling
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
    with if_interrupted(say), progress("sweep", grid.num_points, *columns, transient=False) as bar:

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
    spent = time.perf_counter() - began, seconds_compiling(began)
    return _answer(grid, path, done[0], *spent)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("-" if speed is None else f"{speed:,.0f} points/s")


def _answer(grid: Any, out: Path, from_before: int, seconds: float, compiling: float) -> Answer:
    """Say what is in the store, and how fast it came: what XLA compiles it compiles once."""
    import xarray as xr

    from pipejax.sweep import STATUS

    with xr.open_zarr(out, chunks=None) as data:
        counted = np.bincount(data.status.values.ravel(), minlength=len(STATUS))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        reasons = sorted({str(text) for text in np.ravel(data.reason.values)} - {""})
    new = grid.num_points - from_before
    rate = new / seconds
    compiling = min(compiling, seconds)
    working = seconds - compiling
    result = {
        "out": out,
        "points": grid.num_points,
        "dimensions": grid.sizes,
        **{name.replace(" ", "_"): int(n) for name, n in zip(STATUS, counted, strict=True)},
        "evaluated_now": new,
        "seconds": seconds,
        "compile_seconds": compiling,
        "points_per_second": rate,
        "bytes": size,
        "reasons": reasons,
    }
    counts = zip(STATUS, counted, strict=True)
    parts = ", ".join(f"{count:,} {name}" for name, count in counts if count)
    sizes = ", ".join(f"{name} {size}" for name, size in grid.sizes.items())
    speed = f"evaluated {new:,} in {seconds:.3g} s: {rate:,.0f} points/s"
    if compiling > 0 and new:
        speed = f"evaluated {new:,} in {seconds:.3g} s, {compiling:.3g} s of it compiling"
        speed += f"; then {new / max(working, 1e-9):,.0f} points/s"
    view = [
        plain(f"{grid.num_points:,} points in {out} ({decimal(size)}): {parts}"),
        f"grid: {sizes}",
        speed if new else "nothing was left to evaluate",
        plain(f"next: {command_line('sweep show', {'files': [str(out)]})}"),
    ]
    details = {"reasons of illegal points": [*map(plain, reasons)]} if reasons else {}
    return Answer(result, view, details=details)
