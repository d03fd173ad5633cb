"""A plan as a person reads it: what is best, a row for each idea, what would change the answer."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.report import grid, plain

if TYPE_CHECKING:
    from pipejax.analysis.step.evidence import Evidence
    from pipejax.sweep.plan.result import PlannedLayout, PlanResult

LETTERS = {  # of the degrees of a layout, in the order in which a row names them
    "tensor": "t",
    "context": "c",
    "expert": "e",
    "expert_tensor": "etp",
    "data": "d",
    "pipeline": "p",
    "stages_per_worker": "V",
    "microbatch_size": "b",
    "microbatches": "M",
}
# are named where one of the rows has several
UNUSUAL = ("context", "expert", "expert_tensor", "stages_per_worker")
SPLITS = 3  # other splits of the layers that a row names
REVERSALS = 4  # numbers that are told
UNITS = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}


def plan_lines(found: "PlanResult") -> Iterator[object]:
    """Say what is best, how it compares, and how many layouts that stands on."""
    best, request = found.best, found.request
    yield (
        f"[bold]{request.model.name}[/] on {request.gpus} {request.system.name}, minibatch "
        f"{request.minibatch}: [bold]{seconds(best.step_time)}[/]{_band(best)}, MFU "
        f"{percent(best.mfu)}, bound by {best.bound_by}"
    )
    yield evidence_line(best.regime, best.evidence, request.system.name)
    yield _room(found)
    yield _beside(found)
    yield _table((best, *found.runners_up), "the shortest steps of all layouts that fit")
    yield from _turned_round(found)
    if found.outside:
        reason = (
            f"apart: nobody measured {' or '.join({one.regime: None for one in found.outside})} on "
            f"{request.system.name} closely enough: calibrate on runs of your own before you trust"
        )
        yield _table(found.outside, reason)
    yield plain(
        f"{found.enumerated:,} layouts, {found.fitting:,} fit the memory, {found.evaluated:,} "
        f"evaluated exactly with {found.programs:,} programs in {found.seconds:.1f} s: the lower "
        "bounds of the others are beyond these"
    )


def evidence_line(regime: object, known: "Evidence | None", system: str) -> object:
    """Return how far predictions of similar runs were off."""
    if known is None:
        return plain(f"extrapolated: no measured run on {system} is like this one ({regime})")
    return plain(
        f"evidence: {known.configurations} measured configurations like this one ({regime}) were "
        f"predicted within {known.mean_error:.3g} % on average"
    )


def _room(found: "PlanResult") -> object:
    """Say what tensors may take, and why."""
    request = found.request
    if request.memory_limit is not None:
        return plain(f"tensors may take {gigabytes(request.room)}, as --memory-limit says")
    whole = gigabytes(float(request.system.memory_available))
    return plain(
        f"tensors may take {gigabytes(request.room)}: {100 * request.headroom:g} % of {whole} are "
        "left for fragmentation and the allocator (--headroom)"
    )


def _beside(found: "PlanResult") -> object:
    """Say what was assumed of exchanges of replicas."""
    share = found.request.shared.get("overlap", 0.0)
    if not share:
        return "gradients and gathered weights wait; --overlap 1 takes them beside compute"
    return plain(f"gradients and gathered weights: {100 * share:g} % of what fits beside compute")


def _turned_round(found: "PlanResult") -> Iterator[object]:
    """Say what would have to hold for the runner-up to win."""
    if not found.runners_up:
        return
    behind = found.runners_up[0].step_time / found.best.step_time - 1
    if behind <= 0:
        yield plain(
            "the runner-up's step is no longer: it is second because its evidence is weaker"
        )
        return
    told = [
        f"{one.number} is {_quantity(one.number, one.value)} ({one.factor:.3g} times)"
        for one in found.break_even_factors[:REVERSALS]
    ]
    when = "no number of the machine alone turns them round, 8 times smaller or larger"
    if told:
        when = f"it wins if {', or if '.join(told)}"
    yield plain(f"the runner-up is {percent(behind)} behind: {when}")


def _quantity(number: str, value: float) -> str:
    from pipejax.costs.system.parts import number_dimension  # needs JAX, which help does without

    if (dimension := number_dimension(number)) == "s":
        return seconds(value)
    factor, unit = UNITS[dimension]
    return f"{value / factor:.4g} {unit}"


def _table(shown: "Sequence[PlannedLayout]", title: str) -> object:
    """One row for each idea, whose memory stands in it however narrow the terminal is."""
    few = {name for name in UNUSUAL if all(one.layout[name] == 1 for one in shown)}
    letters = {name: letter for name, letter in LETTERS.items() if name not in few}
    parts = {
        "schedule": [one.layout["schedule"] for one in shown],
        "degrees": [" ".join(f"{k}{one.layout[n]}" for n, k in letters.items()) for one in shown],
        "ZeRO": [f"ZeRO {one.layout['zero']}" for one in shown],
        "recompute": [f"recompute {one.layout['recompute']}" for one in shown],
        "bound": [f"bound by {one.bound_by}" for one in shown],
    }
    alike = {name for name, cells in parts.items() if name != "degrees" and len({*cells}) == 1}
    rows = zip(*(cells for name, cells in parts.items() if name not in alike), strict=True)
    common = [parts[name][0] for name in parts if name in alike and name != "bound"]
    columns: list[tuple[str, list[str]]] = [
        ("layout", [" ".join([*row, *_splits(one)]) for row, one in zip(rows, shown, strict=True)]),
        ("step", [seconds(one.step_time) for one in shown]),
        ("memory", [gigabytes(one.memory_bytes) for one in shown]),
    ]
    if any(one.chance for one in shown):
        columns.append(("chance", [percent(one.chance) for one in shown]))
    return grid(columns, title=title, caption=f"all: {', '.join(common)}" if common else None)


def _splits(one: "PlannedLayout") -> Iterator[str]:
    """Say whether embedding and head count as layers, and how else layers could be split."""
    if one.layout["embedding_units"]:
        yield "edges"
    also = [
        f"V{each['stages_per_worker']}" + " edges" * (each["embedding_units"] > 0)
        for each in one.also
    ]
    if also:
        yield f"(also {', '.join(also[:SPLITS])}{', ..' * (len(also) > SPLITS)})"


def _band(one: "PlannedLayout") -> str:
    if one.band is None:
        return ""
    low, high = one.band
    return f" ({one.band_percent:g} %: {seconds(low)} to {seconds(high)})"
