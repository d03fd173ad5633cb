"""The straight line: a module imports only from its left, and stays small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipejax"
LINE = [
    "shapes", "checks", "units", "ops", "grid", "graph", "placement", "weights", "cells", "dependencies", "versions", "legality", "slots", "table",
    "host_links", "idealised", "memory", "schedules", "files", "layout", "program", "periods", "drafting", "links", "lowering",
    "hardware", "transformer", "seconds", "costs", "cost_files", "workload", "work", "recurrence", "cost_rows",
    "binary_ops", "blocks", "one_function", "devices", "unrolled", "step_program", "steps_forth", "steps_back", "stepped", "batch", "long_schedules", "metrics",
    "evaluate", "activation_memory", "sensitivity", "factors", "own_costs", "jitter", "robustness", "provenance", "jitter_data", "formulas", "compare",
    "transfer_cells", "transfer_graph", "transfer_need", "transfer_moves", "transfer_order", "transfer_waits", "staleness", "training", "training_data", "tuning", "optimize",
    "timeline", "trace", "sweep", "style", "memory_chart", "drawing", "tornado", "delay_chart", "training_chart", "cli",
]  # fmt: skip
HEAVY = {"matplotlib": {"style", "memory_chart", "drawing", "tornado", "delay_chart", "training_chart", "cli"}, "typer": {"cli"}, "rich": {"cli"}, "xarray": {"sweep", "jitter_data", "training_data", "cli"},
         "zarr": {"sweep"}, "distributed": {"sweep"}, "optax": {"tuning"}, "ortools": {"optimize"}, "networkx": set(), "hypothesis": set()}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_place():
    assert {module(path) for path in FILES} == {*LINE, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path):
    name = module(path)
    if name == "__init__":
        return
    for imported in imports(path):
        top, *rest = imported.split(".")
        if top == "pipejax" and rest and rest[0] in LINE and rest[0] != name:
            assert LINE.index(rest[0]) < LINE.index(name), f"{name} imports {rest[0]}"
        if top in HEAVY:
            assert name in HEAVY[top], f"{name} imports {top}"


def test_the_engine_needs_only_jax_and_numpy():
    code = (
        "import sys, pipejax; "
        "bad = {'matplotlib', 'typer', 'rich', 'xarray', 'zarr', 'distributed', 'optax', 'ortools', 'networkx', 'hypothesis'}; "
        "sys.exit(len(bad & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{node.name} has {lines} lines"
