"""The public names: a list that changes on purpose, each documented with an example."""

import importlib
import importlib.util
import inspect
import pkgutil

import jax
import pytest

import pipejax as pj

NAMES = [
    "Calibration",
    "CollectiveRows",
    "Corners",
    "Costs",
    "Distribution",
    "Evaluation",
    "Family",
    "Formula",
    "IncrementalRun",
    "InfeasibleError",
    "Jitter",
    "LatentAttention",
    "LinkCalibration",
    "LinkRun",
    "Links",
    "MixtureOfExperts",
    "Model",
    "Op",
    "Phase",
    "PipelineLayout",
    "Program",
    "ScheduleError",
    "ScheduleTable",
    "StepReport",
    "Straggler",
    "System",
    "Topology",
    "Versus",
    "WeightRule",
    "Workload",
    "activation_memory",
    "arrange",
    "calibrate",
    "calibrate_links",
    "certificate",
    "chrome_trace",
    "compare",
    "corners",
    "cycle_time",
    "design_link_runs",
    "evaluate",
    "extrapolated_makespans",
    "finish_times",
    "formula",
    "formula_family",
    "identify_links",
    "insert_transfers",
    "jitter",
    "length_costs",
    "load_model",
    "load_system",
    "longest_paths",
    "lower",
    "makespan",
    "makespans",
    "makespans_and_grad",
    "memory_bytes",
    "optimize",
    "order",
    "partition",
    "place",
    "plan",
    "plot",
    "read_collectives",
    "read_costs",
    "read_formula",
    "read_lengths",
    "read_rows",
    "read_sweep",
    "read_table",
    "robustness",
    "run_sweep",
    "scale_microbatches",
    "scale_workers",
    "scaled_costs",
    "schedules",
    "sensitivity",
    "slack",
    "stage_costs",
    "staleness",
    "step_report",
    "topology_costs",
    "total_negative_slack",
    "training",
    "transfer_waits",
    "tune",
    "validate",
    "verify",
    "versus",
    "write_table",
]


RESULT = {"write_table": "Raises:", "optimize": "Yields:"}


def test_names():
    assert pj.__all__ == sorted(NAMES, key=lambda n: (not n[0].isupper(), n)) == NAMES


def test_functions_document_arguments_results_and_show_an_example():
    for name in pj.__all__:
        function = getattr(pj, name)
        if not inspect.isfunction(function):
            continue
        text = inspect.getdoc(function) or ""
        for section in ("Args:", RESULT.get(name, "Returns:"), ">>>"):
            assert section in text, (name, section)
        for parameter in inspect.signature(function).parameters:
            assert f"{parameter}:" in text, (name, parameter)


def test_only_the_public_names_are_shown():
    assert dir(pj) == sorted(pj.__all__)
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        _ = pj.evalute


# run in processes of `make test-runtimes`; mypy holds that their functions are typed
NEED_TORCH = {"pipejax.runtimes.gloo.process"}


def functions():
    """Each function of each module; ruff holds that public ones have a docstring."""
    for module in pkgutil.walk_packages(pj.__path__, "pipejax."):
        if module.name in NEED_TORCH and importlib.util.find_spec("torch") is None:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isfunction(value) and value.__module__ == module.name:
                yield f"{module.name}.{name}", value


def test_every_function_is_typed():
    for name, function in functions():
        signature = inspect.signature(function)
        hints = [
            signature.return_annotation,
            *(p.annotation for p in signature.parameters.values()),
        ]
        assert inspect.Parameter.empty not in hints, name


def test_every_public_class_is_documented():
    for name in NAMES:
        assert inspect.getdoc(getattr(pj, name)), name


def test_importing_changes_nothing():
    assert jax.config.jax_enable_x64  # set by the tests, not by the library
    assert not hasattr(pj, "config")
    assert pj.__version__ == "0.1.0"
