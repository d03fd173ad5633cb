"""Derivation of all claims that a certificate makes about a run."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipejax.checker.prices import AT_WORK, SIZES, Prices
from pipejax.checker.rules import TableOp, TableRules
from pipejax.checker.run import Run, by_worker
from pipejax.checker.values import at_microbatch, is_real

ROUNDING = 1e-9  # allowed difference of sums, relative to the largest time or memory
# kind of quantity of each claim that is not a time
QUANTITIES = {"peak_memory": "memory", "held": "memory", "peak_in_flight": "count"}
QUANTITIES |= {"offloaded": "count"}
SEARCHED = "FBIWOL"  # ops whose starts an optimum claims
Curve = list[tuple[float, float]]  # moments, and the memory that a worker holds from then on


class Discrepancy(NamedTuple):
    """A claim of a certificate that does not hold."""

    claim: str  # name of the value, with op, worker and slot
    claimed: Any  # value in the certificate; None if the certificate has none
    derived: Any  # value that the checker derived; None if there is none
    why: str = ""  # reason for the derived value

    def __str__(self) -> str:
        """Describe the discrepancy in one line."""
        values = self.claimed, self.derived
        claimed, derived = ("nothing" if value is None else value for value in values)
        line = f"{self.claim}: claimed {claimed}, derived {derived}"
        return f"{line}, {self.why}" if self.why else line


def derive(run: Run, memory: Prices) -> dict[str, Any]:
    """Derive {key: value} of all claims and proofs in the certificate of a run."""
    workers = range(len(run.table.rows))
    on_compute = [run.worker_events(worker) for worker in workers]
    spans = []
    for events in on_compute:
        ops = [event for event in events if run.is_span_op(event)]
        starts, ends = [run.start[op] for op in ops], [run.end[op] for op in ops]
        spans.append(max(ends) - min(starts) if ops else 0.0)
    curves = [memory_curve(run, memory, worker) for worker in workers]
    cells = (event for event in run.end if event not in run.messages)
    return {
        "makespan": max(run.end.values()),
        "max_span": max(spans),
        "busy": by_worker(sum(run.durations[e] for e in events) for events in on_compute),
        "peak_in_flight": by_worker(peak_in_flight(row, run.rules) for row in run.table.rows),
        "offloaded": sum(op.letters == "O" for op in run.table.cell),
        "ops": {run.name(e): {"start": run.start[e], "end": run.end[e]} for e in cells},
        "transfers": {
            run.name(event): {"leaves": run.start[event], "arrives": run.end[event] + message.lag}
            for event, message in run.messages.items()
        },
        "peak_memory": by_worker(max([0.0, *(held for _, held in c)]) for c in curves),
        "held_from": by_worker([moment for moment, _ in curve] for curve in curves),
        "held": by_worker([held for _, held in curve] for curve in curves),
    }


def derive_optimum(run: Run, value: float, checksum: str) -> dict[str, Any]:
    """Derive {key: value} of the claims in a search's certificate from a run of its table."""
    starts = {
        f"{stage}{letters}{microbatch}": run.start[cell]
        for (letters, stage, microbatch), cell in run.table.cell.items()
        if letters in SEARCHED
    }
    return {"value": value, "starts": starts, "checksum": checksum}


def peak_in_flight(row: list[list[TableOp]], rules: TableRules) -> float:
    """Return the largest number of activations that a worker holds while it executes its row."""

    def change(cell: list[TableOp], moment: str) -> float:
        """Return the change of activations by ops of added kinds, "at_start" or "at_end"."""
        # A kind takes (+) or frees (-) items; an item may be a share of an activation.
        kinds = (rules.kinds[op.letters] for op in cell if op.letters in rules.kinds)
        return sum(
            count * rules.items.get(part, 1)
            for kind in kinds
            if kind["lane"] != "host"
            for part, count in kind[moment].items()
        )

    peak: float = 0
    held: float = 0
    for cell in row:
        held += sum(op.letters == "F" for op in cell) + change(cell, "at_start")
        peak = max(peak, held)
        held += change(cell, "at_end") - sum(op.letters in ("B", "W") for op in cell)
    return peak


