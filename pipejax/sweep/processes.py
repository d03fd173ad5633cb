"""A sweep in several JAX processes, each on its own machine with a shared folder.

Each process evaluates and writes every n-th block: no two write the same file. The first one
makes the store and holds it until all are done.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from pipejax.sweep.blocks import num_blocks
from pipejax.sweep.declaration import Sweep
from pipejax.sweep.run import Progress, complete, evaluated_here, opened
from pipejax.sweep.store import Store, check_same


def run_share(
    sweep: Sweep,
    path: Path,
    *,
    resume: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> None:
    """Evaluate this process's share of a sweep; all processes call it alike.

    `jax.distributed.initialize` comes first. Every process waits for the last one.
    """
    mine = range(jax.process_index(), num_blocks(sweep), jax.process_count())
    with _opened_together(sweep, path, resume=resume) as store:
        complete(sweep, store, mine, evaluated_here, report)
        _meet("done")


@contextlib.contextmanager
def _opened_together(sweep: Sweep, path: Path, *, resume: bool) -> Iterator[Store]:
    """Let the first process make the store and hold it."""
    if jax.process_index() == 0:
        with opened(sweep, path, resume=resume) as store:
            _meet("made")
            yield store
    else:
        _meet("made")
        check_same(sweep, path)
        yield Store(sweep, path)


def _meet(name: str) -> None:
    multihost_utils.sync_global_devices(f"pipejax sweep {name}")
