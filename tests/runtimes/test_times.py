"""Predicted and measured step times of two workers, whose stages sleep."""

import numpy as np
import pytest

import pipejax as pj
from pipejax.runtimes.gloo.runtime import run_tables
from pipejax.runtimes.processes import RuntimeJob

NAMES = ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2"]
NAMES += ["zb-1p", "v-half", "v-min"]
OP = 0.06  # seconds of F; I is as long, W two thirds
STEPS = 5
# what a message takes: activations of 2 MB over gloo itself, or a link that is as slow
MESSAGES = {
    "gloo, 2 MB": ({"hidden": 256, "batch_size": 1000}, 0.0, 0.03, 0.03),
    "2 ms": ({}, 0.002, 0.03, 0.03),
    "half an op": ({}, OP / 2, 0.04, 0.08),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_predicted_and_measured(kind, record_property):
    size, transmit, mean, largest = MESSAGES[kind]
    costs = pj.Costs(forward=OP, input_grad=OP, weight_grad=OP * 2 / 3, transmit=transmit)
    tables = [pj.schedules.build(name, num_workers=2, num_microbatches=4) for name in NAMES]
    runs = run_tables([RuntimeJob(t, costs=costs, steps=STEPS, **size) for t in tables])
    errors = {}
    for name, result in zip(NAMES, runs, strict=True):
        measured = float(np.median(result.step_times))
        errors[name] = result.predicted / measured - 1
        message = max(result.message)
        print(f"{kind:9s} {name:18s} {measured:8.4f} s {errors[name]:+7.2%} {message * 1e3:.1f} ms")
    off = np.abs(list(errors.values()))
    print(f"{kind:12s} mean {off.mean():.2%}, most {off.max():.2%}")
    assert off.mean() <= mean, errors
    assert off.max() <= largest, errors
