"""What stands in place of a GPT's attention or MLP: latent attention, mixtures of experts."""

import dataclasses

import jax

from pipejax.base.display import short_repr
from pipejax.costs.precision import floats_in
from pipejax.costs.system import Number


@short_repr
@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values unfold from one small vector per token.

    A head of queries and keys has `head_width` units of the model without positions and
    `rope_width` with; the latter part of the keys is one for all heads.

    Attributes:
      kv_rank: width of what keys and values unfold from.
      rope_width: width of a head's part that carries positions.
      value_width: width of a head of values.
      query_rank: width of what queries unfold from; None where they are projected at once.

    Example:
      >>> import pipejax as pj
      >>> pj.load_model("deepseek-v3").mla.kv_rank
      512

    References:
      DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """

    kv_rank: Number
    rope_width: Number
    value_width: Number
    query_rank: Number | None = None

    def __post_init__(self) -> None:
        """Take arrays and tracers as floats."""
        floats_in(self, but=int)


@short_repr
@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """An MLP of many experts, of which each token meets a few.

    Attributes:
      experts: routed experts of a layer.
      top_k: experts that each token is routed to.
      expert_hidden: width of one expert.
      shared_experts: experts that all tokens meet, as wide in sum as so many routed ones.
      dense_layers: first layers of the model that have a plain MLP instead.
      capacity_factor: tokens that experts are padded or cut to, over their even share; None where
        no token is dropped.

    Example:
      >>> import pipejax as pj
      >>> pj.load_model("mixtral-8x7b").moe.top_k
      2
    """

    experts: Number
    top_k: Number
    expert_hidden: Number
    shared_experts: Number = 0
    dense_layers: Number = 0
    capacity_factor: Number | None = None

    def __post_init__(self) -> None:
        """Take arrays and tracers as floats."""
        floats_in(self, but=int)

    @property
    def slots(self) -> Number:
        """Tokens that routed experts compute for each token of the microbatch."""
        return self.top_k * (1 if self.capacity_factor is None else self.capacity_factor)


for _kind in (LatentAttention, MixtureOfExperts):
    jax.tree_util.register_dataclass(_kind)
