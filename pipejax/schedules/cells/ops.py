"""Ops in the cells of a schedule table: their phases and their text form.

Phases carry PyTorch's letters everywhere. The text of an op is stage, letter, microbatch, as in
"2F0"; the text of a fused pair is "(0F8;7B0)OVERLAP_F_B". Printing and parsing are inverse.
"""

import enum
import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from pipejax.base.array_types import Bool, Index, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.display import with_short_repr

NO_STAGE = -1
NO_MICROBATCH = -1
NO_PIPE = -1


class Phase(enum.IntEnum):
    """Kind of work in a cell; the value is its code in the arrays of a table.

    Example:
      >>> import pipejax as pj
      >>> pj.Phase.I.name, int(pj.Phase.IDLE)
      ('I', 0)
    """

    IDLE = 0
    F = 1  # forward
    B = 2  # full backward: input and weight gradient in one
    I = 3  # input gradient (the "B" of the zero-bubble papers)  # noqa: E741
    W = 4  # weight gradient
    R = 5  # recompute forward of a checkpointed stage
    UNSHARD = 6  # gather the sharded parameters of a stage (FSDP)
    RESHARD = 7  # drop the gathered parameters
    REDUCE_GRAD = 8  # start to reduce the gradients of a stage
    WAIT_REDUCE_GRAD = 9  # wait for that reduction
    SEND_F = 10  # send an activation to the next stage
    RECV_F = 11  # receive it
    SEND_B = 12  # send an input gradient to the previous stage
    RECV_B = 13  # receive it
    A = 14  # gradient all-reduce of a replicated or data-parallel stage
    U = 15  # optimizer update of a stage; in a cell, right after the gradients that it applies
    O = 16  # offload an activation to the host  # noqa: E741
    L = 17  # load it back
    WAIT_O = 18  # wait for that offload
    WAIT_SEND_F = 19  # wait until that activation is sent
    WAIT_SEND_B = 20  # wait until that input gradient is sent

    @property
    def kind(self) -> "OpKind":
        """Return the record of the phase's kind; an idle cell has none."""
        return KINDS[self]


class CustomPhase(int):
    """A phase that a table defines; the value is its code in the arrays of that table."""

    name: str  # its letters
    kind: "OpKind"  # its properties

    def __new__(cls, code: int, name: str, kind: "OpKind") -> "CustomPhase":
        """Make a phase from a code, letters and a kind of op."""
        phase = super().__new__(cls, code)
        phase.name, phase.kind = name, kind
        return phase

    def __eq__(self, other: object) -> bool:
        """Compare codes and, between custom phases, letters, as two tables may share a code."""
        has_same_code = int(self) == other
        if isinstance(other, CustomPhase):
            return has_same_code and self.name == other.name
        return has_same_code

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return f"<{self.name}: {int(self)}>"

    def __reduce__(self) -> "tuple[type, tuple[int, str, OpKind]]":
        """Pickle the arguments of its constructor."""
        return CustomPhase, (int(self), self.name, self.kind)


AnyPhase = Phase | CustomPhase
SomePhase = TypeVar("SomePhase", bound=AnyPhase)

# Lanes run one op at a time. The row of a worker issues its ops on the host link. Ops on other
# lanes wait only for their dependencies.
COMPUTING, HOST_LINK, NETWORK = LANES = "compute", "host", "net"
# scopes: an op has a time for each microbatch on a stage, each stage, copy of a stage, or worker
MICROBATCH, STAGE, COPY, WORKER = OWNERS = "microbatch", "stage", "copy", "worker"

# parts of an activation: all of it, the share that W needs after I, the checkpoint that F leaves
# if R comes later, and the parts that B, I and W recompute and hold while they run
PARTS = WHOLE, FOR_W, CHECKPOINT, IN_B, IN_I, IN_W = range(6)
AT_WORK = IN_B, IN_I, IN_W
IN_FLIGHT = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)  # count of each part as activations
PARTS_BY_NAME = {"activation": WHOLE, "for_w": FOR_W, "checkpoint": CHECKPOINT}
LEFT_BY_F = -1  # the whole, or the checkpoint if the activation is recomputed


