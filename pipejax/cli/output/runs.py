"""Tables and lines of a run: its step on a machine, numbers of its ops, its longest paths."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.cli.options.memory import HeldMemory
from pipejax.cli.output.report import Column, TextTable, grid, rows_table, seconds


def step_json(run: "pj.Evaluation", workload: "pj.Workload", system: "pj.System") -> dict[str, Any]:
    """Return a step for `--json`."""
    report = pj.step_report(run, workload, system)
    fields = {name: value for name, value in vars(report).items() if name != "bands"}
    if report.bands:
        fields["step_time_band"] = report.bands
    return {name: value for name, value in fields.items() if value is not None}


def memory_json(
    table: pj.ScheduleTable, workload: "pj.Workload", system: "pj.System", held: HeldMemory
) -> dict[str, Any]:
    """Return the memory of each worker for `--json`, in all and by part [B]."""
    from pipejax.costs.stage.stage_work import static_parts

    # without backwards the ledger holds keys and values, and activations are those at work
    held_name = "keys and values" if table.grammar.forward_only else "activations"
    parts = static_parts(workload, table) | {held_name: held.memory.peak}
    if float(system.memory_reserve) > 0:
        parts["reserve"] = np.full(table.num_workers, float(system.memory_reserve))
    needed = held.stages.static + held.memory.peak
    return {"memory_bytes": needed, "memory_parts": parts}


def op_rows(
    evaluation: "pj.Evaluation", name: str, node_values: NumpyArray
) -> list[dict[str, Any]]:
    """Return the number of every op's node for `--json`, under a name."""
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
    """Show the least and the most of each phase on each worker, with the op that has it."""
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


_OP = re.compile(r"(\d+)([A-Za-z_]+)(\d+)")
_SHOWN = 3  # runs of ops that are shown at either end of a path
_ROUNDING = 1e-12  # of the length: what is closer to the longest is as long


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
    """List the longest paths: how much shorter each is, its counts, and its ops."""
    columns = [
        Column("path", "number"),
        Column("length", "length", seconds),
        Column("shorter by", _shorter_by),
        *(Column(name, name) for name in (rows[0]["counts"] if rows else ())),
        Column("ops", "ops", short_form),
    ]
    return rows_table(
        ({**row, **row["counts"], "number": k} for k, row in enumerate(rows, 1)), columns
    )


def _shorter_by(row: Mapping[str, Any]) -> str:
    is_rounding = row["behind"] <= _ROUNDING * row["length"]
    return seconds(0.0 if is_rounding else row["behind"])


def short_form(ops: Iterable[str]) -> str:
    """Write ops of a path shortly: 0F0 0F1 0F2 1F2 2F2 as 0F0-2 1-2F2."""
    runs: list[list[tuple[str, ...]]] = []  # ops as (stage, phase, microbatch)
    for text in ops:
        parts = _OP.fullmatch(text)
        op = parts.groups() if parts else (text,)
        if runs and _continues(runs[-1], op):
            runs[-1].append(op)
        else:
            runs.append([op])
    texts = [_text(run) for run in runs]
    if len(texts) > 2 * _SHOWN + 1:
        texts[_SHOWN:-_SHOWN] = ["..."]
    return " ".join(texts)


def _continues(run: list[tuple[str, ...]], op: tuple[str, ...]) -> bool:
    """Return whether an op continues a run: stage or microbatch moves by 1, and as before."""
    if len(op) != 3 or len(run[-1]) != 3 or run[-1][1] != op[1]:
        return False
    step = _step(run[-1], op)
    return sorted(map(abs, step)) == [0, 1] and (len(run) == 1 or step == _step(run[-2], run[-1]))


def _step(op: tuple[str, ...], next_op: tuple[str, ...]) -> tuple[int, int]:
    """Return the steps of stage and microbatch from an op to the next one."""
    return int(next_op[0]) - int(op[0]), int(next_op[2]) - int(op[2])


def _text(run: list[tuple[str, ...]]) -> str:
    if len(run) == 1:
        return "".join(run[0])
    (stage, phase, microbatch), (last_stage, _, last_microbatch) = run[0], run[-1]
    stages = stage if stage == last_stage else f"{stage}-{last_stage}"
    microbatches = f"{microbatch}-{last_microbatch}"
    return stages + phase + (microbatch if microbatch == last_microbatch else microbatches)
