"""The checker's own reading of what a table has of its own: kinds, rules, slices, a graph.

It takes the rules as the texts that the file holds, and follows them op by op. That both ends of a
rule exist is known: the reader of tables has made sure.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipejax.schedules.table.table import ScheduleTable

Named = tuple[str, int, int]  # an op: letters, stage, microbatch; of a worker, -1 - worker
_END = r"(\d*)([A-Za-z_]+)(\d*)(?:\.(\d+))?(?:@(\w+|[+-]\d+))?"
_RULE = re.compile(rf"{_END} <- {_END}(?: \((?:(all)|slice ([+-]\d+))\))?( \[message\])?")
OPS = ("F", "B", "I", "W", "R", "U")  # usual kinds that count as ops of a row
COMPUTES = "compute", "microbatch"  # lane and owner of what needs the weights of its stage
WHOLE, FOR_W, CHECKPOINT = range(3)  # numbers of the parts of an activation
IN_FLIGHT = (1, 1, 1, 0, 0, 0)  # activations that a part counts as
USUAL = -1  # number of every rule that is no table's own


class WaitedFor(NamedTuple):
    """An op that is waited for.

    Attributes:
      op: which.
      sends: whether a message leads from it to another worker.
      rule: number of the rule, by which messages of one op go.
    """

    op: Named
    sends: bool = True
    rule: int = USUAL


class _RuleEnd(NamedTuple):
    """One end of a rule; None where it is any stage or microbatch."""

    letters: str
    stage: int | None
    microbatch: int | None
    offset: int


class _Rule(NamedTuple):
    """Of the microbatches of the producer it is all, or that some slices away."""

    consumer: _RuleEnd
    producer: _RuleEnd
    is_all: bool
    part: int
    sends: bool


class OwnRules:
    """What a table has of its own; of a usual table nothing.

    Attributes:
      kinds: its kinds by letters.
      items: sizes of items, as shares of a whole activation, behind the three usual parts.
      lanes: lanes of usual kinds that are of a stage as a whole, by letters.
      ends_backward: letters of what frees an activation, or what W needs of it.
      recomputing: letters of what makes an activation from the checkpoint that its F left.
    """

    def __init__(self, table: ScheduleTable) -> None:
        """Read the rules."""
        grammar = table.grammar
        self.kinds, self.items = dict(grammar.kinds), [*grammar.items.values()]
        self.lanes = dict(grammar.lanes)
        takes = (x for x, kind in self.kinds.items() if kind.at_start.get(CHECKPOINT, 0) < 0)
        self.ends_backward = ["B", "W", *(x for x in self.kinds if self._ends_backward(x))]
        self.recomputing = ["R", *(x for x in takes if self.kinds[x].of == "microbatch")]
        self.names_ops = not grammar.has_usual_messages  # by which messages are told
        self._slices, self._graph = grammar.slices, [*grammar.graph]
        self._stages, self._microbatches = table.num_stages, table.num_microbatches
        self._rules = [self._read(text) for text in grammar.texts]

    def lane(self, letters: str) -> str:
        """Lane of an op by its letters."""
        if letters in self.kinds:
            return self.kinds[letters].lane
        if letters in self.lanes:
            return self.lanes[letters]
        return "host" if letters in ("O", "L") else "compute"

    def is_op(self, letters: str) -> bool:
        """Whether it counts as an op of its row, as sharding cells and waits do not."""
        return letters in OPS or (letters in self.kinds and self.kinds[letters].of != "stage")

    def together(self, letters: str) -> bool:
        """Whether the cells of all workers are one op."""
        return letters in self.kinds and self.kinds[letters].together

    def counted(self, letters: str, moment: str) -> float:
        """How many activations more an op of its own takes at its start or end; items by share."""
        if letters not in self.kinds or self.lane(letters) == "host":
            return 0
        shares = [*IN_FLIGHT, *self.items]
        changes = getattr(self.kinds[letters], moment)
        return sum(count * shares[part] for part, count in changes.items())

    def _ends_backward(self, letters: str) -> bool:
        kind = self.kinds[letters]
        whole, for_w = (kind.at_end.get(part, 0) for part in (WHOLE, FOR_W))
        frees = for_w < 0 or (for_w == 0 and whole < 0)
        return frees and (kind.lane, kind.of) == COMPUTES

    def of_stage(self, letters: str) -> list[str]:
        """What on a lane an op waits for: the last before it in its row that is of its stage."""
        computes = letters in OPS[:-1]
        if letters in self.kinds:
            computes = (self.kinds[letters].lane, self.kinds[letters].of) == COMPUTES
        needed = ["UNSHARD"] * computes
        needed += ["REDUCE_GRAD"] * (letters in ("WAIT_REDUCE_GRAD", "U"))
        return [each for each in needed if each in self.lanes]

    def of_worker(self, letters: str) -> bool:
        """Whether a kind is of a worker, and of no stage."""
        return letters in self.kinds and self.kinds[letters].of == "worker"

    def _read(self, text: str) -> _Rule:
        match = _RULE.fullmatch(text)
        assert match is not None, text
        fields = match.groups()
        waits, made = self._end(fields[:5]), self._end(fields[5:10])
        return _Rule(
            waits, made, fields[10] is not None, int(fields[11] or 0), fields[12] is not None
        )

    def _end(self, fields: Sequence[str | None]) -> _RuleEnd:
        stage, letters, microbatch, part, place = fields
        named = {"first": 0, "last": self._stages - 1}
        at = named.get(place or "", int(stage) if stage else None)
        number = int(microbatch) * self._slices + int(part or 0) if microbatch else None
        return _RuleEnd(
            letters or "", at, number, 0 if place in (None, *named) else int(place or 0)
        )

    def before(self, stage: int) -> list[int]:
        """Stages that lead to a stage: the one before it, or those of the graph."""
        return [a for a, b in self._graph if b == stage] if self._graph else [stage - 1]

    def behind(self, stage: int) -> list[int]:
        """Stages that a stage leads to."""
        return [b for a, b in self._graph if a == stage] if self._graph else [stage + 1]

    def slices_before(self, microbatch: int) -> list[int]:
        """The slice before one of the same microbatch."""
        return [microbatch - 1] * (microbatch % self._slices > 0)

    def slices_behind(self, microbatch: int) -> list[int]:
        """The slice behind one of the same microbatch."""
        return [microbatch + 1] * ((microbatch + 1) % self._slices > 0)

    def way(self, source: int, target: int) -> tuple[int, int]:
        """Direction of a message between two stages, 0 forth and 1 back, and its boundary."""
        if not self._graph:
            return int(source > target), min(source, target)
        is_forth = (source, target) in self._graph
        edge = (source, target) if is_forth else (target, source)
        return int(not is_forth), self._graph.index(edge)

    def awaited(self, op: Named, worker: int) -> Iterator[WaitedFor]:
        """What an op on a worker waits for by these rules, whether or not the table holds it."""
        letters, place, microbatch = op
        for number, rule in enumerate(self._rules):
            end = rule.consumer
            if end.letters != letters or end.stage not in (None, place):
                continue
            if end.microbatch not in (None, microbatch):
                continue
            for source in self._sources(rule.producer, place, worker):
                for other in self._numbers(rule, microbatch):
                    yield WaitedFor((rule.producer.letters, source, other), rule.sends, number)

    def _sources(self, end: _RuleEnd, place: int, worker: int) -> list[int]:
        """Places of the producers of an op."""
        if self.of_worker(end.letters):
            return [-1 - worker]
        if end.stage is not None:
            return [end.stage]
        if self._graph and end.offset:
            return self.before(place) if end.offset < 0 else self.behind(place)
        return [place + end.offset]

    def _numbers(self, rule: _Rule, microbatch: int) -> Sequence[int]:
        """Microbatches of the producers of an op."""
        if rule.is_all:
            return range(self._microbatches)
        if rule.producer.microbatch is not None:
            return [rule.producer.microbatch]
        first = microbatch - microbatch % self._slices
        found = microbatch + rule.part
        return [found] if first <= found < first + self._slices else []

    def text(self, op: Named) -> str:
        """Text of an op; slice k of microbatch m is m.k."""
        letters, place, microbatch = op
        whole, part = divmod(microbatch, self._slices)
        number = "" if microbatch < 0 else f"{whole}.{part}" if self._slices > 1 else str(whole)
        return f"{'' if place < 0 else place}{letters}{number}"
