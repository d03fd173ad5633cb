"""The schedules that the sweeps compare, by the label of their datasets and figures."""

from collections.abc import Mapping
from typing import Any

import pipejax as pj

CASES: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"name": "gpipe"},
    "1f1b": {"name": "1f1b"},
    "chimera": {"name": "chimera"},
    "chimera-asymmetric": {"name": "chimera-asymmetric"},
    "hanayo, 1 wave": {"name": "hanayo", "waves": 1},
    "hanayo, 2 waves": {"name": "hanayo", "waves": 2},
    "hanayo, 4 waves": {"name": "hanayo", "waves": 4},
    "interleaved-1f1b": {"name": "interleaved-1f1b", "stages_per_worker": 2},
}


def build(
    case: str, workers: int, microbatches: int, slots: Mapping[str, float]
) -> pj.ScheduleTable:
    """Build the table of a case.

    Args:
      case: one of `CASES`.
      workers: P.
      microbatches: M.
      slots: durations that the table is drawn with.

    Returns:
      The table.
    """
    return pj.schedules.build(
        **CASES[case], num_workers=workers, num_microbatches=microbatches, slots=slots
    )
