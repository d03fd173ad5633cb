"""Table I of the tabular-schedule paper: Hanayo against Chimera at S = B = 8 on all systems.

Printed, and written beside the dataset. Published values stand beside ours as far as they are
reported in secondary sources; the one that e_c is fitted to is marked.
"""

import argparse
import csv
import io
from pathlib import Path

import xarray as xr
from rich.console import Console
from rich.table import Table

from pipejax.files import write_file
from sweeps.tabular.fit import CHIMERA, FITTED_TO, HANAYO, MICROBATCHES, OUTLIERS, WORKERS
from sweeps.tabular.settings import SYSTEMS, main_setting

COLUMNS = (
    "system",
    "Chimera [s]",
    "Hanayo [s]",
    "saved [%]",
    "published [%]",
    "Chimera idle [%]",
    "Hanayo idle [%]",
    "published idle [%]",
)


def rows(data: xr.Dataset) -> list[tuple[str, ...]]:
    """Make the rows of the table, the mean of mid and fast networks last, in order of `COLUMNS`."""
    at = main_setting(data).sel(workers=WORKERS, microbatches=MICROBATCHES)
    time, idle = (
        values.sel(schedule=[CHIMERA, HANAYO]) for values in (at.makespan, at.bubble_ratio)
    )
    saved = 1 - time.sel(schedule=HANAYO) / time.sel(schedule=CHIMERA)
    table = []
    for name in SYSTEMS:
        fitted = " (fitted to)" if name in FITTED_TO else ""
        published = f"{100 * OUTLIERS[name]:+.2f}{fitted}" if name in OUTLIERS else ""
        here = {"system": name}
        seconds = [f"{float(value):.4g}" for value in time.sel(here)]
        shares = [f"{100 * float(value):.1f}" for value in idle.sel(here)]
        table.append(
            (name, *seconds, f"{100 * float(saved.sel(here)):+.2f}", published, *shares, "")
        )
    faster = {"system": [name for name in SYSTEMS if not name.startswith("slow_nw")]}
    shares = [f"{100 * float(value):.1f}" for value in idle.sel(faster).mean("system")]
    mean = f"{100 * float(saved.sel(faster).mean()):+.2f}"
    last = ("mean of mid and fast networks", "", "", mean, "12 to 14", *shares, "about 35 and 25")
    return [*table, last]


def note(data: xr.Dataset) -> str:
    """Say what the table stands on, and that no machine has the memory for it."""
    at = main_setting(data).sel(
        schedule=[CHIMERA, HANAYO], workers=WORKERS, microbatches=MICROBATCHES
    )
    need = (at.static_bytes + at.activation_bytes).max("worker") / 1e9
    chimera, hanayo = (f"{float(value):,.0f} GB" for value in need)
    return (
        f"e_c = {data.attrs['compute efficiency calibrated']:.4f}, minibatch of "
        f"{data.attrs['main minibatch']}, link model {data.attrs['main link']}. The largest worker "
        f"needs {chimera} (Chimera) and {hanayo} (Hanayo) of "
        f"{float(data.memory_capacity) / 1e9:.0f} GB: no recomputation, unfused scores of 80 heads."
    )


def main() -> None:
    """Print the table and write it beside the dataset, as CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="Zarr store to read")
    path: Path = parser.parse_args().data
    with xr.open_zarr(path) as opened:
        data = opened.load()
    table_rows, below = rows(data), note(data)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *table_rows, (below,)])
    out = path.with_name("tabular_table_1.csv")
    write_file(out, text.getvalue())
    grid = Table(*COLUMNS, title="Hanayo, 2 waves, against Chimera at S = B = 8", caption=below)
    for row in table_rows:
        grid.add_row(*row)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(grid)
    console.print(f"kept in {out}")


if __name__ == "__main__":
    main()
