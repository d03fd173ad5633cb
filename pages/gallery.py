"""The gallery: every registered schedule with its timeline, memory, closed form and command."""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.analysis.comparison import closed_form
from pipejax.analysis.formula.parameters import default_parameters
from pipejax.analysis.runs.evaluate import ActivationMemory
from pipejax.schedules import REGISTRY, Builder

WORKERS, MICROBATCHES = 4, 8
TIMES: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1, "O": 1}  # of a microbatch on a worker
MESSAGE = 0.1
OPTIONS: Mapping[str, Mapping[str, Any]] = {"ada-offload": {"memory_limit": 3}}  # not the defaults
FAMILIES: Mapping[str, str] = {  # by the file of the builder
    "one_f_one_b": "One pipe",
    "chimera": "Two pipes, and waves",
    "bitpipe": "Two pipes, and waves",
    "dualpipe": "Fused pairs",
    "zero_bubble": "Split backwards",
    "v_shape": "V placements",
    "offload": "Offloading",
    "asynchronous": "Asynchronous",
    "sliced": "Slices of sequences",
}
MOST_SUMS = 4  # of a form that are shown
NUMBERS = range(WORKERS, 44, WORKERS)  # of microbatches, on which a family is found
LATER = 64  # on which it is checked
EMPTY_PICTURE = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'


class Shown(NamedTuple):
    """A schedule of the gallery.

    Attributes:
      name: of the schedule.
      builder: from the registry.
      run: on so many workers and microbatches.
    """

    name: str
    builder: Builder
    run: pj.Evaluation

    @property
    def family(self) -> str:
        """Heading of its family."""
        return FAMILIES[self.builder.function.__module__.rpartition(".")[2]]

    @property
    def phases(self) -> list[str]:
        """Letters of the phases that take time."""
        cells = {pj.Phase(int(code)).name for code in set(self.run.table.ops.phase.tolist())}
        return [letter for letter in TIMES if letter in cells]


def gallery_files(*, draw: bool, address: Callable[[str, int], str]) -> dict[str, str | bytes]:
    """Return the page of the gallery and its pictures.

    `address` says where a schedule with so many stages per worker is shown live.
    """
    shown = [run_schedule(name) for name in REGISTRY]
    parts = [_head(shown), _thumbnails(shown)]
    files: dict[str, str | bytes] = {}
    for family, members in groupby(shown, key=lambda schedule: schedule.family):
        parts.append(f"## {family}")
        for schedule in members:
            table = schedule.run.table
            live = "" if table.offloads else address(schedule.name, table.stages_per_worker)
            parts += _section(schedule, live, whole=draw)
            files[f"gallery/{schedule.name}.svg"] = _picture(schedule) if draw else EMPTY_PICTURE
    return {"gallery.md": "\n\n".join(parts) + "\n"} | files


def run_schedule(name: str) -> Shown:
    """Build a schedule and run it."""
    table = _table(name, MICROBATCHES)
    costs = pj.Costs.per_worker(
        table,
        forward=TIMES["F"],
        input_grad=TIMES["I"],
        weight_grad=TIMES["W"],
        offload=TIMES["O"],
        transfer=MESSAGE,
    )
    return Shown(name, REGISTRY[name], pj.evaluate(table, costs))


def _table(name: str, microbatches: int) -> pj.ScheduleTable:
    """Build a schedule; one that is planned, for the times here, as the command does."""
    options = dict(OPTIONS.get(name, {}))
    if REGISTRY[name].planned:
        stages = REGISTRY[name].stages_per_worker
        options["slots"] = {letter: TIMES[letter] / stages for letter in ("F", "B", "I", "W")}
        options["transfer"] = MESSAGE
    return pj.schedules.build(name, num_workers=WORKERS, num_microbatches=microbatches, **options)


def _head(shown: list[Shown]) -> str:
    """Write the introduction, and the numbers of all schedules side by side."""
    rows = [
        f"| [{schedule.name}](#{schedule.name}) | {schedule.run.makespan:.1f} "
        f"| {schedule.run.bubble_ratio:.1%} | {_held(schedule).peak.max():.3g} |"
        for schedule in shown
    ]
    return "\n".join(
        [
            "---\nhide: [navigation]\n---\n",
            "# Gallery of schedules",
            "",
            f"All {len(shown)} schedules of the usual ops that come with pipejax; "
            "[others](any_schedule.md#schedules-that-come-with-a-grammar) have ops of their own, "
            "and [more](published_schedules.md) need none. "
            f"P = {WORKERS} workers and M = {MICROBATCHES} microbatches; "
            "on each worker a microbatch takes 1 s forward and "
            "2 s backward (1 s for each half where the backward is split), however many stages "
            f"it meets there; a message takes {MESSAGE} s, an offload or load 1 s. Made by "
            "`pages/gallery.py` when this site was built.",
            "",
            "| schedule | step time [s] | idle | peak memory [activations] |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            "Peak memory is that of the fullest worker, in activations of a microbatch on a whole "
            "worker. Each picture leads to its schedule in the [explorer](explorer.md), live. "
            "In the pictures a number is a microbatch, a black frame the critical path; "
            "below each timeline stands what every worker holds. In the formulas F, B, I and W "
            "are the times of one op on one stage, c that of a message either way.",
        ]
    )


