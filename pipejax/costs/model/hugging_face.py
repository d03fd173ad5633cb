"""Conversion of a Hugging Face config.json to the content of a model file.

Unknown architectures are refused, because nobody would notice a wrong guess of a size. The class
in `architectures` comes first, because a model of a known class may have a new `model_type`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, unknown, whole_number
from pipejax.base.data_files import load_json
from pipejax.costs.model.arguments import load_arguments
from pipejax.costs.system.system import read_named

_DATA, _ = read_named("arguments", "hugging-face", "file")


class Architecture(NamedTuple):
    """Keys and defaults that the config.json of an architecture uses."""

    experts: str = ""  # key of the number of routed experts; empty if MLPs are plain
    expert_hidden: str = "moe_intermediate_size"  # key of the width of an expert
    equal_heads: bool = False  # default: keys and values have as many heads as queries
    head_width: int | None = None  # default; None for hidden size / heads
    window: int | None = 0  # default; 0 for no window, None if `use_sliding_window` decides
    window_period: int = 1  # the last of each so many layers has no window
    latent: bool = False  # whether attention is latent
    biases: str = ""  # "qkv", "all", or empty where keys of the file say it
    qkv_alone: bool = False  # whether `attention_bias` leaves out the output projection
    qk_norms: bool = False  # whether queries and keys have a norm, whatever the file says
    tied: bool = False  # default: head and embedding share parameters
    shared_experts: int = 0  # default: experts that process all tokens
    dense_layers: int = 0  # default: first layers without experts
    ffn_hidden: str = "intermediate_size"  # key of the width of a plain MLP
    note: str = ""  # text on what is left out


ARCHITECTURES: Mapping[str, Architecture] = {
    name: Architecture(**record) for name, record in _DATA["architectures"].items()
}


def model_of_config(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Convert a config.json to the content of a model file, and return notes on omissions."""
    data = load_json(path)
    notes = [
        "sequence_tokens is the longest sequence that the model takes: set the length in training",
        "gradient_bytes is 4, as Megatron accumulates by default: set 2 with --grad-reduce-in-bf16",
    ]
    if isinstance(data.get("text_config"), dict):
        notes.append(f"{path}: only text_config is read, without the keys beside it")
        shared = ("architectures", "tie_word_embeddings")
        data = {key: data[key] for key in shared if key in data} | data["text_config"]
    architecture, kind = _architecture(data, str(path))
    config = _Config(data, str(path))
    sizes = {**_DATA["sizes"], "ffn_hidden": kind.ffn_hidden}
    content: dict[str, Any] = {
        "source": f"{Path(path).name} of Hugging Face, architecture {architecture}.",
        **{name: config.integer(key) for name, key in sizes.items()},
    }
    # `null` means as many heads as queries have, and so does a missing key in some architectures
    is_equal = kind.latent or data.get("num_key_value_heads", 0) is None
    if "num_key_value_heads" not in data:
        is_equal = is_equal or kind.equal_heads
    content["kv_heads"] = content["heads"] if is_equal else config.integer("num_key_value_heads")
    biases = kind.biases == "all" or config.flag("mlp_bias")
    content |= {
        "gated_mlp": True,
        "biases": biases,
        "learned_positions": False,
        "tied_embeddings": config.flag("tie_word_embeddings", kind.tied),
        "dropout": bool(data.get("attention_dropout")),
        "flash_attention": True,
        "gradient_bytes": 4,
    }
    qkv_biases = config.flag("attention_bias") or kind.biases in ("qkv", "all")
    content |= {"norm_biases": False} if biases else {}
    content |= {"qkv_biases": qkv_biases} if qkv_biases != biases else {}
    if qkv_biases and not biases and not (kind.qkv_alone or kind.biases == "qkv"):
        notes.append("attention_bias: the bias of attention's output projection is left out")
    has_norms = config.flag("use_qk_norm", kind.qk_norms)
    if has_norms and architecture != "llama4_text":  # its norms have no parameters
        content["qk_norms"] = True
    content |= _heads(config, kind, content) | _window(config, kind, content)
    if kind.experts:
        content["moe"] = _experts(config, kind)
    if count := data.get("num_nextn_predict_layers"):
        notes.append(f"{count} layers for further tokens are left out: mtp_layers adds them")
    if kind.note:
        notes.append(kind.note)
    texts = {key: str(value) for key, value in data.items()}
    return content, notes + load_arguments("hugging-face").notes(texts, str(path))


