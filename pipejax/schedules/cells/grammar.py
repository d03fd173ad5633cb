"""Grammar of a table as data: kinds of ops, and the rules by which ops wait for ops.

The rules of the literature are the default. A table may add kinds and rules, on lanes beside
compute, with microbatches in slices, over a graph of stages, or without any backward.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import check_types, is_number, resolve_choice, unknown, whole_number, wrong
from pipejax.base.display import with_short_repr
from pipejax.schedules.cells.ops import (
    COMPUTING,
    HOST_LINK,
    INPUT_GRADS,
    MICROBATCH,
    OWNERS,
    PARTS,
    PARTS_BY_NAME,
    STAGE,
    UNIT_SLOTS,
    WEIGHT_GRADS,
    WORKER,
    AnyPhase,
    Cell,
    CustomPhase,
    OpKind,
    Phase,
    PhaseLists,
    check_cell,
    format_cell,
    format_number,
    parse_cell,
)

LAST = -1  # stage, counted from the end
Edge = tuple[int, int]  # source stage and target stage


class Rule(NamedTuple):
    """Rule that an op waits for an op of the same microbatch, `stage_offset` stages away.

    The producers are alternatives: for each stage and microbatch, a table holds at most one. Ops of
    a worker, which have no stage, wait for ops of the same worker.

    Attributes:
      consumer: phase of the op that waits.
      producers: phases; the consumer waits for an op of one of them.
      stage_offset: stage of the producer minus stage of the consumer. In a graph of stages, -1
        stands for every source of an edge, 1 for every target.
      is_needed: whether a consumer must have a producer, if the producer's stage exists.
      is_answered: whether a producer must have a consumer, on its own stage.
      sends: whether a producer on another worker sends a message to the consumer.
      consumer_stage: the only stage whose ops wait; `LAST` is the last one.
      producer_stage: stage of the producer, if the rule names it.
      consumer_microbatch: the only microbatch whose ops wait.
      producer_microbatch: microbatch of the producer, if the rule names it.
      slice_offset: slice of the producer minus slice of the consumer.
      waits_for_all: whether the consumer waits for all microbatches.
    """

    consumer: Phase
    producers: tuple[Phase, ...]
    stage_offset: int = 0
    is_needed: bool = True
    sends: bool = True
    consumer_stage: int | None = None
    producer_stage: int | None = None
    consumer_microbatch: int | None = None
    producer_microbatch: int | None = None
    slice_offset: int = 0
    waits_for_all: bool = False
    is_answered: bool = False


RULES = (
    Rule(Phase.F, (Phase.F,), -1),
    Rule(Phase.R, (Phase.F,)),
    Rule(Phase.B, (Phase.F,)),
    Rule(Phase.I, (Phase.F,)),
    Rule(Phase.B, (Phase.R,), is_needed=False),
    Rule(Phase.I, (Phase.R,), is_needed=False),
    Rule(Phase.B, INPUT_GRADS, 1),
    Rule(Phase.I, INPUT_GRADS, 1),
    Rule(Phase.W, (Phase.I,), is_answered=True),
    Rule(Phase.U, WEIGHT_GRADS),
    Rule(Phase.O, (Phase.F,)),
    Rule(Phase.L, (Phase.O,), is_answered=True),
    Rule(Phase.WAIT_O, (Phase.O,)),
    Rule(Phase.WAIT_SEND_F, (Phase.SEND_F,)),
    Rule(Phase.WAIT_SEND_B, (Phase.SEND_B,)),
    Rule(Phase.R, (Phase.L,), is_needed=False),
    Rule(Phase.B, (Phase.L,), is_needed=False),
    Rule(Phase.I, (Phase.L,), is_needed=False),
)
# rules of microbatches in slices: a slice attends to earlier ones, so its gradient comes first
SLICE_RULES = (
    Rule(Phase.F, (Phase.F,), slice_offset=-1),
    *(Rule(phase, INPUT_GRADS, slice_offset=1) for phase in INPUT_GRADS),
)

_END = r"(\d*)([A-Za-z_]+)(?:(\d+)(?:\.(\d+))?)?(?:@(first|last|[+-]\d+))?"
_SUFFIX = r"(?:\((all|slice [+-]\d+)\))?\s*(\[message\])?"
_RULE = re.compile(rf"{_END}\s*<-\s*{_END}\s*{_SUFFIX}", re.ASCII)


class _End(NamedTuple):
    """One end of a rule, consumer or producer."""

    phase: Phase
    stage: int | None  # None for any
    microbatch: int | None  # None for any
    offset: int  # distance from the consumer [stages]


def parse_rule(text: str, phases: Mapping[str, AnyPhase], slices: int = 1) -> Rule:
    """Read a rule, such as "Fd <- Fa", "Fa <- Fc@-1 [message]" or "2U0 <- W (all)"."""
    # groups: stage, letters, microbatch, slice, @place of each end, then (scope) and [message]
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a rule: expected consumer <- producer, as in 'Fd <- Fa', "
            "'Fa <- Fc@-1 [message]', 'Bc@last <- Fc@last', 'U <- W (all)', 'F <- F (slice -1)'"
        )
    *fields, scope, message = match.groups()
    ends = fields[:5], fields[5:10]
    consumer, producer = (_read_end(end, text, phases, slices) for end in ends)
    rule = Rule(
        consumer.phase,
        (producer.phase,),
        producer.offset,
        sends=message is not None,
        consumer_stage=consumer.stage,
        producer_stage=producer.stage,
        consumer_microbatch=consumer.microbatch,
        producer_microbatch=producer.microbatch,
        slice_offset=0 if scope in (None, "all") else int(scope.removeprefix("slice ")),
        waits_for_all=scope == "all",
    )
    if reason := _rule_error(rule, consumer, producer):
        raise ValueError(f"{text!r} is not a rule: {reason}")
    return rule


def _read_end(
    fields: Sequence[str | None], text: str, phases: Mapping[str, AnyPhase], slices: int
) -> _End:
    """Read one end of a rule from stage, letters, microbatch, slice and the text after @."""
    stage, letters, microbatch, part, place = fields
    if letters is None or letters not in phases:  # capitals count: fa is not FA
        raise unknown(f"phase of {text!r}", letters, tuple(phases))
    phase = cast(Phase, phases[letters])
    if microbatch and (part is None) != (slices == 1):
        form = "m.k, k the slice" if slices > 1 else "a number"
        raise ValueError(f"{text!r} is not a rule: its microbatches are {form}")
    stage_index = int(stage) if stage else None
    stage_index = {"first": 0, "last": LAST}.get(place or "", stage_index)
    offset = int(place) if place and place[0] in "+-" else 0
    microbatch_index = int(microbatch) * slices + int(part or 0) if microbatch else None
    return _End(phase, stage_index, microbatch_index, offset)


def _rule_error(rule: Rule, consumer: _End, producer: _End) -> str:
    """Return the reason why a rule is meaningless; empty if it is valid."""
    for end in (consumer, producer):
        if end.phase.kind.scope == STAGE:
            return f"{end.phase.name} belongs to a whole stage, and rules to microbatches"
        if end.phase.kind.scope == WORKER and (end.stage is not None or producer.offset):
            return f"{end.phase.name} belongs to a worker, not to a stage"
    if consumer.offset:
        return "only a producer may have a distance in stages"
    consumer_scope, producer_scope = consumer.phase.kind.scope, producer.phase.kind.scope
    if consumer_scope == WORKER and producer_scope != WORKER and producer.stage is None:
        return f"name the stage of the producer, as {producer.phase.name}@last"
    if rule.sends and WORKER in (consumer_scope, producer_scope):
        return "only ops of stages send and receive messages"
    if producer.microbatch is not None and (rule.waits_for_all or rule.slice_offset):
        return "a producer with a microbatch cannot have (all) or (slice ..)"
    return ""


def format_rule(rule: Rule, slices: int = 1) -> str:
    """Return the text of a rule, such as "Fa <- Fc@-1 [message]", which `parse_rule` reads."""

    def format_end(phase: AnyPhase, stage: int | None, microbatch: int | None, offset: int) -> str:
        place = f"@{offset:+d}" if offset else ""
        if stage == LAST:
            stage, place = None, "@last"
        stage_text = "" if stage is None else stage
        microbatch_text = "" if microbatch is None else format_number(microbatch, slices)
        return f"{stage_text}{phase.name}{microbatch_text}{place}"

    suffix = " (all)" if rule.waits_for_all else ""
    suffix += f" (slice {rule.slice_offset:+d})" if rule.slice_offset else ""
    suffix += " [message]" if rule.sends else ""
    consumer = format_end(rule.consumer, rule.consumer_stage, rule.consumer_microbatch, 0)
    producer = format_end(
        rule.producers[0], rule.producer_stage, rule.producer_microbatch, rule.stage_offset
    )
    return f"{consumer} <- {producer}{suffix}"


@with_short_repr("letters rules slices forward_only graph lanes")
@dataclasses.dataclass(frozen=True)
class Grammar(PhaseLists[AnyPhase]):
    """Kinds of ops in a table and their dependencies, in addition to the default kinds.

    Attributes:
      kinds: {letters without digits: kind of op}.
      rules: dependencies of these ops, as texts "consumer <- producer"; see the guide.
      items: {name: size} of memory that kinds take and free beside activations; sizes are shares of
        a whole activation of a microbatch.
      slices: K, slices of each microbatch; slice k of microbatch m is written m.k.
      forward_only: whether the table has no backward.
      graph: edges (from, to) between stages, in the order of message times; empty for a chain.
      lanes: lanes beside compute on which UNSHARD and REDUCE_GRAD run, as {"UNSHARD": "net"};
        without a lane they run in the row. The guide says which ops wait for them.

    Raises:
      ValueError: if letters are used already, or a record or a rule is wrong.

    Example:
      >>> import pipejax as pj
      >>> grammar = pj.schedules.Grammar(
      ...     kinds={"D": pj.schedules.OpKind("dispatch", "dispatch", lane="net")},
      ...     rules=["D <- F"],
      ... )
      >>> rows = [["0F0", "0D0", "0B0"]]
      >>> table = pj.ScheduleTable.from_rows(rows, grammar=grammar)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, others={"dispatch": 5.0})
      >>> pj.evaluate(table, costs).makespan
      6.0
    """

    kinds: Mapping[str, OpKind] = dataclasses.field(default_factory=dict)
    rules: Sequence[Any] = ()  # texts; after construction `Rule`
    items: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slices: int = 1
    forward_only: bool = False
    graph: Sequence[Edge] = ()
    lanes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check all fields, parse rules that are texts, and number the custom phases."""
        check_types(kinds=(self.kinds, Mapping), rules=(self.rules, Sequence))
        check_types(**{f"rules[{k}]": (rule, str, Rule) for k, rule in enumerate(self.rules)})
        check_types(items=(self.items, Mapping))
        for name, share in self.items.items():
            if name in PARTS_BY_NAME:
                raise wrong("items", f"{name} is a part of every activation: choose another", name)
            if not is_number(share):
                raise wrong("items", f"{name} must be a number of at least 0, got {share!r}", share)
        check_types(forward_only=(self.forward_only, bool), graph=(self.graph, Sequence))
        whole_number(self.slices, "slices")
        custom_phases = tuple(
            CustomPhase(len(Phase) + k, *_check_kind(letters, kind, self.parts))
            for k, (letters, kind) in enumerate(self.kinds.items())
        )
        lane_sharding = _check_lanes(self.lanes)
        # the phase of each code: the phases of all tables, with UNSHARD and REDUCE_GRAD on their
        # lanes, then custom phases
        lane_phases = {int(phase): phase for phase in lane_sharding}
        phases = (*(lane_phases.get(int(phase), phase) for phase in Phase), *custom_phases)
        object.__setattr__(self, "custom_phases", custom_phases)
        object.__setattr__(self, "lane_sharding", lane_sharding)
        object.__setattr__(self, "phases", phases)
        object.__setattr__(self, "op_phases", phases[1:])  # without idle cells
        worker_times = {phase.kind.time for phase in self.worker_phases}
        stage_phases = {*self.timed_phases} - {*self.worker_phases}
        stage_times = {phase.kind.time for phase in stage_phases}
        if ambiguous_times := worker_times & stage_times:
            time = min(ambiguous_times)
            raise wrong("kinds", f"{time} is a cost of workers and of stages: give two names", time)
        rules = tuple(
            parse_rule(rule, self.by_letters, self.slices) if isinstance(rule, str) else rule
            for rule in self.rules
        )
        object.__setattr__(self, "graph", _check_graph(self.graph, rules))
        object.__setattr__(self, "lanes", {phase.name: phase.kind.lane for phase in lane_sharding})
        object.__setattr__(self, "kinds", {phase.name: phase.kind for phase in custom_phases})
        object.__setattr__(self, "items", dict(self.items))
        object.__setattr__(self, "rules", rules)

    phases: tuple[Phase, ...] = dataclasses.field(init=False, repr=False, compare=False)
    custom_phases: tuple[CustomPhase, ...] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    lane_sharding: tuple[CustomPhase, ...] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __hash__(self) -> int:
        fields = self.rules, self.slices, self.forward_only, self.graph
        return hash((tuple(self.kinds), tuple(self.lanes), *fields))

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle only the arguments of the constructor."""
        if self.is_usual:
            return "USUAL"  # the single object of this name
        fields = (dict(self.kinds), self.texts, dict(self.items))
        return Grammar, (*fields, self.slices, self.forward_only, self.graph, dict(self.lanes))

    @property
    def letters(self) -> tuple[str, ...]:
        """Return the letters of the custom kinds."""
        return tuple(self.kinds)

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the custom rules as texts."""
        return tuple(format_rule(rule, self.slices) for rule in self.rules)

    @functools.cached_property
    def is_usual(self) -> bool:
        """Return whether this is the default grammar, without additions."""
        return self == USUAL

    @functools.cached_property
    def has_usual_messages(self) -> bool:
        """Return whether SEND and RECV cells carry the messages, as in the default grammar."""
        return dataclasses.replace(self, lanes={}) == USUAL

    @functools.cached_property
    def stage_rules(self) -> tuple[tuple[tuple[AnyPhase, ...], Phase], ...]:
        """Return ((consumers, producer), ..): consumers wait for their stage's last producer."""
        rules = (
            (self.compute_phases, Phase.UNSHARD),
            ((Phase.WAIT_REDUCE_GRAD, Phase.U), Phase.REDUCE_GRAD),
        )
        return tuple((ops, producer) for ops, producer in rules if producer in self.lane_sharding)

    @functools.cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """Return the default rules, the rules of slices, and the custom rules."""
        return (*RULES, *(SLICE_RULES if self.slices > 1 else ()), *self.rules)

    @property
    def first_difference(self) -> str:
        """Return the first difference from the default grammar, in words; empty if none."""
        differences = [f"kind {letters} ({kind.name})" for letters, kind in self.kinds.items()]
        differences += [f"rule {text}" for text in self.texts]
        differences += [f"microbatches in {self.slices} slices"] if self.slices > 1 else []
        differences += ["a graph of stages"] if self.graph else []
        differences += ["no backward"] if self.forward_only else []
        differences += [f"{letters} on lane {lane}" for letters, lane in self.lanes.items()]
        return differences[0] if differences else ""

    @property
    def parts(self) -> Mapping[str, int]:
        """Return {name: index} of the parts of an activation, then of the items."""
        return PARTS_BY_NAME | {item: len(PARTS) + k for k, item in enumerate(self.items)}

    @functools.cached_property
    def side_lanes(self) -> Mapping[str, tuple[AnyPhase, ...]]:
        """Return {lane: its phases} for the lanes beside compute, except the host link."""
        lanes = dict.fromkeys(phase.kind.lane for phase in self.cell_phases if phase.kind.time)
        side_lanes = [lane for lane in lanes if lane not in (COMPUTING, HOST_LINK)]
        return {lane: self.on_lane(lane, *OWNERS) for lane in side_lanes}

    @functools.cached_property
    def side_phases(self) -> tuple[AnyPhase, ...]:
        """Return the phases on all lanes beside compute, except the host link."""
        return tuple(phase for phases in self.side_lanes.values() for phase in phases)

    @functools.cached_property
    def unit_slots(self) -> Mapping[str, float]:
        """Return {phase letter: slot duration}; 1 for a custom kind without a duration."""
        slots: dict[str, float] = dict(UNIT_SLOTS)
        for phase in self.custom_phases:
            slots[phase.name] = 1 if phase.kind.slot is None else phase.kind.slot
        return slots

    @functools.cached_property
    def phase_lanes(self) -> Int[NumpyArray, " codes"]:
        """Return the index of each phase code's lane; 0 is the row of compute ops."""
        lanes = np.zeros(len(self.phases), int)
        for lane, phases in enumerate(self.side_lanes.values(), 1):
            lanes[list(phases)] = lane
        return lanes

    def edges(self, num_stages: int) -> tuple[Edge, ...]:
        """Return the edges between stages: of the graph or, without a graph, of a chain."""
        return tuple(self.graph) or tuple((s, s + 1) for s in range(num_stages - 1))

    def read(self, cell: Cell | str) -> Cell:
        """Read a cell from its text, or check a cell of ops."""
        read: Callable[..., Cell] = parse_cell if isinstance(cell, str) else check_cell
        return read(cell, self.by_letters, self.slices)

    def text(self, cell: Cell) -> str:
        """Return the text of a cell."""
        return format_cell(cell, self.slices)


