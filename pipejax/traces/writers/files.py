"""Files of a replayed trace that other commands take: its table, its costs."""

import json
from typing import Any

import numpy as np

from pipejax.base.checks import check_types
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.traces.findings.op_times import costs_of
from pipejax.traces.record import OPS
from pipejax.traces.replaying.replay import Replay


def costs_text(replayed: Replay) -> str:
    """Return mean times of a trace as a file of costs, which `--costs` takes.

    Args:
      replayed: a replayed trace.

    Returns:
      Text of a .json file: times of ops by stage, of messages by stage boundary and direction.

    Example:
      >>> import json, pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=2)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=2.0, transmit=0.5))
      >>> replayed = pj.traces.replay(pj.traces.pipelines_of(pj.traces.of_runs([run])))
      >>> json.loads(pj.traces.costs_text(replayed))["F"]
      [1.0, 1.5]
    """
    check_types(replayed=(replayed, Replay))
    costs = costs_of(replayed)
    content: dict[str, Any] = {"unit": "seconds"}
    for letter in OPS:
        value = getattr(costs, PHASE_FIELDS[letter])
        if value is not None:
            content[letter] = np.asarray(value).tolist()
    if costs.pair is not None:
        content["pair"] = np.asarray(costs.pair).tolist()
    if replayed.pipelines.table.num_stages > 1:
        forward, back = np.asarray(costs.transmit)[:, 0].tolist()
        content |= {"message": {"transmit": forward}, "message_back": {"transmit": back}}
    return json.dumps(content, indent=1)
