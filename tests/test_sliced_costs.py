"""Model costs of slices, counted again from the positions of their tokens."""

import dataclasses

import numpy as np
import pytest

import pipejax as pj
from pipejax.costs.layers.formulas import key_bytes, layer_flop, model_flop
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.stage.slices import sliced_model

GPT, LLAMA = pj.load_model("gpt-22b"), pj.load_model("llama3-8b")
MODELS = {
    "scores kept": dataclasses.replace(GPT, sequence=4096),
    "flash": LLAMA,
    "experts": pj.load_model("mixtral-8x7b"),
    "latent": pj.load_model("deepseek-v3"),
    "window": dataclasses.replace(LLAMA, window=1000, windowed_layers=20),
    "narrow": dataclasses.replace(LLAMA, window=100, windowed_layers=32),
}
P, M, K, B = 4, 2, 4, 3
TABLE = pj.schedules.build("seq-1f1b", num_workers=P, num_microbatches=M, slices=K)
WHOLE = pj.schedules.build("1f1b", num_workers=P, num_microbatches=M)


def get_flop(model, size, kind="dense"):
    layout = pj.Workload(model, minibatch=1).layout(WHOLE, size)
    ops = layer_ops(model, layout, kind)
    return {(op.name, phase): getattr(op.flop, phase) for op in ops for phase in op.flop._fields}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("slices", [1, 2, 7])
def test_slices_have_the_flop_of_the_whole(name, slices):
    model = MODELS[name]
    kind = "moe" if model.moe else "dense"
    parts = [(sliced_model(model, k, slices), B / (2 * k + 1)) for k in range(slices)]
    flops = [get_flop(*part, kind) for part in parts]
    for op, whole in get_flop(model, B, kind).items():
        assert sum(part[op] for part in flops) == pytest.approx(whole, rel=1e-12), op
    for phase in ("forward", "input_grad", "weight_grad"):
        counted = sum(getattr(layer_flop(*part, kind=kind), phase) for part in parts)
        assert counted == pytest.approx(getattr(layer_flop(model, B, kind=kind), phase), rel=1e-12)


@pytest.mark.parametrize("name", ["flash", "window", "narrow"])
def test_attention_of_a_slice_is_of_the_tokens_before(name):
    """Pairs are counted token by token: a token at x sees x + 1/2 of them, or its window."""
    model, slices = dataclasses.replace(MODELS[name], sequence=4096), 4
    place = np.arange(model.sequence) + 0.5
    seen = np.minimum(place, model.window) if model.window else place
    share = model.windowed_layers / model.layers
    met = share * seen + (1 - share) * place
    whole = get_flop(model, 1)["attention", "forward"] / met.sum()
    for k, pairs in enumerate(np.split(met, slices)):
        result = get_flop(sliced_model(model, k, slices), 1 / (2 * k + 1))["attention", "forward"]
        assert result == pytest.approx(whole * pairs.sum(), rel=1e-6)


def test_times_add_up_where_they_are_linear():
    workload = pj.Workload(GPT, minibatch=M * B)
    real = pj.load_system("mid_nw_mid_cp")
    system = dataclasses.replace(real, memory_bandwidth=1e30, compute_latency=0, memory_latency=0)
    whole, sliced = (pj.stage_costs(workload, system, table) for table in (WHOLE, TABLE))
    for name in ("forward", "backward", "input_grad", "weight_grad"):
        time, parts = getattr(whole, name), getattr(sliced, name)
        assert parts.shape == (P, M * K)
        assert np.array_equal(parts[:, :K], parts[:, K:])
        np.testing.assert_allclose(parts[:, :K].sum(axis=1), time, rtol=1e-12)
    growth = np.diff(sliced.forward[0, :K])
    assert growth[0] > 0
    np.testing.assert_allclose(growth, growth[0], rtol=1e-9)  # k times the same pairs
    np.testing.assert_allclose(sliced.transmit.sum(axis=-1), M * whole.transmit, rtol=1e-12)
    assert np.array_equal(sliced.latency, whole.latency)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["flash", "scores kept"])
