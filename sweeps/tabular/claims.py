"""The claims of the tabular-schedule paper, one verdict each, all read at one point of the dataset.

Claims and figures are as reported in secondary sources: the paper itself was not at hand. The point
is the one among all settings at which most of the claims that can fail hold: so it is a fit too.
"""

import argparse
import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xarray as xr
from rich.console import Console
from rich.table import Table

from pipejax.files import write_file
from sweeps.kit.claims import (
    BY_CONSTRUCTION,
    FITTED,
    OURS,
    PUBLISHED,
    READING,
    Claim,
    judge,
    show,
)
from sweeps.tabular import checks
from sweeps.tabular.checks import POINTS, Check, Evidence
from sweeps.tabular.settings import MAIN, SETTINGS, main_setting

CLAIMS = (
    Claim(
        "1a",
        "GPipe and 1F1B have the same run time on all systems",
        "equal",
        "run_time.pdf",
        checks.SAME_RUN_TIME,
        thresholds=(POINTS,),
    ),
    Claim(
        "1b",
        "1F1B has the lower activation peak",
        "min(S-i, B) against B",
        "memory.pdf",
        checks.LOWER_PEAK,
        kind=BY_CONSTRUCTION,
        why="both orders are defined by how many microbatches they admit: the builders are",
    ),
    Claim(
        "2a",
        "Chimera's formula gives a lower bubble ratio than its table",
        "lower",
        "bubble_ratio.pdf",
        checks.FORMULA_BELOW_TABLE,
    ),
    Claim(
        "2b",
        "at (8, 16) Chimera's formula and table disagree",
        "16 % and 26 %",
        "bubble_ratio.pdf",
        checks.FORMULA_AND_TABLE,
        thresholds=(POINTS,),
    ),
    Claim(
        "2c",
        "by formula Chimera lies below GPipe and 1F1B",
        "below",
        "bubble_ratio.pdf",
        checks.BELOW_IN_FORMULA,
        kind=BY_CONSTRUCTION,
        why="algebra: (S-2)/(2B+S-2) is less than (S-1)/(B+S-1) for all S and B",
    ),
    Claim(
        "2d",
        "in the table Chimera lies below GPipe and 1F1B",
        "below",
        "bubble_ratio.pdf",
        checks.BELOW_IN_TABLE,
    ),
    Claim(
        "3a",
        "Chimera is best of these three at B <= 16 with a fast network",
        "best",
        "run_time.pdf",
        checks.CHIMERA_WINS,
    ),
    Claim(
        "3b",
        "its gain over GPipe there",
        "up to about 15 %",
        "run_time.pdf",
        checks.CHIMERA_GAIN,
        thresholds=(POINTS,),
    ),
    Claim(
        "3c",
        "its idle share there",
        "clearly lower",
        "idle_share.pdf",
        checks.CHIMERA_IDLE,
    ),
    Claim(
        "3d",
        "on a fast network its lead is gone at B of 32 to 64",
        "gone",
        "run_time.pdf",
        checks.LEAD_GONE,
        thresholds=(POINTS,),
    ),
    Claim(
        "3e",
        "Chimera is slower on slow networks",
        "slower",
        "run_time.pdf",
        checks.SLOWER_ON_SLOW,
    ),
    Claim(
        "3e, high B",
        "Chimera is slower on slow networks with many microbatches, B >= 64",
        "slower",
        "run_time.pdf",
        checks.SLOWER_AT_HIGH_COUNT,
        kind=READING,
        why="a digest speaks of high B and a slow network together",
    ),
    Claim(
        "3f",
        "there its run time rises with B; GPipe and 1F1B stay stable",
        "rises",
        "run_time.pdf",
        checks.GROWS_WITH_COUNT,
    ),
    Claim(
        "3f, relative",
        "there its run time rises with B relative to GPipe; GPipe and 1F1B stay stable",
        "rises",
        "run_time.pdf",
        checks.GROWS_RELATIVELY,
        kind=READING,
        why="time over GPipe's instead of time",
        thresholds=(POINTS,),
    ),
    Claim(
        "3g",
        "on fast networks the schedules converge for B > 64",
        "converge",
        "run_time.pdf",
        checks.CONVERGE,
        thresholds=(POINTS,),
    ),
    Claim(
        "4",
        "Chimera needs two copies of the weights and a gradient exchange",
        "two copies",
        "memory.pdf",
        checks.CHIMERA_MEMORY,
        kind=BY_CONSTRUCTION,
        why="the builder has two pipes, and every pipe a copy of all stages",
    ),
    Claim(
        "5a",
        "Hanayo at S = B = 8 against Chimera, mean of fast and mid networks",
        "12 to 14 % faster",
        "hanayo.pdf",
        checks.HANAYO_FAST,
        kind=BY_CONSTRUCTION,
        why="with the published order it holds wherever e_c is fitted to another number",
        thresholds=(POINTS,),
    ),
    Claim(
        "5b",
        "its idle share there",
        "from about 35 % to about 25 %",
        "idle_share.pdf",
        checks.HANAYO_IDLE,
        thresholds=(POINTS,),
    ),
    Claim(
        "5c",
        "at slow_nw_fast_cp Hanayo is slower and idles more",
        "-12.32 %",
        "hanayo.pdf",
        checks.HANAYO_OUTLIER,
        why="two numbers, e_c and the memory bandwidth of 3.35 TB/s, were chosen after Table I was "
        "seen",
        thresholds=(POINTS,),
    ),
    Claim(
        "5d",
        "at slow_nw_mid_cp Hanayo is faster",
        "2.33 %",
        "hanayo.pdf",
        checks.HANAYO_FITTED,
        kind=FITTED,
        why="e_c is fitted to this number",
        thresholds=(POINTS,),
    ),
    Claim(
        "6a",
        "asymmetric Chimera has no lower global memory peak",
        "not lower",
        "asymmetric.pdf",
        checks.ASYMMETRIC_PEAK,
    ),
    Claim(
        "6b",
        "its memory is distributed more evenly over workers",
        "more balanced",
        "asymmetric.pdf",
        checks.ASYMMETRIC_BALANCE,
    ),
    Claim(
        "6b, stages",
        "its activations are distributed more evenly over stages",
        "more balanced",
        "asymmetric.pdf",
        checks.STAGE_BALANCE,
        kind=READING,
        why="a digest's motive is to relieve the first stage: per stage instead of per worker",
    ),
    Claim(
        "6c",
        "it is faster at S = 4 with a fast network",
        "about 5 %",
        "asymmetric.pdf",
        checks.ASYMMETRIC_SHALLOW,
        thresholds=(POINTS,),
    ),
    Claim(
        "6d",
        "it is slower at S = 8 with small microbatches",
        "slower",
        "asymmetric.pdf",
        checks.ASYMMETRIC_DEEP,
    ),
    Claim(
        "7",
        "rankings are not invariant between the three levels",
        "not invariant",
        "ranking.pdf",
        checks.RANKING,
        kind=BY_CONSTRUCTION,
        why="one point with another winner would do, of 12 and of 108",
    ),
    Claim(
        "8",
        "no point of the grid fits the 80 GB of one H100",
        "",
        "memory.pdf",
        checks.MEMORY_LIMIT,
        kind=OURS,
    ),
)


