"""Op kinds and dependency rules: the usual ones (F, B, I, W, ..) and those that a table adds."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from pipejax.checker.values import (
    MalformedError,
    is_list,
    is_real,
    is_time,
    is_whole,
    require,
    require_legal,
)

SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WAIT_SEND = ("WAIT_SEND_F", "WAIT_SEND_B")
LETTERS = (*"FBIWRUOL", *SHARDING, "WAIT_O", *COMMUNICATION, *WAIT_SEND)
TIMED = (*"FBIWRUOLA", *SHARDING)
RESERVED = (*LETTERS, "A", "IDLE")
KEYS = ("kinds", "rules", "items", "slices", "forward_only", "graph", "lanes")
SCOPES = ("microbatch", "stage", "copy", "worker")
PARTS = ("activation", "for_w", "checkpoint")
TEXTS = ("letters", "name", "time", "lane", "of")
KIND_KEYS = {*TEXTS, "together", "slot", "at_start", "at_end", "look"}
INPUTS = {  # letters of an op -> letters of its inputs on the same stage and microbatch
    "R": "FL",
    "B": "FRL",
    "I": "FRL",
    "W": "I",
    "U": "BW",
    "O": "F",
    "L": "O",
    "WAIT_O": "O",
}
USUAL_RULE = -1  # stands for the number of a rule if the rule is a usual one
_END = r"(?:([0-9]*)([A-Za-z_]+)([0-9]*)(?:\.([0-9]+))?(?:@(first|last|[+-][0-9]+))?)"
_RULE = re.compile(
    rf"{_END}\s*<-\s*{_END}\s*(?:\((?:(all)|slice ([+-][0-9]+))\))?\s*(\[message\])?"
)


class TableOp(NamedTuple):
    """An op of a table, by letters, stage and microbatch."""

    letters: str
    stage: Any  # number of the stage; a text such as "worker 0" for an op without a stage
    microbatch: int  # of the microbatch, or of the slice (microbatch * slices + k); -1 if none


class RuleEnd(NamedTuple):
    """Consumer or producer of a rule; a stage or microbatch of None stands for any."""

    letters: str
    stage: Any
    microbatch: int | None
    offset: int


class TableRule(NamedTuple):
    """A rule that a table adds: ops of the consumer wait for ops of the producer."""

    text: str
    consumer: RuleEnd
    producer: RuleEnd
    is_all: bool
    slice_offset: int
    has_message: bool


class TableRules:
    """Op kinds and dependency rules of a table: the usual ones, and those that the table adds."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Read the keys of a table's grammar, such as `slices` and `rules`."""
        self.slices = data.get("slices", 1)
        require(is_whole(self.slices, 1), "slices", "a whole number of at least 1", self.slices)
        self.forward_only = data.get("forward_only", False)
        is_valid = isinstance(self.forward_only, bool)
        require(is_valid, "forward_only", "true or false", self.forward_only)
        self.is_usual = not any(data.get(key) for key in ("kinds", "rules", "items", "graph"))
        self.is_usual &= self.slices == 1 and not self.forward_only
        self.lanes = _dictionary(data, "lanes")  # lanes add no kinds or rules
        for letters, lane in self.lanes.items():
            is_lane = isinstance(lane, str) and lane not in ("", "compute", "host")
            is_valid = is_lane and letters in ("UNSHARD", "REDUCE_GRAD")
            require(is_valid, "lanes", "lanes beside compute for UNSHARD, REDUCE_GRAD", self.lanes)
        self.items = _dictionary(data, "items")
        for item, share in self.items.items():
            require(is_time(share), f"items: {item}", "a number of at least 0", share)
        self.kinds: dict[str, dict[str, Any]] = {}
        for kind in _list(data, "kinds", dict):
            self._add_kind(kind)
        self.graph = _list(data, "graph", list)
        for edge in self.graph:
            is_valid = len(edge) == 2 and all(map(is_whole, edge)) and edge[0] != edge[1]
            require(is_valid, "graph", "pairs of two stages", edge)
        is_valid = len({frozenset(edge) for edge in self.graph}) == len(self.graph)
        require(is_valid, "graph", "edges of which none stands twice", self.graph)
        self.rules = [self._read_rule(text) for text in _list(data, "rules", str)]

    def _add_kind(self, kind: dict[str, Any]) -> None:
        """Check an op kind that the table defines, and record it with its defaults."""
        letters = kind.get("letters")
        where = f"kind {letters!r}"
        is_valid = set(kind) <= KIND_KEYS
        require(is_valid, where, f"an object with the keys {', '.join(sorted(KIND_KEYS))}", kind)
        is_valid = all(isinstance(kind[key], str) and kind[key] for key in TEXTS if key in kind)
        require(is_valid, where, f"an object whose {', '.join(TEXTS)} are texts", kind)
        is_name = isinstance(letters, str) and bool(re.fullmatch(r"[A-Z][A-Za-z_]*", letters))
        is_valid = is_name and letters not in RESERVED and letters not in self.kinds
        require(is_valid, where, "named by a capital and letters that no other kind has", kind)
        full = {"lane": "compute", "of": "microbatch", "together": False, "slot": 1, **kind}
        is_collective = full["together"]
        is_valid = is_collective is False or (is_collective is True and full["of"] == "worker")
        require(is_valid, f"{where}: together", "false, or true for a worker", is_collective)
        is_valid = is_time(full["slot"]) and full["slot"] > 0
        require(is_valid, f"{where}: slot", "a number above 0", full["slot"])
        look = kind.get("look", [])
        require(isinstance(look, list), f"{where}: look", "a list", look)
        require(full["of"] in SCOPES, f"{where}: of", f"one of {', '.join(SCOPES)}", full["of"])
        is_valid = full["lane"] != "host" or full["of"] == "microbatch"
        require(is_valid, f"{where}: of", "microbatch on the lane host", full["of"])
        for moment in ("at_start", "at_end"):
            changes = full.setdefault(moment, {})
            parts = [*PARTS, *self.items]
            is_changes = isinstance(changes, dict) and all(
                part in parts and isinstance(count, int) and is_real(count)
                for part, count in changes.items()
            )
            allowed = f"whole numbers of {', '.join(parts)}"
            require(is_changes, f"{where}: {moment}", allowed, changes)
        self.kinds[str(letters)] = full

    def _read_rule(self, text: str) -> TableRule:
        """Read "F <- G@-1 [message]": F waits for a message from G of the previous stage."""
        match = _RULE.fullmatch(text.strip())
        if match is None:
            raise MalformedError(f"{text!r} is not a rule as 'consumer <- producer'")
        *fields, all_text, slice_text, message = match.groups()  # five fields for each end
        ends = self._read_end(fields[:5], text), self._read_end(fields[5:], text)
        is_all, offset = all_text is not None, int(slice_text or 0)
        rule = TableRule(text, *ends, is_all, offset, has_message=message is not None)
        consumer, producer = ends
        scopes = [self.scope(end.letters) for end in ends]
        is_legal = "stage" not in scopes and not consumer.offset
        for end, scope in zip(ends, scopes, strict=True):
            is_legal &= scope != "worker" or (end.stage is None and not end.offset)
        # an op of a worker has no stage, so the rule must name the stage of the producer
        if scopes[0] == "worker" and scopes[1] != "worker":
            is_legal &= producer.stage is not None
        is_legal &= not rule.has_message or "worker" not in scopes
        is_legal &= producer.microbatch is None or not (is_all or offset)
        is_legal &= not self.graph or abs(producer.offset) < 2
        if not is_legal:
            raise MalformedError(f"rule {text!r}: no op can be its consumer or producer")
        return rule

    def _read_end(self, fields: list[Any], text: str) -> RuleEnd:
        """Return the consumer or producer of a rule from five groups matched by `_RULE`."""
        stage, letters, microbatch, slice_text, place = fields
        if letters not in self.kinds and letters not in LETTERS:
            raise MalformedError(f"rule {text!r}: unknown letters {letters!r}")
        has_slice, slice_index = slice_text is not None, int(slice_text or 0)
        is_number = has_slice == (self.slices > 1) if microbatch else not has_slice
        if not is_number or slice_index >= self.slices:
            raise MalformedError(f"rule {text!r}: {microbatch}.{slice_text} is no microbatch")
        number = int(microbatch) * self.slices + slice_index if microbatch else None
        if place in ("first", "last"):
            return RuleEnd(letters, 0 if place == "first" else "last", number, 0)
        return RuleEnd(letters, int(stage) if stage else None, number, int(place or 0))

    def scope(self, letters: str) -> str:
        """Return the scope of an op kind: "microbatch", "stage", "copy" or "worker"."""
        if letters in self.kinds:
            return str(self.kinds[letters]["of"])
        return "stage" if letters in SHARDING else "microbatch"

    def lane(self, letters: str) -> str:
        """Return the lane of an op kind; the lane of communication cells is "compute"."""
        if letters in self.kinds:
            return str(self.kinds[letters]["lane"])
        if letters in self.lanes:
            return str(self.lanes[letters])
        return "host" if letters in ("O", "L") else "compute"

    def stage_cells(self, letters: str) -> list[str]:
        """List the letters of sharding cells on lanes that an op of this kind waits for."""
        computes = letters in tuple("FBIWR") or (letters in self.kinds and self.is_counted(letters))
        is_end = letters in ("WAIT_REDUCE_GRAD", "U")
        needs = (("UNSHARD", computes), ("REDUCE_GRAD", is_end))
        return [cell for cell, is_needed in needs if is_needed and cell in self.lanes]

    def is_counted(self, letters: str) -> bool:
        """Return whether an op kind runs on compute and belongs to a microbatch."""
        return self.lane(letters) == "compute" and self.scope(letters) == "microbatch"

    def is_row_op(self, letters: str) -> bool:
        """Return whether an op kind is an op of the row, not a sharding or a wait cell."""
        added = letters in self.kinds and self.scope(letters) != "stage"
        return letters in tuple("FBIWRU") or added

    def is_collective(self, letters: str) -> bool:
        """Return whether an op kind is a collective of all workers."""
        return letters in self.kinds and bool(self.kinds[letters]["together"])

    def is_gradient(self, letters: str) -> bool:
        """Return whether an op kind ends a backward and so frees the rest of an activation."""
        if letters not in self.kinds:
            return letters in ("B", "W")
        changes = self.kinds[letters]["at_end"]
        for_w, activation = changes.get("for_w", 0), changes.get("activation", 0)
        frees = for_w < 0 or (for_w == 0 and activation < 0)
        return self.is_counted(letters) and frees

    def recomputing(self) -> list[str]:
        """List the op kinds that recompute an activation from its checkpoint, by letters."""
        takes = (x for x, kind in self.kinds.items() if kind["at_start"].get("checkpoint", 0) < 0)
        return [letters for letters in takes if self.scope(letters) == "microbatch"]

    def sources(self, stage: int) -> list[int]:
        """List the stages whose forward output a stage receives."""
        return [a for a, b in self.graph if b == stage] if self.graph else [stage - 1]

    def targets(self, stage: int) -> list[int]:
        """List the stages that receive the forward output of a stage."""
        return [b for a, b in self.graph if a == stage] if self.graph else [stage + 1]

    def route(self, source: int, target: int) -> tuple[int, int] | None:
        """Return (direction, boundary) of a message; None if no edge joins the two stages."""
        if not self.graph:  # direction 0 is forward, 1 backward
            return int(source > target), min(source, target)
        edges = enumerate(self.graph)
        return next(
            ((int(a != source), k) for k, (a, b) in edges if {a, b} == {source, target}), None
        )

    def usual_inputs(self, op: TableOp) -> Iterator[TableOp]:
        """List the inputs of an op by the usual rules; the table may lack some of them."""
        letters, stage, microbatch = op
        for input_letters in INPUTS.get(letters, ""):
            yield op._replace(letters=input_letters)
        if letters == "F":
            yield from (op._replace(stage=source) for source in self.sources(stage))
            if microbatch % self.slices:
                yield op._replace(microbatch=microbatch - 1)
        if letters in ("B", "I"):
            for target in self.targets(stage):
                yield from (TableOp(gradient, target, microbatch) for gradient in "IB")
            if (microbatch + 1) % self.slices:
                yield from (TableOp(gradient, stage, microbatch + 1) for gradient in "IB")

    def is_consumer(self, rule: TableRule, op: TableOp, num_stages: int) -> bool:
        """Return whether an op is a consumer of a rule."""
        end = rule.consumer
        stage = num_stages - 1 if end.stage == "last" else end.stage
        is_place = stage in (None, op.stage) and end.microbatch in (None, op.microbatch)
        return end.letters == op.letters and is_place

    def added_inputs(
        self, op: TableOp, worker: int, num_stages: int, num_microbatches: int
    ) -> Iterator[tuple[TableOp, bool, int]]:
        """List (producer, has_message, number of the rule) of an op's inputs by added rules."""
        # By the rule "F <- G@-1", F of stage 2 and microbatch 5 has the input G of stage 1 and
        # microbatch 5. A producer with the scope "worker" is on the worker of the op.
        _, stage, microbatch = op
        for number, rule in enumerate(self.rules):
            if not self.is_consumer(rule, op, num_stages):
                continue
            end = rule.producer
            if self.scope(end.letters) == "worker":
                sources: list[Any] = [f"worker {worker}"]
            elif end.stage is not None:
                sources = [num_stages - 1 if end.stage == "last" else end.stage]
            elif end.offset and self.graph:
                sources = self.sources(stage) if end.offset < 0 else self.targets(stage)
            else:
                source = stage + end.offset
                sources = [source] if 0 <= source < num_stages else []
            if rule.is_all:
                numbers = range(num_microbatches)
            elif end.microbatch is not None:
                numbers = range(end.microbatch, end.microbatch + 1)
            else:
                other = microbatch + rule.slice_offset
                is_same = other // self.slices == microbatch // self.slices  # same microbatch
                numbers = range(other, other + 1) if is_same else range(0)
            for source in sources:
                for m in numbers:
                    yield TableOp(end.letters, source, m), rule.has_message, number

    def check_rule(
        self, rule: TableRule, ops: Collection[TableOp], stages: int, count: int
    ) -> None:
        """Check that the stages and microbatches of a rule exist, and that it applies to an op."""
        text = f"rule {rule.text}"
        for end in (rule.consumer, rule.producer):
            is_stage = end.stage in (None, "last", *range(stages))
            require_legal(is_stage, f"{text}: stage {end.stage} does not exist")
            is_number = end.microbatch is None or end.microbatch < count
            require_legal(is_number, f"{text}: microbatch {end.microbatch} does not exist")
        has_consumer = any(self.is_consumer(rule, op, stages) for op in ops)
        require_legal(has_consumer, f"{text}: the table holds no op that waits by it")

    def op_text(self, op: TableOp) -> str:
        """Write an op as a table does; slice k of microbatch m is m.k."""
        stage = "" if isinstance(op.stage, str) else op.stage
        text = "" if op.microbatch < 0 else str(op.microbatch)
        if text and self.slices > 1:
            text = "{}.{}".format(*divmod(op.microbatch, self.slices))
        return f"{stage}{op.letters}{text}"


def _dictionary(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name, {})
    require(isinstance(value, dict), name, "an object", value)
    return value


def _list(data: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = data.get(name, [])
    is_valid = is_list(value, lambda entry: isinstance(entry, kind))
    require(is_valid, name, f"a list of entries of type {kind.__name__}", value)
    return list(value)
