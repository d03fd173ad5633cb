"""Results in notebooks: the explorer as a widget, and data frames."""

import json

import pytest

import pipejax as pj


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


@pytest.mark.parametrize("rows", [[1], ["F"], [{"a": 1}]])
def test_what_is_no_record_is_refused(rows):
    with pytest.raises(ValueError, match="rows must be a run or records, got"):
        pj.analysis.frame(rows)


def test_frames_survive_json(run):
    assert len(json.loads(pj.analysis.frame(run).to_json(orient="records"))) == 16
