"""Tuning by gradient: what to set so that a step takes the least time. Needs optax.

One file for each thing that is tuned. All go the same way: a relaxation that may take any real
number, descent along the exact gradient of the step time from many starts at once, rounding to
what is legal, and exact evaluation of what is left.
"""

from pipejax.search.tuning.descent import Descent, descend
from pipejax.search.tuning.layer_assignment import LayerAssignment, TunedLayers
from pipejax.search.tuning.layers import search_layers, tune_layers
from pipejax.search.tuning.microbatch import (
    NothingFitsError,
    Relaxed,
    Tuned,
    relax_microbatches,
    search_microbatches,
    tune_microbatches,
)
from pipejax.search.tuning.microbatch_sizes import Sizes, TuningProblem
from pipejax.search.tuning.recompute import search_recompute, tune_recompute
from pipejax.search.tuning.rounding import TooManyError
from pipejax.search.tuning.schedule_family import ScheduleFamily
from pipejax.search.tuning.system_design import (
    PartPrices,
    SystemDesigns,
    design_systems,
    price_of,
    search_designs,
)

__all__ = [
    "Descent",
    "LayerAssignment",
    "NothingFitsError",
    "PartPrices",
    "Relaxed",
    "ScheduleFamily",
    "Sizes",
    "SystemDesigns",
    "TooManyError",
    "Tuned",
    "TunedLayers",
    "TuningProblem",
    "descend",
    "design_systems",
    "price_of",
    "relax_microbatches",
    "search_designs",
    "search_layers",
    "search_microbatches",
    "search_recompute",
    "tune_layers",
    "tune_microbatches",
    "tune_recompute",
]
