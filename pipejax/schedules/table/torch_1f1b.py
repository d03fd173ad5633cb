"""PyTorch's own table of 1F1B, whose last rank is off by one.

`Schedule1F1B` counts the forwards of a rank on from its warm-up; the last rank has none, and begins
at 1 where all others begin at 0: with four ranks it holds 3F1, 3B0, 3F2, 3B1 and so on. The
runtime does not read this table; what is dumped of it cannot run until the forwards of that rank
are counted from 0. Nothing else is repaired.
"""

from collections.abc import Sequence

from pipejax.schedules.cells.ops import SHARDING, Op, Phase, format_cell, parse_cell

Texts = Sequence[Sequence[str]]

REPAIRS = ("torch-1f1b",)
LOOKS_LIKE = (
    "; this looks like PyTorch's own 1F1B, whose last rank is off by one: --repair torch-1f1b (in "
    'Python repair="torch-1f1b") reads it'
)


def repaired(rows: Texts) -> list[list[str]] | None:
    """Return the cells with the forwards of the last rank counted from 0; None for other tables."""
    *before, last = rows
    rank = len(before)
    found = [_ops(row) for row in rows]
    if any(ops is None or {op.stage for op in ops} != {r} for r, ops in enumerate(found)):
        return None
    own = [op for op in found[-1] or () if op.phase not in SHARDING]
    turns = [(Op(Phase.F, rank, m + 1), Op(Phase.B, rank, m)) for m in range(len(own) // 2)]
    if own != [op for turn in turns for op in turn]:
        return None
    return [list(row) for row in before] + [[_lower(text) for text in last]]


def changes(before: Texts, after: Texts) -> str:
    """Say which cells of the last rank are others; nothing if none is."""
    cells = [
        f"{old.strip()} is read as {new}"
        for old, new in zip(before[-1], after[-1], strict=True)
        if old != new
    ]
    if not cells:
        return ""
    listed = [*cells[:2], "...", cells[-1]] if len(cells) > 4 else cells
    return f"rank {len(before) - 1}, {len(cells)} cells: {', '.join(listed)}"


def _ops(row: Sequence[str]) -> list[Op] | None:
    """The ops of a row of single cells in order; None if there is another one."""
    try:
        cells = [cell for cell in map(parse_cell, row) if cell]
    except ValueError:
        return None
    known = Phase.F, Phase.B, *SHARDING
    is_plain = all(len(cell) == 1 and cell[0].phase in known for cell in cells)
    return [cell[0] for cell in cells] if is_plain else None


def _lower(text: str) -> str:
    """Count a forward one lower."""
    cell = parse_cell(text)
    if not cell or cell[0].phase is not Phase.F:
        return text
    return format_cell((cell[0]._replace(microbatch=cell[0].microbatch - 1),))
