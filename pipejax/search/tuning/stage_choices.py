"""What may be chosen for each stage: its layers, or how many of them are recomputed.

Stages that hold embedding or head, or wait for messages, take fewer layers. Of those that are
recomputed there are as few as memory allows.
"""

import math

import jax
import numpy as np

from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray
from pipejax.costs.system import Number
from pipejax.costs.workload import StageLayers
from pipejax.search.tuning.layer_assignment import Points, StageChoice
from pipejax.search.tuning.rounding import MOST, TooManyError, compositions, swaps, whole_with_sum
from pipejax.search.tuning.step_time_objective import Given
from pipejax.search.tuning.workload_system_pairs import Pair

SPREAD = 0.5  # of the starts, in logarithms of shares


def _split(variables: Array, given: Given) -> tuple[Pair, Number]:
    """One layer for each stage, the rest by a softmax; recomputed as the even split is."""
    even, recomputed = given.pair.assigned
    layers = 1 + jax.nn.softmax(variables) * (even.sum() - len(even))
    assigned = StageLayers(layers, layers * recomputed / even)
    return given.pair._replace(assigned=assigned), given.size


def _even_and_random(
    starts: int, seed: int, shape: tuple[int, ...]
) -> Float[NumpyArray, "starts pairs stages"]:
    noise = np.random.default_rng(seed).normal(0, SPREAD, (starts, *shape))
    noise[0] = 0
    return noise


def _with_recomputed(layers: Points, given: StageLayers) -> StageLayers:
    """Recompute on the stages where the even split does: all layers or none."""
    return StageLayers(layers, layers * (np.asarray(given.recomputed) > 0))


LAYERS = StageChoice(
    relax=_split,
    starts=_even_and_random,
    rate=0.1,
    whole=lambda relaxed: whole_with_sum(np.asarray(relaxed.layers)),
    plain=lambda given: np.asarray(given.layers, int),
    moves=swaps,
    assign=_with_recomputed,
    is_legal=lambda layers, given: layers.min(axis=1) >= 1,
    every=lambda layers: compositions(int(layers.sum()), len(layers)),
)


def _share(variables: Array, given: Given) -> tuple[Pair, Number]:
    layers = given.pair.assigned.layers
    assigned = StageLayers(layers, jax.nn.sigmoid(variables) * layers)
    return given.pair._replace(assigned=assigned), given.size


def _few_to_most(
    starts: int, seed: int, shape: tuple[int, ...]
) -> Float[NumpyArray, "starts pairs stages"]:
    """Start from hardly any to nearly all layers, the same on every stage."""
    del seed
    return np.broadcast_to(np.linspace(-3, 3, starts)[:, None, None], (starts, *shape))


def _one_more_or_less(stages: int) -> Int[NumpyArray, "moves stages"]:
    one = np.eye(stages, dtype=int)
    return np.concatenate([-one, one, swaps(stages)])


def _in_range(recomputed: Points, given: StageLayers) -> Bool[NumpyArray, " points"]:
    """Fewer than none and more than all layers cannot be recomputed."""
    in_range = (recomputed >= 0) & (recomputed <= np.asarray(given.layers))
    return np.asarray(in_range.all(axis=1))


def _every(layers: Int[NumpyArray, " stages"]) -> Points:
    count = math.prod((layers + 1).tolist())
    if count > MOST:
        raise TooManyError(f"{count:.3g} ways to recompute: at most {MOST} are tried")
    return np.stack(np.unravel_index(np.arange(count), tuple(layers + 1)), axis=1)


RECOMPUTED = StageChoice(
    relax=_share,
    starts=_few_to_most,
    rate=0.3,
    # up: what fits in the relaxation fits then, too
    whole=lambda relaxed: np.ceil(relaxed.recomputed - 1e-6).astype(int),
    plain=lambda given: np.concatenate([0 * given.layers, given.layers]).astype(int),
    moves=_one_more_or_less,
    assign=lambda recomputed, given: StageLayers(given.layers, recomputed),
    is_legal=_in_range,
    every=_every,
)
# where there are too many ways: the same number on every stage
RECOMPUTED_ALIKE = RECOMPUTED._replace(
    every=lambda layers: np.minimum(np.arange(layers.max() + 1)[:, None], layers)
)
