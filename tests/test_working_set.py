"""Memory of recomputation: what F leaves, what is whole in a backward, what W holds until it ends.

Numbers are counted by hand. llama3-8b keeps per token of a layer, h = 4096, in units: 2 h of norms'
inputs, 2 h of products' inputs, h of queries, 2 x 1024 of keys and values, h of attention's output
and 3 x 14336 in the MLP: 69632, two bytes each. Of the MLP are 43008, and a checkpoint is h.
"""

import dataclasses

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.stage_work import stage_bytes, static_parts

LLAMA = pj.load_model("llama3-8b")
BODY = dataclasses.replace(LLAMA, vocabulary=0)  # no embedding, no head
TOKENS = 8192
LAYER, MLP, CHECKPOINT = (2 * TOKENS * units for units in (69632, 43008, 4096))
SPLIT = ("zb-h1", "zb-h2", "zb-v", "interleaved-zb", "v-half", "dualpipe", "dualpipe-v")


def activations(workload, table):
    """Peaks of activations alone (workers) [B]."""
    return pj.memory_bytes(workload, table) - sum(static_parts(workload, table).values())


def counted(table, remaining, in_b, in_i, for_w):
    """Walk along the rows: F leaves, B and I bring back, I frees all but what W needs."""
    peaks = []
    for worker in range(table.num_workers):
        held = peak = 0.0
        for slot in range(table.num_slots):
            ops = table.cell(worker, slot)
            held += sum({"F": remaining, "B": in_b, "I": in_i}.get(op.phase.name, 0) for op in ops)
            peak = max(peak, held)
            ends = {"B": remaining + in_b, "I": remaining + in_i - for_w, "W": for_w}
            held -= sum(ends.get(op.phase.name, 0) for op in ops)
        peaks.append(peak)
    return peaks


WAYS = {  # of n layers: F leaves, B brings back, I brings back
    "none": lambda n: (n * LAYER, 0, 0),
    "full": lambda n: (n * CHECKPOINT, LAYER - CHECKPOINT, n * (LAYER - CHECKPOINT)),
    "mlp": lambda n: (n * (LAYER - MLP), MLP, n * MLP),
    # one checkpoint of two layers, both whole at once
    "uniform:2": lambda n: (
        n / 2 * CHECKPOINT,
        2 * LAYER - CHECKPOINT,
        n * LAYER - n / 2 * CHECKPOINT,
    ),
    "block:1": lambda n: (CHECKPOINT + (n - 1) * LAYER, LAYER - CHECKPOINT, LAYER - CHECKPOINT),
}


@pytest.mark.parametrize("recompute", WAYS)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "chimera", *SPLIT])
def test_what_is_held_follows_the_ops(name, recompute):
    table = build(name, 4, 16)
    layers = 32 / table.num_stages  # flash attention, no dropout: W needs all that a layer keeps
    peaks = counted(table, *WAYS[recompute](layers), for_w=layers * LAYER)
    workload = pj.Workload(BODY, 16, recompute=recompute)
    np.testing.assert_allclose(activations(workload, table), peaks, rtol=1e-12)


@pytest.mark.parametrize("recompute", ["full", "uniform:4"])
@pytest.mark.parametrize("name", SPLIT)
def test_recomputation_within_i_holds_what_r_before_it_does(name, recompute):
    table, workload = build(name, 4, 16), pj.Workload(LLAMA, 16, recompute=recompute)
    within, cells = (activations(workload, t) for t in (table, table.with_recomputation()))
    if "B" in {phase.name for phase in table.used_phases}:  # R brings a stage back, B a layer
        assert (within <= cells).all()
    else:
        np.testing.assert_allclose(within, cells, rtol=1e-12)


def test_zero_bubble_with_recomputation_by_hand():
    # 8 layers a stage: c = 0.537 GB, a = 9.127 GB; worker w holds w of them whole when the next I
    # runs, and the head 4.33 GB from F to I, 2.17 GB from I to W
    peaks = activations(pj.Workload(LLAMA, 16, recompute="full"), build("zb-h1", 4, 16)) / 1e9
    np.testing.assert_allclose(peaks, [10.74, 19.33, 27.92, 47.35], atol=0.01)


