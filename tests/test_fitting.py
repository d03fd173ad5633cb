"""A run that does not fit says so first, with the least change that makes it fit."""

import pytest

import pipejax as pj
from pipejax.analysis.step.step_report import fitting_change

GPT3 = ("-m", "gpt3-175b", "-y", "h100", "--tensor-parallel", 8)
SIZES = ("-s", "1f1b", "-P", 8, "-M", 32, "--minibatch", 32)


def test_what_does_not_fit_is_said_first_and_with_what_it_would(call, answer):
    code, shown, _ = call("evaluate", *SIZES, *GPT3)
    assert code == 0
    assert shown.splitlines()[0].endswith(
        "; does not fit: worker 0 needs 100.9 of 83.5 GB; with --sequence-parallel it would"
    )
    result = answer("evaluate", *SIZES, *GPT3)
    assert (result["fits"], result["fits_with"]) == (False, {"sequence_parallel": True})
    (line,) = result["next"]
    again = answer(*line.split()[1:])
    assert again["fits"]
    assert max(again["memory_bytes"]) <= again["memory_room"] < max(result["memory_bytes"])
    assert {"fits_with", "next"}.isdisjoint(again)
    assert "fit" not in call("evaluate", *SIZES, *GPT3, "--sequence-parallel")[1]


def test_what_nothing_makes_fit_is_said(call, answer):
    few = ("-s", "1f1b", "-P", 2, "-M", 32, "--minibatch", 32, *GPT3)
    code, shown, _ = call("evaluate", *few)
    assert code == 0
    assert "231.3 of 83.5 GB; no --sequence-parallel, --zero or --recompute makes it fit" in shown
    assert answer("evaluate", *few)["fits_with"] is None


@pytest.mark.parametrize("share", [0.99, 0.9, 0.8, 0.6, 0.4, 0.2, 0.01])
def test_the_least_dear_change_is_taken(share):
    """As one tries it by hand, in the order of what it costs."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    options = {"minibatch": 8, "tensor_parallel": 2, "data_parallel": 2}
    model = pj.load_model("gpt-22b")

    def need(**change):
        return pj.memory_bytes(pj.Workload(model, **options, **change), table).max()

    room = share * need()
    change = fitting_change(pj.Workload(model, **options), table, room)
    dear = {("zero", 1): 1, ("recompute", "selective"): 2, ("zero", 2): 4}
    dear |= {("recompute", "full"): 8, ("zero", 3): 16}
    costs = [
        sum(dear.get(item, 0) for item in all_values.items())
        for all_values in (
            {"zero": zero, "recompute": recompute, "sequence_parallel": parallel}
            for zero in (0, 1, 2, 3)
            for recompute in ("none", "selective", "full")
            for parallel in (False, True)
        )
        if need(**all_values) <= room
    ]
    if not costs:
        assert change is None
        return
    assert need(**change) <= room
    assert sum(dear.get(item, 0) for item in change.items()) == min(costs)
