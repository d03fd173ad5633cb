"""Systems, settings and orders of the tabular-schedule paper's experiments.

Two settings stand side by side. *As reported* takes the paper's 34 TB/s of memory bandwidth and
full efficiency; *calibrated* takes the 3.35 TB/s of one H100, and an efficiency of compute that
`sweeps.tabular.fit` fits to one published number. The rest of a setting is not published at all:
the minibatch, how messages hold their links, the slots that orders are drawn with, how many
microbatches a pipe of Chimera admits, how often it exchanges gradients, and whether all links and
stages are equal. All of it is searched.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import xarray as xr

import pipejax as pj
from pipejax.costing import Efficiency, Number
from sweeps.kit.cases import CASES, build

MODEL = "tabular-128l"
LEVELS = ("slow", "mid", "fast")
SYSTEMS = tuple(f"{network}_nw_{compute}_cp" for network in LEVELS for compute in LEVELS)

AS_REPORTED, CALIBRATED = "as reported", "calibrated"
SLOTS: Mapping[str, Mapping[str, float]] = {
    "F=1, B=1": {"F": 1, "B": 1},
    "F=1, B=2": {"F": 1, "B": 2},  # a backward of this model takes about twice its forward
}
EQUAL, DOUBLE = SLOTS
# orders are published for B = S alone, drawn with F = B; all others are our list scheduler's
AT_SQUARE = "F = B where B = S"
DRAWN = (AT_SQUARE, *SLOTS)
# microbatches that a pipe of Chimera keeps active at most, by workers; None is its builder's own
ADMISSIONS: Mapping[str, Callable[[int], int | None]] = {
    "P": lambda _: None,
    "1.25 P": lambda workers: workers + workers // 4,
}
ADMITTED = tuple(case for case, options in CASES.items() if options["name"].startswith("chimera"))
# all-reduces of a stage at the end of the step, by workers and microbatches; the two stages of a
# worker are one link's business unless they go at once
EXCHANGES: Mapping[str, Callable[[int, int], float]] = {
    "free": lambda _, __: 0.0,
    "both stages at once": lambda _, __: 0.5,
    "one stage after the other": lambda _, __: 1.0,
    "after every P microbatches": lambda workers, microbatches: microbatches / workers,
    "after every microbatch": lambda _, microbatches: microbatches / 2,
}
ALL_EQUAL, SLOW_LINK, DEAR_STAGE = "none", "a slow link", "a dearer last stage"
SLOWER = 10.0  # of the link between the two workers in the middle: one level of the paper's grid
# what a setting is made of; what a schedule has no part in changes nothing there
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "setting": (AS_REPORTED, CALIBRATED),
    "minibatch": (256, 1024, 4096),
    "link": ("delay", "queued", "blocking", "rendezvous"),
    "drawn": DRAWN,
    "admission": tuple(ADMISSIONS),
    "exchange": tuple(EXCHANGES),
    "inequality": (ALL_EQUAL, SLOW_LINK, DEAR_STAGE),
}
# all claims of the paper are read at this one point: of those that can fail none holds more
MAIN: Mapping[str, Any] = {
    "setting": CALIBRATED,
    "minibatch": 1024,
    "link": "blocking",
    "drawn": AT_SQUARE,
    "admission": "P",
    "exchange": "after every P microbatches",
    "inequality": ALL_EQUAL,
}


class Setting(NamedTuple):
    """Numbers that the paper leaves open about its systems.

    Attributes:
      compute_efficiency: share of the compute peak that an op reaches, e_c.
      memory_bandwidth: [B/s].
    """

    compute_efficiency: Number
    memory_bandwidth: Number


REPORTED = Setting(1.0, 34e12)
H100_BANDWIDTH = 3.35e12


def system_in(system: pj.System, setting: Setting) -> pj.System:
    """Put a system, whose numbers may be traced, in a setting, whose numbers may be traced."""
    return dataclasses.replace(
        system,
        compute_efficiency=Efficiency(shares=(setting.compute_efficiency,)),
        memory_bandwidth=setting.memory_bandwidth,
    )


def system_at(name: str, setting: Setting) -> pj.System:
    """Load one of the paper's systems in a setting."""
    return system_in(pj.load_system(name), setting)


def workload(minibatch: int = MAIN["minibatch"]) -> pj.Workload:
    """Return the model of the paper at a minibatch.

    Its 80 heads do not divide the hidden size of 4096: only FLOP and bytes are counted, in which
    the heads enter as the number of attention scores alone, and no head has a size.
    """
    return pj.Workload(pj.load_model(MODEL), minibatch)


def slots_drawn_with(rule: str, workers: int, microbatches: int) -> str:
    """Name the slots that an order is drawn with."""
    if rule == AT_SQUARE:
        return EQUAL if microbatches == workers else DOUBLE
    return rule


def draw(
    case: str,
    workers: int,
    microbatches: int,
    rule: str = MAIN["drawn"],
    admission: str = MAIN["admission"],
) -> pj.ScheduleTable:
    """Draw the table of a case in one of `DRAWN`, with one of `ADMISSIONS`."""
    options = {"in_flight": ADMISSIONS[admission](workers)} if case in ADMITTED else {}
    slots = SLOTS[slots_drawn_with(rule, workers, microbatches)]
    return build(case, workers, microbatches, slots, **options)


def main_setting(data: xr.Dataset) -> xr.Dataset:
    """Select the point at which all claims are read."""
    return data.sel(MAIN)
