"""Activation memory over time against a sweep in plain Python, and by hand."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import strategies
from hypothesis import given, settings, strategies as st

import pipejax as pj
from pipejax.costs.stage.stage_work import stage_bytes
from pipejax.schedules.table.held_activations import (
    held_counts,
    held_in_rows,
    static_bytes,
)

THIRD = Fraction(1, 3)


def peaks_of_rows(table, sizes):
    """The peak twice: of the rows, and of their counts; both are exact for whole numbers."""
    peaks = held_in_rows(table, at_work=True).peaks(sizes, table.num_workers)
    assert held_counts(table).activation_bytes(tuple(sizes)).tolist() == peaks.tolist()
    return peaks.tolist()


def check_rows_against_time(table, costs, seed):
    """Compare peaks of rows with peaks in time: equal if every op takes time and none is offloaded."""
    rng = np.random.default_rng(seed)
    timed = {
        name: 0.1 + rng.random(table.num_stages)
        for name in ("forward", "backward", "input_grad", "weight_grad", "recompute")
    }
    run = pj.evaluate(table, dataclasses.replace(costs, **timed, offload=0.0, load=0.0, pair=None))
    whole, inputs = 8.0 * rng.integers(1, 9, (2, table.num_stages))
    shares = rng.integers(0, 9, table.num_stages) / 8
    at_work = 8.0 * rng.integers(0, 9, (3, table.num_stages))
    memory = pj.analysis.activation_memory(
        run, sizes=whole, weight_share=shares, checkpoints=inputs, at_work=at_work
    )
    sizes = np.stack([whole, shares * whole, inputs, *at_work])
    assert memory.peak.tolist() == peaks_of_rows(table, sizes)


@pytest.mark.parametrize("name", pj.schedules.REGISTRY)
def test_rows_say_what_the_run_says(name):
    table = pj.schedules.build(name, num_workers=4, num_microbatches=8)
    for seed in range(3):
        check_rows_against_time(table, pj.Costs(update=0.5), seed)


def test_counts_price_many_sizes_at_once():
    held = held_counts(pj.schedules.build("chimera", num_workers=4, num_microbatches=8))
    sizes = np.random.default_rng(0).integers(1, 9, (6, 5, 4)).astype(float)  # parts, batch, stages
    expected = [held.activation_bytes(tuple(part_sizes)) for part_sizes in sizes.swapaxes(0, 1)]
    assert np.array_equal(held.activation_bytes(tuple(sizes)), expected)


@settings(max_examples=60)
@given(case=strategies.cases(pairs=True, step_end=True), seed=st.integers(0, 99))
def test_random_rows_say_what_the_run_says(case, seed):
    check_rows_against_time(case.table, case.costs, seed)


def get_memory(row, costs, **options):
    return pj.analysis.activation_memory(
        pj.evaluate(pj.ScheduleTable.from_rows([row]), costs), **options
    )


COSTS = pj.Costs(
    forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0, recompute=1.0, offload=3.0, load=2.0
)


def test_a_wait_bounds_the_memory_whatever_the_times_are():
    row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
    for offload in (0.0, 0.1, 100.0):
        costs = dataclasses.replace(COSTS, offload=offload)
        assert get_memory(row, costs).peak.tolist() == [1.0]


def test_thirds_add_up_to_whole_numbers():
    first = [f"0{phase}{m}" for m in range(30) for phase in "FI"]  # I before the next F
    memory = get_memory(
        [*first, *(f"0W{m}" for m in range(30))],
        pj.Costs(forward=0.1, input_grad=0.7, weight_grad=0.3),
    )
    thirds = 3 * memory.held
    np.testing.assert_allclose(thirds, np.round(thirds), atol=1e-9)
    assert memory.peak[0] == pytest.approx(1 + 29 * THIRD, abs=1e-9)
    assert memory.held[-1] == 0.0


ONE = ["--schedule", "1f1b", "--workers", "4", "--microbatches", "8"]
TIMES = ["--stage-times", "F=1,I=1,W=1"]


def test_evaluate_prints_the_peak_and_when(answer, call):
    result = answer("evaluate", *ONE, *TIMES)["activation_memory"]
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    memory = pj.analysis.activation_memory(
        pj.evaluate(table, pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0))
    )
    assert result == {
        "unit": "activations",
        "weight_share": 1 / 3,
        "peak": memory.peak.tolist(),
        "peak_at": memory.peak_at.tolist(),
    }
    given_sizes = ["--weight-share", "1", "--activation-sizes", "2,1,1,1"]
    held = answer("evaluate", *ONE, *TIMES, *given_sizes)
    assert held["activation_memory"]["peak"][0] == 2 * held["peak_in_flight"][0]
    _, out, _ = call("evaluate", *ONE, *TIMES, "--details")
    assert f"4 at {memory.peak_at[0]:g} s" in out


def test_a_model_gives_bytes(answer, mistake):
    model = ["-s", "1f1b", "-P", 4, "-M", 8, "-m", "gpt-22b", "-y", "a100", "--minibatch", 8]
    result = answer("evaluate", *model)["activation_memory"]
    assert result["unit"] == "bytes"
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch=8)
    memory = stage_bytes(workload, table)
    held = pj.memory_bytes(workload, table) - static_bytes(table, memory.static)
    np.testing.assert_allclose(result["peak"], held, rtol=1e-14)
    assert result["weight_share"] == memory.weight_share.tolist()
    line = mistake("evaluate", *model, "--activation-sizes", "1")
    assert "--activation-sizes does not go with --model" in line


def test_show_draws_memory_and_host_links(answer, call, tmp_path):
    path = tmp_path / "offload.csv"
    row = ["0F0", "0O0", "0WAIT_O0", "0F1", "0B1", "0L0", "0B0"]
    pj.write_table(pj.ScheduleTable.from_rows([row]), path)
    arguments = ["show", "--table", path, "--stage-times", "F=1,B=2,O=3"]
    _, out, _ = call(*arguments, "--memory", "--width", "80")
    _, compute, host, memory, *legend = out.splitlines()
    assert "WAIT" not in out
    assert ["F0" in compute, "O0" in compute, "O0" in host, "L0" in host] == [1, 0, 1, 1]
    assert [memory.split()[0], "█" in memory, "held" in " ".join(legend)] == ["1", True, True]
    _, out, _ = call(*arguments, "--width", "80")
    *_, legend = out.splitlines()[:4]  # host line always, memory only where asked for
    assert legend.startswith("number: microbatch")
    rows = [["0F0", "0O0", "0WAIT_O0", "0L0", "0B0"], ["1F0", "1B0"]]
    lines = []
    for row in (rows[0], [cell for cell in rows[0] if "WAIT" not in cell]):
        other = tmp_path / "wait.csv"
        pj.write_table(pj.ScheduleTable.from_rows([row, rows[1]]), other)
        _, out, _ = call("show", "--table", other, "--stage-times", "F=1,B=2,O=0.2")
        lines.append(out.splitlines()[1])
    assert lines[0] == lines[1]  # a wait takes no time and no column
    picture = tmp_path / "offload.svg"
    answer(*arguments, "--memory", "--out", picture)
    text = picture.read_text()
    for word in ("offload", "load", "activations held, peak 1", "time [s]"):
        assert word in text
    assert "WAIT_O" not in text
    curves = answer(*arguments, "--memory")["activation_memory"]["curves"]
    assert curves == [{"time": [0.0, 4.0, 7.0, 12.0], "held": [1.0, 1.0, 1.0, 0.0]}]
