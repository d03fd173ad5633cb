"""Better schedules, transfer orders and settings, each beside a bound or an exhaustive twin."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
