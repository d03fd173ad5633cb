"""Training through a pipeline: objectives cut into stages, outdated block updates, bounds."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
