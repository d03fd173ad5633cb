"""Predictions held against measurements."""

import dataclasses
import json

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.step import validation
from pipejax.analysis.step.validation import Predictions, judge, prediction_errors
from pipejax.base.progress import Notice
from pipejax.costs.measured.rows_file import read_predictions, read_rows
from pipejax.costs.system.parts import Efficiency
from pipejax.costs.system.system import DATA, Band, CalibrationRecord


def test_errors_are_summed_up_in_percent():
    measured = np.array([1.0, 2.0, 4.0, np.nan])
    result = prediction_errors(np.array([1.1, 1.8, 4.0, 7.0]), measured)
    assert result.rows == 3
    assert result.mape == pytest.approx((10 + 10 + 0) / 3)
    assert result.bias == pytest.approx((10 - 10 + 0) / 3)
    assert (result.median, result.largest) == pytest.approx((10, 10))


HEAD = "model,tensor,context,expert,data,pipeline,stages_per_worker,microbatch_size,global_batch,"
HEAD += "zero,embedding_units,loss_units,accelerators_per_node,sequence_parallel,overlap,schedule,recompute,"
HEAD += "precision,stack,system,seconds,memory_bytes,group"


def write(path, *ends):
    """A file of rows that are alike but for their machine, time, memory and group."""
    row = "gpt-22b,8,1,1,1,1,1,4,4,0,0,0,8,0,0,1f1b,full,bf16,megatron-lm-2021,"
    path.write_text("\n".join([HEAD, *(row + end for end in ends)]) + "\n")
    return path


@pytest.fixture
def runs(tmp_path):
    return write(
        tmp_path / "runs.csv",
        "a100,2,40e9,slow",
        "a100,1,40e9,fast",
        "h100,1,,fast",
        "h100,4,,fast",
    )


def as_peak(rows, system, link="delay"):
    """Predict 2 s on an A100, 1 s on an H100, 44 GB, and a band of 10 % around."""
    seconds = np.full(len(rows), {"a100": 2.0, "h100": 1.0}[system.name])
    return Predictions(seconds, np.full(len(rows), 44e9), 0.9 * seconds, 1.1 * seconds)


def test_each_row_is_predicted_on_its_machine(runs):
    result = pj.validate(runs, predict=as_peak)
    assert result.predicted.seconds.tolist() == [2, 2, 1, 1]
    assert result.time.mape == pytest.approx((0 + 100 + 0 + 75) / 4)
    assert result.time.bias == pytest.approx((0 + 100 + 0 - 75) / 4)
    assert (result.memory.rows, result.memory.mape) == (2, pytest.approx(10))
    assert result.coverage_90 == 50
    assert {k: len(x.measured) for k, x in result.groups.items()} == {"slow": 1, "fast": 3}
    assert result.groups["slow"].time.mape == 0
    assert [(row["row"], row["error"]) for row in result.worst(2)] == [(2, 100), (4, -75)]


def test_one_machine_for_all_rows(runs):
    with pytest.warns(Notice, match=r"h100 predicts 2 rows that name another system \(a100\)"):
        assert pj.validate(runs, "h100", predict=as_peak).predicted.seconds.tolist() == [1] * 4
    with pytest.warns(Notice, match=r"a100 predicts 2 rows that name another system \(h100\)"):
        assert pj.validate(runs, pj.load_system("a100"), predict=as_peak).time.rows == 4


def test_files_have_groups_of_their_own(runs, tmp_path):
    other = write(tmp_path / "other.csv", "a100,2,,fast", "a100,2,,")
    result = pj.validate([runs, other], predict=as_peak)
    assert list(result.groups) == ["runs: slow", "runs: fast", "other: fast", "other"]
    assert result.groups["other"].time.mape == 0


def test_a_row_without_machine_or_prediction_is_named(tmp_path):
    runs = write(tmp_path / "runs.csv", "a100,2,,x", ",2,,x")
    with pytest.raises(ValueError, match=r"system must be given: .*runs.csv, row 2, names none"):
        pj.validate(runs, predict=as_peak)

    def half(rows, system):
        result = as_peak(rows, system)
        result.seconds[1] = np.nan
        return result

    with pytest.raises(ValueError, match=r"runs.csv, row 2: no seconds predicted"):
        pj.validate(runs, "a100", predict=half)


def test_a_row_in_a_precision_that_the_machine_has_no_peak_for_is_named(tmp_path):
    runs = write(tmp_path / "runs.csv", ",2,,x", ",2,,x")
    runs.write_text("fp8".join(runs.read_text().rsplit("bf16", 1)))
    wrong = r"runs.csv, row 2: a100: no peak is known for precision 'fp8'"
    for door in (pj.validate, pj.calibrate):
        with pytest.raises(ValueError, match=wrong):
            door(pj.files.read_rows(runs), pj.load_system("a100"))


