"""JAX as a runtime: a process with as many devices of its CPU as the table has workers.

How many devices a CPU has is settled when JAX starts, hence the process. They share the processor,
so the program proves gradients; it says nothing of times.
"""

import json
import os
from collections.abc import Sequence

from pipejax.runtimes.processes import call_together
from pipejax.runtimes.runtime_run import RuntimeJob, RuntimeRun
from pipejax.runtimes.spmd.instructions import LEFT_OUT
from pipejax.runtimes.spmd.model import SmallModel
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import to_json

MODULE = "pipejax.runtimes.spmd.process"
FORCED = "--xla_force_host_platform_device_count"  # an older way to say so: JAX refuses both


def run_table(job: RuntimeJob) -> RuntimeRun:
    """Run one table, see `RuntimeJob`.

    Raises:
      ValueError: if the table cannot be run.
    """
    if job.steps:
        raise ValueError(
            f"steps must be 0 in jax, whose devices share a processor, got {job.steps}"
        )
    if job.costs is not None:
        raise ValueError("times have no effect in jax, which times no steps")
    if job.links != Links():
        raise ValueError(f"links have no effect in jax, which times no steps, got {job.links!r}")
    return run_tables([job.table], SmallModel(job.hidden, job.batch_size, job.seed))[0]


def run_tables(tables: Sequence[ScheduleTable], model: SmallModel) -> list[RuntimeRun]:
    """Run a step under each table, all in one process and one compilation."""
    workers = max(table.num_workers for table in tables)
    request = {
        "tables": [json.loads(to_json(table)) for table in tables],
        "model": model._asdict(),
    }
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if FORCED not in flag]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(workers),
        "JAX_ENABLE_X64": "true",
        "XLA_FLAGS": " ".join(flags),
    }
    [found] = call_together(MODULE, [request], environment)
    return [
        RuntimeRun("jax", found["version"], **step, left_out=left_out(table))
        for table, step in zip(tables, found["steps"], strict=True)
    ]


def left_out(table: ScheduleTable) -> dict[str, str]:
    """Say which cells are not executed, by phase, and why."""
    held = set(table.phase.ravel().tolist())
    return {Phase(phase).name: why for phase, why in LEFT_OUT.items() if int(phase) in held}
