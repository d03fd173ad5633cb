"""The page of accuracy and its figure, made from predictions that are known."""

import warnings

import numpy as np
import pytest

from figures.kit.rules import faults
from figures.published import accuracy
from pipejax.analysis.step import validation
from pipejax.base.progress import Notice
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.system.system import DATA
from sweeps.published import fidelity
from sweeps.published.accuracy import BIAS, EACH, MEAN, Accuracy
from sweeps.published.page import Section, page, table, with_summary

TABLES = ("korthikanti_a100", "mlperf_h100", "simumax_b200", "torchtitan_h100")


def five_more(rows, system):
    """Predict 5 % more seconds than measured, 4 % less memory, and no band."""
    none = np.full(len(rows), np.nan)
    return validation.Predictions(1.05 * rows.seconds, 0.96 * rows.memory_bytes, none, none)


@pytest.fixture(scope="module")
def result():
    paths = [DATA / "measured" / f"{name}.csv" for name in TABLES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # rows that name another system
        return [validation.validate(path, "h100", predict=five_more) for path in paths]


def test_errors_are_held_against_their_limits(result):
    box = {row.group: row for row in fidelity.out_of_box(result).accuracies}
    assert {name: (row.tolerance, row.holds) for name, row in box.items()} == {
        "korthikanti_a100": (2.5, False),
        "mlperf_h100": (15.0, True),
        "simumax_b200": (5.5, True),
        "torchtitan_h100": (9.0, True),
    }
    memory = {row.group: row for row in fidelity.memory(result).accuracies}
    assert memory["simumax_b200"].errors.bias == pytest.approx(-4)
    assert memory["simumax_b200"].holds
    assert set(memory) == {"simumax_b200", "torchtitan_h100"}


def test_other_simulators_are_the_limit_on_their_rows(result):
    rows = fidelity.simulators(result).accuracies
    sizes = [(row.runs, row.errors.rows) for row in rows]
    assert sizes == [("pipejax", 22), ("SimuMax", 22), ("pipejax", 6), ("Calculon", 6)]
    theirs = rows[1].errors.mape
    # the mean of the errors that its authors print
    assert theirs == pytest.approx(5.233, abs=0.001)
    assert rows[0].holds == (theirs >= 5)
    assert rows[3].errors.mape == pytest.approx(4.7, abs=0.1)


def test_calibrations_are_judged_by_what_they_left_out():
    errors = validation.prediction_errors(np.array([1.06, 1.02]), np.ones(2))  # mean and bias 4
    section = fidelity.calibrated([fidelity.Fitted(errors, 91.5)] * len(fidelity.FITS))
    rows = [(row.measure, row.tolerance, row.holds) for row in section.accuracies]
    assert rows[:2] == [("mean", 7.0, True), ("bias", 2.0, False)]
    assert len(section.reasons) == len(fidelity.FITS)
    assert "contains 91.5 % of the rows" in section.reasons[0]


def test_errors_are_listed_by_microbatches(result):
    assert fidelity.by_microbatches(result[1].take(np.arange(9))) == "+5.0 % at 8, +5.0 % at 16"


def test_tables_of_one_machine_are_predicted_together():
    groups = [{path.stem.rpartition("_")[2] for path in paths} for paths in fidelity.by_machine()]
    assert sum(map(len, fidelity.by_machine())) == 13
    assert {"h100"} in groups


def test_the_page_says_what_is_beyond_its_limit():
    errors = validation.prediction_errors(
        np.array([1.02, 0.9]), np.ones(2)
    )  # mean 6, largest 10, bias -4
    limits = (MEAN, 6), (EACH, 9), (BIAS, 4.1)
    rows = [Accuracy("t", measure, errors, limit, measure) for measure, limit in limits]
    section = Section("Out of the box", "As it comes.", (*rows, Accuracy("t", "", errors)))
    text = page([section], "a.png")
    assert "2 of 3 errors that have a limit are within this limit." in text
    errors = "6.00 % | 6.00 % | 9.20 % | 10.00 % | -4.00 %"
    assert f"| t | each | 2 | {errors} | each 9 % | **beyond** |" in text
    assert "![Predicted against measured step times](a.png)" in text
    assert len({line.count("|") for line in table(rows).splitlines()}) == 1


@pytest.mark.usefixtures("unchecked")
def test_the_figure_has_a_panel_for_each_table(result):
    data = fidelity.dataset(result)
    assert data.sizes["row"] == 9 + 33 + 22 + 18
    figure = accuracy.draw(data)["accuracy"]
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == [f"{name.replace('_', ' ')}\n5.0 %" for name in TABLES]
    assert faults(figure) == []


def test_the_front_page_says_the_errors_of_today():
    section = fidelity.by_class(fidelity.predicted(validation.measured_tables(unseen=True)))
    for path in fidelity.SUMMARIES:
        text = path.read_text("utf-8")
        assert with_summary(text, section) == text


def test_each_unseen_run_has_its_class():
    tables = {path.stem: path for path in validation.measured_tables(unseen=True)}
    names = {name: fidelity.classes(read_rows(path)).tolist() for name, path in tables.items()}
    assert set(names["bloom_a100"]) == {fidelity.CLUSTERS}
    assert set(names["dgxc_gb200_dense"]) == {fidelity.BLACKWELL}
    assert set(names["maxtext_h100"]) == {fidelity.FSDP}
    assert names["automodel_h100"] == [fidelity.EXPERTS, fidelity.GPT_OSS, fidelity.FSDP]
    assert names["dgxc_moe"] == [fidelity.EXPERTS] * 9 + [fidelity.NEMO_2025] * 3