def test_slices_leave_what_the_whole_leaves(name, recompute):
    """With full recomputation keys and values stay beside what layers start from."""
    model = MODELS[name]
    workload = pj.Workload(model, minibatch=M * B, tensor_parallel=2, recompute=recompute)
    from pipejax.costs.stage.stage_work import stage_bytes

    whole, sliced = (stage_bytes(workload, table) for table in (WHOLE, TABLE))
    held = model.layers / P * key_bytes(model, workload.layout(WHOLE, B))
    total = np.asarray(sliced.activations)[:, :K].sum(axis=1)
    np.testing.assert_allclose(total, whole.activations + held * (recompute == "full"), rtol=1e-12)
    flat = np.ptp(np.asarray(sliced.activations)[:, :K], axis=1) < 1e-6 * total
    assert flat.all() == (name == "flash" or recompute == "full")
    if recompute == "none":  # else gradients of keys and values outweigh the few inputs
        assert (pj.memory_bytes(workload, TABLE) < pj.memory_bytes(workload, WHOLE))[:2].all()


def test_memory_is_that_of_the_run():
    workload = pj.Workload(MODELS["scores kept"], minibatch=M * B)
    from pipejax.costs.stage.stage_work import stage_bytes

    memory = stage_bytes(workload, TABLE)
    run = pj.evaluate(TABLE, pj.stage_costs(workload, pj.load_system("h100"), TABLE))
    held = pj.analysis.activation_memory(run, sizes=np.asarray(memory.activations))
    np.testing.assert_allclose(
        pj.memory_bytes(workload, TABLE), held.peak + np.asarray(memory.static), rtol=1e-12
    )


def test_a_model_is_priced_on_the_command_line(answer, mistake):
    model = ("--model", "llama3-8b", "--system", "h100", "--minibatch", "8", "-P", "4", "-M", "4")
    result = answer("evaluate", "-s", "seq-1f1b", "--slices", "4", *model)
    table = pj.schedules.build("seq-1f1b", num_workers=4, num_microbatches=4, slices=4)
    workload = pj.Workload(LLAMA, minibatch=8)
    run = pj.evaluate(table, pj.stage_costs(workload, pj.load_system("h100"), table))
    assert result["step_time"] == run.step_time
    assert result["memory_bytes"] == pytest.approx(pj.memory_bytes(workload, table).tolist())
    assert sum(result["breakdown"].values()) == pytest.approx(run.step_time)
    for wrong in (
        ("tune", "size", "-s", "seq-1f1b", *model[:6], "-P", "4"),
        ("plan", "--schedules", "seq-1f1b", *model[:6], "--gpus", "8"),
        ("sensitivity", "-s", "seq-1f1b", *model),
    ):
        assert "takes whole microbatches" in mistake(*wrong)


def test_what_has_no_price_in_slices_is_refused():
    system = pj.load_system("h100")
    with pytest.raises(ValueError, match="lengths takes whole microbatches"):
        pj.stage_costs(pj.Workload(LLAMA, minibatch=M), system, TABLE, lengths=[1.0] * M * K)
    both = dataclasses.replace(LLAMA, causal=False)
    with pytest.raises(ValueError, match="llama3-8b is not causal"):
        pj.stage_costs(pj.Workload(both, minibatch=M), system, TABLE)
    with pytest.raises(ValueError, match="2 microbatches do not divide a minibatch of 3"):
        pj.stage_costs(pj.Workload(LLAMA, minibatch=3), system, TABLE)


def test_a_forward_alone_has_a_third_of_the_flop():
    table = pj.schedules.build("chunked-prefill", num_workers=4, num_microbatches=2, slices=4)
    workload, system = pj.Workload(pj.load_model("llama3-8b"), minibatch=2), pj.load_system("h100")
    report = pj.step_report(
        pj.evaluate(table, pj.stage_costs(workload, system, table)), workload, system
    )
    whole = model_flop(workload.model, 2)
    assert report.flops_per_accelerator == pytest.approx(whole / 3 / report.step_time / 4)
    assert report.mfu < 1
