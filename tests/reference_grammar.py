"""The grammar of a table as the oracle reads it: kinds and rules as data, as a table's JSON has them.

The usual kinds and rules are its default. Plain Python; it shares no code with the library.
"""

import re
from typing import NamedTuple

SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
WAITS = ("WAIT_O", "WAIT_SEND_F", "WAIT_SEND_B")
USUAL_KINDS = [
    {"letters": "F", "at_start": {"left": 1}},
    {"letters": "B", "slot": 2, "at_end": {"activation": -1}},
    {"letters": "I", "at_end": {"activation": -1, "for_w": 1}},
    {"letters": "W", "at_end": {"for_w": -1}},
    {"letters": "R", "at_start": {"checkpoint": -1, "activation": 1}},
    {"letters": "U", "slot": 0, "of": "copy"},
    {"letters": "O", "slot": 0, "lane": "host", "at_end": {"left": -1}},
    {"letters": "L", "slot": 0, "lane": "host", "at_start": {"left": 1}},
    *({"letters": letters, "slot": 0, "of": "stage"} for letters in SHARDING),
    *({"letters": letters, "slot": 0, "only_waits": True} for letters in WAITS),
]
BACKWARDS = ("B", "I")
USUAL_RULES = [  # of what a table holds: what is not there is not waited for
    "F <- F@-1 [message]",
    *("R <- F", "R <- L", "W <- I", "U <- B", "U <- W", "O <- F", "L <- O", "WAIT_O <- O"),
    *(f"{b} <- {p}" for b in BACKWARDS for p in "FRL"),
    *(f"{b} <- {p}@+1 [message]" for b in BACKWARDS for p in BACKWARDS),
]
RULES_OF_SLICES = [
    "F <- F (slice -1)",
    *(f"{b} <- {p} (slice +1)" for b in BACKWARDS for p in BACKWARDS),
]

_OP = re.compile(r"(\d*)([A-Za-z_]+?)(\d*)(?:\.(\d+))?(?:@\w+)?(?=[;)]|$)")
_END = r"(\d*)([A-Za-z_]+)(?:(\d+)(?:\.(\d+))?)?(?:@(first|last|[+-]\d+))?"
_RULE = re.compile(rf"{_END} <- {_END}(?: \((all|slice [+-]\d+)\))?( \[message\])?")


class IllegalError(Exception):
    """No table: an op or an end of a rule is missing, or stands where it may not."""


class End(NamedTuple):
    """One end of a rule: letters, a stage ("last" too) or none, a microbatch or none, an offset."""

    letters: str
    stage: object
    microbatch: int | None
    offset: int


class Rule(NamedTuple):
    """Consumer and producer, which of its microbatches, whether a message goes, whether it must be."""

    consumer: End
    producer: End
    every: bool
    part: int
    sends: bool
    is_needed: bool


class Table(NamedTuple):
    """What a rule asks a table for: how many stages and microbatches, and where an op stands."""

    stages: int
    microbatches: int
    cell_of: dict


