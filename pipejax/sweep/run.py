"""Run a sweep: evaluate every incomplete block, in this process or on a Dask cluster, and write it.

Only this process writes. So no block is written twice, and workers need no shared folder. If a
worker is lost, another worker evaluates its blocks again.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr

from pipejax.analysis.runs.evaluate import op_counts
from pipejax.analysis.step.many_systems import PricedSystems, Slowed, price_systems, resource_shares
from pipejax.analysis.step.outputs import SWEPT, swept_outputs
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError, check_types
from pipejax.base.files import provenance
from pipejax.base.progress import OnProgress, telling
from pipejax.base.ties import row_classes
from pipejax.costs.costs import PHASE_FIELDS, Costs, unchecked_costs
from pipejax.costs.model.launchers import launcher_defaults, machine_launches, merge_fields
from pipejax.costs.model.stack import Stack
from pipejax.costs.model.workload import Workload
from pipejax.costs.planning import plans, similar_table
from pipejax.costs.scaling import parse_stragglers
from pipejax.costs.stage.stage_costs import check_machine
from pipejax.costs.stage.stage_work import StageWork, memory_bytes, stage_work
from pipejax.costs.system.parts import with_flags_as_numbers
from pipejax.costs.system.system import Efficiency, System
from pipejax.costs.topology import parse_places
from pipejax.engine.batched.cost_rows import with_pair_times
from pipejax.engine.batched.makespans import makespans
from pipejax.engine.batched.pricing import Rows, programs_of_batch
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import by_microbatch
from pipejax.schedules.cells.ops import TIMED, ScheduleError
from pipejax.schedules.table.links import LINK_OPTIONS, Links
from pipejax.schedules.table.table import ScheduleTable, check_usual
from pipejax.sweep.declaration import Axis, Sweep, built, label, read_sweep
from pipejax.sweep.store import (
    FEASIBLE,
    ILLEGAL,
    OUT_OF_MEMORY,
    Block,
    get_block,
    num_blocks,
    open_store,
    sweep_variables,
)

# Evaluation of one block of a sweep: every program once, with all systems of the block

MAX_NUMBERS = 1 << 23  # largest number of systems x stages that are priced at once
MAX_PLANS = 1000  # largest number of plans of a schedule and workload; a plan takes up to a second
CURVES = ("compute_efficiency", "memory_efficiency")
FLAGGED = ("collectives", "kernels")

# axes whose values are fields of the workload; the fields in `_OTHERS` are read in other ways
_OTHERS = ("model", "weight_share", "stragglers", "worker_places")
WORKLOAD = tuple(field.name for field in dataclasses.fields(Workload) if field.name not in _OTHERS)

Values = dict[str, Any]  # {variable: array}, or {axis: value}
IN_FLOAT64 = functools.partial(jax.enable_x64, True)  # for prices; runs are in the sweep's dtype


def evaluate_block(sweep: Sweep, block: Block) -> Values:
    """Evaluate all points of a block; return {variable: array}."""
    cuts = zip(sweep.axes, block.cuts, strict=True)
    axes = [axis._replace(values=axis.values[cut]) for axis, cut in cuts]
    shape_axes, system_axes = axes[: len(sweep.shape_axes)], axes[len(sweep.shape_axes) :]
    names = [axis.name for axis in shape_axes]
    software: tuple[Stack, ...] = shape_axes[names.index("stack")].values
    systems = {stack.name: stack_systems(system_axes, stack) for stack in software}
    values_by_point = []
    for row in itertools.product(*(axis.values for axis in shape_axes)):
        point = dict(zip(names, row, strict=True))
        with IN_FLOAT64():
            values_by_point.append(_evaluate_named(sweep, point, systems[point["stack"].name]))
    values = {}
    for name, variable in sweep_variables(sweep).items():
        shape = [block.shape[place] for place in variable.places(sweep)]
        stacked = np.stack([point_values[name] for point_values in values_by_point])
        values[name] = stacked.reshape((*shape, *variable.extra_shape))
    return values


class _PipelineJob(NamedTuple):
    """One schedule and workload of the grid, ready to be priced on any system."""

    table: ScheduleTable
    workload: Workload
    links: Links
    slowed: Slowed


def _evaluate_named(sweep: Sweep, point: Values, systems: System) -> Values:
    """Call `_evaluate_systems`, and name the point's schedule and varied axes in its errors."""
    try:
        return _evaluate_systems(sweep, point, systems)
    except ValueError as error:
        varied_axes = {axis.name for axis in sweep.axes if axis.is_listed} | {"schedule"}
        place = ", ".join(f"{name} = {label(point[name])}" for name in point if name in varied_axes)
        raise ValueError(f"at {place}: {error}") from error


