"""Evidence: the measured runs most like a workload, and the range of its measured step time."""

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Bool, Float, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.layers.formulas import OPERAND_BYTES
from pipejax.costs.measured.measured_rows import CONFIGURATION, MeasuredRows
from pipejax.costs.model.launchers import find_launcher
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import DATA, System

EVIDENCE = DATA / "evidence.json"
MIN_CONFIGURATIONS = 3  # fewer measured runs are not enough evidence
MAX_MEAN_ERROR = 15.0  # if predictions err by more, measured runs are not enough evidence [%]
PERCENT = 90  # share of measured times that a range holds [%]
EXPERTS = ("no experts", "experts within nodes", "experts over nodes")
GENERATIONS = {
    "Ampere": ("a100", "a100-40gb", "a100-vtrain"),
    "Hopper": ("h100", "h100-500w", "h200"),
    "Blackwell": ("b200", "b200-simumax", "b300", "gb200", "gb300"),
}
DEFAULT_STACK = "megatron-core-2024"  # stack of systems that name no stack
DEFAULT_LAUNCHERS = ("", "Megatron-LM", "Megatron-Bridge")  # launchers that use the default stack


@short_repr
class Regime(NamedTuple):
    """Facts about a workload that decide which parts of the cost model matter most."""

    splits_weights: bool  # whether replicas split weights (ZeRO 3), and gather them in each layer
    experts: int  # index in `EXPERTS`
    bits: int  # number of bits of a matrix product's operand

    @property
    def facts(self) -> tuple[str, ...]:
        """Return the facts of the regime in words."""
        zero = "ZeRO 3" if self.splits_weights else "ZeRO 0 to 2"
        return f"{self.bits} bits", zero, EXPERTS[self.experts]

    def __str__(self) -> str:
        return ", ".join(self.facts)


@short_repr
class Runs(NamedTuple):
    """Errors of predictions for measured runs of one source, system, stack and regime."""

    source: str
    system: str
    stack: str
    regime: Regime
    errors: tuple[float, ...]  # step time, predicted / measured - 1 of each configuration [%]
    memory: tuple[float, ...] = ()  # fullest worker's memory, predicted / measured - 1 [%]


@short_repr
class ErrorRange(NamedTuple):
    """Range that holds `PERCENT` % of the ratios measured / predicted step time."""

    low: float
    high: float
    basis: str  # description of the runs that give the range


@short_repr
class Evidence(NamedTuple):
    """Measured runs that are most like a workload, and the range of its step time."""

    regime: Regime  # regime of the runs
    errors: tuple[float, ...]  # predicted / measured - 1 of each configuration [%]
    sources: tuple[str, ...] = ()  # publications of the runs
    system: str = ""
    stack: str = ""
    differs: tuple[str, ...] = ()  # facts of the workload that the runs do not share
    factors: ErrorRange | None = None  # range of measured / predicted step time; None if unknown

    @property
    def configurations(self) -> int:
        """Return the number of measured configurations."""
        return len(self.errors)

    @property
    def mean_error(self) -> float:
        """Return the mean absolute error of the runs' predictions [%]."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def bias(self) -> float:
        """Return the mean error of the predicted step times [%]; negative if they are too short."""
        return float(np.mean(self.errors))

    @property
    def spread(self) -> float:
        """Return the mean absolute difference of two errors [%]; NaN if there is one error."""
        differences = [abs(a - b) for a, b in itertools.combinations(self.errors, 2)]
        return float(np.mean(differences)) if differences else math.nan

    @property
    def is_many(self) -> bool:
        """Return whether the configurations suffice to judge predictions."""
        return self.configurations >= MIN_CONFIGURATIONS

    @property
    def is_enough(self) -> bool:
        """Return whether the runs share the workload's facts, are many, and were predicted well."""
        return not self.differs and self.is_many and self.mean_error <= MAX_MEAN_ERROR

    def range(self, step: float) -> tuple[float, float] | None:
        """Return the range of measured times [s] for a predicted step; None if unknown."""
        return None if self.factors is None else (step * self.factors.low, step * self.factors.high)


def operand_bits(precision: str) -> int:
    """Return the number of bits of a matrix product's operand, without shared scales."""
    return int(8 * OPERAND_BYTES.get(precision, 2.0))


