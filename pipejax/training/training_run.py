"""Results of training runs, their summary by step size, and random draws of updates."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.base import checks
from pipejax.base.array_types import Array, Bool, Float, Int, NumpyArray, UInt
from pipejax.base.display import short_repr
from pipejax.training.objective import TrainingObjective

# The random choices of training runs depend only on the seed and the number of a gradient.
#
# Stages, batches and delays of Randomized PipeDream follow from random bits by integer arithmetic.
# So a seed gives the same choices in single and double precision, alone and in a batch, and at any
# step size. Other delays change neither stages nor batches. Gradient noise is drawn in single
# precision and then converted.

CIPHER = "threefry2x32"
LARGEST_COUNT = 1 << 16  # largest count of `integers_below`, whose products then fit into 48 bits
Whole = Int[Array, ""] | UInt[Array, ""]
Delays = Int[Array, ""] | Int[Array, "stages samples stages"]


@short_repr
class Draw(NamedTuple):
    """Random choices of one update of Randomized PipeDream.

    Attributes:
      stage: stage whose block is updated.
      batch: index of the batch.
      read: (stages) for each block, the model that it is read from: the number of updates before.
    """

    stage: Int[Array, ""]
    batch: Int[Array, ""]
    read: Int[Array, " stages"]


def draw(
    seed: Whole | int,
    update: Whole | int,
    *,
    num_stages: int,
    num_batches: int,
    delays: Delays | Int[NumpyArray, "..."] | int,
) -> Draw:
    """Draw the stage, the batch and the read models of one update.

    Args:
      seed: random seed of the run; may be traced.
      update: number k of the update, from 0; may be traced.
      num_stages: S, at most 65534.
      num_batches: number of batches, at most 65536.
      delays: the largest delay (int), up to which a delay is drawn for each block; or an array
        (updated stage, sample, block), from which one sample is drawn. With delay d, update k
        reads the block of a stage from the model after max(0, k - d) updates. May be traced.

    Returns:
      The choices; each value has the same probability, up to 2^-32.

    Example:
      >>> import pipejax as pj
      >>> table = np.zeros((2, 3, 2), np.int32)
      >>> table[0], table[1] = 1, [0, 2]
      >>> options = {"num_stages": 2, "num_batches": 5, "delays": table}
      >>> draws = [pj.training.draw(0, k, **options) for k in range(6)]
      >>> [(int(draw.stage), draw.read.tolist()) for draw in draws]
      [(1, [0, 0]), (1, [1, 0]), (0, [1, 1]), (1, [3, 1]), (1, [4, 2]), (0, [4, 4])]
    """
    bits = _bits(jnp.uint32(seed), jnp.uint32(update), num_stages + 2)
    stage = integers_below(bits[0], jnp.asarray(num_stages))
    update, delays = jnp.asarray(update, jnp.int32), jnp.asarray(delays, jnp.int32)
    if delays.ndim:
        sample = integers_below(bits[2], jnp.asarray(delays.shape[1]))
        delay = delays[stage, sample]
    else:
        delay = integers_below(bits[2:], jnp.minimum(update, delays) + 1)
    read = jnp.maximum(0, update - delay)
    return Draw(stage, integers_below(bits[1], jnp.asarray(num_batches)), read)


def start_key(seed: Whole | int) -> Array:
    """Return the random key for the initial weights of a run."""
    return jax.random.key(jnp.uint32(seed), impl=CIPHER)


def drawn_stage(seed: Whole | int, update: Whole | int, num_stages: int) -> Int[Array, ""]:
    """Draw the stage that `draw` returns, without batch and delays."""
    first = _bits(jnp.uint32(seed), jnp.uint32(update), 1)[0]
    return integers_below(first, jnp.asarray(num_stages))


def gradient_noise(
    seed: Whole | int, number: Whole | int, shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "..."]:
    """Return standard normal numbers for one gradient, independent of all other random numbers."""
    with jax.threefry_partitionable(True):
        key = jax.random.fold_in(_key(jnp.uint32(seed), jnp.uint32(number)), 1)
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def checked_noise(noise: float) -> float:
    """Check the standard deviation of gradient noise."""
    if not checks.is_number(noise) or noise < 0:
        raise checks.wrong("noise", f"must be a finite number of at least 0, got {noise!r}")
    return float(noise)


def integers_below(bits: UInt[Array, "*batch"], count: Int[Array, ""]) -> Int[Array, "*batch"]:
    """Return integers from 0 to count - 1: the bits above bit 32 of random bits * count."""
    counts = jnp.broadcast_to(count.astype(jnp.uint32), bits.shape)
    # the product has 48 bits: multiply low and high 16 bits separately, and carry
    carry = ((bits & 0xFFFF) * counts) >> 16
    return (((bits >> 16) * counts + carry) >> 16).astype(jnp.int32)


def _bits(seed: UInt[Array, ""], update: UInt[Array, ""], count: int) -> UInt[Array, " count"]:
    with jax.threefry_partitionable(True):
        return jax.random.bits(_key(seed, update), (count,), jnp.uint32)


def _key(seed: UInt[Array, ""], number: UInt[Array, ""]) -> Array:
    # The seed is inverted because `start_key` is the pair (0, seed).
    return jax.random.wrap_key_data(jnp.stack([~seed, number]), impl=CIPHER)


def checked_delays(delays: NumpyArray, num_stages: int) -> Int[NumpyArray, "stages samples stages"]:
    """Check delays [updates]; return them as (updated stage, sample, stage that is read)."""
    table = np.asarray(delays)
    samples = table.shape[-2] if table.ndim > 1 else 0
    shapes = [(samples, num_stages), (num_stages, samples, num_stages)]
    if table.shape not in shapes or not 1 <= samples <= LARGEST_COUNT:
        raise ValueError(
            f"delays must have shape (samples, {num_stages}) or ({num_stages}, samples, "
            f"{num_stages}) with 1 to {LARGEST_COUNT} samples, got {table.shape}"
        )
    if table.dtype.kind not in "iu" or table.min() < 0 or table.max() >= LARGEST_COUNT:
        raise ValueError(
            f"delays must be whole numbers from 0 to {LARGEST_COUNT - 1}, got {table.dtype} "
            f"from {table.min()} to {table.max()}"
        )
    return np.broadcast_to(table, (num_stages, *table.shape[-2:])).astype(np.int32)


def checked_delta(delta: int) -> int:
    """Check the largest delay."""
    if checks.whole_number(delta, "delta", minimum=0) >= LARGEST_COUNT:
        raise checks.wrong("delta", f"must be at most {LARGEST_COUNT - 1}, got {delta}")
    return int(delta)


Curves = Float[Array, "*runs samples"] | Float[NumpyArray, "*runs samples"]
Masked = np.ma.MaskedArray[tuple[int, ...], np.dtype[np.floating]]
OF_ALL = ("update", "time")  # fields of `TrainingRun` that are equal for all runs
DIVERGED = 1000.0  # a run has diverged above this multiple of the gap at the start
RULES = ("final", "mean", "stable")  # rules to choose a step size
RISE, ROUNDING = 2.0, 1e-12  # a stable curve is at most RISE x its minimum + ROUNDING x its start


@short_repr
class TrainingRun(NamedTuple):
    """One training run, or many runs as leading axes of all arrays but `update` and `time`.

    Attributes:
      update: (samples) number of block updates before each sample.
      gap: (..., samples) f - f* at each sample; without meaning if diverged, so use `reported`.
      diverged: (...) whether a gap is not finite, or above 1000 times the gap at the start.
      blocks: (..., stages, width) blocks at the end.
      largest_squared_gradient: (...) largest |g|^2 of applied block gradients: G^2 of the bounds.
      mean_squared_gradient: (...) mean of |grad f(w_k)|^2 over all models w_k before an update;
        None if it was not requested.
      time: (samples) time of each sample [s, or slots]; None for a run without times.
      loss: (..., samples) mean training loss of the batches since the previous sample, at the
        weights that their gradients read; NaN without batches.
      minimum: (...) f*, the least value.
    """

    update: Int[NumpyArray, " samples"]
    gap: Float[Array, "*runs samples"]
    diverged: Bool[Array, "*runs"]
    blocks: Float[Array, "*runs stages width"]
    largest_squared_gradient: Float[Array, "*runs"]
    mean_squared_gradient: Float[Array, "*runs"] | None
    time: Float[NumpyArray, " samples"] | None = None
    loss: Curves | None = None
    minimum: Float[NumpyArray, "*runs"] | float = 0.0

    @property
    def value(self) -> Float[NumpyArray, "*runs samples"]:
        """Return the value f at each sample: the gap plus the minimum."""
        return np.asarray(self.gap) + np.asarray(self.minimum)[..., None]

    @property
    def reported(self) -> Masked:
        """Return the gap at each sample as a NumPy array in which diverged runs are masked."""
        return self.masked(self.gap)

    def masked(self, values: Curves) -> Masked:
        """Mask values (..., samples) of runs that diverged."""
        array = np.asarray(values)
        mask = np.broadcast_to(np.asarray(self.diverged)[..., None], array.shape)
        return np.ma.masked_array(array, mask)


@short_repr
@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """Summary of training runs by step size, as means over seeds.

    If a seed of a step size diverged, all entries of this step size but `diverged` are masked.

    Attributes:
      gap: (step_sizes, samples) mean gap over the seeds.
      value: (step_sizes, samples) mean of f over the seeds.
      loss: (step_sizes, samples) mean training loss; masked at samples without batches.
      spread: (step_sizes) standard deviation of the last gap over the seeds; masked for one seed.
      diverged: (step_sizes) number of seeds that diverged.
      best: index of the step size that the rule chooses; None if the rule finds none.
    """

    gap: Masked
    value: Masked
    loss: Masked
    spread: Masked
    diverged: Int[NumpyArray, " step_sizes"]
    best: int | None

    @property
    def final_gap(self) -> Masked:
        """Return the mean gap over seeds at the last sample, for each step size."""
        return self.gap[:, -1]


def summarise(
    runs: TrainingRun, rule: str = "final", step_sizes: Sequence[float] | None = None
) -> Summary:
    """Summarise runs by means over their seeds, and choose the best step size.

    Args:
      runs: training runs with the axes (step_sizes, seeds).
      rule: rule of `choose_step_size` for the best step size, one of `RULES`.
      step_sizes: gamma, for the rule "stable".

    Returns:
      Means by step size, and the index of the best step size.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("pipedream", num_workers=4, num_microbatches=60)
      >>> objective = pj.training.random_quadratic(4, dimension=8, seed=0)
      >>> sizes = [0.25, 0.125, 0.0625]
      >>> runs = pj.training.sweep_replay(
      ...     objective, table, step_sizes=sizes, seeds=range(3), times=10)
      >>> sizes[pj.training.summarise(runs).best]
      0.125
    """
    shape = np.shape(runs.gap)
    if len(shape) != 3:
        raise ValueError(f"runs must have the axes (step_sizes, seeds), got a gap of shape {shape}")
    num_diverged = np.asarray(runs.diverged).sum(axis=1)

    def masked(values: Curves | None) -> Masked:
        """Mask the runs of every step size with which a seed diverged."""
        array = np.full(shape, np.nan) if values is None else np.asarray(values)
        return np.ma.masked_where(np.broadcast_to(num_diverged[:, None, None] > 0, shape), array)

    gap = masked(runs.gap).mean(axis=1)
    final = masked(runs.gap)[:, :, -1]
    if shape[1] == 1:  # one seed has no unbiased standard deviation
        spread = np.ma.masked_array(np.zeros(len(final)), True)
    else:
        spread = final.std(axis=1, ddof=1)
    return Summary(
        gap=gap,
        value=masked(runs.value).mean(axis=1),
        loss=np.ma.masked_invalid(masked(runs.loss).mean(axis=1)),
        spread=np.ma.masked_invalid(spread),
        diverged=num_diverged,
        best=choose_step_size(gap.filled(np.nan), rule, step_sizes),
    )


def choose_step_size(
    curves: Float[NumpyArray, "step_sizes samples"],
    rule: str = "final",
    step_sizes: Sequence[float] | None = None,
) -> int | None:
    """Choose a step size, given the gap over time for each step size.

    Args:
      curves: (step_sizes, samples) mean gap over the seeds; NaN if a seed diverged.
      rule: "final" takes the least last gap. "mean" takes the least mean gap over all samples, so
        early progress counts too. "stable" takes the largest step size whose gap never exceeds
        twice its minimum so far, up to rounding (1e-12 of the first gap).
      step_sizes: (step_sizes) gamma, for the rule "stable".

    Returns:
      Index of the step size; None if every step size diverged or none is stable.

    Example:
      >>> curves = np.array([[8.0, 1.0, 5.0, 0.5], [8.0, 3.0, 2.0, 1.0], [8.0, 7.0, 6.0, 5.0]])
      >>> [choose_step_size(curves, rule, [0.5, 0.25, 0.125]) for rule in RULES]
      [0, 1, 1]
    """
    rule = checks.resolve_choice(rule, RULES, "rule")
    is_eligible = np.isfinite(curves).all(axis=1)
    if rule == "stable":
        if step_sizes is None or len(step_sizes) != len(curves):
            raise ValueError(f"rule stable needs {len(curves)} step_sizes, got {step_sizes!r}")
        lowest = np.minimum.accumulate(curves, axis=1)
        is_eligible &= (curves <= RISE * lowest + ROUNDING * curves[:, :1]).all(axis=1)
        cost = -np.asarray(step_sizes, np.float64)
    else:
        cost = curves[:, -1] if rule == "final" else curves.mean(axis=1)
    return int(np.where(is_eligible, cost, np.inf).argmin()) if is_eligible.any() else None


BYTES_PER_SAMPLE, BYTES_PER_UPDATE = 16, 100  # memory of a run, measured and rounded down
LARGEST_SEED = (1 << 32) - 1
Numbers = Sequence[float] | Float[NumpyArray, " step_sizes"]
Seeds = Sequence[int] | range | Int[NumpyArray, " seeds"]


def run_alone(
    sweep: Callable[..., TrainingRun],
    objective: TrainingObjective,
    step_size: float,
    seed: int,
    **how: Any,
) -> TrainingRun:
    """Run a sweep with one step size and one seed, and remove these two axes."""
    if not checks.are_positive([step_size], 1):
        raise checks.wrong("step_size", f"must be a finite number above 0, got {step_size!r}")
    if np.ndim(objective.minimum):
        raise ValueError(f"objective must be a single one, got {len(objective.minimum)} stacked")
    checks.whole_number(seed, "seed", minimum=0)
    runs = sweep(objective, step_sizes=[step_size], seeds=[seed], **how)
    fields = {name: value for name, value in runs._asdict().items() if name not in OF_ALL}
    return runs._replace(**jax.tree.map(lambda leaf: leaf[0, 0], fields))


def check_runs(
    objective: TrainingObjective, step_sizes: Numbers, seeds: Seeds, samples: int, updates: int = 0
) -> tuple[Float[NumpyArray, " step_sizes"], UInt[NumpyArray, " seeds"]]:
    """Check step sizes, seeds and memory of a sweep; return step sizes and seeds as arrays."""
    # a run stores the random numbers of `updates` updates at the same time
    num_runs = len(step_sizes) * len(seeds)
    num_bytes = num_runs * samples * BYTES_PER_SAMPLE + len(seeds) * updates * BYTES_PER_UPDATE
    checks.check_fits(num_bytes, f"{num_runs} runs with {samples} samples of the gap need")
    if not checks.are_positive(step_sizes, len(step_sizes)) or not len(step_sizes):
        raise checks.wrong(
            "step_sizes", f"must be one or more finite numbers above 0, got {list(step_sizes)}"
        )
    for seed in seeds:
        if checks.whole_number(seed, "each of seeds", minimum=0) > LARGEST_SEED:
            raise ValueError(f"each of seeds must be at most {LARGEST_SEED}, got {seed}")
    stacked = np.shape(objective.minimum)
    if not len(seeds) or stacked not in ((), (len(seeds),)):
        raise checks.wrong(
            "seeds",
            "must be one for each stacked objective, or one or more for a single objective, got "
            f"{len(seeds)} seeds for a stack of shape {stacked}",
        )
    return np.asarray(step_sizes, np.float64), np.asarray(seeds, np.uint32)


def over_runs(train: Callable[..., Any], objective: TrainingObjective, batches: int | None) -> Any:
    """Vectorize the function `train` of one run over seeds and step sizes."""
    stacked = 0 if jnp.ndim(objective.minimum) else None
    over_seeds = jax.vmap(train, (stacked, None, 0, batches))
    return jax.vmap(over_seeds, (None, 0, None, None))
