"""Megatron's training logs: their models, and rows that `validate` reads."""

import gzip
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.costs.measured.megatron_log import MegatronLog
from pipejax.costs.measured.rows_file import read_rows

# of Llama 3 8B on 16 accelerators, as Megatron prints them
FILE = Path(__file__).parent / "data" / "megatron_arguments_llama3.json"
ARGUMENTS = json.loads(FILE.read_text())
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
    options = {k: v for k, v in (ARGUMENTS | changes).items() if v != "left out"}
    message = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in options.items()]
    vocabulary = " > padded vocab (size: 128000) with 256 dummy tokens (new size: 128256)"
    parts = ["using world size: 16", HEAD, *message, TAIL, vocabulary, *lines, ""]
    path.write_text("\n".join(parts))
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
    built = answer("init", "rows", "--from", "a.log,b.log", "--model", "llama3-8b")
    assert (built["out"], built["notes"]) == ("rows.csv", [])
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


def next_command(text):
    """Return the words of the first next command that a report prints."""
    return shlex.split(re.findall("^next: pipejax (.*)$", text, re.MULTILINE)[0])


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
def test_printed_commands_lead_from_a_log_to_its_explanation(tmp_path, answer, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = log(tmp_path / "train.log", **PLAIN)
    rows = next_command(call("init", "model", "--from", path.name)[1])
    _, text, _ = call(*rows)
    assert "next:" not in text  # the log does not say the machine
    assert "the log does not say SYSTEM, one of `pipejax schedules --systems`" in text
    validation = next_command(call(*rows, "--system", "h100", "--force")[1])
    code, text, _ = call(*validation)
    assert code == 1  # no machine has the times of this log
    command = next_command(text)
    options = dict(zip(command[1::2], command[2::2], strict=False))
    sizes = [options[f"--{name}"] for name in ("workers", "microbatches", "tensor-parallel")]
    assert sizes == ["4", "64", "2"]  # 128 sequences on 2 replicas
    assert (options["--data-parallel"], command[-1]) == ("2", "Megatron-LM")
    predicted = json.loads(call(*validation, "--json")[1])["worst"][0]["predicted"]
    assert answer(*command)["step_time"] == pytest.approx(predicted, rel=1e-12)


PLAIN = dict.fromkeys(
    ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
)
CHANGES = json.loads((FILE.parent / "megatron_log_columns.json").read_text())


@pytest.mark.parametrize("change", CHANGES)
def test_arguments_become_columns(change, tmp_path):
    path = log(tmp_path / "train.log", **change["arguments"])
    (row,), _ = MegatronLog.read(path).rows("llama3-8b")
    assert {name: row[name] for name in change["columns"]} == change["columns"]
    # Megatron also prints how tokens travel for models without experts
    (row,), _ = MegatronLog.read(log(tmp_path / "b.log", moe_enable_deepep=True)).rows("llama3-8b")
    assert "dispatcher" not in row


def test_experts_and_latent_attention_are_read(tmp_path):
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 2048}
    more = {"moe_shared_expert_intermediate_size": 4096, "moe_layer_freq": "[0, 0, 1, 1]"}
    ranks = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_head_dim": 128}
    options = experts | more | ranks | {"multi_latent_attention": True, "q_lora_rank": 1536}
    content = MegatronLog.read(log(tmp_path / "train.log", **options)).model()
    sizes = {"experts": 8, "top_k": 2, "expert_hidden": 2048, "shared_experts": 2}
    assert content["moe"] == sizes | {"dense_layers": 2}
    widths = {"kv_rank": 512, "rope_width": 64, "value_width": 128, "query_rank": 1536}
    assert content["mla"] == widths
    assert (content["kv_heads"], content["head_width"]) == (32, 128)


