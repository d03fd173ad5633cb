"""GPipe and 1F1B take equally long, or not: that is a property of the link.

Exact closed forms of both under every link model: how many messages stand on the critical path, and
where which is the faster. The same over a grid of message times, run by the evaluator; and the
bubble ratio of six schedules against the message time.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.analysis import comparison_text, smallest, versus
from pipejax.files import provenance
from pipejax.typing import Float, NumpyArray
from sweeps.kit.cases import build
from sweeps.kit.claims import OURS, Claim, Threshold, Verdict
from sweeps.kit.command import write

STORE = "finding_links.zarr"
PER_WORKER, PER_PAIR, PER_DIRECTION = (
    f"rendezvous, a queue per {scope}" for scope in ("worker", "pair", "direction")
)
LINKS: Mapping[str, str | pj.Links] = {
    "delay": "delay",
    "queued": "queued",
    "blocking": "blocking",
    PER_WORKER: "rendezvous",
    PER_PAIR: pj.Links("rendezvous", queues="pair"),
    PER_DIRECTION: pj.Links("rendezvous", queues="direction"),
}
ONE_SUM = ("delay", "blocking")  # whose forms are one sum: their messages are counted at all sizes
COMPARED = ("gpipe", "1f1b")
SHOWN = (*COMPARED, "chimera", "chimera-asymmetric", "hanayo, 2 waves", "interleaved-1f1b")
DRAWN_LINKS = ("delay", "blocking", PER_WORKER)
WORKERS, ROUNDS = (2, 3, 4, 8, 16), (1, 2, 4, 8)  # M is so many rounds of P microbatches
COUNTED_WORKERS, COUNTED_MICROBATCHES = range(2, 13), range(1, 37)
BACKWARDS = (0.5, 1.0, 2.0, 3.0)  # of a forward
MESSAGES = np.geomspace(1e-3, 10.0, 25)  # of a forward; one is 1
AT = {"workers": 8, "rounds": 2, "backward": 2.0}  # 8 workers, 16 microbatches, B = 2F
CURVE = np.linspace(0.0, 2.0, 41)  # message times of the figure, of a forward
PARAMETERS = ("F", "B", "c")
ANY, LONGER = "any F, B and c", "B >= F"
DOMAINS: Mapping[str, Sequence[str] | Mapping[str, pj.Costs]] = {
    ANY: PARAMETERS,
    LONGER: {  # any F, B - F and c
        "F": pj.Costs(forward=1.0, backward=1.0, transmit=0.0),
        "(B - F)": pj.Costs(forward=0.0, backward=1.0, transmit=0.0),
        "c": pj.Costs(forward=0.0, backward=0.0, transmit=1.0),
    },
}
EQUAL, ONE_NEVER, OTHER_NEVER, DEPENDS = (
    "equal",
    "one is never slower",
    "other is never slower",
    "it depends",
)


def sweep() -> xr.Dataset:
    """Compare both on all sizes.

    Returns:
      messages and sums by (schedule, counted_link, counted_workers, counted_microbatches): of the
      exact forms, messages on the critical path and how many sums there are; verdict and where_1f1b
      by (link, workers, rounds, domain): is 1F1B ("one") or GPipe ("other") never slower there, and
      where 1F1B is at most as long; ratio of 1F1B to GPipe by (link, workers, rounds, backward,
      message); bubble_ratio by (case, drawn_link, curve).
    """
    verdicts = [
        [[[_versus(link, p, r * p, domain) for domain in DOMAINS.values()] for r in ROUNDS]
         for p in WORKERS]
        for link in LINKS
    ]  # fmt: skip
    ratio = [[[_ratio(link, p, r * p) for r in ROUNDS] for p in WORKERS] for link in LINKS]
    counts = np.array(
        [
            [[[_count(name, link, p, m) for m in COUNTED_MICROBATCHES] for p in COUNTED_WORKERS]
             for link in ONE_SUM]
            for name in COMPARED
        ]
    )  # fmt: skip
    counted = ("schedule", "counted_link", "counted_workers", "counted_microbatches")
    sizes = ("link", "workers", "rounds")
    return xr.Dataset(
        {
            "messages": (counted, counts[..., 0]),
            "sums": (counted, counts[..., 1]),
            "verdict": ((*sizes, "domain"), np.array(verdicts)[..., 0]),
            "where_1f1b": ((*sizes, "domain"), np.array(verdicts)[..., 1]),
            "ratio": ((*sizes, "backward", "message"), np.array(ratio)),
            "bubble_ratio": (
                ("case", "drawn_link", "curve"),
                [[_bubbles(case, link) for link in DRAWN_LINKS] for case in SHOWN],
            ),
        },
        coords={
            "schedule": list(COMPARED),
            "counted_link": list(ONE_SUM),
            "counted_workers": list(COUNTED_WORKERS),
            "counted_microbatches": list(COUNTED_MICROBATCHES),
            "link": list(LINKS),
            "workers": list(WORKERS),
            "rounds": list(ROUNDS),
            "domain": list(DOMAINS),
            "backward": list(BACKWARDS),
            "message": MESSAGES,
            "case": list(SHOWN),
            "drawn_link": list(DRAWN_LINKS),
            "curve": CURVE,
        },
        attrs={
            "title": "GPipe against 1F1B by link model",
            "times": "of a forward; c is the transmit time of a message",
            "transfers": "of a rendezvous, in the order of the message-free run with F = 1, B = 2",
            **provenance(),
        },
    )


def _table(name: str, workers: int, microbatches: int) -> pj.ScheduleTable:
    return pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)


def _form(
    name: str,
    link: str,
    workers: int,
    microbatches: int,
    parameters: Sequence[str] | Mapping[str, pj.Costs] = PARAMETERS,
) -> pj.results.Formula:
    table = _table(name, workers, microbatches)
    return pj.formula(pj.lower(table, link=LINKS[link], step_end=False), parameters)


def _count(name: str, link: str, workers: int, microbatches: int) -> tuple[int, int]:
    """Messages of the sum with the most work, and number of sums."""
    facets = _form(name, link, workers, microbatches).facets
    return int(max(facets)[-1]), len(facets)


def _versus(link: str, workers: int, microbatches: int, domain: Any) -> tuple[str, str]:
    gpipe, one_f_one_b = (_form(name, link, workers, microbatches, domain) for name in COMPARED)
    comparison = versus(one_f_one_b, gpipe)
    regions = (" and ".join(region.texts) or "everywhere" for region in comparison.one_at_most)
    return comparison.verdict, " or ".join(regions)


def _ratio(link: str, workers: int, microbatches: int) -> Float[NumpyArray, "backwards messages"]:
    """1F1B against GPipe on the grid of times."""
    backward, message = np.meshgrid(BACKWARDS, MESSAGES, indexing="ij")
    costs = pj.Costs(forward=1.0, backward=backward.ravel(), transmit=message.ravel())
    gpipe, one_f_one_b = (
        np.asarray(
            pj.makespans(pj.lower(_table(n, workers, microbatches), link=LINKS[link]), costs)
        )
        for n in COMPARED
    )
    return (one_f_one_b / gpipe).reshape(backward.shape)


def _bubbles(case: str, link: str) -> Float[NumpyArray, " messages"]:
    """Bubble ratio along the curve, at the size of the example."""
    workers, backward = int(AT["workers"]), AT["backward"]
    microbatches = int(AT["rounds"]) * workers
    table = build(case, workers, microbatches, {"F": 1, "B": backward})
    costs = pj.Costs.per_worker(table, forward=1.0, backward=backward, transfer=CURVE)
    makespan = pj.makespans(pj.lower(table, link=LINKS[link]), costs)
    return 1 - microbatches * (1.0 + backward) / np.asarray(makespan)


Data = Mapping[str, xr.Dataset]
SAME = Threshold(1e-9, "equal but for rounding: within 1e-9", "ours: float64, sums of 200 terms")
LARGE = Threshold(0.10, "differ by a tenth", "ours: beyond what a link model is known to be off")
SMALL = Threshold(0.01, "equal within 1 %", "ours: what published step times are repeated within")


def expected_messages(schedule: str, link: str, workers: int, microbatches: int) -> int:
    """Messages on the critical path, in closed form.

    Args:
      schedule: one of `COMPARED`.
      link: one of `ONE_SUM`.
      workers: P, at least 2.
      microbatches: M.

    Returns:
      Their number.

    Example:
      >>> expected_messages("1f1b", "delay", 8, 16)  # 2(P - 1)(M / P + 1) - 2 where P divides M
      40
    """
    if link == "blocking":
        both = 2 * (microbatches + workers - 2)
        if schedule == "gpipe" or microbatches == 1:
            return both
        return both - 1 if workers > 2 else microbatches + 1
    if schedule == "gpipe":
        return 2 * (workers - 1)
    rounds = -(-microbatches // workers)
    last = microbatches - workers * (rounds - 1)  # microbatches of the last round
    return 2 * (workers - 1) * rounds + 2 * max(last, 2) - 4


def _counts_hold(data: Data, link: str) -> Verdict:
    """Each form is one sum with so many messages, at every size."""
    at = data["finding_links"].sel(counted_link=link)
    expected = xr.apply_ufunc(
        np.vectorize(lambda *where: expected_messages(where[0], link, *where[1:])),
        at.schedule,
        at.counted_workers,
        at.counted_microbatches,
    )
    wrong = (at.messages != expected) | (at.sums != 1)
    return Verdict(
        f"at {int(wrong.size - wrong.sum())} of {wrong.size} forms",
        not bool(wrong.any()),
        "" if not bool(wrong.any()) else "another count, or more than one sum",
    )


def _is_never_slower(data: Data, links: Sequence[str], word: str, **sizes: Any) -> Verdict:
    """With B >= F one of both is never slower: by the exact forms, and at every run."""
    at = data["finding_links"].sel(
        link=list(links), domain=LONGER, backward=slice(1, None), **sizes
    )
    proven = at.verdict.isin([word, EQUAL])
    sign = 1 if word == ONE_NEVER else -1
    against = sign * (at.ratio - 1) > SAME.value
    holds = bool(proven.all()) and not bool(against.any())
    return Verdict(
        f"proven by the exact forms at {int(proven.sum())} of {proven.size} sizes and links; "
        f"contradicted at {int(against.sum())} of {against.size} runs; ratios "
        f"{float(at.ratio.min()):.2f} to {float(at.ratio.max()):.2f}",
        holds,
        "" if holds else "the other is faster somewhere",
    )


def _queued_border(data: Data) -> Verdict:
    """1F1B is at most as long exactly where 2M c >= P(M - 1)(F + B)."""
    at = data["finding_links"].sel(link="queued", workers=slice(3, None), domain=ANY)
    borders = [
        (str(at.where_1f1b.sel(workers=p, rounds=r).item()), _border(int(p), int(r * p)))
        for p in at.workers.values
        for r in at.rounds.values
    ]
    same = sum(exact == expected for exact, expected in borders)
    return Verdict(
        f"that inequality alone at {same} of {len(borders)} sizes",
        same == len(borders),
        "" if same == len(borders) else "another border",
    )


def _border(workers: int, microbatches: int) -> str:
    work = -workers * (microbatches - 1)
    counts = smallest([Fraction(work), Fraction(work), Fraction(2 * microbatches)])
    return comparison_text(PARAMETERS, counts)


def _both_win(data: Data) -> Verdict:
    """With one queue per worker GPipe is the faster somewhere, where B is below F."""
    at = data["finding_links"].sel(
        link=PER_WORKER, workers=slice(3, None), rounds=slice(2, None), domain=ANY
    )
    depends = at.verdict == DEPENDS
    return Verdict(
        f"it depends at {int(depends.sum())} of {depends.size} sizes",
        bool(depends.all()),
        "" if bool(depends.all()) else "one of them is never slower",
    )


def _example(data: Data) -> Verdict:
    """8 x 16, B = 2F, c = F: far slower, equal, far faster."""
    at = data["finding_links"].sel(AT).sel(message=1.0, method="nearest").ratio
    more = {name: float(at.sel(link=name)) - 1 for name in DRAWN_LINKS}
    delay, blocking, meeting = more.values()
    holds = delay > LARGE.value and abs(blocking) < SMALL.value and meeting < -LARGE.value
    return Verdict(
        ", ".join(f"{name} {100 * excess:+.1f} %" for name, excess in more.items()),
        holds,
        "" if holds else "the link changes less",
    )


def _claims() -> Iterator[Claim]:
    """The claims; their figure is one."""
    for number, text, check, thresholds in (
        ("a1", "messages on the critical path, delay links: 2(P - 1) of GPipe, 2(P - 1)k + "
         "2 max(r, 2) - 4 of 1F1B, k rounds of P microbatches with r in the last; any F, B, c",
         lambda data: _counts_hold(data, "delay"), ()),
        ("a2", "blocking links: 2(M + P - 2) of GPipe, and of 1F1B one less from P = 3, M = 2 on",
         lambda data: _counts_hold(data, "blocking"), ()),
        ("a3", "B >= F: 1F1B is never faster by delay, or by rendezvous with a queue per pair of "
         "workers, from two rounds on",
         lambda data: _is_never_slower(
             data, ("delay", PER_PAIR), OTHER_NEVER, rounds=slice(2, None)), (SAME,)),
        ("a4", "B >= F: 1F1B is never slower by blocking, or by rendezvous with a queue per worker "
         "or per direction, from P = 3 on",
         lambda data: _is_never_slower(
             data, ("blocking", PER_WORKER, PER_DIRECTION), ONE_NEVER, workers=slice(3, None)),
         (SAME,)),
        ("a5", "queued links, from P = 3 on: 1F1B is as fast or faster exactly where "
         "2M c >= P(M - 1)(F + B)", _queued_border, ()),
        ("a6", "with a queue per worker GPipe wins somewhere where B < F, from P = 3 and two "
         "rounds on", _both_win, ()),
        ("a7", "at 8 x 16, B = 2F, c = F 1F1B is far slower by delay, equal by blocking, far "
         "faster by rendezvous", _example, (LARGE, SMALL)),
    ):  # fmt: skip
        yield Claim(number, text, "", "finding_links.pdf", check, OURS, thresholds=thresholds)


CLAIMS = tuple(_claims())


def main() -> None:
    """Write the dataset."""
    jax.config.update("jax_enable_x64", True)
    write(__doc__ or "", sweep, lambda data: f"{data.messages.size} forms, {data.ratio.size} runs")


if __name__ == "__main__":
    main()
