"""The program of all devices: in each lockstep slot, every device runs an op, then sends.

  for each slot:  op of the slot, and of its partner   -> an activation, an input gradient
                  one ppermute for each distance that activations move, one for gradients

A table is an argument of the program, as arrays of integers, so tables of equal size share a
compilation. Empty and freed entries of buffers are NaN, so an op at a wrong time gives NaN.

A slot ends with the messages of all devices. So an op is in the first slot after the slots of its
inputs and of the previous op on its worker, and slots are longest paths with one slot per cell. A
buffer of a worker has an entry for each stage copy and microbatch, and a spare last entry. So
instructions need no conditions: an op without a result writes to the spare entry.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.base.longest_path import run_edges
from pipejax.schedules.cells.cells import NOWHERE, TableOps
from pipejax.schedules.cells.dependencies import cell_edges
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    COMMUNICATION,
    INPUT_GRADS,
    SHARDING,
    WEIGHT_GRADS,
    Phase,
)
from pipejax.schedules.table.held_activations import is_recomputed
from pipejax.schedules.table.table import ScheduleTable, without_phases

# ops of a device; the index is the code. A U takes a slot, but changes no weights at step size 0.
CODES = (Phase.IDLE, Phase.F, Phase.B, Phase.I, Phase.W, Phase.R, Phase.O, Phase.L)
LEFT_OUT = {  # phase -> reason why its cells are not executed
    **dict.fromkeys(COMMUNICATION, "a slot ends with its messages, in no order"),
    **dict.fromkeys(SHARDING, "parameters are not sharded"),
    Phase.WAIT_O: "an offload ends in its slot",
}
_OTHERS = [phase for phase in CELL_PHASES if phase not in {*CODES, Phase.U, *LEFT_OUT}]
LEFT_OUT |= dict.fromkeys(_OTHERS, "no device can do it")


class SpmdSizes(NamedTuple):
    """Sizes for which a program is compiled; it can also run smaller tables."""

    workers: int  # P, number of devices
    slots: int  # number of lockstep slots
    microbatches: int  # M
    entries: int  # entries of a worker's buffers, without the spare entry
    copies: int  # stage copies of a worker
    activation_shifts: tuple[int, ...]  # distances (mod P) of activations; a ppermute for each
    gradient_shifts: tuple[int, ...]  # distances (mod P) of input gradients

    @classmethod
    def joined(cls, sizes: Iterable["SpmdSizes"]) -> "SpmdSizes":
        """Return sizes for tables of all given sizes, which have equal numbers of workers."""
        *sizes_by_field, activations, gradients = zip(*sizes, strict=True)
        shifts = (tuple(sorted({*itertools.chain(*sets)})) for sets in (activations, gradients))
        return cls(*map(max, sizes_by_field), *shifts)


class Instructions(NamedTuple):
    """Instructions by slot, worker and step; a fused pair has two steps, other ops have one."""

    code: Int[NumpyArray, "slots workers steps"]  # index of the op in `CODES`
    read: Int[NumpyArray, "slots workers steps"]  # entry of the activation to read
    write: Int[NumpyArray, "slots workers steps"]  # entry to which an activation is written
    free: Int[NumpyArray, "slots workers steps"]  # entry of the activation to free
    entry: Int[NumpyArray, "slots workers steps"]  # entry of gradients and of host memory
    seed: Int[NumpyArray, "slots workers steps"]  # entry for the gradient of the loss
    microbatch: Int[NumpyArray, "slots workers steps"]  # microbatch of this loss
    copy: Int[NumpyArray, "slots workers steps"]  # index of the stage copy on the worker
    activation_to: Int[NumpyArray, "slots workers shifts"]  # entry for an arriving activation
    gradient_to: Int[NumpyArray, "slots workers shifts"]  # entry for an arriving input gradient


def lockstep_slots(table: ScheduleTable) -> Int[NumpyArray, " cells"]:
    """Return the lockstep slot of each cell: the first after all cells that the cell waits for."""
    start, _ = run_edges(*cell_edges(table), np.ones(table.phase.size))
    return start.astype(np.int32)


def local_stage_index(table: ScheduleTable) -> Int[NumpyArray, "workers stages"]:
    """Return the index of each stage among the stages of a worker, or `NOWHERE`."""
    # two pipes that place a stage on the same worker share the stage copy
    is_held = np.zeros((table.num_workers, table.num_stages), bool)
    is_held[table.placement, np.arange(table.num_stages)[None]] = True
    return np.where(is_held, np.cumsum(is_held, axis=1) - 1, NOWHERE)


def sizes_for(table: ScheduleTable, workers: int) -> SpmdSizes:
    """Return the sizes of a program that runs a table on `workers` devices."""
    num_copies = int(local_stage_index(table).max()) + 1  # largest number on a worker
    hop = np.diff(table.placement, axis=1) if table.num_stages > 1 else np.zeros((1, 0), int)
    return SpmdSizes(
        workers=workers,
        slots=int(lockstep_slots(without_phases(table, tuple(LEFT_OUT))).max()) + 1,
        microbatches=table.num_microbatches,
        entries=num_copies * table.num_microbatches,
        copies=num_copies,
        activation_shifts=tuple(sorted({*(hop % workers).ravel().tolist()})),
        gradient_shifts=tuple(sorted({*(-hop % workers).ravel().tolist()})),
    )


def instruct(table: ScheduleTable, sizes: SpmdSizes) -> Instructions:
    """Write the instructions of a table for a program compiled for given sizes."""
    table = without_phases(table, tuple(LEFT_OUT))
    shape = sizes.slots, sizes.workers
    unused = {  # spare entries, which no op reads; idle devices use no weights
        **dict.fromkeys(("code", "copy"), 0),
        **dict.fromkeys(("read", "write", "free", "activation_to"), 2 * sizes.entries),
        **dict.fromkeys(("entry", "seed", "gradient_to"), sizes.entries),
        "microbatch": sizes.microbatches,
    }
    shifts = {"activation_to": sizes.activation_shifts, "gradient_to": sizes.gradient_shifts}
    blank = {}
    for name in Instructions._fields:
        length = len(shifts[name]) if name in shifts else 2  # a fused pair has two ops in a slot
        blank[name] = np.full((*shape, length), unused[name], np.int32)
    written = Instructions(**blank)
    _write_ops(table, sizes, written)
    _write_messages(table, sizes, written)
    return written


class _PlacedOps(NamedTuple):
    """Ops of a table with their slots, workers and buffer entries."""

    ops: TableOps
    at: tuple[NumpyArray, NumpyArray, NumpyArray]  # slot, worker, step
    copy: Int[NumpyArray, " ops"]
    entry: Int[NumpyArray, " ops"]

    def take(self, which: NumpyArray) -> "_PlacedOps":
        at = self.at[0][which], self.at[1][which], self.at[2][which]
        return _PlacedOps(self.ops.take(which), at, self.copy[which], self.entry[which])


def _place_ops(table: ScheduleTable) -> _PlacedOps:
    ops = table.ops
    worker = ops.cell // table.num_slots
    step = (np.arange(len(ops.cell)) >= np.count_nonzero(table.phase)).astype(np.int32)
    copy = local_stage_index(table)[worker, ops.stage]
    entry = copy * table.num_microbatches + ops.microbatch
    return _PlacedOps(ops, (lockstep_slots(table)[ops.cell], worker, step), copy, entry)


def _write_ops(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write the buffer entries that each op reads, stores and frees."""
    # The first half of the buffer has arrived activations, the second half inputs of backwards. A
    # recomputed activation stays in the first half until R. O and L move the entry that F leaves.
    placed = _place_ops(table)
    ops = placed.ops
    needs_recompute = is_recomputed(table)[ops.stage, ops.microbatch]
    arrived, backward_entry = placed.entry, placed.entry + sizes.entries
    after_forward = np.where(needs_recompute, arrived, backward_entry)

    def put(
        name: str, phases: Iterable[Phase], values: NumpyArray, mask: NumpyArray | bool = True
    ) -> None:
        """Write values (ops) to a field of the instructions, for ops of these phases in `mask`."""
        is_selected = np.isin(ops.phase, [*phases]) & mask
        getattr(written, name)[placed.take(is_selected).at] = values[is_selected]

    backward = Phase.B, Phase.I, Phase.W
    codes = np.zeros(len(Phase), np.int32)
    codes[list(CODES)] = np.arange(len(CODES))
    put("code", CODES, codes[ops.phase])
    put("entry", CODES, placed.entry)
    put("copy", CODES, placed.copy)
    put("read", (Phase.F, Phase.R), arrived)
    put("read", backward, backward_entry)
    put("read", (Phase.O,), after_forward)
    put("write", (Phase.F,), backward_entry, ~needs_recompute)
    put("write", (Phase.R,), backward_entry)
    put("write", (Phase.L,), after_forward)
    put("free", (Phase.F,), arrived, ~needs_recompute)
    put("free", (Phase.R,), arrived)
    put("free", WEIGHT_GRADS, backward_entry)
    put("free", (Phase.O,), after_forward)
    is_last = ops.stage == table.num_stages - 1
    put("seed", (Phase.F,), placed.entry, is_last)
    put("microbatch", (Phase.F,), ops.microbatch, is_last)


