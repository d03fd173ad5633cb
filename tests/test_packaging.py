"""Packages built from the repository run without it."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pipejax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ONE = "--schedule 1f1b --workers 4 --microbatches 8 --stage-times F=1,B=2"
READS_ALL_DATA = (ROOT / "tests/data/program_on_all_data.txt").read_text()


def test_the_version_stands_in_one_place():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == PROJECT["version"]
    assert re.search(rf"^## .*\b{re.escape(cited[1])}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    code = "".join(path.read_text() for path in Path(pipejax.__file__).parent.rglob("*.py"))
    assert PROJECT["version"] not in code


def test_the_package_is_a_program():
    command = [sys.executable, "-m", "pipejax", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"pipejax {pipejax.__version__}\n")


def build(folder, *targets):
    """Build distributions of the sources in a folder, without fetching what builds them."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", "dist", *targets]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    return sorted((folder / "dist").iterdir())


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel, made from what git does not ignore, and the package's files."""
    folder = tmp_path_factory.mktemp("sources")
    line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.check_output(line, cwd=ROOT, text=True).split("\0")
    for name in filter(None, result):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    wheel, source = build(folder)
    package = {name for name in result if name.startswith("pipejax/")}
    return source, wheel, package


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A fresh environment with the wheel, where all else comes from this one; its programs."""
    home = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    package, theirs = (
        Path(sysconfig.get_path("purelib", vars={"base": str(prefix)}))
        for prefix in (home, sys.prefix)
    )
    (package / "beside.pth").write_text(f"{theirs}\n")  # its .pth files are not read: no sources
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    options = "--quiet --no-index --no-deps --disable-pip-version-check --force-reinstall"
    options = options.split()
    subprocess.run([*pip, *options, built[1]], check=True, timeout=120)
    return home / "bin"


def run(command, folder, **environment):
    """Run a command outside the repository, with nothing of it in the environment."""
    remaining = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    where = {"cwd": folder, "env": remaining | environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **where)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_source_builds_it(built, tmp_path):
    source, wheel, package = built
    files = contents(wheel)
    assert {name for name in files if name.startswith("pipejax/")} == package
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (again,) = build(next(tmp_path.iterdir()), "-t", "wheel")
    assert again.name == wheel.name
    assert contents(again) == files


@pytest.mark.slow
def test_the_wheel_runs_without_the_repository(installed, tmp_path):
    for program in (["pipejax"], ["python", "-m", "pipejax"]):
        command = [installed / program[0], *program[1:], "evaluate", *ONE.split(), "--json"]
        code, out, err = run(command, tmp_path)
        assert (code, err) == (0, "")
        assert '"makespan": 33.0' in out
    code, out, err = run([installed / "python", "-c", READS_ALL_DATA], tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{PROJECT['version']} ")


def requirements(extra):
    """Distributions that an extra of the project brings, with all that these need, by name."""
    needed, waiting = set(), [Requirement(f"pipejax[{extra}]" if extra else "pipejax")]
    while waiting:
        requirement = waiting.pop()
        for extra_name in requirement.extras or {""}:
            if (requirement.name, extra_name) not in needed:
                needed.add((requirement.name, extra_name))
                texts = metadata.requires(requirement.name) or ()
                inner = [Requirement(text) for text in texts]
                environment = {"extra": extra_name}
                waiting += [r for r in inner if r.marker is None or r.marker.evaluate(environment)]
    return {name for name, _ in needed} - {"pipejax"}


def isolated(wheel, extra, home):
    """A fresh environment that holds the wheel and what the extra brings, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    package = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    (package / "extra.txt").write_text(extra)
    for name in requirements(extra):
        distribution = metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (package / top).exists():
                (package / top).symlink_to(distribution.locate_file(top))
    return home / "bin" / "python"


RUN = """
import pipejax as pj
table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
run = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
assert run.makespan == 9.0  # (P - 1 + M) (F + B)
"""
SPLIT = "pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)"
SWEEP = """
grid = {"schedules": ["gpipe"], "workers": 4, "minibatch": 8, "microbatch_size": 1, "models": "gpt-22b"}
pj.run_sweep(pj.read_sweep(grid | {"systems": ["h100"]}), "grid.zarr")
"""
OF_EXTRAS = {  # what a user does with an extra alone
    "": RUN,
    "cli": f"import sys; from pipejax.cli import main; sys.argv = 'pipejax evaluate {ONE}'.split(); main()",
    "figures": f"{RUN}run.plot().savefig('run.png')",
    "sweeps": f"{RUN}{SWEEP}",
    "cluster": f"import distributed\n{RUN}{SWEEP}",
    "notebook": f"{RUN}pj.plots.explore(run)\npj.analysis.frame(run)",
    "optimize": f"{RUN}pj.optimize(pj.Scenario(table, costs={SPLIT}), memory_limit=2, effort=1)",
    "traces": f"{RUN}pj.traces.read({str(ROOT / 'examples/production_job.parquet')!r})",
}


@pytest.mark.slow
@pytest.mark.parametrize("extra", OF_EXTRAS)
def test_an_extra_alone_does_its_work(extra, built, tmp_path):
    python = isolated(built[1], extra, tmp_path / "home")
    code, _, err = run([python, "-c", OF_EXTRAS[extra]], tmp_path, PIPEJAX_CACHE=str(tmp_path))
    assert code == 0, err
