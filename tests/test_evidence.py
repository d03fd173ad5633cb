"""A plan ranks apart what nobody measured, and says what the rest stands on."""

import dataclasses
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.evidence import (
    EVIDENCE,
    Evidence,
    Regime,
    as_numbers,
    evidence_of_tables,
    from_numbers,
    known_evidence,
    summarize_evidence,
)
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.system.system import DATA, Band, CalibrationRecord
from pipejax.sweep.plan.plan import chances

QUICK = ("llm_foundry_h100", "torchtitan_h100", "megatron_bridge_b300")  # tables
SPLIT, WHOLE = Regime(True, 0, False), Regime(False, 0, False)


def test_the_file_says_what_the_tables_say():
    result = [pj.validate(DATA / "measured" / f"{name}.csv") for name in QUICK]
    stored = json.loads(EVIDENCE.read_text("utf-8"))
    for name, by_stack in evidence_of_tables(result).items():
        for stack, message in by_stack.items():
            assert stored[name][stack] == message


def test_runs_of_one_configuration_count_once():
    rows = read_rows(DATA / "measured" / "llm_foundry_h100.csv").take(np.array([0, 0, 1]))
    (result,) = summarize_evidence(rows, np.array([0.1, 0.3, -0.4]), 8.0)
    assert result[:2] == (SPLIT, 2)
    assert result.mean_error == pytest.approx(100 * (0.2 + 0.4) / 2)
    (again,) = from_numbers(as_numbers([result]))
    assert again == result._replace(mean_error=30.0)


def test_what_is_enough_and_tells_of_what():
    assert [Evidence(WHOLE, n, e).is_enough for n, e in ((3, 15), (2, 1), (9, 16))] == [1, 0, 0]
    narrow = Regime(False, 0, True)
    assert WHOLE.is_covered_by(narrow)
    assert not narrow.is_covered_by(WHOLE)
    assert not SPLIT.is_covered_by(WHOLE)
    assert not Regime(False, 1, False).is_covered_by(WHOLE)  # dense, with experts
    assert str(Regime(True, 2, True)) == "below 16 bits, ZeRO 3, experts over nodes"


def test_a_calibrated_machine_stands_on_its_own_rows():
    h100 = pj.load_system("h100")
    assert known_evidence(h100, "") == known_evidence(h100, "megatron-core-2024") != ()
    assert known_evidence(h100, "a stack of one's own") == ()
    rows = as_numbers([Evidence(WHOLE, 5, 4.0)])
    is_own = dataclasses.replace(h100, calibration=CalibrationRecord("runs", 5, (), (), "", rows))
    assert known_evidence(is_own, "") == (Evidence(WHOLE, 5, 4.0),)


@pytest.fixture(scope="module")
def layouts():
    choices = {"tensor": [2], "pipeline": [2], "zero": [1, 3], "recompute": ["none"]}
    more = {
        "choices": choices | {"edge_units": [0], "microbatch_size": [1], "context": [1]},
        "overlap": 1,
    }
    return lambda system, **options: pj.plan(
        "llama3-8b", system, gpus=8, minibatch=8, schedules=["1f1b"], **more, **options
    )


def test_no_layout_that_nobody_measured_stands_first(layouts):
    h100 = pj.load_system("h100")
    result = layouts(h100)
    first = (result.best, *result.runners_up)
    assert {ranked.layout["zero"] for ranked in first} == {1}
    assert {ranked.layout["zero"] for ranked in result.outside} == {3}
    assert all(ranked.evidence.is_enough for ranked in first)
    assert sum(ranked.chance for ranked in first) == pytest.approx(1)
    # one run, which is no evidence
    assert {str(ranked.evidence) for ranked in result.outside} != {"None"}
    rows = as_numbers([Evidence(SPLIT, 5, 4.0)])
    record = CalibrationRecord("runs of FSDP", 5, (), (), "", rows)
    calibrated = layouts(dataclasses.replace(h100, calibration=record))
    assert {ranked.layout["zero"] for ranked in (calibrated.best, *calibrated.runners_up)} == {3}
    assert {ranked.evidence for ranked in calibrated.outside} == {None}
    unknown = layouts(dataclasses.replace(h100, name="of one's own"))
    assert (unknown.outside, unknown.best.evidence, unknown.best.chance) == ((), None, 0)
    assert unknown.best.step_time == min(ranked.step_time for ranked in (*first, *result.outside))


def test_runs_of_dense_models_tell_nothing_of_experts():
    choices = {"tensor": [2], "pipeline": [2], "zero": [1], "recompute": ["none"], "expert": [1, 8]}
    result = pj.plan(
        "mixtral-8x7b",
        "h100",
        gpus=64,
        minibatch=64,
        schedules=["1f1b"],
        choices=choices | {"context": [1], "microbatch_size": [1]},
        memory_limit=1e12,
    )
    assert result.best.regime == "16 bits, ZeRO 0 to 2, experts within nodes"
    evidence = result.best.evidence
    assert evidence is None or evidence.regime.experts == 1


def test_evaluate_says_what_its_step_time_rests_on(call):
    line = ("evaluate", "-s", "1f1b", "-P", 2, "-M", 4, "--minibatch", 4, "--tensor-parallel", 8)
    for model, message in (
        (
            "llama3-8b",
            "16 measured configurations like this one (16 bits, ZeRO 0 to 2, no experts)",
        ),
        ("mixtral-8x7b", "(16 bits, ZeRO 0 to 2, experts within nodes)"),
    ):
        code, text, _ = call(*line, "--model", model, "--system", "h100")
        assert (code, message in text) == (0, True)
    text = call(*line, "--model", "llama3-8b", "--system", "h200")[1]
    assert "no measured run on h200 is like this one (16 bits, ZeRO 0 to 2, no experts)" in text


def test_a_plan_has_the_band_of_evaluate(layouts):
    rows, bands = as_numbers([Evidence(WHOLE, 5, 4.0)]), (Band(80, 0.9, 1.2),)
    record = CalibrationRecord("runs", 5, (), bands, "", rows)
    best = layouts(dataclasses.replace(pj.load_system("h100"), calibration=record)).best
    assert best.band == (0.9 * best.step_time, 1.2 * best.step_time)
    assert best.band_percent == 80


def test_chances_are_those_of_draws():
    times, spreads = np.array([1.0, 1.01, 1.1, 1.02]), np.array([0.02, 0.02, 0.02, 0.1])
    draws = np.log(times) + spreads * np.random.default_rng(0).standard_normal((200_000, 4))
    counted = np.bincount(draws.argmin(axis=1), minlength=4) / len(draws)
    np.testing.assert_allclose(chances(times, spreads), counted, atol=0.005)
    alike = chances([1.0, 1.0, 2.0], [0.01] * 3)
    assert alike[0] == pytest.approx(0.5)
    assert alike[2] < 1e-6
    assert chances([3.0], [0.1]) == pytest.approx([1.0])
