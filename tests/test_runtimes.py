"""Tables run under JAX: gradients equal to those of the model without a pipeline."""

import importlib.util
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from daily import daily, read_cases
from hypothesis import Phase as Stage, given, settings
from legal_sizes import WHOLE, build
from mpmd_stand_ins import PipelineSchedule, executed, fragments, make_op, make_text, preprocessed
from strategies import tables

import pipejax as pj
from pipejax.runtimes import processes
from pipejax.runtimes.exports import add_runtime_cells, check_exportable, to_jaxpp, to_shardy
from pipejax.runtimes.formats import FORMATS
from pipejax.runtimes.gloo import runtime
from pipejax.runtimes.processes import RuntimeJob
from pipejax.runtimes.spmd.execute import LEFT_OUT, SmallModel
from pipejax.runtimes.spmd.runtime import run_tables
from pipejax.schedules.cells.ops import SHARDING, WAIT_SEND, Phase, format_cell
from pipejax.schedules.table.communication_cells import (
    producer_order,
    table_messages,
    with_transfers,
)
from pipejax.schedules.table.table import without_phases
from pipejax.schedules.table.table_files import LossWarning, RepairNotice, to_csv

MODEL = SmallModel(hidden=4, batch_size=1)
EXACT = 1e-9  # relative, in float64; 1e-5 is asked for


def draw_samples(count, **what):
    result = []

    @settings(max_examples=count, phases=[Stage.generate], derandomize=True, database=None)
    @given(tables(**what))
    def draw(case):
        result.append(case[0])

    draw()
    return result[:count]


FOUR_PIPES = "chimera, 4 pipes"
FEW = 10  # random tables that always run; 50 where there is time


def asked_for(session):
    """Names of the schedules that this run looks at."""
    test = test_every_schedule_has_the_gradients_of_the_model_without_a_pipeline
    chosen = [item for item in session.items if getattr(item, "function", None) is test]
    return {item.callspec.params["name"] for item in chosen}


@pytest.fixture(scope="module")
def steps(request):
    """The schedules of this run and a few random tables."""
    size = {"num_workers": 4, "num_microbatches": 8}
    names = [name for name in (*WHOLE, FOUR_PIPES) if name in asked_for(request.session)]
    registered = [
        pj.schedules.build("chimera", **size, pipes=4)
        if name == FOUR_PIPES
        else pj.schedules.build(name, **size)
        for name in names
    ]
    random = draw_samples(FEW, communication=True)
    runs = run_tables([*registered, *random], MODEL)
    return dict(zip([*names, *range(len(random))], runs, strict=True))


@pytest.mark.parametrize("name", daily([*WHOLE, FOUR_PIPES], total=2))
def test_every_schedule_has_the_gradients_of_the_model_without_a_pipeline(name, steps):
    assert (steps[name].gradient_error < EXACT, steps[name].loss_error < EXACT) == (True, True)


def test_random_tables_have_them_too(steps):
    assert max(steps[number].error for number in range(FEW)) < EXACT


@pytest.mark.slow
def test_many_random_tables_have_them_too():
    random = [*draw_samples(25), *draw_samples(25, communication=True)]
    assert max(run.error for run in run_tables(random, MODEL)) < EXACT
    held = {phase for table in random for phase in np.unique(table.phase)}
    assert held >= {int(pj.Phase[letter]) for letter in "FBIWROLU"}
    assert any(table.is_fused.any() for table in random)
    assert {table.num_pipes for table in random} == {1, 2}


def test_what_is_not_executed_is_said():
    table = pj.links.insert_transfers(build("gpipe", 2, 2))
    assert not without_phases(table, tuple(LEFT_OUT)).has_communication
    assert {phase.name for phase in LEFT_OUT} >= {"SEND_F", "RECV_B", "WAIT_SEND_F", "UNSHARD"}


