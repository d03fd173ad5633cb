"""Elasticities: against finite differences of the front door, and Euler's identity."""

import dataclasses
import itertools
import shlex

import jax
import numpy as np
import pytest
from daily import daily, read_cases

import pipejax as pj
from pipejax.analysis.step import many_systems
from pipejax.analysis.step.many_systems import price_systems, resource_shares
from pipejax.analysis.uncertainty.sensitivity import MODEL_PARAMETERS, place_sensitivity, swings
from pipejax.costs.model.workload import assign_layers
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_work
from pipejax.costs.system.parts import FIELDS
from pipejax.engine.batched import interpreter

STEP = 1e-5
WIDE = {"tensor_parallel": 8, "wide_first": 1, "wide_last": 1}
CHIMERA = "chimera on a slow network"
CASES = read_cases("CASES of test_sensitivity")


PRICE = jax.jit(work_costs)


def case(name):
    schedule, options, model, system, parallel = CASES[name]
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=8, **options)
    # uneven numbers: at a tie of two paths or roofs the derivative has two sides
    model_record = pj.load_model(model)
    machine = pj.load_system(system)
    waits = {"compute_latency": 1.3e-6, "memory_latency": 0.7e-6}
    node = dataclasses.replace(machine.node, latency=machine.node.latency * 1.1)
    machine = dataclasses.replace(machine, **waits, node=node)
    return table, pj.Workload(model_record, minibatch=16, **parallel), machine


def put(tree, path, factor):
    name, *rest = path
    value = getattr(tree, name)
    if rest:
        return dataclasses.replace(tree, **{name: put(value, rest, factor)})
    new = tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor
    return dataclasses.replace(tree, **{name: new})


def step_time(program, table, workload, system, parameter, factor):
    size = workload.microbatch_size(table)
    assigned = assign_layers(workload, table)
    if parameter in FIELDS:
        system = put(system, FIELDS[parameter], factor)
    elif parameter == "microbatch_size":
        size *= factor
    else:
        name = parameter.removeprefix("model.")
        changed = {name: getattr(workload.model, name) * factor}
        model = dataclasses.replace(workload.model, **changed)
        workload = dataclasses.replace(workload, model=model)
        if name == "layers":
            assigned = type(assigned)(*(part * factor for part in assigned))
    work = stage_work(workload, table, assigned=assigned, microbatch_size=size)
    same_types = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float64(1), (work, system))
    return float(pj.makespan(program, PRICE(*same_types)))


@pytest.mark.parametrize(
    ("name", "link"),
    daily(
        [*itertools.product(reversed(CASES), ["delay"]), (CHIMERA, "rendezvous")],
        total=4,
    ),
)
def test_elasticities_are_finite_differences_and_shares_sum_to_one(name, link):
    table, workload, system = case(name)
    result = pj.sensitivity(table, workload, system, link=link)
    costs, program = pj.stage_costs(workload, system, table), pj.lower(table, link=link)
    assert result.step_time == pytest.approx(pj.evaluate(table, costs, link=link).makespan, 1e-13)
    for parameter, slope in result.elasticity.items():
        at = program, table, workload, system, parameter
        up, down = (step_time(*at, np.exp(s * STEP)) for s in (1, -1))
        assert slope == pytest.approx(np.log(up / down) / (2 * STEP), abs=2e-5), parameter
    assert sum(result.share.values()) == pytest.approx(1, abs=1e-12)
    assert min(result.share.values()) >= 0
    assert result.share[result.bound_by] == max(result.share.values())
    for rate in ("compute.peak", "memory.bandwidth", "node.bandwidth", "network.bandwidth"):
        efficiency = f"{rate.split('.')[0]}.efficiency"
        if rate == "memory.bandwidth" and system.collectives.copies:
            # copies of collectives pass through memory at the sheet's rate
            assert result.elasticity[rate] < result.elasticity[efficiency] < 0
        else:
            assert result.elasticity[efficiency] == pytest.approx(result.elasticity[rate])


@pytest.mark.parametrize("name", ["1f1b on h100", CHIMERA])
def test_a_batch_has_the_shares_of_its_members(name, monkeypatch):
    monkeypatch.setattr(many_systems, "PART", 2)  # three systems, two at once
    table, workload, system = case(name)
    names = ("compute.peak", "network.bandwidth", "network.latency")
    others = [put(system, FIELDS[name], 0.1) for name in names]
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *others)
    work = stage_work(workload, table)
    result = resource_shares(pj.lower(table), price_systems(work, stacked))
    for varied, time, row in zip(others, *map(np.asarray, result), strict=True):
        alone = pj.sensitivity(table, workload, varied)
        np.testing.assert_allclose(row, list(alone.share.values()), atol=1e-12)
        assert time == alone.step_time


def test_systems_with_different_networks_have_the_prices_of_each():
    table, workload, system = case("interleaved, full recomputation")
    names = ("network.bandwidth", "network.latency", "memory.capacity")
    others = [put(system, FIELDS[name], 0.1) for name in names]
    stacked = jax.tree.map(lambda *leaves: np.array(leaves), *others)
    result = price_systems(stage_work(workload, table, offloads=True), stacked).costs
    for row, varied in enumerate(others):
        for name, cost in vars(pj.stage_costs(workload, varied, table)).items():
            if cost is not None:
                np.testing.assert_array_equal(getattr(result, name)[row], cost, err_msg=name)