def row_regimes(rows: MeasuredRows, per_node: float) -> list[Regime]:
    """Return each row's regime; `per_node` is the default number of accelerators per node."""
    # the accelerators of an expert group are neighbours, so they fill a node first
    node_size = np.where(rows.accelerators_per_node > 0, rows.accelerators_per_node, per_node)
    # index in `EXPERTS`: 0 without experts, 1 if they are within a node, 2 if across nodes
    experts = np.where(rows.column("experts") > 0, 1 + (rows.expert > node_size), 0)
    bits = map(operand_bits, rows.precision.tolist())
    columns = zip((rows.zero >= 3).tolist(), experts.tolist(), bits, strict=True)
    return [Regime(*values) for values in columns]


def workload_regime(workload: Workload, per_node: float) -> Regime:
    """Return a workload's regime on nodes with `per_node` accelerators."""
    experts = 0 if workload.model.moe is None else 1 + (workload.expert_parallel > per_node)
    return Regime(workload.zero >= 3, int(experts), operand_bits(workload.precision))


def group_errors(
    rows: MeasuredRows, error: Float[NumpyArray, " rows"], per_node: float
) -> dict[Regime, tuple[float, ...]]:
    """Return {regime: mean prediction error of each configuration [%]}.

    `error` is predicted / measured - 1 of each row, not in percent.
    """
    texts = [rows.column(name).astype(str) for name in CONFIGURATION]
    runs = list(zip(*(column.tolist() for column in texts), strict=True))
    errors: dict[Regime, dict[tuple[str, ...], list[float]]] = {}
    for regime, run, value in zip(row_regimes(rows, per_node), runs, error.tolist(), strict=True):
        if np.isfinite(value):
            errors.setdefault(regime, {}).setdefault(run, []).append(100 * value)
    return {
        regime: tuple(round(float(np.mean(values)), 2) for values in by_run.values())
        for regime, by_run in sorted(errors.items())
    }


