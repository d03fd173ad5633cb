"""Tables for JaxPP and Shardy: modules that make what those runtimes take, in the table's order."""

import json
from pathlib import Path

import pytest
from legal_sizes import WHOLE
from mpmd_stand_ins import PipelineSchedule, executed, fragments, make_op, make_text, preprocessed

import pipejax as pj
from pipejax.runtimes.exports import to_jaxpp, to_shardy
from pipejax.runtimes.formats import FORMATS
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table_files import LossWarning

JAXPP = json.loads((Path(__file__).parent / "data" / "jaxpp_schedules.json").read_text())
OWN = {  # class of JaxPP -> schedule here
    "Std1F1B": "1f1b",
    "Eager1F1B": "eager-1f1b",
    "GPipe": "gpipe",
    "ZeroBubble": "zb-h1",
    "Interleaved1F1B": "interleaved-1f1b",
}


def schedule(name, workers=4, microbatches=8):
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)


def one_pipe(names=WHOLE):
    return [name for name in names if schedule(name).num_pipes == 1]


def get_ops(rows):
    return [[op for cell in row for op in cell.split("+") if op != "-"] for row in rows]


@pytest.mark.parametrize("recorded", JAXPP["schedules"])
def test_a_module_for_jaxpp_makes_the_tasks_of_its_own_schedules(recorded, monkeypatch):
    name, workers, microbatches = recorded.split()
    table = schedule(OWN[name], int(workers), int(microbatches))
    built = executed(to_jaxpp(table), monkeypatch).schedule
    rows = [[make_text(task) for task in row] for row in built.tasks(int(microbatches))]
    theirs = [row.split() for row in JAXPP["schedules"][recorded]]
    # theirs fuses the forward and the backward of the last stage; W of stage 0 stands behind its I
    assert get_ops(rows) == get_ops(theirs)


@pytest.mark.filterwarnings("ignore::pipejax.schedules.table.table_files.LossWarning")
@pytest.mark.parametrize("name", one_pipe())
def test_a_module_for_jaxpp_holds_the_order_of_the_table(name, monkeypatch):
    table = schedule(name)
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
    table = schedule(name)
    built = executed(to_shardy(table), monkeypatch).schedule
    assert isinstance(built, PipelineSchedule)
    split = built.required_mpmd_options["mpmd_split_bwd_fragments"]
    assert split == bool((table.phase == Phase.I).any())
    all_of_them = [*fragments(table, split=split)]
    (build,) = built.schedule_merge_rule_builders
    for worker in range(table.num_workers):
        parts = [fragment for fragment in all_of_them if fragment.mesh_name == f"mesh{worker}"]
        (rule,), merges = build(parts, None)
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
    table = schedule("zb-h1", 2, 2)
    (build,) = executed(to_shardy(table), monkeypatch).schedule.schedule_merge_rule_builders
    result = [*fragments(table, split=True)]
    assert build([], None) == ([], [])
    with pytest.raises(ValueError, match="workers \\[0, 1\\]"):
        build(result, None)
    with pytest.raises(ValueError, match="no fragment of stage 1, microbatch 1"):
        build(
            [
                fragment
                for fragment in result
                if (fragment.stage_id, fragment.call_counter) == (1, 0)
            ],
            None,
        )


@pytest.mark.parametrize("write", [to_jaxpp, to_shardy])
def test_what_a_runtime_has_no_word_for_is_refused_or_said(write):
    with pytest.raises(ValueError, match="chimera has 2 pipes"):
        write(schedule("chimera"))
    with pytest.warns(LossWarning, match="24 O, 24 L, 3 WAIT_O cells are left out"):
        write(
            pj.schedules.build("pipe-offload", num_workers=4, num_microbatches=8, offload_share=1.0)
        )


def test_weight_gradients_of_the_first_stage_that_move_are_said():
    apart = pj.ScheduleTable.from_rows([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    with pytest.warns(LossWarning, match="2 weight gradients of stage 0 stand with its input"):
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
    with pytest.raises(ValueError, match="format"):
        pj.write_table(table, tmp_path / "trace.json", format="chrome-trace")
