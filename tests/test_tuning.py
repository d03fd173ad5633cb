"""Tuning: step times against the engine, and what is found against all settings."""

import dataclasses
import importlib
import json
import re
import shlex

import jax
import numpy as np
import pytest
from compilations import compilations
from daily import read_cases, with_cases

import pipejax as pj
from pipejax.cli.output.report import SEARCH_FIELDS
from pipejax.costs.model.workload import StageLayers
from pipejax.costs.stage.stage_costs import work_costs
from pipejax.costs.stage.stage_work import stage_work
from pipejax.search.tuning.joint import JointProblem, improve, search_jointly, search_locally, swaps
from pipejax.search.tuning.problem import ScheduleFamily, TuningProblem

front = importlib.import_module("pipejax.search.tuning.tune")

SYSTEM = dataclasses.replace(pj.load_system("h100"), memory_reserve=0.0)
SMALL = dataclasses.replace(pj.load_model("gpt-22b"), layers=16)
WORKLOAD = pj.Workload(SMALL, minibatch=64, tensor_parallel=8)


def scenario(workload=WORKLOAD, system=SYSTEM, **fields):
    return pj.Scenario("1f1b", 4, costs=pj.costing.ModelCosts(workload, system), **fields)


def with_memory(gigabytes):
    return dataclasses.replace(SYSTEM, memory_capacity=gigabytes * 1e9)


_families = {}


def get_family(schedule, workers=4):
    """One family for all tests: what it has compiled is used again."""
    return _families.setdefault((schedule, workers), ScheduleFamily(schedule, workers))


SLOW_CHIMERA = pytest.param("chimera", marks=pytest.mark.slow)


def test_a_family_knows_a_number_of_microbatches_that_exists():
    for schedule in ("1f1b", "dualpipe", "chimera"):
        family = get_family(schedule)
        assert family.usual_microbatches == 16
        workload = pj.Workload(SMALL, 16, tensor_parallel=8)
        problem = TuningProblem.from_workload(family, workload, SYSTEM)
        assert len(problem.assigned.layers) == family.table(16).num_stages


def test_an_exact_evaluation_is_that_of_evaluate():
    options = {"slots": {"F": 1, "B": 1}}
    result = pj.tune(scenario(options=options, link="queued"))
    sizes = result.best.details["sizes"]
    assert [size["microbatch_size"] for size in sizes] == [1, 2, 4, 8, 16, 32, 64]
    for size in sizes:
        count = size["microbatches"]
        table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=count)
        run = pj.evaluate(table, pj.stage_costs(WORKLOAD, SYSTEM, table), link="queued")
        assert size["step_time"] == pytest.approx(run.step_time, rel=1e-12)
        assert size["memory_bytes"] == pytest.approx(pj.memory_bytes(WORKLOAD, table).max())


def test_a_batch_has_what_each_of_it_has():
    """Step times and memory, for layers that need not be whole."""
    problem = few_layers(memory_capacity=40e9)
    layers = np.random.default_rng(0).uniform(1, 4, (12, 4))
    with jax.enable_x64(True):
        batch = problem.evaluate_batch(8, StageLayers(layers, 0.5 * layers))
        single = problem.evaluate(8, StageLayers(layers[3], 0.5 * layers[3]))
    np.testing.assert_allclose(np.array(batch)[:, 3], single, rtol=1e-12)


def tuned_size(family, workload, system, **options):
    """The best size, of all."""
    problem = TuningProblem.from_workload(family, workload, system, **options)
    return search_jointly(JointProblem(problem, ("size",)))


def test_memory_is_a_limit():
    slow = dataclasses.replace(SYSTEM, compute_latency=5e-3)  # favours large microbatches
    free = tuned_size(get_family("1f1b"), WORKLOAD, slow, memory_limit=False)
    need = free.memory_bytes
    assert free.setting.size > 1
    bound, same = (
        tuned_size(get_family("1f1b"), WORKLOAD, dataclasses.replace(slow, memory_capacity=room))
        for room in (0.99 * need, need)
    )
    assert same.setting.size == free.setting.size
    assert bound.setting.size < same.setting.size


@pytest.mark.slow
@with_cases("name workers minibatch memory message", *read_cases("test_nothing_fits_is_an_error"))
def test_nothing_fits_is_an_error(name, workers, minibatch, memory, message):
    workload = dataclasses.replace(WORKLOAD, minibatch=minibatch)
    with pytest.raises(ValueError, match=message):
        tuned_size(get_family(name, workers), workload, with_memory(memory))