def _architecture(data: Mapping[str, Any], path: str) -> tuple[str, Architecture]:
    """Find a config.json's architecture by its class name or its model type."""
    # Qwen2MoeForCausalLM -> Qwen2Moe -> qwen2_moe
    classes = [re.sub("For[A-Z].*", "", str(text)) for text in data.get("architectures") or ()]
    names = [re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", text).lower() for text in classes]
    if "model_type" in data:
        names.append(str(data["model_type"]))
    for name in (*names, *(f"{name}_text" for name in names)):
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    if not names:
        raise ValueError(f"{path}: key model_type is missing")
    raise ValueError(f"{path}: {unknown('architecture (model_type)', names[-1], ARCHITECTURES)}")


class _Config(NamedTuple):
    """Content of a config.json, whose whole numbers are checked when read."""

    data: Mapping[str, Any]
    path: str

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a switch; `null` is false."""
        value = self.data.get(key, default)
        if value not in (True, False, None):
            raise ValueError(f"{self.path}: {key} must be true or false, got {value!r}")
        return bool(value)

    def integer(self, key: str, minimum: int = 1, default: int | None = None) -> int:
        """Return a key's whole number; a default replaces a missing one or `null`."""
        if self.data.get(key) is None and default is not None:
            return default
        if self.data.get(key) is None:
            raise ValueError(f"{self.path}: key {key} is missing")
        value = self.data[key]
        return whole_number(value, f"{self.path}: {key}", minimum=minimum, maximum=MAX_COUNT)


def _heads(config: _Config, kind: Architecture, content: Mapping[str, Any]) -> dict[str, Any]:
    """Read the width of heads, unless it is hidden / heads, and the ranks of latent attention."""
    if kind.latent:
        latent = {name: config.integer(key) for name, key in _DATA["latent"].items()}
        if rank := config.integer("q_lora_rank", default=0):
            latent["query_rank"] = rank
        return {"head_width": config.integer("qk_nope_head_dim"), "mla": latent}
    width = config.data.get("head_dim", kind.head_width)
    if width is None or width * content["heads"] == content["hidden"]:
        return {}
    return {"head_width": whole_number(width, f"{config.path}: head_dim", maximum=MAX_COUNT)}


def _window(config: _Config, kind: Architecture, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sliding window's tokens and its number of layers; {} if it has no effect."""
    data, layers = config.data, content["layers"]
    types = data.get("layer_types")
    if types is not None:
        allowed = ("full_attention", "sliding_attention", "chunked_attention")
        if invalid := [layer_type for layer_type in types if layer_type not in allowed]:
            raise ValueError(
                f"{config.path}: layer_types must be {', '.join(allowed)}, got {invalid[0]!r}"
            )
        if len(types) != layers:
            raise ValueError(f"{config.path}: layer_types must be {layers}, got {len(types)}")
    elif not config.flag("use_sliding_window", kind.window is not None):  # None: off by default
        return {}
    window = data.get("sliding_window", kind.window or None)
    if window is None or (isinstance(window, int) and window >= content["sequence_tokens"]):
        return {}
    if types is not None:
        windowed = types.count("sliding_attention")
    elif "max_window_layers" in data:  # Qwen: the layers from this one on have the window
        windowed = max(0, layers - config.integer("max_window_layers", minimum=0))
    else:
        older_period = config.integer("_sliding_window_pattern", default=kind.window_period)
        period = config.integer("sliding_window_pattern", default=older_period)
        windowed = layers - layers // period if period > 1 else layers  # of 26 with period 6: 22
    tokens = whole_number(window, f"{config.path}: sliding_window", maximum=MAX_COUNT)
    return {"window_tokens": tokens, "windowed_layers": windowed} if windowed else {}


def _experts(config: _Config, kind: Architecture) -> dict[str, int]:
    """Return the sizes of a mixture of experts as a model file holds them."""
    # {key: the value with which all layers after the first dense ones have experts}
    for key, expected in _DATA["equal_layers"].items():
        value = config.data.get(key, expected)
        if value != expected:
            raise ValueError(
                f"{config.path}: {key} must be {expected}, got {value!r}: dense layers after "
                "layers with experts are not supported"
            )
    experts = {
        "experts": config.integer(kind.experts),
        "top_k": config.integer("num_experts_per_tok"),
        "expert_hidden": config.integer(kind.expert_hidden),
    }
    default = 0 if "n_shared_experts" in config.data else kind.shared_experts  # `null` means 0
    shared = config.integer("n_shared_experts", 0, default)
    if "shared_expert_intermediate_size" in config.data:
        width = config.integer("shared_expert_intermediate_size", minimum=0)
        shared, remainder = divmod(width, experts["expert_hidden"])
        if remainder:
            raise ValueError(
                f"{config.path}: shared_expert_intermediate_size must be a multiple of "
                f"{kind.expert_hidden}, {experts['expert_hidden']}, got {width}"
            )
    dense = config.integer("first_k_dense_replace", 0, kind.dense_layers)
    return experts | {"shared_experts": shared, "dense_layers": dense}
