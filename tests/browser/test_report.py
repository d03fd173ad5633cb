"""The report of a trace in a browser: on a phone, in the dark, without a network."""

import pytest

import pipejax as pj
from pipejax.cli.app import run


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a small run with a slow stage."""
    folder = tmp_path_factory.mktemp("reports")
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    costs = pj.Costs(forward=[1.0, 1.0, 1.4, 1.0], backward=2.0)
    text = pj.files.chrome_trace(pj.evaluate(table, costs))
    (folder / "run.json").write_text(text)
    page = folder / "report.html"
    assert run(["trace", str(folder / "run.json"), "--schedules", "zb-h1", "--out", str(page)]) == 0
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_fits_its_screen(report, browser, width, scheme):
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, offline=True
    )
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
