"""Claims of papers and their verdicts: what is published, what comes out, and why not.

A claim is reproduced if what it states holds within the tolerance written beside its check. Where
it does not, the reason is part of the answer.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr
from rich.console import Console
from rich.table import Table

from pipejax.base.files import write_file


class Verdict(NamedTuple):
    """What came out.

    Attributes:
      ours: our figure, in words.
      holds: whether the claim holds within its tolerance.
      reason: why not, or what to know about it.
    """

    ours: str
    holds: bool
    reason: str = ""


class Claim(NamedTuple):
    """A claim of the paper.

    Attributes:
      number: as listed in the paper's summary, with a letter for its parts.
      text: what is claimed.
      published: the published figure.
      figure: file that shows it.
      check: reads the verdict off the data.
    """

    number: str
    text: str
    published: str
    figure: str
    check: Callable[[Any], Verdict]


def judge(claims: Sequence[Claim], data: Any) -> list[dict[str, str]]:
    """Check every claim.

    Args:
      claims: what is checked.
      data: what their checks read.

    Returns:
      One row per claim: number, claim, published, ours, verdict, reason, figure.
    """
    rows = []
    for claim in claims:
        verdict = claim.check(data)
        rows.append(
            {
                "number": claim.number,
                "claim": claim.text,
                "published": claim.published,
                "ours": verdict.ours,
                "verdict": "reproduced" if verdict.holds else "differs",
                "reason": verdict.reason,
                "figure": claim.figure,
            }
        )
    return rows


def show(rows: Sequence[dict[str, str]], out: Path) -> None:
    """Print the table of claims and keep it as JSON.

    Args:
      rows: as from `judge`.
      out: file to write.
    """
    write_file(out, json.dumps(rows, indent=1) + "\n")
    grid = Table("", "claim", "published", "ours", "verdict", "reason", "figure", show_lines=True)
    for row in rows:
        colour = "green" if row["verdict"] == "reproduced" else "yellow"
        grid.add_row(
            row["number"],
            row["claim"],
            row["published"],
            row["ours"],
            f"[{colour}]{row['verdict']}[/]",
            row["reason"],
            row["figure"],
        )
    console = Console(width=None if Console().is_terminal else 160)
    console.print(grid)
    reproduced = sum(row["verdict"] == "reproduced" for row in rows)
    console.print(
        f"{reproduced} of {len(rows)} claims reproduced, "
        f"{len(rows) - reproduced} differ; kept in {out}"
    )


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
