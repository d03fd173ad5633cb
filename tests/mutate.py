"""Mutation test: cosmic-ray changes the package, and the tests of the changed file run.

    pip install -e '.[mutate]'
    python tests/mutate.py pipejax/engine --count 20       # 20 changes of each file
    python tests/mutate.py pipejax/base/checks.py --seed 2  # others

No part of `make`: a change takes as long as its tests. They run in a clone of the last commit in
--folder, where a second call goes on. The changes that no test finds are printed.
"""

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from near import get_tests

ROOT = Path(__file__).parent.parent
# arithmetic, comparisons, numbers, booleans: not annotations, decorators and what is raised
OPERATORS = re.compile(
    ".*(BinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul)|ComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|"
    "GtE_Gt|Eq_NotEq|NotEq_Eq)|NumberReplacer|TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd)"
)
CONFIG = """[cosmic-ray]
module-path = "{path}"
timeout = 600.0
excluded-modules = []
test-command = "{python} -m pytest -q -x --tb=no -p no:cacheprovider -m 'not slow' {tests}"
distributor.name = "local"
"""


def survivors(path, folder, count, seed):
    """Let changes of a file meet its tests; yield those that no test finds."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    config, session = (folder / f"{path.replace('/', '.')}.{end}" for end in ("toml", "sqlite"))
    tests = " ".join(get_tests(path))
    config.write_text(CONFIG.format(path=path, python=sys.executable, tests=tests))
    clone = folder / "clone"
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "first_failure", "EXAMPLES": "300"}
    if not session.exists():
        start = [sys.executable, "-m", "cosmic_ray.cli", "init", config, session]
        subprocess.run(start, cwd=clone, check=True)
        with use_db(str(session)) as work:
            items = list(work.pending_work_items)
            useful = [item for item in items if OPERATORS.match(item.mutations[0].operator_name)]
            sample = random.Random(seed).sample(useful, min(count, len(useful)))
            jobs = {item.job_id for item in sample}
            for item in items:
                if item.job_id not in jobs:
                    work.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
    command = [sys.executable, "-m", "cosmic_ray.cli", "exec", config, session]
    subprocess.run(command, cwd=clone, env=environment, check=True)
    with use_db(str(session)) as work:
        for _, result in work.completed_work_items:
            if result.test_outcome == TestOutcome.SURVIVED:
                yield result.diff


def main():
    parser = argparse.ArgumentParser(description="change the package, see whether a test fails")
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders of the package")
    parser.add_argument("--count", type=int, default=5, help="changes of a file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "results" / "mutants")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if not (folder / "clone").exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
    for arguments in options.paths:
        for path in [arguments] if arguments.is_file() else sorted(arguments.rglob("*.py")):
            for diff in survivors(str(path), folder, options.count, options.seed):
                print(diff)


if __name__ == "__main__":
    main()