def _write_messages(table: ScheduleTable, sizes: SpmdSizes, written: Instructions) -> None:
    """Write the entries in which receivers store the messages that arrive at the end of a slot."""
    # A worker sends at most one activation and one input gradient per slot, to a worker at one of
    # the distances in `shifts`. Each distance has a column, because it needs a separate ppermute.
    placed = _place_ops(table)
    for phases, hop, field, shifts in (
        ((Phase.F,), 1, written.activation_to, sizes.activation_shifts),
        (INPUT_GRADS, -1, written.gradient_to, sizes.gradient_shifts),
    ):
        has_target = (placed.ops.stage + hop >= 0) & (placed.ops.stage + hop < table.num_stages)
        ops, (slot, worker, _) = placed.take(np.isin(placed.ops.phase, phases) & has_target)[:2]
        stage = ops.stage + hop
        receiver = table.placement[ops.pipe, stage]
        column = np.searchsorted(shifts, (receiver - worker) % sizes.workers)
        copy = local_stage_index(table)[receiver, stage]
        # the buffer of a receiver has an entry for each stage copy and microbatch
        field[slot, receiver, column] = copy * table.num_microbatches + ops.microbatch


class SmallModel(NamedTuple):
    """Size and seed of the small model to train."""

    hidden: int = 16  # width of the layers
    batch_size: int = 2  # examples of a microbatch
    seed: int = 0  # random seed of parameters and data


