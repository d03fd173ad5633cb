"""What the commands of this folder have in common: `python -m sweeps.NAME --out STORE`."""

import argparse
from collections.abc import Callable
from pathlib import Path

import xarray as xr
from rich.console import Console


def write(
    description: str, sweep: Callable[[], xr.Dataset], count: Callable[[xr.Dataset], str]
) -> None:
    """Make a dataset and write it as a Zarr store; one that is there is replaced as a whole.

    Args:
      description: of the command; its first line is shown by `--help`.
      sweep: makes the dataset.
      count: says how much it holds.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="Zarr store to write")
    out: Path = parser.parse_args().out
    dataset = sweep()
    out.parent.mkdir(parents=True, exist_ok=True)
    dataset.to_zarr(out, mode="w", zarr_format=2)
    Console().print(f"{count(dataset)} in {out}")
