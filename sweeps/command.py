"""What the commands of this folder have in common: `python -m sweeps.NAME --out STORE`."""

import argparse
from collections.abc import Callable
from pathlib import Path

import xarray as xr
from rich.console import Console

from pipejax.base.files import drafted


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
    save(dataset, out)
    Console().print(f"{count(dataset)} in {out}")


def save(dataset: xr.Dataset, out: Path) -> None:
    """Write a Zarr store; one that is there is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with drafted(out) as draft:
        dataset.to_zarr(draft, zarr_format=2)
