"""PyTorch's runtime: one process for each worker of a table, connected by gloo.

Gradients are exact. If the job has op times, each op sleeps until its time has passed, so many
workers run on few cores. Otherwise ops and messages take the time of this machine.
"""

import importlib.util
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.analysis.runs.evaluate import evaluate
from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.costs import PHASE_FIELDS, Costs
from pipejax.runtimes.exports import add_runtime_cells, check_exportable
from pipejax.runtimes.processes import RuntimeJob, RuntimeRun, call_together
from pipejax.schedules.table.communication_cells import insert_transfers
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import to_csv

MODULE = "pipejax.runtimes.gloo.process"
NO_TORCH = "the runtime torch needs PyTorch: pip install 'pipejax[torch]'"
# links of gloo: a rank posts a message when its row reaches the SEND or RECV; both directions of a
# pair of ranks share one queue, in the order of the cells
GLOO = Links("rendezvous", "pair", posting="program")
TIMED = ("F", "B", "I", "W")
# limits of a run: time to start all processes [s], and for each step, time of the machine's own
# work [s] and time of ops and messages, relative to the sum of their requested times
START_UP, PER_STEP, SLOWER = 60.0, 20.0, 10


def run_table(job: RuntimeJob) -> RuntimeRun:
    """Run the table of a job."""
    return run_tables([job])[0]


def run_tables(jobs: Sequence[RuntimeJob]) -> list[RuntimeRun]:
    """Run tables with equal numbers of workers, one after the other, in the same processes."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(NO_TORCH)
    first = jobs[0]
    ranks = first.table.num_workers
    for job in jobs:
        if job.table.num_workers != ranks:
            raise ValueError(f"tables must all have {ranks} workers, got {job.table.num_workers}")
        check_exportable(job.table)
    tables = [add_runtime_cells(job.table, sharding=False) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="pipejax-") as folder:
        paths = [Path(folder) / f"{k}.csv" for k in range(len(jobs))]
        tasks = list(map(_write_task, jobs, tables, paths))
        timeout = START_UP
        for job in jobs:
            messages = float(message_seconds(job).sum()) * job.table.num_microbatches
            ops = sum(float(times.sum()) for times in op_seconds(job).values())
            timeout += (job.steps + 1) * (PER_STEP + SLOWER * (ops + messages))
        request: dict[str, Any] = {
            "ranks": ranks,
            "model": {"hidden": first.hidden, "batch_size": first.batch_size, "seed": first.seed},
            "steps": first.steps,
            "timeout": timeout,
            "tasks": tasks,
        }
        requests = [{**request, "rank": rank} for rank in range(ranks)]
        loopbacks = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        environment = {"GLOO_SOCKET_IFNAME": loopbacks[0]} if loopbacks else {}
        answers = call_together(MODULE, requests, environment, timeout)
    return [
        _join_ranks(job, table, answers[0]["version"], [answer["tasks"][k] for answer in answers])
        for k, (job, table) in enumerate(zip(jobs, tables, strict=True))
    ]


def _write_task(job: RuntimeJob, table: ScheduleTable, path: Path) -> dict[str, Any]:
    """Write the table to a file for all ranks; return the task with its path and the times."""
    path.write_text(to_csv(table))
    return {
        "path": str(path),
        "format": "compute_comms" if table.has_communication else "compute_only",
        "placement": table.placement[0].tolist(),
        "microbatches": table.num_microbatches,
        "seconds": {phase: times.tolist() for phase, times in op_seconds(job).items()},
        "messages": message_seconds(job).tolist() if message_seconds(job).any() else None,
        "trace": None if job.trace is None else str(job.trace),
    }


def op_seconds(job: RuntimeJob) -> dict[str, Float[NumpyArray, "stages microbatches"]]:
    """Return {phase letter: (stages, microbatches) requested op times [s]}; {} without costs."""
    if job.costs is None:
        return {}
    seconds = {}
    for phase in TIMED:
        value = getattr(job.costs, PHASE_FIELDS[phase])
        if value is not None:
            time = np.asarray(value, float)
            by_stage = time[:, None] if time.ndim == 1 else time
            shape = job.table.num_stages, job.table.num_microbatches
            seconds[phase] = np.broadcast_to(by_stage, shape)
    return seconds


def message_seconds(job: RuntimeJob) -> Float[NumpyArray, "directions boundaries"]:
    """Return the requested message times [s] (directions, boundaries); 0 without costs."""
    shape = 2, max(0, job.table.num_stages - 1)
    if job.costs is None:
        return np.zeros(shape)
    seconds = np.asarray(job.costs.latency, float) + np.asarray(job.costs.transmit, float)
    return np.broadcast_to(seconds[:, 0] if seconds.ndim == 3 else seconds, shape)


def _join_ranks(
    job: RuntimeJob, table: ScheduleTable, version: str, ranks: Sequence[dict[str, Any]]
) -> RuntimeRun:
    """Combine the results of all ranks for a table, and add the predicted step time."""
    (last_rank,) = [rank for rank in ranks if rank["loss"] is not None]
    errors = {
        "gradient_error": float(np.max([rank["gradient_error"] for rank in ranks])),
        "loss": last_rank["loss"],
        "loss_error": last_rank["loss_error"],
    }
    if not job.steps:
        return RuntimeRun("torch", version, **errors)
    steps = [[rank["steps"][k] for rank in ranks] for k in range(job.steps)]
    measured = [_op_and_message_times(step, job) for step in steps]
    profiles, messages = zip(*measured, strict=True)
    times = [predicted(table, profile, message, job.links) for profile, message in measured]
    return RuntimeRun(
        "torch",
        version,
        **errors,
        step_times=[max(rank["time"] for rank in step) for step in steps],
        predicted=float(np.median(times)),
        profile={
            phase: np.median([profile[phase] for profile in profiles], axis=0).tolist()
            for phase in profiles[0]
        },
        message=np.median([message[0] for message in messages], axis=0).tolist(),
    )


def _op_and_message_times(
    ranks: Sequence[dict[str, Any]], job: RuntimeJob
) -> tuple[dict[str, list[float]], Float[NumpyArray, "directions boundaries"]]:
    """Return {phase letter: op time of each stage [s]} and message times [s] of a step."""
    # `ranks` are the answers of all ranks about this step; the time of a missing op is 0
    times_by_stage = {int(k): times for rank in ranks for k, times in rank["profile"].items()}
    profile = {
        phase: [times_by_stage[stage].get(phase, 0.0) for stage in range(job.table.num_stages)]
        for phase in TIMED
        if any(phase in times for times in times_by_stage.values())
    }
    message = np.max([rank["message"] for rank in ranks], axis=0) + message_seconds(job)
    return profile, message


def predicted(
    table: ScheduleTable,
    profile: dict[str, list[float]],
    message: Float[NumpyArray, "directions boundaries"],
    links: Links = GLOO,
) -> float:
    """Predict the makespan [s] at measured times, with the cells that PyTorch adds."""
    links = GLOO if links == Links() else links
    lowered = table if table.has_communication else insert_transfers(table, lowering="pytorch")
    costs = Costs(
        **{PHASE_FIELDS[phase]: np.array(times) for phase, times in profile.items()},
        transmit=message[:, None] if message.size else 0.0,
    )
    return float(evaluate(lowered, costs, link=links).makespan)
