"""Systems, models and what they cost: units, rooflines, placement in nodes, memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from daily import read_cases, with_cases
from step_flop import step_flop

import pipejax as pj
from pipejax.costs.layers.formulas import (
    boundary_bytes,
    edge_activation_bytes,
    head_flop,
    layer_activation_bytes,
    layer_flop,
    layer_weight_grad_bytes,
    model_flop,
)
from pipejax.costs.model.layout import Layout
from pipejax.costs.model.model import model_names
from pipejax.costs.model.workload import Stages, stage_layers, stage_parameters
from pipejax.costs.model.workload_fields import MODULES, RECOMPUTE
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_bytes, stage_work
from pipejax.costs.system.parts import with_flags_as_numbers
from pipejax.costs.system.system import roofline_time, system_names
from pipejax.schedules.table.held_activations import peak_in_flight, static_bytes

TABLE = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)


def test_all_data_files_load_and_name_their_source():
    assert {"a100", "h100", "h200", "b200", "mi300x", "mid_nw_mid_cp"} <= set(system_names())
    assert {"gpt3-175b", "llama3-70b", "llama3-405b", "tabular-128l"} <= set(model_names())
    for thing in (*map(pj.load_system, system_names()), *map(pj.load_model, model_names())):
        assert len(thing.source) > 20


def test_grid_of_systems_scales_by_ten():
    mid, fast = pj.load_system("mid_nw_mid_cp"), pj.load_system("fast_nw_slow_cp")
    assert fast.network.bandwidth == pytest.approx(10 * mid.network.bandwidth)
    assert fast.peak_flops == pytest.approx(mid.peak_flops / 10)
    assert mid.network.bandwidth == 50e9
    assert mid.network.latency == pytest.approx(500e-9)


def test_roofline_takes_the_slower_side():
    system = pj.load_system("mid_nw_mid_cp")
    assert float(roofline_time(system, 2e15, 0.0)) == pytest.approx(2.0)
    assert float(roofline_time(system, 0.0, 34e12)) == pytest.approx(1.0 + 50e-9)
    assert float(roofline_time(system, 2e15, 34e12)) == pytest.approx(2.0)


def test_efficiency_depends_on_size():
    system = pj.load_system("h100")
    small, large = (float(system.memory_efficiency.at(size)) for size in (1e5, 1e9))
    assert (small, large) == (0.3, 0.9)


def test_accelerators_with_less_memory_differ_in_memory_alone():
    large, small = pj.load_system("a100"), pj.load_system("a100-40gb")
    names = ("memory_capacity", "memory_bandwidth", "name", "source")
    small_values = {name: getattr(small, name) for name in names}
    assert small == dataclasses.replace(large, **small_values)
    assert small.memory_capacity < large.memory_capacity / 1.9
    assert small.memory_bandwidth < large.memory_bandwidth


def get_everything(model, size, layers):
    layout = Layout(microbatch_size=size)
    properties = ("kv_hidden", "matrix_parameters", "layer_parameters", "embedding_parameters")
    parts = {name: getattr(model, name) for name in (*properties, "head_parameters", "parameters")}
    for recompute in RECOMPUTE:
        parts[f"flop {recompute}"] = layer_flop(model, size, recompute)
        parts[f"step {recompute}"] = step_flop(model, size * 4096, recompute)
        parts[f"kept {recompute}"] = layer_activation_bytes(model, layout, recompute)
    functions = (layer_weight_grad_bytes, edge_activation_bytes, boundary_bytes)
    parts |= {function.__name__: function(model, layout) for function in functions}
    parts["head flop"] = head_flop(model, size)
    ends = np.eye(len(layers))
    stages = Stages(layers, layers, 0 * layers, ends[-1], ends[0], ends[-1], *[ends[0]] * 6)
    return parts | {"stages": stage_parameters(model, layout, stages)}


@with_cases(
    "name",
    "llama3-405b",
    *(pytest.param(n, marks=pytest.mark.slow) for n in model_names() if n != "llama3-405b"),
)
def test_whole_numbers_of_a_trace_do_not_wrap_around(name):
    """JAX's default integers have 32 bits, and nothing says so when they overflow."""
    options = pj.load_model(name), 64, np.full(8, 16, np.int32)
    eager = get_everything(*options)
    with jax.enable_x64(False):
        traced = jax.jit(get_everything)(*options)
        narrow = get_everything(*jax.tree.map(np.int32, options))
        subset = jax.jit(lambda size, n: get_everything(options[0], size, n))(*options[1:])
    for result in (traced, narrow, subset):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-6), result, eager)


