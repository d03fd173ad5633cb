"""GPT models as Zero Bubble Pipeline Parallelism prints them (ICLR 2024, openreview tuzTN0eIO5).

Shapes (Table 3), profiled times (Table 6) and the bubble rates of its searched schedules (Table 5).
"""

from collections.abc import Mapping
from typing import NamedTuple

SEARCHED = ("ZB-1p", "ZB-2p")  # limits: P and 2P activations


class Shape(NamedTuple):
    """A GPT model.

    Attributes:
      workers: P that it was trained on.
      hidden: h.
      heads: a.
      sequence: s.

    Example:
      >>> round(MODELS["6.2B"].weight_share, 3)
      0.432
    """

    workers: int
    hidden: int
    heads: int
    sequence: int = 1024

    @property
    def weight_share(self) -> float:
        """Share of an activation that W needs after I: 32h of 34h + 5as bytes per token."""
        return 32 * self.hidden / (34 * self.hidden + 5 * self.heads * self.sequence)


class Profile(NamedTuple):
    """Times of one microbatch on one stage [ms], and what was reached with them.

    Attributes:
      forward: T_F.
      input_grad: T_B of the paper, which is our I.
      weight_grad: T_W.
      message: T_comm.
      searched: idle share in a worker's own span under each of `SEARCHED`; None if not printed.

    Example:
      >>> PROFILES["1.5B", 24].searched
      (0.1585, 0.0433)
    """

    forward: float
    input_grad: float
    weight_grad: float
    message: float
    searched: tuple[float | None, float | None]


MODELS: Mapping[str, Shape] = {
    "1.5B": Shape(8, 2304, 24),
    "6.2B": Shape(8, 4096, 32),
    "14.6B": Shape(16, 5120, 40),
    "28.3B": Shape(32, 6144, 48),
}
PROFILES: Mapping[tuple[str, int], Profile] = {  # by model and number of microbatches
    ("1.5B", 24): Profile(18.522, 18.086, 9.337, 0.601, (0.1585, 0.0433)),
    ("1.5B", 32): Profile(18.513, 18.086, 9.331, 0.626, (0.1242, 0.0039)),
    ("1.5B", 64): Profile(18.546, 18.097, 9.321, 0.762, (0.0674, 0.0026)),
    ("6.2B", 24): Profile(29.718, 29.444, 19.927, 0.527, (0.1323, 0.0029)),
    ("6.2B", 32): Profile(29.802, 29.428, 19.53, 0.577, (0.1045, 0.0022)),
    ("6.2B", 64): Profile(29.935, 29.621, 19.388, 0.535, (0.0554, None)),
    ("14.6B", 48): Profile(11.347, 11.248, 8.132, 0.377, (0.1397, 0.0066)),
    ("14.6B", 64): Profile(11.307, 11.254, 8.101, 0.379, (0.1088, 0.0054)),
    ("14.6B", 128): Profile(11.325, 11.308, 8.109, 0.378, (0.0576, 0.0028)),
    ("28.3B", 96): Profile(10.419, 10.207, 7.715, 0.408, (0.1421, 0.0038)),
    ("28.3B", 128): Profile(10.408, 10.204, 7.703, 0.408, (0.1106, 0.0029)),
    ("28.3B", 256): Profile(10.402, 10.248, 7.698, 0.46, (0.0594, 0.0018)),
}