class Grammar:
    """Kinds by letters, and rules in their order."""

    def __init__(self, data=None):
        data = data or {}
        self.slices = data.get("slices", 1)
        self.forward_only = data.get("forward_only", False)
        self.graph = [tuple(edge) for edge in data.get("graph", [])]
        self.items = data.get("items", {})
        self.own = [kind["letters"] for kind in data.get("kinds", [])]
        self.kinds = {kind["letters"]: kind for kind in [*USUAL_KINDS, *data.get("kinds", [])]}
        self.lanes = data.get("lanes", {})
        for letters, lane in self.lanes.items():
            self.kinds[letters] = {**self.kinds[letters], "lane": lane}
        usual = [*USUAL_RULES, *(RULES_OF_SLICES if self.slices > 1 else [])]
        self.rules = [self.rule(text, False) for text in usual]
        self.rules += [self.rule(text, True) for text in data.get("rules", [])]

    def of(self, letters):
        return self.kinds[letters].get("of", "microbatch")

    def lane(self, letters):
        messages = {"lane": "net"}  # SEND and RECV cells, which no rule speaks of
        return self.kinds.get(letters, messages).get("lane", "compute")

    def computes(self, letters):
        """Whether it is compute of a microbatch, by which microbatches are counted."""
        kind = self.kinds.get(letters, {"only_waits": True})
        is_work = self.lane(letters) == "compute" and not kind.get("only_waits")
        return is_work and self.of(letters) == "microbatch"

    def ends_backward(self, letters):
        """Whether it frees an activation, of which W needs nothing more, or what W needs of it."""
        freed = self.kinds.get(letters, {}).get("at_end", {})
        for_w = freed.get("for_w", 0)
        return self.computes(letters) and (for_w < 0 or for_w == 0 > freed.get("activation", 0))

    def needs(self, letters):
        """What is waited for that stands on a lane, of the same stage, last before it in the row."""
        if self.computes(letters):
            return {"UNSHARD"} & {*self.lanes}
        return {"REDUCE_GRAD"} & {*self.lanes} if letters in ("WAIT_REDUCE_GRAD", "U") else set()

    def together(self, letters):
        return self.kinds[letters].get("together", False)

    def is_op(self, letters):
        """Whether it is an op of its row, and not of a stage as a whole, a wait, or on a lane."""
        kind = self.kinds[letters]
        is_row = self.lane(letters) == "compute" and self.of(letters) != "stage"
        return is_row and not kind.get("only_waits", False)

    def number(self, microbatch, part):
        return int(microbatch) * self.slices + int(part or 0)

    def split(self, text):
        """'(0F1;2B0)OVERLAP_F_B' -> [('F', 0, 1), ('B', 2, 0)]; None for what an op does not carry."""
        found = _OP.findall(text.replace("OVERLAP_F_B", "").strip())
        return [
            (letters, int(stage) if stage else None, self.number(m, part) if m else None)
            for stage, letters, m, part in found
        ]

    def rule(self, text, is_needed):
        *fields, which, message = _RULE.fullmatch(text).groups()
        ends = []
        for stage, letters, m, part, place in (fields[:5], fields[5:]):
            at = {"first": 0, "last": "last"}.get(place, int(stage) if stage else None)
            offset = int(place) if place and place[0] in "+-" else 0
            ends.append(End(letters, at, self.number(m, part) if m else None, offset))
        part = int(which.removeprefix("slice ")) if which and which != "all" else 0
        return Rule(*ends, which == "all", part, message is not None, is_needed)

    def waits(self, op, worker, table):
        """What an op waits for, each with the number of its rule and whether a message goes."""
        letters, place, m = op
        for number, rule in enumerate(self.rules):
            end = rule.consumer
            is_meant = end.letters == letters and end.microbatch in (None, m)
            if is_meant and end.stage in (None, self._as_written(end.stage, place, table)):
                for producer in self._producers(rule, place, m, worker, table):
                    if producer in table.cell_of:
                        yield producer, number, rule.sends
                    elif rule.is_needed:
                        raise IllegalError(f"{op} lacks {producer}")

    @staticmethod
    def _as_written(stage, place, table):
        return "last" if stage == "last" and place == table.stages - 1 else place

    def _producers(self, rule, place, m, worker, table):
        for source in self._places(rule.producer, place, worker, table):
            if rule.every:
                found = range(table.microbatches)
            elif rule.producer.microbatch is not None:
                found = [rule.producer.microbatch]
            else:
                is_inside = 0 <= m % self.slices + rule.part < self.slices
                found = [m + rule.part] if is_inside else []
            for other in found:
                yield rule.producer.letters, source, other

    def _places(self, end, place, worker, table):
        if self.of(end.letters) == "worker":
            return [f"worker {worker}"]
        if end.stage is not None:
            return [table.stages - 1 if end.stage == "last" else end.stage]
        if end.offset and self.graph:
            ways = self.graph if end.offset < 0 else [(b, a) for a, b in self.graph]
            return [a for a, b in ways if b == place]
        source = place + end.offset
        return [source] if 0 <= source < table.stages else []

    def way(self, source, target):
        """Direction of a message between two stages, 0 forth and 1 back, and where it goes.

        That is the edge of the graph, or the lower one of both stages.
        """
        if not self.graph:
            return int(source > target), min(source, target)
        is_forth = (source, target) in self.graph
        edge = (source, target) if is_forth else (target, source)
        if edge not in self.graph:
            raise IllegalError(f"no edge joins stages {source} and {target}")
        return int(not is_forth), self.graph.index(edge)


