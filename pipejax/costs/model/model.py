"""Models: the shape of a transformer, its parameters, and the files that hold it.

Parameter counts follow Megatron (arXiv:2104.04473, eq. 2), extended to grouped-query and latent
attention, gated MLPs and mixtures of experts.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pipejax.base import file_fields
from pipejax.base.checks import number, resolve_choice, wrong
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.jax_on_demand import register
from pipejax.costs import array_functions as xp
from pipejax.costs.model.workload_fields import UNFUSED, parse_recompute
from pipejax.costs.precision import make_floats
from pipejax.costs.system.system import Number, names_in, read_named


@short_repr
@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are computed from a small vector per token.

    A head of queries and keys has `head_width` (of the model) units without positions, and
    `rope_width` units with positions. All heads share the second part of the keys.

    Attributes:
      kv_rank: width of the vector from which keys and values unfold.
      rope_width: width of the part of a head that carries positions.
      value_width: width of a head of values.
      query_rank: width of the vector from which queries unfold; None if projected directly.

    References:
      DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """

    kv_rank: Number
    rope_width: Number
    value_width: Number
    query_rank: Number | None = None

    def __post_init__(self) -> None:
        make_floats(self, skip=int)


@short_repr
@dataclasses.dataclass(frozen=True)
class MixtureOfExperts:
    """An MLP that consists of many experts; each token is sent to a few of them.

    Attributes:
      experts: routed experts of a layer.
      top_k: experts that each token is routed to.
      expert_hidden: width of one expert.
      shared_experts: experts that process all tokens; their width is counted in routed experts.
      dense_layers: first layers of the model that have a plain MLP instead.
      capacity_factor: tokens of an expert after padding or dropping, over its even share; None if
        no token is dropped.
    """

    experts: Number
    top_k: Number
    expert_hidden: Number
    shared_experts: Number = 0
    dense_layers: Number = 0
    capacity_factor: Number | None = None

    def __post_init__(self) -> None:
        make_floats(self, skip=int)

    @property
    def slots(self) -> Number:
        """Return the number of copies of a token that routed experts compute, padding included."""
        return self.top_k * (1 if self.capacity_factor is None else self.capacity_factor)


for _kind in (LatentAttention, MixtureOfExperts):
    register(_kind)


KINDS = ("dense", "moe")  # kinds of layers
_STATIC = {"static": True}  # not a number: part of the tree, not a leaf


