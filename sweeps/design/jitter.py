"""Step times under jitter: schedules at eight workers and 32 microbatches as one dataset.

An op varies by 5 %, a worker by 2 % from step to step, a message by 30 %, and now and then a worker
is a straggler. All schedules do the same work and see the same samples.
"""

import itertools

import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import pipejax as pj
from pipejax.analysis import jitter_dataset
from sweeps.kit.cases import build
from sweeps.kit.command import write

SHOWN = (
    "gpipe",
    "1f1b",
    "chimera",
    "chimera-asymmetric",
    "hanayo, 1 wave",
    "hanayo, 2 waves",
    "interleaved-1f1b",
)
WORKERS, MICROBATCHES, SAMPLES, SEED = 8, 32, 10_000, 0
SLOTS = {"F": 1, "B": 2}
TIMES = {"forward": 0.010, "backward": 0.020}  # of a microbatch on a worker [s]
MESSAGE = {"latency": 1e-5, "transmit": 4e-4}  # [s]
JITTER = pj.analysis.Jitter(
    op=pj.analysis.Distribution("lognormal", 0.05),
    worker=pj.analysis.Distribution("lognormal", 0.02),
    message=pj.analysis.Distribution("gamma", 0.3),
    straggler=pj.analysis.Straggler(probability=0.002, slowdown=1.3),
)


def sweep(samples: int = SAMPLES) -> xr.Dataset:
    """Run every schedule.

    Args:
      samples: of each schedule.

    Returns:
      The dataset; every variable states its unit.
    """
    runs = {}
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("samples", total=samples * len(SHOWN))
        for before, case in zip(itertools.count(0, samples), SHOWN, strict=False):
            table = build(case, WORKERS, MICROBATCHES, SLOTS)
            runs[case] = pj.jitter(
                table,
                pj.Costs.per_worker(table, **TIMES, **MESSAGE),
                JITTER,
                samples=samples,
                seed=SEED,
                on_progress=lambda done, *_, before=before: progress.update(
                    task, completed=before + done
                ),
            )
    data = jitter_dataset(runs)
    return data.assign_attrs({f"{name} [s]": value for name, value in {**TIMES, **MESSAGE}.items()})


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.makespan.size} samples")


if __name__ == "__main__":
    main()
