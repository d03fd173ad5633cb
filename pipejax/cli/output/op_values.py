"""A number for every op, listed or summed up by worker and phase."""

from collections.abc import Callable
from typing import NamedTuple

from rich.table import Table

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.output.tables import grid


class OpValue(NamedTuple):
    """A number that belongs to an op.

    Attributes:
      op: text of the op or fused pair.
      phase: its letter, of a pair both.
      worker: worker, or `NO_WORKER` for a collective.
      value: the number.
    """

    op: str
    phase: str
    worker: int
    value: float


def op_values(evaluation: "pj.Evaluation", of_node: Float[NumpyArray, " nodes"]) -> list[OpValue]:
    """List every op with its node's number.

    Args:
      evaluation: a run.
      of_node: (nodes) numbers.

    Returns:
      Ops row by row, then all-reduces and updates.
    """
    from pipejax.analysis.timeline import bars

    return [
        OpValue(
            bar.label,
            "+".join(op.phase.name for op in bar.ops),
            bar.worker,
            float(of_node[bar.node]),
        )
        for bar in bars(evaluation)
    ]


def values_by_phase(values: list[OpValue], name: str, format: Callable[[float], str]) -> Table:
    """Show the least and the most of each phase on each worker, with the op that has it.

    Args:
      values: what every op has.
      name: what the number is.
      format: prints one.

    Returns:
      The table.
    """
    from pipejax.engine.lowering.program import NO_WORKER

    groups: dict[tuple[int, str], list[OpValue]] = {}
    for value in values:
        groups.setdefault((value.worker, value.phase), []).append(value)
    least = [min(group, key=lambda v: v.value) for group in groups.values()]
    most = [max(group, key=lambda v: v.value) for group in groups.values()]
    return grid(
        [
            ("worker", ("-" if worker == NO_WORKER else worker for worker, _ in groups)),
            ("phase", (phase for _, phase in groups)),
            ("ops", map(len, groups.values())),
            (f"least {name}", (format(v.value) for v in least)),
            ("op with least", (v.op for v in least)),
            (f"most {name}", (format(v.value) for v in most)),
            ("op with most", (v.op for v in most)),
        ],
        keys=2,
    )
