"""The page of accuracy: what was predicted, how far off it is, and what is allowed."""

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from sweeps.published.accuracy import Accuracy

ABOUT = """\
# Accuracy

This page compares predicted step times and memory with published measurements. `make fidelity`
writes the page and its figure. The tables of measured runs have their sources and assumptions in
[`pipejax/costs/data/measured`](../pipejax/costs/data/measured/README.md). An error is predicted /
measured - 1. *Bias* is the mean error; all other columns are of absolute errors.
"""
EXPECTED = """\
## What to expect of other runs

The sources that were left out say best how far off new runs will be: we knew all other tables when
we chose the terms of the cost model. For new runs, we expect these mean absolute errors, without
any fit and after a fit to five rows of the same stack:

| runs | without a fit | five rows |
| --- | ---: | ---: |
| dense pipelines on H100, H200; on A100 with a shipped stack | 6 % | 4 % |
| dense pipelines on A100 clusters whose links and stack are described | 13 % | 7 % |
| the same, links or framework not described (too fast) | 25 % | not measured |
| FSDP on A100, H100, its stack named | 8 % | 5 % |
| dense models on B200, B300, GB200, GB300; in NVFP4 with its stack | 8 % | 6 % |
| models with experts (releases of one layout do not agree) | 20 % | 18 % |
| gpt-oss (too fast) | 40 % | 20 % |
| MI300X, MI355X (no run was seen) | 30 % | 10 % |
| small layers bound by their host, networks below 10 GB/s per accelerator | 65 % | 40 % |
"""
BENCHMARK = """\
## A benchmark of simulators

The tables of measured runs can serve to judge any simulator. Predict the rows of a table, and write
a CSV file with the columns `row` (number in the table, from 1), `seconds` and, if you have it,
`memory_bytes`. Rows may be missing.

    pipejax validate pipejax/costs/data/measured/mlperf_h100.csv --predictions THEIRS.csv

This prints the simulator's errors by group, the worst rows, and pipejax's errors on the same rows.
The exit code is 0 if the mean error is within `--tolerance PERCENT`, else 1.
"""
HEAD = ("", "runs", "rows", "mean", "median", "90 % within", "largest", "bias", "allowed", "")


class Section(NamedTuple):
    """One table of the page.

    Attributes:
      title: of the section.
      text: what was predicted, and from what.
      accuracies: rows of the table.
      reasons: why errors are as large as they are.
    """

    title: str
    text: str
    accuracies: tuple[Accuracy, ...]
    reasons: tuple[str, ...] = ()


def page(sections: Sequence[Section], figure: str) -> str:
    """Write the page in Markdown."""
    judged = [row for section in sections for row in section.accuracies if row.allowed]
    within = sum(row.holds for row in judged)
    count = f"{within} of {len(judged)} errors that have a limit are within this limit.\n"
    parts = [ABOUT, count, f"![Predicted against measured step times]({figure})\n"]
    for section in sections:
        parts += [f"## {section.title}\n", wrap(section.text), table(section.accuracies)]
        parts += ["".join(map(wrap, section.reasons))] if section.reasons else []
    return "\n".join([*parts, EXPECTED, BENCHMARK])


def wrap(text: str) -> str:
    """Break a paragraph into lines of the width of all pages."""
    return fill(text, 128, break_long_words=False, break_on_hyphens=False) + "\n"


def table(accuracies: Sequence[Accuracy]) -> str:
    """Write a table in Markdown."""
    lines = [HEAD, ("---", "---", *("---:" for _ in HEAD[2:-1]), "---")]
    lines += [cells(row) for row in accuracies]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


BEGIN, END = "<!-- unseen runs -->\n", "<!-- end of unseen runs -->"


def with_summary(text: str, section: Section) -> str:
    """Return a page with a section's mean errors between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no {BEGIN.strip()} and {END} in the page")
    lines = ["| unseen runs | configurations | mean error |", "| --- | ---: | ---: |"]
    for row in section.accuracies:
        e = row.errors
        lines.append(f"| {row.group} | {e.rows} | {e.mape:.1f} % |")
    return "".join([before, BEGIN, *(f"{line}\n" for line in lines), END, after])


def cells(row: Accuracy) -> tuple[str, ...]:
    """Return what a row says, as text."""
    e = row.errors
    figures = [f"{value:.2f} %" for value in (e.mape, e.median, e.p90, e.largest)]
    verdict = "" if not row.allowed else "within" if row.holds else "**beyond**"
    return (row.group, row.runs, str(e.rows), *figures, f"{e.bias:+.2f} %", row.allowed, verdict)
