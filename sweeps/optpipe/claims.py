"""The claims of OptPipe (arXiv 2510.05186), one verdict each, read off datasets.

One rule for all: where a claim says "up to" or "over", it holds if one problem of the grid reaches
the figure; the range over all problems is shown beside it, and at how many it is reached. Idle time
is the makespan minus the work of a worker. A claim about several opponents is one about the best of
those that fit at each problem. What the proven bound leaves possible is said too: no solver gets
beyond that.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import xarray as xr

from sweeps.kit.claims import OURS, Claim, Verdict, command
from sweeps.optpipe.cases import (
    INTERLEAVED,
    METHODS,
    OPTIMUM,
    OPTIMUM_INTERLEAVED,
    OWN,
    SHARED,
)
from sweeps.optpipe.published import Row, rows

Data = Mapping[str, xr.Dataset]
Check = Callable[[Data], Verdict]
STORES = ("grid", "published", "refinement")
OTHERS = tuple(name for name in METHODS if name != "ada-offload")  # AdaOffload is of the paper
ONE_STAGE = tuple(name for name in METHODS if name not in INTERLEAVED)  # per worker
TIGHT, AMPLE = 1.0, 1.5  # peaks of 1F1B: tight is below, ample from there on
HIDDEN = 1.0  # forwards: what an offload may take for PipeOffload to hide it behind compute
SAME = 1e-9  # relative: sums of times closer than this are equal
PRINTED = 5e-5  # half of the last printed digit of an idle share
JOB = 1000  # steps of the job that is looked at
EVERY = slice(None)
BELOW, FROM = slice(None, TIGHT - SAME), slice(AMPLE, None)


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
    count = int((values >= figure).sum())
    return f"{100 * figure:g} % at {count} of {int(values.notnull().sum())} problems"


def _idle_saved(
    data: Data, methods: Sequence[str], limits: slice = EVERY, ours: str = OPTIMUM
) -> Verdict:
    """At least half of the idle time of the best of some methods is saved somewhere."""
    grid = data["grid"].sel(limit=limits)
    theirs = _best(grid.idle_time, methods).where(grid.solved)
    saved = 1 - grid.idle_time.sel(schedule=ours, drop=True) / theirs
    possible = (1 - (_bound(grid, ours) - grid.work) / theirs).where(saved.notnull())
    holds = bool(saved.max() >= 0.5)
    return Verdict(
        f"{_percent(saved)}, most at {_where(saved)}; {_reached(saved, 0.5)}; the bound allows "
        f"{_percent(possible)}",
        holds,
        "" if holds else _excluded(possible, 0.5),
    )


def _bound(grid: xr.Dataset, ours: str) -> xr.DataArray:
    """What no schedule with so many stages per worker goes below [s]."""
    if ours == OPTIMUM:
        return grid.lower_bound
    return grid.proven.sel(schedule=ours, drop=True)


def _excluded(possible: xr.DataArray, figure: float) -> str:
    """Why a figure is not reached: because it cannot be, or because the search stops short."""
    allowed, count = int((possible >= figure).sum()), int(possible.notnull().sum())
    if not allowed:
        return (
            "proven: the bound of every problem allows less, for filling the pipe is idle time of "
            "any schedule, and the opponents have little besides"
        )
    return f"the bound excludes it at {count - allowed} of {count} problems; {allowed} are open"


def _throughput(data: Data, limits: slice, published: float, opponent: str, ours: str) -> Verdict:
    """More steps per second than PipeOffload somewhere, by more than the published share.

    Only where an offload takes no longer than a forward: PipeOffload is made for such links.
    """
    grid = data["grid"].sel(limit=limits)
    grid = grid.isel(host_link=np.flatnonzero(grid.host_link.values <= HIDDEN))
    theirs = grid.makespan.sel(schedule=opponent, drop=True).where(grid.solved)
    gain = theirs / grid.makespan.sel(schedule=ours, drop=True) - 1
    possible = (theirs / _bound(grid, ours) - 1).where(gain.notnull())
    holds = bool((gain > published).any())
    return Verdict(
        f"{_percent(gain)}, most at {_where(gain)}; {_reached(gain, published)}; the bound allows "
        f"{_percent(possible)}",
        holds,
        "" if holds else _excluded(possible, published),
    )


def _trains(data: Data) -> Verdict:
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


def _never_worse(data: Data, methods: Sequence[str], ours: str = OPTIMUM) -> Verdict:
    """The optimum is at most as long as each method that fits."""
    grid = data["grid"]
    found = grid.makespan.sel(schedule=ours, drop=True)
    theirs = grid.makespan.sel(schedule=list(methods)).where(grid.solved & found.notnull())
    worse = theirs * (1 + SAME) < found
    gain = theirs / found - 1
    two = grid.makespan.sel(schedule=OPTIMUM_INTERLEAVED, drop=True)
    also = theirs * (1 + SAME) < two
    known = worse & two.notnull()
    return Verdict(
        f"worse at {int(worse.sum())} of {int(theirs.notnull().sum())} schedules that "
        f"fit; faster by {_percent(gain)}",
        not bool(worse.any()),
        ""
        if not bool(worse.any())
        else f"they have two stages per worker, which halves the time to fill the pipe: with two "
        f"stages the search is worse at {int((known & also).sum())} of {int(known.sum())} of these",
    )


def _shared(data: Data) -> Verdict:
    """What sharing a host link costs, and what of it the optimum takes."""
    grid = data["grid"]
    both = grid.solved.all("sharing") & np.isfinite(grid.host_link)
    times = grid.makespan.where(both)
    loss = times.sel(sharing=SHARED) / times.sel(sharing=OWN) - 1
    lost = grid.out_of_memory.sel(sharing=SHARED) & ~grid.out_of_memory.sel(sharing=OWN)
    methods = {"optimised": OPTIMUM, "PipeOffload": "pipe-offload", "AdaOffload": "ada-offload"}
    each = [
        f"{label} loses {_percent(loss.sel(schedule=name))}"
        + (f", and does not fit any more at {count}" if count else "")
        for label, name in methods.items()
        for count in [int((lost & both).sel(schedule=name).sum())]
    ]
    ours, theirs = (loss.sel(schedule=list(n)) for n in ((OPTIMUM,), ("ada-offload",)))
    holds = bool(ours.mean() <= theirs.mean())
    return Verdict("; ".join(each), holds, "" if holds else "its schedules use the link more")


def _quality(data: Data) -> Verdict:
    """How fast schedules are good: half of the problems of each size within 5 % of the best."""
    grid = data["grid"]
    curve = grid.excess_over_best.sel(share=0.5)
    when = grid.solve_time.where(curve <= 0.05).min("solve_time")
    end = grid.excess_over_best.isel(solve_time=-1)
    parts = [
        f"{int(size)} ops: half within 5 % after {float(when.sel(ops=size)):.2g} s, nine tenths "
        f"within {100 * float(end.sel(ops=size, share=0.9)):.2g} % at the end"
        for size in grid.ops.values
    ]
    holds = bool(when.notnull().all())
    return Verdict("; ".join(parts), holds, "" if holds else "the largest need longer solves")


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
        "" if found == count else "no schedule was found in time",
    )


def _refined(data: Data, against: str) -> Verdict:
    """A job that starts at once and takes what is better ends first."""
    jobs = data["refinement"].time
    jobs = jobs.isel(steps=int(abs(jobs.steps - JOB).argmin("steps")))
    gain = jobs.sel(policy=against) / jobs.sel(policy="refine") - 1
    holds = bool((gain >= -SAME).all() & (gain > SAME).any())
    return Verdict(
        f"{_percent(gain)} longer after {int(jobs.steps)} steps",
        holds,
        "" if holds else "the first schedules are so good that nothing is won",
    )


def _searched(row: Row, data: Data) -> Verdict:
    """Ours is at most the printed figure, to its last digit."""
    at = data["published"].sel(row=row.words)
    ours, bound = float(at.ours), float(at.bound)
    proof = " (optimal)" if at.status.item() == "optimal" else f" (bound {bound:.4f})"
    holds = ours <= row.published + PRINTED
    open_part = f"not proven either way: the bound is {bound:.4f}"
    reason = "proven optimal for the printed times" if "optimal" in proof else open_part
    return Verdict(f"{ours:.4f}{proof}, by {at.source.item()}", holds, "" if holds else reason)


MEMORY = "optpipe_memory.pdf"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "1",
        "idle time is up to 50 % less than that of 1F1B, zero-bubble and PipeOffload schedules, "
        "the best of them, at the same memory limit",
        "up to 50 %",
        MEMORY,
        partial(_idle_saved, methods=tuple(n for n in OTHERS if n in ONE_STAGE)),
    ),
    Claim(
        "1, tight",
        "the same, below the memory of 1F1B",
        "",
        MEMORY,
        partial(_idle_saved, methods=tuple(n for n in OTHERS if n in ONE_STAGE), limits=BELOW),
        kind=OURS,
    ),
    Claim(
        "1, interleaved",
        "the same against the interleaved ones too, with two stages per worker",
        "",
        MEMORY,
        partial(_idle_saved, methods=OTHERS, ours=OPTIMUM_INTERLEAVED),
        kind=OURS,
    ),
    Claim(
        "1, AdaOffload",
        "the same against all with one stage per worker and AdaOffload, where it starts",
        "",
        MEMORY,
        partial(_idle_saved, methods=ONE_STAGE),
        kind=OURS,
    ),
    Claim(
        "2, tight",
        "more throughput than PipeOffload under tight memory",
        "over 20 %",
        MEMORY,
        partial(_throughput, limits=BELOW, published=0.2, opponent="pipe-offload", ours=OPTIMUM),
    ),
    Claim(
        "2, ample",
        "more throughput than PipeOffload with ample memory",
        "over 30 %",
        MEMORY,
        partial(_throughput, limits=FROM, published=0.3, opponent="pipe-offload", ours=OPTIMUM),
    ),
    *(
        Claim(
            f"2, {word}, interleaved",
            f"{text}, both with two stages per worker",
            "",
            MEMORY,
            partial(
                _throughput,
                limits=limits,
                published=figure,
                opponent="pipe-offload, interleaved",
                ours=OPTIMUM_INTERLEAVED,
            ),
            kind=OURS,
        )
        for word, text, limits, figure in (
            ("tight", "over 20 % more under tight memory", BELOW, 0.2),
            ("ample", "over 30 % more with ample memory", FROM, 0.3),
        )
    ),
    Claim(
        "1, whole",
        "idle time is up to 50 % less than that of 1F1B with whole backwards, which PipeOffload's "
        "own runtime has with one stage per worker",
        "",
        MEMORY,
        partial(_idle_saved, methods=("1f1b",)),
        kind=OURS,
    ),
    Claim(
        "2, whole",
        "over 30 % more throughput than that with ample memory",
        "",
        MEMORY,
        partial(_throughput, limits=FROM, published=0.3, opponent="1f1b", ours=OPTIMUM),
        kind=OURS,
    ),
    Claim("3", "trains where zero-bubble schedules run out of memory", "yes", MEMORY, _trains),
    Claim(
        "4",
        "the optimum is never worse than ZB-1p and ZB-2p where they fit",
        "",
        MEMORY,
        partial(_never_worse, methods=("zb-1p", "zb-2p")),
        kind=OURS,
    ),
    Claim(
        "4, all",
        "nor than any other method with one stage per worker that fits",
        "",
        MEMORY,
        partial(_never_worse, methods=ONE_STAGE),
        kind=OURS,
    ),
    Claim(
        "4, interleaved",
        "nor than interleaved schedules that fit",
        "",
        MEMORY,
        partial(_never_worse, methods=INTERLEAVED),
        kind=OURS,
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
        kind=OURS,
    ),
    Claim(
        "6, stay",
        "and before staying with the best heuristic",
        "",
        "optpipe_training.pdf",
        partial(_refined, against="stay"),
        kind=OURS,
    ),
    Claim(
        "8",
        "where two neighbours share a host link, the optimum loses less than AdaOffload",
        "",
        "optpipe_links.pdf",
        _shared,
        kind=OURS,
    ),
    Claim(
        "9",
        "half of the problems of each size are within 5 % of the best known schedule in time",
        "",
        "optpipe_quality.pdf",
        _quality,
        kind=OURS,
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
