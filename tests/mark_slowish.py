"""Add tests above 30 ms of CPU time to data/slowish.txt: of files changed since it was written."""

import argparse
import contextlib
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import pytest

import pipejax

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "data" / "slowish.txt"
LIMIT = 0.03  # [s]


def cpu_seconds():
    """Return the CPU time of this process and the children that it waited for [s]."""
    return sum(os.times()[:4])


def pytest_collection_finish():
    """Import all of the package: no test is slow because it is the first to import a part."""
    for module in pkgutil.walk_packages(pipejax.__path__, "pipejax."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    jax.clear_caches()
    begin = cpu_seconds()
    yield
    with open(os.environ["CPU_TIMES"], "a") as file:
        file.write(f"{cpu_seconds() - begin}\t{item.nodeid}\n")


def quick_times(files):
    """Run the tests of files that `make quick` runs; return the CPU time by test [s]."""
    with tempfile.NamedTemporaryFile("r") as file:
        environment = os.environ | {
            "CPU_TIMES": file.name,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mark_slowish", "--quick", *files]
        subprocess.run(command, env=environment, cwd=ROOT, check=False)
        rows = [line.rstrip("\n").partition("\t") for line in file]
    return {name: float(seconds) for seconds, _, name in rows}


def shortened(names, others):
    """Name a file or a function instead of its tests, where all of them are listed."""
    for cut in ("[", "::"):
        quick = {name.partition(cut)[0] for name in others}
        groups = defaultdict(set)
        for name in names:
            groups[name.partition(cut)[0]].add(name)
        names = set()
        for group, members in groups.items():
            names |= members if group in quick else {group}
    return names


def changed_files():
    """Return test files that were changed since the list was written."""

    def git(*words):
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).split()

    (commit,) = git("log", "-1", "--format=%H", "--", str(LIST))
    changed = git("diff", "--name-only", commit, "--", "tests")
    changed += git("ls-files", "--others", "--exclude-standard", "tests")
    return {name for name in changed if Path(name).match("tests/test_*.py")}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="test files, or `tests` for all")
    parser.add_argument("--anew", action="store_true", help="forget first what is listed of them")
    options = parser.parse_args()
    files = {*(options.files or changed_files())}
    listed = {name: name.partition("::")[0] for name in LIST.read_text().splitlines()}
    others = {name for name, file in listed.items() if (ROOT / file).exists()}
    if options.anew:
        others -= {name for name, file in listed.items() if files & {file, "tests"}}
    measured, slow = set(), set()
    while files:
        names = others | shortened(slow, measured - slow)
        LIST.write_text("".join(f"{name}\n" for name in sorted(names)))
        times, again = quick_times(files), quick_times(files)
        added = {name for name in times if min(times[name], again.get(name, 0)) > LIMIT}
        measured, slow = measured | times.keys(), slow | added
        files = {name.partition("::")[0] for name in added}


if __name__ == "__main__":
    main()