@with_short_repr("name time lane scope")
class OpKind(NamedTuple):
    """Properties of one kind of op. Rules of `cells.grammar` give its dependencies.

    Attributes:
      name: name in reports.
      time: name of its cost, a field of `Costs` or a new name; empty if it takes no time.
      lane: "compute" for ops in row order; "host", "net" or a new name for ops beside the row.
      scope: "microbatch" (of a stage), "stage", "copy" of a stage, or "worker" (a microbatch on
        every worker, of no stage).
      is_collective: whether the cells of all workers are one op, which starts when all have
        reached it.
      slot: duration in drawings of tables; None if it is not drawn.
      at_start: {part: change} of the activations on its worker when the op starts.
      at_end: {part: change} of the activations on its worker when the op ends.
      awaited_phase: phase whose end the op waits for, if it only waits.
      look: colour in pictures, if it has one; then a darker shade for the second pipe, and a shade
        for the first of several stages of a worker. Lightness tells kinds apart.
      in_cells: whether a table holds it; otherwise only lowering adds it.
    """

    name: str
    time: str = ""
    lane: str = COMPUTING
    scope: str = MICROBATCH
    is_collective: bool = False
    slot: int | None = None
    at_start: Mapping[int, int] = MappingProxyType({})
    at_end: Mapping[int, int] = MappingProxyType({})
    awaited_phase: Phase | None = None
    look: tuple[str, ...] | None = None
    in_cells: bool = True


KINDS: Mapping[Phase, OpKind] = {
    Phase.F: OpKind(
        "forward",
        "forward",
        slot=1,
        at_start={LEFT_BY_F: 1},
        look=("#A6D4F5", "#6F8EA4", "#6EBDEE"),
    ),
    Phase.B: OpKind(
        "backward", "backward", slot=2, at_end={WHOLE: -1}, look=("#D87C00", "#B06500", "#B46000")
    ),
    Phase.I: OpKind(
        "input gradient",
        "input_grad",
        slot=1,
        at_end={WHOLE: -1, FOR_W: 1},
        look=("#00875F", "#005E42", "#006B4B"),
    ),
    Phase.W: OpKind(
        "weight gradient",
        "weight_grad",
        slot=1,
        at_end={FOR_W: -1},
        look=("#F9F08F", "#AEA864", "#AC9C38"),
    ),
    Phase.R: OpKind(
        "recompute",
        "recompute",
        slot=1,
        at_start={CHECKPOINT: -1, WHOLE: 1},
        look=("#D9A2CB", "#87647E", "#C186B2"),
    ),
    Phase.UNSHARD: OpKind("gather weights", "unshard", scope=STAGE),
    Phase.RESHARD: OpKind("drop weights", "reshard", scope=STAGE),
    Phase.REDUCE_GRAD: OpKind("reduce gradients", "reduce_grad", scope=STAGE),
    Phase.WAIT_REDUCE_GRAD: OpKind("wait for gradients", "wait_reduce_grad", scope=STAGE),
    Phase.SEND_F: OpKind("send activation", lane=NETWORK),
    Phase.RECV_F: OpKind("receive activation", lane=NETWORK),
    Phase.SEND_B: OpKind("send gradient", lane=NETWORK),
    Phase.RECV_B: OpKind("receive gradient", lane=NETWORK),
    # idle time is white too, so pictures hatch an all-reduce
    Phase.A: OpKind(
        "all-reduce", "all_reduce", NETWORK, STAGE, look=("#FFFFFF", "#FFFFFF"), in_cells=False
    ),
    Phase.U: OpKind("update", "update", scope=COPY, look=("#1C1C1C", "#1C1C1C")),
    Phase.O: OpKind(
        "offload", "offload", HOST_LINK, at_end={LEFT_BY_F: -1}, look=("#003C78", "#002346")
    ),
    Phase.L: OpKind(
        "load", "load", HOST_LINK, at_start={LEFT_BY_F: 1}, look=("#A83200", "#651E00")
    ),
    Phase.WAIT_O: OpKind("wait for offload", awaited_phase=Phase.O),
    Phase.WAIT_SEND_F: OpKind("wait for activation", awaited_phase=Phase.SEND_F),
    Phase.WAIT_SEND_B: OpKind("wait for gradient", awaited_phase=Phase.SEND_B),
}


