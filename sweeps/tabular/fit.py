"""The one number of the tabular-schedule paper's cost model that is fitted: the efficiency e_c.

The paper reports neither its efficiency factors nor its minibatch. Its Table I says that Hanayo is
2.33 % faster than Chimera at S = B = 8 on slow_nw_mid_cp. Newton's method on the evaluator, with
the gradient of both makespans, finds the share of the compute peak at which ours is: everything
else is then a prediction.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import pipejax as pj
from pipejax.typing import Array, Float
from sweeps.tabular.settings import (
    H100_BANDWIDTH,
    MAIN,
    SYSTEMS,
    Setting,
    draw,
    system_at,
    workload,
)

WORKERS = MICROBATCHES = 8
CHIMERA, HANAYO = "chimera", "hanayo, 2 waves"
FITTED_TO = {"slow_nw_mid_cp": 0.0233}  # gain of Hanayo over Chimera
OUTLIERS = {**FITTED_TO, "slow_nw_fast_cp": -0.1232}  # its Table I, as far as it is known
START, STEPS, TOLERANCE = 0.5, 20, 1e-12


class Fit(NamedTuple):
    """The fitted efficiency.

    Attributes:
      compute_efficiency: e_c.
      residual: of the number that it is fitted to.
      steps: of Newton's method.
    """

    compute_efficiency: float
    residual: float
    steps: int

    @property
    def setting(self) -> Setting:
        """The calibrated setting."""
        return Setting(self.compute_efficiency, H100_BANDWIDTH)


def gain_at(system: str) -> Callable[[float], Float[Array, ""]]:
    """Make the function from e_c to the share of time that Hanayo saves against Chimera."""
    tables = [draw(case, WORKERS, MICROBATCHES, MAIN["drawn"]) for case in (HANAYO, CHIMERA)]
    programs = [pj.lower(table, link=MAIN["link"]) for table in tables]

    def gain(efficiency: float) -> Float[Array, ""]:
        machine = system_at(system, Setting(efficiency, H100_BANDWIDTH))
        hanayo, chimera = (
            jnp.asarray(pj.makespan(program, pj.stage_costs(workload(), machine, table)))
            for program, table in zip(programs, tables, strict=True)
        )
        return 1 - hanayo / chimera

    return gain


def fit() -> Fit:
    """Fit e_c to the published number.

    Raises:
      ArithmeticError: if Newton's method leaves (0, 1] or does not end.
    """
    ((system, published),) = FITTED_TO.items()
    gain_and_slope = jax.jit(jax.value_and_grad(gain_at(system)))
    efficiency = START
    for step in range(STEPS):
        gain, slope = gain_and_slope(efficiency)
        residual = float(gain) - published
        if abs(residual) < TOLERANCE:
            return Fit(efficiency, residual, step)
        efficiency -= residual / float(slope)
        if not 0 < efficiency <= 1:
            raise ArithmeticError(f"e_c left (0, 1] in step {step}: {efficiency}")
    raise ArithmeticError(f"e_c = {efficiency} still misses by {residual} after {STEPS} steps")


def main() -> None:
    """Print the fit, and what it predicts."""
    # jax leaves this function without annotations
    jax.config.update("jax_enable_x64", True)
    found = fit()
    show = Console().print
    show(
        f"e_c = {found.compute_efficiency:.4f} after {found.steps} steps of Newton's method, "
        f"residual {100 * found.residual:+.1e} points"
    )
    gains = {name: float(gain_at(name)(found.compute_efficiency)) for name in SYSTEMS}
    for name, gain in gains.items():
        known = f", published {100 * OUTLIERS[name]:+.2f} %" if name in OUTLIERS else ""
        show(f"  {name:16} Hanayo saves {100 * gain:+6.2f} %{known}", highlight=False)
    mean = np.mean([gain for name, gain in gains.items() if not name.startswith("slow_nw")])
    show(f"  mid and fast networks: mean {100 * mean:.1f} %, published 12 to 14 %", highlight=False)


if __name__ == "__main__":
    main()
