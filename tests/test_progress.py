"""Long calls tell how far they are: whoever asks, and a notebook by itself."""

import json
import sys
import types
from xml.etree import ElementTree

import pytest

import pipejax as pj
from pipejax.base import progress
from pipejax.base.progress import telling

TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)


class Notebook:
    """A kernel of a notebook, as far as it concerns bars: what it shows, and a clock."""

    def __init__(self):
        self.shown, self.now = [], 0.0

    def display(self, picture, *, raw, display_id):
        assert raw
        assert display_id
        self.shown.append([picture])
        return types.SimpleNamespace(update=self.update)

    def update(self, picture, *, raw):
        assert raw
        self.shown[-1].append(picture)


@pytest.fixture
def notebook(monkeypatch):
    result = Notebook()
    monkeypatch.setattr(progress, "_notebook", lambda: result.display)
    monkeypatch.setattr(progress.time, "monotonic", lambda: result.now)
    return result


def test_a_bar_shows_after_a_second_and_not_too_often(notebook):
    with telling("work <1>", None) as tell:
        for done in range(1000):
            notebook.now = done * 0.002  # two seconds in all
            tell(done, 1000, "best 3 s")
            assert bool(notebook.shown) == (notebook.now >= 1)
    (pictures,) = notebook.shown
    assert 5 <= len(pictures) <= 7  # five in a second, and the end
    assert pictures[-1]["text/plain"] == "work <1>: 999 of 1000, 2 s, best 3 s"
    bar = ElementTree.fromstring(pictures[-1]["text/html"])
    assert (bar[0].tag, bar[0].attrib) == ("progress", {"value": "999", "max": "1000"})


def test_what_is_short_shows_nothing(notebook):
    with telling("work", None) as tell:
        tell(1, 2, "")
    assert notebook.shown == []


def test_without_a_total_there_is_no_bar_but_a_line(notebook):
    def work():
        with telling("work", None) as tell:
            notebook.now = 1.0
            tell(3, None, "runs")
            tell(4, None, "runs")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [picture["text/plain"] for picture in notebook.shown[0]] == [
        "work: 3, 1 s, runs",
        "work: 4, 1 s, runs",
    ]
    assert "<progress" not in notebook.shown[0][0]["text/html"]


def test_scripts_and_terminals_of_ipython_are_no_notebooks(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert progress._notebook() is None
    assert "IPython" not in sys.modules
    core = types.ModuleType("IPython.core.getipython")
    shown = types.ModuleType("IPython.display")
    shown.display = print
    kernel = types.SimpleNamespace(kernel=1)
    for shell, expected in ((None, None), (object(), None), (kernel, print)):
        core.get_ipython = lambda shell=shell: shell
        for name, module in (("", core), (".core.getipython", core), (".display", shown)):
            monkeypatch.setitem(sys.modules, f"IPython{name}", module)
        assert progress._notebook() is expected


def calls():
    slow = pj.Costs(forward=[1.0, 1.3, 0.9, 1.1], backward=2.0, latency=0.5)
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    two = pj.Costs(forward=1.0, backward=2.0, latency=0.9)
    yield ("order", lambda f: pj.search.messages(table, two, iterations=3, on_progress=f), (3, 3))
    lengths = [1.0, 1.1, 1.2, 8.0, 2.0, 1.3, 4.0, 1.4]
    uneven = pj.costing.scaled_costs(slow, table, microbatches=lengths)
    yield (
        "arrange",
        lambda tell: pj.search.microbatches(TABLE, uneven, iterations=2, on_progress=tell),
        (2, 2),
    )
    yield "formula", lambda tell: pj.formula(pj.lower(TABLE), on_progress=tell), (None, None)


@pytest.mark.parametrize(
    ("call", "last"), [entry[1:] for entry in calls()], ids=["order", "arrange", "formula"]
)
def test_long_calls_tell(call, last):
    message = []
    call(lambda *entry: message.append(entry))
    assert message == sorted(message, key=lambda entry: entry[0])
    done, total, text = message[-1]
    assert last == (None, None) or (done, total) == last
    assert total is None or total >= done > 0
    assert text
    with pytest.raises(ValueError, match="on_progress must be a function of done, total and text"):
        call(3)


@pytest.mark.slow
def test_a_notebook_shows_bars_and_tables(data):
    import nbformat
    from nbclient import NotebookClient

    texts = (data / "notebook_cells.txt").read_text().split("\n---\n")
    cells = [nbformat.v4.new_code_cell(text) for text in texts]
    book = NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()
    outputs = [[output.data for output in cell.outputs if "data" in output] for cell in book.cells]
    assert [len(output) for output in outputs] == [1, 1, 1, 1]  # and no error, no stream
    assert outputs[0][0]["text/plain"].startswith("work: 3 of 3, ")
    assert '<progress value="3" max="3">' in outputs[0][0]["text/html"]
    assert "0F0" in outputs[1][0]["text/html"]
    assert outputs[1][0]["text/plain"].startswith("ScheduleTable('1f1b': 4 workers x ")
    assert ">makespan<" in outputs[2][0]["text/html"]
    assert outputs[3][0]["text/plain"] == "33.0"


# Results in notebooks: the explorer as a widget, and data frames


@pytest.fixture(scope="module")
def run():
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    return pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))


def test_a_widget_holds_the_page_of_its_runs(run):
    widget = pj.plots.explore([run, run], height=500)
    assert widget.page.count("<html") == 1
    assert (widget.height, widget.selected) == (500, "")
    script = widget.get_state()["_esm"]
    assert 'model.set("selected", data.selectedOp)' in script
    assert "selectedOp: state.selected" in widget.page  # what the page tells the script


def test_python_hears_of_the_op_that_is_chosen(run):
    widget, heard = pj.plots.explore(run), []
    widget.observe(lambda change: heard.append(change.new), "selected")
    widget.set_state({"selected": "1B3"})  # as the script does
    assert heard == ["1B3"]


def test_a_run_has_a_row_for_each_op(run):
    ops = pj.analysis.frame(run)
    assert len(ops) == 2 * 2 * 4
    times = ops.assign(time=ops.finish - ops.start)
    assert times.groupby("worker").time.sum().tolist() == run.busy.tolist() == [12.0, 12.0]
    path = times[times.is_critical]  # without messages, its ops fill the step
    assert path.time.sum() == ops.finish.max() == run.makespan == 15.0
    assert sorted(ops[ops.stage == 1].microbatch) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_fused_pair_is_one_row():
    table = pj.schedules.build("dualpipe", num_workers=2, num_microbatches=8)
    ops = pj.analysis.frame(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
    assert "F+B" in {*ops.kind}
    cells = [cell for row in table.rows() for cell in row if cell]
    assert len(ops) == len(cells)
    assert (ops.kind.str.count("[+]") + 1).sum() == sum(map(len, cells))


def test_records_have_a_row_each():
    costs = pj.Costs(forward=1.0, backward=2.0)
    scenario = pj.Scenario("1f1b", num_workers=2, num_microbatches=4, costs=costs)
    explanation = pj.explain(scenario)
    remedies = pj.analysis.frame(explanation.remedies)
    assert remedies.what.tolist() == [remedy.what for remedy in explanation.remedies]
    parts = pj.analysis.frame(explanation.parts)
    assert parts.seconds.sum() == pytest.approx(explanation.step_time)


def test_records_within_records_have_dotted_names(run):
    rows = pj.analysis.frame([run])
    assert rows["links.model"].tolist() == ["delay"]


def test_frames_survive_json(run):
    assert len(json.loads(pj.analysis.frame(run).to_json(orient="records"))) == 16
