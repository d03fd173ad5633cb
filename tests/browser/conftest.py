"""A browser for the tests of pages: Debian's chromium, driven by Playwright; offline."""

import os
import shutil

import numpy as np
import pytest
from explorer_cases import explored
from playwright.sync_api import sync_playwright

import pipejax as pj
from pipejax.plots.explorer.payload import page as page_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
READY = "html[data-ready]"


def found_browser():
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else BROWSERS
    return next(filter(None, map(shutil.which, names)), None)


def pytest_sessionstart(session):
    if found_browser() is None:
        needed = "the tests of pages need a browser: apt install chromium, or name one in $CHROMIUM"
        pytest.exit(needed, returncode=2)


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        how = {"executable_path": found_browser(), "args": ["--no-sandbox", "--disable-gpu"]}
        opened = playwright.chromium.launch(**how)
        yield opened
        opened.close()


class Visit:
    """A page that is open: what it asked for, and what it complained of."""

    def __init__(self, browser, path, at="", **context):
        settings = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"} | context
        self.context = browser.new_context(**settings)
        self.context.set_offline(True)
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.url = path.as_uri()
        self.page.goto(self.url + (f"#{at}" if at else ""))
        self.page.wait_for_selector(READY, timeout=20_000)
        self.settle()

    def settle(self):
        """Wait until what was done is on the screen, and in the address."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.page.evaluate(f"new Promise(done => {frames})")

    def wait(self, condition):
        """Wait until a condition holds; the page lets nobody evaluate text, so it is asked again."""
        for _ in range(100):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(condition)

    def __call__(self, script, argument=None):
        return self.page.evaluate(script, argument)

    def set_factor(self, key, factor):
        field = self.page.locator(f"[data-factor={key}]")
        field.fill(repr(factor))
        field.press("Enter")
        self.settle()

    def set_link(self, name):
        self.page.get_by_label(name, exact=True).check()
        self.settle()

    def makespans(self):
        """Makespans that the page shows, by schedule."""
        return self("explorer.schedules.map(s => s.error ? null : s.makespan)")

    def place(self, op, index=0):
        """Middle of an op on the screen."""
        return self(
            """([index, label]) => {
              const { bars, schedule } = explorer.panes[index];
              const op = schedule.find(label);
              const axis = explorer.view.over(80, bars.width - 80);
              const [x, y, width, height] = bars.place(axis, op, bars.row(op));
              const box = bars.canvas.getBoundingClientRect();
              return [box.left + x + width / 2, box.top + y + height / 2];
            }""",
            [index, op],
        )

    def close(self):
        self.context.close()


@pytest.fixture
def visit(browser):
    """Open a page; in the end it must have asked for nothing, and complained of nothing."""
    opened = []

    def visit(path, at="", **context):
        opened.append(Visit(browser, path, at, **context))
        return opened[-1]

    yield visit
    for schedule in opened:
        schedule.close()
        assert [u for u in schedule.requests if not u.startswith((schedule.url, "data:"))] == []
        assert schedule.complaints == []


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """A page of one schedule, and its run."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    shown = explored(table, pj.Costs(forward=1, backward=2, transmit=0.25), limits=np.full(4, 3.0))
    path = tmp_path_factory.mktemp("pages") / "one page.html"
    path.write_text(page_of([shown]))
    return path, shown.run


@pytest.fixture
def opened(alone, visit):
    return visit(alone[0])


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A page of 64 workers and 1024 microbatches."""
    table = pj.schedules.build("1f1b", num_workers=64, num_microbatches=1024)
    path = tmp_path_factory.mktemp("pages") / "large.html"
    path.write_text(page_of([explored(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.1))]))
    return path
