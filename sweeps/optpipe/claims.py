"""The claims of OptPipe (arXiv 2510.05186), one verdict each, read off datasets.

One rule for all: where a claim says "up to" or "over", it holds if one problem of the grid exceeds
the figure; the range over all problems is shown beside it, and at how many it is exceeded.

How PipeOffload runs its backwards is not said. Its paper splits them; its authors' runtime runs
whole ones where a worker has one stage. A claim for which that decides has no verdict of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from sweeps.kit.claims import BY_CONSTRUCTION, OURS, READING, Claim, command
from sweeps.optpipe.cases import INTERLEAVED, OPTIMUM, OPTIMUM_INTERLEAVED, WHOLE
from sweeps.optpipe.checks import (
    AMPLE_GAIN,
    BELOW,
    FROM,
    HIDDEN,
    IDLE_SAVED,
    ONE_STAGE,
    OTHERS,
    PRINTED,
    SPLIT,
    TIGHT_GAIN,
    Data,
    Gain,
    against_either,
    at_most_printed,
    good_in_time,
    idle_saved,
    in_its_memory,
    judged,
    largest_is_solved,
    never_worse,
    refined_ends_first,
    sharing_costs,
    throughput,
    trains,
)
from sweeps.optpipe.published import rows

STORES = ("grid", "published", "refinement")
OPTPIPE, ZERO_BUBBLE = "OptPipe", "Zero Bubble (arXiv 2401.10241)"  # whose claims
STARTS = "the search begins at the best of these that fits"
MEMORY, OPPONENTS = "optpipe_memory.pdf", "optpipe_opponents.pdf"
IDLE = partial(idle_saved, methods=SPLIT)
IDLE_WHOLE = partial(idle_saved, methods=(WHOLE,))
TIGHTLY = partial(throughput, limits=BELOW, least=TIGHT_GAIN, ours=OPTIMUM)
AMPLY = partial(throughput, limits=FROM, least=AMPLE_GAIN, ours=OPTIMUM)
PIPE_OFFLOAD, PIPE_OFFLOAD_INTERLEAVED = "pipe-offload", "pipe-offload, interleaved"


class Reading(NamedTuple):
    """A claim against other opponents, or at other limits, than it is counted for."""

    number: str
    text: str
    why: str
    gain: Callable[[Data], Gain]


READINGS = (
    Reading(
        "1, split",
        "against the best of 1F1B, zero-bubble and PipeOffload with split backwards",
        "split, as in the paper of PipeOffload",
        IDLE,
    ),
    Reading(
        "1, split, tight",
        "the same, below the memory of 1F1B",
        "only PipeOffload fits there",
        partial(IDLE, limits=BELOW),
    ),
    Reading(
        "1, whole",
        "against PipeOffload with whole backwards alone",
        "whole, as its authors' runtime has them with one stage per worker, which offloads nothing "
        "then",
        IDLE_WHOLE,
    ),
    Reading(
        "1, whole, tight",
        "the same, below the memory of 1F1B",
        "no runtime is known that does this",
        partial(IDLE_WHOLE, limits=BELOW),
    ),
    Reading(
        "1, interleaved",
        "against interleaved ones too, all with two stages per worker",
        "stages per worker are not said",
        partial(idle_saved, methods=OTHERS, ours=OPTIMUM_INTERLEAVED),
    ),
    Reading(
        "1, AdaOffload",
        "against all with one stage per worker and AdaOffload",
        "AdaOffload is OptPipe's own start",
        partial(idle_saved, methods=ONE_STAGE),
    ),
    *(
        Reading(f"2, {word}, {name}", f"{text}, {against}", why, partial(gain, **options))
        for word, text, gain in (
            ("tight", "over 20 % more under tight memory", TIGHTLY),
            ("ample", "over 30 % more with ample memory", AMPLY),
        )
        for name, against, why, options in (
            ("split", "split backwards", "as in 1, split", {"opponent": PIPE_OFFLOAD}),
            ("whole", "whole backwards", "as in 1, whole", {"opponent": WHOLE}),
            (
                "interleaved",
                "both with two stages per worker",
                "stages per worker are not said",
                {"opponent": PIPE_OFFLOAD_INTERLEAVED, "ours": OPTIMUM_INTERLEAVED},
            ),
        )
    ),
    *(
        Reading(
            f"2, its memory, {name}",
            f"over 20 % more in the memory that PipeOffload holds itself, {name} backwards",
            "a reviewer notes that OptPipe used more memory than PipeOffload",
            partial(in_its_memory, opponent=opponent),
        )
        for name, opponent in (("split", PIPE_OFFLOAD), ("whole", WHOLE))
    ),
)
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "1",
        "idle time is up to 50 % less than that of 1F1B, zero-bubble and PipeOffload schedules, "
        "the best of them, at the same memory limit",
        "up to 50 %",
        OPPONENTS,
        partial(against_either, split=IDLE, whole=IDLE_WHOLE),
        paper=OPTPIPE,
        thresholds=(IDLE_SAVED,),
    ),
    Claim(
        "2, tight",
        "more throughput than PipeOffload under tight memory",
        "over 20 %",
        OPPONENTS,
        partial(
            against_either,
            split=partial(TIGHTLY, opponent=PIPE_OFFLOAD),
            whole=partial(TIGHTLY, opponent=WHOLE),
        ),
        paper=OPTPIPE,
        thresholds=(TIGHT_GAIN, HIDDEN),
    ),
    Claim(
        "2, ample",
        "more throughput than PipeOffload with ample memory",
        "over 30 %",
        OPPONENTS,
        partial(
            against_either,
            split=partial(AMPLY, opponent=PIPE_OFFLOAD),
            whole=partial(AMPLY, opponent=WHOLE),
        ),
        paper=OPTPIPE,
        thresholds=(AMPLE_GAIN, HIDDEN),
    ),
    *(
        Claim(
            reading.number,
            reading.text,
            "",
            OPPONENTS,
            judged(reading.gain),
            kind=READING,
            why=reading.why,
        )
        for reading in READINGS
    ),
    Claim(
        "3",
        "trains where zero-bubble schedules run out of memory",
        "yes",
        MEMORY,
        trains,
        kind=BY_CONSTRUCTION,
        why="a limit of one activation or more has a legal schedule, and a search starts at one",
        paper=OPTPIPE,
    ),
    Claim(
        "4",
        "the optimum is never worse than ZB-1p and ZB-2p where they fit",
        "",
        MEMORY,
        partial(never_worse, methods=("zb-1p", "zb-2p")),
        kind=BY_CONSTRUCTION,
        why=STARTS,
    ),
    Claim(
        "4, all",
        "nor than any other method with one stage per worker that fits",
        "",
        MEMORY,
        partial(never_worse, methods=ONE_STAGE),
        kind=BY_CONSTRUCTION,
        why=STARTS,
    ),
    Claim(
        "4, interleaved",
        "nor than interleaved schedules that fit",
        "",
        MEMORY,
        partial(never_worse, methods=INTERLEAVED),
        kind=OURS,
    ),
    Claim(
        "5",
        "models up to 14.2B on up to 16 accelerators are solved",
        "14.2B, 16",
        "optpipe_gaps.pdf",
        largest_is_solved,
        kind=BY_CONSTRUCTION,
        why="a heuristic always returns a schedule; how far from the best it can be is beside it",
        paper=OPTPIPE,
    ),
    Claim(
        "6, wait",
        "training while the search goes on ends before waiting for the optimum",
        "",
        "optpipe_training.pdf",
        partial(refined_ends_first, against="wait"),
        kind=OURS,
    ),
    Claim(
        "6, stay",
        "and before staying with the best heuristic",
        "",
        "optpipe_training.pdf",
        partial(refined_ends_first, against="stay"),
        kind=OURS,
    ),
    Claim(
        "8",
        "where two neighbours share a host link, the optimum loses less than AdaOffload",
        "",
        "optpipe_links.pdf",
        sharing_costs,
        kind=OURS,
    ),
    Claim(
        "9",
        "half of the problems of each size are within 5 % of the best known schedule in time",
        "",
        "optpipe_quality.pdf",
        good_in_time,
        kind=OURS,
    ),
    *(
        Claim(
            f"7, {row.words}",
            "idle share in a worker's own span is at most that of the published "
            f"search in {row.setting.activations:g} activations",
            f"{row.published:.4f}",
            "",
            partial(at_most_printed, row),
            paper=ZERO_BUBBLE,
            thresholds=(PRINTED,),
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
