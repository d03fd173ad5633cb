"""A calibration finds the numbers that its rows were made with, and says what it does not know."""

import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.analysis.step.step_time import StepTimes
from pipejax.base.data_files import load_json
from pipejax.cli.app import run
from pipejax.costs.layers.collectives import collective_time
from pipejax.costs.measured.measured_rows import KINDS, MESSAGE, read_collectives
from pipejax.costs.measured.rows_file import read_rows
from pipejax.costs.model.layout import Group
from pipejax.costs.system.parts import FIELDS, system_number, written_with
from pipejax.costs.system.system import DATA, data_file
from pipejax.search.calibration.hold_outs import DRAWS, band, band_coverage, read_folds
from pipejax.search.calibration.parameters import (
    FITTED,
    PRIORS,
    parameters_with_priors,
    with_factors,
)

TRUTH = {"compute.efficiency": 0.62, "host.launch": 2.5e-5, "host.step": 6e-3}
FIT = (*TRUTH, "network.latency")  # of one node, which no row sees
COLUMNS = "layers,hidden,heads,sequence,tensor,data,pipeline,microbatch_size,global_batch,"
REST = "schedule,sequence_parallel,recompute,seconds"
LAYOUTS = ((1, 1, 1), (2, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2))
OUTLIER = 17  # a row, from 1
HEADER = "layers,hidden,heads,sequence,tensor,pipeline,microbatch_size,global_batch,seconds\n"


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


def test_the_numbers_are_found_within_their_errors(result_case):
    for name, value in TRUTH.items():
        number = result_case.parameters[name]
        assert number.identified
        assert abs(number.value - value) < 4 * number.standard_error < 0.3 * value
    assert result_case.starts_differ < 1e-3
    assert result_case.system.calibration.overlap == 0.0  # which all runs had


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


def test_the_command_writes_a_system_that_predicts_the_same(result_case, data, tmp_path, answer):
    out = tmp_path / "fitted.json"
    options = ["--system", "a100", "--fit", ",".join(FIT), "--hold-out", "group:t"]
    message = answer("calibrate", str(data), *options, "--out", str(out))
    assert {"parameters", "fit", "held_out", "outliers"} <= set(message)
    keys = ["identified", "standard_error", "unit", "value"]
    assert sorted(message["parameters"]["host.step"]) == keys
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


def test_where_a_machine_is_right_nothing_is_fitted_nor_written(six, data, a100, tmp_path, answer):
    result = pj.calibrate(six, a100)
    assert not result.parameters
    assert result.as_is.mape < 1e-9
    np.testing.assert_allclose(StepTimes(six).predict(result.system), six.seconds)
    path, out = tmp_path / "rows.csv", tmp_path / "mine.json"
    head, *lines = data.read_text().splitlines()
    line = lines[six.row[1] - 1].rpartition(",")[0]
    path.write_text(f"{head}\n{line},{six.seconds[1]}\n")  # one row tells nothing
    message = answer("calibrate", str(path), "--system", "a100", "--out", str(out))
    assert (message["parameters"], message["bands"], message["written"]) == ({}, {}, None)
    assert not out.exists()


def test_what_helps_rows_that_a_fit_did_not_see_is_fitted(six, a100):
    slow = a100.with_number("compute.efficiency", 0.5)
    result = pj.calibrate(six.with_columns(seconds=StepTimes(six).predict(slow)), a100)
    assert result.left_out.mape < result.as_is.mape / 2
    assert result.parameters["compute.efficiency"].value < 0.75
    assert [band.percent for band in result.system.calibration.bands] == [80]  # of six parts


# of the times of the rows
@with_cases("factors", [1.006] * 6, [0.994] * 6, [1.25] * 5 + [0.9], [1.25] + [0.9] + [1.25] * 4)
def test_nothing_is_fitted_where_that_helps_little_or_harms_the_worst_row(six, a100, factors):
    result = pj.calibrate(six.with_columns(seconds=six.seconds * factors), a100)
    assert not result.parameters
    assert result.fit == result.as_is


