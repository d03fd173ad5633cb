"""Step times of runs on H100 and B200, to which nothing was fitted, by the machines' own files."""

import dataclasses

import numpy as np
import pytest
from legal_sizes import build

import pipejax as pj
from pipejax.analysis.step.validation import prediction_errors
from pipejax.costs.measured.rows_file import read_predictions, read_rows
from pipejax.costs.system.parts import Efficiency
from pipejax.costs.system.system import DATA

MLPERF, SIMUMAX = (
    read_rows(DATA / "measured" / f"{n}.csv") for n in ("mlperf_h100", "simumax_b200")
)
pytestmark = pytest.mark.slow  # prices of every layout, and schedules of up to 18,000 ops


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
        moved = error - slope * (error[is_fitted] @ slope[is_fitted]) / (
            slope[is_fitted] @ slope[is_fitted]
        )
        assert np.abs(np.expm1(moved[~is_fitted])).max() < 0.08


def test_simumax_runs_are_predicted_no_worse_than_by_simumax():
    theirs = read_predictions(DATA / "predictions" / "simumax_b200.csv", len(SIMUMAX))["seconds"]
    ours = predicted(SIMUMAX, pj.load_system("b200-simumax"))
    our_errors, their_errors = (
        prediction_errors(seconds, SIMUMAX.seconds) for seconds in (ours, theirs)
    )
    assert our_errors.mape <= their_errors.mape
