"""Parts of any step that sum to its time.

The mean worker computes for a part of the step and waits for the rest. Each reason to wait is as
long as the step grows when that reason joins those before it, so the parts telescope to the step:

    stages alike, no messages            compute + start + gaps + end
    rules of the table among usual ops   + rules
    microbatches as they are             + uneven microbatches
    stages as they are                   + imbalance
    messages that use no resource        + messages
    links as they are                    + blocking
    offloads, sharding, exchange, update + the seconds of each that nothing hides, then of each lane

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
      seconds: time that it adds to the step [s].
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
      All parts in the order in which they are added, also those of 0 s.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=4)
      >>> run = pj.evaluate(table, pj.Costs(forward=[1.0, 1.5], backward=[2.0, 3.0], transmit=0.5))
      >>> [(part.name, part.seconds) for part in step_parts(run) if part.seconds]
      [('compute', 15.0), ('start', 1.875), ('end', 1.875), ('imbalance', 2.25), ('messages', 1.0)]
    """
    check_types(evaluation=(evaluation, Evaluation))
    meaning = {**MEANING, **FORWARD_MEANING} if evaluation.table.grammar.forward_only else MEANING
    return [
        Part(name, seconds, meaning.get(name, f"ops on {name}"))
        for name, seconds in _telescoped(evaluation)
    ]


def without_rules(table: ScheduleTable) -> ScheduleTable | None:
    """Return a table without its rules among usual ops, which order no data; None without any."""
    rules = table.grammar.rules
    others = [rule for rule in rules if {rule.consumer, *rule.producers} - {*Phase}]
    if len(others) == len(rules):
        return None
    return dataclasses.replace(table, grammar=dataclasses.replace(table.grammar, rules=others))


def _telescoped(evaluation: Evaluation) -> Iterator[tuple[str, float]]:
    """Yield names and seconds of the parts, in order; each is the growth of the makespan by it."""
    table, free = evaluation.table, Links("delay")
    waits = {field: 0.0 for fields in _waits(table).values() for field in fields}
    compute_costs = with_leaves(evaluation.costs, waits)  # of ops alone
    program, vector = lower_and_price(table, compute_costs, free)
    compute = float(busy_times(program, vector).mean())
    even_costs = stages_alike(compute_costs, table, microbatches=True)
    ruleless = without_rules(table)
    program, run = _run(ruleless or table, even_costs, free)
    makespan = float(run.finish.max())
    start, gaps = _idle_until_turns(table, program, run)
    yield "compute", compute
    yield "start", start
    yield "gaps", gaps
    yield "end", makespan - compute - start - gaps
    levels = [*_levels(evaluation, compute_costs)]
    if ruleless is not None:
        levels.insert(0, (RULES, (even_costs, free)))
    for name, level in levels:
        previous, makespan = makespan, float(_run(table, *level)[1].finish.max())
        yield name, makespan - previous


def _idle_until_turns(table: ScheduleTable, program: Program, run: HostRun) -> tuple[float, float]:
    """Return the mean worker's idle time until its first backward, then until its last forward.

    Both in seconds. Without backwards, the first forward takes the place of the first backward.
    """
    # Ops of a row run one after the other: the idle time up to the end of an op is this end less
    # the durations so far. Durations 1 2, ends 1 5: idle 0, then 5 - (1 + 2) = 2.
    nodes = program.node_of_cell  # (workers, slots); empty slots are the source, at time 0
    idle = run.finish[nodes] - run.duration[nodes].cumsum(axis=1)
    is_backward, is_forward = (
        np.isin(table.phase, phases) | np.isin(table.partners.phase, phases)
        for phases in (INPUT_GRADS, (Phase.F,))
    )
    # argmax is the first True; of the reversed row, the last one from its end
    first_turn = (is_backward if is_backward.any() else is_forward).argmax(axis=1)
    last_forward = nodes.shape[1] - 1 - is_forward[:, ::-1].argmax(axis=1)
    last_forward = np.where(is_forward.any(axis=1), last_forward, 0)
    workers = np.arange(len(nodes))
    start = idle[workers, first_turn]  # 0 in a row without backwards: all idle time is the end
    gaps = np.maximum(idle[workers, last_forward] - start, 0.0)
    return float(start.mean()), float(gaps.mean())


def _levels(evaluation: Evaluation, costs: Costs) -> Iterator[tuple[str, tuple[Costs, Links]]]:
    """Yield names of parts with the costs and links of the run that has them and all before.

    `costs` are those of compute ops alone; each level adds some of the evaluation's.
    """
    links = Links("delay")
    yield "uneven microbatches", (stages_alike(costs, evaluation.table), links)
    yield "imbalance", (costs, links)
    for name, fields in _waits(evaluation.table).items():
        costs = with_leaves(costs, {field: getattr(evaluation.costs, field) for field in fields})
        links = evaluation.links if name == "blocking" else links
        yield name, (costs, links)


def stages_alike(costs: Costs, table: ScheduleTable, *, microbatches: bool = False) -> Costs:
    """Give all stages the mean times of ops; with `microbatches` all microbatches too."""
    leaves = {}
    for name in (*ScaledFields.from_table(table).words["compute"], "pair_factor"):
        value = getattr(costs, name)
        if value is not None and np.ndim(value):
            values = np.asarray(value, float)  # (stages), or (stages, microbatches)
            is_scalar = microbatches or values.ndim == 1
            leaves[name] = values.mean() if is_scalar else values.mean(axis=0, keepdims=True)
    return with_leaves(costs, leaves)


def _run(table: ScheduleTable, costs: Costs, links: Links) -> tuple[Program, HostRun]:
    program, vector = lower_and_price(table, costs, links)
    return program, run_on_host(program, vector)
