"""A small character-level language model: a transformer of one block per inner stage.

Stage 0 looks up characters and positions, stages 1 to S - 2 are transformer blocks with the
normalisation before attention and MLP, stage S - 1 normalises and predicts the next character.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.training import TrainingObjective
from pipejax.typing import Array, Bool, Float, Int, NumpyArray

HELD_OUT = 64  # windows that the value is a mean over
SHARE = 0.9  # of the text that batches are cut out of; the rest is held out
ALPHABET = np.array(list("abcdefghijklmnopqrstuvwxyz"))
WORDS = 200  # of the lexicon
LETTERS = (2, 8)  # of a word, shortest and longest
LENGTH = 20_000  # characters of a random text, about
EPSILON = 1e-5  # under the root of the normalisation
Shapes = Mapping[str, tuple[int, ...]]
Parameters = Mapping[str, Array]
Leaf = Any  # an array; while JAX takes an objective apart, whatever stands for one
Blocks = Float[Array, "stages width"]


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel(TrainingObjective):
    """Mean cross-entropy of the next character [nats].

    `value` is over the held-out windows, not over the batches: its gradient is not the mean of
    the batches' gradients, and `minimum` is 0 because the least value is not known.

    Attributes:
      tokens: (batches, examples, context + 1) windows that are trained on.
      held_out: (64, context + 1) windows that the value is taken of.
      minimum: scalar 0.
      num_stages: S.
      num_batches: number of batches.
      vocabulary: number of different characters.
      width: of an activation.
      heads: of an attention.

    Example:
      >>> model = language_model(4, seed=0)
      >>> model.init(jax.random.key(0)).shape, model.tokens.shape
      ((4, 3168), (60, 10, 17))
    """

    tokens: Leaf
    held_out: Leaf
    minimum: Leaf
    num_stages: int = dataclasses.field(metadata={"static": True})
    num_batches: int = dataclasses.field(metadata={"static": True})
    vocabulary: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})

    def init(self, key: Array) -> Blocks:
        """Draw weights of variance 1 / inputs, embeddings of variance 1; scales are 1."""
        starts = [_start(self._shapes(stage)) for stage in range(self.num_stages)]
        width = max(spread.size for spread, _ in starts)
        padded = [
            [np.pad(part, (0, width - part.size)) for part in parts]
            for parts in zip(*starts, strict=True)
        ]
        spread, mean = (jnp.asarray(np.stack(rows)) for rows in padded)
        return mean + spread * jax.random.normal(key, spread.shape, spread.dtype)

    def batch(self, index: Int[Array, ""] | int) -> Int[Array, "examples length"]:
        """Take the windows of one batch."""
        return self.tokens[index]

    def input(self, batch: Int[Array, "examples length"]) -> Int[Array, "examples context"]:
        """Return all characters but the last."""
        return batch[:, :-1]

    def stage(
        self, stage: int, block: Float[Array, " width"], activation: Array, batch: Array
    ) -> Float[Array, "examples context features"]:
        """Run one stage: embedding, a transformer block, or the prediction."""
        parameters = _unflatten(block, self._shapes(stage))
        if stage == 0:
            return parameters["characters"][activation] + parameters["positions"][None]
        if stage < self.num_stages - 1:
            return _transform(parameters, activation, self.heads)
        return _normalise(activation, parameters["scale"]) @ parameters["predict"]

    def loss(self, activation: Array, batch: Int[Array, "examples length"]) -> Float[Array, ""]:
        """Return the mean cross-entropy over all characters but the first."""
        likelihood = jax.nn.log_softmax(activation)
        return -jnp.mean(jnp.take_along_axis(likelihood, batch[:, 1:, None], axis=-1))

    def value(self, blocks: Blocks) -> Float[Array, ""]:
        """Return the loss of the held-out windows."""
        return self.batch_loss(blocks, self.held_out)

    def batch_loss(self, blocks: Blocks, batch: Array) -> Float[Array, ""]:
        """Run the inner stages in a loop, so that their number costs no compilation."""
        first = self.stage(0, blocks[0], self.input(batch), batch)
        inner = jax.lax.scan(
            lambda activation, block: (self.stage(1, block, activation, batch), None),
            first,
            blocks[1:-1],
        )[0]
        last = self.num_stages - 1
        return self.loss(self.stage(last, blocks[last], inner, batch), batch)

    def held(self) -> Bool[NumpyArray, "stages width"]:
        """Return which coordinates are no padding."""
        stages = [self._shapes(stage).values() for stage in range(self.num_stages)]
        sizes = np.array([sum(int(np.prod(shape)) for shape in shapes) for shapes in stages])
        return np.arange(sizes.max()) < sizes[:, None]

    def _shapes(self, stage: int) -> Shapes:
        """Return the shapes of the parameters of a stage by name."""
        width = self.width
        if stage == 0:
            context = self.held_out.shape[-1] - 1
            return {"characters": (self.vocabulary, width), "positions": (context, width)}
        if stage < self.num_stages - 1:
            return {
                "before_attention": (width,),
                "mix": (width, 3 * width),
                "merge": (width, width),
                "before_mlp": (width,),
                "up": (width, 4 * width),
                "bias": (4 * width,),
                "down": (4 * width, width),
            }
        return {"scale": (width,), "predict": (width, self.vocabulary)}


def language_model(
    num_stages: int,
    *,
    width: int = 16,
    heads: int = 2,
    context: int = 16,
    num_batches: int = 60,
    batch_size: int = 10,
    text: str | None = None,
    seed: int,
) -> LanguageModel:
    """Make a language model and the windows that it is trained on.

    Windows of context + 1 characters start anywhere in the first nine tenths of the text; 64
    windows spread evenly over the rest are held out. In the precision that is JAX's default.

    Args:
      num_stages: S, at least 3.
      width: of an activation, a multiple of `heads`.
      heads: of an attention.
      context: characters that a prediction looks at, at most.
      num_batches: number of batches.
      batch_size: windows of a batch.
      text: what is learned, or None for `random_text` of the seed.
      seed: of windows and random text, which do not depend on the machine.

    Returns:
      The objective.

    Raises:
      ValueError: if a stage or a held-out window would be missing.

    Source:
      Vaswani et al. 2017, Attention Is All You Need; the order of the normalisation as in Xiong
      et al. 2020, On Layer Normalization in the Transformer Architecture.

    Example:
      >>> model = language_model(3, text="to be or not to be " * 20, seed=0)
      >>> model.vocabulary, model.num_stages
      (7, 3)
    """
    if num_stages < 3:
        raise ValueError(f"num_stages must be at least 3, got {num_stages}")
    if width % heads:
        raise ValueError(f"width must be a multiple of heads {heads}, got {width}")
    characters, codes = encode(random_text(seed) if text is None else text)
    border = int(SHARE * len(codes))
    if len(codes) - border <= context:
        raise ValueError(f"text must have more than {10 * context} characters, got {len(codes)}")
    random = np.random.default_rng([seed, 1])  # not the stream of the text
    starts = random.integers(0, border - context, (num_batches, batch_size))
    held_out = np.linspace(border, len(codes) - context - 1, HELD_OUT).astype(np.int64)
    return LanguageModel(
        tokens=jnp.asarray(windows(codes, starts, context + 1)),
        held_out=jnp.asarray(windows(codes, held_out, context + 1)),
        minimum=jnp.zeros(()),
        num_stages=num_stages,
        num_batches=num_batches,
        vocabulary=len(characters),
        width=width,
        heads=heads,
    )


def random_text(seed: int) -> str:
    """Make a text: random words, the r-th of which comes with a frequency proportional to 1 / r.

    A lexicon of 200 words has 2 to 8 letters each; letters are drawn uniformly, words by Zipf's
    law, one after the other and with single spaces between them, 20,000 characters or a few less.
    So there is something to learn: letters from those before them, and which words are frequent.

    Args:
      seed: of lexicon and words, which do not depend on the machine.

    Returns:
      The text.

    Example:
      >>> text = random_text(0)
      >>> len(set(text)), len(text) > 19_000, len(set(text.split()))
      (27, True, 194)
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(LETTERS[0], LETTERS[1] + 1, WORDS)
    lexicon = ["".join(random.choice(ALPHABET, length)) for length in lengths]
    frequency = 1 / np.arange(1, WORDS + 1)
    words = random.choice(WORDS, LENGTH // LETTERS[0], p=frequency / frequency.sum())
    return " ".join(lexicon[word] for word in words)[:LENGTH].rsplit(" ", 1)[0]


def encode(text: str) -> tuple[list[str], Int[NumpyArray, " characters"]]:
    """Number the characters of a text."""
    characters, codes = np.unique(np.array(list(text)), return_inverse=True)
    return characters.tolist(), codes.astype(np.int32)


def windows(
    codes: Int[NumpyArray, " characters"], starts: Int[NumpyArray, "*shape"], length: int
) -> Int[NumpyArray, "*shape length"]:
    """Cut windows out of a text: (..., length) windows."""
    return codes[starts[..., None] + np.arange(length)]


def _start(
    shapes: Shapes,
) -> tuple[Float[NumpyArray, " parameters"], Float[NumpyArray, " parameters"]]:
    """Return spread and mean of the initial parameters of a stage; vectors have only a mean."""
    spreads, means = [], []
    for name, shape in shapes.items():
        weights = len(shape) > 1
        looked_up = name in ("characters", "positions")
        spread = (1.0 if looked_up else shape[0] ** -0.5) if weights else 0.0
        spreads.append(np.full(np.prod(shape), spread))
        means.append(np.full(np.prod(shape), 0.0 if weights or name == "bias" else 1.0))
    return np.concatenate(spreads), np.concatenate(means)


def _unflatten(block: Float[Array, " width"], shapes: Shapes) -> Parameters:
    """Return the arrays of a stage by name; the rest of the block is padding."""
    parts, first = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        parts[name] = block[first : first + size].reshape(shape)
        first += size
    return parts


def _normalise(x: Float[Array, "... features"], scale: Array) -> Float[Array, "... features"]:
    """Normalise by the root mean square (Zhang and Sennrich 2019)."""
    size = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return x * size * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def _transform(
    parameters: Parameters, x: Float[Array, "examples context features"], heads: int
) -> Float[Array, "examples context features"]:
    """Apply a transformer block: causal attention and MLP, each with a residual connection."""
    examples, context, width = x.shape
    mixed = _normalise(x, parameters["before_attention"]) @ parameters["mix"]
    q, k, v = jnp.moveaxis(mixed.reshape(examples, context, 3, heads, width // heads), 2, 0)
    scores = jnp.einsum("eqhf,ekhf->ehqk", q, k) * (width // heads) ** -0.5
    is_visible = jnp.tril(jnp.ones((context, context), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf))
    x = x + jnp.einsum("ehqk,ekhf->eqhf", weights, v).reshape(x.shape) @ parameters["merge"]
    up = _normalise(x, parameters["before_mlp"]) @ parameters["up"] + parameters["bias"][None, None]
    return x + jax.nn.gelu(up) @ parameters["down"]


jax.tree_util.register_dataclass(LanguageModel)
