"""A calibration finds the numbers that its rows were made with, and says what it does not know."""

import dataclasses
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.cli.app import run
from pipejax.costs.measured.rows_file import read_rows

TRUTH = {"compute.efficiency": 0.62, "host.launch": 2.5e-5, "host.step": 6e-3}
FIT = (*TRUTH, "network.latency")  # of one node, which no row sees
COLUMNS = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,"
REST = "schedule,sequence_parallel,recompute,seconds"
LAYOUTS = ((1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2))
OUTLIER = 17  # a row, from 1


@pytest.fixture(scope="module")
def a100():
    system = pj.load_system("a100")
    return dataclasses.replace(system, kernels=dataclasses.replace(system.kernels, priced=1.0))


@pytest.fixture(scope="module")
def data(tmp_path_factory, a100):
    """Rows with 1 % of noise, one of them taking twice as long as it should."""
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    shapes = [
        f"{layers},{hidden},16,512,{t},{d},{p},{b},{4 * d * b},1f1b,0,none"
        for layers, hidden in ((4, 1024), (8, 1024), (4, 4096))
        for t, d, p in LAYOUTS
        for b in (1, 2, 4)
    ]
    path.write_text(COLUMNS + REST + "\n" + "\n".join(f"{row},1.0" for row in shapes))
    with pytest.warns():
        rows = read_rows(path)
    for name, value in TRUTH.items():
        a100 = a100.with_number(name, value)
    seconds = StepTimes(rows).predict(a100)
    seconds *= np.exp(0.01 * np.random.default_rng(0).standard_normal(len(rows)))
    seconds[OUTLIER - 1] *= 2
    lines = [f"{row},{time}" for row, time in zip(shapes, seconds, strict=True)]
    path.write_text(COLUMNS + REST + "\n" + "\n".join(lines))
    return path


@pytest.fixture(scope="module")
def result_case(data, a100):
    with pytest.warns():
        rows = read_rows(data)
    return pj.calibrate(rows, a100, fit=FIT, hold_out="group:t,b", starts=2)


def test_the_overlap_that_all_runs_had_is_kept(result_case):
    assert result_case.system.calibration.overlap == 0.0


def test_the_numbers_are_found_within_their_errors(result_case):
    for name, value in TRUTH.items():
        number = result_case.parameters[name]
        assert number.identified
        assert abs(number.value - value) < 4 * number.standard_error < 0.3 * value
    assert result_case.starts_differ < 1e-3


@pytest.mark.slow
def test_what_no_row_sees_is_flagged_and_stays_at_its_prior(result_case, a100):
    number = result_case.parameters["network.latency"]
    assert not number.identified
    assert number.value == pytest.approx(a100.network.latency, rel=1e-3)


def test_outliers_are_listed_and_pull_little(result_case):
    assert [outlier.row for outlier in result_case.outliers] == [OUTLIER]
    assert result_case.outliers[0].error == pytest.approx(-50, abs=3)
    assert result_case.fit.median < 1.5


def test_rows_left_out_are_predicted(result_case):
    assert result_case.held_out.rows == result_case.fit.rows == 54
    # each row has been left out once
    errors = np.abs(result_case.predicted_unseen / result_case.predicted - 1)
    assert 0 < errors.max() < 0.2
    assert len(result_case.folds) == 12
    assert [band.percent for band in result_case.system.calibration.bands] == [80, 90]
    assert result_case.fit.median < result_case.held_out.median < 3
    assert result_case.coverage[80] <= result_case.coverage[90] <= 100


