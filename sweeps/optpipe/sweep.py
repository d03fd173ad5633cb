"""Schedules under a memory limit against the best there is: the comparison of arXiv 2510.05186.

Idle share by memory limit and by speed of the host link, for methods of the literature and for the
optimum with its proven bound; the published figures of searched schedules; how solutions get better
while training runs on them; three timelines.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xarray as xr
from rich.console import Console

from pipejax.files import provenance
from sweeps.kit.command import check, save
from sweeps.kit.journal import Journal
from sweeps.optpipe import (
    grid,
    published,
    refinement,
    timelines,
)

EFFORT = 2.0  # of a solve: all parts together take less than ten minutes on two cores
PARTS: Mapping[str, Callable[[Journal, float, bool], xr.Dataset]] = {
    "grid": grid.sweep,
    "published": published.sweep,
    "refinement": refinement.sweep,
    "timelines": timelines.sweep,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the dataset of every part that is not there yet.

    Args:
      arguments: of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of Zarr stores to write")
    parser.add_argument("--only", choices=PARTS, help="one part, made anew")
    parser.add_argument(
        "--effort", type=float, default=EFFORT, help="of each solve, in seconds of one idle core"
    )
    parser.add_argument("--small", action="store_true", help="a few tiny problems, to try it out")
    options = parser.parse_args(arguments)
    if not options.effort > 0:
        parser.error(f"--effort must be above 0, got {options.effort:g}")
    shown = Console(stderr=True)
    for name in PARTS if options.only is None else [options.only]:
        path = options.out / f"optpipe_{name}.zarr"
        if path.exists() and options.only is None:
            shown.print(f"{path} is there: --only {name} makes it anew", soft_wrap=True)
            continue
        check(path, parser)
        origin = provenance()
        context = f"effort {options.effort:g}, code {origin['code']}"
        journal = Journal(path.with_suffix(".jsonl"), context)
        data = PARTS[name](journal, options.effort, options.small)
        attributes = {"effort of a solve": options.effort, **origin}
        save(data.assign_attrs(attributes), path)
        journal.path.unlink(missing_ok=True)
        shown.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
