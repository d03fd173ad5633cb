"""Slow workers: a factor reaches the ops of its worker and no others, in every kind of table."""

import jax
import numpy as np
import pytest
import reference
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj

LINKS = st.sampled_from(["delay", "queued", "blocking", "rendezvous"])


class SlowRun(reference.Run):
    """The event loop with a factor on what each worker executes."""

    def __init__(self, factors, *arguments):
        self.factors = factors
        super().__init__(*arguments)

    def duration(self, cell):
        if cell[0][0] in (*reference.HOST, "WAIT_O"):
            return super().duration(cell)
        phase, stage, m = cell[0]
        worker = -1 - m if phase == "U" and m < 0 else self.cell_of[phase, stage, m][0]
        return super().duration(cell) * self.factors[worker]


@settings(max_examples=60)
@given(
    case=st.booleans().flatmap(
        lambda given: strategies.cases(pairs=given, step_end=True, by_microbatch=not given)
    ),
    link=LINKS,
    data=st.data(),
)
def test_slow_workers_are_those_of_the_event_loop(case, link, data):
    table = case.table
    factors = [data.draw(st.integers(2, 12)) / 4 for _ in range(table.num_workers)]
    costs = pj.scale_workers(case.costs, table, factors)
    pipes = table.pipe_of_microbatch.tolist()
    expected = SlowRun(factors, case.rows, pipes, case.theirs, link)
    found = pj.evaluate(table, costs, link=link)
    assert found.makespan == pytest.approx(expected.makespan, rel=1e-12)
    np.testing.assert_allclose(found.busy, expected.busy(), rtol=1e-12)
    plain = pj.evaluate(table, case.costs, link=link)
    program = plain.program
    on_worker = (program.worker >= 0) & (plain.node_duration > 0)
    ratio = found.node_duration[on_worker] / plain.node_duration[on_worker]
    assert ratio == pytest.approx(np.array(factors)[program.worker[on_worker]])
    beside = program.worker < 0
    assert np.array_equal(found.node_duration[beside], plain.node_duration[beside])
    assert pj.verify(pj.certificate(found)).ok


def test_copies_of_a_stage_are_as_slow_as_their_workers(data):
    """Chimera's update of a stage is short on one worker and long on the other."""
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs = pj.scale_workers(pj.Costs(forward=1.0, backward=2.0, update=0.5), table, {1: 3.0})
    run = pj.evaluate(table, costs)
    assert run.busy.tolist() == [13.0, 39.0, 13.0, 13.0]
    updates = (run.program.phase == pj.Phase.U) & (run.program.worker >= 0)
    assert (
        run.node_duration[updates].tolist()
        == np.where(run.program.worker[updates] == 1, 1.5, 0.5).tolist()
    )
    rules = pj.scaled_costs(pj.Costs(forward=1.0, backward=2.0), table, "compute@worker1*3")
    plain = pj.scale_workers(pj.Costs(forward=1.0, backward=2.0), table, {1: 3.0})
    assert np.array_equal(rules.forward, plain.forward)
    split = pj.read_table(data / "DualPipeV_4_8.csv")  # its fused pairs have a time of their own
    paired = pj.Costs(forward=1.0, backward=2.0, pair=2.5)
    slow = pj.evaluate(split, pj.scale_workers(paired, split, {2: 2.0}))
    ratio = slow.busy / pj.evaluate(split, paired).busy
    assert ratio.tolist() == [1.0, 1.0, 2.0, 1.0]


@pytest.mark.compiles
def test_factors_are_differentiable():
    """The derivative by a worker's factor is what the worker has of the critical path."""
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=4)
    costs, program = pj.Costs(forward=1.0, backward=2.0, transmit=0.125), pj.lower(table)

    def total(factors):
        return pj.makespan(program, pj.scale_workers(costs, table, factors))

    factors = np.array([1.0, 1.3, 1.1, 1.7])
    with jax.enable_x64(True):
        slopes = jax.grad(total)(factors)
    run = pj.evaluate(table, pj.scale_workers(costs, table, factors))
    on_path = run.critical & (run.program.worker >= 0)
    expected = (
        np.bincount(run.program.worker[on_path], run.node_duration[on_path], minlength=4) / factors
    )
    assert np.asarray(slopes) == pytest.approx(expected)
