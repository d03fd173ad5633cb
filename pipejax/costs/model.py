"""Models: FLOP, bytes, parameters and activations of a transformer, from published formulas.

b is the microbatch size in sequences, s the sequence length, h the hidden size, a the number of
attention heads, t the tensor-parallel degree. FLOP of F, I and W per layer are those of the
zero-bubble paper (arXiv:2401.10241, Table 1), activations those of Korthikanti et al.
(arXiv:2205.05198, Table 2), parameters those of Megatron (arXiv:2104.04473, eq. 2), all written
so that grouped-query attention and gated MLPs fit in.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pipejax.base.checks import MAX_COUNT, known_as, whole_number
from pipejax.base.short_repr import short_repr
from pipejax.base.units import check_keys, load_json
from pipejax.costs.precision import as_float, floats_in
from pipejax.costs.system import Number, _names, data_file

RECOMPUTE = ("none", "selective", "full")
_STATIC = {"static": True}  # not a number: part of the tree, not a leaf


@short_repr
@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A transformer language model, a pytree of its numbers.

    Attributes:
      name: name.
      source: where the numbers come from.
      layers: L.
      hidden: h.
      heads: a.
      kv_heads: heads of keys and values.
      ffn_hidden: width of the MLP.
      vocabulary: V; 0 for a model without embedding and head.
      sequence: s [tokens].
      gated_mlp: whether the MLP has a gate (three matrices instead of two).
      biases: whether linear layers and norms have biases.
      learned_positions: whether positions are embedded with parameters.
      tied_embeddings: whether the head shares the embedding's parameters.
      dropout: whether dropout masks are kept.
      flash_attention: whether attention scores are recomputed instead of kept.
      element_bytes: bytes of a parameter, activation or gradient.
      optimizer_bytes: bytes of optimizer state per parameter.
      whole_heads: whether a head has a whole number of the hidden units; false where only products
        of heads and hidden size are meant, as in a published model whose heads do not divide.

    Example:
      >>> import pipejax as pj
      >>> gpt = pj.load_model("gpt-22b")
      >>> gpt.layers, gpt.hidden, round(gpt.parameters / 1e9, 1)
      (48, 6144, 22.1)
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

    def __post_init__(self) -> None:
        """Take arrays and tracers as floats; Python's whole numbers multiply without limit."""
        floats_in(self, but=int)

    @property
    def kv_hidden(self) -> Number:
        """Width of keys and of values."""
        return self.hidden * self.kv_heads / self.heads

    @property
    def matrix_parameters(self) -> Number:
        """Parameters of one layer that take part in matrix products: 12 h^2 in a GPT."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_hidden
        return attention + (3 if self.gated_mlp else 2) * self.hidden * self.ffn_hidden

    @property
    def layer_parameters(self) -> Number:
        """Parameters of one layer: 12 h^2 + 13 h in a GPT."""
        norms = 2 * self.hidden * (2 if self.biases else 1)
        mlp = self.ffn_hidden * (2 if self.gated_mlp else 1) + self.hidden
        biases = (2 * self.hidden + 2 * self.kv_hidden + mlp) if self.biases else 0
        return self.matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> Number:
        """Parameters of the token and position embedding on the first stage."""
        positions = self.sequence if self.learned_positions else 0
        return 1.0 * self.hidden * (self.vocabulary + positions) * (self.vocabulary > 0)

    @property
    def head_parameters(self) -> Number:
        """Parameters of the output head, counted also where it is tied to the embedding."""
        return 1.0 * self.hidden * self.vocabulary

    @property
    def parameters(self) -> Number:
        """All parameters (Megatron eq. 2, without the final norm): a tied head counts once.

        Example:
          >>> import pipejax as pj
          >>> round(pj.load_model("gpt3-175b").parameters / 1e9, 1)
          174.6
        """
        head = 0 if self.tied_embeddings else self.head_parameters
        return self.layers * self.layer_parameters + self.embedding_parameters + head


jax.tree_util.register_dataclass(Model)


class LayerSplit(NamedTuple):
    """How the accelerators of one worker split a layer.

    Attributes:
      tensor_parallel: t, accelerators that make up one worker.
      sequence_parallel: whether they split norms, dropout and messages too.
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = False

    @property
    def shared_by(self) -> int:
        """Accelerators that split what tensor parallelism alone leaves whole."""
        return self.tensor_parallel if self.sequence_parallel else 1


WHOLE = LayerSplit()


class PhaseFlop(NamedTuple):
    """FLOP of each phase.

    Attributes:
      forward: F.
      input_grad: I, recomputation included.
      weight_grad: W.
    """

    forward: Number
    input_grad: Number
    weight_grad: Number


def _tokens(model: Model, microbatch_size: Number) -> Number:
    """Tokens of a microbatch, a float: what is counted by it is beyond the integers of a trace."""
    return as_float(microbatch_size) * model.sequence


def layer_flop(model: Model, microbatch_size: Number, recompute: str = "none") -> PhaseFlop:
    """FLOP of one layer: F = bsh(24h + 4s), I = bsh(24h + 8s), W = 24bsh^2 in a GPT.

    References:
      Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1.
    """
    recompute = check_recompute(recompute)
    tokens = _tokens(model, microbatch_size)
    linear = 2 * tokens * model.matrix_parameters
    scores = 4 * tokens * model.sequence * model.hidden
    in_attention = scores / 2 if model.flash_attention else 0.0
    selective = in_attention if model.flash_attention else scores
    again = {"none": in_attention, "selective": selective, "full": in_attention + linear + scores}[
        recompute
    ]
    return PhaseFlop(linear + scores, linear + 2 * scores + again, linear)


