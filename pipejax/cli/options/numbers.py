"""Numbers in options: seconds, lists of them, and times of ops in short form."""

import math

from pipejax.base.data_files import read_quantity


def parse_times(text: str, option: str) -> dict[str, float]:
    """Read op times such as "F=1,B=2"."""
    from pipejax.costs.costs import PHASE_FIELDS

    times: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        if letter not in PHASE_FIELDS:
            raise ValueError(
                f"{option}: {entry.strip()!r} is not LETTER=TIME: letters are "
                f"{', '.join(PHASE_FIELDS)}"
            )
        if PHASE_FIELDS[letter] in times:
            raise ValueError(f"{option}: {letter} is given twice")
        times[PHASE_FIELDS[letter]] = parse_seconds(value, f"{option}: {letter}")
    if "forward" not in times:
        raise ValueError(f"{option}: F is missing, got {text!r}")
    return times


def parse_list(text: str, where: str, *, seconds: bool = False) -> list[float]:
    """Read finite numbers of at least 0, such as "1,1,2", or times."""
    parse = parse_seconds if seconds else parse_number
    return [parse(part.strip(), where) for part in text.split(",")]


def parse_seconds(text: str, where: str) -> float:
    """Read a time of at least 0: with a unit, as 40us, or in seconds."""
    value = read_quantity(text, "s", where)
    return parse_number(text, where) if value is None else value


def parse_number(text: str, where: str) -> float:
    """Read a finite number of at least 0."""
    value = parse_float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a finite number of at least 0, got {text!r}")
    return value


def parse_float(text: str) -> float:
    """Read a number; what is none is NaN, which no check of a range lets pass."""
    try:
        return float(text) if is_plain(text) else math.nan
    except ValueError:
        return math.nan


def is_plain(text: str) -> bool:
    """Whether no digit is written otherwise than 0 to 9: Python reads 1_0 and those of Arabic."""
    return text.isascii() and "_" not in text
