"""A kind of op that no part of the package knows goes through all of it, defined here alone."""

import json

import pipejax as pj
from pipejax.analysis.runs.chrome_trace import chrome_trace

GRAMMAR = pj.schedules.Grammar(
    kinds={
        "P": pj.schedules.OpKind("fetch", "fetch", lane="disk", at_start={"rows": 1}),
        "E": pj.schedules.OpKind("look up", "look_up", at_end={"rows": -1}, look=("#123456",)),
    },
    rules=["E <- P", "0F <- E"],
    items={"rows": 2.0},
)
ROWS = [["0P0", "0P1", "0E0", "0F0", "0E1", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
STARTS = [[0, 4, 4, 5, 8, 9, 10, 13], [6, 7, 10, 11]]  # counted by hand: fetches take 4


def test_a_new_kind_goes_everywhere(tmp_path):
    table = pj.ScheduleTable.from_rows(ROWS, grammar=GRAMMAR, name="fetched")
    costs = pj.Costs(forward=1.0, backward=2.0, others={"fetch": 4.0, "look_up": 1.0})
    run = pj.evaluate(table, costs)
    for worker, starts in enumerate(STARTS):
        assert run.start[worker, : len(starts)].tolist() == starts
    assert (run.makespan, run.busy.tolist()) == (15.0, [8.0, 6.0])
    memory = pj.analysis.activation_memory(run)  # of rows 2 are held for an activation
    assert memory.peak.tolist() == [4.0, 1.0]
    legend = {text.get_text() for part in run.plot().legends for text in part.get_texts()}
    assert {"fetch", "look up", "thin rows: disk"} <= legend
    pj.write_table(table, tmp_path / "fetched.json")
    assert pj.read_table(tmp_path / "fetched.json").grammar == GRAMMAR
    traced = {event["name"] for event in json.loads(chrome_trace(run))["traceEvents"]}
    assert {"0P0", "0E0", "0P1", "0E1"} <= traced
    assert pj.verify(pj.certificate(run, memory=memory)).ok
    form, times = pj.formula(pj.lower(table, step_end=False)), {"F": 1, "B": 2, "P": 4, "E": 1}
    assert form([times.get(name, 0.0) for name in form.parameters]) == 15.0
