"""Analysis of runs: times, causes of slow steps, uncertainty, and published formulas."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