FEW = dataclasses.replace(pj.load_model("llama3-70b"), layers=10)


def few_layers(schedule="1f1b", **changes):
    """A model of few layers with a large head."""
    workload = pj.Workload(FEW, 32, tensor_parallel=8)
    system = dataclasses.replace(SYSTEM, **changes)
    return TuningProblem.from_workload(get_family(schedule), workload, system)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", SLOW_CHIMERA])
@pytest.mark.parametrize("speed", [1, 2, 3])
def test_layers_are_those_of_the_exhaustive_search(schedule, speed):
    problem = few_layers(schedule, peak_flops=SYSTEM.peak_flops * speed)
    joint = JointProblem(problem, ("layers",), 8)
    tuned, best = search_locally(joint), search_jointly(joint)
    assert best.evaluated == 84  # ways to write 10 as a sum of 4
    assert tuned.step_time == pytest.approx(best.step_time, rel=1e-12)
    assert tuned.setting.layers.sum() == 10
    even, _ = problem.evaluate(8, problem.assigned)
    assert tuned.step_time < even  # the head makes the even split a bad one


@pytest.mark.slow
def test_recomputed_layers_are_those_of_the_exhaustive_search():
    free = few_layers()
    layers = free.assigned.layers
    least, largest = (free.evaluate(4, StageLayers(layers, r))[1] for r in (layers, 0 * layers))
    limit = (least + largest) / 2
    problem = few_layers(memory_capacity=limit)
    joint = JointProblem(problem, ("recompute",), 4)
    tuned, best = search_locally(joint), search_jointly(joint)
    assert tuned.step_time == pytest.approx(best.step_time, rel=1e-12)
    assert tuned.memory_bytes <= limit < largest
    full, _ = problem.evaluate(4, StageLayers(layers, layers))
    assert tuned.step_time < full
    with pytest.raises(ValueError, match=r"^no setting fits: the smallest need is .* 1.0 GB"):
        search_locally(JointProblem(few_layers(memory_capacity=1e9), ("recompute",), 4))


def test_stage_times_and_memory_of_layers_are_those_of_the_library():
    problem, table = few_layers(), pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    layers = StageLayers(np.array([4.0, 1.0, 2.0, 3.0]), np.array([1.0, 0.0, 2.0, 3.0]))
    workload = pj.Workload(FEW, 32, tensor_parallel=8)
    costs = work_costs(stage_work(workload, table, assigned=layers), SYSTEM)
    step, need = problem.evaluate(8, layers)
    assert step == pytest.approx(pj.evaluate(table, costs).step_time)
    assert need == pytest.approx(pj.memory_bytes(workload, table, layers).max())


SIZES = "microbatch_size microbatches step_time"
COMMAND = shlex.split("tune --model gpt-22b --system h100 --tensor-parallel 8 --workers 4")


def run_once(monkeypatch):
    """Let each way of tuning run once, and return the functions whose result was printed."""
    result, calls = {}, []

    def once(name, way):
        def run(*args, **kwargs):
            calls.append(name)
            if name not in result:
                result[name] = way(*args, **kwargs)
            return result[name]

        return run

    for name in ("plain_settings", "search_locally"):
        monkeypatch.setattr(front, name, once(name, getattr(front, name)))
    return calls


@pytest.fixture
def tune(call):
    """Run a command; return exit code, stdout and stderr."""
    return lambda *more, what="size": call("tune", what, *COMMAND[1:], *more)


