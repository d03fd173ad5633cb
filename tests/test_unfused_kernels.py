"""Kernels that are not fused keep more: each tensor counted by hand, and four measured peaks."""

import dataclasses
import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.costs.layers.formulas import (
    WHOLE,
    buffer_bytes,
    edge_activation_bytes,
    head_weight_grad_bytes,
    layer_activation_bytes,
)
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.launchers import launcher_defaults
from pipejax.costs.model.layout import Layout
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.costs.system.system import DATA

# A public report of 2023 on Megatron-LM without Transformer Engine: 7 billion parameters, flash
# attention, SwiGLU as function and product, dropout; max_memory_allocated on 8 GPUs.
SEVEN = pj.load_model(Path(__file__).parent / "data" / "model_of_7_billion.json")
PEAKS = [  # GiB; workers, microbatches, minibatch of a pipeline, vocabulary, layout
    (69.1, 1, 128, 256, 50432, {"data_parallel": 8}),
    (55.7, 1, 32, 128, 50432, {"data_parallel": 4, "tensor_parallel": 2}),
    (49.8, 2, 256, 512, 50432, {"data_parallel": 4}),
    (28.8, 1, 32, 128, 51200, {"tensor_parallel": 8}),
]


@pytest.mark.parametrize(("peak", "workers", "count", "minibatch", "vocabulary", "degrees"), PEAKS)
def test_measured_peaks(peak, workers, count, minibatch, vocabulary, degrees):
    table = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=count)
    model = dataclasses.replace(SEVEN, vocabulary=vocabulary)
    need = pj.memory_bytes(pj.Workload(model, minibatch, zero=1, **degrees), table).max()
    assert need / 2**30 == pytest.approx(peak, rel=0.03)
    fused = dataclasses.replace(model, unfused="")
    less = pj.memory_bytes(pj.Workload(fused, minibatch, zero=1, **degrees), table).max()
    assert less / 2**30 < 0.96 * peak


def more(model, unfused, layout=WHOLE, **how):
    """Bytes that a layer keeps more where kernels are not fused."""
    apart, fused = (
        layer_activation_bytes(dataclasses.replace(model, unfused=names), layout, **how)
        for names in (unfused, "")
    )
    return apart - fused


def test_a_layer_of_the_report():
    # 660 MiB for 4096 tokens: SiLU's output 85 MiB, attention's output once more 32 MiB
    layout = Layout(microbatch_size=2.0)
    assert layer_activation_bytes(SEVEN, layout) / 2**20 == pytest.approx(660, abs=0.5)
    assert more(SEVEN, "activation", layout) / 2**20 == pytest.approx(85)
    assert more(SEVEN, "attention", layout) / 2**20 == pytest.approx(32)
    split = Layout(microbatch_size=2.0, tensor=8.0)
    assert more(SEVEN, "activation+attention", split) / 2**20 == pytest.approx(117 / 8)


GPT, MIXTRAL = pj.load_model("gpt-22b"), pj.load_model("mixtral-8x7b")
LLAMA = pj.load_model("llama3-8b")


def test_norms_in_float32():
    # 4 bytes of the input in float32 and 2 of the normalized one, where a fused norm keeps 2
    assert more(LLAMA, "norm") == 2 * 4 * 8192 * 4096
    assert more(LLAMA, "norm", Layout(tensor=4.0)) == 2 * 4 * 8192 * 4096  # whole
    assert more(LLAMA, "norm", Layout(tensor=4.0, sequence_parallel=1.0)) == 2 * 8192 * 4096
    assert more(LLAMA, "norm", recompute="layernorm") == 0
    apart = dataclasses.replace(LLAMA, unfused="norm")
    head, less = (edge_activation_bytes(model)[1] for model in (apart, LLAMA))
    assert head - less == 4 * 8192 * 4096


