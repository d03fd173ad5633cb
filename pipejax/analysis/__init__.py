"""Analysis of runs: times, causes and uncertainty, and comparison with published forms."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
