"""`pipejax plan`: the layout of a training job that takes the shortest step."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pipejax as pj
from pipejax.base.progress import if_interrupted
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import Count, CountIfGiven, Schedules, Text
from pipejax.cli.output.answer import Answer, file_lines
from pipejax.cli.output.files import NO_OUTPUT, Output, check_modules, drawing
from pipejax.cli.output.kinds import DRAWING, PLAN, SWEEPS
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import grid, pick, plain

if TYPE_CHECKING:
    from pipejax.sweep.plan.result import PlannedLayout, PlanResult

COLUMNS = {  # of the report: what stands over each degree
    "schedule": "schedule",
    "tensor": "t",
    "context": "c",
    "expert": "e",
    "data": "d",
    "pipeline": "p",
    "stages_per_worker": "v",
    "microbatch_size": "b",
    "microbatches": "M",
    "zero": "ZeRO",
    "recompute": "recompute",
    "embedding_units": "edges",
}


class LayoutChoices(NamedTuple):
    """Values of the axes that are searched, each a number or several.

    Attributes:
      tensor: all inside a node if not given.
      stages_per_worker: several may be given, as 1,2; up to 16 that divide the layers if not given.
      microbatch_size: several may be given, as 1,2.
      recompute: none, selective or full, or several.
      zero: 0, 1 (optimizer state), 2 (gradients too), 3 (weights too), or several, as 0,1.
      edge_units: or several, as 0,1.
    """

    tensor: Text = None
    context: Text = None
    expert: Text = None
    data: Text = None
    pipeline: Text = None
    stages_per_worker: Text = None
    microbatch_size: Text = None
    recompute: Text = None
    zero: Text = None
    edge_units: Text = None

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Read the values of each axis that is given."""
        given = {name: text for name, text in self._asdict().items() if text is not None}
        return {name: tuple(_values(name, text)) for name, text in given.items()}


def _values(name: str, text: str) -> list[Any]:
    """Read values that commas separate."""
    words = [word.strip() for word in text.split(",")]
    if name == "recompute":
        return words
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{flag(name)} must be whole numbers, as 1,2,4, got {text!r}")
    return [int(word) for word in words]


