"""Dependence of the step time on each number: elasticities and swings of four settings.

In three of them compute takes the largest share of the critical path, in one the network.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from rich.console import Console
from rich.progress import track

import pipejax as pj
from pipejax.analysis import PARAMETERS, RESOURCES, swings
from pipejax.files import provenance
from pipejax.results import Sensitivity
from sweeps.kit.command import write

FACTORS = (0.5, 2.0)  # what a parameter is multiplied by


@dataclasses.dataclass(frozen=True)
class Setting:
    """A schedule and workload on a system.

    Attributes:
      schedule: name of the builder.
      model: name of the model.
      system: name of the system.
      minibatch: sequences per step.
      microbatches: in which they are split.
      tensor_parallel: accelerators that make up one worker.
      recompute: "none", "selective" or "full".
      workers: of the pipeline.
      options: of the builder.
    """

    schedule: str
    model: str
    system: str
    minibatch: int
    microbatches: int
    tensor_parallel: int = 8
    recompute: str = "none"
    workers: int = 8
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Dependence(NamedTuple):
    """Dependence of one setting's step time on each number.

    Attributes:
      at: elasticities and shares.
      ends: by parameter, step time [s] at each of `FACTORS`.
    """

    at: Sensitivity
    ends: Mapping[str, tuple[float, float]]


SETTINGS: Mapping[str, Setting] = {
    "1F1B, Llama-3 70B, H100": Setting("1f1b", "llama3-70b", "h100", 128, 128),
    "interleaved 1F1B, V=5, Llama-3 70B, B200": Setting(
        "interleaved-1f1b", "llama3-70b", "b200", 128, 64, options={"stages_per_worker": 5}
    ),
    "Chimera, GPT-3 175B, H100": Setting("chimera", "gpt3-175b", "h100", 32, 8, recompute="full"),
    "Hanayo, 2 waves, 128 layers, slow network": Setting(
        "hanayo", "tabular-128l", "slow_nw_fast_cp", 64, 16, tensor_parallel=1, options={"waves": 2}
    ),
}


def sweep(settings: Mapping[str, Setting] = SETTINGS) -> xr.Dataset:
    """Find elasticities, shares and swings of every setting.

    Args:
      settings: by label.

    Returns:
      The dataset; every variable states its unit. Efficiencies have no swing: NaN.
    """
    shown = Console(stderr=True)
    results = [_find(setting) for setting in track(settings.values(), "settings", console=shown)]
    return _label(settings, results)


def _find(setting: Setting) -> Dependence:
    table = pj.schedules.build(
        setting.schedule,
        num_workers=setting.workers,
        num_microbatches=setting.microbatches,
        **setting.options,
    )
    workload = pj.Workload(
        pj.load_model(setting.model),
        setting.minibatch,
        tensor_parallel=setting.tensor_parallel,
        recompute=setting.recompute,
    )
    system = pj.load_system(setting.system)
    ends = swings(table, workload, system, factors=FACTORS)
    return Dependence(pj.sensitivity(table, workload, system), ends)


def _label(settings: Mapping[str, Setting], results: Sequence[Dependence]) -> xr.Dataset:
    none = (np.nan,) * len(FACTORS)
    variables = {
        "step_time": (("setting",), [result.at.step_time for result in results], "s"),
        "elasticity": (
            ("setting", "parameter"),
            [[result.at.elasticity[name] for name in PARAMETERS] for result in results],
            "1",
        ),
        "share": (
            ("setting", "resource"),
            [[result.at.share[name] for name in RESOURCES] for result in results],
            "1",
        ),
        "swing": (
            ("setting", "parameter", "factor"),
            [[result.ends.get(name, none) for name in PARAMETERS] for result in results],
            "s",
        ),
    }
    described = {
        field.name: (
            "setting",
            [_text(getattr(setting, field.name)) for setting in settings.values()],
        )
        for field in dataclasses.fields(Setting)
    }
    return xr.Dataset(
        {name: (dims, values, {"units": unit}) for name, (dims, values, unit) in variables.items()},
        coords={
            "setting": list(settings),
            "parameter": list(PARAMETERS),
            "resource": list(RESOURCES),
            "factor": list(FACTORS),
            **described,
        },
        attrs={
            "title": "What the step time depends on",
            "link": "delay",
            "dtype": "float64",
            **provenance(),
        },
    )


def _text(value: Any) -> Any:
    """Options as text; a dataset's labels are numbers or text."""
    return value if isinstance(value, int | str) else " ".join(f"{k}={v}" for k, v in value.items())


def main() -> None:
    """Write the dataset."""
    write(__doc__ or "", sweep, lambda data: f"{data.sizes['setting']} settings")


if __name__ == "__main__":
    main()
