"""A plan and the options of launchers as text."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

import pipejax as pj
from pipejax.base.data_files import load_json
from pipejax.cli.output.numbers import gigabytes, percent, quantity, seconds
from pipejax.cli.output.report import folded, pick, plain
from pipejax.cli.output.tables import Column, rows_table

if TYPE_CHECKING:
    from pipejax.analysis.step.evidence import Evidence
    from pipejax.sweep.plan.result import PlannedLayout, PlanResult

MAX_LAYER_COUNTS = 32  # of stages in a note; more are written as runs of equal numbers
MAX_OPTION_LETTERS = 200  # of an option with its value on a first screen


def launch_json(launches: "Iterable[pj.results.Launch]") -> dict[str, Any]:
    """Return the options of each launcher for `--json`, by its name."""
    return {launch.launcher: pick(launch, "options lacks program") for launch in launches}


def layout_json(
    workload: "pj.Workload | None", table: pj.ScheduleTable, launcher: str | None = None
) -> dict[str, Any]:
    """Return the layers of each stage, and notes on them; nothing without a workload."""
    if workload is None:
        return {}
    from pipejax.costs.model.launchers import find_launcher
    from pipejax.costs.model.workload import assign_layers

    layers = [int(count) for count in assign_layers(workload, table).layers]
    notes, record = [], find_launcher(launcher or "Megatron-LM")
    if len({*layers}) > 1:
        reason = f"{record.name} {record.uneven}"
        if workload.pipeline_layout:
            reason = "as --pipeline-layout has them"
        elif workload.embedding_units or workload.loss_units:
            reason = "embedding and head count as layers"
            units = workload.embedding_units + workload.loss_units
            if record.name == "torchtitan" and (sum(layers) + units) % len(layers):
                reason += "; torchtitan itself, without module names, gives the first stages more"
        text = " ".join(map(str, layers))
        if len(layers) > MAX_LAYER_COUNTS:  # as runs: 0, 126 x 1, 0
            runs = [(count, len([*same])) for count, same in itertools.groupby(layers)]
            text = ", ".join(f"{n} x {count}" if n > 1 else str(count) for count, n in runs)
        notes.append(f"layers of stages: {text} ({reason})")
    if workload.uneven_splits:
        splits = "; ".join(workload.uneven_splits)
        notes.append(f"no launcher runs it, times are of equal parts: {splits}")
    if "fp8" in workload.precision and record.name == "Megatron-LM":
        other = "weights count 2 bytes; without Megatron-LM's --fp8-param-gather"
        notes.append(f"{other}, copies in fp8 take 1 or 2 bytes more")
    expert_parts, is_default = workload.expert_tensor, not workload.expert_tensor_parallel
    if workload.has_experts and expert_parts > 1 and is_default:
        notes.append(
            f"tensor parallelism cuts each expert in {expert_parts} parts, Megatron-LM's default; "
            "torchtitan's is 1: --expert-tensor-parallel"
        )
    return {"layers_of_stages": layers} | ({"notes": notes} if notes else {})


def launch_lines(
    launches: "Iterable[pj.results.Launch]", *, full: bool = False, short: bool = False
) -> Iterator[Text]:
    """Yield the gaps of each launcher, or else its options; `full`: both; `short` cuts values."""
    for launch in launches:
        lacks = f"lacks {'; '.join(launch.lacks)}" if launch.lacks else ""
        options = launch.text if full or not lacks else ""
        for name, value in launch.options.items() if short else ():
            text = launch._replace(options={name: value}, program="").text
            if (rest := len(text) - MAX_OPTION_LETTERS) > 0:
                note = f"... ({rest} more characters; --details or --json has all)"
                options = options.replace(text, text[:MAX_OPTION_LETTERS] + note)
        yield plain(f"{launch.launcher}: {'; the rest: '.join(filter(None, (lacks, options)))}")


TEXTS = load_json(Path(__file__).with_name("plan_words.json"))
WORDS: Mapping[str, str] = TEXTS["degrees"]  # of a layout, in the order in which a row names them
LIMITS: Mapping[str, str] = TEXTS["limits"]  # by numbers of a section of the machine
MAX_SOURCES = 2  # publications that a line names
MAX_DEFAULTS = 2  # lines of defaults of launchers on the first screen
MAX_BREAK_EVEN = 2  # numbers of the machine that a report names
OVERLAPS = (  # fields of a workload, degree and name of the traffic, and the option
    ("overlap", "data", "exchanges of gradients and weights", "--overlap"),
    ("tensor_overlap", "tensor", "exchanges of tensor parallelism", "--tensor-overlap"),
)


def plan_view(plan: "PlanResult") -> Iterator[object]:
    """Yield the best layout, its evidence and assumptions, and the next layouts."""
    best, request, band = plan.best, plan.request, ""
    if best.band is not None:
        low, high = map(seconds, best.band)
        band = f" ({best.band_percent:g} %: {low} to {high})"
    yield (
        f"[bold]{seconds(best.step_time)}[/] per step{band} for {request.model.name} with "
        f"sequences of {request.model.sequence:,} tokens on {request.gpus} {request.system.name}: "
        f"{layout_text(best.layout)}"
    )
    limit = LIMITS.get(best.bound_by.partition(".")[0], "other")
    fits, launcher_lines = _under_launchers(plan)
    if not fits:
        text = "warning: this layout fits in no launcher with its defaults"
        yield f"{text}; plan for one: --launcher NAME"
    yield plain(
        f"MFU {percent(best.mfu)} (causal attention counted in full); memory "
        f"{gigabytes(best.memory_bytes)} per accelerator; bottleneck: {limit} ({best.bound_by} of "
        "the system)"
    )
    yield from _measured_memory(plan)
    best_evidence = evidence_json(best.evidence, best.step_time)
    yield from evidence_lines(best_evidence, best.regime, request.system.name)
    yield _memory_limit(plan)
    yield from _assumptions(plan)
    yield from launcher_lines[:MAX_DEFAULTS]
    if plan.runners_up:
        yield from _break_even(plan)
    for entry in plan.outside:
        evidence, kind, system = entry.evidence, f"({entry.regime})", request.system.name
        why = f"no run of its kind {kind} was measured on {system}"
        if best.evidence is not None and best.evidence.differs:
            why = f"measured runs differ more from it {kind} than from the first"
        if evidence is not None and evidence.is_many and not evidence.differs:
            why = f"predictions of its kind {kind} are {evidence.mean_error:.3g} % off"
        if best.memory_bytes <= request.safe_memory < entry.memory_bytes:
            factor = request.memory_factors[-1]
            need = gigabytes(factor * entry.memory_bytes)
            why = f"faster if it fits ({need} at {factor:.3g} times the predicted memory)"
        text = f"{seconds(entry.step_time)} with {layout_text(entry.layout)}"
        yield plain(f"not ranked: {text}; {why}")


def plan_details(plan: "PlanResult") -> dict[str, list[object]]:
    """Return measured runs, defaults of launchers, next and unranked layouts, and the search."""
    from pipejax.analysis.step.evidence import are_tied  # needs NumPy, which help does without

    search = (
        f"{plan.enumerated:,} layouts, {plan.fitting:,} fit the memory; {plan.evaluated:,} were "
        f"evaluated in {plan.seconds:.3g} s, all others are provably slower"
    )
    ranked = (plan.best, *plan.runners_up)
    ties = are_tied([row.step_time for row in ranked], [row.evidence for row in ranked])
    evidence = evidence_json(plan.best.evidence, plan.best.step_time)
    details: dict[str, list[object]] = {
        "measured runs": [evidence_details(evidence)] if evidence else [],
        "defaults of launchers": _under_launchers(plan)[1][MAX_DEFAULTS:],
        "best layouts": [_table(ranked, ties.tolist() if plan.tied > 1 else ())],
        "layouts that are not ranked": [_table(plan.outside)] if plan.outside else [],
        "search": [plain(search)],
    }
    return {name: parts for name, parts in details.items() if parts}


def layout_text(layout: Mapping[str, Any]) -> str:
    """Describe a layout in words; leave out sizes of 1, and recomputation if there is none."""
    sizes = [f"{word} {layout[name]}" for name, word in WORDS.items() if layout[name] > 1]
    if units := layout["embedding_units"]:
        sizes.append(f"embedding and head each count as {units:g} layer{'s' if units > 1 else ''}")
    recompute = "" if layout["recompute"] == "none" else f", recompute {layout['recompute']}"
    schedule = layout["schedule"] if layout["pipeline"] > 1 else "no pipeline"
    return f"{schedule}, {', '.join(sizes)}, ZeRO {layout['zero']}{recompute}"


def evidence_json(evidence: "Evidence | None", step: float) -> dict[str, Any] | None:
    """Return the nearest runs, their errors [%], and the range of a step time [s]; or None."""
    if evidence is None:
        return None
    names = "configurations mean_error bias sources system stack differs"
    basis = None if evidence.factors is None else evidence.factors.basis
    more = {"regime": str(evidence.regime), "range": evidence.range(step), "range_basis": basis}
    return pick(evidence, names) | more


def _measured_memory(plan: "PlanResult") -> Iterator[object]:
    """Yield how measured memory of the launcher's runs compares with predictions."""
    from pipejax.analysis.step.evidence import memory_factors  # needs NumPy, as in `_assumptions`
    from pipejax.costs.model.launchers import find_launcher

    factors, predicted = plan.request.memory_factors, plan.best.memory_bytes
    if not factors:
        return
    available = float(plan.request.system.memory_available)
    smallest, largest, hint = factors[0], factors[-1], ""
    is_split, source = plan.best.workload.zero == 3, find_launcher(plan.request.launcher).source
    alike = memory_factors(source, splits_weights=is_split)
    if alike and alike[-1] > largest:
        zero = "ZeRO 3" if is_split else "ZeRO 0 to 2"
        hint = f"; with {zero} in other precisions up to {alike[-1]:.3g} times"
    if predicted * largest > available:
        hint = f"; --memory-limit {available / largest / 1e9:.3g}GB leaves room{hint}"
    yield plain(
        f"measured runs of {plan.request.launcher} took {smallest:.3g} to {largest:.3g} times the "
        f"predicted memory ({len(factors)} configurations): here up to "
        f"{gigabytes(largest * predicted)} of {gigabytes(available)}{hint}"
    )


