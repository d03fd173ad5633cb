"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset.

declaration  ->  blocks  ->  evaluation  ->  store  ->  xarray.Dataset
"""

from pipejax.sweep.dataset_layout import STATUS
from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.run import run_sweep

__all__ = ["STATUS", "Sweep", "read_sweep", "run_sweep"]
