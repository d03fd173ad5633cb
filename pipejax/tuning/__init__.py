"""Tuning by gradient: what to set so that a step takes the least time. Needs optax.

One file for each thing that is tuned. All go the same way: a relaxation that may take any real
number, descent along the exact gradient of the step time from many starts at once, rounding to
what is legal, and exact evaluation of what is left.
"""

from pipejax.tuning.descent import Descent, descend
from pipejax.tuning.family import Family
from pipejax.tuning.microbatch import (
    Relaxed,
    Tuned,
    relax_microbatches,
    search_microbatches,
    tune_microbatches,
)
from pipejax.tuning.sizes import Problem, Sizes

__all__ = [
    "Descent",
    "Family",
    "Problem",
    "Relaxed",
    "Sizes",
    "Tuned",
    "descend",
    "relax_microbatches",
    "search_microbatches",
    "tune_microbatches",
]
