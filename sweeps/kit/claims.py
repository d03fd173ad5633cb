"""Claims of papers and their verdicts: what is published, what comes out, and why not.

A claim is reproduced if what it states holds within the tolerance written beside its check. Where
it does not, the reason is part of the answer: a table that lacks one is printed and kept, and ends
in an error.
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
OPEN, EXCLUSIVE = "open", "exclusive"
PUBLISHED = {True: "reproduced", False: "differs", None: OPEN}
OWN = {True: "holds", False: "fails", None: OPEN}  # statements that no paper makes
HOLDS = PUBLISHED[True], OWN[True]
COLOUR = dict.fromkeys(HOLDS, "green") | dict.fromkeys((OPEN, EXCLUSIVE), "cyan")


class Verdict(NamedTuple):
    """What came out.

    Attributes:
      ours: our figure, in words.
      holds: whether the claim holds within its tolerance; None if the data does not decide.
      reason: why not, or what to know about it.
    """

    ours: str
    holds: bool | None
    reason: str = ""


class Claim(NamedTuple):
    """A claim of the paper, or a statement of our own beside it.

    Attributes:
      number: as listed in the paper's summary, with a letter for its parts.
      text: what is claimed.
      published: the published figure; empty for a statement of our own.
      figure: file that shows it; empty if none does.
      check: reads the verdict off the data.
      excludes: number of a claim that holds in no setting in which this one does: neither counts.
    """

    number: str
    text: str
    published: str
    figure: str
    check: Callable[[Any], Verdict]
    excludes: str = ""


def judge(claims: Sequence[Claim], data: Any) -> list[Row]:
    """Check every claim.

    Args:
      claims: what is checked.
      data: what their checks read.

    Returns:
      One row per claim: number, claim, published, ours, verdict, reason, figure.

    Raises:
      ValueError: if a claim excludes one that is not there.
    """
    numbers = {claim.number for claim in claims}
    excluded = {claim.excludes for claim in claims} - {""}
    if unknown := excluded - numbers:
        raise ValueError(f"excluded claims that are not listed: {', '.join(sorted(unknown))}")
    rows = []
    for claim in claims:
        verdict = claim.check(data)
        word = (PUBLISHED if claim.published else OWN)[verdict.holds]
        if claim.excludes or claim.number in excluded:
            word = EXCLUSIVE
        rows.append(
            {
                "number": claim.number,
                "claim": claim.text,
                "published": claim.published,
                "ours": verdict.ours,
                "verdict": word,
                "reason": verdict.reason,
                "figure": claim.figure,
            }
        )
    return rows


def counted(rows: Sequence[Row]) -> str:
    """Count the verdicts in words; statements of our own are counted apart.

    Args:
      rows: as from `judge`.

    Returns:
      As "14 of 18 published claims reproduced, 2 differ, 2 exclude each other; 3 of 3 own hold".
    """
    published = [row["verdict"] for row in rows if row["published"]]
    own = [row["verdict"] for row in rows if not row["published"]]
    words = {"differs": "differ", OPEN: "open", EXCLUSIVE: "exclude each other"}
    parts = [f"{published.count('reproduced')} of {len(published)} published claims reproduced"]
    parts += [f"{published.count(v)} {text}" for v, text in words.items() if v in published]
    if own:
        parts[-1] += f"; {own.count('holds')} of {len(own)} statements of our own hold"
    return ", ".join(parts)


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
        colour = COLOUR.get(row["verdict"], "yellow")
        grid.add_row(
            row["number"],
            row["claim"],
            row["published"] or "(own)",
            row["ours"],
            f"[{colour}]{row['verdict']}[/]",
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
