"""A training step on its machine: where seconds and bytes go, MFU, tokens, price."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.activations import HeldMemory
from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.tables import grid

IF_KNOWN = ("cost_per_step", "cost_per_token")


def step_json(run: "pj.Evaluation", workload: "pj.Workload", system: "pj.System") -> dict[str, Any]:
    """What `--json` says of a step."""
    report = pj.step_report(run, workload, system)
    found = {name: value for name, value in vars(report).items() if name != "bands"}
    if report.bands:
        found["step_time_band"] = report.bands
    return {name: v for name, v in found.items() if v is not None or name not in IF_KNOWN}


def memory_json(
    table: pj.ScheduleTable, workload: "pj.Workload", system: "pj.System", held: HeldMemory
) -> dict[str, Any]:
    """What `--json` says of the memory of each worker, in all and by part [B]."""
    from pipejax.costs.stage_bytes import static_parts

    parts = static_parts(workload, table) | {"activations": held.memory.peak}
    if float(system.memory_reserve) > 0:
        parts["reserve"] = np.full(table.num_workers, float(system.memory_reserve))
    needed = held.stages.static + held.memory.peak
    return {"memory_bytes": needed, "memory_parts": parts}


def step_facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what a step buys, and what fills the fullest worker."""
    rate = result["flops_per_accelerator"] / 1e12
    tokens = (
        f"{result['tokens_per_second']:.4g} per second on {result['accelerators']} accelerators"
    )
    rows = [
        ("tokens", tokens),
        ("MFU", f"{percent(result['mfu'])} of {result['precision']}, {rate:.4g} TFLOP/s each"),
    ]
    ends = result.get("step_time_band", {}).items()
    if ends:
        said = (f"{seconds(low)} to {seconds(high)} ({each} %)" for each, (low, high) in ends)
        rows.append(("step between", ", ".join(said)))
    if "cost_per_step" in result:
        each = f"{1e6 * result['cost_per_token']:.4g} USD per million tokens"
        rows.append(("price", f"{result['cost_per_step']:.4g} USD per step, {each}"))
    fullest = int(np.argmax(result["memory_bytes"]))
    parts = ((name, float(by[fullest])) for name, by in result["memory_parts"].items())
    filled = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts if size > 0)
    return [*rows, (f"worker {fullest} holds", filled)]


def step_parts(result: Mapping[str, Any]) -> Table:
    """Where the seconds of a step go; parts that take none are left out."""
    parts = {name: time for name, time in result["breakdown"].items() if time > 0}
    shares = (percent(time / (result["step_time"] or 1.0)) for time in parts.values())
    columns = ("part", parts), ("time", map(seconds, parts.values())), ("of the step", shares)
    return grid(columns)
