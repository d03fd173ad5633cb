"""Stages that are alike are priced as one."""

import dataclasses

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.many_systems import distinct_stages
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_work

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
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
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
    whole, gathered = (
        sum(jax.tree.leaves(jax.tree.map(lambda n, cost: (n * cost).sum(), *pair)))
        for pair in ((counts, expected), (places.gather(counts), costs))
    )
    assert gathered == pytest.approx(whole, rel=1e-12)


def test_a_pipeline_of_one_stage_has_one_kind_and_no_boundary():
    table = pj.schedules.build("gpipe", num_workers=1, num_microbatches=2)
    work = stage_work(pj.Workload(DENSE, 2), table)
    few, places = distinct_stages(work)
    costs = places.spread(in_front(work_costs(few, pj.load_system("h100"))))
    assert costs.forward.shape == (1, 1)
    assert costs.transmit.shape == (1, 2, 1, 0)
    assert few.stages.first.sum() == few.stages.last.sum() == 1


def test_many_kinds_of_stages_are_all_kept():
    table = pj.schedules.build("1f1b", num_workers=12, num_microbatches=12)
    work = stage_work(pj.Workload(DENSE, 12), table)
    layers = (np.arange(1.0, 13.0),)
    work = work._replace(layers=layers, stages=work.stages._replace(layers=layers[0]))
    few, places = distinct_stages(work)
    assert few.layers[0].shape == (12,)
    assert few.layers[0][places.stage].tolist() == layers[0].tolist()