def as_numbers(errors: dict[Regime, tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
    """Convert errors to rows of a system's file: three numbers of a regime, then errors [%]."""
    return tuple((*map(int, regime), *values) for regime, values in errors.items())


def from_numbers(row: Sequence[float]) -> tuple[Regime, tuple[float, ...]]:
    """Convert a row of `as_numbers` back to (regime, errors)."""
    splits, experts, bits, *errors = row
    return Regime(bool(splits), int(experts), int(bits)), tuple(errors)


def as_runs(records: Iterable[Mapping[str, Any]]) -> tuple[Runs, ...]:
    """Convert records, in the form of the file `EVIDENCE`, to `Runs`."""
    runs = []
    for record in records:
        memory = dict(map(from_numbers, record.get("memory", ())))
        source, system, stack = record["source"], record["system"], record["stack"]
        for regime, errors in map(from_numbers, record["errors"]):
            runs.append(Runs(source, system, stack, regime, errors, memory.get(regime, ())))
    return tuple(runs)


@functools.cache
def measured_runs() -> tuple[Runs, ...]:
    """Return the measured runs that come with pipejax."""
    return as_runs(json.loads(EVIDENCE.read_text("utf-8")))


def memory_factors(source: str, **facts: Any) -> list[float]:
    """List the ratios measured / predicted memory of a source's runs with these facts."""
    # facts are fields of `Regime`, such as bits=16
    groups = [
        runs.memory
        for runs in measured_runs()
        if runs.source == source and runs.regime == runs.regime._replace(**facts)
    ]
    return sorted(1 / (1 + error / 100) for errors in groups for error in errors)


def sure_memory(limit: float, available: float, factors: Sequence[float]) -> float:
    """Return the predicted memory [B] up to which a run surely fits.

    `factors` are the ratios measured / predicted memory. Even with the largest factor, such a
    run needs at most the available memory.
    """
    return min(limit, available / factors[-1]) if factors else limit


def _generation(system: str) -> str:
    return next((name for name, systems in GENERATIONS.items() if system in systems), "")


def _with_equal_experts(runs: Iterable[Runs], regime: Regime) -> list[Runs]:
    """Return the runs of models with experts if the regime has experts, else the other runs."""
    return [group for group in runs if (group.regime.experts > 0) == (regime.experts > 0)]


def error_range(regime: Regime, system: str, runs: Iterable[Runs]) -> ErrorRange | None:
    """Return the range of measured / predicted step time for a new source; None without runs.

    The K nearest sources measured models with experts, if the regime has experts, else models
    without, on this generation of machines. Each of them has weight 1 / (K + 1). The rest of the
    weight is divided in the same way over the sources of all generations, then of all models. All
    runs of a source have equal weight. The range leaves out 5 (K - 1) / (K + 1) % at either end.
    """
    # With 2 nearest sources and 3 on all generations, a source has weight 1/3 among the nearest,
    # and 1/3 * 1/4 among all generations.
    all_runs, generation = tuple(runs), _generation(system)
    all_generations = _with_equal_experts(all_runs, regime)
    near = [group for group in all_generations if generation == _generation(group.system)]
    if not generation or not near:
        return None
    ratios: list[float] = []
    weights: list[float] = []
    source_weight = 1.0
    for groups in (near, all_generations, all_runs):
        errors: dict[str, list[float]] = {}  # by source
        for group in groups:
            errors.setdefault(group.source, []).extend(group.errors)
        source_weight /= len(errors) + 1  # weight of a source, and of all wider sets together
        for values in errors.values():
            ratios += [1 / (1 + error / 100) for error in values]
            weights += [source_weight / len(values)] * len(values)
    # A further draw lies between the smallest and the largest of K draws with probability
    # (K - 1) / (K + 1). So the fewer sources there are, the less is cut off at either end.
    sources = len({group.source for group in near})
    tail = (1 - PERCENT / 100) / 2 * (sources - 1) / (sources + 1)
    ends = np.quantile(ratios, [tail, 1 - tail], weights=weights, method="inverted_cdf")
    low, high = ends.tolist()
    kind = "with" if regime.experts else "without"
    noun = "data source" if sources == 1 else "data sources"
    basis = f"{sources} {noun} of models {kind} experts on {generation}"
    # true if the wider sets, of weight 1 / (K + 1), weigh more than the range leaves out
    is_wide = (sources - 1) * (100 - PERCENT) < 100
    return ErrorRange(low, high, f"{basis}, all others with less weight" if is_wide else basis)


def find_evidence(
    regime: Regime, system: System, stack: str, launcher: str = ""
) -> Evidence | None:
    """Find the measured runs most like a workload. Return None if there are no such runs."""
    # A calibrated machine uses the runs of its calibration, and their band as the range. Other
    # machines use runs that come with pipejax, on machines of the same generation. The models have
    # experts if the workload's model has experts. An empty stack stands for the default stack.
    record, software = system.calibration, stack or DEFAULT_STACK
    # `runs` are the candidates, `factors` is their range of measured / predicted step time
    if record is None:
        factors = error_range(regime, system.name, measured_runs())
        runs = [x for x in measured_runs() if _generation(x.system) == _generation(system.name)]
    else:
        software = stack or record.stack or DEFAULT_STACK
        rows = map(from_numbers, record.evidence)  # (regime, errors, memory)
        runs = [Runs(record.source, system.name, record.stack or software, *row) for row in rows]
        bands = (band for band in record.bands if band.percent == PERCENT)
        factors = next((ErrorRange(b.low, b.high, "its own runs") for b in bands), None)
    groups: dict[tuple[str, str, Regime], list[Runs]] = {}
    for group in _with_equal_experts(runs, regime):
        groups.setdefault((group.system, group.stack, group.regime), []).append(group)
    facts = *regime.facts, system.name, software
    is_unmeasured = record is None and not stack and launcher not in DEFAULT_LAUNCHERS
    unmeasured = f"{launcher} with kernels priced as those of {software}, which nobody measured"
    if is_unmeasured and (name := find_launcher(launcher).measured):
        unmeasured += f" (change: --stack {name})"
    candidates = []
    for (run_system, run_stack, run_regime), members in groups.items():
        run_facts = *run_regime.facts, run_system, run_stack
        differs = tuple(a for a, b in zip(facts, run_facts, strict=True) if a != b)
        if is_unmeasured:
            differs = (*(fact for fact in differs if fact != software), unmeasured)
        errors = tuple(error for group in members for error in group.errors)
        sources = tuple(dict.fromkeys(group.source for group in members))
        # a calibration holds for its own regime only
        error_factors = factors if record is None or not differs else None
        fields = run_regime, errors, sources, run_system, run_stack, differs, error_factors
        candidates.append(Evidence(*fields))
    if not candidates:
        return None
    # prefer many runs, then the fewest differences, then the most configurations
    return max(candidates, key=lambda run: (run.is_many, -len(run.differs), run.configurations))


def are_tied(
    times: Sequence[float], evidence: Sequence[Evidence | None]
) -> Bool[NumpyArray, " layouts"]:
    """Return for each layout whether it ties with the fastest within prediction errors."""
    # Layouts of one job share the errors of the machine. A layout ties if it is slower by at most
    # the `spread` of the errors in its evidence. A layout without evidence never ties.
    lags = np.array(times) / min(times) - 1
    spreads = np.array([math.nan if x is None else x.spread / 100 for x in evidence])
    has_evidence = np.array([x is not None for x in evidence])
    return (lags <= spreads) | ((lags == 0) & has_evidence)
