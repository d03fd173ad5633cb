"""Software stacks: how training software overlaps exchanges and launches kernels, from files.

The speed of an attention kernel is in a system's file (`kernels: attention`), not in the stack's.
So every stack can be combined with every system.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipejax.base.checks import check_types
from pipejax.base.display import with_short_repr
from pipejax.base.file_fields import (
    FLAG,
    NAME,
    NUMBER,
    TEXT,
    Fields,
    FileField,
    choice,
    read_record,
    section,
)
from pipejax.base.progress import Notice
from pipejax.costs.model.model import Model
from pipejax.costs.model.workload_fields import OF_EXPERTS, WORKLOAD_FIELDS
from pipejax.costs.system.parts import ATTENTION, system_number
from pipejax.costs.system.system import System, names_in, read_named

OF_WORKLOAD = (
    *("overlap", "tensor_overlap", "expert_overlap", "dispatcher", "contiguous_context"),
    *("graphs", "optimizer_offload", "attention_precision", "head_precision"),
    *("wide_first", "wide_last"),
)


@with_short_repr("name attention elementwise workload source")
@dataclasses.dataclass(frozen=True, repr=False)
class Stack:
    """Properties of training software that affect the times of a step.

    Attributes:
      name: name of the stack.
      source: where its numbers come from.
      attention: name of the attention kernel in the files of systems; empty for the kernel that a
        system's file assumes.
      elementwise: bytes that norms, activation functions and residuals move, divided by those of
        fused kernels in the model's precision.
      launch: host time to start one kernel [s]; None for the system's number.
      launch_blocking: whether each kernel ends before the host starts the next, as with
        CUDA_LAUNCH_BLOCKING=1.
      unfused: kernels that keep more memory (`Model.unfused`), for models that name none.
      workload: defaults of `Workload` fields (those in `OF_WORKLOAD`).
    """

    name: str
    source: str
    attention: str = ""
    elementwise: float = 1.0
    launch: float | None = None
    launch_blocking: bool = False
    unfused: str = ""
    workload: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, model: Model) -> Model:
        """Return the model with the stack's unfused kernels, unless the model names some itself."""
        if model.unfused or not self.unfused:
            return model
        return dataclasses.replace(model, unfused=self.unfused)

    def is_known_on(self, system: System) -> bool:
        """Return whether a system's file says how fast the stack's kernel of attention is."""
        kernel = self.attention.replace("-", "_")
        return not kernel or bool(getattr(system.attention_kernels, kernel))

    def on(self, system: System) -> System:
        """Return the system with the speed that this software reaches on it.

        The system is unchanged if it was calibrated on runs of the stack, or if the stack has no
        name. The system's file must have the speed of the stack's attention kernel.

        Example:
          >>> import pipejax as pj
          >>> a100 = pj.load_stack("composer-2023").on(pj.load_system("a100"))
          >>> print(f"{a100.kernels.attention_efficiency:.2f}")
          0.35
        """
        record = system.calibration
        if not self.name or (record is not None and record.stack == self.name):
            return system
        kernels = dataclasses.replace(system.kernels, elementwise=self.elementwise)
        if self.attention:
            share = getattr(system.attention_kernels, self.attention.replace("-", "_"))
            if not share:
                raise ValueError(
                    f"stack {self.name}: {system.name} does not say how fast {self.attention} is: "
                    "give it in its file, as kernels: attention"
                )
            efficiency = system_number(system, "compute.efficiency")
            kernels = dataclasses.replace(kernels, attention_efficiency=share / efficiency)
        if self.launch_blocking:  # times of host and accelerator add up
            kernels = dataclasses.replace(kernels, sharpness=1.0)
        host = system.host
        if self.launch is not None:
            host = dataclasses.replace(host, launch=self.launch)
        return dataclasses.replace(system, kernels=kernels, host=host)


AS_THE_SYSTEM = Stack("", "")  # software that changes no number of a system


def machine_software(system: System, stack: Stack | str | Path | None = None) -> Stack:
    """Return the requested software stack, or by default that of the system's calibration."""
    check_types(stack=(stack, Stack, str, Path, type(None)))
    if stack is not None:
        return stack if isinstance(stack, Stack) else load_stack(stack)
    record = system.calibration
    if record is None:
        return AS_THE_SYSTEM
    stack = load_stack(record.stack) if record.stack else AS_THE_SYSTEM
    if record.overlap is not None:
        stack = dataclasses.replace(stack, workload={**stack.workload, "overlap": record.overlap})
    if stack.workload:
        fields = ", ".join(f"{name} = {value}" for name, value in stack.workload.items())
        by = f"{stack.name}, " if stack.name else ""
        text = f"used as in the runs that it was calibrated on: {by}{fields}"
        warnings.warn(f"{system.name}: {text}", Notice, 4)
    return stack


def fields_for(model: Model, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default fields, without those that need experts if the model has none."""
    return {n: v for n, v in fields.items() if model.moe or v in OF_EXPERTS.get(n, (v,))}


def stack_names() -> tuple[str, ...]:
    """Return the names of the stacks that come with pipejax."""
    return names_in("stacks")


def load_stack(name: str | Path) -> Stack:
    """Read a stack by name, or from a JSON file.

    Args:
      name: one of `stack_names()`, or the path of a file that ends in .json.

    Returns:
      The stack, in SI units.

    Raises:
      ValueError: if the name or a key is unknown, or a value is invalid.
      OSError: if the file cannot be read.

    Example:
      >>> import pipejax as pj
      >>> pj.load_stack("megatron-core-2026").workload["dispatcher"]
      'per-node'
    """
    check_types(name=(name, str, Path))
    data, where = read_named("stacks", name, "stack")
    return read_record(_stack, FILE, data, where)


FILE: Fields = {
    "name": FileField(NAME),
    "source": FileField(TEXT),
    "kernels": FileField(
        section(
            {
                "attention": FileField(choice(("", *ATTENTION)), ""),
                "elementwise": FileField(NUMBER, 1.0),
                "unfused": FileField(TEXT, ""),
            }
        ),
        {},
    ),
    "host": FileField(
        section(
            {"launch": FileField(NUMBER, None, "s"), "launch_blocking": FileField(FLAG, False)}
        ),
        {},
    ),
    "workload": FileField(
        section({name: FileField(WORKLOAD_FIELDS[name].values, None) for name in OF_WORKLOAD}), {}
    ),
}


def _stack(*, kernels: Any, host: Any, workload: Any, **fields: Any) -> Stack:
    workload = {name: value for name, value in workload.items() if value is not None}
    return Stack(**fields, **kernels, **host, workload=workload)
