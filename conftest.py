"""The tests run stricter than users do: float64, no silent rank promotion, fixed seeds.

Examples in docstrings and documents run as users run them, in JAX's own float32.
"""

import gc
import importlib.util
import os
import subprocess
from pathlib import Path

# What the tests compile is kept, for the next run, the other workers and the processes that
# tests start. These must be in the environment before JAX is imported.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".pytest_cache" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Most of what the tests compile runs once: here machine code is not optimised, and fusions do
# not go through the slower of XLA's two emitters. XLA_FLAGS= in the environment runs the tests
# with what users compile, or where XLA knows a flag no longer.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest
import turns
from hypothesis import HealthCheck, Phase, core, settings
from jax._src import monitoring

STRICT = {"jax_enable_x64": True, "jax_numpy_rank_promotion": "raise"}
AS_USERS = {"jax_enable_x64": False, "jax_numpy_rank_promotion": "allow"}


def configure(options):
    for name, value in options.items():
        jax.config.update(name, value)


configure(STRICT)

_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=25, derandomize=True, **_quiet)
# other examples for each commit: see tests/turns.py
settings.register_profile("ci", max_examples=20, database=None, **_quiet)
settings.register_profile("nightly", max_examples=2000, **_quiet)
# for tests/mutate.py, to whom the smallest failing example is no better than the first
settings.register_profile(
    "first_failure", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


MOST_RESIDENT = 1.2e9  # bytes of a process above which it forgets what it compiled
# what is freed stays with the process, so it forgets again only when it has grown by this much more
GROWTH = 3e8
forgets_above = [MOST_RESIDENT]
LEFT_OUT = ("compiles", "solver", "process", "takes_turns", "slow")
collect_ignore = ["docs/examples"]  # notebooks: tests/test_docs.py runs them
if importlib.util.find_spec("torch") is None:  # they run in processes of `make test-runtimes`
    collect_ignore += ["pipejax/runtimes/gloo/process.py"]


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only what starts no compiler or solver")


def pytest_configure(config):
    drawn_anew = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
    if core.global_force_seed is None and not drawn_anew:  # none was given by --hypothesis-seed
        core.global_force_seed = turns.NUMBER
    if config.getoption("--quick"):
        os.environ.setdefault("EXAMPLES", "200")  # of the fuzzer


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"parts of grids and examples of TURN={turns.TURN}")


# first: it marks what an option then leaves out
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("takes_turns"):
            if not turns.is_now(*mark.args or [item.nodeid]):
                item.add_marker("slow")
    if not config.getoption("--quick"):
        return

    def is_quick(item):
        marked = any(item.get_closest_marker(name) for name in LEFT_OUT)
        return not marked and not isinstance(item, pytest.DoctestItem)

    config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
    items[:] = filter(is_quick, items)


def resident():
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Keep a worker small: two of them, and what they start, run on a machine of 8 GB."""
    if resident() > forgets_above[0]:
        jax.clear_caches()  # what is needed again comes from the cache on disk
        gc.collect()
        forgets_above[0] = max(MOST_RESIDENT, resident() + GROWTH)


@pytest.fixture(autouse=True)
def quick_is_quick(request, monkeypatch):
    """Under --quick fail a test that compiles, solves or starts a process without its mark."""
    if not request.config.getoption("--quick"):
        yield
        return
    from ortools.sat.python import cp_model

    done = set()

    def recording(mark, function):
        return lambda *args, **kwargs: done.add(mark) or function(*args, **kwargs)

    def listen(event, *_, **__):
        if "backend_compile" in event:
            done.add("compiles")

    monkeypatch.setattr(subprocess, "Popen", recording("process", subprocess.Popen))
    monkeypatch.setattr(cp_model.CpSolver, "solve", recording("solver", cp_model.CpSolver.solve))
    monitoring.register_event_duration_secs_listener(listen)
    jax.clear_caches()  # or only the first test of those that need a program would be found
    yield
    monitoring.unregister_event_duration_listener(listen)
    assert not done, f"it lacks the marks {sorted(done)}"


@pytest.fixture(autouse=True)
def as_users(request):
    """Run examples with JAX's defaults, which is what a reader who types them has."""
    is_example = request.node.get_closest_marker("example") is not None
    if not is_example and not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    configure(AS_USERS)
    yield
    configure(STRICT)