def test_softmax_in_float32():
    # with dropout: 4 of its output, 1 of the mask and 2 of what dropout puts out, not 5
    pairs = 64 * 2048**2
    assert more(GPT, "softmax", Layout(tensor=8.0)) == 2 * pairs / 8
    # without: 4 of its output and 2 of the product's input, not 2
    plain = dataclasses.replace(GPT, dropout=False)
    assert more(plain, "softmax", Layout(tensor=8.0)) == 4 * pairs / 8
    assert more(LLAMA, "softmax") == 0  # a flash kernel keeps no scores
    assert more(GPT, "softmax", recompute="selective") == 0


def test_gathered_inputs_of_products():
    # attention and MLP keep h in place of h / 4; a layer of experts keeps that of attention
    layout = Layout(tensor=4.0, sequence_parallel=1.0)
    gathered = 2 * 8192 * (4096 - 1024)
    assert more(LLAMA, "gather", layout) == 2 * gathered
    assert more(LLAMA, "gather", layout, recompute="mlp") == gathered
    assert more(LLAMA, "gather", layout, recompute="layernorm") == 0
    assert more(MIXTRAL, "gather", layout, kind="moe") == 2 * 32768 * (4096 - 1024)
    assert more(LLAMA, "gather", Layout(tensor=4.0)) == 0  # they are whole anyway
    apart = dataclasses.replace(LLAMA, unfused="gather")
    head, less = (edge_activation_bytes(model, layout)[1] for model in (apart, LLAMA))
    assert head - less == gathered


