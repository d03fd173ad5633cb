"""Closed forms of a page: of as many programs as are small enough."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipejax.analysis.formula.formula import formula
from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.costs import FIELDS, PHASE_FIELDS, Costs, unchecked_costs
from pipejax.engine.lowering.program import Program
from pipejax.plots.explorer.factors import Factor, kinds

MOST_FACETS = 12  # that a person reads
MOST_NODES = 200_000  # of all programs whose form is looked for: a few seconds


class FormSearch:
    """Looks for the closed forms of programs as long as there are not too many nodes in all."""

    def __init__(self) -> None:
        """Begin with the nodes that may be searched."""
        self.nodes_left = MOST_NODES

    def form(
        self,
        program: Program,
        run: Evaluation,
        factors: Sequence[Factor],
        base: Float[NumpyArray, " costs"],
    ) -> dict[str, Any] | None:
        """The form of a program of a run's table, or None where it is too large or pairs overlap.

        Its parameters are the kinds of costs that have factors: a time, where it is one for all
        stages and messages, else the factor itself. `base` is what the factors multiply.
        """
        overlaps = run.costs.pair_factor is not None and program.layout.num_pairs
        if overlaps or program.num_nodes > self.nodes_left:
            return None
        self.nodes_left -= program.num_nodes
        own, parameters, units, is_time = np.array(kinds(run)), {}, [], []
        for factor in factors:
            costs = base[own == factor.key]
            if costs.size and costs.max() > 0:
                is_one = costs.min() == costs.max()
                value = 1.0 if is_one else getattr(run.costs, field_of(factor.key))
                parameters[factor.key] = value
                units.append(float(costs[0]) if is_one else 1.0)
                is_time.append(bool(is_one))
        try:
            found = formula(program, _weights(run.costs, parameters), max_facets=MOST_FACETS)
        except ValueError:  # no few sums bound it
            return None
        return {
            "parameters": [*parameters],
            "units": units,
            "isTime": is_time,
            "facets": [[float(count) for count in facet] for facet in found.facets],
            "exact": found.exact,
            "gap": found.gap,
        }


def field_of(key: str) -> str:
    """Field of `Costs` that holds a kind of cost."""
    return PHASE_FIELDS.get(key, key)


def _weights(costs: Costs, parameters: dict[str, Any]) -> dict[str, Costs]:
    """Costs where one parameter is 1 and all others are 0; what costs nothing stays known."""
    named = {field_of(key) for key in parameters}
    free = {
        field: 0.0 for field in FIELDS if field not in named and getattr(costs, field) is not None
    }
    return {
        key: unchecked_costs(free | {field_of(key): value}) for key, value in parameters.items()
    }
