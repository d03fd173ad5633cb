"""The small model that is trained, in PyTorch: stages of one shape, and what they learn."""

from typing import NamedTuple

import torch

INNER = 8  # width within a stage, at most: large messages need little arithmetic
JUDGED = 64  # features of the output that the loss looks at, at most


class TorchModel(NamedTuple):
    """What is trained, in float64.

    Attributes:
      hidden: width of what stages pass on.
      batch_size: examples of a microbatch.
      seed: of parameters and data.
    """

    hidden: int
    batch_size: int
    seed: int

    def stage(self, number: int) -> "Stage":
        """Draw the parameters of a stage, from a seed of its own."""
        return Stage(self.hidden, self._drawn(number + 1))

    def data(self, num_microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Draw input and target (batch, hidden) of each microbatch."""
        drawn = self._drawn(0)
        shape = 2, num_microbatches, self.batch_size, self.hidden
        inputs, targets = torch.randn(shape, generator=drawn, dtype=torch.float64)
        return list(inputs), list(targets)

    def example(self) -> torch.Tensor:
        """What a stage gets and passes on: shape and type alone."""
        return torch.empty(self.batch_size, self.hidden, dtype=torch.float64, device="meta")

    def _drawn(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + stream)


class Stage(torch.nn.Module):  # type: ignore[misc]  # mypy does not see PyTorch
    """A residual layer."""

    def __init__(self, hidden: int, drawn: torch.Generator) -> None:
        """Draw the parameters."""
        super().__init__()
        inner = min(hidden, INNER)

        def parameter(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=drawn, dtype=torch.float64)
            return torch.nn.Parameter(values * shape[0] ** -0.5)

        self.into, self.bias, self.out = (
            parameter(hidden, inner),
            parameter(inner),
            parameter(inner, hidden),
        )

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Return (batch, hidden) what the next stage gets."""
        inner = torch.tanh(torch.addmm(self.bias, activation, self.into))
        return torch.addmm(activation, inner, self.out)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a microbatch."""
    return ((output[:, :JUDGED] - target[:, :JUDGED]) ** 2).mean() / 2


def unpipelined(
    stages: list[Stage], inputs: list[torch.Tensor], targets: list[torch.Tensor]
) -> float:
    """Run the model stage after stage and microbatch after microbatch; leave its gradients."""
    total = 0.0
    for activation, target in zip(inputs, targets, strict=True):
        for stage in stages:
            activation = stage(activation)
        loss = loss_of(activation, target) / len(inputs)
        loss.backward()
        total += float(loss.detach())
    return total