class PhaseLists(Generic[SomePhase]):
    """Lists of phases by the properties of their kinds."""

    op_phases: tuple[SomePhase, ...]  # all phases but idle cells

    def __init__(self, op_phases: Iterable[SomePhase]) -> None:
        self.op_phases = tuple(op_phases)

    def on_lane(self, lane: str, *scopes: str) -> tuple[SomePhase, ...]:
        """List the phases of these scopes on a lane that have a cost."""
        phases = (phase for phase in self.cell_phases if phase.kind.time)
        return tuple(p for p in phases if p.kind.lane == lane and p.kind.scope in scopes)

    @functools.cached_property
    def cell_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that a cell can hold."""
        return tuple(phase for phase in self.op_phases if phase.kind.in_cells)

    @functools.cached_property
    def by_letters(self) -> Mapping[str, SomePhase]:
        """Return the phases that a cell can hold, by their letters."""
        return MappingProxyType({phase.name: phase for phase in self.cell_phases})

    @functools.cached_property
    def compute_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that compute a microbatch on a stage."""
        return self.on_lane(COMPUTING, MICROBATCH)

    @functools.cached_property
    def row_ops(self) -> tuple[SomePhase, ...]:
        """Return the phases that compute, of all scopes except whole stages."""
        return self.on_lane(COMPUTING, MICROBATCH, COPY, WORKER)

    @functools.cached_property
    def busy_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases of all scopes that compute and so keep a worker busy."""
        return self.on_lane(COMPUTING, *OWNERS)

    @functools.cached_property
    def sharding_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that run once per stage, not once per microbatch."""
        return tuple(phase for phase in self.cell_phases if phase.kind.scope == STAGE)

    @functools.cached_property
    def microbatch_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases whose ops belong to a microbatch."""
        return tuple(phase for phase in self.cell_phases if phase.kind.scope != STAGE)

    @functools.cached_property
    def worker_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases whose ops belong to a worker and have no stage."""
        return tuple(phase for phase in self.cell_phases if phase.kind.scope == WORKER)

    @functools.cached_property
    def collective_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases of collectives, whose cells on all workers are one op."""
        return tuple(phase for phase in self.cell_phases if phase.kind.is_collective)

    @functools.cached_property
    def host_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that run on host links."""
        return self.on_lane(HOST_LINK, MICROBATCH)

    @functools.cached_property
    def timed_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that have a cost."""
        return tuple(phase for phase in self.op_phases if phase.kind.time)

    @functools.cached_property
    def executed_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that a worker executes in row order under every link model."""
        return (*self.busy_phases, *(phase for phase in self.op_phases if phase == Phase.WAIT_O))

    @functools.cached_property
    def backward_ends(self) -> tuple[SomePhase, ...]:
        """Return the phases that end a backward by freeing the last part of an activation."""

        def frees_activation(kind: OpKind) -> bool:
            for_w = kind.at_end.get(FOR_W, 0)  # I leaves this share to W, which frees it
            return for_w < 0 or (for_w == 0 and kind.at_end.get(WHOLE, 0) < 0)

        return tuple(phase for phase in self.compute_phases if frees_activation(phase.kind))

    @functools.cached_property
    def recomputing_phases(self) -> tuple[SomePhase, ...]:
        """Return the phases that recompute an activation from the checkpoint of its forward."""
        return tuple(
            phase
            for phase in self.op_phases
            if phase.kind.at_start.get(CHECKPOINT, 0) < 0 and phase.kind.scope == MICROBATCH
        )


USUAL_PHASES = PhaseLists(KINDS)
SPLIT = (Phase.F, Phase.I, Phase.W)  # phases of a microbatch on a stage, in this order
INPUT_GRADS = (Phase.B, Phase.I)  # they send a gradient back; a forward may be fused with one
WEIGHT_GRADS = (Phase.B, Phase.W)  # the last op of a backward
BACKWARDS = (Phase.B, Phase.I, Phase.W)  # whole, or in two halves
UPDATES = USUAL_PHASES.on_lane(COMPUTING, COPY)
STEP_END = (Phase.A, Phase.U)  # lowering adds them if no cell of the table updates
COMPUTE, ROW_OPS = USUAL_PHASES.compute_phases, USUAL_PHASES.row_ops
SHARDING, CELL_PHASES = USUAL_PHASES.sharding_phases, USUAL_PHASES.cell_phases
HOST, TIMED = USUAL_PHASES.host_phases, USUAL_PHASES.timed_phases
MESSAGES = (Phase.SEND_F, Phase.RECV_F, Phase.SEND_B, Phase.RECV_B)  # link models run them
WAIT_SEND = (Phase.WAIT_SEND_F, Phase.WAIT_SEND_B)  # only some link models run them
WAITS = (Phase.WAIT_O, *WAIT_SEND)
COMMUNICATION = MESSAGES + WAIT_SEND