class StageParameters(NamedTuple):
    """Parameters of one stage, or of several stages along leading axes."""

    into: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]
    bias: Float[Array, "*copies hidden"] | Float[NumpyArray, "*copies hidden"]
    out: Float[Array, "*copies hidden hidden"] | Float[NumpyArray, "*copies hidden hidden"]


class TrainingData(NamedTuple):
    """Inputs of the first stage and targets of the last stage, for all microbatches."""

    input: Float[NumpyArray, "microbatches batch hidden"]
    target: Float[NumpyArray, "microbatches batch hidden"]


def stage_parameters(num_stages: int, model: SmallModel) -> StageParameters:
    """Draw random parameters (stages, ...), with a separate seed for each stage."""
    parts, hidden = [], model.hidden  # (input weights, bias, output weights) of each stage
    for stage in range(num_stages):
        draw = np.random.default_rng([model.seed, stage]).standard_normal
        scale = hidden**-0.5
        parts.append((scale * draw((hidden, hidden)), draw(hidden), scale * draw((hidden, hidden))))
    return StageParameters(*map(np.stack, zip(*parts, strict=True)))


def training_data(num_microbatches: int, model: SmallModel) -> TrainingData:
    """Draw random inputs and targets for one step."""
    shape = 2, num_microbatches, model.batch_size, model.hidden
    return TrainingData(*np.random.default_rng(model.seed).standard_normal(shape))


