"""Timelines as pictures: png, pdf, svg."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.path import Path as Outline

from pipejax.analysis.evaluate import Evaluation
from pipejax.analysis.timeline import Bar, arrows, bars
from pipejax.base.files import drafted
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.plots import palette, style
from pipejax.plots.memory import Curves, draw_memory
from pipejax.schedules.cells.ops import WAITS, Phase

MAX_LABELS = 2000  # more microbatch numbers than this are left out, nobody could read them
_HEIGHT = 0.8  # of a bar, relative to the distance of rows


class _Lane(NamedTuple):
    """Where bars stand in a row, relative to its middle."""

    top: float
    height: float


# ops, then those on the host link
_WHOLE_ROW = (_Lane(-_HEIGHT / 2, _HEIGHT), _Lane(_HEIGHT / 2, 0.0))
_SHARED_ROW = (_Lane(-_HEIGHT / 2, 0.54), _Lane(0.17, 0.25))
_DIGIT = 4.6  # width of a digit in the least font [point]


def draw_timeline(
    evaluation: Evaluation,
    path: Path,
    *,
    messages: bool = False,
    unit: str = "s",
    memory: Curves | None = None,
) -> None:
    """Draw a run: one row per worker, phases coloured, critical path framed.

    Offloads and loads stand as thin bars under the ops of their worker.
    """
    style.use()
    row = 0.42 if evaluation.table.offloads else 0.28
    heights = [row * evaluation.workers] + [0.34 * evaluation.workers] * (memory is not None)
    width = 2 * style.PAGE if _is_long(evaluation) else style.PAGE
    figure, parts = plt.subplots(
        len(heights),
        figsize=(width, sum(heights) + 0.7 + 0.4 * len(heights)),
        sharex=True,
        height_ratios=heights,
        squeeze=False,
    )
    axes, *below = parts[:, 0]
    draw_on(axes, evaluation, messages=messages, unit=unit)
    if memory is not None:
        draw_memory(below[0], memory, until=evaluation.makespan)
        below[0].set_xlabel(axes.get_xlabel())
        axes.set_xlabel("")
    figure.legend(
        handles=legend_entries(evaluation, messages=messages), loc="outside lower right", ncols=9
    )
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with drafted(path) as draft:
        figure.savefig(draft, metadata=metadata)
    plt.close(figure)


def draw_on(axes: Axes, evaluation: Evaluation, *, messages: bool = False, unit: str = "s") -> None:
    """Draw a run on given axes."""
    draw_bars(axes, _shown(evaluation), workers=evaluation.workers, until=evaluation.makespan)
    if messages:
        _draw_messages(axes, evaluation)
    axes.set_xlabel(f"time [{unit}]")
    axes.set_title(
        f"{evaluation.schedule}: {evaluation.makespan:.5g} {unit}, "
        f"idle {100 * evaluation.bubble_ratio:.1f} %, {evaluation.links.model} links",
        loc="left",
        parse_math=False,  # the name is a file's, not a formula
    )


def draw_bars(
    axes: Axes, drawn: Sequence[Bar], *, workers: int, until: float, marked: Sequence[bool] = ()
) -> None:
    """Draw ops on given axes, one row per worker; those that are marked have a black corner."""
    lanes = _SHARED_ROW if any(bar.on_host_link for bar in drawn) else _WHOLE_ROW
    for bar in drawn:
        row = workers if bar.worker == NO_WORKER else bar.worker
        _draw_bar(axes, bar, row, lanes[bar.on_host_link])
    for bar in itertools.compress(drawn, marked):
        _mark(axes, bar, lanes[bar.on_host_link])
    _number(axes, drawn, until, lanes)
    labels = [f"worker {w}" for w in range(workers)]
    has_collectives = any(bar.worker == NO_WORKER for bar in drawn)
    style.name_rows(axes, labels + ["all-reduce"] * has_collectives)
    axes.set_xlim(0, until or 1)


def _is_long(evaluation: Evaluation) -> bool:
    return evaluation.table.num_slots > 60


def _shown(evaluation: Evaluation) -> list[Bar]:
    """What has a length: waits are not drawn."""
    return [bar for bar in bars(evaluation) if bar.ops[0].phase not in WAITS]


def _draw_bar(axes: Axes, bar: Bar, row: int, lane: _Lane) -> None:
    """One op, or a fused pair as two halves; a frame marks the critical path."""
    top, part, length = row + lane.top, lane.height / len(bar.ops), bar.finish - bar.start
    parts = [
        Rectangle(
            (bar.start, top + k * part),
            length,
            part,
            linewidth=0.4,
            **style.look(op.phase.name),
        )
        for k, op in enumerate(bar.ops)
    ]
    if bar.is_critical:
        frame: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": "black",
            "linewidth": 0.9,
            "zorder": 3,
        }
        parts.append(Rectangle((bar.start, top), length, lane.height, **frame))
    for each in parts:
        axes.add_patch(each)


def _mark(axes: Axes, bar: Bar, lane: _Lane) -> None:
    """Blacken the upper right corner of an op."""
    right, top = bar.finish, bar.worker + lane.top
    width, height = 0.25 * (bar.finish - bar.start), 0.3 * lane.height
    corner = [(right - width, top), (right, top), (right, top + height)]
    axes.add_patch(Polygon(corner, facecolor=palette.BLACK, linewidth=0, zorder=3))


def _number(axes: Axes, drawn: Sequence[Bar], until: float, lanes: tuple[_Lane, _Lane]) -> None:
    """Write microbatch numbers where they fit."""
    if len(drawn) > MAX_LABELS:
        return
    points_per_time = axes.bbox.width * 72 / style.SCREEN_DPI / (until or 1)
    for bar in (bar for bar in drawn if bar.worker != NO_WORKER):
        for k, op in enumerate(bar.ops):
            room = (bar.finish - bar.start) * points_per_time
            if op.microbatch < 0 or room < _DIGIT * len(str(op.microbatch)):
                continue
            lane = lanes[bar.on_host_link]
            part = lane.height / len(bar.ops)
            axes.text(
                (bar.start + bar.finish) / 2,
                bar.worker + lane.top + (k + 0.5) * part,
                str(op.microbatch),
                ha="center",
                va="center",
                zorder=4,
                fontsize=style.LEAST_FONT,
                color=palette.look(op.phase.name).ink,
            )


def _draw_messages(axes: Axes, evaluation: Evaluation) -> None:
    """Lines from the edge of the sender's row to the edge of the receiver's."""
    sent = arrows(evaluation)
    edges = [np.sign(a.receiver - a.sender) * _HEIGHT / 2 for a in sent]
    lines = [
        [(a.start, a.sender + edge), (a.finish, a.receiver - edge)]
        for a, edge in zip(sent, edges, strict=True)
    ]
    colours = ["black" if a.is_critical else palette.PURPLE for a in sent]
    widths = [1.0 if a.is_critical else 0.5 for a in sent]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=widths, zorder=5))


def legend_entries(evaluation: Evaluation, *, messages: bool) -> list[Patch | Line2D]:
    """List what the colours and lines of a timeline mean."""
    entries: list[Patch | Line2D] = [*bar_entries(_shown(evaluation))]
    if messages:
        entries.append(Line2D([], [], color=palette.PURPLE, linewidth=0.8, label="message"))
    return entries


def bar_entries(drawn: Sequence[Bar]) -> list[Patch]:
    """List what the colours and frames of ops mean."""
    used = np.unique([op.phase for bar in drawn for op in bar.ops])
    phases = [
        Patch(**style.look(name), label=palette.look(name).name)
        for name in (Phase(int(code)).name for code in used)
    ]
    frame = Patch(facecolor="none", edgecolor="black", label="critical path")
    return [*phases, frame] if any(bar.is_critical for bar in drawn) else phases


def mark_entry(label: str) -> Line2D:
    """Say what a black corner means."""
    corner = MarkerStyle(Outline([(-1, 1), (1, 1), (1, -1), (-1, 1)]))
    return Line2D([], [], linestyle="", marker=corner, color=palette.BLACK, label=label)
