"""The report of a trace in a browser: on a phone, in the dark, without a network."""

import base64
import json

import pytest

import pipejax as pj
from pipejax.cli.app import run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a small run with a slow stage."""
    folder = tmp_path_factory.mktemp("reports")
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    costs = pj.Costs(forward=[1.0, 1.0, 1.4, 1.0], backward=2.0)
    (folder / "run.json").write_text(pj.files.chrome_trace(pj.evaluate(table, costs)))
    page = folder / "report.html"
    assert run(["trace", str(folder / "run.json"), "--schedules", "zb-h1", "--out", str(page)]) == 0
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_fits_its_screen(report, browser, width, scheme):
    screen = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    context = browser.new_context(**screen, offline=True)
    page = context.new_page()
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    picture = page.locator(".picture svg")
    assert picture.bounding_box()["width"] >= 600  # it is scrolled rather than made small
    assert page.locator("code").first.bounding_box()["width"] >= 180
    explorer = page.frame_locator("iframe")
    explorer.locator("html[data-ready]").wait_for(timeout=20_000)
    names = explorer.locator(".schedule h2 b").all_inner_texts()
    assert names == ["as it ran", "replayed", "mean pipeline", "first remedy"]
    assert explorer.get_by_label("residuals", exact=True).is_checked()
    context.close()
    assert (asked, complaints) == ([report.as_uri()], [])


# the explorer in a cell of a notebook: its script, with a model in place of the notebook's
CELL = """<!doctype html><div id="cell"></div><script type="module">
import widget from "data:text/javascript;base64,{script}";
const state = {{ page: {page}, height: 640, selected: "" }};
window.heard = [];
widget.render({{
  el: document.getElementById("cell"),
  model: {{
    get: (name) => state[name], set: (name, value) => {{ state[name] = value; }},
    on: () => {{}}, save_changes: () => window.heard.push(state.selected),
  }},
}});
</script>"""


def test_a_chosen_op_reaches_the_notebook(browser):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    widget = pj.plots.explore(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
    script = base64.b64encode(widget.get_state()["_esm"].encode()).decode()
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    shown = json.dumps(widget.page).replace("<", "\\u003c")
    page.set_content(CELL.format(script=script, page=shown))
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(state="attached")
    box = frame.locator("canvas").nth(1).bounding_box()
    # worker 0 runs 0F2 from 6 s to 7 s of 15; the axis begins behind 80 pixels of names
    page.mouse.click(box["x"] + 80 + (box["width"] - 80) * 6.5 / 15, box["y"] + box["height"] / 4)
    page.wait_for_function("window.heard.length > 0")
    assert page.evaluate("window.heard") == ["0F2"]
    assert complaints == []
    page.close()
