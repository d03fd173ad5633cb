"""Training through a pipeline with delayed updates: objectives, replays and bounds."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
