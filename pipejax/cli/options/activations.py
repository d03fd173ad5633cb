"""Options of the activation memory: how large an activation is, and what W needs of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import share
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.numbers import gigabytes
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE
from pipejax.schedules.table.held_activations import static_bytes

if TYPE_CHECKING:
    from pipejax.analysis.activation_memory import ActivationMemory
    from pipejax.analysis.evaluate import Evaluation
    from pipejax.costs.workload import Workload


WeightShare = Annotated[
    float | None,
    typer.Option(
        help="Share of an activation that W needs after I, from 0 to 1; with --model it follows "
        "from the layers if not given, else it is 1/3."
    ),
]


class HeldMemory(NamedTuple):
    """The memory of a run.

    Attributes:
      memory: that of its activations.
      unit: of their sizes, "activations" or "bytes".
      static: (workers) bytes that last the whole step beside it, if a model says how many.
    """

    memory: "ActivationMemory"
    unit: str
    static: Float[NumpyArray, " workers"] | None = None

    @property
    def text(self) -> Callable[[float], str]:
        """How a level is printed."""
        return gigabytes if self.unit == "bytes" else "{:.4g}".format

    def as_json(self) -> dict[str, Any]:
        """What `--json` says of it."""
        held = self.memory
        return {
            "unit": self.unit,
            "weight_share": printed_share(held),
            "peak": held.peak,
            "peak_at": held.peak_at,
        }


def printed_share(held: "ActivationMemory") -> float | list[float]:
    """The weight share as `--json` says it: one number, or where stages differ one for each."""
    shares: list[float] = held.weight_share.tolist()
    return shares[0] if len({*shares}) == 1 else shares


class ActivationOptions(NamedTuple):
    """How activations are sized; `of` gives the memory of a run."""

    weight_share: float | None
    sizes: list[float] | None

    def of(self, evaluation: "Evaluation", workload: "Workload | None") -> HeldMemory:
        """Follow the memory of a run: in bytes where a model says how many.

        Raises:
          ValueError: if sizes are given beside a model, or not one for each stage.
        """
        from pipejax.analysis.activation_memory import activation_memory
        from pipejax.costs.workload import stage_bytes

        if workload is not None:
            if self.sizes is not None:
                raise ValueError("--activation-sizes does not go with --model, which has its own")
            stages = stage_bytes(workload, evaluation.table)
            static, whole, shares, inputs, version = map(np.asarray, stages)
            held = activation_memory(
                evaluation, sizes=whole, weight_share=shares, checkpoints=inputs
            )
            return HeldMemory(held, "bytes", static_bytes(evaluation.table, static, version))
        sizes = self.sizes or [1.0]
        if len(sizes) not in (1, evaluation.stages):
            raise ValueError(
                f"--activation-sizes must be a number or one for each of {evaluation.stages} "
                f"stages, got {len(sizes)}"
            )
        one_or_each = sizes[0] if len(sizes) == 1 else sizes
        needed = WEIGHT_SHARE if self.weight_share is None else self.weight_share
        held = activation_memory(evaluation, sizes=one_or_each, weight_share=needed)
        return HeldMemory(held, "activations")


def choose_activations(
    *,
    weight_share: WeightShare = None,
    activation_sizes: Annotated[
        str | None, typer.Option(help="Size of an activation, a number or one per stage: 1,1,2.")
    ] = None,
) -> ActivationOptions:
    """Read how activations are sized."""
    if weight_share is not None:
        share(weight_share, "--weight-share")
    if activation_sizes is None:
        return ActivationOptions(weight_share, None)
    sizes = [
        parse_seconds(size.strip(), "--activation-sizes") for size in activation_sizes.split(",")
    ]
    return ActivationOptions(weight_share, sizes)
