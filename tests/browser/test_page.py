"""The page in a browser: it loads from a file, zooms, answers the mouse and keys, and stays fluid."""

import dataclasses
import io
import re

import matplotlib.image
import numpy as np
import pytest
from explorer_cases import CROSSED, explored
from grammar_tables import grammar_table
from markupsafe import escape

import pipejax as pj
from pipejax.base import longest_path
from pipejax.plots import palette
from pipejax.plots.explorer.payload import page
from pipejax.schedules.table.links import Links
from pipejax.traces.replaying.replay import Replay

LOADS_IN = 3.0  # seconds, 64 workers x 1024 microbatches
FRAMES = 30.0  # a second
GUTTER = 80  # pixels left of the time axis


def seen(opened):
    return opened("[explorer.view.from, explorer.view.to]")


def over_bars(opened, share=0.5):
    box = opened.page.locator("canvas.bars").first.bounding_box()
    x = box["x"] + GUTTER + share * (box["width"] - GUTTER)
    opened.page.mouse.move(x, box["y"] + box["height"] / 2)
    return x


def pixels(opened, selector="canvas.bars"):
    """Colours of a canvas on the screen, (pixels, 3)."""
    picture = opened.page.locator(selector).first.screenshot()
    return (matplotlib.image.imread(io.BytesIO(picture))[..., :3] * 255).reshape(-1, 3)


def test_it_opens_from_a_file_and_draws(opened):
    assert opened.page.url.startswith("file:///")
    assert opened.page.title() == "1f1b, 4 workers, 8 microbatches"
    assert len(np.unique(pixels(opened), axis=0)) > 10
    assert opened.page.locator("#notice").inner_text() == ""


def test_the_wheel_zooms_about_the_pointer_and_dragging_moves(opened):
    whole = seen(opened)
    over_bars(opened, 0.25)
    under = whole[0] + 0.25 * (whole[1] - whole[0])
    opened.page.mouse.wheel(0, -600)
    opened.settle()
    zoomed = seen(opened)
    assert zoomed[1] - zoomed[0] < 0.6 * (whole[1] - whole[0])
    assert zoomed[0] + 0.25 * (zoomed[1] - zoomed[0]) == pytest.approx(under, rel=1e-3)
    before = pixels(opened)
    x = over_bars(opened, 0.5)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 100, 200, steps=5)
    opened.page.mouse.up()
    opened.settle()
    moved = seen(opened)
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert (pixels(opened) != before).any()
    opened.page.get_by_role("button", name="Fit").click()
    assert seen(opened) == whole


