"""A model's file from the config.json that Hugging Face publishes with weights.

Each architecture names its sizes and what it takes where a key is left out; one that is not here is
refused by name, because a size that is guessed is wrong in silence.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.checks import MAX_COUNT, unknown, whole_number
from pipejax.base.data_files import load_json

_SIZES = {  # keys of a model's file: those of config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_hidden": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence_tokens": "max_position_embeddings",
}
_LATENT = {
    "kv_rank": "kv_lora_rank",
    "rope_width": "qk_rope_head_dim",
    "value_width": "v_head_dim",
}


class Architecture(NamedTuple):
    """What an architecture's config.json holds.

    Attributes:
      experts: key of the number of routed experts; empty where MLPs are plain.
      expert_hidden: key of the width of one of them.
      head_width: width of a head where the file does not say it; None where heads share the hidden
        units.
      window: sliding window where the file does not say one; 0 for none.
      latent: whether attention is latent.
      biased: whether queries, keys and values have biases, whatever the file says.
    """

    experts: str = ""
    expert_hidden: str = "moe_intermediate_size"
    head_width: int | None = None
    window: int = 0
    latent: bool = False
    biased: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(window=4096),
    "mixtral": Architecture("num_local_experts", "intermediate_size"),
    "qwen2": Architecture(biased=True),
    "qwen2_moe": Architecture("num_experts", biased=True),
    "qwen3": Architecture(head_width=128),
    "qwen3_moe": Architecture("num_experts", head_width=128),
    "deepseek_v2": Architecture("n_routed_experts", latent=True),
    "deepseek_v3": Architecture("n_routed_experts", latent=True),
}
_OTHERWISE = {  # what has to hold of keys that say how layers differ
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
}


def model_of_config(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Read a config.json into the content of a model's file.

    Args:
      path: the file.

    Returns:
      The content, without a name, and what is not in the file or not carried over, in words.

    Raises:
      ValueError: if the architecture is unknown, a key is missing or has a value that a model's
        file cannot say.
      OSError: if the file cannot be read.
    """
    data = load_json(Path(path))
    if "model_type" not in data:
        raise ValueError(f"{path}: model_type is missing")
    named = str(data["model_type"])
    if named not in ARCHITECTURES:
        raise ValueError(f"{path}: {unknown('architecture (model_type)', named, ARCHITECTURES)}")
    kind, given = ARCHITECTURES[named], _Config(data, str(path))
    notes = [
        "sequence_tokens is the longest sequence that it takes: set those that are trained",
        "gradient_bytes is 4, as Megatron accumulates by default: set 2 with --grad-reduce-in-bf16",
    ]
    content: dict[str, Any] = {
        "source": f"{Path(path).name} of Hugging Face, model_type {named}.",
        **{name: given.whole(key) for name, key in _SIZES.items()},
    }
    content["kv_heads"] = content["heads"]
    if not kind.latent and data.get("num_key_value_heads") is not None:
        content["kv_heads"] = given.whole("num_key_value_heads")
    biased = {bool(data.get(key, kind.biased)) for key in ("attention_bias", "mlp_bias")}
    if kind.biased or True in biased:
        notes.append("biases of some layers are left out")
    content |= {
        "gated_mlp": True,
        "biases": False,
        "learned_positions": False,
        "tied_embeddings": bool(data.get("tie_word_embeddings", False)),
        "dropout": bool(data.get("attention_dropout")),
        "flash_attention": True,
        "gradient_bytes": 4,
    }
    content |= _heads(given, kind, content) | _window(given, kind, content)
    if kind.experts:
        content["moe"] = _experts(given, kind)
    if data.get("num_nextn_predict_layers"):
        further = data["num_nextn_predict_layers"]
        notes.append(f"{further} layers for further tokens are left out: mtp_layers adds them")
    return content, notes


class _Config(NamedTuple):
    """A config.json, and how its values are read."""

    data: Mapping[str, Any]
    path: str

    def whole(self, key: str, least: int = 1) -> int:
        """Read a whole number that has to be there."""
        if self.data.get(key) is None:
            raise ValueError(f"{self.path}: {key} is missing")
        value = self.data[key]
        return whole_number(value, f"{self.path}: {key}", least=least, most=MAX_COUNT)


def _heads(given: _Config, kind: Architecture, content: Mapping[str, Any]) -> dict[str, Any]:
    """Width of a head, and what latent attention unfolds from."""
    if kind.latent:
        latent = {name: given.whole(key) for name, key in _LATENT.items()}
        if given.data.get("q_lora_rank") is not None:
            latent["query_rank"] = given.whole("q_lora_rank")
        return {"head_width": given.whole("qk_nope_head_dim"), "mla": latent}
    width = given.data.get("head_dim", kind.head_width)
    if width is None or width * content["heads"] == content["hidden"]:
        return {}
    return {"head_width": whole_number(width, f"{given.path}: head_dim", most=MAX_COUNT)}


def _window(given: _Config, kind: Architecture, content: Mapping[str, Any]) -> dict[str, Any]:
    """A sliding window that is used and shorter than a sequence, in all layers."""
    data = given.data
    if data.get("use_sliding_window", kind.window > 0) is False:
        return {}
    if kind.window == 0 and "use_sliding_window" not in data:
        return {}
    window = data.get("sliding_window", kind.window or None)
    if window is None or (isinstance(window, int) and window >= content["sequence_tokens"]):
        return {}
    layers = content["layers"]
    if "max_window_layers" in data:  # of Qwen: from this layer on
        layers = max(0, layers - given.whole("max_window_layers", least=0))
    tokens = whole_number(window, f"{given.path}: sliding_window", most=MAX_COUNT)
    return {"window_tokens": tokens, "windowed_layers": layers}


def _experts(given: _Config, kind: Architecture) -> dict[str, int]:
    """A mixture of experts, the same in all layers but the first."""
    for key, wanted in _OTHERWISE.items():
        value = given.data.get(key, wanted)
        if value != wanted:
            raise ValueError(
                f"{given.path}: {key} must be {wanted}: layers with and without experts in turn "
                f"cannot be described, got {value!r}"
            )
    found = {
        "experts": given.whole(kind.experts),
        "top_k": given.whole("num_experts_per_tok"),
        "expert_hidden": given.whole(kind.expert_hidden),
    }
    shared = int(given.data.get("n_shared_experts") or 0)
    if "shared_expert_intermediate_size" in given.data:
        width = given.whole("shared_expert_intermediate_size", least=0)
        shared, rest = divmod(width, found["expert_hidden"])
        if rest:
            raise ValueError(
                f"{given.path}: shared_expert_intermediate_size must be a multiple of "
                f"{kind.expert_hidden}, {found['expert_hidden']}, got {width}"
            )
    dense = int(given.data.get("first_k_dense_replace") or 0)
    return found | {"shared_experts": shared, "dense_layers": dense}
