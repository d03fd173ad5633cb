"""Sharded weights beside compute: by hand, against the event loop, and what is refused."""

import dataclasses
import itertools
import json
import re
import shlex

import grammar_cases
import numpy as np
import pytest
import reference
from daily import daily, read_cases, with_cases
from explorer_cases import explored, unpack

import pipejax as pj
from pipejax.costs.stage.stage_costs import stage_parts
from pipejax.costs.stage.stage_work import gathered_bytes
from pipejax.plots.explorer.payload import payload
from pipejax.schedules.table.communication_cells import with_sharding, with_transfers
from pipejax.schedules.table.sharding import on_sharding_lane
from pipejax.schedules.table.table_files import to_json
from pipejax.search.tuning.lookahead import LookaheadSearch

LANES = {"UNSHARD": "net", "REDUCE_GRAD": "net"}
OP = re.compile(r"(\d+)([A-Z_]+)(\d*)")
ROW = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD 1WAIT_REDUCE_GRAD"


def make_table(*rows, **grammar):
    built_grammar = pj.schedules.Grammar(**{"lanes": LANES, **grammar})
    return pj.ScheduleTable.from_rows([row.split() for row in rows], grammar=built_grammar)


def get_lanes(run):
    return [(x.lane, x.busy.tolist(), x.exposed.tolist()) for x in pj.analysis.lane_times(run)]


def test_a_row_by_hand():
    """Gathers end at 0.5 and 1; 1REDUCE_GRAD runs from 4.5 to 7.5 beside 0B0, the next one behind."""
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0)
    run = pj.evaluate(make_table(ROW), costs)
    assert run.makespan == 10.5
    assert run.finish[0].tolist() == [0.5, 1.0, 1.5, 2.5, 4.5, 7.5, 4.5, 6.5, 10.5, 7.5]
    assert (run.busy.tolist(), get_lanes(run)) == ([6.0], [("net", [7.0], [4.5])])
    usual = pj.evaluate(make_table(ROW, lanes={}), costs)
    assert (usual.makespan, usual.busy.tolist(), get_lanes(usual)) == (13.0, [13.0], [])


def test_a_gather_waits_for_what_is_dropped_before():
    """1UNSHARD stands behind 0RESHARD: it cannot run beside 0F0, whatever the lane does."""
    row = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    run = pj.evaluate(make_table(row), pj.Costs(forward=1.0, backward=2.0, unshard=0.5))
    assert run.makespan == 3 * 0.5 + 6.0


def test_updates_wait_for_reductions():
    """U of stage 1 in the row waits until 7.5, and the all-reduce behind a row until 10.5."""
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0, update=0.25)
    row = ROW.replace("1WAIT_REDUCE_GRAD", "1U0 0U0")
    assert pj.evaluate(make_table(row), costs).makespan == 10.5 + 0.25
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=3.0, all_reduce=1.0)
    assert pj.evaluate(make_table(ROW), costs).makespan == 10.5 + 1.0


def test_a_circle_is_named():
    """A kind on the same lane, before the gather, waits for the backward of what it gathers."""
    kinds = {"N": pj.schedules.OpKind("note", "note", lane="net")}
    circle = {"0UNSHARD (worker 0)", "0B0 (worker 0)", "0N0 (worker 0)"}
    with pytest.raises(pj.ScheduleError, match="deadlock: no op of this cycle can start") as error:
        make_table("0N0 0UNSHARD 0F0 0B0", kinds=kinds, rules=["N <- B"])
    names = re.sub(".*can start: ", "", str(error.value).splitlines()[0]).split(" -> ")
    assert {*names} == circle


@with_cases("row why", *read_cases("weights out of turn"))
def test_weights_out_of_turn_are_refused(row, why):
    make_table(row, lanes={})  # as it was where they stand in the row
    with pytest.raises(pj.ScheduleError, match=why):
        make_table(row)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("posting", ["early", "program"])
def test_what_pytorch_runs_is_the_event_loop(name, posting):
    built = pj.schedules.build(name, num_workers=3, num_microbatches=6)
    table = on_sharding_lane(pj.links.insert_transfers(built, lowering="pytorch"), "net")
    data = json.loads(to_json(table)) | {"kinds": [], "graph": []}
    data["rows"] = [[cell or "" for cell in row] for row in data["rows"]]
    for seed, queues in enumerate(("worker", "pair", "direction")):
        case = grammar_cases.price(data, np.random.default_rng(seed))
        links = pj.Links("rendezvous", queues, posting=posting)
        options = data["rows"], data["pipe_of_microbatch"], case.theirs, "rendezvous", queues
        run = reference.Run(*options, posting=posting, grammar=data)
        assert pj.evaluate(table, case.costs, link=links).makespan == run.makespan


