"""The checker's own account of the activation memory of a run (docs/semantics.md, Memory)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipejax.analysis.verify.event_run import EventRun, of_microbatch

Curve = list[tuple[float, float]]  # (time [s], held from then on)


class ActivationSizes(NamedTuple):
    """What activations take, by stage, in one unit; or lists by stage and microbatch.

    Attributes:
      whole: all of an activation.
      weight_share: share of it that W needs after I.
      checkpoints: what F leaves of it where R comes later.
    """

    whole: Sequence[Any]
    weight_share: Sequence[Any]
    checkpoints: Sequence[Any]


def memory_curves(run: EventRun, sizes: ActivationSizes) -> list[Curve]:
    """Follow what each worker holds; at one moment only the sum of all changes counts (rule 5)."""
    changes: list[dict[float, float]] = [defaultdict(float) for _ in run.rows]
    for (phase, stage, microbatch), cell in run.at.items():
        whole, share, rest = (of_microbatch(size[stage], microbatch) for size in sizes)
        left = rest if ("R", stage, microbatch) in run.at else whole
        for_weights = share * whole
        taken = {"F": left, "R": whole - left, "L": left}
        freed = {"B": whole, "I": whole - for_weights, "W": for_weights, "O": left}
        if phase in taken:
            changes[cell[0]][run.start[cell]] += taken[phase]
        if phase in freed:
            changes[cell[0]][run.end[cell]] -= freed[phase]
    return [_summed(own) for own in changes]


def _summed(changes: dict[float, float]) -> Curve:
    curve, held = [], 0.0
    for moment in sorted(changes):
        held += changes[moment]
        curve.append((moment, held))
    return curve


def peaks_in_flight(run: EventRun) -> list[int]:
    """Count activations from F to the end of B or W, in row order; both of a pair count."""
    peaks = []
    for row in run.rows:
        held = peak = 0
        for cell in row:
            held += sum(op[0] == "F" for op in cell)
            peak = max(peak, held)
            held -= sum(op[0] in ("B", "W") for op in cell)
        peaks.append(peak)
    return peaks