def test_a_marked_range_is_shown(alone, visit):
    opened = visit(alone[0])
    x = over_bars(opened, 0.2)
    opened.page.keyboard.down("Shift")
    opened.page.mouse.down()
    opened.page.mouse.move(x + 300, 200, steps=4)
    opened.page.mouse.up()
    opened.page.keyboard.up("Shift")
    opened.settle()
    box = opened.page.locator("canvas.bars").bounding_box()
    whole = 1.01 * alone[1].makespan
    expected = 300 / (box["width"] - GUTTER) * whole
    assert np.diff(seen(opened))[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("op", ["0F0", "2B3", "3F7"])
def test_the_pointer_over_an_op_says_what_it_is(op, alone, visit):
    path, run = alone
    opened = visit(path)
    opened.page.mouse.move(*opened.place(op))
    opened.settle()
    tip = opened.page.locator("#tip")
    assert tip.is_visible()
    text = tip.inner_text()
    stage, letter, microbatch = int(op[0]), op[1], int(op[2:])
    table = run.table
    worker, slot = np.argwhere(
        (table.stage == stage)
        & (table.phase == {"F": 1, "B": 2}[letter])
        & (table.microbatch == microbatch)
    )[0]
    node = run.program.node_of_cell[worker, slot]
    assert text.startswith(op)
    assert f"{run.start[worker, slot]:.5g} s to {run.finish[worker, slot]:.5g} s" in text
    lag = np.asarray(opened("Array.from(explorer.focused.vector)"))[run.program.lag_index]
    slack = longest_path.slack(run.program.preds, run.node_duration, lag)[node]
    message = "on the critical path" if run.critical[node] else f"slack {slack:.5g} s"
    assert message in text, text
    opened.page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_a_click_chooses_an_op_and_says_what_it_waits_for(opened):
    opened.page.mouse.click(*opened.place("2B3"))
    opened.settle()
    text = opened.page.locator("#op").inner_text()
    assert text.startswith("2B3 backward")
    assert "message 3B3 from worker 3" in text
    opened.page.locator("#op .waits button").first.click()
    assert not opened.page.locator("#op").inner_text().startswith("2B3")
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("#op").is_visible()


def test_search_finds_and_goes_on(opened):
    plain = pixels(opened)
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("m3 B")
    opened.settle()
    assert opened.page.locator("#matches").inner_text() == "4 found"
    assert (pixels(opened) != plain).mean() > 0.05  # all others fade
    result = []
    for _ in range(4):
        opened.page.keyboard.press("Enter")
        result.append(opened("explorer.state.selected"))
    assert sorted(result) == ["0B3", "1B3", "2B3", "3B3"]
    opened.page.locator("#find").fill("critical")
    count = int(opened.page.locator("#matches").inner_text().split()[0])
    on_path = "explorer.focused.path.filter(n => explorer.focused.program.nodeOps[n] >= 0)"
    assert count == opened(f"{on_path}.length")


def test_what_is_shown_can_be_switched(opened):
    for name in ("critical path", "messages"):
        before = pixels(opened)
        box = opened.page.get_by_label(name, exact=True)
        box.set_checked(not box.is_checked())
        opened.settle()
        assert (pixels(opened) != before).any(), name
    held = opened.page.locator("canvas.held")
    assert held.is_visible()
    opened.page.get_by_label("memory", exact=True).uncheck()
    assert not held.is_visible()


def test_keys(alone, visit):
    opened = visit(alone[0])
    press = opened.page.keyboard.press
    press("+")
    press("+")
    zoomed = seen(opened)
    assert zoomed[1] - zoomed[0] < 0.5 * 1.01 * alone[1].makespan
    press("ArrowRight")
    assert seen(opened)[0] > zoomed[0]
    press("0")
    assert seen(opened)[0] == 0
    press("n")
    first = opened("explorer.state.selected")
    press("]")
    assert opened("explorer.state.selected") != first
    press("[")
    assert opened("explorer.state.selected") == first
    press(".")
    assert opened("explorer.state.selected") == "0F1"
    press("l")
    assert opened("explorer.state.link") == "queued"
    press("r")
    assert opened("explorer.state.link") == "delay"
    press("g")
    assert not opened.page.locator("canvas.held").is_visible()
    press("m")
    assert opened("explorer.state.shown.messages") is True
    press("d")
    assert opened("document.documentElement.hasAttribute('data-dark')")
    press("?")
    assert opened.page.locator("#keys").is_visible()
    press("Escape")
    assert not opened.page.locator("#keys").is_visible()


def test_all_can_be_reached_and_has_a_name(opened):
    nameless = opened(
        """[...document.querySelectorAll("input, button, canvas:not([aria-hidden])")].filter(e =>
          !(e.ariaLabel || e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()))
          .map(e => e.outerHTML)"""
    )
    assert nameless == []
    reached = set()
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        active = "document.activeElement"
        reached.add(opened(f"{active}.id || {active}.className || {active}.value"))
    names = {"find", "zoom-in", "fit", "theme", "help", "bars", "factor-F", "factor-transmit"}
    assert names <= reached
    label = opened.page.locator("canvas.bars").get_attribute("aria-label")
    assert re.search(r"1f1b: [\d.]+ s, idle [\d.]+ %", label)
    opened.page.wait_for_timeout(600)
    assert "1f1b" in opened.page.locator("#spoken").inner_text()
    opened.page.locator("#factor-F").focus()
    before = opened.makespans()
    opened.page.keyboard.press("ArrowRight")  # moves the slider, not the view
    opened.settle()
    assert opened.makespans() > before
    assert seen(opened)[0] == 0


def test_a_deep_link_restores_all(alone, visit):
    opened = visit(alone[0])
    opened.set_link("rendezvous")
    opened.set_factor("F", 1.7)
    opened.page.keyboard.press("m")
    opened.page.locator("#find").fill("m3")
    opened.page.mouse.click(*opened.place("2B3"))
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("d")
    opened.wait("location.hash.includes('theme=dark')")
    at = opened.page.url.split("#")[1]
    again = visit(alone[0], at)
    assert again("explorer.state.write()") == opened("explorer.state.write()") == at
    assert again.makespans() == opened.makespans()
    assert seen(again) == pytest.approx(seen(opened), rel=1e-6)
    assert again.page.locator("#op").inner_text() == opened.page.locator("#op").inner_text()
    assert again.page.get_by_label("rendezvous", exact=True).is_checked()
    assert again.page.locator("#find").input_value() == "m3"
    again("location.hash = 'link=queued'")
    again.wait("explorer.state.link === 'queued' && explorer.state.find === ''")


def test_a_page_can_open_with_a_part_in_sight(alone, tmp_path, visit):
    path = tmp_path / "part.html"
    run = alone[1]
    shown = explored(run.table, run.costs)
    path.write_text(page([shown], view=(2.0, 8.0), show={"critical": False}))
    opened = visit(path)
    assert seen(opened) == [2.0, 8.0]
    assert not opened.page.get_by_label("critical path", exact=True).is_checked()
    opened.page.keyboard.press("0")
    opened.wait("location.hash === '#view=all'")
    assert seen(visit(path, "view=all"))[0] == 0


def test_an_address_with_nonsense_opens_as_given(alone, visit):
    at = "link=no&x.F=-1&x.B=abc&view=9~1&worker=99&focus=7&selected=9F9&theme=pink"
    opened = visit(alone[0], at)
    assert opened.makespans() == [alone[1].makespan]
    assert opened("explorer.state.write()") in ("", "selected=9F9")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(scheme, alone, visit):
    opened = visit(alone[0], color_scheme=scheme)
    dark = scheme == "dark"
    assert (pixels(opened).mean() < 128) == dark or pixels(opened)[0].mean() < 60
    assert (pixels(opened)[0].mean() < 60) == dark
    colours = opened(
        """["ink", "quiet", "accent", "limit"].map(name =>
          getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim())"""
    )
    grounds = opened(
        """["paper", "panel", "row-chosen"].map(name =>
          getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim())"""
    )
    for colour in colours:
        for ground in grounds[: 3 if colour == colours[0] else 2]:
            assert contrast(colour, ground) >= 4.5, (colour, ground)
    opened.page.get_by_role("button", name="Light or dark").click()
    opened.settle()
    assert (pixels(opened)[0].mean() < 60) != dark


def contrast(first, other):
    """Contrast of two colours as WCAG defines it."""

    def luminance(colour):
        parts = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    bright, dim = sorted([luminance(first), luminance(other)], reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("width", [1280, 700, 360])
def test_nothing_is_cut_in_a_narrow_window(width, alone, visit):
    opened = visit(alone[0], viewport={"width": width, "height": 700})
    assert opened("document.documentElement.scrollWidth") <= width
    assert opened.page.locator("#factor-F").bounding_box()["width"] > 150


def test_long_names_do_not_widen_the_panel(tmp_path, visit):
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
    name = "a/folder/of/tables/with_a_rather_long_name_{}.csv"
    tables = [dataclasses.replace(table, name=name.format(k)) for k in range(2)]
    costs = pj.Costs(forward=1.0, backward=2.0)
    path = tmp_path / "names.html"
    path.write_text(page([explored(table, costs) for table in tables]))
    opened = visit(path, viewport={"width": 1300, "height": 800})
    assert opened("(p => p.scrollWidth <= p.clientWidth)(document.querySelector('.panel'))")


def test_a_large_page_loads_soon_and_pans_fluidly(large, visit):
    opened = visit(large)
    loaded, rates = opened("explorer.readyAt") / 1000, []
    for zoom in (1.05, 4, 30, 300, 3000):
        opened("zoom => { explorer.fit(); explorer.view.zoom(zoom, explorer.middle()); }", zoom)
        opened.settle()
        seconds = opened(
            """() => new Promise(done => {
              const begun = performance.now();
              let frames = 0;
              const step = () => {
                if (++frames === 60) { done((performance.now() - begun) / 1000); return; }
                explorer.view.pan(frames < 30 ? 0.01 : -0.01);
                explorer.viewChanged();
                requestAnimationFrame(step);
              };
              requestAnimationFrame(step);
            })"""
        )
        rates.append(60 / seconds)
    assert loaded < LOADS_IN
    assert min(rates) >= FRAMES


@pytest.mark.parametrize("link", ["queued", "blocking", "rendezvous"])
def test_a_large_page_changes_its_link_model_soon(link, large, visit):
    opened = visit(large)
    took = opened(
        """async link => {
          const begun = performance.now();
          await explorer.setLink(link);
          return (performance.now() - begun) / 1000;
        }""",
        link,
    )
    assert took < 1.0
    assert opened("explorer.focused.makespan") > 3474.9


def test_a_link_model_that_deadlocks_says_why(tmp_path, visit):
    rows = [row.split(",") for row in CROSSED]
    table = pj.ScheduleTable.from_rows(rows, name="<b>mine</b>")
    path = tmp_path / "x.html"
    path.write_text(page([explored(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.1))]))
    opened = visit(path)
    assert opened.page.locator("h1").inner_text() == "<b>mine</b>"
    opened.page.get_by_label("rendezvous", exact=True).check()
    opened.settle()
    assert "deadlock" in opened.page.locator(".refused").inner_text()
    assert not opened.page.locator("canvas.bars").is_visible()
    opened.page.keyboard.press("n")  # nothing to choose, nothing to complain of
    opened.page.get_by_label("queued", exact=True).check()
    opened.settle()
    assert opened.page.locator("canvas.bars").is_visible()


def test_a_time_can_be_typed(opened):
    field = opened.page.locator("[data-factor=transmit]")
    for text, factor in (("500 ms", 2.0), ("0.75s", 3.0), ("1,5", 1.5), ("x2", 2.0)):
        field.fill(text)
        field.press("Enter")
        opened.settle()
        assert opened("explorer.state.factors.get('transmit')") == pytest.approx(factor), text
        assert field.input_value()[1:] == f"{factor:g}"


def test_within_a_report_it_has_no_address_and_complains_of_nothing(alone, tmp_path, browser):
    report = tmp_path / "report.html"
    text = str(escape(alone[0].read_text()))
    report.write_text(f'<!doctype html><iframe srcdoc="{text}" width=900 height=600></iframe>')
    context = browser.new_context()
    opened, complaints = context.new_page(), []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(report.as_uri())
    frame = opened.frames[1]
    frame.wait_for_selector("html[data-ready]", timeout=20_000)
    frame.evaluate("explorer.setFactor('F', 2)")
    opened.wait_for_timeout(600)  # longer than it waits before it keeps its state
    assert frame.evaluate("explorer.focused.makespan") > alone[1].makespan
    whole = frame.evaluate("explorer.view.to")
    opened.mouse.move(400, 150)
    opened.mouse.wheel(0, -600)  # the wheel scrolls the report
    opened.wait_for_timeout(200)
    assert frame.evaluate("explorer.view.to") == whole
    assert complaints == []
    context.close()


def test_what_is_no_factor_is_refused_aloud_and_stays(alone, visit):
    opened = visit(alone[0])
    field = opened.page.locator("[data-factor=transmit]")
    message = opened.page.locator("[data-wrong=transmit]")
    for text in ("banana", "-2", "", "3 days"):
        field.fill(text)
        field.press("Enter")
        opened.settle()
        assert message.is_visible()
        assert f'"{text}" is not a factor of at least 0' in message.inner_text()
        assert field.input_value() == text
        assert opened.makespans() == [alone[1].makespan]
    field.fill("2")
    field.press("Enter")
    opened.settle()
    assert not message.is_visible()
    assert field.get_attribute("aria-invalid") == "false"
    field.fill("banana")
    field.press("Enter")
    opened.page.get_by_role("button", name="as given").click()  # another choice mends it
    assert not message.is_visible()


@pytest.mark.parametrize("height", [620, 800, 1000])
def test_a_page_of_one_schedule_fits_its_window_so_the_wheel_zooms(height, alone, visit):
    opened = visit(alone[0], viewport={"width": 1280, "height": height})
    assert opened("document.documentElement.scrollHeight") <= height
    curve = opened.page.locator("canvas.held").bounding_box()
    assert curve["y"] + curve["height"] > 0.7 * height  # few workers leave no half empty


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A page of 16 workers and 64 microbatches, and its run, with a limit that is far above."""
    table = pj.schedules.build("interleaved-1f1b", num_workers=16, num_microbatches=64)
    costs = pj.Costs.per_worker(table, forward=1.0, backward=2.0, transfer=0.1)
    shown = explored(table, costs, limits=np.full(16, 1000.0))
    path = tmp_path_factory.mktemp("pages") / "crowded.html"
    path.write_text(page([shown]))
    return path, shown.run


def test_the_critical_path_paints_no_row_black_on_a_phone(crowded, visit):
    opened = visit(crowded[0], viewport={"width": 390, "height": 844})
    ink = np.array([27, 31, 36])
    black = (np.abs(pixels(opened) - ink).max(axis=1) < 12).mean()
    assert 0.001 < black < 0.05


def test_names_of_workers_are_whole(crowded, visit):
    opened = visit(crowded[0])
    box = opened.page.locator("canvas.bars").bounding_box()
    clip = {"x": box["x"], "y": box["y"], "width": 6, "height": box["height"]}
    image = matplotlib.image.imread(io.BytesIO(opened.page.screenshot(clip=clip)))[..., :3]
    assert image.min() > 0.9  # nothing reaches the edge


def test_a_limit_far_above_leaves_no_flat_curve(crowded, visit):
    opened = visit(crowded[0], "curve=memory")
    held = pixels(opened, "canvas.held")
    box = opened.page.locator("canvas.held").bounding_box()
    shape = round(box["height"]), round(box["width"]), 3
    blue = np.abs(held.reshape(shape) - [0, 114, 178]).max(axis=2) < 60
    assert np.ptp(np.nonzero(blue)[0]) > 0.5 * shape[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A page of a measured run that paused twice, what is known of it, and its stalls."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    forward, backward = np.random.default_rng(1).uniform(1.0, 2.0, (2, 4, 8))
    times = {"forward": forward, "backward": backward}
    run = pj.evaluate(table, pj.Costs(**times, transmit=0.2), link="blocking")
    trace = pj.traces.record_runs([run])
    paused = 0.3 * (trace.start > 8.0) + 0.7 * (trace.start > 14.0)
    trace = dataclasses.replace(trace, start=trace.start + paused, end=trace.end + paused)
    pipelines = pj.traces.find_pipelines(trace)
    result = Replay(pipelines, Links.resolve("blocking"), np.full(6, 0.2), np.zeros(1), {})
    (pipeline,) = result.pipelines.pipelines
    costs = pj.traces.measured_costs(result, pipeline=pipeline)
    starts = result.pipelines.starts(pipeline)
    replayed = explored(result.pipelines.table, costs, result.links)
    replayed = replayed._replace(name="replayed", recorded=starts)
    path = tmp_path_factory.mktemp("pages") / "recorded.html"
    path.write_text(page([replayed, explored(table, costs, result.links)]))
    letters = [trace.phases[code] for code in trace.phase]
    labels = [f"{trace.stage[k]}{letters[k]}{trace.microbatch[k]}" for k in pipeline.slices]
    op_values = (x[pipeline.slices] for x in (trace.start, result.residuals, result.stalls))
    return path, labels, *op_values


def op_pixels(opened, index, what):
    """Return a number of every op of a schedule of the page."""
    return opened(
        "([k, what]) => [...explorer.schedules[k].ops.phase.keys()].map(op => "
        "({ start: explorer.schedules[k].opStart[op], stall: explorer.schedules[k].stall(op) })[what])",
        [index, what],
    )


def colour(opened, label, index):
    """Return the colour in the middle of the lower edge of an op, where no text stands."""
    x, y = opened.place(label, index)
    shot = opened.page.screenshot(clip={"x": x, "y": y + 7, "width": 1, "height": 1})
    red, green, blue = (matplotlib.image.imread(io.BytesIO(shot))[0, 0, :3] * 255).astype(int)
    return f"#{red:02X}{green:02X}{blue:02X}"


def test_ops_of_own_kinds_are_found_and_say_what_they_wait_for(tmp_path, visit):
    """A collective waits for all workers; a search for a microbatch shows its slices."""
    path = tmp_path / "x.html"
    runs = [explored(*grammar_table(name)) for name in ("vocabulary", "slices")]
    path.write_text(page(runs))
    opened = visit(path)
    result = {}
    for text in ("Ca", "s1", "m1", "1f1.0"):
        opened.page.locator("#find").fill(text)
        opened.settle()
        result[text] = opened("explorer.schedules.map(s => s.matches.reduce((sum, f) => sum + f))")
    # s1 is stage 1, and the vocabulary's forward of microbatch 1 on both workers
    assert result == {"Ca": [6, 0], "s1": [8, 8], "m1": [12, 8], "1f1.0": [0, 1]}
    waits = """name => {
      const one = explorer.schedules[0];
      return one.waits(one.find(name)).map(({ op, isLast }) => [one.label(op), isLast]);
    }"""
    assert opened(waits, "Ca1") == [["1F1", True], ["Cb0", False], ["Cb0", False]]
    assert opened("explorer.schedules[0].label(explorer.schedules[0].awaiting(22))") == "Ca1"
    assert "thin rows: net" in opened.page.locator("#legend").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_recorded_run_stands_above_its_replay(scheme, recorded, visit):
    """It stays where it is when times change; colours say how much later its ops started."""
    path, labels, starts, residuals, stalls = recorded
    opened = visit(path, "critical=0", color_scheme=scheme, viewport={"width": 1200, "height": 900})
    names = [heading.inner_text() for heading in opened.page.locator(".schedule h2 b").all()]
    assert names == ["as it ran", "replayed", "1f1b"]
    np.testing.assert_allclose(op_pixels(opened, 0, "start"), starts, atol=1e-12)
    np.testing.assert_allclose(op_pixels(opened, 1, "start"), starts - residuals, atol=1e-9)
    np.testing.assert_allclose(op_pixels(opened, 0, "stall"), stalls, atol=1e-9)
    latest, first = labels[residuals.argmax()], labels[residuals.argmin()]
    ends = palette.SECONDS[:: 1 if scheme == "light" else -1]
    for index in (0, 1):
        assert [colour(opened, op, index) for op in (first, latest)] == [ends[0], ends[-1]]
    assert "residual 0 s1 s" in opened.page.locator(".schedule h2").first.inner_text()
    opened.page.mouse.move(*opened.place(latest, 1))
    opened.settle()
    tip, start = opened.page.locator("#tip").inner_text(), starts[residuals.argmax()]
    for message in (
        f"start as it ran {start:.5g} s",
        f"start replayed {start - 1:.5g} s",
        "residual 1 s",
    ):
        assert message in tip
    opened.page.mouse.move(5, 5)
    opened.page.get_by_label("residuals", exact=True).uncheck()
    opened.settle()
    fill = palette.USUAL[latest[1]].fill.upper()
    assert [colour(opened, latest, index) for index in (0, 1, 2)] == [fill] * 3
    opened.wait("location.hash.includes('residuals=0')")
    opened.page.keyboard.press("e")
    opened.settle()
    assert colour(opened, latest, 2) == fill != colour(opened, latest, 0)
    before = opened.makespans()
    opened.set_factor("B", 1.5)
    ran, replayed, _ = opened.makespans()
    assert (ran, replayed > before[1]) == (before[0], True)
    np.testing.assert_allclose(op_pixels(opened, 0, "start"), starts, atol=1e-12)
    assert opened("explorer.schedules[0].residuals.low") < -1.0  # it is late no more
