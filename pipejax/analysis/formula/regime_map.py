"""Which of several schedules is the fastest over two ratios of parameters: a map of regimes.

Forms are homogeneous: where all parameters double, so do all makespans. So of three parameters the
ratios of two to the first say all.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.formula.form import Formula
from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.base.ties import least_named

RANGES = ((0.5, 4.0), (0.0, 2.0))  # of the second and third parameter, in times of the first
SIDE = 200  # values of each
WITHIN = (
    1 / np.pi
)  # where in its cell a value lies: on no border, where two tie who differ beside it


class RegimeMap(NamedTuple):
    """A map of the fastest."""

    # the first, in times of which the others are; that across; that up
    parameters: tuple[str, str, str]
    across: Float[NumpyArray, " across"]  # values of the second
    up: Float[NumpyArray, " up"]  # values of the third
    names: list[str]  # who is fastest somewhere, ties as "a = b", the largest area first
    codes: Int[NumpyArray, "up across"]  # (up, across) place in names
    box: dict[str, tuple[float, float]]  # what is drawn of each parameter; the first is 1

    @property
    def shares(self) -> dict[str, float]:
        """Share of the map, by name."""
        return {name: float(np.mean(self.codes == k)) for k, name in enumerate(self.names)}


def regime_map(forms: Mapping[str, Formula]) -> RegimeMap:
    """Find who is fastest where the second and third of three parameters vary."""
    first = next(iter(forms.values()))
    if len(first.parameters) != 3:
        given = ", ".join(first.parameters)
        raise wrong("parameters", f"of a map must be three, as F,B,c, got {given}")
    for name, form in forms.items():
        if not form.exact:
            raise ValueError(f"the form of {name} is not exact: give a box or more facets")
    unit, *others = first.parameters
    box = {unit: (0.0, np.inf), **dict(zip(others, RANGES, strict=True)), **first.box}
    for name in others:
        low, high = box[name]
        if not low < high < np.inf:
            raise wrong("box", f"of {name} must be a range to draw a map, got {low:g} to {high:g}")
    if not box[unit][0] <= 1 <= box[unit][1]:
        raise wrong("box", f"{unit} must hold 1, in times of which the others are drawn")
    steps = (np.arange(SIDE) + WITHIN) / SIDE
    across, up = (
        float(low) + (float(high) - float(low)) * steps
        for low, high in (box[name] for name in others)
    )
    theta = np.stack(np.broadcast_arrays(1.0, across, up[:, None]), axis=-1)
    times = np.stack([form(theta) for form in forms.values()])
    drawn = {unit: (1.0, 1.0)} | {name: box[name] for name in others}
    return RegimeMap(first.parameters, across, up, *least_named(times, [*forms]), drawn)
