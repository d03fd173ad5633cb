"""What is known of a system's numbers before anything is measured on it.

A calibration keeps numbers near these, by so much as its rows leave them open.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Prior(NamedTuple):
    """Where a number lies: its logarithm is normal, or the logit of a number with a limit.

    Attributes:
      centre: median; None where the system file says it.
      spread: standard deviation of the logarithm, or of the logit.
      limit: what the number stays below: 1 for a share.
    """

    centre: float | None = None
    spread: float = 0.3
    limit: float = math.inf


PRIORS: Mapping[str, Prior] = {
    "compute.efficiency": Prior(0.7, 0.7, limit=1.0),
    "compute.latency": Prior(4e-6, 0.7),
    "memory.efficiency": Prior(0.8, 0.7, limit=1.0),
    "memory.latency": Prior(4e-6, 0.7),
    "node.efficiency": Prior(0.7, 0.7, limit=1.0),
    "node.latency": Prior(None, 0.7),
    "network.efficiency": Prior(0.7, 0.7, limit=1.0),
    "network.latency": Prior(None, 0.7),
}
FITTED = tuple(PRIORS)  # by a calibration that is not told what to fit
