"""`pipejax run`: a table executed by a runtime, its gradients beside those without a pipeline."""

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.checks import positive, resolve_choice, whole_number
from pipejax.cli.options.option import options
from pipejax.cli.options.run import LinkOptions, RunOptions
from pipejax.cli.options.scenario import build
from pipejax.cli.options.values import Count, Seed
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import TABLES
from pipejax.cli.output.numbers import percent, seconds
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import facts, grid, heading, pick, sizes_of

if TYPE_CHECKING:
    from pipejax.runtimes.runtime_run import RuntimeRun


@options
def run(
    *,
    timed: RunOptions = RunOptions(),
    links: LinkOptions = LinkOptions(),
    runtime: str = "jax",
    hidden: Count = 16,
    batch_size: Count = 2,
    steps: int = 0,
    seed: Seed = 0,
    tolerance: float = 1e-5,
    trace: Annotated[Output, TABLES] = NO_OUTPUT,
) -> Answer:
    """Run a table in a runtime: its gradients against those of the model without a pipeline.

    Exit code 0 if the gradients are equal within the tolerance, 1 if they are not.

    Options:
      steps: 0 times nothing.
      tolerance: relative to the largest entry.
      trace: a file for each worker, as PyTorch's profiler writes them; `pipejax trace` reads them.

    Example:
      pipejax run -s zb-h1 -P 4 -M 8 --runtime jax
    """
    from pipejax.runtimes.runtime_run import RUNTIMES, RuntimeJob, run_table

    name = resolve_choice(runtime, RUNTIMES, "--runtime")
    most = positive(tolerance, "--tolerance")
    if trace.path is not None and (name != "torch" or steps == 0):
        raise ValueError("--trace needs --runtime torch, and --steps of which there is a trace")
    scenario = timed.scenario(links.links())
    table = build(scenario)
    job = RuntimeJob(
        table,
        scenario.links,
        scenario.table_costs() if scenario.has_times else None,
        whole_number(hidden, "--hidden"),
        whole_number(batch_size, "--batch-size"),
        whole_number(steps, "--steps", minimum=0),
        whole_number(seed, "--seed", minimum=0),
    )
    with tempfile.TemporaryDirectory(prefix="pipejax-") as folder:
        if trace.path is not None:
            job = job._replace(trace=Path(folder, "trace"))
        with waiting(f"running {table.name} in {name}"):
            found = run_table(name, job)
        trace.save(lambda draft: shutil.copytree(Path(folder, "trace"), draft))
    ok = found.error <= most
    result = _summary(table, found, ok)
    go_on = () if trace.written is None else (f"pipejax trace {trace.written}",)
    written = {"wrote a trace of each worker to": trace}
    return Answer(result, _said(result, found), written, holds=ok, next=go_on)


def _summary(table: pj.ScheduleTable, found: "RuntimeRun", ok: bool) -> dict[str, Any]:
    """Collect what `--json` prints; an error that is no number is null."""
    errors = {"gradient_error": found.gradient_error, "loss_error": found.loss_error}
    return {
        **sizes_of(table),
        **pick(found, "runtime version"),
        "ok": ok,
        **{name: value if math.isfinite(value) else None for name, value in errors.items()},
        "loss": found.loss if math.isfinite(found.loss) else None,
        **pick(found, "left_out step_times"),
        "step_time": float(np.median(found.step_times)) if len(found.step_times) else None,
        **pick(found, "predicted profile message step_size"),
    }


def _said(result: Mapping[str, Any], found: "RuntimeRun") -> Iterator[object]:
    verdict = "equal" if result["ok"] else "[red]not equal[/]"
    rows = [
        ("gradients", f"{verdict}, largest relative difference {found.gradient_error:.3g}"),
        ("loss", f"{found.loss:.6g}, relative difference {found.loss_error:.3g}"),
    ]
    if found.step_size is not None:
        alike = ": all versions of the weights are those of the start" * (found.step_size == 0)
        rows.append(("U cells", f"step size {found.step_size:g}{alike}"))
    measured = result["step_time"]
    if measured is not None:
        rows.append(("step time", f"[bold]{seconds(measured)}[/] measured"))
    if measured is not None and found.predicted is not None:
        error = percent(found.predicted / measured - 1)
        rows.append(("predicted", f"{seconds(found.predicted)}, {error} off"))
    rows += [(f"{phase} cells", f"left out: {why}") for phase, why in found.left_out.items()]
    yield f"{heading(result)}, {found.runtime} {found.version}"
    yield facts(rows)
    if found.profile:
        stages = range(result["stages"])
        columns = [(letter, map(seconds, times)) for letter, times in found.profile.items()]
        yield grid([("stage", stages), *columns])
