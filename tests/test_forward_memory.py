"""Memory of runs without a backward: weights, keys and values, one layer's activations."""

import dataclasses

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.stage_work import stage_bytes, static_parts
from pipejax.schedules.cells.grammar import Grammar

LLAMA = pj.load_model("llama3-70b")  # h 8192, 64 heads, 8 of keys and values, MLP 28672


def prefill(workers, slices, requests=1):
    return build("chunked-prefill", workers, requests, slices=slices)


def caches(workload, table):
    """Keys and values (workers) at the end of the run [B]."""
    return pj.memory_bytes(workload, table) - sum(static_parts(workload, table).values())


def at_work(workload, table):
    return static_parts(workload, table)["activations"]


def test_a_prompt_in_chunks():
    table, workload = prefill(8, 8), pj.Workload(LLAMA, 1)
    # 10 layers a stage, 2 x 1024 units of keys and values, 8192 tokens, 2 bytes
    np.testing.assert_allclose(caches(workload, table), 10 * 2 * 1024 * 8192 * 2)
    # one layer of a chunk of 1024 tokens: 6 h + 2 x 1024 + 3 x 28672 units, two bytes each
    layer = 2 * 1024 * (6 * 8192 + 2048 + 3 * 28672)
    np.testing.assert_allclose(at_work(workload, table)[1:7], layer)
    # the logits of the last token in float32
    assert at_work(workload, table)[7] - layer == pytest.approx(4 * 128256)
    assert {*static_parts(workload, table)} == {"parameters", "activations"}
    # 10 layers of 855.6 million parameters, and an embedding or head of 128256 x 8192 at the ends
    needs = pj.memory_bytes(workload, table) / 1e9
    np.testing.assert_allclose(needs[[1, 0]], [17.11 + 0.34 + 0.28, 19.21 + 0.34 + 0.28], atol=0.01)


def test_requests_at_once_keep_their_keys_and_values():
    # 3 requests of 2 prompts each, all of whose tokens are held at the end
    table, workload = prefill(4, 4, requests=3), pj.Workload(LLAMA, 6)
    np.testing.assert_allclose(caches(workload, table), 20 * 2 * 1024 * 8192 * 2 * 6)
    layer = 2 * 2 * 2048 * (6 * 8192 + 2048 + 3 * 28672)
    assert at_work(workload, table)[1] == pytest.approx(layer)
    assert at_work(workload, table)[3] - layer == pytest.approx(2 * 4 * 128256)


@pytest.mark.parametrize(("tensor", "heads"), [(4, 2), (8, 1), (16, 1)])
def test_a_head_of_keys_and_values_is_on_one_accelerator(tensor, heads):
    # 8 heads of 128 units: beyond 8 accelerators each holds a whole one
    table, workload = prefill(8, 8), pj.Workload(LLAMA, 1, tensor_parallel=tensor)
    np.testing.assert_allclose(caches(workload, table), 10 * 2 * 128 * heads * 8192 * 2)


def test_latent_attention_keeps_its_vector():
    # 512 + 64 units of each token, whole on every accelerator; 61 layers on 1 worker
    model, table = pj.load_model("deepseek-v3"), prefill(1, 4)
    for tensor in (1, 8):
        workload = pj.Workload(model, 1, tensor_parallel=tensor)
        np.testing.assert_allclose(caches(workload, table), 61 * 576 * 4096 * 2)


def test_experts_at_work():
    # a token meets 2 experts of 14336: in and out 2 x 2 h, inside 2 x 3 x 14336
    model, table = pj.load_model("mixtral-8x7b"), prefill(4, 8)
    layer = 2 * 4096 * (6 * 4096 + 2048 + 2 * 2 * 4096 + 2 * 3 * 14336)
    assert at_work(pj.Workload(model, 1), table)[1] == pytest.approx(layer)
    np.testing.assert_allclose(
        caches(pj.Workload(model, 1), table), 8 * 2 * 1024 * model.sequence * 2
    )


def test_dropout_has_no_masks_and_scores_grow_with_the_chunk():
    # gpt-22b, 2 chunks of 1024 tokens: 8 h + 2 x 4 h units, and the second meets 1536 on the mean
    model, table = pj.load_model("gpt-22b"), prefill(4, 2)
    work = at_work(pj.Workload(model, 1), table)[1]
    units = 1024 * 16 * 6144
    assert work - 2 * units == pytest.approx(2 * 64 * 1024 * 3072)  # scores as they are counted


def test_a_table_of_ones_own_without_slices():
    grammar = Grammar(forward_only=True)
    rows = [["0F0", "0F1", "0F2", ""], ["", "1F0", "1F1", "1F2"]]
    table = pj.ScheduleTable.from_rows(rows, grammar=grammar)
    workload = pj.Workload(LLAMA, 6)  # 2 sequences a request, 40 layers a stage
    np.testing.assert_allclose(caches(workload, table), 40 * 2 * 1024 * 8192 * 2 * 6)
    memory = stage_bytes(workload, table)
    zeros = memory.gradients, memory.optimizer, memory.version, *memory.at_work
    assert not np.any(zeros)


def test_training_of_the_same_model_is_unchanged():
    table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=8)
    assert "gradients" in static_parts(pj.Workload(LLAMA, 8), table)


def test_the_report_says_what_is_held(answer, call):
    run = ["evaluate", "-s", "chunked-prefill", "-P", 8, "-M", 1, "--slices", 8]
    run += ["-m", "llama3-70b", "-y", "h100", "--minibatch", 1]
    result = answer(*run)
    assert result["fits"]
    assert {*result["memory_parts"]} == {"parameters", "activations", "keys and values", "reserve"}
    _, text, _ = call(*run, "--details")
    assert "keys and values 0.336 GB" in " ".join(text.split())
    assert "peak keys and values" in " ".join(text.split())


def test_dropout_is_off_where_nothing_is_trained():
    model = dataclasses.replace(LLAMA, dropout=True)
    same = [at_work(pj.Workload(m, 1), prefill(8, 8)).tolist() for m in (model, LLAMA)]
    assert same[0] == same[1]