def _check_graph(graph: Sequence[Any], rules: Iterable[Rule]) -> tuple[Edge, ...]:
    """Check that edges of a graph join two different stages each, and each pair only once."""
    edges = tuple(
        (whole_number(a, "graph", minimum=0), whole_number(b, "graph", minimum=0)) for a, b in graph
    )
    stage_pairs = [frozenset(edge) for edge in edges]
    for edge, pair in zip(edges, stage_pairs, strict=True):
        if len(pair) == 1 or stage_pairs.count(pair) > 1:
            raise wrong("graph", f"each edge must join another two stages, got {edge}", edge)
    offsets = [rule.stage_offset for rule in rules if abs(rule.stage_offset) > 1]
    if edges and offsets:
        raise wrong("rules", f"with a graph, use @-1 or @+1 for stages, got @{offsets[0]:+d}")
    return edges


def _check_lanes(lanes: Mapping[Any, Any]) -> tuple[CustomPhase, ...]:
    """Check the lanes of UNSHARD and REDUCE_GRAD; return the phases with their lanes."""
    check_types(lanes=(lanes, Mapping))
    sharding = {phase.name: phase for phase in (Phase.UNSHARD, Phase.REDUCE_GRAD)}
    for letters, lane in lanes.items():
        resolve_choice(letters, tuple(sharding), "lanes")
        if not isinstance(lane, str) or not lane or lane in (COMPUTING, HOST_LINK):
            allowed = "a lane beside compute and host, as 'net'"
            raise wrong("lanes", f"{letters} must be on {allowed}, got {lane!r}", lane)
    return tuple(
        CustomPhase(int(phase), letters, phase.kind._replace(lane=lanes[letters]))
        for letters, phase in sharding.items()
        if letters in lanes
    )


