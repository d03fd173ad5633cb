"""The record `Builder` of a schedule that can be built, and the decorator that registers it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from pipejax.schedules.table.table import ScheduleTable


class Builder(NamedTuple):
    """A schedule that can be built.

    Attributes:
      function: function that makes the table.
      source: where the schedule was published.
      planned: whether the order of ops is planned from op times, by default those of the run.
      bytes_per_op: memory to make a table and its program, measured and rounded down [bytes].
      stages_per_worker: V, if no option gives it.
      sizes: workers and microbatches, if it can build no others, as a table from a file.
      legal: text on the workers P and microbatches M that it can build; empty if unknown.
      content: hash of the code of a user's own schedule, or of its table.

    Example:
      >>> from pipejax.schedules import REGISTRY
      >>> REGISTRY["hanayo"].options, REGISTRY["gpipe"].source
      (('waves',), 'Huang et al., GPipe (arXiv:1811.06965)')
    """

    function: Callable[..., ScheduleTable]
    source: str
    planned: bool = False
    bytes_per_op: int = 600
    stages_per_worker: int = 1
    sizes: tuple[int, int] | None = None
    legal: str = ""
    content: str = ""

    @property
    def summary(self) -> str:
        """Return the first line of the builder's docstring, or ""."""
        lines = (inspect.getdoc(inspect.unwrap(self.function)) or "").splitlines()
        return lines[0].rstrip(".") if lines else ""

    @property
    def options(self) -> tuple[str, ...]:
        """Return the parameters beyond workers, microbatches and slots."""
        common = {"num_workers", "num_microbatches", "slots"}
        return tuple(name for name in _parameters(self.function) if name not in common)

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the options, and `slots` if the builder takes slot durations."""
        return (*self.options, *(["slots"] if "slots" in _parameters(self.function) else []))


@functools.cache
def _parameters(function: Callable[..., ScheduleTable]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


ANY, EVEN, PAIRED = "any P and M", "P and M even", "M at least 2P"
CONTROLLABLE = "Qi et al., Controllable Memory (arXiv:2405.15362)"
ZERO_BUBBLE = "Qi et al., Zero Bubble (arXiv:2401.10241)"
PLANNED, DRAWN = 900, 250  # bytes per op of plans, and of tables with known starts
BRAIDED = 1500  # bytes per op with all its parts

Function = TypeVar("Function", bound=Callable[..., ScheduleTable])
USUAL_BUILDERS: dict[str, Builder] = {}  # builders with the default grammar
EXTENDED_BUILDERS: dict[str, Builder] = {}  # builders with an extended grammar


def published(
    name: str, source: str, *, extends_grammar: bool = False, **fields: Any
) -> Callable[[Function], Function]:
    """Register a builder under a name, with its source and further fields of `Builder`."""

    def register(function: Function) -> Function:
        builders = EXTENDED_BUILDERS if extends_grammar else USUAL_BUILDERS
        builders[name] = Builder(function, source, **fields)
        return function

    return register
