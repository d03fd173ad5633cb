"""Arguments of Megatron's logs: each is read, without effect, or named with what is assumed."""

from pathlib import Path

import pytest

from pipejax.costs.measured.megatron_log import MegatronLog
from pipejax.costs.model.arguments import NOTHING, load_arguments

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


LATENT = {
    **{"multi_latent_attention": "True", "kv_lora_rank": "512", "qk_head_dim": "128"},
    **{"qk_pos_emb_head_dim": "64", "v_head_dim": "128", "q_lora_rank": "1536"},
}
EXPERTS = {"num_experts": "8", "moe_layer_freq": "1", "expert_interval": "1", "topk": "2"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "2"}
FLASH = dict.fromkeys(
    ("use_flash_attn", *(f"use_flash_attn_{kind}" for kind in ("v1", "v2", "triton", "builder"))),
    "False",
)
# what makes an argument count, and a value that is none of the defaults
READ = {
    **dict.fromkeys((*LATENT,), (LATENT, None)),
    "multi_latent_attention": (LATENT, None),
    **dict.fromkeys(("moe_router_topk", "topk", "moe_ffn_hidden_size"), (EXPERTS, "4")),
    "moe_shared_expert_intermediate_size": ({**EXPERTS, "moe_ffn_hidden_size": "64"}, "128"),
    "expert_tensor_parallel_size": (EXPERTS, "4"),
    "enable_expert_tensor_parallelism": (EXPERTS, None),
    "moe_layer_freq": (EXPERTS, "[0, 1]"),
    "expert_interval": ({"num_experts": "8"}, "2"),
    "moe_expert_capacity_factor": (EXPERTS, "1.5"),
    "moe_train_capacity_factor": (EXPERTS, "1.5"),
    "moe_token_dropping": (EXPERTS | {"moe_train_capacity_factor": "1.5"}, None),
    "moe_token_dispatcher_type": (EXPERTS, "flex"),
    "recompute_granularity": ({"recompute_modules": "None"}, "full"),
    "recompute_method": (FULL, "block"),
    "recompute_num_layers": (FULL, "3"),
    "recompute_modules": ({"recompute_granularity": "selective"}, "['mlp']"),
    "recompute_activations": (
        {"recompute_granularity": "None", "checkpoint_activations": "False"},
        "True",
    ),
    "activations_checkpoint_method": ({"activations_checkpoint_num_layers": "3"}, "block"),
    "activations_checkpoint_num_layers": ({"activations_checkpoint_method": "uniform"}, "3"),
    "checkpoint_activations": ({"recompute_granularity": "None"}, None),
    "use_distributed_optimizer": ({"zero_stage": "0"}, None),
    "quick_geglu": ({"swiglu": "False"}, None),
    "checkpoint_num_layers": ({"checkpoint_activations": "True"}, "3"),
    "fp8": ({}, "hybrid"),
    "fp16": ({"bf16": "False", "fp16": "True"}, None),
    "bf16": ({"fp16": "False", "bf16": "True"}, None),
    "fp8_recipe": ({"fp8": "e4m3"}, "mxfp8"),
    "data_parallel_sharding_strategy": ({"use_megatron_fsdp": "True"}, "optim_grads"),
    "optimizer_offload_fraction": ({"optimizer_cpu_offload": "True"}, "0.5"),
    "overlap_param_gather": ({"use_distributed_optimizer": "True"}, None),
    "zero_stage": ({}, "2"),
    "deepspeed": ({"zero_stage": "2"}, None),
    "num_query_groups": ({"group_query_attention": "True"}, "4"),
    "num_layers_per_virtual_pipeline_stage": (
        {"virtual_pipeline_model_parallel_size": "None"},
        "2",
    ),
    "pipeline_model_parallel_layout": ({}, "Et*6|t*6|t*6|t*6L"),
    "decoder_first_pipeline_num_layers": ({"virtual_pipeline_model_parallel_size": "None"}, "3"),
    "decoder_last_pipeline_num_layers": ({"virtual_pipeline_model_parallel_size": "None"}, "3"),
    "vocab_size": ({"padded_vocab_size": "None"}, "50000"),
    "global_batch_size": ({}, "128"),
    "attention_dropout": ({"hidden_dropout": "0.0", "attention_dropout": "0.0"}, "0.1"),
    "hidden_dropout": ({"attention_dropout": "0.0", "hidden_dropout": "0.0"}, "0.1"),
    "attention_backend": ({"transformer_impl": "transformer_engine"}, "unfused"),
    **dict.fromkeys(FLASH, (FLASH | {"transformer_impl": "local"}, None)),
    "transformer_impl": (FLASH, None),
    "position_embedding_type": ({"use_rotary_position_embeddings": "False"}, None),
    "use_rotary_position_embeddings": (
        {"position_embedding_type": "learned_absolute", "add_position_embedding": "True"},
        None,
    ),
    "add_position_embedding": (
        {"position_embedding_type": "None", "use_rotary_position_embeddings": "False"},
        None,
    ),
    "qk_layernorm": ({"multi_latent_attention": "False"}, None),
    "normalization": ({}, None),
}


TEXTS = ("LayerNorm", "RMSNorm", "local", "transformer_engine", "rope")


def values(log, name):
    context, value = READ.get(name, ({}, None))
    before = context.get(name, log.arguments[name])
    candidates = [value, "True", "False", other(before), *TEXTS]
    return context, [v for v in candidates if v is not None and v != before]


@pytest.mark.parametrize("name", DUMPS)
def test_each_argument_is_read_or_named_or_without_effect(name):
    log = dump(name)
    log = log._replace(vocabulary=0, times=[(0, seconds) for _, seconds in log.times])
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
    changed = log._replace(
        arguments=log.arguments | {"new_thing": "3", "new_switch": "False", "newer": "None"}
    )
    (note,) = changed.notes()
    assert note.endswith("1 unknown, not read: new_thing 3")
    assert NOTHING[0] == "None"
