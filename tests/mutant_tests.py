"""A plugin of pytest for tests/mutate.py: which tests a mutant meets, cheapest first, until one fails.

`MUTANT` in the environment names a file of JSON with what earlier runs have learned: seconds by
test, tests that have failed with a change before. What this run has learned goes into it.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

COSTLY = ("compiles", "solver", "process")
UNKNOWN = {True: 1.5, False: 0.2}  # seconds of a test that has not run yet, if it is costly or not
STATE = Path(os.environ["MUTANT"])
HANGS = 120.0  # seconds of the processor, of one test: the process ends by a signal
BUDGET = float(os.environ.get("MUTANT_SECONDS", "inf"))  # of the processor, for all tests
known = json.loads(STATE.read_text()) if STATE.exists() else {}
seconds, finders = known.setdefault("seconds", {}), known.setdefault("finders", {})
said = {"failed": "", "left": 0, "ran": 0}


def expected(item):
    """Seconds that a test takes; one that has found a change before is worth more."""
    costly = any(item.get_closest_marker(name) for name in COSTLY)
    return seconds.get(item.nodeid, UNKNOWN[costly]) / (1 + 4 * finders.get(item.nodeid, 0))


def pytest_collectreport(report):
    if report.failed:
        said["failed"] = "collection"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = sorted((item for item in items if item not in slow), key=expected)
    said["left"] = len(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Run a test, and once more if it fails: what depends on the load is no finding."""
    if time.process_time() > BUDGET:
        item.session.shouldstop = "the budget is spent"
        return True
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, HANGS)
    for _ in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not any(report.failed for report in reports):
            seconds[item.nodeid] = round(time.process_time() - began, 3)
            break
    else:
        said["failed"] = item.nodeid
        item.session.shouldstop = "found"
    said["left"] -= 1
    said["ran"] += 1
    return True


def pytest_sessionfinish():
    STATE.write_text(json.dumps({"seconds": seconds, "finders": finders, "said": said}))
