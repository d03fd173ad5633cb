"""Timelines as pictures and in the terminal: one axis, crop, sizes, pipes, captions, no side effects."""

import io
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from colorspacious import cspace_convert
from daily import with_cases
from grammar_tables import grammar_table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from rich.console import Console
from rich.style import Style

import pipejax as pj
from figures.kit.rules import faults, figure_caption
from pipejax.analysis.runs.timeline import (
    arrows,
    bars,
    depths,
    part_window,
    second_pipe,
    second_pipe_name,
)
from pipejax.base import display
from pipejax.cli.output.terminal_timeline import ShownRun, print_legend, print_run
from pipejax.plots import palette
from pipejax.plots.timeline import HATCH, _Number

LEAST_LIGHTNESS = 9.0  # between forwards and backwards, in CIE L*
COSTS = pj.Costs(forward=1.0, backward=2.0, transmit=0.3)
# two pipes in opposite directions; a forward of the second runs with a backward of the first
DUAL = [["0F0", "(1F1;0B0)OVERLAP_F_B", "1B1"], ["0F1", "1F0", "1B0", "0B1"]]


def run(name, workers=4, microbatches=8, costs=COSTS, **options):
    size = {"num_workers": workers, "num_microbatches": microbatches}
    return pj.evaluate(pj.schedules.build(name, **size, **options), costs)


@pytest.fixture(scope="module")
def chimera():
    return run("chimera")


@pytest.fixture(scope="module")
def figure(chimera):
    return pj.plot([chimera, run("zb-h1")], messages=True, caption=True)


def test_matplotlib_stays_as_it_is(chimera, tmp_path):
    before, backend, figures = dict(mpl.rcParams), mpl.get_backend(), plt.get_fignums()
    picture = chimera.plot(size="column", font="serif", font_size=9)
    picture.savefig(tmp_path / "one.pdf")
    assert chimera._repr_svg_().startswith("<svg")
    assert (dict(mpl.rcParams), mpl.get_backend(), plt.get_fignums()) == (before, backend, figures)
    pdf = (tmp_path / "one.pdf").read_bytes()
    assert (b"/FontFile2" in pdf, b"/Type3" in pdf) == (True, False)  # embedded, as TrueType


def test_runs_share_one_axis_and_none_is_cut(figure):
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() == pytest.approx((0, 32.6))
    assert first.get_title(loc="left") == "chimera: 32.6 s, idle 26.4 %, link model delay"
    assert [t.get_text() for t in second.get_yticklabels()] == [f"worker {w}" for w in range(4)]
    assert second.get_xlabel() == "time [s]"


def test_it_can_be_printed_and_says_what_it_shows(figure):
    assert faults(figure) == []
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *("forward", "backward", "input gradient", "weight gradient", "second pipe"),
        *("critical path", "idle", "message"),
    ]
    assert figure_caption(figure) == (
        "4 workers, 8 microbatches, F 1 s, messages transmit 0.3 s, link model delay. chimera: B 2 s, "
        "makespan 32.6 s, bubble ratio 0.2638. zb-h1: I 1 s, W 1 s, makespan 30.6 s, bubble ratio "
        "0.2157."
    )
    below = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    assert below == figure_caption(figure)


def test_of_several_couples_of_pipes_every_second_one_has_strokes():
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4, pipes=4)
    assert {op.microbatch for op in second_pipe(table)} == {1, 3}
    assert second_pipe_name([table]) == "every second pipe"


@with_cases("size width", ("column", 3.33), ("page", 7.0), ("9.5cm", 9.5 / 2.54), (5, 5.0))
def test_sizes(chimera, size, width):
    assert pj.plot(chimera, size=size).get_figwidth() == pytest.approx(width)


def test_a_column_can_be_printed(chimera):
    picture = pj.plot(chimera, size="column", part="warmup", messages=True)
    assert faults(picture) == []
    assert picture.axes[0].get_xlim() == pytest.approx((0, 7.2))
    assert figure_caption(picture).endswith("Shown: 0 to 7.2 s.")


def test_numbers_stand_where_they_fit(chimera):
    for size, has_numbers in (("page", True), (1.0, False)):
        picture = pj.plot(chimera, size=size, stop=31.0)
        picture.draw_without_rendering()
        (axes,) = picture.axes
        numbers = [text for text in axes.findobj(_Number) if text.get_visible()]
        assert bool(numbers) is has_numbers
        bars = [
            path.get_extents(axes.transData)
            for group in axes.collections
            if isinstance(group, PolyCollection)
            for path in group.get_paths()
        ]
        for number in numbers:
            box = number.get_window_extent()
            assert any(bar.x0 <= box.x0 and box.x1 <= bar.x1 for bar in bars), number
            assert axes.bbox.x0 <= box.x0
            assert box.x1 <= axes.bbox.x1


