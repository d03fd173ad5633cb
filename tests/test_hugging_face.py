"""Models from config.json files, against models whose parameters are published."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from daily import read_cases

import pipejax as pj
from pipejax.costs.measured.megatron_log import MegatronLog
from pipejax.costs.model.arguments import NOTHING, load_arguments
from pipejax.costs.model.hugging_face import model_of_config

# keys of published config.json files that say what a model computes
CONFIGS = json.loads((Path(__file__).parent / "data" / "hugging_face.json").read_text())
LLAMA, MIXTRAL, QWEN3 = (CONFIGS[name] for name in ("llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b"))
DEEPSEEK, GPT_OSS, KIMI = (CONFIGS[name] for name in ("deepseek-v3", "gpt-oss-120b", "kimi-k2"))
GLM, SCOUT = CONFIGS["glm-4.5-air"], CONFIGS["llama-4-scout-text"]
SMALL = {"qwen2": "qwen2-7b", "qwen3": "qwen3-8b", "mistral": "mistral-7b"}
SMALL = {architecture: CONFIGS[name] for architecture, name in SMALL.items()}
KNOWN = {"llama3-70b": LLAMA, "mixtral-8x7b": MIXTRAL, "qwen3-30b-a3b": QWEN3}
KNOWN |= {"deepseek-v3": DEEPSEEK}


def written(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_a_config_gives_the_model_that_comes_with_pipejax(name, tmp_path, answer):
    config = written(tmp_path / "config.json", KNOWN[name])
    out = tmp_path / "ours.json"
    built = answer("init", "model", "--from", config, "--out", out)
    assert built["notes"][0].startswith("sequence_tokens is the longest")
    ours, theirs = pj.load_model(out), pj.load_model(name)
    assert ours.sequence == KNOWN[name]["max_position_embeddings"]
    alike = {"name": theirs.name, "source": theirs.source, "sequence": theirs.sequence}
    assert "gradient_bytes is 4" in built["notes"][1]
    alike["gradient_bytes"] = None  # of those that come with pipejax, 2
    alike["qk_norms"] = theirs.qk_norms
    assert ours.qk_norms == (name == "qwen3-30b-a3b")
    assert ours.gradient_bytes == 4
    assert dataclasses.replace(ours, **alike) == theirs
    assert ours.source == f"config.json of Hugging Face, architecture {KNOWN[name]['model_type']}."


def test_what_a_config_leaves_out_is_as_its_architecture_has_it(tmp_path):
    def read(**config):
        return model_of_config(written(tmp_path / "config.json", config))

    assert read(**SMALL["mistral"])[0]["window_tokens"] == 4096
    windowed = read(**SMALL["mistral"], sliding_window=1024)[0]
    assert (windowed["window_tokens"], windowed["windowed_layers"]) == (1024, 32)
    qwen = SMALL["qwen2"] | {"sliding_window": 4096, "max_window_layers": 20}
    assert "window_tokens" not in read(**qwen, use_sliding_window=False)[0]
    assert read(**qwen, use_sliding_window=True)[0]["windowed_layers"] == 8
    assert read(**SMALL["qwen3"])[0].get("head_width") is None  # 128 x 32 are the hidden units
    assert read(**LLAMA | {"num_key_value_heads": None})[0]["kv_heads"] == 64
    rest = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read(**rest)[0]["kv_heads"] == 64
    assert read(**LLAMA, tie_word_embeddings=True)[0]["tied_embeddings"] is True
    assert read(**SMALL["qwen2"])[0]["qkv_biases"] is True
    assert any("mtp_layers adds them" in note for note in read(**DEEPSEEK)[1])
    shared = QWEN3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 1536}
    assert read(**shared)[0]["moe"]["shared_experts"] == 2
    # as transformers has it: deepseek_v3 3 dense layers and a shared expert, glm4_moe 1 and 1
    for config, dense in ((DEEPSEEK, 3), (GLM, 1)):
        names = "first_k_dense_replace", "n_shared_experts"
        rest = {key: value for key, value in config.items() if key not in names}
        moe = read(**rest)[0]["moe"]
        assert (moe["dense_layers"], moe["shared_experts"]) == (dense, 1)
        assert read(**rest, n_shared_experts=None)[0]["moe"]["shared_experts"] == 0


@pytest.mark.parametrize("kind", ["llava", "mistral3", "smolvlm"])
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_a_switch_beside_the_text_ties_embeddings_unless_text_says(kind, outer, inner, tmp_path):
    tied = inner if inner is not None else bool(outer)
    text = LLAMA | ({} if inner is None else {"tie_word_embeddings": inner})
    config = {"model_type": kind, "text_config": text}
    config |= {} if outer is None else {"tie_word_embeddings": outer}
    content, _ = model_of_config(written(tmp_path / "config.json", config))
    model = pj.load_model(written(tmp_path / "model.json", {"name": "x", **content}))
    # published parameters of llama3-70b, without the head if it is tied
    assert model.parameters == 70553706496 - tied * 128256 * 8192


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3, *SMALL.values()])
def test_heads_of_keys_are_stated_where_the_default_is_another(config, tmp_path, mistake):
    # without the key, transformers takes 8 (mixtral, mistral), 4 (qwen3_moe) or 32 (qwen2, qwen3)
    rest = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    path = written(tmp_path / "config.json", rest)
    line = mistake("init", "model", "--from", path, "--out", tmp_path / "out.json")
    assert "num_key_value_heads is missing" in line
    null = written(tmp_path / "null.json", rest | {"num_key_value_heads": None})
    assert model_of_config(null)[0]["kv_heads"] == config["num_attention_heads"]


# parameters, counted by hand or published to the digit, and the published number
COUNTED = {
    # a norm of queries and keys without parameters; published: 109e9 with the part for pictures
    "llama-4-scout": (
        {
            **{"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"},
            **{"text_config": SCOUT, "vision_config": {"hidden_size": 1408}},
        },
        48 * ((2 * 5120 * 5120 + 2 * 5120 * 1024 + 2 * 5120) + (5120 * 16 + 17 * 3 * 5120 * 8192))
        + (2 * 202048 * 5120 + 5120),
        107.77e9,
    ),
    "mistral-7b": (SMALL["mistral"], 7241732096, 7241732096),
    "llama-3.1-8b": (CONFIGS["llama-3.1-8b"], 8030261248, 8030261248),
    "qwen2.5-7b": (CONFIGS["qwen2.5-7b"], 7615616512, 7615616512),
    "qwen3-8b": (SMALL["qwen3"], 8190735360, 8190735360),
    "mixtral-8x7b": (MIXTRAL, 46702792704, 46702792704),
    "phi-3-mini": (CONFIGS["phi-3-mini"], 3821079552, 3821079552),
    # a tied embedding; two of four norms of a layer, 2 x 42 x 3584, are left out
    "gemma-2-9b": (CONFIGS["gemma-2-9b"], *[9241705984 - 2 * 42 * 3584] * 2),
}
for _name, (_products, _published) in read_cases("parameters of configs").items():
    COUNTED[_name] = (CONFIGS[_name], sum(map(math.prod, _products)), _published)


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_counted_by_hand(name, tmp_path):
    config, counted, published = COUNTED[name]
    assert counted == pytest.approx(published, rel=1e-3)
    content, _ = model_of_config(written(tmp_path / "config.json", config))
    model = pj.load_model(written(tmp_path / "model.json", {"name": name, **content}))
    assert model.parameters == counted


def test_the_class_goes_before_the_name(tmp_path):
    def source(**config):
        return model_of_config(written(tmp_path / "config.json", config))[0]["source"]

    assert source(**KIMI) == "config.json of Hugging Face, architecture deepseek_v3."
    named = LLAMA | {"model_type": "a_name_of_ours", "architectures": ["LlamaForCausalLM"]}
    assert source(**named).endswith("architecture llama.")
    unknown = LLAMA | {"architectures": ["OursForCausalLM"]}  # as remote code of a known type has
    assert source(**unknown).endswith("architecture llama.")
    qwen = QWEN3 | {"model_type": "ours", "architectures": ["Qwen3MoeForCausalLM"]}
    assert source(**qwen).endswith("architecture qwen3_moe.")


def test_windows_are_counted_by_layer(tmp_path):
    def window(**config):
        content, _ = model_of_config(written(tmp_path / "config.json", config))
        return content.get("window_tokens"), content.get("windowed_layers")

    assert window(**GPT_OSS) == (128, 18)
    gemma = COUNTED["gemma-2-9b"][0]
    assert window(**gemma) == (4096, 21)  # every second of 42
    gemma3 = gemma | {"model_type": "gemma3_text", "sliding_window": 1024}
    assert window(**gemma3) == (1024, 35)  # five of six: 42 - 7
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        assert window(**gemma3, **{name: 3}) == (1024, 28)  # two of three
        assert window(**gemma3, **{name: 1}) == (1024, 42)
    assert window(**LLAMA) == (None, None)


def test_keys_that_are_not_read_are_named(tmp_path):
    def notes(**config):
        return " ".join(model_of_config(written(tmp_path / "config.json", config))[1])

    assert "attention_chunk_size 8192 is not read" in notes(**SCOUT)
    quantized = notes(**LLAMA, quantization_config={"bits": 4})
    assert "quantization_config {'bits': 4} is not read" in quantized
    for name in ("torch_dtype", "dtype"):
        wide = f"{name} float32 is not read: weights have bytes_per_element"
        assert wide in notes(**LLAMA, **{name: "float32"})
        assert name not in notes(**LLAMA, **{name: "float16"})
    assert "1 unknown, not read: num_new_layers 3" in notes(**LLAMA, num_new_layers=3)
    biased = notes(**LLAMA, attention_bias=True)
    assert "attention_bias: the bias of attention's output projection is left out" in biased
    quiet = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16", "use_cache": True}
    assert "not read" not in notes(**LLAMA, **quiet, hidden_act="silu", bos_token_id=1)


# arguments of Megatron's logs: each is read, without effect, or named with what is assumed
# dumps of Megatron-LM of three years and of Megatron-DeepSpeed, with their defaults
DUMPS = ("2021", "2023", "2025", "deepspeed")
DATA = Path(__file__).parent / "data"
TABLE = load_arguments("megatron")


def dump(name):
    return MegatronLog.read(DATA / f"megatron_arguments_{name}.txt")


def outcome(log, **changes):
    log = log._replace(arguments=log.arguments | changes)
    try:
        rows, notes = log.rows("model")
        return rows, log.model(), notes
    except ValueError as error:
        return str(error), None, [str(error)]


def other(value):
    if value in ("True", "False"):
        return str(value == "False")
    return str(2 * int(value) + 2) if value.isdecimal() else "7"


# by argument, others that make it count, and a value that is none of the defaults
READ = json.loads((DATA / "megatron_argument_contexts.json").read_text())
TEXTS = ("LayerNorm", "RMSNorm", "local", "transformer_engine", "rope")


def values(log, name):
    context, value = READ.get(name, ({}, None))
    before = context.get(name, log.arguments[name])
    candidates = [value, "True", "False", other(before), *TEXTS]
    return context, [v for v in candidates if v is not None and v != before]


@pytest.mark.parametrize("name", DUMPS)
def test_each_argument_is_read_or_named_or_without_effect(name):
    log = dump(name)
    log = log._replace(vocabulary=0, times=[line._replace(batch=0) for line in log.times])
    dropped = []
    for argument, value in log.arguments.items():
        if argument in TABLE.read:
            context, candidates = values(log, argument)
            before = outcome(log, **context)
            is_seen = any(outcome(log, **context | {argument: v}) != before for v in candidates)
        elif assumptions := TABLE.assumptions.get(argument):
            context = {record["with"]: "2" for record in assumptions if "with" in record}
            context |= {c: "True" for c in context if c.startswith(("has", "use"))}
            settings = [log.arguments | context | {argument: v} for v in (other(value), "False")]
            notes = [note for setting in settings for note in TABLE.notes(setting, "log")]
            is_seen = any(f" {argument} " in note and "not read" in note for note in notes)
        else:
            is_seen = TABLE.without_effect.match(argument) is not None
        if not is_seen:
            dropped.append(argument)
    assert ", ".join(dropped) == ""


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_of_defaults_names_nothing(name):
    assert dump(name).notes() == []


def test_unknown_arguments_are_listed_if_they_are_set():
    log = dump("2021")
    unknown = {"new_thing": "3", "new_switch": "False", "newer": "None"}
    changed = log._replace(arguments=log.arguments | unknown)
    (note,) = changed.notes()
    assert note.endswith("1 unknown, not read: new_thing 3")
    assert NOTHING[0] == "None"
