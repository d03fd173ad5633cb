"""Commands that compile nothing start without JAX; our trees are registered once it is there."""

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipejax as pj
from pipejax.base import compiled, files, jax_on_demand
from pipejax.base.progress import merge_progress
from pipejax.cli import process
from pipejax.costs.precision import float_type
from pipejax.costs.system.parts import Host, NarrowPeaks
from pipejax.engine import recurrence

DATA = Path(__file__).parent / "data"
COMMANDS = (DATA / "without_jax.txt").read_text().splitlines()
ALONE = (DATA / "program_without_jax.txt").read_text()
SIZES = (3, 4, 5, 6)


def test_commands_that_compile_nothing_need_no_jax(tmp_path):
    how = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", ALONE, json.dumps(COMMANDS)], **how)
    codes = json.loads(done.stderr.splitlines()[-1])
    assert dict(zip(COMMANDS, codes, strict=True)) == dict.fromkeys(COMMANDS, 0), done.stderr


LATE = (DATA / "program_before_jax.txt").read_text()


@pytest.mark.parametrize("deferred", ["", "deferred"])
def test_jax_knows_records_that_were_made_before_it(deferred):
    code = LATE.format(deferred=deferred)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "15.0\n", done.stderr


@pytest.fixture
def on_host(monkeypatch):
    """As before JAX was imported."""
    monkeypatch.setattr(jax_on_demand, "is_loaded", lambda: False)


def records():
    system = pj.load_system("b300")
    table = pj.schedules.build("chimera", num_workers=4, num_microbatches=8)
    tree = {"b": (1.0, None, [2.0, 3.0]), "a": pj.Costs(forward=np.ones(4), backward=2.0)}
    return {
        "system": system,
        "model": pj.load_model("deepseek-v3"),
        "program": pj.lower(table),
        "nothing": None,
        "number": 3.0,
        "plain": tree,
        "of a tuple with names": NarrowPeaks(1.0, 2.0),
        "host": Host(1.0),
    }


def same(first, second):
    return type(first) is type(second) and np.array_equal(first, second)


