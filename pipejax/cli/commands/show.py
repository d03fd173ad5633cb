"""`pipejax show`: timelines, in the terminal, drawn, or on a page that prices them anew."""

import contextlib
import itertools
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.markup import escape

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, resolve_choice
from pipejax.base.files import write_file
from pipejax.cli.options import tables
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.memory import ActivationOptions, HeldMemory, MemoryLimit, StageSizes
from pipejax.cli.options.option import options, parse_seconds
from pipejax.cli.options.scenario import parse_scenario
from pipejax.cli.output import terminal_timeline
from pipejax.cli.output.files import ANY, NO_OUTPUT, TIMELINE, Output
from pipejax.cli.output.numbers import percent
from pipejax.cli.output.report import Answer, console, pick, plain, print_all, progress, table_sizes

if TYPE_CHECKING:
    from pipejax.analysis.runs.timeline import Window
    from pipejax.costs.sources import CostSource
    from pipejax.plots.caption import TimeUnit
    from pipejax.plots.explorer.payload import StepView
    from pipejax.plots.style import Paper

CAPTION_PLACES = ("under", "beside")


@options
class PictureSettings:
    """Style of a timeline."""

    from_: str | None = None
    to: str | None = None
    part: str | None = None
    unit: str | None = None
    caption: str | None = None
    no_critical: bool = False
    transfers: bool = False
    title: str | None = None
    labels: str | None = None

    def check(self, out: str | None, paper: tables.PaperSettings) -> None:
        """Refuse options without effect on a file of this suffix."""
        if self.caption is not None:
            resolve_choice(self.caption, CAPTION_PLACES, "--caption")
        drawing_options = [name for name, value in vars(paper).items() if value is not None]
        drawing_options += ["transfers"] if self.transfers else []
        drawing_options += ["caption"] if self.caption == "beside" else []
        if drawing_options and out == ".html":
            option = flag(drawing_options[0])
            raise ValueError(f"{option} has no effect on a page ({out}), only on a drawing")

    def time_unit(self, runs: "Sequence[pj.Evaluation]", *, in_slots: bool) -> "TimeUnit":
        """Return the unit of the time axis."""
        from pipejax.plots.caption import SLOTS, TIME_UNITS, choose_unit

        if self.unit is None:
            return choose_unit(runs, SLOTS if in_slots else None)
        if in_slots:
            raise ValueError(
                f"--unit {self.unit}: without times a timeline is in slots: give --stage-times, "
                "--worker-times, --costs or --model"
            )
        return choose_unit(runs, resolve_choice(self.unit, TIME_UNITS, "--unit"))


class Scene(NamedTuple):
    """Runs on one time axis, with their style."""

    runs: "Mapping[str, pj.Evaluation]"  # by name
    sizes: Sequence[StageSizes]  # sizes of activations of each run
    held: Sequence[HeldMemory | None]  # memory of each run, or None where it is not shown
    unit: "TimeUnit"  # of times
    window: "Window | None"  # part of the time axis, if not all of it
    messages: bool  # whether messages are shown
    picture: PictureSettings  # style
    caption: str  # parameters of the runs in words


@options
def show(
    *,
    run: tables.SizedRunOptions = tables.SizedRunOptions(),
    picture: PictureSettings = PictureSettings(),
    printed: tables.PaperSettings = tables.PaperSettings(),
    schedules: str | None = None,
    out: Annotated[Output, TIMELINE] = NO_OUTPUT,
    messages: bool = False,
    memory: bool = False,
    width: int | None = None,
    open: bool = False,
    choose: bool = False,
) -> Answer:
    """Show timelines of schedules under one time axis, or, without times, with equally long ops.

    A page (.html) prices them anew as sliders move; it needs no server and no net.
    """
    activations = run.activations
    suffix = None if out.path is None else out.path.suffix
    picture.check(suffix, printed)
    for name, is_on in {"open": open, "choose": choose}.items():
        if is_on and suffix != ".html":
            raise ValueError(f"--{name} has no effect without --out PAGE.html")
    paper = None if suffix in (None, ".html") else printed.paper()
    caption_out = Output()
    if picture.caption == "beside" and out.path is not None:
        path = out.path.with_suffix(".md")
        caption_out = Output(path, "--caption beside: --out", out.force).check(ANY)
    with_curves = memory or suffix == ".html"
    settings = run.table_options((*tables.OF_RUNS, *["memory_limit"] * with_curves))
    scenarios, missing = tables.shown_scenarios(run, settings, schedules)
    limit = settings.options.get("memory_limit") if with_curves else None
    scene = _scene(scenarios, activations, picture, messages, memory, limit)
    if suffix == ".html":
        choices = further_runs(run, settings, scenarios[0].source) if choose else []
        save_page(scene, scenarios[0], activations, limit, memory, choices, out)
    elif paper is not None:
        _draw(scene, paper, out, caption_out)
    if open and out.written is not None:
        webbrowser.open(out.written.resolve().as_uri())
    result = _as_json(scene, missing, several=schedules is not None)
    return Answer(result, _view(scene, missing, out, caption_out, width))