def _evaluate_systems(sweep: Sweep, point: Values, systems: System) -> Values:
    """Evaluate one schedule and workload on a batch of systems."""
    # `point` is {axis: value} without the axes of systems. The result is {variable of the dataset:
    # array (systems)}. If the point is illegal, only status and reason are set.
    num_systems = _num_systems(systems)
    variables = sweep_variables(sweep)
    values = {name: variable.empty(num_systems) for name, variable in variables.items()}
    values["status"][:] = ILLEGAL
    try:
        workload = _point_workload(point, systems)
        usable, refusal = _usable_systems(workload, systems)
        values["reason"] = np.array(refusal, object)
        jobs = [
            (usable[rows], job, stage_work(workload, job.table))
            for rows, job in _pipeline_jobs(point, workload, _select(systems, usable))
        ]
        needs = [float(memory_bytes(workload, job.table).max()) for _, job, _ in jobs]
    except MismatchError as error:
        reason = error.reason if isinstance(error, ScheduleError) else str(error)
        return values | {"reason": np.array(reason, object)}
    for (rows, job, work), need in zip(jobs, needs, strict=True):
        job_systems = _select(systems, rows)
        if job.table.offloads and not np.all(np.asarray(job_systems.host_link.bandwidth) > 0):
            raise ValueError("activations are offloaded, and a system has no host_link")
        fits = need <= np.asarray(job_systems.memory_available)
        memory = values["memory_bytes"]  # (systems), or () for all systems
        memory[rows if memory.ndim else ...] = need
        values["status"][rows] = np.where(fits, FEASIBLE, OUT_OF_MEMORY)
        batch_size = max(1, MAX_NUMBERS // job.table.num_stages)
        for begin in range(0, len(rows), batch_size):
            batch = rows[begin : begin + batch_size]
            priced = _price_job(job, work, _select(systems, batch), sweep)
            for name, value in _run_job(job, priced, sweep).items():
                values[name][batch] = value
    return values


def _num_systems(systems: System) -> int:
    return len(np.asarray(systems.gpus_per_node))


def _usable_systems(workload: Workload, systems: System) -> tuple[Rows, str]:
    """Return indices of the systems that can run a workload, and why other systems are refused."""
    # Systems that lack the same numbers have one kind. The first system of each kind is checked.
    numbers = [*vars(systems.narrow_peaks).values(), systems.host.memory_bandwidth]
    numbers.append(systems.host_link.bandwidth)
    size = _num_systems(systems)
    has_number = [np.broadcast_to(np.asarray(number) > 0, size) for number in numbers]
    examples, kinds = row_classes(has_number)
    refusals = []
    for example in examples:
        try:
            check_machine(workload, _select(systems, np.array([example])))
        except ValueError as error:
            refusals.append(str(error))
        else:
            refusals.append("")
    is_usable = np.array([not refusal for refusal in refusals])[kinds]
    return np.flatnonzero(is_usable), max(refusals)  # the largest text: "" is the smallest


def _select(systems: System, rows: Rows) -> System:
    if len(rows) == _num_systems(systems):
        return systems
    return jax.tree.map(lambda leaf: leaf[rows], systems)


def _point_workload(point: Values, systems: System) -> Workload:
    """Return the workload of a point, with the defaults of launcher and software."""
    model, _, defaults = launcher_defaults(
        point.get("launcher"), point["model"], systems, point["stack"], point["workers"]
    )
    fields = {name: point[name] for name in WORKLOAD if name in point}
    return Workload(
        model,
        **merge_fields(defaults, fields, point.get("launcher")),
        weight_share=dict(point["schedule"].options).get("weight_share"),
        stragglers=parse_stragglers(point["stragglers"], "stragglers"),
        worker_places=parse_places(point["worker_places"], "worker_places"),
    )


def _pipeline_jobs(
    point: Values, workload: Workload, systems: System
) -> Iterator[tuple[Rows, _PipelineJob]]:
    """Yield (indices of systems, job) for each group of systems with the same table."""
    # If the order of ops is fixed, all systems have the same table. A planned schedule has a table
    # for each set of op times.
    num_microbatches = point.get("microbatches")
    if num_microbatches is None:
        num_microbatches, remainder = divmod(point["minibatch"], point["microbatch_size"])
        if remainder:
            raise MismatchError(
                f"microbatch size {point['microbatch_size']} does not divide a minibatch "
                f"of {point['minibatch']}"
            )
    size = {"num_workers": point["workers"], "num_microbatches": num_microbatches}
    choice = point["schedule"]
    options, launcher = dict(choice.options), point.get("launcher")
    if workload.uneven_splits:
        raise MismatchError(f"no launcher runs it: {'; '.join(workload.uneven_splits)}")

    def make_job(table: ScheduleTable) -> _PipelineJob:
        """Combine a table with the workload; refuse a table that the launcher cannot run."""
        if table.grammar.custom_phases:
            check_usual(table, "a sweep over models")
        machine = systems, point["stack"].name, launcher
        if launcher and (refusal := machine_launches(workload, table, *machine)[0].refusal):
            raise MismatchError(refusal)
        slowed = Slowed.from_stragglers(table, dict(workload.stragglers))
        return _PipelineJob(table, workload, _links(point), slowed)

    if not choice.is_planned:
        yield np.arange(_num_systems(systems)), make_job(built(choice, **size))
        return
    # plan with the op times of a table of this size on each system
    example = make_job(similar_table(choice.builder, size, options))
    has_host_link = bool(np.all(np.asarray(systems.host_link.bandwidth) > 0))
    priced = price_systems(stage_work(workload, example.table, offloads=has_host_link), systems)
    costs = {k: v for k, v in vars(example.slowed.costs(priced.costs)).items() if v is not None}
    planned_options = list(plans(choice.builder, options, costs))
    if len(planned_options) > MAX_PLANS:
        raise ValueError(
            f"schedule {choice} is planned for the times of each system, and "
            f"{len(planned_options):,} systems of this sweep differ in them: at most {MAX_PLANS:,}"
        )
    for rows, options_of_rows in planned_options:
        yield rows, make_job(choice.builder.function(**size, **options_of_rows))


def _links(point: Values) -> Links:
    values = {name: point["link" if name == "model" else name] for name in LINK_OPTIONS}
    return Links(**{name: LINK_OPTIONS[name].parse(v, name) for name, v in values.items() if v})


def _price_job(job: _PipelineJob, work: StageWork, systems: System, sweep: Sweep) -> PricedSystems:
    """Price a job on each system, with factors of slow workers and of fused pairs."""
    priced = price_systems(work, systems, dtype=sweep.dtype)
    slowed_costs = job.slowed.costs(priced.costs)
    if job.workload.pair_factor != 1:
        factor = np.full(1, job.workload.pair_factor, np.dtype(sweep.dtype))
        slowed_costs = unchecked_costs({**vars(slowed_costs), "pair_factor": factor})
    return priced._replace(costs=slowed_costs)


def _run_job(job: _PipelineJob, priced: PricedSystems, sweep: Sweep) -> Values:
    """Return {output: results (systems, ..)}; systems with equal eager messages share a program."""
    size = _num_systems(priced.systems)
    results: Values = {}
    for program, rows in programs_of_batch(job.table, job.links, priced.costs):
        if rows is None:  # one program for all systems
            return _run_program(program, job, priced, sweep)
        for name, values in _run_program(program, job, priced.rows(rows), sweep).items():
            if name not in results:
                results[name] = np.empty((size, *values.shape[1:]), values.dtype)
            results[name][rows] = values
    return results


def _run_program(
    program: Program, job: _PipelineJob, priced: PricedSystems, sweep: Sweep
) -> Values:
    """Return {output: array (systems, ...)} for one program, including step times [s]."""
    program = by_microbatch(program) if job.slowed.differ else program
    size = _num_systems(priced.systems)
    share: NumpyArray | None = None
    if any(SWEPT[name].resources or SWEPT[name].needs_paths for name in sweep.outputs):
        steps, shares = resource_shares(program, priced, slowed=job.slowed)
        times, share = np.asarray(steps), np.asarray(shares)
    else:
        times = np.asarray(makespans(program, priced.costs, batch_size=size, unroll=False))
    busy = _mean_busy_time(priced.costs, program)
    subject = priced.systems, job.workload, job.table
    outputs = swept_outputs(sweep.outputs, *subject, times, busy, share)
    if missing := [name for name in sweep.outputs if name not in outputs]:
        needs = SWEPT[missing[0]].needs
        raise ValueError(f"output {missing[0]} needs {needs}, which a system lacks")
    return {"step_time": times, **outputs}


def _mean_busy_time(costs: Costs, program: Program) -> Float[NumpyArray, " batch"]:
    """Return the compute time of the mean worker [s] for each system of the batch."""
    # The compute time is a sum over ops: number of ops on the mean worker, times the op time. A
    # fused pair without a time of its own counts as two ops, F and B.
    layout = program.layout
    counts = op_counts(program).sum(axis=0) / program.num_workers
    first, pairs = layout.first_pair, counts[layout.first_pair : layout.first_link]
    totals = []
    if costs.pair_factor is None:
        np.add.at(counts, np.asarray(program.pair_index), pairs[:, None])
    else:
        leaves = {name: leaf for name, leaf in vars(costs).items() if leaf is not None}
        times = np.asarray(with_pair_times(program, leaves)["pair"])
        totals.append(times @ pairs.astype(times.dtype))
    by_phase = counts[1:first].reshape(len(TIMED), *layout.op_shape)
    for phase, row in zip(TIMED, by_phase, strict=True):
        if row.any():
            leaf = getattr(costs, PHASE_FIELDS[phase.name])
            weights = row.sum(axis=1) if leaf.ndim == 2 else row.ravel()
            # this memory order fixes the order in which BLAS adds
            rows = np.asfortranarray(leaf.reshape(len(leaf), -1))
            totals.append(rows @ weights.astype(leaf.dtype))
    return functools.reduce(operator.add, totals)


def stack_systems(axes: list[Axis], software: Stack) -> System:
    """Return the systems that a block of the sweep has, with software, as one batched system."""
    # `axes` are the systems, the accelerators per node, and fields of systems. The batch has every
    # combination of their values: a grid (systems, node sizes, field 1, field 2, ..), flattened at
    # the end. The software applies to the systems before their fields are varied.
    system_axis, node_axis, *fields = axes
    members = tuple(map(software.on, system_axis.values))
    grid = (len(members), len(node_axis.values), *(len(axis.values) for axis in fields))
    ones = (1,) * len(fields)
    node_sizes = [[size or system.gpus_per_node for size in node_axis.values] for system in members]
    stacked = jax.tree.map(
        lambda *leaves: np.array(leaves, float).reshape(-1, 1, *ones),
        *_with_equal_structure(members),
    )
    for k, axis in enumerate(fields):  # field k is axis 2 + k of the grid
        stacked = stacked.with_number(axis.name, np.array(axis.values).reshape(-1, *ones[k + 1 :]))
    gpus_per_node = np.array(node_sizes, float).reshape(*grid[:2], *ones)
    stacked = dataclasses.replace(stacked, gpus_per_node=gpus_per_node)
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, grid).ravel(), stacked)