def test_whole_layers_are_not_assigned_in_a_trace():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    h100 = pj.load_system("h100")
    with pytest.raises(ValueError, match=r"number of layers is traced: .* close over the model"):
        jax.jit(lambda model: pj.stage_costs(pj.Workload(model, 8), h100, table).forward)(
            pj.load_model("gpt-22b")
        )


def test_prices_are_float64_and_the_same_in_a_trace():
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    workload = pj.Workload(pj.load_model("llama3-405b"), minibatch=8 * 64, data_parallel=64)
    h100 = pj.load_system("h100")
    whole = dataclasses.replace(h100, peak_flops=int(h100.peak_flops), memory_bandwidth=10**13)

    def prices(system):
        # where a schedule offloads nothing, a host link out of sight is not asked for a price
        costs = pj.stage_costs(workload, system, table)
        return dataclasses.replace(costs, offload=None, load=None)

    for system in (h100, whole):
        exact = prices(system)
        with jax.enable_x64(False):
            eager = prices(system)
            traced = jax.jit(prices)(system)
        assert {np.asarray(leaf).dtype for leaf in jax.tree.leaves(eager)} == {np.dtype(np.float64)}
        jax.tree.map(np.testing.assert_array_equal, eager, exact)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-6), traced, exact)


@pytest.mark.parametrize("system", ["h100", "mid_nw_mid_cp"])
def test_known_numbers_are_priced_without_a_compiler(system):
    """A cold `pipejax evaluate --model` would wait for ten seconds, where NumPy takes a hundredth."""
    table = pj.schedules.build("1f1b", num_workers=11, num_microbatches=12)
    workload = pj.Workload(pj.load_model("llama3-405b"), minibatch=12, tensor_parallel=8)
    machine = pj.load_system(system)
    assert compilations(lambda: pj.stage_costs(workload, machine, table)) == 0
    traced = jax.tree.map(jnp.asarray, dataclasses.replace(machine, name="", source=""))
    assert compilations(lambda: jax.jit(lambda s: pj.stage_costs(workload, s, table))(traced)) > 0


