"""Joint tuning against all settings of small spaces."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax.cli.app import run
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_work
from pipejax.search.tuning import joint as joint_tuning, problem as tuning_problem
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem

SYSTEM = dataclasses.replace(pj.load_system("h100"), memory_reserve=0.0, memory_capacity=10.6e9)
MODEL = dataclasses.replace(pj.load_model("gpt-22b"), layers=6)
FAMILY = ScheduleFamily("1f1b", 2)
WHOLE = ("size", "layers", "recompute")


def few(parts=WHOLE, system=SYSTEM, minibatch=8):
    """A problem whose memory binds."""
    workload = pj.Workload(MODEL, minibatch, tensor_parallel=8)
    return joint_tuning.JointProblem(TuningProblem.from_workload(FAMILY, workload, system), parts)


SLOW = dataclasses.replace(SYSTEM, compute_latency=1e-3)
CASES = {"fast": (SYSTEM, 8), "slow": (SLOW, 8)}
CASES |= {"room": (dataclasses.replace(SLOW, memory_capacity=20e9), 12)}


@pytest.fixture(scope="module")
def result_case():
    """By case the problem, what a local search finds, and the best of all settings."""
    with jax.enable_x64(True):
        problems = {name: few(WHOLE, *case) for name, case in CASES.items()}
        searches = joint_tuning.search_locally, joint_tuning.search_jointly
        return {k: (x, *(search(x) for search in searches)) for k, x in problems.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_best_of_all_settings_is_found(result_case, case):
    joint, tuned, best = result_case[case]
    assert best.step_time / (1 + 1e-12) <= tuned.step_time <= 1.005 * best.step_time
    assert tuned.memory_bytes <= joint.problem.capacity
    setting = tuned.setting
    assert setting.layers.sum() == 6
    assert np.all((setting.recomputed >= 0) & (setting.recomputed <= setting.layers))


def test_memory_binds_and_sizes_differ(result_case):
    settings = [tuned.setting for _, tuned, _ in result_case.values()]
    assert any(setting.recomputed.any() for setting in settings)
    assert len({int(setting.size) for setting in settings}) > 1


def test_a_step_time_is_that_of_evaluate(result_case):
    _, tuned, _ = result_case["fast"]
    setting = tuned.setting
    layers = StageLayers(setting.layers.astype(float), setting.recomputed.astype(float))
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=int(8 // setting.size))
    workload = pj.Workload(MODEL, 8, tensor_parallel=8)
    run = pj.evaluate(table, work_costs(stage_work(workload, table, assigned=layers), SYSTEM))
    assert tuned.step_time == pytest.approx(run.step_time, rel=1e-12)
    need = pj.memory_bytes(workload, table, layers).max()
    assert tuned.memory_bytes == pytest.approx(need, rel=1e-12)


def test_plain_settings_are_told_first_and_compile_nothing(monkeypatch):
    """Each is better than the one before, and the step time of what it says."""
    monkeypatch.setattr(tuning_problem, "makespans", None)
    workload = pj.Workload(MODEL, 8, tensor_parallel=8)
    message = list(joint_tuning.plain_best_settings(few()))
    times = [result_case.step_time for result_case in message]
    assert len(times) > 1
    assert times == sorted(times, reverse=True)
    setting = message[-1].setting
    assert setting.layers.tolist() == [3, 3]
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=int(8 // setting.size))
    layers = StageLayers(setting.layers.astype(float), setting.recomputed.astype(float))
    run = pj.evaluate(table, work_costs(stage_work(workload, table, assigned=layers), SYSTEM))
    assert message[-1].step_time == run.step_time


@pytest.mark.parametrize("parts", [WHOLE, ("size", "layers"), ("recompute",)])
def test_settings_are_counted(parts):
    joint = few(parts, *CASES["room"])
    blocks = list(joint_tuning.all_settings(joint))
    assert sum(len(block.size) for block in blocks) == joint_tuning.count_settings(joint)
    rows = np.concatenate([np.column_stack([b.size, b.layers, b.recomputed]) for b in blocks])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_command_tunes_several_parts_together(capsys, monkeypatch):
    """The front door hands over what was asked for; what it finds is held above."""
    seen = []

    def tune(joint):
        seen.append(joint)
        setting = next(joint_tuning.all_settings(joint)).at([0])
        (step,), (need,) = joint.times_and_needs(setting)
        numbers = step.item(), need.item(), 7
        return joint_tuning.BestSetting(setting.at(0), *numbers, joint.problem.workload)

    front = importlib.import_module("pipejax.search.tuning.tune")
    monkeypatch.setattr(front, "search_locally", tune)
    arguments = ["tune", "layers,size", "-m", "gpt-22b", "-y", "h100", "--minibatch", "8"]
    arguments += ["--workers", "2", "--tensor-parallel", "8", "--method", "local"]
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["what"] == "layers,size"
    assert seen[0].parts == ("size", "layers")
    assert sum(result["best"]["layers"]) == 48
