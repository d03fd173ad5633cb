"""Files of a replayed trace that other commands take: its table, its costs."""

import json
from typing import Any

import numpy as np

from pipejax.base.checks import check_types
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.traces.findings.op_times import costs_of
from pipejax.traces.record import OPS
from pipejax.traces.replaying.pipelines import fused_with_last
from pipejax.traces.replaying.replay import Replay


def costs_text(replayed: Replay) -> str:
    """Return mean times of a trace as a file of costs, which `--costs` takes.

    Phases that were not recorded are not in it: what reads the file takes half of B for I and W.

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
    costs, recorded = costs_of(replayed), _recorded(replayed)
    content: dict[str, Any] = {"unit": "seconds", "recorded": True}
    for letter in (letter for letter in OPS if letter in recorded):
        content[letter] = np.asarray(getattr(costs, PHASE_FIELDS[letter])).tolist()
    if costs.pair is not None:
        content["pair"] = np.asarray(costs.pair).tolist()
    if replayed.pipelines.table.num_stages > 1:
        forward, back = np.asarray(costs.transmit)[:, 0].tolist()
        content |= {"message": {"transmit": forward}, "message_back": {"transmit": back}}
    return json.dumps(content, indent=1)


def _recorded(replayed: Replay) -> set[str]:
    """Phases of which an op ran by itself, in no fused pair."""
    trace, pipelines = replayed.pipelines.trace, replayed.pipelines.pipelines
    slices = np.concatenate([one.slices for one in pipelines])
    is_second = fused_with_last(trace, slices)
    alone = slices[~(is_second | np.append(is_second[1:], False))]
    return {trace.phases[code] for code in np.unique(trace.phase[alone]).tolist()}
