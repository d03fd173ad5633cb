"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset.

declaration  ->  blocks  ->  evaluation  ->  store  ->  xarray.Dataset
"""

from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.run import run_sweep
from pipejax.sweep.store import STATUS

__all__ = ["STATUS", "Sweep", "read_sweep", "run_sweep"]