def evidence_lines(record: Mapping[str, Any] | None, regime: str, system: str) -> Iterator[object]:
    """Write the range of a step time and its nearest measured runs, from `evidence_json`."""
    if record is None:
        yield plain(f"extrapolated: nobody measured such runs ({regime}) on machines like {system}")
        return
    differs = f"; your run differs: {', '.join(record['differs'])}" if record["differs"] else ""
    expected = "extrapolated: no range is known"
    if record["range"] is not None:
        ends = " to ".join(map(seconds, record["range"]))
        basis = record["range_basis"].partition(",")[0]  # --json says what weighs less
        basis = basis.replace("models without experts", "dense models")
        expected = f"likely range: {ends} (90 % of runs, from our errors on {basis})"
    yield plain(expected)
    yield plain(
        f"most similar measured runs: {record['configurations']} ({_sources(record)}, "
        f"{record['system']}), predicted {record['mean_error']:.3g} % off on average{differs}"
    )


def _sources(record: Mapping[str, Any]) -> str:
    names = record["sources"]
    return ", ".join(names) if len(names) <= MAX_SOURCES else f"{len(names)} sources"


def evidence_details(record: Mapping[str, Any]) -> object:
    """Return what the nearest measured runs are, and their errors, from `evidence_json`."""
    bias = f"{abs(record['bias']):.3g} % too {'long' if record['bias'] >= 0 else 'short'}"
    wider = "; the likely range covers more sources" if record["range"] is not None else ""
    return plain(
        f"{record['configurations']} runs of {_sources(record)} ({record['regime']}) on "
        f"{record['system']} with {record['stack']}: our step times are "
        f"{record['mean_error']:.3g} % off on average (bias: {bias}){wider}"
    )


