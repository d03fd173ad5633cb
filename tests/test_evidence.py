"""A plan ranks apart what nobody measured, and says what the rest stands on."""

import dataclasses
import json
import re

import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.analysis import measured_tables
from pipejax.analysis.step.evidence import (
    EVIDENCE,
    Evidence,
    Regime,
    Runs,
    are_tied,
    as_numbers,
    as_runs,
    error_range,
    find_evidence,
    from_numbers,
    group_errors,
    measured_runs,
)
from pipejax.analysis.step.step_time import StepTimes
from pipejax.cli.output.plans import plan_view
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.launchers import LAUNCHERS
from pipejax.costs.system.system import DATA, Band, CalibrationRecord
from pipejax.sweep.plan.plan import layout_regimes
from sweeps.published.fidelity import coverage, evidence_of_tables

QUICK = ("llm_foundry_h100", "torchtitan_h100", "megatron_bridge_b300")  # tables
SPLIT, WHOLE = Regime(True, 0, 16), Regime(False, 0, 16)
FIVE = (4.0, -4.0, 3.0, -5.0, 4.0)  # errors [%]
TABLES = DATA / "measured"


def test_the_file_says_what_the_tables_say():
    stored = json.loads(EVIDENCE.read_text("utf-8"))
    paths = [DATA / "measured" / f"{name}.csv" for name in QUICK]
    for record in evidence_of_tables([pj.validate(path) for path in paths]):
        assert record in stored


def test_runs_of_one_configuration_count_once():
    rows = read_rows(DATA / "measured" / "llm_foundry_h100.csv").take(np.array([0, 0, 1]))
    errors = group_errors(rows, np.array([0.1, 0.3, -0.4]), 8.0)
    assert errors == {SPLIT: (20.0, -40.0)}
    assert [from_numbers(row) for row in as_numbers(errors)] == [*errors.items()]


def test_evidence_is_of_the_same_kind():
    cases = ((15.0,) * 3, 1), ((1.0, 1.0), 0), ((-16.0,) * 9, 0)
    assert [Evidence(WHOLE, errors).is_enough for errors, _ in cases] == [ok for _, ok in cases]
    assert not Evidence(WHOLE, (1.0,) * 9, differs=("h200",)).is_enough
    assert str(Regime(True, 2, 8)) == "8 bits, ZeRO 3, experts over nodes"
    biased = Evidence(WHOLE, (-4.0, -1.0, 2.0))
    assert (biased.bias, biased.spread) == (-1, 4)
    assert biased.mean_error == pytest.approx(7 / 3)


def test_the_nearest_evidence_says_in_what_it_differs():
    h100 = pj.load_system("h100")
    for stack, precision, system, differs in (
        ("", 16, h100, ()),
        ("megatron-core-2024", 8, h100, ()),  # of 8 bits itself, and not for 16
        ("one of ours", 16, h100, ("one of ours",)),
        ("", 4, h100, ("4 bits",)),
        ("", 8, pj.load_system("h200"), ("h200",)),
    ):
        evidence = find_evidence(Regime(False, 0, precision), system, stack)
        assert (evidence.differs, evidence.is_enough) == (differs, not differs)
        assert evidence.factors is not None
    for regime, name in ((WHOLE, "mi300x"), (Regime(False, 1, 16), "a100"), (SPLIT, "mi355x")):
        assert find_evidence(regime, pj.load_system(name), "") is None


def test_a_calibrated_machine_stands_on_its_rows():
    rows, bands = as_numbers({WHOLE: FIVE}), (Band(80, 0.95, 1.05), Band(90, 0.9, 1.2))
    record = CalibrationRecord("runs", 5, (), bands, "", rows)
    machine = dataclasses.replace(pj.load_system("h100"), calibration=record)
    evidence = find_evidence(WHOLE, machine, "")
    assert (evidence.errors, evidence.sources, evidence.is_enough) == (FIVE, ("runs",), True)
    assert evidence.range(10.0) == (9.0, 12.0)
    assert find_evidence(SPLIT, machine, "").range(1.0) is None
    assert find_evidence(Regime(False, 1, 16), machine, "") is None
    assert find_evidence(WHOLE, machine, "", "DeepSpeed") == evidence  # whatever the launcher


