"""Start of JAX in the process of the command line: late, and with a cache of compiled programs.

The cache is a folder of the user. JAX locks it, so that no process reads a program while another
one writes it.
"""

import os
from pathlib import Path

from pipejax.base import jax_on_demand
from pipejax.base.files import cache_folder
from pipejax.base.jax_on_demand import jax

KEPT = {  # of programs
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_compilation_cache_max_size": 1 << 29,  # bytes: what was not used for longest goes
}


def prepare() -> None:
    """Import JAX only when a command asks for it."""
    jax_on_demand.defer()
    jax_on_demand.with_jax(_keep_compiled)


def _keep_compiled() -> None:
    """Keep what is compiled, unless the user said where, or there is no such place."""
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]  # made late
        return
    try:
        import filelock  # noqa: F401  # which JAX takes for its lock

        folder: Path = cache_folder("compiled")
        folder.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, RuntimeError):
        return
    if not os.access(folder, os.W_OK):
        return
    for name, value in KEPT.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder))