def _with_equal_structure(systems: tuple[System, ...]) -> list[System]:
    """Convert systems to equal structure, so that their fields can be stacked."""
    # Texts are removed. Efficiency curves are padded to equal length with steps at infinite sizes.
    # Flags that differ between systems become numbers.
    flags = {jax.tree.structure([getattr(system, name) for name in FLAGGED]) for system in systems}
    longest = {name: max(len(getattr(system, name).sizes) for system in systems) for name in CURVES}

    def pad(curve: Efficiency, steps: int) -> Efficiency:
        """Extend a curve to a number of steps; the new steps are never reached."""
        count = steps - len(curve.sizes)
        return Efficiency(curve.sizes + (np.inf,) * count, curve.shares + curve.shares[-1:] * count)

    def convert(system: System) -> System:
        curves: dict[str, Any] = {k: pad(getattr(system, k), n) for k, n in longest.items()}
        parts = {name: getattr(system, name) for name in FLAGGED}
        if len(flags) > 1:
            parts = {name: with_flags_as_numbers(part) for name, part in parts.items()}
        return dataclasses.replace(system, name="", source="", calibration=None, **curves, **parts)

    return [convert(system) for system in systems]


BLOCKS_PER_THREAD = 2  # number of submitted blocks per thread of the cluster
SCHEDULER_TIMEOUT = 10.0  # time limit for the scheduler's answer [s]


