"""A model's times of attention, dispatch, experts and combine: parts of its F, B, I and W."""

import dataclasses

import jax
import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.step.many_systems import distinct_stages
from pipejax.costs.layers.kernels import device_time
from pipejax.costs.layers.layer_ops import embedding_ops, layer_ops
from pipejax.costs.stage.stage_costs import stage_parts, work_costs
from pipejax.costs.stage.stage_work import stage_work

H100 = pj.load_system("h100")
NAMES = ("combined-1f1b", "braided-dualpipe", "braided-dualpipe-v")
MODELS = ("mixtral-8x7b", "deepseek-v3-mtp")
SUMS = {  # of each field, the kinds that make it up
    "forward": ("fa", "fd", "fm", "fc"),
    "backward": ("bc", "bm", "bd", "ba"),
    "input_grad": ("bc", "im", "bd", "ia"),
    "weight_grad": ("wm", "wa"),
}


def workload(model, **more):
    more = {"expert_parallel": 8, "data_parallel": 8, **more}
    return pj.Workload(pj.load_model(model), minibatch=16, **more)


def make_table(name):
    return build(name, 4, 16)


def sums(costs):
    """Largest error of a field, of those all of whose kinds are there."""
    parts = costs.others
    result = {
        field: np.abs(sum(parts[kind] for kind in kinds) / getattr(costs, field) - 1).max()
        for field, kinds in SUMS.items()
        if set(kinds) <= set(parts)
    }
    assert "forward" in result
    assert len(result) > 1
    return max(result.values())


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("model", MODELS)
def test_parts_sum_to_the_whole(model, name):
    for more in ({}, {"recompute": "full"}, {"tensor_parallel": 2}, {"zero": 3}):
        costs = pj.stage_costs(workload(model, **more), H100, make_table(name))
        assert sums(costs) < 1e-12
        assert all((np.asarray(other) > 0).all() for other in costs.others.values())


# what is before the tokens leave: names of mixtral's ops
OF_ATTENTION = {f"attention{end}" for end in ("_norm", "", "_residual")} | {"qkv", "rotation"}
OF_ATTENTION |= {"projection", "mlp_norm", "router", "routing", "dispatch"}
OF_EXPERTS = {
    f"{part}_{end}" for part in ("expert", "shared") for end in ("in", "activation", "out")
}
OF_EXPERTS |= {"combine", "mlp_residual"}