def test_numbers_of_a_row_all_stand_or_none():
    """Two digits need more room than one, forwards are shorter: no number vanishes alone."""
    counts = []
    for size in (7.0, 5.5, 4.0, 3.0):
        picture = pj.plot(run("1f1b", 4, 12, pj.Costs(forward=1.0, backward=1.5)), size=size)
        picture.draw_without_rendering()
        (axes,) = picture.axes
        seen = {}
        for text in axes.findobj(_Number):
            seen.setdefault(round(text.get_position()[1]), set()).add(text.get_visible())
        assert all(len(flags) == 1 for flags in seen.values())
        counts.append(sum(True in flags for flags in seen.values()))
    assert counts[0] == 4
    assert counts[-1] == 0


def test_stages_of_a_worker_go_from_dark_to_light():
    shown = run("interleaved-1f1b", stages_per_worker=3)
    assert depths(shown.table) == [1.0] * 4 + [0.5] * 4 + [0.0] * 4
    assert depths(run("zb-v").table) == [1.0] * 4 + [0.0] * 4
    assert not any(depths(run("chimera").table))
    picture = shown.plot()
    assert "darker: earlier stages" in [t.get_text() for t in picture.legends[0].get_texts()]
    colours = {c.get_facecolor()[0].tobytes() for c in picture.axes[0].collections if hatchless(c)}
    assert len(colours) == 6  # forward and backward, each in three shades


def hatchless(collection):
    return isinstance(collection, PolyCollection) and len(collection.get_facecolor())


def test_shades_of_stages_stay_apart_in_grey():
    """Beside each other in one schedule: forwards and backwards, or forwards, I and W."""
    for phases in ("FB", "FIW"):
        looks = [palette.PHASES[letter].deepened(share) for letter in phases for share in (0, 1)]
        ladder = sorted(grey(np.array(to_rgb(look.fill))) for look in looks)
        assert min(np.diff(ladder)) >= 7.0, ladder


def test_messages_cross_no_number():
    picture = pj.plot(run("interleaved-1f1b"), messages=True)
    (axes,) = picture.axes
    lines = max(c.get_zorder() for c in axes.collections if type(c).__name__ == "LineCollection")
    assert lines < min(c.get_zorder() for c in axes.collections if isinstance(c, PolyCollection))


def test_transfers_have_a_lane_below_the_ops_of_both_workers():
    shown = pj.evaluate(
        pj.schedules.build("1f1b", num_workers=3, num_microbatches=4), COSTS, link="rendezvous"
    )
    picture = pj.plot(shown, transfers=True)
    colour = to_rgb(palette.MESSAGE)
    boxes = [
        path.get_extents()
        for group in picture.axes[0].collections
        if isinstance(group, PolyCollection) and colour in map(tuple, group.get_facecolor()[:, :3])
        for path in group.get_paths()
    ]
    assert len(boxes) == 2 * len(arrows(shown))
    assert all(0.1 < box.y0 - round(box.y0) < box.y1 - round(box.y0) < 0.5 for box in boxes)
    assert "transfer" in [text.get_text() for text in picture.legends[0].get_texts()]


@with_cases("name below", ("braid", ["net"]), ("vocabulary", ["net"]), ("mixed", ["net", "host"]))
def test_lanes_are_thin_rows_below_their_worker(name, below):
    table, costs = grammar_table(name)
    shown = pj.evaluate(table, costs)
    picture = pj.plot(shown, size="page", caption=True)
    assert faults(picture) == []
    names = [text.get_text() for text in picture.legends[0].get_texts()]
    assert f"thin rows: {', '.join(below)}" in names
    assert {phase.kind.name for phase in table.grammar.custom_phases} <= {*names}
    tops = {}
    looks = palette.phase_looks(table.used_phases)
    colour_lanes = {to_rgb(looks[phase.name].fill): phase.kind.lane for phase in table.used_phases}
    for group in picture.axes[0].collections:
        if isinstance(group, PolyCollection) and len(group.get_facecolor()):
            lane = colour_lanes.get(tuple(group.get_facecolor()[0, :3]))
            for box in (path.get_extents() for path in group.get_paths()):
                tops.setdefault(lane, set()).add((round(box.y0 % 1, 9), round(box.height, 9)))
    order = [tops[lane] for lane in ("compute", *below)]
    assert [len(lanes) for lanes in order] == [1] * len(order)
    ((_, whole),), *thin = order
    assert all(height < 0.6 * whole for ((_, height),) in thin)
    tops = [(top - 0.5) % 1 for ((top, _),) in order]  # from the upper edge of the row on
    assert tops == sorted(tops)


