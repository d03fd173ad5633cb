"""Published closed forms: what papers print for a schedule, with what they assume.

These are the first of the three levels. They know nothing of messages and little of unequal
stages; the table and the run show where that matters.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipejax.schedules.table.table import ScheduleTable


class Shape(NamedTuple):
    """What the closed forms depend on.

    Attributes:
      p: workers.
      m: microbatches.
      v: stages per worker.
    """

    p: int
    m: int
    v: int


class ClosedForm(NamedTuple):
    """What a paper prints for a schedule.

    Attributes:
      bubble_ratio: idle / total as text and as a function, or None if none is printed.
      in_flight: activations that worker r holds, in stages, as text and as a function of the
        shape and r; or None.
      weight_copies: copies of the model's weights over all workers.
      assumes: when the bubble ratio is exact.
      holds: whether the shape fits these assumptions.
      source: where it is printed.
    """

    bubble_ratio: tuple[str, Callable[[Shape], float]] | None
    in_flight: tuple[str, Callable[[Shape, int], int]] | None
    weight_copies: int
    assumes: str
    holds: Callable[[Shape], bool]
    source: str


_PIPELINE = ("(P-1)/(M+P-1)", lambda n: (n.p - 1) / (n.m + n.p - 1))
_LOOPED = ("(P-1)/(VM+P-1)", lambda n: (n.p - 1) / (n.v * n.m + n.p - 1))


def _interleaved(n: Shape, r: int) -> int:
    return min(2 * (n.p - r - 1) + (n.v - 1) * n.p + 1, n.m * n.v)


CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "gpipe": ClosedForm(
        _PIPELINE,
        ("M", lambda n, r: n.m),
        1,
        "equal stages",
        lambda n: True,
        "arXiv:1811.06965, section 2.3; arXiv:2104.04473, section 2.2",
    ),
    "1f1b": ClosedForm(
        _PIPELINE,
        ("min(P-r, M)", lambda n, r: min(n.p - r, n.m)),
        1,
        "equal stages",
        lambda n: True,
        "arXiv:2104.04473, section 2.2",
    ),
    "eager-1f1b": ClosedForm(
        _PIPELINE,
        ("min(2(P-r)-1, M)", lambda n, r: min(2 * (n.p - r) - 1, n.m)),
        1,
        "equal stages",
        lambda n: True,
        "arXiv:2211.05322",
    ),
    "interleaved-1f1b": ClosedForm(
        _LOOPED,
        ("min(2(P-r-1)+(V-1)P+1, MV)", _interleaved),
        1,
        "equal stages, M a multiple of P",
        lambda n: n.m % n.p == 0,
        "arXiv:2104.04473, section 2.2.2; in flight arXiv:2503.01328, section 3",
    ),
    "looped-bfs": ClosedForm(
        _LOOPED,
        ("MV", lambda n, r: n.m * n.v),
        1,
        "equal stages, M at least P",
        lambda n: n.m >= n.p,
        "arXiv:2407.21783, section 3.3.2",
    ),
    "chimera": ClosedForm(
        ("(P-2)/(2M+P-2)", lambda n: (n.p - 2) / (2 * n.m + n.p - 2)),
        ("P/2+1+min(r, P-1-r)", lambda n, r: n.p // 2 + 1 + min(r, n.p - 1 - r)),
        2,
        "equal stages, F = B, M a multiple of P",
        lambda n: n.m % n.p == 0,
        "arXiv:2107.06925, Table 2 (smallest and largest worker; between them our count)",
    ),
    "zb-h1": ClosedForm(
        ("(P-1)/(3M+P-1)", lambda n: (n.p - 1) / (3 * n.m + n.p - 1)),
        ("min(P, M)", lambda n, r: min(n.p, n.m)),
        1,
        "F = I = W, M at least P",
        lambda n: n.m >= n.p,
        "arXiv:2401.10241, Table 2; in flight section 2.3",
    ),
    "zb-h2": ClosedForm(
        None,
        ("min(2P-1, M)", lambda n, r: min(2 * n.p - 1, n.m)),
        1,
        "only the bubble within a worker's span is published",
        lambda n: False,
        "arXiv:2401.10241, Table 2 and section 2.3",
    ),
}
NO_FORM = ClosedForm(
    None, None, 1, "no closed form is published that we could verify", lambda n: False, "-"
)


def closed_form(table: ScheduleTable) -> tuple[ClosedForm, Shape]:
    """Find what papers print for a schedule."""
    shape = Shape(table.num_workers, table.num_microbatches, table.stages_per_worker)
    fallback = NO_FORM._replace(weight_copies=table.num_pipes)
    return CLOSED_FORMS.get(table.name, fallback), shape
