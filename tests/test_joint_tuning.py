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
from pipejax.search.tuning import step_time_objective
from pipejax.search.tuning.joint import (
    every_setting,
    improve_settings,
    plain_answers,
    search_jointly,
    tune_jointly,
)
from pipejax.search.tuning.joint_space import (
    JointProblem,
    TunedJointly,
    count_settings,
)
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem

SYSTEM = dataclasses.replace(pj.load_system("h100"), memory_reserve=0.0, memory_capacity=10.6e9)
MODEL = dataclasses.replace(pj.load_model("gpt-22b"), layers=6)
FAMILY = ScheduleFamily("1f1b", 2)
WHOLE = ("size", "layers", "recompute")


def few(parts=WHOLE):
    """Three pairs whose memory binds, one of them on a slow machine."""
    slow = dataclasses.replace(SYSTEM, compute_latency=1e-3)
    systems = [SYSTEM, slow, dataclasses.replace(slow, memory_capacity=20e9)]
    workloads = [pj.Workload(MODEL, minibatch, tensor_parallel=8) for minibatch in (8, 8, 12)]
    problem = TuningProblem.of(FAMILY, workloads, systems)
    return JointProblem(problem, parts)


@pytest.fixture(scope="module")
def found():
    """A problem, what gradients find, and the best of all settings."""
    with jax.enable_x64(True):
        joint = few()
        return joint, tune_jointly(joint, starts=4, steps=25), search_jointly(joint)


def test_the_best_of_all_settings_is_found(found):
    joint, tuned, best = found
    assert np.all(tuned.step_time <= 1.005 * best.step_time)
    assert np.all(best.step_time <= tuned.step_time * (1 + 1e-12))
    assert np.all(tuned.memory_bytes <= joint.problem.capacity)
    settings = tuned.settings
    assert settings.layers.sum(axis=1).tolist() == [6, 6, 6]
    assert np.all((settings.recomputed >= 0) & (settings.recomputed <= settings.layers))
    assert settings.recomputed.any()  # or memory would not bind
    assert len({*settings.size.tolist()}) > 1
    assert tuned.relaxed_step_time.shape == tuned.relaxed[0].shape == (3,)


def test_a_step_time_is_that_of_evaluate(found):
    _, tuned, _ = found
    own = tuned.settings.at(0)
    layers = StageLayers(own.layers.astype(float), own.recomputed.astype(float))
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=int(8 // own.size))
    workload = pj.Workload(MODEL, 8, tensor_parallel=8)
    run = pj.evaluate(table, work_costs(stage_work(workload, table, assigned=layers), SYSTEM))
    assert tuned.step_time[0] == pytest.approx(run.step_time, rel=1e-12)
    need = pj.memory_bytes(workload, table, layers).max()
    assert tuned.memory_bytes[0] == pytest.approx(need, rel=1e-12)


def test_plain_settings_are_told_first_and_compile_nothing(monkeypatch):
    """Each is better than the one before, and the step time of what it says."""
    monkeypatch.setattr(step_time_objective, "makespans", None)
    workload = pj.Workload(MODEL, 8, tensor_parallel=8)
    joint = JointProblem(TuningProblem.of(FAMILY, [workload], [SYSTEM]), WHOLE)
    told = list(plain_answers(joint))
    times = [found.step_time.sum() for found in told]
    assert len(times) > 1
    assert times == sorted(times, reverse=True)
    own = told[-1].settings.at(0)
    assert own.layers.tolist() == [3, 3]
    table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=int(8 // own.size))
    layers = StageLayers(own.layers.astype(float), own.recomputed.astype(float))
    run = pj.evaluate(table, work_costs(stage_work(workload, table, assigned=layers), SYSTEM))
    assert told[-1].step_time[0] == run.step_time


def test_a_setting_is_improved_by_one_layer_at_a_time(found):
    joint, tuned, _ = found
    far = tuned.settings._replace(
        layers=np.array([[5, 1]] * 3), recomputed=np.array([[5, 1], [5, 1], [0, 0]])
    )
    with jax.enable_x64(True):
        before = joint.times(far)
        settings, times = improve_settings(joint, far, joint.times)
    assert np.all(times < before)
    np.testing.assert_array_equal(settings.size, far.size)
    np.testing.assert_allclose(times, tuned.step_time, rtol=0.02)


@pytest.mark.parametrize("parts", [WHOLE, ("size", "layers"), ("recompute",)])
def test_settings_are_counted(parts):
    joint = few(parts)
    blocks = list(every_setting(joint, 2))
    assert sum(len(block.pair) for block in blocks) == count_settings(joint, 2)
    rows = np.concatenate([np.column_stack([b.size, b.layers, b.recomputed]) for b in blocks])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_command_tunes_several_parts_together(capsys, monkeypatch):
    """The front door hands over what was asked for; what it finds is held above."""
    seen = []

    def tune(joint):
        seen.append(joint)
        setting = next(every_setting(joint, 0)).at([0])
        step, need = joint.exact(setting)
        relaxed = np.ones(1), StageLayers(np.ones((1, 2)), np.zeros((1, 2)))
        return TunedJointly(setting, step, need, 7, step, relaxed)

    front = importlib.import_module("pipejax.search.tuning.tune")
    monkeypatch.setattr(front, "tune_jointly", tune)
    arguments = ["tune", "layers,size", "-m", "gpt-22b", "-y", "h100", "--minibatch", "8"]
    arguments += ["--workers", "2", "--tensor-parallel", "8", "--method", "gradient"]
    assert run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["what"] == "layers,size"
    assert seen[0].parts == ("size", "layers")
    assert sum(result["best"]["layers"]) == 48