def test_what_runs_have_of_their_own_looks_alike_in_one_picture():
    picture = pj.plot([pj.evaluate(*grammar_table("mixed")), run("1f1b"), run("zb-h1")])
    (patches,) = [
        c for c in picture.axes[0].collections if hatchless(c) and has_colour(c, "#123456")
    ]
    assert patches.get_paths()
    table, _ = grammar_table("mixed")
    phases = [*table.used_phases, *run("zb-h1").table.used_phases]
    dispatch = palette.phase_looks(phases)["D"].fill
    assert any(has_colour(c, dispatch) for c in picture.axes[0].collections if hatchless(c))


def has_colour(collection, colour):
    return tuple(collection.get_facecolor()[0, :3]) == to_rgb(colour)


def test_a_slice_stands_behind_its_microbatch():
    table, costs = grammar_table("slices")
    shown = pj.evaluate(table, costs)
    (axes,) = pj.plot(shown).axes
    assert {text.get_text() for text in axes.findobj(_Number)} == {"0.0", "0.1", "1.0", "1.1"}
    whole = part_window(run("1f1b"), "warmup")._replace(stop=shown.makespan)
    assert "│F1.0│" in terminal(ShownRun(shown, None, whole, False, True), None)


def test_a_name_that_is_long_takes_one_line(chimera):
    picture = pj.plot({"mine.py:warm": chimera}, size="column")
    assert picture.axes[0].get_title(loc="left") == "mine.py:warm: 32.6 s, idle 26.4 %"


def test_pipes_are_told_apart_by_strokes(chimera):
    (axes,) = chimera.plot().axes
    strokes = [c for c in axes.collections if isinstance(c, PolyCollection) and c.get_hatch()]
    drawn_second = sum(len(c.get_paths()) for c in strokes)
    table = chimera.table
    second = np.isin(table.ops.microbatch, np.flatnonzero(table.pipe_of_microbatch))
    assert drawn_second == second.sum() > 0
    at_once = [p.get_extents() for c in strokes for p in c.get_paths() if p.get_extents().x0 == 0]
    assert [round((box.y0 + box.y1) / 2) for box in at_once] == [3]  # it begins at the last worker
    assert {c.get_hatch() for c in strokes} == {HATCH}
    (one_pipe,) = run("1f1b").plot().axes
    assert not any(c.get_hatch() for c in one_pipe.collections if isinstance(c, PolyCollection))


def test_a_fused_pair_of_two_pipes_is_two_halves():
    """As DualPipe's: the hatched forward of one pipe above the backward of the other."""
    table = pj.ScheduleTable.from_rows(DUAL, placement=[[0, 1], [1, 0]], pipe_of_microbatch=[0, 1])
    (axes,) = table.plot().axes
    groups = [c for c in axes.collections if isinstance(c, PolyCollection)]
    heights = [path.get_extents().height for c in groups if c.get_hatch() for path in c.get_paths()]
    assert len(heights) == 4
    assert min(heights) == pytest.approx(max(heights) / 2)


def grey(colours):
    return cspace_convert(colours, "sRGB1", "CIELab")[..., 0]


@pytest.mark.parametrize("size", ["page", "column"])
def test_forward_and_backward_stay_apart_in_grey_with_strokes(chimera, size):
    picture = pj.plot(chimera, size=size, critical=False)
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    (axes,) = picture.axes
    table, seen = chimera.table, {}
    for cell, microbatch in np.stack([table.ops.cell, table.ops.microbatch], 1).tolist():
        worker, slot = divmod(cell, table.num_slots)
        (op,) = table.cell(worker, slot)
        start, finish = chimera.start[worker, slot], chimera.finish[worker, slot]
        ends = [(start, worker - 0.3), (finish, worker + 0.3)]
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        patch = pixels[int(len(pixels) - y0) : int(len(pixels) - y1), int(x0) + 1 : int(x1)]
        pipe = int(table.pipe_of_microbatch[microbatch])
        seen.setdefault((op.phase.name, pipe), []).append(grey(patch).mean())
    forward, backward = (
        [lightness for (name, _), values in seen.items() if name == letter for lightness in values]
        for letter in "FB"
    )
    assert min(forward) - max(backward) >= LEAST_LIGHTNESS, (min(forward), max(backward))


def test_parts_of_a_run():
    """On a worker the warm-up ends with its first backward, the cool-down begins behind its last F."""
    shown = run("1f1b", costs=pj.Costs(forward=1.0, backward=2.0))
    windows = [tuple(part_window(shown, name)) for name in ("warmup", "steady", "cooldown")]
    assert windows == [(0.0, 10.0), (10.0, 22.0), (22.0, 33.0)]
    with pytest.raises(ValueError, match="gpipe has none"):
        part_window(run("gpipe"), "steady")


