"""Searches beside `pj.optimize` and `pj.tune`, each with a bound on what it did not try."""

from pipejax.search.orders.deal import deals as deals
from pipejax.search.orders.permutations import microbatches as microbatches
from pipejax.search.orders.places import places as places
from pipejax.search.orders.transfers import messages as messages
from pipejax.search.partition.partition import layers as layers
from pipejax.search.schedule.problem import InfeasibleError as InfeasibleError
from pipejax.search.tuning.chunks import chunks as chunks
from pipejax.search.tuning.lookahead import lookahead as lookahead
