"""Text to train on, made from a seed, and its windows."""

from pathlib import Path

import numpy as np

from pipejax.base.array_types import Int, NumpyArray

ALPHABET = np.array(list("abcdefghijklmnopqrstuvwxyz"))
WORDS = 200  # of the lexicon
LETTERS = (2, 8)  # of a word, shortest and longest
LENGTH = 20_000  # characters of a random text, about


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
      >>> import pipejax as pj
      >>> text = pj.training.random_text(0)
      >>> len(set(text)), len(text) > 19_000, len(set(text.split()))
      (27, True, 194)
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(LETTERS[0], LETTERS[1] + 1, WORDS)
    lexicon = ["".join(random.choice(ALPHABET, length)) for length in lengths]
    frequency = 1 / np.arange(1, WORDS + 1)
    drawn = random.choice(WORDS, LENGTH // LETTERS[0], p=frequency / frequency.sum())
    return " ".join(lexicon[word] for word in drawn)[:LENGTH].rsplit(" ", 1)[0]


def read_text(text: str | Path | None, seed: int) -> str:
    """Return a text, read it, or make one."""
    if text is None:
        return random_text(seed)
    return text.read_text(encoding="utf-8") if isinstance(text, Path) else text


def encode(text: str) -> tuple[list[str], Int[NumpyArray, " characters"]]:
    """Number the characters of a text."""
    characters, codes = np.unique(np.array(list(text)), return_inverse=True)
    return characters.tolist(), codes.astype(np.int32)


def windows(
    codes: Int[NumpyArray, " characters"], starts: Int[NumpyArray, "*shape"], length: int
) -> Int[NumpyArray, "*shape length"]:
    """Cut windows out of a text: (..., length) windows."""
    return codes[starts[..., None] + np.arange(length)]
