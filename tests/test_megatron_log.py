"""Megatron's training logs: their models, and rows that `validate` reads."""

import csv
import json

import pytest

import pipejax as pj
from pipejax.costs.measured.megatron_log import MegatronLog
from pipejax.costs.measured.rows_file import read_rows

ARGUMENTS = {  # of Llama 3 8B on 16 accelerators, as Megatron prints them
    "accumulate_allreduce_grads_in_fp32": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "context_parallel_size": 1,
    "data_path": "['data/a b_text_document']",
    "expert_model_parallel_size": 1,
    "ffn_hidden_size": 14336,
    "fp8": None,
    "global_batch_size": 128,
    "group_query_attention": True,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "micro_batch_size": 1,
    "moe_ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_experts": None,
    "num_layers": 32,
    "num_layers_per_virtual_pipeline_stage": 4,
    "num_query_groups": 8,
    "overlap_grad_reduce": True,
    "overlap_param_gather": False,
    "pipeline_model_parallel_size": 4,
    "position_embedding_type": "rope",
    "recompute_granularity": "selective",
    "recompute_method": None,
    "recompute_num_layers": None,
    "seq_length": 8192,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 2,
    "transformer_impl": "transformer_engine",
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "virtual_pipeline_model_parallel_size": 2,
    "vocab_size": None,
    "world_size": 16,
}
HEAD, TAIL = f"{24 * '-'} arguments {24 * '-'}", f"{20 * '-'} end of arguments {21 * '-'}"
MEMORY = (
    "[Rank 0] (after 1 iterations) memory (MB) | allocated: 9334.4 | max allocated: 12680.5 | "
    "reserved: 13236.0 | max reserved: 13236.0[Rank 6] (after 1 iterations) memory (MB) | "
    "allocated: 10850.7 | max allocated: 15754.5 | reserved: 16334.0 | max reserved: 16334.0"
)


def line(number, milliseconds, batch=128):
    return (
        f" [2025-08-01 07:19:37] iteration {number:8d}/    5000 | consumed samples:          128 | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): "
        f"80.2 | learning rate: 6.9E-08 | global batch size: {batch:5d} | lm loss: 1.04E+01 |"
    )


LINES = [MEMORY, line(1, 19138.8), line(2, 6010.0), line(3, 5990.0), line(4, 6000.0)]


def log(path, lines=LINES, **changes):
    given = {k: v for k, v in (ARGUMENTS | changes).items() if v != "left out"}
    told = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in given.items()]
    vocabulary = " > padded vocab (size: 128000) with 256 dummy tokens (new size: 128256)"
    path.write_text("\n".join(["using world size: 16", HEAD, *told, TAIL, vocabulary, *lines, ""]))
    return path


def test_a_log_gives_the_model_that_it_trained(tmp_path, answer):
    out = tmp_path / "ours.json"
    answer("init", "model", "--from", log(tmp_path / "train.log"), "--out", out)
    ours, theirs = pj.load_model(out), pj.load_model("llama3-8b")
    assert ours.gradient_bytes == 4
    assert ours.source == "Arguments of Megatron in train.log."
    assert ours.parameters == theirs.parameters
    for name in ("kv_heads", "sequence", "dropout", "flash_attention", "tied_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
def test_a_log_gives_rows_that_validate_reads(tmp_path, answer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ramped = [line(1, 9000, 64), line(2, 3000, 64), *LINES[1:]]
    log(tmp_path / "a.log")
    log(tmp_path / "b.log", ramped, use_distributed_optimizer=False)
    made = answer("init", "rows", "--from", "a.log,b.log", "--model", "llama3-8b")
    assert (made["out"], made["notes"]) == ("rows.csv", [])
    rows = read_rows(tmp_path / "rows.csv")
    assert rows.seconds.tolist() == [6.0, 3.0, 6.0]  # the first of each size warms up
    assert rows.global_batch.tolist() == [128, 64, 128]
    assert rows.memory_bytes[0] == round(15754.5 * 2**20)
    assert rows.variance[0] == pytest.approx((0.01 / 6) ** 2 / 3, rel=1e-3)
    names = "tensor pipeline data stages_per_worker microbatch_size zero sequence_parallel overlap"
    first = [getattr(rows, name)[0] for name in names.split()]
    assert first == [2, 4, 2, 2, 1, 1, 1, 0.5]
    assert (rows.zero[1], rows.overlap[1]) == (0, 1.0)
    assert (rows.recompute[0], rows.precision[0]) == ("selective", "bf16")


CHANGES = {  # arguments, and what they make of a row
    "recompute full": ({"recompute_granularity": "full"}, {"recompute": "full"}),
    "modules": ({"recompute_modules": "['mlp', 'core_attn']"}, {"recompute": "mlp+core_attn"}),
    "fp8": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"precision": "fp8"}),
    "mxfp8": ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"precision": "mxfp8"}),
    "fsdp": ({"use_megatron_fsdp": True}, {"zero": 3}),
    "plain": (
        dict.fromkeys(
            ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
        ),
        {"stages_per_worker": 1},
    ),
    "layers": ({"virtual_pipeline_model_parallel_size": None}, {"stages_per_worker": 2}),
    "split": ({"account_for_loss_in_pipeline_split": True}, {"loss_units": 1}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_arguments_become_columns(what, tmp_path):
    changes, columns = CHANGES[what]
    (row,), _ = MegatronLog.read(log(tmp_path / "train.log", **changes)).rows("llama3-8b")
    assert {name: row[name] for name in columns} == columns


def test_experts_and_latent_attention_are_read(tmp_path):
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 2048}
    more = {"moe_shared_expert_intermediate_size": 4096, "moe_layer_freq": "[0, 0, 1, 1]"}
    ranks = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_head_dim": 128}
    given = experts | more | ranks | {"multi_latent_attention": True, "q_lora_rank": 1536}
    content = MegatronLog.read(log(tmp_path / "train.log", **given)).model()
    assert content["moe"] == {
        "experts": 8,
        "top_k": 2,
        "expert_hidden": 2048,
        "shared_experts": 2,
        "dense_layers": 2,
    }
    assert content["mla"] == {
        "kv_rank": 512,
        "rope_width": 64,
        "value_width": 128,
        "query_rank": 1536,
    }
    assert (content["kv_heads"], content["head_width"]) == (32, 128)


