"""The longest paths of a run: as a table, and for `--json`."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.tables import grid

if TYPE_CHECKING:
    from pipejax.analysis.longest_paths import LongPath

_OP = re.compile(r"(\d+)([A-Z]+)(\d+)")
_SHOWN = 3  # runs of ops that are shown at either end of a path
_ROUNDING = 1e-12  # of the length: what is closer to the longest is as long


def paths_json(paths: "Iterable[LongPath]") -> list[dict[str, Any]]:
    """What `--json` says of paths."""
    return [
        {
            "length": path.length,
            "behind": path.behind,
            "counts": dict(path.counts),
            "ops": list(path.ops),
            "messages": list(path.messages),
        }
        for path in paths
    ]


def paths_table(paths: "list[LongPath]") -> Table:
    """Show the longest paths: how far behind each is, what it counts, and the way it takes."""
    names = list(paths[0].counts) if paths else []
    behind = (path.behind * (path.behind > _ROUNDING * path.length) for path in paths)
    columns: list[tuple[str, Iterable[object]]] = [
        ("path", range(1, len(paths) + 1)),
        ("length", [seconds(path.length) for path in paths]),
        ("behind", map(seconds, behind)),
        *((name, [path.counts[name] for path in paths]) for name in names),
        ("ops", [short_form(path.ops) for path in paths]),
    ]
    return grid(columns)


def short_form(ops: Iterable[str]) -> str:
    """Write ops of a path shortly: those that follow each other by stage or microbatch as a range.

    Example:
      >>> short_form(["0F0", "1F0", "2F0", "2F1", "2F2", "2B2", "1B2", "0B2"])
      '0-2F0 2F1-2 2-0B2'
    """
    runs: list[list[tuple[str, ...]]] = []
    for op in ops:
        parts = _OP.fullmatch(op)
        step = parts.groups() if parts else (op,)
        if runs and _continues(runs[-1], step):
            runs[-1].append(step)
        else:
            runs.append([step])
    texts = [_text(run) for run in runs]
    if len(texts) > 2 * _SHOWN + 1:
        texts[_SHOWN:-_SHOWN] = ["..."]
    return " ".join(texts)


def _continues(run: list[tuple[str, ...]], step: tuple[str, ...]) -> bool:
    """Whether an op is the next of a run: one number goes on as before, all else stays."""
    if len(step) != 3 or len(run[-1]) != 3 or run[-1][1] != step[1]:
        return False
    (stage, _, microbatch), (last_stage, _, last) = step, run[-1]
    move = int(stage) - int(last_stage), int(microbatch) - int(last)
    if sorted(map(abs, move)) != [0, 1]:
        return False
    before = run[-2] if len(run) > 1 else None
    return before is None or move == (int(last_stage) - int(before[0]), int(last) - int(before[2]))


def _text(run: list[tuple[str, ...]]) -> str:
    if len(run) == 1:
        return "".join(run[0])
    (stage, letter, microbatch), (last_stage, _, last) = run[0], run[-1]
    stages = stage if stage == last_stage else f"{stage}-{last_stage}"
    return stages + letter + (microbatch if microbatch == last else f"{microbatch}-{last}")
