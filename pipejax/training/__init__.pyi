"""Objectives, ways to train them through a pipeline, and what theory says."""

from pipejax.training.linear_models import (
    Logistic as Logistic,
    Quadratic as Quadratic,
    nesterov_quadratic as nesterov_quadratic,
    random_logistic as random_logistic,
    random_quadratic as random_quadratic,
    spectral_quadratic as spectral_quadratic,
)
from pipejax.training.objective import (
    TrainingObjective as TrainingObjective,
    batch_gradient as batch_gradient,
    smoothness as smoothness,
)
from pipejax.training.replays import (
    batch_order as batch_order,
    replay as replay,
    sweep_replay as sweep_replay,
)
from pipejax.training.rpd import (
    randomized_pipedream as randomized_pipedream,
    sweep_randomized_pipedream as sweep_randomized_pipedream,
)
from pipejax.training.theory import (
    ConvergenceBound as ConvergenceBound,
    best_step_size as best_step_size,
    convergence_bound as convergence_bound,
    delay_term_law as delay_term_law,
    pipedream_delay as pipedream_delay,
)
from pipejax.training.training_run import (
    RULES as RULES,
    Draw as Draw,
    Summary as Summary,
    TrainingRun as TrainingRun,
    choose_step_size as choose_step_size,
    draw as draw,
    summarise as summarise,
)
