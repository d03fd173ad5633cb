"""Tables in files: what is written is read; what is no table is refused by name."""

import dataclasses
import json
import warnings

import pytest
import strategies
from daily import read_cases, with_cases
from hypothesis import given, strategies as st
from legal_sizes import WHOLE, build

import pipejax as pj
from pipejax.schedules.table.table_files import LossWarning, to_csv

PYTORCH = "ZBVZeroBubble_4_8 DualPipeV_4_8 DualPipeV_4_8.comms Interleaved1F1B_4_8.comms"


def same(first, second):
    return [list(row) for row in first.rows()] == [list(row) for row in second.rows()]


def written_and_read(table, path):
    """Return what reading a written table gives, and what was said to be lost."""
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        pj.write_table(table, path)
    assert all(warning.category is LossWarning for warning in message)
    return pj.read_table(path), [str(warning.message) for warning in message]


def fields(table):
    return {
        "placement": table.placement.tolist(),
        "pipes of the microbatches": table.pipe_of_microbatch.tolist(),
        "slot durations": dict(table.slots),
        "stage shares": table.stage_shares,
        "weight rule": table.weights,
    }


@given(case=strategies.cases())
def test_json_round_trip(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "table.json"
    read, lost = written_and_read(case.table, path)
    assert same(read, case.table)
    assert not lost
    assert fields(read) == fields(case.table)
    assert read.name == case.table.name


@given(case=strategies.cases(), slots=st.sampled_from([{}, {"F": 2.5}]), share=st.integers(0, 1))
def test_csv_gives_back_the_table_or_says_what_it_lost(case, slots, share, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    shares = tuple(1.0 + share * stage for stage in range(case.table.num_stages))
    table = dataclasses.replace(case.table, slots=slots, stage_shares=shares)
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        text = to_csv(table)
    path.write_text(text)
    lost = "".join(str(warning.message) for warning in message)
    try:
        read = pj.read_table(path)
    except pj.ScheduleError:  # two pipes that do not mirror each other
        assert "placement" in lost
        return
    assert same(read, table)
    before, back = fields(table), fields(read)
    named = {name for name in before if before[name] != back[name]}
    assert all(name in lost for name in named) if named else not lost


LOST = read_cases("what a CSV does not hold")


@pytest.mark.parametrize("name", WHOLE)
def test_csv_round_trip(name, tmp_path):
    table = build(name, 4, 8)
    read, lost = written_and_read(table, tmp_path / f"{name}.csv")
    assert same(read, table)
    assert read.placement.tolist() == table.placement.tolist()
    assert read.name == name
    text = f"a CSV does not hold the {LOST.get(name)} of {name}: reading it gives another table, "
    assert lost == ([text + "a .json file keeps them"] if name in LOST else [])


@pytest.mark.parametrize("name", ["a.yaml", "a.txt", "a", "a.json.gz", "json"])
def test_a_file_of_an_unknown_suffix_is_refused(name, tmp_path):
    table = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"must end in .csv or .json, got "):
        pj.write_table(table, tmp_path / name)
    assert not [*tmp_path.iterdir()]
    pj.write_table(table, tmp_path / "A.JSON")
    assert json.loads((tmp_path / "A.JSON").read_text())


def test_a_placement_that_a_csv_cannot_tell_is_said_to_be_lost(tmp_path):
    rows = [row.split() for row in ("0F0 0B0 1F1 1B1", "1F0 1B0 0F1 0B1", "2F0 2B0", "2F1 2B1")]
    where = {"placement": [[0, 1, 2], [1, 0, 3]], "pipe_of_microbatch": [0, 1]}
    table = pj.ScheduleTable.from_rows(rows, **where)
    with pytest.warns(LossWarning, match="does not hold the placement"):
        pj.write_table(table, tmp_path / "table.csv")
    with pytest.raises(pj.ScheduleError, match="mirrored workers"):
        pj.read_table(tmp_path / "table.csv")


@pytest.mark.parametrize("name", [*PYTORCH.split(), "1F1B_4_8.comms"])
def test_pytorch_files_are_written_as_they_were_read(name, data):
    path = data / f"{name}.csv"
    written = [row.rstrip(",") for row in to_csv(pj.read_table(path)).split("\r\n")]
    assert written == [row.rstrip(",") for row in path.read_bytes().decode().splitlines()] + [""]


def test_old_line_ends_spaces_in_pairs_and_what_spreadsheets_do_are_read(tmp_path):
    path = tmp_path / "edited.csv"
    path.write_bytes(b"0F0,0F1,0B0,0B1\r1F0, ( 1F1 ; 1B0 ) OVERLAP_F_B ,1B1\r")
    assert pj.read_table(path).is_fused.sum() == 1
    path.write_bytes("\ufeff 0F0 , 0B0,,\r\n1F0,1B0\r\n\r\n,,\r\n".encode())
    with pytest.warns(match=r"empty rows at its end count as no workers \(2\)"):
        assert pj.read_table(path).num_workers == 2


@pytest.mark.parametrize("content", [bytes(range(128, 256)), b"\x89PNG\r\n\x1a\n\0\0"])
def test_files_that_are_no_text_are_refused_by_name(content, tmp_path):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(pj.ScheduleError, match="not text") as caught:
        pj.read_table(tmp_path / "bad.csv")
    assert "bad.csv" in caught.value.reason


def test_a_command_says_what_its_csv_does_not_hold(call, tmp_path):
    path = tmp_path / "better.csv"
    options = "--schedule", "pipedream-2bw", "--workers", 2, "--microbatches", 4
    options += "--stage-times", "F=1,B=2", "--iterations", 0, "--out", path
    code, _, err = call("tune", "messages", *options)
    assert code == 0
    assert err.startswith("warning: a CSV does not hold the slot durations and weight rule of pipe")
    assert err.count("\n") == 1


@with_cases("line", *read_cases("numbers below all floats"))
def test_numbers_too_small_for_a_float_are_not_zero(line, mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text('{"unit": "seconds", "F": [1e-400, 1], "B": 1}')
    (tmp_path / "costs.csv").write_text("stage,F_ms,B_ms\n0,1e-400,2\n1,1,2\n")
    message = mistake("evaluate", "-s", "1f1b", "-P", 2, "-M", 4, *line)
    assert "e-400" in message or "E-999" in message


@pytest.mark.parametrize("zero", ["0", "0.0", "0e-400", "0.000E9", "-0"])
def test_zeros_are_numbers(zero, answer):
    result = answer("evaluate", "-s", "1f1b", "-P", 2, "-M", 4, "-T", f"F={zero},B=1")
    assert result["makespan"] == 5
