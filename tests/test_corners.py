"""Slack against a target, total negative slack, and corners: named sets of costs, all at once."""

import dataclasses

import jax
import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.base import longest_path
from pipejax.engine.pricing import price
from pipejax.schedules.table.links import LINK_MODELS

LINKS = st.sampled_from(list(LINK_MODELS))
SMALL = ["evaluate", "--schedule", "chimera", "--workers", 4, "--microbatches", 4]
SMALL += ["--stage-times", "F=1,B=2", "--comm", 0.1]
CHIMERA = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)


@pytest.mark.slow
@given(case=strategies.cases(pairs=True, step_end=True), link=LINKS, data=st.data())
@settings(max_examples=12)
def test_corners_equal_one_by_one(case, link, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    costs = {"first": case.costs}
    for name in ("second", "third"):
        costs[name] = strategies.price(case.table, case.rows, rng, pairs=True, step_end=True).costs
    target = data.draw(st.none() | st.integers(0, 400).map(lambda k: k / 8))
    program = strategies.padded(pj.lower(case.table, link=link), num_nodes=512, max_preds=8)
    ends = np.zeros(9, int)  # of workers that there are not: the source
    ends[: program.num_workers] = program.last_node
    program = dataclasses.replace(program, last_node=ends)
    result = pj.analysis.corners(program, costs, target=target)
    for k, corner in enumerate(costs.values()):
        assert result.makespan[k] == pj.makespan(program, corner)
        assert np.array_equal(result.slack[k], pj.analysis.slack(program, corner, target=target))
        spare = longest_path.slack(program.preds, *map(np.asarray, price(program, corner)), target)
        assert np.array_equal(result.slack[k], spare)
        late = 0.0 if target is None else pj.analysis.total_negative_slack(program, corner, target)
        assert result.total_negative_slack[k] == late
    assert np.array_equal(result.worst_slack, result.slack.min(axis=0))
    nodes = np.arange(program.num_nodes)
    assert np.array_equal(result.slack[result.binding, nodes], result.worst_slack)
    assert np.array_equal(result.binding, np.argmax(result.slack == result.worst_slack, axis=0))


def test_lateness_is_an_objective():
    program = pj.lower(pj.schedules.build("1f1b", num_workers=4, num_microbatches=8))

    def late(transmit, target):
        costs = pj.Costs(forward=1.0, backward=2.0, transmit=transmit)
        return pj.analysis.total_negative_slack(program, costs, target)

    times = np.linspace(0.013, 1.0, 5)  # off the borders of pieces
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(late), (0, None)))(times, 33.5)
    for time, value, slope in zip(times, values, slopes, strict=True):
        assert value == pytest.approx(float(late(float(time), 33.5)), rel=1e-6)
        step = (float(late(float(time) + 1e-3, 33.5)) - float(late(float(time), 33.5))) / 1e-3
        assert slope == pytest.approx(step, rel=1e-2, abs=1e-3)
    # the ends are 33, 31, 29 and 27: in time, at the target to the bit, and all four late
    assert late(0.0, 33.0) == 0.0
    assert late(0.0, 20.0) == -(13.0 + 11.0 + 9.0 + 7.0)
    assert jax.grad(late, argnums=1)(0.0, 27.0) == 3.0  # who ends at the target is not late


@pytest.mark.parametrize("pair", [None, 2.5])
def test_rules_scale_what_they_name(data, pair):
    """On every node by itself, whichever worker of two pipes it runs on."""
    table = CHIMERA if pair is None else pj.read_table(data / "DualPipeV_4_8.csv")
    stages = np.arange(1.0, table.num_stages + 1)
    microbatches = np.arange(1.0 * table.num_microbatches)
    costs = pj.Costs(  # every shape that a leaf may have
        forward=stages,
        backward=stages[:, None] + microbatches,
        input_grad=1.25,
        weight_grad=stages[None, 0, None] + microbatches[None],
        transmit=stages[:-1],
        latency=microbatches.reshape(1, 1, 1, -1),
        pair=pair,
    )
    plain = pj.evaluate(table, costs, link="queued")
    program, sent = plain.program, plain.program.messages
    is_op = program.worker >= 0
    for rules, scaled in (
        ("compute*2", is_op),
        ("compute@worker2*2", program.worker == 2),
        ("compute@stage1*2", is_op & (program.stage == 1)),
        ("compute@microbatch3*2", is_op & (program.microbatch == 3)),
        ("F@stage1*2", is_op & (program.stage == 1) & (program.phase == pj.Phase.F)),
        ("message@microbatch3*2", ~is_op & (program.microbatch == 3)),
        ("transmit@worker2*2", (program.sender == 2) | (program.receiver == 2)),
        ("message*2", ~is_op),
    ):
        if pair is not None and rules in ("F@stage1*2", "compute@microbatch3*2"):
            continue  # a pair's time is by the stage and microbatch of its forward
        result = pj.evaluate(table, pj.costing.scaled_costs(costs, table, rules), link="queued")
        is_timed = plain.node_duration > 0
        factor = result.node_duration[is_timed] / plain.node_duration[is_timed]
        assert factor.tolist() == np.where(scaled, 2.0, 1.0)[is_timed].tolist(), rules
    is_forth = sent.phase == pj.Phase.SEND_F
    boundary = np.minimum(sent.stage, np.where(is_forth, sent.stage, sent.stage - 1))
    slower = pj.costing.scaled_costs(costs, table, "transmit@boundary1*2")
    result = pj.evaluate(table, slower, link="queued")
    factor = result.node_duration[sent.carrier] / plain.node_duration[sent.carrier]
    assert factor.tolist() == np.where(boundary == 1, 2.0, 1.0).tolist()
    twice = pj.costing.scaled_costs(costs, table, "transmit*2, transmit@boundary1*2, latency*3")
    assert (twice.transmit / costs.transmit).tolist() == [2.0, 4.0, *[2.0] * (len(stages) - 3)]
    assert np.array_equal(twice.latency, 3 * costs.latency)


def test_corners_on_the_command_line(answer, call):
    slow, hot = ["--corner", "slow link:transmit*4"], ["--corner", "hot:compute@worker2*1.5"]
    result = answer(*SMALL, *slow, *hot, "--target", 18, "--slack")
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=0.1)
    corner_costs = [pj.Costs(forward=1.0, backward=2.0, transmit=0.4)]
    corner_costs.append(pj.costing.scaled_costs(costs, CHIMERA, "compute@worker2*1.5"))
    program = pj.lower(CHIMERA, step_end=False)
    assert [corner["name"] for corner in result["corners"]] == ["nominal", "slow link", "hot"]
    for corner, priced in zip(result["corners"], [costs, *corner_costs], strict=True):
        assert corner["makespan"] == pj.evaluate(CHIMERA, priced).makespan
        late = pj.analysis.total_negative_slack(program, priced, 18.0)
        assert corner["total_negative_slack"] == late
        assert corner["worst_slack"] == pytest.approx(18 - corner["makespan"])
    assert sum(corner["binding_ops"] for corner in result["corners"]) == 32 == len(result["slack"])
    assert {op["corner"] for op in result["slack"]} <= {"nominal", "slow link", "hot"}
    worst = min(corner["worst_slack"] for corner in result["corners"])
    assert min(op["slack"] for op in result["slack"]) == worst
    alone = answer(*SMALL, "--target", 16)
    assert (alone["target"], alone["worst_slack"]) == (16, pytest.approx(-0.7))
    assert alone["total_negative_slack"] < alone["worst_slack"]
    assert "corners" not in alone
    assert "slow link" in call(*SMALL, *slow)[1]