# ------------------------------------------------------------------------------------- lookahead
def gathered(row, ahead, limit):
    """Cells of a row by what they mean, use by use: which gather and drop stand before which op.

    A stage stays until its next use if no more than `most` different ones are used up to then; else
    it is gathered again, so many uses ahead, but not before there is room up to its use.
    """
    before = [[] for _ in range(len(row) + 1)]  # of each op: (drops first, use, letters)
    for k, stage in enumerate(row):
        last = max((j for j in range(k) if row[j] == stage), default=None)
        if last is None or len({*row[last + 1 : k + 1]}) > limit:
            room = min(j for j in range(k + 1) if len({*row[j : k + 1]}) <= limit)
            before[max(k - ahead, room)].append((1, k, f"{stage}UNSHARD"))
        later = next((j for j in range(k + 1, len(row)) if row[j] == stage), None)
        if later is None or len({*row[k + 1 : later + 1]}) > limit:
            before[k + 1].append((0, k, f"{stage}RESHARD"))
    return [[text for _, _, text in sorted(cells)] for cells in before]


def sharded_row(texts, ahead, limit):
    """A row with gathers by `gathered`, and every reduction awaited before the next one."""
    stages = [int(text.split("B")[0].split("F")[0]) for text in texts]
    cells = gathered(stages, ahead, limit)
    last = {stage: k for k, stage in enumerate(stages) if "B" in texts[k]}
    result, wait = [], []
    for k, text in enumerate(texts):
        result += [*cells[k], text]
        if last[stages[k]] == k:
            result += [*wait, f"{stages[k]}REDUCE_GRAD"]
            wait = [f"{stages[k]}WAIT_REDUCE_GRAD"]
    # what is dropped at the end stands before the last wait
    return result + cells[-1] + wait


def get_texts(table):
    return [[table.grammar.text(cell) for cell in row if cell] for row in table.rows()]


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_gathers_stand_where_they_are_said_to(ahead, limit):
    rng = np.random.default_rng(ahead + 41 * limit)
    names = "gpipe", "interleaved-1f1b", "looped-bfs", "circular", "hanayo"
    sizes = {"num_workers": 3, "num_microbatches": 6}
    for name in names:
        takes = pj.schedules.find(name).takes
        more = {"stages_per_worker": 3} if "stages_per_worker" in takes else {}
        table = pj.schedules.build(name, **sizes, **more)
        lookaheads = rng.integers(0, ahead + 1, 3).tolist()  # every worker its own
        result = pj.schedules.insert_sharding(table, lookahead=lookaheads, residency=limit)
        rows = [sharded_row(r, n, limit) for r, n in zip(get_texts(table), lookaheads, strict=True)]
        assert get_texts(result) == rows
        assert pj.schedules.gathered_peak(result).max() <= limit


@pytest.mark.parametrize("name", pj.schedules.names())
def test_every_schedule_keeps_its_residency_in_time(name):
    """Peaks of a run are at most those of row order; PyTorch's rule is one of the parameters."""
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    costs = {"unshard": 0.7, "reduce_grad": 0.4, "offload": 0.5, "recompute": 1.0}
    times = {kind.time: 0.5 for kind in table.grammar.kinds.values()}
    costs = pj.Costs(forward=1.0, backward=2.0, others=times, **costs)
    for largest in (2, None):
        result = pj.schedules.insert_sharding(table, lookahead=2, residency=largest)
        in_rows = pj.schedules.gathered_peak(result)
        assert in_rows.max() <= (largest or 99)
        run = pj.evaluate(result, costs)
        weights = pj.analysis.gathered_weights(run)
        assert (weights.peak <= in_rows).all()
        assert set(np.unique(weights.held)) <= {*range(5)}
    if not table.offloads:
        how = {"residency": 3, "counted": "stages", "defer_reduce_grad_wait": False}
        ours = pj.schedules.insert_sharding(table, lookahead=2, lane="compute", **how)
        assert get_texts(ours) == get_texts(with_sharding(table))


