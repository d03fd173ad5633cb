"""Certificates of closed forms: what `verify` needs to prove them again without the engine."""

import dataclasses
import json
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from pipejax.analysis.formula.cells import cells, regions
from pipejax.analysis.formula.parameters import weights_by_key
from pipejax.analysis.verify.formula_file import FORMAT, VERSION
from pipejax.base.display import ResultDict
from pipejax.engine.lowering.lower import lower
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import by_microbatch
from pipejax.schedules.table.communication_cells import insert_transfers
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import to_json

ARRAYS = ("preds", "duration_index", "lag_index")

if TYPE_CHECKING:
    from pipejax.analysis.formula.form import Formula


def formula_certificate(form: "Formula", table: ScheduleTable) -> dict[str, Any]:
    """State a closed form with its proof: `verify` checks it by other means than the engine.

    The proof is a set of simplicial cells that cover the domain of the parameters. On each of them
    one facet is the largest, and the makespan at its rays is no longer than that facet (or longer
    by the gap at most); the makespan is convex, so it is no longer anywhere between them. For each
    facet there is a point where it is the count of a longest path, so it is never too large.

    A `ValueError` says that the table is not the one whose makespan it is.
    """
    _check_is_of(form.program, table)
    if form.program.links.posting == "program" and not table.has_communication:
        # the order in which transfers are posted is claimed too
        table = insert_transfers(table, link=form.program.links)
    envelope, names = form.envelope, form.parameters
    rays, _ = regions(envelope.cone, len(form.counts))
    return ResultDict(
        {
            "format": FORMAT,
            "version": VERSION,
            "table": json.loads(to_json(table)),
            "links": dataclasses.asdict(form.program.links),
            "parameters": [
                {
                    "name": name,
                    "unit": unit,
                    "weights": weights_by_key(form.program, form.costs.costs[k], unit),
                }
                for k, (name, unit) in enumerate(zip(names, form.units.tolist(), strict=True))
            ],
            "box": {
                name: [bound if bound < np.inf else None for bound in bounds]
                for name, bounds in form.box.items()
            },
            "facets": form.counts.tolist(),
            "points": envelope.points.tolist(),
            "rays": rays.tolist(),
            "cells": [list(cell) for cell in cells(envelope.cone, len(form.counts))],
            "gap": [*Fraction(envelope.gap).as_integer_ratio()],
        }
    )


def _check_is_of(program: Program, table: ScheduleTable) -> None:
    """Check that a program is a lowered table."""
    for step_end in (True, False):
        other = lower(table, link=program.links, step_end=step_end)
        other = by_microbatch(other) if program.layout.per_microbatch else other
        pairs = ((getattr(program, name), getattr(other, name)) for name in ARRAYS)
        if all(np.array_equal(one, two) for one, two in pairs):
            return
    raise ValueError("the table is not the one that was lowered for this form")