def head_flop(model: Model, microbatch_size: Number) -> PhaseFlop:
    """FLOP of the output head: 2bshV in each phase."""
    each = 2 * _tokens(model, microbatch_size) * model.head_parameters
    return PhaseFlop(each, each, each)


def step_flop(model: Model, minibatch: Number, recompute: str = "none") -> Number:
    """FLOP of a whole step: forward, backward and recomputation."""
    layers = model.layers * sum(layer_flop(model, minibatch, recompute))
    return layers + sum(head_flop(model, minibatch))


def layer_activation_bytes(
    model: Model, microbatch_size: Number, split: LayerSplit = WHOLE, recompute: str = "none"
) -> Number:
    """Bytes that one microbatch leaves on one layer until its backward.

    sbh(10 + 24/t + 5as/(ht)) in a GPT; under sequence parallelism the 10 is divided by t too;
    with selective recomputation the last term is gone; with full recomputation only the input
    stays, 2sbh.

    References:
      Korthikanti et al. (arXiv:2205.05198), Table 2.
    """
    recompute = check_recompute(recompute)
    tokens = _tokens(model, microbatch_size)
    if recompute == "full":
        return model.element_bytes * tokens * model.hidden / split.shared_by
    e, masks = model.element_bytes, (2 if model.dropout else 0)
    keeps_scores = recompute == "none" and not model.flash_attention
    per_score = (2 * e + 1 if model.dropout else e) if keeps_scores else 0
    scores = per_score * model.heads * tokens * model.sequence
    needed = layer_weight_grad_bytes(model, microbatch_size, split)
    return needed + masks * tokens * model.hidden / split.shared_by + scores / split.tensor_parallel


def layer_weight_grad_bytes(
    model: Model, microbatch_size: Number, split: LayerSplit = WHOLE
) -> Number:
    """Bytes that W of one layer needs after I: both inputs of its weight GEMMs, 32sbh in a GPT.

    These are the layer's inputs of the four products (queries, keys and values; projection; both
    of the MLP), 14sbh, and the gradients of their outputs, 18sbh, which I leaves where norms,
    attention and activation function had theirs: only scores and dropout masks are gone after I.

    References:
      Zero Bubble Pipeline Parallelism (arXiv:2401.10241), Table 1: M_W.
    """
    e, h, tokens = model.element_bytes, model.hidden, _tokens(model, microbatch_size)
    # whole: inputs of the first product of attention and MLP, gradients of the second one's output
    whole = 4 * h
    # split: queries, keys, values and the projection's input; all of the MLP in between
    parts = 2 * h + 2 * model.kv_hidden + (3 if model.gated_mlp else 2) * model.ffn_hidden
    return e * tokens * (whole / split.shared_by + parts / split.tensor_parallel)


def edge_activation_bytes(
    model: Model, microbatch_size: Number, split: LayerSplit = WHOLE
) -> tuple[Number, Number]:
    """Bytes that one microbatch leaves on the first stage's embedding and last stage's head.

    References:
      Korthikanti et al. (arXiv:2205.05198), section 4.3.
    """
    tokens = _tokens(model, microbatch_size) * (model.vocabulary > 0)
    mask = tokens * model.hidden / split.shared_by if model.dropout else 0.0
    inputs = tokens * 2 * model.element_bytes * model.hidden / split.shared_by
    return mask, inputs + tokens * 4 * model.vocabulary / split.tensor_parallel


def boundary_bytes(model: Model, microbatch_size: Number, split: LayerSplit = WHOLE) -> Number:
    """Bytes that cross a stage boundary: bsh elements, by t under sequence parallelism."""
    volume = _tokens(model, microbatch_size) * model.hidden * model.element_bytes
    return volume / split.shared_by


def model_names() -> tuple[str, ...]:
    """Return the names of the models that come with pipejax."""
    return _names("models")


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
    path = data_file("models", name, "model")
    data = load_json(path)
    fields = {field.name: field for field in dataclasses.fields(Model)}
    keys = {_KEYS.get(name, name): name for name in fields}
    where = str(path) if str(name).endswith(".json") else path.name
    check_keys(data, dict.fromkeys(keys, ""), where)
    values: dict[str, Any] = {}
    for key, field in keys.items():
        if key not in data:
            if fields[field].default is dataclasses.MISSING:
                raise ValueError(f"{where}: {key} is missing")
            continue
        value, kind = data[key], fields[field].type
        if kind in (str, bool):
            if not isinstance(value, kind):
                wanted = "a text" if kind is str else "true or false"
                raise ValueError(f"{where}: {key} must be {wanted}, got {value!r}")
            values[field] = value
            continue
        least = 0 if field == "vocabulary" else 1
        values[field] = whole_number(value, f"{where}: {key}", least=least, most=MAX_COUNT)
    model = Model(**values)
    check_heads(model, where)
    return model


_KEYS = {
    "sequence": "sequence_tokens",
    "optimizer_bytes": "optimizer_bytes_per_parameter",
    "element_bytes": "bytes_per_element",
}


def check_heads(model: Model, where: str) -> None:
    """Check that heads share the hidden units, and heads of keys and values the others."""
    for name, whole, parts, given in (
        ("kv_heads", "heads", model.kv_heads, model.heads),
        ("heads", "hidden", model.heads, model.hidden),
    ):
        if given % parts and (name == "kv_heads" or model.whole_heads):
            more = '; "whole_heads": false allows it' if name == "heads" else ""
            raise ValueError(f"{where}: {name} must divide {whole}, {given}, got {parts}{more}")


def check_recompute(recompute: str) -> str:
    """Return the recomputation mode that a name means."""
    found: str = known_as(recompute, RECOMPUTE, "recompute")
    return found