def test_attention_is_what_comes_before_the_experts():
    """Kernel by kernel, on a stage between first and last: 8 layers, all of them with experts."""
    task, phases = workload("mixtral-8x7b"), ("forward", "input_grad", "weight_grad")
    table = make_table("braided-dualpipe")
    costs = pj.stage_costs(task, H100, table)
    ops = layer_ops(task.model, task.layout(table), "moe")
    assert {op.name for op in ops} <= OF_ATTENTION | OF_EXPERTS
    kinds = ("fa", "fm"), ("ia", "im"), ("wa", "wm")
    for phase, (attention, experts) in zip(phases, kinds, strict=True):
        seconds = [
            sum(float(device_time(H100, op, phase)) for op in ops if op.name in names)
            for names in (OF_ATTENTION, OF_EXPERTS)
        ]
        result = [float(costs.others[name][1]) for name in (attention, experts)]
        assert result[0] / result[1] == pytest.approx(seconds[0] / seconds[1], rel=1e-9)
        assert sum(result) == pytest.approx(8 * sum(seconds), rel=1e-3)  # the host adds the rest
    ops = embedding_ops(task.model, task.layout(table))
    first = sum(float(device_time(H100, op, "forward")) for op in ops)
    more = costs.others["fa"][0] - costs.others["fa"][1]
    assert more == pytest.approx(first, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_exchanges_and_every_part_of_an_op(name):
    """Dispatch and combine share what the breakdown of costs says of experts."""
    task, table = workload("deepseek-v3"), make_table(name)
    costs, parts = pj.stage_costs(task, H100, table), stage_parts(task, H100, table)
    for field, (dispatch, combine) in {"forward": ("fd", "fc"), "input_grad": ("bd", "bc")}.items():
        expected = getattr(parts["expert"], field)
        assert costs.others[dispatch] + costs.others[combine] == pytest.approx(expected, rel=1e-12)
        assert (costs.others[dispatch] == costs.others[combine]).all()
    for kind, seconds in costs.others.items():
        assert sum(part.others[kind] for part in parts.values()) == pytest.approx(seconds)
    run = pj.evaluate(table, costs)
    report = pj.step_report(run, task, H100)
    assert sum(report.breakdown.values()) == pytest.approx(run.step_time, rel=1e-9)


def test_lengths_and_slow_workers_reach_parts_too():
    task, table = workload("mixtral-8x7b"), make_table("combined-1f1b")
    whole = pj.stage_costs(task, H100, table)
    sequence = task.model.sequence
    alike = pj.stage_costs(task, H100, table, lengths=[sequence] * 16)
    longer = pj.stage_costs(task, H100, table, lengths=[sequence] * 15 + [2 * sequence])
    assert sums(longer) < 1e-12
    slow = pj.stage_costs(dataclasses.replace(task, stragglers=((1, 2.0),)), H100, table)
    for kind, seconds in whole.others.items():
        assert alike.others[kind] == pytest.approx(np.tile(seconds[:, None], (1, 16)))
        assert (longer.others[kind][:, -1] > 1.5 * seconds).all()
        is_exchange = kind[1] in "dc"
        assert slow.others[kind] == pytest.approx(seconds * [1, 2 - is_exchange, 1, 1])


@pytest.mark.slow
def test_parts_are_differentiated():
    task, table = workload("mixtral-8x7b"), make_table("combined-1f1b")

    def exchange(factor):
        network = dataclasses.replace(H100.node, bandwidth=H100.node.bandwidth * factor)
        return pj.stage_costs(task, dataclasses.replace(H100, node=network), table).others

    expected = pj.stage_costs(task, H100, table).others
    traced, slope = exchange(1.0), jax.jacfwd(exchange)(1.0)
    for kind, seconds in expected.items():
        assert np.asarray(traced[kind]) == pytest.approx(seconds)
        assert (np.asarray(slope[kind]) < 0).all() == (kind[1] in "dc")


def test_sweeps_go_on_without_what_they_cannot_price(call, tmp_path):
    (tmp_path / "grid.toml").write_text(
        'schedules = ["1f1b", "combined-1f1b"]\nmodels = "mixtral-8x7b"\nsystems = "h100"\n'
        "workers = 4\nmicrobatches = 8\nminibatch = 8\nexpert_parallel = 8\ndata_parallel = 8\n"
    )
    files = tmp_path / "grid.toml", "-o", tmp_path / "grid.zarr"
    code, text, error = call("sweep", "run", *files, "--details")
    assert (code, "Traceback" in error) == (0, False)
    assert "a sweep over models knows the usual ops and rules alone" in text + error


# stages that are alike are priced as one
DENSE, SPARSE = pj.load_model("gpt-22b"), pj.load_model("deepseek-v3")
WORKLOADS = {
    "1f1b": pj.Workload(DENSE, 16, tensor_parallel=4),
    "interleaved-1f1b": pj.Workload(DENSE, 16, recompute="full", embedding_units=1, loss_units=1),
    "chimera": pj.Workload(DENSE, 16, data_parallel=4, zero=1, overlap=True),
    "chimera-asymmetric": pj.Workload(DENSE, 16, tensor_parallel=8, rank_order="tp-pp-dp"),
    "hanayo": pj.Workload(SPARSE, 16, expert_parallel=8, data_parallel=8, zero=2),
    "pipe-offload": pj.Workload(DENSE, 16),
}


def in_front(costs):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], costs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_stages_cost_what_the_distinct_ones_do(name):
    workload = WORKLOADS[name]
    table = build(name, 4, 8)
    system = dataclasses.replace(pj.load_system("h100"), gpus_per_node=4)
    work = stage_work(workload, table)
    few, places = distinct_stages(work)
    assert {*places.stage} == {*range(len(few.stages.first))}
    assert {*places.boundary.ravel()} == {*range(few.stages.senders.size)}
    expected, costs = in_front(work_costs(work, system)), in_front(work_costs(few, system))
    jax.tree.map(np.testing.assert_array_equal, places.spread(costs), expected)
    # counts of all stages weigh what they weigh when they are gathered
    rng = np.random.default_rng(1)
    counts = jax.tree.map(lambda leaf: rng.integers(0, 9, leaf.shape) * 1.0, expected)
    pairs = (counts, expected), (places.gather(counts), costs)
    sums = (jax.tree.map(lambda n, cost: (n * cost).sum(), *pair) for pair in pairs)
    whole, gathered = (sum(jax.tree.leaves(tree)) for tree in sums)
    assert gathered == pytest.approx(whole, rel=1e-12)


def test_a_pipeline_of_one_stage_has_one_kind_and_no_boundary():
    few, places = distinct_stages(stage_work(pj.Workload(DENSE, 2), build("gpipe", 1, 2)))
    costs = places.spread(in_front(work_costs(few, pj.load_system("h100"))))
    assert costs.forward.shape == (1, 1)
    assert costs.transmit.shape == (1, 2, 1, 0)
    assert few.stages.first.sum() == few.stages.last.sum() == 1


def test_many_kinds_of_stages_are_all_kept():
    work = stage_work(pj.Workload(DENSE, 12), build("1f1b", 12, 12))
    layers = (np.arange(1.0, 13.0),)
    work = work._replace(layers=layers, stages=work.stages._replace(layers=layers[0]))
    few, places = distinct_stages(work)
    assert few.layers[0].shape == (12,)
    assert few.layers[0][places.stage].tolist() == layers[0].tolist()
