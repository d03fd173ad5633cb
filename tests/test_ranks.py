"""Parameters of a rank, to the digit: sums by hand, and what two public logs of 2021 print."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from step_flop import step_flop

import pipejax as pj
from pipejax.costs.layers.collectives import layer_collectives
from pipejax.costs.layers.formulas import layer_flop
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import LatentAttention, MixtureOfExperts
from pipejax.costs.stage.stage_work import stage_bytes, static_parts

GPT = pj.load_model("gpt-22b")  # biases, learned positions, tied embeddings
LLAMA = pj.load_model("llama3-8b")  # none of these; h 4096, f 14336, kv width 1024
MIXTRAL = pj.load_model("mixtral-8x7b")  # the same layers, 8 experts


def gpt(layers, hidden, vocabulary, sequence, **changes):
    sizes = {"layers": layers, "hidden": hidden, "heads": 8, "kv_heads": 8}
    sizes |= {"ffn_hidden": 4 * hidden, "vocabulary": vocabulary, "sequence": sequence}
    return dataclasses.replace(GPT, **sizes, **changes)


def llama(**changes):
    """A small one: 4 layers, h 64, 8 heads of 8, 2 of keys, f 96, V 1000."""
    sizes = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn_hidden": 96}
    return dataclasses.replace(LLAMA, **sizes, vocabulary=1000, sequence=32, **changes)


def gpt_layer(h, t):
    """12 h h and 7 h of column biases are split; 2 h of row biases and 4 h of norms are whole."""
    return (12 * h * h + 7 * h) // t + 6 * h


# products of a small Llama's attention and MLP, split by t: queries and outputs 64 x 64, keys and
# values 64 x 16, three matrices 64 x 96
ATTENTION, MLP = 2 * 64 * 64 + 2 * 64 * 16, 3 * 64 * 96
NORMS = 2 * 64  # of a layer, without biases
EXPERT = 3 * 64 * 24
MOE = MixtureOfExperts(experts=8, top_k=2, expert_hidden=24)
# latent attention: down to 32 of queries, to 16 and 4 of keys, whole; up to 8 heads of 8 + 4 and of
# 8 + 8, out of 8 heads of 8, split; norms of 32 and 16
LATENT = LatentAttention(kv_rank=16, rope_width=4, value_width=8, query_rank=32)
DOWN, UP = 64 * (32 + 16 + 4) + 32 + 16, 32 * 8 * 12 + 16 * 8 * 16 + 8 * 8 * 64
MIXTRAL_LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024  # attention, split by t
MIXTRAL_EXPERTS = 8 * 3 * 4096 * 14336
MIXTRAL_WHOLE = 2 * 4096 + 8 * 4096  # norms and the router

# model, workers, degrees, parameters of an accelerator of each worker
HALF, EDGE = (ATTENTION + MLP) // 2 + NORMS, 1000 * 64 // 2  # of a layer; of embedding or head
WORDS, PLACES = 1024 * 64, 32 * 64  # of a small GPT
SPARSE = (UP + EXPERT) // 4 + DOWN + NORMS + 8 * 64 + 8 * EXPERT // 2  # one latent layer
T2, T4, T8 = ({"tensor_parallel": t} for t in (2, 4, 8))
THIRTEEN = (1_712_942_080, 1_573_350_400, 1_573_350_400, 1_702_466_560)
SMALL = gpt(4, 64, 1024, 32)
UNTIED = dataclasses.replace(SMALL, tied_embeddings=False)
BARE = 4 * gpt_layer(64, 4) + PLACES + 2 * 64
QUARTER = MIXTRAL_LAYER // 4 + MIXTRAL_EXPERTS // (2 * 2) + MIXTRAL_WHOLE
# attention; the bias behind it and two norms; the router; experts
BIASED = (4 * 64 * 64 + 3 * 64) // 2, 64 + 4 * 64, (64 + 1) * 8, 4 * ((2 * 64 * 24 + 24) // 2 + 64)
HEADLESS = dataclasses.replace(llama(), vocabulary=0)
MTP = 2 * 64 * 64 // 2 + 3 * 64  # what a layer for a further token has more
FURTHER, LAST = llama(mtp_layers=1), 3 * HALF + MTP

CASES = {
    "log, 36 layers, t 2 p 2": (gpt(36, 1280, 50432, 1024), 2, T2, (210_753_280, 209_445_120)),
    # the difference of the middle is 10 layers of h 5120; of the ends 50,432 h / 2, and 2,048 h of
    # positions on the first and 2 h of the norm on the last
    "log, 13 billion, t 2 p 4": (gpt(40, 5120, 50432, 2048), 4, T2, THIRTEEN),
    "tied on one worker: no copy": (SMALL, 1, T4, (BARE + WORDS // 4,)),
    "untied, with positions": (UNTIED, 1, T4, (BARE + 2 * WORDS // 4,)),
    "norms with biases, products without": (
        *(gpt(2, 64, 1024, 32, biases=False, norm_biases=True), 2, T2),
        tuple(12 * 64 * 64 // 2 + 4 * 64 + WORDS // 2 + more for more in (PLACES, 2 * 64)),
    ),
    "grouped queries, no biases": (llama(), 2, T2, (2 * HALF + EDGE, 2 * HALF + EDGE + 64)),
    "biases of queries, keys and values, norms of a head": (
        *(llama(qkv_biases=True, qk_norms=True), 1, T2),
        (4 * ((ATTENTION + MLP + 64 + 2 * 16) // 2 + NORMS + 2 * 8) + 1000 * 64 + 64,),
    ),
    "no head, no norm before it": (HEADLESS, 2, T2, (2 * HALF,) * 2),
    "mixtral, t 8: experts cut in 8": (MIXTRAL, 2, T8, (2_919_497_728, 2_919_501_824)),
    "mixtral, t 2 e 4 etp 2": (
        *(MIXTRAL, 2, T2 | {"expert_parallel": 4, "data_parallel": 4}),
        (3_220_307_968, 3_220_312_064),
    ),
    "mixtral, t 2 e 4 etp 1": (
        *(MIXTRAL, 2, T2 | {"expert_parallel": 4, "data_parallel": 2, "expert_tensor_parallel": 1}),
        (6_038_880_256, 6_038_884_352),
    ),
    "mixtral, t 4 e 2 etp 2": (
        *(MIXTRAL, 1, T4 | {"expert_parallel": 2, "expert_tensor_parallel": 2}),
        (32 * QUARTER + 2 * 32000 * 4096 // 4 + 4096,),
    ),
    # GPT with experts: 7 h of biases are now 3 h of queries, keys, values and per expert f inside,
    # h behind; the router has a bias for each expert
    "biases in experts and router, t 2 e 2 etp 2": (
        *(gpt(2, 64, 1024, 32, moe=MOE), 1, T2 | {"expert_parallel": 2, "data_parallel": 2}),
        (2 * sum(BIASED) + WORDS // 2 + PLACES + 2 * 64,),
    ),
    # the first of 4 layers is dense; the ways down and both norms of latent attention are whole
    "latent attention, a shared expert, t 4 e 2 etp 1": (
        llama(mla=LATENT, moe=dataclasses.replace(MOE, shared_experts=1, dense_layers=1)),
        2,
        T4 | {"expert_parallel": 2, "expert_tensor_parallel": 1},
        ((UP + MLP) // 4 + DOWN + NORMS + SPARSE + EDGE // 2, 2 * SPARSE + EDGE // 2 + 64),
    ),
    # a layer for a further token has a projection 2 h x h, split, and three norms; its stage looks
    # up tokens, in a copy of the embedding
    "MTP behind an untied head": (FURTHER, 2, T2, (2 * HALF + EDGE, LAST + 2 * EDGE + 64)),
    "MTP with a tied head: one copy serves both": (
        *(dataclasses.replace(FURTHER, tied_embeddings=True), 2, T2),
        (2 * HALF + EDGE, LAST + EDGE + 64),
    ),
    "MTP on a stage of its own": (
        *(FURTHER, 3, T2 | {"pipeline_layout": "Ett|ttm|L"}),
        (2 * HALF + EDGE, LAST + EDGE, EDGE + 64),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_a_rank(name):
    model, workers, degrees, counts = CASES[name]
    table = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=workers)
    workload = pj.Workload(model, minibatch=workers, **degrees)
    weights = static_parts(workload, table)["parameters"] / model.element_bytes
    assert weights.tolist() == list(counts)
    if workers == 1 and degrees["tensor_parallel"] == 1:
        assert counts == (model.parameters,)


def test_all_accelerators_together_hold_the_model():
    for model in (GPT, LLAMA, MIXTRAL, pj.load_model("deepseek-v3-mtp")):
        table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
        layer = model.shared_parameters + model.expert_parameters
        mtp = model.mtp_layers * (layer + 2 * model.hidden**2 + 3 * model.hidden)  # three norms
        weights = stage_bytes(pj.Workload(model, minibatch=1), table).weights
        assert weights.tolist() == [model.element_bytes * (model.parameters + mtp)]
    assert LLAMA.parameters == 8_030_261_248  # as published with the weights


def test_optimizer_state_is_split_by_replicas_of_experts():
    """t 2, d 4: e 2 of etp 2 leave 2 replicas of experts, of etp 1 four; 4 of the rest."""
    table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
    for parts, replicas in ((2, 2), (1, 4)):
        degrees = T2 | {"expert_parallel": 2, "expert_tensor_parallel": parts, "data_parallel": 4}
        workload = pj.Workload(MIXTRAL, minibatch=1, **degrees, zero=1)
        experts = 32 * MIXTRAL_EXPERTS / (2 * parts)
        rest = 32 * (MIXTRAL_LAYER / 2 + MIXTRAL_WHOLE) + 2 * 32000 * 4096 / 2 + 4096
        memory = stage_bytes(workload, table)
        assert memory.weights.tolist() == [2 * (experts + rest)]
        assert memory.optimizer[0] == pytest.approx(12 * (experts / replicas + rest / 4))


def flop(layout):
    ops = layer_ops(MIXTRAL, layout, "moe")
    return sum(op.flop.forward for op in ops if op.name.startswith("expert"))


def test_experts_compute_the_same_however_they_are_cut():
    """2 of 8 experts for each of 32,768 tokens: 2 x 3 h f each; t accelerators share them."""
    whole = 2 * 32768 * 2 * 3 * 4096 * 14336
    split = {"tensor": 4.0, "sequence_parallel": 1.0}
    for expert, parts in ((1, 1), (1, 4), (2, 2), (4, 1)):
        layout = Layout(**split, expert=expert, expert_tensor=parts)
        assert flop(layout) == pytest.approx(whole / 4)
    # without sequence parallelism each accelerator has all tokens, and cut experts share the work
    assert flop(Layout(tensor=4.0, expert_tensor=4.0)) == pytest.approx(whole / 4)
    assert flop(Layout(tensor=4.0)) == pytest.approx(whole)


def exchanges(recompute="none", **degrees):
    result = layer_collectives(MIXTRAL, Layout(tensor=4.0, **degrees), "moe", recompute=recompute)
    return {
        collective.kind: (collective.volume.forward, collective.count)
        for collective in result
        if collective.group == "expert_tensor" and collective.count.forward
    }


def test_who_splits_an_expert_gathers_its_tokens():
    """32,768 tokens x 2 experts x 4096 x 2 bytes over t = 4, and those of etp accelerators."""
    sent = 32768 * 2 * 4096 * 2 / 4
    both = exchanges(sequence_parallel=1.0, expert_tensor=2.0)
    assert both == {"all_gather": (2 * sent, (1, 1, 0)), "reduce_scatter": (2 * sent, (1, 1, 0))}
    again = exchanges("moe", sequence_parallel=1.0, expert_tensor=2.0)
    assert again["all_gather"] == (2 * sent, (1, 2, 0))
    assert exchanges(sequence_parallel=1.0) == {}
    # all have the same tokens without sequence parallelism: outputs and gradients are summed
    assert exchanges(expert_tensor=4.0) == {"all_reduce": (4 * sent, (1, 1, 0))}


def test_ranks_of_experts_are_neighbours():
    """t 4, d 4, e 2, etp 2: parts 0 and 1, experts 0 and 2, replicas 0, 4, 8 and 12."""
    layout = Layout(tensor=4.0, data=4.0, expert=2.0, expert_tensor=2.0)
    inside = layout.layer_groups
    groups = inside["expert_tensor"], inside["expert"], layout.replica_groups[1]
    ranks = [
        sorted(
            sum(place * stride for place, stride in zip(places, group.strides, strict=True))
            for places in np.ndindex(*(int(extent) for extent in group.extents))
        )
        for group in groups
    ]
    assert ranks == [[0, 1], [0, 2], [0, 4, 8, 12]]


SIZES = ("-s", "1f1b", "-P", 2, "-M", 8, "-m", "mixtral-8x7b", "-y", "h100", "--minibatch", 8)


def test_the_default_is_said_and_an_option_changes_it(answer, mistake):
    default = answer("evaluate", *SIZES, "--tensor-parallel", 8)
    (note,) = default["notes"]
    assert "each expert in 8 parts" in note
    assert "--expert-tensor-parallel" in note
    whole = answer("evaluate", *SIZES, "--tensor-parallel", 8, "--expert-tensor-parallel", 1)
    assert "notes" not in whole
    counts = [result["memory_parts"]["parameters"][0] / 2 for result in (default, whole)]
    assert counts[1] - counts[0] == 16 * MIXTRAL_EXPERTS * 7 / 8
    spread = ("--tensor-parallel", 2, "--expert-parallel", 4, "--data-parallel", 2)
    line = mistake("evaluate", *SIZES, *spread)  # Megatron refuses it, too
    assert (
        "--expert-tensor-parallel 2 (--tensor-parallel, by default) x --expert-parallel 4" in line
    )
    assert "1 leaves experts whole" in line


def test_a_plan_searches_whole_and_cut_experts():
    from pipejax.sweep.plan.layouts import PlanRequest, enumerate_layouts, layout_workload

    request = PlanRequest(MIXTRAL, pj.load_system("h100"), 16, 16, choices={"tensor": (4,)})
    result = enumerate_layouts(request)
    assert {*result.expert_tensor.tolist()} == {1, 4}
    # t c d = 16 / P accelerators hold a stage
    assert ((16 // result.pipeline) % (result.expert * result.expert_tensor) == 0).all()
    for parts, chosen in ((4, 0), (1, 1)):
        place = int(np.flatnonzero(result.expert_tensor == parts)[0])
        assert layout_workload(request, result, place).expert_tensor_parallel == chosen
    asked = dataclasses.replace(request, choices={"tensor": (4,), "expert_tensor": (2,)})
    assert {*enumerate_layouts(asked).expert_tensor.tolist()} == {2}


# Shapes of models: published parameters, and files that describe what cannot be

# billions: all, and those that one token meets
PUBLISHED = json.loads((Path(__file__).parent / "data/published_parameters.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name):
    model = pj.load_model(name)
    active = model.active_parameters
    if name == "gpt-oss-120b":  # its model card counts so
        active -= model.embedding_parameters
    for result, printed in zip((model.parameters, active), PUBLISHED[name], strict=True):
        assert result / 1e9 == pytest.approx(printed, rel=0.021 if printed < 50 else 0.004)


def test_a_layer_of_further_prediction_is_none_of_the_published_parameters():
    with_it, without = map(pj.load_model, ("deepseek-v3-mtp", "deepseek-v3"))
    assert with_it.parameters == without.parameters
    # 685 billion with it, of which embedding and head are there already
    shared = with_it.embedding_parameters + with_it.head_parameters
    layer = with_it.shared_parameters + with_it.expert_parameters
    mtp = layer + 2 * with_it.hidden**2 + 3 * with_it.hidden
    assert (with_it.parameters + mtp + shared) / 1e9 == pytest.approx(685, 0.001)


@pytest.mark.parametrize("query_rank", [None, 1536])
def test_latent_attention_has_the_matrices_of_its_paper(query_rank):
    """DeepSeek-V2 (arXiv:2405.04434), appendix C; queries may be projected at once, as in its Lite."""
    model = pj.load_model("deepseek-v3")
    mla = dataclasses.replace(model.mla, query_rank=query_rank)
    h, heads, kv, without, rope, value = 7168, 128, 512, 128, 64, 128
    queries = heads * (without + rope)
    query = h * queries if query_rank is None else query_rank * (h + queries)
    keys_and_values = h * (kv + rope) + kv * heads * (without + value)
    result = dataclasses.replace(model, mla=mla).attention_matrices
    assert result == query + keys_and_values + heads * value * h


def test_flop_are_six_per_active_parameter_and_token():
    """In W each matrix that a token meets counts twice, in a step six times."""
    model = pj.load_model("mixtral-8x7b")
    short = dataclasses.replace(model, sequence=1)
    met = model.active_parameters - model.embedding_parameters
    assert layer_flop(short, 1, kind="moe").weight_grad == 2 * short.active_matrices("moe")
    assert step_flop(short, 1) / 6 == pytest.approx(met, rel=1e-3)


def test_experts_as_wide_as_the_mlp_that_all_tokens_meet_are_that_mlp():
    dense = pj.load_model("llama3-8b")
    moe = pj.costing.MixtureOfExperts(experts=1, top_k=1, expert_hidden=dense.ffn_hidden)
    mixed = dataclasses.replace(dense, moe=moe)
    router = dense.hidden
    assert mixed.shared_parameters + mixed.expert_parameters == dense.layer_parameters + router
    assert mixed.parameters == dense.parameters + dense.layers * router


def test_a_model_is_a_pytree_of_its_numbers():
    for name in ("deepseek-v3", "gpt-22b"):
        model = pj.load_model(name)
        with jax.enable_x64(True):
            twice = jax.tree.map(lambda *leaves: np.stack(leaves), model, model)
        assert twice.parameters.tolist() == [model.parameters] * 2