@with_short_repr(
    "name layers hidden heads kv_heads ffn_hidden vocabulary sequence mla moe parameters source"
)
@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A transformer language model: its sizes, as a pytree.

    Attributes:
      name: name of the model.
      source: where the numbers come from.
      layers: L, number of layers.
      hidden: h, hidden size.
      heads: a, number of attention heads.
      kv_heads: number of heads of keys and values.
      ffn_hidden: width of the MLP.
      vocabulary: V, size of the vocabulary; 0 for a model without embedding and head.
      sequence: s, length of a sequence [tokens].
      gated_mlp: whether the MLP has a gate (three matrices instead of two).
      biases: whether linear layers and norms have biases.
      learned_positions: whether positions are embedded with parameters.
      tied_embeddings: whether the head shares the embedding's parameters.
      dropout: whether dropout masks are kept.
      flash_attention: whether attention scores are recomputed instead of kept.
      element_bytes: bytes of a parameter, activation or gradient.
      optimizer_bytes: bytes of optimizer state per parameter.
      whole_heads: whether heads must divide the hidden size; false for published models whose heads
        do not.
      head_width: width of a head; None for hidden / heads. For latent attention, the width of the
        part of queries and keys without positions.
      mla: latent attention; None if heads project keys and values directly.
      moe: experts, None for plain MLPs in all layers.
      mtp_layers: layers after the others that predict further tokens, each with a projection of two
        inputs. These layers share embedding and head. Times leave out the projection (0.3 % of
        DeepSeek-V3's FLOP).
      causal: whether a token attends only to earlier tokens.
      window: tokens, including itself, that a token attends to in layers with a sliding window;
        one of at least `sequence` has no effect.
      windowed_layers: layers with such a window.
      gradient_bytes: bytes of an accumulated gradient; None for element_bytes.
      fused_loss: whether logits turn into their gradient in place, without a softmax in float32.
      unfused: kernels that are not fused and so keep more memory, joined by +: "activation" (SwiGLU
        as function and product), "attention" (its output in two orders), "gather" (inputs of
        products under sequence parallelism, kept as gathered), "logits" (copied to float32),
        "loss" (a softmax and its gradient), "norm" (in float32) and "softmax" (in float32, without
        flash attention). Times do not depend on it.
      norm_biases: whether norms have biases (LayerNorm); as `biases` if None.
      qkv_biases: whether queries, keys and values have biases; as `biases` if None.
      qk_norms: whether queries and keys have a norm, one head wide; latent attention has some.
    """

    name: str = dataclasses.field(metadata=_STATIC)
    source: str = dataclasses.field(metadata=_STATIC)
    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    ffn_hidden: Number
    vocabulary: Number
    sequence: Number
    gated_mlp: bool = dataclasses.field(metadata=_STATIC)
    biases: bool = dataclasses.field(metadata=_STATIC)
    learned_positions: bool = dataclasses.field(metadata=_STATIC)
    tied_embeddings: bool = dataclasses.field(metadata=_STATIC)
    dropout: bool = dataclasses.field(metadata=_STATIC)
    flash_attention: bool = dataclasses.field(metadata=_STATIC)
    element_bytes: Number = 2
    optimizer_bytes: Number = 12
    whole_heads: bool = dataclasses.field(default=True, metadata=_STATIC)
    head_width: Number | None = None
    mla: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    mtp_layers: Number = 0
    window: Number | None = None
    windowed_layers: Number = 0
    causal: bool = dataclasses.field(default=True, metadata=_STATIC)
    gradient_bytes: Number | None = None
    fused_loss: bool = dataclasses.field(default=False, metadata=_STATIC)
    unfused: str = dataclasses.field(default="", metadata=_STATIC)
    norm_biases: bool | None = dataclasses.field(default=None, metadata=_STATIC)
    qkv_biases: bool | None = dataclasses.field(default=None, metadata=_STATIC)
    qk_norms: bool = dataclasses.field(default=False, metadata=_STATIC)

    def __post_init__(self) -> None:
        make_floats(self, skip=int)
        for kernel in unfused_kernels(self):
            resolve_choice(kernel, UNFUSED, "unfused")

    @property
    def accumulated_bytes(self) -> Number:
        """Return the bytes per parameter of an accumulated gradient."""
        return self.element_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def query_hidden(self) -> Number:
        """Return the total width of the queries of all heads."""
        if self.mla is not None:
            return self.heads * (self._head_width + self.mla.rope_width)
        return self.hidden if self.head_width is None else self.heads * self.head_width

    def attended_by(self, share: Number) -> Number:
        """Return the number of tokens that a token attends to, averaged over tokens and layers."""
        # `share` scales the mean s / 2 of a causal mask, only in layers without a window.
        s, window = self.sequence, self.window
        in_full = s / 2 * share if self.causal else s
        if window is None:
            return in_full
        # token k < w attends to k tokens, not to w: w^2 / 2 fewer in all
        in_window = window - window**2 / (2 * s) if self.causal else window
        in_window = xp.where(window < s, in_window, in_full)  # a longer window hides nothing
        return in_full + (in_window - in_full) * self.windowed_layers / self.layers

    @property
    def kv_hidden(self) -> Number:
        """Return the total width of the keys of all heads."""
        return self.query_hidden * self.kv_heads / self.heads

    @property
    def value_hidden(self) -> Number:
        """Return the total width of the values of all heads."""
        return self.kv_hidden if self.mla is None else self.kv_heads * self.mla.value_width

    @property
    def output_hidden(self) -> Number:
        """Return the width of attention's output before its projection."""
        return self.query_hidden if self.mla is None else self.heads * self.mla.value_width

    @property
    def _head_width(self) -> Number:
        return self.hidden / self.heads if self.head_width is None else self.head_width

    @property
    def attention_layers(self) -> list[tuple[Number, Number]]:
        """List (input width, output width) of each linear layer of attention."""
        # Queries, keys and values are one layer, unless attention is latent.
        h, mla, projection = self.hidden, self.mla, (self.output_hidden, self.hidden)
        if mla is None:
            return [(h, self.query_hidden + self.kv_hidden + self.value_hidden), projection]
        unfolded = self.heads * (self._head_width + mla.value_width)
        keys = [(h, mla.kv_rank + mla.rope_width), (mla.kv_rank, unfolded)]
        if mla.query_rank is None:
            return [(h, self.query_hidden), *keys, projection]
        return [(h, mla.query_rank), (mla.query_rank, self.query_hidden), *keys, projection]

    @property
    def attention_matrices(self) -> Number:
        """Count the weights of attention's matrix products in a layer: 4 h^2 in a GPT."""
        return sum(inputs * outputs for inputs, outputs in self.attention_layers)

    @property
    def attention_sides(self) -> Number:
        """Sum input and output widths of attention's linear layers in a layer: 6 h in a GPT."""
        return sum(inputs + outputs for inputs, outputs in self.attention_layers)

    def mlp_sides(self, width: Number) -> Number:
        """Sum the input and output widths of an MLP's linear layers: 10 h in a GPT."""
        return 2 * self.hidden + (3 if self.gated_mlp else 2) * width

    @property
    def shared_sides(self) -> Number:
        """Sum input and output widths of a layer's linear layers except routed experts."""
        if self.moe is None:
            return self.active_sides()
        has_shared = self.moe.shared_experts > 0
        width = self.moe.shared_experts * self.moe.expert_hidden
        return self.attention_sides + has_shared * self.mlp_sides(width)

    def active_sides(self, kind: str = "dense") -> Number:
        """Sum input and output widths of the linear layers that a token passes in a layer."""
        if kind == "dense" or self.moe is None:
            return self.attention_sides + self.mlp_sides(self.ffn_hidden)
        return self.shared_sides + self.moe.top_k * self.mlp_sides(self.moe.expert_hidden)

    def mlp_matrices(self, width: Number) -> Number:
        """Count the weights of the matrix products of an MLP: 8 h^2 in a GPT."""
        return (3 if self.gated_mlp else 2) * self.hidden * width

    @property
    def matrix_parameters(self) -> Number:
        """Count the weights of a dense layer's matrix products: 12 h^2 in a GPT."""
        return self.attention_matrices + self.mlp_matrices(self.ffn_hidden)

    def active_matrices(self, kind: str = "dense") -> Number:
        """Count the weights of the matrix products that a token passes in a layer of a kind."""
        if kind == "dense" or self.moe is None:
            return self.matrix_parameters
        width = (self.moe.top_k + self.moe.shared_experts) * self.moe.expert_hidden
        router = self.hidden * self.moe.experts
        return self.attention_matrices + self.mlp_matrices(width) + router

    @property
    def norm_parameters(self) -> Number:
        """Count the parameters of a norm of the hidden state: 2 h in a GPT."""
        has_biases = self.biases if self.norm_biases is None else self.norm_biases
        return self.hidden * (2 if has_biases else 1)

    def _column_biases(self, mlp_width: Number) -> Number:
        """Count the biases of a layer's products that tensor parallelism splits by outputs."""
        attention = self.query_hidden + self.kv_hidden + self.value_hidden
        has_qkv = self.biases if self.qkv_biases is None else self.qkv_biases
        mlp = mlp_width * (2 if self.gated_mlp else 1)
        return has_qkv * attention + self.biases * mlp

    @property
    def _router(self) -> Number:
        return 0 if self.moe is None else (self.hidden + self.biases) * self.moe.experts

    def _small_parameters(self, mlps: Number, mlp_width: Number) -> Number:
        """Count norm parameters and biases of a layer; `mlps` MLPs have total width `mlp_width`."""
        norms, mla = 2 * self.norm_parameters, self.mla
        if mla is not None:
            norms += mla.kv_rank + (0 if mla.query_rank is None else mla.query_rank)
        elif self.qk_norms:
            norms += 2 * self.query_hidden / self.heads
        return norms + self.biases * (1 + mlps) * self.hidden + self._column_biases(mlp_width)

    def whole_parameters(self, kind: str = "dense") -> Number:
        """Count a layer's parameters that all tensor-parallel ranks replicate: 6 h in a GPT."""
        # These parameters are norms, biases that are added after a sum over ranks, down projections
        # of latent attention and the router, as in Megatron-LM.
        moe = self.moe if kind == "moe" else None
        mlps = 1 if moe is None else 1 * (moe.shared_experts > 0)
        count = self._small_parameters(mlps, 0) - self._column_biases(0)
        if self.mla is not None:
            query_rank = 0 if self.mla.query_rank is None else self.mla.query_rank
            count += self.hidden * (self.mla.kv_rank + self.mla.rope_width + query_rank)
        return count if moe is None else count + self._router

    @property
    def layer_parameters(self) -> Number:
        """Count the parameters of one dense layer: 12 h^2 + 13 h in a GPT."""
        return self.matrix_parameters + self._small_parameters(1, self.ffn_hidden)

    @property
    def expert_parameters(self) -> Number:
        """Count the parameters of all routed experts of one layer."""
        return 0 if self.moe is None else self.moe.experts * self._one_expert

    @property
    def _one_expert(self) -> Number:
        assert self.moe is not None
        width = self.moe.expert_hidden
        biases = self.hidden + width * (2 if self.gated_mlp else 1)
        return self.mlp_matrices(width) + (biases if self.biases else 0)

    @property
    def shared_parameters(self) -> Number:
        """Count the parameters of a layer with experts, except those of the routed experts."""
        if self.moe is None:
            return self.layer_parameters
        width = self.moe.shared_experts * self.moe.expert_hidden
        small = self._small_parameters(1 * (self.moe.shared_experts > 0), width)
        return self.attention_matrices + self.mlp_matrices(width) + self._router + small

    @property
    def layers_by_kind(self) -> dict[str, Number]:
        """Count the layers of each kind; the model has all dense layers first, then "moe"."""
        if self.moe is None:
            return {"dense": self.layers}
        return {"dense": self.moe.dense_layers, "moe": self.layers - self.moe.dense_layers}

    @property
    def last_kind(self) -> str:
        """Return the kind of the last layers and of multi-token prediction layers."""
        return "dense" if self.moe is None else "moe"

    @property
    def position_parameters(self) -> Number:
        """Count the parameters of learned positions, which every accelerator holds whole."""
        positions = self.sequence if self.learned_positions else 0
        return 1.0 * self.hidden * positions * (self.vocabulary > 0)

    @property
    def embedding_parameters(self) -> Number:
        """Count the parameters of the token and position embedding."""
        return self.head_parameters + self.position_parameters

    @property
    def last_norm_parameters(self) -> Number:
        """Count the parameters of the norm before the head, if there is a head."""
        return self.norm_parameters * (self.vocabulary > 0)

    @property
    def head_parameters(self) -> Number:
        """Count the parameters of the output head, whether or not the embedding shares them."""
        return 1.0 * self.hidden * self.vocabulary

    @property
    def mtp_projection(self) -> Number:
        """Count the weights of the projection in a multi-token prediction layer, without norms."""
        return 2 * self.hidden**2

    @property
    def parameters(self) -> Number:
        """Count all parameters of the model; a head tied to the embedding adds none."""
        return self._parameters(self.expert_parameters)

    @property
    def active_parameters(self) -> Number:
        """Count the parameters that a token passes, which include only `top_k` routed experts."""
        return self._parameters(0 if self.moe is None else self.moe.top_k * self._one_expert)

    def _parameters(self, experts: Number) -> Number:
        """Count the model's parameters if a layer's routed experts have `experts` parameters."""
        head = 0 if self.tied_embeddings else self.head_parameters
        layers = self.layers_by_kind
        with_experts = layers.get("moe", 0) * (self.shared_parameters + experts)
        dense = layers["dense"] * self.layer_parameters
        ends = self.embedding_parameters + self.last_norm_parameters + head
        return dense + with_experts + ends


register(Model)


def model_names() -> tuple[str, ...]:
    """Return the names of the models that come with pipejax."""
    return names_in("models")


def load_model(name: str | Path) -> Model:
    """Read a model by name, or from a JSON file.

    Args:
      name: one of `model_names()`, or the path of a file that ends in .json.

    Returns:
      The model.

    Raises:
      ValueError: if the name is unknown, or the file lacks a key or holds a wrong value.
      OSError: if the file cannot be read.

    Example:
      >>> import pipejax as pj
      >>> pj.load_model("llama3-70b").layers
      80
    """
    return read_model(*read_named("models", name, "model"))


def read_model(data: Any, where: str) -> Model:
    """Read a model from the content of its file, and check it."""
    model = file_fields.read_record(Model, FILE, data, where)
    check_shape(model, where)
    return model


_KEYS = {
    "sequence": "sequence_tokens",
    "window": "window_tokens",
    "optimizer_bytes": "optimizer_bytes_per_parameter",
    "element_bytes": "bytes_per_element",
}
_KINDS: Mapping[str, file_fields.FieldKind] = {  # fields that are no texts, flags or counts from 1
    **dict.fromkeys(("vocabulary", "shared_experts", "dense_layers"), file_fields.whole(0)),
    **dict.fromkeys(("mtp_layers", "windowed_layers"), file_fields.whole(0)),
    # 8 and 16 would be bits
    **dict.fromkeys(("element_bytes", "gradient_bytes"), file_fields.whole(1, 4)),
    "capacity_factor": file_fields.NUMBER,
}


def _fields(record: type) -> dict[str, file_fields.FileField]:
    """Return the fields of a model file, or of a record such as `moe` within it."""
    fields = {}
    for field in dataclasses.fields(record):
        # the first type of a union such as Number | None
        value_type: Any = field.type
        if isinstance(value_type, UnionType):
            value_type = get_args(value_type)[0]
        if value_type in (LatentAttention, MixtureOfExperts):
            kind = file_fields.section(_fields(value_type), value_type)
        else:
            kinds = {str: file_fields.TEXT, bool: file_fields.FLAG}
            kind = _KINDS.get(field.name) or kinds.get(value_type, file_fields.whole())
        default = file_fields.NEEDED if field.default is dataclasses.MISSING else field.default
        key = _KEYS.get(field.name, field.name)
        fields[key] = file_fields.FileField(kind, default, target=field.name)
    return fields


FILE = _fields(Model)


def check_sizes(model: Model) -> None:
    """Check the sizes of a model made in Python, like the sizes in a file."""
    may_be_0 = (*_KINDS, "ffn_hidden", "optimizer_bytes")
    for where, record in (("model", model), ("model: mla", model.mla), ("model: moe", model.moe)):
        for field in dataclasses.fields(record) if record else ():
            size: Any = getattr(record, field.name)
            if not (field.metadata or size is None or dataclasses.is_dataclass(size)):
                size = size.tolist() if hasattr(size, "tolist") else size  # NumPy or JAX
                number(size, f"{where}: {field.name}", least=field.name not in may_be_0)
    if model.layers % 1:
        raise wrong("model", f"layers must be whole, got {model.layers}")
    check_shape(model, "model")


def check_shape(model: Model, where: str) -> None:
    """Check that a model's sizes fit together, such as heads that divide the hidden size."""
    heads, kv_heads, hidden = model.heads, model.kv_heads, model.hidden
    if heads % kv_heads:
        raise ValueError(f"{where}: kv_heads must divide heads ({heads}), got {kv_heads}")
    if model.head_width is None and model.whole_heads and hidden % heads:
        raise ValueError(
            f"{where}: heads must divide hidden ({hidden}), got {heads}; "
            '"whole_heads": false or a "head_width" allow it'
        )
    _check_at_most(where, "windowed_layers", model.windowed_layers, "layers", model.layers)
    moe = model.moe
    if moe is None:
        return
    if moe.capacity_factor == 0:
        raise ValueError(f"{where}: moe: capacity_factor must be above 0, got 0")
    _check_at_most(f"{where}: moe", "top_k", moe.top_k, "experts", moe.experts)
    _check_at_most(f"{where}: moe", "dense_layers", moe.dense_layers, "layers", model.layers)


def _check_at_most(where: str, name: str, value: Number, total: str, limit: Number) -> None:
    if value > limit:
        raise ValueError(f"{where}: {name} must be at most {total} ({limit}), got {value}")


def unfused_kernels(model: Model) -> frozenset[str]:
    """Return the names of the kernels that the model runs unfused, such as "softmax"."""
    return frozenset(model.unfused.split("+")) if model.unfused else frozenset()


def recomputed_modules(recompute: str) -> frozenset[str]:
    """Return the parts of a layer that I recomputes."""
    in_layer = parse_recompute(recompute).in_layer
    return frozenset(() if in_layer == "none" else in_layer.split("+"))
