"""Parts of any step that sum to its time.

The mean worker computes for a part of the step and waits for the rest. Each reason to wait is as
long as the step grows when that reason joins those before it, so the parts telescope to the step:

    stages alike, no messages            compute + start + gaps + end
    rules of the table among usual ops   + rules
    microbatches as they are             + uneven microbatches
    stages as they are                   + imbalance
    messages that use no resource        + messages
    links as they are                    + blocking
    offloads, sharding, exchange, update + what of each nothing hides, and of each lane of its own

Only the two kinds of unevenness can be negative: a schedule may run faster on stages that differ.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pipejax.analysis.runs.evaluate import Evaluation, busy_times
from pipejax.base.checks import check_types
from pipejax.base.display import short_repr
from pipejax.costs.costs import Costs, with_leaves
from pipejax.costs.scaling import ScaledFields
from pipejax.engine.lowering.program import Program
from pipejax.engine.pricing import lower_and_price
from pipejax.engine.recurrence_host import HostRun, run_on_host
from pipejax.schedules.cells.ops import COMPUTING, INPUT_GRADS, Phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

SHARDING = ("unshard", "reshard", "reduce_grad", "wait_reduce_grad")
# times added to ops alone, in this order: fields of `Costs` by the name of their part
WAITS: Mapping[str, tuple[str, ...]] = {
    "messages": ("latency", "transmit"),
    "blocking": (),  # the links, not a cost
    "offloads": ("offload", "load"),
    "sharding": SHARDING,
    "exchange": ("all_reduce",),
    "update": ("update",),
}


LANE = "lane "  # of parts that are a table's own
RULES = "rules"  # likewise


@short_repr
class Part(NamedTuple):
    """A part of a step.

    Attributes:
      name: compute, start, gaps, end, uneven microbatches, imbalance, one of `WAITS`, rules of the
        table among usual ops, or a lane.
      seconds: how long the step is because of it [s].
      meaning: the part in words.

    Example:
      >>> Part("update", 0.5, "optimizer").seconds
      0.5
    """

    name: str
    seconds: float
    meaning: str


MEANING: Mapping[str, str] = {
    "compute": "ops of the mean worker",
    "start": "warm-up bubble, with equal stages",
    "gaps": "idle between warm-up and cool-down",
    "end": "cool-down bubble",
    "uneven microbatches": "unequal microbatches",
    "imbalance": "unequal stages or workers",
    "messages": "waits for messages",
    "blocking": "messages that block others, or a worker",
    "offloads": "activations to the host and back",
    "sharding": "weights gathered, gradients reduced",
    "exchange": "all-reduce of gradients",
    "update": "optimizer",
    RULES: "ops that wait by rules of the table",
}
FORWARD_MEANING: Mapping[str, str] = {  # of a table without backwards
    "start": "warm-up bubble, with equal stages",
    "gaps": "idle between its forwards",
    "end": "idle after its last forward",
}


def _waits(table: ScheduleTable) -> Mapping[str, tuple[str, ...]]:
    """List the times added to ops alone: `WAITS`, then each lane beside compute."""
    phases = table.grammar.custom_phases
    lanes = dict.fromkeys(phase.kind.lane for phase in phases if phase.kind.lane != COMPUTING)
    fields = {lane: tuple(p.kind.time for p in phases if p.kind.lane == lane) for lane in lanes}
    return {**WAITS, **{LANE + lane: times for lane, times in fields.items()}}


def step_parts(evaluation: Evaluation) -> list[Part]:
    """Break a run down into parts that sum to its makespan.

    Args:
      evaluation: a run.

    Returns:
      All parts, in the order in which they are added; those that take nothing among them.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=[2.0, 3.0], transmit=0.5))
      >>> [(part.name, part.seconds) for part in step_parts(run) if part.seconds]
      [('compute', 15.0), ('start', 1.875), ('end', 1.875), ('imbalance', 2.25), ('messages', 1.0)]
    """
    check_types(evaluation=(evaluation, Evaluation))
    parts = dict(_telescoped(evaluation))
    meaning = {**MEANING, **FORWARD_MEANING} if evaluation.table.grammar.forward_only else MEANING
    return [
        Part(name, seconds, meaning.get(name, f"ops on {name}")) for name, seconds in parts.items()
    ]


def without_rules(table: ScheduleTable) -> ScheduleTable | None:
    """Return a table without its rules among usual ops, which order no data; None without any."""
    rules = table.grammar.rules
    others = [rule for rule in rules if {rule.consumer, *rule.producers} - {*Phase}]
    if len(others) == len(rules):
        return None
    return dataclasses.replace(table, grammar=dataclasses.replace(table.grammar, rules=others))


def _telescoped(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """Yield names and seconds of the parts, in order."""
    table, costs = evaluation.table, evaluation.costs
    without = {name: 0.0 for names in _waits(table).values() for name in names}
    alone = with_leaves(costs, without)
    free = Links("delay")

    program, vector = lower_and_price(table, alone, free)
    compute = float(busy_times(program, vector).mean())
    alike, bare = stages_alike(alone, table, microbatches=True), without_rules(table)
    program, run = _run(bare or table, alike, free)
    total = float(run.finish.max())
    start, gaps = _idle_until_turns(table, program, run)
    yield "compute", compute
    yield "start", start
    yield "gaps", gaps
    yield "end", total - compute - start - gaps
    if bare is not None:
        longer = float(_run(table, alike, free)[1].finish.max())
        yield RULES, longer - total
        total = longer
    for name, level in _levels(evaluation, alone):
        longer = float(_run(table, *level)[1].finish.max())
        yield name, longer - total
        total = longer


def _idle_until_turns(table: ScheduleTable, program: Program, run: HostRun) -> tuple[float, float]:
    """Idle time of the mean worker before its first backward, then to its last forward."""
    # Without backwards, before its first forward.
    # Ops of a row run one after the other, so what is idle before an op is its start less the
    # durations before it.
    node = program.node_of_cell
    # (workers, slots) idle up to the end of each op; empty slots stand on the source, at time 0
    idle = run.finish[node] - run.duration[node].cumsum(axis=1)
    backward, forward = (
        np.isin(table.phase, phases) | np.isin(table.partners.phase, phases)
        for phases in (INPUT_GRADS, (Phase.F,))
    )
    slots = node.shape[1]
    first = (backward if backward.any() else forward).argmax(axis=1)
    last = np.where(forward.any(axis=1), slots - 1 - forward[:, ::-1].argmax(axis=1), 0)
    workers = np.arange(len(node))
    start = idle[workers, first]  # of a row without backwards 0: all of its idle time is the end
    return float(start.mean()), float(np.maximum(idle[workers, last] - start, 0.0).mean())


def _levels(evaluation: Evaluation, alone: Costs) -> Iterator[tuple[str, tuple[Costs, Links]]]:
    """Costs and links of every level above the lowest, with the part that it adds."""
    free, costs = Links("delay"), evaluation.costs
    yield "uneven microbatches", (stages_alike(alone, evaluation.table), free)
    yield "imbalance", (alone, free)
    links = free
    for name, fields in _waits(evaluation.table).items():
        alone = with_leaves(alone, {field: getattr(costs, field) for field in fields})
        links = evaluation.links if name == "blocking" else links
        yield name, (alone, links)


def stages_alike(costs: Costs, table: ScheduleTable, *, microbatches: bool = False) -> Costs:
    """Give all stages the mean times of ops; with `microbatches` all microbatches too."""
    leaves = {}
    for name in (*ScaledFields.from_table(table).words["compute"], "pair_factor"):
        value = getattr(costs, name)
        if value is not None and np.ndim(value):
            values = np.asarray(value, float)
            is_one = microbatches or values.ndim == 1
            leaves[name] = values.mean() if is_one else values.mean(axis=0, keepdims=True)
    return with_leaves(costs, leaves)


def _run(table: ScheduleTable, costs: Costs, links: Links) -> tuple[Program, HostRun]:
    program, vector = lower_and_price(table, costs, links)
    return program, run_on_host(program, vector)