def run_stage(parameters: StageParameters, activation: Array) -> Array:
    """Return the output of a stage, of shape (batch, hidden)."""
    inner = jnp.tanh(activation @ parameters.into + parameters.bias[None])
    return activation + inner @ parameters.out


def square_loss(output: Array, target: Array) -> Array:
    """Return half the mean square error of the output for a microbatch."""
    return jnp.mean((output - target) ** 2) / 2


@jax.jit
def unpipelined(
    parameters: StageParameters,
    input: Float[Array, "microbatches batch hidden"],
    target: Float[Array, "microbatches batch hidden"],
    is_real_stage: Bool[Array, " stages"],
    weights: Float[Array, " microbatches"],
) -> tuple[Float[Array, ""], StageParameters]:
    """Return loss and gradients of the model, computed stage by stage without a schedule."""
    # Smaller models are padded: a stage that is not real returns its input, and a microbatch that
    # does not exist has weight 0 in the loss.

    def mean_loss(parameters: StageParameters) -> Array:
        def apply_stage(activation: Array, stage: Any) -> tuple[Array, None]:
            layer, is_real = stage
            return jnp.where(is_real, run_stage(layer, activation), activation), None

        def microbatch_loss(activation: Array, target: Array) -> Array:
            output, _ = jax.lax.scan(apply_stage, activation, (parameters, is_real_stage))
            return square_loss(output, target)

        return jnp.sum(weights * jax.vmap(microbatch_loss)(input, target))

    return jax.value_and_grad(mean_loss)(parameters)


WORKERS = "workers"
Index = Any  # a traced integer, or an array of integers


class WorkerState(NamedTuple):
    """Buffers of all workers; inside the program of a device, buffers of one worker."""

    # arrived activations, then activations for backwards
    activations: Float[Array, "*workers kept batch hidden"]
    gradients: Float[Array, "*workers entries batch hidden"]  # gradients of stage outputs
    host: Float[Array, "*workers entries batch hidden"]  # offloaded activations
    weights: StageParameters  # (copies, ...) parameters of each stage copy
    sums: StageParameters  # (copies, ...) sums of weight gradients of each stage copy
    losses: Float[Array, "*workers microbatches"]  # losses, on workers with the last stage


class _InFlight(NamedTuple):
    """State of a worker, and the messages that it sends at the end of the slot."""

    state: WorkerState
    activation: Array
    gradient: Array


