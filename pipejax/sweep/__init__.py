"""Sweeps: a declared grid of schedules, workloads and systems becomes a labelled dataset.

declaration  ->  blocks  ->  evaluation  ->  store  ->  xarray.Dataset
"""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
