"""Values of options: how they are declared, and how texts become numbers."""

import math
import re

import numpy as np

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.data_files import read_quantity

# types of values; what an option is, and between which numbers it lies, is in the catalogue
Text = str | None
Count = int
CountIfGiven = int | None


def parse_times(text: str, option: str) -> dict[str, float]:
    """Read op times such as "F=1,B=2,pair=2.5": by field, of kinds of a table by letters."""
    from pipejax.costs.costs import TIME_FIELDS

    times: dict[str, float] = {}
    for entry in text.split(","):
        letter, _, value = (part.strip() for part in entry.partition("="))
        field = TIME_FIELDS.get(letter, letter)
        if letter not in TIME_FIELDS and not re.fullmatch("[A-Z][A-Za-z_]*", letter):
            raise ValueError(
                f"{option}: {entry.strip()!r} is not LETTER=TIME: letters are "
                f"{', '.join(TIME_FIELDS)}"
            )
        if field in times:
            raise ValueError(f"{option}: {letter} is given twice")
        times[field] = parse_seconds(value, f"{option}: {letter}")
    if "forward" not in times and not times.keys() - TIME_FIELDS.values():
        raise ValueError(f"{option}: F is missing, got {text!r}")
    return times


def parse_list(text: str, where: str, *, seconds: bool = False) -> list[float]:
    """Read finite numbers of at least 0, such as "1,1,2", or times."""
    parse = parse_seconds if seconds else parse_number
    return [parse(part.strip(), where) for part in text.split(",")]


def parse_counts(text: str, where: str) -> list[int]:
    """Read whole numbers of at least 1, such as "8,16"."""
    numbers = whole_numbers(text)
    if numbers is None or 0 in numbers:
        raise ValueError(f"{where} must be whole numbers of at least 1, got {text!r}")
    return numbers


def whole_numbers(text: str) -> list[int] | None:
    """Read numbers in digits, such as "0,8"; None if one is not."""
    words = [word.strip() for word in text.split(",")]
    are_digits = all(word.isdigit() and is_plain(word) for word in words)
    return [int(word) for word in words] if are_digits else None


def parse_whole(text: str, option: str, least: int) -> list[int]:
    """Read whole numbers of at least `least`, such as "0,1"."""
    numbers = parse_list(text, option)
    if any(number != int(number) or number < least for number in numbers):
        raise ValueError(f"{option} must be whole numbers of at least {least}, got {text!r}")
    return [int(number) for number in numbers]


def number_text(number: float) -> str:
    """Write a number so that it is read as the same one: 1, 0.25, 1.1609066379844362."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)


def seconds_text(seconds: float) -> str:
    """Write a time so that it is read as the same one, in the unit that takes fewest letters."""
    texts = [number_text(seconds)]
    texts += [f"{number_text(seconds / 10.0**-k)}{unit}" for k, unit in ((3, "ms"), (6, "us"))]
    return min((text for text in texts if parse_seconds(text, "") == seconds), key=len)


def parse_layers(text: str | None, stages: int) -> list[int] | None:
    """Read the layers of each stage: one number for all, or one each; None for no text."""
    if text is None:
        return None
    counts = parse_counts(text, "--stage-layers")
    return counts * stages if len(counts) == 1 else counts


def for_each(
    values: list[float], count: int, option: str, what: str
) -> Float[NumpyArray, " entries"]:
    """Read one number for all, or one for each stage or worker."""
    if len(values) not in (1, count):
        raise ValueError(
            f"{option} must be a number or one for each of {count} {what}, got {len(values)}"
        )
    return np.broadcast_to(np.array(values, float), (count,)).copy()


def parse_columns(text: str, example: str) -> dict[str, str]:
    """Read what is said of columns, each once, in a text like the example: replica=dp,step=it."""
    pairs = [[part.strip() for part in entry.partition("=")] for entry in text.split(",")]
    columns = {name: value for name, _, value in pairs if name and value}
    if len(columns) < len(pairs):
        raise ValueError(f"--columns must be as {example}, got {text!r}")
    return columns


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


def parse_share(text: str, where: str) -> float:
    """Read a share from 0 to 1: a number, or with % a hundredth of one."""
    value = parse_ratio(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{where} must be a share from 0 to 1, as 0.1 or 10%, got {text!r}")
    return value


def parse_percent(text: str, where: str) -> float:
    """Read a percentage of at least 0, with or without the sign."""
    value = parse_float(text.strip().removesuffix("%").strip())
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} must be a percentage of at least 0, as 5 or 5%, got {text!r}")
    return value


def parse_ratio(text: str) -> float:
    """Read a number, or with % a hundredth of one; what is none is NaN."""
    bare = text.strip().removesuffix("%")
    return parse_float(bare.strip()) / (100 if "%" in text else 1)


def parse_float(text: str) -> float:
    """Read a number; what is none is NaN, which no check of a range lets pass."""
    try:
        return float(text) if is_plain(text) else math.nan
    except ValueError:
        return math.nan


def is_plain(text: str) -> bool:
    """Return whether all digits are 0 to 9: Python also reads 1_0 and Arabic digits."""
    return text.isascii() and "_" not in text
