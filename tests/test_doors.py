"""Checks of public arguments: options, names, types."""

import json
import pickle
import sys
import warnings

import pytest
from daily import read_cases

import pipejax as pj
from pipejax.base.checks import MismatchError, resolve_choice, resolve_name, unknown, wrong
from pipejax.base.progress import Notice, notices_as_lines
from pipejax.cli.app import COMMANDS, command_function
from pipejax.cli.options.line import LineOptions, parse
from pipejax.costs.system.system import data_file

ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
TIMES = ["--stage-times", "F=1,B=2"]


def test_names_fold_case(answer):
    named = ["--schedule", "1F1B", *ONE[2:], *TIMES, "--link", "Queued"]
    assert answer("evaluate", *named)["link"] == "queued"
    assert pj.schedules.build("ZB-h1", num_workers=2, num_microbatches=2).name == "zb-h1"
    assert pj.load_model("Llama3-70B").layers == 80
    assert pj.load_system("H100").name == "h100"
    assert pj.Links("Rendezvous", queues="PAIR") == pj.Links("rendezvous", queues="pair")
    assert pj.analysis.Distribution("Gamma", 0.1) == pj.analysis.Distribution("gamma", 0.1)
    assert pj.Workload(pj.load_model("gpt-22b"), 8, recompute="FULL").recompute == "full"


def test_the_nearest_name_is_proposed():
    names = ("delay", "queued", "Blocking")
    assert resolve_name("blocking", names, "link model") == "Blocking"
    with pytest.raises(ValueError, match=r"unknown link model 'blokcing': .*; did you mean Block"):
        resolve_name("blokcing", names, "link model")
    with pytest.raises(ValueError, match=r"got 'queue'; did you mean queued[?]$"):
        resolve_choice("queue", names, "link")
    with pytest.raises(ValueError, match=r"did you mean zb-h1 or zb-v[?]$"):  # all of that word
        resolve_choice("ZB", ("zbx", "zb-h1", "zb-v"), "schedule")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):  # nothing is near
        resolve_choice("xyz", names, "link")
    with pytest.raises(ValueError, match=r"got None$"):
        resolve_choice(None, names, "link")


def torch_1f1b(workers, microbatches, *, reduces):
    """The 1F1B that PyTorch dumps, by what its `Schedule1F1B` is known to count."""
    rows = []
    for rank in range(workers):
        warmup, row = workers - 1 - rank, [""] * rank
        row += [f"{rank}F{m}" for m in range(warmup)] + [""] * 2 * warmup
        forward, backward = max(warmup - 1, 0), 0  # the last rank has no warm-up, and counts from 1
        for _ in range(microbatches - warmup):
            forward += 1
            row += [f"{rank}F{forward}", f"{rank}B{backward}"]
            backward += 1
        for m in range(backward, microbatches):
            row += ["", f"{rank}B{m}"]
        rows.append([cell for cell in row if cell] + [f"{rank}REDUCE_GRAD"] if reduces else row)
    return rows


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 1), (2, 4), (4, 3), (4, 8), (5, 13)])
def test_the_1f1b_of_pytorch_is_read_where_it_is_asked_for(tmp_path, size, reduces):
    path = tmp_path / "dump.csv"
    path.write_text("\n".join(map(",".join, torch_1f1b(*size, reduces=reduces))))
    with pytest.raises(pj.ScheduleError, match=r"PyTorch's own 1F1B, .* --repair torch-1f1b"):
        pj.read_table(path)
    workers, microbatches = size
    with pytest.warns(UserWarning, match=rf"rank {workers - 1}, {microbatches} cells: .*F1 is rea"):
        table = pj.read_table(path, repair="Torch-1F1B")
    built = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=microbatches)
    costs = pj.Costs(forward=1.0, backward=1.5, transmit=0.25)
    assert pj.evaluate(table, costs).makespan == pj.evaluate(built, costs).makespan


DUMP = torch_1f1b(4, 8, reduces=False)
BROKEN = read_cases("BROKEN of test_doors")


@pytest.mark.filterwarnings("ignore:.*nothing to repair")
@pytest.mark.filterwarnings("ignore:.*is read as")
@pytest.mark.parametrize("what", BROKEN)
def test_nothing_else_is_repaired(tmp_path, what):
    path = tmp_path / "broken.csv"
    path.write_text("\n".join(map(",".join, BROKEN[what])))
    with pytest.raises(pj.ScheduleError) as plain:
        pj.read_table(path)
    assert "torch-1f1b" not in str(plain.value)
    with pytest.raises(pj.ScheduleError):
        pj.read_table(path, repair="torch-1f1b")


