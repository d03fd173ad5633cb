"""Tables with grammars of their own go where others go, or are refused by what they have."""

import json
import re

import numpy as np
import pytest
from daily import daily, read_cases
from grammar_tables import TABLES, grammar_table

import pipejax as pj
from pipejax.analysis.runs.chrome_trace import chrome_trace
from pipejax.schedules.table.table_files import to_json

TIMES = read_cases("times of grammars")
HAS = read_cases("parts of grammars")


@pytest.fixture
def build_case(tmp_path):
    def write(name):
        path = tmp_path / "table.json"
        path.write_text(to_json(grammar_table(name)[0]))
        return path, ["-T", TIMES[name], "--comm", "0.1"]

    return write


WORK = {  # what a command is asked, beside the table and times
    "evaluate": ["--corner", "slow:message*2,compute@worker0*1.5", "--paths", "2"],
    "show": ["--memory", "--messages"],
    "explain": ["--stragglers", "0=1.5", "--search"],
    "sensitivity": [],
    "staleness": [],
}
IN_LISTS = {"compare": [], "jitter": ["--op", "lognormal:0.05", "--samples", "10"]}


def rotated_cases():
    """Yield two tables of each command for every day, the first another one than of the last command."""
    for k, command in enumerate([*WORK, *IN_LISTS, "compare --diff"]):
        names = [*TABLES][k % len(TABLES) :] + [*TABLES][: k % len(TABLES)]
        yield from daily([(command, name) for name in names], total=len(names))


@pytest.mark.parametrize(("command", "name"), [*rotated_cases()])
def test_commands_know_what_tables_have_of_their_own(command, name, build_case, call):
    path, times = build_case(name)
    asked = [command, "--table", path, *times, *WORK.get(command, ())]
    if command in IN_LISTS:
        asked = [command, "--tables", path, *times, *IN_LISTS[command]]
    if command == "compare --diff":
        other = path.with_name(f"other{path.suffix}")
        other.write_bytes(path.read_bytes())
        asked = [*command.split(), "--schedules", f"{path},{other}", *times]
    for form in ([], ["--json"]):
        code, out, error = call(*asked, *form)
        assert (code, error) == (0, "")
    json.loads(out)


REFUSED = read_cases("commands without grammars")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("command", REFUSED)
def test_who_knows_only_the_usual_names_what_is_not(command, name, build_case, call):
    if name == "sharded" and "torch-csv" in REFUSED[command]:
        return  # PyTorch has these cells, wherever they run
    path, times = build_case(name)
    code, _, error = call(*command.split(), "--table", path, *times, *REFUSED[command])
    assert code == 2
    assert f"knows the usual ops and rules alone, and {name} has {HAS[name]}" in error
    assert error.count("\n") == 1


def test_a_csv_holds_no_table_with_a_grammar(tmp_path):
    table, _ = grammar_table("mixed")
    with pytest.raises(ValueError, match=re.escape("a CSV knows the usual ops and rules alone")):
        pj.write_table(table, tmp_path / "x.csv")
    pj.write_table(table, tmp_path / "x.json")
    assert pj.read_table(tmp_path / "x.json").grammar == table.grammar


def test_rules_scale_costs_of_kinds():
    table, costs = grammar_table("vocabulary")
    twice = pj.costing.scaled_costs(costs, table, "compute@worker1*2, Ca*3, T@microbatch1*5")
    assert (twice.forward.tolist(), twice.backward.tolist()) == ([1.0, 2.0], [2.0, 4.0])
    assert (twice.s.tolist(), float(twice.ca)) == ([0.5, 1.5], pytest.approx(0.6))
    assert np.allclose(twice.t, [[0.5, 2.5, 0.5], [1.0, 5.0, 1.0]])
    slow = pj.costing.scaled_costs(costs, table, workers={0: 3.0}, microbatches=[1.0, 2.0, 1.0])
    assert np.allclose(slow.s, [[1.5, 3.0, 1.5], [0.75, 1.5, 0.75]])
    assert np.allclose(slow.cb, [[0.2, 0.4, 0.2]])
    run = pj.evaluate(table, slow)
    assert run.busy == pytest.approx([3 * (4 * 3 + 4 * 1.0), 4 * 3 + 4 * 1.25])
    for rules, why in (
        ("S@stage1*2", "S has no stage of its own: legal places are worker, microbatch"),
        ("D*2", "unknown cost 'D'"),
        ("S@worker2*2", "the table has 2 workers"),
    ):
        with pytest.raises(ValueError, match=why):
            pj.costing.scaled_costs(costs, table, rules)
    graph, costs = grammar_table("graph")
    slow = pj.costing.scaled_costs(costs, graph, "transmit@boundary1*2, transmit@worker3*10")
    assert np.allclose(slow.transmit, [[[0.1, 0.2, 1.0]]] * 2)


@pytest.mark.parametrize("name", TABLES)
def test_parts_of_a_step_name_its_lanes(name):
    table, costs = grammar_table(name)
    result = pj.explain(table, costs)
    parts = {part.name: part.seconds for part in result.parts}
    assert sum(parts.values()) == pytest.approx(pj.evaluate(table, costs).makespan)
    lanes = {f"lane {phase.kind.lane}" for phase in table.grammar.custom_phases} - {"lane compute"}
    assert {part for part in parts if part.startswith("lane")} == lanes
    assert not any(remedy.kind == "schedule" for remedy in result.remedies)


@pytest.mark.parametrize("name", TABLES)
def test_levels_agree_without_messages(name):
    """The idealised table in the ratio of all times is the run without messages and sharding."""
    table, costs = grammar_table(name)
    alike = {field: np.mean(time) for field, time in vars(costs).items() if time is not None}
    times = {phase.kind.time: alike.pop(phase.kind.time) for phase in table.grammar.custom_phases}
    free = dict.fromkeys(("transmit", "unshard", "reduce_grad"), 0.0)
    both = pj.compare(table, pj.Costs(**alike | free, others=times))
    assert both.bubble_ratio == pytest.approx(both.table_bubble_ratio)


def test_what_two_orders_of_own_kinds_do_differently(answer, call, tmp_path):
    table, _ = grammar_table("vocabulary")
    rows = [[table.grammar.text(cell) for cell in row] for row in table.rows()]
    other = [list(row) for row in rows]
    other[0][9], other[0][10] = other[0][10], other[0][9]  # T0 before 0B0
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, cells in zip(paths, (rows, other), strict=True):
        built = pj.ScheduleTable.from_rows(cells, grammar=table.grammar)
        path.write_text(to_json(built))
    result = answer("compare", "--diff", "-S", f"{paths[0]},{paths[1]}")
    assert (result["moved"], result["only"]) == ([], {})
    assert [row["cells"] for row in result["rows"]] == [["0B0", "T0"]]
    slices = tmp_path / "slices.json"
    slices.write_text(to_json(grammar_table("slices")[0]))
    code, _, error = call("compare", "--diff", "-S", f"{slices},{paths[0]}")
    assert (code, "has 2 slices of a microbatch" in error) == (2, True)


def test_paths_count_kinds(answer, build_case):
    path, times = build_case("vocabulary")
    (longest,) = answer("evaluate", "--table", path, *times, "--paths", "1")["paths"]
    seconds = {"F": 1, "B": 2, "Ca": 0.2, "Cb": 0.2, "S": 0.5, "T": 0.5, "c_F": 0.1, "c_B": 0.1}
    assert sum(seconds[name] * count for name, count in longest["counts"].items()) == pytest.approx(
        longest["length"]
    )


# A kind of op that no part of the package knows goes through all of it, defined here alone

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
