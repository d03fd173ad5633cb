"""Models from config.json files, against models whose parameters are published."""

import dataclasses
import json

import pytest

import pipejax as pj
from pipejax.costs.model.hugging_face import ARCHITECTURES, model_of_config

COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
COMMON = (*COMMON, "vocab_size", "max_position_embeddings")


def sized(model_type, *sizes, **more):
    return {"model_type": model_type, **dict(zip(COMMON, sizes, strict=True)), **more}


LLAMA = sized("llama", 80, 8192, 64, 28672, 128256, 8192, num_key_value_heads=8)
MIXTRAL = sized(
    *("mixtral", 32, 4096, 32, 14336, 32000, 32768),
    **{"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    sliding_window=None,
)
QWEN3 = sized(
    *("qwen3_moe", 48, 2048, 32, 6144, 151936, 40960),
    **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "mlp_only_layers": [], "decoder_sparse_step": 1},
)
DEEPSEEK = sized(
    *("deepseek_v3", 61, 7168, 128, 18432, 129280, 163840),
    **{"num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
)
KNOWN = {
    "llama3-70b": LLAMA,
    "mixtral-8x7b": MIXTRAL,
    "qwen3-30b-a3b": QWEN3,
    "deepseek-v3": DEEPSEEK,
}


def written(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_a_config_gives_the_model_that_comes_with_pipejax(name, tmp_path, answer):
    config = written(tmp_path / "config.json", KNOWN[name])
    out = tmp_path / "ours.json"
    made = answer("init", "model", "--from", config, "--out", out)
    assert made["notes"][0].startswith("sequence_tokens is the longest")
    ours, theirs = pj.load_model(out), pj.load_model(name)
    assert ours.sequence == KNOWN[name]["max_position_embeddings"]
    alike = {"name": theirs.name, "source": theirs.source, "sequence": theirs.sequence}
    assert "gradient_bytes is 4" in made["notes"][1]
    alike["gradient_bytes"] = None  # of those that come with pipejax, 2
    assert ours.gradient_bytes == 4
    assert dataclasses.replace(ours, **alike) == theirs
    assert ours.source == f"config.json of Hugging Face, model_type {KNOWN[name]['model_type']}."


# billions of parameters, with the embedding, as they are published
SMALL = {
    "qwen2": (sized("qwen2", 28, 3584, 28, 18944, 152064, 131072, num_key_value_heads=4), 7.6),
    "qwen3": (sized("qwen3", 36, 4096, 32, 12288, 151936, 40960, num_key_value_heads=8), 8.2),
    "mistral": (sized("mistral", 32, 4096, 32, 14336, 32000, 32768, num_key_value_heads=8), 7.2),
}


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_those_published(name, tmp_path):
    config, billions = SMALL[name]
    content, _ = model_of_config(written(tmp_path / "config.json", config))
    model = pj.load_model(written(tmp_path / "model.json", {"name": name, **content}))
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.05)


def test_what_a_config_leaves_out_is_as_its_architecture_has_it(tmp_path):
    def read(**config):
        return model_of_config(written(tmp_path / "config.json", config))

    assert read(**SMALL["mistral"][0])[0]["window_tokens"] == 4096
    windowed = read(**SMALL["mistral"][0], sliding_window=1024)[0]
    assert (windowed["window_tokens"], windowed["windowed_layers"]) == (1024, 32)
    qwen = SMALL["qwen2"][0] | {"sliding_window": 4096, "max_window_layers": 20}
    assert "window_tokens" not in read(**qwen, use_sliding_window=False)[0]
    assert read(**qwen, use_sliding_window=True)[0]["windowed_layers"] == 8
    assert read(**SMALL["qwen3"][0])[0].get("head_width") is None  # 128 x 32 are the hidden units
    assert read(**LLAMA | {"num_key_value_heads": None})[0]["kv_heads"] == 64
    assert read(**LLAMA, tie_word_embeddings=True)[0]["tied_embeddings"] is True
    assert "biases of some layers are left out" in read(**SMALL["qwen2"][0])[1]
    assert any("mtp_layers adds them" in note for note in read(**DEEPSEEK)[1])
    shared = QWEN3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1536}
    assert read(**shared)[0]["moe"]["shared_experts"] == 2


BAD = {
    "unknown architecture (model_type) 'gpt2': known are llama, mistral": {"model_type": "gpt2"},
    "model_type is missing": {"model_type_": "llama"},
    "num_hidden_layers is missing": {"model_type": "llama"},
    "hidden_size must be a whole number": LLAMA | {"hidden_size": "8192"},
    "num_experts_per_tok is missing": {k: v for k, v in MIXTRAL.items() if "per_tok" not in k},
    "decoder_sparse_step must be 1": QWEN3 | {"decoder_sparse_step": 2},
    "mlp_only_layers must be []": QWEN3 | {"mlp_only_layers": [0]},
    "shared_expert_intermediate_size must be a multiple": QWEN3
    | {"shared_expert_intermediate_size": 1000},
    "kv_lora_rank is missing": {k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_named(message, tmp_path, mistake):
    config = written(tmp_path / "config.json", BAD[message])
    line = mistake("init", "model", "--from", config, "--out", tmp_path / "out.json")
    assert message in line
    assert line.startswith(f"error: --from {config}: ")
    assert set(ARCHITECTURES) >= {"llama", "mistral", "mixtral", "qwen2", "qwen3", "deepseek_v3"}