def test_microbatches_say_their_size_where_it_is_not_tuned(tune, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("microbatches = 16\n")
    options = ("--minibatch", 32, "--config", path, "--json")
    code, out, _ = tune(*options, what="recompute")
    result = json.loads(out)
    assert (code, result["microbatch_size"], result["microbatches"]) == (0, 2, 16)
    for more, message in (
        (("--microbatch-size", 2), "--microbatches 16 and --microbatch-size set the same"),
        (("--minibatch", 24), "--microbatches 16 must divide --minibatch 24"),
    ):
        sized = [*options[:2], *options[2:]] if more[0] != "--minibatch" else list(options[2:])
        code, _, err = tune(*sized, *more, what="recompute")
        assert (code, message in err) == (2, True)
    code, _, err = tune(*options)
    assert (code, "--microbatches 16 does not go with tune size" in err) == (2, True)


@pytest.mark.parametrize("method", [None, "exhaustive", "local"])
def test_only_the_way_that_is_asked_for_is_paid_for(tune, monkeypatch, method):
    spent = run_once(monkeypatch)
    more = [] if method is None else ["--method", method]
    arguments = ["--minibatch", 16, "--schedule", "chimera", "--link", "rendezvous", *more]
    code, out, err = tune(*arguments, "--details")
    if method == "local":  # there are few sizes
        assert code == 2
        assert "method must be exhaustive for size, got 'local'" in err
        return
    assert code == 0
    assert re.search("│ yes +│ yes +│\n", out)
    assert "method: exhaustive (" in out
    assert spent == ["plain_settings"]
    result = json.loads(tune(*arguments, "--json")[1])
    assert result["method"] == "exhaustive"
    assert "local" not in result
    assert ("5 settings: up to 200000" in result["reason"]) == (method is None)


@with_cases("what minibatch workers method reason", *read_cases("methods by numbers of settings"))
def test_the_number_of_settings_chooses_the_method(what, minibatch, workers, method, reason):
    workload = pj.Workload(pj.load_model("gpt-22b"), minibatch, tensor_parallel=8)
    microbatches = 0 if "size" in what else 32
    problem = TuningProblem.from_workload(ScheduleFamily("1f1b", workers), workload, SYSTEM)
    joint = JointProblem(problem, tuple(what.split(",")), microbatches)
    result, why = front._choose_method(joint)
    assert result == method
    assert re.match(reason, why)


@pytest.mark.slow
def test_a_second_call_compiles_nothing():
    workload = pj.Workload(pj.load_model("gpt-22b"), 8, tensor_parallel=8)
    options = {"over": "layers", "method": "local", "microbatch_size": 1}
    first = pj.tune(scenario(workload), **options)
    seen, results = [], []
    again_on = scenario(workload, pj.load_system("b200"))
    assert not compilations(
        lambda: results.append(pj.tune(again_on, **options, on_best=seen.append))
    )
    (again,) = results
    times = [function.value for function in seen]
    assert len(times) > 1
    assert times == sorted(times, reverse=True)
    assert times[-1] == again.value
    assert again.value < first.value


@with_cases(
    "what more keys",
    ("layers", ["--schedule", "interleaved-1f1b"], {"layers", "recomputed"}),
    pytest.param("recompute", [], {"layers", "recomputed"}, marks=pytest.mark.slow),
)
def test_other_things_to_tune(tune, monkeypatch, what, more, keys):
    run_once(monkeypatch)
    arguments = ["--minibatch", 8, "--microbatch-size", 2, *more]
    code, out, _ = tune(*arguments, "--method", "local", "--json", what=what)
    result = json.loads(out)
    assert code == 0
    assert set(result["best"]) >= keys
    assert set(result) >= {*SEARCH_FIELDS.split(), *SIZES.split(), "best", "local"}
    assert (result["what"], result["microbatch_size"], result["microbatches"]) == (what, 2, 4)
    assert set(result["local"]) >= set(SIZES.split())
    assert result["local"]["tuned_step_time"] == result["step_time"]
    if what == "layers":
        refusal = "ways to split 48 into 8: at most 200000 are tried"
        code, out, _ = tune(*arguments, "--method", "local", what=what)
        assert "│ even " in out
        code, _, err = tune(*arguments, "--method", "exhaustive", what=what)
        assert (code, refusal in err) == (2, True)


def test_a_command_where_nothing_fits_says_so(call):
    one_by_one = [*COMMAND[: COMMAND.index("--tensor-parallel")], "--workers", "4"]
    code, out, err = call(*one_by_one, "--minibatch", "8", "--json")
    assert code == 0
    result = json.loads(out)
    assert not result["best"]["fits"]
    assert not any(size["fits"] for size in result["exhaustive"]["sizes"])
    assert "warning: no microbatch size fits: the smallest need is" in err


def test_memory_is_no_limit_where_that_is_said():
    small = scenario(system=dataclasses.replace(SYSTEM, memory_capacity=1e9))
    free = pj.tune(small, no_memory_limit=True)
    assert not free.best.fits


def test_one_stage_keeps_all_layers():
    def value(points, owner):
        return points[:, 0].astype(float)

    points, values = improve(np.array([[80]]), np.zeros(1, int), swaps(1), value)
    assert (points.tolist(), values.tolist()) == ([[80]], [80.0])
