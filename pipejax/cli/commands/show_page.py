"""The page that `pipejax show` writes: what is shown, and what can be chosen there."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.files import write_file
from pipejax.cli.options.memory import ActivationOptions, MemoryLimit, StageSizes
from pipejax.cli.options.pricing import Pricing
from pipejax.cli.options.pricing_steps import GivenTimes, TableSlots
from pipejax.cli.options.tables import TableOptions
from pipejax.cli.output.files import Output
from pipejax.cli.output.progress import waiting

if TYPE_CHECKING:
    from pipejax.cli.commands.show import Scene
    from pipejax.plots.explorer.payload import Carried, StepView


NO_TIMES = Pricing(TableSlots())
# what a page carries to choose from
WORKERS = (2, 4, 8, 16)
MICROBATCHES = (4, 8, 16, 32)
STAGES_PER_WORKER = (2, 4)


def save_page(
    scene: "Scene",
    pricing: Pricing | None,
    activations: ActivationOptions,
    limit: MemoryLimit | None,
    memory: bool,
    choice: "Carried",
    out: Output,
) -> None:
    """Write a page; its memory limit, if none is given, is with a model what its system has."""
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryView

    given = pricing or NO_TIMES
    explored = []
    for (name, run), sizes in zip(scene.runs.items(), scene.sizes, strict=True):
        limits = _limits(run.table, sizes, given, activations, limit)
        held = MemoryView(*sizes[:5], limits, sizes.static)
        explored.append(Explored(run, held, _step(run, given), name))
    wanted = {"messages": scene.messages, "memory": memory}
    show = {name: True for name, is_wanted in wanted.items() if is_wanted}
    show |= {"critical": False} if scene.picture.no_critical else {}
    unit = "slots" if pricing is None else "s"
    with waiting("looking for closed forms"):
        title = scene.picture.title or ""
        text = page(explored, unit=unit, show=show, view=scene.window, title=title, carried=choice)
    out.save(lambda draft: write_file(draft, text))


def carried(
    options: TableOptions,
    pricing: Pricing | None,
    tables: Sequence[pj.ScheduleTable],
    choose: bool,
) -> "Carried":
    """What a page can show beside the tables that it is written with."""
    from pipejax.plots.explorer.library import OfferedTimes
    from pipejax.plots.explorer.payload import NOTHING, Carried

    source = None if pricing is None or pricing.steps else pricing.source
    if (
        not isinstance(source, GivenTimes)
        or len(source.messages) > 1
        or "pair" in source.times  # a page prices the pairs of other tables by their two ops
    ):
        if choose:
            raise ValueError(
                "--choose needs times that hold for any schedule: give --worker-times or "
                "--stage-times without pair=, and nothing that changes them"
            )
        return NOTHING
    times = OfferedTimes(source.of_any(tables), source.per_worker)
    return Carried(times, _every_table(options, Pricing(source)) if choose else {})


def _every_table(
    options: TableOptions, pricing: Pricing
) -> "Mapping[str, Sequence[pj.ScheduleTable]]":
    """Build what is built in for all sizes of a page; what does not exist for some is left out."""
    from pipejax.schedules import REGISTRY

    found: dict[str, list[pj.ScheduleTable]] = {}
    with waiting("building schedules to choose from"):
        for name, workers, microbatches in itertools.product(REGISTRY, WORKERS, MICROBATCHES):
            takes = REGISTRY[name].options
            if "offload" in takes:  # no page lowers offloads
                continue
            for count in STAGES_PER_WORKER if "stages_per_worker" in takes else (0,):
                own = options.of(name)
                if count:
                    own = own._replace(options={**own.options, "stages_per_worker": count})
                with contextlib.suppress(MismatchError):
                    table = own.build(name, workers, microbatches, pricing)
                    found.setdefault(name, []).append(table)
    return found


def _step(run: "pj.Evaluation", pricing: Pricing) -> "StepView | None":
    """What a step is worth, where a model gives its costs."""
    from pipejax.plots.explorer.payload import StepView

    if pricing.workload is None or pricing.system is None:
        return None
    report = pj.step_report(run, pricing.workload, pricing.system)
    return StepView(report.tokens_per_second * run.step_time, report.mfu * run.step_time)


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
