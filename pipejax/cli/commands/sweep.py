"""`pipejax sweep`: a declared grid into a labelled dataset."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from pipejax.cli.options.groups import JsonFlag
from pipejax.cli.output.numbers import console, print_json


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Declaration of the grid.")],
    out: Annotated[Path, typer.Option(help="Zarr store to write.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a store that is there.")
    ] = False,
    scheduler: Annotated[
        str | None, typer.Option(help="Dask scheduler whose workers evaluate, as tcp://host:8786.")
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="First of several JAX processes, as host:port.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="How many JAX processes there are.", min=1)
    ] = None,
    process: Annotated[
        int | None, typer.Option(help="Which of them this one is, from 0.", min=0)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Evaluate a grid of schedules, workloads and systems into a Zarr store, block by block.

    Killed at any moment and resumed, it ends with the same bytes as without a break.
    """
    run = _runner(scheduler, coordinator, processes, process)
    try:
        from pipejax.sweep import read_sweep  # xarray and zarr are an extra
    except ModuleNotFoundError as error:
        raise ValueError(f"sweeps need {error.name}: pip install 'pipejax[sweeps]'") from None
    grid = read_sweep(file)
    told: dict[str, Any] = {"from_before": 0, "new": 0}
    began = time.perf_counter()
    try:
        with _bar(grid.num_points) as move:

            def report(progress: Any) -> None:
                key = "new" if progress.is_new else "from_before"
                told[key] = progress.points - (told["from_before"] if progress.is_new else 0)
                move(progress.points, progress.num_points)

            run(grid, out, resume, report)
    except KeyboardInterrupt:
        raise ValueError(
            f"interrupted after {told['new']} points: {out} keeps them, go on with --resume"
        ) from None
    _print(grid, out, told, time.perf_counter() - began, json)


def _runner(
    scheduler: str | None, coordinator: str | None, processes: int | None, process: int | None
) -> Callable[[Any, Path, bool, Any], None]:
    """Choose who evaluates: this process, a cluster, or several processes."""
    together = (coordinator, processes, process)
    if scheduler is not None and together != (None, None, None):
        raise ValueError("--scheduler does not go with --coordinator, --processes and --process")
    if any(given is None for given in together) and together != (None, None, None):
        raise ValueError("--coordinator, --processes and --process go together: give all three")
    if process is not None and processes is not None and process >= processes:
        raise ValueError(f"--process must be below --processes {processes}, got {process}")

    def here(grid: Any, out: Path, resume: bool, report: Any) -> None:
        from pipejax.sweep import run_sweep

        run_sweep(grid, out, resume=resume, report=report, results=_on_cluster(scheduler)).close()

    def one_of_many(grid: Any, out: Path, resume: bool, report: Any) -> None:
        import jax

        from pipejax.sweep.processes import run_share

        with _nothing_on_stdout():  # the processes' connections announce themselves there
            jax.distributed.initialize(coordinator, processes, process)
            run_share(grid, out, resume=resume, report=report)

    return here if coordinator is None else one_of_many


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Send to stderr what libraries print to stdout."""
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield
    finally:
        os.dup2(kept, sys.stdout.fileno())
        os.close(kept)


def _on_cluster(scheduler: str | None) -> Any:
    if scheduler is None:
        return None
    try:
        from pipejax.sweep.cluster import evaluated_on  # Dask is an extra
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--scheduler {scheduler}: it needs {error.name}: pip install 'pipejax[cluster]'"
        ) from None
    return evaluated_on(scheduler)


class _Rate(ProgressColumn):
    """Points per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("-" if speed is None else f"{speed:,.0f} points/s")


@contextmanager
def _bar(num_points: int) -> Iterator[Callable[[int, int], None]]:
    """Show progress with rate and time left on stderr, where a person sees it."""
    columns = (
        TextColumn("sweep"),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, disable=not shown.is_terminal) as progress:
        task = progress.add_task("sweep", total=num_points)

        def move(points: int, total: int) -> None:
            progress.update(task, completed=points, total=total)

        yield move


def _print(grid: Any, out: Path, told: dict[str, int], seconds: float, json: bool) -> None:
    import xarray as xr

    from pipejax.sweep import STATUS

    with xr.open_zarr(out, chunks=None) as data:
        counted = np.bincount(data.status.values.ravel(), minlength=len(STATUS))
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        reasons = sorted({str(text) for text in np.ravel(data.reason.values)} - {""})
    rate = told["new"] / seconds
    result = {
        "out": str(out),
        "points": grid.num_points,
        "dimensions": grid.sizes,
        **{name.replace(" ", "_"): int(n) for name, n in zip(STATUS, counted, strict=True)},
        "evaluated_now": told["new"],
        "seconds": seconds,
        "points_per_second": rate,
        "bytes": size,
        "reasons": reasons,
    }
    if json:
        print_json(result)
        return
    shown = console()
    sizes = ", ".join(f"{name} {size}" for name, size in grid.sizes.items())
    shown.print(
        f"{grid.num_points:,} points ({sizes}) in {out}, {decimal(size)}",
        markup=False,
        soft_wrap=True,
    )
    shown.print(
        f"evaluated {told['new']:,} in {seconds:.1f} s: {rate:,.0f} points/s"
        + (f"; {told['from_before']:,} were there" if told["from_before"] else "")
    )
    table = Table("status", "points", show_header=False, box=None)
    for name, count in zip(STATUS, counted, strict=True):
        if count:
            table.add_row(name, f"{count:,}")
    shown.print(table)
    for reason in reasons[:5]:
        shown.print(f"  illegal: {reason}", markup=False, soft_wrap=True)
    if len(reasons) > 5:
        shown.print(f"  and {len(reasons) - 5} further reasons, in the variable `reason`")