def _held(schedule: Shown) -> ActivationMemory:
    """Memory of a run, in activations of a microbatch on a whole worker."""
    table = schedule.run.table
    return pj.analysis.activation_memory(
        schedule.run, sizes=np.divide(table.stage_shares, table.stages_per_worker)
    )


def _thumbnails(shown: list[Shown]) -> str:
    """All pictures, small, each with the way to its section."""
    links = (
        f"[![{schedule.name}](gallery/{schedule.name}.svg)<br>{schedule.name}](#{schedule.name})"
        for schedule in shown
    )
    return '<div class="thumbnails" markdown>\n\n' + "\n".join(links) + "\n\n</div>"


def _section(schedule: Shown, live: str, *, whole: bool) -> Iterator[str]:
    """One schedule; `live` is where it can be tried, if anywhere."""
    yield f"### {schedule.name} {{ #{schedule.name} }}"
    yield f"{schedule.builder.summary}. *{_linked(schedule.builder.source)}*"
    picture = f"![Timeline and memory of {schedule.name}](gallery/{schedule.name}.svg)"
    yield f"[{picture}]({live})\n\n[Open it live]({live}){{ .md-button }}" if live else picture
    form, _ = closed_form(schedule.run.table)
    facts = {"step time": _exact(schedule), "legal": schedule.builder.legal} if whole else {}
    for ratio, quantity in (
        (form.bubble_ratio, "idle"),
        (form.span_bubble_ratio, "idle within a worker's span"),
    ):
        if ratio is not None:
            source = _linked(form.source)
            seconds = f", `{form.idle[0]}` s with {form.idle_assumes}" if form.idle else ""
            facts["published"] = f"{quantity} `{ratio[0]}` with {form.assumes}{seconds} ({source})"
    facts |= option_meanings(schedule.builder)
    yield "\n".join(f"- **{name}**: {text}" for name, text in facts.items() if text)
    yield f"```sh\n{command(schedule)}\n```"


def command(schedule: Shown) -> str:
    """The command that draws it."""
    times = ",".join(f"{letter}={TIMES[letter]:g}" for letter in schedule.phases)
    options = "".join(
        f" --{name.replace('_', '-')} {value}"
        for name, value in OPTIONS.get(schedule.name, {}).items()
    )
    return (
        f"pipejax show --schedule {schedule.name} --workers {WORKERS} --microbatches {MICROBATCHES}"
        f"{options} \\\n    --worker-times {times} --comm {MESSAGE} --memory"
    )


def _exact(schedule: Shown) -> str:
    """The closed form for any number of microbatches, or for the number here."""

    def program(microbatches: int) -> pj.Program:
        return pj.lower(_table(schedule.name, microbatches))

    parameters = default_parameters(program(MICROBATCHES))
    names = tuple(dict.fromkeys(name.partition("_")[0] for name in parameters))
    text, where = str(pj.formula(program(MICROBATCHES), names)), f"M = {MICROBATCHES}"
    with contextlib.suppress(ValueError):  # counts may not repeat so soon
        family = pj.analysis.formula_family(program, NUMBERS, names, verify_on=[LATER])
        if family.first <= MICROBATCHES and len(family.branches) == 1:
            text = str(family).partition(" for ")[0]
            where = (
                f"M = {family.first}, {family.first + WORKERS}, {family.first + 2 * WORKERS}, .."
            )
    sums = text.removeprefix("max(").removesuffix(")").split(", ") if "max(" in text else [text]
    listed = ", ".join(f"`{addend}`" for addend in sums[:MOST_SUMS])
    rest = len(sums) - MOST_SUMS
    more = f" and {rest} more {'sum' if rest == 1 else 'sums'}" if rest > 0 else ""
    largest = "the largest of " if len(sums) > 1 else ""
    planned = " (the order that is planned for the times here)" * schedule.builder.planned
    return f"{largest}{listed}{more}, at P = {WORKERS} and {where}{planned}"


def option_meanings(builder: Builder) -> dict[str, str]:
    """Describe the options of a schedule, from its docstring."""
    text = inspect.getdoc(inspect.unwrap(builder.function)) or ""  # the registry checks arguments
    entries = re.findall(r"^  (\w+): (.*(?:\n {4}.*)*)", text.partition("Options:\n")[2], re.M)
    about = {name: " ".join(lines.split()) for name, lines in entries}
    if missing := [name for name in builder.options if name not in about]:
        raise LookupError(f"{builder.function.__name__}: its docstring has no option {missing[0]}")
    return {f"`{name}`": about[name] for name in builder.options}


def _linked(source: str) -> str:
    """Link papers."""
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


def _picture(schedule: Shown) -> bytes:
    """Draw the timeline above the memory."""
    # matplotlib takes a second to import
    from pipejax.plots.caption import choose_unit
    from pipejax.plots.timeline import Curves, Drawing, Panel, draw_panels

    curves = Curves(_held(schedule), "activations held", "{:.3g}".format)
    figure = draw_panels(
        [Panel(schedule.run.schedule, schedule.run, curves)], Drawing(choose_unit([schedule.run]))
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()