def test_a_range_weighs_sources_alike_and_widens_if_they_are_few():
    def runs(source, system, *errors, experts=0):
        return Runs(source, system, "s", Regime(False, experts, 16), errors)

    # One source of Hopper has half of the weight, whatever its number of runs; the sources of all
    # generations share the next 1/3 of that, then 1/2 of it.
    single = [runs("a", "h100", *[0.0] * 99)]
    sources = "1 data source of models without experts on Hopper, all others with less weight"
    assert error_range(WHOLE, "h200", single) == (1, 1, sources)
    fast = runs("b", "a100", -50.0)  # ratio 2: weight 1/2 x 1/3 + 1/2 x 1/3 x 1/3 = 0.222
    assert error_range(WHOLE, "h100", [*single, fast])[:2] == (1, 2)
    # 7 sources of 1/8 each; wider classes add 2 (1/8 / 10 + 1/8 / 100) = 0.0275 of others, and
    # 5 % (7 - 1) / (7 + 1) = 3.75 % are left out; with 5 sources 0.047 and 3.33 %
    seven, slow = [runs(str(k), "h100", 0.0) for k in range(7)], runs("c", "a100", -50.0)
    assert error_range(WHOLE, "h100", [*seven, fast, slow])[:2] == (1, 1)
    assert error_range(WHOLE, "h100", [*seven[2:], fast, slow])[:2] == (1, 2)
    assert error_range(Regime(False, 1, 16), "h100", seven) is None
    assert error_range(WHOLE, "of one's own", seven) is None


def test_ranges_hold_for_sources_that_were_left_out():
    records = evidence_of_tables([pj.validate(path) for path in measured_tables(unseen=True)])
    for judged in (as_runs(records), measured_runs()):
        inside = [x for values in coverage(judged, measured_runs()).values() for x in values]
        assert 0.85 <= np.mean(inside) <= 0.95


def test_layouts_tie_within_the_spread_of_errors():
    runs = Evidence(WHOLE, (1.0, 3.0, 2.0))  # differences of 2, 1 and 1: spread 4/3 %
    single = Evidence(WHOLE, (1.0,))
    for times, evidence, tied in (
        ([1, 1.013, 1.014], [runs] * 3, [1, 1, 0]),
        ([1.013, 1, 1], [runs, single, None], [1, 1, 0]),
        ([1, 1], [None, None], [0, 0]),
    ):
        assert are_tied(times, evidence).tolist() == list(map(bool, tied))


@pytest.fixture(scope="module")
def layouts():
    choices = {"tensor": [2], "pipeline": [2], "zero": [1, 3], "recompute": ["none"]}
    choices |= {"edge_units": [0], "microbatch_size": [1], "context": [1]}
    more = {"choices": choices, "overlap": 1}
    more |= {"gpus": 8, "minibatch": 8, "schedules": ["1f1b"]}
    return lambda system, **options: pj.plan("llama3-8b", system, **more, **options)


def test_no_layout_that_nobody_measured_stands_first(layouts):
    h100 = pj.load_system("h100")
    result = layouts(h100)
    first = (result.best, *result.runners_up)
    assert {ranked.layout["zero"] for ranked in first} == {1}
    assert {ranked.layout["zero"] for ranked in result.outside} == {3}
    assert all(ranked.evidence.is_enough for ranked in first)
    spread = result.best.evidence.spread / 100
    ratios = [ranked.step_time / result.best.step_time for ranked in first]
    assert result.tied == sum(ratio <= 1 + spread for ratio in ratios)
    # one run, which is no evidence
    assert {str(ranked.evidence) for ranked in result.outside} != {"None"}
    record = CalibrationRecord("runs of FSDP", 5, (), (), "", as_numbers({SPLIT: FIVE}))
    calibrated = layouts(dataclasses.replace(h100, calibration=record))
    assert {ranked.layout["zero"] for ranked in (calibrated.best, *calibrated.runners_up)} == {3}
    assert {ranked.evidence.differs for ranked in calibrated.outside} == {("ZeRO 0 to 2",)}
    unknown = layouts(dataclasses.replace(h100, name="of one's own"))
    assert (unknown.outside, unknown.best.evidence, unknown.tied) == ((), None, 0)
    assert unknown.best.step_time == min(ranked.step_time for ranked in (*first, *result.outside))


