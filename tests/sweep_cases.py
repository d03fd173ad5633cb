"""Shared by the tests of sweeps: a declared sweep and a grid of 560 points."""

import re
import tomllib
from pathlib import Path

from pipejax.cli.app import run

DATA = Path(__file__).parent / "data"
TOML, GRID_TOML = ((DATA / f"{name}.toml").read_text() for name in ("sweep", "sweep_grid"))
GRID = tomllib.loads(GRID_TOML)


def declare(folder):
    path = folder / "sweep.toml"
    path.write_text(TOML)
    return path


def write_grid(folder):
    """Write the grid into a folder, as a declared sweep."""
    path = folder / "grid.toml"
    path.write_text(GRID_TOML)
    return path


def refused(capsys, *arguments):
    assert run(["sweep", "run", *map(str, arguments), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch("error: .+\\n(hint: .+\\n)?", printed.err)
    return printed.err.replace("\nhint", "")
