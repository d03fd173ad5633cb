"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset.

declaration  ->  blocks  ->  evaluation  ->  store  ->  xarray.Dataset
"""

from pipejax.sweep.blocks import Block, get_block, num_blocks
from pipejax.sweep.declaration import Sweep, read_sweep
from pipejax.sweep.evaluation import evaluate_block
from pipejax.sweep.run import Progress, run_sweep
from pipejax.sweep.variables import STATUS

__all__ = [
    "STATUS",
    "Block",
    "Progress",
    "Sweep",
    "evaluate_block",
    "get_block",
    "num_blocks",
    "read_sweep",
    "run_sweep",
]
