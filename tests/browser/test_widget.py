"""The explorer in a cell of a notebook: its script, with a model in place of the notebook's."""

import base64
import json

import pipejax as pj

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
    page.set_content(
        CELL.format(script=script, page=json.dumps(widget.page).replace("<", "\\u003c"))
    )
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(state="attached")
    box = frame.locator("canvas").nth(1).bounding_box()
    # worker 0 runs 0F2 from 6 s to 7 s of 15; the axis begins behind 80 pixels of names
    page.mouse.click(box["x"] + 80 + (box["width"] - 80) * 6.5 / 15, box["y"] + box["height"] / 4)
    page.wait_for_function("window.heard.length > 0")
    assert page.evaluate("window.heard") == ["0F2"]
    assert complaints == []
    page.close()