def plan(
    choices: LayoutChoices,
    shared: Mapping[str, Any],
    links: pj.Links,
    model: str,
    system: str,
    gpus: Count,
    minibatch: Count,
    stack: Text = None,
    schedules: Schedules = "1f1b,interleaved-1f1b,zb-h1",
    sequence: CountIfGiven = None,
    runners_up: int = 9,
    exhaustive: bool = False,
    out: Annotated[Output, PLAN] = NO_OUTPUT,
    resume: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Find the layout of a training job that takes the shortest step, among all that fit.

    Options:
      minibatch: all its replicas together; evaluate counts that of one pipeline.
      exhaustive: else only those that can be among the best.
      out: all layouts (.zarr or .csv).
      figure: step time against memory, its front exact (.png, .pdf, .svg).

    Example:
      pipejax plan -m llama3-405b -y h100 --gpus 2048 --minibatch 2048
    """
    if resume and (out.path is None or out.path.suffix != ".zarr" or out.force):
        raise ValueError("--resume goes on with --out STORE.zarr, without --force")
    check_modules("plan needs", SWEEPS, "sweeps")
    transformer = pj.load_model(model)
    if sequence is not None:
        transformer = dataclasses.replace(transformer, sequence=sequence)

    def say() -> str | None:
        if out.path is None or out.path.suffix != ".zarr":
            return None
        return f"{out.path} keeps what was evaluated, go on with --resume"

    with if_interrupted(say), progress("layouts", None) as bar:
        found = pj.plan(
            transformer,
            pj.load_system(system),
            gpus=gpus,
            stack=stack,
            minibatch=minibatch,
            schedules=[name.strip() for name in schedules.split(",")],
            choices=choices.values(),
            link=links,
            **shared,
            runners_up=runners_up,
            exhaustive=exhaustive,
            front=figure.path is not None,
            out=out.path,
            resume=resume,
            replace=out.force,
            on_progress=bar.tell,
        )
    _draw(found, figure)
    result = {
        "model": found.request.model.name,
        "system": found.request.system.name,
        **pick(found.request, "gpus minibatch"),
        "best": _as_json(found.best),
        "runners_up": [_as_json(one) for one in found.runners_up],
        "outside": [_as_json(one) for one in found.outside],
        **pick(found, "enumerated fitting evaluated programs seconds"),
        **({} if out.path is None else out.as_json()),
    }
    files = file_lines({"all layouts in": out, "picture in": figure})
    return Answer(result, chain(_said(found), files))


def _as_json(one: "PlannedLayout") -> dict[str, Any]:
    """A layout with what is known of its regime."""
    evidence = None if one.evidence is None else pick(one.evidence, "configurations mean_error")
    return dataclasses.asdict(one) | {"evidence": evidence}


def _said(found: "PlanResult") -> Iterator[object]:
    """Say what is best, how it compares, and how many layouts that stands on."""
    best, request = found.best, found.request
    yield (
        f"[bold]{request.model.name}[/] on {request.gpus} {request.system.name}, minibatch "
        f"{request.minibatch}: [bold]{seconds(best.step_time)}[/]{_band(best)}, MFU "
        f"{percent(best.mfu)}, bound by {best.bound_by}"
    )
    yield _evidence(best, request.system.name)
    yield _table((best, *found.runners_up), best, "the shortest steps of all layouts that fit")
    if found.outside:
        reason = (
            f"apart: nobody measured {' or '.join({one.regime: None for one in found.outside})} on "
            f"{request.system.name} closely enough: calibrate on runs of your own before you trust"
        )
        yield _table(found.outside, best, reason)
    yield plain(
        f"{found.enumerated:,} layouts, {found.fitting:,} fit the memory, {found.evaluated:,} "
        f"evaluated exactly with {found.programs:,} programs in {found.seconds:.1f} s: the lower "
        "bounds of the others are beyond these"
    )


def _evidence(best: "PlannedLayout", system: str) -> object:
    """Say what the best step time rests on."""
    known = best.evidence
    if known is None:
        return plain(f"no run of its regime ({best.regime}) on {system} is known: extrapolated")
    return plain(
        f"its regime ({best.regime}): {known.configurations} measured configurations, predicted to "
        f"{known.mean_error:.1f} % in the mean"
    )


def _table(shown: "Sequence[PlannedLayout]", best: "PlannedLayout", title: str) -> object:
    columns = [(header, [one.layout[name] for one in shown]) for name, header in COLUMNS.items()]
    columns += [
        ("step", [seconds(one.step_time) for one in shown]),
        ("MFU", [percent(one.mfu) for one in shown]),
        ("memory", [gigabytes(one.memory_bytes) for one in shown]),
        ("left", [gigabytes(one.memory_left) for one in shown]),
        ("chance", [percent(one.chance) if one.chance else "" for one in shown]),
        ("bound by", [one.bound_by for one in shown]),
    ]
    # a column that is the same for all, where the headline says it or it is what is usual
    usual = {"c": 1, "e": 1, "edges": 0, "chance": "", "bound by": best.bound_by}
    columns = [
        (name, cells) for name, cells in columns if any(cell != usual.get(name) for cell in cells)
    ]
    return grid(columns, title=title)


def _band(one: "PlannedLayout") -> str:
    """The band of a step time, where there is one."""
    if one.band is None:
        return ""
    low, high = one.band
    return f" (90 %: {seconds(low)} to {seconds(high)})"


def _draw(found: "PlanResult", figure: Output) -> None:
    """Draw step time against memory."""
    if figure.path is None:
        return
    from pipejax.plots.fronts import draw_plan  # matplotlib is an extra

    with drawing(figure, columns=2, height=3.2) as (_, axes):
        draw_plan(
            axes,
            found.columns(),
            found.front,
            capacity=found.request.room,
        )
