"""Costs from rules, lengths, layouts and networks, and the parts that they are made of."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
