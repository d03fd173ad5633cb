"""Tables and lines of a run: its step on a machine, numbers of its ops, its longest paths."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.memory import HeldMemory
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.report import pick
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table


def step_json(run: "pj.Evaluation", workload: "pj.Workload", system: "pj.System") -> dict[str, Any]:
    """Return a step for `--json`."""
    report = pj.step_report(run, workload, system)
    fields = pick(report, "step_time breakdown accelerators precision") | report.outputs
    return fields | ({"step_time_band": report.bands} if report.bands else {})


def memory_json(
    table: pj.ScheduleTable, workload: "pj.Workload", system: "pj.System", held: HeldMemory
) -> dict[str, Any]:
    """Return each worker's need for `--json`, its parts, and the reserve outside the need [B]."""
    from pipejax.costs.stage.stage_work import static_parts

    # without backwards the held memory is the KV cache; `static_parts` has the activations then
    held_name = "keys and values" if table.grammar.forward_only else "activations"
    parts = static_parts(workload, table) | {held_name: held.memory.peak}
    if float(system.memory_reserve) > 0:
        parts["reserve"] = np.full(table.num_workers, float(system.memory_reserve))
    needed = held.stages.static + held.memory.peak
    return {"memory_bytes": needed, "memory_parts": parts}


def op_rows(
    evaluation: "pj.Evaluation", name: str, node_values: NumpyArray
) -> list[dict[str, Any]]:
    """Return for `--json` a row per op: the op, its worker, and its node's value under a name."""
    from pipejax.analysis.runs.timeline import bars

    return [
        {"op": bar.label, "worker": bar.worker, name: float(node_values[bar.node])}
        for bar in bars(evaluation)
    ]


def values_by_phase(
    evaluation: "pj.Evaluation",
    name: str,
    node_values: Float[NumpyArray, " nodes"],
    format: Callable[[float], str],
) -> TextTable:
    """Make a table of the least and most of `node_values`, by worker and phase, with their ops."""
    from pipejax.analysis.runs.timeline import bars
    from pipejax.engine.lowering.program import NO_WORKER

    groups: dict[tuple[int, str], list[tuple[float, str]]] = {}
    for bar in bars(evaluation):
        phase = "+".join(op.phase.name for op in bar.ops)
        group = groups.setdefault((bar.worker, phase), [])
        group.append((float(node_values[bar.node]), bar.label))
    smallest = [min(group, key=itemgetter(0)) for group in groups.values()]
    largest = [max(group, key=itemgetter(0)) for group in groups.values()]
    return grid(
        [
            ("worker", ("-" if worker == NO_WORKER else worker for worker, _ in groups)),
            ("phase", (phase for _, phase in groups)),
            ("ops", map(len, groups.values())),
            (f"least {name}", (format(value) for value, _ in smallest)),
            ("op with least", (op for _, op in smallest)),
            (f"most {name}", (format(value) for value, _ in largest)),
            ("op with most", (op for _, op in largest)),
        ],
        keys=2,
    )


MAX_ENDS = 4  # ops that are shown at either end of a path
ROUNDING = 1e-12  # of the length of a path: a smaller difference to the longest is 0


def paths_json(paths: "Iterable[pj.results.LongPath]") -> list[dict[str, Any]]:
    """Return paths for `--json`."""
    return [
        {
            "length": path.length,
            "behind": path.shorter_by,
            "counts": dict(path.counts),
            "ops": [*path.ops],
            "messages": [*path.messages],
        }
        for path in paths
    ]


def paths_table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """List the longest paths: how much shorter each is than the longest, its counts, its ops."""
    rounding = ROUNDING * rows[0]["length"] if rows else 0.0
    columns = [
        Column("path", "number"),
        Column("length", "length", seconds),
        Column("shorter by", "behind", lambda time: seconds(time if time > rounding else 0.0)),
        *(Column(name, name) for name in (rows[0]["counts"] if rows else ())),
        Column("ops", "ops", ends_of_path),
    ]
    flat_rows = ({**row, **row["counts"], "number": k} for k, row in enumerate(rows, 1))
    return rows_table(flat_rows, columns)


def ends_of_path(ops: Sequence[str]) -> str:
    """Write the first and the last ops of a path, with `..` between them."""
    if len(ops) <= 2 * MAX_ENDS + 1:
        return " ".join(ops)
    return " ".join([*ops[:MAX_ENDS], "..", *ops[-MAX_ENDS:]])
