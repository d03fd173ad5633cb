"""Analysis of runs: what a table costs, why, how sure that is, and what others say of it."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
