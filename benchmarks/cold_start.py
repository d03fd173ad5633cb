"""Processor time of commands from cold: `python -m benchmarks.cold_start`.

Each command is a process of its own, as a person starts it, and its time is that of the user and
of the system. Beside them stand processes that only import what commands need in any case: NumPy,
the libraries of the command line, and JAX.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import prepare_output
from pipejax.base.files import write_file

TIMES = "-P 4 -M 8 -W F=10ms,B=20ms"
MODEL = "-s 1f1b -P 8 -M 32 -m llama3-8b -y a100 --minibatch 32"
IMPORTS = {
    "Python": "pass",
    "NumPy": "import numpy",
    "NumPy, cyclopts, rich, pydantic": "import numpy, cyclopts, rich.table",
    "JAX": "import jax.numpy",
}
COMMANDS = {
    "evaluate": f"evaluate -s 1f1b {TIMES}",
    "evaluate, a model": f"evaluate {MODEL}",
    "show": f"show -s 1f1b {TIMES}",
    "show, a page": f"show -s 1f1b {TIMES} --out page.html --force",
    "schedules": "schedules",
    "compare": f"compare -S gpipe,1f1b {TIMES}",
    "compare --diff": f"compare --diff -S 1f1b,gpipe {TIMES}",
    "export": f"export -s 1f1b {TIMES} --format torch-csv --out table.csv --force",
    "init": "init model --out model.json --force",
    "explain": f"explain {MODEL}",
    "sensitivity": f"sensitivity {MODEL}",
    "jitter": "jitter -S gpipe,1f1b -P 8 -M 32 -W F=1,B=2 --op lognormal:0.05",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/benchmark_cold_start.json"))
    arguments = parser.parse_args()
    prepare_output(arguments.out)  # before the work
    runs = {name: [sys.executable, "-c", text] for name, text in IMPORTS.items()}
    runs |= {
        name: [sys.executable, "-m", "pipejax", *line.split()] for name, line in COMMANDS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        # as installed: with compiled files, and with a cache of its own that the first round fills
        environment = {**os.environ, "PIPEJAX_CACHE": folder, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        rounds = [
            {name: measure_seconds(command, folder, environment) for name, command in runs.items()}
            for _ in track(range(1 + arguments.repeats), "starting", console=Console(stderr=True))
        ]
    first, *later = rounds
    result = {
        "first_seconds": first,
        "seconds": {
            name: float(np.median([times_by_name[name] for times_by_name in later]))
            for name in runs
        },
    }
    write_file(arguments.out, json.dumps(result, indent=1))
    grid = Table(
        title="processor time of a process [s], and how many times that of importing NumPy"
    )
    for heading in ("process", "first, nothing compiled", "later, median", "x NumPy"):
        grid.add_column(heading, justify="left" if heading == "process" else "right")
    for name, seconds in result["seconds"].items():
        times = seconds / result["seconds"]["NumPy"]
        grid.add_row(name, f"{first[name]:.2f}", f"{seconds:.2f}", f"{times:.1f}")
    Console().print(grid)


def measure_seconds(command, folder, environment):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