def _at(tree: Any, index: Index) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _idle(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    return moving


def _forward(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    """Run F; store its input and, on the last stage, the loss and the gradient of the loss."""
    state = moving.state
    activation = state.activations[step.read]
    output = run_stage(_at(state.weights, step.copy), activation)
    loss, seed = jax.value_and_grad(square_loss)(output, target[step.microbatch])
    activations = state.activations.at[step.free].set(jnp.nan).at[step.write].set(activation)
    state = state._replace(
        activations=activations,
        gradients=state.gradients.at[step.seed].set(seed),
        losses=state.losses.at[step.microbatch].set(loss),
    )
    return moving._replace(state=state, activation=output)


def _backward(
    step: Instructions, moving: _InFlight, target: Array, *, for_input: bool, for_weights: bool
) -> _InFlight:
    """Compute the input gradient (I), the weight gradient (W) or both (B) of a stage."""
    # this runs the forward of the stage again from the stored input
    state = moving.state
    weights, activation = _at(state.weights, step.copy), state.activations[step.read]
    _, pull = jax.vjp(run_stage, weights, activation)
    gradients, gradient = pull(state.gradients[step.entry])
    if for_weights:
        state = state._replace(
            activations=state.activations.at[step.free].set(jnp.nan),
            gradients=state.gradients.at[step.entry].set(jnp.nan),
            sums=jax.tree.map(
                lambda total, part: total.at[step.copy].add(part), state.sums, gradients
            ),
        )
    return moving._replace(state=state, gradient=gradient if for_input else moving.gradient)


def _recompute(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    """Copy the checkpoint to the entry that backwards read; backwards run the stage again."""
    state = moving.state
    activation = state.activations[step.read]
    activations = state.activations.at[step.free].set(jnp.nan).at[step.write].set(activation)
    return moving._replace(state=state._replace(activations=activations))


def _offload(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    state = moving.state
    host = state.host.at[step.entry].set(state.activations[step.read])
    activations = state.activations.at[step.free].set(jnp.nan)
    return moving._replace(state=state._replace(activations=activations, host=host))


def _load(step: Instructions, moving: _InFlight, target: Array) -> _InFlight:
    state = moving.state
    activations = state.activations.at[step.write].set(state.host[step.entry])
    host = state.host.at[step.entry].set(jnp.nan)
    return moving._replace(state=state._replace(activations=activations, host=host))


BRANCHES: list[Callable[..., _InFlight]] = [  # functions for `CODES`, in the same order
    _idle,
    _forward,
    functools.partial(_backward, for_input=True, for_weights=True),
    functools.partial(_backward, for_input=True, for_weights=False),
    functools.partial(_backward, for_input=False, for_weights=True),
    _recompute,
    _offload,
    _load,
]


def _store_arrivals(
    buffer: Array, value: Array, entries: Index, shifts: tuple[int, ...], workers: int
) -> Array:
    """Send a value to the workers at each distance (shift), and store the values that arrive."""
    # With 4 workers and shift 1, workers 0 1 2 3 send to 1 2 3 0. A receiver that does not need
    # the value stores it in its spare entry.
    for k, shift in enumerate(shifts):
        ring = [(worker, (worker + shift) % workers) for worker in range(workers)]
        arrival = jax.lax.ppermute(value, WORKERS, ring) if shift else value
        buffer = buffer.at[entries[k]].set(arrival)
    return buffer


def _exchange(moving: _InFlight, now: Instructions, sizes: SpmdSizes) -> WorkerState:
    """Send activations and gradients at the end of a slot; return the worker's new state."""
    state, store = moving.state, functools.partial(_store_arrivals, workers=sizes.workers)
    activation = moving.activation, now.activation_to, sizes.activation_shifts
    gradient = moving.gradient, now.gradient_to, sizes.gradient_shifts
    return state._replace(
        activations=store(state.activations, *activation),
        gradients=store(state.gradients, *gradient),
    )


@functools.partial(jax.jit, static_argnames="sizes")
def execute(
    instructions: Instructions,
    state: WorkerState,
    target: Float[Array, "microbatches batch hidden"],
    sizes: SpmdSizes,
) -> WorkerState:
    """Run a table with one device per worker; return the final state of all workers."""
    # Instructions have the shape (slots, workers, ...). All fields but the last two have entries
    # for both ops of a slot.
    op_fields = Instructions._fields[:-2]

    def on_worker(instructions: Instructions, state: WorkerState, target: Array) -> WorkerState:
        def slot(state: WorkerState, now: Instructions) -> tuple[WorkerState, None]:
            """Run the op or fused pair of a slot, then exchange messages."""
            no_message = jnp.zeros(target.shape[1:], target.dtype)  # (batch, hidden)
            moving = _InFlight(state, no_message, no_message)
            for position in range(2):  # the second op is idle unless the slot has a fused pair
                fields = {name: getattr(now, name)[position] for name in op_fields}
                op = now._replace(**fields)
                moving = jax.lax.switch(op.code, BRANCHES, op, moving, target)
            return _exchange(moving, now, sizes), None

        worker_steps = jax.tree.map(lambda leaf: leaf[:, 0], instructions)
        state, _ = jax.lax.scan(slot, _at(state, 0), worker_steps)
        return jax.tree.map(lambda leaf: leaf[None], state)

    mesh = Mesh(jax.devices()[: sizes.workers], (WORKERS,))
    by_worker, by_slot = PartitionSpec(WORKERS), PartitionSpec(None, WORKERS)
    program = jax.shard_map(
        on_worker,
        mesh=mesh,
        in_specs=(by_slot, by_worker, PartitionSpec()),
        out_specs=by_worker,
        check_vma=False,
    )
    return program(instructions, state, target)
