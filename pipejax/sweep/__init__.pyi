"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset."""

from pipejax.sweep.declaration import Sweep as Sweep, read_sweep as read_sweep
from pipejax.sweep.run import run_sweep as run_sweep
from pipejax.sweep.store import STATUS as STATUS
