"""Costs in seconds.

`Costs` holds what an op takes on each stage and what a message takes over each stage boundary.
Its leaves are arrays, so costs can be batched, differentiated and optimised; their values never
cause a recompilation. Everything here is seconds: GB/s and TFLOP/s end in `system.py`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.costs.seconds import Number, checked_seconds
from pipejax.schedules.cells.ops import Phase
from pipejax.schedules.table.table import ScheduleTable

PHASE_FIELDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input_grad",
    "W": "weight_grad",
    "R": "recompute",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    "REDUCE_GRAD": "reduce_grad",
    "WAIT_REDUCE_GRAD": "wait_reduce_grad",
    "A": "all_reduce",
    "U": "update",
    "O": "offload",
    "L": "load",
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds per op and per message.

    An op time is a scalar, the same for every stage, or has one entry per stage. A message time
    is a scalar, or has one entry per stage boundary, or any shape that broadcasts to
    (2 directions, pipes, stages - 1): activations first, then input gradients.

    Attributes:
      forward: F [s].
      backward: B, the whole backward [s].
      input_grad: I [s].
      weight_grad: W [s].
      recompute: R [s].
      all_reduce: A, gradient all-reduce of a stage [s].
      update: U, optimizer update of a stage [s].
      unshard: UNSHARD [s].
      reshard: RESHARD [s].
      reduce_grad: REDUCE_GRAD [s].
      wait_reduce_grad: WAIT_REDUCE_GRAD [s].
      latency: L of a message [s].
      transmit: X of a message, bytes / bandwidth [s].
      offload: O, an activation to the host [s].
      load: L, back from the host; as offload if None [s].
      pair: duration of a fused pair, by the stage of its forward; the sum of both if None [s].

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> costs = pj.Costs.uniform(table, forward=1.0, backward=2.0, transfer=0.5)
      >>> float(pj.makespan(pj.lower(table), costs))  # (M+P-1)(F+B) + 2(P-1)c
      10.0
    """

    forward: Number = 0.0
    backward: Number = 0.0
    input_grad: Number = 0.0
    weight_grad: Number = 0.0
    recompute: Number = 0.0
    all_reduce: Number = 0.0
    update: Number = 0.0
    unshard: Number = 0.0
    reshard: Number = 0.0
    reduce_grad: Number = 0.0
    wait_reduce_grad: Number = 0.0
    latency: Number = 0.0
    transmit: Number = 0.0
    offload: Number = 0.0
    load: Number | None = None
    pair: Number | None = None

    def __post_init__(self) -> None:
        """Make arrays of lists: a cost is one leaf of the tree."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, field.name, checked_seconds(field.name, value))

    @classmethod
    def uniform(
        cls,
        table: ScheduleTable,
        *,
        forward: Number,
        backward: Number | None = None,
        input_grad: Number | None = None,
        weight_grad: Number | None = None,
        transfer: Number | None = None,
        latency: Number = 0.0,
        **others: Number | None,
    ) -> "Costs":
        """Give every stage the same op times and every boundary the same message time.

        Args:
          table: the schedule to be priced; its stages decide nothing here, for costs are equal.
          forward: F [s]; every argument is a number, or an array (batch) of them.
          backward: B; the sum of I and W if None.
          input_grad: I; half of B if None.
          weight_grad: W; what B leaves over I if None.
          transfer: transmit time of a message; `transmit=` is the same.
          latency: latency of a message.
          **others: further fields of `Costs`.

        Returns:
          The costs; where any argument has a batch axis, all leaves have it.

        Raises:
          ValueError: if a cost is negative or not finite, or neither B nor I and W are given.

        Example:
          >>> import pipejax as pj
          >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
          >>> pj.Costs.uniform(table, forward=1.0, backward=3.0).input_grad
          1.5
        """
        del table
        if transfer is not None and others.get("transmit") is not None:
            raise ValueError("transfer and transmit are the same cost: give one")
        given = {"latency": latency, "transmit": 0.0 if transfer is None else transfer}
        given |= {name: value for name, value in others.items() if value is not None}
        costs = cls.complete(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            **given,
        )
        shape = np.broadcast_shapes(*(jnp.shape(leaf) for leaf in jax.tree.leaves(costs)))
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape), costs) if shape else costs

    @classmethod
    def per_stage(
        cls,
        table: ScheduleTable,
        *,
        forward: Number,
        backward: Number | None = None,
        input_grad: Number | None = None,
        weight_grad: Number | None = None,
        **others: Number | None,
    ) -> "Costs":
        """Give each stage its own op times and each boundary its own message time.

        Args:
          table: the schedule to be priced.
          forward: F, a number or (..., stages) [s]; so are the other op times.
          backward: B; the sum of I and W if None.
          input_grad: I; half of B if None.
          weight_grad: W; what B leaves over I if None.
          **others: further fields of `Costs`; latency and transmit are numbers, (stages - 1)
            arrays or broadcast to (2, pipes, stages - 1).

        Returns:
          The costs.

        Raises:
          ValueError: if a cost is negative, not finite, or has the wrong number of entries.

        Example:
          >>> import pipejax as pj
          >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
          >>> costs = pj.Costs.per_stage(table, forward=[1.0, 2.0], backward=[2.0, 4.0])
          >>> costs.weight_grad.tolist()
          [1.0, 2.0]
        """
        given = {name: value for name, value in others.items() if value is not None}
        costs = cls.complete(
            forward=forward,
            backward=backward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            **given,
        )
        costs.check_shapes(table.num_stages, table.num_pipes)
        return costs

    @classmethod
    def complete(
        cls,
        *,
        forward: Number,
        backward: Number | None = None,
        input_grad: Number | None = None,
        weight_grad: Number | None = None,
        **others: Number,
    ) -> "Costs":
        """Make costs, filling in B = I + W, or I = W = B / 2.

        Args:
          forward: F [s].
          backward: B, or None.
          input_grad: I, or None.
          weight_grad: W, or None.
          **others: further fields of `Costs`.

        Returns:
          The costs.

        Raises:
          ValueError: if a cost is negative or not finite, or neither B nor I and W are given.

        Example:
          >>> Costs.complete(forward=1.0, backward=3.0, input_grad=1.0).weight_grad
          2.0
        """
        unknown = set(others) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown cost {sorted(unknown)[0]!r}: known are {_FIELD_NAMES}")
        given = {
            "forward": forward,
            "backward": backward,
            "input_grad": input_grad,
            "weight_grad": weight_grad,
            **others,
        }
        checked = {
            name: checked_seconds(name, value) for name, value in given.items() if value is not None
        }
        b, i, w = (checked.get(name) for name in ("backward", "input_grad", "weight_grad"))
        if b is None:
            if i is None or w is None:
                raise ValueError(
                    "the backward has no cost: give backward (B), or input_grad (I) and "
                    "weight_grad (W)"
                )
            b = i + w
        if i is None:
            i = b / 2 if w is None else checked_seconds("I = B - W (input_grad)", b - w)
        if w is None:
            w = checked_seconds("W = B - I (weight_grad)", b - i)
        checked |= {"backward": b, "input_grad": i, "weight_grad": w}
        return cls(**checked)

    def field_of(self, phase: Phase) -> str:
        """Return the field that prices a phase: that of O for L, where L is not given.

        Args:
          phase: a phase with a duration.

        Returns:
          Name of the field.

        Example:
          >>> Costs(offload=2.0).field_of(Phase.L)
          'offload'
        """
        as_offload = phase is Phase.L and self.load is None
        return "offload" if as_offload else PHASE_FIELDS[phase.name]

    def check_values(self) -> None:
        """Check that every cost is finite and at least 0.

        Raises:
          ValueError: if one is not; the message names it.

        Example:
          >>> Costs(forward=-1.0).check_values()
          Traceback (most recent call last):
          ...
          ValueError: forward must be finite and at least 0 seconds, got -1.0
        """
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                checked_seconds(field.name, getattr(self, field.name))

    def check_shapes(self, num_stages: int, num_pipes: int) -> None:
        """Check that every cost has one entry, or one per stage or boundary.

        Args:
          num_stages: S.
          num_pipes: number of pipes.

        Raises:
          ValueError: if one has another number of entries; the message names it.

        Example:
          >>> Costs(forward=np.ones(2)).check_shapes(num_stages=3, num_pipes=1)
          Traceback (most recent call last):
          ...
          ValueError: forward has shape (2,), the table has 3 stages
        """
        for field in dataclasses.fields(self):
            shape = jnp.shape(
                getattr(self, field.name) if getattr(self, field.name) is not None else 0.0
            )
            if field.name in ("latency", "transmit"):
                target: tuple[int, ...] = (2, num_pipes, num_stages - 1)
                what = f"{num_stages - 1} stage boundaries (or {target})"
            else:
                target, what = (num_stages,), f"{num_stages} stages"
            try:
                fits = np.broadcast_shapes(shape, target)[-len(target) :] == target
            except ValueError:
                fits = False
            if shape and not fits:
                raise ValueError(f"{field.name} has shape {shape}, the table has {what}")


jax.tree_util.register_dataclass(Costs)
_FIELD_NAMES = ", ".join(field.name for field in dataclasses.fields(Costs))
