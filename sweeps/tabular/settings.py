"""What the experiments of the tabular-schedule paper run on: systems, settings, orders.

Two settings stand side by side. *As reported* takes the paper's 34 TB/s of memory bandwidth and
full efficiency; *calibrated* takes the 3.35 TB/s of one H100, and an efficiency of compute that
`tabular_fit` fits to one published number. Neither the minibatch nor the efficiencies are
published: the minibatch is the same in both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import xarray as xr

import pipejax as pj
from pipejax.costing import Efficiency, Number
from sweeps.kit.cases import build

MODEL = "tabular-128l"
MINIBATCH = 1024
LEVELS = ("slow", "mid", "fast")
SYSTEMS = tuple(f"{network}_nw_{compute}_cp" for network in LEVELS for compute in LEVELS)

AS_REPORTED, CALIBRATED = "as reported", "calibrated"
LINKS = ("delay", "blocking")
SLOTS: Mapping[str, Mapping[str, float]] = {
    "F=1, B=1": {"F": 1, "B": 1},
    "F=1, B=2": {"F": 1, "B": 2},  # a backward of this model takes about twice its forward
}
EQUAL, DOUBLE = SLOTS
# orders are published for B = S and drawn with F = B there; beyond, nobody published one for B = 2F
PUBLISHED = "published"
DRAWN = (PUBLISHED, *SLOTS)
# all claims of the paper are read at this one point
MAIN: Mapping[str, str] = {"setting": CALIBRATED, "link": "blocking", "drawn": PUBLISHED}


class Setting(NamedTuple):
    """What the paper's systems leave open.

    Attributes:
      compute_efficiency: share of the compute peak that an op reaches, e_c.
      memory_bandwidth: [B/s].
    """

    compute_efficiency: Number
    memory_bandwidth: Number


REPORTED = Setting(1.0, 34e12)
H100_BANDWIDTH = 3.35e12


def system_at(name: str, setting: Setting) -> pj.System:
    """Load one of the paper's systems in a setting, whose numbers may be traced."""
    return dataclasses.replace(
        pj.load_system(name),
        compute_efficiency=Efficiency(shares=(setting.compute_efficiency,)),
        memory_bandwidth=setting.memory_bandwidth,
    )


def stack(systems: Sequence[pj.System]) -> pj.System:
    """Stack systems along the first axis of every field."""
    alike = [dataclasses.replace(system, name="grid", source="grid") for system in systems]
    return jax.tree.map(lambda *leaves: jnp.array(leaves), *alike)


def systems_at(settings: Sequence[Setting]) -> pj.System:
    """Stack all systems in all settings, the systems of one setting after those of another."""
    return stack([system_at(name, setting) for setting in settings for name in SYSTEMS])


def workload() -> pj.Workload:
    """Return the model and minibatch of the paper.

    Its 80 heads do not divide the hidden size of 4096: only FLOP and bytes are counted, in which
    the heads enter as the number of attention scores alone, and no head has a size.
    """
    return pj.Workload(pj.load_model(MODEL), MINIBATCH)


def slots_of(drawn: str, workers: int, microbatches: int) -> str:
    """Name the slots that an order is drawn with."""
    if drawn == PUBLISHED:
        return EQUAL if microbatches == workers else DOUBLE
    return drawn


def draw(case: str, workers: int, microbatches: int, drawn: str = PUBLISHED) -> pj.ScheduleTable:
    """Draw the table of a case in one of `DRAWN`."""
    return build(case, workers, microbatches, SLOTS[slots_of(drawn, workers, microbatches)])


def main_setting(data: xr.Dataset) -> xr.Dataset:
    """Select the point at which all claims are read."""
    return data.sel(MAIN)