def test_rows_in_another_unit_are_refused(six, a100):
    for factor, unit in ((1e3, "milliseconds"), (1 / 60, "minutes")):
        rows = six.with_columns(seconds=factor * six.seconds)
        with pytest.raises(ValueError, match=f"seconds must be .* as if .* {unit}"):
            pj.calibrate(rows, a100)
    rows = six.with_columns(seconds=40 * six.seconds)
    with pytest.raises(ValueError, match="took 40 times the predicted time"):
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
    with pytest.raises(
        ValueError, match="stack must be the same in all rows, got none, megatron-lm-2021"
    ):
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
    long = "6 of 8 rows took about 2 times as long as the other rows suggest: their unit"
    for factor, message in ((1.0, []), (2.0, [long])):
        wrong = np.where(np.arange(8) % 5 < 3, factor, 1.0)
        changed = rows.with_columns(seconds=seconds * wrong)
        result = pj.calibrate(changed, a100, fit=["network.latency"])
        assert [remark.split(",")[0] for remark in result.remarks] == message


# numbers of a system by name, under their priors, and back in a file
@pytest.fixture(scope="module")
def plain_a100():
    return pj.load_system("a100")


def test_every_prior_is_of_a_number():
    assert set(FITTED) <= set(PRIORS) <= set(FIELDS)
    assert all(prior.spread > 0 for prior in PRIORS.values())


@pytest.mark.parametrize("name", sorted(PRIORS))
def test_a_number_is_put_where_it_is_read(plain_a100, name):
    value = 1.25 if name == "kernels.sharpness" else 0.25
    assert system_number(plain_a100.with_number(name, value), name) == value


def test_a_number_far_from_all_machines_gives_a_warning(plain_a100):
    with pytest.warns(UserWarning, match="network.bandwidth is .* times below the smallest"):
        plain_a100.with_number("network.bandwidth", 50.0)  # GB/s were meant
    with pytest.warns(UserWarning, match="compute.peak is .* times below the smallest"):
        plain_a100.with_number("compute.peak", np.array([312.0, 3e14]))


def test_a_file_with_numbers_reads_back_as_the_system_with_them(plain_a100, tmp_path):
    values = {"compute.peak": 2.5e14, "memory.latency": 3e-6, "node.efficiency": 0.625}
    path = tmp_path / "other.json"
    path.write_text(json.dumps(written_with(load_json(data_file("hardware", "a100", "")), values)))
    expected = plain_a100
    for name, value in values.items():
        expected = expected.with_number(name, value)
    assert pj.load_system(path) == expected != plain_a100


def test_whitened_parameters_are_numbers_within_their_limits(plain_a100):
    parameters = with_factors(parameters_with_priors(plain_a100, FITTED), ["layer"], 1.0)
    points = np.random.default_rng(0).standard_normal((5, len(parameters.names))) * 3
    values = parameters.values(points)
    assert (values > 0).all()
    assert (values < parameters.limit).all()
    centre = parameters.values(np.zeros((1, len(parameters.names))))[0]
    np.testing.assert_allclose(centre, parameters.centre)
    moved = (parameters.values(points + 1e-6) - parameters.values(points - 1e-6)) / 2e-6
    np.testing.assert_allclose(parameters.slopes(points), moved, rtol=1e-6)


@with_cases("stack", "megatron-core-2024", "torchtitan-2024-eager", None)
def test_whitened_parameters_are_numbers_that_a_system_may_have(plain_a100, stack):
    system = plain_a100 if stack is None else pj.load_stack(stack).on(plain_a100)
    names = [name for name in PRIORS if system_number(system, name) > 0]
    parameters = parameters_with_priors(system, names)
    for size in (-6.0, 6.0):
        values = parameters.values(np.full((1, len(names)), size))[0]
        for name, value in zip(names, values.tolist(), strict=True):
            other = system.with_number(name, value)  # refuses a number beyond its limits
            assert system_number(other, name) == pytest.approx(value)


