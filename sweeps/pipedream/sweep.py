"""PipeDream against Randomized PipeDream and LocalSGD: the experiments of arXiv 2606.03498.

A run is one scheme of one setting, with all its step sizes and seeds. Runs are spread over the
processor's cores and kept one by one, so that what was cut short goes on where it was; experiments
share those that are the same. A dataset that is there is kept if code and settings are those that
it was made with, and else made anew.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

from pipejax.files import checksum, provenance
from sweeps.kit.command import check, save, why_anew
from sweeps.pipedream import (
    convergence_bound,
    curves,
    schedules,
    schemes,
    staleness,
)
from sweeps.pipedream.curves import read
from sweeps.pipedream.runs import ALONE, list_runs, make, together
from sweeps.pipedream.settings import EXPERIMENTS

RUNS = "pipedream_runs"  # folder of what is kept until all experiments are there
# longest first, so that no core is left with a long one at the end
PARTS = (
    "language",
    "scaling",
    "convergence_bound",
    "machines",
    "logistic",
    "nesterov",
    "match",
    "quadratic",
    "staleness",
    "pipedream_schedules",
)
MODULES: Mapping[str, ModuleType] = {
    "staleness": staleness,
    "convergence_bound": convergence_bound,
    "pipedream_schedules": schedules,
}


def origin_hashes(name: str) -> dict[str, str]:
    """Hash what the numbers of a dataset depend on.

    Args:
      name: of the experiment.

    Returns:
      Hash of the package, of the sweep and of the settings, by name.
    """
    module = MODULES.get(name, schemes)
    reading = {"reading": checksum(Path(str(curves.__file__)).read_bytes())[:16]}
    return {
        "code": provenance()["code"],
        "sweep": checksum(Path(str(module.__file__)).read_bytes())[:16],
        "settings": checksum(repr(EXPERIMENTS.get(name, "")))[:16],
        **(reading if name in EXPERIMENTS else {}),
    }


def store_path(name: str, out: Path) -> Path:
    """Return the path of a dataset."""
    return out / (f"{name}.zarr" if name in ALONE else f"pipedream_{name}.zarr")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the dataset of every experiment that is not there, or was made otherwise.

    Args:
      arguments: of the command line; those of the process if None.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of Zarr stores to write")
    parser.add_argument("--only", choices=PARTS, help="one experiment")
    options = parser.parse_args(arguments)
    out: Path = options.out
    shown = Console(stderr=True, soft_wrap=True)
    runs_by_name = {}
    for name in PARTS if options.only is None else [options.only]:
        path = store_path(name, out)
        check(path, parser)
        origin = origin_hashes(name)
        reason = why_anew(path, origin)
        shown.print(f"{path} is made: {reason}" if reason else f"{path} is kept", highlight=False)
        if reason:
            context = f"code {origin['code']}, sweep {origin['sweep']}"
            runs_by_name[name] = list_runs(name, out / RUNS, context)
    make([run for runs in runs_by_name.values() for run in runs], shown)
    for name, runs in runs_by_name.items():
        attributes = {**provenance(), **origin_hashes(name), "title": f"PipeDream: {name}"}
        data, store = together(name, runs), store_path(name, out)
        if name in EXPERIMENTS:
            data = read(data, store.stem)
        save(data.assign_attrs(attributes), store)
    if options.only is None:
        shutil.rmtree(out / RUNS, ignore_errors=True)


if __name__ == "__main__":
    main()