Slots = Mapping[str, float]  # durations by phase letter that a table is drawn with
UNIT_SLOTS: Mapping[str, int] = MappingProxyType(
    {phase.name: kind.slot for phase, kind in KINDS.items() if kind.slot is not None}
)
EQUAL_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 1})


def is_phase(codes: NumpyArray, phases: Iterable[int]) -> Bool[NumpyArray, "..."]:
    """Return whether each phase code is among `phases`; ten times as fast as `np.isin`."""
    return _membership(tuple(phases)).take(codes, mode="clip")


@functools.cache
def _membership(phases: tuple[int, ...]) -> NumpyArray:
    is_member = np.zeros(2 + max(phases, default=0), bool)  # the last entry is for larger codes
    is_member[list(phases)] = True
    return is_member


class Op(NamedTuple):
    """One op: phase, stage and microbatch.

    Ops of a whole stage, such as sharding, carry `NO_MICROBATCH`, ops of a worker `NO_STAGE`. If
    microbatches have K slices, slice k of microbatch m has the number m K + k.

    Example:
      >>> import pipejax as pj
      >>> str(pj.Op(pj.Phase.F, stage=2, microbatch=0))
      '2F0'
    """

    phase: Phase  # or a `CustomPhase` of a table that defines it
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return format_op(self)


def matching_receive(send: Op) -> Op:
    """Return the RECV op that takes the message of a SEND op, on the neighbouring stage."""
    if send.phase == Phase.SEND_F:
        return Op(Phase.RECV_F, send.stage + 1, send.microbatch)
    return Op(Phase.RECV_B, send.stage - 1, send.microbatch)


Cell = tuple[Op, ...]  # () is idle, (op,) an op, (forward, backward) a fused pair

PHASES = USUAL_PHASES.by_letters
_LIMIT = 10**9
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")


@functools.lru_cache
def _op_form(letters: tuple[str, ...], slices: int) -> re.Pattern[str]:
    """Return the pattern of an op's text, made of stage, letters, microbatch, slice and lane."""
    alternatives = "|".join(sorted(letters, key=len, reverse=True))  # RECV_F before R
    part = r"(?:([0-9]{1,9})\.([0-9]{1,9}))?" if slices > 1 else r"([0-9]{0,9})(?:\.([0-9]{1,9}))?"
    return re.compile(rf"([0-9]{{0,9}})({alternatives}){part}(?:@(\w+))?")


def parse_op(text: str, phases: Mapping[str, AnyPhase] = PHASES, slices: int = 1) -> Op:
    """Read one op from its text: "2F0" is stage 2, phase F, microbatch 0; "2F0.1" its slice 1."""
    plain = text.strip()
    match = _op_form(tuple(phases), slices).fullmatch(plain)
    if match is None or not (match[1] or match[3]):
        form = "2F0.1" if slices > 1 else "2F0"
        shown = plain if len(plain) <= 40 else f"{plain[:40]}..."
        raise ValueError(
            f"{shown!r} is not an op: expected stage, letter, microbatch, as in "
            f"{form}; letters are {', '.join(phases)}, numbers have at most 9 digits"
        )
    stage, letters, microbatch, part, lane = match.groups()
    kind = phases[letters].kind
    for digits, carries, what in (
        (microbatch, kind.scope != STAGE, "microbatch"),
        (stage, kind.scope != WORKER, "stage"),
    ):
        if bool(digits) != carries:
            need = f"a {what}" if carries else f"no {what}"
            raise ValueError(f"{plain!r} is not an op: {letters} carries {need}")
    if lane not in (None, kind.lane):
        raise ValueError(f"{plain!r} is not an op: {letters} is on lane {kind.lane}")
    if part and int(part) >= slices:
        allowed = f"slices are 0 to {slices - 1}" if slices > 1 else "the table has no slices"
        raise ValueError(f"{plain!r} is not an op: {allowed}")
    number = int(microbatch) * slices + int(part or 0) if microbatch else NO_MICROBATCH
    return Op(cast(Phase, phases[letters]), int(stage) if stage else NO_STAGE, number)


