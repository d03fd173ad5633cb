"""PipeDream's delay in closed form, with free messages and with messages that take time.

Every op takes one slot. With free messages updates end together all the time, which is where
S^2 - S/2 comes from; whatever message, however short, breaks these ties. Delays are counted in the
steady state of tables of eight microbatches for each stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.files import provenance
from sweeps.kit.claims import OURS, SHOWN, Claim, Threshold, Verdict
from sweeps.kit.command import write

STORE = "finding_delays.zarr"
STAGES = tuple(range(2, 49))
PER_STAGE = 8  # microbatches: the steady state is the middle half of them


class Case(NamedTuple):
    """Differences of a run.

    Attributes:
      message: its time, of an op.
      backward: its time, of a forward.
      link: link model.
      admission: of the schedule.
    """

    message: float = 0.0
    backward: float = 1.0
    link: str = "delay"
    admission: str = "each-stage"


FREE = ("free messages", "first stage limited")
SHORT = ("message 1/8", "message 3/4")
LONG = ("message 5/4", "message 4")
ELSEWHERE = ("message 1", "blocking message 1/8", "backward of 2 forwards")
CASES: Mapping[str, Case] = dict(
    zip(
        (*FREE, *SHORT, *LONG, *ELSEWHERE),
        (
            Case(),
            Case(admission="first-stage"),
            *map(Case, (0.125, 0.75, 1.25, 4.0)),
            Case(1.0),
            Case(0.125, link="blocking"),
            Case(backward=2.0),
        ),
        strict=True,
    )
)


def largest(stages: Any, *, ties: bool = True) -> Any:
    """Closed form of the largest delay.

    Args:
      stages: S, at least 2.
      ties: whether updates end together, as they do where messages take no time.

    Returns:
      Block updates.

    Example:
      >>> largest(7), largest(8), largest(8, ties=False)
      (45, 60, 63)
    """
    return stages**2 - (stages + 1) // 2 if ties else stages**2 - 1


def mean(stages: Any, *, late: bool = False) -> Any:
    """Closed form of the mean delay.

    Args:
      stages: S, at least 2.
      late: whether a message takes longer than an op.

    Returns:
      Block updates; beyond (S^2 - 1)/2 it is S/4 for even S and (S - 1/S)/4 for odd S.

    Example:
      >>> mean(8), mean(3), mean(8, late=True)
      (33.5, 4.666666666666667, 31.5)
    """
    return (stages**2 - 1) / 2 + (0 if late else (stages**2 // 4) / stages)


def sweep(stages: Sequence[int] = STAGES) -> xr.Dataset:
    """Count the delays of every case at every depth.

    Args:
      stages: S.

    Returns:
      max_delay and mean_delay (case, stages) [block updates].
    """
    stalenesses = [
        [_counted(case, s) for s in track(stages, name, console=Console(stderr=True))]
        for name, case in CASES.items()
    ]
    axes, units = ("case", "stages"), {"units": "block updates"}
    return xr.Dataset(
        {
            "max_delay": (
                axes,
                [[staleness.max_delay for staleness in row] for row in stalenesses],
                units,
            ),
            "mean_delay": (
                axes,
                [[staleness.mean_delay for staleness in row] for row in stalenesses],
                units,
            ),
        },
        coords={"case": list(CASES), "stages": list(stages)},
        attrs={
            "title": "Delays of PipeDream",
            "microbatches per stage": PER_STAGE,
            **provenance(),
        },
    )


def _counted(case: Case, stages: int) -> pj.results.Staleness:
    table = pj.schedules.build(
        "pipedream",
        num_workers=stages,
        num_microbatches=PER_STAGE * stages,
        admission=case.admission,
    )
    costs = pj.Costs(forward=1.0, backward=case.backward, transmit=case.message)
    return pj.staleness(table, costs, link=case.link)


Data = Mapping[str, xr.Dataset]
SAME = Threshold(1e-9, "equal but for rounding", "ours: means of integers in double precision")


def _deviations(data: Data, names: Sequence[str], **form: bool) -> tuple[xr.DataArray, ...]:
    """Return counts less both closed forms: ties for the largest, late for the mean."""
    at = data["finding_delays"].sel(case=list(names))
    ties, late = form["ties"], form["late"]
    return at.max_delay - largest(at.stages, ties=ties), at.mean_delay - mean(at.stages, late=late)


def _exact(apart: xr.DataArray) -> Verdict:
    wrong = abs(apart) > SAME.value
    depths = f"S = {int(apart.stages[0])} to {int(apart.stages[-1])}"
    words = f"exactly so at {int((~wrong).sum())} of {wrong.size} counts, {depths}"
    first = apart.stages[wrong.any("case")].values[:1]
    return Verdict(words, not first.size, *(f"not so from S = {s} on" for s in first))


def _both_exact(data: Data, names: Sequence[str], **form: bool) -> Verdict:
    return _exact(xr.concat(_deviations(data, names, **form), "case"))


def _elsewhere(data: Data) -> Verdict:
    """Say how far the closed forms of free messages are off where they do not hold."""
    words = []
    for name in ELSEWHERE:
        largest_off, average = (
            float(deviation.isel(case=0, stages=-1))
            for deviation in _deviations(data, [name], ties=True, late=False)
        )
        words.append(f"{name}: {largest_off:+g} and {average:+.3g}")
    depth = int(data["finding_delays"].stages[-1])
    return Verdict(f"largest and mean at S = {depth}, {'; '.join(words)}", None)


def _claims() -> Iterator[Claim]:
    """One claim for each closed form, and one for where they end."""
    forms: tuple[tuple[str, str, Callable[[Data], Verdict]], ...] = (
        (
            "e1",
            "PipeDream's largest delay is floor(S^2 - S/2) where messages are free, whichever "
            "stages limit what enters",
            lambda data: _exact(_deviations(data, FREE, ties=True, late=False)[0]),
        ),
        (
            "e2",
            "its mean is (S^2 - 1)/2 + S/4 for even S and (S^2 - 1)/2 + (S - 1/S)/4 for odd S",
            lambda data: _exact(_deviations(data, FREE, ties=True, late=False)[1]),
        ),
        (
            "e3",
            "links that delay a message by less than an op (1/8, 3/4) make the largest S^2 - 1 and "
            "leave the mean as it is: the S/2 is that of updates which end together",
            lambda data: _both_exact(data, SHORT, ties=False, late=False),
        ),
        (
            "e4",
            "links that delay it by more (5/4, 4) make the largest S^2 - 1, the mean (S^2 - 1)/2",
            lambda data: _both_exact(data, LONG, ties=False, late=True),
        ),
    )
    for number, text, check in forms:
        yield Claim(number, text, "", "", check, OURS, thresholds=(SAME,))
    yield Claim(
        "e5",
        "how far both closed forms of free messages are off elsewhere",
        "",
        "",
        _elsewhere,
        SHOWN,
        why="it says where they end",
    )


CLAIMS = tuple(_claims())


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.max_delay.size} counts")


if __name__ == "__main__":
    main()
