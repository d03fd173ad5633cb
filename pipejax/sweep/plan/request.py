"""What a plan is asked for: a job on so many accelerators, and what may be chosen."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipejax import schedules
from pipejax.base.checks import (
    MAX_COUNT,
    check_types,
    one_of,
    positive,
    share,
    unknown,
    whole_number,
    wrong,
)
from pipejax.base.display import short_repr
from pipejax.costs.model.model import Model, check_recompute
from pipejax.costs.model.workload import Workload
from pipejax.costs.model.workload_fields import RECOMPUTE, WORKLOAD_FIELDS
from pipejax.costs.stage.slices import check_whole
from pipejax.costs.stage.stage_costs import check_machine
from pipejax.costs.system.system import System
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import check_usual

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
ZERO = tuple(range(1 + (WORKLOAD_FIELDS["zero"].most or 0)))  # what replicas may split
EDGE_UNITS = (0, 1)  # layers that embedding and head each count as when layers are assigned
COUNTED = (
    *("tensor", "context", "expert", "expert_tensor", "data", "pipeline", "stages_per_worker"),
)
SHARED = tuple(sorted(name for name, field in WORKLOAD_FIELDS.items() if field.of_plan))
# share of an accelerator's memory that is left for what tensors do not tell: fragmentation, what
# the allocator keeps. Of 2,327 measured runs 27 are predicted to have left less; both tables of
# llm-foundry, whose microbatches were made as large as fit, end at 0.901 and 0.912 of the memory
HEADROOM = 0.1
CHOICES = (*COUNTED, "microbatch_size", "zero", "edge_units", "recompute")


@short_repr
@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A training job, and the layouts that may be chosen for it.

    Attributes:
      model: the transformer.
      system: the machine.
      gpus: accelerators, all of which are used.
      minibatch: sequences per step of the whole job.
      schedules: names of schedules with a fixed order of ops.
      choices: by axis (`CHOICES`) the values that are allowed; for the others all that are legal.
      links: link model, and what is shared.
      shared: fields of `Workload` that all layouts have in common (`SHARED`).
      stack: the software, by name; empty for what the system's file takes for granted.
      memory_limit: what the tensors of an accelerator may take [B]; what `headroom` leaves if None.
      headroom: share of an accelerator's memory that no tensor may have.
    """

    model: Model
    system: System
    gpus: int
    minibatch: int
    schedules: tuple[str, ...] = SCHEDULES
    choices: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    links: Links = dataclasses.field(default_factory=Links)
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stack: str = ""
    memory_limit: float | None = None
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        check_types(model=(self.model, Model), system=(self.system, System))
        for name in ("gpus", "minibatch"):
            count = whole_number(getattr(self, name), name, most=MAX_COUNT)
            object.__setattr__(self, name, count)
        object.__setattr__(self, "schedules", _known_schedules(self.schedules))
        chosen = {name: _known_values(name, values) for name, values in self.choices.items()}
        object.__setattr__(self, "choices", chosen)
        object.__setattr__(self, "links", Links.of(self.links))
        share(self.headroom, "headroom")
        if self.memory_limit is not None:
            positive(self.memory_limit, "memory_limit")
        for name in self.shared:
            if name not in SHARED:
                raise unknown("field of all layouts", name, SHARED)
        workload = Workload(self.model, self.minibatch, **self.shared)  # which checks them
        check_machine(workload, self.system)

    @property
    def room(self) -> float:
        """Memory of an accelerator that a layout may need [B]."""
        if self.memory_limit is not None:
            return float(self.memory_limit)
        return (1 - self.headroom) * float(self.system.memory_available)

    @property
    def recomputations(self) -> tuple[str, ...]:
        """Names that `Layouts.recompute` counts in: those of all models, then parts of layers."""
        chosen = self.choices.get("recompute", ())
        return (*RECOMPUTE, *(name for name in chosen if name not in RECOMPUTE))

    def allowed(self, axis: str, values: Sequence[Any]) -> list[Any]:
        """Keep those of an axis's values that may be chosen."""
        wanted = self.choices.get(axis)
        return [value for value in values if wanted is None or value in wanted]


def _known_schedules(names: Sequence[str]) -> tuple[str, ...]:
    found = tuple(schedules.named(name) for name in names)
    if not found or len(set(found)) < len(found):
        raise wrong("schedules", f"must be different names, got {', '.join(names) or 'none'}")
    for name in found:
        if schedules.find(name).sizes is not None:
            raise ValueError(f"schedule {name} is one table: a plan takes schedules of any size")
        if schedules.find(name).planned:
            raise ValueError(
                f"schedule {name} is planned from the times of one layout: a plan takes schedules "
                "with a fixed order of ops"
            )
        table = schedules.build(name, num_workers=4, num_microbatches=8)
        check_whole(table, "a plan")
        check_usual(table, "a plan")
        if table.updates_within:
            raise ValueError(f"schedule {name} is asynchronous: a plan is of synchronous steps")
    return found


def _known_values(axis: str, values: Sequence[Any]) -> tuple[Any, ...]:
    if axis not in CHOICES:
        raise unknown("choice", axis, CHOICES)
    if not values:
        raise ValueError(f"{axis} must have at least one value")
    if axis == "recompute":
        return tuple(dict.fromkeys(check_recompute(value) for value in values))
    if axis == "zero":
        return tuple(one_of(value, ZERO, axis) for value in values)
    least = 0 if axis == "edge_units" else 1
    return tuple(whole_number(value, axis, least=least, most=MAX_COUNT) for value in values)
