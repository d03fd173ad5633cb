"""Certificates: what a run claims, with all that it takes to derive it again.

`verify` derives it by other means; what writes a certificate takes every number from the engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.analysis.runs.activation_memory import ActivationMemory, activation_memory
from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.verify.certificate_file import SIZES, new_certificate
from pipejax.analysis.verify.event_run import (
    by_worker,
    cell_name,
    reduction_name,
    transfer_name,
    update_name,
)
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS
from pipejax.schedules.cells.ops import HOST, Op, Phase
from pipejax.schedules.table.communication_cells import insert_transfers

Limits = Sequence[float] | Float[NumpyArray, " workers"]


def certificate(
    evaluation: Evaluation,
    *,
    memory: ActivationMemory | None = None,
    limits: Limits | None = None,
    objective: str = "makespan",
    offload: bool = False,
    lower_bounds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """State what a run claims, with its table, links and costs: `verify` derives it again.

    Args:
      evaluation: the run.
      memory: its activation memory, which says what activations take; one each if None.
      limits: (workers) what each worker may hold of activations, where that is claimed.
      objective: what was to be least: "makespan" or "span".
      offload: whether a search of the schedule might offload activations: then memory chains fail.
      lower_bounds: lower bounds [s] by what they rest on (`CheckedBound`), as
        {"memory chain": 12.0}.

    Returns:
      What JSON can hold; write it to a file with `json.dumps`.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("zb-h1", num_workers=2, num_microbatches=3)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.5))
      >>> claimed = pj.certificate(run, limits=[2.0, 2.0])
      >>> claimed["claim"]["makespan"], claimed["claim"]["peak_memory"]["worker 0"]
      (12.0, 2.0)
      >>> pj.verify(claimed).ok
      True
    """
    check_types(evaluation=(evaluation, Evaluation))
    held = activation_memory(evaluation) if memory is None else memory
    if evaluation.links.posting == "program" and not evaluation.table.has_communication:
        # the order in which transfers are posted is claimed too
        table = insert_transfers(evaluation.table, link=evaluation.links)
        evaluation = evaluate(table, evaluation.costs, link=evaluation.links)
    table, sizes = evaluation.table, (held.sizes, held.weight_share, held.checkpoints)
    workers = range(evaluation.workers)
    return new_certificate(
        "run",
        table,
        evaluation.links,
        costs={
            "seconds": _seconds(evaluation),
            "memory": {name: size.tolist() for name, size in zip(SIZES, sizes, strict=True)},
        },
        claim={
            "objective": objective,
            "limits": None if limits is None else np.asarray(limits, float).tolist(),
            "offload": offload,
            "makespan": evaluation.makespan,
            "max_span": evaluation.max_span,
            "busy": by_worker(evaluation.busy.tolist()),
            "peak_in_flight": by_worker(evaluation.peak_in_flight.tolist()),
            "offloaded": int((table.phase == Phase.O).sum()),
            "peak_memory": by_worker(held.peak.tolist()),
            "lower_bounds": [
                {"by": by, "value": float(value)} for by, value in (lower_bounds or {}).items()
            ],
        },
        proof={
            "ops": _ops(evaluation),
            "transfers": _transfers(evaluation),
            "held_from": by_worker(held.curve(w)[0].tolist() for w in workers),
            "held": by_worker(held.curve(w)[1].tolist() for w in workers),
        },
    )


def _seconds(evaluation: Evaluation) -> dict[str, Any]:
    """Lists of what is known: (stages) by phase letter, (2, pipes, stages - 1) of messages.

    And a last axis of microbatches where a time differs by them.
    """
    table, costs = evaluation.table, evaluation.costs
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        [*PHASE_FIELDS, "pair", "pair_factor"], (table.num_stages,)
    )
    shapes |= dict.fromkeys(MESSAGE_FIELDS, (2, table.num_pipes, table.num_stages - 1))
    found = {}
    for key, shape in shapes.items():
        value = getattr(costs, PHASE_FIELDS.get(key, key))
        if value is not None:
            array = np.asarray(value, np.float64)
            each = (table.num_microbatches,) if array.ndim > len(shape) else ()
            found[key] = np.broadcast_to(array, (*shape, *each)).tolist()
    return found


def _ops(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Start and end of cells, all-reduces and updates by name."""
    program, found = evaluation.program, {}
    times = evaluation.start.tolist(), evaluation.finish.tolist()
    for worker, row in enumerate(evaluation.table.rows()):
        for slot, cell in enumerate(row):
            if cell and cell[0].phase in (*evaluation.links.executed, *HOST):
                start, end = (time[worker][slot] for time in times)
                found[cell_name(";".join(map(str, cell)), worker, slot)] = {
                    "start": start,
                    "end": end,
                }
    for node in program.beside_cells.tolist():
        stage, worker = int(program.stage[node]), int(program.worker[node])
        name = update_name(stage, worker)
        if program.phase[node] == Phase.A:
            name = reduction_name(stage, int(program.microbatch[node]))
        start, end = evaluation.node_start[node], evaluation.node_finish[node]
        found[name] = {"start": float(start), "end": float(end)}
    return found


def _transfers(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """When messages leave and arrive, by name."""
    sent = evaluation.program.messages
    columns = (sent.phase, sent.stage, sent.microbatch, sent.sender, sent.receiver)
    times = evaluation.message_start, evaluation.message_finish
    rows = zip(*(column.tolist() for column in (*columns, *times)), strict=True)
    return {
        transfer_name(str(Op(Phase(phase), stage, microbatch)), *workers): {
            "leaves": leaves,
            "arrives": arrives,
        }
        for phase, stage, microbatch, *workers, leaves, arrives in rows
    }