LONG = dataclasses.replace(LLAMA, sequence=65536)
GB = {  # of worker 0 of 8, 4 layers each, 8 in flight; at 65536 tokens: layer 9.127, checkpoint 0.537
    "full": 8 * 4 * 0.536871 + 9.126806 - 0.536871,
    "uniform:2": 8 * 2 * 0.536871 + 2 * 9.126806 - 0.536871,
    "uniform:3": 8 * 2 * 0.536871 + 3 * 9.126806 - 0.536871,  # groups of 3 and 1
    "block:3": 8 * (3 * 0.536871 + 9.126806) + 9.126806 - 0.536871,
    "mlp": 8 * 4 * (9.126806 - 5.637145) + 5.637145,
}


@pytest.mark.parametrize("recompute", GB)
def test_one_layer_group_or_module_is_whole_while_it_is_recomputed(recompute):
    peaks = activations(pj.Workload(LONG, 16, recompute=recompute), build("1f1b", 8, 16))
    assert peaks[0] / 1e9 == pytest.approx(GB[recompute], rel=1e-6)


def test_tensor_parallelism_splits_the_whole_layer():
    # t = 8, no sequence parallelism: 4 h whole, 53248 units by 8; a checkpoint is whole
    workload = pj.Workload(LONG, 16, recompute="full", tensor_parallel=8)
    layer, checkpoint = 2 * 65536 * (4 * 4096 + 53248 / 8), 2 * 65536 * 4096
    peaks = activations(workload, build("1f1b", 8, 16))
    assert peaks[0] == pytest.approx(8 * 4 * checkpoint + layer - checkpoint)
    shared = dataclasses.replace(workload, sequence_parallel=True)
    layer, checkpoint = layer / (4 * 4096 + 53248 / 8) * 69632 / 8, checkpoint / 8
    peaks = activations(shared, build("1f1b", 8, 16))
    assert peaks[0] == pytest.approx(8 * 4 * checkpoint + layer - checkpoint)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_scores_of_one_layer_come_back_where_attention_is_recomputed(name):
    # 5 a s^2 b bytes by t; W needs none of them, so I goes layer by layer too
    model = dataclasses.replace(pj.load_model("gpt-22b"), vocabulary=0)
    workload = pj.Workload(model, 8, recompute="selective", tensor_parallel=8)
    memory = stage_bytes(workload, build(name, 4, 8))
    scores = 5 * 64 * 2048**2 / 8
    assert [size.tolist() for size in memory.at_work] == [[scores] * 4, [scores] * 4, [0.0] * 4]


def test_the_kind_of_layer_that_is_whole_is_the_widest():
    # mixtral: tokens meet 2 experts of 14336: inputs and outputs 2 x 2 h, MLP 2 x 3 x 14336
    model = dataclasses.replace(pj.load_model("mixtral-8x7b"), vocabulary=0, sequence=8192)
    workload = pj.Workload(model, 8, recompute="full")
    layer = 2 * TOKENS * (6 * 4096 + 2048 + 2 * 2 * 4096 + 2 * 3 * 14336)
    in_b = stage_bytes(workload, build("1f1b", 4, 8)).at_work[0]
    assert in_b.tolist() == [layer - CHECKPOINT] * 4


def test_frozen_weights_have_no_w_that_holds_what_i_brought_back():
    # below adapters there is no W: I goes layer by layer, as B does
    workload = pj.Workload(BODY, 16, recompute="full", frozen=True)
    in_b, in_i, in_w = stage_bytes(workload, build("zb-h1", 4, 16)).at_work
    assert (in_i == in_b).all()
    assert (in_w == 0).all()


AGAIN = {  # by how many activations of worker 0, 4 in flight, 8 layers each; W starts as I did
    ("full", False): 4 * 8 * CHECKPOINT + LAYER - CHECKPOINT,
    ("full", True): 4 * 8 * CHECKPOINT + 8 * (LAYER - CHECKPOINT),  # R brings a stage back
    ("block:5", False): 4 * (5 * CHECKPOINT + 3 * LAYER) + LAYER - CHECKPOINT,
    ("uniform:4", False): 4 * 2 * CHECKPOINT + 4 * LAYER - CHECKPOINT,
    ("none", True): 4 * 8 * CHECKPOINT + 8 * (LAYER - CHECKPOINT),
}


