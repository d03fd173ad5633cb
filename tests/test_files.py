"""Tables in files: what is written is read; what is no table is refused by name."""

import json

import pytest
import strategies
from hypothesis import given

import pipejax as pj
from pipejax.schedules.table.table_files import to_csv, to_json


def same(one, other):
    return [list(row) for row in one.rows()] == [list(row) for row in other.rows()]


@given(case=strategies.cases())
def test_json_round_trip(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "table.json"
    pj.write_table(case.table, path)
    read = pj.read_table(path)
    assert same(read, case.table)
    assert read.placement.tolist() == case.table.placement.tolist()
    assert read.pipe_of_microbatch.tolist() == case.table.pipe_of_microbatch.tolist()
    assert dict(read.slots) == dict(case.table.slots)
    assert (read.name, read.stage_shares) == (case.table.name, case.table.stage_shares)


@pytest.mark.parametrize("name", pj.schedules.names())
def test_csv_round_trip(name, tmp_path):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    path = tmp_path / f"{name}.csv"
    pj.write_table(table, path)
    read = pj.read_table(path)
    assert same(read, table)
    assert read.placement.tolist() == table.placement.tolist()
    assert read.name == name


@pytest.mark.parametrize(
    "name",
    [
        "ZBVZeroBubble_4_8",
        "DualPipeV_4_8",
        "DualPipeV_4_8.comms",
        "Interleaved1F1B_4_8.comms",
        "1F1B_4_8.comms",
    ],
)
def test_pytorch_files_are_written_as_they_were_read(name, data):
    path = data / f"{name}.csv"
    written = [row.rstrip(",") for row in to_csv(pj.read_table(path)).split("\r\n")]
    assert written == [row.rstrip(",") for row in path.read_bytes().decode().splitlines()] + [""]


def test_old_line_ends_and_spaces_in_pairs_are_read(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes(b"0F0,0F1,0B0,0B1\r1F0, ( 1F1 ; 1B0 ) OVERLAP_F_B ,1B1\r")
    assert pj.read_table(path).is_fused.sum() == 1


def test_what_spreadsheets_do_to_a_csv_is_read(tmp_path):
    path = tmp_path / "edited.csv"
    path.write_bytes("\ufeff 0F0 , 0B0,,\r\n1F0,1B0\r\n\r\n,,\r\n".encode())
    assert pj.read_table(path).num_workers == 2


GOOD = json.loads(to_json(pj.schedules.build("chimera", num_workers=2, num_microbatches=2)))
BAD = {
    "empty": (b"", "the file is empty"),
    "blank": (b" \n\n", "the file is empty"),
    "binary": (bytes(range(128, 256)), "not text"),
    "zeros": (b"0F0\0,0B0", "binary data"),
    "an image": (b"\x89PNG\r\n\x1a\n\0\0", "not text"),
    "prose": (b"hello, world\n", "'hello' is not an op"),
    "unclosed quote": (b'"0F0,0B0\n', "not a table|not an op"),
    "half of json": (b'{"format": ', "not JSON"),
    "other json": (b'{"a": 1}', '"format": "pipejax-table"'),
    "json list": (b"[1, 2]", "is not an op"),
    "missing key": (json.dumps({k: v for k, v in GOOD.items() if k != "rows"}).encode(), "'rows'"),
    "unknown key": (json.dumps(GOOD | {"rowz": []}).encode(), "unknown key 'rowz'"),
    "rows of numbers": (json.dumps(GOOD | {"rows": [[1]]}).encode(), "lists of texts"),
    "placement text": (json.dumps(GOOD | {"placement": "x"}).encode(), "placement lists"),
    "ragged placement": (json.dumps(GOOD | {"placement": [[0, 1], [1]]}).encode(), "of one length"),
    "unknown slot": (json.dumps(GOOD | {"slots": {"Z": 1}}).encode(), "unknown phase 'Z'"),
    "negative slot": (
        json.dumps(GOOD | {"slots": {"F": -1}}).encode(),
        "F must be a finite number",
    ),
    "huge placement": (
        json.dumps(GOOD | {"placement": [[0, 10**20], [1, 0]]}).encode(),
        "not a table",
    ),
    "another version": (json.dumps(GOOD | {"version": 7}).encode(), "version"),
    "key twice": (b'{"format": 1, "format": 2}', "key 'format' stands twice"),
    "missing op": (b"0F0,0B0,0F1\n", "missing op 0B1"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_by_name(what, tmp_path):
    content, message = BAD[what]
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(pj.ScheduleError, match=message) as caught:
        pj.read_table(path)
    assert "bad.csv" in caught.value.reason
