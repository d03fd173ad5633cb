"""Shared by the commands of this folder: `python -m sweeps.NAME --out STORE`."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import xarray as xr
from rich.console import Console

from pipejax.files import ATTRIBUTES, atomic_write, check_writable, is_dataset


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
    check(out, parser)
    dataset = sweep()
    save(dataset, out)
    Console().print(f"{count(dataset)} in {out}")


def check(out: Path, parser: argparse.ArgumentParser) -> None:
    """End, before any work, where a dataset cannot be written or something else is there.

    These commands repeat what they made: a dataset of theirs is replaced unasked.
    """
    try:
        check_writable(out)
    except OSError as error:
        parser.error(f"{out}: {error.strerror}")
    if os.path.lexists(out) and not is_dataset(out):
        parser.error(f"{out} is not a dataset that was written here: it is never replaced")


def why_anew(out: Path, origin: Mapping[str, str]) -> str:
    """Say why a dataset cannot be kept.

    Args:
      out: Zarr store, there or not.
      origin: what its numbers depend on, each in its attributes under the same name.

    Returns:
      What has changed, in words; empty if the dataset is what would be made again.
    """
    if not is_dataset(out):
        return "it is not there"
    attributes = json.loads((out / ATTRIBUTES).read_bytes())
    changed = [
        f"{name} {attributes.get(name, 'unknown')}, now {value}"
        for name, value in origin.items()
        if attributes.get(name) != value
    ]
    return f"it was made with {'; '.join(changed)}" if changed else ""


def save(dataset: xr.Dataset, out: Path) -> None:
    """Write a Zarr store; one that is there is replaced as a whole."""
    with atomic_write(out) as draft:
        # a part that was read back brings its dtype on disk: NaN would be cast to its integers
        dataset.drop_encoding().to_zarr(draft, zarr_format=2)