def test_a_simulator_is_judged_by_the_rows_that_it_predicts(runs, tmp_path):
    guess = tmp_path / "guess.csv"
    guess.write_text("row,seconds\n4,5\n2,1.1\n")
    theirs, ours = judge(pj.validate(runs, predict=as_peak), guess)
    assert theirs.measured.row.tolist() == ours.measured.row.tolist() == [2, 4]
    assert theirs.time.mape == pytest.approx((10 + 25) / 2)
    assert ours.time.mape == pytest.approx((100 + 75) / 2)
    assert theirs.memory is None
    assert theirs.coverage_90 is None


def test_the_exit_code_says_whether_the_mean_is_within(runs, call, answer, monkeypatch, tmp_path):
    monkeypatch.setattr(validation, "predicted_by_costs", as_peak)
    result = answer("validate", runs, "--tolerance", 44, "--out", tmp_path / "x.svg")
    assert (result["rows"], result["mape"], result["coverage_90"]) == (4, 43.75, 50)
    assert set(result) >= {"median", "p90", "bias", "worst", "groups"}
    assert set(result["worst"][0]) >= {"row", "measured", "predicted", "error"}
    assert result["memory"]["mape"] == pytest.approx(10)
    assert "predicted [s]" in (tmp_path / "x.svg").read_text()
    code, out, _ = call("validate", runs, "--tolerance", 43)
    assert code == 1
    assert "43.8 % off in the mean of 4 rows, above the tolerance of 43 %" in out
    assert call("validate", runs, "--json", "--tolerance", 43)[0] == 1


def test_memory_is_judged_where_no_time_was_measured(answer, call, monkeypatch, tmp_path):
    monkeypatch.setattr(validation, "predicted_by_costs", as_peak)
    runs = write(tmp_path / "runs.csv", "a100,,40e9,x")
    result = answer("validate", runs, "--tolerance", 10.1)
    assert (result["mape"], result["worst"]) == (None, [])
    assert result["memory"]["bias"] == pytest.approx(10)
    assert call("validate", runs, "--tolerance", 9.9)[0] == 1


def test_predictions_of_others_are_printed_beside_ours(runs, call, monkeypatch, tmp_path):
    monkeypatch.setattr(validation, "predicted_by_costs", as_peak)
    guess = tmp_path / "guess.csv"
    guess.write_text("row,seconds\n1,2.1\n")
    code, out, _ = call("validate", runs, "--predictions", guess, "--details")
    assert code == 0
    assert [line for line in out.splitlines() if "pipejax" in line and " 0 % " in line]
    assert [line for line in out.splitlines() if "predictions" in line and " 5 % " in line]
    code, out, _ = call("validate", runs, "--predictions", guess, "--json")
    assert json.loads(out)["mape"] == pytest.approx(5)
    assert json.loads(out)["pipejax"]["mape"] == 0


def test_the_cost_model_gives_times_bands_and_memory_where_it_was_measured(runs, monkeypatch):
    monkeypatch.setattr(validation.StepTimes, "predict", lambda self, system: np.full(2, 3.0))
    bands = (Band(80, 0.95, 1.02), Band(90, 0.9, 1.2))
    record = CalibrationRecord("runs", 9, (), bands)
    system = dataclasses.replace(pj.load_system("a100"), calibration=record)
    rows = pj.files.read_rows(runs).take(np.array([1, 3]))
    result = validation.predicted_by_costs(rows, system)
    assert (result.seconds[0], result.low[0], result.high[0]) == pytest.approx((3.0, 2.7, 3.6))
    workload = pj.Workload(pj.load_model("gpt-22b"), 4, tensor_parallel=8, recompute="full")
    table = pj.schedules.build("1f1b", num_workers=1, num_microbatches=1)
    assert result.memory_bytes[0] == pj.memory_bytes(workload, table).max()
    assert np.isnan(result.memory_bytes[1])


@pytest.mark.slow  # a minute
@pytest.mark.usefixtures("unchecked")
def test_all_tables_that_come_with_pipejax_are_predicted():
    result = pj.validate()
    assert result.time.rows == len(result.measured) > 1000
    assert len({*result.measured.file}) == 13
    assert 0 < result.time.median < 50


def test_a_configuration_that_was_run_often_counts_once(tmp_path):
    runs = write(tmp_path / "runs.csv", "a100,2,,x", "a100,4,,y", "h100,1,,x")
    result = pj.validate(runs, predict=as_peak)
    np.testing.assert_allclose(result.errors, [0, -0.5, 0])
    once = result.by_configuration
    np.testing.assert_allclose(once.measured.seconds, [3, 1])
    np.testing.assert_allclose(once.errors, [2 / 3 - 1, 0])


