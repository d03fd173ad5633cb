"""Measured training runs: reading, checks, replays, explanations and improvements."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