@pytest.mark.parametrize("draw", range(3))  # device and host took longer than their sum
def test_a_fit_of_few_rows_keeps_numbers_within_their_limits(draw):
    rows = read_rows(pj.files.DATA / "measured" / "unseen" / "bloom_a100.csv")
    few = rows.take(np.random.default_rng(draw).permutation(len(rows))[:5])
    fitted = pj.calibrate(few, pj.load_system("a100"), fit="all").parameters["kernels.sharpness"]
    assert fitted.value == pytest.approx(1.0, abs=0.2)


def test_mistakes_are_named(plain_a100):
    with pytest.raises(ValueError, match=r"unknown fit 'memory\.size'"):
        parameters_with_priors(plain_a100, ["memory.size"])


def test_a_number_of_the_system_comes_before_that_of_others(plain_a100):
    """The H100's file has 10 us from NCCL's constants, other machines 40."""
    name, h100 = "collectives.latency", pj.load_system("h100")
    for system, centre in ((h100, 1e-5), (pj.load_system("mid_nw_mid_cp"), 4e-5)):
        for general in (False, True):  # known better than step times tell
            numbers = parameters_with_priors(system, [name], general=general)
            assert numbers.centre.tolist() == [centre]
    name = "host.step"
    priors = [parameters_with_priors(plain_a100, [name], general=g) for g in (False, True)]
    system_centre, others = (numbers.centre[0] for numbers in priors)
    assert (system_centre, others) == (plain_a100.host.step, PRIORS["host.step"].centre)
    name = "kernels.attention_efficiency"
    unsaid = plain_a100.with_number(name, 1.0)  # a data sheet knows no losses
    assert parameters_with_priors(unsaid, [name]).centre[0] == PRIORS[name].centre


# links fitted to collectives and messages that were timed by themselves
NCCL = DATA / "collectives" / "nccl_all_reduce_a100.csv"
TRUE = read_cases("TRUE of test_calibrate")


def measured(system, kinds=KINDS):
    """Rows of every kind as a system has them: (kind, ranks, inside, bytes, seconds)."""
    rows = []
    for kind in kinds:
        groups = [(2, 2), (2, 1)] if kind == MESSAGE else [(4, 4), (8, 8), (16, 8), (64, 8)]
        for ranks, inside in groups:
            for volume in 10.0 ** np.arange(3.0, 10.0, 0.5):
                link = system.peer_link if inside > 1 else system.network
                group = Group(ranks, inside)
                seconds = link.latency + volume / link.rate
                if kind != MESSAGE:
                    seconds = float(collective_time(system, kind, volume, group))
                rows.append((kind, ranks, inside, volume, seconds))
    return rows


def write(path, rows, header="kind,ranks,ranks_per_node,bytes,seconds"):
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def machine():
    system = pj.load_system("a100")
    for name, value in TRUE.items():
        system = system.with_number(name, value)
    return system


def test_the_numbers_that_made_the_times_are_found(machine, tmp_path):
    rows = pj.files.read_collectives(write(tmp_path / "x.csv", measured(machine)))
    result = pj.links.calibrate_links(rows, pj.load_system("a100"))
    assert {parameter.name for parameter in result.parameters} == set(TRUE)
    for parameter in result.parameters:
        assert parameter.identified
        assert parameter.value == pytest.approx(TRUE[parameter.name], rel=0.01), parameter.name
        assert system_number(result.system, parameter.name) == parameter.value
    assert result.fit.rows == len(rows.seconds)
    assert result.fit.mape < 0.1


def test_only_links_that_rows_use_are_fitted(machine, tmp_path):
    rows = [row for row in measured(machine, [MESSAGE]) if row[2] == 1]
    result = pj.links.calibrate_links(read_collectives(write(tmp_path / "x.csv", rows)), machine)
    names = {parameter.name for parameter in result.parameters}
    assert names == {"network.efficiency", "network.latency"}
    near = [row for row in measured(machine, ["all_gather"]) if row[1] == row[2]]
    result = pj.links.calibrate_links(read_collectives(write(tmp_path / "x.csv", near)), machine)
    assert not [number for number in result.parameters if number.name.startswith("network")]


