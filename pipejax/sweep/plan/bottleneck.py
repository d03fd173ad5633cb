"""What bounds a layout: the resource of the machine that takes the largest share of its step.

A step time is a sum of times on the critical path. A rate that grows by a little, or a latency that
does, changes it by the share of the path that this resource takes (Euler's identity), so shares are
differences of step times; the compiled prices of all layouts serve every machine.
"""

from typing import Any

import jax
import numpy as np

from pipejax.analysis.sensitivity import POWER, RESOURCES
from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.system import System
from pipejax.costs.system_fields import FIELDS
from pipejax.sweep.plan.layouts import Layouts
from pipejax.sweep.plan.pricing import price
from pipejax.sweep.plan.programs import exact_times
from pipejax.sweep.plan.request import PlanRequest
from pipejax.sweep.plan.search import Rows, groups_of, shape_of

STEP = 1e-4  # by which each resource is changed: far above rounding, and few paths change by it


def bounds_of_steps(request: PlanRequest, layouts: Layouts, rows: Rows) -> list[str]:
    """Name the resource that bounds each of some layouts, as `sensitivity` does."""
    found = [""] * len(rows)
    some = layouts.take(rows)
    for same in groups_of((*some[:3], some.microbatches)):
        most = resource_shares_of(request, some.take(same)).argmax(axis=0)
        for place, resource in zip(same.tolist(), most.tolist(), strict=True):
            found[place] = RESOURCES[resource]
    return found


def resource_shares_of(
    request: PlanRequest, layouts: Layouts
) -> Float[NumpyArray, "resources layouts"]:
    """Shares (resources, layouts) of the step that each resource takes, for one program."""
    shape, count = shape_of(request, layouts, 0), int(layouts.microbatches[0])
    systems = [request.system, *(_changed(request.system, name) for name in RESOURCES)]
    each: System = jax.tree.map(lambda *leaves: np.repeat(leaves, len(layouts)), *systems)
    every = layouts.take(np.tile(np.arange(len(layouts)), len(systems)))
    costs = price(request, shape, every, each).costs
    times = exact_times(shape, count, costs, request.links).reshape(len(systems), -1)
    power = np.array(list(POWER.values()))
    return power[:, None] * (times[1:] / times[0] - 1) / STEP


def _changed(system: System, name: str) -> System:
    """A system of which one resource is more."""
    path = FIELDS[name]

    def changed(where: Any, leaf: Any) -> Any:
        # the leaves of an efficiency are the entries of its curve: they have no name of their own
        is_it = tuple(key.name for key in where if hasattr(key, "name")) == path
        return leaf * (1 + STEP) if is_it else leaf

    found: System = jax.tree_util.tree_map_with_path(changed, system)
    return found
