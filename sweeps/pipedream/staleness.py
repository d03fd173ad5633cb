"""Delays and weight versions of PipeDream: by depth, their distribution, and under messages.

Every op takes one slot, and a run has 40 microbatches for each stage, so that half of it is steady.
Under messages a backward takes two forwards.
"""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.files import provenance
from pipejax.results import Staleness
from pipejax.typing import Float, Int, NumpyArray
from sweeps.kit.command import write

STAGES = (*range(2, 33), 40, 50, 64, 80, 100, 128, 150)
SHOWN = (8, 32)  # stages whose delays are counted one by one; the first one also under messages
PER_STAGE = 40  # microbatches
LINKS = ("delay", "queued", "blocking", "rendezvous")
MESSAGES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # time of a message / that of a forward
BACKWARD = 2.0  # time of a backward / that of a forward, under messages
SHARE = {"units": "1"}
DELAY = {"units": "block updates"}


def sweep(
    stages: Sequence[int] = STAGES,
    shown: Sequence[int] = SHOWN,
    messages: Sequence[float] = MESSAGES,
) -> xr.Dataset:
    """Count the delays of every depth, and of one depth under messages.

    Args:
      stages: S of the first part.
      shown: those of them whose delays are counted one by one; the first one also under messages.
      messages: time of a message / that of a forward.

    Returns:
      max_delay and mean_delay, each with its law (stages) [block updates]; share (shown, delay) of
      the updates and stages with a delay; own_lag and weight_versions (stage) of the first of
      `shown`; max_delay_under_messages and mean_delay_under_messages (link, message).
    """
    console = Console(stderr=True)
    by_depth = {s: pj.staleness(_table(s)) for s in track(stages, "depths", console=console)}
    one_by_one = [by_depth[s] for s in shown]
    first = one_by_one[0]
    whole = np.array(stages)
    return xr.Dataset(
        {
            "max_delay": (
                "stages",
                [staleness.max_delay for staleness in by_depth.values()],
                DELAY,
            ),
            "mean_delay": (
                "stages",
                [staleness.mean_delay for staleness in by_depth.values()],
                DELAY,
            ),
            "max_delay_law": ("stages", whole**2 - whole / 2, {**DELAY, "law": "S^2 - S/2"}),
            "mean_delay_law": (
                "stages",
                (whole**2 - 1) / 2 + whole / 4,
                {**DELAY, "law": "(S^2 - 1)/2 + S/4"},
            ),
            "share": (("shown", "delay"), _shares(one_by_one), SHARE),
            "own_lag": ("stage", first.own_lag, {"units": "updates of the stage"}),
            "weight_versions": ("stage", first.weight_versions, SHARE),
            **_under_messages(shown[0], messages, console),
        },
        coords={
            "stages": whole,
            "shown": list(shown),
            "stage": np.arange(shown[0]),
            "link": list(LINKS),
            "message": list(messages),
        },
        attrs={
            "title": "Staleness of PipeDream",
            "schedule": "pipedream",
            "microbatches per stage": PER_STAGE,
            "backward / forward under messages": BACKWARD,
            **provenance(),
        },
    )


def _table(stages: int) -> pj.ScheduleTable:
    return pj.schedules.build("pipedream", num_workers=stages, num_microbatches=PER_STAGE * stages)


def _shares(stalenesses: Sequence[Staleness]) -> Float[NumpyArray, "shown delays"]:
    """Share of each delay; 0 above the largest one."""
    counts = [staleness.histogram() for staleness in stalenesses]
    longest = max(map(len, counts))
    return np.stack([np.pad(count / count.sum(), (0, longest - len(count))) for count in counts])


def _under_messages(
    stages: int, messages: Sequence[float], console: Console
) -> dict[str, tuple[tuple[str, str], NumpyArray, dict[str, str]]]:
    """Largest and mean delay under each link model and time of a message."""
    table = _table(stages)
    cases = [(link, message) for link in LINKS for message in messages]
    stalenesses = []
    for link, message in track(cases, "messages", console=console):
        costs = pj.Costs(forward=1.0, backward=BACKWARD, transmit=float(message))
        stalenesses.append(pj.staleness(table, costs, link=link))
    shape = len(LINKS), len(messages)
    largest: Int[NumpyArray, "links messages"] = np.reshape(
        [s.max_delay for s in stalenesses], shape
    )
    mean: Float[NumpyArray, "links messages"] = np.reshape(
        [s.mean_delay for s in stalenesses], shape
    )
    return {
        "max_delay_under_messages": (("link", "message"), largest, DELAY),
        "mean_delay_under_messages": (("link", "message"), mean, DELAY),
    }


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.sizes['stages']} depths of PipeDream")


if __name__ == "__main__":
    main()
