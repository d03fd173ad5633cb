"""The house style: colours that grey print and colour-blind readers keep apart, rules of figures."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from colorspacious import cspace_convert
from grammar_tables import grammar_table
from matplotlib.colors import to_rgb

from figures.kit.rules import AXES_DIFFER, describe, faults, figure_caption
from pipejax.analysis.runs.evaluate import ActivationMemory
from pipejax.analysis.uncertainty.sensitivity import PARAMETERS
from pipejax.plots import palette, style
from pipejax.plots.charts import PARAMETER_NAMES, draw_delays, draw_predictions, draw_tornado
from pipejax.plots.fronts import Shown, draw_results
from pipejax.plots.heat_maps import Height, Side, draw_regions
from pipejax.plots.timeline import Curves, draw_memory
from pipejax.schedules import Grammar, OpKind
from pipejax.schedules.cells.ops import KINDS, MICROBATCH, Phase

SEEN_BY = {  # whole deficiencies, by the model of Machado, Oliveira and Fernandes 2009
    "all": None,
    "deuteranopes": "deuteranomaly",
    "protanopes": "protanomaly",
    "tritanopes": "tritanomaly",
}
LEAST_LIGHTNESS, LEAST_DIFFERENCE = 9.0, 12.0  # in CIE L*a*b*, where 100 is from black to white


@pytest.fixture(autouse=True)
def _style():
    style.use()


def lab(colour, seen_by="all"):
    rgb = to_rgb(colour)
    if SEEN_BY[seen_by] is not None:
        space = {"name": "sRGB1+CVD", "cvd_type": SEEN_BY[seen_by], "severity": 100}
        rgb = np.clip(cspace_convert(rgb, space, "sRGB1"), 0, 1)
    return cspace_convert(rgb, "sRGB1", "CIELab")


HATCHED = "A"  # its strokes tell it apart, its white does not
FILLS = {phase: look.fill for phase, look in palette.PHASES.items() if phase != HATCHED}
SHADES = {
    f"{phase} of the second pipe": look.shade
    for phase, look in palette.PHASES.items()
    if KINDS[Phase[phase]].scope == MICROBATCH
}


def test_phases_are_told_apart_in_grey():
    ladder = sorted(lab(fill)[0] for fill in FILLS.values())
    assert min(np.diff(ladder)) >= LEAST_LIGHTNESS


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_phases_and_shades_of_pipes_are_told_apart(seen_by):
    seen = {name: lab(colour, seen_by) for name, colour in (FILLS | SHADES).items()}
    for first, second in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[first] - seen[second]) >= LEAST_DIFFERENCE, (first, second)


@pytest.mark.parametrize("name", ["braid", "vocabulary", "mixed"])
def test_kinds_of_a_table_are_told_apart_in_grey_from_all_that_it_has(name):
    looks = palette.phase_looks(grammar_table(name)[0].used_phases)
    ladder = sorted(lab(look.fill)[0] for look in looks.values())
    assert min(np.diff(ladder)) >= LEAST_LIGHTNESS
    for look in looks.values():
        assert abs(lab(look.fill)[0] - lab(look.ink)[0]) >= 45


@pytest.mark.parametrize("count", [1, 8, 40])
def test_any_number_of_kinds_has_colours(count):
    kinds = {f"K{chr(65 + k // 26)}{chr(65 + k % 26)}": OpKind("x", "x") for k in range(count)}
    looks = palette.phase_looks(Grammar(kinds=kinds).custom_phases)
    assert len({look.fill for look in looks.values()}) == count
    light = [lab(look.fill)[0] for look in looks.values()]
    assert light == sorted(light, reverse=True)  # in their order


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_forward_and_backward_are_far_apart(seen_by):
    """At a glance, in grey; they were 158 and 162 of 255 once."""
    forward, backward, input_grad = (lab(FILLS[name], seen_by)[0] for name in "FBI")
    assert min(forward - backward, forward - input_grad) >= 15


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_what_has_an_order_goes_from_light_to_dark(seen_by):
    steps = -np.diff([lab(colour, seen_by)[0] for colour in palette.ORDERED])
    assert min(steps) >= LEAST_LIGHTNESS


@pytest.mark.parametrize("phase", palette.PHASES)
def test_text_and_strokes_can_be_read_on_every_phase(phase):
    look = palette.PHASES[phase]
    for ground in (look.fill, look.shade):
        assert abs(lab(ground)[0] - lab(look.ink)[0]) >= 45


def good():
    figure, axes = plt.subplots(figsize=(style.COLUMN, 2))
    axes.plot([0, 1], [0, 1], marker="o", color=palette.BLUE, label="a line")
    axes.bar([0, 1], [1, 0.5], color=palette.SILVER)
    axes.set(xlabel="time [s]", ylabel="share")
    figure.legend(loc="outside lower center")
    return describe(figure, "A line\n        that rises."), axes


def test_a_good_figure_has_no_faults():
    figure, _ = good()
    assert faults(figure) == []
    assert figure_caption(figure) == "A line that rises."


def unequal(figure, axes):
    figure.clear()
    first, second = figure.subplots(2)
    first.plot([0, 1], color=palette.BLACK)
    second.plot([0, 2], color=palette.BLACK)
    first.set_ylabel("share")
    second.set_ylabel("share")


SPOIL = {
    "5 inch wide": lambda figure, axes: figure.set_figwidth(5),
    "it has no caption": lambda figure, axes: describe(figure, ""),
    "1 texts of 6 points": lambda figure, axes: axes.text(0.2, 0.5, "small", fontsize=6),
    "'outer' reaches beyond": lambda figure, axes: figure.text(0.98, 0.5, "outer"),
    "'one' and 'two' overlap": lambda figure, axes: (
        axes.text(0.2, 0.5, "one"),
        axes.text(0.21, 0.5, "two"),
    ),
    "no legend names the marker 's'": lambda figure, axes: axes.plot([0.5], [0.5], "sk"),
    "no legend and no text": lambda figure, axes: axes.plot([0.5, 1], [0, 0], palette.GREEN),
    "bars on a logarithmic axis": lambda figure, axes: axes.set_yscale("log"),
    "bars are cut": lambda figure, axes: axes.set_ylim(0, 0.7),
    "hides data": lambda figure, axes: axes.legend(loc="lower center"),
    "panels of 'share' have unequal": unequal,
}


@pytest.mark.parametrize("fault", SPOIL)
def test_a_fault_is_told(fault):
    figure, axes = good()
    SPOIL[fault](figure, axes)
    assert any(line.startswith(fault) or fault in line for line in faults(figure))


def test_a_caption_allows_unequal_axes():
    figure, axes = good()
    unequal(figure, axes)
    describe(figure, f"Their vertical {AXES_DIFFER}.")
    assert faults(figure) == []


def test_figures_are_saved_at_their_size(tmp_path):
    """Text beyond the canvas makes no file larger: a column stays a column."""
    figure, axes = good()
    axes.text(2.0, 0.5, "far out")
    figure.savefig(tmp_path / "any.png")
    height, width, _ = plt.imread(tmp_path / "any.png").shape
    dpi = plt.rcParams["savefig.dpi"]
    assert (width, height) == (int(style.COLUMN * dpi), int(2 * dpi))
    assert plt.rcParams["pdf.fonttype"] == plt.rcParams["ps.fonttype"] == 42


DRAWN = {
    "staleness": lambda axes: draw_delays(axes, np.array([3, 5, 8, 2]), 1.5),
    "sensitivity": lambda axes: draw_tornado(
        axes, 2.0, {"compute.peak": (3.0, 1.5), "model.layers": (1.0, 4.0)}
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_the_commands_draw_can_be_printed(name):
    figure, axes = plt.subplots(figsize=(style.COLUMN, 3.2))
    DRAWN[name](axes)
    assert faults(describe(figure, f"`pipejax {name}`.")) == []


def test_predictions_near_each_other_have_marks():
    _, axes = plt.subplots(figsize=(style.COLUMN, 3.2))
    draw_predictions(axes, np.array([8.3, 9.1, 9.6]), np.array([8.1, 9.4, 9.5]), ["a"] * 3)
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    marks = [t.get_text() for t in axes.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert len(marks) >= 3
    assert all(marks)


def test_one_delay_is_not_the_whole_picture():
    _, axes = plt.subplots()
    draw_delays(axes, np.array([7]), 0.0)
    assert axes.get_xlim() == (-0.6, 3.6)
    assert axes.get_legend() is None  # it is beside the bars


def test_a_front_is_seen_to_the_edges_and_the_rest_is_counted():
    _, axes = plt.subplots()
    step, memory = np.array([1.0, 1.1, 1.2, 30.0]), np.array([5.0, 4.0, 4.5, 4.2])
    sides = [Shown("step time [s]", step), Shown("memory [GB]", memory)]
    ones = np.ones(4, bool)
    draw_results(axes, sides, {"points": ones}, np.array([0, 1]), np.array([0]))
    (front,) = [line for line in axes.lines if line.get_label() == "front"]
    assert axes.get_xlim()[1] < 2
    assert front.get_xdata()[-1] == axes.get_xlim()[1]
    assert axes.get_title(loc="left") == "1 of 4 points lie further out"


def test_a_front_of_what_is_to_be_large_runs_to_where_it_is_small():
    _, axes = plt.subplots()
    rate, bandwidth = np.array([5.0, 3.0, 1.0, 4.0]), np.array([9.0, 2.0, 1.0, 9.5])
    sides = [Shown("rate", rate, more_is_better=True), Shown("bandwidth", bandwidth)]
    message = "x", ["one", "two", "three"]
    draw_results(axes, sides, {"all": np.ones(4, bool)}, np.arange(3), np.array([0]), message)
    (front,) = [line for line in axes.lines if line.get_label() == "front"]
    steps = front.get_path().vertices  # for 3 and less no more is needed than 2
    assert steps[-1].tolist() == [axes.get_xlim()[0], 1.0]
    assert [3.0, 9.0] in steps.tolist()
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3"]
    (named,) = [legend for legend in axes.figure.legends if legend.get_title().get_text() == "x"]
    assert [text.get_text() for text in named.get_texts()] == ["one", "two", "three"]


def test_long_names_of_a_map_are_in_the_picture():
    picture = style.Picture(style.Paper(style.COLUMN), 3.0)
    sides = [Side("across", np.array([1.0, 2.0])), Side("up", np.array([1.0, 2.0]))]
    names = ["interleaved-1f1b stages_per_worker=2", "one = " * 20 + "other"]
    draw_regions(picture.subplots(), *sides, np.array([[0, 1], [1, 0]]), names)
    (legend,) = picture.legends
    assert legend.get_window_extent().width <= picture.bbox.width


def test_a_map_has_lines_of_equal_costs():
    _, axes = plt.subplots()
    sides = [Side("across", np.array([1.0, 2.0])), Side("up", np.array([1.0, 2.0]))]
    flat = Height("time [s]", np.ones((2, 2)))
    draw_regions(axes, *sides, np.zeros((2, 2), int), ["one"], flat)
    assert axes.get_title(loc="left") == ""  # there are none
    height = Height("time [s]", np.array([[1.0, 2.0], [3.0, np.nan]]))
    draw_regions(axes, *sides, np.array([[0, 0], [0, -1]]), ["one"], height)
    assert axes.get_title(loc="left") == "lines: time [s]"


def test_numbers_of_a_logarithmic_axis_stand_apart():
    _, axes = plt.subplots()
    axes.plot([2.0, 30.0], [1.0, 1e4])
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        style.name_ticks(axis)
    axes.figure.canvas.draw()
    texts = [
        [text for label in axis.get_minorticklabels() if (text := label.get_text())]
        for axis in (axes.xaxis, axes.yaxis)
    ]
    assert {"5", "20"} <= {*texts[0]} <= {"0.5", "2", "5", "20", "50"}
    assert texts[1] == []
    assert axes.yaxis.get_major_formatter()(1e5) == "100,000"


def test_the_machine_stands_above_the_work_in_a_tornado():
    _, axes = plt.subplots()
    swings = {"compute.peak": (3.0, 1.5), "model.layers": (1, 9), "collectives.latency": (1.9, 2.1)}
    draw_tornado(axes, 2.0, swings)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["layers", "latency of a collective", "peak FLOP/s"]  # from below
    assert {*PARAMETERS} <= {*PARAMETER_NAMES}


def test_both_bars_of_a_tornado_are_seen_where_both_lengthen_the_step():
    _, axes = plt.subplots()
    swings = {"model.layers": (3.0, 4.0), "compute.peak": (3.0, 1.5), "model.heads": (None, 3.0)}
    draw_tornado(axes, 2.0, swings)
    bars = [(round(bar.get_y(), 3), bar.get_height(), bar.get_width()) for bar in axes.patches]
    assert {(round(y), height) for y, height, width in bars if width == 50} >= {(0, 0.7)}
    layers = [(y, height) for y, height, width in bars if height == 0.35]
    assert sorted(layers) == [(0.65, 0.35), (1.0, 0.35)]  # side by side


def test_a_memory_limit_is_a_line_above_what_keeps_to_it():
    ones = np.ones(2)
    held = ActivationMemory(
        worker=np.array([0, 0, 1]),
        time=np.array([0.0, 1.0, 0.0]),
        held=np.array([1.0, 3.0, 2.0]),
        peak=np.array([3.0, 2.0]),
        peak_at=np.array([1.0, 0.0]),
        **dict.fromkeys(("sizes", "weight_share", "checkpoints"), ones),
    )
    _, axes = plt.subplots()
    draw_memory(axes, Curves(held, "held", "{:g}".format, limit=4.0), until=2.0)
    lines = [part.get_segments() for part in axes.collections if hasattr(part, "get_segments")]
    levels = [float(line[0][0, 1]) for line in lines]
    tops = [float(line.get_ydata().min()) for line in axes.lines if line.get_marker() != "o"]
    assert len(levels) == 2
    ends = zip((0.5, 1.5), levels, tops, strict=True)
    heights = [(base - level, base - top) for base, level, top in ends]
    assert heights == pytest.approx(np.array([[1, 3 / 4], [1, 2 / 4]]) * heights[0][0])
    assert heights[0][0] < 1  # of a row
    assert axes.get_title(loc="left") == "held, peak 3, dashed: limit 4"
