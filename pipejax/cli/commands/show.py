"""`pipejax show`: timelines, in the terminal or drawn."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.markup import escape

import pipejax as pj
from pipejax.base.files import write_file
from pipejax.cli.options.memory import ActivationOptions, HeldMemory, MemoryLimit
from pipejax.cli.options.picture import PictureSettings, by_name, caption_file, setting_of
from pipejax.cli.options.pricing import Pricing, or_slots
from pipejax.cli.options.tables import TableChoice, TableOptions, chosen_tables, naming
from pipejax.cli.options.values import CountIfGiven, JsonFlag, Text
from pipejax.cli.output.explored import save_page
from pipejax.cli.output.files import ANY, NO_OUTPUT, TIMELINE, Output
from pipejax.cli.output.report import console, percent, pick, print_json, print_plain, print_written
from pipejax.cli.output.terminal_timeline import (
    NAMES,
    ShownRun,
    label_width,
    print_legend,
    print_limit,
    print_run,
)

if TYPE_CHECKING:
    from pipejax.analysis.runs.timeline import Window
    from pipejax.plots.caption import TimeUnit
    from pipejax.plots.style import Paper


NO_TIMES = Pricing(lambda table: or_slots(None, table))


class Scene(NamedTuple):
    """What is shown.

    Attributes:
      runs: by name.
      held: memory of each run, or None where it is not shown.
      unit: of times.
      window: part of the time axis, if not all of it.
      messages: whether messages are shown.
      picture: how it is shown.
      caption: parameters of the runs in words.
    """

    runs: "Mapping[str, pj.Evaluation]"
    held: Sequence[HeldMemory | None]
    unit: "TimeUnit"
    window: "Window | None"
    messages: bool
    picture: PictureSettings
    caption: str


def show(
    options: TableOptions,
    choice: TableChoice,
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    picture: PictureSettings,
    schedules: Text = None,
    out: Annotated[Output, TIMELINE] = NO_OUTPUT,
    messages: bool = False,
    memory: bool = False,
    width: CountIfGiven = None,
    json: JsonFlag = False,
) -> None:
    """Show timelines of schedules under one time axis; without times, in the tables' own slots.

    Options:
      schedules: one below the other.
      out: .png, .pdf, .svg, or a page as `explore` writes (.html).

    Example:
      pipejax show -s hanayo -P 4 -M 4 --waves 2 --messages
    """
    suffix = None if out.path is None else out.path.suffix
    picture.check(suffix)
    paper = None if suffix in (None, ".html") else picture.paper()
    beside = _caption_output(picture, out)
    with_curves = memory or suffix == ".html"
    tables, missing = chosen_tables(options, choice, pricing, schedules, with_curves=with_curves)
    limit = options.options.get("memory_limit") if with_curves else None
    scene = _scene(tables, pricing, links, activations, picture, messages, memory, limit)
    if suffix == ".html":
        given = {"messages": messages, "memory": memory}
        more = {name: True for name, wanted in given.items() if wanted}
        more |= {"critical": False} if picture.no_critical else {}
        view = scene.window
        save_page(tables, pricing, links, activations, out, limit=limit, show=more, view=view)
    elif paper is not None:
        _draw(scene, paper, out, beside)
    if json:
        print_json(_as_json(scene, out, missing, several=schedules is not None))
        return
    for name, reason in missing.items():
        print_plain(f"{name} is not there: {reason}")
    if out.path is None:
        _print(scene, width)
    print_written("drawn to", out.written)
    print_written("caption in", beside.written)
    beside.end(json=json)


def _caption_output(picture: PictureSettings, out: Output) -> Output:
    """Where the caption goes, if a file of its own is asked for."""
    if picture.caption != "beside" or out.path is None:
        return Output()
    return Output(out.path.with_suffix(".md"), "--caption beside: --out", out.force).check(ANY)


def _scene(
    tables: Sequence[pj.ScheduleTable],
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    picture: PictureSettings,
    messages: bool,
    memory: bool,
    limit: MemoryLimit | None,
) -> Scene:
    """Run the tables."""
    from pipejax.plots.caption import caption_of_runs

    evaluated, held = [], []
    priced = pricing or NO_TIMES
    for table in tables:
        with naming(table):
            run = pj.evaluate(table, priced.of(table), link=links)
        sizes = activations.of(table, priced.workload, priced.microbatches)
        evaluated.append(run)
        limits = limit and limit.levels(table, sizes, activations, priced.workload)
        held.append(sizes.held(run)._replace(limits=limits) if memory else None)
    runs = by_name(evaluated)
    unit = picture.time_unit(evaluated, in_slots=pricing is None)
    window = picture.window(evaluated)
    caption = caption_of_runs(runs, unit, setting=setting_of(pricing), window=window)
    return Scene(runs, held, unit, window, messages, picture, caption)


def _draw(scene: Scene, paper: "Paper", out: Output, beside: Output) -> None:
    """Draw to a file, and write the caption beside it where that is asked for."""
    from pipejax.plots.bars import Curves
    from pipejax.plots.timeline import Drawing, Panel, draw_panels, save

    panels = []
    for (name, run), held in zip(scene.runs.items(), scene.held, strict=True):
        sizes = None if held is None else held.stages
        curves = (
            None
            if held is None or sizes is None
            else Curves(held.memory, NAMES[sizes.unit], sizes.text, held.limits)
        )
        panels.append(Panel(name, run, curves))
    caption = scene.caption if scene.picture.caption == "under" else ""
    critical = not scene.picture.no_critical
    look = Drawing(scene.unit, paper, scene.window, scene.messages, critical, caption)
    drawn = draw_panels(panels, look)
    out.save(lambda draft: save(drawn, draft))
    text = caption_file(str(out.path and out.path.name), scene.caption)
    beside.save(lambda draft: write_file(draft, text), lambda: text)


def _as_json(
    scene: Scene, out: Output, missing: Mapping[str, str], *, several: bool
) -> dict[str, Any]:
    """What `--json` says: of one schedule as it is, of several as a list."""
    runs = [
        _run_json(run) | ({} if held is None else _memory_json(held))
        for run, held in zip(scene.runs.values(), scene.held, strict=True)
    ]
    more = {"caption": scene.caption, **out.as_json()}
    return {"runs": runs, "missing": missing, **more} if several else {**runs[0], **more}


def _memory_json(held: HeldMemory) -> dict[str, object]:
    curves = [held.memory.curve(worker) for worker in range(len(held.memory.peak))]
    steps = [{"time": time, "held": level} for time, level in curves]
    return {"activation_memory": held.as_json() | {"curves": steps}}


def _run_json(evaluation: "pj.Evaluation") -> dict[str, Any]:
    from pipejax.analysis.runs.timeline import arrows, bars

    return {
        **pick(evaluation, "schedule makespan"),
        "ops": [
            {"op": bar.label, **pick(bar, "worker start finish"), "critical": bar.is_critical}
            for bar in bars(evaluation)
        ],
        "messages": [
            {
                "op": str(arrow.op),
                **pick(arrow, "sender receiver start finish"),
                "critical": arrow.is_critical,
            }
            for arrow in arrows(evaluation)
        ],
    }


def _print(scene: Scene, width: int | None) -> None:
    """Print runs one below the other, under one time axis."""
    from pipejax.analysis.runs.timeline import Window

    out = console()
    whole = Window(0.0, max(run.makespan for run in scene.runs.values()))
    critical = not scene.picture.no_critical
    shown = [
        ShownRun(run, held, scene.window or whole, scene.messages, critical)
        for run, held in zip(scene.runs.values(), scene.held, strict=True)
    ]
    label = label_width(shown)
    for name, each in zip(scene.runs, shown, strict=True):
        run = each.run
        out.print(
            f"[bold]{escape(name)}[/] on {run.workers} workers: {scene.unit.text(run.makespan)}, "
            f"idle {percent(run.bubble_ratio)}, {run.links.model} links"
        )
        print_run(out, each, label, (width or out.width) - label - 3)
        if each.held is not None:
            print_limit(out, each.held)
    if scene.window is not None:
        low, high = scene.window
        out.print(f"shown: {low / scene.unit.seconds:.5g} to {scene.unit.text(high)}")
    print_legend(out, shown)
    if scene.picture.caption == "under":
        print_plain(scene.caption)