def test_weights_that_are_updated_are_gathered_again():
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=3)
    row = get_texts(pj.schedules.insert_sharding(table, lookahead=9))[0]
    again = "0B0 0REDUCE_GRAD 0RESHARD 0WAIT_REDUCE_GRAD 0U0 0UNSHARD 0F2"
    assert again in " ".join(row)


def test_messages_are_no_uses():
    bare = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    sent = with_transfers(bare, None, pj.Links(), waits=True)
    for ahead in (1, 2, 3):
        result = pj.schedules.insert_sharding(sent, lookahead=ahead, residency=1 + ahead // 2)
        texts = get_texts(result)
        rows = [[x for x in row if "_F" not in x and "_B" not in x] for row in texts]
        assert rows == get_texts(
            pj.schedules.insert_sharding(bare, lookahead=ahead, residency=1 + ahead // 2)
        )


# ---------------------------------------------------------------------------------------- search
def get_peak(row, sizes):
    held = [0.0]
    for text in row:
        sign = {"UNSHARD": 1, "RESHARD": -1}.get(text.lstrip("0123456789"), 0)
        held.append(held[-1] + (sign and sign * sizes[int(text[0])]))
    return max(held)


def get_makespan(rows, seconds, home):
    end, last, row_end, lane_end = {}, {}, [0.0] * len(rows), [0.0] * len(rows)
    remaining = [list(map(OP.fullmatch, row)) for row in rows]
    while any(remaining):
        for w, row in enumerate(remaining):
            while row:
                stage, letters, m = row[0].groups()
                stage, way = int(stage), {"F": -1, "B": 1}.get(letters)
                begins = [row_end[w]]
                if way is not None:
                    inputs = [("F", stage, m)] * (letters == "B")
                    inputs += [(letters, stage + way, m)] * (0 <= stage + way < len(home))
                    if not all(built in end for built in inputs):
                        break
                    for built in inputs:
                        sent = seconds["transmit"] * (home[built[1]] != w)
                        begins.append(end[built] + sent)
                begins.append(
                    last.get(
                        ({"WAIT_REDUCE_GRAD": "REDUCE_GRAD"}.get(letters, "UNSHARD"), stage), 0.0
                    )
                )
                takes = seconds.get(letters, [0.0] * len(home))[stage]
                if letters in LANES:
                    lane_end[w] = last[letters, stage] = max(row_end[w], lane_end[w]) + takes
                else:
                    row_end[w] = end[letters, stage, m] = max(begins) + takes
                row.pop(0)
    return max(row_end + lane_end)


def brute_force(table, seconds, sizes, limit):
    ways = []
    for row in get_texts(table):
        largest = range(1, 1 + len({text[0] for text in row}))
        rows = {tuple(sharded_row(row, n, r)) for n in range(len(row)) for r in largest}
        ways.append([row for row in sorted(rows) if get_peak(row, sizes) <= limit])
    home = table.placement[0].tolist()
    return min(get_makespan(rows, seconds, home) for rows in itertools.product(*ways))


def small_problem(seed):
    """A schedule of two or three workers, costs and sizes by stage, and a limit that may be tight."""
    rng = np.random.default_rng(seed)
    name = ["interleaved-1f1b", "looped-bfs", "hanayo", "circular"][seed % 4]
    workers = 2 + (seed % 25 == 4)
    more = {} if name == "hanayo" else {"stages_per_worker": 2 + (workers == 2 and seed % 3 == 0)}
    table = pj.schedules.build(name, num_workers=workers, num_microbatches=workers, **more)
    samples = {letters: rng.integers(1, 40, table.num_stages) / 8 for letters in ("F", "B", *LANES)}
    seconds = {letters: times.tolist() for letters, times in samples.items()} | {"transmit": 0.25}
    fields = {"F": "forward", "B": "backward", "UNSHARD": "unshard", "REDUCE_GRAD": "reduce_grad"}
    costs = pj.Costs(transmit=0.25, **{fields[x]: times for x, times in samples.items()})
    sizes = rng.integers(1, 5, table.num_stages) / 2
    limit = [np.inf, sizes.max(), sizes.max() + sizes.min()][rng.integers(3)]
    return table, costs, seconds, sizes, limit


class Unlucky(LookaheadSearch):
    """Begins with the first row of every worker, and lets none of them choose another."""

    def __init__(self, *options):
        super().__init__(*options)
        self.best = (0,) * len(self.options)
        self.value = self._makespan(self.best)
        self._unchanged = len(self.options)


@pytest.mark.parametrize("seed", daily(range(50), always=12, total=2))
def test_the_best_lookahead_is_that_of_all(seed):
    table, costs, seconds, sizes, limit = small_problem(seed)
    result = pj.search.lookahead(table, costs, limit=limit, sizes=sizes)
    least = brute_force(table, seconds, sizes, limit)
    if seed < 12:
        through_all = Unlucky(table, costs, pj.Links(), limit, sizes).run(10**6)
        assert (through_all.value, through_all.stopped) == (least, "optimal")
    assert (result.value, result.lower_bound, result.stopped) == (least, least, "optimal")
    assert pj.evaluate(result.best.table, costs).makespan == result.value
    assert (result.best.peak <= limit).all()
    assert result.value <= min(time for time in result.baselines.values() if time is not None)
    again = pj.schedules.insert_sharding(
        table, lookahead=result.best.lookahead, residency=result.best.residency
    )
    assert get_texts(again) == get_texts(result.best.table)


# ------------------------------------------------------------------------------- models, commands
SPLIT = {"minibatch": 8, "tensor_parallel": 2, "data_parallel": 8, "zero": 3, "overlap": 0.0}


def parts_of_weights(workload, system, table):
    """Return the time that exchanges of weights add to ops of a table without cells (stages)."""
    parts = stage_parts(workload, system, table)["weights"]
    return np.asarray(parts.forward), np.asarray(parts.weight_grad)


def test_a_model_prices_the_cells_as_its_ops_otherwise():
    """Without overlap F takes one gather longer, W one reduction: of all layers."""
    workload = pj.Workload(pj.load_model("llama3-8b"), **SPLIT)
    system = pj.load_system("h100")
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    sharded = pj.schedules.insert_sharding(table)
    gathers, reductions = parts_of_weights(workload, system, table)
    bare, costs = (pj.stage_costs(workload, system, variant) for variant in (table, sharded))
    assert np.asarray(costs.unshard) == pytest.approx(gathers)
    assert np.asarray(costs.reduce_grad) == pytest.approx(reductions)
    assert (np.asarray(bare.unshard) == 0).all()
    assert (np.asarray(costs.forward) < np.asarray(bare.forward)).all()
    # ops exchange nothing themselves
    assert not np.any(parts_of_weights(workload, system, sharded))
    whole = dataclasses.replace(workload, zero=0)  # weights are there all the time
    whole_costs = pj.stage_costs(whole, system, sharded)
    assert not np.any(whole_costs.unshard)
    assert not np.any(whole_costs.reduce_grad)
    assert np.asarray(whole_costs.forward) == pytest.approx(np.asarray(costs.forward))


def test_memory_counts_whole_stages_while_they_are_gathered():
    """Parameters of a stage in bf16, and gradients in fp32, before the replicas split them."""
    workload = pj.Workload(pj.load_model("llama3-8b"), **SPLIT)
    table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=8)
    whole = pj.costing.stage_bytes(dataclasses.replace(workload, zero=0), table)
    shards = pj.costing.stage_bytes(workload, table)
    for largest in (1, 2):
        sharded = pj.schedules.insert_sharding(table, residency=largest)
        result = pj.memory_bytes(workload, sharded) - pj.memory_bytes(workload, table)
        stages = [[worker, worker + 4] for worker in range(4)]
        weights = [np.sort(whole.weights[places])[-largest:].sum() for places in stages]
        more = whole.gradients - shards.gradients - shards.gathered
        expected = [w + more[places].sum() for w, places in zip(weights, stages, strict=True)]
        assert result == pytest.approx(expected)


ASKED = ["-s", "interleaved-1f1b", "-P", "4", "-M", "8", "-V", "3"]
TIMES = ["-T", "F=1,B=2,UNSHARD=1.5,REDUCE_GRAD=1.5"]


def test_commands_put_the_cells_in(answer, tmp_path):
    how = "--lookahead", "2", "--residency", "2"
    result = answer("evaluate", *ASKED, *TIMES, *how)
    assert (result["makespan"], result["lanes"][0]["lane"]) == (84.5, "net")
    assert result["gathered_weights"]["peak"] == [2.0] * 4
    in_rows = answer("evaluate", *ASKED, *TIMES, *how, "--sharding-lane", "compute")
    assert "lanes" not in in_rows
    assert in_rows["makespan"] > result["makespan"]
    answer("export", *ASKED, *how, "-f", "torch-csv", "-o", tmp_path / "x.csv")
    read = answer("evaluate", "-t", tmp_path / "x.csv", *TIMES, "--sharding-lane", "net")
    assert (read["makespan"], read["lanes"]) == (result["makespan"], result["lanes"])


def test_tune_lookahead_answers_as_every_search(answer, call, tmp_path):
    asked = ["tune", "lookahead", *ASKED, *TIMES, "--weights-limit", "2"]
    result = answer(*asked, "-o", tmp_path / "x.json")
    assert (result["value"], result["lower_bound"], result["gap"]) == (84.5, 84.5, 0.0)
    assert result["stopped"] == "optimal"
    assert result["baselines"] == {"no lookahead": 97.5, "one ahead": 85.5, "PyTorch": None}
    best = {"lookahead": [2] * 4, "residency": [2] * 4, "peak": [2.0] * 4, "unit": "stages"}
    assert result["best"] == best
    assert answer("evaluate", "-t", tmp_path / "x.json", *TIMES)["makespan"] == 84.5
    assert "--lookahead 2,2,2,2 --residency 2,2,2,2" in result["next"][0]
    code, text, _ = call(*asked, "--details")
    assert (code, "optimal: no other can be shorter" in text) == (0, True)
    model = shlex.split("-m llama3-8b -y h100 --minibatch 8 --data-parallel 8 --zero 3")
    result = answer("tune", "lookahead", *ASKED, *model, "--weights-limit", "8GB")
    assert result["best"]["unit"] == "bytes"
    assert max(result["best"]["peak"]) <= 8e9


def test_training_runs_along_a_timeline_with_gathers():
    table = pj.schedules.build("pipedream", num_workers=2, num_microbatches=20)
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=1.0, reduce_grad=1.0)
    gathered = pj.schedules.insert_sharding(table, lookahead=1)
    quadratic = pj.training.random_quadratic(2, dimension=4, seed=0)
    how = {"step_size": 0.01, "seed": 0, "costs": costs, "times": 2}
    run = pj.training.replay(quadratic, gathered, **how)
    end = pj.evaluate(gathered, costs).makespan
    assert run.time[-1] == end > pj.evaluate(table, costs).makespan


