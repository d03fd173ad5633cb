"""Run a sweep: every incomplete block is evaluated, here or on a cluster, and written."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from pipejax.base.checks import check_types
from pipejax.base.progress import OnProgress, telling
from pipejax.sweep.dataset_layout import get_block, num_blocks
from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.evaluation import Values, evaluate_block
from pipejax.sweep.store import opened


def run_sweep(
    given: Sweep | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    replace: bool = False,
    scheduler: str | None = None,
    on_progress: OnProgress | None = None,
) -> xr.Dataset:
    """Evaluate a grid into a Zarr store.

    Args:
      given: the sweep, its declaration, or the path of a TOML file (`read_sweep`).
      out: path of the store.
      resume: whether to go on with a store that is there; blocks that are whole stay.
      replace: whether to begin anew a store that is there, of this grid or another.
      scheduler: address of a Dask scheduler whose workers evaluate; this process if None.
      on_progress: called with the points that are done, those of the grid and "points", first for
        what an earlier run left, then after every block; a bar in notebooks if None.

    Returns:
      The dataset, opened from the store: values are read when they are used.

    Raises:
      ValueError: if the declaration is wrong, or the store holds another grid or was begun by
        other code.
      FileExistsError: if there is a store and neither resume nor replace is given.
      OSError: if it cannot be written, another process writes to it, or no scheduler answers.

    Example:
      >>> import tempfile
      >>> import pipejax as pj
      >>> grid = {"schedules": ["gpipe", "1f1b"], "workers": 4, "minibatch": 8,
      ...         "microbatch_size": [1, 3], "models": "tabular-128l", "systems": "fast_nw_slow_cp"}
      >>> data = pj.run_sweep(grid, f"{tempfile.mkdtemp()}/out.zarr")
      >>> data.step_time.sel(schedule="1f1b").values.round(1).tolist()
      [20.3, nan]
      >>> str(data.reason.sel(schedule="1f1b", microbatch_size=3).item())
      'microbatch size 3 does not divide a minibatch of 8'
    """
    check_types(
        given=(given, Sweep, Mapping, str, Path), out=(out, str, Path), resume=(resume, bool)
    )
    sweep = given if isinstance(given, Sweep) else read_sweep(given)
    path = Path(out)
    with (
        telling("sweep", on_progress) as tell,
        opened(sweep, path, resume=resume, replace=replace) as store,
    ):
        blocks = [get_block(sweep, number) for number in range(num_blocks(sweep))]
        missing = [block.number for block in blocks if not store.is_whole(block)]
        done = sweep.num_points - sum(blocks[number].num_points for number in missing)
        tell(done, sweep.num_points, "points")
        for number, values in _evaluated(sweep, missing, scheduler):
            store.write(blocks[number], values)
            done += blocks[number].num_points
            tell(done, sweep.num_points, "points")
    return xr.open_zarr(path, chunks=None)


def _evaluated(
    sweep: Sweep, numbers: list[int], scheduler: str | None
) -> Iterator[tuple[int, Values]]:
    """Evaluate blocks in this process, one after the other, or on a cluster in any order."""
    if scheduler is not None:
        from pipejax.sweep.cluster import evaluated_on  # Dask is an extra

        yield from evaluated_on(scheduler, sweep, numbers)
        return
    for number in numbers:
        yield number, evaluate_block(sweep, get_block(sweep, number))
