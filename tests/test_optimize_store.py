"""The store of solved problems: what it answers, and that nothing wrong in it is believed."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from certified import check_solution, get_first

import pipejax as pj
from pipejax.base.files import DRAFT
from pipejax.checker.verify import certificate_checksum
from pipejax.search.schedule import initial_plans
from pipejax.search.schedule.problem import build_problem
from pipejax.search.schedule.store import SolvedProblems, StoreWarning, prover

EXACT = {"forward": 10.0, "input_grad": 10.0, "weight_grad": 10.0}
HARD = {"forward": 10.0, "input_grad": 11.0, "weight_grad": 9.0, "transfer": 0.7}
BEGIN = f"""
import sys, pipejax as pj
table = pj.schedules.build("1f1b", num_workers=6, num_microbatches=16)
costs = pj.Costs.uniform(table, **{HARD})
"""
WRITE = (
    BEGIN
    + """
from pipejax.search.schedule.problem import build_problem
from pipejax.search.schedule.store import SolvedProblems
problem, store = build_problem(table, costs, memory_limit=int(sys.argv[2])), SolvedProblems(sys.argv[1])
for bound in range(1, 10000):
    store.put(problem, table, bound, seconds=1.0, source="1f1b")
"""
)


def small(limit=3, offload=None, scale=1.0, **times):
    """A table of 4 workers and 8 microbatches, its costs, and how it is to be optimised."""
    table = pj.schedules.build("1f1b", num_workers=4, num_microbatches=8)
    seconds = {name: scale * time for name, time in ((times or EXACT) | {}).items()}
    host = {} if offload is None else {"offload": scale * offload}
    costs = pj.Costs.uniform(table, **seconds, **host)
    return table, costs, {"memory_limit": limit, "offload": offload is not None}


def best(case, store, seconds=20.0):
    table, costs, options = case
    last = pj.optimize(table, costs, **options, time_limit=seconds, store=store)
    check_solution(last, costs, **options)
    return last


def make_problem(case):
    table, costs, options = case
    return build_problem(table, costs, **options)


def put_table(store, case, name, bound=1, **options):
    """Keep a schedule of the literature as what was found; return its makespan."""
    _, costs, _ = case
    other = pj.schedules.build(name, num_workers=4, num_microbatches=8, **options)
    store.put(make_problem(case), other, bound, seconds=1.0, source=name)
    return pj.evaluate(other, costs).makespan


@pytest.fixture(autouse=True)
def few_baselines(monkeypatch):
    """Compare with the given schedule only: the others take longer than the store."""
    monkeypatch.setattr(
        initial_plans, "baseline_tables", lambda problem, table: iter([("1f1b", table)])
    )


@pytest.fixture
def store(tmp_path):
    return SolvedProblems(tmp_path / "store")


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    store = SolvedProblems(tmp_path_factory.mktemp("solved"))
    put_table(store, small(), "zero-bubble", bound=31, memory_limit=3)
    (path,) = store.path.glob("*.json")
    return path


def test_the_same_problem_is_answered_at_once_in_any_unit_of_time(store):
    first = best(small(), store)
    assert (first.value, first.best.status) == (310.0, "optimal")
    for scale in (1.0, 1e-3, 0.3, 7e4):
        solution = pj.optimize(*small(scale=scale)[:2], memory_limit=3, store=store)
        assert (solution.best.source, solution.best.status) == ("store", "optimal")
        assert solution.value == pytest.approx(310 * scale, rel=1e-12)
    assert len(list(store.path.glob("*.json"))) == 1
    again = best(small(), store)
    assert list(again.best.table.rows()) == list(first.best.table.rows())
    assert again.baselines == {"1f1b": None}  # is looked at in any case


def test_default_folder(monkeypatch):
    monkeypatch.setenv("PIPEJAX_CACHE", "/here")
    assert str(SolvedProblems().path) == "/here"
    monkeypatch.delenv("PIPEJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(SolvedProblems().path) == "/caches/pipejax/optimize"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert SolvedProblems().path.parts[-3:] == (".cache", "pipejax", "optimize")


def test_a_search_that_was_ended_goes_on_from_its_best(store):
    table, costs, options = small(**HARD)
    first = get_first(table, costs, **options, store=store)
    entry = store.get(make_problem((table, costs, options)))
    problem = make_problem((table, costs, options))
    assert entry.objective * problem.unit == pytest.approx(first.value)
    assert entry.proven_bound * problem.unit == pytest.approx(first.lower_bound)
    again = get_first(table, costs, **options, store=store)
    assert (again.best.source, again.value) == ("store", first.value)


def test_the_shorter_schedule_and_the_higher_bound_stay(store):
    case = small(8, **HARD)
    put_table(store, case, "zb-h1", bound=5)
    put_table(store, case, "gpipe", bound=7)
    put_table(store, case, "1f1b", bound=6)
    entry = store.get(make_problem(case))
    assert (entry.source, entry.proven_bound) == ("zb-h1", 7)
    assert entry.seconds == 2.0
    with pytest.raises(ValueError, match="bound 10000 is above the objective"):
        put_table(store, case, "gpipe", bound=10000)
    with pytest.raises(ValueError, match="takes 24 of 9 parts of the memory of worker 0"):
        put_table(store, small(3, **HARD), "gpipe")


def test_an_entry_is_a_certificate(store):
    put_table(store, small(4, offload=20.0), "zb-h1", bound=20)
    put_table(store, small(8, **HARD), "gpipe", bound=5)
    (_, costs, options) = case = small(4, **HARD)
    costs = dataclasses.replace(costs, all_reduce=0.5, update=0.25)
    problem = build_problem(case[0], costs, **options, link="queued")
    store.put(problem, case[0], 5, seconds=1.0, source="1f1b")
    read = store.get(problem).problem
    names = {field.name for field in dataclasses.fields(read)} - {"unit", "exact"}
    for field in names:
        assert np.array_equal(getattr(read, field), getattr(problem, field)), field
    texts = [path.read_text() for path in store.path.glob("*.json")]
    assert [pj.verify(json.loads(text)).problems for text in texts] == [()] * 3
    for change, problem in (
        (changed("proof", "starts", "0F1", to=5), "starts: 0F1: claimed 5, derived"),
        (changed("claim", "value", to=10**6), "value: claimed 1000000, derived"),
        (changed("claim", "limits", 0, to=1), "limit: worker 0: claimed 1, derived"),
        (changed("claim", "lower_bounds", 0, "value", to=10**6), "which was reached"),
        (changed("proof", "source", to="somebody"), "checksum: claimed"),
    ):
        for text in texts:
            verdict = pj.verify(change(text, json.loads(text)))
            assert problem in " ".join(map(str, verdict.problems))


def test_a_bound_that_other_code_proved_is_not_taken_over(store, solved):
    data = json.loads(solved.read_text())
    data["proof"]["prover"] = prover() | {"ortools": "9.1"}
    store.path.mkdir()
    (store.path / solved.name).write_text(json.dumps(summed(data)))
    entry = store.get(make_problem(small()))
    assert (entry.objective, entry.proven_bound) == (31, 0)
    result = best(small(), store)
    assert (result.best.source, result.best.status) == ("store", "optimal")  # proved again
    assert store.get(make_problem(small())).proven_bound == 31


def changed(*where, to):
    def change(text, data):
        inner = data
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = to(inner[where[-1]]) if callable(to) else to
        return data

    return change


def summed(data):
    if "proof" in data:
        data["proof"]["checksum"] = certificate_checksum(data)
    return data


ONE_BY_ONE = [[f"{stage}{phase}0" for phase in "FIW"] for stage in range(4)]
DAMAGES = {
    "cut short": lambda text, data: text[: len(text) // 2],
    "zeros": lambda text, data: "\0" * len(text),
    "one digit": lambda text, data: text.replace('"value": 31}', '"value": 30}'),
    "no object": lambda text, data: "[1]",
    "nested": lambda text, data: "[" * 100000,
    "another file": lambda text, data: '{"format": "pipejax-table", "version": 1}',
    "no schedule": changed("table", "rows", to=lambda rows: [row[::-1] for row in rows]),
    "another schedule": changed("table", "rows", to=ONE_BY_ONE),
    "too much memory": changed("claim", "limits", to=[8] * 4),
    "bound above it": changed("claim", "lower_bounds", 0, "value", to=32),
    "ragged": changed("costs", "seconds", "latency", to=[[[0], [0, 0]]]),
    "no problem": changed("costs", "seconds", to={}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_right_is_told_and_not_used(store, solved, damage):
    text = solved.read_text()
    damaged = DAMAGES[damage](text, json.loads(text))
    if isinstance(damaged, dict):  # by someone who knows about checksums
        damaged = json.dumps(summed(damaged))
    assert damaged != text
    store.path.mkdir()
    path = store.path / solved.name
    path.write_text(damaged)
    with pytest.warns(StoreWarning, match=f"{path.name} is not used: ..."):
        assert store.get(make_problem(small())) is None
    assert path.read_text() == damaged


def test_a_damaged_file_does_not_keep_an_answer_back(store, solved):
    store.path.mkdir()
    path = store.path / solved.name
    path.write_text("{")
    with pytest.warns(StoreWarning, match="is not used"):
        result = best(small(), store, 0.001)
    assert result.value == 310.0
    assert store.get(make_problem(small())).objective == 31


def test_a_folder_that_cannot_be_written_does_not_keep_an_answer_back(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(StoreWarning, match="is not used"):
        assert best(small(), tmp_path / "file", 0.001).value == 310.0
    (tmp_path / f"{make_problem(small()).key}.json").mkdir()
    with pytest.warns(StoreWarning, match="is not used"):
        assert best(small(), tmp_path, 0.001).value == 310.0


def wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def big(limit):
    table = pj.schedules.build("1f1b", num_workers=6, num_microbatches=16)
    return build_problem(table, pj.Costs.uniform(table, **HARD), memory_limit=limit)


def test_two_processes_that_write_and_one_that_is_killed(store):
    """A reader sees a whole entry at any moment, and a bound that only rises."""
    line = [sys.executable, "-c", WRITE, str(store.path), "6"]
    processes = [subprocess.Popen(line) for _ in range(2)]
    problem, bounds = big(6), [0]
    try:
        wait_for(lambda: store.get(problem) is not None)
        for victim in processes:
            seen, until = len({*bounds}), time.monotonic() + 60
            # until so many bounds were seen: a machine under load writes few in a second
            while len({*bounds}) < seen + 6:
                assert time.monotonic() < until
                bounds.append(store.get(problem).proven_bound)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert bounds == sorted(bounds)
    assert len({*bounds}) > 5
    table = pj.schedules.build("1f1b", num_workers=6, num_microbatches=16)
    store.put(problem, table, bounds[-1] + 1000, seconds=1.0, source="1f1b")  # no lock is left
    assert store.get(problem).proven_bound == bounds[-1] + 1000
    assert not list(store.path.glob(f"*{DRAFT}*"))