def test_names_of_deepspeed_give_the_model(tmp_path):
    dense = {"num_experts": "[1]", "num_key_value_heads": 4, "group_query_attention": "left out"}
    rotary = {"use_rotary_position_embeddings": True, "position_embedding_type": "left out"}
    content = MegatronLog.read(log(tmp_path / "a.log", **dense, **rotary)).model()
    assert "moe" not in content
    assert (content["kv_heads"], content["learned_positions"]) == (4, False)
    experts = {"num_experts": "[8, 8]", "topk": 2, "moe_train_capacity_factor": 1.5}
    more = {"moe_ffn_hidden_size": "left out", "ffn_hidden_size": 2048}
    content = MegatronLog.read(log(tmp_path / "b.log", **experts, **more)).model()
    sizes = {"experts": 8, "top_k": 2, "capacity_factor": 1.5, "expert_hidden": 2048}
    assert sizes.items() <= content["moe"].items()
    mixed = MegatronLog.read(log(tmp_path / "c.log", num_experts="[8, 16]"))
    with pytest.raises(ValueError, match="num_experts must be a whole number"):
        mixed.model()


def test_switches_of_the_model_are_read(tmp_path):
    changes = {"normalization": "LayerNorm", "add_qkv_bias": True, "qk_layernorm": True}
    fusions = {"bias_swiglu_fusion": False, "masked_softmax_fusion": False}
    content = MegatronLog.read(log(tmp_path / "a.log", **changes, **fusions)).model()
    names = ("norm_biases", "qkv_biases", "qk_norms", "unfused")
    assert [content[name] for name in names] == [True, True, True, "activation+softmax"]


def test_lines_behind_the_arguments_do_not_overwrite_them(tmp_path):
    later = ["  num_layers ........ 99", "[INFO] [config.py:1]   zero_stage ........ 3"]
    path = log(tmp_path / "train.log", [*later, *LINES])
    assert MegatronLog.read(path).integer("num_layers") == 32
    assert "zero_stage" not in MegatronLog.read(path).arguments
    bare = [text for text in path.read_text().splitlines() if "arguments --" not in text]
    path.write_text("\n".join(bare))  # no marks: the first value counts
    assert MegatronLog.read(path).integer("num_layers") == 32


@pytest.mark.parametrize("prefix", ["[rank0]:", "0: ", "\x1b[32m", "2025-08-01 07:19:37 "])
def test_prefixes_and_colours_of_lines_are_passed_over(prefix, tmp_path):
    path = log(tmp_path / "train.log")
    plain = MegatronLog.read(path)
    path.write_text("\n".join(prefix + text for text in path.read_text().splitlines()))
    assert MegatronLog.read(path) == plain
    packed = tmp_path / "packed" / "train.log"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert MegatronLog.read(packed)[1:] == plain[1:]


def test_names_as_long_as_the_dots_are_read(tmp_path):
    name = "inference_dynamic_batching_buffer_guaranteed_fraction"  # 53 characters, no dots
    path = log(tmp_path / "train.log", **{name: 0.2, "x" * 47: 1})
    assert MegatronLog.read(path).arguments[name] == "0.2"
    assert MegatronLog.read(path).arguments["x" * 47] == "1"


SAME = {  # times in ms of iterations, and seconds, n and spread of the row: the first warms up
    "two equal": ([9100.5, 4000.5, 4000.5], (4.0005, 2, None)),
    "four equal": ([4000.5] * 5, (4.0005, 4, None)),
    "one": ([9100.5, 4000.5], (4.0005, None, None)),
    "no number": ([9100.5, math.nan, 4000.5, 4000.5], (4.0005, 2, None)),
    "different": ([9100.5, 4000.0, 4010.0], (4.005, 2, 0.00707)),  # 10 ms / sqrt(2)
}


@pytest.mark.parametrize("case", SAME)
def test_a_spread_of_nothing_is_left_out(case, tmp_path, answer):
    times, expected = SAME[case]
    path = log(tmp_path / "train.log", [line(k, time) for k, time in enumerate(times, 1)])
    rows, notes = MegatronLog.read(path).rows("llama3-8b")
    assert tuple(rows[0].get(name) for name in ("seconds", "n", "spread")) == expected
    assert any("1 lines without a time" in note for note in notes) == (case == "no number")
    out = tmp_path / "rows.csv"
    answer("init", "rows", "--from", path, "--model", "llama3-8b", "--out", out)