@pytest.mark.slow
def test_flags_as_numbers_give_the_same_prices():
    """Systems that price kernels and such that do not make one batch with flags as numbers."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=64, tensor_parallel=8, zero=1)
    work = stage_work(workload, table)
    for name in ("h100", "mid_nw_mid_cp"):
        system = pj.load_system(name)
        parts = {part: getattr(system, part) for part in ("collectives", "kernels")}
        numbers = {part: with_flags_as_numbers(value) for part, value in parts.items()}
        plain, traced = (
            work_costs(work, system),
            jax.jit(functools.partial(work_costs, work))(
                dataclasses.replace(system, name="", source="", calibration=None, **numbers)
            ),
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13), traced, plain)


def test_layers_are_assigned_whole():
    model = pj.load_model("llama3-405b")  # 126 layers
    for p in (1, 3, 4, 7, 16):
        table = pj.schedules.build("1f1b", num_workers=p, num_microbatches=2)
        layers = stage_layers(model, table)
        assert layers.sum() == 126
        assert np.ptp(layers) <= 1
        assert layers[0] == layers.min() == layers[-1]
    asymmetric = pj.schedules.build("chimera-asymmetric", num_workers=4, num_microbatches=2)
    assert stage_layers(pj.load_model("tabular-128l"), asymmetric).tolist() == [21, 21, 43, 43]


@pytest.mark.parametrize(("window", "windowed"), [(4096, 32), (1024, 27), (128, 16)])
def test_a_window_counts_only_its_pairs(window, windowed):
    model = dataclasses.replace(pj.load_model("llama3-8b"), sequence=32768)
    local = dataclasses.replace(model, window=window, windowed_layers=windowed)
    # two products of 4096 units for each pair, once forward and twice back, of one sequence
    # a token that attends to n tokens counts 2 n pairs, so that s tokens of a full mask count s^2
    attended = np.minimum(np.arange(32768) + 0.5, window)
    pairs = windowed * (32768**2 - 2 * attended.sum())
    assert model_flop(model, 1) - model_flop(local, 1) == pytest.approx(3 * 2 * 2 * 4096 * pairs)
    # a machine without `kernels` prices the forward of a whole layer by its FLOP
    system = pj.load_system("slow_nw_mid_cp")
    table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
    dense, near = (
        float(np.ravel(pj.stage_costs(pj.Workload(m, 1), system, table).forward)[0])
        for m in (model, local)
    )
    assert dense - near == pytest.approx(2 * 2 * 4096 * pairs / 1e15)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_a_sequence_or_more_hides_nothing(causal):
    model = dataclasses.replace(pj.load_model("llama3-8b"), sequence=1024, causal=causal)
    for window in (1024, 1025, 4096):
        local = dataclasses.replace(model, window=window, windowed_layers=16)
        assert model_flop(local, 1) == model_flop(model, 1)
        assert local.attended_by(1.5) == model.attended_by(1.5)


def test_stage_costs_by_hand():
    model, system = pj.load_model("tabular-128l"), pj.load_system("slow_nw_mid_cp")
    workload = pj.Workload(model, minibatch=16)  # 2 sequences per microbatch
    costs = pj.stage_costs(workload, system, TABLE)
    flop = layer_flop(model, 2)
    np.testing.assert_allclose(costs.forward, 32 * flop.forward / 1e15)
    np.testing.assert_allclose(costs.backward, 32 * (flop.input_grad + flop.weight_grad) / 1e15)
    np.testing.assert_allclose(costs.transmit, 2 * 4096 * 4096 * 2 / 5e9)
    np.testing.assert_allclose(costs.latency, 500e-9)
    assert not np.any(costs.all_reduce)  # no copies, no exchange
    chimera = pj.schedules.build("chimera", num_workers=4, num_microbatches=8)
    exchange = pj.stage_costs(workload, system, chimera).all_reduce
    np.testing.assert_allclose(exchange, 2 * 500e-9 + 2 * 32 * model.layer_parameters / 5e9)


def test_workers_in_one_node_use_its_links():
    model, system = pj.load_model("gpt-22b"), pj.load_system("h100")
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    workload = pj.Workload(model, minibatch=8, tensor_parallel=4)  # two workers per node
    latency = np.asarray(pj.stage_costs(workload, system, table).latency)
    near, far = system.node.latency, system.network.latency
    assert near < far
    np.testing.assert_allclose(latency[0, 0], [near, far, near])
    alone = pj.stage_costs(pj.Workload(model, minibatch=8), system, table).latency
    np.testing.assert_allclose(np.asarray(alone)[0, 0], near)


@pytest.mark.slow
def test_costs_are_differentiable_in_the_system():
    model = pj.load_model("tabular-128l")
    program = pj.lower(TABLE)

    def step(system):
        return pj.makespan(program, pj.stage_costs(pj.Workload(model, 8), system, TABLE))

    system = jax.tree.map(jnp.asarray, pj.load_system("mid_nw_mid_cp"))
    slope = jax.grad(step)(system)
    assert float(slope.peak_flops) < 0
    assert float(slope.network.bandwidth) < 0
    assert float(slope.network.latency) == 2 * 3 * (8 / 4 + 1) - 2  # messages on the path


def test_costs_are_differentiable_after_a_trace_of_another_precision():
    workload = pj.Workload(pj.load_model("llama3-8b"), minibatch=8)

    def forward(system):
        return pj.stage_costs(workload, system, TABLE).forward.sum()

    for is_64 in (False, True, False):
        with jax.enable_x64(is_64):
            slope = jax.grad(forward)(jax.tree.map(jnp.asarray, pj.load_system("h100")))
        assert slope.peak_flops.dtype == (np.float64 if is_64 else np.float32)
        assert float(slope.peak_flops) < 0


def test_memory():
    model = pj.load_model("gpt-22b")
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=8)
    workload = pj.Workload(model, minibatch=8, tensor_parallel=8)
    memory = stage_bytes(workload, table)
    static, activations = memory.static, memory.activations
    # two bytes of parameter and gradient, twelve of optimizer; the head counts on the last stage
    total = model.parameters + model.head_parameters
    # 6 h of each layer, positions and the last norm are whole on each of the 8
    whole = 48 * 6 * 6144 + 2048 * 6144 + 2 * 6144
    assert static.sum() == pytest.approx(16 * (whole + (total - whole) / 8))
    need = pj.memory_bytes(workload, table)
    layer = layer_activation_bytes(model, Layout(tensor=8))
    mask, head = activations[0] - 12 * layer, activations[-1] - 12 * layer
    held = peak_in_flight(table)[1]
    assert need[1] == pytest.approx(static[1] + static[2] + held * 12 * layer)
    assert mask > 0
    assert head > 0


def test_stages_share_what_is_on_one_worker():
    model = pj.load_model("gpt-22b")
    alone = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
    assert model.tied_embeddings
    static = stage_bytes(pj.Workload(model, minibatch=1), alone).static
    assert static.sum() == pytest.approx(16 * model.parameters)  # the head is the embedding
    rows = [row.split() for row in ("0F0 0B0 2F1 2B1", "1F0 1B0 1F1 1B1", "2F0 2B0 0F1 0B1")]
    table = pj.ScheduleTable.from_rows(rows)  # both pipes have stage 1 on worker 1
    memory = stage_bytes(pj.Workload(model, minibatch=2), table).static
    np.testing.assert_allclose(
        static_bytes(table, memory), [memory[0] + memory[2], memory[1], memory[0] + memory[2]]
    )
    costs = pj.stage_costs(pj.Workload(model, minibatch=2), pj.load_system("h100"), table)
    assert np.flatnonzero(costs.all_reduce).tolist() == [0, 2]
    updates = pj.evaluate(table, costs).program.phase == pj.Phase.U
    assert updates.sum() == 5


def test_flash_attention_has_nothing_to_drop():
    model = pj.load_model("llama3-70b")
    plain = layer_flop(dataclasses.replace(model, flash_attention=False), 1)
    scores = 2 * model.sequence**2 * model.hidden  # one matrix product, once more in the backward
    assert layer_flop(model, 1).input_grad - plain.input_grad == scores


@pytest.mark.parametrize("flash", [True, False])
@with_cases(
    "model width layout",
    # sum of the heads' widths of queries and of values
    ("llama3-70b", 64 * (128 + 128), {}),
    ("gpt3-175b", 96 * (128 + 128), {"tensor_parallel": 8, "sequence_parallel": True}),
    ("deepseek-v2", 128 * (192 + 128), {"expert_parallel": 8, "data_parallel": 8}),
    ("qwen3-30b-a3b", 32 * (128 + 128), {"context_parallel": 2, "recompute_again": True}),
)
def test_selective_recomputes_core_attention_whatever_its_kernel(model, width, layout, flash):
    """Megatron-LM's attention.py reruns core attention without a look at its kernel."""
    model = dataclasses.replace(pj.load_model(model), flash_attention=flash)
    again = layer_flop(model, 1, recompute="selective").input_grad
    products = 2 * model.sequence**2 * width  # of queries and keys, and of scores and values
    assert again - layer_flop(model, 1).input_grad == products
    table = pj.schedules.build("zb-h1", num_workers=4, num_microbatches=8)
    system = pj.load_system("h100")
    costs, sizes = {}, {}
    for recompute in ("none", "selective", "core_attn"):
        workload = pj.Workload(model, minibatch=8, recompute=recompute, **layout)
        costs[recompute] = pj.stage_costs(workload, system, table)
        sizes[recompute] = pj.memory_bytes(workload, table).tolist()
    seconds = {name: record.input_grad.tolist() for name, record in costs.items()}
    assert seconds["selective"] == seconds["core_attn"] > seconds["none"]
    assert costs["selective"].weight_grad.tolist() == costs["core_attn"].weight_grad.tolist()
    assert sizes["selective"] == sizes["core_attn"] <= sizes["none"]


