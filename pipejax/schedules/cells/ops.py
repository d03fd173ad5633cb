"""What a cell of a schedule table can hold: ops, their phases and their text form.

Phases carry PyTorch's letters everywhere. The text of an op is stage, letter, microbatch, as in
"2F0"; the text of a fused pair is "(0F8;7B0)OVERLAP_F_B". Printing and parsing are inverse.
"""

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipejax.base.array_types import Index
from pipejax.base.checks import MismatchError
from pipejax.base.display import short_repr_of

NO_STAGE = -1
NO_MICROBATCH = -1
NO_PIPE = -1


class Phase(enum.IntEnum):
    """The kind of work in a cell; the value is its code in the arrays of a table.

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


COMPUTE = (Phase.F, Phase.B, Phase.I, Phase.W, Phase.R)
SPLIT = (Phase.F, Phase.I, Phase.W)  # of a microbatch on a stage, in this order
SHARDING = (Phase.UNSHARD, Phase.RESHARD, Phase.REDUCE_GRAD, Phase.WAIT_REDUCE_GRAD)
MESSAGES = (Phase.SEND_F, Phase.RECV_F, Phase.SEND_B, Phase.RECV_B)
WAIT_SEND = (Phase.WAIT_SEND_F, Phase.WAIT_SEND_B)
COMMUNICATION = MESSAGES + WAIT_SEND
STEP_END = (Phase.A, Phase.U)  # lowering adds them, where no cell of the table updates
HOST = (Phase.O, Phase.L)  # run on the worker's host link, beside its compute
TIMED = COMPUTE + SHARDING + STEP_END + HOST  # phases with a duration
WAITS = (Phase.WAIT_O, *WAIT_SEND)  # take no time of their own
EXECUTED = (*COMPUTE, *SHARDING, Phase.U, Phase.WAIT_O)  # a worker executes these in row order
CELL_PHASES = EXECUTED + COMMUNICATION + HOST
NUMBERED = tuple(phase for phase in CELL_PHASES if phase not in SHARDING)  # have a microbatch

Slots = Mapping[str, float]  # durations by phase letter that a table is drawn with
UNIT_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1, "R": 1})
EQUAL_SLOTS: Mapping[str, int] = MappingProxyType({"F": 1, "B": 1})


class Op(NamedTuple):
    """One op: phase, stage and microbatch.

    Sharding ops belong to a stage as a whole and carry `NO_MICROBATCH`.

    Example:
      >>> import pipejax as pj
      >>> str(pj.Op(pj.Phase.F, stage=2, microbatch=0))
      '2F0'
    """

    phase: Phase
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        """Return stage, letter, microbatch."""
        microbatch = "" if self.microbatch == NO_MICROBATCH else str(self.microbatch)
        return f"{self.stage}{self.phase.name}{microbatch}"


def receive_of(send: Op) -> Op:
    """Return the RECV of a SEND, on the stage that the message goes to."""
    if send.phase == Phase.SEND_F:
        return Op(Phase.RECV_F, send.stage + 1, send.microbatch)
    return Op(Phase.RECV_B, send.stage - 1, send.microbatch)


Cell = tuple[Op, ...]  # () is idle, (op,) an op, (forward, backward) a fused pair

_NUMBERED = frozenset(NUMBERED)
_LIMIT = 10**9
_LETTERS = "|".join(phase.name for phase in reversed(CELL_PHASES))
_OP = re.compile(rf"([0-9]{{1,9}})({_LETTERS})([0-9]{{0,9}})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")


def parse_op(text: str) -> Op:
    """Read one op."""
    match = _OP.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{_shorten(text.strip())!r} is not an op: expected stage, letter, microbatch, as in "
            f"2F0; letters are {', '.join(p.name for p in CELL_PHASES)}, numbers have at most 9 "
            "digits"
        )
    phase = Phase[match[2]]
    if (phase in SHARDING) != (match[3] == ""):
        need = "no microbatch" if phase in SHARDING else "a microbatch"
        raise ValueError(f"{text.strip()!r} is not an op: {phase.name} carries {need}")
    return Op(phase, int(match[1]), int(match[3]) if match[3] else NO_MICROBATCH)


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def parse_cell(text: str) -> Cell:
    """Read one cell: empty, an op, or a fused pair."""
    text = text.strip()
    if not text:
        return ()
    pair = _PAIR.fullmatch(text)
    if pair is None:
        return (parse_op(text),)
    forward, backward = parse_op(pair[1]), parse_op(pair[2])
    if forward.phase is not Phase.F or backward.phase not in (Phase.B, Phase.I):
        raise ValueError(f"{text!r} is not a fused pair: expected (F;B) or (F;I), forward first")
    return forward, backward


def _is_plain(op: Op) -> bool:
    return (
        isinstance(op, Op)
        and isinstance(op.phase, Phase)
        and op.phase in _NUMBERED
        and type(op.stage) is type(op.microbatch) is int
        and 0 <= op.stage < _LIMIT
        and 0 <= op.microbatch < _LIMIT
    )


def check_cell(cell: Cell) -> Cell:
    """Check a cell that is given as ops, by printing and parsing it."""
    if isinstance(cell, tuple) and len(cell) == 1 and _is_plain(cell[0]):
        return cell  # nearly all are: tables of a million cells are made in seconds
    if not isinstance(cell, tuple | list) or not all(isinstance(op, Op) for op in cell):
        raise ValueError(f"a cell is a text such as '2F0' or a tuple of Op, got {cell!r}")
    if any(not isinstance(op.phase, Phase) for op in cell):
        raise ValueError(f"the phase of an op is one of Phase, got {cell!r}")
    if len(cell) > 2:
        raise ValueError(f"a cell holds at most a fused pair, got {len(cell)} ops")
    return parse_cell(format_cell(tuple(cell)))


def format_cell(cell: Cell) -> str:
    """Return the text of a cell; the inverse of `parse_cell`."""
    if len(cell) == 2:
        return f"({cell[0]};{cell[1]})OVERLAP_F_B"
    return "".join(map(str, cell))


# The error for schedules that cannot run.


@short_repr_of("reason worker slot")
class ScheduleError(MismatchError):
    """A schedule that cannot run.

    The check that fails names the place; the table, which knows all cells, adds the grid.

    Attributes:
      reason: one line that names the op.
      grid: the table as text with the place marked, empty where there is no place to show.
      worker: row of the fault, or None.
      slot: column of the fault, or None where it is the whole row.
    """

    def __init__(
        self, reason: str, grid: str = "", place: tuple[Index, Index | None] | None = None
    ) -> None:
        """Join the reason and the grid to the message; a place is a worker and a slot."""
        super().__init__(f"{reason}\n{grid}" if grid else reason)
        self.reason, self.grid = reason, grid
        self.worker, self.slot = (None if p is None else int(p) for p in place or (None, None))