@pytest.mark.slow
def test_the_command_says_what_it_found_and_what_it_left_out(call, tmp_path):
    table = pj.links.insert_transfers(build("zb-h1", 2, 3))
    pj.write_table(table, tmp_path / "table.csv")
    code, out, _ = call("run", "--table", tmp_path / "table.csv", "--tolerance", "1e-300", "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["runtime"]) == (1, False, "jax")
    assert 0 < result["gradient_error"] < EXACT
    assert result["loss_error"] < EXACT
    assert set(result["left_out"]) == {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [(1e-9, 0, "gradients are those"), (np.nan, 1, "gradients differ from")],
)
def test_a_person_reads_whether_gradients_are_equal(error, code, says, call, monkeypatch):
    run = processes.RuntimeRun(
        "jax", "1.0", error, 1.5, 0.0, {"U": "why"}, [1.0, 3.0, 2.0], 2.2, {"F": [0.1, 0.2]}
    )
    monkeypatch.setattr(processes, "run_table", lambda name, job: run)
    command = ("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    ended, out, _ = call(*command, "--details")
    assert (ended, says in out) == (code, True)
    for text in ("2 s measured", "2.2 s, 10 % off", "U cells", "200 ms"):
        assert text in out
    ended, out, _ = call(*command, "--json")
    result = json.loads(out)
    assert result["gradient_error"] == (None if np.isnan(error) else error)
    assert (result["step_time"], result["predicted"], result["ok"]) == (2.0, 2.2, code == 0)


@pytest.mark.parametrize(("name", "step_size"), [("pipedream", 0.0), ("1f1b", None)])
def test_the_step_size_of_updates_is_said(name, step_size, call, monkeypatch):
    def ends(module, requests, environment):
        step = {"gradient_error": 0.0, "loss": 1.0, "loss_error": 0.0}
        return [{"version": "1.0", "steps": [step]}]

    monkeypatch.setattr("pipejax.runtimes.spmd.runtime.call_together", ends)
    command = ("run", "--schedule", name, "--workers", "2", "--microbatches", "2")
    _, out, _ = call(*command)
    message = "step size 0: all weight versions equal the first"
    assert (message in " ".join(out.split())) == (step_size is not None)
    assert json.loads(call(*command, "--json")[1])["step_size"] == step_size


def test_devices_that_are_missing_are_named(monkeypatch, call):
    started = subprocess.Popen

    def without_devices(words, env, **rest):
        return started(words, env={**env, "JAX_NUM_CPU_DEVICES": "1"}, **rest)

    monkeypatch.setattr(subprocess, "Popen", without_devices)
    code, out, err = call("run", "--schedule", "1f1b", "--workers", "2", "--microbatches", "2")
    assert (code, out) == (2, "")
    assert "2 workers, but JAX has 1 devices" in err


# Tables for PyTorch's runtime, and refusals; tests/runtimes runs it

SENT = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def table(*rows, **more):
    return pj.ScheduleTable.from_rows([row.split() for row in rows], name="it", **more)


REFUSED = {
    "stage 0 is on workers 0 and 1, but a stage must be on one rank": build("chimera", 2, 2),
    r"\d+ O cells, it offloads nothing": build("pipe-offload", 2, 8),
    "cells, it updates after the whole table": build("pipedream", 2, 4),
    "2 R cells, it recomputes within the backward": table("0F0 0R0 0B0 0F1 0R1 0B1"),
    "0F1 stands before 0F0, but the runtime takes the losses": table("0F1 0F0 0B0 0B1"),
    # activations cross the other way round, and the runtime would mix them up
    "worker 1 posts 1RECV_F1 where worker 0 sends for 1RECV_F0": table(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_said_is_refused_with_the_reason(reason):
    with pytest.raises(ValueError, match=f"PyTorch's runtime cannot run .*{reason}"):
        check_exportable(REFUSED[reason])


@pytest.mark.parametrize("name", WHOLE)
def test_all_others_can_be_said(name):
    built = pj.schedules.build(name, num_workers=2, num_microbatches=4)
    placed_once = (built.placement == built.placement[0]).all()
    is_expressible = not built.offloads and not built.updates_within and Phase.R not in built.phase
    if placed_once and is_expressible:
        check_exportable(built)


def test_waits_are_put_in_and_said():
    with pytest.warns(RepairNotice, match="it: 1 WAIT_SEND_F, 1 WAIT_SEND_B cells are added"):
        whole = add_runtime_cells(table(*SENT), sharding=False)
    assert int(np.isin(whole.phase, WAIT_SEND).sum()) == 2
    assert add_runtime_cells(whole, sharding=False).phase.tolist() == whole.phase.tolist()
    with pytest.warns(RepairNotice, match="2 UNSHARD, 2 RESHARD, 2 REDUCE_GRAD, 2 WAIT_REDUCE"):
        sharded = add_runtime_cells(whole, sharding=True)
    order = [op for op in sharded.phase[0].tolist() if op not in SHARDING and op]
    assert order == [op for op in whole.phase[0].tolist() if op]
    bare = table("0F0 0B0", "1F0 1B0")
    assert add_runtime_cells(bare, sharding=True) is bare


def test_no_idle_cells_beside_communication():
    short = table(SENT[0], SENT[1] + " 1WAIT_SEND_B0")
    assert short.num_slots == 5
    lines = to_csv(short).splitlines()
    assert [len(line.split(",")) for line in lines] == [4, 5]
    idle = pj.ScheduleTable.from_rows([["", "0F0", "0B0"]])  # nothing refuses them here
    assert to_csv(idle).splitlines() == [",0F0,0B0"]


def test_export_puts_in_what_the_runtime_needs(call, tmp_path):
    pj.write_table(table(*SENT), tmp_path / "sent.csv")
    out = tmp_path / "whole.csv"
    options = ("--table", str(tmp_path / "sent.csv"), "--format", "torch-csv", "--out", str(out))
    code, _, err = call("export", *options)
    assert code == 0
    assert (
        "1 WAIT_SEND_F, 1 WAIT_SEND_B cells are added, because PyTorch's runtime needs them" in err
    )
    assert out.read_text().splitlines()[0] == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD"
    )


def test_a_lowered_table_is_what_export_makes_of_its_transfers():
    built = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    lowered = pj.links.insert_transfers(built, lowering="pytorch")
    assert add_runtime_cells(lowered, sharding=True).phase.tolist() == lowered.phase.tolist()


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_without_pytorch_the_extra_is_named(mistake):
    options = ("run", "-s", "1f1b", "-P", "2", "-M", "2", "--runtime", "torch")
    assert "pip install 'pipejax[torch]'" in mistake(*options)


def test_the_prediction_is_the_run_of_the_lowered_table():
    built = pj.schedules.build("gpipe", num_workers=2, num_microbatches=5)
    times = {"F": [1.0, 1.0], "B": [2.0, 2.0]}
    result = runtime.predicted(built, times, np.full((2, 1), 0.5))
    assert result == 1 + 5 * 1.5 + 2 + 5 * 2.5  # the next RECV is posted after an op
    early = pj.Links("rendezvous", "pair")
    assert runtime.predicted(built, times, np.full((2, 1), 0.5), early) < result


def test_times_that_ops_and_links_are_to_take():
    built = pj.schedules.build("zb-h1", num_workers=2, num_microbatches=4)
    costs = pj.Costs(forward=1.0, backward=np.array([2.0, 4.0]), latency=0.25, transmit=0.5)
    job = RuntimeJob(built, costs=costs)
    assert runtime.op_seconds(job)["I"].tolist() == [[1.0] * 4, [2.0] * 4]
    by_microbatch = np.array([[1.0, 1.0, 3.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    uneven = RuntimeJob(built, costs=pj.Costs(forward=by_microbatch, backward=2.0))
    assert runtime.op_seconds(uneven)["F"].tolist() == by_microbatch.tolist()
    assert runtime.message_seconds(job).tolist() == [[0.75], [0.75]]
    assert not runtime.message_seconds(RuntimeJob(built)).any()


# Lowering as PyTorch does it: cell by cell what its own schedule classes make of their tables


def with_waits(table, order=None):
    """SEND, RECV and waits."""
    return with_transfers(table, order, pj.Links(), waits=True)


def cells(table):
    return [[format_cell(cell) for cell in row if cell] for row in table.rows()]


def split(rows):
    return [[cell.replace("-", "") for cell in row.split()] for row in rows]


@pytest.fixture
def lowered(data):
    return json.loads((data / "torch_lowered.json").read_text())["tables"]


def test_equal_cell_by_cell(lowered):
    for case in lowered:
        table = pj.ScheduleTable.from_rows(split(case["compute"]))
        ours = pj.links.insert_transfers(table, lowering="PyTorch")
        assert cells(ours) == split(case["lowered"]), case["schedule"]


def test_read_written_and_lowered_again(lowered, tmp_path):
    for case in lowered:
        table = pj.ScheduleTable.from_rows(split(case["lowered"]))
        pj.write_table(table, tmp_path / "table.csv")
        read = pj.read_table(tmp_path / "table.csv")
        assert cells(read) == split(case["lowered"])
        # SEND, RECV and waits give way, the rest stays
        assert cells(pj.links.insert_transfers(read, lowering="pytorch")) == cells(read)


@pytest.mark.parametrize("name", WHOLE)
def test_waits_delay_nothing(name):
    built = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.7, offload=0.5)
    free, held = pj.links.insert_transfers(built), with_waits(built)
    assert int(np.isin(held.phase, WAIT_SEND).sum()) == len(table_messages(free).producer)
    for posting in ("early", "program"):
        for queues in ("worker", "pair", "direction"):
            links = pj.Links("rendezvous", queues, posting=posting)
            spans = [pj.evaluate(table, costs, link=links).makespan for table in (free, held)]
            assert spans[0] == spans[1], (name, links)


def test_sharding_cells_cost_nothing_unless_given():
    built = pj.schedules.build("interleaved-1f1b", num_workers=2, num_microbatches=4)
    costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.5)
    whole = pj.links.insert_transfers(built, lowering="pytorch")
    assert set(np.unique(whole.phase)) >= set(SHARDING)
    bare = with_waits(built, producer_order(built))
    spans = [pj.evaluate(table, costs, link="rendezvous").makespan for table in (whole, bare)]
    assert spans[0] == spans[1]
    assert cells(without_phases(whole, SHARDING)) == cells(with_waits(built))


def test_an_order_is_kept_beside_all_else():
    table = pj.schedules.build("1f1b", num_workers=3, num_microbatches=4)
    order = producer_order(table)
    ours = pj.links.insert_transfers(table, order, lowering="pytorch")
    assert cells(without_phases(without_phases(ours, SHARDING), WAIT_SEND)) == cells(
        pj.links.insert_transfers(table, order)
    )


# Action tables as PyTorch's schedules write them, against the checker, under every link model

FILES = [
    *("1F1B_4_8.comms", "Interleaved1F1B_4_8.comms", "InterleavedZeroBubble_4_8"),
    *("ZBVZeroBubble_4_8", "DualPipeV_4_8", "DualPipeV_4_8.comms"),
]
LINKS = [(link, "worker") for link in ("delay", "queued", "blocking", "rendezvous")]
LINKS += [("rendezvous", queues) for queues in ("pair", "direction")]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("link", "queues"), LINKS)
def test_agrees_with_the_checker(name, link, queues, data):
    table = pj.read_table(data / f"{name}.csv")
    stages = np.arange(table.num_stages)
    transmit = np.stack([0.5 + 0.25 * (stages[:-1] % 2), 0.75 + 0.125 * (stages[:-1] % 3)])[:, None]
    costs = pj.Costs(
        forward=1 + 0.25 * (stages % 3),
        input_grad=1 + 0.5 * (stages % 2),
        weight_grad=0.5 + 0.125 * (stages % 4),
        backward=1.5 + 0.625 * (stages % 2),
        latency=0.125,
        transmit=transmit,
    )
    run = pj.evaluate(table, costs, link=pj.Links(link, queues))
    assert pj.verify(pj.certificate(run)).problems == ()


def test_interleaved_zb_is_pytorchs(data):  # cell by cell; columns of idle cells are not its times
    files = [(4, 8, pj.read_table(data / "InterleavedZeroBubble_4_8.csv").rows())]
    for case in json.loads((data / "torch_lowered.json").read_text())["tables"]:
        if case["schedule"] == "InterleavedZeroBubble":
            cells = [row.replace("-", "").split() for row in case["compute"]]
            table = pj.ScheduleTable.from_rows(cells)
            files.append((case["workers"], case["microbatches"], table.rows()))
    assert len(files) == 2
    for workers, microbatches, rows in files:
        ours = build("interleaved-zb", workers, microbatches)
        theirs = [[cell for cell in row if cell] for row in rows]
        assert [[cell for cell in row if cell] for row in ours.rows()] == theirs


# Tables for JaxPP and Shardy: modules that make what those runtimes take, in the table's order

JAXPP = json.loads((Path(__file__).parent / "data" / "jaxpp_schedules.json").read_text())
OWN = read_cases("schedules of JaxPP")


def one_pipe(names=WHOLE):
    return [name for name in names if build(name).num_pipes == 1]


def get_ops(rows):
    return [[op for cell in row for op in cell.split("+") if op != "-"] for row in rows]


@pytest.mark.parametrize("recorded", JAXPP["schedules"])
def test_a_module_for_jaxpp_makes_the_tasks_of_its_own_schedules(recorded, monkeypatch):
    name, workers, microbatches = recorded.split()
    table = build(OWN[name], int(workers), int(microbatches))
    built = executed(to_jaxpp(table), monkeypatch).schedule
    rows = [[make_text(task) for task in row] for row in built.tasks(int(microbatches))]
    theirs = [row.split() for row in JAXPP["schedules"][recorded]]
    # theirs fuses the forward and the backward of the last stage; W of stage 0 stands behind its I
    assert get_ops(rows) == get_ops(theirs)


@pytest.mark.filterwarnings("ignore::pipejax.schedules.table.table_files.LossWarning")
@pytest.mark.parametrize("name", one_pipe())
def test_a_module_for_jaxpp_holds_the_order_of_the_table(name, monkeypatch):
    table = build(name)
    built = executed(to_jaxpp(table), monkeypatch).schedule
    assert [built.get_mpmd_idx(stage) for stage in range(built.num_stages)] == [*table.placement[0]]
    split = bool((table.phase == Phase.I).any())
    assert built.is_partial_bwd is split
    rows = [preprocessed(row) for row in built.tasks(8)]
    expected = [
        [
            _as_jaxpp_runs(op, split)
            for cell in row
            for op in cell
            if op.phase in (Phase.F, Phase.B, Phase.I, Phase.W) and op[:2] != (Phase.W, 0)
        ]
        for row in table.rows()
    ]
    result = [[op for slot in row for op in slot.split("+")] for row in rows]
    assert result == [[text for texts in row for text in texts] for row in expected]
    with pytest.raises(ValueError, match="8 microbatches, not 9"):
        built.tasks(9)


def _as_jaxpp_runs(op, split):
    if op.phase is not Phase.B or not split:
        return [str(op)]
    return [str(op._replace(phase=x)) for x in ((Phase.I, Phase.W) if op.stage else (Phase.I,))]


@pytest.mark.filterwarnings("ignore::pipejax.schedules.table.table_files.LossWarning")
@pytest.mark.parametrize("name", one_pipe())
def test_a_module_for_shardy_orders_every_fragment_as_the_table(name, monkeypatch):
    table = build(name)
    built = executed(to_shardy(table), monkeypatch).schedule
    assert isinstance(built, PipelineSchedule)
    split = built.required_mpmd_options["mpmd_split_bwd_fragments"]
    assert split == bool((table.phase == Phase.I).any())
    all_of_them = [*fragments(table, split=split)]
    (make_rules,) = built.schedule_merge_rule_builders
    for worker in range(table.num_workers):
        parts = [fragment for fragment in all_of_them if fragment.mesh_name == f"mesh{worker}"]
        (rule,), merges = make_rules(parts, None)
        assert sorted(map(make_op, rule.ordered_fragments)) == sorted(map(make_op, parts))
        ordered = [make_op(fragment) for fragment in rule.ordered_fragments]
        ops = [op for cell in [*table.rows()][worker] for op in cell]
        assert ordered == [half for op in ops for half in _as_shardy_splits(op, split)]
        assert len(merges) == int(table.is_fused[worker].sum())
        assert all(len(merge.target.origins) == 2 for merge in merges)


def _as_shardy_splits(op, split):
    """Fragments of an op: the backward of the first stage is whole, and stands where its I stands."""
    if op.phase not in (Phase.F, Phase.B, Phase.I, Phase.W) or op[:2] == (Phase.W, 0):
        return []
    if split and op.stage == 0 and op.phase is not Phase.F:
        return [(Phase.B, *op[1:])]
    if split and op.phase is Phase.B:
        return [(half, *op[1:]) for half in (Phase.I, Phase.W)]
    return [tuple(op)]


def test_fragments_that_are_missing_or_strange_are_refused(monkeypatch):
    table = build("zb-h1", 2, 2)
    (make_rules,) = executed(to_shardy(table), monkeypatch).schedule.schedule_merge_rule_builders
    result = [*fragments(table, split=True)]
    assert make_rules([], None) == ([], [])
    with pytest.raises(ValueError, match="workers \\[0, 1\\]"):
        make_rules(result, None)
    with pytest.raises(ValueError, match="no fragment of stage 1, microbatch 1"):
        make_rules([x for x in result if (x.stage_id, x.call_counter) == (1, 0)], None)


@pytest.mark.parametrize("write", [to_jaxpp, to_shardy])
def test_what_a_runtime_has_no_word_for_is_refused_or_said(write):
    with pytest.raises(ValueError, match="chimera has 2 pipes"):
        write(build("chimera"))
    with pytest.warns(LossWarning, match="24 O, 24 L, 3 WAIT_O cells are left out"):
        write(build("pipe-offload", 4, 8, offload_share=1.0))


def test_weight_gradients_of_the_first_stage_that_move_are_said():
    apart = pj.ScheduleTable.from_rows([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    with pytest.warns(LossWarning, match="2 weight gradients of stage 0 move to its input"):
        to_jaxpp(apart)


def test_any_name_of_a_table_is_a_comment(monkeypatch):
    table = pj.ScheduleTable.from_rows([["0F0", "0B0"]], name='a """ \\ $ü\n name')
    for write in (to_jaxpp, to_shardy):
        assert executed(write(table), monkeypatch).schedule


def test_python_writes_what_the_command_writes(tmp_path, call):
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    for name, form in FORMATS.items():
        if not form.is_run:
            paths = tmp_path / f"{name}.call", tmp_path / f"{name}.command"
            pj.write_table(table, paths[0], format=name)
            size = ("-s", "1f1b", "-P", "2", "-M", "4")
            assert call("export", *size, "--format", name, "--out", paths[1])[0] == 0
            assert paths[0].read_bytes() == paths[1].read_bytes()