def test_swings_are_exact_evaluations():
    table, workload, system = case(CHIMERA)
    program = pj.lower(table)
    result = swings(table, workload, system, factors=(0.5, 3.0))
    assert {f"model.{name}" for name in MODEL_PARAMETERS} < set(result)
    for parameter, ends in result.items():
        ours = [step_time(program, table, workload, system, parameter, f) for f in (0.5, 3.0)]
        np.testing.assert_allclose(ends, ours, rtol=1e-12, err_msg=parameter)


def test_other_systems_and_models_do_not_recompile():
    table, workload, system = case(CHIMERA)
    others = [
        (workload, pj.load_system("fast_nw_fast_cp")),
        (dataclasses.replace(workload, model=pj.load_model("gpt3-175b"), minibatch=32), system),
    ]
    rebuilt, _, _ = case(CHIMERA)
    result = [pj.sensitivity(table, workload, system).step_time]
    swings(table, workload, system)
    solver = interpreter._compile()
    compiled = solver._cache_size()
    result += [pj.sensitivity(table, *other).step_time for other in others]
    for other in others:
        swings(rebuilt, *other)
    assert solver._cache_size() == compiled
    assert len(set(result)) == 3


SETTING = [
    *shlex.split("sensitivity --schedule 1f1b --workers 2 --microbatches 4 --model tabular-128l"),
    *shlex.split("--system mid_nw_mid_cp --minibatch 8"),
]


def test_command(answer_and_text, tmp_path):
    out = tmp_path / "tornado.svg"
    result, text = answer_and_text(*SETTING, "--factor", 3, "--figure", out)
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
    workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)
    expected = pj.sensitivity(table, workload, pj.load_system("mid_nw_mid_cp"))
    assert result["step_time"] == pytest.approx(expected.step_time)
    assert result["elasticity"] == pytest.approx(expected.elasticity)
    assert result["bound_by"] == expected.bound_by == "compute.peak"
    assert result["factors"] == [1 / 3, 3]
    assert result["swings"]["model.kv_heads"][1] is None  # more than heads
    slower, faster = result["swings"]["compute.peak"]
    assert faster < result["step_time"] < slower
    assert "peak FLOP/s" in out.read_text()
    assert "bound by compute.peak" in text


@pytest.mark.slow
def test_a_step_time_beyond_floats_is_refused():
    h100 = pj.load_system("h100")
    workload = pj.Workload(pj.load_model("tabular-128l"), minibatch=8)
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    for name, value in (("peak_flops", 1e-300), ("compute_latency", 1e307)):
        system = dataclasses.replace(h100, **{name: value})
        with pytest.raises(ValueError, match="the step time is too large for a float64"):
            pj.sensitivity(table, workload, system)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_shares_of_places_are_the_critical_path(name):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    rng = np.random.default_rng(3)
    times = {k: rng.uniform(1, 2, table.num_stages) for k in ("forward", "input_grad")}
    between = rng.uniform(0.1, 0.4, table.num_stages - 1)
    costs = pj.Costs(**times, weight_grad=0.5, transmit=between)
    run = pj.evaluate(table, costs)
    result = place_sensitivity(run, (0.5, 2.0))
    for place in ("stage", "worker"):
        chosen = [part for part in result if part.place.startswith((place, "boundary"))]
        shares = [part.share for part in chosen]
        assert sum(shares) == pytest.approx(1.0, rel=1e-12)
    for resource in result:
        for factor, time in zip((0.5, 2.0), resource.step_times, strict=True):
            scaled = pj.costing.scaled_costs(costs, table, resource.rule(factor))
            assert pj.evaluate(table, scaled).makespan == time
        # one more per mille costs its share: no other path is so near
        nudged = pj.costing.scaled_costs(costs, table, resource.rule(1 + 1e-9))
        slope = (pj.evaluate(table, nudged).makespan - run.makespan) / (1e-9 * run.makespan)
        assert slope == pytest.approx(resource.share, abs=1e-5)


@pytest.mark.parametrize(("encoders", "depth"), [(1, 2), (2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("link", ["delay", "queued", "rendezvous"])
def test_shares_of_boundaries_of_a_graph_are_their_slopes(encoders, depth, link):
    options = {"encoders": encoders, "encoder_stages": depth}
    table = pj.schedules.build("encoders-1f1b", num_workers=8, num_microbatches=4, **options)
    times = np.random.default_rng(1).uniform(0.1, 3, (2, 1, len(table.grammar.edges(8))))
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=times, latency=0.1)
    run = pj.evaluate(table, costs, link=link)
    for resource in place_sensitivity(run, (1 - 1e-7, 1 + 1e-7)):
        slower, faster = resource.step_times[::-1]
        slope = (slower - faster) / (2e-7 * run.makespan)
        assert slope == pytest.approx(resource.share, abs=1e-5)


def test_a_file_of_costs_has_places(answer):
    line = ["-s", "1f1b", "-P", 2, "-M", 8, "-T", "F=1,B=2", "--stragglers", "1=2"]
    result = answer("sensitivity", *line, "--factor", 2)
    assert result["places"][0]["place"] in ("stage1", "worker1")
    assert result["places"][0]["step_times"] == [27.0, 99.0]
