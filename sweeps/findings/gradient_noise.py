"""LocalSGD's win on logistic regression is gradient noise: without it PipeDream ends below.

The scaling experiment of arXiv 2606.03498 in the setting of its authors, over the noise of a
gradient: after 3,180 slots on the same examples, each scheme at the step size that ends lowest. An
end is read off the last model, as published, and as the mean over the last tenth of the run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

from pipejax.files import provenance
from pipejax.training import sweep_replay
from pipejax.typing import Float, NumpyArray
from sweeps.kit.claims import OURS, SHOWN, Claim, Verdict
from sweeps.kit.command import write
from sweeps.pipedream.schemes import build_until, make_objectives
from sweeps.pipedream.settings import RUN_5, SAMPLES, SEEDS, Problem, Setting

STORE, FIGURE = "finding_gradient_noise.zarr", "finding_gradient_noise.pdf"
STAGES = (4, 8, 16, 32, 64)
NOISES = (0.0, 0.05, 0.1, 0.2, 0.5)  # standard deviations; the last one is published
UNTIL = 3180.0  # slots
READS = ("last model", "mean of the last tenth")
TENTH = SAMPLES // 10
PIPEDREAM, LOCAL_SGD = "pipedream", "local-sgd H=5"


class Tried(NamedTuple):
    """A scheme and its grid of step sizes, in half powers of two."""

    method: str
    exponents: Float[NumpyArray, " step_sizes"]
    options: Mapping[str, int | str]


SCHEMES = {
    PIPEDREAM: Tried("pipedream", np.arange(-7, -3.5, 0.5), {"admission": "first-stage"}),
    LOCAL_SGD: Tried("local-sgd", np.arange(-5, 0, 0.5), {"local_steps": 5}),
}


def sweep(
    stages: Sequence[int] = STAGES,
    noises: Sequence[float] = NOISES,
    seeds: Sequence[int] = SEEDS,
    problem: Problem = RUN_5,
    until: float = UNTIL,
) -> xr.Dataset:
    """Train both schemes at every depth and noise.

    Args:
      stages: S.
      noises: standard deviation of what is added to every coordinate of a gradient.
      seeds: of examples, starts and noise.
      problem: its noise is not read.
      until: how long [slots].

    Returns:
      end (read, scheme, stages, noise, seed), f at the step size whose median over the seeds is
      least, step_size and edge, whether it is the last of its grid; crossing (read, stages), the
      noise at which both medians are equal, missing where they never are.
    """
    with jax.enable_x64(True):
        schemes = [
            xr.concat(
                [
                    _ends(tried, Setting(s, problem, until, (), seeds=tuple(seeds)), noises)
                    for s in track(stages, name, console=Console(stderr=True))
                ],
                xr.Variable("stages", list(stages)),
            )
            for name, tried in SCHEMES.items()
        ]
    data = xr.concat(schemes, xr.Variable("scheme", list(SCHEMES)))
    medians = data.end.median("seed")
    lead = np.log(medians.sel(scheme=LOCAL_SGD) / medians.sel(scheme=PIPEDREAM))
    crossing = xr.apply_ufunc(
        lambda leads: _crossing(leads, np.asarray(noises)),
        lead,
        input_core_dims=[["noise"]],
        vectorize=True,
    )
    attributes = {"title": "Gradient noise and who ends lowest", "slots": until, **provenance()}
    return data.assign(crossing=crossing).assign_attrs(attributes)


def _ends(tried: Tried, setting: Setting, noises: Sequence[float]) -> xr.Dataset:
    """Both readings of f at the best step size of each noise; infinite where a run diverged."""
    objective = make_objectives(setting)
    table = build_until(tried.method, setting.stages, setting.until, **tried.options)
    step_sizes = 2.0**tried.exponents
    values = []
    for noise in noises:
        run = sweep_replay(
            objective,
            table,
            step_sizes=step_sizes,
            seeds=setting.seeds,
            times=np.linspace(0.0, setting.until, SAMPLES + 1),
            batches="cyclic",
            noise=noise,
        )
        value = run.reported.filled(np.inf) + np.asarray(run.minimum)[..., None]
        values.append([value[..., -1], value[..., -TENTH:].mean(axis=-1)])
    ends = np.array(values)  # noise, read, step size, seed
    best = np.median(ends, axis=-1).argmin(axis=-1)
    at = np.take_along_axis(ends, best[..., None, None], axis=2)[:, :, 0]
    return xr.Dataset(
        {
            "end": (("noise", "read", "seed"), at, {"long_name": "f"}),
            "step_size": (("noise", "read"), step_sizes[best]),
            "edge": (("noise", "read"), (best == 0) | (best == len(step_sizes) - 1)),
        },
        coords={"noise": list(noises), "read": list(READS), "seed": list(setting.seeds)},
    )


def _crossing(lead: Float[NumpyArray, " noises"], noises: Float[NumpyArray, " noises"]) -> float:
    """First noise at which the lead changes its sign, on a line between two levels; or missing."""
    change = np.flatnonzero(lead[:-1] * lead[1:] < 0)
    if not change.size:
        return float("nan")
    k = change[0]
    return float(noises[k] + (noises[k + 1] - noises[k]) * lead[k] / (lead[k] - lead[k + 1]))


Data = Mapping[str, xr.Dataset]
DEEP = 8  # stages from which PipeDream is below without noise
DEEPER = 16  # and LocalSGD with a fifth of the published noise
PUBLISHED_NOISE, FIFTH = 0.5, 0.1


def _with_every_seed(data: Data, first: str, second: str, **where: float | slice) -> Verdict:
    """Judge if one scheme ends below the other with every seed, by both readings."""
    at = data["finding_gradient_noise"].sel(where)
    below = at.end.sel(scheme=first) < at.end.sel(scheme=second)
    lead = at.end.median("seed").sel(scheme=second) / at.end.median("seed").sel(scheme=first)
    words = (
        f"in {int(below.sum())} of {below.size} pairs of ends; by the medians "
        f"{float(lead.min()):.2g} to {float(lead.max()):.2g} times"
    )
    if bool(below.all()):
        return Verdict(words, True)
    lost = [int(s) for s in at.stages if not bool(below.sel(stages=s).all())]
    return Verdict(words, False, f"not with every seed at S = {', '.join(map(str, lost))}")


def _turns(data: Data) -> Verdict:
    """LocalSGD's end falls with depth at the published noise, and rises without any."""
    local = data["finding_gradient_noise"].sel(scheme=LOCAL_SGD)
    medians = local.end.median("seed")
    noisy = medians.sel(noise=PUBLISHED_NOISE)
    quiet = medians.sel(noise=0, stages=slice(DEEP, None))
    ends = [
        f"{float(by_depth.isel(read=0, stages=0)):.2g} to "
        f"{float(by_depth.isel(read=0, stages=-1)):.2g}"
        for by_depth in (noisy, quiet)
    ]
    wrong = [
        words
        for words, good in (
            ("it does not fall with noise", bool((noisy.diff("stages") < 0).all())),
            ("it does not rise without", bool((quiet.diff("stages") > 0).all())),
        )
        if not good
    ]
    return Verdict(f"{ends[0]} with noise, {ends[1]} without", not wrong, "; ".join(wrong))


