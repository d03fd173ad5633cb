"""Thirteen rooms with ranks: a file imports from a lower rank or from its own room, never sideways."""

import ast
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

from near import ALWAYS, FILES as TEST_FILES, TESTS, near_tests
from public_names import NAMES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipejax"
RANK, ORDER, HEAVY = tomllib.loads((ROOT / "tests/data/rooms.toml").read_text()).values()
FILES = sorted(PACKAGE.rglob("*.py"))
DOORS = {"pipejax", *(f"pipejax.{room}" for room in NAMES if room)}


def place(path):
    """Room, and the folder or file in it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0], parts[1]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def height(room, part):
    order = ORDER.get(room, ())
    return order.index(part) if part in order else len(order)


def wrong_imports(path):
    """List imports that are not downwards, or that only other rooms may do."""
    room, part = place(path)
    for imported in imports(path):
        top, *rest = imported.split(".")
        if top in HEAVY and room not in HEAVY[top]:
            yield f"{path}: {room} imports {top}"
        if top != "pipejax" or not rest or rest[0] not in RANK:
            continue
        if rest[0] != room and RANK[rest[0]] >= RANK[room]:
            yield f"{path}: {room} imports {imported}"
        if rest[0] == room and len(rest) > 1 and height(room, rest[1]) > height(room, part):
            yield f"{path}: {part} imports {imported}"


def test_the_checker_imports_nothing_else_of_the_package():
    """It agrees with the engine by nothing but truth."""
    names = {name for path in (PACKAGE / "checker").glob("*.py") for name in imports(path)}
    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert others
    assert all(name.startswith("pipejax.checker.") for name in others)


def test_the_rooms_are_those_of_the_house():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms == set(RANK)
    files = {path.name for path in PACKAGE.glob("*.py")} - {f"{name}.py" for name in NAMES}
    assert files == {"__init__.py", "__main__.py"}


def test_imports_point_downwards():
    assert [w for path in FILES if path.parent != PACKAGE for w in wrong_imports(path)] == []


def deep_imports(path):
    """Modules of the package that a paper imports, or imports from, where users have no door."""
    for node in ast.walk(parsed(path)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        yield from (m for m in modules if m.split(".")[0] == "pipejax" and m not in DOORS)


def test_papers_come_in_by_the_door():
    papers = [*(ROOT / "sweeps").rglob("*.py"), *(ROOT / "figures").rglob("*.py")]
    deep = {str(path.relative_to(ROOT)): set(deep_imports(path)) for path in papers}
    assert {path: modules for path, modules in deep.items() if modules} == {}


def test_the_ranks_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for name, text in {
        "costs/work.py": "from pipejax.engine.lowering import program",
        "schedules/cells/ops.py": "from pipejax.schedules.table.table import ScheduleTable",
        "search/found.py": "from pipejax.sweep import run",
        "engine/batch.py": "import matplotlib.pyplot",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        assert len(list(wrong_imports(tmp_path / name))) == 1, name


def test_the_engine_needs_only_jax_and_numpy():
    code = f"import sys, pipejax; sys.exit(len({set(HEAVY)!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_functions_stay_readable():
    long = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                long += [f"{path}: {node.name} has {lines} lines"] if lines > 60 else []
    assert long == []


def test_schedules_are_built_without_jax():
    code = "import sys; from pipejax import schedules; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_two_classes_have_one_name():
    nodes = [node for path in FILES for node in ast.walk(parsed(path))]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))


def test_figures_take_names_from_sweeps_and_compute_nothing_with_them():
    """A figure reads a dataset: of the sweep that made it it may know constants and words."""
    names = {name for path in (ROOT / "figures").rglob("*.py") for name in imports(path)}
    used = {name for name in names if name.split(".")[0] == "sweeps"}
    others = {name for name in used if not name.split(".")[-1].isupper()}
    assert others == {"sweeps.pipedream.words.fraction"}
    tabular = [name for p in (ROOT / "figures" / "tabular").glob("*.py") for name in imports(p)]
    assert not [name for name in tabular if name.startswith(("sweeps", "jax"))]


def test_changed_files_have_tests():
    """`make near` runs each test file for a folder, and tests for each folder."""
    names = {name for line in TESTS.values() for name in line.split()}
    assert names - TEST_FILES.keys() == set()
    without_line = {file for name, file in TEST_FILES.items() if name not in names} - {*ALWAYS}
    assert [file for file in without_line if not file.startswith("tests/papers/")] == []
    assert [path for path in TESTS if not (ROOT / path).exists()] == []
    folders = {str(path.parent.relative_to(ROOT)) for path in FILES}
    assert folders - {path.rstrip("/") for path in TESTS} == set()
    for path, test in {
        "pipejax/search/orders/deal.py": "tests/test_deal.py",
        "pipejax/schedules/table/links.py": "tests/test_trace.py",
        "pipejax/costs/layers/kernels.py": "tests/test_stacks.py",
        "pipejax/costs/stage/stage_costs.py": "tests/test_golden.py",
        "pipejax/schedules/table/slot_simulation.py": "tests/test_schedules.py",
        "tests/strategies.py": "tests/test_fuzz.py",
        "tests/data/mistakes.json": "tests/test_mistakes.py",
        "sweeps/findings/links.py": "tests/papers/test_findings.py",
    }.items():
        assert test in near_tests(path), path
