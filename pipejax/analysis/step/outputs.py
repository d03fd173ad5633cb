"""Outputs of a run beside its times and memory: all lists of outputs follow from `OUTPUTS`."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.costs.layers.formulas import model_flop
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import System
from pipejax.schedules.table.table import ScheduleTable


class Steps(NamedTuple):
    """Steps of one program on a batch of systems, from which outputs follow."""

    seconds: Float[NumpyArray, " batch"]  # step time [s]
    busy: Float[NumpyArray, " batch"]  # busy time of the mean worker [s]
    share: Float[NumpyArray, "batch resources"]  # of the critical path; empty if nothing needs it
    systems: System  # the batch
    tokens: float  # tokens of a step in all replicas
    flop: float  # model FLOP of a step in all replicas
    accelerators: int  # number of accelerators of the job
    peak: Any  # peak of an accelerator in the workload's precision [FLOP/s]

    @property
    def price(self) -> Any:
        """Return the price of all accelerators for a step [USD]."""
        return self.systems.price * self.accelerators * self.seconds


class StepOutput(NamedTuple):
    """An output of `evaluate`, `compare` and sweeps; its name is its key in JSON."""

    unit: str
    meaning: str
    values: Callable[[Steps], Any] | None = None  # for steps with a model and a system
    run_value: Callable[[Evaluation], float] | None = None  # for any run
    row: str = ""  # title of the row in the totals of `evaluate`; "" for none
    column: str = ""  # head of the column of `compare`; "" for none
    more_is_better: bool = False
    needs: str = ""  # field of `System`; systems with 0 there lack the output
    in_report: bool = True  # whether `evaluate` and `compare` have `values`, not only sweeps
    needs_paths: bool = False  # whether `values` uses `share` to compute a number
    dtype: str = ""  # data type in a dataset; "" for that of the sweep
    resources: str = ""  # "index" for an index in `RESOURCES`, "dimension" for a value of each


TOKENS = "tokens_per_second"
OUTPUTS: Mapping[str, StepOutput] = {
    "bubble_ratio": StepOutput(
        *("1", "share of all workers' time without work"),
        lambda steps: 1 - steps.busy / steps.seconds,
        lambda run: run.bubble_ratio,
    ),
    "bubble_overhead": StepOutput(
        *("1", "makespan over the busy time of the mean worker, less 1"),
        run_value=lambda run: run.bubble_overhead,
        row="idle over busy time",
    ),
    "max_span": StepOutput(
        *("s", "longest time of a worker from its first to its last op"),
        run_value=lambda run: run.max_span,
        row="longest time from first to last op of a worker",
    ),
    "span_bubble_ratio": StepOutput(
        *("1", "share of the longest span without work"),
        run_value=lambda run: run.span_bubble_ratio,
        row="idle in that time",
    ),
    "mfu": StepOutput(
        *("1", "share of what the accelerators could do that is model FLOP"),
        lambda steps: steps.flop / (steps.seconds * steps.accelerators * steps.peak),
        column="MFU",
        more_is_better=True,
    ),
    "flops_per_accelerator": StepOutput(
        *("FLOP/s", "model FLOP of a step over step time and accelerators"),
        lambda steps: steps.flop / (steps.seconds * steps.accelerators),
        more_is_better=True,
    ),
    TOKENS: StepOutput(
        *("tokens/s", "tokens of all replicas over step time"),
        lambda steps: steps.tokens / steps.seconds,
        more_is_better=True,
    ),
    "tokens_per_second_per_gpu": StepOutput(
        *("tokens/s", "tokens of all replicas over step time and accelerators"),
        lambda steps: steps.tokens / steps.seconds / steps.accelerators,
        more_is_better=True,
        in_report=False,
    ),
    "cost_per_step": StepOutput(
        *("USD", "price of the accelerators for a step"),
        lambda steps: steps.price,
        row="price of a step",
        needs="price",
    ),
    "cost_per_token": StepOutput(
        *("USD/token", "price of the accelerators for a token"),
        lambda steps: steps.price / steps.tokens,
        row="price of tokens",
        needs="price",
    ),
    "bound_by": StepOutput(
        *("1", "resource that takes the largest share of the critical path"),
        lambda steps: steps.share.argmax(axis=1),
        in_report=False,
        dtype="int8",
        resources="index",
    ),
    "share": StepOutput(
        *("1", "share of the critical path"),
        lambda steps: steps.share,
        in_report=False,
        dtype="float32",
        resources="dimension",
    ),
}
RUN_OUTPUTS = {name: output for name, output in OUTPUTS.items() if output.run_value}
SWEPT = {name: output for name, output in OUTPUTS.items() if output.values}
STEP_OUTPUTS = {k: o for k, o in SWEPT.items() if o.in_report and k not in RUN_OUTPUTS}
MORE_IS_BETTER = tuple(name for name, output in OUTPUTS.items() if output.more_is_better)
MEASURES = "step_time", "memory_bytes", *(k for k, o in SWEPT.items() if not o.resources)


def run_outputs(run: Evaluation) -> dict[str, float]:
    """Return {output: value} of any run."""
    return {k: output.run_value(run) for k, output in RUN_OUTPUTS.items() if output.run_value}


def step_outputs(run: Evaluation, workload: Workload, system: System) -> dict[str, float]:
    """Return {output: value} of a run with a model and a system, beside those of any run."""
    seconds, busy = np.array([run.step_time]), np.array([float(run.busy.mean())])
    values = swept_outputs(STEP_OUTPUTS, system, workload, run.table, seconds, busy)
    return {name: value.item() for name, value in values.items()}


def swept_outputs(
    names: Collection[str],
    systems: System,
    workload: Workload,
    table: ScheduleTable,
    seconds: NumpyArray,
    busy: NumpyArray,
    share: NumpyArray | None = None,
) -> dict[str, Any]:
    """Return {output: values (batch)}, without outputs that need what a system lacks."""
    sequences = workload.minibatch * workload.data_parallel
    part = 3 if table.grammar.forward_only else 1  # a forward has a third of a step's products
    layout = None if table.grammar.forward_only else workload.layout(table)
    replica = workload.accelerators_per_worker * table.num_workers
    steps = Steps(
        seconds=seconds,
        busy=busy,
        share=np.zeros((0, 0)) if share is None else share,
        systems=systems,
        tokens=sequences * float(workload.model.sequence),
        flop=float(model_flop(workload.model, sequences, layout)) / part,
        accelerators=replica * workload.data_parallel,
        peak=systems.peak(workload.precision),
    )
    return {
        name: output.values(steps)
        for name, output in OUTPUTS.items()
        if name in names and output.values
        if not output.needs or np.all(getattr(systems, output.needs))
    }
