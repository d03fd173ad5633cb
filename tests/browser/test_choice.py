"""Schedules chosen on a page, or dropped on it, have the numbers of `pipejax evaluate`."""

import dataclasses
import json
import warnings
from contextlib import suppress
from pathlib import Path

import grammar_cases
import numpy as np
import pytest
from explorer_cases import explored
from grammar_tables import grammar_table
from hypothesis import HealthCheck, given, settings, strategies as st
from playwright.sync_api import Error
from strategies import tables

import pipejax as pj
from pipejax.cli.app import run as pipejax
from pipejax.plots.explorer.payload import page as page_of
from pipejax.schedules import REGISTRY
from pipejax.schedules.cells.ops import ScheduleError
from pipejax.schedules.table.links import LINK_MODELS, LINKS, LinkModel
from pipejax.schedules.table.table_files import to_csv, to_json

TIMES = ["--worker-times", "F=1,B=2.2,I=1.3,W=0.9", "--comm", "0.17"]
DATA = Path(__file__).parents[1] / "data"
SAMPLE = 23  # of all that is offered every so manieth run
WRITTEN_BY_PYTORCH = [
    *("1F1B_4_8.comms", "DualPipeV_4_8.comms", "DualPipeV_4_8", "DualPipe_4_8"),
    *("Interleaved1F1B_4_8.comms", "InterleavedZeroBubble_4_8", "ZBVZeroBubble_4_8"),
]
AS_PYTORCH = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved-zb"]
MAKESPANS = """async (names) => {
  const { library, scene } = explorer;
  const out = [];
  const each = names ? names.map((name) => ({ name })) : library.entries;
  for (const entry of each) {
    const schedule = library.find(entry, entry.workers, entry.microbatches);
    schedule.keys = scene.factors.map(({ key }) => key);
    for (const link of scene.links) {
      await schedule.evaluate(link, scene.factors.map(({ initial }) => initial));
      const { name, stagesPerWorker, workers, microbatches } = entry;
      const found = schedule.error || schedule.makespan;
      out.push([name, stagesPerWorker, workers, microbatches, link, found, schedule.bubbleRatio,
        schedule.peakInFlight]);
    }
  }
  return out;
}"""


