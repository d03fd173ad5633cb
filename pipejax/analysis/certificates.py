"""Certificates as files: the claims of a run, with the inputs that derive them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.runs.evaluate import ActivationMemory, Evaluation, activation_memory, evaluate
from pipejax.base.array_types import Num, NumpyArray
from pipejax.base.checks import check_types
from pipejax.base.data_files import load_json
from pipejax.base.display import ResultDict, with_short_repr
from pipejax.checker.claims import Discrepancy
from pipejax.checker.run import by_worker
from pipejax.checker.verify import CheckedBound, Verdict, check
from pipejax.costs.costs import MESSAGE_FIELDS
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.schedules.cells.ops import Op, Phase
from pipejax.schedules.table.communication_cells import insert_transfers, table_messages
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import to_json

VERSION = 2
SIZES = ("sizes", "weight_share", "checkpoints")
AT_WORK = "at_work"  # key of the memory that B, I and W recompute while they run

# the checker imports nothing, so its records get their short repr here
with_short_repr("ok makespan problems bounds")(Verdict)
with_short_repr("")(Discrepancy)
with_short_repr("")(CheckedBound)

Limits = Sequence[float] | Num[NumpyArray, " workers"]


def verify(certificate: str | Path | Mapping[str, Any]) -> Verdict:
    """Check all claims of a certificate with an independent run of its table.

    The checker shares no code with the package: it runs the table as events that wait for events,
    in plain Python, as docs/semantics.md says.

    Args:
      certificate: certificate of a run, a closed form or a solved problem, or its file.

    Returns:
      The derived makespan, claims that do not hold, and the reasons of lower bounds.

    Raises:
      ValueError: if the content is no certificate of this version, a key is missing or unknown, or
        the costs do not fit the table.
      OSError: if the file cannot be read.

    Cost:
      About linear in the ops of the table: some seconds for a hundred thousand ops.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> claimed = pj.certificate(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
      >>> verdict = pj.verify(claimed)
      >>> verdict.ok, verdict.makespan
      (True, 15.0)
      >>> claimed["proof"]["ops"]["1F0 (worker 1, slot 1)"]["start"] = 0.5
      >>> print(*pj.verify(claimed).problems)
      ops: 1F0 (worker 1, slot 1): start: claimed 0.5, derived 1.0, behind 0SEND_F0 (worker 0 to 1)
    """
    check_types(certificate=(certificate, str, Path, Mapping))
    if isinstance(certificate, Mapping):
        return check(certificate)
    return check(load_json(Path(certificate)), str(certificate))


def new_certificate(
    kind: str,
    table: ScheduleTable,
    links: Links,
    *,
    costs: Mapping[str, Any],
    claim: Mapping[str, Any],
    proof: Mapping[str, Any],
) -> dict[str, Any]:
    """Build a certificate as a dictionary that JSON can hold."""
    table_content = json.loads(to_json(table))
    all_costs = {"links": json.loads(json.dumps(dataclasses.asdict(links))), **costs}
    parts = {"costs": all_costs, "claim": dict(claim), "proof": dict(proof)}
    return ResultDict({"kind": kind, "version": VERSION, "table": table_content, **parts})


def certificate(
    evaluation: Evaluation,
    *,
    memory: ActivationMemory | None = None,
    limits: Limits | None = None,
    objective: str = "makespan",
    offload: bool = False,
    lower_bounds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the results of a run with its table, links and costs, so that `verify` can check them.

    Args:
      evaluation: the run.
      memory: activation memory of the run; by default each activation has size 1.
      limits: (workers) claimed memory limit of each worker.
      objective: quantity that a search made small: "makespan" or "span".
      offload: whether the search of the schedule might offload activations; lower bounds by memory
        chains do not hold then.
      lower_bounds: lower bounds [s] by their reason (`CheckedBound`), as {"memory chain": 12.0}.

    Returns:
      A dictionary for `json.dumps`.

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
    memory = activation_memory(evaluation) if memory is None else memory
    if evaluation.links.posting == "program" and not evaluation.table.has_communication:
        # the certificate also states the order in which transfers are posted
        table = insert_transfers(evaluation.table, link=evaluation.links)
        evaluation = evaluate(table, evaluation.costs, link=evaluation.links)
    table, sizes = evaluation.table, (memory.sizes, memory.weight_share, memory.checkpoints)
    curves = [memory.curve(worker) for worker in range(evaluation.workers)]
    memory_sizes = {name: size.tolist() for name, size in zip(SIZES, sizes, strict=True)}
    if memory.at_work.any():
        memory_sizes[AT_WORK] = memory.at_work.tolist()
    return new_certificate(
        "run",
        table,
        evaluation.links,
        costs={"seconds": _seconds(evaluation), "memory": memory_sizes},
        claim={
            "objective": objective,
            "limits": None if limits is None else np.asarray(limits, float).tolist(),
            "offload": offload,
            "makespan": evaluation.makespan,
            "max_span": evaluation.max_span,
            "busy": by_worker(evaluation.busy.tolist()),
            "peak_in_flight": by_worker(evaluation.peak_in_flight.tolist()),
            "offloaded": table.num_offloaded,
            "peak_memory": by_worker(memory.peak.tolist()),
            "lower_bounds": [
                {"by": by, "value": float(value)} for by, value in (lower_bounds or {}).items()
            ],
        },
        proof={
            "ops": _ops(evaluation),
            "transfers": _transfers(evaluation),
            "held_from": by_worker(times.tolist() for times, _ in curves),
            "held": by_worker(levels.tolist() for _, levels in curves),
        },
    )


def _seconds(evaluation: Evaluation) -> dict[str, Any]:
    """Return a run's costs [s] as {letter of a phase or name of a cost: nested list}."""
    # Lists have shape (stages), (workers) for phases with the scope worker, or
    # (2, pipes, boundaries) for messages. Times that differ by microbatch have a last axis for it.
    table, costs, layout = evaluation.table, evaluation.costs, evaluation.program.layout
    values: dict[str, tuple[Any, tuple[int, ...]]]
    values = {p.name: (costs.time(p), (layout.num_places(p),)) for p in layout.timed}
    values |= {key: (getattr(costs, key), (table.num_stages,)) for key in ("pair", "pair_factor")}
    values |= {key: (getattr(costs, key), layout.link_shape[:3]) for key in MESSAGE_FIELDS}
    seconds = {}
    for key, (value, shape) in values.items():
        if value is not None:
            array = np.asarray(value, np.float64)
            last_axis = (table.num_microbatches,) if array.ndim > len(shape) else ()
            seconds[key] = np.broadcast_to(array, (*shape, *last_axis)).tolist()
    return seconds


def _ops(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Return {name of an op, all-reduce or update: {"start": s, "end": s}}."""
    program, grammar, ops = evaluation.program, evaluation.table.grammar, {}
    on_lanes = *grammar.host_phases, *grammar.side_phases
    executed = {*evaluation.links.executed_phases(grammar), *on_lanes}
    for worker, row in enumerate(evaluation.table.rows()):
        for slot, cell in enumerate(row):
            if cell and cell[0].phase in executed:
                name = ";".join(grammar.text((op,)) for op in cell)
                ops[f"{name} (worker {worker}, slot {slot})"] = {
                    "start": float(evaluation.start[worker, slot]),
                    "end": float(evaluation.finish[worker, slot]),
                }
    for node in program.beside_cells.tolist():
        stage, worker = int(program.stage[node]), int(program.worker[node])
        name = f"{stage}U (worker {worker})"
        if worker == NO_WORKER:  # an all-reduce; it has a microbatch if the table has U cells
            microbatch = int(program.microbatch[node])
            name = f"{stage}A{microbatch}" if microbatch >= 0 else f"{stage}A"
        start, end = evaluation.node_start[node], evaluation.node_finish[node]
        ops[name] = {"start": float(start), "end": float(end)}
    return ops


def _transfers(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Return {name of a message: {"leaves": s, "arrives": s}}."""
    table, messages = evaluation.table, evaluation.program.messages
    cells = table_messages(table)  # in the order of `messages`
    transfers = {}
    for k in range(len(messages.producer)):
        stage, microbatch = int(messages.stage[k]), int(messages.microbatch[k])
        name = str(Op(Phase(int(messages.phase[k])), stage, microbatch))
        if not table.grammar.has_usual_messages:
            producer = _op_text(table, int(cells.producer[k]), stage, microbatch)
            consumer = _op_text(table, int(cells.consumer[k]), int(cells.to_stage[k]))
            name = f"{producer} to {consumer}"
        transfers[f"{name} (worker {messages.sender[k]} to {messages.receiver[k]})"] = {
            "leaves": float(evaluation.message_start[k]),
            "arrives": float(evaluation.message_finish[k]),
        }
    return transfers


def _op_text(table: ScheduleTable, cell: int, stage: int, microbatch: int | None = None) -> str:
    """Return the text of a cell's op on a stage; `microbatch` selects an op of a fused pair."""
    ops = table.cell(*table.place(cell))
    op = next(op for op in ops if op.stage == stage and microbatch in (None, op.microbatch))
    return table.grammar.text((op,))