def test_evaluate_says_what_its_step_time_rests_on(call):
    line = ("evaluate", "-s", "1f1b", "-P", 2, "-M", 4, "--minibatch", 4, "--tensor-parallel", 8)
    dense, sparse = "llama3-8b", "mixtral-8x7b"
    for model, system, *messages in (
        (
            *(dense, "h100"),
            "likely range: 426 ms to 543 ms (90 % of runs, from our errors on 9 data sources of",
            "21 runs of NVIDIA/dgxc-benchmarking (16 bits, ZeRO 0 to 2, no experts) on h100",
            "our step times are 1.1 % off on average (bias: 0.188 % too long); the likely",
            "of dense models on Hopper)\nmost similar measured runs: 21 (NVIDIA",
        ),
        (
            dense,
            "h200",
            "(NVIDIA/dgxc-benchmarking, h100), predicted 1.1 % off on average; your run differs: h200\n",
        ),
        (dense, "gb200", "of dense models on Blackwell"),
        (sparse, "h100", "(16 bits, ZeRO 0 to 2, experts within nodes)"),
        (dense, "mi300x", "extrapolated: nobody measured such runs (16 bits, ZeRO 0 to 2"),
    ):
        code, text, _ = call(*line, "--model", model, "--system", system, "--details")
        assert (code, [message for message in messages if message not in text]) == (0, []), text


def test_a_plan_has_the_band_of_evaluate(layouts):
    rows, bands = as_numbers({WHOLE: FIVE}), (Band(80, 0.9, 1.2),)
    record = CalibrationRecord("runs", 5, (), bands, "", rows)
    best = layouts(dataclasses.replace(pj.load_system("h100"), calibration=record)).best
    assert best.band == (0.9 * best.step_time, 1.2 * best.step_time)
    assert best.band_percent == 80


def test_a_layout_that_no_launcher_fits_by_default_is_named_first(layouts):
    result = layouts(pj.load_system("h100"))
    entry = result.under_launchers[0]._replace(fits=False)
    for names, is_first in (((*LAUNCHERS,), True), ((*LAUNCHERS,)[1:], False)):
        entries = (entry._replace(launchers=names),)
        lines = [*map(str, plan_view(dataclasses.replace(result, under_launchers=entries)))]
        assert lines[1].startswith("warning: this layout fits in no launcher") == is_first
        assert sum("launcher" in line for line in lines) == 1


def test_each_unmeasured_regime_has_its_best_layout_apart():
    choices = {"tensor": [2], "pipeline": [2], "context": [1], "microbatch_size": [1]}
    choices |= {"zero": [1, 3], "recompute": ["full"], "expert": [1, 8, 32]}
    job = {"gpus": 256, "minibatch": 256, "precision": "fp8", "schedules": ["1f1b"]}
    result = pj.plan("qwen3-30b-a3b", "h100", **job, choices=choices, exhaustive=True)
    ranked = (result.best, *result.runners_up)
    measured = {"8 bits, ZeRO 0 to 2, experts over nodes"}  # within nodes 23.8 % off: no evidence
    assert {layout.regime for layout in ranked} == measured
    times = {}
    for k, layout in enumerate(layout_regimes(result.request, result.layouts)):
        step = result.estimates.step_time[k]
        times[str(layout)] = np.nanmin([step, times.get(str(layout), np.inf)])
    apart = {layout.regime: layout.step_time for layout in result.outside}
    assert apart == {regime: times[regime] for regime in times.keys() - measured}
    assert len(apart) == 3


