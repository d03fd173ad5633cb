"""The numbers of the page are those of `pipejax evaluate`, wherever sliders and switches stand."""

import numpy as np
import pytest
from explorer_cases import GIVEN, build_case, explored

import pipejax as pj
from pipejax.base import longest_path
from pipejax.cli.app import run as pipejax
from pipejax.plots.explorer.payload import page as page_of
from pipejax.schedules.table.links import LINKS

SIZES = ["--workers", "4", "--microbatches", "8"]
SCHEDULES = [
    *("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "chimera", "hanayo"),
    *("zb-h1", "zb-h2", "pipedream"),
]
SETTINGS = [  # factors of F, B, I, W and messages; B is I + W
    {},
    {"F": 1.37, "transmit": 2.5},
    {"B": 1.5, "I": 1.75, "W": 1.25},
    {"F": 0.3, "B": 0.8, "I": 0.9, "W": 0.7, "transmit": 0.0},
    {"transmit": 31.7},
]


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """A page of ten schedules, and their tables, which do not change as sliders move."""
    folder = tmp_path_factory.mktemp("pages")
    times = [*SIZES, "--worker-times", "F=1,B=2", "--comm", "0.2"]
    page = folder / "ten.html"
    assert pipejax(["show", "--schedules", ",".join(SCHEDULES), *times, "--out", str(page)]) == 0
    tables = {name: folder / f"{name}.json" for name in SCHEDULES}
    for name, path in tables.items():
        export = ["export", "--schedule", name, *times, "--format", "json", "--out", str(path)]
        assert pipejax(export) == 0
    return page, tables


@pytest.mark.parametrize("link", LINKS)
def test_sliders_move_the_makespan_to_what_evaluate_says(link, ten, visit, answer):
    page, tables = ten
    opened = visit(page)
    opened.set_link(link)
    for setting in SETTINGS:
        factors = {"F": 1.0, "B": 1.0, "I": 1.0, "W": 1.0, "transmit": 1.0} | setting
        for key, factor in factors.items():
            opened.set_factor(key, factor)
        times = f"F={factors['F']!r},B={2 * factors['B']!r},I={factors['I']!r},W={factors['W']!r}"
        for (schedule, table), shown in zip(tables.items(), opened.makespans(), strict=True):
            options = ["--table", table, "--worker-times", times]
            comm = repr(0.2 * factors["transmit"])
            expected = answer("evaluate", *options, "--comm", comm, "--link", link)
            assert shown == pytest.approx(expected["makespan"], rel=1e-9), (schedule, setting)
            if setting == {}:
                assert shown == expected["makespan"]  # to the last bit
    cells = opened.page.locator("#results td.makespan")
    assert [float(cell.get_attribute("data-value")) for cell in cells.all()] == opened.makespans()


def test_a_dragged_slider_prices_anew(alone, visit):
    path, run = alone
    opened = visit(path)
    box = opened.page.locator("#factor-F").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2, steps=8)
    opened.page.mouse.up()
    opened.settle()
    factor = opened("explorer.state.factors.get('F')")
    assert factor > 1.5
    scaled = pj.Costs(forward=factor, backward=2.0, transmit=0.25)
    expected = pj.evaluate(run.table, scaled).makespan
    shown = float(opened.page.locator("#makespan").get_attribute("data-value"))
    assert shown == pytest.approx(expected, rel=1e-9)
    assert f"{expected:.5g} s" in opened.page.locator("#makespan").inner_text()
    opened.page.get_by_role("button", name="as given").click()
    opened.settle()
    assert opened.makespans() == [run.makespan]


