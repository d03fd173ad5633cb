"""Pages of the explorer, of one schedule or of several."""

from collections.abc import Sequence

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.files import write_file
from pipejax.cli.options.activations import ActivationOptions, StageSizes, for_each
from pipejax.cli.options.memory_limit import OPTION, MemoryLimit
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.output.files import Output
from pipejax.cli.output.report import waiting


def save_page(
    tables: Sequence[pj.ScheduleTable],
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    out: Output,
    *,
    limit: MemoryLimit | None = None,
    show: Sequence[str] = (),
) -> list["pj.Evaluation"]:
    """Write a page of some tables, in their own slots without times, and return their runs.

    Args:
      tables: the schedules.
      pricing: how they are priced.
      links: what they run under.
      activations: how activations are sized.
      out: where the page goes.
      limit: what a worker may hold; where a model counts bytes the system says it.
      show: what is shown at first: "messages", "memory".

    Returns:
      (tables) runs.
    """
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryShown

    given = Pricing(lambda table: or_slots(None, table)) if pricing is None else pricing
    explored = []
    for table in tables:
        run = pj.evaluate(table, given.of(table), link=links)
        sized = activations.of(table, given.workload, given.microbatches)
        limits = _limits(sized, given, limit, table.num_workers)
        explored.append(Explored(run, MemoryShown(*sized[:4], limits)))
    with waiting("looking for closed forms"):
        text = page(explored, unit="slots" if pricing is None else "s", show=show)
    out.save(lambda draft: write_file(draft, text))
    return [each.run for each in explored]


def _limits(
    sized: StageSizes, pricing: Pricing, limit: MemoryLimit | None, workers: int
) -> Float[NumpyArray, " workers"] | None:
    """What the activations of each worker may take: what is asked, or what the system has left."""
    import numpy as np

    if sized.unit == "activations":
        return None if limit is None else for_each(limit.values, workers, OPTION, "workers")
    if sized.static is None or pricing.system is None:
        return None
    return np.maximum(float(pricing.system.memory_available) - sized.static, 0.0)
