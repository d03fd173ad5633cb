"""A schedule table as text: one line per worker, one column per slot, a place marked."""

from collections.abc import Sequence

MAX_SLOTS = 16  # columns shown around a marked place
MAX_WORKERS = 32


def format_grid(
    rows: Sequence[Sequence[str]],
    mark: tuple[int, int | None] | None = None,
    max_slots: int | None = None,
) -> str:
    """Lay the cells of a table out in columns."""
    num_slots = max((len(row) for row in rows), default=0)
    slots = _window(num_slots, mark[1] if mark else None, max_slots or num_slots)
    workers = _window(len(rows), mark[0] if mark else None, MAX_WORKERS)
    texts = {(w, t): _text(rows[w], t, (w, t) == mark) for w in workers for t in slots}
    label = max((len(f"worker {w}") for w in workers), default=0)
    widths = {t: max([len(str(t)), *(len(texts[w, t]) for w in workers)]) for t in slots}
    header = "  ".join(f"{t:^{widths[t]}}" for t in slots)
    lines = [(" " * (label + 4) + header).rstrip()]
    for w in workers:
        pointer = ">" if mark == (w, None) else " "
        cells = "  ".join(f"{texts[w, t]:^{widths[t]}}" for t in slots)
        lines.append(f"{pointer} {f'worker {w}':<{label}}  {cells}".rstrip())
    hidden = num_slots - len(slots)
    if hidden:
        lines.append(f"  (slots {slots.start} to {slots.stop - 1} of {num_slots})")
    return "\n".join(lines)


def _window(size: int, centre: int | None, width: int) -> range:
    start = min(max((centre or 0) - width // 2, 0), max(size - width, 0))
    return range(start, min(start + width, size))


def _text(row: Sequence[str], slot: int, marked: bool) -> str:
    text = (row[slot] if slot < len(row) else "") or "."
    return f">{text}<" if marked else text
