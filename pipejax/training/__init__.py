"""Training through a pipeline: objectives cut into stages, outdated block updates, bounds."""

from pipejax.training.draws import Draw, draw
from pipejax.training.logistic import random_logistic
from pipejax.training.objective import Objective, batch_gradient, block_gradient
from pipejax.training.quadratic import nesterov_quadratic, random_quadratic, spectral_quadratic
from pipejax.training.rpd import randomized_pipedream, sweep_randomized_pipedream
from pipejax.training.run import Run
from pipejax.training.smoothness import smoothness

__all__ = [
    "Draw",
    "Objective",
    "Run",
    "batch_gradient",
    "block_gradient",
    "draw",
    "nesterov_quadratic",
    "random_logistic",
    "random_quadratic",
    "randomized_pipedream",
    "smoothness",
    "spectral_quadratic",
    "sweep_randomized_pipedream",
]