def test_seconds_of_an_iteration_are_read_too(tmp_path):
    text = line(1, 9000.0) + "\n" + line(2, 4.5)
    text = text.replace("iteration (ms)", "iteration (s)").replace("9000.0", "9.0")
    (row,), _ = MegatronLog.read(log(tmp_path / "train.log", [text])).rows("llama3-8b")
    assert row["seconds"] == 4.5


@pytest.mark.filterwarnings("ignore::pipejax.base.progress.Notice")
def test_a_layout_of_a_log_is_priced(tmp_path, answer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    even, short = "Et*8|t*8|t*8|t*8L", "Ett|t*8|t*8|t*14L"
    log(tmp_path / "a.log", **PLAIN)
    log(tmp_path / "b.log", **PLAIN, pipeline_model_parallel_layout=even)
    log(tmp_path / "c.log", **PLAIN, pipeline_model_parallel_layout=short)
    answer("init", "rows", "--from", "a.log,b.log,c.log", "--model", "llama3-8b")
    rows = read_rows(tmp_path / "rows.csv")
    assert rows.pipeline_layout.tolist() == ["", "Et*8|t*8|t*8|t*8L", "Ett|t*8|t*8|t*14L"]
    seconds = StepTimes(rows).predict(pj.load_system("h100"))
    assert seconds[0] == seconds[1]
    assert seconds[2] > 1.3 * seconds[0]  # 14 layers and the head where 8 were


def test_what_the_log_and_the_model_differ_in_is_a_column_or_named(tmp_path, answer):
    path = log(tmp_path / "train.log", seq_length=4096, num_layers=16)
    out = tmp_path / "rows.csv"
    built = answer("init", "rows", "--from", path, "--model", "llama3-8b", "--out", out)
    (note,) = built["notes"]
    assert "the log has layers 16 (32); sizes in brackets are those of llama3-8b" in note
    header, row = (text.split(",") for text in out.read_text().splitlines()[:2])
    cells = dict(zip(header, row, strict=False))
    assert (cells["sequence"], cells["gradient_bytes"]) == ("4096", "4")
    assert "flash_attention" not in cells
    silent = {"accumulate_allreduce_grads_in_fp32": "left out", "transformer_impl": "left out"}
    path = log(tmp_path / "train.log", **silent, hidden_dropout=0.1)
    (row,), _ = MegatronLog.read(path).rows("llama3-8b", pj.load_model("llama3-8b"))
    assert row["dropout"] == 1
    assert not {"sequence", "gradient_bytes", "flash_attention"} & {*row}


def test_rows_need_no_sizes_of_the_log(tmp_path, answer, mistake):
    mixed = {"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": "[0, 1, 0, 1]"}
    path, out = log(tmp_path / "train.log", **mixed), tmp_path / "rows.csv"
    options = "init", "rows", "--from", path, "--model", "mixtral-8x7b", "--out", out
    (note,) = answer(*options)["notes"]
    assert "moe_layer_freq [0, 1, 0, 1]: dense layers after layers with experts" in note
    assert note.endswith("the sizes of mixtral-8x7b are not compared with the log's")
    for name in ("tensor", "memory_bytes"):
        text = mistake(*options, "--columns", f"{name}=4", "--force")
        assert f"the log has {name} itself: leave it out of --columns" in text


def test_of_several_runs_in_a_log_the_last_counts(tmp_path):
    first, second = log(tmp_path / "a.log"), log(tmp_path / "b.log", seq_length=4096)
    first.write_text(first.read_text() + second.read_text())
    result = MegatronLog.read(first)
    assert (result.model()["sequence_tokens"], len(result.times)) == (4096, 4)
    notes = " ".join(result.rows("llama3-8b")[1])
    assert "4 iterations of earlier runs are left out" in notes
    assert "earlier runs" not in " ".join(MegatronLog.read(second).rows("llama3-8b")[1])


PATH, FIRST = "heterogeneous_layers_config_path", "decoder_first_pipeline_num_layers"
WRONG = read_cases("WRONG of test_megatron_log")


@pytest.mark.parametrize("message", WRONG)
def test_what_a_log_lacks_is_named(message, tmp_path, mistake):
    path = log(tmp_path / "train.log", **WRONG[message])
    out = tmp_path / "rows.csv"
    text = mistake("init", "rows", "--from", path, "--model", "llama3-8b", "--out", out)
    assert message in text
    assert str(path) in text


def test_mistakes_beside_the_log(tmp_path, mistake, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log(tmp_path / "train.log", [])
    options = "init", "rows", "--from", "train.log"
    message = mistake(*options)
    assert (
        "needs --model: write that of the log by `pipejax init model --from train.log`" in message
    )
    assert "no line has `elapsed time per iteration" in mistake(*options, "--model", "llama3-8b")
    assert "--from train.log does not go with system" in mistake("init", "system", *options[2:])
    message = mistake("init", "model", *options[2:], "--model", "gpt-22b")
    assert "--model gpt-22b does not go with model --from" in message
    log(tmp_path / "short.log", [line(1, 9000.0)])
    short = "init", "rows", "--from", "short.log", "--model", "llama3-8b", "--json"
    (note,) = json.loads(call(*short)[1])["notes"]
    assert "only one line of 128 sequences, with its warm-up" in note


@with_cases("layers workers options dropped", *read_cases("test_layers_that_a_run_drops_are_said"))
def test_layers_that_a_run_drops_are_said(layers, workers, options, dropped, tmp_path):
    sizes = {"num_layers": layers, "pipeline_model_parallel_size": workers}
    sizes |= {"virtual_pipeline_model_parallel_size": None, "tensor_model_parallel_size": 1}
    path = log(tmp_path / "train.log", **(sizes | options))
    _, notes = MegatronLog.read(path).rows("llama3-8b")
    notes = [note for note in notes if "layers do not divide" in note]
    assert len(notes) == (dropped > 0)
    assert all(f": {layers} layers do" in note for note in notes)
    assert all(f"drops {dropped} of them" in note for note in notes)


def test_deepspeed_counts_embeddings_as_layers(tmp_path):
    # BLOOM: 70 layers and both ends over 12 stages are 72 / 12 = 6 a stage
    method = {"deepspeed": True, "pp_partition_method": "type:transformer|embedding"}
    sizes = {"num_layers": 70, "pipeline_model_parallel_size": 12, "world_size": 48}
    read = MegatronLog.read(log(tmp_path / "train.log", **sizes, **method))
    columns = read.layout_columns()
    assert [columns[f"{end}_units"] for end in ("embedding", "loss")] == [1, 1]
    assert not any("pp_partition_method" in note for note in read.notes())
    other = log(tmp_path / "other.log", pp_partition_method="parameters")
    assert any(
        "pp_partition_method parameters is not" in n for n in MegatronLog.read(other).notes()
    )


@with_cases(
    "vocabulary tensor multiple padded", *read_cases("test_a_vocabulary_is_padded_as_in_the_run")
)
def test_a_vocabulary_is_padded_as_in_the_run(vocabulary, tensor, multiple, padded, tmp_path):
    path = log(
        tmp_path / "train.log",
        vocab_size=vocabulary,
        tensor_model_parallel_size=tensor,
        make_vocab_size_divisible_by=multiple,
        padded_vocab_size="left out",
    )
    path.write_text(path.read_text().replace("padded vocab", "vocab"))
    assert MegatronLog.read(path).model()["vocabulary"] == padded


@with_cases("options is_noted", *read_cases("test_copies_of_weights_in_fp8_are_said"))
def test_copies_of_weights_in_fp8_are_said(options, is_noted, tmp_path):
    notes = MegatronLog.read(log(tmp_path / "train.log", **options)).notes()
    assert any("no fp8 copies of weights stay" in note for note in notes) is is_noted
