"""Rows as reports print them, and PyTorch's letters of 2024: read as a step of 9 s, or refused."""

import re
import warnings

import pytest

import pipejax as pj
from pipejax.schedules.table.table_files import ReadingNotice

STEPS = """\
         Rank 0  Rank 1
Step 00: 0F0
Step 01: 0F1     1F0
Step 02:         1B0
Step 03: 0B0     1F1
Step 04:         1B1
Step 05: 0B1
"""
NINE_SECONDS = {
    "lists": "[0F0, 0F1, 0B0, 0B1]\n[1F0, 1B0, 1F1, 1B1]\n",
    "nested lists": "[[0F0, 0F1, 0B0, 0B1],\n [1F0, 1B0, 1F1, 1B1]]\n",
    "lists over several lines": "[[0F0,\n  0F1,\n 0B0, 0B1],\n [1F0, 1B0,\n 1F1, 1B1],\n]\n",
    "dict": "{0: [0F0, 0F1, None, 0B0, None, 0B1], 1: [None, 1F0, 1B0, 1F1, 1B1, None]}",
    "dict of words": "{'rank1': ['1F0', '1B0', '1F1', '1B1'], 'rank0': ['0F0', '0F1', '0B0', '0B1']}",
    "JSON": '{"0": ["0F0", "0F1", "0B0", "0B1"], "1": ["1F0", "1B0", "1F1", "1B1"]}',
    "defaultdict": "defaultdict(<class 'list'>, {0: [0F0, 0F1, 0B0, 0B1], 1: [1F0, 1B0, 1F1, 1B1]})",
    "assignments": "rank0 = ['0F0', '0F1', '0B0', '0B1']\nrank1 = ['1F0', '1B0', '1F1', '1B1']\n",
    "a launcher's prefix": "[rank1]:[1F0, 1B0, 1F1, 1B1]\n[rank0]:[0F0, 0F1, 0B0, 0B1]\n",
    "prefix and label": "[rank0]: Rank 0: [0F0, 0F1, 0B0, 0B1]\n[rank1]: Rank 1: [1F0, 1B0, 1F1, 1B1]",
    "ranks": "Rank 0: 0F0, 0F1, 0B0, 0B1\nRank 1: 1F0, 1B0, 1F1, 1B1\n",
    "ranks in another order": "Rank 1: 1F0 1B0 1F1 1B1\nRank 0: 0F0 0F1 0B0 0B1\n",
    "stages": "Stage 0: 0F0 0F1 0B0 0B1\nStage 1: 1F0 1B0 1F1 1B1\n",
    "numbers": "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n",
    "caption and fence": "Order:\n```text\nRank 0: 0F0 0F1 0B0 0B1\nRank 1: 1F0 1B0 1F1 1B1\n```\n",
    "dots": "0F0 0F1 . 0B0 . 0B1\n. 1F0 1B0 1F1 1B1 .\n",
    "dashes": "0F0 0F1 - 0B0 - 0B1\n- 1F0 1B0 1F1 1B1 -\n",
    "None": "0F0,0F1,None,0B0,None,0B1\nNone,1F0,1B0,1F1,1B1,None\n",
    "tabs": "rank0\t0F0\t0F1\t\t0B0\t\t0B1\nrank1\t\t1F0\t1B0\t1F1\t1B1\t\n",
    "semicolons": "0F0; 0F1; 0B0; 0B1\n1F0; 1B0; 1F1; 1B1\n",
    "bars": "rank0|0F0|0F1||0B0||0B1\nrank1||1F0|1B0|1F1|1B1|\n",
    "bar behind the rank": "0| 0F0 0F1 . 0B0 . 0B1\n1| . 1F0 1B0 1F1 1B1 .\n",
    "quotes and commas": "'0F0', '0F1', '0B0', '0B1',\n'1F0', '1B0', '1F1', '1B1',\n",
    "Markdown": "|Rank|0|1|2|3|\n|--|--|:-:|--|--|\n|0|0F0|0F1|0B0|0B1|\n|1|1F0|1B0|1F1|1B1|\n",
    "arrows": "Rank 0: 0F0 \u2192 0F1 \u2192 0B0 -> 0B1\nRank 1: 1F0 => 1B0 => 1F1 => 1B1\n",
    "arrows alone": "0F0->0F1->0B0->0B1\n1F0 -> 1B0 -> 1F1 -> 1B1\n",
    "remarks": "0F0 0F1 0B0 0B1  # rank 0\n// the last one\n1F0 1B0 1F1 1B1  # rank 1\n",
    "remarks in a CSV": "# mine\n0F0,0F1,,0B0,,0B1\n# more\n,1F0,1B0,1F1,1B1,\n",
    "ranks behind #": "#0 0F0 0F1 0B0 0B1\n#1 1F0 1B0 1F1 1B1\n",
    "a column of ranks": "rank,step0,step1,step2,step3\n0,0F0,0F1,0B0,0B1\n1,1F0,1B0,1F1,1B1\n",
}
STEPS_OF_NINE_SECONDS = {
    "PyTorch's": STEPS,
    "without its indent": STEPS.strip(),
    "heads behind #": "# step rank 0 rank 1\n#0 0F0 .\n#1 0F1 1F0\n#2 . 1B0\n#3 0B0 1F1\n#4 . 1B1\n#5 0B1 .",
    "ranks swapped": "        Rank 1 Rank 0\nStep 0:        0F0\nStep 1: 1F0    0F1\nStep 2: 1B0\n"
    "Step 3: 1F1    0B0\nStep 4: 1B1\nStep 5:        0B1\n",
    "blanks squeezed": "Rank 0 Rank 1\nStep 0: 0F0 None\nStep 1: 0F1 1F0\nStep 2: None 1B0\n"
    "Step 3: 0B0 1F1\nStep 4: None 1B1\nStep 5: 0B1 None\n",
    "Markdown": "| Step | Rank 0 | Rank 1 |\n|---|---|---|\n| 0 | 0F0 | |\n| 1 | 0F1 | 1F0 |\n"
    "| 2 | | 1B0 |\n| 3 | 0B0 | 1F1 |\n|4| | 1B1 |\n|5|0B1| |\n",
    "tabs": "\tRank 0\tRank 1\nStep 0\t0F0\t\nStep 1\t0F1\t1F0\nStep 2\t\t1B0\nStep 3\t0B0\t1F1\n"
    "Step 4\t\t1B1\nStep 5\t0B1\t\n",
    "tabs cut off": "\tRank 0\tRank 1\nStep 0\t0F0\nStep 1\t0F1\t1F0\nStep 2\t\t1B0\nStep 3\t0B0\t1F1\n"
    "Step 4\t\t1B1\nStep 5\t0B1\n",
    "CSV": "step,rank 0,rank 1\n0,0F0,\n1,0F1,1F0\n2,,1B0\n3,0B0,1F1\n4,,1B1\n5,0B1,\n",
}


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


