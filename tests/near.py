"""Tests near a change: `make near` runs those that this file prints, `tests/mutate.py` uses the table.

A changed file of the package has the tests of the table and those that import it, any other file those
that import or name it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = (
    "tests/test_words.py",
    "tests/test_architecture.py",
    "tests/test_docs.py::test_every_public_name_is_in_the_reference",
    "tests/test_docs.py::test_a_page_has_every_key",
    "tests/test_docs.py::test_commands_and_options_that_a_page_mentions_exist",
)
# tests by path: a file has those of the longest prefix
TESTS = json.loads((ROOT / "tests" / "data" / "near.json").read_text())
FILES = {
    path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
    for folder in ("tests", "tests/papers")
    for path in sorted((ROOT / folder).glob("test_*.py"))
}


def get_tests(path):
    """Tests of a file: those of its longest prefix, those that import it, and its own examples."""
    prefix = max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)
    is_text = Path(path).suffix in (".py", ".md") and (ROOT / path).exists()
    examples = [path] if is_text and ">>>" in (ROOT / path).read_text() else []
    room, _, module = path.removesuffix(".py").replace("/", ".").rpartition(".")
    imports = re.compile(rf"(?m)^\s*from ({room}\.{module} import|{room} import .*\b{module}\b)")
    importers = [file for file in FILES.values() if imports.search((ROOT / file).read_text())]
    return [*examples, *importers, *(FILES[name] for name in TESTS[prefix].split())]


def matching_tests(pattern):
    """Test files that match a pattern, and those that import a helper that does."""
    tests = set()
    for path in (ROOT / "tests").rglob("*.py"):
        if not re.search(pattern, path.read_text()):
            continue
        is_test = path.name.startswith("test_")
        tests |= {str(path.relative_to(ROOT))} if is_test else helper_tests(path.stem)
    return tests & {*FILES.values()}


def helper_tests(module):
    return matching_tests(rf"(?m)^(from|import) {module}\b")


def near_tests(path):
    """Tests near a changed file: by the table, or those that import its folder or name the file."""
    file = Path(path)
    if any(path.startswith(prefix) for prefix in TESTS):
        return get_tests(path)
    if path in FILES.values():
        return [path]
    if file.suffix == ".py":
        is_helper = path.startswith("tests/")
        return helper_tests(file.stem if is_helper else str(file.parent).replace("/", r"\."))
    name = file.parts[2] if path.startswith("tests/data/") else file.name
    return matching_tests(f'["/]{re.escape(name)}')


def git(*words):
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else []


def changed_files():
    """Files changed since the branch left main, untracked ones too; of a clean main, its last commit."""
    if not git("rev-parse", "HEAD"):
        sys.exit(f"{ROOT} is no clone of git, which says what has changed: make test runs all")
    base = git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    untracked = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", *base) + untracked
    return changed or git("diff", "--name-only", "HEAD~1")


def main():
    tests = {*ALWAYS}
    for path in changed_files():
        near = sorted({*near_tests(path)})
        names = " ".join(Path(test).stem for test in near) or "no test, see make test"
        print(f"{path}: {names}", file=sys.stderr)
        tests.update(near)
    print(f"{len(tests)} files of tests; make quick is shorter than many of them", file=sys.stderr)
    print(*sorted(test for test in tests if test.partition("::")[0] not in tests - {test}))


if __name__ == "__main__":
    main()
