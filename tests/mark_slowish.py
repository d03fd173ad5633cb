"""Write data/slowish.txt: tests above 30 ms of CPU time (`--anew` forgets the list first)."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import jax
import pytest

LIST = Path(__file__).parent / "data" / "slowish.txt"
LIMIT = 0.03  # [s]


def cpu_seconds():
    """Return the CPU time of this process and the children that it waited for [s]."""
    return sum(os.times()[:4])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    jax.clear_caches()
    begin = cpu_seconds()
    yield
    with open(os.environ["CPU_TIMES"], "a") as file:
        file.write(f"{cpu_seconds() - begin}\t{item.nodeid}\n")


def quick_times(arguments):
    """Run the tests of `make quick`; return the CPU time by test [s]."""
    with tempfile.NamedTemporaryFile("r") as file:
        environment = os.environ | {
            "CPU_TIMES": file.name,
            "PYTHONPATH": str(LIST.parents[1]),
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mark_slowish", "--quick", "tests"]
        subprocess.run([*command, *arguments], env=environment, check=False)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="forget the present list")
    options, arguments = parser.parse_known_args()
    listed = set() if options.anew else set(LIST.read_text().splitlines())
    while True:
        LIST.write_text("".join(f"{name}\n" for name in sorted(listed)))
        times, again = quick_times(arguments), quick_times(arguments)
        slow = {name for name in times if min(times[name], again.get(name, 0)) > LIMIT}
        if not slow:
            return
        listed = shortened(listed | slow, times.keys() - slow)


if __name__ == "__main__":
    main()
