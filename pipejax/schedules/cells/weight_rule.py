"""Which weights a forward reads, where a table updates them before its end.

A table without U cells is synchronous: every microbatch reads the weights that the step began
with. With U cells the table is asynchronous, and the order of its rows says which updates a
forward can see; the rule says which of those it reads. The backward of a microbatch always uses
the weights of its forward (weight stashing, arXiv:1806.03377).
"""

import dataclasses

from pipejax.base.checks import whole_number


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Which of the weights that are there a forward reads.

    Attributes:
      behind: None for the newest of its stage when it runs, as PipeDream does. A number holds
        every microbatch that many updates behind the one that applies its own gradient, on all
        stages alike: 1 is the double buffering of PipeDream-2BW (arXiv:2006.09503).
      runs: R, models that are trained side by side; microbatch m belongs to run m mod R.
      local_steps: H, updates of a run after which the models of all runs are averaged; a round
        is R * H microbatches. Without effect where there is one run.

    Raises:
      ValueError: if a number is not whole, behind is below 0 or another below 1.

    Example:
      >>> import pipejax as pj
      >>> pj.WeightRule(runs=2, local_steps=5).round_size
      10
      >>> pj.WeightRule(local_steps=0)
      Traceback (most recent call last):
      ...
      ValueError: local_steps must be a whole number of at least 1, got 0
    """

    behind: int | None = None
    runs: int = 1
    local_steps: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.behind is not None:
            object.__setattr__(self, "behind", whole_number(self.behind, "behind", least=0))
        for name in ("runs", "local_steps"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))

    @property
    def round_size(self) -> int:
        """Microbatches from one average of the runs to the next."""
        return self.runs * self.local_steps


NEWEST = WeightRule()