def answer(capsys, *arguments):
    assert pipejax([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """A page that carries all that there is to choose from."""
    page = tmp_path_factory.mktemp("pages") / "choose.html"
    shown = ["show", "-s", "1f1b", "-P", "4", "-M", "8", *TIMES, "--choose"]
    assert pipejax([*shown, "--out", str(page)]) == 0
    return page


def test_all_that_is_offered_is_what_evaluate_says(offered, visit, capsys):
    opened = visit(offered)
    result = opened(MAKESPANS)
    assert len({name for name, *_ in result}) == sum(
        "offload" not in builder.options for builder in REGISTRY.values()
    )
    assert {type(makespan) for *_, makespan, _, _ in result} <= {int, float}  # none is refused
    for k, (name, count, workers, microbatches, link, makespan, idle, peaks) in enumerate(result):
        asked = ["-s", name, "-P", workers, "-M", microbatches, *TIMES, "--link", link]
        if "stages_per_worker" in REGISTRY[name].options:
            asked += ["--stages-per-worker", count]
        if k % SAMPLE == 0:
            expected = answer(capsys, "evaluate", *asked)
            assert makespan == pytest.approx(expected["makespan"], rel=1e-9), asked
            assert idle == pytest.approx(expected["bubble_ratio"], abs=1e-9)
            assert peaks == expected["peak_in_flight"]


@pytest.fixture(scope="module")
def csvs(tmp_path_factory):
    """Twenty tables as PyTorch writes them, with transfers and without."""
    folder = tmp_path_factory.mktemp("csvs")
    result = []
    for name in WRITTEN_BY_PYTORCH:
        result.append(folder / f"{name}.csv")
        result[-1].write_text((DATA / result[-1].name).read_text())
    for k, name in enumerate(AS_PYTORCH):
        table = pj.schedules.build(name, num_workers=4, num_microbatches=8 + 4 * (k % 2))
        lowered = pj.links.insert_transfers(table, lowering="pytorch")
        for kind, rows in (("compute", table), ("comms", lowered)):
            result.append(folder / f"{name}.{kind}.csv")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it does not state the shares
                result[-1].write_text(to_csv(rows))
    assert len(result) >= 20
    return result


def test_tables_that_are_dropped_are_what_evaluate_says(offered, csvs, visit, capsys):
    opened = visit(offered)
    opened.page.locator("#open").set_input_files([str(path) for path in csvs])
    opened.wait(f"explorer.schedules.length === {1 + len(csvs)}")
    for link in LINKS:
        opened.set_link(link)
        shown = opened.makespans()[1:]
        for path, makespan in zip(csvs, shown, strict=True):
            expected = answer(capsys, "evaluate", "--table", path, *TIMES, "--link", link)
            assert makespan == pytest.approx(expected["makespan"], rel=1e-9), (path, link)


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


def test_any_table_is_what_the_engine_says(offered, visit):
    """Drawn ones: two pipes, fused pairs, recomputation, waits, transfers in cells, sharding."""
    how = st.fixed_dictionaries({"communication": st.booleans(), "sharding": st.booleans()})
    samples = examples(how.flatmap(lambda how: tables(**how, offloads=False)), 30)
    opened = visit(offered)
    opened("explorer.scene.times.ops[explorer.scene.grammars[0].codes.R] = 1.1")
    times = {"forward": 1.0, "backward": 2.2, "input_grad": 1.3, "weight_grad": 0.9}
    for k, (table, _) in enumerate(samples):
        name = opened(
            "([text, name]) => explorer.library.take(text, name)", [to_json(table), f"t{k}.json"]
        )
        result = opened(MAKESPANS, [name])
        costs = pj.Costs.per_worker(table, **times, recompute=1.1, transfer=0.17)
        for *_, link, makespan, idle, peaks in result:
            run = pj.evaluate(table, costs, link=link)
            assert makespan == pytest.approx(run.makespan, rel=1e-9), (table, link)
            assert idle == pytest.approx(run.bubble_ratio, abs=1e-9)
            assert peaks == run.peak_in_flight.tolist()


def test_a_link_model_is_what_its_record_says(tmp_path, visit, monkeypatch):
    # a message holds its link for latency and transmit time, and arrives a latency later
    store = LinkModel("queued", occupancy="message", lag="latency")
    monkeypatch.setitem(LINK_MODELS, "queued", store)
    page, times = tmp_path / "page.html", TIMES[:2]
    lags = ["--latency", "0.1", "--transmit", "0.2"]
    assert (
        pipejax(["show", "-s", "1f1b", "-P", "4", "-M", "8", *times, *lags, "--out", str(page)])
        == 0
    )
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=2.2, latency=0.1, transmit=0.2)
    opened = visit(page)
    name = opened(TAKE, [to_json(table), "t.json"])
    result = {link: makespan for *_, link, makespan, _, _ in opened(MAKESPANS, [name])}
    assert result["queued"] == pytest.approx(pj.evaluate(table, costs, link="queued").makespan)
    assert result["queued"] > result["delay"]


TAKE = "([text, name]) => explorer.library.take(text, name)"


def as_engine(opened, table, costs, name, *, releases=True):
    """Compare the page's answer for a dropped table with the engine's."""
    for *_, link, makespan, idle, peaks in opened(MAKESPANS, [name]):
        run = pj.evaluate(table, costs, link=link)
        assert makespan == pytest.approx(run.makespan, rel=1e-12), link
        assert idle == pytest.approx(run.bubble_ratio, abs=1e-9)
        assert not releases or peaks == run.peak_in_flight.tolist()


NOT_READ = {
    "mixed": "0X0: this page runs nothing on host links",
    "sharded": "a page does not read tables whose gathers or reductions are on lanes",
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_a_page_does_not_lower_is_refused(name, tmp_path, visit):
    table, costs = grammar_table(name)
    path = tmp_path / "x.html"
    path.write_text(page_of([explored(table, costs)]))
    with pytest.raises(Error, match=NOT_READ[name]):
        visit(path)(TAKE, [to_json(table), "again.json"])


def test_any_grammar_is_lowered_as_the_engine_does(tmp_path, visit):
    """Drawn ones: kinds, rules, lanes, gates, slices, graphs, items; others are refused."""
    samples = []
    for case in examples(grammar_cases.cases(), 25):
        with suppress(ScheduleError):  # a spoiled one, or one that cannot run
            table = case.table()
            costs = dataclasses.replace(case.costs, all_reduce=0.0, update=0.0)
            on_host = np.isin(table.phase, table.grammar.host).any()
            if not (
                on_host
                or table.grammar.lane_sharding
                or table.is_fused.any()
                or costs.per_microbatch()
            ):
                pj.evaluate(table, costs, link="rendezvous")
                samples.append((table, costs))
    assert len(samples) > 5
    for k, (table, costs) in enumerate(samples):
        path = tmp_path / f"{k}.html"
        path.write_text(page_of([explored(table, costs)]))
        opened = visit(path)
        name = opened(TAKE, [to_json(table), "again.json"])
        as_engine(opened, table, costs, name, releases=False)  # drawn kinds free what none took
        opened.context.close()


def test_another_order_of_the_same_kinds_is_dropped(tmp_path, visit, capsys):
    """With times by letters; other kinds and rules are refused, and rows that cannot run."""
    table, costs = grammar_table("braid")
    other, _ = grammar_table("vocabulary")
    path, page = tmp_path / "braid.json", tmp_path / "x.html"
    path.write_text(to_json(table))
    times = "Fa=1,Fd=.6,Fm=1.25,Bm=2,Bd=.5,Ba=1.5"
    shown = ["show", "-t", str(path), "-T", times, "--comm", "0.1", "--out", str(page)]
    assert pipejax(shown) == 0
    capsys.readouterr()
    opened = visit(page)
    rows = [[table.grammar.text(cell) for cell in row] for row in table.rows()]
    rows[1][4:6] = rows[1][5:3:-1]  # a backward before the last forward
    plain = pj.ScheduleTable.from_rows(rows, grammar=table.grammar)
    as_engine(opened, plain, costs, opened(TAKE, [to_json(plain), "plain.json"]))
    with pytest.raises(Error, match=r"own kinds and rules \(Ca, S, Cb, T\) are those of no table"):
        opened(TAKE, [to_json(other), "other.json"])
    late = to_json(table).replace('"1Fa0"', '"x"').replace('"1Ba0"', '"1Fa0"')
    for text, why in (
        (late.replace('"x"', '"1Ba0"'), "a deadlock: ops or transfers wait"),
        (to_json(table).replace('"1Bd1"', '""'), "missing op 1Bd1: Ba on worker 1 waits for it"),
        (to_json(table).replace('"1Bd1"', '"1Bd1@dma"'), '"1Bd1@dma" is no op'),
    ):
        with pytest.raises(Error, match=why):
            opened(TAKE, [text, "wrong.json"])


def test_tables_are_dropped_on_a_page_of_measured_costs(tmp_path, visit, capsys):
    """Times of each stage are taken over for tables of as many stages; others are refused."""
    options = ["--table", "examples/schedule.csv", "--costs", "examples/measured.json"]
    page = tmp_path / "measured.html"
    assert pipejax(["show", *options, "--out", str(page)]) == 0
    capsys.readouterr()
    opened = visit(page)
    assert not opened.page.locator("#add").is_visible()
    other = tmp_path / "other.csv"
    table = pj.schedules.build("looped-bfs", num_workers=4, num_microbatches=8)
    other.write_text(to_csv(table))
    opened.page.locator("#open").set_input_files(str(other))
    opened.wait("explorer.schedules.length === 2")
    for link in LINKS:
        opened.set_link(link)
        expected = answer(
            capsys, "evaluate", "--table", other, "--costs", options[-1], "--link", link
        )
        assert opened.makespans()[1] == pytest.approx(expected["makespan"], rel=1e-9)
    small = tmp_path / "small.csv"
    small.write_text("0F0,0B0\n1F0,1B0\n")
    opened.page.locator("#open").set_input_files(str(small))
    notice = opened.page.locator("#choice-notice")
    notice.wait_for()
    assert "it has 2 stages, and this page has times for 8 stages" in notice.inner_text()
    assert opened("explorer.schedules.length") == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it holds no text"),
        ("banana,0B0\n", '"banana" is no op'),
        ("0F0\n", "needs F, and B or both I and W"),
        ("0F0,0B0,0F0\n", "0F0 stands twice"),
        ("0B0,0F0\n", "stands before what it waits for"),
        ("0F0,0B0\n1B0,1F0\n", "stands before what it waits for"),
        ("0F0,1B0\n1F0,0B0\n", "is on two workers"),
        ("0F0,0O0,0L0,0B0\n", "this page runs nothing on host links"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "every message needs one SEND and one RECV"),
        ('{"rows": []}', "it is JSON"),
    ],
)
def test_what_is_no_table_is_refused_and_says_why(text, why, offered, tmp_path, visit, capsys):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    opened = visit(offered)
    opened.set_link("rendezvous")
    opened.page.locator("#open").set_input_files(str(path))
    if "SEND" in text:  # says so where transfers meet
        opened.wait("explorer.schedules.length === 2")
        message = opened.page.locator(".refused").last
    else:
        message = opened.page.locator("#choice-notice")
    message.wait_for()
    assert why in message.inner_text()
    capsys.readouterr()
    link = ["--link", "rendezvous"]
    assert pipejax(["evaluate", "--table", str(path), *TIMES, *link]) == 2


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
    assert "No dualpipe is here for 4 workers and 4 microbatches" in (
        page.locator("#choice-notice").inner_text()
    )
    assert opened.makespans() == before
    assert page.get_by_label("microbatches", exact=True).input_value() == "8"


def test_an_address_with_what_is_not_there_opens_as_given(offered, visit):
    opened = visit(offered, "show=nothing*3&size=5x7")
    assert opened.page.get_by_label("schedule 1", exact=True).input_value() == "1f1b"
    assert "No nothing is here" in opened.page.locator("#choice-notice").inner_text()
    assert opened("explorer.focused.name") == "1f1b"


def test_a_file_is_dropped_with_the_mouse(offered, visit):
    opened = visit(offered)
    opened(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["0F0,0B0\\n1F0,1B0\\n"], "two.csv"));
          for (const type of ["dragover", "drop"]) {
            document.body.dispatchEvent(new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }));
          }
        }"""
    )
    opened.wait("explorer.schedules.length === 2")
    assert opened.makespans()[1] == pytest.approx(2 * (1 + 2.2) + 2 * 0.17)
    assert "two" in opened.page.locator("#results").inner_text()