def memory_curve(run: Run, memory: Prices, worker: int) -> Curve:
    """List (time of a change, memory of the worker from then on) in the order of time."""
    changes: dict[float, float] = defaultdict(float)
    for slot, cell in enumerate(run.table.rows[worker]):
        event = worker, slot
        for op in cell if event in run.end else ():
            at_start, at_end = _changes(op, run, memory)
            if op.letters in at_start:
                changes[run.start[event]] += at_start[op.letters]
            if op.letters in at_end:
                changes[run.end[event]] += at_end[op.letters]
    curve, held = [], 0.0
    for moment in sorted(changes):
        held += changes[moment]
        curve.append((moment, held))
    return curve


def _changes(op: TableOp, run: Run, memory: Prices) -> tuple[dict[str, float], dict[str, float]]:
    """Return two dicts {letters: change of memory}: at the start and at the end of ops."""
    letters, rules = op.letters, run.rules
    # ops without a stage have the sizes of the last stage, ops without a microbatch of the first
    stage, microbatch = -1 if isinstance(op.stage, str) else op.stage, max(op.microbatch, 0)
    size, share, checkpoint = (at_microbatch(memory[key][stage], microbatch) for key in SIZES)
    for_w = share * size
    phases = ["R", *rules.recomputing()]
    is_recomputed = any((phase, stage, microbatch) in run.table.cell for phase in phases)
    forward = checkpoint if is_recomputed else size  # memory that F leaves
    at_start = {"F": forward, "R": size - forward, "L": forward}
    at_end = {"B": -size, "I": -(size - for_w), "W": -for_w, "O": -forward}
    for work, sizes in zip("BIW", memory.get(AT_WORK, ()), strict=False):  # only with a model
        extra = at_microbatch(sizes[stage], microbatch)
        at_start[work], at_end[work] = extra, at_end[work] - extra
    if letters in rules.kinds:
        parts = {"activation": size, "for_w": for_w, "checkpoint": checkpoint}
        parts |= {item: share * size for item, share in rules.items.items()}
        for moment, changes in (("at_start", at_start), ("at_end", at_end)):
            counts = rules.kinds[letters][moment]
            if counts:
                changes[letters] = sum(count * parts[part] for part, count in counts.items())
    return at_start, at_end


def tolerances(derived: dict[str, Any], memory: Prices, rules: TableRules) -> dict[str, float]:
    """Return {"time": .., "memory": .., "count": ..}: by how much claims may differ from a run."""
    sizes = [size for key in ("sizes", "checkpoints") for size in _numbers(memory[key])]
    largest = max([*sizes, *derived["peak_memory"].values()])
    # counts must be exact, unless the grammar has items, which may be fractions
    counts = max(derived["peak_in_flight"].values()) if rules.items else 0
    sums = {"time": derived["makespan"], "memory": largest, "count": counts}
    return {name: ROUNDING * value for name, value in sums.items()}


def _numbers(values: Any) -> Iterator[float]:
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, list):
            yield from _numbers(value)
        else:
            yield value


def differences(claimed: Any, derived: Any, within: float, where: str) -> Iterator[Discrepancy]:
    """List the differences between a claim and the derived value, both possibly nested."""
    if isinstance(claimed, dict) and isinstance(derived, dict):
        for key in [*derived, *(key for key in claimed if key not in derived)]:
            pair = claimed.get(key), derived.get(key)
            yield from differences(*pair, within, f"{where}: {key}")
    elif isinstance(claimed, list) and isinstance(derived, list) and len(claimed) == len(derived):
        for number, pair in enumerate(zip(claimed, derived, strict=True)):
            yield from differences(*pair, within, f"{where}[{number}]")
    elif isinstance(claimed, str) or not is_real(claimed) or not is_real(derived):
        if claimed != derived or type(claimed) is not type(derived):
            yield Discrepancy(where, claimed, derived)
    elif abs(claimed - derived) > within:
        yield Discrepancy(where, claimed, derived)