def _memory_limit(plan: "PlanResult") -> object:
    """Return the memory that tensors may take, and why."""
    request = plan.request
    if request.memory_limit is not None:
        return plain(f"memory limit: {gigabytes(request.usable_memory)} (--memory-limit)")
    available = gigabytes(float(request.system.memory_available))
    return plain(
        f"memory limit: {gigabytes(request.usable_memory)} = {available} minus "
        f"{100 * request.headroom:g} % for fragmentation (--headroom)"
    )


def _assumptions(plan: "PlanResult") -> Iterator[object]:
    """Yield the overlap of traffic, bits of gradients, and the layout with launchers' defaults."""
    from pipejax.costs.model.launchers import LAUNCHERS  # needs NumPy, which help does without

    overlaps = []
    for name, axis, traffic, flag in OVERLAPS:
        share = getattr(plan.best.workload, name)
        verb = {0.0: "do not overlap", 1.0: "overlap"}.get(share, f"overlap by {100 * share:g} %")
        if plan.best.layout[axis] > 1:
            scope = "compute"
            if axis == "data" and plan.best.layout["pipeline"] > 1:
                scope = "the stage's own compute"
                scope += f", {'and' if share else 'but'} run during backwards of other stages"
            overlaps.append(f"{traffic} {verb} with {scope} (change: {flag})")
    stack = plan.request.stack
    for launcher in LAUNCHERS.values():
        if stack and launcher.stack == stack:
            overlaps.append(f"eager kernels, not compiled (change: --stack {launcher.compiled})")
    gradient_bits = 8 * float(plan.best.workload.model.accumulated_bytes)
    yield plain(f"assumes: {'; '.join([*overlaps, f'gradients of {gradient_bits:g} bits'])}")