def _crossings(data: Data) -> Verdict:
    crossing = data["finding_gradient_noise"].crossing
    words = (f"{float(crossing.sel(stages=s, read=READS[0])):.2g} at S = {int(s)}"
             for s in crossing.stages)  # fmt: skip
    return Verdict(", ".join(words), None)


def _claims() -> Iterator[Claim]:
    """Yield claims: the winner without and with noise, and the effect of depth on LocalSGD."""
    forms: tuple[tuple[str, str, Callable[[Data], Verdict]], ...] = (
        (
            "c1",
            f"without gradient noise PipeDream ends below {LOCAL_SGD} on logistic regression, with "
            f"every seed from S = {DEEP} on",
            lambda data: _with_every_seed(
                data, PIPEDREAM, LOCAL_SGD, noise=0, stages=slice(DEEP, None)
            ),
        ),
        (
            "c2",
            "LocalSGD ends below PipeDream from a fifth of the published noise on, with every seed "
            f"from S = {DEEPER} on",
            lambda data: _with_every_seed(
                data, LOCAL_SGD, PIPEDREAM, noise=slice(FIFTH, None), stages=slice(DEEPER, None)
            ),
        ),
        (
            "c3",
            "with the published noise LocalSGD ends the lower the deeper the pipe, without noise "
            f"the higher from S = {DEEP} on",
            _turns,
        ),
    )
    for number, text, check in forms:
        yield Claim(number, text, "", FIGURE, check, OURS)
    yield Claim(
        "c4",
        "the noise at which both end alike",
        "",
        FIGURE,
        _crossings,
        SHOWN,
        why="it says where the order turns",
    )


CLAIMS = tuple(_claims())


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.end.size} ends")


if __name__ == "__main__":
    main()
