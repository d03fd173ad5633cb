"""docs/extending.md: the worked examples, applied to a copy of the package, do what the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
MOST_FILES = 4  # that a change touches, besides the checker and the reference
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", PAGE, re.M))
WORKED = [title for title, text in SECTIONS.items() if "```diff" in text]


def blocks(section, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", SECTIONS[section], re.M | re.S)


def changes(section):
    """Lines to add, by file: (line that they stand behind, or None for a new file, lines)."""
    result = {}
    for line in "".join(blocks(section, "diff")).splitlines():
        if line.startswith("--- "):
            result[line[4:]] = hunks = []
        elif line.startswith("+"):
            if not hunks:
                hunks.append((None, []))
            hunks[-1][1].append(line[1:])
        else:
            hunks.append((line[1:], []))
    return result


def apply(section, root):
    """Make the changes of a section in a copy of the package."""
    for name, hunks in changes(section).items():
        path = root / name
        text = path.read_text() if path.exists() else ""
        for before, lines in hunks:
            added = "".join(f"{line}\n" for line in lines)
            if before is None:
                assert not text, name
                text = added
            else:
                assert text.count(f"{before}\n") == 1, (name, before)
                text = text.replace(f"{before}\n", f"{before}\n{added}")
        path.write_text(text)


@pytest.mark.parametrize("section", WORKED)
def test_a_worked_example_runs_in_a_copy_of_the_package(section, tmp_path):
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pipejax", tmp_path / "pipejax", ignore=skipped)
    apply(section, tmp_path)
    (code,), (shown,) = blocks(section, "python"), blocks(section, "text")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-c", code], **how)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown


@pytest.mark.parametrize("section", WORKED)
def test_a_change_touches_few_files_and_the_section_names_them(section):
    files = changes(section)
    assert len(files) <= MOST_FILES
    folders = {name.rpartition("/")[0] for name in files}
    assert all(name in SECTIONS[section] or f"{name}/" in SECTIONS[section] for name in folders)