def run_sweep(
    declaration: Sweep | Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    replace: bool = False,
    scheduler: str | None = None,
    on_progress: OnProgress | None = None,
) -> xr.Dataset:
    """Evaluate the grid of a sweep, and write the results to a Zarr store.

    Args:
      declaration: the sweep, its declaration, or the path of a TOML file (`read_sweep`).
      out: path of the store.
      resume: whether to continue an existing store; complete blocks stay.
      replace: whether to replace an existing store, even of another grid.
      scheduler: address of a Dask scheduler, to run on its cluster; default: this process.
      on_progress: called after every block with the number of finished points, the number of all
        points, and "points".

    Returns:
      The dataset, opened lazily from the store.

    Raises:
      ValueError: if the declaration is wrong, or the store holds another grid or was begun by
        other code.
      FileExistsError: if the store exists, and neither resume nor replace is True.
      OSError: if the store cannot be written, another process writes to it, or no scheduler
        answers.

    Example:
      >>> import tempfile
      >>> import pipejax as pj
      >>> grid = {"schedules": ["gpipe", "1f1b"], "workers": 4, "minibatch": 8,
      ...         "microbatch_size": [1, 3], "models": "tabular-128l", "systems": "fast_nw_slow_cp"}
      >>> data = pj.run_sweep(grid, f"{tempfile.mkdtemp()}/out.zarr")
      >>> data.step_time.sel(schedule="1f1b").values.round(1).tolist()
      [20.3, nan]
      >>> str(data.reason.sel(schedule="1f1b", microbatch_size=3).item())
      'microbatch size 3 does not divide a minibatch of 8'
    """
    check_types(
        given=(declaration, Sweep, Mapping, str, Path), out=(out, str, Path), resume=(resume, bool)
    )
    sweep = declaration if isinstance(declaration, Sweep) else read_sweep(declaration)
    path = Path(out)
    with (
        telling("sweep", on_progress) as tell,
        open_store(sweep, path, resume=resume, replace=replace) as store,
    ):
        blocks = [get_block(sweep, number) for number in range(num_blocks(sweep))]
        missing = [block.number for block in blocks if not store.is_whole(block)]
        done = sweep.num_points - sum(blocks[number].num_points for number in missing)
        tell(done, sweep.num_points, "points")
        if scheduler is not None:
            results = evaluate_remote(scheduler, sweep, missing)
        else:
            results = ((number, evaluate_block(sweep, blocks[number])) for number in missing)
        for number, values in results:
            store.write(blocks[number], values)
            done += blocks[number].num_points
            tell(done, sweep.num_points, "points")
    return xr.open_zarr(path, chunks=None)


