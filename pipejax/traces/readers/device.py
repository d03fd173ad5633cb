"""Work of a device: the budget of a step, and clocks of files from matched collectives."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.traces.record import NONE

_LAUNCH_LATENCY = 10.0  # from a launch until a kernel that waits for nothing starts [us]
_SPREAD_QUANTILE = 0.9
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
_WAITING_COPY = re.compile(r"cu(?:da)?Memcpy(?!\w*Async)")
_EXCHANGES = ("nccl", "nvshmem", "deep_ep")  # first letters of kernels that exchange data


class DeviceWork(NamedTuple):
    """Kernels, copies and memory sets of one device; times in microseconds."""

    launch: Float[NumpyArray, " works"]  # by the host; -inf if it was not recorded
    start: Float[NumpyArray, " works"]
    end: Float[NumpyArray, " works"]
    stream: Float[NumpyArray, " works"]
    is_exchange: Float[NumpyArray, " works"]  # with another device or the host
    collective: Float[NumpyArray, " works"]  # number of its `CollectiveKey`, NONE for other work

    @classmethod
    def empty(cls) -> "DeviceWork":
        """Return no work."""
        return cls(*np.zeros((6, 0)))

    def select(self, is_selected: NumpyArray) -> "DeviceWork":
        """Return the selected work."""
        return DeviceWork(*(values[is_selected] for values in self))

    def shift(self, delay: float) -> "DeviceWork":
        """Add a delay [us] to all times."""
        return self._replace(
            launch=self.launch + delay, start=self.start + delay, end=self.end + delay
        )

    def join(self, other: "DeviceWork") -> "DeviceWork":
        """Return this work and the other."""
        return DeviceWork(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class CollectiveKey(NamedTuple):
    """Collectives that are matched by their order."""

    communicator: str  # empty if it is unknown
    name: str
    size: int = NONE  # in bytes

    @classmethod
    def from_kernel(
        cls, kernel: str, communicator: str = "", size: int = NONE
    ) -> "CollectiveKey | None":
        """Return the collective of a kernel's name, such as ncclDevKernel_AllReduce_Sum_f32."""
        name = next((name for name in COLLECTIVES if name in kernel), None)
        if name is None or not is_exchange(kernel):
            return None
        return cls(communicator, name if communicator else kernel, size)


def number_collective(collective: CollectiveKey | None, collectives: dict[CollectiveKey, int]) -> int:
    """Return the number of a collective among those of all files; NONE for other work."""
    return NONE if collective is None else collectives.setdefault(collective, len(collectives))


def is_exchange(kernel: str) -> bool:
    """Return whether a kernel exchanges data with other devices, by its name."""
    return kernel.lower().startswith(_EXCHANGES)


def is_sync(call: str) -> bool:
    """Return whether a call of the CUDA runtime or driver waits for the device, by its name."""
    return "Synchronize" in call or bool(_WAITING_COPY.match(call))


def find_calls(
    correlation: Int[NumpyArray, " works"], call_correlation: Int[NumpyArray, " calls"]
) -> Int[NumpyArray, " works"]:
    """Return the position of the host call that launched each work; NONE without a record."""
    # look up each call by binary search in the sorted correlations
    order = np.append(np.argsort(call_correlation, kind="stable"), NONE)
    sorted_correlation = call_correlation[order[:-1]]
    position = np.searchsorted(sorted_correlation, correlation)
    has_call = np.append(sorted_correlation, NONE)[position] == correlation
    return np.where(has_call, order[position], NONE)


def find_launches(
    call: Int[NumpyArray, " works"], call_start: Float[NumpyArray, " calls"]
) -> Float[NumpyArray, " works"]:
    """Return the start of the call of each work; -inf without a record."""
    return np.append(call_start, -np.inf)[call]  # NONE is the last entry


