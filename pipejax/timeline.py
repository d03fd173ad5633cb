"""A run as bars and arrows: what the terminal, the drawings and the trace export all show."""

from typing import NamedTuple

import numpy as np

from pipejax.evaluate import Evaluation
from pipejax.ops import HOST, NO_MICROBATCH, Op, Phase, format_cell
from pipejax.program import Program


class Bar(NamedTuple):
    """An op on a worker.

    Attributes:
      worker: worker, or `NO_WORKER` for a collective, which runs beside compute.
      start: [s].
      finish: [s].
      ops: the op, or the forward and backward of a fused pair.
      is_critical: whether it is on the critical path.

    Example:
      >>> Bar(worker=2, start=0.0, finish=1.0, ops=(Op(Phase.F, 2, 0),), is_critical=True).label
      '2F0'
    """

    worker: int
    start: float
    finish: float
    ops: tuple[Op, ...]
    is_critical: bool

    @property
    def on_host_link(self) -> bool:
        """Whether it is an offload or a load, which runs beside the worker's compute."""
        return self.ops[0].phase in HOST

    @property
    def label(self) -> str:
        """Text of the cell."""
        return format_cell(self.ops)


class Arrow(NamedTuple):
    """A message between workers.

    Attributes:
      sender: worker.
      receiver: worker.
      start: when it leaves [s].
      finish: when it arrives [s].
      op: the SEND_F or SEND_B.
      is_critical: whether it is on the critical path.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> str(arrows(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))[1].op)
      '1SEND_B0'
    """

    sender: int
    receiver: int
    start: float
    finish: float
    op: Op
    is_critical: bool


def bars(evaluation: Evaluation) -> list[Bar]:
    """List every op of the table, then all-reduces and updates where they take part.

    Args:
      evaluation: a run.

    Returns:
      Bars, row by row.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
      >>> [bar.label for bar in bars(run)]
      ['0F0', '0B0', '1F0', '1B0']
    """
    program = evaluation.program

    def bar(worker: int, node: int, ops: tuple[Op, ...]) -> Bar:
        return Bar(
            worker,
            float(evaluation.node_start[node]),
            float(evaluation.node_finish[node]),
            ops,
            bool(evaluation.critical[node]),
        )

    in_table = [
        bar(
            int(worker),
            int(program.node_of_cell[worker, slot]),
            evaluation.table.cell(worker, slot),
        )
        for worker, slot in np.argwhere(program.node_of_cell > 0)
    ]
    return in_table + [
        bar(int(program.worker[n]), int(n), (_step_end_op(program, int(n)),))
        for n in program.beside_cells
    ]


def _step_end_op(program: Program, node: int) -> Op:
    return Op(Phase(int(program.phase[node])), int(program.stage[node]), NO_MICROBATCH)


def arrows(evaluation: Evaluation) -> list[Arrow]:
    """List every message between workers.

    Args:
      evaluation: a run.

    Returns:
      Arrows, in the order in which their producers stand in their rows.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=1)
      >>> run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0, transmit=0.5))
      >>> [(a.sender, a.receiver, a.start, a.finish) for a in arrows(run)]
      [(0, 1, 1.0, 1.5), (1, 0, 4.5, 5.0)]
    """
    sent = evaluation.program.messages
    return [
        Arrow(
            int(sent.sender[k]),
            int(sent.receiver[k]),
            float(evaluation.message_start[k]),
            float(evaluation.message_finish[k]),
            Op(Phase(int(sent.phase[k])), int(sent.stage[k]), int(sent.microbatch[k])),
            bool(evaluation.message_critical[k]),
        )
        for k in range(len(sent.producer))
    ]