def evaluate_remote(address: str, sweep: Sweep, numbers: list[int]) -> Iterator[tuple[int, Values]]:
    """Evaluate blocks on the workers of a Dask scheduler; yield (number, values) in any order."""
    # Each thread of the cluster gets `BLOCKS_PER_THREAD` blocks, so that few are in memory.
    from distributed import Client, as_completed  # an optional dependency

    try:
        client = Client(address, timeout=SCHEDULER_TIMEOUT)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(f"--scheduler: no scheduler answers at {address!r}: {reason}") from None
    code, next_numbers = provenance()["code"], iter(numbers)

    def submit(number: int) -> Any:
        return client.submit(_evaluate, sweep, number, code, pure=False, retries=3)

    with client:
        threads = max(1, sum(client.nthreads().values()))
        first_numbers = itertools.islice(next_numbers, BLOCKS_PER_THREAD * threads)
        running = as_completed([submit(number) for number in first_numbers])
        for future in running:
            yield future.result()
            future.release()
            for number in itertools.islice(next_numbers, 1):
                running.add(submit(number))


def _evaluate(sweep: Sweep, number: int, code: str) -> tuple[int, Values]:
    code_here = provenance()["code"]
    if code_here != code:
        raise ValueError(f"a worker has pipejax code {code_here}, this process has {code}")
    return number, evaluate_block(sweep, get_block(sweep, number))