def test_a_repair_says_what_it_changed(call, mistake, tmp_path):
    dump = tmp_path / "dump.csv"
    dump.write_text("\n".join(map(",".join, DUMP)))
    code, out, err = call("evaluate", "--table", dump, "--repair", "torch-1f1b", *TIMES, "--json")
    assert (code, out.count("\n"), err.count("\n")) == (0, 1, 1)
    assert "rank 3, 8 cells: 3F1 is read as 3F0, 3F2 is read as 3F1, ..., 3F8 is read as 3F7" in err
    assert "dump.csv: missing op 0F8" in mistake("show", "--table", dump)
    sound = tmp_path / "sound.csv"
    sound.write_text("0F0,0B0\n")
    assert "nothing to repair" in call("show", "--table", sound, "--repair", "torch-1f1b")[2]


def changed(folder, kind, name, **values):
    """A model or system file with other values."""
    path = folder / f"{name}-changed.json"
    path.write_text(json.dumps(json.loads(data_file(kind, name, "file").read_text()) | values))
    return path


def test_a_model_may_say_that_only_products_of_its_heads_are_meant(tmp_path):
    values = {"heads": 60, "kv_heads": 60, "whole_heads": False}
    odd = pj.load_model(changed(tmp_path, "models", "gpt-22b", **values))
    assert (odd.heads, odd.hidden % odd.heads) == (60, 24)
    assert not pj.load_model("tabular-128l").whole_heads


def test_a_backward_of_records_may_contradict_its_parts(answer, tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"unit": "seconds", "recorded": true, "F": 1, "B": 5, "I": 1, "W": 2}')
    assert answer("evaluate", *ONE, "--costs", costs)["busy"] == pytest.approx([8 + 8 * 5] * 4)
    for backward in (3, 2.98):  # what is measured is not the same to the last digit
        times = ["--stage-times", f"F=1,B={backward},I=1,W=2"]
        assert answer("evaluate", *ONE, *times)["busy"] == pytest.approx([8 + 8 * backward] * 4)
    fused = pj.Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=2.0)  # faster in one
    assert fused.backward == 2.0


def test_one_line_is_all_that_a_command_says():
    notice, foreign = Notice("a table is repaired"), RuntimeWarning("overflow encountered in add")
    with pytest.MonkeyPatch.context() as patch, notices_as_lines():
        lines = []
        patch.setattr(sys.stderr, "write", lines.append)
        for warning in (notice, foreign):
            warnings.showwarning(warning, type(warning), "here", 1)
    assert lines == ["warning: a table is repaired\n"]


def within(place, error):
    """An error in the text of another, which says where."""
    outer = ValueError(f"{place}: {error}")
    outer.__context__ = error
    return outer


def test_an_error_names_the_option_of_its_file_or_of_its_argument():
    options = LineOptions("evaluate", COMMANDS)
    words = ["--memory-limit", "2", "--table", "x.csv", "--slack"]
    parse(command_function("evaluate"), words, options)
    limit = wrong("memory_limit", "must be 3", 2)
    first, no_table = "the memory limit of worker 0 is 2", unknown("table", "y", ["z"])
    for error, message in (
        (limit, "--memory-limit must be 3"),
        (within("1f1b", limit), "1f1b: --memory-limit must be 3"),
        (within("x.csv", limit), "--table x.csv: memory_limit must be 3"),
        (MismatchError(first, "memory_limit"), f"--memory-limit 2: {first}"),
        (MismatchError(first), first),
        (pj.ScheduleError("a table is no table", argument="table"), "a --table is no table"),
        (ValueError("memory_limit must be 3"), "memory_limit must be 3"),
        (ValueError("x.csv is not a table"), "--table x.csv is not a table"),
        (wrong("table: a cell", "is odd"), "--table: a cell is odd"),
        (wrong("tables", "must be legal"), "tables must be legal"),
        (no_table, "--table: unknown table 'y': known are z"),
        (unknown("cell", "x.csv", ["z"]), "unknown cell 'x.csv': known are z"),
        (within("--corner a", no_table), "--corner a: unknown table 'y': known are z"),
        (ValueError("give backward (B), or weight_grad (W)"), "give B, or W"),
        (ValueError("W = B - I (weight_grad) is -1"), "W = B - I is -1"),
    ):
        assert options.error_text(error) == message


def test_an_error_of_an_argument_is_its_text_and_travels_between_processes():
    errors = wrong("zero", "must be at most 3", 4), unknown("model", "x", ["y"])
    others = MismatchError("no", "pipes"), pj.ScheduleError("no", "grid", argument="slots")
    for error in (*errors, *others):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (type(error), str(error))
        assert copied.argument == error.argument != ""
