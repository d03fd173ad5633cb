"""Tables that commands print: at 80 columns, piped, and in the formats of papers and spreadsheets."""

import csv
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from daily import read_cases, with_cases

from pipejax.base.data_files import time_unit
from pipejax.cli.options.line import command_line, config_text, written, written_but
from pipejax.cli.options.option import parse_share
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.report import printing
from pipejax.cli.output.runs import ends_of_path
from pipejax.cli.output.tables import Column, format_table, grid, rows_table

ONE = ["-s", "1f1b", "-P", "4", "-M", "8"]
TIMES = ["-T", "F=1,B=2"]
WIDE = [*["compare", "-S", "gpipe,1f1b,chimera", "-P", "4", "-M", "4,8", "--comm", "0.1"], *TIMES]
REPORTS = read_cases("REPORTS of test_printed_tables")


def letters(text):
    return Counter(re.sub(r"[^\w%.,:()+-]", "", text))


@pytest.mark.parametrize("name", REPORTS)
def test_tables_fit_80_columns_and_nothing_is_cut(call, monkeypatch, name):
    texts = []
    for width in ("80", "1000"):
        monkeypatch.setenv("COLUMNS", width)
        code, out, err = call(*REPORTS[name], "--details")
        assert (code, err) == (0, "")
        texts.append([line for line in out.splitlines() if re.match("[┏┃┡│└]", line)])
    narrow, wide = texts
    assert narrow
    assert max(map(len, narrow)) <= 80
    assert "…" not in "".join(narrow)
    assert not letters("".join(wide)) - letters("".join(narrow))
    body = [line for line in wide if line.startswith("│")]
    short = {cell.strip() for line in body for cell in line.split("│") if len(cell.strip()) < 12}
    assert [cell for cell in short if cell not in "\n".join(narrow)] == []  # broken in no place