def test_the_command_writes_a_system_that_predicts_the_same(result_case, data, tmp_path, capsys):
    out = tmp_path / "fitted.json"
    options = ["--system", "a100", "--fit", ",".join(FIT), "--hold-out", "group:t"]
    assert run(["calibrate", str(data), *options, "--out", str(out), "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert {"parameters", "fit", "held_out", "outliers"} <= set(message)
    assert set(message["parameters"]["host.step"]) == {
        "value",
        "unit",
        "standard_error",
        "identified",
    }
    fitted = pj.load_system(out)
    assert fitted.calibration.rows == 54
    assert [band.percent for band in fitted.calibration.bands] == [80]
    with pytest.warns():
        again = StepTimes(read_rows(data)).predict(fitted)
    np.testing.assert_allclose(again, result_case.predicted, rtol=1e-4)


@pytest.fixture(scope="module")
def six(data, a100):
    """Six rows of large layers as the machine itself has them."""
    with pytest.warns():
        rows = read_rows(data).take(np.arange(38, 54, 3))
    return rows.with_columns(seconds=StepTimes(rows).predict(a100))


def test_where_the_machine_is_right_nothing_is_fitted_nor_written(
    six, data, a100, tmp_path, capsys
):
    result = pj.calibrate(six, a100)
    assert not result.parameters
    assert result.as_is.mape < 1e-9
    np.testing.assert_allclose(StepTimes(six).predict(result.system), six.seconds)
    path, out = tmp_path / "rows.csv", tmp_path / "mine.json"
    head, *lines = data.read_text().splitlines()
    line = lines[six.row[1] - 1].rpartition(",")[0]
    path.write_text(f"{head}\n{line},{six.seconds[1]}\n")  # one row tells nothing
    assert run(["calibrate", str(path), "--system", "a100", "--out", str(out), "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert (message["parameters"], message["bands"], message["written"]) == ({}, {}, None)
    assert not out.exists()


def test_what_helps_rows_that_a_fit_did_not_see_is_fitted(six, a100):
    slow = a100.with_number("compute.efficiency", 0.5)
    rows = six.with_columns(seconds=StepTimes(six).predict(slow))
    result = pj.calibrate(rows, a100)
    assert result.left_out.mape < result.as_is.mape / 2
    assert result.parameters["compute.efficiency"].value < 0.75
    assert [band.percent for band in result.system.calibration.bands] == [80]  # of six parts


@pytest.mark.parametrize(
    "factors",  # of the times of the rows
    [[1.006] * 6, [0.994] * 6, [1.25] * 5 + [0.9], [1.25] + [0.9] + [1.25] * 4],
)
def test_nothing_is_fitted_where_that_helps_less_than_runs_differ_or_harms_the_worst_row(
    six, a100, factors
):
    rows = six.with_columns(seconds=six.seconds * factors)
    result = pj.calibrate(rows, a100)
    assert not result.parameters
    assert result.fit == result.as_is


def test_rows_in_another_unit_are_refused(six, a100):
    for factor, unit in ((1e3, "milliseconds"), (1 / 60, "minutes")):
        rows = six.with_columns(seconds=factor * six.seconds)
        with pytest.raises(ValueError, match=f"seconds of all rows must be .* as if .* {unit}"):
            pj.calibrate(rows, a100)
    rows = six.with_columns(seconds=40 * six.seconds)
    with pytest.raises(ValueError, match="more than 40 times"):
        pj.calibrate(rows, a100)


def test_a_run_that_stands_there_often_weighs_as_one(data, a100):
    """Fitted by name: one row takes twice as long, alone or fifty times."""
    with pytest.warns():
        rows = read_rows(data).take(np.arange(36, 54))
    times = StepTimes(rows).predict(a100) * np.where(np.arange(18) == 2, 2.0, 1.0)
    wrong = rows.with_columns(seconds=times)
    often = wrong.take(np.repeat(np.arange(18), np.where(np.arange(18) == 2, 50, 1)))
    once, many = (pj.calibrate(rows, a100, fit=FIT) for rows in (wrong, often))
    name = "compute.efficiency"
    assert many.parameters[name].value == pytest.approx(once.parameters[name].value, rel=0.01)
    assert {outlier.row for outlier in many.outliers} == {39}


def test_rows_of_several_stacks_are_refused(six, a100):
    stacks = np.array(["", "", "", "", "", "megatron-lm-2021"])
    with pytest.raises(ValueError, match="stack must be one: rows are of none, megatron-lm-2021"):
        pj.calibrate(six.with_columns(stack=stacks), a100)


def test_rows_far_off_widen_no_band(data, a100):
    with pytest.warns():
        rows = read_rows(data)
    bands = []
    for factor in (1.0, 1000.0):
        seconds = rows.seconds * np.where(rows.row == OUTLIER, factor / 2, 1.0)
        result = pj.calibrate(rows.with_columns(seconds=seconds), a100, fit=FIT)
        bands.append([band[1:] for band in result.system.calibration.bands])
    np.testing.assert_allclose(bands[0], bands[1], rtol=0.01)


def test_where_all_rows_are_far_off_there_is_no_band(data, a100):
    """Four runs of one layer, three times as long as they are: of a network that they do not use."""
    with pytest.warns():
        rows = read_rows(data).take(np.array([0, 12, 18, 30]))
    rows = rows.with_columns(seconds=3 * StepTimes(rows).predict(a100))
    result = pj.calibrate(rows, a100, fit=["network.latency"])
    assert len(result.outliers) == len(rows)
    assert result.system.calibration.bands == ()


def test_rows_of_two_kinds_are_told(data, a100):
    with pytest.warns():
        rows = read_rows(data).take(np.arange(0, 48, 6))
    seconds = StepTimes(rows).predict(a100)
    for factor, message in ((1.0, []), (2.0, ["6 of 8 rows take about 2 times as long"])):
        wrong = np.where(np.arange(8) % 5 < 3, factor, 1.0)
        result = pj.calibrate(
            rows.with_columns(seconds=seconds * wrong), a100, fit=["network.latency"]
        )
        assert [remark.split(",")[0] for remark in result.remarks] == message
