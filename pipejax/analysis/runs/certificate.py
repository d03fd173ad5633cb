"""Certificates: what a run claims, with all that it takes to derive it again.

`verify` derives it by other means; what writes a certificate takes every number from the engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.analysis.runs.activation_memory import ActivationMemory, activation_memory
from pipejax.analysis.runs.evaluate import Evaluation, evaluate
from pipejax.analysis.verify.certificate_file import AT_WORK, SIZES, new_certificate
from pipejax.analysis.verify.event_run import (
    by_worker,
    cell_name,
    reduction_name,
    transfer_name,
    update_name,
)
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs.costs import MESSAGE_FIELDS
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.table.communication_cells import insert_transfers, messages_of
from pipejax.schedules.table.table import ScheduleTable

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
            "memory": {name: size.tolist() for name, size in zip(SIZES, sizes, strict=True)}
            | ({AT_WORK: held.at_work.tolist()} if held.at_work.any() else {}),
        },
        claim={
            "objective": objective,
            "limits": None if limits is None else np.asarray(limits, float).tolist(),
            "offload": offload,
            "makespan": evaluation.makespan,
            "max_span": evaluation.max_span,
            "busy": by_worker(evaluation.busy.tolist()),
            "peak_in_flight": by_worker(evaluation.peak_in_flight.tolist()),
            "offloaded": table.num_offloaded,
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
    """Lists of what is known: (stages or workers) by letters, (2, pipes, boundaries) of messages.

    And a last axis of microbatches where a time differs by them.
    """
    table, costs, layout = evaluation.table, evaluation.costs, evaluation.program.layout
    values = {phase.name: costs.time(phase) for phase in layout.timed}
    shapes: dict[str, tuple[int, ...]] = {
        phase.name: (layout.places_of(phase),) for phase in layout.timed
    }
    shapes |= dict.fromkeys(("pair", "pair_factor"), (table.num_stages,))
    shapes |= dict.fromkeys(MESSAGE_FIELDS, layout.link_shape[:3])
    found = {}
    for key, shape in shapes.items():
        value = values[key] if key in values else getattr(costs, key)
        if value is not None:
            array = np.asarray(value, np.float64)
            each = (table.num_microbatches,) if array.ndim > len(shape) else ()
            found[key] = np.broadcast_to(array, (*shape, *each)).tolist()
    return found


def _ops(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Start and end of cells, all-reduces and updates by name."""
    program, grammar, found = evaluation.program, evaluation.table.grammar, {}
    runs = {*evaluation.links.executed(grammar), *grammar.host, *grammar.off_row}
    times = evaluation.start.tolist(), evaluation.finish.tolist()
    for worker, row in enumerate(evaluation.table.rows()):
        for slot, cell in enumerate(row):
            if cell and cell[0].phase in runs:
                start, end = (time[worker][slot] for time in times)
                name = ";".join(grammar.text((op,)) for op in cell)
                found[cell_name(name, worker, slot)] = {"start": start, "end": end}
    for node in program.beside_cells.tolist():
        stage, worker = int(program.stage[node]), int(program.worker[node])
        name = update_name(stage, worker)
        if program.worker[node] == NO_WORKER:  # an all-reduce is of all copies
            name = reduction_name(stage, int(program.microbatch[node]))
        start, end = evaluation.node_start[node], evaluation.node_finish[node]
        found[name] = {"start": float(start), "end": float(end)}
    return found


def _transfers(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """When messages leave and arrive, by name."""
    table, sent = evaluation.table, evaluation.program.messages
    found = messages_of(table)
    ends = zip(*(x.tolist() for x in (found.producer, found.consumer, found.to_stage)), strict=True)
    columns = (sent.phase, sent.stage, sent.microbatch, sent.sender, sent.receiver)
    times = evaluation.message_start, evaluation.message_finish
    rows = zip(*(column.tolist() for column in (*columns, *times)), strict=True)
    named = {}
    for (maker, waits, target), (phase, stage, microbatch, *workers, leaves, arrives) in zip(
        ends, rows, strict=True
    ):
        name = str(Op(Phase(phase), stage, microbatch))
        if not table.grammar.has_usual_messages:
            of = (stage, microbatch), (target, None)
            name = " to ".join(
                _op_of(table, cell, *key) for cell, key in zip((maker, waits), of, strict=True)
            )
        named[transfer_name(name, *workers)] = {"leaves": leaves, "arrives": arrives}
    return named


def _op_of(table: ScheduleTable, cell: int, stage: int, microbatch: int | None) -> str:
    """Text of the first op of a cell that is of a stage, and of a microbatch if one is given."""
    ops = table.cell(*table.place(cell))
    return table.grammar.text(
        next((op,) for op in ops if op.stage == stage and microbatch in (None, op.microbatch))
    )
