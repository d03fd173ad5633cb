"""Functions compiled by XLA whose programs are let go again.

What XLA compiles lies in memory maps, some 40 for a program of the recurrence, and JAX keeps it for
as long as the function. A process has 65,530 maps on Linux, and dies at the limit. So one that
meets hundreds of schedules drops what our functions compiled; what is needed again is compiled
again. Functions of others keep theirs.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipejax.base import jax_on_demand
from pipejax.base.jax_on_demand import jax

if TYPE_CHECKING:
    from jax.stages import Wrapped

MOST_MAPS = 4000
EVERY = 16  # compilations from one look at the maps to the next
MOST_COMPILATIONS = 256  # from one time to the next, where there are no maps to look at
_COMPILE = "/jax/core/compile/"  # traces, lowering and what the backend does
_COMPILED = f"{_COMPILE}backend_compile_duration"


class _Compilations:
    """Our functions, and what was compiled since their programs were let go."""

    def __init__(self) -> None:
        self.functions: list[Any] = []  # those of JAX, each with a cache of its own
        self.count = self.looked = 0  # compilations since then, and at the last look at the maps
        # when each step of compiling began and how long it took [s]; no step lies in another
        self.spent: list[tuple[float, float]] = []

    def hear(self, event: str, duration_secs: float, **_: Any) -> None:
        """Count a compilation, of whatever function; drop our programs if there are too many."""
        if event.startswith(_COMPILE):
            began = time.perf_counter() - duration_secs
            while self.spent and self.spent[-1][0] >= began:  # a trace holds those of its parts
                self.spent.pop()
            self.spent.append((began, duration_secs))
        self.count += event == _COMPILED
        if self.count - self.looked < EVERY:
            return
        self.looked, maps = self.count, _maps()
        if self.count > MOST_COMPILATIONS if maps is None else maps > MOST_MAPS:
            self.count = self.looked = 0
            for function in self.functions:
                function.clear_cache()


_compilations = _Compilations()
jax_on_demand.with_jax(
    lambda: jax.monitoring.register_event_duration_secs_listener(_compilations.hear)
)


def seconds_compiling(since: float) -> float:
    """Return the seconds that this process has compiled since a moment of `time.perf_counter`."""
    return sum(duration for began, duration in _compilations.spent if began >= since)


def compiled(function: Callable[..., Any], **options: Any) -> "Wrapped":
    """Compile as `jax.jit` does, for the life of the process; programs may be dropped."""
    # What is compiled for one object goes with it, and is a matter for jax.jit itself.
    run = jax.jit(function, **options)
    _compilations.functions.append(run)
    return run


def _maps(maps_file: Path = Path("/proc/self/maps")) -> int | None:
    """Memory maps of this process; None where the system does not tell."""
    try:
        return maps_file.read_bytes().count(b"\n")
    except OSError:
        return None
