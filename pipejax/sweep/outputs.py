"""Outputs that a sweep can keep besides step time and memory, with a record for each output."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.system.system import System


class SystemRuns(NamedTuple):
    """Results of one program on a batch of systems, from which outputs follow."""

    step_time: Float[NumpyArray, " batch"]  # [s]
    busy: Float[NumpyArray, " batch"]  # busy time of the mean worker [s]
    tokens: Any  # tokens of a step in all replicas
    accelerators: int  # number of accelerators of the job
    # share of the critical path that each resource takes; empty if no output needs shares
    share: Float[NumpyArray, "batch resources"]
    systems: System  # the batch


class SweepOutput(NamedTuple):
    """An output that a sweep may keep for each point."""

    unit: str
    meaning: str
    values: Callable[[SystemRuns], NumpyArray]  # (batch), or (batch, resources)
    dtype: str = ""  # data type in the dataset; "" for that of the sweep
    needs_paths: bool = False  # whether the output follows from `share`
    is_measure: bool = True  # whether the output is a number that ranks points
    more_is_better: bool = False
    is_resource: bool = False  # whether values are indices in `RESOURCES`
    per_resource: bool = False  # whether there is a value for each resource


TOKENS = "tokens_per_second"
OUTPUTS: Mapping[str, SweepOutput] = {
    "bubble_ratio": SweepOutput(
        "1", "idle share of the workers", lambda runs: 1 - runs.busy / runs.step_time
    ),
    TOKENS: SweepOutput(
        *("token/s", "tokens of a second", lambda runs: runs.tokens / runs.step_time),
        more_is_better=True,
    ),
    "tokens_per_second_per_gpu": SweepOutput(
        *("token/s", "tokens of a second by accelerator"),
        lambda runs: runs.tokens / runs.step_time / runs.accelerators,
        more_is_better=True,
    ),
    "bound_by": SweepOutput(
        *("1", "resource that takes the largest share of the critical path"),
        lambda runs: runs.share.argmax(axis=1),
        "int8",
        needs_paths=True,
        is_measure=False,
        is_resource=True,
    ),
    "share": SweepOutput(
        *("1", "share of the critical path", lambda runs: runs.share, "float32"),
        needs_paths=True,
        is_measure=False,
        per_resource=True,
    ),
}
MORE_IS_BETTER = tuple(name for name, output in OUTPUTS.items() if output.more_is_better)
MEASURES = (  # numbers that rank points
    *("step_time", "memory_bytes"),
    *(name for name, output in OUTPUTS.items() if output.is_measure),
)
