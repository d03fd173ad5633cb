"""A plan as text: the best layout, the next ones, and what would change the order."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipejax.cli.output.numbers import gigabytes, percent, seconds
from pipejax.cli.output.report import Column, folded, plain, table_of

if TYPE_CHECKING:
    from pipejax.analysis.step.evidence import Evidence
    from pipejax.sweep.plan.result import PlannedLayout, PlanResult

WORDS = {  # degrees of a layout, in the order in which a row names them
    "tensor": "TP",
    "context": "CP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "data": "DP",
    "pipeline": "PP",
    "stages_per_worker": "VPP",
    "microbatch_size": "microbatch",
    "microbatches": "microbatches",
}
SPLITS = 3  # other splits of the layers that a row names
REVERSALS = 2  # numbers of the machine that a report names
UNITS = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s")}


def plan_view(found: "PlanResult") -> Iterator[object]:
    """Yield the best layout, how sure it is, what was assumed, and the next ones."""
    best, request = found.best, found.request
    yield (
        f"[bold]{seconds(best.step_time)}[/] per step{_band(best)} for {request.model.name} on "
        f"{request.gpus} {request.system.name}: {_long_text(best)}"
    )
    yield plain(
        f"MFU {percent(best.mfu)}; memory {gigabytes(best.memory_bytes)}; bound by {best.bound_by}"
    )
    yield evidence_line(best.regime, best.evidence, request.system.name)
    yield _room(found)
    yield _assumptions(found)
    if found.runners_up:
        yield from _break_even(found)
    if found.outside:
        first = found.outside[0]
        yield plain(
            f"not ranked, too little is measured of {first.regime}: {seconds(first.step_time)} "
            f"with {_long_text(first)}; calibrate first"
        )


def plan_details(found: "PlanResult") -> dict[str, list[object]]:
    """Return the layouts that come next, those that are not ranked, and the search."""
    search = (
        f"{found.enumerated:,} layouts, {found.fitting:,} fit the memory; {found.evaluated:,} were "
        f"evaluated in {found.seconds:.3g} s, all others are provably slower"
    )
    details: dict[str, list[object]] = {
        "best layouts": [_table((found.best, *found.runners_up))],
        "layouts that are not ranked": [_table(found.outside)] if found.outside else [],
        "search": [plain(search)],
    }
    return {name: parts for name, parts in details.items() if parts}


def _long_text(one: "PlannedLayout") -> str:
    """Return a layout in words, without what has its usual value."""
    layout = one.layout
    sizes = [f"{words} {layout[name]}" for name, words in WORDS.items() if layout[name] > 1]
    kept = f", recompute {layout['recompute']}" * (layout["recompute"] != "none")
    return f"{layout['schedule']}, {', '.join(sizes)}, ZeRO {layout['zero']}{kept}"


def evidence_line(regime: object, known: "Evidence | None", system: str) -> object:
    """Return how far predictions of similar runs were off."""
    if known is None:
        return plain(f"extrapolated: no measured run on {system} is like this one ({regime})")
    return plain(
        f"evidence: {known.configurations} measured configurations like this one ({regime}) were "
        f"predicted within {known.mean_error:.3g} % on average"
    )


def _room(found: "PlanResult") -> object:
    """Return what tensors may take, and why."""
    request = found.request
    if request.memory_limit is not None:
        return plain(f"tensors may take {gigabytes(request.room)} (--memory-limit)")
    whole = gigabytes(float(request.system.memory_available))
    return plain(
        f"tensors may take {gigabytes(request.room)}: {100 * request.headroom:g} % of {whole} stay "
        "free for fragmentation (--headroom)"
    )


def _assumptions(found: "PlanResult") -> object:
    """Return what was assumed of exchanges and of gradients."""
    share = found.request.shared.get("overlap", 0.0)
    overlap = f"{100 * share:g} % of communication that fits overlaps compute"
    if not share:
        overlap = "no communication overlaps compute (--overlap 1: all that fits does)"
    model = found.best.workload.model
    size = model.gradient_bytes or model.element_bytes
    return plain(f"assumes: {overlap}; gradients of {8 * float(size):g} bits")


def _break_even(found: "PlanResult") -> Iterator[object]:
    """Yield what would have to hold for the runner-up to win."""
    lag = found.runners_up[0].step_time / found.best.step_time - 1
    if lag <= 0:
        yield "the second layout is as fast, but less is measured of such layouts"
        return
    cases = [
        f"{number.number} is {_quantity(number.number, number.value)} ({number.factor:.3g} times)"
        for number in found.break_even_factors[:REVERSALS]
    ]
    when = "and stays behind if any one number of the machine is up to 8 times off"
    if cases:
        when = f"and wins if {', or if '.join(cases)}"
    yield plain(f"the second layout is {percent(lag)} slower, {when}")


def _quantity(number: str, value: float) -> str:
    from pipejax.costs.system.parts import number_dimension  # needs JAX, which help does without

    if (dimension := number_dimension(number)) == "s":
        return seconds(value)
    factor, unit = UNITS[dimension]
    return f"{value / factor:.4g} {unit}"


def _table(layouts: "Sequence[PlannedLayout]") -> object:
    """Show one row for each layout; what is the same in all stands below."""
    columns = (
        Column("step", "step_time", seconds),
        Column("memory", "memory_bytes", gigabytes),
        Column("schedule", "schedule"),
        *(Column(words, name) for name, words in WORDS.items()),
        Column("ZeRO", "zero"),
        Column("recompute", "recompute"),
        Column("other splits", "splits"),
        Column("bound by", "bound_by"),
    )
    rows = ({**vars(one), **one.layout, "splits": " ".join(_splits(one))} for one in layouts)
    return folded(table_of(rows, columns, keys=2))


def _splits(one: "PlannedLayout") -> Iterator[str]:
    """Yield whether embedding and head count as layers, and how else layers could be split."""
    if one.layout["embedding_units"]:
        yield "edges"
    also = [
        f"V{split['stages_per_worker']}" + " edges" * (split["embedding_units"] > 0)
        for split in one.also
    ]
    if also:
        yield f"(also {', '.join(also[:SPLITS])}{', ..' * (len(also) > SPLITS)})"


def _band(one: "PlannedLayout") -> str:
    if one.band is None:
        return ""
    low, high = one.band
    return f" ({one.band_percent:g} %: {seconds(low)} to {seconds(high)})"
