"""Memory of this machine, and the options that its XLA compiler knows."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
ALWAYS_FREE = 1 << 18  # bytes that every process has, so no limit is read
Options = dict[str, int | bool]


def memory(cgroups: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes this process can have: least of machine, container and process limits."""
    limits = [sys.maxsize]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not everywhere
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(ImportError, OSError):
        import resource

        limits += [
            soft
            for soft, _ in map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_DATA))
            if soft != resource.RLIM_INFINITY
        ]
    return min(limits + list(_container_limits(cgroups, membership)))


def _container_limits(cgroups: Path, membership: Path) -> Iterator[int]:
    """Yield the memory limits [bytes] of this process's control groups, version 1 or 2."""
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder = cgroups / controllers / name.lstrip("/")
            for group in (folder, *folder.parents):
                for file in ("memory.max", "memory.limit_in_bytes"):
                    with contextlib.suppress(OSError, ValueError):  # "max": there is none
                        yield int((group / file).read_text())
                if group == cgroups:
                    break


def check_fits(num_bytes: int, what: str) -> None:
    """Raise a ValueError if the machine has less memory; `what` is its subject and verb."""
    if num_bytes > ALWAYS_FREE and num_bytes > (available := memory()):
        raise ValueError(
            f"{what} at least {num_bytes // 10**9:,} GB of memory; this machine has "
            f"{available / 1e9:,.1f} GB"
        )


def cpu_options(**options: int | bool) -> Options:
    """Drop XLA options that this backend lacks or XLA_FLAGS sets; the rest suits `jax.jit`."""
    import jax

    if jax.default_backend() != "cpu":
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        name: value for name, value in options.items() if name not in flags and _knows(name, value)
    }


@functools.cache
def _knows(name: str, value: int | bool) -> bool:
    """Return whether XLA knows an option; another version may not."""
    import jax

    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