def test_layouts_of_one_job_are_ranked(tmp_path):
    head = "model,tensor,data,global_batch,stack,system,seconds\n"
    path = tmp_path / "runs.csv"
    rows = ["gpt-22b,8,1,4", "gpt-22b,4,2,4", "gpt-22b,2,4,4", "gpt-22b,8,1,8"]
    seconds = (2.0, 2.5, 4.0, 1.0)
    lines = [f"{row},megatron-lm-2021,a100,{s}" for row, s in zip(rows, seconds, strict=True)]
    path.write_text(head + "\n".join(lines))

    def swapped(rows, system, link="delay"):
        order = np.array([1.5, 1.0, 3.0, 9.0])
        return Predictions(order, *np.full((3, 4), np.nan))

    with pytest.warns():
        result = pj.validate(path, predict=swapped).ranking
    assert result[:2] == (1, 3)
    assert result[2:] == pytest.approx((1 / 3, 0, 25, 25))


# Step times of runs on H100 and B200, to which nothing was fitted, by the machines' own files

MLPERF, SIMUMAX = (
    read_rows(DATA / "measured" / f"{n}.csv") for n in ("mlperf_h100", "simumax_b200")
)


def predicted(rows, system):
    return np.array([step_time(rows, k, system) for k in range(len(rows))])


def step_time(rows, k, system):
    stages, count = int(rows.stages_per_worker[k]), int(rows.microbatches[k])
    options = {"stages_per_worker": stages} if stages > 1 else {}
    table = build(str(rows.schedule[k]), int(rows.pipeline[k]), count, **options)
    workload = pj.Workload(
        rows.models[rows.model[k]],
        count * int(rows.microbatch_size[k]),
        tensor_parallel=int(rows.tensor[k]),
        sequence_parallel=bool(rows.sequence_parallel[k]),
        context_parallel=int(rows.context[k]),
        expert_parallel=int(rows.expert[k]),
        expert_tensor_parallel=int(rows.expert_tensor[k]),
        data_parallel=int(rows.data[k]),
        zero=int(rows.zero[k]),
        overlap=rows.overlap[k],
        tensor_overlap=rows.tensor_overlap[k],
        precision=str(rows.precision[k]),
        embedding_units=int(rows.embedding_units[k]),
        loss_units=int(rows.loss_units[k]),
    )
    return pj.evaluate(table, pj.stage_costs(workload, system, table)).makespan


def one_run_of_each_layout(rows):
    keys = list(zip(rows.model.tolist(), rows.data.tolist(), strict=True))
    return rows.take(np.array([keys.index(key) for key in dict.fromkeys(keys)]))


@pytest.mark.slow  # prices of every layout, and schedules of up to 18,000 ops
def test_mlperf_is_within_15_percent_and_from_one_model_to_the_other_within_8():
    rows, h100 = one_run_of_each_layout(MLPERF), pj.load_system("h100")
    assert len(rows) == 11
    ours = predicted(rows, h100)
    assert prediction_errors(ours, rows.seconds).largest < 15
    slower = dataclasses.replace(h100, compute_efficiency=Efficiency((0.0,), (0.7,)))
    slope = np.log(predicted(rows, slower) / ours)  # by the log of the share of the peak
    for fitted in (0, 1):  # one number, fitted to the runs of one model
        is_fitted = rows.model == fitted
        error = np.log(ours / rows.seconds)
        fitted_slope = slope[is_fitted]
        moved = error - slope * (error[is_fitted] @ fitted_slope) / (fitted_slope @ fitted_slope)
        assert np.abs(np.expm1(moved[~is_fitted])).max() < 0.08


@pytest.mark.slow
def test_simumax_runs_are_predicted_no_worse_than_by_simumax():
    theirs = read_predictions(DATA / "predictions" / "simumax_b200.csv", len(SIMUMAX))["seconds"]
    ours = predicted(SIMUMAX, pj.load_system("b200-simumax"))
    first, second = (prediction_errors(x, SIMUMAX.seconds) for x in (ours, theirs))
    assert first.mape <= second.mape


@pytest.mark.parametrize("table", ["korthikanti_a100", "torchtitan_h100"])
def test_the_command_says_how_well_layouts_are_ranked(answer_and_text, table):
    result, text = answer_and_text("validate", DATA / "measured" / f"{table}.csv")
    ranking = result["ranking"]
    count = round(ranking["best_found"] * ranking["jobs"] / 100)
    jobs = f"{count} of {ranking['jobs']} jobs ({ranking['layouts']} layouts)"
    assert f"the layout predicted fastest is the fastest in {jobs}" in text