def split_windows(
    work: DeviceWork,
    syncs: Float[NumpyArray, "2 syncs"],
    begin: Float[NumpyArray, " windows"],
    end: Float[NumpyArray, " windows"],
) -> Float[NumpyArray, "5 windows"]:
    """Divide windows of time into compute, exposed, blocking, launch-starved and stalled time.

    `syncs` are starts and ends of host calls that wait for the device. A kernel is
    launched when its host call begins, plus the usual latency of a launch.
    """
    issue = work.launch + _LAUNCH_LATENCY
    points = np.unique(np.concatenate([*work[1:3], issue[np.isfinite(issue)], *syncs, begin, end]))
    middle, length = (points[1:] + points[:-1]) / 2, np.diff(points)

    def covers(starts: NumpyArray, ends: NumpyArray) -> NumpyArray:
        # more intervals have begun before a point than have ended: it lies in one
        return np.searchsorted(np.sort(starts), middle) > np.searchsorted(np.sort(ends), middle)

    exchanges = work.is_exchange > 0
    order = np.argsort(work.start, kind="stable")
    next_work = np.searchsorted(work.start[order], middle)
    next_issue = np.append(issue[order], np.inf)[next_work]  # no work follows: none was launched
    conditions = [
        covers(work.start[~exchanges], work.end[~exchanges]),
        covers(work.start[exchanges], work.end[exchanges]),
        covers(*syncs),
        next_issue > middle,
        np.ones(len(middle), bool),
    ]
    # each piece counts for the first condition that holds
    part = np.argmax(conditions, axis=0)
    totals = np.stack(
        [
            np.append(0.0, np.cumsum(np.where(part == k, length, 0.0)))
            for k in range(len(conditions))
        ]
    )
    return totals[:, np.searchsorted(points, end)] - totals[:, np.searchsorted(points, begin)]


class ClockMatch(NamedTuple):
    """Lead of one clock over another by collectives that end together [us]."""

    lead: float
    spread: float  # of 90 % of the collectives around the lead
    num_collectives: int


def match_clocks(
    files: Sequence[Sequence[DeviceWork]], collectives: Sequence[CollectiveKey]
) -> list[ClockMatch | None]:
    """Return the lead of the clock of each file over that of the first; None without a match.

    Each file has the work of one or several ranks. All ranks of a collective end it together.
    Collectives without a known communicator count only if all ranks ran them equally often.
    """
    num_ranks = sum(map(len, files))
    ends = [dict(_collective_ends(ranks)) for ranks in files]
    rank_counts = [
        sum(len(file_ends[key]) for file_ends in ends if key in file_ends)
        for key in range(len(collectives))
    ]
    is_global = [
        bool(collective.communicator) or count == num_ranks
        for collective, count in zip(collectives, rank_counts, strict=True)
    ]
    common = [
        {key: np.median(value, axis=0) for key, value in file_ends.items() if is_global[key]}
        for file_ends in ends
    ]
    matches: list[ClockMatch | None] = [None] * len(files)
    if files:
        matches[0] = ClockMatch(0.0, 0.0, 0)
    while True:
        edges = [
            (edge.spread, k, edge)
            for k in range(len(files))
            if matches[k] is None
            for base, match in zip(common, matches, strict=True)
            if match is not None and (edge := _compare(base, common[k], collectives, match))
        ]
        if not edges:
            return matches
        _, k, matches[k] = min(edges)


def _collective_ends(ranks: Sequence[DeviceWork]) -> Iterator[tuple[int, NumpyArray]]:
    """Yield the ends of each collective (ranks, occurrences) that all its ranks ran as often."""
    by_key: dict[int, list[NumpyArray]] = {}
    for work in ranks:
        order = np.argsort(work.start, kind="stable")
        for key in np.unique(work.collective[work.collective >= 0]).astype(int).tolist():
            by_key.setdefault(key, []).append(work.end[order][work.collective[order] == key])
    for key, ends in by_key.items():
        if len({len(values) for values in ends}) == 1:
            yield key, np.stack(ends)


def _compare(
    base: Mapping[int, NumpyArray],
    other: Mapping[int, NumpyArray],
    collectives: Sequence[CollectiveKey],
    reference: ClockMatch,
) -> ClockMatch | None:
    """Compare the ends of collectives of two files; the first has a known clock."""
    leads: dict[object, list[NumpyArray]] = {}
    for key in sorted(base.keys() & other.keys()):
        if len(base[key]) == len(other[key]):
            # with known communicators all are alike, else each name is a guess of its own
            group = True if collectives[key].communicator else key
            leads.setdefault(group, []).append(other[key] - base[key])
    matches = []
    for parts in leads.values():
        values = np.concatenate(parts)
        lead = float(np.median(values))
        spread = float(np.quantile(np.abs(values - lead), _SPREAD_QUANTILE))
        matches.append(
            ClockMatch(reference.lead + lead, max(reference.spread, spread), len(values))
        )
    # one collective alone has no spread
    return min(matches, key=lambda match: (match.num_collectives == 1, match.spread), default=None)
