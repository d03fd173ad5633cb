"""Compiled functions that drop XLA's programs before memory maps run out.

A compiled program takes some 40 memory maps as long as its function lives, and Linux kills a
process at 65,530. Programs that are dropped are compiled again when they are needed.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipejax.base import jax_on_demand
from pipejax.base.jax_on_demand import jax

if TYPE_CHECKING:
    from jax.stages import Wrapped

Options = dict[str, int | bool]  # of XLA, by name
MAX_MAPS = 4000  # memory maps of this process, beyond which programs are dropped
CHECK_INTERVAL = 16  # compilations from one count of the maps to the next
MAX_COMPILATIONS = 256  # if maps cannot be counted, programs are dropped after so many
_COMPILE = "/jax/core/compile/"  # events of tracing, lowering and the backend
_COMPILED = f"{_COMPILE}backend_compile_duration"


class _Compilations:
    """Register of this package's jitted functions, and a count of recent compilations."""

    def __init__(self) -> None:
        self.functions: list[Any] = []  # results of jax.jit, each with a cache
        self.count = self.last_check = 0  # compilations: so far, and at the last count of the maps
        # begin and duration of each compilation step [s]; steps do not overlap
        self.steps: list[tuple[float, float]] = []

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Record a compilation step that ended now; drop programs if there are too many."""
        if event.startswith(_COMPILE):
            begin = time.perf_counter() - duration_secs
            # an outer step ends after the steps inside it: drop the inner steps
            while self.steps and self.steps[-1][0] >= begin:
                self.steps.pop()
            self.steps.append((begin, duration_secs))
        if event == _COMPILED:
            self.count += 1
        if self.count - self.last_check < CHECK_INTERVAL:
            return
        self.last_check, num_maps = self.count, _count_maps()
        is_full = self.count > MAX_COMPILATIONS if num_maps is None else num_maps > MAX_MAPS
        if is_full:
            self.count = self.last_check = 0
            for function in self.functions:
                function.clear_cache()


_compilations = _Compilations()
jax_on_demand.with_jax(
    lambda: jax.monitoring.register_event_duration_secs_listener(_compilations.listen)
)


def seconds_compiling(since: float) -> float:
    """Return the time that JAX has spent compiling [s] since a time of `time.perf_counter`."""
    return sum(duration for begin, duration in _compilations.steps if begin >= since)


def compiled(function: Callable[..., Any], **options: Any) -> "Wrapped":
    """Return the `jax.jit` of a function; if many programs exist, its programs are dropped."""
    # Functions of a single object use jax.jit instead, and their programs end with the object.
    jitted = jax.jit(function, **options)
    _compilations.functions.append(jitted)
    return jitted


def _count_maps(maps_file: Path = Path("/proc/self/maps")) -> int | None:
    """Count the memory maps of this process; None if the system does not list them."""
    try:
        return maps_file.read_bytes().count(b"\n")
    except OSError:
        return None


def cpu_options(**options: int | bool) -> Options:
    """Return the options that XLA knows and XLA_FLAGS does not set; none on accelerators."""
    if jax.default_backend() != "cpu":
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {k: v for k, v in options.items() if k not in flags and _knows(k, v)}


@functools.cache
def _knows(name: str, value: int | bool) -> bool:
    """Return whether this version of XLA accepts a value of an option."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
