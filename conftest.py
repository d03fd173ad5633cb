"""The tests run stricter than users do: float64, no silent rank promotion, fixed seeds.

Examples in docstrings and documents run as users run them, in JAX's own float32.
"""

import gc
import importlib.util
import os
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
from hypothesis import HealthCheck, settings

STRICT = {"jax_enable_x64": True, "jax_numpy_rank_promotion": "raise"}
AS_USERS = {"jax_enable_x64": False, "jax_numpy_rank_promotion": "allow"}


def configure(options):
    for name, value in options.items():
        jax.config.update(name, value)


configure(STRICT)

_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=20, derandomize=True, **_quiet)
settings.register_profile("nightly", max_examples=2000, **_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

MOST_RESIDENT = 1.2e9  # bytes of a process above which it forgets what it compiled
# what is freed stays with the process, so it forgets again only when it has grown by this much more
GROWTH = 3e8
forgets_above = [MOST_RESIDENT]
collect_ignore = ["docs/examples"]  # notebooks: tests/test_docs.py runs them
if importlib.util.find_spec("torch") is None:  # they run in processes of `make test-runtimes`
    collect_ignore += ["pipejax/runtimes/gloo/process.py"]


# tests above 30 ms of CPU time, which `python tests/mark_slowish.py` measures
SLOWISH = Path(__file__).parent / "tests" / "data" / "slowish.txt"


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only tests of a few milliseconds")


def pytest_configure(config):
    if config.getoption("--quick"):
        os.environ.setdefault("EXAMPLES", "200")  # of the fuzzer


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--quick"):
        return
    slowish = set(SLOWISH.read_text().splitlines())

    def is_quick(item):
        names = {item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]}
        is_slow = item.get_closest_marker("slow") or not slowish.isdisjoint(names)
        return not is_slow and not isinstance(item, pytest.DoctestItem)

    config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
    items[:] = filter(is_quick, items)


# The collector of cycles walks all objects that live, most of which are modules and tests that
# stay: it rests until they are collected, and does not look at them later.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


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
def as_users(request):
    """Run examples with JAX's defaults, which is what a reader who types them has."""
    is_example = request.node.get_closest_marker("example") is not None
    if not is_example and not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    configure(AS_USERS)
    yield
    configure(STRICT)
