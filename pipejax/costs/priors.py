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
      is_own: whether the system's own number is the median where it has one: vendors and tests of
        single collectives know some of them better than step times do.
    """

    centre: float | None = None
    spread: float = 0.3
    limit: float = math.inf
    is_own: bool = False


PRIORS: Mapping[str, Prior] = {
    # measured: large products reach 73 to 87 % of the sheet's peak on A100, H100 and B200
    "compute.efficiency": Prior(0.8, 0.7, limit=1.0),
    "compute.latency": Prior(4e-6, 0.2),
    "memory.efficiency": Prior(0.7, 0.7, limit=1.0),
    "memory.latency": Prior(4e-6, 0.2),
    "kernels.attention_efficiency": Prior(0.7, 0.5, limit=1.0),
    "kernels.narrow_efficiency": Prior(0.85, 0.5, limit=1.0),
    "kernels.misaligned_efficiency": Prior(0.5, 0.7, limit=1.0),
    "kernels.sharpness": Prior(4.0, 0.5),
    "optimizer.efficiency": Prior(0.8, 0.7, limit=1.0),
    # a launch takes 5 us in C, several times as long from a Python program with autograd
    "host.launch": Prior(40e-6, 0.7),
    "host.collective": Prior(50e-6, 1.0),
    "host.layer": Prior(100e-6, 1.0),
    "host.microbatch": Prior(300e-6, 1.0),
    "host.step": Prior(2e-3, 1.0),
    "collectives.latency": Prior(40e-6, 0.7, is_own=True),
    "collectives.simple_latency": Prior(30e-6, 1.0),
    "collectives.low_latency_share": Prior(0.92, 0.5, limit=1.0),
    "collectives.copies": Prior(1.0, 1.0),
    "node.efficiency": Prior(0.8, 0.7, limit=1.0),
    "node.latency": Prior(None, 0.7),
    "network.efficiency": Prior(0.7, 0.7, limit=1.0),
    "network.latency": Prior(None, 0.7),
}
# what step times seldom decide, or other measurements do: links of a node, which tables of
# collectives measure; the host's seconds per layer beside those per kernel; kernels of their own
# shares that not all runs have
_ASKED_FOR = (
    "kernels.attention_efficiency",
    "kernels.narrow_efficiency",
    "host.layer",
    "collectives.simple_latency",
    "collectives.low_latency_share",
    "collectives.copies",
    "node.efficiency",
    "node.latency",
)
FITTED = tuple(name for name in PRIORS if name not in _ASKED_FOR)  # where nobody says what to fit