def test_recompute_cells_say_when_activations_come_back():
    model = pj.load_model("gpt-22b")
    table = pj.ScheduleTable.from_rows([["0F0", "0F1", "0R1", "0B1", "0R0", "0B0"]])
    workload = pj.Workload(model, minibatch=2, recompute="full")
    memory = stage_bytes(workload, table)
    layer, held = (48 * layer_activation_bytes(model, recompute=r) for r in ("none", "full"))
    assert memory.activations[0] - memory.checkpoint[0] == pytest.approx(layer - held)
    need = pj.memory_bytes(workload, table)[0] - memory.static[0]
    assert need == pytest.approx(memory.checkpoint[0] + memory.activations[0])
    system = pj.load_system("h100").with_number("host.launch", 0.0)
    cells, inside = (
        pj.stage_costs(workload, system, t)
        for t in (table, pj.ScheduleTable.from_rows([["0F0", "0F1", "0B1", "0B0"]]))
    )
    np.testing.assert_allclose(cells.input_grad + cells.recompute, inside.input_grad)


def test_sequence_parallelism_splits_what_it_says():
    model, system = pj.load_model("gpt-22b"), pj.load_system("h100")
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    plain, split = (
        pj.Workload(model, 2, tensor_parallel=8, sequence_parallel=s) for s in (False, True)
    )
    ours = [pj.stage_costs(w, system, table) for w in (plain, split)]
    np.testing.assert_allclose(ours[0].transmit, 8 * np.asarray(ours[1].transmit))
    activations = [stage_bytes(w, table).activations for w in (plain, split)]
    assert np.all(activations[1] < activations[0])


