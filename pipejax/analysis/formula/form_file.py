"""Closed forms that were saved: read from what `pipejax formula --out` wrote, or a certificate."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.formula.cone import Cone, Vectors
from pipejax.analysis.formula.facets import Envelope
from pipejax.analysis.formula.form import Formula
from pipejax.analysis.formula.parameters import linear_costs
from pipejax.analysis.verify.formula_file import (
    FormulaContent,
    is_formula,
    read_formula_certificate,
)
from pipejax.base.checks import check_types
from pipejax.base.data_files import load_json
from pipejax.costs.costs import PHASE_FIELDS, unchecked_costs
from pipejax.engine.lowering.lower import lower
from pipejax.schedules.cells.ops import STEP_END


def read_formula(source: str | Path | Mapping[str, Any]) -> Formula:
    """Read a closed form that was saved; `verify` says whether it is right.

    Args:
      source: file of `pipejax formula --out`, or a certificate of a form, or what it holds.

    Returns:
      The form.

    Raises:
      ValueError: if it is no closed form.
      ScheduleError: if its table cannot run.
      OSError: if the file cannot be read.

    Example:
      >>> import json, pathlib, tempfile, pipejax as pj
      >>> table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "form.json"
      >>> claimed = pj.formula(pj.lower(table, step_end=False)).certificate(table)
      >>> _ = path.write_text(json.dumps(claimed))
      >>> print(pj.read_formula(path))
      max(6F + 4B + 4c_F + 3c_B, 4F + 6B + 3c_F + 4c_B)
    """
    check_types(source=(source, str, Path, Mapping))
    data = source if isinstance(source, Mapping) else load_json(Path(source))
    name = "the form" if isinstance(source, Mapping) else str(source)
    if not is_formula(data):
        raise ValueError(f"{name} holds no closed form: `pipejax formula --out` writes one")
    content = read_formula_certificate(data, name)
    ends = [phase.name for phase in STEP_END]
    step_end = any(np.any(weights[phase]) for weights in content.weights for phase in ends)
    program = lower(content.table, link=content.links, step_end=step_end)
    costs = linear_costs(
        program,
        {
            parameter: unchecked_costs(
                {PHASE_FIELDS.get(key, key): np.array(value) / unit for key, value in own.items()}
            )
            for parameter, unit, own in zip(
                content.names, content.units, content.weights, strict=True
            )
        },
    )
    facets, gap = np.array(content.facets), content.gap
    box = data.get("certificate", data)["box"]
    return Formula(
        parameters=costs.names,
        counts=facets,
        units=np.array(content.units, object),
        exact=gap == 0,
        gap=float(gap),
        evaluations=content.report.get("evaluations", 0),
        box={key: (low, math.inf if high is None else high) for key, (low, high) in box.items()},
        program=costs.program,
        costs=costs._replace(units=np.array(content.units, object)),
        envelope=Envelope(facets, np.array(content.points, object), _cone(content), {}, gap, 0),
    )


def _cone(content: FormulaContent) -> Cone:
    """The cone above the facets, from its rays."""
    size, dims = len(content.names), len(content.domain[0])
    rays = np.array(content.rays, object)
    facets = np.array(content.facets, object)
    largest = (rays[:, :size] @ facets.T).max(axis=1)
    upwards = np.eye(dims + 1, dtype=int)[-1].astype(object)
    above = np.vstack([np.column_stack([rays, largest]), upwards])
    sums: Vectors = np.zeros((len(facets), dims + 1), object)
    sums[:, :size], sums[:, -1] = -facets, 1
    domain = np.column_stack([np.array(content.domain, object), np.zeros(len(content.domain), int)])
    inequalities = np.vstack([domain, upwards, sums])
    return Cone(above, inequalities, above @ inequalities.T == 0)
