"""Pages of the explorer, of one schedule or of several."""

from collections.abc import Mapping, Sequence

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.files import write_file
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit, StageSizes
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.options.tables import naming
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
    show: Mapping[str, bool] | None = None,
    view: tuple[float, float] | None = None,
) -> list["pj.Evaluation"]:
    """Write a page of some tables, in their own slots without times, and return their runs.

    Args:
      tables: the schedules.
      pricing: how they are priced.
      links: what they run under.
      activations: how activations are sized.
      out: where the page goes.
      limit: what a worker may hold; if None, with a model what its system has.
      show: what is shown at first, or not, as for `page`.
      view: part of the time axis that is shown at first.

    Returns:
      (tables) runs.
    """
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryShown

    given = Pricing(lambda table: or_slots(None, table)) if pricing is None else pricing
    explored = []
    for table in tables:
        with naming(table):
            run = pj.evaluate(table, given.of(table), link=links)
        sized = activations.of(table, given.workload, given.microbatches)
        limits = _limits(table, sized, given, activations, limit)
        explored.append(Explored(run, MemoryShown(*sized[:4], limits)))
    with waiting("looking for closed forms"):
        text = page(explored, unit="slots" if pricing is None else "s", show=show, view=view)
    out.save(lambda draft: write_file(draft, text))
    return [each.run for each in explored]


def _limits(
    table: pj.ScheduleTable,
    sized: StageSizes,
    pricing: Pricing,
    activations: ActivationOptions,
    limit: MemoryLimit | None,
) -> Float[NumpyArray, " workers"] | None:
    """What the activations of each worker may take: what is asked, or what the system has left."""
    if limit is not None:
        return limit.levels(table, sized, activations, pricing.workload)
    if sized.static is None or pricing.system is None:
        return None
    return (float(pricing.system.memory_available) - sized.static).clip(min=0.0)
