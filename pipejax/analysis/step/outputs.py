"""Outputs of a run beside its times and memory: all lists of outputs follow from outputs.json."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import NumpyArray
from pipejax.base.data_files import load_json
from pipejax.costs.layers.formulas import model_flop
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import System
from pipejax.schedules.table.table import ScheduleTable


class StepOutput(NamedTuple):
    """An output of `evaluate`, `compare` and sweeps; its name is its key in JSON."""

    unit: str
    meaning: str
    values: str = ""  # formula of `step_numbers`, for steps with a model and a system
    run_value: str = ""  # formula of fields of `Evaluation`, for any run
    row: str = ""  # title of the row in the totals of `evaluate`; "" for none
    column: str = ""  # head of the column of `compare`; "" for none
    more_is_better: bool = False
    in_report: bool = True  # whether `evaluate` and `compare` have `values`, not only sweeps
    dtype: str = ""  # data type in a dataset; "" for that of the sweep
    # "index" for values that are indices in `RESOURCES`, "dimension" for a value of each resource
    resources: str = ""


TOKENS = "tokens_per_second"
OUTPUTS: Mapping[str, StepOutput] = {
    name: StepOutput(**fields)
    for name, fields in load_json(Path(__file__).with_name("outputs.json")).items()
}
RUN_OUTPUTS = {name: output for name, output in OUTPUTS.items() if output.run_value}
SWEPT = {name: output for name, output in OUTPUTS.items() if output.values}
STEP_OUTPUTS = {k: o for k, o in SWEPT.items() if o.in_report and k not in RUN_OUTPUTS}
MORE_IS_BETTER = tuple(name for name, output in OUTPUTS.items() if output.more_is_better)
MEASURES = "step_time", "memory_bytes", *(k for k, o in SWEPT.items() if not o.resources)


def step_numbers(
    systems: System, workload: Workload, table: ScheduleTable, **results: NumpyArray
) -> dict[str, Any]:
    """Return {name: number} for formulas: results (batch), fields of systems that are not 0."""
    sequences = workload.minibatch * workload.data_parallel
    part = 3 if table.grammar.forward_only else 1  # a forward has a third of a step's products
    layout = None if table.grammar.forward_only else workload.layout(table)
    replica = workload.accelerators_per_worker * table.num_workers
    return {
        **{name: x for name, x in vars(systems).items() if np.all(np.asarray(x, object) != 0)},
        "tokens": sequences * float(workload.model.sequence),
        "flop": float(model_flop(workload.model, sequences, layout)) / part,
        "accelerators": replica * workload.data_parallel,
        "peak": systems.peak(workload.precision),
        **results,
    }


def compute(formula: str, numbers: Mapping[str, Any]) -> Any:
    """Compute a formula of `outputs.json`.

    Raises:
      NameError: if it has a number that is not there, such as the price of a system without one.
    """
    return eval(formula, {"__builtins__": {}}, dict(numbers))


def run_outputs(run: Evaluation) -> dict[str, float]:
    """Return {output: value} of any run."""
    return {name: compute(o.run_value, vars(run)) for name, o in RUN_OUTPUTS.items()}


def step_outputs(run: Evaluation, workload: Workload, system: System) -> dict[str, float]:
    """Return {output: value} of a run with a model and a system, beside those of any run."""
    step_time, busy = np.array([run.step_time]), np.array([float(run.busy.mean())])
    numbers = step_numbers(system, workload, run.table, step_time=step_time, busy=busy)
    outputs = {}
    for name, output in STEP_OUTPUTS.items():
        with suppress(NameError):  # the system lacks a number, such as a price
            outputs[name] = compute(output.values, numbers).item()
    return outputs
