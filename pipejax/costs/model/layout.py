"""Layout of a job on accelerators: degrees of parallelism, and the groups that they form.

Ranks that differ only in the first axis of the rank order are neighbours. Experts are spread over
the accelerators that hold one stage; each expert is split over neighbours. All functions are
arithmetic on numbers, so that many layouts are priced as one batch.
"""

import dataclasses
from typing import NamedTuple

from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.display import short_repr
from pipejax.base.jax_on_demand import register
from pipejax.costs import array_functions as xp
from pipejax.costs.array_functions import Computed
from pipejax.costs.model.workload_fields import PRECISIONS, RANK_ORDERS
from pipejax.costs.precision import FloatFields
from pipejax.costs.system.system import Number

Workers = Int[NumpyArray, "..."] | Float[Computed, "..."]


class Group(NamedTuple):
    """Number of accelerators in a collective, and how many of them share a node."""

    size: Number  # number of accelerators
    inside: Number  # number of these accelerators in one node


class RankGroup(NamedTuple):
    """A group of ranks: all combinations of positions along several strided ranges."""

    extents: tuple[Number, ...]  # members along each range
    strides: tuple[Number, ...]  # distance between neighbours along each range [ranks]

    def count_ranks(self, gpus_per_node: Number) -> Group:
        """Count the accelerators of the group, and those of the group on one node."""
        # 4 ranks at stride 2 (ranks 0 2 4 6) on nodes of 4: 4 // 2 = 2 of them share a node
        size: Number = 1.0
        inside: Number = 1.0
        for extent, stride in zip(self.extents, self.strides, strict=True):
            size = size * extent
            inside = inside * xp.clip(xp.floor(gpus_per_node / stride), 1.0, extent)
        return Group(size, inside)


@short_repr
@dataclasses.dataclass(frozen=True)
class Layout(FloatFields):
    """Degrees of parallelism, microbatch size and precision of a job's stages."""

    tensor: Number = 1.0  # t, accelerators that split every product of a layer
    context: Number = 1.0  # c, accelerators that split the sequence
    expert: Number = 1.0  # e, accelerators (or groups that split each expert) for the experts
    expert_tensor: Number = 1.0  # accelerators that split each expert
    data: Number = 1.0  # d, replicas
    pipeline: Number = 1.0  # P, workers of one pipeline
    sequence_parallel: Number = 0.0  # 1: t accelerators split norms, dropout and messages
    scatter_gather: Number = 0.0  # 1: t accelerators send parts of a message; receivers gather
    zero: Number = 0.0  # replicas split 0 nothing, 1 optimizer state, 2 gradients, 3 weights too
    microbatch_size: Number = 1.0  # b [sequences]
    overlap: Number = 0.0  # share of gradient and weight exchanges that runs beside compute
    tensor_overlap: Number = 0.0  # share of tensor-parallel exchanges beside compute
    expert_overlap: Number = 0.0  # share of expert exchanges beside compute
    dispatch_per_node: Number = 0.0  # 1: one copy of a token to a node, 0: to each expert
    # 1: consecutive tokens on each context rank; under a causal mask the last rank has most pairs
    contiguous_context: Number = 0.0
    graphs: Number = 0.0  # share of the kernels that start as graphs, not one by one
    optimizer_offload: Number = 0.0  # share of the optimizer's state and update on the host
    # layers that share a checkpoint where whole layers are recomputed
    recompute_group: Number = 1.0
    # precisions of products, by name
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata={"static": True})
    attention_precision: str = dataclasses.field(default=PRECISIONS[0], metadata={"static": True})
    head_precision: str = dataclasses.field(default=PRECISIONS[0], metadata={"static": True})
    # first and last layers whose products stay in 16 bits
    wide_layers: tuple[int, int] = dataclasses.field(default=(0, 0), metadata={"static": True})
    rank_order: str = dataclasses.field(default=RANK_ORDERS[0], metadata={"static": True})
    # whether base weights have no gradient; with adapters they never have one
    frozen: bool = dataclasses.field(default=False, metadata={"static": True})
    lora_rank: int = dataclasses.field(default=0, metadata={"static": True})  # r of adapters, or 0
    # whether W recomputes activations like I
    recompute_again: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def trains_base(self) -> bool:
        """Return whether the model's own weights have gradients."""
        return not (self.frozen or self.lora_rank)

    @property
    def trains_layers(self) -> bool:
        """Return whether the weights of layers, or adapters beside them, have gradients."""
        return self.trains_base or self.lora_rank > 0

    @property
    def shared_by(self) -> Number:
        """Count the accelerators that split activations outside matrix products: t or 1."""
        return 1 + (self.tensor - 1) * self.sequence_parallel

    @property
    def replicas(self) -> Number:
        """Count the accelerators that hold the same part of the dense weights: c d."""
        return self.context * self.data

    @property
    def expert_replicas(self) -> Number:
        """Count the accelerators that hold the same part of the same experts: t c d / (e etp)."""
        return self.tensor * self.replicas / (self.expert * self.expert_tensor)

    @property
    def expert_gather(self) -> Number:
        """Count the accelerators that share an expert and gather different tokens for it."""
        copies = self.tensor / self.shared_by  # t without sequence parallelism, else 1
        return self.expert_tensor / xp.minimum(self.expert_tensor, copies)

    @property
    def data_stride(self) -> Number:
        """Return the distance between neighbouring data-parallel replicas [ranks]."""
        replica_size = self.tensor * self.context
        return replica_size * (1 if self.rank_order == RANK_ORDERS[0] else self.pipeline)

    @property
    def layer_groups(self) -> dict[str, RankGroup]:
        """Return {name: group of ranks} for products, sequences, all experts, and one expert."""
        return {
            "tensor": RankGroup((self.tensor,), (1.0,)),
            "context": RankGroup((self.context,), (self.tensor,)),
            "expert": self._expert_ranks(self.expert_tensor, self.expert),
            "expert_tensor": self._expert_ranks(1.0, self.expert_tensor),
        }

    @property
    def replica_groups(self) -> tuple[RankGroup, RankGroup]:
        """Return two groups of ranks: with equal dense weights, and with equal experts."""
        dense = RankGroup((self.context, self.data), (self.tensor, self.data_stride))
        stride = self.expert_tensor * self.expert
        return dense, self._expert_ranks(stride, self.expert_replicas)

    def _expert_ranks(self, stride: Number, count: Number) -> RankGroup:
        """Return a group of `count` ranks of a stage, `stride` apart, replica after replica."""
        # Replicas of 4 ranks lie `data_stride` apart. Stride 2, count 4: 2 members in each of 2
        # replicas. Stride 8, count 2: one member in every second replica.
        replica_size = self.tensor * self.context
        inner_stride = xp.minimum(stride, replica_size)
        inner_end = xp.minimum(stride * count, replica_size)
        extents = (inner_end / inner_stride, count * inner_stride / inner_end)
        return RankGroup(extents, (inner_stride, self.data_stride * stride / inner_stride))

    def is_near(
        self, first: Workers | float, second: Workers | float, gpus_per_node: Number
    ) -> Bool[Computed, "..."]:
        """Return whether the first accelerators of two workers share a node."""
        stride = self.tensor * self.context
        if self.rank_order == RANK_ORDERS[0]:  # pipelines vary slowest
            stride = stride * self.data
        nodes = (xp.floor(worker * stride / gpus_per_node) for worker in (first, second))
        return xp.asarray(xp.equal(*nodes))


register(Layout)
