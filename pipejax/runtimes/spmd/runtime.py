"""JAX runtime, which executes a table in a process with one CPU device per worker.

JAX fixes the number of devices when it starts, so a run needs a new process. The devices share the
processor, so a run checks gradients but measures no times.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.base.array_types import Array, Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.runtimes.processes import RuntimeJob, RuntimeRun, call_together, serve
from pipejax.runtimes.spmd.execute import (
    LEFT_OUT,
    SmallModel,
    SpmdSizes,
    StageParameters,
    TrainingData,
    WorkerState,
    execute,
    instruct,
    local_stage_index,
    sizes_for,
    stage_parameters,
    training_data,
    unpipelined,
)
from pipejax.schedules.cells.cells import NOWHERE
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable
from pipejax.schedules.table.table_files import from_json, to_json


class TrainingStep(NamedTuple):
    """Results of a training step in the order of a table."""

    gradients: StageParameters  # (stages, ...) sum over all microbatches and copies of a stage
    losses: Float[NumpyArray, " microbatches"]  # loss of each microbatch


def train(table: ScheduleTable, model: SmallModel, sizes: SpmdSizes) -> TrainingStep:
    """Run a training step in the order of a table, in a program compiled for `sizes`."""
    # Example of `local_index` (workers, stages): if stages 0 1 2 3 are on workers 0 1 0 1, the
    # rows are 0 - 1 - and - 0 - 1, where - is NOWHERE.
    count = len(jax.devices())
    if count < sizes.workers:
        raise ValueError(
            f"the table has {sizes.workers} workers, but JAX has {count} devices here: "
            f"JAX_NUM_CPU_DEVICES={sizes.workers} must be set before JAX starts"
        )
    local_index, data = local_stage_index(table), training_data(table.num_microbatches, model)
    state = execute(
        jax.tree.map(jnp.asarray, instruct(table, sizes)),
        _initial_state(table, model, sizes, local_index, data),
        jnp.asarray(_pad(data.target, sizes.microbatches + 1)),  # the last target is never read
        sizes,
    )
    state = jax.tree.map(np.asarray, state)
    worker, stage = np.nonzero(local_index != NOWHERE)  # of each stage copy

    def sum_copies(leaf: NumpyArray) -> NumpyArray:
        """Sum gradients (workers, copies, ...) over the copies of each stage: (stages, ...)."""
        total = np.zeros((table.num_stages, *leaf.shape[2:]))
        np.add.at(total, stage, leaf[worker, local_index[worker, stage]])
        return total

    last_worker = table.placement[table.pipe_of_microbatch, -1]
    return TrainingStep(
        gradients=jax.tree.map(sum_copies, state.sums),
        losses=state.losses[last_worker, np.arange(table.num_microbatches)],
    )


def _pad(values: NumpyArray, count: int) -> NumpyArray:
    return np.concatenate([values, np.zeros((count - len(values), *values.shape[1:]))])


def _initial_state(
    table: ScheduleTable,
    model: SmallModel,
    sizes: SpmdSizes,
    local_index: Int[NumpyArray, "workers stages"],
    data: TrainingData,
) -> WorkerState:
    """Return the initial buffers of all workers, with weights and inputs of the first stage."""
    # A buffer has an entry per stage copy and microbatch, which is NaN until it is written, and a
    # spare entry. Activations have two entries: one for the arrived input, one for the backward.
    block = model.batch_size, model.hidden
    activations = np.full((sizes.workers, 2 * sizes.entries + 1, *block), np.nan)
    empty = np.full((sizes.workers, sizes.entries + 1, *block), np.nan)
    microbatch = np.arange(table.num_microbatches)
    first_worker = table.placement[table.pipe_of_microbatch, 0]
    entry = local_index[first_worker, 0] * table.num_microbatches + microbatch
    activations[first_worker, entry] = data.input
    worker, stage = np.nonzero(local_index != NOWHERE)  # of each stage copy

    def worker_weights(leaf: NumpyArray) -> Array:
        """Copy weights (stages, ...) to the workers with these stages: (workers, copies, ...)."""
        weights = np.full((sizes.workers, sizes.copies, *leaf.shape[1:]), np.nan)
        weights[worker, local_index[worker, stage]] = leaf[stage]
        return jnp.asarray(weights)

    weights = jax.tree.map(worker_weights, stage_parameters(table.num_stages, model))
    return WorkerState(
        activations=jnp.asarray(activations),
        gradients=jnp.asarray(empty),
        host=jnp.asarray(empty),
        weights=weights,
        sums=jax.tree.map(jnp.zeros_like, weights),
        losses=jnp.full((sizes.workers, sizes.microbatches + 1), jnp.nan),
    )


def step_errors(
    table: ScheduleTable, step: TrainingStep, model: SmallModel, stages: int, microbatches: int
) -> dict[str, float]:
    """Return the errors of gradients and loss, relative to a step without a pipeline."""
    # the step without a pipeline is compiled for `stages` and `microbatches`, at least the table's
    count = table.num_microbatches
    data = training_data(count, model)
    parameters = stage_parameters(table.num_stages, model)
    loss, gradients = unpipelined(
        jax.tree.map(lambda leaf: jnp.asarray(_pad(leaf, stages)), parameters),
        *(jnp.asarray(_pad(values, microbatches)) for values in data),
        jnp.arange(stages) < table.num_stages,
        jnp.where(jnp.arange(microbatches) < count, 1 / count, 0.0),
    )
    errors = []
    for sums, exact_means in zip(step.gradients, gradients, strict=True):
        for stage in range(table.num_stages):
            exact = np.asarray(exact_means)[stage]
            largest = np.max(np.abs(np.asarray(sums[stage]) / count - exact))
            errors.append(float(largest / np.max(np.abs(exact))))
    mean = float(np.mean(step.losses))
    return {
        "gradient_error": float(np.max(errors)),  # relative to the largest entry of each array
        "loss": mean,
        "loss_error": abs(mean - float(loss)) / abs(float(loss)),
    }


MODULE = "pipejax.runtimes.spmd.runtime"
FORCED = "--xla_force_host_platform_device_count"  # JAX refuses this together with its own option


def run_table(job: RuntimeJob) -> RuntimeRun:
    """Run the table of a job."""
    if job.steps:
        raise wrong("steps", f"must be 0 in jax, whose devices share a processor, got {job.steps}")
    if job.costs is not None:
        raise ValueError("times have no effect in jax, which times no steps")
    if job.links != Links():
        raise ValueError(f"links have no effect in jax, which times no steps, got {job.links!r}")
    return run_tables([job.table], SmallModel(job.hidden, job.batch_size, job.seed))[0]


def run_tables(tables: Sequence[ScheduleTable], model: SmallModel) -> list[RuntimeRun]:
    """Run a step in the order of each table, in one process and with one compilation."""
    workers = max(table.num_workers for table in tables)
    request = {"tables": [json.loads(to_json(table)) for table in tables], "model": model._asdict()}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if FORCED not in flag]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(workers),
        "JAX_ENABLE_X64": "true",
        "XLA_FLAGS": " ".join(flags),
    }
    [answer] = call_together(MODULE, [request], environment)
    return [
        RuntimeRun(
            "jax",
            answer["version"],
            **step,
            left_out=left_out(table),
            step_size=0.0 if table.updates_within else None,
        )
        for table, step in zip(tables, answer["steps"], strict=True)
    ]


def left_out(table: ScheduleTable) -> dict[str, str]:
    """Return {phase: reason} for cells of a table that the JAX runtime skips."""
    used = set(table.phase.ravel().tolist())
    return {Phase(phase).name: reason for phase, reason in LEFT_OUT.items() if int(phase) in used}


def answer_to(request: Any) -> dict[str, Any]:
    """Run a step in the order of each table, with one compilation; return errors and losses."""
    tables = [from_json(data) for data in request["tables"]]
    model = SmallModel(**request["model"])
    workers = max(table.num_workers for table in tables)
    sizes = SpmdSizes.joined(sizes_for(table, workers) for table in tables)
    largest = max(table.num_stages for table in tables), sizes.microbatches
    steps = [step_errors(table, train(table, model, sizes), model, *largest) for table in tables]
    return {"version": jax.__version__, "steps": steps}


if __name__ == "__main__":
    serve(answer_to)
