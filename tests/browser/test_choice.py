"""Schedules chosen on a page have the numbers of `pipejax evaluate`."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grammar_cases
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from strategies import tables

import pipejax as pj
from pipejax.cli.app import run as pipejax
from pipejax.plots.explorer.payload import Explored, page as page_of
from pipejax.schedules import REGISTRY
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.links import LINK_MODELS, LinkModel

TIMES = ["--worker-times", "F=1,B=2.2,I=1.3,W=0.9", "--comm", "0.17"]
SAMPLE = 23  # of all that is offered every so manieth run
MAKESPANS = (Path(__file__).parents[1] / "data" / "chosen_makespans.js").read_text()


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """A page that carries all that there is to choose from."""
    page = tmp_path_factory.mktemp("pages") / "choose.html"
    shown = ["show", "-s", "1f1b", "-P", "4", "-M", "8", *TIMES, "--choose"]
    assert pipejax([*shown, "--out", str(page)]) == 0
    return page


def test_all_that_is_offered_is_what_evaluate_says(offered, visit, answer):
    opened = visit(offered)
    result = opened(MAKESPANS)
    builders = REGISTRY.values()
    assert len({name for name, *_ in result}) == sum("offload" not in b.options for b in builders)
    assert {type(makespan) for *_, makespan, _, _ in result} <= {int, float}  # none is refused
    for k, (name, count, workers, microbatches, link, makespan, idle, peaks) in enumerate(result):
        asked = ["-s", name, "-P", workers, "-M", microbatches, *TIMES, "--link", link]
        if "stages_per_worker" in REGISTRY[name].options:
            asked += ["--stages-per-worker", count]
        if k % SAMPLE == 0:
            expected = answer("evaluate", *asked)
            assert makespan == pytest.approx(expected["makespan"], rel=1e-9), asked
            assert idle == pytest.approx(expected["bubble_ratio"], abs=1e-9)
            assert peaks == expected["peak_in_flight"]


def examples(strategy, count):
    """So many draws, which one page is asked about one after the other."""
    samples = []

    @settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def draw(value):
        samples.append(value)

    draw()
    return samples


def test_any_table_is_what_the_engine_says(tmp_path, visit):
    """Drawn ones: two pipes, fused pairs, recomputation, waits, sharding."""
    how = st.fixed_dictionaries({"communication": st.just(False), "sharding": st.booleans()})
    samples = examples(how.flatmap(lambda how: tables(**how, offloads=False)), 30)
    carried = {f"t{k}": table for k, (table, _) in enumerate(samples)}
    times = {"forward": 1.0, "backward": 2.2, "input_grad": 1.3, "weight_grad": 0.9}
    times |= {"recompute": 1.1, "transfer": 0.17}
    costs = {name: pj.Costs.per_worker(table, **times) for name, table in carried.items()}
    runs = {k: pj.evaluate(replace(x, name=k), costs[k]) for k, x in carried.items()}
    opened = visit(offering(tmp_path, runs.values()))
    for run in runs.values():
        as_engine(opened, run)


def offering(folder, runs):
    """Write a page that carries runs to choose from, beside one of 1f1b."""
    shown = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    page = folder / "page.html"
    run = pj.evaluate(shown, pj.Costs(forward=1.0, backward=2.2, latency=0.1, transmit=0.2))
    page.write_text(page_of([Explored(run)], choices=[*runs]))
    return page


def test_a_link_model_is_what_its_record_says(tmp_path, visit, monkeypatch):
    # a message holds its link for latency and transmit time, and arrives a latency later
    store = LinkModel("queued", occupancy="message", lag="latency")
    monkeypatch.setitem(LINK_MODELS, "queued", store)
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.2, latency=0.1, transmit=0.2)
    opened = visit(offering(tmp_path, [pj.evaluate(table, costs)]))
    result = {link: makespan for *_, link, makespan, _, _ in opened(MAKESPANS, ["chimera"])}
    assert result["queued"] == pytest.approx(pj.evaluate(table, costs, link="queued").makespan)
    assert result["queued"] > result["delay"]


def as_engine(opened, run):
    """Compare the page's answer for a carried run with the engine's."""
    for *_, link, makespan, idle, peaks in opened(MAKESPANS, [run.schedule]):
        expected = pj.evaluate(run.table, run.costs, link=link)
        assert makespan == pytest.approx(expected.makespan, rel=1e-12), link
        assert idle == pytest.approx(expected.bubble_ratio, abs=1e-9)
        assert peaks == pytest.approx(expected.peak_in_flight.tolist())


def test_any_grammar_runs_as_the_engine_does(tmp_path, visit):
    """Drawn ones: kinds, rules, lanes, gates, slices, graphs, items."""
    runs = []
    for case in examples(grammar_cases.cases(), 25):
        with suppress(ScheduleError):  # a spoiled one, or one that cannot run
            table, costs = replace(case.table(), name=f"t{len(runs)}"), case.costs
            pj.evaluate(table, costs, link="rendezvous")
            runs.append(pj.evaluate(table, costs))
    assert len(runs) > 5
    opened = visit(offering(tmp_path, runs))
    for run in runs:
        as_engine(opened, run)


def test_schedules_workers_and_microbatches_are_chosen(offered, visit):
    opened = visit(offered)
    page = opened.page
    page.get_by_label("schedule 1", exact=True).select_option("interleaved-1f1b")
    opened.wait("explorer.focused.name === 'interleaved-1f1b'")
    page.get_by_label("stages per worker 1", exact=True).select_option("4")
    opened.wait("explorer.focused.stages === 16")
    page.get_by_label("microbatches", exact=True).select_option("16")
    opened.wait("explorer.focused.microbatches === 16")
    page.get_by_role("button", name="Compare with another").click()
    opened.wait("explorer.schedules.length === 2")
    page.get_by_label("schedule 2", exact=True).select_option("zb-v")
    opened.wait("explorer.schedules[1].name === 'zb-v'")
    assert page.locator("#subtitle").inner_text() == "4 workers, 16 microbatches"
    assert page.locator("h1").inner_text() == "2 schedules"
    assert page.locator("#results tbody tr").count() == 2
    assert page.locator("#factor-W").is_visible()
    opened.wait("location.hash.includes('size=4x16')")
    again = visit(offered, page.url.split("#")[1])
    assert again.makespans() == opened.makespans()
    page.get_by_role("button", name="leave out zb-v").click()
    opened.wait("explorer.schedules.length === 1")
    assert not page.locator("#factor-W").is_visible()  # nothing has it


def test_what_is_not_there_for_a_size_is_said(offered, visit):
    opened = visit(offered)
    page = opened.page
    page.get_by_label("schedule 1", exact=True).select_option("dualpipe")
    opened.wait("explorer.focused.name === 'dualpipe'")
    before = opened.makespans()
    page.get_by_label("microbatches", exact=True).select_option("4")  # fewer than it needs
    page.locator("#choice-notice").wait_for()
    notice = page.locator("#choice-notice").inner_text()
    assert "No dualpipe is here for 4 workers and 4 microbatches" in notice
    assert opened.makespans() == before
    assert page.get_by_label("microbatches", exact=True).input_value() == "8"


def test_an_address_with_what_is_not_there_opens_as_given(offered, visit):
    opened = visit(offered, "show=nothing*3&size=5x7")
    assert opened.page.get_by_label("schedule 1", exact=True).input_value() == "1f1b"
    assert "No nothing is here" in opened.page.locator("#choice-notice").inner_text()
    assert opened("explorer.focused.name") == "1f1b"
