"""Draw every figure from saved data: `python -m figures --data RESULTS --out FOLDER`."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import xarray as xr
from rich.console import Console
from rich.progress import track

from figures.design import (
    best_schedule,
    jitter,
    pareto,
    run_time as design_run_time,
    timelines,
    tornado,
)
from figures.findings import (
    gradient_noise as finding_gradient_noise,
    links as finding_links,
    offload as finding_offload,
    queues as finding_queues,
    regimes as finding_regimes,
)
from figures.kit.captions import in_latex, in_markdown
from figures.kit.overview import Source, overview
from figures.kit.rules import faults, figure_caption
from figures.optpipe import (
    gaps as optpipe_gaps,
    links as optpipe_links,
    memory as optpipe_memory,
    opponents as optpipe_opponents,
    quality as optpipe_quality,
    refinement as optpipe_refinement,
    timelines as optpipe_timelines,
)
from figures.pipedream import (
    convergence_bound,
    curves as pipedream_curves,
    machines as pipedream_machines,
    match as pipedream_match,
    scaling as pipedream_scaling,
    schedules as pipedream_schedules,
    staleness,
)
from figures.published import accuracy
from figures.tabular import (
    asymmetric,
    bubble_ratio,
    hanayo,
    memory,
    ranking,
    regimes,
    run_time,
    schedule_tables,
)
from pipejax.files import atomic_write, check_writable, write_file
from pipejax.plots import style

PIPEDREAM: Mapping[str, ModuleType] = {
    "quadratic": pipedream_curves,
    "match": pipedream_match,
    "nesterov": pipedream_curves,
    "logistic": pipedream_curves,
    "language": pipedream_curves,
    "scaling": pipedream_scaling,
    "machines": pipedream_machines,
}
OPTPIPE: Mapping[str, tuple[ModuleType, ...]] = {
    "grid": (optpipe_opponents, optpipe_memory, optpipe_links, optpipe_gaps, optpipe_quality),
    "refinement": (optpipe_refinement,),
    "timelines": (optpipe_timelines,),
}


STORES: Mapping[str, Source] = {
    "tabular_schedules.zarr": Source(
        "python -m sweeps.tabular.schedules --out",
        (bubble_ratio, run_time, memory, hanayo, asymmetric, ranking),
    ),
    "schedule_tables.zarr": Source(
        "python -m sweeps.tabular.schedule_tables --out", (schedule_tables,)
    ),
    "regimes.zarr": Source("python -m sweeps.tabular.regimes --out", (regimes,)),
    "fidelity.zarr": Source(
        "python -m sweeps.published.fidelity --page docs/accuracy.md --out", (accuracy,)
    ),
    "design_space.zarr": Source(
        "pipejax sweep run sweeps/design/design_space.toml --out",
        (design_run_time, best_schedule, pareto),
    ),
    "sensitivity.zarr": Source("python -m sweeps.design.sensitivity --out", (tornado,)),
    "jitter.zarr": Source("python -m sweeps.design.jitter --out", (jitter,)),
    "timelines.zarr": Source("python -m sweeps.design.timelines --out", (timelines,)),
    "staleness.zarr": Source("python -m sweeps.pipedream.staleness --out", (staleness,)),
    "convergence_bound.zarr": Source(
        "python -m sweeps.pipedream.convergence_bound --out", (convergence_bound,)
    ),
    "pipedream_schedules.zarr": Source(
        "python -m sweeps.pipedream.schedules --out", (pipedream_schedules,)
    ),
    **{
        f"pipedream_{name}.zarr": Source(
            f"python -m sweeps.pipedream.sweep --only {name} --out", (script,), to_folder=True
        )
        for name, script in PIPEDREAM.items()
    },
    **{
        f"optpipe_{name}.zarr": Source(
            f"python -m sweeps.optpipe.sweep --only {name} --out", scripts, to_folder=True
        )
        for name, scripts in OPTPIPE.items()
    },
    "finding_links.zarr": Source("python -m sweeps.findings.links --out", (finding_links,)),
    "finding_regimes.zarr": Source("python -m sweeps.findings.regimes --out", (finding_regimes,)),
    "finding_queues.zarr": Source("python -m sweeps.findings.queues --out", (finding_queues,)),
    "finding_delays.zarr": Source("python -m sweeps.findings.delays --out", ()),
    "finding_gradient_noise.zarr": Source(
        "python -m sweeps.findings.gradient_noise --out", (finding_gradient_noise,)
    ),
    "finding_offload.zarr": Source(
        "python -m sweeps.findings.offload --grid results/optpipe_grid.zarr --out",
        (finding_offload,),
    ),
}
SUFFIXES: Mapping[str, Mapping[str, None]] = {"pdf": {"CreationDate": None}, "png": {}}
CAPTIONS: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "captions.md": in_markdown,
    "captions.tex": in_latex,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the figures of every store that is there, as pdf and png, and write their captions.

    Captions are written twice: as a page of all figures, and as LaTeX to be put into a paper.

    What would keep a figure from being printed is told, but it is drawn.

    Args:
      arguments: of the command line; those of the process if None.

    Returns:
      Exit code: 2 if no store is there.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of Zarr stores to read")
    parser.add_argument("--out", type=Path, help="folder to write")
    parser.add_argument("--overview", type=Path, help="write the page of all papers, and end")
    options = parser.parse_args(arguments)
    if options.overview is not None:
        write_file(options.overview, overview(STORES))
        return 0
    if options.data is None or options.out is None:
        parser.error("the following arguments are required: --data, --out")
    there = [name for name in STORES if (options.data / name).exists()]
    if not there:
        print(
            f"error: --data {options.data} holds none of {', '.join(STORES)}: `make sweeps` and "
            "`make paper` write them",
            file=sys.stderr,
        )
        return 2
    try:
        options.out.mkdir(exist_ok=True)  # it is ours: figures of these names are replaced
        check_writable(options.out / "any.png")
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    names = _draw(there, options.data, options.out)
    shown = Console()
    shown.print(
        f"{len(names)} figures, {' and '.join(CAPTIONS)} in {options.out}: {', '.join(names)}",
        soft_wrap=True,
    )
    for name in (name for name in STORES if name not in there):
        target = options.data if STORES[name].to_folder else options.data / name
        shown.print(
            f"no {options.data / name}: `{STORES[name].command} {target}` writes it", soft_wrap=True
        )
    return 0


def _draw(stores: list[str], data: Path, out: Path) -> list[str]:
    """Draw the figures of some stores and write their captions; return their names."""
    style.use()
    work = [(name, script) for name in stores for script in STORES[name].scripts]
    loaded: dict[str, xr.Dataset] = {}
    captions: dict[str, str] = {}
    for name, script in track(work, "figures", console=Console(stderr=True)):
        if name not in loaded:
            with xr.open_zarr(data / name) as store:
                loaded[name] = store.load().assign_attrs(store=Path(name).stem)
        for label, figure in script.draw(loaded[name]).items():
            for fault in faults(figure):
                print(f"{label}: {fault}", file=sys.stderr)
            for suffix, metadata in SUFFIXES.items():
                with atomic_write(out / f"{label}.{suffix}") as draft:
                    figure.savefig(draft, metadata=dict(metadata))
            captions[label] = figure_caption(figure)
            plt.close(figure)
    for name, written in CAPTIONS.items():
        write_file(out / name, written(captions))
    return list(captions)


if __name__ == "__main__":
    sys.exit(main())