def test_nccls_table_is_met_within_two_percent():
    """VIA-Research/vTrain, trace/a100: 553 all-reduces on 2 to 8 accelerators of a node."""
    result = pj.links.calibrate_links(read_collectives(NCCL), pj.load_system("a100"))
    assert result.fit.rows == 7 * 79
    assert result.fit.mape < 2
    # a100.json was fitted to these rows before
    for parameter in result.parameters:
        expected = float(system_number(pj.load_system("a100"), parameter.name))
        assert parameter.value == pytest.approx(expected, rel=0.03), parameter.name


def test_rows_that_spread_count_less(machine, tmp_path):
    """Half of the messages are twice as long, and say that they are not sure."""
    sure = [(*row, 100, 1e-9) for row in measured(machine, [MESSAGE])]
    unsure = [(*row[:4], 2 * row[4], 1, 4 * row[4]) for row in measured(machine, [MESSAGE])]
    header = "kind,ranks,ranks_per_node,bytes,seconds,n,spread"
    rows = read_collectives(write(tmp_path / "x.csv", [*sure, *unsure], header))
    fitted = pj.links.calibrate_links(rows, machine).parameters
    result = {number.name: number.value for number in fitted}
    assert result["network.efficiency"] == pytest.approx(TRUE["network.efficiency"], rel=0.01)
    none = rows._replace(variance=np.zeros_like(rows.variance))
    fitted = pj.links.calibrate_links(none, machine).parameters
    pulled = {number.name: number.value for number in fitted}
    assert pulled["network.efficiency"] < 0.9 * TRUE["network.efficiency"]


@with_cases("kinds factor", *read_cases("test_times_in_other_units_are_refused"))
def test_times_in_other_units_are_refused(kinds, factor, machine, tmp_path):
    rows = [(*row[:-1], row[-1] * factor) for row in measured(machine, kinds)]
    columns = pj.files.read_collectives(write(tmp_path / "x.csv", rows))
    with pytest.raises(ValueError, match=r"x\.csv: .*: check seconds, bytes"):
        pj.links.calibrate_links(columns, pj.load_system("a100"))


def test_the_command_writes_links_that_have_the_same_times(tmp_path, answer):
    out = tmp_path / "links.json"
    arguments = ["--collectives", str(NCCL), "--system", "a100", "--out", str(out)]
    message = answer("calibrate", *arguments)
    assert message["collectives"]["mape"] < 2
    assert "collectives.copies" in message["parameters"]
    fitted, a100 = pj.load_system(out), pj.load_system("a100")
    rows = read_collectives(NCCL)
    result = pj.links.calibrate_links(rows, a100).system
    group = Group(rows.ranks * 1.0, rows.inside * 1.0)
    times = [collective_time(s, "all_reduce", rows.volume, group) for s in (fitted, result)]
    np.testing.assert_allclose(*times, rtol=1e-12)
    assert fitted.compute_efficiency == a100.compute_efficiency
    assert fitted.calibration.rows == 553
    assert fitted.calibration.bands == ()
    assert jax.tree.leaves(dataclasses.replace(fitted.host)) == jax.tree.leaves(a100.host)


@pytest.mark.slow
def test_the_command_fits_runs_beside_what_links_decide(tmp_path, answer, capsys):
    runs = tmp_path / "runs.csv"
    rows = [f"gpt-22b,{t},4,1,{b},{8 * b},{s}" for t, b, s in [(8, 4, 2.1), (8, 8, 4), (4, 4, 3.6)]]
    header = "model,tensor,pipeline,data,microbatch_size,global_batch,seconds"
    runs.write_text("\n".join([header, *rows]))
    arguments = [str(runs), "--collectives", str(NCCL), "--system", "a100"]
    message = answer("calibrate", *arguments, "--out", str(tmp_path / "x.json"))
    assert message["fit"]["rows"] == 3
    assert message["collectives"]["mape"] < 2
    assert {"collectives.latency", "compute.efficiency"} <= set(message["parameters"])
    assert message["parameters"]["collectives.latency"]["value"] == pytest.approx(3.55e-5, rel=0.01)
    assert run(["calibrate", *arguments, "--out", str(tmp_path / "y.json")]) == 0
    printed = capsys.readouterr().out
    assert "553 collectives and messages" in printed
    assert "numbers are fitted to 3 runs" in printed


