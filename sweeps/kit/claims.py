"""Claims of papers and their verdicts: what is published, what comes out, and why not.

Only a claim that some result could contradict is counted, and only where no number of it chose our
settings. What follows by construction, what was fitted, another reading of a claim, and figures
that nothing is published about stand in the table with their own words, and are not counted. Where
a claim does not hold, the reason is part of the answer: a table that lacks one is printed and kept,
and ends in an error.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr
from rich.console import Console
from rich.table import Table

from pipejax.files import write_file

Row = dict[str, str]
PUBLISHED, OURS = (
    "published",
    "own",
)  # statements of a paper, and ours beside them: both are counted
BY_CONSTRUCTION, FITTED, READING, SHOWN = "by construction", "fitted", "reading", "shown"
OPEN = "open"
# what the verdict is called, by kind of claim and by whether it holds; what a kind lacks is no
# verdict but an error: a theorem that fails, a fit that does not meet its number
WORDS: Mapping[str, Mapping[bool | None, str]] = {
    PUBLISHED: {True: "reproduced", False: "differs", None: OPEN},
    OURS: {True: "holds", False: "fails", None: OPEN},
    READING: {True: "holds so read", False: "fails so read", None: OPEN},
    BY_CONSTRUCTION: {True: "follows by construction"},
    FITTED: {True: "fitted"},
    SHOWN: {None: "shown"},
}
COUNTED = PUBLISHED, OURS
HOLDS = tuple(words[True] for words in WORDS.values() if True in words)
COLOUR = dict.fromkeys(HOLDS, "green") | dict.fromkeys(("differs", "fails"), "yellow")


class Threshold(NamedTuple):
    """Number that a verdict is judged by.

    Attributes:
      value: the number.
      words: what it says, as "within a factor of 2".
      source: who says so: a citation, or "ours" with the reason that was there before the result.
    """

    value: float
    words: str
    source: str


class Verdict(NamedTuple):
    """Result of a check.

    Attributes:
      ours: our figure, in words.
      holds: whether the claim holds within its tolerance; None if the data does not decide.
      reason: why not, or what to know about it.
      depends: what decides where both come out, as "the opponent"; then `holds` is None.
    """

    ours: str
    holds: bool | None
    reason: str = ""
    depends: str = ""


class Claim(NamedTuple):
    """A claim of a paper, or a statement of our own beside it.

    Attributes:
      number: as listed in the paper's summary, with a letter for its parts.
      text: what is claimed.
      published: the published figure; empty for a statement of our own.
      figure: file that shows it; empty if none does.
      check: reads the verdict off the data.
      kind: one of `WORDS`.
      why: why it is not counted: what it follows from, which number was fitted, what else is read.
      paper: whose claim it is, where a table holds those of several.
      thresholds: what it is judged by.
    """

    number: str
    text: str
    published: str
    figure: str
    check: Callable[[Any], Verdict]
    kind: str = PUBLISHED
    why: str = ""
    paper: str = ""
    thresholds: tuple[Threshold, ...] = ()


def judge(claims: Sequence[Claim], data: Any) -> list[Row]:
    """Check every claim.

    Args:
      claims: what is checked.
      data: what their checks read.

    Returns:
      One row per claim: number, claim, published, ours, verdict, reason, figure, kind, paper,
      thresholds.

    Raises:
      ValueError: if a claim is of a kind that its verdict cannot have, as a theorem that fails, or
        is not counted without saying why.
    """
    return [_row(claim, claim.check(data)) for claim in claims]


def _row(claim: Claim, verdict: Verdict) -> Row:
    """One row of the table, as `judge` returns it."""
    if (claim.kind == PUBLISHED) and not claim.published:
        raise ValueError(
            f"claim {claim.number} has no published figure: it is {OURS!r} or {SHOWN!r}"
        )
    if claim.kind not in COUNTED and not claim.why:
        raise ValueError(f"claim {claim.number} is not counted ({claim.kind}): say why")
    words = WORDS[claim.kind]
    if verdict.holds not in words:
        raise ValueError(
            f"claim {claim.number} is {claim.kind!r}, but what came out is {verdict.holds}: "
            f"{verdict.ours}"
        )
    word = f"depends on {verdict.depends}" if verdict.depends else words[verdict.holds]
    return {
        "number": claim.number,
        "claim": claim.text,
        "published": claim.published,
        "ours": verdict.ours,
        "verdict": word,
        "reason": "; ".join(part for part in (claim.why, verdict.reason) if part),
        "figure": claim.figure,
        "kind": claim.kind,
        "paper": claim.paper,
        "thresholds": "; ".join(
            f"{threshold.words} ({threshold.source})" for threshold in claim.thresholds
        ),
    }


def counted(rows: Sequence[Row]) -> str:
    """Count the verdicts in words: by paper, our own statements apart, then what does not count.

    Args:
      rows: as from `judge`.

    Returns:
      As "reproduced 14, differs 3, of 17 published claims; holds 3, of 3 statements of our own; not
      counted: follows by construction 2, fitted 1".
    """
    parts = []
    published = [row for row in rows if row["kind"] == PUBLISHED]
    for paper in dict.fromkeys(row["paper"] for row in published):
        name = f"{paper}: " if paper else ""
        those = [row["verdict"] for row in published if row["paper"] == paper]
        parts.append(f"{name}{_tally(those, 'reproduced')}, of {len(those)} published claims")
    if statements := [row["verdict"] for row in rows if row["kind"] == OURS]:
        parts.append(f"{_tally(statements, 'holds')}, of {len(statements)} statements of our own")
    if rest := [row["verdict"] for row in rows if row["kind"] not in COUNTED]:
        parts.append(f"not counted: {_tally(rest)}")
    return "; ".join(parts)


def _tally(verdicts: Sequence[str], *first: str) -> str:
    """Count verdicts, as "reproduced 3, open 1"; those of `first` even if there are none."""
    words = dict.fromkeys((*first, *verdicts))
    return ", ".join(f"{word} {verdicts.count(word)}" for word in words)


def show(rows: Sequence[Row], out: Path) -> None:
    """Print the table of claims and keep it as JSON.

    Args:
      rows: as from `judge`.
      out: file to write.

    Raises:
      SystemExit: if a claim that does not hold has no reason; the table is there then.
    """
    write_file(out, json.dumps(rows, indent=1) + "\n")
    grid = Table("", "claim", "published", "ours", "verdict", "reason", "figure", show_lines=True)
    for row in rows:
        colour = COLOUR.get(row["verdict"], "cyan")
        judged_by = f"\n[dim]{row['thresholds']}[/]" if row["thresholds"] else ""
        grid.add_row(
            row["number"],
            row["claim"],
            row["published"] or "(own)",
            row["ours"],
            f"[{colour}]{row['verdict']}[/]{judged_by}",
            row["reason"],
            row["figure"],
        )
    console = Console(width=None if Console().is_terminal else 160)
    console.print(grid)
    console.print(f"{counted(rows)}; kept in {out}")
    bare = [row["number"] for row in rows if row["verdict"] not in HOLDS and not row["reason"]]
    if bare:
        raise SystemExit(f"error: no reason is given why these do not hold: {'; '.join(bare)}")


def command(about: str, claims: Sequence[Claim], stores: Mapping[str, str], out: str) -> None:
    """Print the table of claims on a folder of datasets and keep it beside them.

    Args:
      about: what the command does, in its help.
      claims: what is checked; their checks read datasets by name.
      stores: Zarr store of each dataset, by name.
      out: name of the file with the table.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of Zarr stores to read")
    folder: Path = parser.parse_args().data
    data = {}
    for name, store in stores.items():
        with xr.open_zarr(folder / store) as opened:
            data[name] = opened.load()
    show(judge(claims, data), folder / out)