def _scene(
    scenarios: "Sequence[pj.Scenario]",
    activations: ActivationOptions,
    picture: PictureSettings,
    messages: bool,
    memory: bool,
    limit: MemoryLimit | None,
) -> Scene:
    """Evaluate the tables, and gather what a drawing or a page of them needs."""
    from pipejax.analysis.runs.timeline import time_window
    from pipejax.plots.caption import caption_of_runs

    runs, sizes, held = [], [], []
    for scenario in scenarios:
        table = scenario.table()
        with tables.naming(table):
            runs.append(scenario.evaluate())
        sizes.append(activations.scenario_sizes(scenario))
        limits = None
        if limit is not None:
            limits = limit.levels(table, sizes[-1], activations, scenario.workload)
        held.append(sizes[-1].held(runs[-1])._replace(limits=limits) if memory else None)
    labels = tables.with_labels(picture.labels, [run.schedule for run in runs])
    runs_by_name = dict(zip(labels, runs, strict=True))
    unit = picture.time_unit(runs, in_slots=not scenarios[0].has_times)
    start = None if picture.from_ is None else parse_seconds(picture.from_, "--from")
    stop = None if picture.to is None else parse_seconds(picture.to, "--to")
    window, setting = time_window(runs, start, stop, picture.part), ""
    workload, system = scenarios[0].workload, scenarios[0].system
    if workload is not None and system is not None:
        setting = f"{workload.model.name} on {system.name}, minibatch {workload.minibatch}"
    caption = caption_of_runs(runs_by_name, unit, setting=setting, window=window)
    return Scene(runs_by_name, sizes, held, unit, window, messages, picture, caption)


def _draw(scene: Scene, paper: "Paper", out: Output, caption_out: Output) -> None:
    """Draw to a file, and write the caption to its file, if options name these files."""
    from pipejax.plots.timeline import Curves, Drawing, Panel, draw_panels

    panels = []
    for (name, run), memory in zip(scene.runs.items(), scene.held, strict=True):
        curves = None
        if memory is not None:
            unit = terminal_timeline.NAMES[memory.stages.unit]
            curves = Curves(memory.memory, unit, memory.stages.text, memory.limits)
        panels.append(Panel(name, run, curves))
    caption = scene.caption if scene.picture.caption == "under" else ""
    fields = pick(scene, "unit window messages") | pick(scene.picture, "transfers")
    fields |= {"critical": not scene.picture.no_critical, "title": scene.picture.title or ""}
    out.save_picture(draw_panels(panels, Drawing(paper=paper, caption=caption, **fields)))
    label = out.path.name if out.path else ""  # a page in Markdown, as figures/ writes it
    caption_out.save_text(f"![{label}]({label})\n\n{scene.caption}\n")


def _as_json(scene: Scene, missing: Mapping[str, str], *, several: bool) -> dict[str, Any]:
    """Return the object of `--json`: that of one schedule, or a list of several."""
    runs = [_run_json(run, held) for run, held in zip(scene.runs.values(), scene.held, strict=True)]
    result = {"runs": runs, "missing": missing} if several else runs[0]
    return {**result, "caption": scene.caption}


def _run_json(evaluation: "pj.Evaluation", held: HeldMemory | None) -> dict[str, Any]:
    """Return ops, messages and memory curves of a run for `--json`."""
    from pipejax.analysis.runs.timeline import arrows, bars

    memory: dict[str, Any] = {}
    if held is not None:
        curves = map(held.memory.curve, range(evaluation.workers))
        steps = [{"time": time, "held": level} for time, level in curves]
        memory["activation_memory"] = held.as_json() | {"curves": steps}
    return {
        **{k: size for k, size in table_sizes(evaluation.table).items() if k != "stages"},
        **pick(evaluation, "makespan bubble_ratio"),
        "ops": [
            {"op": bar.label, **pick(bar, "worker lane start finish"), "critical": bar.is_critical}
            for bar in bars(evaluation)
        ],
        "messages": [
            {
                "op": evaluation.table.grammar.text((arrow.op,)),
                **pick(arrow, "sender receiver start finish"),
                "critical": arrow.is_critical,
            }
            for arrow in arrows(evaluation)
        ],
        **memory,
    }


def _view(
    scene: Scene, missing: Mapping[str, str], out: Output, caption_out: Output, width: int | None
) -> Iterator[object]:
    """Print the timelines, or yield the drawn runs as text; yield schedules that do not exist."""
    if out.path is None:
        _print(scene, width)
    else:
        for name, run in scene.runs.items():
            time, idle = scene.unit.text(run.makespan), percent(run.bubble_ratio)
            yield plain(f"{name} takes {time}; idle {idle}")
    for name, reason in missing.items():
        yield plain(f"{name} does not exist here: {reason}")
    if caption_out.written is not None:
        yield plain(f"wrote {caption_out.written}")
    caption_out.end(json=False)