def test_a_page_offers_tables_with_lanes():
    costs = pj.Costs(forward=1.0, backward=2.0, unshard=0.5, reduce_grad=0.25)
    shown = explored(make_table("0F0 0B0", lanes={}), costs)
    scene = payload([shown], unit="s", choices=[pj.evaluate(make_table(ROW), costs)])
    (offered,) = scene["choices"]
    gathers = unpack(offered["ops"])["phase"] >= len(pj.Phase)  # with codes of their own
    lanes = {scene["phases"][code]["lane"] for code in unpack(offered["ops"])["phase"][gathers]}
    assert lanes == {"net"}


def test_gathers_beside_compute_may_take_no_time(call):
    asked = ["evaluate", "-s", "1f1b", "-P", "2", "-M", "2", "--lookahead", "1"]
    assert call(*asked, "-T", "F=1,B=2,UNSHARD=1,REDUCE_GRAD=0")[0] == 0


def test_a_lookahead_in_stages_stays_within_the_residency():
    table = pj.schedules.build("looped-bfs", num_workers=1, num_microbatches=1, stages_per_worker=3)
    for lane in ("net", "compute"):
        how = {"counted": "stages", "lane": lane}
        options = pj.schedules.insert_sharding(table, lookahead=2, residency=1, **how)
        assert pj.schedules.gathered_peak(options).tolist() == [1.0]
        assert get_texts(options)[0].count("1RESHARD") == get_texts(options)[0].count("1UNSHARD")


def test_nothing_is_gathered_where_nothing_is_split():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    table = pj.schedules.insert_sharding(table)
    model = pj.load_model("llama3-8b")
    alone = pj.Workload(model, minibatch=8, tensor_parallel=2, zero=3)
    assert gathered_bytes(alone, table).tolist() == [0.0] * 4
    split = pj.Workload(model, minibatch=8, tensor_parallel=2, zero=3, data_parallel=2)
    assert gathered_bytes(split, table).min() > 0


def test_tables_with_kinds_of_workers_are_searched(answer):
    times = "F=1,B=2,S=0.5,T=0.5,X=0.2,Y=0.2,UNSHARD=1,REDUCE_GRAD=1"
    result = answer("tune", "lookahead", "-s", "vocabulary-1f1b", "-P", "2", "-M", "3", "-T", times)
    assert result["stopped"] == "optimal"
