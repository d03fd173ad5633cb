"""R cells put into any table, and weight gradients that recompute once more."""

import itertools

import pytest

import pipejax as pj
from pipejax.schedules import REGISTRY

F, B, I, R = (pj.Phase[letter] for letter in "FBIR")  # noqa: E741
SIZE = {"num_workers": 4, "num_microbatches": 8}


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"chunked-prefill"}))  # has no backward
def test_every_backward_recomputes_first(name):
    table = pj.schedules.build(name, **SIZE).with_recomputation()
    assert (table.where[R] >= 0).all()
    for row in table.rows():
        for cell, after in itertools.pairwise(row):
            for op in cell:
                if op.phase == R:
                    assert (op.stage, op.microbatch) in [
                        other[1:] for other in after if other.phase in (B, I)
                    ]
    assert [*table.with_recomputation().rows()] == [*table.rows()]


def test_checkpoints_are_what_waits_for_a_backward():
    """F leaves a checkpoint; R brings the activation back, I leaves what W needs of it."""
    table = pj.schedules.build("zb-h1", **SIZE)
    costs = pj.Costs(forward=1.0, backward=2.0, recompute=1.0)
    sizes = {"sizes": [1.0] * 4, "checkpoints": [0.125] * 4, "weight_share": [0.25] * 4}
    whole = pj.analysis.activation_memory(pj.evaluate(table, costs), **sizes)
    less = pj.analysis.activation_memory(pj.evaluate(table.with_recomputation(), costs), **sizes)
    assert whole.peak[0] == 4.0
    assert less.peak[0] == 3 * 0.125 + 1.0


def test_recomputing_twice_loses_what_split_backwards_gain(answer):
    """At F = I = W = R, ZB-H1 beats 1F1B; with R before I and again before W it is slower."""
    options = "-P", 4, "-M", 16, "--stage-times", "F=1,I=1,W=1,R=1", "--recompute-cells"
    result = {
        name: answer("evaluate", "-s", name, *options, *more)["makespan"]
        for name, more in (("1f1b", ()), ("zb-h1", ("--recompute-again",)))
    }
    once = answer("evaluate", "-s", "zb-h1", *options)["makespan"]
    assert result["1f1b"] == 16 * 4.0 + 3 * 3.0  # an R waits for no gradient: it fills the bubble
    assert 16 * 4.0 <= once < result["1f1b"] < 16 * 5.0 <= result["zb-h1"]


def test_what_has_no_effect_is_refused(call, tmp_path):
    options = "evaluate", "-s", "1f1b", "-P", 4, "-M", 8, "--stage-times"
    code, _, message = call(*options, "F=1,B=2,R=1")
    assert (code, "R has no effect" in message) == (2, True)
    code, _, message = call(*options, "F=1,B=2,R=1", "--recompute-cells", "--recompute-again")
    assert (code, "--recompute-again has no effect: no W in 1f1b" in message) == (2, True)
    code, _, message = call(*options, "F=1,B=2", "--recompute-cells")
    assert (code, "phase R has no cost" in message) == (2, True)


def test_a_table_of_a_file_gets_them_too(answer, tmp_path):
    path = tmp_path / "table.json"
    pj.write_table(pj.schedules.build("gpipe", **SIZE), path)
    options = "evaluate", "--table", path, "--stage-times", "F=1,B=2,R=0.5", "--recompute-cells"
    assert answer(*options)["makespan"] == 8 * 3.5 + 3 * 3.0
