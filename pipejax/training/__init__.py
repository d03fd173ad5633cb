"""Training through a pipeline: objectives cut into stages, outdated block updates, bounds."""

from pipejax.training.draws import Draw, draw
from pipejax.training.language_models import LanguageModel, language_model, random_text
from pipejax.training.linear_models import (
    Logistic,
    Quadratic,
    nesterov_quadratic,
    random_logistic,
    random_quadratic,
    spectral_quadratic,
)
from pipejax.training.objective import TrainingObjective, batch_gradient, block_gradient, smoothness
from pipejax.training.replays import batch_order, replay, sweep_replay
from pipejax.training.rpd import randomized_pipedream, sweep_randomized_pipedream
from pipejax.training.theory import (
    ConvergenceBound,
    best_step_size,
    convergence_bound,
    delay_term_law,
    pipedream_delay,
)
from pipejax.training.training_run import (
    Summary,
    TrainingRun,
    choose_step_size,
    summarise,
)

__all__ = [
    "ConvergenceBound",
    "Draw",
    "LanguageModel",
    "Logistic",
    "Quadratic",
    "Summary",
    "TrainingObjective",
    "TrainingRun",
    "batch_gradient",
    "batch_order",
    "best_step_size",
    "block_gradient",
    "choose_step_size",
    "convergence_bound",
    "delay_term_law",
    "draw",
    "language_model",
    "nesterov_quadratic",
    "pipedream_delay",
    "random_logistic",
    "random_quadratic",
    "random_text",
    "randomized_pipedream",
    "replay",
    "smoothness",
    "spectral_quadratic",
    "summarise",
    "sweep_randomized_pipedream",
    "sweep_replay",
]
