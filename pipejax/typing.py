"""Array types with named axes, for signatures: plain arrays where jaxtyping is not imported."""

from pipejax.base.namespaces import lazy

__getattr__, __dir__, __all__ = lazy(__name__)
