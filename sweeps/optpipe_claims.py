"""The claims of OptPipe (arXiv 2510.05186), one verdict each, read off datasets.

Where one of its claims says "up to" or "over", it holds if one problem of the grid reaches the
figure; the range over all of them is shown beside it. What the proven bound leaves possible is
said too: no solver gets beyond that.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import xarray as xr

from sweeps.claims import Claim, Verdict, command
from sweeps.optpipe_cases import METHODS, OPTIMUM
from sweeps.optpipe_published import Row, rows

Data = Mapping[str, xr.Dataset]
Check = Callable[[Data], Verdict]
STORES = ("grid", "published", "refinement")
OTHERS = tuple(name for name in METHODS if name != "ada-offload")  # AdaOffload is of the paper
TIGHT, AMPLE = 1.0, 1.5  # peaks of 1F1B: tight is below, ample from there on
HIDDEN = 1.0  # forwards: what an offload may take for PipeOffload to hide it behind compute
SAME = 1e-9  # relative: sums of times closer than this are equal
PRINTED = 5e-5  # half of the last printed digit of an idle share
JOB = 1000  # steps of the job that is looked at


def _best(values: xr.DataArray, methods: Sequence[str]) -> xr.DataArray:
    """The least of some methods that fit; missing where none does."""
    return values.sel(schedule=list(methods)).min("schedule")


def _where(values: xr.DataArray) -> str:
    """Name the problem with the largest value."""
    at = values.stack(case=values.dims)
    at = at.isel(case=int(at.fillna(-np.inf).argmax("case")))
    link = float(at.host_link)
    return f"{at.model.item()}, M={int(at.microbatches)}, limit {float(at.limit):g}, " + (
        f"offload in {link:g} F" if np.isfinite(link) else "no host link"
    )


def _percent(values: xr.DataArray) -> str:
    low, high = (round(100 * float(end), 1) + 0.0 for end in (values.min(), values.max()))
    return f"{low:.1f} to {high:.1f} %"  # + 0.0: no minus before 0


def _idle_saved(data: Data, methods: Sequence[str], limits: slice, reason: str) -> Verdict:
    """At least half of the idle time of the best of some methods is saved somewhere."""
    grid = data["grid"].sel(limit=limits)
    theirs = _best(grid.bubble_ratio, methods).where(grid.solved)
    saved = 1 - grid.bubble_ratio.sel(schedule=OPTIMUM) / theirs
    possible = 1 - grid.bound_bubble_ratio / theirs
    holds = float(saved.max()) >= 0.5
    return Verdict(
        f"{_percent(saved)}, most at {_where(saved)}; the bound allows {_percent(possible)}, most "
        f"at {_where(possible)}",
        holds,
        "" if holds else reason,
    )


def _throughput(data: Data, limits: slice, published: float, reason: str) -> Verdict:
    """More steps per second than PipeOffload somewhere, by more than the published share.

    Only where an offload takes no longer than a forward: PipeOffload is made for such links.
    """
    grid = data["grid"].sel(limit=limits)
    grid = grid.isel(host_link=np.flatnonzero(grid.host_link.values <= HIDDEN))
    theirs = grid.makespan.sel(schedule="pipe-offload").where(grid.solved)
    gain = theirs / grid.makespan.sel(schedule=OPTIMUM) - 1
    possible = theirs / grid.lower_bound - 1
    above = int((gain > published).sum())
    return Verdict(
        f"{_percent(gain)}, above at {above} of {int(gain.notnull().sum())} problems, most at "
        f"{_where(gain)}; the bound allows {_percent(possible)}",
        above > 0,
        "" if above else reason,
    )


def _trains(data: Data) -> Verdict:
    """A schedule that fits is found wherever the zero-bubble schedules do not fit."""
    grid = data["grid"]
    none = grid.out_of_memory.sel(schedule=["zb-1p", "zb-2p"]).all("schedule") & grid.solved
    runs = none & grid.makespan.sel(schedule=OPTIMUM).notnull()
    return Verdict(
        f"{int(runs.sum())} of {int(none.sum())} problems in which both run out of "
        "memory are solved",
        bool(none.any() & (runs == none).all()),
    )


def _never_worse(data: Data, methods: Sequence[str]) -> Verdict:
    """The optimum is at most as long as each method that fits."""
    grid = data["grid"]
    theirs = grid.makespan.sel(schedule=list(methods)).where(grid.solved)
    ours = grid.makespan.sel(schedule=OPTIMUM)
    worse = theirs * (1 + SAME) < ours
    gain = theirs / ours - 1
    return Verdict(
        f"worse at {int(worse.sum())} of {int(theirs.notnull().sum())} schedules that "
        f"fit; faster by {_percent(gain)}",
        not bool(worse.any()),
        "the search ended before it had tried all heuristics" if bool(worse.any()) else "",
    )


def _largest(data: Data) -> Verdict:
    """Every problem of the largest pipe has a schedule; how far from the best it can be."""
    grid = data["grid"]
    at = grid.isel(model=int(grid.workers.argmax("model")))
    count = int(at.solved.sum())
    found = int(at.makespan.sel(schedule=OPTIMUM).notnull().sum())
    proven = int((at.gap <= SAME).sum())
    return Verdict(
        f"{at.model.item()}: {found} of {count} problems have a schedule, {proven} of "
        f"them proven best; gap at most {100 * float(at.gap.max()):.1f} %, half of them "
        f"below {100 * float(at.gap.median()):.2g} %",
        found == count,
    )


def _refined(data: Data, against: str) -> Verdict:
    """A job that starts at once and takes what is better ends first."""
    jobs = data["refinement"].time
    jobs = jobs.isel(steps=int(abs(jobs.steps - JOB).argmin("steps")))
    gain = jobs.sel(policy=against) / jobs.sel(policy="refine") - 1
    return Verdict(
        f"{_percent(gain)} longer after {int(jobs.steps)} steps",
        bool((gain >= -SAME).all() & (gain > SAME).any()),
    )


def _searched(row: Row, data: Data) -> Verdict:
    """Ours is at most the printed figure, to its last digit."""
    at = data["published"].sel(row=row.words)
    ours, bound = float(at.ours), float(at.bound)
    proof = " (optimal)" if at.status.item() == "optimal" else f" (bound {bound:.4f})"
    return Verdict(f"{ours:.4f}{proof}, by {at.source.item()}", ours <= row.published + PRINTED)


FLUSH = (
    "a step here ends with a flush: filling and draining the pipe is idle time of every schedule; "
    "where memory is tight the bound is low, so whether more can be saved is open"
)
ONE_STAGE = "ours has one stage per worker and whole backwards"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "1",
        "idle time is up to 50 % less than that of 1F1B, ZB-1p, ZB-2p and PipeOffload at "
        "the same memory limit",
        "up to 50 %",
        "optpipe_memory.pdf",
        partial(_idle_saved, methods=OTHERS, limits=slice(None), reason=FLUSH),
    ),
    Claim(
        "1, tight",
        "the same, below the memory of 1F1B",
        "",
        "optpipe_memory.pdf",
        partial(_idle_saved, methods=OTHERS, limits=slice(None, TIGHT - SAME), reason=FLUSH),
    ),
    Claim(
        "1, AdaOffload",
        "the same against all of these and AdaOffload, where it starts",
        "",
        "optpipe_memory.pdf",
        partial(
            _idle_saved,
            methods=tuple(METHODS),
            limits=slice(None),
            reason=(
                "AdaOffload plans for the same times and limits and is often near the optimum; "
                + FLUSH
            ),
        ),
    ),
    Claim(
        "2, tight",
        "more throughput than PipeOffload under tight memory",
        "over 20 %",
        "optpipe_memory.pdf",
        partial(_throughput, limits=slice(None, TIGHT - SAME), published=0.2, reason=ONE_STAGE),
    ),
    Claim(
        "2, ample",
        "more throughput than PipeOffload with ample memory",
        "over 30 %",
        "optpipe_memory.pdf",
        partial(_throughput, limits=slice(AMPLE, None), published=0.3, reason=ONE_STAGE),
    ),
    Claim(
        "3",
        "trains where zero-bubble schedules run out of memory",
        "yes",
        "optpipe_memory.pdf",
        _trains,
    ),
    Claim(
        "4",
        "the optimum is never worse than ZB-1p and ZB-2p where they fit",
        "never",
        "optpipe_memory.pdf",
        partial(_never_worse, methods=("zb-1p", "zb-2p")),
    ),
    Claim(
        "4, all",
        "nor than any other method that fits",
        "never",
        "optpipe_memory.pdf",
        partial(_never_worse, methods=tuple(METHODS)),
    ),
    Claim(
        "5",
        "models up to 14.2B on up to 16 accelerators are solved",
        "14.2B, 16",
        "optpipe_gaps.pdf",
        _largest,
    ),
    Claim(
        "6, wait",
        "training while the search goes on ends before waiting for the optimum",
        "",
        "optpipe_training.pdf",
        partial(_refined, against="wait"),
    ),
    Claim(
        "6, stay",
        "and before staying with the best heuristic",
        "",
        "optpipe_training.pdf",
        partial(_refined, against="stay"),
    ),
    *(
        Claim(
            f"7, {row.words}",
            "idle share in a worker's own span is at most that of the published "
            f"search in {row.setting.activations:g} activations",
            f"{row.published:.4f}",
            "",
            partial(_searched, row),
        )
        for row in rows()
    ),
)


def main() -> None:
    """Print the table of claims and keep it beside the datasets."""
    stores = {name: f"optpipe_{name}.zarr" for name in STORES}
    command(__doc__ or "", CLAIMS, stores, "optpipe_claims.json")


if __name__ == "__main__":
    main()
