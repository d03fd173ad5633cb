"""Three levels side by side, and the explanation of where they part."""

import itertools
import json
import random
import re

import pytest
from daily import read_cases, with_cases
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.comparison import row_exchanges, table_difference
from pipejax.analysis.runs.timeline import arrows, bars
from pipejax.analysis.step.outputs import RUN_OUTPUTS
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import LINKS, Links

LARGE = "--model", "gpt-22b", "--system", "h100", "--minibatch", 16, "--tensor-parallel", 2
SIZE = {"num_workers": 4, "num_microbatches": 8}
PIPE = pj.schedules.build("1f1b", **SIZE)
ONE = ["0F0", "0F1", "0B0", "0B1"]
ASSUMES = "the formula assumes equal stages, F = B"


def levels(name, p=4, m=8, link="delay", slots=None, **costs):
    options = {} if slots is None else {"slots": slots}
    return pj.compare(build(name, p, m, **options), pj.Costs(**costs), link=link)


@with_cases("name arguments why", *read_cases("test_why"))
def test_why(name, arguments, why):
    assert re.search(why, levels(name, **{"forward": 1.0, "backward": 2.0, **arguments}).why)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "interleaved-1f1b"])
def test_a_slow_worker_is_a_reason_of_its_own(name):
    table = build(name, 4, 8)
    costs = pj.costing.scaled_costs(pj.Costs(forward=1.0, backward=2.0), table, workers={1: 2.0})
    why = pj.compare(table, costs).why
    assert "workers are not equally fast (worker 1 takes 2 times as long)" in why
    assert "unequal" not in why
    assert "ratio" not in why


def test_a_ratio_may_be_said_and_is_kept_then():
    table = build("chimera", 4, 8)
    point = pj.compare(table, pj.Costs(forward=1.0, backward=2.0), slots={"F": 1, "B": 1})
    assert point.formula_bubble_ratio == point.table_bubble_ratio < point.bubble_ratio
    assert "times are not in the ratio of the slots (F = 1 s, B = 2 s)" in point.why


@pytest.mark.parametrize("name", pj.schedules.REGISTRY)
@pytest.mark.parametrize("scale", [0.3, 7.0])
def test_tables_are_measured_in_the_ratio_of_the_costs(name, scale):
    """Without messages and with stages alike, the run is the idealised table."""
    table = build(name, 4, 8)
    times = {"forward": scale, "input_grad": 1.7 * scale, "weight_grad": 0.4 * scale}
    point = pj.compare(table, pj.Costs.per_worker(table, **times, offload=0.0))
    assert point.table_bubble_ratio == pytest.approx(point.bubble_ratio, rel=1e-9)
    assert point.slots == pytest.approx({"F": 1.0, "B": 2.1, "I": 1.7, "W": 0.4})


