"""Run a sweep: every incomplete block is evaluated, here or on a Dask cluster, and written.

Only this process writes, so no block is written twice and workers need no shared folder. A block
whose worker is lost is evaluated again by another one.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from pipejax.base.checks import check_types
from pipejax.base.progress import OnProgress, telling
from pipejax.base.provenance import provenance
from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.evaluation import Values, evaluate_block
from pipejax.sweep.store import get_block, num_blocks, opened

AHEAD = 2  # blocks at work or waiting for each thread of the cluster
PATIENCE = 10.0  # seconds to wait for the scheduler to answer


def run_sweep(
    declaration: Sweep | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    replace: bool = False,
    scheduler: str | None = None,
    on_progress: OnProgress | None = None,
) -> xr.Dataset:
    """Evaluate a grid into a Zarr store.

    Args:
      declaration: the sweep, its declaration, or the path of a TOML file (`read_sweep`).
      out: path of the store.
      resume: whether to continue an existing store; complete blocks stay.
      replace: whether to replace an existing store, of this grid or another.
      scheduler: address of a Dask scheduler whose workers evaluate; default: this process.
      on_progress: called with the points done, all points and "points", after every block.

    Returns:
      The dataset, opened lazily from the store.

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
        given=(declaration, Sweep, Mapping, str, Path), out=(out, str, Path), resume=(resume, bool)
    )
    sweep = declaration if isinstance(declaration, Sweep) else read_sweep(declaration)
    path = Path(out)
    with (
        telling("sweep", on_progress) as tell,
        opened(sweep, path, resume=resume, replace=replace) as store,
    ):
        blocks = [get_block(sweep, number) for number in range(num_blocks(sweep))]
        missing = [block.number for block in blocks if not store.is_whole(block)]
        done = sweep.num_points - sum(blocks[number].num_points for number in missing)
        tell(done, sweep.num_points, "points")
        if scheduler is not None:
            results = evaluated_on(scheduler, sweep, missing)
        else:
            results = ((number, evaluate_block(sweep, blocks[number])) for number in missing)
        for number, values in results:
            store.write(blocks[number], values)
            done += blocks[number].num_points
            tell(done, sweep.num_points, "points")
    return xr.open_zarr(path, chunks=None)


def evaluated_on(address: str, sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Evaluate blocks on the workers of a scheduler, in any order."""
    from distributed import Client  # Dask is an extra

    try:
        client = Client(address, timeout=PATIENCE)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"--scheduler: no scheduler answers at {address!r}: {reason}") from None
    with client:
        yield from _in_any_order(client, sweep, numbers)


def _in_any_order(client: Any, sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Keep the workers busy, with no more blocks in memory than necessary."""
    from distributed import as_completed

    code = provenance()["code"]
    waiting = iter(numbers)

    def submit(number: int) -> Any:
        return client.submit(_evaluate, sweep, number, code, pure=False, retries=3)

    threads = max(1, sum(client.nthreads().values()))
    first = itertools.islice(waiting, AHEAD * threads)
    running = as_completed([submit(number) for number in first])
    for future in running:
        yield future.result()
        future.release()
        for number in waiting:
            running.add(submit(number))
            break


def _evaluate(sweep: Sweep, number: int, code: str) -> tuple[int, Values]:
    code_here = provenance()["code"]
    if code_here != code:
        raise ValueError(f"a worker has pipejax code {code_here}, this process has {code}")
    return number, evaluate_block(sweep, get_block(sweep, number))
