"""Tables that a page carries to choose from, and what it needs to lower tables by itself.

Tables are carried as the text of their cells, all in one deflated text: a page lowers the one that
is chosen, as it does one that is dropped on it. What the cells mean (`grammar`) are the records of
the library: there is no second list of phases or of what waits for what.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS, Costs
from pipejax.schedules.cells import memory_ledger, placement
from pipejax.schedules.cells.dependencies import RULES
from pipejax.schedules.cells.ops import (
    CELL_PHASES,
    CHECKPOINT,
    COMPUTE,
    HOST,
    LEFT_BY_F,
    MESSAGES,
    ROW_OPS,
    SHARDING,
    TIMED,
    UNIT_SLOTS,
    WAIT_SEND,
    WHOLE,
    Phase,
    format_cell,
)
from pipejax.schedules.table.table import ScheduleTable

LEVEL = 9  # of zlib: a page is written once and read often
APART = "\n\n"  # between the texts of tables


class OfferedTimes(NamedTuple):
    """Times that hold for a table of any size.

    Attributes:
      costs: one number each.
      by_worker: whether those of ops are what a microbatch takes on a worker, else on a stage.
    """

    costs: Costs
    by_worker: bool

    def as_json(self) -> dict[str, Any]:
        """By code of the phase, and of messages [s]."""
        ops = {int(phase): getattr(self.costs, PHASE_FIELDS[phase.name]) for phase in TIMED}
        known = {phase: float(time) for phase, time in ops.items() if time is not None}
        sent = {name: float(np.asarray(getattr(self.costs, name))) for name in MESSAGE_FIELDS}
        return {"ops": known, **sent, "byWorker": self.by_worker}


def grammar() -> dict[str, Any]:
    """What cells mean, what waits for what, and what workers hold, for a page that reads tables."""
    waits = (Phase.WAIT_O, *WAIT_SEND)
    return {
        "codes": {phase.name: int(phase) for phase in CELL_PHASES},
        "letters": {int(phase): phase.name for phase in CELL_PHASES},
        "compute": COMPUTE,
        "rowOps": ROW_OPS,
        "sharding": SHARDING,
        "messages": MESSAGES,
        "waits": WAIT_SEND,
        "refused": (*HOST, Phase.WAIT_O),
        "timed": TIMED,
        "rules": [
            [rule.consumer, rule.producers, rule.stage_offset]
            for rule in RULES
            if rule.consumer not in (*HOST, *waits)
        ],
        "unit": {int(Phase[name]): slot for name, slot in UNIT_SLOTS.items()},
        "ledger": {int(phase): entries for phase, entries in memory_ledger.LEDGER.items()},
        "parts": {"whole": WHOLE, "checkpoint": CHECKPOINT, "leftByF": LEFT_BY_F},
        "sizes": [1.0, memory_ledger.WEIGHT_SHARE, 1.0],
    }


def library(tables: Mapping[str, Sequence[ScheduleTable]]) -> dict[str, Any]:
    """Pack tables by the name of their schedule; a page can lower all but those that offload."""
    entries, texts = [], []
    for name, each in tables.items():
        for table in each:
            if table.offloads:
                continue
            sizes = {"workers": table.num_workers, "microbatches": table.num_microbatches}
            each_worker = {"stagesPerWorker": table.stages_per_worker}
            entries.append({"name": name, **sizes, **each_worker, **_unstated(table)})
            texts.append(_text(table))
    packed = zlib.compress(APART.join(texts).encode(), LEVEL)
    return {"entries": entries, "apart": APART, "data": base64.b64encode(packed).decode()}


def _text(table: ScheduleTable) -> str:
    """Cells by row, without idle ones: their order is all that counts."""
    rows = ((format_cell(cell) for cell in row if cell) for row in table.rows())
    return "\n".join(map(",".join, rows))


def _unstated(table: ScheduleTable) -> dict[str, Any]:
    """What the cells of a table do not tell."""
    found: dict[str, Any] = {}
    pipes, pipe_of = placement.infer(list(table.rows()))
    own = table.placement.tolist(), table.pipe_of_microbatch.tolist()
    if own != (pipes.tolist(), pipe_of.tolist()):
        found |= {"placement": own[0], "pipeOf": own[1]}
    if set(table.stage_shares) != {1.0}:
        found["shares"] = [float(share) for share in table.stage_shares]
    return found
