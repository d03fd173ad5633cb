"""Streams, variables and packages that are not as usual: a right answer or one line, never less."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from daily import with_cases

import pipejax as pj
from pipejax.cli.app import run

MAIN = f"{sys.executable} -c 'from pipejax.cli import main; main()'"
ENVIRONMENT = tomllib.loads((Path(__file__).parent / "data" / "environment.toml").read_text())
RUNS, RIGHT, CASES, QUIET, SLOW, EXTRAS = ENVIRONMENT.values()
SLOW |= {name: [*run, 0, ""] for name, run in QUIET.items()}


def run_by_shell(folder, command, shell):
    """Run a command as a user does; return its exit code, stdout and stderr."""
    (folder / "err").touch()
    line = shell.format(f"{MAIN} {RUNS[command]}") + "; exit ${PIPESTATUS[0]}"
    environment = os.environ | {"PIPEJAX_CACHE": str(folder / "store")}
    how = {"cwd": folder, "capture_output": True, "timeout": 120, "env": environment}
    done = subprocess.run(["bash", "-c", line], **how)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@with_cases("case", *CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
def test_one_line_or_the_right_answer(case, tmp_path):
    command, shell, expected, line = (CASES | SLOW)[case]
    code, out, err = run_by_shell(tmp_path, command, shell)
    assert code == expected, err
    assert re.fullmatch(line, err), err
    assert code or RIGHT[command] in out


@pytest.mark.parametrize("width", [0, 1, 5, 1000])
def test_a_terminal_of_any_width_gets_the_answer(width, monkeypatch, call):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for command in ("show", "evaluate"):
        code, out, err = call(*RUNS[command].split())
        assert (code, err) == (0, "")
        assert "4 workers" in re.sub(r"\s+", " ", out)


def test_a_file_does_not_get_the_number_of_a_stream(tmp_path):
    code = """import sys
from pipejax.cli.process import open_streams
open_streams()
sys.exit(0 if open('x', 'w').fileno() > 2 else 1)"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    line = f'exec {sys.executable} -c "$0" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", line, code], cwd=tmp_path, env=environment)
    assert done.returncode == 0


class Missing:
    """A finder of modules that finds one module no longer."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without(monkeypatch):
    """Take a module away, and what has been imported with it."""

    def without(name):
        for module in [m for m in sys.modules if m.startswith(f"{name}.") or m == name]:
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Missing(name), *sys.meta_path])

    return without


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_said_before_the_work(name, without, mistake, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPEJAX_CACHE", str(tmp_path / "store"))
    arguments, extra = EXTRAS[name]
    without(name)
    for work in ("optimize", "tune", "jitter", "run_sweep", "evaluate"):
        monkeypatch.setattr(pj, work, None)
    line = mistake(*arguments.split())
    assert re.search(f"needs? {name}: ", line)
    assert f"pip install 'pipejax[{extra}]'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cyclopts", pytest.param("rich", marks=pytest.mark.slow)])
def test_the_command_line_says_what_it_needs(name):
    code = f"import sys; sys.modules[{name!r}] = None; from pipejax.cli import main; main()"
    command = [sys.executable, "-c", code, "schedules"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    needed = f"error: the command line needs {name}: pip install 'pipejax[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", needed)


def test_errors_that_are_not_about_backends_stay_errors(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(pj.Scenario, "evaluate", wrong)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run(RUNS["evaluate"].split())