def _checks(kind: str) -> dict[str, Check]:
    return {
        claim.number: claim.check
        for claim in CLAIMS
        if claim.kind == kind and isinstance(claim.check, Check)
    }


CAN_FAIL, READINGS = _checks(PUBLISHED), _checks(READING)


def by_setting(whole: xr.Dataset, claims: Mapping[str, Check]) -> xr.DataArray:
    """Judge claims in all settings.

    Args:
      whole: the dataset of `sweeps.tabular.schedules`.
      claims: their checks by number.

    Returns:
      (claim, ...settings) whether it holds; False, all of them, where no e_c could be fitted.
    """
    is_priced = whole.makespan.sel(schedule="gpipe").notnull()
    is_priced = is_priced.any([dim for dim in is_priced.dims if dim not in SETTINGS])
    held = [check.holds(whole) & is_priced for check in claims.values()]
    names = xr.Variable("claim", list(claims))
    return xr.concat(held, names, coords="minimal", compat="override", join="exact")


COLUMNS = (*SETTINGS, "hold", "of", "not", "readings that hold")


def setting_rows(held: xr.DataArray, readings: xr.DataArray) -> list[tuple[str, ...]]:
    """Make a row for every setting, the best first, in order of `COLUMNS`."""
    points = held.stack(point=list(SETTINGS)).transpose("point", "claim")
    also = readings.stack(point=list(SETTINGS)).transpose("point", "claim")
    rows = [
        (
            *map(str, point),
            str(int(row.sum())),
            str(row.size),
            ", ".join(held.claim.values[~row]),
            "; ".join(readings.claim.values[more]),
        )
        for point, row, more in zip(points.point.values, points.values, also.values, strict=True)
    ]
    order = np.lexsort((-also.sum("claim").values, -points.sum("claim").values))
    return [rows[k] for k in order]


