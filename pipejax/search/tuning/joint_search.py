"""All settings of a joint space, one after the other: the exhaustive twin of `joint.py`."""

from collections.abc import Iterator

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.search.tuning.joint_space import (
    LANES,
    JointProblem,
    Settings,
    TunedJointly,
    count_settings,
    joined,
)
from pipejax.search.tuning.layer_assignment import LAYERS
from pipejax.search.tuning.rounding import Points, TooManyError, compositions
from pipejax.search.tuning.system_design import DIVIDED

MOST_SETTINGS = 5_000_000
DIVISIONS = 20  # parts of a budget that are tried


def search_jointly(joint: JointProblem, *, divisions: int = DIVISIONS) -> TunedJointly:
    """Evaluate all settings of every pair; a budget is spent in so many parts."""
    pairs = range(len(joint.problem.capacity))
    counts = [count_settings(joint, pair, divisions) for pair in pairs]
    if max(counts) > MOST_SETTINGS:
        raise TooManyError(f"{max(counts):.3g} settings: at most {MOST_SETTINGS} are tried")
    best: list[tuple[Settings, Float[NumpyArray, " settings"]]] = []
    for pair in pairs:
        for block in every_setting(joint, pair, divisions):
            times = joint.times(block)
            least = [times.argmin()]
            best.append((block.at(least), times[least]))
    settings, least_times = zip(*best, strict=True)
    return joint.pick(joined(list(settings)), np.concatenate(least_times), int(sum(counts)))


def every_setting(joint: JointProblem, pair: int, divisions: int) -> Iterator[Settings]:
    """All settings of one pair, in blocks of one microbatch size each."""
    layers, recomputed = every_assignment(joint, pair)
    logits = np.zeros((1, DIVIDED))
    if "system" in joint.parts:
        logits = np.log(compositions(divisions, DIVIDED) / divisions)
    total = len(layers) * len(logits)
    for size in joint.sizes(pair):
        for low in range(0, total, LANES):
            which, share = np.divmod(np.arange(low, min(low + LANES, total)), len(logits))
            own = np.full(len(which), pair)
            yield Settings(
                own,
                np.full(len(which), size),
                layers[which],
                recomputed[which],
                logits[share],
            )


def every_assignment(joint: JointProblem, pair: int) -> tuple[Points, Points]:
    """All layers (ways, stages) of a pair, and those that are recomputed."""
    even, again = (np.asarray(each[pair], int) for each in joint.problem.pairs.assigned)
    layers = LAYERS.every(even) if "layers" in joint.parts else even[None]
    if "recompute" not in joint.parts:
        return layers, layers * (again > 0)
    return _with_every_recompute(layers)


def _with_every_recompute(layers: Points) -> tuple[Points, Points]:
    """Every layers (ways, stages) with every number of them recomputed on each stage."""
    choices = layers + 1
    ways = choices.prod(axis=1)
    which = np.repeat(np.arange(len(layers)), ways)
    number: Int[NumpyArray, " ways"] = np.arange(len(which)) - np.repeat(
        np.cumsum(ways) - ways, ways
    )
    recomputed = np.empty((len(which), layers.shape[1]), int)
    for stage in range(layers.shape[1]):
        number, recomputed[:, stage] = np.divmod(number, choices[which, stage])
    return layers[which], recomputed
