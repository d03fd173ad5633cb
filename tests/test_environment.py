"""Streams, variables and packages that are not as usual: a right answer or one line, never less."""

import os
import re
import subprocess
import sys

import pytest

import pipejax as pj
from pipejax.cli.app import run

MAIN = f"{sys.executable} -c 'from pipejax.cli import main; main()'"
ONE = "--schedule 1f1b --workers 4 --microbatches 8"
RUNS = {
    "help": "--help",
    "evaluate": f"evaluate {ONE} --stage-times F=1,B=2",
    "json": f"evaluate {ONE} --stage-times F=1,B=2 --json",
    "show": f"show {ONE}",
    "drawing": f"show {ONE} --out x.svg",
    "named": f"export {ONE} --format json --out \u00e9.json",
    "plan": "plan --model llama3-8b --system a100 --gpus 2 --minibatch 2",
    "optimize": f"optimize {ONE} --stage-times F=1,I=1,W=1 --memory-limit 4 --time-limit 1",
    "mistake": "evaluate --bogus",
}
RIGHT = {  # what stands in an answer
    "help": "optimize",
    "evaluate": "33 s",
    "json": '"makespan": 33.0',
    "show": "worker 3",
    "drawing": "wrote x.svg",
    "named": "?.json",  # what has no letter in ASCII
    "plan": "per step",
    "optimize": "optimal: no other can be shorter",
}
# id -> (command, how the shell runs it, exit code, stderr)
CASES = {
    "stdout closed": ("evaluate", "{} >&-", 2, "error: standard output: Bad file descriptor\n"),
    "stdout full": ("json", "{} >/dev/full", 2, "error: standard output: No space left.*\n"),
    "reader left": ("help", "(sleep 1; {}) | true", 141, ""),
    "stderr closed": ("mistake", "{} 2>&-", 2, ""),
    "stdout and stderr closed": ("evaluate", "{} >&- 2>&-", 2, ""),
    "ascii": ("named", "PYTHONIOENCODING=ascii {}", 0, ""),
    "no platform": ("plan", "JAX_PLATFORMS=foo {}", 2, "error: JAX_PLATFORMS=foo .*\n"),
}
QUIET = {  # id -> (command, how the shell runs it): answered, and nothing on stderr
    "stdin closed": ("evaluate", "{} <&-"),
    "answer, stderr closed": ("evaluate", "{} 2>&-"),
    "answer, stderr full": ("evaluate", "{} 2>/dev/full"),
    "no locale": ("show", "LC_ALL=POSIX {}"),
    "no UTF-8": ("show", "LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {}"),
    "unknown locale": ("evaluate", "LC_ALL=xx_XX.nonsense {}"),
    "ascii show": ("show", "PYTHONIOENCODING=ascii {}"),
    "COLUMNS=abc": ("show", "COLUMNS=abc {}"),
    "no LINES": ("show", "unset LINES COLUMNS; {}"),
    "TERM=dumb": ("show", "TERM=dumb {}"),
    "FORCE_COLOR": ("evaluate", "FORCE_COLOR=1 {}"),
    "no HOME": ("optimize", "unset HOME PIPEJAX_CACHE; XDG_CACHE_HOME=$PWD {}"),
    "no TMPDIR": ("optimize", "TMPDIR=/nonexistent {}"),
    "drawing, no TMPDIR": ("drawing", "TMPDIR=/nonexistent {}"),
    "folder deleted": ("evaluate", "mkdir d; cd d; rmdir ../d; {}"),
}
NO_CACHE, JAX_CACHE = "unset PIPEJAX_CACHE XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"
NO_FOLDER = "warning: store: /dev/null/.* is not used: Not a directory\n"
SLOW = {
    **{case: (*run, 0, "") for case, run in QUIET.items()},
    "help, stdout closed": ("help", "{} >&-", 2, "error: standard output: Bad file.*\n"),
    "show, reader left": ("show", "{} | true", 141, ""),
    "all closed": ("evaluate", "{} <&- >&- 2>&-", 2, ""),
    "stderr full": ("mistake", "{} 2>/dev/full", 2, ""),
    "HOME is no folder": ("optimize", f"{NO_CACHE}; HOME=/dev/null {{}}", 0, NO_FOLDER),
    "store cannot be": ("optimize", "PIPEJAX_CACHE=/proc/x {}", 0, "warning: store: /proc/x .*\n"),
    "store is a file": ("optimize", "touch f; PIPEJAX_CACHE=f {}", 0, "warning: store: f .*\n"),
    "drawing, folder deleted": ("drawing", "mkdir d; cd d; rmdir ../d; {}", 2, "error: --out .*\n"),
    "no such platform": ("plan", "JAX_PLATFORMS=cuda {}", 2, "error: JAX_PLATFORMS=cuda .*\n"),
    "no truth value": ("plan", "JAX_DEBUG_NANS=abc {}", 2, "error: .*'abc'.*'JAX_DEBUG_NANS'\n"),
    "no cache of JAX": ("plan", f"{JAX_CACHE}=/proc/x {{}}", 0, "(warning: .*/proc/x'\n)*"),
    "XLA's flags": ("plan", "XLA_FLAGS=--bogus {}", 1, ".*Unknown flag in XLA_FLAGS: --bogus\n"),
}


def run_by_shell(folder, command, shell):
    """Run a command as a user does; return its exit code, stdout and stderr."""
    (folder / "err").touch()
    line = shell.format(f"{MAIN} {RUNS[command]}") + "; exit ${PIPESTATUS[0]}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        capture_output=True,
        timeout=120,
        env=os.environ | {"PIPEJAX_CACHE": str(folder / "store")},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
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
    done = subprocess.run(
        ["bash", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0


EXTRAS = {  # module -> what needs it, and the extra that has it
    "ortools": (RUNS["optimize"], "optimize"),
    "filelock": (RUNS["optimize"], "optimize"),
    "platformdirs": (RUNS["optimize"], "optimize"),
    "matplotlib": (RUNS["drawing"], "figures"),
    "xarray": ("sweep run x.toml --out x.zarr", "sweeps"),
    "zarr": (
        "jitter --schedules 1f1b --workers 4 --microbatches 8 --stage-times F=1,B=2 --out x.zarr",
        "sweeps",
    ),
    "distributed": ("sweep run x.toml --out x.zarr --scheduler tcp://no:1", "cluster"),
}


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
