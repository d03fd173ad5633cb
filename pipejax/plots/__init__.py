"""Drawings of arrays and evaluations; only this package of pipejax imports matplotlib."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
