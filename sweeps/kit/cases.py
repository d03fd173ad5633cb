"""The schedules that the sweeps compare, by the label of their datasets and figures."""

from collections.abc import Mapping
from typing import Any

import pipejax as pj

CASES: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {"name": "gpipe"},
    "1f1b": {"name": "1f1b"},
    "chimera": {"name": "chimera"},
    "chimera-asymmetric": {"name": "chimera-asymmetric", "shares": (1, 2)},
    "chimera-asymmetric, 2:1": {"name": "chimera-asymmetric", "shares": (2, 1)},
    "hanayo, 1 wave": {"name": "hanayo", "waves": 1},
    "hanayo, 2 waves": {"name": "hanayo", "waves": 2},
    "hanayo, 4 waves": {"name": "hanayo", "waves": 4},
    "interleaved-1f1b": {"name": "interleaved-1f1b", "stages_per_worker": 2},
}
ASYNCHRONOUS: Mapping[str, Mapping[str, Any]] = {
    "naive": {"name": "naive"},
    "pipedream": {"name": "pipedream"},
    "pipedream, first stage": {"name": "pipedream", "admission": "first-stage"},
    "local-sgd, H=1": {"name": "local-sgd", "local_steps": 1},
}


def build(
    case: str, workers: int, microbatches: int, slots: Mapping[str, float], **builder_options: Any
) -> pj.ScheduleTable:
    """Build the table of a case.

    Args:
      case: one of `CASES` or `ASYNCHRONOUS`.
      workers: P.
      microbatches: M.
      slots: durations that the table is drawn with.
      **builder_options: further options of its builder.

    Returns:
      The table.
    """
    options = {**{**CASES, **ASYNCHRONOUS}[case], **builder_options}
    if shares := options.pop("shares", ()):  # of the first and of the second half of the stages
        options["stage_shares"] = [share for share in shares for _ in range(workers // 2)]
    return pj.schedules.build(
        **options, num_workers=workers, num_microbatches=microbatches, slots=slots
    )
