"""Links: times of messages on a machine, and waiting of transfers."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