@pytest.mark.parametrize(("unfused", "copies"), [("logits", 1), ("loss", 1), ("logits+loss", 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_holds_copies_of_its_logits_once(unfused, copies, schedule):
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=8)
    model = dataclasses.replace(LLAMA, gradient_bytes=2)
    needs = [
        pj.memory_bytes(pj.Workload(m, 16, tensor_parallel=2), table)
        for m in (dataclasses.replace(model, unfused=unfused), model)
    ]
    copy = 4 * 2 * 8192 * 128256 / 2  # two sequences of a microbatch, half of the vocabulary
    assert needs[0] - needs[1] == pytest.approx([0, 0, 0, copies * copy])


def test_nanotron_reserves_as_much_more_at_every_tensor_parallelism():
    # one kind of jobs gathers again in the backward, the other keeps what it gathered
    rows = read_rows(DATA / "measured" / "nanotron_h100.csv")
    rows = rows.take((rows.pipeline == 1) & (rows.tensor <= 32) & np.isfinite(rows.memory_bytes))
    ratio = rows.memory_bytes / pj.validate(rows).predicted.memory_bytes
    is_slow = np.char.endswith(rows.release.astype(str), "slow links")
    for is_kind, tensor in itertools.product((is_slow, ~is_slow), (1, 2, 4, 8, 16, 32)):
        assert 1.05 < np.median(ratio[is_kind & (rows.tensor == tensor)]) < 1.25


def test_torchtitan_reserves_little_more_without_a_pipeline():
    runs = pj.validate(DATA / "measured" / "torchtitan_h100.csv")
    ratio = runs.measured.memory_bytes / runs.predicted.memory_bytes
    is_fsdp = (runs.measured.zero == 3) & (runs.measured.tensor == 1)
    assert is_fsdp.sum() == 10
    assert ((ratio[is_fsdp] > 1.0) & (ratio[is_fsdp] < 1.15)).all()


@pytest.mark.parametrize("stack", ["torchtitan-2024", "nanotron-2024", "megatron-core-2024"])
def test_a_stack_says_which_kernels_keep_more(stack):
    unfused = pj.load_stack(stack).unfused
    model, software, _ = launcher_defaults(None, LLAMA, pj.load_system("h100"), stack)
    assert model.unfused == unfused == software.unfused
    assert bool(unfused) == (stack != "megatron-core-2024")
    explicit = dataclasses.replace(LLAMA, unfused="norm")  # a model that says it keeps what it says
    assert launcher_defaults(None, explicit, pj.load_system("h100"), stack)[0] == explicit


def test_activation_functions():
    assert more(GPT, "activation") == 0  # of GELU its input and output, fused or not
    # of every token 2 experts of 14336
    assert more(MIXTRAL, "activation", kind="moe") == 2 * 32768 * 2 * 14336
    assert more(MIXTRAL, "activation", kind="moe", recompute="moe_act") == 0
    assert more(LLAMA, "activation", recompute="mlp") == 0
    shared = pj.load_model("deepseek-v3")  # 8 experts and 1 for all, of 2048; 3 dense layers first
    assert more(shared, "activation", kind="moe") == 2 * 4096 * (8 + 1) * 2048
    assert more(shared, "activation", kind="dense") == 2 * 4096 * 18432


def test_what_is_recomputed_is_whole_with_its_unfused_tensors():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    model = dataclasses.replace(LLAMA, vocabulary=0)
    apart = dataclasses.replace(model, unfused="activation+attention")
    needs = [pj.memory_bytes(pj.Workload(m, 8, recompute="full"), table)[0] for m in (apart, model)]
    assert needs[0] - needs[1] == pytest.approx(2 * 8192 * (14336 + 4096))  # of one layer


# Memory of measured runs: what was allocated on the fullest accelerator, nothing fitted

WIDE = {"gradient_bytes": 4}
SIMUMAX = DATA / "measured" / "simumax_b200.csv"


def layout_workload(rows, k, **changes):
    message = {
        "tensor_parallel": int(rows.tensor[k]),
        "sequence_parallel": bool(rows.sequence_parallel[k]),
        "context_parallel": int(rows.context[k]),
        "expert_parallel": int(rows.expert[k]),
        "expert_tensor_parallel": int(rows.expert_tensor[k]),
        "data_parallel": int(rows.data[k]),
        "zero": int(rows.zero[k]),
    }
    minibatch = int(rows.microbatches[k] * rows.microbatch_size[k])
    return pj.Workload(rows.models[rows.model[k]], minibatch, **(message | changes))


def errors(path, **changes):
    """Predicted over measured memory, less 1, by row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults that the file does not say
        rows = read_rows(path)
    result = []
    for k in range(len(rows)):
        table = build("1f1b", int(rows.pipeline[k]), int(rows.microbatches[k]))
        need = pj.memory_bytes(layout_workload(rows, k, **changes), table).max()
        result.append(need / rows.memory_bytes[k] - 1)
    return np.array(result)


def test_dense_and_expert_models_on_b200():
    """Megatron-core with 12 or 4 layers: t, P, c, e; sequences of 4,096 to 131,072 tokens."""
    result = errors(SIMUMAX)
    assert len(result) == 22
    assert np.abs(result).mean() < 0.006
    assert np.abs(result).max() < 0.016
    # and the replicas do split the optimizer's state: else the first row alone is 70 % over
    assert errors(SIMUMAX, zero=0).max() > 0.5


@pytest.mark.parametrize("per_worker", [1, 2])
def test_buffers_are_there_once_per_worker(per_worker):
    model = pj.load_model("llama3-8b")
    wide = pj.Workload(pj.Model(**(vars(model) | WIDE)), minibatch=8)
    name = "1f1b" if per_worker == 1 else "interleaved-1f1b"
    options = {} if per_worker == 1 else {"stages_per_worker": per_worker}
    table = pj.schedules.build(name, num_workers=2, num_microbatches=8, **options)
    buffers = stage_bytes(wide, table).buffers
    without_head, with_head = (
        buffer_bytes(wide.model, Layout(), dense=1, moe=0, head=head) for head in (0, 1)
    )
    by_worker = [buffers[table.placement[0] == worker].sum() for worker in range(2)]
    assert by_worker == pytest.approx([without_head, with_head])
    assert stage_bytes(pj.Workload(model, 8), table).buffers.tolist() == [0] * len(buffers)


def test_after_i_the_last_stage_keeps_logits_gradient_in_the_models_bytes():
    model = pj.load_model("gpt-22b")
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=4)
    memory = stage_bytes(pj.Workload(model, minibatch=4), table)
    needed = memory.weight_share * memory.activations
    head = head_weight_grad_bytes(model)
    assert needed[-1] - needed[1] == pytest.approx(head)
    assert head == 2 * 2048 * (6144 + 51200)
