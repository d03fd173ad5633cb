"""A plugin of pytest for tests/mutate.py: the tests of some files meet one mutant after the other.

The tests are collected once; each mutant has a process of its own, forked from there, in which the
functions of the changed file have the code of the changed source. It runs the tests, those that
have found something first, then the cheapest, until one fails. `MUTANTS` in the environment names
a folder: `drawn.json` holds the mutants, `learned.json` what earlier runs have learned, and a line
of `found.jsonl` says what came of one.
"""

import gc
import json
import os
import signal
import time
import traceback
import types
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

COSTLY = ("compiles", "solver", "process")
UNKNOWN = {True: 1.5, False: 0.2}  # seconds of a test that has not run yet, if it is costly or not
HANGS = 120.0  # seconds of the processor, of one test: the process ends by a signal
FOLDER = Path(os.environ.get("MUTANTS", ""))  # doctests import it without
REPORT, LEARNED, FOUND = (FOLDER / f for f in ("report.json", "learned.json", "found.jsonl"))
learned = {"seconds": {}, "finders": {}, "failing": []}  # the last: without any change
learned |= json.loads(LEARNED.read_text()) if LEARNED.exists() else {}
seconds, finders, failing = learned["seconds"], learned["finders"], learned["failing"]


def expected(item):
    """Seconds that a test takes; one that has found a change before is worth more."""
    costly = any(item.get_closest_marker(name) for name in COSTLY)
    return seconds.get(item.nodeid, UNKNOWN[costly]) / (1 + 4 * finders.get(item.nodeid, 0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Let each mutant meet the tests."""
    drawn, passing = json.loads((FOLDER / "drawn.json").read_text()), set()
    for mutant in drawn:
        if session.testsfailed:
            assert mutant["is_there"], "the tests cannot be collected"
            said = {"failed": "collection", "left": 0}
        else:
            said = finder(session.items, mutant, passing)
        finders[said["failed"]] = finders.get(said["failed"], 0) + 1
        LEARNED.write_text(json.dumps(learned))
        with FOUND.open("a") as file:
            print(json.dumps([mutant["key"], said["failed"], said["left"]]), file=file)
    return True


def finder(items, mutant, passing):
    """What fails with a mutant and does not without it."""
    while True:
        tried = [item for item in items if item.nodeid not in failing]
        said = forked(mutant, sorted(tried, key=expected))
        named = [item for item in items if item.nodeid == said["failed"]]
        if not named or said["failed"] in passing or mutant["is_there"]:
            return said
        if forked(None, named)["failed"]:
            failing.append(said["failed"])
        else:
            passing.add(said["failed"])


def forked(mutant, items):
    """Run tests in a process of their own, with a mutant or without: what failed, what is left."""
    REPORT.unlink(missing_ok=True)
    changes = mutant and not mutant["is_there"]
    path = Path(mutant["path"]) if changes else None
    source = path.read_text() if changes else ""
    with warnings.catch_warnings(action="ignore"):  # JAX has no threads yet
        process = os.fork()
    if not process:
        code = 1
        try:
            if changes:
                change(str(path.resolve()), source, mutant["text"])
                path.write_text(mutant["text"])  # for processes that tests start
            REPORT.write_text(json.dumps(first_failure(items, mutant and mutant["seconds"])))
            code = 0
        except BaseException:
            (FOLDER / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if changes:
        path.write_text(source)
    if os.WIFSIGNALED(status):
        return {
            "failed": "timeout" if os.WTERMSIG(status) == signal.SIGPROF else "crash",
            "left": 0,
        }
    assert status == 0, (FOLDER / "error.txt").read_text()
    said = json.loads(REPORT.read_text())
    seconds.update(said.pop("seconds"))
    return said


def change(name, source, text):
    """Give the functions of a file the code of another source, wherever they are held."""
    codes = {}

    def walk(*pair):
        inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in pair]
        for one, other in zip(*inner, strict=True):
            codes[one] = other
            walk(one, other)

    walk(*(compile(each, name, "exec", dont_inherit=True) for each in (source, text)))
    held = [f for f in gc.get_objects() if isinstance(f, types.FunctionType)]
    held = [f for f in held if f.__code__.co_filename == name]
    assert held, f"no function of {name} was imported"
    for function in held:
        function.__code__ = codes[function.__code__]


def first_failure(items, budget):
    """Run tests until one fails, and once more to be sure: what depends on the load is no finding."""
    took, began = {}, time.process_time()
    for number, (item, after) in enumerate(pairwise([*items, None])):
        if budget and time.process_time() - began > budget:
            return {"failed": "", "left": len(items) - number, "seconds": took}
        for _ in range(2):
            signal.setitimer(signal.ITIMER_PROF, HANGS)
            start = time.process_time()
            reports = runtestprotocol(item, nextitem=after, log=False)
            if not any(report.failed for report in reports):
                took[item.nodeid] = round(time.process_time() - start, 3)
                break
        else:
            return {"failed": item.nodeid, "left": 0, "seconds": took}
    return {"failed": "", "left": 0, "seconds": took}
