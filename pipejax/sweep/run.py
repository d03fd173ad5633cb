"""Run a sweep: every block that is not whole yet is evaluated, here or elsewhere, and written."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr

from pipejax.sweep.blocks import get_block, num_blocks
from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.evaluation import Values, evaluate_block
from pipejax.sweep.store import Store, check_same, create_store, locked, restore

Results = Callable[[Sweep, list[int]], Iterable[tuple[int, Values]]]


class Progress(NamedTuple):
    """How far a sweep is.

    Attributes:
      points: that are done.
      num_points: of the whole grid.
      is_new: whether they were evaluated now; those of an earlier run are told first, in one.
    """

    points: int
    num_points: int
    is_new: bool


def run_sweep(
    given: Sweep | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    results: Results | None = None,
    report: Callable[[Progress], None] | None = None,
) -> xr.Dataset:
    """Evaluate a grid into a Zarr store.

    Args:
      given: the sweep, its declaration, or the path of a TOML file (`read_sweep`).
      out: path of the store.
      resume: whether to go on with a store that is there; blocks that are whole stay.
      results: evaluates blocks in any order, each once; in this process if None.
      report: called after every block.

    Returns:
      The dataset, opened from the store: values are read when they are used.

    Raises:
      ValueError: if the declaration is wrong, or the store holds another grid or was begun by
        other code.
      FileExistsError: if there is a store and resume is not given.
      OSError: if it cannot be written, or another process writes to it.

    Example:
      >>> import tempfile
      >>> grid = {"schedules": ["gpipe", "1f1b"], "workers": 4, "minibatch": 8,
      ...         "microbatch_size": [1, 3], "models": "tabular-128l", "systems": "fast_nw_slow_cp"}
      >>> data = run_sweep(grid, f"{tempfile.mkdtemp()}/out.zarr")
      >>> data.step_time.sel(schedule="1f1b").values.round(1).tolist()
      [20.3, nan]
      >>> str(data.reason.sel(schedule="1f1b", microbatch_size=3).item())
      'microbatch size 3 does not divide a minibatch of 8'
    """
    sweep = given if isinstance(given, Sweep) else read_sweep(given)
    path = Path(out)
    with opened(sweep, path, resume=resume) as store:
        complete(sweep, store, range(num_blocks(sweep)), results or evaluated_here, report)
    return xr.open_zarr(path, chunks=None)


@contextlib.contextmanager
def opened(sweep: Sweep, path: Path, *, resume: bool) -> Iterator[Store]:
    """Create a store, or go on with one, and hold it."""
    was_there = path.exists()
    if was_there:
        if not resume:
            raise FileExistsError(
                17, "it exists: go on with it by --resume, or give another --out", str(path)
            )
        check_same(sweep, path)
    else:
        create_store(sweep, path)
    with locked(path):
        if was_there:
            restore(sweep, path)
        yield Store(sweep, path)


def complete(
    sweep: Sweep,
    store: Store,
    numbers: Iterable[int],
    results: Results,
    report: Callable[[Progress], None] | None,
) -> None:
    """Evaluate and write those blocks that are not whole."""
    points = {number: get_block(sweep, number).num_points for number in numbers}
    missing = [number for number in points if not store.is_whole(number)]
    done, total = sum(points.values()) - sum(points[n] for n in missing), sum(points.values())
    tell = report or (lambda progress: None)
    tell(Progress(done, total, False))
    for number, values in results(sweep, missing):
        store.write(get_block(sweep, number), values)
        done += points[number]
        tell(Progress(done, total, True))


def evaluated_here(sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Evaluate blocks in this process, one after the other."""
    for number in numbers:
        yield number, evaluate_block(sweep, get_block(sweep, number))