def _print(scene: Scene, width: int | None) -> None:
    """Print runs one below the other, under one time axis."""
    from pipejax.analysis.runs.timeline import Window

    out = console()
    window = scene.window or Window(0.0, max(run.makespan for run in scene.runs.values()))
    critical = not scene.picture.no_critical
    shown = [
        terminal_timeline.ShownRun(run, held, window, scene.messages, critical)
        for run, held in zip(scene.runs.values(), scene.held, strict=True)
    ]
    label, looks = terminal_timeline.label_width(shown), terminal_timeline.looks_of_runs(shown)
    for name, shown_run in zip(scene.runs, shown, strict=True):
        run = shown_run.run
        out.print(
            f"[bold]{escape(name)}[/] on {run.workers} workers: {scene.unit.text(run.makespan)}, "
            f"workers idle {percent(run.bubble_ratio)} of the time"
        )
        terminal_timeline.print_run(out, shown_run, label, (width or out.width) - label - 3, looks)
        if shown_run.held_memory is not None:
            terminal_timeline.print_limit(out, shown_run.held_memory)
    if scene.window is not None:
        low, high = scene.window
        out.print(f"shown: {low / scene.unit.seconds:.5g} to {scene.unit.text(high)}")
    terminal_timeline.print_legend(out, shown)
    if scene.picture.caption == "under":
        print_all(plain(scene.caption))


# The page that `pipejax show` writes: its schedules, and the choices on it

WORKERS = (2, 4, 8, 16)  # choices that a page offers
MICROBATCHES = (4, 8, 16, 32)
STAGES_PER_WORKER = (2, 4)


def save_page(
    scene: "Scene",
    scenario: "pj.Scenario",
    activations: ActivationOptions,
    limit: MemoryLimit | None,
    memory: bool,
    choices: "Sequence[pj.Evaluation]",
    out: Output,
) -> None:
    """Write the explorer's page with the runs of a scene, and `choices` of further runs."""
    from pipejax.plots.explorer.payload import Explored, page

    explored = []
    for (name, run), sizes in zip(scene.runs.items(), scene.sizes, strict=True):
        limits = _limits(run.table, sizes, scenario, activations, limit)
        fields: Any = {"unit": sizes.unit, "limits": limits, "static": sizes.static}
        held, step = sizes.held(run).memory, _step(run, scenario)
        explored.append(Explored(run, name, step, memory=held, **fields))
    flags = {"messages": scene.messages, "memory": memory}
    show = {name: True for name, is_on in flags.items() if is_on}
    if scene.picture.no_critical:
        show["critical"] = False
    unit = "s" if scenario.has_times else "slots"
    with progress("looking for closed forms"):
        title = scene.picture.title or ""
        text = page(explored, unit=unit, show=show, view=scene.window, title=title, choices=choices)
    out.save(lambda draft: write_file(draft, text))


def further_runs(
    run: tables.SizedRunOptions, options: tables.TableOptions, source: "CostSource"
) -> "list[pj.Evaluation]":
    """Return runs of all schedules at all sizes that a page offers, without impossible sizes."""
    from pipejax.costs.sources import GivenTimes
    from pipejax.schedules import REGISTRY
    from pipejax.schedules.table.slot_simulation import without_idle_slots

    if (
        not isinstance(source, GivenTimes)
        or len(source.messages) > 1
        or "pair" in source.times  # other pairs have other ops
        or run.cost_fields.edits
    ):
        raise ValueError(
            "--choose needs times that hold for any schedule: give --worker-times or "
            "--stage-times without pair=, and nothing that changes them"
        )
    runs: list[pj.Evaluation] = []
    with progress("running schedules to choose from"), without_idle_slots():
        for name, workers, microbatches in itertools.product(REGISTRY, WORKERS, MICROBATCHES):
            option_names = REGISTRY[name].options
            if "offload" in option_names:  # its order would follow from times that may be missing
                continue
            # 0 if the schedule has no such option
            for count in STAGES_PER_WORKER if "stages_per_worker" in option_names else (0,):
                settings, more = options.only(name), {"stages_per_worker": count} if count else {}
                settings = settings._replace(options=settings.options | more)
                with contextlib.suppress(MismatchError):
                    point = tables.SizedSchedule(name, workers, microbatches)
                    runs.append(parse_scenario(run, settings=settings, point=point).evaluate())
    return runs


def _step(run: "pj.Evaluation", scenario: "pj.Scenario") -> "StepView | None":
    """Return tokens and MFU of a step, if a model gives its costs."""
    from pipejax.plots.explorer.payload import StepView

    if scenario.workload is None or scenario.system is None:
        return None
    report = pj.step_report(run, scenario.workload, scenario.system)
    return StepView(report.tokens_per_second * run.step_time, report.mfu * run.step_time)


def _limits(
    table: pj.ScheduleTable,
    sizes: StageSizes,
    scenario: "pj.Scenario",
    activations: ActivationOptions,
    limit: MemoryLimit | None,
) -> Float[NumpyArray, " workers"] | None:
    """Return the memory limit of activations: the option, or the free memory of the system."""
    if limit is not None:
        return limit.levels(table, sizes, activations, scenario.workload)
    if sizes.static is None or scenario.system is None:
        return None
    return (float(scenario.system.memory_available) - sizes.static).clip(min=0.0)
