"""PipeDream against Randomized PipeDream and LocalSGD: the experiments of arXiv 2606.03498.

Every scheme sees the same objectives and is tuned over step sizes that are powers of two, with
several seeds. Time is in slots of one forward or one backward of one stage; the last experiment
takes the times of a transformer on nine machines instead.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.base.provenance import provenance
from pipejax.training import (
    TrainingObjective,
    language_model,
    nesterov_quadratic,
    random_logistic,
    random_quadratic,
    sweep_replay,
)
from sweeps.command import check, save
from sweeps.pipedream_schemes import (
    SAMPLES,
    Scheme,
    curves,
    powers,
    randomized,
    stacked,
    table_of,
    timeline,
)

SEEDS = range(5)
DELTAS = (8, 30, 60, 180, 420)
LOCAL_STEPS = (2, 5, 30)
DEPTHS = (2, 4, 8, 16, 32, 64, 128)
LARGEST_RPD = 64  # stages up to which the scaling experiment runs RPD: it keeps S^2 models
SYSTEMS = tuple(f"{n}_nw_{c}_cp" for n in ("slow", "mid", "fast") for c in ("slow", "mid", "fast"))


def _compare(
    name: str,
    objective: TrainingObjective,
    schemes: Sequence[Scheme],
    step_sizes: Sequence[float],
    seeds: Sequence[int] = SEEDS,
) -> xr.Dataset:
    shown = Console(stderr=True)
    runs = {
        s.label: jax.block_until_ready(s.train(objective, step_sizes, seeds))
        for s in track(schemes, name, console=shown)
    }
    return curves(runs, step_sizes)


def _quadratic_128(stages: int, seed: int) -> TrainingObjective:
    return random_quadratic(stages, dimension=128, seed=seed)


def _logistic_512(stages: int, seed: int) -> TrainingObjective:
    return random_logistic(stages, dimension=512, seed=seed)


def quadratic(stages: int = 8, microbatches: int = 400) -> xr.Dataset:
    """PipeDream against RPD with several deltas on a random quadratic: S = 8, 3,200 updates.

    Args:
      stages: S.
      microbatches: M; S * M block updates.

    Returns:
      Curves of all schemes.
    """
    objective = stacked(functools.partial(_quadratic_128, stages), range(10))
    until = 2.0 * microbatches
    schemes = [
        timeline("pipedream", "pipedream", stages, until, batches="drawn"),
        timeline("pipedream, epochs", "pipedream", stages, until),
        *(randomized(stages, stages * microbatches, delta) for delta in DELTAS),
    ]
    return _compare(f"quadratic, S={stages}", objective, schemes, powers(1, 7), range(10))


def match(depths: Sequence[int] = (4, 8, 16), microbatches: int = 400) -> xr.Dataset:
    """PipeDream against RPD at delta = S^2 - S/2, over the whole run, for several depths.

    Args:
      depths: S of each.
      microbatches: M.

    Returns:
      Curves with a further axis, stages.
    """
    parts = []
    for stages in depths:
        objective = stacked(functools.partial(_quadratic_128, stages), range(10))
        schemes = [
            timeline("pipedream", "pipedream", stages, 2.0 * microbatches, batches="drawn"),
            randomized(stages, stages * microbatches)._replace(label="rpd"),
        ]
        parts.append(_compare(f"match, S={stages}", objective, schemes, powers(3, 8), range(10)))
    return xr.concat(parts, xr.Variable("stages", list(depths)))


def nesterov(stages: int = 16, until: float = 1200.0) -> xr.Dataset:
    """PipeDream against LocalSGD on Nesterov's quadratic: S = R = 16, 1,200 slots.

    Args:
      stages: S and R.
      until: slots.

    Returns:
      Curves of all schemes.
    """
    objective = stacked(
        lambda seed: nesterov_quadratic(stages, dimension=160, condition_number=100.0, seed=seed),
        SEEDS,
    )
    return _compare(
        "nesterov", objective, _against_local_sgd(stages, until, LOCAL_STEPS), powers(6, 13)
    )


def logistic(stages: int = 16, until: float = 830.0) -> xr.Dataset:
    """PipeDream against LocalSGD on logistic regression: S = R = 16, 830 slots.

    Args:
      stages: S and R.
      until: slots.

    Returns:
      Curves of all schemes; of LocalSGD also with the gap of each run's own model.
    """
    objective = stacked(
        lambda seed: random_logistic(stages, dimension=32, num_batches=600, signal=2.0, seed=seed),
        SEEDS,
    )
    own = [
        timeline(
            f"local-sgd H={h}, own models", "local-sgd", stages, until, each_run=True, local_steps=h
        )
        for h in LOCAL_STEPS
    ]
    schemes = [*_against_local_sgd(stages, until, LOCAL_STEPS), *own]
    return _compare("logistic", objective, schemes, powers(-2, 7))


def language(stages: int = 16, until: float = 2000.0) -> xr.Dataset:
    """PipeDream against LocalSGD on a small language model: S = R = 16, 2,000 slots.

    Args:
      stages: S and R.
      until: slots.

    Returns:
      Curves of all schemes; the gap is the loss [nats] on text that is held out.
    """
    with jax.enable_x64(False):
        return _compare(
            "language",
            language_model(stages, seed=0),
            _against_local_sgd(stages, until, (1, 4, 8)),
            powers(-2, 1),
            range(2),
        )


def _against_local_sgd(stages: int, until: float, local_steps: Sequence[int]) -> list[Scheme]:
    return [
        timeline("pipedream", "pipedream", stages, until),
        *(
            timeline(f"local-sgd H={h}", "local-sgd", stages, until, local_steps=h)
            for h in local_steps
        ),
    ]


def scaling(depths: Sequence[int] = DEPTHS, until: float = 660.0) -> xr.Dataset:
    """Gap at a fixed time against the number of stages, logistic regression with d = 512.

    Args:
      depths: S of each.
      until: slots.

    Returns:
      Final gaps (stages, scheme, step_size, seed).
    """
    parts = []
    for stages in depths:
        objective = stacked(functools.partial(_logistic_512, stages), range(3))
        schemes = [*_against_local_sgd(stages, until, (5,))]
        if stages <= LARGEST_RPD:
            schemes.append(randomized(stages, int(until) * stages // 2)._replace(label="rpd"))
        found = _compare(f"scaling, S={stages}", objective, schemes, powers(-3, 7), range(3))
        parts.append(found.isel(sample=-1))
    return xr.concat(
        parts, xr.Variable("stages", list(depths)), join="outer", fill_value={"diverged": False}
    )


def machines(stages: int = 8, microbatches: int = 320) -> xr.Dataset:
    """Gap against simulated seconds on nine machines, for two objectives.

    Times are those of a transformer of 128 layers with one sequence per microbatch; an update
    costs what reading and writing the optimizer's state costs.

    Args:
      stages: S and R.
      microbatches: M, about; every scheme does whole rounds.

    Returns:
      Curves (objective, system, scheme, step_size, seed, sample); time [s] by objective, system,
      scheme and sample.
    """
    tables = {
        label: table_of(name, stages, 2.0 * microbatches, **options)
        for label, name, options in (
            ("pipedream", "pipedream", {}),
            ("pipedream-2bw", "pipedream-2bw", {}),
            ("local-sgd H=1", "local-sgd", {"local_steps": 1}),
            ("local-sgd H=5", "local-sgd", {"local_steps": 5}),
        )
    }
    objectives = {
        "nesterov": stacked(
            lambda seed: nesterov_quadratic(
                stages, dimension=160, condition_number=100.0, seed=seed
            ),
            SEEDS,
        ),
        "logistic": stacked(
            lambda seed: random_logistic(
                stages, dimension=32, num_batches=600, signal=2.0, seed=seed
            ),
            SEEDS,
        ),
    }
    step_sizes = {"nesterov": powers(5, 13), "logistic": powers(-1, 7)}
    cases = [(o, s) for o in objectives for s in SYSTEMS]
    parts = []
    for name, system in track(cases, "machines", console=Console(stderr=True)):
        runs = {
            label: sweep_replay(
                objectives[name],
                table,
                step_sizes=step_sizes[name],
                seeds=SEEDS,
                costs=_costs(table, system),
                times=SAMPLES,
            )
            for label, table in tables.items()
        }
        part = curves(runs, range(len(step_sizes[name])))
        part.time.attrs["units"] = "s"
        gamma = ("step_size", np.asarray(step_sizes[name]))
        parts.append(part.assign_coords(gamma=gamma).drop_vars("step_size"))
    by_objective = [
        xr.concat(parts[k : k + len(SYSTEMS)], xr.Variable("system", list(SYSTEMS)))
        for k in range(0, len(parts), len(SYSTEMS))
    ]
    return xr.concat(by_objective, xr.Variable("objective", list(objectives)))


def _costs(table: pj.ScheduleTable, system: str) -> pj.Costs:
    workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=table.num_microbatches)
    costs = pj.stage_costs(workload, pj.load_system(system), table)
    return dataclasses.replace(costs, all_reduce=0.0)


EXPERIMENTS: Mapping[str, Callable[[], xr.Dataset]] = {
    "quadratic": quadratic,
    "match": match,
    "nesterov": nesterov,
    "logistic": logistic,
    "language": language,
    "scaling": scaling,
    "machines": machines,
}


def main() -> None:
    """Write the dataset of every experiment that is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of Zarr stores to write")
    parser.add_argument("--only", choices=EXPERIMENTS, help="one experiment, made anew")
    options = parser.parse_args()
    shown = Console(stderr=True)
    for name in EXPERIMENTS if options.only is None else [options.only]:
        path = options.out / f"pipedream_{name}.zarr"
        if path.exists() and options.only is None:
            shown.print(f"{path} is there: --only {name} makes it anew", soft_wrap=True)
            continue
        check(path, parser)
        with jax.enable_x64(True):
            data = EXPERIMENTS[name]()
        save(data.assign_attrs(provenance()), path)
        shown.print(f"wrote {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