@pytest.mark.parametrize(("recompute", "cells"), AGAIN)
def test_w_that_recomputes_again_holds_checkpoints(recompute, cells):
    table = build("zb-h1", 4, 16)
    table = table.with_recomputation() if cells else table
    workload = pj.Workload(BODY, 16, recompute=recompute, recompute_again=True)
    assert activations(workload, table)[0] == pytest.approx(AGAIN[recompute, cells])


@pytest.mark.parametrize("cells", [False, True])
@pytest.mark.parametrize(("recompute", "layers"), [("full", 8), ("block:3", 3), ("uniform:2", 8)])
def test_w_that_recomputes_again_lasts_w_and_r(recompute, layers, cells):
    table, h100 = build("zb-h1", 4, 16), pj.load_system("h100")
    table = table.with_recomputation() if cells else table
    workload = pj.Workload(LLAMA, 16, recompute=recompute)
    costs = pj.stage_costs(workload, h100, table)
    again = pj.stage_costs(dataclasses.replace(workload, recompute_again=True), h100, table)
    share = 1 if cells else layers / 8  # R brings all layers of a stage back
    longer = np.asarray(again.weight_grad) - np.asarray(costs.weight_grad)
    np.testing.assert_allclose(longer, share * np.asarray(costs.recompute), rtol=1e-3)
    assert again.input_grad.tolist() == costs.input_grad.tolist()


@pytest.mark.parametrize("recompute", ["mlp", "half_products", "layernorm+mlp"])
def test_parts_of_layers_are_recomputed_in_w_too(recompute):
    # W lasts as much longer as I does for the same parts, and all that F kept stays until W
    table, h100 = build("zb-h1", 4, 16), pj.load_system("h100")
    none, once = (pj.Workload(LLAMA, 16, recompute=parts) for parts in ("none", recompute))
    twice = dataclasses.replace(once, recompute_again=True)
    costs = [pj.stage_costs(workload, h100, table) for workload in (none, once, twice)]
    input_grads, weight_grads = (
        np.array([getattr(cost, field) for cost in costs])
        for field in ("input_grad", "weight_grad")
    )
    grows, shrinks = weight_grads[2] - weight_grads[1], input_grads[1] - input_grads[0]
    np.testing.assert_allclose(grows, shrinks, rtol=1e-3)
    assert input_grads[2].tolist() == input_grads[1].tolist()
    assert weight_grads[1].tolist() == weight_grads[0].tolist()
    memory = stage_bytes(twice, table)
    assert memory.activations.tolist() == stage_bytes(once, table).activations.tolist()
    assert memory.weight_share[1:3].tolist() == [1.0, 1.0]  # without edges


@pytest.mark.parametrize("recompute", ["none", "full", "block:3", "uniform:2", "half_products"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "zb-h1"])
def test_recomputing_again_concerns_split_backwards_with_recomputation(schedule, recompute):
    table, h100 = build(schedule, 4, 16), pj.load_system("h100")
    once = pj.Workload(LLAMA, 16, recompute=recompute, weight_share=0.5)
    again = dataclasses.replace(once, recompute_again=True)
    (step, need), other = (
        (pj.evaluate(table, pj.stage_costs(w, h100, table)).step_time, pj.memory_bytes(w, table))
        for w in (once, again)
    )
    is_equal = other[0] == step and (other[1] == need).all()
    assert is_equal == (schedule != "zb-h1" or recompute == "none")


def test_recompute_again_at_the_command_line(answer):
    run = ["evaluate", "-s", "zb-h1", "-P", 4, "-M", 16, "-m", "llama3-8b", "-y", "h100"]
    run += ["--minibatch", 16]
    full = ["--recompute", "full", "--recompute-cells"]
    once, again = (answer(*run, *full, *more) for more in ((), ["--recompute-again"]))
    costs = pj.stage_costs(pj.Workload(LLAMA, 16), pj.load_system("h100"), build("zb-h1", 4, 16))
    longer = np.subtract(again["busy"], once["busy"])
    np.testing.assert_allclose(longer, 16 * np.asarray(costs.recompute), rtol=1e-3)
    assert sum(again["breakdown"].values()) == pytest.approx(again["step_time"])


