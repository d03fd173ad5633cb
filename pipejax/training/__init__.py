"""Training through a pipeline: objectives divided into stages, delayed updates, bounds."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