def test_one_ratio_for_all_that_is_compared(answer, call):
    """Chimera's order is drawn for F = B; at B = 2 F it is idle for 26 %, not for 15.79 %."""
    options = "--workers", 8, "--microbatches", 16, "--stage-times", "F=1,B=2"
    result = answer("compare", "--schedules", "chimera,1f1b,interleaved-1f1b", *options)
    assert result["slots"] == {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    chimera, pipe, looped = result["rows"]
    assert chimera["formula_bubble_ratio"] == pytest.approx(6 / 38)
    assert chimera["table_bubble_ratio"] == pytest.approx(17 / 65)
    assert pipe["table_bubble_ratio"] == pytest.approx(7 / 23)
    assert looped["table_bubble_ratio"] == pytest.approx(7 / 39)
    _, printed, _ = call("compare", "--schedules", "chimera,1f1b", *options, "--details")
    assert "of the schedule if F = 1, B = 2, I = 1, W = 1" in printed
    assert "26.2 %" in printed


@pytest.mark.parametrize(
    "costs",
    [["-T", "F=1,I=1,W=1"], ["-T", "F=1,B=2", "--comm", "0.1"], ["-C", "even.json"]],
    ids=" ".join,
)
@pytest.mark.parametrize("deep", ["zb-v", "interleaved-zb", "hanayo"])
def test_unequal_work_is_not_ranked(answer, call, tmp_path, monkeypatch, costs, deep):
    """Two stages of 3 s on each worker are twice the work of one: 16 x 6 s against 16 x 3 s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "even.json").write_text(json.dumps({"unit": "seconds", "F": 1, "I": 1, "W": 1}))
    line = ["compare", "-S", f"zb-h1,1f1b,{deep}", "-P", 4, "-M", 16, *costs]
    zb, pipe, other = answer(*line)["rows"]
    assert (zb["stages"], pipe["stages"], other["stages"]) == (4, 4, 8)
    assert other["makespan"] > 16 * 6 > pipe["makespan"] > zb["makespan"] > 16 * 3
    assert (zb["above_best"], other["above_best"]) == (0, 0)
    assert pipe["above_best"] == pipe["makespan"] / zb["makespan"] - 1
    text = " ".join(call(*line)[1].split())
    assert f"zb-h1 is fastest at S = 4: {zb['makespan']:.3g} s; next is 1f1b" in text
    assert f"{deep} is fastest at S = 8" in text
    assert "not ranked together: times are of a stage" in text
    assert "--measured-stages N" in text
    equal = answer(*line, "--measured-stages", 4)["rows"]
    assert equal[2]["makespan"] < other["makespan"] / 1.5
    assert sorted(row["above_best"] for row in equal)[0] == 0 < equal[1]["above_best"]
    assert "not ranked together" not in call(*line, "--measured-stages", 4)[1]


def test_what_does_not_fit_is_marked_and_never_the_best(answer, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["compare", "-S", "interleaved-1f1b,1f1b,chimera", "-P", "8", "-M", "16"]
    rows = answer(*options, *LARGE)["rows"]
    capacity = pj.load_system("h100").memory_available
    assert [row["fits"] for row in rows] == [max(row["memory_bytes"]) <= capacity for row in rows]
    assert [row["fits"] for row in rows] == [False, True, False]
    assert min(rows, key=lambda row: row["makespan"])["fits"] is False
    _, printed, _ = call(*options, *LARGE)
    above = [line.split("│")[3].strip() for line in printed.splitlines() if line[:1] == "│"]
    assert sorted(above) == ["-", "-", "0 %"]
    assert re.search(r"not ranked, need more than 83.5 GB: [a-z1-]+ \(\d+.\d GB\), ", printed)
    assert printed.startswith("1f1b is fastest: ")
    none = call(*options[:1], "-S", "chimera", *options[3:], *LARGE)[1]
    assert "no schedule fits the memory" in none


def test_rows_are_sorted_against_the_best_in_one_unit_of_memory(answer, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    line = "compare -S 1f1b,interleaved-1f1b,hanayo,zb-h1 -P 8 -M 16 -W F=1,B=2"
    options = line.split()
    rows = {row["schedule"]: row for row in answer(*options)["rows"]}
    assert rows["interleaved-1f1b"]["peak_in_flight"] == 23
    assert rows["interleaved-1f1b"]["peak_microbatches"] == 11.5  # of two stages each
    assert rows["1f1b"]["above_best"] == pytest.approx(rows["1f1b"]["makespan"] / 55 - 1)
    _, out, _ = call(*options)
    table = [line.split("│") for line in out.splitlines() if line[:1] == "│"]
    outputs = [output for output in RUN_OUTPUTS.values() if output.column]
    assert {len(line) for line in table} == {7 + len(outputs)}  # one table, without sizes
    assert [line[1].strip() for line in table] == sorted(rows, key=lambda n: rows[n]["makespan"])
    assert table[0][3].strip() == "0 %"
    assert out.startswith("zb-h1 is fastest: 55 s; next is interleaved-1f1b, ")
    assert "\n8 workers, 16 microbatches; messages overlap with compute and " in out
    _, out, _ = call(*options, "--details")
    assert out.count("no closed form is published") == 1
    options = ["compare", "-S", "hanayo,pipe-offload", "-P", "2", "-M", "4", "-T", "F=1,B=2,O=1"]
    assert "formula" not in call(*options)[1]
    _, out, _ = call(*options, "--details")
    assert "pipe-offload, hanayo: no formula: no closed form is published" in out


def test_only_what_does_not_exist_is_left_out(answer):
    options = "compare", "--microbatches", 16, *LARGE, "--workers"
    rows = answer(*options, 3, "--schedules", "1f1b,chimera")["rows"]
    assert rows[1]["error"].startswith("chimera needs an even number of workers")


def test_offloads_alone_are_a_share_of_the_critical_path():
    row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
    costs = pj.Costs(forward=1.0, backward=2.0, offload=9.0)
    why = pj.compare(pj.ScheduleTable.from_rows([row]), costs).why
    assert re.search(r"run above table: offloads and loads take [\d.]+ % of the critical path", why)


def test_bound_by_names_the_dominant_cost():
    table = build("1f1b", 4, 8)
    for name, field in (("F", "forward"), ("B", "backward"), ("message", "transmit")):
        costs = {"forward": 1.0, "backward": 1.0} | {field: 9.0}
        result = pj.evaluate(table, pj.Costs(**costs))
        assert result.bound_by == name
        assert sum(result.path_share.values()) == pytest.approx(1)


def test_nothing_takes_time():
    result = pj.evaluate(build("gpipe", 2, 2), pj.Costs(forward=0.0, backward=0.0))
    assert (result.makespan, result.bubble_ratio, result.bubble_overhead) == (0, 0, 0)
    assert (result.bound_by, result.path_share) == ("nothing", {})


@pytest.mark.parametrize("link", LINKS)
def test_timeline_is_consistent(link, data):
    table = pj.read_table(data / "DualPipeV_4_8.comms.csv")
    costs = pj.Costs(forward=1.0, input_grad=1.5, weight_grad=0.7, latency=0.1, transmit=0.4)
    run = pj.evaluate(table, costs, link=link)
    all_bars, sent = bars(run), arrows(run)
    assert max(bar.finish for bar in all_bars) == run.makespan
    ends = {(bar.worker, str(op)): bar for bar in all_bars for op in bar.ops}
    for arrow in sent:
        letters = "F" if arrow.op.phase is pj.Phase.SEND_F else "BI"
        nearby = (f"{arrow.op.stage}{x}{arrow.op.microbatch}" for x in letters)
        producer = next(ends[arrow.sender, op] for op in nearby if (arrow.sender, op) in ends)
        next_stage = arrow.op.stage + (1 if letters == "F" else -1)
        nearby = (f"{next_stage}{x}{arrow.op.microbatch}" for x in letters)
        consumer = next(ends[arrow.receiver, op] for op in nearby if (arrow.receiver, op) in ends)
        assert producer.finish - 1e-9 <= arrow.start
        assert arrow.start + 0.5 - 1e-9 <= arrow.finish <= consumer.start + 1e-9
    critical = [bar for bar in all_bars if bar.is_critical]
    assert critical
    length = sum(bar.finish - bar.start for bar in critical)
    computed = ("F", "B", "I", "W", "pair")
    waits = sum(share for name, share in run.path_share.items() if name not in computed)
    assert length == pytest.approx(run.makespan * (1 - waits))


def test_a_figure_has_the_runs_that_exist(tmp_path, call):
    figure = tmp_path / "runs.svg"
    run = "compare -S gpipe,chimera -P 4 -M 7,8 -W F=1,B=2"  # chimera needs an even number
    code, shown, _ = call(*run.split(), "--figure", str(figure))
    assert (code, str(figure) in shown) == (0, True)
    titles = re.findall(r">([^<>]+ M = \d): ([^<>,]+)", figure.read_text())
    assert titles == [("gpipe M = 7", "30 s"), ("gpipe M = 8", "33 s"), ("chimera M = 8", "29 s")]


# differences of two tables: cells, rows, workers, phases; and their cost
def get_rows(*rows):
    return pj.ScheduleTable.from_rows(rows)


def test_idle_slots_are_no_difference():
    result = table_difference(get_rows(ONE), get_rows(["", *ONE[:2], "", *ONE[2:]]))
    assert result.is_none
    assert result.rows == []


def test_the_first_difference_and_what_is_out_of_order():
    result = table_difference(get_rows(ONE), get_rows(["0F0", "0B0", "0F1", "0B1"]))
    (row,) = result.rows
    assert (row.worker, row.first, row.reordered, row.only) == (0, 1, 1, (0, 0))
    cells = [[str(cell[0]) for cell in cells] for _, cells in row.around(1)]
    assert cells == [["0F0", "0F1", "0B0"], ["0F0", "0B0", "0F1"]]
    assert result.only == {}


def test_fewest_ops_that_would_have_to_move():
    """Against the longest common order by trying all parts of the row."""
    draw = random.Random(1)
    ops = [f"0{phase}{m}" for phase in "FB" for m in range(4)]
    for _ in range(5):
        order = draw.sample(range(4), 4), draw.sample(range(4), 4)
        row = [f"0F{m}" for m in order[0]] + [f"0B{m}" for m in order[1]]
        result = table_difference(get_rows(ops), get_rows(row))
        parts = (p for size in range(len(ops) + 1) for p in itertools.combinations(ops, size))
        longest = max(len(p) for p in parts if [op for op in row if op in p] == list(p))
        assert sum(entry.reordered for entry in result.rows) == len(ops) - longest


def test_split_backwards_are_counted_once():
    result = table_difference(PIPE, pj.schedules.build("zb-h1", **SIZE))
    assert result.split == (0, 32)
    assert result.only == {Phase.B: (32, 0), Phase.I: (0, 32), Phase.W: (0, 32)}
    assert table_difference(pj.schedules.build("zb-h1", **SIZE), PIPE).split == (32, 0)


def test_cells_of_communication_and_workers():
    sent = pj.links.insert_transfers(PIPE, link=Links("rendezvous"))
    result = table_difference(PIPE, sent)
    assert result.communication == (0, 2 * 2 * 3 * 8)
    assert result.other_placement is False
    result = table_difference(PIPE, pj.ScheduleTable.from_rows([*PIPE.rows()][::-1]))
    assert (result.other_placement, len(result.moved)) == (True, 64)
    assert result.moved[pj.Op(Phase.F, 0, 0)] == (0, 3)
    assert result.only == {}


def test_tables_of_other_sizes():
    result = table_difference(PIPE, build("1f1b", 3, 9))
    assert result.sizes == {"workers": (4, 3), "stages": (4, 3), "microbatches": (8, 9)}
    assert [row.worker for row in result.rows] == [0, 1, 2]
    assert result.only[Phase.F] == (8, 3)


def test_a_row_alone_is_exchanged():
    other = pj.schedules.build("gpipe", **SIZE)
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    result = [*row_exchanges(PIPE, other, range(4), costs, Links())]
    rows = [next(iter(other.rows())), *[*PIPE.rows()][1:]]
    assert result[0] == pj.evaluate(PIPE.with_rows(rows), costs).makespan
    assert result[1:] == [None] * 3  # backwards in another order than the next worker's


def test_the_command(answer, call, tmp_path):
    pj.write_table(PIPE, tmp_path / "pipe.csv")
    both = ["compare", "--diff", "--schedules", f"{tmp_path / 'pipe.csv'},zb-h1"]
    options = [*both, "--stage-times", "F=1,B=2", "--comm", 0.1]
    result = answer(*options)
    assert [run["workers"] for run in result["tables"]] == [4, 4]
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    assert result["tables"][0]["makespan"] == pj.evaluate(PIPE, costs).makespan
    assert (result["equal"], result["split"], result["unit"]) == (False, [0, 32], "seconds")
    assert result["rows"][0]["cells"] == ["0B0", "0I0"]
    assert [row["worker"] for row in result["exchanges"]] == [0, 1, 2, 3]
    code, out, _ = call(*options, "--details")
    assert code == 0
    assert ">0B0<" in out
    assert "backwards that are split into I and W, only in B: 32" in out
    pj.write_table(PIPE, tmp_path / "same.csv")
    both[-1] = f"{tmp_path / 'pipe.csv'},{tmp_path / 'same.csv'}"
    same = answer(*both)
    assert (same["equal"], same["unit"], same["exchanges"]) == (True, "slots", [])
    assert "the same cells in the same order" in call(*both, "--labels", "mine,yours")[1]


@pytest.mark.parametrize("name", pj.schedules.names())
def test_a_table_is_like_itself(name):
    table = build(name, 4, 8)
    assert table_difference(table, table).is_none
