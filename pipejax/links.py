"""Links: which model a machine follows, what its messages take, and where transfers wait."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
