"""Drawings of arrays and evaluations; the only package of pipejax that imports matplotlib."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
