"""A sweep on a Dask cluster: workers evaluate blocks, this process writes them.

Only one process writes, so no block is written twice and workers need no shared folder. A block
whose worker is lost is evaluated again by another one.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from distributed import Client, as_completed

from pipejax.base.provenance import provenance
from pipejax.sweep.dataset_layout import get_block
from pipejax.sweep.declaration import Sweep
from pipejax.sweep.evaluation import Values, evaluate_block

AHEAD = 2  # blocks at work or waiting for each thread of the cluster
PATIENCE = 10.0  # seconds to wait for the scheduler to answer


def evaluated_on(address: str, sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Evaluate blocks on the workers of a scheduler, in any order."""
    try:
        client = Client(address, timeout=PATIENCE)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"--scheduler: no scheduler answers at {address!r}: {reason}") from None
    with client:
        yield from _in_any_order(client, sweep, numbers)


def _in_any_order(client: Any, sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Keep the workers busy, with no more blocks in memory than necessary."""
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
    """Evaluate one block on a worker."""
    own = provenance()["code"]
    if own != code:
        raise ValueError(f"a worker has pipejax code {own}, this process has {code}")
    return number, evaluate_block(sweep, get_block(sweep, number))