def test_a_table_too_wide_continues_below_with_its_first_column(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = call(*WIDE, "--details")
    heads = [line for line in out.splitlines() if "schedule" in line and "┃" in line]
    assert len(heads) == 2
    assert sum("chimera" in line for line in out.splitlines() if "│" in line) == 4  # in two parts


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("format", ["markdown", "latex", "csv"])
def test_every_table_is_printed_in_every_format(call, name, format):
    code, out, err = call(*REPORTS[name], "-f", format)
    assert (code, err) == (0, "")
    blocks = [block.splitlines() for block in out.strip().split("\n\n")]
    tables = [block for block in blocks if format != "markdown" or block[0].startswith("| ")]
    assert tables
    if format == "markdown":
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
            assert re.fullmatch(r"\|( -{3}:? \|)+", table[1])
    elif format == "csv":
        for table in tables:
            assert len({len(row) for row in csv.reader(table)}) == 1
            headers = next(csv.reader(table))
            assert "" not in headers
            assert len({*headers}) == len(headers)
    else:
        assert out.count("\\begin{tabular}") == out.count("\\end{tabular}") > 0
        message = [line for line in out.splitlines() if not line.startswith(("%", "\\"))]
        assert all(line == "" or line.endswith(r"\\") for line in message)
        words = re.sub(r"(?<!\\)\$[^$]+\$", "", " ".join(message))  # without mathematics
        assert not re.search(r"(?<!\\)[%_#$]", words)


def test_a_csv_keeps_what_lines_say_elsewhere(call):
    _, out, _ = call("compare", "-S", "gpipe,chimera", "-P", "4", "-M", "3", *TIMES, "-f", "csv")
    gpipe, chimera = csv.DictReader(out.strip().splitlines())
    assert (gpipe["bubble: schedule"], chimera["bubble: schedule"]) == ("50 %", "-")
    assert chimera["reason"].startswith("not evaluated: ")
    assert "even" in chimera["reason"]


def test_tables_of_several_sizes_go_on_below_with_their_names(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "64")
    (tmp_path / "mine").mkdir()
    for workers, count, name in (("4", "8", "four"), ("2", "6", "two")):
        path = f"mine/{name}.csv"
        built = ["export", "-s", "1f1b", "-P", workers, "-M", count, "--format", "torch-csv"]
        assert call(*built, "--out", path)[0] == 0
    _, out, _ = call("compare", "--tables", "mine", *TIMES, "--details")
    heads = [line for line in out.splitlines() if line.startswith("┃") and " P " in line]
    assert len(heads) > 1
    assert all(" M " in head and "schedule" in head for head in heads)


def test_cells_are_written_as_each_format_has_it():
    table = grid([("a|b", ["1 | 2", "x"]), ("c_%", ["50 %", "[bold]7[/]"])], title="t & u")
    assert format_table(table, "markdown").splitlines()[2:] == [
        "| a\\|b | c_% |",
        "| --- | ---: |",
        "| 1 \\| 2 | 50 % |",
        "| x | 7 |",
        "",
    ]
    assert "a|b & c\\_\\% \\\\\n" in format_table(table, "latex")
    assert format_table(table, "csv") == "a|b,c_%\n1 | 2,50 %\nx,7\n\n"


def test_latex_has_the_rules_of_booktabs_and_units_in_the_head():
    times = [("a", ["61.5 s", "970 ms", "-"]), ("b", ["+3.1 %", "0 %", "-"])]
    times += [("c", ["1 GB", "x"] * 2)]
    table = grid([(name, cells[:3]) for name, cells in times])
    assert format_table(table, "latex").splitlines() == [
        "\\begin{tabular}{rrl}",
        "\\toprule",
        "a [s] & b [\\%] & c \\\\",
        "\\midrule",
        "61.5 & +3.1 & 1 GB \\\\",
        "0.97 & 0 & x \\\\",
        "- & - & 1 GB \\\\",
        "\\bottomrule",
        "\\end{tabular}",
        "",
    ]


def test_slack_that_is_rounding_is_printed_as_none(call, monkeypatch):
    """Sums of measured times leave 1e-16 s; it was printed as -2.2204e-07 ns."""
    root = Path(__file__).parents[1] / "examples"
    files = ["--table", root / "schedule.csv", "--costs", root / "measured.json"]
    code, out, _ = call("evaluate", *files, "--slack")
    assert code == 0
    assert out.count(" 0 s ") == 8  # F and B of four workers
    assert "-" not in "".join(line for line in out.splitlines() if " 0 s " in line)


def test_a_row_without_a_value_has_a_dash():
    columns = Column("schedule", "name"), Column("times", "count", "{:+d}".format)
    rows = [{"name": "a", "count": 1}, {"name": "b", "count": None}, {"name": "c"}]
    assert format_table(rows_table(rows, columns), "csv") == "schedule,times\na,+1\nb,-\nc,-\n\n"


@with_cases(
    "write values texts",
    (seconds, (0.0616, 33.0, 0.0, 0.000999999999), ("61.6 ms", "33 s", "0 s", "1 ms")),
    (percent, (0.2727, None), ("27.3 %", "-")),
    (gigabytes, (2.5e9,), ("2.5 GB",)),
    (time_unit, (0.06, 0.0), ((0.001, "ms"), (1.0, "s"))),
    (
        ends_of_path,
        ([f"0F{k}" for k in range(9)], [f"0F{k}" for k in range(10)]),
        ("0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0F8", "0F0 0F1 0F2 0F3 .. 0F6 0F7 0F8 0F9"),
    ),
)
def test_numbers_and_paths_are_printed_shortly(write, values, texts):
    assert tuple(map(write, values)) == texts


# Command lines and files of options that commands end in

MODEL = ("-m", "gpt-22b", "-y", "h100", "--minibatch", 8, "--tensor-parallel", 8)


def test_what_was_written_is_written_again():
    with printing(None, options={"workers": 4, "link": "queued", "json": True}):
        with printing(None, options={"table": "a b.csv", "no_store": True}):
            assert written_but() == {"table": "a b.csv", "no_store": True}
        assert written_but() == {"workers": 4, "link": "queued"}
        assert written("link", "queues") == {"link": "queued"}
        line = command_line("tune messages", written_but() | {"no_store": True, "out": "a b.csv"})
    assert line == "pipejax tune messages --workers 4 --link queued --no-store --out 'a b.csv'"
    assert written_but() == {}
    assert command_line("trace", {"files": ["a b", "c"], "against": ["d", "e"]}) == (
        "pipejax trace 'a b' c --against d --against e"
    )


def test_a_file_of_options_is_one_of_config():
    text = config_text({"stages_per_worker": 2, "model": 'a"b.json', "sequence_parallel": True})
    read = {"stages-per-worker": 2, "model": 'a"b.json', "sequence-parallel": True}
    assert tomllib.loads(text) == read


@with_cases("text share", ("0.1", 0.1), ("10%", 0.1), ("2.5 %", 0.025), ("1", 1))
def test_shares(text, share):
    assert parse_share(text, "--gap") == pytest.approx(share, rel=1e-15)


def test_tuned_sizes_end_in_what_launchers_are_told_and_a_page(answer, call, tmp_path):
    line = ("tune", "size", "-s", "interleaved-1f1b", "-P", 2, "-V", 2, *MODEL)
    result = answer(*line, "--method", "exhaustive")
    best, message = result["best"], result["launch"]["Megatron-LM"]["options"]
    assert message["micro-batch-size"] == best["microbatch_size"]
    assert message["num-virtual-stages-per-pipeline-rank"] == 2
    (page,) = result["next"]
    out = tmp_path / "size.html"
    assert call(*shlex.split(page)[1:-1], out)[0] == 0
    assert "<canvas" in out.read_text()


def test_sequences_of_another_length(answer):
    sizes = ("evaluate", "-s", "1f1b", "-P", 4, "-M", 8)
    short, long = (answer(*sizes, *MODEL, *more) for more in ((), ("--sequence", 4096)))
    assert long["step_time"] > short["step_time"]
