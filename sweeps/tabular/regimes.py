"""Exact regions where one schedule beats another: regime maps of their closed forms as one dataset.

F, B and c are what one microbatch takes on one worker and what a message takes, under the link
model in which the paper's claims are read. Only their ratios count, so B / F and c / F span a
plane; each form is exact on all of it, and so are the borders. The systems of the tabular-schedule
paper and some accelerators are points on it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr

import pipejax as pj
from pipejax.analysis import named_parameters
from pipejax.files import provenance
from pipejax.results import Region
from sweeps.kit.command import write
from sweeps.tabular.fit import calibrated
from sweeps.tabular.settings import MAIN, SYSTEMS, Setting, draw, system_at, workload

PARAMETERS = ("F", "B", "c")


class Pair(NamedTuple):
    """Two schedules to compare.

    Attributes:
      one: the first, by its case.
      other: the second.
      workers: P.
      microbatches: M.
    """

    first: str
    second: str
    workers: int
    microbatches: int


PAIRS: Mapping[str, Pair] = {
    "chimera": Pair("chimera", "1f1b", 8, 32),
    "hanayo": Pair("hanayo, 2 waves", "chimera", 8, 8),
}
POINTS = 241  # on each axis
BACKWARDS, MESSAGES = (0.5, 4.0), (1e-5, 10.0)  # of a forward
ACCELERATORS = ("a100", "h100", "b200", "mi300x")


def sweep(points: int = POINTS, setting: Setting | None = None) -> xr.Dataset:
    """Evaluate both forms of each pair on the plane, and place the systems on it.

    Args:
      points: on each axis.
      setting: of the paper's systems; the calibrated one if None.

    Returns:
      By (pair, backward, message): ratio of step times; by (pair, system): B / F and c / F; by
      pair: the c / F up to which the first is as fast at B = 2F, NaN where it is everywhere. The
      borders are attributes: inequalities where the first is as fast or faster.
    """
    backward, message = np.linspace(*BACKWARDS, points), np.geomspace(*MESSAGES, points)
    plane = {"F": 1.0, "B": backward[:, None], "c": message[None, :]}
    forms = {name: [_form(case, pair) for case in pair[:2]] for name, pair in PAIRS.items()}
    ratio = [first(**plane) / second(**plane) for first, second in forms.values()]
    setting = calibrated() if setting is None else setting
    systems = {name: system_at(name, setting) for name in SYSTEMS}
    systems |= {name: pj.load_system(name) for name in ACCELERATORS}
    places = np.array(
        [[_place(system, pair) for system in systems.values()] for pair in PAIRS.values()]
    )
    comparisons = {name: pj.analysis.versus(*pair) for name, pair in forms.items()}
    return xr.Dataset(
        {
            "ratio": (("pair", "backward", "message"), np.array(ratio)),
            "backward_of": (("pair", "system"), places[..., 0]),
            "message_of": (("pair", "system"), places[..., 1]),
            "border": ("pair", [_border(*pair) for pair in forms.values()]),
        },
        coords={
            "pair": list(PAIRS),
            "one": ("pair", [pair.first for pair in PAIRS.values()]),
            "other": ("pair", [pair.second for pair in PAIRS.values()]),
            "workers": ("pair", [pair.workers for pair in PAIRS.values()]),
            "microbatches": ("pair", [pair.microbatches for pair in PAIRS.values()]),
            "facets": ("pair", [f"{len(a.facets)} and {len(b.facets)}" for a, b in forms.values()]),
            "backward": backward,
            "message": message,
            "system": list(systems),
        },
        attrs={
            "title": f"regimes of closed forms, {MAIN['link']} links",
            "link": MAIN["link"],
            **{
                f"{name}: one at most": _texts(comparison.one_at_most)
                for name, comparison in comparisons.items()
            },
            **{f"{name}: verdict": comparison.verdict for name, comparison in comparisons.items()},
            **provenance(),
        },
    )


def _border(first: pj.results.Formula, second: pj.results.Formula) -> float:
    """Close in on the message time up to which the first is as fast, at B = 2F."""
    low, high = 0.0, MESSAGES[1]

    def wins(message: float) -> bool:
        at = {"F": 1.0, "B": 2.0, "c": message}
        return float(first(**at)) <= float(second(**at))

    if wins(high):
        return np.nan
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low


def _texts(regions: Sequence[Region]) -> str:
    return " or ".join(" and ".join(region.texts) for region in regions)


def _form(case: str, pair: Pair) -> pj.results.Formula:
    table = draw(case, pair.workers, pair.microbatches)
    program = pj.lower(table, link=MAIN["link"], step_end=False)
    return pj.formula(program, named_parameters(program, PARAMETERS, table.worker_parts))


def _place(system: pj.System, pair: Pair) -> tuple[float, float]:
    """B / F and c / F of the paper's model on a system, at the minibatch of the paper."""
    table = draw("1f1b", pair.workers, pair.microbatches)
    costs = pj.stage_costs(workload(), system, table)
    forward, backward = (_mean(leaf) for leaf in (costs.forward, costs.backward))
    return backward / forward, (_mean(costs.latency) + _mean(costs.transmit)) / forward


def _mean(leaf: Any) -> float:
    return float(np.mean(np.asarray(leaf)))


def main() -> None:
    """Write the dataset."""
    jax.config.update("jax_enable_x64", True)
    write(
        __doc__ or "", sweep, lambda data: f"{data.ratio.size} points of {data.sizes['pair']} maps"
    )


if __name__ == "__main__":
    main()
