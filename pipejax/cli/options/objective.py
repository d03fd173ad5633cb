"""Options of what is trained."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pipejax as pj
from pipejax.base.checks import one_of
from pipejax.base.files import read_file
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import Count, CountIfGiven, Text, parse_float

MAKERS = {  # names of functions in `pipejax.training`
    "quadratic": "random_quadratic",
    "nesterov": "nesterov_quadratic",
    "logistic": "random_logistic",
    "language": "language_model",
}
KINDS = {  # options that belong to one objective
    "condition_number": "nesterov",
    "strong_convexity": "nesterov",
    "minimiser": "nesterov",
    "text": "language",
}
COORDINATES = 8  # of a stage, if no option says how many there are
SIZES = 8  # step sizes tried, if no option says which
SIZES_OF_LANGUAGE = [2.0, 1.0, 0.5, 0.25]  # whose L is not known


class ObjectiveOptions(NamedTuple):
    """What is trained, without its stages; `make` cuts it into so many."""

    name: str
    settings: dict[str, Any]

    def make(self, stages: int) -> "pj.training.TrainingObjective":
        """Make the objective, with seed 0.

        Raises:
          ValueError: if it cannot be cut into so many stages.
        """
        if self.name == "language" and stages < 3:
            raise ValueError(
                "--objective language needs at least 3 stages, to look up, transform and predict, "
                f"got {stages}"
            )
        settings = dict(self.settings)
        if self.name != "language":
            dimension = settings.setdefault("dimension", COORDINATES * stages)
            if dimension % stages:
                raise ValueError(
                    f"--dimension must be a multiple of {stages} stages, got {dimension}"
                )
        make: Callable[..., pj.training.TrainingObjective] = getattr(pj.training, MAKERS[self.name])
        return make(stages, seed=0, **settings)


class ObjectiveSettings(NamedTuple):
    """Options of what is trained.

    Attributes:
      objective: quadratic, nesterov, logistic or language.
      dimension: 8 each if not given; for language, the width of an activation (16).
      condition_number: 100 if not given.
      strong_convexity: 1 if not given.
      minimiser: solved (as published, if not given) or normal (drawn).
      text: a random one if not given.
    """

    objective: str = "quadratic"
    dimension: CountIfGiven = None
    condition_number: float | None = None
    strong_convexity: float | None = None
    minimiser: Text = None
    text: Path | None = None
    batches: Count = 60
    batch_size: Count = 10

    def chosen(self) -> ObjectiveOptions:
        """Read what is trained."""
        name = one_of(self.objective, MAKERS, "--objective")
        for option, kind in KINDS.items():
            if getattr(self, option) is not None and name != kind:
                raise ValueError(f"{flag(option)} does not go with --objective {name}")
        settings: dict[str, Any] = {"num_batches": self.batches, "batch_size": self.batch_size}
        if self.dimension is not None:
            if name == "language" and self.dimension % 2:
                raise ValueError(
                    f"--dimension must be even for --objective language, got {self.dimension}"
                )
            settings["width" if name == "language" else "dimension"] = self.dimension
        if name == "nesterov":
            own = {option: getattr(self, option) for option in KINDS if KINDS[option] == name}
            settings |= {"condition_number": 100.0}
            settings |= {option: value for option, value in own.items() if value is not None}
        if self.text is not None:
            settings["text"] = _read(self.text)
        return ObjectiveOptions(name, settings)


def _read(path: Path) -> str:
    try:
        return read_file(path).decode()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text {path} must be UTF-8, but has {error.reason} at byte {error.start}"
        ) from None


def choose_step_sizes(text: str | None, objective: "pj.training.TrainingObjective") -> list[float]:
    """Read step sizes, or take powers of two downwards: 8 of them from 2 / L, 4 for language.

    Args:
      text: as 0.25,0.125, or None.
      objective: what is trained, with smoothness L.

    Returns:
      Step sizes, each once.

    Raises:
      ValueError: if one is no finite number above 0, or comes twice.

    Example:
      >>> from pipejax.training import spectral_quadratic
      >>> choose_step_sizes(None, spectral_quadratic(2, spectrum=[1.0, 8.0], seed=0))[:3]
      [0.25, 0.125, 0.0625]
      >>> choose_step_sizes("0.5,0", spectral_quadratic(2, spectrum=[1.0, 8.0], seed=0))
      Traceback (most recent call last):
      ...
      ValueError: --step-sizes must be finite numbers above 0, as 0.25,0.125, got '0'
    """
    if text is None:
        if not isinstance(objective, pj.training.Quadratic | pj.training.Logistic):
            return SIZES_OF_LANGUAGE
        first = 2.0 ** math.floor(math.log2(2 / pj.training.smoothness(objective)))
        return [first / 2**halvings for halvings in range(SIZES)]
    parts = [part.strip() for part in text.split(",")]
    sizes = [parse_float(part) for part in parts]
    for place, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        if not 0 < size < math.inf:
            raise ValueError(
                f"--step-sizes must be finite numbers above 0, as 0.25,0.125, got {part!r}"
            )
        if size in sizes[:place]:
            raise ValueError(f"--step-sizes must name each once, got {size:g} twice")
    return sizes