def test_of_several_runs_in_a_log_the_last_counts(tmp_path):
    first, second = log(tmp_path / "a.log"), log(tmp_path / "b.log", seq_length=4096)
    first.write_text(first.read_text() + second.read_text())
    found = MegatronLog.read(first)
    assert (found.model()["sequence_tokens"], len(found.times)) == (4096, 4)


WRONG = {
    "tensor_model_parallel_size is not among": {"tensor_model_parallel_size": "left out"},
    "micro_batch_size must be a whole number": {"micro_batch_size": "x"},
    "decoder_first_pipeline_num_layers 7: a row cannot": {"decoder_first_pipeline_num_layers": 7},
    "it holds no arguments, as `num_layers": {"num_layers": "left out"},
    "accelerators must be a multiple of tensor x context x pipeline, 8, got 12": {"world_size": 12},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_log_lacks_is_named(message, tmp_path, mistake):
    path = log(tmp_path / "train.log", **WRONG[message])
    out = tmp_path / "rows.csv"
    said = mistake("init", "rows", "--from", path, "--model", "llama3-8b", "--out", out)
    assert message in said
    assert str(path) in said


def test_mistakes_beside_the_log(tmp_path, mistake, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "train.log", [])
    given = "init", "rows", "--from", "train.log"
    said = mistake(*given)
    assert "needs --model: pipejax init model --from train.log writes the one of the log" in said
    assert "no line says `elapsed time per iteration" in mistake(*given, "--model", "llama3-8b")
    assert "--from train.log does not go with costs" in mistake("init", "costs", *given[2:])
    said = mistake("init", "model", *given[2:], "--model", "gpt-22b")
    assert "--model gpt-22b does not go with model --from" in said
    assert "--model gpt-22b does not go with rows" in mistake(*given[:2], "--model", "gpt-22b")
    log(tmp_path / "short.log", [line(1, 9000.0)])
    short = "init", "rows", "--from", "short.log", "--model", "llama3-8b", "--json"
    assert (
        "only one line of 128 sequences, with its warm-up"
        in json.loads(call(*short)[1])["notes"][0]
    )


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
def test_rows_to_begin_with_are_read_as_they_are(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    made = answer("init", "rows")
    assert made["used_by"] == "pipejax validate rows.csv --system a100"
    assert read_rows("rows.csv").seconds.tolist() == [18.13]


@pytest.mark.parametrize("text", ["block:2", "uniform:4", "full"])
def test_a_form_of_recomputation_becomes_a_row(text, tmp_path, call):
    method, _, count = text.partition(":")
    arguments = {"recompute_granularity": "full", "recompute_method": "uniform"}
    if count:
        arguments |= {"recompute_method": method, "recompute_num_layers": int(count)}
    path, out = log(tmp_path / "train.log", **arguments), tmp_path / "rows.csv"
    assert call("init", "rows", "--from", path, "--model", "llama3-8b", "--out", out)[0] == 0
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert row["recompute"] == text
