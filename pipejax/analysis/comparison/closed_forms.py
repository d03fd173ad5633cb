"""Closed forms that papers print for a schedule, with their assumptions."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipejax.schedules.cells.grammar import Grammar
from pipejax.schedules.table.table import ScheduleTable


class Shape(NamedTuple):
    """Sizes that the closed forms depend on."""

    p: int  # workers
    m: int  # microbatches
    v: int  # stages per worker
    f: int = 1  # couples of pipes, where there are several pipes: 2f pipes
    k: int = 1  # slices of a microbatch


Ratio = tuple[str, Callable[[Shape], float]]


class Times(NamedTuple):
    """Times of ops on one stage [s]."""

    f: float
    i: float
    w: float
    pair: float  # a fused pair, F&B

    @property
    def b(self) -> float:
        """A whole backward."""
        return self.i + self.w


class ClosedForm(NamedTuple):
    """Closed forms that a paper prints for a schedule."""

    source: str  # publication
    bubble_ratio: Ratio | None = None  # idle / total as text and as a function
    # activations that worker r holds, in stages (or slices of them), as text and as a function of
    # the shape and r
    in_flight: tuple[str, Callable[[Shape, int], int]] | None = None
    assumes: str = "equal stages"  # conditions under which the ratios are exact
    holds: Callable[[Shape], bool] = lambda n: True  # whether the shape fits these assumptions
    weight_copies: int = 1  # copies of the model's weights over all workers
    span_bubble_ratio: Ratio | None = None  # idle / total of the longest span of a worker
    # longest wait of a worker [s], as text and as a function of shape and times
    idle: tuple[str, Callable[[Shape, Times], float]] | None = None
    idle_assumes: str = ""  # conditions under which that is exact


_PIPELINE = ("(P-1)/(M+P-1)", lambda n: (n.p - 1) / (n.m + n.p - 1))
_LOOPED = ("(P-1)/(VM+P-1)", lambda n: (n.p - 1) / (n.v * n.m + n.p - 1))
_SLICED = ("(P-1)/(KM+P-1)", lambda n: (n.p - 1) / (n.k * n.m + n.p - 1))
_FUSED = "F = I, W at most I, max(F, B) <= F&B <= F + B"


def _span_ratio(text: str, idle: Callable[[int], int]) -> Ratio:
    """Return idle / total slots of a span with the six ops of each microbatch on two stages."""
    return f"x/(6M+x), x = {text}", lambda n: idle(n.p) / (6 * n.m + idle(n.p))


def _chimera_in_flight(n: Shape, r: int) -> int:
    apart = n.p // n.f  # workers from one couple of pipes to the next
    return n.p - apart // 2 + 1 + min(r % apart, apart - 1 - r % apart)


def _interleaved(n: Shape, r: int) -> int:
    return min(2 * (n.p - r - 1) + (n.v - 1) * n.p + 1, n.m * n.v)


CLOSED_FORMS: Mapping[str, ClosedForm] = {
    "gpipe": ClosedForm(
        "arXiv:1811.06965, section 2.3; arXiv:2104.04473, section 2.2",
        _PIPELINE,
        ("M", lambda n, r: n.m),
    ),
    "1f1b": ClosedForm(
        "arXiv:2104.04473, section 2.2", _PIPELINE, ("min(P-r, M)", lambda n, r: min(n.p - r, n.m))
    ),
    "eager-1f1b": ClosedForm(
        "arXiv:2211.05322",
        _PIPELINE,
        ("min(2(P-r)-1, M)", lambda n, r: min(2 * (n.p - r) - 1, n.m)),
    ),
    "interleaved-1f1b": ClosedForm(
        "arXiv:2104.04473, section 2.2.2; in flight arXiv:2503.01328, section 3",
        _LOOPED,
        ("min(2(P-r-1)+(V-1)P+1, MV)", _interleaved),
        "equal stages, M a multiple of P",
        holds=lambda n: n.m % n.p == 0,
    ),
    "circular": ClosedForm(
        "AI-Hypercomputer/maxtext, base.yml", _LOOPED, ("MV", lambda n, r: n.m * n.v)
    ),
    "looped-bfs": ClosedForm(
        "arXiv:2407.21783, section 3.3.2",
        _LOOPED,
        ("MV", lambda n, r: n.m * n.v),
        "equal stages, M at least P",
        holds=lambda n: n.m >= n.p,
    ),
    "chimera": ClosedForm(
        "arXiv:2107.06925, Tables 2 and 3 (smallest and largest worker; between them our count)",
        (
            "(P-2f)/(2fM+P-2f), 2f pipes",
            lambda n: (n.p - 2 * n.f) / (2 * n.f * n.m + n.p - 2 * n.f),
        ),
        ("P-P/2f+1+min(q, P/f-1-q), q = r mod P/f", _chimera_in_flight),
        "equal stages, F = B, M a multiple of P",
        holds=lambda n: n.m % n.p == 0,
    ),
    "dualpipe": ClosedForm(
        "deepseek-ai/DualPipe, table of the README",
        ("(P-2)/(3M+P-2)", lambda n: (n.p - 2) / (3 * n.m + n.p - 2)),
        ("P+1", lambda n, r: n.p + 1),
        "F = I = W, F&B = F + B",
        idle=("(P/2-1)(F&B+B-3W)", lambda n, t: (n.p / 2 - 1) * (t.pair + t.b - 3 * t.w)),
        idle_assumes=_FUSED,
    ),
    "dualpipe-v": ClosedForm(
        "deepseek-ai/DualPipe, table of the README, of 2P stages",
        ("(P-1)/(3M+P-1)", lambda n: (n.p - 1) / (3 * n.m + n.p - 1)),
        ("2P+1", lambda n, r: 2 * n.p + 1),
        "F = I = W, F&B = F + B",
        idle=("(P-1)(F&B+B-3W)", lambda n, t: (n.p - 1) * (t.pair + t.b - 3 * t.w)),
        idle_assumes=_FUSED,
    ),
    "zb-h1": ClosedForm(
        "arXiv:2401.10241, Table 2; in flight section 2.3",
        ("(P-1)/(3M+P-1)", lambda n: (n.p - 1) / (3 * n.m + n.p - 1)),
        ("min(P, M)", lambda n, r: min(n.p, n.m)),
        "F = I = W, M at least P",
        holds=lambda n: n.m >= n.p,
    ),
    "zb-h2": ClosedForm(
        "arXiv:2401.10241, Table 2 and section 2.3",
        in_flight=("min(2P-1, M)", lambda n, r: min(2 * n.p - 1, n.m)),
        assumes="F = I = W, M at least 2P-1",
        holds=lambda n: n.m >= 2 * n.p - 1,
        span_bubble_ratio=("0", lambda n: 0.0),
    ),
    "zb-v": ClosedForm(
        "arXiv:2401.10241, section 6; arXiv:2405.15362, section 3",
        in_flight=("2 min(P, M)", lambda n, r: 2 * min(n.p, n.m)),
        assumes="F = I = W, M at least 2P-1",
        holds=lambda n: n.m >= 2 * n.p - 1,
        span_bubble_ratio=("0", lambda n: 0.0),
    ),
    "v-half": ClosedForm(
        "arXiv:2405.15362, the authors' generator",
        in_flight=("2 min(P//2+1, M)", lambda n, r: 2 * min(n.p // 2 + 1, n.m)),
        assumes="F = I = W, P at least 3, M at least P",
        holds=lambda n: n.m >= n.p >= 3,
        span_bubble_ratio=_span_ratio("3P-7 (P even), 3P-4 (odd)", lambda p: 3 * p - 7 + p % 2 * 3),
    ),
    "v-min": ClosedForm(
        "arXiv:2405.15362, the authors' generator",
        in_flight=("2 min((P+4)//3, M)", lambda n, r: 2 * min((n.p + 4) // 3, n.m)),
        assumes="F = I = W, M at least P",
        holds=lambda n: n.m >= n.p >= 2,
        span_bubble_ratio=_span_ratio(
            "4P-7 (3 divides P), 4P-5", lambda p: 4 * p - (5 if p % 3 else 7)
        ),
    ),
    "seq-1f1b": ClosedForm(
        "arXiv:2406.03488: 1F1B of KM units; in flight thunlp/Seq1F1B, issue 4",
        _SLICED,
        ("min(P-r-1+K, KM)", lambda n, r: min(n.p - r - 1 + n.k, n.k * n.m)),
        "equal stages and slices",
    ),
    "terapipe": ClosedForm(
        "arXiv:2102.07988: GPipe of KM units",
        _SLICED,
        ("KM", lambda n, r: n.k * n.m),
        "equal stages and slices",
    ),
    "slimpipe": ClosedForm(
        "arXiv:2504.14519: interleaved 1F1B of KM units, a microbatch and its warm-up in flight",
        ("(P-1)/(KVM+P-1)", lambda n: (n.p - 1) / (n.k * n.v * n.m + n.p - 1)),
        ("min(KV+2(P-r-1), KVM)", lambda n, r: min(n.k * n.v + 2 * (n.p - r - 1), n.k * n.v * n.m)),
        "equal stages and slices",
    ),
}
NO_FORM = ClosedForm(
    "-", assumes="no closed form is published that we could verify", holds=lambda n: False
)


def closed_form(table: ScheduleTable) -> tuple[ClosedForm, Shape]:
    """Return the closed form of a schedule, and the shape to evaluate it at."""
    couples, slices = max(table.num_pipes // 2, 1), table.grammar.slices
    sizes = table.num_workers, table.num_microbatches // slices, table.stages_per_worker
    is_usual = table.grammar == Grammar(slices=slices)
    form = CLOSED_FORMS.get(table.name, NO_FORM) if is_usual else NO_FORM
    shape = Shape(*sizes, couples, slices)
    return form._replace(weight_copies=table.num_pipes), shape
