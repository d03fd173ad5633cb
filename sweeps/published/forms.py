"""Published closed forms against exact ones: where each holds, as inequalities.

    python -m sweeps.published.forms

A published form is one sum. It is the makespan exactly where no other sum of the exact form is
larger; where it is none of these sums, where both happen to be equal. Exit code 1 where a form that
should be a sum of the exact one is not.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import pipejax as pj
from pipejax.analysis import comparison_text, named_parameters, regions, smallest

SIZES = tuple((p, factor * p) for p in (2, 4, 8) for factor in (2, 4))
SHOWN = (4, 16)  # size whose region is shown

Counts = tuple[Fraction, ...]


class Published(NamedTuple):
    """A closed form as it is published.

    Attributes:
      schedule: name.
      text: as it is written, F, B, I and W per worker, T their sum.
      counts: of the parameters by P and M.
      parameters: that it is a function of.
      source: where it stands.
      options: of the schedule.
      is_facet: whether it should be one of the sums of the exact form.
    """

    schedule: str
    text: str
    counts: Callable[[int, int], Sequence[int | Fraction]]
    parameters: tuple[str, ...]
    source: str
    options: Mapping[str, Any] = {}
    is_facet: bool = True


class Verdict(NamedTuple):
    """Region where a published form is the makespan.

    Attributes:
      holds: whether it is a sum of the exact form, or need not be.
      where: inequalities or equations, or "everywhere".
    """

    holds: bool
    where: str


COSTS, SPLIT = ("F", "B", "c"), ("F", "I", "W", "c")
FORMS = (
    Published(
        "gpipe",
        "(M + P - 1) T + 2(P - 1) c",
        lambda p, m: (m + p - 1, m + p - 1, 2 * (p - 1)),
        COSTS,
        "arXiv:1811.06965; message term our own",
    ),
    Published(
        "1f1b",
        "(M + P - 1) T + [2(P - 1)(M/P + 1) - 2] c",
        lambda p, m: (m + p - 1, m + p - 1, 2 * (p - 1) * (m // p + 1) - 2),
        COSTS,
        "arXiv:2104.04473; message term our own",
    ),
    Published(
        "eager-1f1b",
        "(M + P - 1) T + 2(P - 1) c",
        lambda p, m: (m + p - 1, m + p - 1, 2 * (p - 1)),
        COSTS,
        "arXiv:2211.05322",
    ),
    Published(
        "interleaved-1f1b",
        "(M + (P - 1)/V) T, V = 2",
        lambda p, m: (m + Fraction(p - 1, 2), m + Fraction(p - 1, 2)),
        ("F", "B"),
        "arXiv:2104.04473, section 2.2.2",
        {"stages_per_worker": 2},
    ),
    Published(
        "looped-bfs",
        "(M + (P - 1)/V) T, V = 2",
        lambda p, m: (m + Fraction(p - 1, 2), m + Fraction(p - 1, 2)),
        ("F", "B"),
        "arXiv:2407.21783, section 3.3.2",
        {"stages_per_worker": 2},
    ),
    Published(
        "chimera",
        "(M + P/2 - 1) T, F = B",
        lambda p, m: (m + p // 2 - 1, m + p // 2 - 1),
        ("F", "B"),
        "arXiv:2107.06925, Table 2",
        is_facet=False,
    ),
    Published(
        "zb-h1",
        "M T + (P - 1)(F + I - W) + 4(P - 1) c",
        lambda p, m: (m + p - 1, m + p - 1, m - p + 1, 4 * (p - 1)),
        SPLIT,
        "arXiv:2401.10241, Table 2; message term our own",
    ),
)


def judge(published: Published, p: int, m: int) -> Verdict:
    """Say where a published form is the makespan."""
    table = pj.schedules.build(
        published.schedule, num_workers=p, num_microbatches=m, **published.options
    )
    program = pj.lower(table, step_end=False)
    weights = named_parameters(program, published.parameters, table.worker_parts)
    if "c" not in published.parameters:
        weights = {name: costs for name, costs in weights.items() if name != "c"}
    form = pj.formula(program, weights)
    counts = tuple(map(Fraction, published.counts(p, m)))
    facets = [tuple(map(Fraction, facet)) for facet in form.facets]
    if counts in facets:
        number = facets.index(counts)
        bounds = [
            border.text if border.facet == number else _turned(border.text)
            for border in form.borders
            if number in border[:2]
        ]
        return Verdict(True, " and ".join(bounds) or "everywhere")
    return Verdict(not published.is_facet, _where_equal(form, facets, counts))


def _turned(text: str) -> str:
    smaller, larger = text.split(" >= ")
    return f"{larger} >= {smaller}"


def _where_equal(form: pj.results.Formula, facets: Sequence[Counts], counts: Counts) -> str:
    """Equations on which a sum that is no facet is the makespan."""
    rays, spans = regions(form.envelope.cone, len(facets))
    thetas = (rays * form.units).tolist()
    equations = []
    for facet, span in zip(facets, spans, strict=True):
        difference = [a - b for a, b in zip(facet, counts, strict=True)]
        values = [sum(d * t for d, t in zip(difference, thetas[k], strict=True)) for k in span]
        if min(values) <= 0 <= max(values):
            difference = smallest(difference)
            sign = 1 if next(filter(None, difference)) > 0 else -1
            equations.append(comparison_text(form.parameters, [sign * d for d in difference], "="))
    return " or ".join(dict.fromkeys(equations)) or "nowhere"


def rows() -> list[tuple[Published, bool, str]]:
    """Each published form, whether it holds at all sizes, and where at the size that is shown."""
    return [
        (form, all(judge(form, *size).holds for size in SIZES), judge(form, *SHOWN).where)
        for form in FORMS
    ]


def main() -> int:
    """Print the table."""
    p, m = SHOWN
    table = Table(
        "schedule", "published makespan", "a sum of the exact form", f"exact at {p} x {m} where"
    )
    judged_rows = rows()
    for form, holds, where in judged_rows:
        word = ("yes" if form.is_facet else "no, nor should it be") if holds else "[red]no[/]"
        table.add_row(form.schedule, form.text, word, where)
    Console().print(table)
    return int(not all(holds for _, holds, _ in judged_rows))


if __name__ == "__main__":
    sys.exit(main())
