"""Schedules of microbatches in slices, against their orders and forms written down again.

Orders are those of thunlp/Seq1F1B (`schedules.py`: warm-up P - r + K - 2; `sp_utils.py`: a queue
from which microbatches leave in order and slices of one in the reverse order), of GPipe, and of
interleaved 1F1B with groups of P slices. The checker runs them.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.comparison import closed_form
from pipejax.costs.layers.formulas import key_bytes, layer_flop, model_flop
from pipejax.costs.layers.layer_ops import layer_ops
from pipejax.costs.stage.slices import sliced_model

GRID = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 3, 5)))
SLIM = [(p, m, k * p, v) for p, m, k, v in itertools.product((1, 2, 4), (1, 2, 5), (1, 3), (2, 3))]


def built(name, p, m, k, **options):
    return pj.schedules.build(name, num_workers=p, num_microbatches=m, slices=k, **options)


def turns(warmup, forwards, backwards):
    first, rest = forwards[:warmup], forwards[warmup:]
    pairs = [op for pair in zip(rest, backwards, strict=False) for op in pair]
    return first + pairs + backwards[len(rest) :]


def order(name, p, m, k, v=1):
    rows = []
    for r in range(p):
        groups = range(0, k, p) if v > 1 else [0]
        size = p if v > 1 else k
        passes = [(c, g + j) for g in groups for c in range(v) for j in range(size)]
        forwards = [("F", c * p + r, i, j) for i in range(m) for c, j in passes]
        backwards = [("B", c * p + r, i, j) for i in range(m) for c, j in reversed(passes)]
        warmup = {"terapipe": m * k, "seq-1f1b": p - r + k - 2}.get(name, k * v + 2 * (p - r) - 3)
        rows.append(turns(min(warmup, m * k * v), forwards, backwards))
    return rows


CASES = [(name, p, m, k, 1) for name in ("seq-1f1b", "terapipe") for p, m, k in GRID[::3]]
CASES += [("slimpipe", *sizes) for sizes in SLIM]


@pytest.mark.parametrize("name", ["seq-1f1b", "terapipe", "slimpipe"])
def test_orders_are_those_written_here_and_run_as_the_checker_runs_them(name):
    rng = np.random.default_rng(len(name))
    for _, p, m, k, v in [case for case in CASES if case[0] == name]:
        table = built(name, p, m, k, **({"stages_per_worker": v} if v > 1 else {}))
        rows = order(name, p, m, k, v)
        number = {"F": pj.Phase.F, "B": pj.Phase.B}
        expected = [[(number[f], s, i * k + j) for f, s, i, j in row] for row in rows]
        assert [[tuple(op) for cell in row for op in cell] for row in table.rows()] == expected
        times = {phase: rng.random((p * v, m * k)) for phase in "FB"}
        costs = pj.Costs(forward=times["F"], backward=times["B"], transmit=0.25)
        run = pj.evaluate(table, costs)
        assert pj.verify(pj.certificate(run)).problems == ()


@pytest.mark.parametrize("name", ["seq-1f1b", "terapipe", "slimpipe"])
def test_bubble_and_memory_are_those_that_are_published(name):
    """Idle is (P - 1) / (K V) of a microbatch's F and B; activations by worker, in slices."""
    for _, p, m, k, v in [case for case in CASES if case[0] == name]:
        table = built(name, p, m, k, **({"stages_per_worker": v} if v > 1 else {}))
        ran = pj.evaluate(table, pj.Costs.per_worker(table, forward=1.0, backward=2.0))
        assert ran.makespan == pytest.approx(3 * (m + (p - 1) / (k * v)))
        assert ran.bubble_overhead == pytest.approx((p - 1) / (k * v * m))
        held = {
            "seq-1f1b": [min(p - r - 1 + k, m * k) for r in range(p)],
            "terapipe": [m * k] * p,
            "slimpipe": [min(k * v + 2 * (p - r - 1), m * k * v) for r in range(p)],
        }[name]
        assert ran.peak_in_flight.tolist() == held
        form, shape = closed_form(table)
        assert form.holds(shape)
        assert form.bubble_ratio[1](shape) == pytest.approx(ran.bubble_ratio, abs=1e-12)
        assert [form.in_flight[1](shape, r) for r in range(p)] == held


def test_memory_of_the_first_worker_in_microbatches():
    """1F1B holds P of M_a / P; Seq1F1B (P - 1 + K) / K, SlimPipe one and 2 (P - 1) / (K V)."""
    for p, k in ((4, 4), (4, 16), (8, 8), (8, 64)):
        seq, slim = built("seq-1f1b", p, 2 * p, k), built("slimpipe", p, 2 * p, k)
        costs = pj.Costs(forward=1.0, backward=2.0)
        held = [pj.compare(table, costs).peak_microbatches for table in (seq, slim)]
        assert held == pytest.approx([(p - 1 + k) / k, 1 + 2 * (p - 1) / (2 * k)])


def test_one_slice_is_the_schedule_itself():
    for name, other in (("seq-1f1b", "1f1b"), ("terapipe", "gpipe")):
        sliced = built(name, 4, 8, 1)
        whole = pj.schedules.build(other, num_workers=4, num_microbatches=8)
        assert [*sliced.rows()] == [*whole.rows()]


def test_the_command_line_takes_slices(answer):
    size = ["-P", "4", "-M", "8", "--worker-times", "F=1,B=2"]
    result = answer("evaluate", "-s", "seq-1f1b", "--slices", "4", *size)
    assert (result["microbatches"], result["slices"]) == (8, 4)
    assert result["makespan"] == pytest.approx(3 * (8 + 3 / 4))
    rows = answer("compare", "-S", "1f1b,seq-1f1b,slimpipe", "--slices", "8", *size)["rows"]
    by_name = {row["schedule"]: row["makespan"] for row in rows}
    assert by_name == pytest.approx(
        {"slimpipe slices=8": 24 + 9 / 16, "seq-1f1b slices=8": 24 + 9 / 8, "1f1b": 33.0}
    )
    assert {row["microbatches"] for row in rows} == {8}


# Model costs of slices, counted again from the positions of their tokens

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


def test_a_forward_alone_has_a_third_of_the_flop():
    table = pj.schedules.build("chunked-prefill", num_workers=4, num_microbatches=2, slices=4)
    workload, system = pj.Workload(pj.load_model("llama3-8b"), minibatch=2), pj.load_system("h100")
    run = pj.evaluate(table, pj.stage_costs(workload, system, table))
    report = pj.step_report(run, workload, system)
    whole = model_flop(workload.model, 2)
    assert report.flops_per_accelerator == pytest.approx(whole / 3 / report.step_time / 4)
    assert report.mfu < 1
