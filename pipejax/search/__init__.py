"""Searches for better schedules, orders and settings, each with a bound or an exhaustive check."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
