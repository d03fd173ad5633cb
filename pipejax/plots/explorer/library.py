"""Tables that users can choose on a page, and data with which the page lowers tables."""

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.costs.costs import MESSAGE_FIELDS, Costs
from pipejax.plots.palette import USUAL as USUAL_LOOKS, phase_looks
from pipejax.schedules.cells.grammar import USUAL, Grammar, Rule
from pipejax.schedules.cells.ops import (
    AT_WORK,
    CHECKPOINT,
    HOST,
    IN_FLIGHT,
    KINDS,
    LEFT_BY_F,
    WAIT_SEND,
    WHOLE,
    AnyPhase,
    CustomPhase,
    Phase,
)
from pipejax.schedules.table.held_activations import WEIGHT_SHARE, memory_ledger
from pipejax.schedules.table.table import ScheduleTable

LEVEL = 9  # level of zlib: a page is written once and read often


class PagePhases(NamedTuple):
    """Grammars of all tables on a page, and a distinct code for each of their phases."""

    grammars: tuple[Grammar, ...]  # the usual one first
    own_phases: tuple[CustomPhase, ...]  # phases of tables; their codes follow the usual ones

    @classmethod
    def from_tables(cls, tables: Iterable[ScheduleTable]) -> "PagePhases":
        """Collect the grammars of tables and the phases that these define, without duplicates."""
        grammars = tuple(dict.fromkeys([USUAL, *(table.grammar for table in tables)]))
        own_phases: list[CustomPhase] = []
        for grammar in grammars:
            for phase in (*grammar.lane_sharding, *grammar.custom_phases):
                if not any(_is_equal(phase, other) for other in own_phases):
                    own_phases.append(phase)
        return cls(grammars, tuple(own_phases))

    @property
    def by_code(self) -> dict[int, AnyPhase]:
        """Phases by their code on the page, without the idle cell."""
        own_phases = enumerate(self.own_phases, len(Phase))
        return {int(phase): phase for phase in KINDS} | dict(own_phases)

    def as_json(self, used: Iterable[AnyPhase]) -> dict[int, dict[str, str]]:
        """Return name, lane and colours of each phase by code, with distinct colours for `used`."""
        looks = {**USUAL_LOOKS, **phase_looks([*used, *self.own_phases])}
        return {
            code: {
                "letter": phase.name,
                "name": looks[phase.name].name,
                "lane": phase.kind.lane,
                "fill": looks[phase.name].fill,
                "shade": looks[phase.name].shade,
                "deep": looks[phase.name].deep or looks[phase.name].fill,
            }
            for code, phase in self.by_code.items()
        }

    def codes(self, grammar: Grammar) -> Int[NumpyArray, " codes"]:
        """Return the page's code of each phase, as an array by the phase's code in a grammar."""
        page_codes = np.arange(len(grammar.phases))
        for phase in (*grammar.lane_sharding, *grammar.custom_phases):
            is_equal = [_is_equal(phase, other) for other in self.own_phases]
            page_codes[phase] = len(Phase) + is_equal.index(True)
        return page_codes


def _is_equal(phase: CustomPhase, other: CustomPhase) -> bool:
    return (phase.name, phase.kind) == (other.name, other.kind)


class OfferedTimes(NamedTuple):
    """Times of ops and messages that apply to tables of any size."""

    costs: Costs  # one number for each kind
    by_worker: bool  # whether op times are of a microbatch on a worker, not on a stage

    def as_json(self, phases: PagePhases) -> dict[str, Any]:
        """Return times of ops, by the code of their phase, and of messages [s]."""
        ops = {code: self.costs.time(phase) for code, phase in phases.by_code.items()}
        set_times = {code: float(time) for code, time in ops.items() if time is not None}
        messages = {name: float(np.asarray(getattr(self.costs, name))) for name in MESSAGE_FIELDS}
        return {"ops": set_times, **messages, "byWorker": self.by_worker}


def grammar_of_page(grammar: Grammar, phases: PagePhases) -> dict[str, Any]:
    """Return a grammar's codes, rules and memory as JSON, with which a page lowers tables."""
    codes = phases.codes(grammar)

    def coded(phases: Iterable[AnyPhase]) -> list[int]:
        """Return the page's codes of phases."""
        return codes[np.array([*phases], int)].tolist()

    def by_code(values: Mapping[Any, Any]) -> dict[int, Any]:
        """Replace the keys of a mapping, which are phases, by the page's codes of the phases."""
        return dict(zip(coded(values), values.values(), strict=True))

    waits, slots = (Phase.WAIT_O, *WAIT_SEND), grammar.unit_slots
    names = [phase.name for phase in grammar.cell_phases]
    return {
        "codes": dict(zip(names, coded(grammar.cell_phases), strict=True)),
        "rowOps": coded(grammar.row_ops),
        "timed": coded(grammar.timed),
        "offRow": by_code({phase: phase.kind.lane for phase in grammar.side_phases}),
        "together": coded(grammar.collectives),
        "workerPhases": coded(grammar.worker_phases),
        "rules": [
            _rule(rule, coded) for rule in grammar.all_rules if rule.consumer not in (*HOST, *waits)
        ],
        "slices": grammar.slices,
        "graph": grammar.graph,
        "unit": by_code({p: slots[p.name] for p in grammar.timed if p.name in slots}),
        "ledger": by_code(memory_ledger((*KINDS, *grammar.custom_phases))),
        "parts": {"whole": WHOLE, "checkpoint": CHECKPOINT, "leftByF": LEFT_BY_F},
        "sizes": [1.0, WEIGHT_SHARE, 1.0, *np.zeros(len(AT_WORK)), *grammar.items.values()],
        "shares": [*IN_FLIGHT, *grammar.items.values()],
    }


def _rule(rule: Rule, coded: Callable[[Iterable[AnyPhase]], list[int]]) -> dict[str, Any]:
    """Return a rule as JSON, with codes for phases and JavaScript names for fields."""
    (consumer,) = coded([rule.consumer])
    fields = rule._asdict() | {"consumer": consumer, "producers": coded(rule.producers)}
    return {re.sub("_(.)", lambda m: m[1].upper(), name): value for name, value in fields.items()}


def library(tables: Mapping[str, Sequence[ScheduleTable]], phases: PagePhases) -> str:
    """Pack tables by schedule name, except those with offloads, which a page cannot lower."""
    entries = [
        {
            "name": name,
            "workers": table.num_workers,
            "microbatches": table.num_microbatches // table.grammar.slices,
            "stagesPerWorker": table.stages_per_worker,
            "grammar": phases.grammars.index(table.grammar),
            "placement": table.placement.tolist(),
            "microbatchPipes": table.pipe_of_microbatch.tolist(),
            "shares": [float(share) for share in table.stage_shares],
            "rows": _rows_text(table),
        }
        for name, versions in tables.items()
        for table in versions
        if not table.offloads
    ]
    return base64.b64encode(zlib.compress(json.dumps(entries).encode(), LEVEL)).decode()


def _rows_text(table: ScheduleTable) -> str:
    """Write rows without idle cells, because only their order counts."""
    rows = ((table.grammar.text(cell) for cell in row if cell) for row in table.rows())
    return "\n".join(map(",".join, rows))