def neighbours(held: xr.DataArray, readings: xr.DataArray) -> list[tuple[str, ...]]:
    """Take the rows that show what decides: the main setting, and those with one part changed."""
    points = [MAIN] + [
        {**MAIN, name: value}
        for name in SETTINGS
        for value in held[name].values
        if value != MAIN[name]
    ]
    settings = [{name: [value] for name, value in at.items()} for at in points]
    return [setting_rows(held.sel(at), readings.sel(at))[0] for at in settings]


def show_settings(whole: xr.Dataset, out: Path) -> None:
    """Keep the table of all settings as CSV, and print what decides.

    Args:
      whole: the dataset of `sweeps.tabular.schedules`.
      out: file to write.

    Raises:
      SystemExit: if another setting holds more of the claims than the main one, or as many and more
        of the readings; the table is there then.
    """
    held, readings = (by_setting(whole, claims) for claims in (CAN_FAIL, READINGS))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *setting_rows(held, readings)])
    write_file(out, text.getvalue())
    title = "The claims that can fail in other settings: one part changed at a time"
    grid = Table(*COLUMNS, title=title)
    main, *others = neighbours(held, readings)
    grid.add_row(*main, style="bold")
    for row in others:
        grid.add_row(*row)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(grid)
    console.print(f"{choice(held, readings)} All settings are kept in {out}")
    better = (held.sum("claim") * (1 + len(READINGS)) + readings.sum("claim")).transpose(*SETTINGS)
    if float(better.max()) > float(better.sel(MAIN)):
        raise SystemExit("error: the main setting is not among the best")


def choice(held: xr.DataArray, readings: xr.DataArray) -> str:
    """Say how the main setting was chosen, and how many hold at most with each value of a part."""
    count = held.sum("claim")
    largest = int(count.max())
    best = count == largest
    more = readings.sum("claim").where(best)
    equal = int((more == more.max()).sum())
    listed = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{value} {int(count.sel({name: value}).max())}" for value in count[name].values
        )
        for name in SETTINGS
    )
    return (
        f"Of {count.size} settings none holds more than {largest} of {held.sizes['claim']} claims, "
        f"{int(best.sum())} hold as many, {equal} of these the most readings too. The main setting "
        f"is one of them: it was chosen by this table, which is a fit of settings. The most by "
        f"part: {listed}."
    )


def main() -> None:
    """Print the table of settings and the table of claims and keep both beside the dataset."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of Zarr stores to read")
    folder: Path = parser.parse_args().data
    with xr.open_zarr(folder / "tabular_schedules.zarr") as opened:
        whole = opened.load()
    show(judge(CLAIMS, Evidence(main_setting(whole), whole)), folder / "tabular_claims.json")
    show_settings(whole, folder / "tabular_settings.csv")


if __name__ == "__main__":
    main()
