"""`pipejax run`: a table executed by a runtime, its gradients beside those without a pipeline."""

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.checks import positive, resolve_choice
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build
from pipejax.cli.options.tables import RunOptions
from pipejax.cli.output.files import NO_OUTPUT, TABLES, Output
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.report import Answer, pick, progress, table_sizes
from pipejax.cli.output.tables import grid

if TYPE_CHECKING:
    from pipejax.runtimes.processes import RuntimeRun


@options
def run(
    *,
    timed: RunOptions = RunOptions(),
    runtime: str = "jax",
    hidden: int = 16,
    batch_size: int = 2,
    steps: int = 0,
    seed: int = 0,
    tolerance: float = 1e-5,
    trace: Annotated[Output, TABLES] = NO_OUTPUT,
) -> Answer:
    """Run a schedule in JAX or PyTorch, and compare its gradients with those of the whole model.

    Exit code 0 if the gradients are equal within the tolerance, 1 if they are not.
    """
    from pipejax.runtimes.processes import RUNTIMES, RuntimeJob, run_table

    name = resolve_choice(runtime, RUNTIMES, "--runtime")
    largest_error = positive(tolerance, "--tolerance")
    if trace.path is not None and (name != "torch" or steps == 0):
        raise ValueError("--trace needs --runtime torch, and --steps above 0 to record")
    scenario = timed.scenario()
    table = build(scenario)
    costs = scenario.table_costs() if scenario.has_times else None
    job = RuntimeJob(table, scenario.links, costs, hidden, batch_size, steps, seed)
    with tempfile.TemporaryDirectory(prefix="pipejax-") as folder:
        if trace.path is not None:
            job = job._replace(trace=Path(folder, "trace"))
        with progress(f"running {table.name} in {name}"):
            outcome = run_table(name, job)
        trace.save(lambda draft: shutil.copytree(Path(folder, "trace"), draft))
    is_equal = outcome.error <= largest_error
    result = _as_json(table, outcome, is_equal)
    op_times = [(letter, map(seconds, times)) for letter, times in outcome.profile.items()]
    profile = grid([("stage", range(result["stages"])), *op_times])
    next_commands = () if trace.written is None else (f"pipejax trace {trace.written}",)
    details = {"op times": [profile]} if op_times else {}
    return Answer(result, _view(result, outcome), is_equal, next_commands, details)


def _as_json(table: pj.ScheduleTable, run: "RuntimeRun", is_equal: bool) -> dict[str, Any]:
    """Return the object of `--json`; a number that is not finite is null."""
    errors = pick(run, "gradient_error loss_error loss")
    return {
        **table_sizes(table),
        **pick(run, "runtime version"),
        "ok": is_equal,
        **{name: value if math.isfinite(value) else None for name, value in errors.items()},
        **pick(run, "left_out step_times"),
        "step_time": float(np.median(run.step_times)) if len(run.step_times) else None,
        **pick(run, "predicted profile message step_size"),
    }


def _view(data: Mapping[str, Any], run: "RuntimeRun") -> Iterator[object]:
    """Yield errors of gradients and loss, the step time, and what the runtime skips."""
    verdict = "are those" if data["ok"] else "[red]differ from those[/]"
    yield (
        f"{data['schedule']} ran in {run.runtime} {run.version}: its gradients {verdict} of the "
        f"model without a pipeline (largest relative difference {run.gradient_error:.3g})"
    )
    yield f"loss {run.loss:.6g}; relative difference to that model's loss {run.loss_error:.3g}"
    measured = data["step_time"]
    if measured is not None:
        predicted = ""
        if run.predicted is not None:
            error = percent(run.predicted / measured - 1)
            predicted = f", predicted {seconds(run.predicted)}, {error} off"
        yield f"step time [bold]{seconds(measured)}[/] measured{predicted}"
    if run.step_size is not None:
        note = ": all weight versions equal the first" if run.step_size == 0 else ""
        yield f"U cells: step size {run.step_size:g}{note}"
    for phase, reason in run.left_out.items():
        yield f"{phase} cells are skipped: {reason}"
