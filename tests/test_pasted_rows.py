"""Rows as reports print them, and PyTorch's letters of 2024: read as a step of 9 s, or refused."""

import json
import re
import warnings
from pathlib import Path

import pytest
from daily import read_cases

import pipejax as pj
from pipejax.schedules.table.table_files import ReadingNotice

TEXTS = json.loads((Path(__file__).parent / "data" / "pasted_rows.json").read_text())
NINE_SECONDS, STEPS_OF_NINE_SECONDS = TEXTS.values()


def read(text, path):
    path.write_text(text)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        table = pj.read_table(path)
    assert all(notice.category is ReadingNotice for notice in notices)
    return table, [str(notice.message) for notice in notices]


@pytest.mark.parametrize("form", NINE_SECONDS)
def test_rows_as_people_paste_them(form, tmp_path):
    table, notices = read(NINE_SECONDS[form], tmp_path / "rows.csv")
    assert pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)).makespan == 9
    assert not notices


@pytest.mark.parametrize("form", STEPS_OF_NINE_SECONDS)
def test_lines_that_are_steps(form, tmp_path):
    table, notices = read(STEPS_OF_NINE_SECONDS[form], tmp_path / "rows.csv")
    assert pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)).makespan == 9
    assert notices == ["rows: its 6 lines are read as steps, its 2 columns as ranks"]


@pytest.mark.parametrize("schedule", ["dualpipe-v", "1f1b", "zb-h1"])
@pytest.mark.parametrize("workers", [4, 12])
def test_step_views_of_whole_schedules(schedule, workers, tmp_path):
    """As PyTorch pads them: columns as wide as their widest cell and the label of a step."""
    table = pj.schedules.build(schedule, num_workers=workers, num_microbatches=24)
    rows = [[table.grammar.text(cell) for cell in row] for row in table.rows()]
    digits = len(str(table.num_slots - 1))
    steps = [f"Step {step:0{digits}}" for step in range(table.num_slots)]
    widths = [max(len(steps[0]), *map(len, row)) for row in rows]
    lines = [[f"Rank {rank}" for rank in range(workers)], *zip(*rows, strict=True)]
    text = "\n".join(
        label + " ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        for label, line in zip(
            [" " * (len(steps[0]) + 2), *(f"{step}: " for step in steps)], lines, strict=True
        )
    )
    for form in (text, text.strip(), str(table)):  # a table prints itself as rows of dots and ops
        path = tmp_path / "steps.csv"
        path.write_text(form)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReadingNotice)
            result = pj.read_table(path)
        cells = [[cell for cell in row if cell] for row in result.rows()]
        assert cells == [[cell for cell in row if cell] for row in table.rows()]


def test_pairs_between_blanks_and_in_lists(tmp_path):
    """By hand: 0F0, 0F1, a pair of 0F2 and 0B0, 0B1, 0B2: 1 + 1 + (1 + 2) + 2 + 2 s."""
    for text in (
        "0F0 0F1 . (0F2;0B0)OVERLAP_F_B 0B1 0B2\n",
        "[0F0, 0F1, (0F2; 0B0)OVERLAP_F_B, 0B1, 0B2]\n",
        "0F0; 0F1; (0F2;0B0) OVERLAP_F_B; 0B1; 0B2\n",
    ):
        table, _ = read(text, tmp_path / "pairs.csv")
        assert table.is_fused.sum() == 1
        assert pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)).makespan == 9


OLDER = "its letters are PyTorch's of 2024: B is read as I, BW as B"
TABLES_OF_2024 = read_cases("tables in letters of 2024")


@pytest.mark.parametrize("form", TABLES_OF_2024)
def test_letters_of_2024(form, tmp_path):
    text, seconds = TABLES_OF_2024[form]
    table, notices = read(text, tmp_path / "older.csv")
    costs = pj.Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
    assert pj.evaluate(table, costs).makespan == seconds
    assert notices == [f"older: {OLDER}"]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble_4_8", "ZBVZeroBubble_4_8"])
def test_whole_schedules_in_letters_of_2024(name, data, tmp_path):
    """B becomes BW and I becomes B, but not in SEND_B and RECV_B."""
    text = (data / f"{name}.csv").read_text()
    older = re.sub(r"(?<=\d)I(?=\d)", "B", re.sub(r"(?<=\d)B(?=\d)", "BW", text))
    table, notices = read(older, tmp_path / "older.csv")
    assert [*table.rows()] == [*pj.read_table(data / f"{name}.csv").rows()]
    assert notices == [f"older: {OLDER}"]


def test_letters_of_today_are_read_as_they_are(tmp_path):
    text = "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1I1,1W1\n"
    table, notices = read(text, tmp_path / "today.csv")
    assert [cell[0].phase.name for cell in next(iter(table.rows())) if cell] == [*"FFIWB"]
    assert not notices


def test_a_command_says_which_letters_it_read(call, tmp_path):
    path = tmp_path / "older.csv"
    path.write_text(TABLES_OF_2024["mixed"][0])
    code, out, err = call("evaluate", "--table", path, "--stage-times", "F=1,I=1,W=1")
    assert (code, err) == (0, f"warning: older: {OLDER}\n")
    assert "14 s" in out


def test_a_worker_without_ops_is_not_dropped(tmp_path):
    steps = "step rank0 rank1 rank2\n0 0F0 . .\n1 . 1F0 .\n2 . 1B0 .\n3 0B0 . ."
    with pytest.raises(pj.ScheduleError, match="worker 2 has no op"):
        read(steps, tmp_path / "table.csv")


@pytest.mark.parametrize(("rows", "count"), [(",", 1), (",,,\n,,,\n", 2), (" , \n,\n,\n\n", 3)])
def test_empty_rows_at_the_end_are_said_to_be_no_workers(rows, count, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"0F0,0B0\n1F0,1B0\n{rows}")
    with pytest.warns(match=rf"empty rows at its end count as no workers \({count}\)"):
        assert pj.read_table(path).num_workers == 2
