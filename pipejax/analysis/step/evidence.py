"""Evidence: which regimes of training were measured, and how far predictions were off."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipejax.analysis.step.validation import Validation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.display import short_repr
from pipejax.costs.layers.formulas import OPERAND_BYTES
from pipejax.costs.measured.measured_rows import CONFIGURATION, MeasuredRows, joined
from pipejax.costs.model.workload import Workload
from pipejax.costs.system.system import DATA, System, load_system

EVIDENCE = DATA / "evidence.json"
MIN_CONFIGURATIONS = 3  # from which measured runs are evidence
MAX_MEAN_ERROR = 15.0  # of their predictions up to which they are [%]
EXPERTS = ("no experts", "experts within nodes", "experts over nodes")
PROFILES = ("a100-vtrain", "b200-simumax")  # machines whose numbers come from the same runs
DEFAULT_STACK = "megatron-core-2024"  # of systems that name none


@short_repr
class Regime(NamedTuple):
    """Facts about a workload that decide which terms of the model a step time rests on."""

    splits_weights: bool  # whether replicas split weights (ZeRO 3): exchanges beside every layer
    experts: int  # index in `EXPERTS`
    is_narrow: bool  # whether products are below 16 bits

    def __str__(self) -> str:
        parts = [
            "below 16 bits" if self.is_narrow else "16 bits",
            "ZeRO 3" if self.splits_weights else "ZeRO 0 to 2",
        ]
        return ", ".join([*parts, EXPERTS[self.experts]])

    def is_covered_by(self, other: "Regime") -> bool:
        """Return whether runs of another regime count here: runs in 16 bits do not cover 8 bits."""
        return other[:2] == self[:2] and other.is_narrow >= self.is_narrow


@short_repr
class Evidence(NamedTuple):
    """Measured runs of a regime, and how far predictions were from them."""

    regime: Regime  # of the runs
    configurations: int  # different ones
    mean_error: float  # mean of the absolute errors of their predictions [%]

    @property
    def is_enough(self) -> bool:
        """Return whether a step time of the regime is no extrapolation."""
        return self.configurations >= MIN_CONFIGURATIONS and self.mean_error <= MAX_MEAN_ERROR


def row_regimes(rows: MeasuredRows, per_node: float) -> list[Regime]:
    """Return the regime of each row; `per_node` is for rows that do not give it."""
    # The accelerators that experts are spread over are neighbours: they fill a node first.
    nodes = np.where(rows.accelerators_per_node > 0, rows.accelerators_per_node, per_node)
    experts = (rows.column("experts") > 0) * (1 + (rows.expert > nodes))
    narrow = np.isin(rows.precision, list(OPERAND_BYTES))
    columns = zip((rows.zero >= 3).tolist(), experts.tolist(), narrow.tolist(), strict=True)
    return [Regime(*values) for values in columns]


def workload_regime(workload: Workload, per_node: float) -> Regime:
    """Return the regime of a workload on nodes of so many accelerators."""
    experts = 0 if workload.model.moe is None else 1 + (workload.expert_parallel > per_node)
    return Regime(workload.zero >= 3, experts, workload.precision in OPERAND_BYTES)


def evidence_for(regime: Regime, evidence: Iterable[Evidence]) -> Evidence | None:
    """Return the best evidence about a regime: enough runs first, then most runs."""
    return max(
        (record for record in evidence if regime.is_covered_by(record.regime)),
        key=lambda record: (record.is_enough, record.configurations),
        default=None,
    )


def summarize_evidence(
    rows: MeasuredRows, error: Float[NumpyArray, " rows"], per_node: float
) -> tuple[Evidence, ...]:
    """Average the relative errors of each regime; runs of one configuration count once."""
    texts = [rows.column(name).astype(str) for name in CONFIGURATION]
    runs = list(zip(*(column.tolist() for column in texts), strict=True))
    errors: dict[Regime, dict[tuple[str, ...], list[float]]] = {}
    for regime, run, value in zip(row_regimes(rows, per_node), runs, error.tolist(), strict=True):
        if np.isfinite(value):
            errors.setdefault(regime, {}).setdefault(run, []).append(value)
    evidence = []
    for regime, by_run in sorted(errors.items()):
        means = [abs(np.mean(run_errors)) for run_errors in by_run.values()]
        evidence.append(Evidence(regime, len(by_run), 100 * float(np.mean(means))))
    return tuple(evidence)


def as_numbers(evidence: Iterable[Evidence]) -> tuple[tuple[float, ...], ...]:
    """Return evidence as files hold it, a row each: regime, configurations and mean error."""
    return tuple(
        (*map(int, record.regime), record.configurations, round(record.mean_error, 2))
        for record in evidence
    )


def from_numbers(rows: Iterable[Sequence[float]]) -> tuple[Evidence, ...]:
    """Read evidence from the numbers of `as_numbers`."""
    return tuple(
        Evidence(
            Regime(bool(splits), int(experts), bool(narrow)), int(configurations), float(error)
        )
        for splits, experts, narrow, configurations, error in rows
    )


def evidence_of_tables(tables: Sequence[Validation]) -> dict[str, dict[str, list[list[float]]]]:
    """Summarize the evidence of tables by machine and stack, in the form of `EVIDENCE`.

    Args:
      tables: tables with their predictions; profiles of the same runs are skipped.

    Returns:
      By machine and stack a row for each regime: whether weights are split, the index in `EXPERTS`,
      whether products are below 16 bits, then configurations and mean error [%].

    Raises:
      ValueError: if there is no table, or a row names no machine.

    Example:
      >>> import pipejax as pj
      >>> runs = pj.validate(pj.files.DATA / "measured" / "megatron_bridge_b300.csv")
      >>> [row[:4] for row in evidence_of_tables([runs])["b300"]["megatron-core-2024"]]
      [[0, 1, 0, 2], [0, 1, 1, 9], [0, 2, 0, 1]]
    """
    if not tables:
        raise ValueError("tables: no table is given")
    measured = joined([table.measured for table in tables])
    error = np.concatenate([table.errors for table in tables])
    stacks = np.where(measured.stack == "", DEFAULT_STACK, measured.stack)
    rows_by_system: dict[str, dict[str, list[list[float]]]] = {}
    for name, stack in sorted(set(zip(measured.system.tolist(), stacks.tolist(), strict=True))):
        if name in PROFILES:
            continue
        is_pair = (measured.system == name) & (stacks == stack)
        per_node = float(load_system(name).gpus_per_node)
        numbers = as_numbers(summarize_evidence(measured.take(is_pair), error[is_pair], per_node))
        rows_by_system.setdefault(name, {})[stack] = list(map(list, numbers))
    return rows_by_system


def known_evidence(system: System, stack: str) -> tuple[Evidence, ...]:
    """Return the evidence about a machine and its software, from its calibration or our tables."""
    if system.calibration is not None:
        return from_numbers(system.calibration.evidence)
    by_stack = json.loads(EVIDENCE.read_text("utf-8")).get(system.name, {})
    return from_numbers(by_stack.get(stack or DEFAULT_STACK, []))