# rows that each fit leaves out, and the bands of predictions that come of them
@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    runs = itertools.product((4, 8), (1, 2, 8), (1, 2))
    lines = [f"{layers},{64 * layers},8,128,{t},2,{b},16,0.5" for layers, t, b in runs]
    path.write_text(HEADER + "\n".join(lines))
    with pytest.warns():
        return read_rows(path)


def test_a_value_is_left_out_once(rows):
    folds = read_folds(rows, "t=8")
    assert folds.names == ("t=8",)
    np.testing.assert_array_equal(folds.left_out[0], rows.tensor == 8)
    np.testing.assert_array_equal(read_folds(rows, "tensor=8").left_out, folds.left_out)


@with_cases("hold_out count size", *read_cases("test_parts_cover_every_row_once"))
def test_parts_cover_every_row_once(rows, hold_out, count, size):
    folds = read_folds(rows, hold_out)
    assert folds.left_out.shape == (count, len(rows)) == (len(folds.names), 12)
    np.testing.assert_array_equal(folds.left_out.sum(axis=0), 1)
    np.testing.assert_array_equal(folds.left_out.sum(axis=1), size)


def test_a_group_is_left_out_as_a_whole(rows):
    for name, is_left_out in zip(*read_folds(rows, "group:h,b"), strict=True):
        hidden, size = map(int, re.findall(r"\d+", name))
        is_named = (rows.column("hidden") == hidden) & (rows.microbatch_size == size)
        np.testing.assert_array_equal(is_left_out, is_named)


def test_few_rows_are_drawn_many_times(rows):
    folds = read_folds(rows, "few:5")
    assert folds.left_out.shape == (DRAWS, 12)
    np.testing.assert_array_equal((~folds.left_out).sum(axis=1), 5)
    assert len({tuple(is_left_out) for is_left_out in folds.left_out}) > DRAWS / 2
    np.testing.assert_array_equal(read_folds(rows, "few:5").left_out, folds.left_out)
    assert (read_folds(rows, "few:5", seed=1).left_out != folds.left_out).any()


def grouped(groups, rows, seed):
    """Residuals whose groups are wrong together."""
    random = np.random.default_rng(seed)
    return [random.normal(0.1 * random.normal(), 0.02, rows) for _ in range(groups)]


def test_a_band_is_of_measured_over_predicted():
    residual = np.log(np.linspace(0.8, 1.25, 1001))  # predicted over measured
    _, low, high = band(residual, 90, 10**6)
    assert low == pytest.approx(1 / np.quantile(np.exp(residual), 0.95))
    assert high == pytest.approx(1 / np.quantile(np.exp(residual), 0.05))


def test_few_groups_need_a_wider_band():
    residual = np.concatenate(grouped(12, 20, 0))
    widths = [np.log(high / low) for _, low, high in (band(residual, 80, k) for k in (4, 12, 500))]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == pytest.approx(np.ptp(residual))


@pytest.mark.parametrize("percent", [80, 90])
def test_a_group_that_was_left_out_is_covered_as_often_as_said(percent):
    result = []
    for seed in range(40):
        groups = grouped(20, 15, seed)
        left_out = np.repeat(np.eye(20, dtype=bool), 15, axis=1)
        residual = np.tile(np.concatenate(groups), (20, 1))
        result.append(band_coverage(groups, residual, left_out)[percent])
    assert np.mean(result) == pytest.approx(percent, abs=3)


def test_one_fold_is_judged_by_the_rows_that_were_fitted():
    residual = np.array([[0.01, -0.01, 0.02, -0.02, 0.0, 0.5]])
    left_out = np.arange(6)[None] == 5
    assert band_coverage([residual[0, 5:]], residual, left_out) == {80: 0.0, 90: 0.0}
