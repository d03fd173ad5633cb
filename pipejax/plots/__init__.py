"""The only room that imports matplotlib: arrays and evaluations in, drawings out."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
