"""Links: what messages take on a machine, and where transfers wait."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