@with_cases(
    "model system precision", *read_cases("test_where_no_regime_is_measured_the_nearest_is_ranked")
)
def test_where_no_regime_is_measured_the_nearest_is_ranked(model, system, precision):
    """Runs without ZeRO 3 are near: layouts with it differ in a further fact, and stand apart."""
    choices = {"tensor": [1], "pipeline": [1], "context": [1], "expert": [1, 8], "zero": [1, 3]}
    job = {"gpus": 8, "minibatch": 64, "precision": precision, "schedules": ["1f1b"]}
    result = pj.plan(model, system, **job, choices=choices)
    ranked = (result.best, *result.runners_up)
    assert not any(layout.evidence.is_enough for layout in ranked)
    assert {layout.layout["zero"] for layout in ranked} == {1}
    (apart,) = result.outside
    assert apart.layout["zero"] == 3
    assert len(apart.evidence.differs) == 1 + len(result.best.evidence.differs)


@pytest.mark.parametrize("stack", ["", "maxtext-2025"])
@pytest.mark.parametrize("regime", [WHOLE, SPLIT])
@pytest.mark.parametrize("launcher", ["", "Megatron-LM", "Megatron-Bridge", "DeepSpeed", "MaxText"])
def test_a_launcher_without_kernels_of_its_own_is_not_measured(launcher, regime, stack):
    h100 = pj.load_system("h100")
    usual = find_evidence(regime, h100, stack)
    evidence = find_evidence(regime, h100, stack, launcher)
    words = f"{launcher} with kernels priced as those of megatron-core-2024, which nobody measured"
    shipped = {"DeepSpeed": "megatron-deepspeed-2022", "MaxText": "maxtext-2025"}
    words += f" (change: --stack {shipped.get(launcher)})"
    if stack or launcher in ("", "Megatron-LM", "Megatron-Bridge"):
        assert evidence == usual
        return
    others = [fact for fact in usual.differs if fact != "megatron-core-2024"]
    assert evidence.differs == (*others, words)
    assert not evidence.is_enough
    assert evidence._replace(differs=usual.differs) == usual  # the nearest runs, and their range


def test_evaluate_and_plan_say_that_a_launcher_is_not_measured(call):
    job = ("-m", "llama3-8b", "-y", "h100", "--minibatch", 16, "--launcher", "deepspeed")
    planned = ("--gpus", 8, "--pipeline", 2, "--tensor", 1)
    for line in (("evaluate", "-s", "1f1b", "-P", 4, "-M", 16), ("plan", *planned)):
        text = " ".join(call(*line, *job)[1].split())
        words = "your run differs: DeepSpeed with kernels priced as those of megatron-core-2024"
        assert words in text


@with_cases(
    "system launcher first_is_measured",
    *read_cases("test_a_layout_is_not_apart_for_what_the_best_lacks"),
)
def test_a_layout_is_not_apart_for_what_the_best_lacks(call, system, launcher, first_is_measured):
    job = ("-m", "llama3-8b", "-y", system, "--gpus", 16, "--minibatch", 32)
    text = " ".join(call("plan", *job, "--launcher", launcher)[1].split())
    assert ("; your run differs: " in text) != first_is_measured
    assert bool(re.search("not ranked: .*; no run of its kind", text)) == first_is_measured
    assert ("measured runs differ more from it (16 bits" in text) != first_is_measured


# published times on A100 that nothing was fitted to, by the machine's own file
def errors(table, system, rows=slice(None)):
    """Signed errors of rows of a table [%]."""
    result = read_rows(TABLES / f"{table}.csv")
    result = result.take(np.arange(len(result))[rows])
    return 100 * (StepTimes(result).predict(pj.load_system(system)) / result.seconds - 1)


@pytest.mark.filterwarnings("ignore")
def test_korthikanti_22b_within_five_percent():
    assert np.abs(errors("korthikanti_a100", "a100", slice(0, 2))).max() < 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_korthikanti_table_5_within_its_tolerance():
    result = np.abs(errors("korthikanti_a100", "a100", slice(0, 8)))
    assert result.mean() < 2.5
    assert result.max() < 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("table", ["vtrain_single", "vtrain_multi"])
def test_vtrain_is_met_by_one_set_of_numbers(table):
    result = errors(table, "a100-vtrain")
    assert np.abs(result).mean() < 7
    assert abs(result.mean()) < 4
