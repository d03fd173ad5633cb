"""Benchmarks: ratios to named alternatives, measured in one run on one machine."""

from pathlib import Path

from pipejax.base.files import check_writable


def prepare_output(path: Path) -> None:
    """Make the folder of a result, and check before the work that the file can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
