"""A process that meets many programs lets go of what was compiled for the first ones."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pipejax as pj
from pipejax.base import compiled
from pipejax.engine import recurrence

SIZES = (3, 4, 5, 6)


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
