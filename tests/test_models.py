"""Shapes of models: published parameters, and files that describe what cannot be."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from step_flop import step_flop

import pipejax as pj
from pipejax.costs.layers.formulas import layer_flop
from pipejax.costs.model.model import model_names
from pipejax.costs.system.system import data_file

PUBLISHED = {  # billions: all, and those that one token meets
    "llama3-8b": (8.03, 8.03),
    "llama3-70b": (70.6, 70.6),
    "llama3-405b": (405.9, 405.9),
    "gpt3-175b": (174.6, 174.6),
    "gpt-1t": (1008.0, 1008.0),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-120b": (116.83, 5.13),  # without the embedding, as its model card counts
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name):
    model = pj.load_model(name)
    active = model.active_parameters
    if name == "gpt-oss-120b":
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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral-8x7b", {"moe": {"top_k": 9}}, "moe: top_k must be at most experts, 8, got 9"),
        ("mixtral-8x7b", {"moe": {"wide": 9}}, "moe: unknown key 'wide'"),
        ("deepseek-v3", {"moe": {"dense_layers": 62}}, "dense_layers must be at most layers, 61"),
        ("deepseek-v3", {"mla": {"kv_rank": 0}}, "mla: kv_rank must be a whole number of at least"),
        ("mixtral-8x7b", {"moe": {"capacity_factor": -1}}, "moe: capacity_factor must be a number"),
        ("mixtral-8x7b", {"moe": {"capacity_factor": 0}}, "capacity_factor must be above 0"),
        ("mixtral-8x7b", {"moe": 8}, "moe must be an object with the keys experts"),
        ("gpt-oss-120b", {"windowed_layers": 37}, "windowed_layers must be at most layers, 36"),
        ("gpt-oss-120b", {"window_tokens": 5000}, "window must be at most sequence, 4096"),
        ("llama3-8b", {"bytes_per_element": 16}, "bytes_per_element must be at most 4, got 16"),
        ("llama3-8b", {"gradient_bytes": 32}, "gradient_bytes must be at most 4, got 32"),
        ("llama3-8b", {"head_width": 0}, "head_width must be a whole number of at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(name, changes, message, tmp_path):
    described = json.loads(data_file("models", name, "model").read_text())
    for key, values in changes.items():
        is_part = isinstance(values, dict)
        described[key] = described[key] | values if is_part else values
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=message):
        pj.load_model(path)


def test_all_that_the_measured_data_name_is_there():
    assert set(PUBLISHED) <= set(model_names())
