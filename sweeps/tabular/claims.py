"""The claims of the tabular-schedule paper, one verdict each, all read at one point of the dataset.

Claims and figures are as reported in secondary sources: the paper itself was not at hand.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xarray as xr
from rich.console import Console
from rich.table import Table

from sweeps.kit.claims import HOLDS, OURS, PUBLISHED, Claim, Verdict, judge, show
from sweeps.tabular.checks import (
    asymmetric_balance,
    asymmetric_deep,
    asymmetric_peak,
    asymmetric_shallow,
    below_in_formula,
    below_in_table,
    chimera_gain,
    chimera_idle,
    chimera_memory,
    chimera_wins,
    converge,
    formula_and_table,
    formula_below_table,
    grows_with_count,
    hanayo_fast,
    hanayo_fitted,
    hanayo_idle,
    hanayo_outlier,
    lead_gone,
    lower_peak,
    memory_limit,
    ranking,
    same_run_time,
    slower_on_slow,
)
from sweeps.tabular.settings import MAIN, main_setting


class Evidence(NamedTuple):
    """What verdicts are read off.

    Attributes:
      runs: the dataset of `tabular_schedules` in one setting, under one link model, in one order.
      search: that of `tabular_search`.
    """

    runs: xr.Dataset
    search: xr.Dataset


def on_runs(check: Callable[[xr.Dataset], Verdict]) -> Callable[[Evidence], Verdict]:
    """Let a check read the runs alone."""
    return lambda data: check(data.runs)


def with_search(
    check: Callable[[xr.Dataset, xr.Dataset], Verdict],
) -> Callable[[Evidence], Verdict]:
    """Let a check read the search too."""
    return lambda data: check(data.runs, data.search)


CLAIMS = (
    Claim(
        "1a",
        "GPipe and 1F1B have the same run time on all systems",
        "equal",
        "run_time_s8.pdf",
        with_search(same_run_time),
    ),
    Claim(
        "1b",
        "1F1B has the lower activation peak",
        "min(S-i, B) against B",
        "memory.pdf",
        on_runs(lower_peak),
    ),
    Claim(
        "2a",
        "Chimera's formula gives a lower bubble ratio than its table",
        "lower",
        "bubble_ratio.pdf",
        on_runs(formula_below_table),
    ),
    Claim(
        "2b",
        "at (8, 16) Chimera's formula and table disagree",
        "16 % and 26 %",
        "bubble_ratio.pdf",
        on_runs(formula_and_table),
    ),
    Claim(
        "2c",
        "by formula Chimera lies below GPipe and 1F1B",
        "below",
        "bubble_ratio.pdf",
        on_runs(below_in_formula),
    ),
    Claim(
        "2d",
        "in the table Chimera lies below GPipe and 1F1B",
        "below",
        "bubble_ratio.pdf",
        on_runs(below_in_table),
    ),
    Claim(
        "3a",
        "Chimera is best of these three at B <= 16 with a fast network",
        "best",
        "run_time_s8.pdf",
        on_runs(chimera_wins),
    ),
    Claim(
        "3b",
        "its gain over GPipe there",
        "up to about 15 %",
        "run_time_s8.pdf",
        on_runs(chimera_gain),
    ),
    Claim(
        "3c",
        "its idle share there",
        "clearly lower",
        "idle_share_s8.pdf",
        on_runs(chimera_idle),
    ),
    Claim(
        "3d",
        "on a fast network its lead is gone at B of 32 to 64",
        "gone",
        "run_time_s8.pdf",
        on_runs(lead_gone),
    ),
    Claim(
        "3e",
        "Chimera is slower on slow networks",
        "slower",
        "run_time_s8.pdf",
        with_search(slower_on_slow),
    ),
    Claim(
        "3f",
        "there its run time grows with B, relative to GPipe; GPipe and 1F1B stay stable",
        "grows",
        "run_time_s8.pdf",
        on_runs(grows_with_count),
    ),
    Claim(
        "3g",
        "on fast networks the schedules converge for B > 64",
        "converge",
        "run_time_s8.pdf",
        on_runs(converge),
    ),
    Claim(
        "4",
        "Chimera needs two copies of the weights and a gradient exchange",
        "two copies",
        "memory.pdf",
        on_runs(chimera_memory),
    ),
    Claim(
        "5a",
        "Hanayo at S = B = 8 against Chimera, mean of fast and mid networks",
        "12 to 14 % faster",
        "hanayo.pdf",
        on_runs(hanayo_fast),
    ),
    Claim(
        "5b",
        "its idle share there",
        "from about 35 % to about 25 %",
        "idle_share_s8.pdf",
        on_runs(hanayo_idle),
    ),
    Claim(
        "5c",
        "at slow_nw_fast_cp Hanayo is slower and idles more",
        "-12.32 %",
        "hanayo.pdf",
        on_runs(hanayo_outlier),
    ),
    Claim(
        "5d",
        "at slow_nw_mid_cp Hanayo is 2.33 % faster: what e_c is fitted to",
        "",
        "hanayo.pdf",
        on_runs(hanayo_fitted),
        kind=OURS,
    ),
    Claim(
        "6a",
        "asymmetric Chimera has no lower global memory peak",
        "not lower",
        "asymmetric.pdf",
        on_runs(asymmetric_peak),
    ),
    Claim(
        "6b",
        "its memory is distributed more evenly over workers",
        "more balanced",
        "memory.pdf",
        on_runs(asymmetric_balance),
    ),
    Claim(
        "6c",
        "it is faster at S = 4 with a fast network",
        "about 5 %",
        "asymmetric.pdf",
        on_runs(asymmetric_shallow),
    ),
    Claim(
        "6d",
        "it is slower at S = 8 with small microbatches",
        "slower",
        "asymmetric.pdf",
        on_runs(asymmetric_deep),
    ),
    Claim(
        "7",
        "rankings are not invariant between the three levels",
        "not invariant",
        "ranking.pdf",
        on_runs(ranking),
    ),
    Claim(
        "8",
        "no point of the grid fits the 80 GB of one H100",
        "",
        "memory.pdf",
        on_runs(memory_limit),
        kind=OURS,
    ),
)


def elsewhere(runs: xr.Dataset, search: xr.Dataset) -> list[tuple[str, ...]]:
    """Judge the claims at every setting, link model and order: what they are, and the count."""
    points = itertools.product(*(runs[name].values for name in MAIN))
    found = []
    for point in points:
        here = dict(zip(MAIN, map(str, point), strict=True))
        rows = judge(CLAIMS, Evidence(runs.sel(here), search))
        published = [row for row in rows if row["kind"] == PUBLISHED]
        differ = [row["number"] for row in published if row["verdict"] not in HOLDS]
        count = f"{len(published) - len(differ)} of {len(published)}"
        found.append((*here.values(), count, " ".join(differ)))
    return found


def main() -> None:
    """Print the table of claims and keep it beside the dataset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of Zarr stores to read")
    folder: Path = parser.parse_args().data
    stores = []
    for name in ("tabular_schedules", "tabular_search"):
        with xr.open_zarr(folder / f"{name}.zarr") as opened:
            stores.append(opened.load())
    runs, search = stores
    grid = Table(*MAIN, "reproduced", "not", title="The same claims in other settings")
    for row in elsewhere(runs, search):
        grid.add_row(*row, style="bold" if row[: len(MAIN)] == tuple(MAIN.values()) else "")
    Console(width=None if Console().is_terminal else 120).print(grid)
    show(judge(CLAIMS, Evidence(main_setting(runs), search)), folder / "tabular_claims.json")


if __name__ == "__main__":
    main()