def _under_launchers(plan: "PlanResult") -> tuple[bool, list[object]]:
    """Return whether the layout fits with defaults of any launcher, and a line for each result."""
    from pipejax.costs.model.launchers import LAUNCHERS  # needs NumPy, which help does without

    names_by_result, others = dict[str, list[str]](), [*LAUNCHERS]
    for entry in plan.under_launchers:
        others = [name for name in others if name not in entry.launchers]
        result = f"{gigabytes(entry.memory_bytes)}, does not fit"
        if entry.fits:
            result = f"{seconds(entry.step_time)}, {gigabytes(entry.memory_bytes)}"
        stack = f" and --stack {entry.stack}, as in measured runs" if entry.stack else ""
        result = f"{stack} ({8 * entry.gradient_bytes:g}-bit gradients): {result}"
        names_by_result.setdefault(result, []).extend(entry.launchers)
    lines = [f"with defaults of {', '.join(n)}{result}" for result, n in names_by_result.items()]
    fits = bool(others) or any(entry.fits for entry in plan.under_launchers)
    if lines and fits and not plan.request.launcher:
        lines += [f"with defaults of {', '.join(others)}: as assumed above"] if others else []
        lines[min(len(lines), MAX_DEFAULTS) - 1] += "; plan for one: --launcher NAME"
    return fits, [*map(plain, lines)]


def _break_even(plan: "PlanResult") -> Iterator[object]:
    """Yield the layouts that tie, or changes of the machine that make the second one best."""
    from pipejax.costs.system.parts import number_dimension  # needs JAX, which help does without

    if plan.tied > 1:
        yield (
            f"{plan.tied} layouts tie: their times differ by less than our predictions are off "
            "(--details lists them)"
        )
        return
    lag = plan.runners_up[0].step_time / plan.best.step_time - 1
    cases = []
    for case in plan.break_even_factors[:MAX_BREAK_EVEN]:
        verb, dimension = "rises" if case.factor > 1 else "falls", number_dimension(case.number)
        now, then = (quantity(x, dimension) for x in (case.value / case.factor, case.value))
        cases.append(f"{case.number} {verb} from {now} to {then}")
    when = "stays slower than this layout if any one number of the machine is up to 8 times off"
    if cases:
        when = f"overtakes this layout if {', or if '.join(cases)}"
    yield plain(f"next best: {layout_text(plan.runners_up[0].layout)}; {percent(lag)} slower")
    yield plain(f"it {when}")


def _table(layouts: "Sequence[PlannedLayout]", ties: Sequence[bool] = ()) -> object:
    """Show one row for each layout, and whether it ties; values that all share stand below."""
    columns = (
        Column("step", "step_time", seconds),
        Column("memory", "memory_bytes", gigabytes),
        Column("schedule", "schedule"),
        *(Column(word, name) for name, word in WORDS.items()),
        Column("ZeRO", "zero"),
        Column("recompute", "recompute"),
        Column("bound by", "bound_by"),
        *([Column("tie", "tie")] if ties else []),
    )
    marks = ["yes" if is_tied else "no" for is_tied in ties] or [""] * len(layouts)
    pairs = zip(layouts, marks, strict=True)
    rows = ({**vars(entry), **entry.layout, "tie": mark} for entry, mark in pairs)
    return folded(rows_table(rows, columns, keys=2))
