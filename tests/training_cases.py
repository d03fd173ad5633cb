"""Objectives of the tests of training: three stages, small."""

import numpy as np

import pipejax.training as pt
from sweeps.pipedream.language_model import language_model

S = 3
SIZES = {"dimension": 6, "num_batches": 5, "batch_size": 4}
OBJECTIVES = {
    "random": lambda seed=0: pt.random_quadratic(S, **SIZES, seed=seed),
    "spectral": lambda: pt.spectral_quadratic(
        S, spectrum=[0.1, 0.5, 1, 1, 2, 4], num_batches=5, batch_size=4, seed=0
    ),
    "nesterov": lambda: pt.nesterov_quadratic(S, **SIZES, condition_number=50.0, seed=0),
    "logistic": lambda: pt.random_logistic(S, **SIZES, l2=1e-2, seed=0),
    "language": lambda: language_model(
        S + 1, width=4, context=6, num_batches=3, batch_size=2, seed=0
    ),
}


def rows(objective):
    """Examples and targets as plain arrays."""
    return np.asarray(objective.features).reshape(-1, 6), np.asarray(objective.targets).ravel()
