"""Certificates of whatever the engine runs are accepted.

`make fuzz EXAMPLES=20000` draws others, as many as that.
"""

import os

import numpy as np
import pytest
from certificate_cases import KINDS, optimum_of, written
from hypothesis import given, settings

import pipejax as pj

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))
SHARES = {"run": 0.5, "optimum": 0.1, "formula": 0.1}
SHARES |= {"run of a grammar": 0.2, "formula of a grammar": 0.1}


@pytest.mark.parametrize("kind", KINDS)
def test_every_true_certificate_is_accepted(kind):
    @settings(max_examples=max(1, round(EXAMPLES * SHARES[kind])))
    @given(claimed=KINDS[kind])
    def accept(claimed):
        assert claimed["kind"] == kind.split()[0]
        assert pj.verify(claimed).problems == ()

    accept()


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_memory_that_comes_and_goes_at_one_moment_is_none(name):
    """Parts of an activation that are freed need not sum up to it, in floats."""
    table = pj.schedules.build(name, num_workers=2, num_microbatches=3)
    run = pj.evaluate(table, pj.Costs(forward=0.0, input_grad=0.0, weight_grad=0.0))
    assert pj.verify(written(pj.certificate(run))).problems == ()


def test_the_update_of_a_copy_is_that_of_its_own_microbatches():
    """A sharding cell, which is of no microbatch, does not say which pipe a copy belongs to."""
    table = pj.ScheduleTable.from_rows(
        [["0F1", "0B1", "1RESHARD", "1F0", "1B0"], ["1F1", "1B1", "0F0", "0B0"]],
        placement=[[0, 1], [1, 0]],
        pipe_of_microbatch=[1, 0],
    )
    costs = pj.Costs(forward=1.0, backward=2.0, update=np.array([[1.0, 5.0], [2.0, 3.0]]))
    run = pj.evaluate(table, costs)
    claimed = written(pj.certificate(run))
    assert pj.verify(claimed).problems == ()
    update = claimed["proof"]["ops"]["1U (worker 0)"]
    assert update["end"] - update["start"] == 2.0


def test_bounds_of_times_without_a_common_unit_are_derived():
    """The unit of which all are whole multiples has more digits than a float."""
    table = pj.schedules.build("1f1b", num_workers=8, num_microbatches=2)
    rng = np.random.default_rng(0)
    times = {name: rng.random(8) for name in ("forward", "input_grad", "weight_grad")}
    costs = pj.Costs(**times, transmit=rng.random((2, 1, 7)), latency=rng.random((2, 1, 7)))
    run = pj.evaluate(table, costs, link="queued")
    claimed = pj.certificate(run, limits=[2.0] * 8, lower_bounds={"memory area": 0.5})
    assert pj.verify(written(claimed)).problems == ()


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_an_optimum_says_what_its_table_reaches(objective):
    """With all-reduces in the order of a run; spans are without the end of the step."""
    table = pj.schedules.build("chimera", num_workers=2, num_microbatches=2)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        whole = {
            name: rng.integers(1, 9, 2) * 1.0
            for name in ("forward", "input_grad", "weight_grad", "all_reduce", "update")
        }
        claimed = optimum_of(table, pj.Costs(**whole), 4.0, objective=objective)
        assert claimed is None or pj.verify(claimed).problems == ()


def test_weights_of_a_form_are_whole_in_every_part_of_a_message():
    """Latency and transmit time are halves, and the message is a whole."""
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
    costs = pj.Costs(forward=1.0, backward=2.0, latency=0.5, transmit=0.5)
    form = pj.formula(pj.lower(table, step_end=False), {"x": costs})
    assert pj.verify(form.certificate(table)).ok