@pytest.mark.parametrize("link", LINKS)
def test_slack_path_messages_and_waits_are_those_of_the_engine(link, alone, visit):
    path, options = alone
    opened = visit(path, f"link={link}&x.transmit=3&x.F=0.7")
    run = pj.evaluate(options.table, pj.Costs(forward=0.7, backward=2.0, transmit=0.75), link=link)
    program = run.program
    lag = np.asarray(opened("Array.from(explorer.focused.vector)"))[program.lag_index]
    nodes = opened("Array.from(explorer.focused.program.op)")
    slack = longest_path.slack(program.preds, run.node_duration, lag)[nodes]
    result = opened("[...explorer.focused.program.op.keys()].map(op => explorer.focused.slack(op))")
    assert np.allclose(result, slack, rtol=0, atol=1e-9)
    critical = opened("Array.from(explorer.focused.isCritical)")
    assert (np.array(critical, bool)[1:] == run.critical[1:]).all()
    times = opened(
        """[...explorer.focused.messages.producer.keys()].map(k =>
          [explorer.focused.messageTimes.leave[k], explorer.focused.messageTimes.arrive[k]])"""
    )
    expected = np.stack([run.message_start, run.message_finish], axis=1)
    assert np.allclose(times, expected, rtol=1e-12)
    assert opened("explorer.focused.bubbleRatio") == pytest.approx(run.bubble_ratio, rel=1e-9)
    shares = dict(opened("[...explorer.focused.shares]"))
    total = sum(shares.values())
    kinds = {"transmit": "message"}
    for name, share in run.path_share.items():
        assert shares[kinds.get(name, name)] / total == pytest.approx(share, rel=1e-9)
    last = opened(
        """[...explorer.focused.program.op.keys()].map(op =>
          explorer.focused.waits(op).filter(wait => wait.isLast).map(wait => wait.at)[0] ?? 0)"""
    )
    assert np.allclose(last, run.node_start[nodes], rtol=1e-12)


def test_memory_curves_are_those_of_the_run(alone, visit):
    path, options = alone
    opened = visit(path, "x.B=2&curve=memory")
    run = pj.evaluate(options.table, pj.Costs(forward=1.0, backward=4.0, transmit=0.25))
    memory = pj.analysis.activation_memory(run)
    steps = opened(
        """explorer.panes[0].schedule.memorySteps("memory").map(s =>
          [Array.from(s.time), Array.from(s.held), s.peak, s.peakAt])"""
    )
    for worker, (time, held, peak, at) in enumerate(steps):
        expected = memory.curve(worker)
        assert np.allclose(time, expected[0])
        assert np.allclose(held, expected[1])
        assert (peak, at) == pytest.approx((memory.peak[worker], memory.peak_at[worker]))
    flight = opened("explorer.panes[0].schedule.memorySteps('flight').map(s => s.peak)")
    assert flight == run.peak_in_flight.tolist()


def test_the_form_says_which_sum_is_the_largest(tmp_path, visit):
    out = tmp_path / "x.html"
    arguments = ["--schedule", "chimera", "--workers", "4", "--microbatches", "4"]
    assert pipejax(["show", *arguments, "--stage-times", "F=1,B=1", "--out", str(out)]) == 0
    opened = visit(out)
    lines = opened.page.locator(".form li")
    sums = lines.locator(".sum").all_inner_texts()
    assert sums == ["6F + 4B + 7c", "4F + 6B + 7c"]
    assert lines.nth(0).get_attribute("aria-current") == "true"
    opened.set_factor("B", 2.0)
    assert lines.nth(0).get_attribute("aria-current") is None
    assert lines.nth(1).get_attribute("aria-current") == "true"
    assert lines.nth(1).locator(".value").inner_text() == "16 s"
    assert opened.makespans() == [16.0]


@pytest.mark.parametrize("name", GIVEN)
def test_any_table_and_costs(name, tmp_path, visit):
    """Costs by stage and microbatch, updates within a table, fused pairs, host links."""
    table, costs = build_case(name)
    path = tmp_path / "x.html"
    path.write_text(page_of([explored(table, costs)]))
    opened = visit(path, "messages=1&curve=memory")
    for link in LINKS:
        opened.set_link(link)
        run = pj.evaluate(table, costs, link=link)
        assert opened.makespans() == [run.makespan]
        assert np.allclose(opened("Array.from(explorer.focused.busy)"), run.busy, rtol=1e-12)
        memory = pj.analysis.activation_memory(run)
        peaks = opened("explorer.panes[0].schedule.memorySteps('memory').map(s => s.peak)")
        assert np.allclose(peaks, memory.peak)
    for _ in range(12):  # through all that has details
        opened.page.keyboard.press(".")
    assert opened.page.locator("#op").inner_text()
