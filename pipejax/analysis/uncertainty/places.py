"""What a step depends on where its costs are given: stages, workers, and links between them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types
from pipejax.costs.scaling import scaled_costs
from pipejax.engine.lowering.program import NO_WORKER
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import makespan_on_host
from pipejax.schedules.cells.ops import Phase

TINY = np.finfo(float).tiny  # pairs that take no time have shares of nothing


class PlaceSensitivity(NamedTuple):
    """What the step takes if everything at one place takes less, or more.

    Attributes:
      place: stage, worker or boundary with its number, as rules of `scaled_costs` name them.
      what: compute or message.
      share: of the critical path that is spent there: elasticity of the step time.
      step_times: of each factor [s].

    Example:
      >>> PlaceSensitivity("stage2", "compute", 0.75, (10.0, 20.0)).rule(1.5)
      'compute@stage2*1.5'
    """

    place: str
    what: str
    share: float
    step_times: tuple[float, ...]

    def rule(self, factor: float) -> str:
        """The rule that scales it."""
        return f"{self.what}@{self.place}*{factor!r}"


def place_sensitivity(
    evaluation: Evaluation, factors: tuple[float, ...] = (0.5, 2.0)
) -> list[PlaceSensitivity]:
    """Find how the step depends on each stage, worker and stage boundary, by exact runs."""
    check_types(evaluation=(evaluation, Evaluation))
    found = [
        PlaceSensitivity(place, what, share, _runs(evaluation, f"{what}@{place}", factors))
        for place, what, share in _shares(evaluation)
    ]
    return sorted(found, key=lambda each: (-each.share, -each.step_times[-1]))


def _shares(evaluation: Evaluation) -> Iterator[tuple[str, str, float]]:
    """Places, what is there, and the share of the critical path that is spent there."""
    program, total = evaluation.program, evaluation.makespan or 1.0
    critical = evaluation.critical & (np.asarray(program.worker) != NO_WORKER)
    seconds = np.where(critical, evaluation.node_duration, 0.0)
    spent = {
        "stage": _by_stage(evaluation, seconds),
        "worker": np.bincount(
            np.asarray(program.worker)[critical], seconds[critical], evaluation.workers
        ),
    }
    for place, of_place in spent.items():
        for number, share in enumerate((of_place / total).tolist()):
            yield f"{place}{number}", "compute", share
    sent = program.messages
    lasts = (evaluation.message_finish - evaluation.message_start)[evaluation.message_critical]
    # activations go from stage s over boundary s, gradients over boundary s - 1
    boundary = np.asarray(sent.stage) - (np.asarray(sent.phase) == Phase.SEND_B)
    sending = np.bincount(boundary[evaluation.message_critical], lasts, evaluation.stages)
    for number in np.unique(boundary).tolist():
        yield f"boundary{number}", "message", float(sending[number]) / total


def _by_stage(
    evaluation: Evaluation, seconds: Float[NumpyArray, " nodes"]
) -> Float[NumpyArray, " stages"]:
    """Sum seconds of nodes by stage; those of a fused pair as its two ops share them."""
    program, count = evaluation.program, evaluation.stages
    fused = np.zeros(program.num_nodes, bool)
    fused[np.asarray(program.fused)[:, 0]] = True
    own = (np.asarray(program.stage) >= 0) & ~fused
    spent = np.bincount(np.asarray(program.stage)[own], seconds[own], count)
    if not fused.any():
        return spent
    _, vector = lower_and_price(evaluation.table, evaluation.costs, evaluation.links)
    kind = np.asarray(program.duration_index)[fused] - program.layout.first_pair
    ops = np.asarray(program.pair_index)[kind]  # (pairs, 2) positions of the forward, the backward
    share = vector[ops] / np.maximum(vector[ops].sum(axis=1, keepdims=True), TINY)
    _, stage = program.layout.op_at(ops)
    return spent + np.bincount(stage.ravel(), (share * seconds[fused, None]).ravel(), count)


def _runs(evaluation: Evaluation, what: str, factors: tuple[float, ...]) -> tuple[float, ...]:
    """Step times with each factor [s]."""
    table, links = evaluation.table, evaluation.links
    scaled = (scaled_costs(evaluation.costs, table, f"{what}*{each!r}") for each in factors)
    return tuple(makespan_on_host(*lower_and_price(table, costs, links)) for costs in scaled)
