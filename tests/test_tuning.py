"""Tuning: relaxations against the engine, gradients against differences, all against searches."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from benchmarks.tuning import compare, random_pairs
from pipejax.cli.app import run
from pipejax.memory import held_counts, peak_activation_bytes
from pipejax.schedules import REGISTRY
from pipejax.tuning import (
    Family,
    Problem,
    descend,
    relax_microbatches,
    search_microbatches,
    tune_microbatches,
)

SYSTEM = pj.load_system("h100")
SMALL = dataclasses.replace(pj.load_model("gpt-22b"), layers=16)
WORKLOAD = pj.Workload(SMALL, minibatch=64, tensor_parallel=8)


def with_memory(gigabytes):
    return dataclasses.replace(SYSTEM, memory_capacity=gigabytes * 1e9)


MINIBATCHES = (24, 32, 36, 48, 60, 64, 96)
_families = {}


def family_of(schedule, workers=4):
    """One family for all tests: what it has compiled is used again."""
    return _families.setdefault((schedule, workers), Family(schedule, workers))


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 128), ("chimera", 128), ("gpipe", 64)])
def test_tuned_sizes_are_those_of_the_exhaustive_search(schedule, count):
    family = family_of(schedule)
    workloads, systems = random_pairs(schedule, 4, count, seed=1, minibatches=MINIBATCHES)
    found = {"tuned": tune_microbatches(family, workloads, systems),
             "exhaustive": search_microbatches(family, workloads, systems)}  # fmt: skip
    result = compare(found)
    assert result["equal"] >= 0.99 * result["pairs"]
    assert result["worst_loss"] <= 0.005
    assert len(result["best_sizes"]) > 4  # the question is not trivial
    assert result["evaluated_sizes"] < 0.7 * result["legal_sizes"]
    assert schedule == "gpipe" or result["memory_binds"] > 0.2


def test_an_exact_evaluation_is_that_of_evaluate():
    family = Family("interleaved-1f1b", 4, {"stages_per_worker": 2}, "queued")
    sizes = search_microbatches(family, [WORKLOAD], [SYSTEM]).sizes
    assert sizes.size.tolist() == [1, 2, 4, 8, 16, 32, 64]
    for count, step, need in zip(
        sizes.microbatches, sizes.step_time, sizes.memory_bytes, strict=True
    ):
        table = pj.schedules.build("interleaved-1f1b", num_workers=4, num_microbatches=int(count))
        run = pj.evaluate(table, pj.stage_costs(WORKLOAD, SYSTEM, table), link="queued")
        assert step == pytest.approx(run.step_time, rel=1e-12)
        assert need == pytest.approx(pj.memory_bytes(WORKLOAD, table).max(), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "interleaved-1f1b"])
def test_the_relaxation_is_exact_at_multiples_of_the_workers(schedule):
    """In the affine regime, from M = P on where messages are short: to rounding."""
    family = family_of(schedule)
    workload = dataclasses.replace(WORKLOAD, minibatch=192)
    problem = Problem.of(family, [workload], [SYSTEM])
    best = search_microbatches(family, [workload], [SYSTEM], memory_limit=False)
    at = np.flatnonzero((best.sizes.microbatches % 4 == 0) & best.sizes.is_legal)
    assert len(at) > 7
    relaxed = problem.relaxed_step_times(np.zeros(len(at), int), best.sizes.size[at].astype(float))
    np.testing.assert_allclose(relaxed, best.sizes.step_time[at], rtol=1e-6)
    forecast = problem.forecast(best.sizes)
    legal = best.sizes.is_legal
    np.testing.assert_allclose(forecast[legal], best.sizes.step_time[legal], rtol=1e-6)
    assert np.all(np.isinf(forecast[~legal]))


@pytest.mark.parametrize("capacity", [30.0, 300.0])  # short of memory, and not
def test_the_gradient_of_the_relaxed_step_time_is_that_of_differences(capacity):
    problem = Problem.of(family_of("1f1b"), [WORKLOAD] * 3, [with_memory(capacity)] * 3)
    at, step = np.log([1.3, 4.7, 21.0]), 1e-6
    given = problem.given_of(np.arange(3))
    values, gradient = problem.objective.value_and_grad(at, given)
    up, down = (problem.objective.values(at + sign * step, given) for sign in (1, -1))
    np.testing.assert_allclose(gradient, (up - down) / (2 * step), rtol=1e-5)
    np.testing.assert_allclose(values, problem.objective.values(at, given))
    free = problem.relaxed_step_times(np.arange(3), np.exp(at))
    assert np.array_equal(
        free < np.asarray(values), problem.relaxed_need(np.arange(3), np.exp(at)) > capacity * 1e9
    )


def test_memory_is_a_limit():
    slow = dataclasses.replace(SYSTEM, compute_latency=5e-3)  # favours large microbatches
    free = tune_microbatches(family_of("1f1b"), [WORKLOAD], [slow], memory_limit=False)
    need = free.memory_bytes[0]
    assert free.microbatch_size[0] > 1
    short = dataclasses.replace(slow, memory_capacity=0.99 * need)
    exact = dataclasses.replace(slow, memory_capacity=need)
    bound, same = tune_microbatches(
        family_of("1f1b"), [WORKLOAD] * 2, [short, exact]
    ).microbatch_size
    assert same == free.microbatch_size[0]
    assert bound < same
    relaxed = tune_microbatches(family_of("1f1b"), [WORKLOAD], [short]).relaxed
    assert relaxed.microbatch_size[0] < same


def test_nothing_fits_is_an_error():
    message = (
        r"no microbatch size fits: the smallest need is \d+\.\d GB .* of 1; the system has 2.0 GB"
    )
    for way in (tune_microbatches, search_microbatches):
        with pytest.raises(ValueError, match=message):
            way(family_of("1f1b"), [WORKLOAD], [with_memory(2.0)])
        with pytest.raises(ValueError, match="pair 1: no microbatch size fits"):
            way(family_of("1f1b"), [WORKLOAD] * 2, [SYSTEM, with_memory(2.0)])
        with pytest.raises(
            ValueError, match="no microbatch size is legal for a minibatch of 63: chimera"
        ):
            way(family_of("chimera"), [dataclasses.replace(WORKLOAD, minibatch=63)], [SYSTEM])
        with pytest.raises(ValueError, match="even number of workers"):
            way(Family("chimera", 3), [WORKLOAD], [SYSTEM])


def test_pairs_that_are_not_alike_are_refused():
    family = family_of("1f1b")
    gated = dataclasses.replace(WORKLOAD, model=pj.load_model("llama3-70b"))
    with pytest.raises(ValueError, match=r"models of one batch .* llama3-70b and gpt-22b"):
        Problem.of(family, [WORKLOAD, gated], [SYSTEM] * 2)
    with pytest.raises(ValueError, match="same parallelism"):
        Problem.of(
            family, [WORKLOAD, dataclasses.replace(WORKLOAD, tensor_parallel=4)], [SYSTEM] * 2
        )
    with pytest.raises(ValueError, match="as many workloads as systems, got 1 and 2"):
        Problem.of(family, [WORKLOAD], [SYSTEM] * 2)


def test_more_starts_find_more_minima():
    workloads, systems = random_pairs("1f1b", 4, 30, seed=5, minibatches=MINIBATCHES)
    problem = Problem.of(family_of("1f1b"), workloads, systems)
    one, many = (relax_microbatches(problem, starts=n)[2].min(axis=0) for n in (1, 6))
    assert np.all(many < one * 1.05)
    assert np.any(many < one * 0.95)


@pytest.mark.parametrize("schedule", REGISTRY)
def test_held_counts_give_the_peak_for_any_sizes(schedule):
    table = pj.schedules.build(schedule, num_workers=4, num_microbatches=10)
    held = held_counts(table)
    for size in np.random.default_rng(0).random((20, table.num_stages)):
        np.testing.assert_allclose(
            (held.activations @ size).max(axis=1), peak_activation_bytes(table, size)
        )


def test_descent_keeps_to_its_bounds_and_the_best_point():
    def jump(x):  # falls, then jumps up
        return jnp.where(x < 2, -x, 5.0), jnp.full_like(x, -1.0)

    found = descend(jump, np.array([0.0, 1.5]), steps=30)
    assert np.all((found.points < 2) & (found.points > 1.5))
    np.testing.assert_allclose(found.values, -found.points)
    assert descend(jump, np.array([0.0]), upper=1.0).points.tolist() == [1.0]
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        descend(jump, np.array([0.0]), steps=0)


COMMAND = [
    "tune",
    "--model",
    "gpt-22b",
    "--system",
    "h100",
    "--tensor-parallel",
    "8",
    "--workers",
    "4",
]


def call(capsys, *arguments):
    code = run([*COMMAND, *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(capsys):
    code, out, _ = call(capsys, "--minibatch", 32, "--json")
    result = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert set(result) >= {"microbatch_size", "microbatches", "step_time", "relaxed", "exhaustive", "schedule",
                           "workers", "minibatch", "memory_bytes", "seconds", "ratio"}  # fmt: skip
    assert set(result["relaxed"]) >= {"microbatch_size", "microbatches", "step_time"}
    best = result["exhaustive"]
    assert {key: best[key] for key in ("microbatch_size", "microbatches", "step_time")} == {
        key: result[key] for key in ("microbatch_size", "microbatches", "step_time")}  # fmt: skip
    assert [size["microbatches"] for size in best["sizes"]] == [32, 16, 8, 4, 2, 1]
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=result["microbatches"])
    workload = pj.Workload(pj.load_model("gpt-22b"), 32, tensor_parallel=8)
    assert result["step_time"] == pytest.approx(
        pj.evaluate(table, pj.stage_costs(workload, SYSTEM, table)).step_time
    )
    code, out, _ = call(capsys, "--minibatch", 32, "--schedule", "chimera", "--link", "rendezvous")
    assert code == 0
    assert out.count("tuned") == 1
    assert "exhaustive search: the same" in out


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "--model needs --minibatch"),
    (["--minibatch", 8, "--schedule", "2f2b"], "unknown schedule '2f2b': known are gpipe"),
    (["--minibatch", 8, "--waves", 2], "schedule 1f1b takes no waves"),
    (["--minibatch", 9, "--schedule", "chimera"], "no microbatch size is legal for a minibatch of 9"),
    (["--minibatch", 8, "--tensor-parallel", 1], "no microbatch size fits: the smallest need is"),
])  # fmt: skip
def test_mistakes_are_one_line(capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_command_without_a_model_is_refused(capsys):
    assert run(["tune", "--workers", "4", "--stage-times", "F=1,B=2"]) == 2
    assert "tune needs --model" in capsys.readouterr().err


def test_without_optax_the_command_says_what_to_install(capsys, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[:2] == ["pipejax", "tuning"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pj, "tuning")
    monkeypatch.setitem(sys.modules, "optax", None)
    code, _, err = call(capsys, "--minibatch", 8)
    assert code == 2
    assert "error: tuning needs optax: pip install 'pipejax[tuning]'" in err
