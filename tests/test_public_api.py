"""The public names: a list that changes on purpose, each documented with an example."""

import inspect

import jax
import pytest

import pipejax as pj

NAMES = [
    "Costs",
    "CriticalPath",
    "Evaluation",
    "Levels",
    "Model",
    "NodeCosts",
    "Op",
    "Phase",
    "Program",
    "ScheduleError",
    "ScheduleTable",
    "System",
    "Workload",
    "chrome_trace",
    "critical_path",
    "evaluate",
    "finish_times",
    "in_flight",
    "levels",
    "load_model",
    "load_system",
    "lower",
    "makespan",
    "memory_bytes",
    "pad",
    "peak_in_flight",
    "price",
    "read_costs",
    "read_table",
    "schedules",
    "stage_costs",
    "write_table",
]


def test_names():
    assert pj.__all__ == sorted(NAMES, key=lambda n: (not n[0].isupper(), n)) == NAMES


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isfunction(getattr(pj, n))])
def test_functions_document_arguments_results_and_show_an_example(name):
    text = inspect.getdoc(getattr(pj, name))
    parameters = inspect.signature(getattr(pj, name)).parameters
    assert text
    for section in ("Args:", "Returns:" if name != "write_table" else "Raises:", ">>>"):
        assert section in text, section
    for parameter in parameters:
        assert f"{parameter}:" in text, parameter


def test_every_public_class_is_documented():
    for name in NAMES:
        assert inspect.getdoc(getattr(pj, name)), name


def test_importing_changes_nothing():
    assert jax.config.jax_enable_x64  # set by the tests, not by the library
    assert not hasattr(pj, "config")
    assert pj.__version__ == "0.1.0"
