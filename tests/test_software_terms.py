"""What software adds to a step: exchanges that wait, kernels, experts' ways, graphs, recomputation."""

import dataclasses
import itertools

import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.collectives import Spread, _pairs
from pipejax.costs.layers.formulas import layer_activation_bytes, layer_flop
from pipejax.costs.layers.kernels import device_time
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.model.layout import Group, Layout
from pipejax.costs.model.workload_fields import MODULES
from pipejax.costs.system.parts import Host

H100 = pj.load_system("h100")
QUIET = dataclasses.replace(H100, host=Host())  # a host that costs nothing
LLAMA, QWEN = pj.load_model("llama3-8b"), pj.load_model("qwen3-30b-a3b")
DEEPSEEK = pj.load_model("deepseek-v3")
TABLE = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
PHASES = ("forward", "input_grad", "weight_grad")


def phases(model=LLAMA, system=QUIET, **given):
    costs = pj.stage_costs(pj.Workload(model, 1, **given), system, TABLE)
    return np.array([float(np.asarray(getattr(costs, name))[0]) for name in PHASES])


def test_weights_that_replicas_split_wait_by_the_share_that_is_not_hidden():
    """A slow network: less than all fits beside compute, and each share hides its part of it."""
    sharded = {"data_parallel": 8, "zero": 3}
    none, half, whole = (phases(**sharded, overlap=share) for share in (0, 0.5, True))
    np.testing.assert_allclose(half, (none + whole) / 2)
    alone = phases(data_parallel=8, zero=2)
    assert (none[:2] > alone[:2]).all()  # F and I wait for weights, W for what gradients need
    slow = QUIET.with_number("node.bandwidth", 1e9)
    waits = phases(system=slow, **sharded) - phases(system=slow, **sharded, overlap=1)
    # as long as all compute; the embedding's own is less than it has to exchange, even there
    np.testing.assert_allclose(waits, phases(), rtol=1e-3)


def test_full_recomputation_gathers_weights_once_for_itself_and_the_backward():
    sharded = {"data_parallel": 8, "zero": 3}
    gathered = phases(**sharded) - phases(data_parallel=8, zero=2, overlap=0)
    again = phases(**sharded, recompute="full") - phases(
        data_parallel=8, zero=2, recompute="full", overlap=0
    )
    np.testing.assert_allclose(again[:2], gathered[:2], rtol=1e-9)


def test_elementwise_traffic_is_of_what_is_no_product():
    kernels = dataclasses.replace(H100.kernels, elementwise=2.0)
    eager = dataclasses.replace(H100, kernels=kernels)
    for op in layer_ops(LLAMA, Layout()):
        one, two = (device_time(system, op, "forward") for system in (H100, eager))
        launched = float(op.launches.forward) * H100.memory_latency
        assert two == pytest.approx(2 * one - launched if op.kind == "memory" else one)


def test_the_last_of_a_sequence_in_order_attends_to_most():
    """Pairs of a causal mask, a pair with itself as half a one: counted token by token."""
    tokens, parts = 24, 4
    before = np.arange(tokens) + 0.5
    most = before.reshape(parts, -1).mean(axis=1).max()
    model = dataclasses.replace(LLAMA, sequence=tokens)
    even, last = (
        next(
            op
            for op in layer_ops(model, Layout(context=parts, contiguous_context=c))
            if op.name == "attention"
        ).flop.forward
        for c in (0, 1)
    )
    assert last / even == pytest.approx(most / before.mean())


def test_one_copy_per_node_is_what_all_choices_of_experts_give():
    accelerators, inside, slots = 4, 2, 3
    route = _pairs(Spread.over(Group(accelerators, inside), 3.0, slots))  # three copies of 1 B
    near, far = [], []
    for chosen in itertools.product(range(accelerators), repeat=slots):
        nodes = {each // inside for each in chosen}
        far.append(len(nodes - {0}))
        near.append(len(set(chosen)) * (1 - 1 / inside))
    assert route.far_bytes == pytest.approx(np.mean(far))
    assert route.near_bytes == pytest.approx(np.mean(near))
    plain = _pairs(Spread.over(Group(accelerators, inside), 3.0))
    assert (plain.far_bytes, plain.near_bytes) == (1.5, 0.75)


def test_tokens_on_their_way_to_experts_hide_beside_the_layer_by_a_share():
    spread = {"expert_parallel": 8, "data_parallel": 8}
    none, half, whole = (phases(QWEN, **spread, expert_overlap=o) for o in (0, 0.5, 1))
    np.testing.assert_allclose(half, (none + whole) / 2)
    assert (none[:2] > whole[:2]).all()
    assert none[2] == whole[2]  # W sends nothing to experts
    once = phases(QWEN, **spread, dispatcher="per-node")
    assert (once[:2] < none[:2]).all()


def test_kernels_that_start_as_graphs_spare_the_host():
    size = {"tensor_parallel": 8}
    eager, graphs = (phases(system=H100, **size, graphs=share) for share in (0, 1))
    np.testing.assert_array_equal(graphs, phases(**size))
    assert (eager > graphs).all()


@pytest.mark.parametrize(
    ("model", "kind"), [(LLAMA, "dense"), (DEEPSEEK, "dense"), (DEEPSEEK, "moe")]
)
@pytest.mark.parametrize("module", MODULES)
def test_a_module_recomputed_adds_its_forward_to_i_and_frees_memory(model, kind, module):
    layout = Layout(microbatch_size=1)
    plain, again = (layer_ops(model, layout, kind, recompute=r) for r in ("none", module))
    more = sum(
        b.flop.input_grad - a.flop.input_grad
        for a, b in zip(plain, again, strict=True)
        if a.kind == "gemm"
    )
    formula = (
        layer_flop(model, 1, module, kind).input_grad - layer_flop(model, 1, kind=kind).input_grad
    )
    if module == "core_attn":  # the formula counts pairs that a flash kernel skips
        assert formula > 0 == more
    else:
        assert float(more) == pytest.approx(float(formula), rel=1e-9)
    moved = [b.volume.input_grad - a.volume.input_grad for a, b in zip(plain, again, strict=True)]
    assert min(moved) >= 0
    kept = [layer_activation_bytes(model, layout, r, kind) for r in ("none", module)]
    assert kept[1] <= kept[0]


def test_parts_of_layers_are_named_in_any_order_and_each_once():
    workload = pj.Workload(LLAMA, 1, recompute="mlp+layernorm+mlp")
    assert workload.recompute == "layernorm+mlp"
    both = phases(recompute="layernorm+mlp")[1] - phases()[1]
    each = [phases(recompute=name)[1] - phases()[1] for name in ("layernorm", "mlp")]
    assert both == pytest.approx(sum(each))
    with pytest.raises(ValueError, match=r"unknown recompute 'mlp\+mlb'.*core_attn"):
        pj.Workload(LLAMA, 1, recompute="mlp+mlb")


def test_some_layers_of_a_stage_are_recomputed():
    times = [phases(recompute="full", recompute_layers=n)[1] for n in (8, 16, 0)]
    none = phases()[1]
    np.testing.assert_allclose(
        np.array(times) - none, (times[2] - none) * np.array([1 / 4, 1 / 2, 1])
    )
    need = [
        pj.memory_bytes(pj.Workload(LLAMA, 1, recompute="full", recompute_layers=n), TABLE)[0]
        for n in (8, 16, 0)
    ]
    assert need[0] > need[1] > need[2]
