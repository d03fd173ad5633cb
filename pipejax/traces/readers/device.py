"""Device work: division of steps into times by cause, and clocks matched by collectives."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.traces.record import NONE

# launch by the host (-inf if unknown), start and end [us]; stream; whether it exchanges data;
# number of its collective, NONE if it is no collective
Work = Float[NumpyArray, "6 works"]
# names of work that exchanges data; "copy" leaves its device
EXCHANGE = re.compile(r"nccl|nvshmem|deep_?ep|^copy$", re.IGNORECASE)
_COLLECTIVE = re.compile("AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv")
Key = tuple[str, str, int]  # communicator (empty if unknown), name and size of a collective
_LAUNCH_LATENCY = 10.0  # from the launch of a kernel that waits for nothing to its start [us]
_SPREAD_QUANTILE, _MAX_SPREAD = 0.9, 1000.0  # [us]; a larger spread of collectives is no match


def number_collective(
    name: str, communicator: str, size: int, keys: dict[Key, int], *, is_exchange: bool
) -> int:
    """Return the number of a kernel's collective, a new one in `keys` if needed; else NONE."""
    match = _COLLECTIVE.search(name) if is_exchange else None
    if match is None:
        return NONE
    return keys.setdefault((communicator, match[0] if communicator else name, size), len(keys))


def split_windows(
    work: Work,
    syncs: Float[NumpyArray, "2 syncs"],
    begin: Float[NumpyArray, " windows"],
    end: Float[NumpyArray, " windows"],
) -> Float[NumpyArray, "5 windows"]:
    """Divide windows from `begin` to `end` into times by cause, as in `StepBudget`; all in us."""
    # All starts and ends cut time into pieces: slices 0-5 and 3-8 make pieces 0-3, 3-5 and 5-8.
    # Each piece has one cause: the first condition that holds.
    launch, start, stop, _, is_exchange, _ = work[:, np.argsort(work[1], kind="stable")]
    issue, exchanges = launch + _LAUNCH_LATENCY, is_exchange > 0
    points = np.unique(np.concatenate([start, stop, issue[np.isfinite(issue)], *syncs, begin, end]))
    middle, length = (points[1:] + points[:-1]) / 2, np.diff(points)

    def covers(starts: NumpyArray, ends: NumpyArray) -> Bool[NumpyArray, " pieces"]:
        # a piece lies in an interval if more intervals have begun than ended before its middle
        return np.searchsorted(np.sort(starts), middle) > np.searchsorted(np.sort(ends), middle)

    def following(values: NumpyArray, points: NumpyArray) -> NumpyArray:
        """Return the value at the first point after the middle of each piece; inf without one."""
        return np.append(values, np.inf)[np.searchsorted(points, middle)]

    # after the last work of a window, the device waits for other devices, not for its host
    has_work = following(start, start) < following(np.sort(end), np.sort(end))
    conditions = [
        covers(start[~exchanges], stop[~exchanges]),
        covers(start[exchanges], stop[exchanges]),
        covers(*syncs),
        has_work & (following(issue, start) > middle),
        np.ones(len(middle), bool),
    ]
    cause = np.argmax(conditions, axis=0)
    times = np.where(cause == np.arange(len(conditions))[:, None], length, 0.0)
    totals = np.pad(np.cumsum(times, axis=1), ((0, 0), (1, 0)))  # (causes, points)
    return totals[:, np.searchsorted(points, end)] - totals[:, np.searchsorted(points, begin)]


class ClockMatch(NamedTuple):
    """Lead of one clock over another, from collectives that end together on both [us]."""

    lead: float
    spread: float  # largest difference from the lead, of the best 90 % of the collectives
    num_collectives: int


def match_clocks(
    files: Sequence[Sequence[NumpyArray]], keys: Sequence[Key]
) -> list[ClockMatch | None]:
    """Return the lead of each file's clock over the first file's clock; None without a match."""
    # All ranks of a collective end it together. A collective without a communicator counts if all
    # ranks ran it; of more than two ranks, each sends to and receives from others.
    ends_by_rank = [[_collective_ends(work) for work in ranks] for ranks in files]
    counts = Counter(key for ranks in ends_by_rank for by_key in ranks for key in by_key)
    num_ranks = sum(map(len, files))
    usable = {
        key
        for key, (communicator, name, _) in enumerate(keys)
        if (communicator or counts[key] == num_ranks) and ("SendRecv" not in name or num_ranks == 2)
    }
    ends = [_median_ends(ranks) for ranks in ends_by_rank]
    matches: dict[int, ClockMatch | None] = {}
    known_ends: dict[int, NumpyArray] = {}
    for k in [*range(len(files))] * len(files):  # a file may match only one that comes later
        if matches.get(k) is None:
            match = _match_two_clocks(known_ends, ends[k], keys) if k else ClockMatch(0.0, 0.0, 0)
            matches[k] = match
            lead = 0.0 if match is None else match.lead
            for key in usable & ends[k].keys() if match else ():
                known_ends.setdefault(key, ends[k][key] - lead)
    return [matches[k] for k in range(len(files))]


def _collective_ends(work: Work) -> dict[int, NumpyArray]:
    """Return the ends [us] of each collective of a rank (uses), in order, by its number."""
    _, _, stop, _, _, key = work[:, np.argsort(work[1], kind="stable")]
    numbers = np.unique(key[key >= 0]).astype(int).tolist()
    return {number: stop[key == number] for number in numbers}


def _median_ends(ranks: Sequence[Mapping[int, NumpyArray]]) -> dict[int, NumpyArray]:
    """Return median ends of each collective over a file's ranks, if all ran it equally often."""
    by_key: dict[int, list[NumpyArray]] = {}
    for key, ends in itertools.chain.from_iterable(by_rank.items() for by_rank in ranks):
        by_key.setdefault(key, []).append(ends)
    return {key: np.median(e, axis=0) for key, e in by_key.items() if len({*map(len, e)}) == 1}


def _match_two_clocks(
    base: Mapping[int, NumpyArray], other: Mapping[int, NumpyArray], keys: Sequence[Key]
) -> ClockMatch | None:
    """Return the match of two clocks with the least spread, from ends of collectives [us]."""
    # collectives with communicators give one match; each name without a communicator gives another
    leads: dict[int, list[float]] = {}
    for key in base.keys() & other.keys():
        if len(base[key]) == len(other[key]):
            communicator, _, _ = keys[key]
            group = -1 if communicator else key
            leads.setdefault(group, []).extend((other[key] - base[key]).tolist())
    matches = []
    for values in leads.values():
        lead = float(np.median(values))
        spread = float(np.quantile(np.abs(np.array(values) - lead), _SPREAD_QUANTILE))
        if spread < _MAX_SPREAD:
            matches.append(ClockMatch(lead, spread, len(values)))
    return min(matches, key=lambda match: (match.num_collectives == 1, match.spread), default=None)