def check(grammar, cells, placement, pipe_of):
    """Refuse what is no table; `cells` are by worker, of ops. Deadlocks are found elsewhere."""
    stages, where = len(placement[0]), {}
    numbers = [op[2] for row in cells for cell in row for op in cell if grammar.computes(op[0])]
    count = 1 + max(numbers, default=-1)
    for w, row in enumerate(cells):
        demand(any(row), f"worker {w} has no op")
        for cell in row:
            for op in cell:
                letters, place, m = op
                of = grammar.of(letters)
                demand(of == "stage" or m < count, f"{op}: no such microbatch")
                demand(of == "worker" or place < stages, f"{op}: no such stage")
                if of in ("microbatch", "copy"):
                    demand(placement[pipe_of[m]][place] == w, f"{op} is on another worker")
                if of == "stage":
                    demand(w in [row[place] for row in placement], f"{op} is on another worker")
                    continue
                demand(op not in where, f"{op} stands twice")
                where[op] = (w, cell)
    demand(count > 0, "nothing computes a microbatch")
    demand(count % grammar.slices == 0, "the last microbatch lacks slices")
    for m in range(count):
        first = m - m % grammar.slices
        demand(pipe_of[m] == pipe_of[first], "slices of one microbatch are in two pipes")
    table = Table(stages, count, where)
    for rule in grammar.rules:
        check_rule(rule, table)
    _check_usual(grammar, table)
    for row in cells if "UNSHARD" in grammar.lanes else []:
        check_weights(grammar, [op for cell in row for op in cell])


def check_weights(grammar, ops):
    """What is gathered anywhere in a row is dropped before, and there when it is needed."""
    there = {place: False for letters, place, _ in ops if letters in ("UNSHARD", "RESHARD")}
    for letters, place, _ in ops:
        if letters in ("UNSHARD", "RESHARD"):
            demand(there[place] == (letters == "RESHARD"), f"{letters} of {place} out of turn")
            there[place] = letters == "UNSHARD"
        elif "UNSHARD" in grammar.needs(letters):
            demand(there.get(place, True), f"{letters} of {place} has no weights")


def demand(condition, what):
    if not condition:
        raise IllegalError(what)


def check_rule(rule, table):
    """Both ends of a rule exist: what is of one place or microbatch, and what waits at all."""
    for end in (rule.consumer, rule.producer):
        demand(end.stage in (None, "last", *range(table.stages)), f"{end}: no such stage")
        is_there = end.microbatch is None or end.microbatch < table.microbatches
        demand(is_there, f"{end}: no such microbatch")
    letters, stage, m, _ = rule.consumer
    stage = table.stages - 1 if stage == "last" else stage
    waiting = [op for op in table.cell_of if op[0] == letters and stage in (None, op[1])]
    is_used = any(m in (None, op[2]) for op in waiting)
    demand(is_used or not rule.is_needed, f"{rule}: nothing waits by it")


def _check_usual(grammar, table):
    stages, count, where = table
    has = where.__contains__
    for letters, s, m in where:
        maker = {"R": "F", "O": "F", "L": "O", "WAIT_O": "O"}.get(letters)
        demand(maker is None or has((maker, s, m)), f"{letters} lacks {maker}")
    is_usual = any(op[0] in ("F", "B", "I", "W") for op in where)
    for s in range(stages if is_usual or not grammar.own else 0):
        for m in range(count):
            whole, grad, weight, off, load = (has((p, s, m)) for p in "BIWOL")
            demand(has(("F", s, m)), "there is no forward")
            demand(off == load, "an offload or a load alone")
            if grammar.forward_only:
                demand(not (whole or grad or weight or has(("U", s, m))), "forward_only")
            else:
                demand(grad == weight and whole != grad, "no backward, or two")
            demand(off or not has(("WAIT_O", s, m)), "a wait for nothing")