@pytest.mark.parametrize("name", records())
def test_trees_are_walked_as_jax_walks_them(name, on_host):
    tree = records()[name]
    paths = jax.tree_util.tree_leaves_with_path(tree)
    texts = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    last = [text.rpartition(".")[2] for text in texts]
    assert all(map(same, jax_on_demand.leaves(tree), jax.tree.leaves(tree)))
    assert [leaf_name for leaf_name, _ in jax_on_demand.named_leaves(tree)] == last
    ours = jax_on_demand.mapped(lambda first, second: np.add(first, second), tree, tree)
    theirs = jax.tree.map(lambda first, second: np.add(first, second), tree, tree)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert all(map(same, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def test_trees_of_different_forms_are_not_mapped_together(on_host):
    with pytest.raises(ValueError, match=r"one has the parts \(0, 1\), another is \[1\.0\]"):
        jax_on_demand.mapped(lambda first, second: first, [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="another is 3"):
        jax_on_demand.mapped(lambda first, second: first, {"a": 1.0}, 3)


NUMBERS = (
    *(1, 1.0, True, np.float64(1), np.float32(1), np.int64(1)),
    *(np.ones(2, kind) for kind in ("f2", "f4", "f8", "i1", "i8", "u4", "?")),
    *(jnp.ones(2, kind) for kind in ("bfloat16", "float16", "float32", "int32")),
    jnp.asarray(1.0),
)


def test_the_type_of_numbers_is_that_of_jax():
    for count in (1, 2, 3):
        for values in itertools.combinations(NUMBERS, count):
            with jax.enable_x64(True):
                result = jnp.promote_types(jnp.result_type(float, *values), np.float32)
            assert float_type(*values) == result, values


class Config:
    """Configuration of JAX in a process."""

    def __init__(self, folder=None):
        self.jax_compilation_cache_dir = folder

    def update(self, name, value):
        setattr(self, name, value)


@pytest.mark.parametrize("case", ["kept", "elsewhere", "no folder", "no filelock"])
def test_compiled_programs_are_kept_where_they_can_be(case, tmp_path, monkeypatch):
    config = Config("theirs" if case == "elsewhere" else None)
    monkeypatch.setattr(process, "jax", SimpleNamespace(config=config))
    monkeypatch.setenv(files.CACHE, "/proc/x" if case == "no folder" else str(tmp_path))
    if case == "no filelock":
        monkeypatch.setitem(sys.modules, "filelock", None)
    process._keep_compiled()
    expected = {"kept": str(tmp_path / "compiled"), "elsewhere": "theirs"}.get(case)
    assert config.jax_compilation_cache_dir == expected
    assert hasattr(config, "jax_compilation_cache_max_size") == (case == "kept")


CACHED = """
import sys
sys.argv[1:] = "plan -m llama3-8b -y a100 --gpus 2 --minibatch 2 -f csv".split()
from pipejax.cli import main
main()
"""


@pytest.mark.slow
def test_processes_share_a_cold_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(files.CACHE, str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    start = [sys.executable, "-c", CACHED]
    for _ in range(2):  # cold, then warm
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs = [subprocess.Popen(start, **streams) for _ in range(4)]
        message = [run.communicate() for run in runs]
        assert {run.returncode for run in runs} == {0}, message
        assert len({out for out, _ in message}) == 1
        assert {err for _, err in message} == {""}
        remaining = sorted(file.name for file in (tmp_path / "compiled").glob("*-cache"))
        assert remaining


# a process that meets many programs lets go of what was compiled for the first ones
def gradient(num_microbatches):
    table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=num_microbatches)
    program = pj.lower(table)
    costs = pj.Costs(forward=[1.0, 2.0], backward=[3.0, 4.0], transmit=0.5)
    value = float(pj.makespan(program, costs))
    return value, jax.grad(lambda costs: pj.makespan(program, costs))(costs)


def test_programs_are_let_go_where_maps_are_many(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_MAPS", 0)
    monkeypatch.setattr(compiled, "CHECK_INTERVAL", 1)
    recurrence._makespan.clear_cache()
    result = [gradient(count) for count in SIZES]
    assert recurrence._makespan._cache_size() <= 1
    for count, (value, slopes) in zip(SIZES, result, strict=True):  # 2 + 1 ways through the pipe
        assert value == 1 + 0.5 + 2 * count + 4 * count + 0.5 + 3
        assert [int(x) for x in (*slopes.forward, *slopes.backward)] == [1, count, 1, count]


def test_programs_stay_where_maps_are_few(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_MAPS", sys.maxsize)
    monkeypatch.setattr(compiled, "CHECK_INTERVAL", 1)
    recurrence._makespan.clear_cache()
    for count in SIZES:
        gradient(count)
    assert recurrence._makespan._cache_size() == len(SIZES)


def test_compilations_are_counted_where_the_system_tells_no_maps(monkeypatch, tmp_path):
    assert compiled._count_maps(tmp_path / "none") is None
    monkeypatch.setattr(compiled, "_count_maps", lambda: None)
    heard = compiled._Compilations()
    heard.functions.append(dropped := jax.jit(lambda x: x + 1.0))
    dropped(1.0)
    for _ in range(compiled.MAX_COMPILATIONS + compiled.CHECK_INTERVAL):
        heard.listen(compiled._COMPILED, 0.1)
        heard.listen("another event", 0.1)
    assert dropped._cache_size() == 0


def test_time_of_compiling_is_counted_once(monkeypatch):
    """A trace holds those of its parts, which end before it; time before a moment is left out."""
    heard = compiled._Compilations()
    monkeypatch.setattr(compiled, "_compilations", heard)
    for now, duration in ((5.0, 2.0), (11.0, 0.5), (12.0, 1.0), (13.0, 3.0), (20.0, 4.0)):
        monkeypatch.setattr(compiled.time, "perf_counter", lambda now=now: now)
        heard.listen("/jax/core/compile/jaxpr_trace_duration", duration)
        heard.listen("/jax/another", 100.0)
    assert heard.steps == [(3.0, 2.0), (10.0, 3.0), (16.0, 4.0)]
    assert compiled.seconds_compiling(9.0) == 7.0


def test_a_sweep_says_what_it_compiled(tmp_path, answer):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'schedules = "1f1b"\nworkers = 2\nminibatch = 6\nmicrobatch_size = [1, 2]\n'
        'models = "tabular-128l"\nsystems = "h100"\n'
    )
    result = answer("sweep", "run", grid, "--out", tmp_path / "out.zarr")
    assert 0 <= result["compile_seconds"] <= result["seconds"]
    assert result["points_per_second"] == 2 / result["seconds"]


@pytest.mark.slow
def test_two_hundred_programs_fit_into_a_process():
    process = Path(__file__).parent / "long_process.py"
    ran = subprocess.run([sys.executable, process, "200"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    maps, megabytes = np.array([line.split()[1:] for line in ran.stdout.splitlines()], int).T
    assert maps.max() < 8000
    assert megabytes.max() < 2000


# jobs in threads of their own: their news, their errors, and how they end
def test_news_of_all_jobs_come_in_their_order():
    def job(first):
        return lambda tell: [tell(first + k) for k in range(5)]

    message = list(merge_progress([job(0), job(100)], stop=lambda: None))
    assert sorted(message) == [*range(5), *range(100, 105)]
    assert [news for news in message if news < 100] == [*range(5)]


def test_a_job_goes_on_when_the_next_news_is_asked_for():
    built = []

    def job(tell):
        for number in range(3):
            built.append(number)
            tell(number)

    news = merge_progress([job], stop=lambda: None)
    for number in range(3):
        assert next(news) == number
        time.sleep(0.05)  # in which it could do more
        assert built == [*range(number + 1)]
    assert list(news) == []


def test_an_error_of_a_job_is_raised_and_ends_the_others():
    over = threading.Event()

    def fails(tell):
        tell(1)
        raise ValueError("no such thing")

    news = merge_progress([fails, lambda tell: over.wait()], over.set)
    assert next(news) == 1
    with pytest.raises(ValueError, match="no such thing"):
        next(news)
    assert over.is_set()


def test_closing_stops_what_begins_late_too():
    begun, stops = threading.Event(), []

    def job(tell):
        tell("begun")
        begun.wait()  # a stop before now is not heard

    def stop():
        stops.append(True)
        if len(stops) == 3:
            begun.set()

    news = merge_progress([job], stop)
    assert next(news) == "begun"
    news.close()
    assert len(stops) >= 3
