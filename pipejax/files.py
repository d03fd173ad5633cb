"""Files: measured rows and traces, and datasets that say which code made them."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