def test_large_pictures_are_pixels_and_not_drawn_unasked(chimera, monkeypatch):
    monkeypatch.setattr(display, "MAX_CELLS", 10)
    assert chimera._repr_svg_() is None
    monkeypatch.setattr("pipejax.plots.timeline.MAX_SHAPES", 10)
    assert "<image" in chimera.plot()._repr_svg_()


def test_without_matplotlib_a_notebook_shows_text(chimera, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [x for x in sys.modules if x.startswith(("pipejax.plots.", "matplotlib."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(pj), "plot", raising=False)
    assert chimera._repr_svg_() is None


def terminal(shown, colours):
    # a style keeps the codes of the first console that it was shown on
    Style.parse.cache_clear()
    Style._add.cache_clear()
    out = Console(
        file=io.StringIO(), force_terminal=colours is not None, color_system=colours, width=100
    )
    print_run(out, shown, 8, 80)
    print_legend(out, [shown])
    return out.file.getvalue()


def test_the_terminal_has_the_colours_of_the_figures(chimera):
    whole = part_window(chimera, "warmup")._replace(stop=chimera.makespan)
    shown = ShownRun(chimera, None, whole, False, True)
    coloured, plain = terminal(shown, "truecolor"), terminal(shown, None)
    for letter in "FB":
        for colour in (palette.PHASES[letter].fill, palette.PHASES[letter].shade):
            red, green, blue = (round(255 * part) for part in to_rgb(colour))
            assert f"48;2;{red};{green};{blue}" in coloured
    first = plain.splitlines()[0]
    assert first.startswith("worker 0 ┃F")  # its edge says that it is critical
    assert "·" in first
    assert "/" in first
    assert "\x1b" not in plain


def test_the_terminal_has_a_line_for_each_lane():
    table, costs = grammar_table("mixed")
    single = pj.evaluate(table, costs)
    whole = part_window(run("1f1b"), "warmup")._replace(stop=single.makespan)
    shown = ShownRun(single, None, whole, False, True)
    lines = terminal(shown, None).splitlines()
    names = [line[:8].strip() for line in lines[:6]]
    assert names == ["worker 0", "net", "host", "worker 1", "net", "host"]
    assert "│D0" in lines[1]
    assert "X0" in lines[2]
    assert "Z router" in "".join(lines[6:])
    assert "48;2;18;52;86" in terminal(shown, "truecolor")  # the colour that it says


def test_show_of_several(call, answer, tmp_path):
    three = ["show", "-S", "gpipe,1f1b,chimera", "-P", "2", "-M", "4", "-W", "F=1,B=2"]
    _, out, _ = call(*three, "--to", "4", "--caption", "under", "--width", "60")
    heads = [line.split()[0] for line in out.splitlines() if " on 2 workers: " in line]
    assert heads == ["gpipe", "1f1b", "chimera"]
    assert "shown: 0 to 4 s" in out
    assert "2 workers, 4 microbatches" in out
    message = answer(*three)
    assert [row["schedule"] for row in message["runs"]] == ["gpipe", "1f1b", "chimera"]
    picture = tmp_path / "three.svg"
    answer(*three, "--size", "8.5cm", "--caption", "beside", "--out", picture)
    caption = picture.with_suffix(".md").read_text()
    assert caption == f"![three.svg](three.svg)\n\n{message['caption']}\n"
    assert 'width="240.944' in picture.read_text()[:2000]


def test_labels_and_title(answer, tmp_path):
    two = ["show", "-S", "gpipe,1f1b", "-P", "2", "-M", "4"]
    picture = tmp_path / "two.svg"
    message = answer(*two, "--labels", "all first, one by one", "--title", "Two $x$", "-o", picture)
    assert "all first: makespan" in message["caption"]
    text = picture.read_text()
    assert [part in text for part in ("Two $x$", "one by one: ", "gpipe")] == [True, True, False]


def test_an_all_reduce_that_takes_no_time_has_no_row():
    """A model without data parallelism costs none; the updates beside it take their time."""
    costs = {"forward": 1.0, "backward": 2.0, "update": 1.0}
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    for time in (0.0, 1.0):
        run = pj.evaluate(table, pj.Costs(**costs, all_reduce=time))
        rows = [label.get_text() for label in pj.plot(run).axes[0].get_yticklabels()]
        assert ("all-reduce" in rows) == (time > 0)
        assert {bar.ops[0].phase.name for bar in bars(run, untimed=False)} == {
            *"FBU",
            *("A" if time > 0 else ""),
        }