LACKING = {  # parts of layers that a model lacks, by its architecture
    "llama3-8b": {"mla_up_proj", "moe", "moe_act", "shared_experts"},
    "gpt-22b": {"mla_up_proj", "moe", "moe_act", "shared_experts"},
    "mixtral-8x7b": {"mla_up_proj", "mlp", "shared_experts"},
    "qwen3-235b-a22b": {"mla_up_proj", "mlp", "shared_experts"},
    "deepseek-v3": set(),
}


@pytest.mark.parametrize("name", LACKING)
def test_parts_of_layers_that_a_model_lacks_are_no_recomputation(name):
    model = pj.load_model(name)
    for part in MODULES:
        if part not in LACKING[name]:
            assert pj.Workload(model, 4, recompute=part).recompute == part
            continue
        for recompute in (part, f"core_attn+{part}"):
            with pytest.raises(ValueError, match=rf"{name} has no {part}; known are core_attn, "):
                pj.Workload(model, 4, recompute=recompute)


def test_degrees_of_one_go_with_models_without_experts():
    model = pj.load_model("gpt-22b")
    for degree in (0, 1):
        workload = pj.Workload(model, 8, expert_parallel=1, expert_tensor_parallel=degree)
        assert workload.expert_parallel == 1
    mixtral = pj.Workload(pj.load_model("mixtral-8x7b"), 8, data_parallel=8, expert_parallel=2)
    assert mixtral.expert_parallel == 2


def test_flop_of_an_unknown_recomputation_are_refused():
    with pytest.raises(ValueError, match="unknown recompute 'some'"):
        layer_flop(pj.load_model("gpt-22b"), 1, "some")


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_numbers_of_numpy_are_numbers(kind):
    fields = {"overlap": kind(0.5), "weight_share": kind(0.25), "stragglers": {0: kind(2)}}
    workload = pj.Workload(pj.load_model("gpt-22b"), np.int32(8), zero=np.uint8(1), **fields)
    assert workload == pj.Workload(
        *(pj.load_model("gpt-22b"), 8), zero=1, overlap=0.5, weight_share=0.25, stragglers={0: 2.0}
    )


@pytest.mark.parametrize("value", [-1, float("nan"), True, "2"])
@with_cases("name part fields least", *read_cases("smallest sizes of layers"))
@pytest.mark.usefixtures("unchecked")
def test_sizes_of_experts_and_latent_attention_are_checked_too(name, part, fields, least, value):
    model = pj.load_model(name)
    for field in fields:
        changed = dataclasses.replace(getattr(model, part), **{field: value})
        workload = pj.Workload(dataclasses.replace(model, **{part: changed}), 8)
        message = f"^model: {part}: {field} must be a number of at least {least}, got {value!r}"
        with pytest.raises(ValueError, match=message):
            pj.stage_costs(workload, pj.load_system("h100"), TABLE)


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.float32, np.float64, float])
def test_sizes_of_a_model_may_be_numbers_of_numpy(kind):
    model, system = pj.load_model("gpt-22b"), pj.load_system("h100")
    costs = pj.stage_costs(pj.Workload(model, 8), system, TABLE)
    other = dataclasses.replace(model, layers=kind(model.layers), heads=kind(model.heads))
    assert pj.stage_costs(pj.Workload(other, 8), system, TABLE) == costs


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama3-8b", "deepseek-v3", "gpt-22b"])
@with_cases("setting", *read_cases("settings of groups"))
def test_settings_of_groups_change_no_time_of_a_single_accelerator(model, setting):
    # the eager kernels of this software wait for their host, which starts collectives too
    system = pj.load_stack("torchtitan-2024-eager").on(pj.load_system("h100"))
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    plain = pj.Workload(pj.load_model(model), minibatch=4)
    step_times = [
        pj.evaluate(table, pj.stage_costs(workload, system, table)).step_time
        for workload in (plain, dataclasses.replace(plain, **setting))
    ]
    assert step_times[0] == step_times[1]


@with_cases("sequence context tensor splits", *read_cases("test_sequences_that_no_launcher_splits"))
def test_sequences_that_no_launcher_splits(sequence, context, tensor, splits):
    model = dataclasses.replace(pj.load_model("llama3-8b"), sequence=sequence)
    degrees = {"tensor_parallel": tensor, "context_parallel": context}
    workload = pj.Workload(model, 8, sequence_parallel=tensor > 1, **degrees)
    assert workload.uneven_splits == splits
    whole = dataclasses.replace(workload, sequence_parallel=False, contiguous_context=True)
    assert whole.uneven_splits == (splits if context == 3 else [])