def _check_kind(letters: Any, kind: Any, parts: Mapping[str, int]) -> tuple[str, OpKind]:
    """Check a custom kind and its letters; return both, with memory changes by index in `parts`."""
    if not isinstance(letters, str) or not re.fullmatch(r"[A-Z][A-Za-z_]*", letters):
        raise wrong(
            "kinds", f"a kind is named by letters, as Fa or SEND_F, got {letters!r}", letters
        )
    if letters in Phase.__members__:
        raise wrong("kinds", f"{letters} is a phase of every table: choose other letters", letters)
    if not isinstance(kind, OpKind):
        raise wrong("kinds", f"{letters} must be an OpKind, got {kind!r}", kind)
    kind = kind._replace(scope=resolve_choice(kind.scope, OWNERS, f"scope of {letters}"))
    texts, slot = (kind.name, kind.time, kind.lane), kind.slot
    for is_wrong, why in (
        (not all(isinstance(text, str) and text for text in texts), "needs name, time and lane"),
        (kind.is_collective and kind.scope != WORKER, "a collective needs the scope worker"),
        (kind.lane == HOST_LINK and kind.scope != MICROBATCH, "its scope must be a microbatch"),
        (not (slot is None or (is_number(slot) and slot > 0)), "slot must be above 0"),
        (kind.awaited_phase is not None or not kind.in_cells, "a custom kind must stand in cells"),
    ):
        if is_wrong:
            raise wrong("kinds", f"{letters}: {why}, got {kind!r}", kind)
    for colour in kind.look or ():
        if not isinstance(colour, str) or not re.fullmatch("#[0-9A-Fa-f]{6}", colour):
            raise wrong("kinds", f"{letters}: write a colour as #A6D4F5, got {colour!r}", colour)

    def by_index(changes: Mapping[Any, int]) -> dict[int, int]:
        """Return the changes of parts by index; the keys may be indices or names."""
        names = {index: name for name, index in parts.items()}
        checked_changes = {}
        for part, change in changes.items():
            name = resolve_choice(names.get(part, part), tuple(parts), f"item of {letters}")
            if type(change) is not int:
                raise wrong("kinds", f"{letters}: takes whole numbers of {name}, got {change!r}")
            checked_changes[parts[name]] = change
        return checked_changes

    return letters, kind._replace(at_start=by_index(kind.at_start), at_end=by_index(kind.at_end))


USUAL = Grammar()
