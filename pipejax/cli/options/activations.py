"""Options of the activation memory: how large an activation is, and what W needs of it."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from pipejax.analysis.activation_memory import ActivationMemory, activation_memory
from pipejax.analysis.evaluate import Evaluation
from pipejax.cli.options.numbers import parse_seconds
from pipejax.cli.output.numbers import gigabytes
from pipejax.costs.workload import Workload, stage_bytes
from pipejax.schedules.cells.memory_ledger import WEIGHT_SHARE


class HeldMemory(NamedTuple):
    """The activation memory of a run, and the unit of its sizes."""

    memory: ActivationMemory
    unit: str

    @property
    def text(self) -> Callable[[float], str]:
        """How a level is printed."""
        return gigabytes if self.unit == "bytes" else "{:.4g}".format

    def as_json(self) -> dict[str, Any]:
        """What `--json` says of it."""
        held = self.memory
        return {
            "unit": self.unit,
            "weight_share": held.weight_share,
            "peak": held.peak,
            "peak_at": held.peak_at,
        }


class ActivationOptions(NamedTuple):
    """How activations are sized; `of` gives the memory of a run."""

    weight_share: float
    sizes: list[float] | None

    def of(self, evaluation: Evaluation, workload: Workload | None) -> HeldMemory:
        """Follow the memory of a run: in bytes where a model says how many.

        Raises:
          ValueError: if sizes are given beside a model, or not one for each stage.
        """
        if workload is not None:
            if self.sizes is not None:
                raise ValueError("--activation-sizes does not go with --model, which has its own")
            stages = stage_bytes(workload, evaluation.table)
            whole, inputs = np.asarray(stages.activations), np.asarray(stages.checkpoint)
            held = activation_memory(
                evaluation, sizes=whole, weight_share=self.weight_share, checkpoints=inputs
            )
            return HeldMemory(held, "bytes")
        sizes = self.sizes or [1.0]
        if len(sizes) not in (1, evaluation.stages):
            raise ValueError(
                f"--activation-sizes must be a number or one for each of {evaluation.stages} "
                f"stages, got {len(sizes)}"
            )
        one_or_each = sizes[0] if len(sizes) == 1 else sizes
        held = activation_memory(evaluation, sizes=one_or_each, weight_share=self.weight_share)
        return HeldMemory(held, "activations")


def choose_activations(
    *,
    weight_share: Annotated[
        float | None, typer.Option(help="Share of an activation that W needs after I, from 0 to 1.")
    ] = None,
    activation_sizes: Annotated[
        str | None, typer.Option(help="Size of an activation, a number or one per stage: 1,1,2.")
    ] = None,
) -> ActivationOptions:
    """Read how activations are sized."""
    weight_share = WEIGHT_SHARE if weight_share is None else weight_share
    if not 0 <= weight_share <= 1:
        raise ValueError(f"--weight-share must be a number from 0 to 1, got {weight_share}")
    if activation_sizes is None:
        return ActivationOptions(weight_share, None)
    sizes = [
        parse_seconds(size.strip(), "--activation-sizes") for size in activation_sizes.split(",")
    ]
    return ActivationOptions(weight_share, sizes)
