"""Closed forms as text and as LaTeX."""

from collections.abc import Callable, Sequence
from fractions import Fraction

READABLE = 1000  # largest denominator that is written as one; of decimals
DECIMAL = 8  # a smaller one

Counts = Sequence[Fraction]


def as_text(names: Sequence[str], facets: Sequence[Counts]) -> str:
    """Write a form as `max(6F + 4B, 4F + 6B)`, or as one sum where there is one facet."""
    sums = [linear_text(names, counts) for counts in facets]
    return sums[0] if len(sums) == 1 else f"max({', '.join(sums)})"


def as_latex(names: Sequence[str], facets: Sequence[Counts]) -> str:
    r"""Write a form as `\max\left(6 F + 4 B,\; 4 F + 6 B\right)`."""
    symbols = [latex_symbol(name) for name in names]
    sums = [_sum(symbols, counts, _latex_factor) for counts in facets]
    joined = r",\; ".join(sums)
    return joined if len(sums) == 1 else rf"\max\left({joined}\right)"


def linear_text(names: Sequence[str], counts: Counts) -> str:
    """Write a sum as `6F + 4B - c`."""
    return _sum(names, counts, _text_factor)


def comparison_text(names: Sequence[str], counts: Counts, relation: str = ">=") -> str:
    """Write that `counts . theta >= 0` with positive terms on both sides, as `2F + c >= 3B`."""
    positive = [max(count, Fraction(0)) for count in counts]
    negative = [max(-count, Fraction(0)) for count in counts]
    return f"{linear_text(names, positive)} {relation} {linear_text(names, negative)}"


def latex_symbol(name: str) -> str:
    """Write a parameter as a symbol, a word and a long index upright."""
    kind, _, index = name.partition("_")
    symbol = kind if len(kind) == 1 else rf"\mathrm{{{kind}}}"
    if not index:
        return symbol
    return f"{symbol}_{index}" if len(index) == 1 else rf"{symbol}_{{\mathrm{{{index}}}}}"


def polynomial_text(symbol: str, coefficients: Counts) -> str:
    """Write a polynomial, its constant given first, as `7/4 M + 12`."""
    powers = ["", symbol, *(f"{symbol}^{k}" for k in range(2, len(coefficients)))]
    constant, *others = coefficients
    text = _sum(powers[:0:-1], others[::-1], _text_factor)
    if not constant:
        return text
    if text == "0":
        return str(constant)
    return f"{text} {'-' if constant < 0 else '+'} {abs(constant)}"


def _sum(symbols: Sequence[str], counts: Counts, factor: Callable[[Fraction], str]) -> str:
    text = ""
    for symbol, count in zip(symbols, counts, strict=True):
        if count:
            sign = (" - " if count < 0 else " + ") if text else "-" * (count < 0)
            text += f"{sign}{'' if abs(count) == 1 else factor(abs(count))}{symbol}"
    return text or "0"


def _is_decimal(size: Fraction) -> bool:
    """Whether a number is better read as 39.52 than as 988/25."""
    whole = 10**6 % size.denominator == 0
    return size.denominator > (DECIMAL if whole else READABLE)


def _text_factor(size: Fraction) -> str:
    if _is_decimal(size):
        return f"{float(size):g} "
    return str(size) if size.denominator == 1 else f"{size} "


def _latex_factor(size: Fraction) -> str:
    if size.denominator == 1 or _is_decimal(size):
        return f"{float(size):g} "
    return rf"\tfrac{{{size.numerator}}}{{{size.denominator}}} "
