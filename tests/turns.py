"""Whose turn it is: large grids run in parts, another one for each commit.

A case that costs seconds is one of a grid of dozens. `make test` runs the first of a grid, which is
its smallest, and one part of the others, chosen by the commit; `make test-all` runs them all. So do
single tests that take seconds and are marked `takes_turns`, each beside cheaper ones of the same
thing: a third of them runs, those that share what is costly to make together. The
examples that hypothesis draws begin at the same number. A run ends with a line that says it, and
with `TURN=...` in the environment another one runs the same.
"""

import os
import random
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def _of_commit() -> str:
    """The commit that is tested; a copy without Git has always the same turn."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return found.stdout.strip()


# processes that tests start, and workers of pytest, have the turn of the first one
TURN = os.environ.setdefault("TURN", _of_commit())
NUMBER = int(TURN, 16)


def in_turn(cases: Iterable[Any], *, always: int = 1, of: int = 3) -> list[Any]:
    """Cases for `parametrize`, of which those are slow whose turn it is not.

    Args:
      cases: of a grid; the smallest first.
      always: how many of them run each time.
      of: the others are so many times those that run.
    """
    cases = list(cases)
    others = range(always, len(cases))
    # drawn, as a grid's axes would else decide who is together
    chosen = random.Random(NUMBER).sample(others, -(-len(others) // of))
    return [case if k < always or k in chosen else _slow(case) for k, case in enumerate(cases)]


def is_now(name: str, *, of: int = 3) -> bool:
    """Whether a test, or several with the name of a group, has its turn."""
    return (zlib.crc32(name.encode()) + NUMBER) % of == 0


def _slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a `pytest.param` already
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
