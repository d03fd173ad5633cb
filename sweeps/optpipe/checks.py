"""Judges of the claims of OptPipe: gains over opponents, and checks on datasets.

Idle time is the makespan minus the work of a worker. A claim about several opponents is one about
the best of those that fit at each problem. What the proven bound leaves possible is said too: no
solver gets beyond that.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from sweeps.kit.claims import Threshold, Verdict
from sweeps.optpipe.cases import (
    INTERLEAVED,
    METHODS,
    OPTIMUM,
    OPTIMUM_INTERLEAVED,
    OWN,
    SHARED,
    WHOLE,
)
from sweeps.optpipe.published import Row

Data = Mapping[str, xr.Dataset]
Check = Callable[[Data], Verdict]
# of the methods, AdaOffload is of the paper itself, and PipeOffload stands there twice
OTHERS = tuple(name for name in METHODS if name not in ("ada-offload", WHOLE))
ONE_STAGE = tuple(name for name in METHODS if name not in (*INTERLEAVED, WHOLE))  # per worker
SPLIT = tuple(name for name in OTHERS if name in ONE_STAGE)
TIGHT, AMPLE = 1.0, 1.5  # peaks of 1F1B: tight is below, ample from there on
JOB = 1000  # steps of the job that is looked at
EVERY = slice(None)
SAME = Threshold(
    1e-9, "sums of times that differ by a relative 1e-9 are equal", "ours: rounding of floats"
)
BELOW, FROM = slice(None, TIGHT - SAME.value), slice(AMPLE, None)
HIDDEN = Threshold(
    1.0,
    "where an offload takes a forward at most",
    "ours: PipeOffload is made for links that compute hides (arXiv 2503.01328)",
)
PRINTED = Threshold(5e-5, "half of the last printed digit", "arXiv 2401.10241, four digits")
REVIEWS = "arXiv 2510.05186, as its public reviews report it"
IDLE_SAVED = Threshold(0.5, "50 % less, at one problem at least", "arXiv 2510.05186, abstract")
TIGHT_GAIN = Threshold(0.2, "over 20 % more, at one problem at least", REVIEWS)
AMPLE_GAIN = Threshold(0.3, "over 30 % more, at one problem at least", REVIEWS)
GOOD = Threshold(0.05, "within 5 % of the best known", "ours")


class Gain(NamedTuple):
    """Gains of the optimum over an opponent, problem by problem.

    Attributes:
      found: the gain; missing where the opponent does not fit.
      possible: the most that the proven bound leaves.
      least: what is claimed.
      peaks: activations that the optimum and its opponent hold, in words.
    """

    gain: xr.DataArray
    possible: xr.DataArray
    least: Threshold
    peaks: str = ""

    @property
    def holds(self) -> bool:
        """Return whether one problem reaches the claim."""
        return bool((self.gain > self.least.value).any())

    @property
    def verdict(self) -> Verdict:
        """The verdict, with what the bound leaves."""
        return Verdict(
            f"{_percent(self.gain)}, most at {_where(self.gain)}{self.peaks}; "
            f"{_reached(self.gain, self.least.value)}; the bound allows "
            f"{_percent(self.possible)}",
            self.holds,
            "" if self.holds else _excluded(self.possible, self.least.value),
        )


def _best(values: xr.DataArray, methods: Sequence[str]) -> xr.DataArray:
    """The least of some methods that fit; missing where none does."""
    return values.sel(schedule=list(methods)).min("schedule")


def _where(values: xr.DataArray) -> str:
    """Name the problem with the largest value."""
    at = values.stack(case=values.dims)
    at = at.isel(case=int(at.fillna(-np.inf).argmax("case")))
    link = float(at.host_link)
    offload = f"offload in {link:g} F" if np.isfinite(link) else "no host link"
    shared = ", link shared by two" if str(at.sharing.item()) == SHARED else ""
    return (
        f"{at.model.item()}, M={int(at.microbatches)}, limit {float(at.limit):g}, {offload}{shared}"
    )


def _percent(values: xr.DataArray) -> str:
    low, high = (round(100 * float(end), 1) + 0.0 for end in (values.min(), values.max()))
    return f"{low:.1f} to {high:.1f} %"  # + 0.0: no minus before 0


def _reached(values: xr.DataArray, figure: float) -> str:
    count = int((values > figure).sum())
    return f"more than {100 * figure:g} % at {count} of {int(values.notnull().sum())} problems"


def idle_saved(
    data: Data, methods: Sequence[str], limits: slice = EVERY, ours: str = OPTIMUM
) -> Gain:
    """Share of the idle time of the best of some methods that is saved."""
    grid = data["grid"].sel(limit=limits)
    theirs = _best(grid.idle_time, methods).where(grid.solved)
    saved = 1 - grid.idle_time.sel(schedule=ours, drop=True) / theirs
    possible = (1 - (_bound(grid, ours) - grid.work) / theirs).where(saved.notnull())
    return Gain(saved, possible, IDLE_SAVED)


def _bound(grid: xr.Dataset, ours: str) -> xr.DataArray:
    """Return the lower bound of schedules with so many stages per worker [s]."""
    if ours == OPTIMUM:
        return grid.lower_bound
    return grid.proven.sel(schedule=ours, drop=True)


def _excluded(possible: xr.DataArray, figure: float) -> str:
    """Why a figure is not reached: because it cannot be, or because the search stops short."""
    allowed, count = int((possible > figure).sum()), int(possible.notnull().sum())
    if not allowed:
        return (
            "proven: the bound of every problem allows less, for filling the pipe is idle time of "
            "any schedule, and the opponents have little besides"
        )
    return f"the bound excludes it at {count - allowed} of {count} problems; {allowed} are open"


def throughput(data: Data, limits: slice, least: Threshold, opponent: str, ours: str) -> Gain:
    """Compute the gain in steps per second over PipeOffload, on links that it is made for."""
    grid = data["grid"].sel(limit=limits)
    grid = grid.isel(host_link=np.flatnonzero(grid.host_link.values <= HIDDEN.value))
    theirs = grid.makespan.sel(schedule=opponent, drop=True).where(grid.solved)
    gain = theirs / grid.makespan.sel(schedule=ours, drop=True) - 1
    possible = (theirs / _bound(grid, ours) - 1).where(gain.notnull())
    return Gain(gain, possible, least, _peaks(grid, gain, ours, opponent))


def _peaks(grid: xr.Dataset, gain: xr.DataArray, *methods: str) -> str:
    """Say what each method holds where the gain is largest: limits are equal, peaks are not."""
    at = gain.stack(case=gain.dims).fillna(-np.inf)
    there = {str(name): at.isel(case=int(at.argmax("case")))[name] for name in gain.dims}
    peak = grid.peak.sel(there)
    held = [f"{float(peak.sel(schedule=name)):.1f}" for name in methods]
    return f" (in {held[0]} activations against {held[1]})"


def in_its_memory(data: Data, opponent: str) -> Gain:
    """More throughput than PipeOffload in at most the memory that PipeOffload holds itself."""
    grid = data["grid"].isel(host_link=np.flatnonzero(data["grid"].host_link <= HIDDEN.value))
    theirs = grid.makespan.sel(schedule=opponent, drop=True).where(grid.solved)
    held = grid.peak.sel(schedule=opponent, drop=True) / grid.workers  # peaks of 1F1B
    # the last limit that is not above what it holds; -1: all are above
    place = np.searchsorted(grid.limit.values, held.values * (1 + SAME.value), side="right") - 1
    index = held.copy(data=place).rename(limit="asked").clip(0)
    ours, bound = (
        values.isel(limit=index).drop_vars("limit").rename(asked="limit").where(place >= 0)
        for values in (
            grid.makespan.sel(schedule=OPTIMUM, drop=True).where(grid.solved),
            grid.lower_bound.where(grid.solved),
        )
    )
    gain = theirs / ours - 1
    return Gain(gain, (theirs / bound - 1).where(gain.notnull()), TIGHT_GAIN)


def against_either(
    data: Data, split: Callable[[Data], Gain], whole: Callable[[Data], Gain]
) -> Verdict:
    """A claim against PipeOffload with split backwards and with whole ones."""
    both = {"split": split(data), "whole": whole(data)}
    words = "; ".join(
        f"against {name} backwards {_percent(gain.gain)}, {_reached(gain.gain, gain.least.value)}"
        for name, gain in both.items()
    )
    answers = {gain.holds for gain in both.values()}
    if len(answers) == 1:
        holds = answers.pop()
        return Verdict(words, holds, "" if holds else both["whole"].verdict.reason)
    reason = "no source says how its PipeOffload runs backwards; each opponent has a row of its own"
    return Verdict(words, None, reason, "the opponent")


def judged(gain: Callable[[Data], Gain]) -> Check:
    """Check one gain by itself."""
    return lambda data: gain(data).verdict


def trains(data: Data) -> Verdict:
    """A schedule that fits is found wherever the zero-bubble schedules do not fit."""
    grid = data["grid"]
    none = grid.out_of_memory.sel(schedule=["zb-1p", "zb-2p"]).all("schedule") & grid.solved
    runs = none & grid.makespan.sel(schedule=OPTIMUM).notnull()
    holds = bool(none.any() & (runs == none).all())
    return Verdict(
        f"{int(runs.sum())} of {int(none.sum())} problems in which both run out of "
        "memory are solved",
        holds,
        "" if holds else "no schedule was found there",
    )


def never_worse(data: Data, methods: Sequence[str], ours: str = OPTIMUM) -> Verdict:
    """The optimum is at most as long as each method that fits."""
    grid = data["grid"]
    ours_seconds = grid.makespan.sel(schedule=ours, drop=True)
    theirs = grid.makespan.sel(schedule=list(methods)).where(grid.solved & ours_seconds.notnull())
    worse = theirs * (1 + SAME.value) < ours_seconds
    gain = theirs / ours_seconds - 1
    holds = not bool(worse.any())
    return Verdict(
        f"worse at {int(worse.sum())} of {int(theirs.notnull().sum())} schedules that "
        f"fit; faster by {_percent(gain)}",
        holds,
        "" if holds else _why_worse(grid, methods, worse),
    )


def _why_worse(grid: xr.Dataset, methods: Sequence[str], worse: xr.DataArray) -> str:
    """Say what stops the optimum: its bound where methods have more stages, else the search."""
    theirs = grid.makespan.sel(schedule=list(methods)).where(worse)
    excluded = theirs * (1 + SAME.value) < grid.lower_bound
    words = (
        f"proven at {int(excluded.sum())} of {int(worse.sum())} of these, where the bound of one "
        "stage per worker is above them; the search ended before it found as good at the others"
    )
    if not set(methods) <= set(INTERLEAVED):
        return words
    two = grid.makespan.sel(schedule=OPTIMUM_INTERLEAVED, drop=True)
    also, is_solved = theirs * (1 + SAME.value) < two, worse & two.notnull()
    return (
        f"{words}; with two stages per worker, as they have, the search is worse at "
        f"{int((is_solved & also).sum())} of {int(is_solved.sum())}"
    )


def sharing_costs(data: Data) -> Verdict:
    """Say what sharing a host link costs each method."""
    grid = data["grid"]
    both = grid.solved.all("sharing") & np.isfinite(grid.host_link)
    times = grid.makespan.where(both)
    loss = times.sel(sharing=SHARED) / times.sel(sharing=OWN) - 1
    lost = grid.out_of_memory.sel(sharing=SHARED) & ~grid.out_of_memory.sel(sharing=OWN)
    methods = {"optimised": OPTIMUM, "PipeOffload": "pipe-offload", "AdaOffload": "ada-offload"}
    losses = [
        f"{label} loses {_percent(loss.sel(schedule=name))}"
        + (f", and does not fit any more at {count}" if count else "")
        for label, name in methods.items()
        for count in [int((lost & both).sel(schedule=name).sum())]
    ]
    ours, theirs = (loss.sel(schedule=list(n)) for n in ((OPTIMUM,), ("ada-offload",)))
    holds = bool(ours.mean() <= theirs.mean())
    return Verdict("; ".join(losses), holds, "" if holds else "its schedules use the link more")


def good_in_time(data: Data) -> Verdict:
    """Say when half of the problems of each size are within 5 % of the best."""
    grid = data["grid"]
    curve = grid.excess_over_best.sel(share=0.5)
    when = grid.solve_time.where(curve <= GOOD.value).min("solve_time")
    end = grid.excess_over_best.isel(solve_time=-1)
    parts = [
        f"{int(size)} ops: half within 5 % after {float(when.sel(ops=size)):.2g} s, nine tenths "
        f"within {100 * float(end.sel(ops=size, share=0.9)):.2g} % at the end"
        for size in grid.ops.values
    ]
    holds = bool(when.notnull().all())
    return Verdict("; ".join(parts), holds, "" if holds else "the largest need longer solves")


def largest_is_solved(data: Data) -> Verdict:
    """Every problem of the largest pipe has a schedule; how far from the best it can be."""
    grid = data["grid"]
    at = grid.isel(model=int(grid.workers.argmax("model")))
    count = int(at.solved.sum())
    solved = int(at.makespan.sel(schedule=OPTIMUM).notnull().sum())
    proven = int((at.gap <= SAME.value).sum())
    return Verdict(
        f"{at.model.item()}: {solved} of {count} problems have a schedule, {proven} of "
        f"them proven best; gap at most {100 * float(at.gap.max()):.1f} %, half of them "
        f"below {100 * float(at.gap.median()):.2g} %",
        solved == count,
        "" if solved == count else "no schedule was found in time",
    )


def refined_ends_first(data: Data, against: str) -> Verdict:
    """A job that starts at once and takes what is better ends first."""
    jobs = data["refinement"].time
    jobs = jobs.isel(steps=int(abs(jobs.steps - JOB).argmin("steps")))
    gain = jobs.sel(policy=against) / jobs.sel(policy="refine") - 1
    holds = bool((gain >= -SAME.value).all() & (gain > SAME.value).any())
    return Verdict(
        f"{_percent(gain)} longer after {int(jobs.steps)} steps",
        holds,
        "" if holds else "the first schedules are so good that nothing is won",
    )


def at_most_printed(row: Row, data: Data) -> Verdict:
    """Ours is at most the printed figure, to its last digit."""
    at = data["published"].sel(row=row.words)
    ours, bound = float(at.ours), float(at.bound)
    proof = " (optimal)" if at.status.item() == "optimal" else f" (bound {bound:.4f})"
    holds = ours <= row.published + PRINTED.value
    open_part = f"not proven either way: the bound is {bound:.4f}"
    reason = "proven optimal for the printed times" if "optimal" in proof else open_part
    return Verdict(f"{ours:.4f}{proof}, by {at.source.item()}", holds, "" if holds else reason)
