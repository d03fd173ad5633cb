"""Families of closed forms, whose counts are polynomials in the microbatches or workers.

A number is a number of microbatches or workers. A schedule that repeats itself adds the same counts
to each path with every period. So the counts at n, n + period, n + 2 period, ... lie on lines (or
parabolas). Some numbers in equal steps give these polynomials, and later numbers check them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from pipejax.analysis.formula.form import formula
from pipejax.analysis.formula.parameters import Weights, polynomial_text
from pipejax.base.checks import whole_number
from pipejax.base.display import with_short_repr
from pipejax.engine.lowering.program import Program

NUM_CHECKS = 2  # numbers of each residue that check a polynomial, besides those that give it
MAX_FACETS = 60  # largest number of facets of a form in a family
MAX_TRIALS = 10**6  # largest number of candidate polynomials

Parameters = Sequence[str] | Weights | None
Facet = tuple[Fraction, ...]
FacetsByNumber = Mapping[int, list[Facet]]
Polynomial = tuple[Fraction, ...]  # coefficients, the constant first
Branch = tuple[tuple[Polynomial, ...], ...]  # a polynomial for each (facet, parameter)


class NoFamilyError(ValueError):
    """No common polynomials go through the counts of the closed forms at the checked numbers."""


@with_short_repr("symbol parameters first period found_on verified_on branches")
class Family(NamedTuple):
    """Closed form for all numbers of microbatches (or workers) from `first` on.

    The family is checked at some numbers, not proved for all.

    Attributes:
      symbol: "M" or "P".
      parameters: names of the parameters.
      first: smallest number for which the family holds.
      period: numbers that differ by the period have counts on the same polynomials.
      branches: {number mod period: a polynomial for each (facet, parameter)}.
      found_on: numbers in equal steps that gave the family or checked it.
      verified_on: later numbers that checked the family.
    """

    symbol: str
    parameters: tuple[str, ...]
    first: int
    period: int
    branches: Mapping[int, Branch]
    found_on: tuple[int, ...]
    verified_on: tuple[int, ...]

    def facets(self, number: int) -> list[Facet]:
        """Return the counts of the facets at a number of at least `first`."""
        whole_number(number, self.symbol, minimum=self.first)
        if number % self.period not in self.branches:
            residues = ", ".join(map(str, sorted(self.branches)))
            raise ValueError(
                f"{self.symbol} mod {self.period} must be one of {residues}, got {number}"
            )
        branch = self.branches[number % self.period]
        return sorted({_counts(facet, number) for facet in branch}, reverse=True)

    def __call__(self, number: int) -> Callable[..., float]:
        """Return the closed form at a number: a function of the parameters by name."""
        facets = self.facets(number)

        def closed_form(**values: float) -> float:
            seconds = [values[name] for name in self.parameters]
            return max(
                sum(float(count) * value for count, value in zip(facet, seconds, strict=True))
                for facet in facets
            )

        return closed_form

    def __str__(self) -> str:
        """Write a line for each group of residues: `(M + 3)F + 6c for M >= 1, M mod 2 = 0`."""
        texts: dict[str, list[int]] = {}
        for residue, branch in sorted(self.branches.items()):
            last = max(n for n in self.found_on if n % self.period == residue)
            facets = [
                [polynomial_text(self.symbol, polynomial) for polynomial in facet]
                for facet in sorted(branch, key=lambda facet: _counts(facet, last), reverse=True)
            ]
            texts.setdefault(_form_text(self.parameters, facets), []).append(residue)
        lines = []
        for text, residues in texts.items():
            where = f"{self.symbol} >= {self.first}"
            if len(residues) < self.period:
                where += f", {self.symbol} mod {self.period} = {', '.join(map(str, residues))}"
            lines.append(f"{text} for {where}")
        return "\n".join(lines)


def _form_text(names: Sequence[str], facets: Sequence[Sequence[str]]) -> str:
    """Write facets, given as texts of their counts, as `max((M + 3)F + 2B, 6F)`."""
    sums = []
    for facet in facets:
        counts = [f"({count})" if " " in count else count for count in facet]
        terms = [
            name if count == "1" else f"{count}{name}"
            for count, name in zip(counts, names, strict=True)
            if count != "0"
        ]
        sums.append(" + ".join(terms))
    return sums[0] if len(sums) == 1 else f"max({', '.join(sums)})"


def formula_family(
    program: Callable[[int], Program],
    numbers: Sequence[int],
    parameters: Parameters | Callable[[int], Parameters] = None,
    *,
    verify_on: Sequence[int] = (),
    symbol: str = "M",
    degree: int = 1,
) -> Family:
    """Find how the facets of closed forms depend on the number of microbatches or workers.

    A closed form is a maximum of sums (facets) such as 6F + 4B. A family has polynomials in place
    of 6 and 4. It must hold on the later half of the numbers, because a few numbers may seem to
    have a shorter period.

    Args:
      program: function that lowers the schedule for a number of microbatches or workers.
      numbers: numbers that give the family, in rising equal steps.
      parameters: as for `formula`, or a function from the number to the parameters.
      verify_on: later numbers that check the family.
      symbol: name of the number in the text.
      degree: degree of the polynomials, from 0 to 2; 2 suits numbers of workers.

    Returns:
      The family with the smallest period, from the first number for which it holds.

    Raises:
      NoFamilyError: if there is no family: the number of facets grows, the numbers are too few for
        the period, or their step does not divide the period.
      ValueError: if the numbers do not rise in equal steps, or the degree is not from 0 to 2.

    Example:
      >>> import pipejax as pj
      >>> def program(m):
      ...     return pj.lower(pj.schedules.build("1f1b", num_workers=4, num_microbatches=m))
      >>> names = ("F", "B", "c")
      >>> family = pj.analysis.formula_family(program, range(4, 44, 4), names, verify_on=[80])
      >>> print(family)
      (M + 3)F + (M + 3)B + (3/2 M + 4)c for M >= 4, M mod 4 = 0
      >>> family(100)(F=1.0, B=2.0, c=0.0)
      309.0
    """
    whole_number(degree, "degree", minimum=0, maximum=2)
    numbers, check_numbers = [*numbers], [*verify_on]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if step < 1 or numbers != [*range(numbers[0], numbers[-1] + 1, step)]:
        raise ValueError(f"numbers must rise in equal steps, got {numbers}")
    forms = {
        n: formula(program(n), parameters(n) if callable(parameters) else parameters)
        for n in (*numbers, *check_numbers)
    }
    facets = {n: [tuple(map(Fraction, f)) for f in form.facets] for n, form in forms.items()}
    max_period = len(numbers) // (degree + 1 + NUM_CHECKS) * step
    for period in range(step, max_period + 1, step):
        fit = _fit_period(numbers, check_numbers, facets, period, degree)
        if fit is None:
            continue
        first, branches = fit
        if first > numbers[len(numbers) // 2]:
            continue
        names = next(iter(forms.values())).parameters
        found_on = tuple(n for n in numbers if n >= first)
        verified_on = tuple(n for n in check_numbers if n >= first)
        return Family(symbol, names, first, period, branches, found_on, verified_on)
    largest = max(map(len, facets.values()))
    steps = f", in multiples of {step}: rise by 1 for others" if step > 1 else ""
    raise NoFamilyError(
        f"no polynomials in {symbol} of degree {degree} hold from {numbers[0]} to {numbers[-1]}, "
        f"which show periods up to {max_period}{steps}; forms have up to {largest} facets; give "
        "more numbers, or fewer parameters"
    )


def _fit_period(
    numbers: list[int], check_numbers: list[int], facets: FacetsByNumber, period: int, degree: int
) -> tuple[int, dict[int, Branch]] | None:
    """Fit polynomials by residue. Return (first number that they fit, {residue: polynomials})."""
    # The last numbers of a residue give its polynomials, and check them with `check_numbers`.
    branches: dict[int, Branch] = {}
    first, step = numbers[0], numbers[1] - numbers[0]
    for residue in {n % period for n in numbers}:
        members = [n for n in numbers if n % period == residue]
        tail = members[-(degree + 1 + NUM_CHECKS) :]
        checked = [*tail, *(n for n in check_numbers if n % period == residue)]
        branch = _fit_polynomials(tail[: degree + 1], checked, facets)
        if branch is None:
            return None
        start = tail[0]
        for number in reversed(members):
            if {_counts(facet, number) for facet in branch} != {*facets[number]}:
                break
            start = number
        branches[residue] = branch
        # the polynomials of this residue fail at start - period, so the family begins later
        first = max(first, start - period + step)
    return first, branches


def _fit_polynomials(bases: list[int], checked: list[int], facets: FacetsByNumber) -> Branch | None:
    """Fit polynomials to facets at the numbers `bases`. Return None if a checked number fails."""
    # Every choice of one facet per base gives a candidate. For example, facets 3F at M = 1 and 5F
    # at M = 2 give (2M + 1)F, which stays if 7F is a facet at M = 3.
    sizes = {len(facets[n]) for n in checked}
    count = sizes.pop()
    if sizes or count > MAX_FACETS or count ** len(bases) > MAX_TRIALS:
        return None
    expected = {n: {*facets[n]} for n in checked}
    fits = []
    for choice in itertools.product(*(facets[n] for n in bases)):
        polynomials = tuple(_interpolate(bases, values) for values in zip(*choice, strict=True))
        if all(_counts(polynomials, n) in expected[n] for n in checked):
            fits.append(polynomials)
    is_all = all({_counts(facet, n) for facet in fits} == expected[n] for n in checked)
    return tuple(fits) if is_all and len(fits) == count else None


def _interpolate(numbers: Sequence[int], values: Sequence[Fraction]) -> Polynomial:
    """Return the coefficients, of M^0 first, of the polynomial with these values at the numbers."""
    # Newton's divided differences, then Horner's rule from the last number to the first:
    # numbers 1, 2 and values 3, 5 have differences 3, 2, so 3 + 2 (M - 1) = 2 M + 1.
    differences = [*values]
    for order in range(1, len(numbers)):
        for k in range(len(numbers) - 1, order - 1, -1):
            step = numbers[k] - numbers[k - order]
            differences[k] = (differences[k] - differences[k - 1]) / step
    polynomial: list[Fraction] = [Fraction(0)] * len(numbers)
    for number, difference in zip(reversed(numbers), reversed(differences), strict=True):
        shifted = [Fraction(0), *polynomial[:-1]]
        polynomial = [s - number * p for s, p in zip(shifted, polynomial, strict=True)]
        polynomial[0] += difference
    return tuple(polynomial)


def _counts(facet: Sequence[Polynomial], number: int) -> Facet:
    """Return a facet's counts: the values of its polynomials at a number."""
    return tuple(
        sum((c * number**k for k, c in enumerate(polynomial)), Fraction(0)) for polynomial in facet
    )