def parse_cell(text: str, phases: Mapping[str, AnyPhase] = PHASES, slices: int = 1) -> Cell:
    """Read one cell from its text: empty, an op, or a fused pair "(0F8;7B0)OVERLAP_F_B"."""
    text = text.strip()
    if not text:
        return ()
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return (parse_op(text, phases, slices),)
    forward, backward = (parse_op(part, phases, slices) for part in pair.groups())
    if forward.phase is not Phase.F or backward.phase not in INPUT_GRADS:
        raise ValueError(f"{text!r} is not a fused pair: expected (F;B) or (F;I), forward first")
    return forward, backward


def _is_plain(op: Op, phases: Mapping[str, AnyPhase]) -> bool:
    """Return whether an op has one of the phases, and a legal stage and microbatch."""
    return (
        isinstance(op, Op)
        and isinstance(op.phase, AnyPhase)
        and phases.get(op.phase.name) == op.phase
        and op.phase.kind.scope in (MICROBATCH, COPY)
        and type(op.stage) is type(op.microbatch) is int
        and 0 <= op.stage < _LIMIT
        and 0 <= op.microbatch < _LIMIT
    )


def check_cell(cell: Cell, phases: Mapping[str, AnyPhase] = PHASES, slices: int = 1) -> Cell:
    """Check a cell of ops by printing and parsing it; return it with the table's phases."""
    if isinstance(cell, tuple) and len(cell) == 1 and _is_plain(cell[0], phases):
        return cell  # fast path for most cells: a table may have millions
    if not isinstance(cell, tuple | list) or not all(isinstance(op, Op) for op in cell):
        raise ValueError(f"a cell is a text such as '2F0' or a tuple of Op, got {cell!r}")
    if any(not isinstance(op.phase, AnyPhase) for op in cell):
        raise ValueError(f"the phase of an op is one of Phase, got {cell!r}")
    if len(cell) > 2:
        raise ValueError(f"a cell holds at most a fused pair, got {len(cell)} ops")
    return parse_cell(format_cell(tuple(cell), slices), phases, slices)


def format_number(microbatch: int, slices: int = 1) -> str:
    """Return the text of a microbatch, "m" or "m.slice"; empty for `NO_MICROBATCH`."""
    if microbatch == NO_MICROBATCH:
        return ""
    return ".".join(map(str, divmod(microbatch, slices))) if slices > 1 else str(microbatch)


def format_op(op: Op, slices: int = 1) -> str:
    """Return the text of an op; the inverse of `parse_op`."""
    stage = "" if op.stage == NO_STAGE else str(op.stage)
    return f"{stage}{op.phase.name}{format_number(op.microbatch, slices)}"


def format_cell(cell: Cell, slices: int = 1) -> str:
    """Return the text of a cell; the inverse of `parse_cell`."""
    texts = [format_op(op, slices) for op in cell]
    return f"({texts[0]};{texts[1]})OVERLAP_F_B" if len(cell) == 2 else "".join(texts)


@with_short_repr("reason worker slot")
class ScheduleError(MismatchError):
    """Error that a schedule cannot run.

    The check that fails names the place; the table, which knows all cells, adds the grid.

    Attributes:
      reason: one line that names the op.
      grid: the table as text with the place marked, empty if there is no place to show.
      worker: row of the fault, or None.
      slot: column of the fault, or None if the fault is the whole row.
      argument: argument of a builder that has a wrong value, or empty.
    """

    def __init__(
        self,
        reason: str,
        grid: str = "",
        place: tuple[Index, Index | None] | None = None,
        argument: str = "",
    ) -> None:
        """Join reason and grid to the message; `place` is (worker, slot)."""
        super().__init__(f"{reason}\n{grid}" if grid else reason, argument)
        self.reason, self.grid = reason, grid
        self.worker, self.slot = (None if p is None else int(p) for p in place or (None, None))