REFUSED = {
    "a rank of idle cells alone": ("0F0 0B0\n- -\n1F0 1B0\n", "'- -' holds no op"),
    "a cell under no rank": (STEPS.replace("         1B0", "    1B0"), "stands under no rank"),
    "steps without ranks": (STEPS[STEPS.index("Step") :], "a cell for each rank"),
    "a cell is missing": ("|Step|Rank 0|Rank 1|\n|0|0F0|\n|1|0B0|1F0|\n", "a cell for each rank"),
    "a step is missing": (
        STEPS.replace("Step 02:         1B0\n", ""),
        "steps must be numbered 0 to 4",
    ),
    "columns of ranks in a plain CSV": ("0F0,\n0F1,1F0\n,1B0\n0B0,1F1\n,1B1\n0B1,\n", "one worker"),
    "a rank is missing": ("Rank 0: 0F0 0B0\nRank 2: 1F0 1B0\n", r"0 to 1, got \[0, 2\]"),
    "ranks from 1": ("Rank 1: 0F0 0B0\nRank 2: 1F0 1B0\n", r"0 to 1, got \[1, 2\]"),
    "a row over two lines": ("Rank 0: 0F0 0F1\n 0B0 0B1\n", "numbered 0 to 1"),
    "cells left out": ("0F0 0F1 ... 0B1\n", "'...' is not an op.*rows are read as CSV, as lists"),
    "a remark": ("Rank 0: 0F0 0B0\nthe end\n", "'the end' holds no op"),
    "a cell outside the lists": ("0F0 [0B0]\n", "'0F0 ' is in no list|'0F0' is in no list"),
    "lists of numbers": ("model 8B [1, 2]\n", "is in no list|is not an op"),
    "small letters": ("0f0,0B0\n", "'0f0' is not an op"),
    "B with and without W": (
        "0F0,0F1,0B0,0W0,0B1\n",
        "0B1 has no W, other B have .*write 0B1 as BW, or B as I",
    ),
    "BW beside I": ("0F0,0F1,0I0,0W0,0BW1\n", "BW and I do not go together .*write I, W and B"),
    "B beside I": ("0F0,0B0,0I0,0W0\n", "twice"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_forms_that_are_refused(form, tmp_path):
    text, message = REFUSED[form]
    with pytest.raises(pj.ScheduleError, match=message):
        read(text, tmp_path / "rows.csv")


OLDER = "its letters are PyTorch's of 2024: B is read as I, BW as B"
TABLES_OF_2024 = {  # text and makespan with F = I = W = 1, B = 2
    # 0F0 0-1, 1F0 1-2, 1BW0 2-4, 0BW0 4-6
    "BW alone": ("0F0,0BW0\n1F0,1BW0\n", 6),
    # 0F0 0-1, 1F0 1-2, 1B0 2-3, 1W0 3-4, 0B0 3-4, 0W0 4-5
    "B and W without BW": ("0F0,0B0,0W0\n1F0,1B0,1W0\n", 5),
    # 0F0 0-1, 1F0 1-2, 1B0 2-3, 0BW0 3-5; SEND_B keeps its B
    "messages": ("0F0,0SEND_F0,0RECV_B0,0BW0\n1RECV_F0,1F0,1B0,1SEND_B0,1W0\n", 5),
    # 0F0 0-1, then a pair of 0F1 and 0B0 1-3, 0W0 3-4, 0BW1 4-6
    "a pair": ("0F0,(0F1;0B0)OVERLAP_F_B,0W0,0BW1\n", 6),
    "lists": ("[0F0, 0BW0]\n[1F0, 1BW0]\n", 6),
    # two stages of 4 microbatches, where half of the backwards are split; by an event loop
    "mixed": (
        "0F0,0F1,0F2,0B0,0W0,0F3,0BW1,0B2,0W2,0BW3\n1F0,1BW0,1F1,1B1,1W1,1F2,1BW2,1F3,1B3,1W3\n",
        14,
    ),
}


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


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0B0\n1F0,1B0\n,\n2F0,2B0",
        "Rank 0: 0F0 0B0\nRank 1: 1F0 1B0\nRank 2: . .",
        "step rank0 rank1 rank2\n0 0F0 . .\n1 . 1F0 .\n2 . 1B0 .\n3 0B0 . .",
    ],
)
@pytest.mark.filterwarnings("ignore::pipejax.schedules.table.table_files.ReadingNotice")
def test_a_worker_without_ops_is_not_dropped(text, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(pj.ScheduleError, match="worker 2 has no op"):
        pj.read_table(path)


@pytest.mark.parametrize(("rows", "count"), [(",", 1), (",,,\n,,,\n", 2), (" , \n,\n,\n\n", 3)])
def test_empty_rows_at_the_end_are_said_to_be_no_workers(rows, count, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"0F0,0B0\n1F0,1B0\n{rows}")
    with pytest.warns(match=rf"empty rows at its end count as no workers \({count}\)"):
        assert pj.read_table(path).num_workers == 2