# ------------------------------------------------------------------------------------------ forms
def test_forms_are_one_mechanism():
    block = pj.Workload(LLAMA, 16, recompute="block:7")
    assert pj.Workload(LLAMA, 16, recompute="full", recompute_layers=7) == block
    assert pj.Workload(LLAMA, 16, recompute="uniform:1").recompute == "full"
    assert dataclasses.replace(block, recompute="none") == pj.Workload(LLAMA, 16)


def test_time_of_a_block_lies_between_none_and_full():
    def busy(recompute):
        workload, table = pj.Workload(LLAMA, 16, recompute=recompute), build("1f1b", 4, 16)
        return pj.stage_costs(workload, pj.load_system("h100"), table).backward[1]

    none, full = busy("none"), busy("full")
    assert busy("block:2") == pytest.approx(none + 2 / 8 * (full - none))
    assert busy("uniform:2") == busy("uniform:8") == busy("block:8") == full
    for recompute in ("block:9", "block:99", "uniform:9"):
        text = f"recompute {recompute}: no stage has more than 8 layers; full recomputes all layers"
        with pytest.raises(ValueError, match=f"^{text}$"):
            busy(recompute)


def test_a_plan_leaves_out_layouts_whose_stages_have_fewer_layers(answer):
    # 32 layers: a stage of one worker has 32, of two 16
    request = ["plan", "-m", "llama3-8b", "-y", "b300", "--gpus", 2, "--minibatch", 8, "-S", "1f1b"]
    request += ["--runners-up", 99]
    for recompute, pipelines in ("block:17", {1}), ("uniform:16", {1, 2}), ("block:16", {1, 2}):
        result = answer(*request, "--recompute", recompute)
        layouts = [plan["layout"] for plan in (result["best"], *result["runners_up"])]
        assert {layout["pipeline"] for layout in layouts} == pipelines


FLAGS = {
    "block:7": {"recompute-method": "block", "recompute-num-layers": 7},
    "uniform:2": {"recompute-method": "uniform", "recompute-num-layers": 2},
    "full": {"recompute-method": "uniform", "recompute-num-layers": 1},
}


@pytest.mark.parametrize("recompute", FLAGS)
def test_launchers_are_told_the_form(recompute):
    workload = pj.Workload(LLAMA, 16, recompute=recompute)
    lines = pj.costing.launches(workload, build("1f1b", 4, 16))
    launches = {launch.launcher: launch for launch in lines}
    assert launches["Megatron-LM"].options.items() >= FLAGS[recompute].items()
    deepspeed = launches["DeepSpeed"]
    if recompute == "block:7":
        assert deepspeed.lacks == ("recomputation block:7 (it has none, full and uniform:N)",)
    else:
        interval = FLAGS[recompute]["recompute-num-layers"]
        assert f"activation_checkpoint_interval={interval}" in deepspeed.program


def test_a_plan_needs_what_evaluate_does():
    ways = {"recompute": ["full", "block:3", "uniform:4", "mlp"], "pipeline": [4], "tensor": [1]}
    ways |= {"edge_units": [0], "microbatch_size": [1]}
    asked = {"gpus": 4, "minibatch": 16, "schedules": ["1f1b", "zb-h1"], "memory_limit": 200e9}
    result = pj.plan(LLAMA, pj.load_system("h100"), **asked, choices=ways)
    assert len(result.layouts) == 2 * 4
    for row, needed in enumerate(result.estimates.memory_bytes):
        layout = result.layouts.described(result.request, row)
        workload = pj.Workload(LLAMA, 16, recompute=layout["recompute"], zero=layout["zero"])
        need = pj.memory_bytes(workload, build(layout["schedule"], 4, 16)).max()
        assert needed == pytest.approx(need, rel=1e-9)


def test_a_certificate_says_what_backwards_recompute(call, tmp_path):
    path = tmp_path / "run.json"
    run = ["evaluate", "-s", "zb-h1", "-P", 4, "-M", 8, "-m", "llama3-8b", "-y", "h100"]
    run += ["--minibatch", 8, "--recompute", "full", "--certificate", path]
    assert call(*run)[0] == 0
    assert call("verify", path)[0] == 0
    assert '"at_work"' in path.read_text()
