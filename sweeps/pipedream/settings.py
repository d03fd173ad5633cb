"""Settings of the experiments of arXiv 2606.03498, as data: as they were run, and as captions say.

The captions and the authors' public notebooks do not agree. "as run" is what the notebooks' code
and printed results say; where they say nothing (experiments 3 and 4), it is a setting that was
looked for. Time is in slots of one forward or one backward of one stage.

Every scheme is trained with its published step size and with two powers of two to either side.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pipejax.training import pipedream_delay

AS_RUN, CAPTION = "as run", "caption"
SEEDS = tuple(range(5))
# of the authors' examples in all notebooks; their gradient noise comes from one generator for all
# step sizes and schemes of a depth, so that no seed of a run repeats it
AUTHORS_SEED = 0
STEPS = (-2, -1, 0, 1, 2)  # powers of two around the published step size
# where smaller ones end higher: beyond the best one, for LocalSGD one more
UPWARD, BEYOND = (0, 1, 2, 3, 4), (1, 2, 3, 4, 5)
SAMPLES = 50  # of each curve, after the start


class Problem(NamedTuple):
    """Objective that is trained.

    Attributes:
      kind: one of `sweeps.pipedream.schemes.MAKERS`.
      dimension: coordinates of the model, or its width.
      num_batches: number of batches.
      batch_size: examples of a batch.
      noise: standard deviation of what is added to every coordinate of a gradient.
    """

    kind: str
    dimension: int
    num_batches: int
    batch_size: int
    noise: float = 0.0


class Scheme(NamedTuple):
    """A way to train.

    Attributes:
      label: how it is called in datasets.
      method: a schedule, or "rpd".
      step_size: gamma as published, in the middle of those that are tried.
      options: of the schedule.
      delta: largest delay of RPD [block updates].
      steps: powers of two around the published step size.
      batches: in which order PipeDream and LocalSGD take them; RPD draws each by itself.
    """

    label: str
    method: str
    step_size: float
    options: tuple[tuple[str, int | str], ...] = ()
    delta: int = 0
    steps: tuple[int, ...] = STEPS
    batches: str = "cyclic"

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """Step sizes that are tried."""
        return tuple(self.step_size * 2.0**step for step in self.steps)


class Setting(NamedTuple):
    """One problem, the schemes that are compared on it, and for how long.

    Attributes:
      stages: S.
      problem: what is trained.
      until: how long [slots].
      schemes: the ways to train.
      column: whose setting it is, `AS_RUN` or `CAPTION`.
      seeds: of examples, start and batches.
      systems: machines whose seconds take the place of slots; none if empty.
      samples: of each curve, after the start.
    """

    stages: int
    problem: Problem
    until: float
    schemes: tuple[Scheme, ...]
    column: str = AS_RUN
    seeds: tuple[int, ...] = SEEDS
    systems: tuple[str, ...] = ()
    samples: int = SAMPLES


def filled(stages: int, microbatches: int) -> float:
    """Slots that PipeDream takes for all microbatches."""
    return 2.0 * (microbatches + stages - 1)


def pipedream(step_size: float) -> Scheme:
    """PipeDream that admits microbatches as the timelines of the notebooks do."""
    return Scheme("pipedream", "pipedream", step_size, (("admission", "first-stage"),))


def local_sgd(local_steps: int, step_size: float) -> Scheme:
    """LocalSGD with as many runs as stages."""
    options = (("local_steps", local_steps),)
    return Scheme(f"local-sgd H={local_steps}", "local-sgd", step_size, options)


def randomized(delta: int, step_size: float, label: str = "") -> Scheme:
    """Randomized PipeDream."""
    return Scheme(label or f"rpd delta={delta}", "rpd", step_size, delta=delta)


def matched(stages: int, step_size: float) -> Scheme:
    """Randomized PipeDream with the largest delay of PipeDream."""
    return randomized(pipedream_delay(stages), step_size, "rpd")


RUN_1 = Problem("random quadratic", 512, num_batches=20, batch_size=100)
SCHEMES_1 = (
    pipedream(1 / 16),
    *(
        randomized(delta, step_size)
        for delta, step_size in (
            (8, 1 / 8),
            (30, 1 / 8),
            (60, 1 / 16),
            (180, 1 / 16),
            (420, 1 / 32),
        )
    ),
)
SYSTEMS = tuple(f"{n}_nw_{c}_cp" for n in ("slow", "mid", "fast") for c in ("slow", "mid", "fast"))
# with batches of 10 the published step sizes diverge: these are 1/128 to 1/32, or 1/256 to 1/64
SMALLER = {1 / 8: (-4, -3, -2), 1 / 16: (-3, -2, -1), 1 / 32: (-3, -2, -1)}
LOCAL_STEP_SIZES = {2: 1 / 16, 4: 1 / 16, 8: 1 / 8, 16: 1 / 4, 32: 1 / 4, 64: 1 / 4, 128: 1 / 2}
RUN_5 = Problem("logistic regression", 512, num_batches=50, batch_size=1, noise=0.5)
CAPTION_5 = Problem("logistic regression", 512, num_batches=60, batch_size=10)


def _scaling(stages: int, problem: Problem, until: float, column: str) -> Setting:
    """RPD takes as many updates as PipeDream, one by one: it is most of the work."""
    schemes = (
        pipedream(1 / 64),
        matched(stages, 1 / 64)._replace(steps=(-2, -1, 0, 1)),
        local_sgd(5, LOCAL_STEP_SIZES[stages]),
    )
    return Setting(stages, problem, until, schemes, column, SEEDS[:3])


def _machines(problem: Problem, gamma: float) -> Setting:
    """Our own experiment: eight stages, about 320 microbatches, whole groups and rounds."""
    schemes = (
        pipedream(gamma),
        Scheme("pipedream-2bw", "pipedream-2bw", 4 * gamma),
        local_sgd(1, 8 * gamma),
        local_sgd(5, 8 * gamma),
    )
    return Setting(8, problem, 640.0, schemes, seeds=SEEDS[:3], systems=SYSTEMS)


EXPERIMENTS: Mapping[str, tuple[Setting, ...]] = {
    "quadratic": (
        Setting(8, RUN_1, filled(8, 400), SCHEMES_1),
        Setting(
            8,
            RUN_1._replace(num_batches=60, batch_size=10),
            filled(8, 300),
            tuple(scheme._replace(steps=SMALLER[scheme.step_size]) for scheme in SCHEMES_1),
            CAPTION,
        ),
    ),
    "match": (  # with the batches of PipeDream in turn, and drawn one by one as RPD draws them
        Setting(
            8,
            RUN_1,
            filled(8, 400),
            (
                pipedream(1 / 16),
                pipedream(1 / 16)._replace(label="pipedream, drawn", steps=(0,), batches="drawn"),
                matched(8, 1 / 16),
            ),
        ),
    ),
    "nesterov": (
        Setting(
            16,
            Problem("tridiagonal quadratic", 512, num_batches=120, batch_size=5),
            filled(16, 600),
            (
                pipedream(1 / 256),
                local_sgd(2, 1 / 32),
                local_sgd(5, 1 / 32),
                local_sgd(30, 1 / 256),
            ),
        ),
    ),
    "logistic": (
        Setting(
            16,
            Problem("logistic regression", 1024, num_batches=20, batch_size=10, noise=0.3),
            filled(16, 400),
            (pipedream(1 / 32), local_sgd(2, 1 / 2), local_sgd(5, 1 / 2), local_sgd(30, 1 / 4)),
        ),
    ),
    "language": (
        Setting(
            16,
            Problem("language model", 16, num_batches=20, batch_size=5),
            2000.0,
            (
                pipedream(1 / 8)._replace(steps=UPWARD),
                *(local_sgd(steps, 1 / 8)._replace(steps=BEYOND) for steps in (1, 4, 8)),
            ),
            seeds=SEEDS[:4],
            samples=25,  # two epochs of PipeDream each, that their loss is the mean of
        ),
    ),
    "scaling": (
        *(_scaling(stages, RUN_5, 3180.0, AS_RUN) for stages in LOCAL_STEP_SIZES),
        *(_scaling(stages, CAPTION_5, 660.0, CAPTION) for stages in (2, 8, 32)),
    ),
    "machines": (
        _machines(Problem("tridiagonal quadratic", 512, num_batches=120, batch_size=5), 1 / 128),
        _machines(
            Problem("logistic regression", 512, num_batches=20, batch_size=10, noise=0.3), 1 / 32
        ),
    ),
}
