"""A calibration finds the numbers that its rows were made with, and says what it does not know."""

import dataclasses
import json

import numpy as np
import pytest

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.cli.app import run
from pipejax.costs.measured.rows_file import read_rows

pytestmark = pytest.mark.compiles
TRUTH = {"compute.efficiency": 0.62, "host.launch": 2.5e-5, "host.step": 6e-3}
FIT = (*TRUTH, "network.latency")  # of one node, which no row sees
COLUMNS = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,"
REST = "schedule,sequence_parallel,recompute,seconds"
LAYOUTS = ((1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2))
OUTLIER = 17  # a row, from 1


@pytest.fixture(scope="module")
def a100():
    found = pj.load_system("a100")
    return dataclasses.replace(found, kernels=dataclasses.replace(found.kernels, priced=1.0))


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
    lines = [f"{row},{each}" for row, each in zip(shapes, seconds, strict=True)]
    path.write_text(COLUMNS + REST + "\n" + "\n".join(lines))
    return path


@pytest.fixture(scope="module")
def found(data, a100):
    with pytest.warns():
        rows = read_rows(data)
    return pj.calibrate(rows, a100, fit=FIT, hold_out="group:t,b", starts=3)


@pytest.mark.takes_turns
def test_the_numbers_are_found_within_their_errors(found):
    for name, value in TRUTH.items():
        number = found.parameters[name]
        assert number.identified
        assert abs(number.value - value) < 4 * number.standard_error < 0.3 * value
    assert found.starts_differ < 1e-3


@pytest.mark.takes_turns
def test_what_no_row_sees_is_flagged_and_stays_at_its_prior(found, a100):
    number = found.parameters["network.latency"]
    assert not number.identified
    assert number.value == pytest.approx(a100.network.latency, rel=1e-3)


def test_outliers_are_listed_and_pull_little(found):
    assert [each.row for each in found.outliers] == [OUTLIER]
    assert found.outliers[0].error == pytest.approx(-50, abs=3)
    assert found.fit.median < 1.5


def test_rows_left_out_are_predicted(found):
    assert found.held_out.rows == found.fit.rows == 54
    assert len(found.folds) == 12
    assert found.fit.median < found.held_out.median < 3
    assert found.coverage[80] <= found.coverage[90] <= 100


@pytest.mark.takes_turns
def test_the_command_writes_a_system_that_predicts_the_same(found, data, tmp_path, capsys):
    out = tmp_path / "fitted.json"
    options = ["--system", "a100", "--fit", ",".join(FIT), "--hold-out", "group:t,b"]
    assert run(["calibrate", str(data), *options, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"parameters", "fit", "held_out", "outliers"} <= set(told)
    assert set(told["parameters"]["host.step"]) == {"value", "unit", "standard_error", "identified"}
    fitted = pj.load_system(out)
    assert fitted.calibration.rows == 54
    assert [band.percent for band in fitted.calibration.bands] == [80, 90]
    with pytest.warns():
        again = StepTimes(read_rows(data)).predict(fitted)
    np.testing.assert_allclose(again, found.predicted, rtol=1e-4)
