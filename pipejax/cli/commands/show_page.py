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
from pipejax.cli.options.run import SizedRunOptions
from pipejax.cli.options.scenario import parse_scenario
from pipejax.cli.options.tables import SizedSchedule, TableOptions
from pipejax.cli.output.files import Output
from pipejax.cli.output.progress import waiting

if TYPE_CHECKING:
    from pipejax.cli.commands.show import Scene
    from pipejax.plots.explorer.payload import Carried, StepView


# what a page carries to choose from
WORKERS = (2, 4, 8, 16)
MICROBATCHES = (4, 8, 16, 32)
STAGES_PER_WORKER = (2, 4)


def save_page(
    scene: "Scene",
    scenario: "pj.Scenario",
    activations: ActivationOptions,
    limit: MemoryLimit | None,
    memory: bool,
    choice: "Carried",
    out: Output,
) -> None:
    """Write a page; without a memory limit, a model has that of its system."""
    from pipejax.plots.explorer.page import page
    from pipejax.plots.explorer.payload import Explored, MemoryView

    explored = []
    for (name, run), sizes in zip(scene.runs.items(), scene.sizes, strict=True):
        limits = _limits(run.table, sizes, scenario, activations, limit)
        held = MemoryView(*sizes[:5], limits, sizes.static)
        explored.append(Explored(run, held, _step(run, scenario), name))
    flags = {"messages": scene.messages, "memory": memory}
    show = {name: True for name, is_wanted in flags.items() if is_wanted}
    show |= {"critical": False} if scene.picture.no_critical else {}
    unit = "s" if scenario.has_times else "slots"
    with waiting("looking for closed forms"):
        title = scene.picture.title or ""
        text = page(explored, unit=unit, show=show, view=scene.window, title=title, carried=choice)
    out.save(lambda draft: write_file(draft, text))


def carried(
    run: SizedRunOptions, options: TableOptions, scenarios: "Sequence[pj.Scenario]", choose: bool
) -> "Carried":
    """Return further tables that a page can show."""
    from pipejax.costs.sources import GivenTimes
    from pipejax.plots.explorer.library import OfferedTimes
    from pipejax.plots.explorer.payload import NOTHING, Carried

    source, costs_edits = scenarios[0].source, run.cost_fields.edits
    if (
        costs_edits
        or not isinstance(source, GivenTimes)
        or len(source.messages) > 1
        or "pair" in source.times  # a page prices the pairs of other tables by their two ops
    ):
        if choose:
            raise ValueError(
                "--choose needs times that hold for any schedule: give --worker-times or "
                "--stage-times without pair=, and nothing that changes them"
            )
        return NOTHING
    tables = [scenario.table() for scenario in scenarios]
    times = OfferedTimes(source.for_tables(tables), source.per_worker)
    return Carried(times, _every_table(run, options) if choose else {})


def _every_table(
    run: SizedRunOptions, options: TableOptions
) -> "Mapping[str, Sequence[pj.ScheduleTable]]":
    """Build what is built in for all sizes of a page; what does not exist for some is left out."""
    from pipejax.schedules import REGISTRY

    tables_by_name: dict[str, list[pj.ScheduleTable]] = {}
    with waiting("building schedules to choose from"):
        for name, workers, microbatches in itertools.product(REGISTRY, WORKERS, MICROBATCHES):
            takes = REGISTRY[name].options
            if "offload" in takes:  # no page lowers offloads
                continue
            for count in STAGES_PER_WORKER if "stages_per_worker" in takes else (0,):
                settings = options.only(name)
                if count:
                    settings = settings._replace(
                        options={**settings.options, "stages_per_worker": count}
                    )
                with contextlib.suppress(MismatchError):
                    point = SizedSchedule(name, workers, microbatches)
                    scenario = parse_scenario(run, settings=settings, point=point)
                    tables_by_name.setdefault(name, []).append(scenario.table())
    return tables_by_name


def _step(run: "pj.Evaluation", scenario: "pj.Scenario") -> "StepView | None":
    """Return tokens and MFU of a step, if a model gives its costs."""
    from pipejax.plots.explorer.payload import StepView

    if scenario.workload is None or scenario.system is None:
        return None
    report = pj.step_report(run, scenario.workload, scenario.system)
    return StepView(report.tokens_per_second * run.step_time, report.mfu * run.step_time)


def _limits(
    table: pj.ScheduleTable,
    sized: StageSizes,
    scenario: "pj.Scenario",
    activations: ActivationOptions,
    limit: MemoryLimit | None,
) -> Float[NumpyArray, " workers"] | None:
    """Return the memory limit of activations: the option, or the free memory of the system."""
    if limit is not None:
        return limit.levels(table, sized, activations, scenario.workload)
    if sized.static is None or scenario.system is None:
        return None
    return (float(scenario.system.memory_available) - sized.static).clip(min=0.0)
