"""How fast a gradient can change: the constant L of the bounds."""

import numpy as np

from pipejax.training.linear import gram
from pipejax.training.logistic import Logistic
from pipejax.training.objective import TrainingObjective
from pipejax.training.quadratic import Quadratic


def smoothness(objective: TrainingObjective) -> float:
    """Lipschitz constant L of the gradient of f.

    Of a quadratic it is the largest eigenvalue of the Hessian X^T X / n, exactly. Of logistic
    regression it is the upper bound lambda_max(X^T X) / 4n + l2: the logistic function is nowhere
    steeper than 1/4.

    Args:
      objective: a quadratic or a logistic regression, not stacked.

    Returns:
      L.

    Raises:
      ValueError: if the objective is of another kind, or stacked.

    Example:
      >>> import pipejax as pj
      >>> objective = pj.training.spectral_quadratic(2, spectrum=[1.0, 3.0], seed=0)
      >>> round(pj.training.smoothness(objective), 4)
      3.0
    """
    if not isinstance(objective, Quadratic | Logistic) or np.ndim(objective.minimum):
        raise ValueError(
            "objective must be one Quadratic or Logistic, "
            f"got {type(objective).__name__} of minimum {objective.minimum}"
        )
    largest = float(np.linalg.eigvalsh(gram(objective))[-1])
    if isinstance(objective, Logistic):
        return largest / 4 + float(objective.l2)
    return largest
