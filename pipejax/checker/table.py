"""Reader of a certificate's table, which checks that the table is legal."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipejax.checker.rules import (
    COMMUNICATION,
    KEYS as RULE_KEYS,
    LETTERS,
    USUAL_RULE,
    WAIT_SEND,
    TableOp,
    TableRules,
)
from pipejax.checker.values import (
    IllegalError,
    MalformedError,
    is_list,
    is_time,
    is_whole,
    require,
    require_legal,
)

KEYS = {
    *("format", "version", "name", "placement", "pipe_of_microbatch"),
    *("slots", "stage_shares", "rows"),
}
LONGEST_NAME = 1000
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")


class Cell(NamedTuple):
    """Position of a cell in a table."""

    worker: int
    slot: int


class CellReader:
    """Reader of the texts of cells."""

    def __init__(self, rules: TableRules) -> None:
        """Compile the pattern for the text of an op: stage, letters, microbatch or slice, lane."""
        letters = sorted([*LETTERS, *rules.kinds], key=len, reverse=True)
        number = "([0-9]{0,9})()"
        if rules.slices > 1:
            number = r"(?:([0-9]{1,9})\.([0-9]{1,9}))?"
        self.rules = rules
        self.form = re.compile(rf"([0-9]{{0,9}})({'|'.join(letters)}){number}(?:@(\w+))?")

    def read_cell(self, text: str, worker: int) -> list[TableOp]:
        """Return the ops of a cell: none, a single op, or the two ops of a fused pair."""
        text = text.strip()
        pair = PAIR.fullmatch(text)
        if not pair:
            return [self._read_op(text, worker)] if text else []
        cell = [self._read_op(part, worker) for part in pair.groups()]
        is_pair = cell[0].letters == "F" and cell[1].letters in ("B", "I")
        require_legal(is_pair, f"{text!r} is not a pair of an F and a B or I")
        return cell

    def _read_op(self, text: str, worker: int) -> TableOp:
        """Read an op such as "0F3", "1UNSHARD@net", or "0F3.1" (slice 1 of microbatch 3)."""
        match = self.form.fullmatch(text.strip())
        if not match:
            raise IllegalError(f"{text!r} on worker {worker} is not an op")
        stage, letters, microbatch, slice_text, lane = match.groups()
        scope = self.rules.scope(letters)
        if bool(microbatch) != (scope != "stage") or bool(stage) != (scope != "worker"):
            raise IllegalError(f"{text!r} on worker {worker} is not an op")
        op_lane = "net" if letters in COMMUNICATION else self.rules.lane(letters)
        require_legal(lane in (None, op_lane), f"{text!r} stands on another lane than {op_lane}")
        slices, slice_index = self.rules.slices, int(slice_text or 0)
        require_legal(slice_index < slices, f"{text!r} is no slice: there are {slices}")
        number = int(microbatch) * slices + slice_index if microbatch else -1
        return TableOp(letters, int(stage) if stage else f"worker {worker}", number)


class Table:
    """A legal table, with the ops of each cell and the cell of each op."""

    def __init__(self, data: Any) -> None:
        """Read a table from JSON data and check that it is legal."""
        self._read(data)  # rules, placement and number of stages, but not the cells
        for stage in {stage for edge in self.rules.graph for stage in edge}:
            require_legal(stage < self.num_stages, f"graph: stage {stage} does not exist")
        reader = CellReader(self.rules)
        self.rows = [
            [reader.read_cell(text, worker) for text in row]
            for worker, row in enumerate(data["rows"])
        ]
        compute = {*"FBIWR", *filter(self.rules.is_counted, self.rules.kinds)}
        ops = [op for row in self.rows for cell in row for op in cell]
        microbatches = (op.microbatch for op in ops if op.letters in compute)
        self.num_microbatches = 1 + max(microbatches, default=-1)
        self._check_microbatches()
        self.cell: dict[TableOp, Cell] = {}  # by op
        for worker, row in enumerate(self.rows):
            require_legal(any(row), f"worker {worker} has no op")
            for slot, cell in enumerate(row):
                for op in cell:
                    self._record_op(op, Cell(worker, slot))
        self.has_communication = any(op.letters in COMMUNICATION for op in self.cell)
        require_legal(
            self.rules.is_usual or not self.has_communication,
            "communication cells stand in a table with kinds or rules of its own",
        )
        for rule in self.rules.rules:
            self.rules.check_rule(rule, self.cell, self.num_stages, self.num_microbatches)
        self._check_complete()
        self._check_order()
        if self.has_communication:
            self._check_communication()
        self._check_updates()
        if "UNSHARD" in self.rules.lanes:
            for worker, row in enumerate(self.rows):
                self._check_gathered(worker, [op for cell in row for op in cell])

    def _read(self, data: Any) -> None:
        """Read and check all keys of a table, except the text of its cells."""
        optional = {"weights", *RULE_KEYS}
        is_valid = isinstance(data, dict)
        require(is_valid, "the table", f"an object with the keys {', '.join(sorted(KEYS))}", data)
        for key in sorted((set(data) - optional) ^ KEYS):
            fault = "missing" if key in KEYS else "unknown"
            raise MalformedError(f"{fault} key {key!r} in the table")
        form = data["format"], data["version"]
        is_valid = repr(form) == "('pipejax-table', 1)"  # `==` on numbers would accept true for 1
        require(is_valid, "format and version of the table", "'pipejax-table' and 1", form)
        is_valid = isinstance(data["name"], str) and len(data["name"]) <= LONGEST_NAME
        require(is_valid, "name", f"a text of at most {LONGEST_NAME} characters", data["name"])
        is_valid = is_list(data["rows"], lambda row: is_list(row, lambda x: isinstance(x, str)))
        require(is_valid, "rows", "lists of texts", data["rows"])
        self.placement, self.pipes = data["placement"], data["pipe_of_microbatch"]
        workers = len(data["rows"])
        is_placement = (
            is_list(self.placement, lambda row: is_list(row, is_whole) and row)
            and len({len(row) for row in self.placement}) == 1
            and all(worker < workers for row in self.placement for worker in row)
        )
        require(is_placement, "placement", f"lists of {workers} workers from 0", self.placement)
        self.num_stages, pipes = len(self.placement[0]), len(self.placement)
        is_valid = is_list(self.pipes, lambda pipe: is_whole(pipe) and pipe < pipes)
        require(is_valid, "pipe_of_microbatch", f"a list of {pipes} pipes from 0", self.pipes)
        self.rules = TableRules(data)
        slots, shares = data["slots"], data["stage_shares"]
        letters = {*"FBIWR", *self.rules.kinds}
        is_slots = isinstance(slots, dict) and set(slots) <= letters
        is_valid = is_slots and all(is_time(time) and time > 0 for time in slots.values())
        require(is_valid, "slots", f"numbers above 0 of {', '.join(sorted(letters))}", slots)
        is_shares = is_list(shares, lambda share: is_time(share) and share > 0)
        is_valid = is_shares and len(shares) in (0, self.num_stages)
        require(is_valid, "stage_shares", f"0 or {self.num_stages} numbers above 0", shares)
        self._read_weights(data.get("weights", {}))

    def _read_weights(self, rule: Any) -> None:
        """Read the weight rule, which says which weight version a forward reads."""
        # behind: age of the version in updates; runs: number of LocalSGD's models; local_steps:
        # updates of a model between two averages
        keys = ("behind", "runs", "local_steps")
        is_rule = isinstance(rule, dict) and set(rule) <= set(keys)
        has_counts = is_rule and all(is_whole(rule.get(key, 1), 1) for key in keys[1:])
        require(has_counts, "weights", f"whole numbers of {', '.join(keys)}", rule)
        self.weight_lag, self.runs = rule.get("behind"), rule.get("runs", 1)
        self.local_steps = rule.get("local_steps", 1)
        has_lag = self.weight_lag is None or is_whole(self.weight_lag)
        require(has_lag, "weights: behind", "a whole number or null", self.weight_lag)

    def _check_microbatches(self) -> None:
        """Check that each microbatch has a pipe, and that all its slices have the same pipe."""
        count, slices = self.num_microbatches, self.rules.slices
        reason = f"pipe_of_microbatch names {len(self.pipes)} microbatches, the rows hold {count}"
        require_legal(len(self.pipes) == count, reason)
        require_legal(count % slices == 0, f"a microbatch has not all of its {slices} slices")
        for number in range(count):
            is_same = self.pipes[number] == self.pipes[number - number % slices]
            require_legal(is_same, f"slices of microbatch {number // slices} are in several pipes")

    def _record_op(self, op: TableOp, cell: Cell) -> None:
        """Record the cell of an op; check stage, microbatch and worker, and that the op is new."""
        _, stage, microbatch = op
        text = f"op {self.rules.op_text(op)} on worker {cell.worker}"
        count = self.num_microbatches
        require_legal(microbatch < count, f"{text}: microbatches are 0 to {count - 1}")
        if not isinstance(stage, str):
            stages = self.num_stages
            require_legal(stage < stages, f"{text}: stages are 0 to {stages - 1}")
            pipes = self.placement if microbatch < 0 else [self.placement[self.pipes[microbatch]]]
            workers = [pipe[stage] for pipe in pipes]
            require_legal(cell.worker in workers, f"{text}: its stage is on worker {workers[0]}")
            if microbatch < 0:
                return
        require_legal(op not in self.cell, f"{text} stands twice")
        self.cell[op] = cell

    def inputs(self, op: TableOp) -> Iterator[tuple[TableOp, bool, int]]:
        """List (producer, has_message, number of the rule) of all inputs of an op."""
        for producer in self.rules.usual_inputs(op):
            if producer in self.cell:
                yield producer, True, USUAL_RULE
        worker, sizes = self.cell[op].worker, (self.num_stages, self.num_microbatches)
        for producer, has_message, rule in self.rules.added_inputs(op, worker, *sizes):
            if producer not in self.cell:
                self._raise_missing(producer, f"{self.rules.op_text(op)} waits for it")
            yield producer, has_message, rule

    def _raise_missing(self, op: TableOp, why: str) -> None:
        require_legal(False, f"missing op {self.rules.op_text(op)}: {why}")

    def _check_complete(self) -> None:
        """Check that microbatches pass all stages, and that ops of wait cells exist."""
        rules = self.rules
        # if all op kinds are added by the table, a microbatch need not pass all stages
        passes_all = not rules.kinds or any(op.letters in tuple("FBIW") for op in self.cell)
        for stage in range(self.num_stages if passes_all else 0):
            for microbatch in range(self.num_microbatches):
                self._check_passes(stage, microbatch)
        for op in self.cell:
            if op.letters in ("WAIT_O", *WAIT_SEND):
                producer = awaited_op(op)
                if producer not in self.cell:
                    self._raise_missing(producer, f"{rules.op_text(op)} waits for it")

    def _check_passes(self, stage: int, microbatch: int) -> None:
        """Check the ops of a microbatch on a stage: F, a backward, and O only together with L."""
        ops = {letters: TableOp(letters, stage, microbatch) for letters in "FBIWOLU"}
        has = {letters: op in self.cell for letters, op in ops.items()}
        if not has["F"]:
            self._raise_missing(ops["F"], "there is no forward")
        if has["O"] != has["L"]:
            self._raise_missing(ops["L" if has["O"] else "O"], "O and L belong together")
        if self.rules.forward_only:
            for letters in "BIWU":
                text = self.rules.op_text(ops[letters])
                require_legal(not has[letters], f"op {text}: the table is forward_only")
        elif not has["B"]:
            for letters in "BIW" if not has["I"] and not has["W"] else "IW":
                if not has[letters]:
                    self._raise_missing(ops[letters], "there is no whole backward")
        else:
            is_split = has["I"] or has["W"]
            text = self.rules.op_text(ops["B"])
            require_legal(not is_split, f"op {text} does the backward twice: it is also split")

    def _check_order(self) -> None:
        """Check that no op waits for a later op of its row, and that messages run along edges."""
        rules = self.rules
        for op, (worker, slot) in self.cell.items():
            producers = [producer for producer, *_ in self.inputs(op)]
            if op.letters in WAIT_SEND:
                producers.append(awaited_op(op))
            for producer in producers:
                home, producer_slot = self.cell[producer]
                lanes = {rules.lane(x.letters).replace("host", "compute") for x in (op, producer)}
                if home == worker and producer_slot >= slot and len(lanes) == 1:
                    late = "is the same fused pair" if producer_slot == slot else "stands after it"
                    wait = f"{rules.op_text(op)} on worker {worker} waits for"
                    text = f"deadlock: {wait} {rules.op_text(producer)}, which {late} in the row"
                    raise IllegalError(text)
        for producer, op in self.crossing():
            has_way = producer.stage != op.stage and rules.route(producer.stage, op.stage)
            text = f"{rules.op_text(op)} waits for {rules.op_text(producer)}"
            require_legal(has_way, f"{text}: no message leads there")

    def crossing(self) -> Iterator[tuple[TableOp, TableOp]]:
        """List (producer, consumer) of each message between workers."""
        for op, (worker, _) in self.cell.items():
            for producer, has_message, _ in self.inputs(op):
                if has_message and self.cell[producer].worker != worker:
                    yield producer, op

    def _check_communication(self) -> None:
        """Check that each message has a SEND after its producer and a RECV before its consumer."""
        message_ops = set()
        for producer, op in self.crossing():
            send, receive = message_cells(producer, op)
            message_ops |= {send, receive}
            for end in (send, receive):
                if end not in self.cell:
                    self._raise_missing(end, f"{self.rules.op_text(op)} waits for its message")
            text = self.rules.op_text(send)
            is_behind = self.cell[send] > self.cell[producer]
            require_legal(is_behind, f"{text} stands before its message is computed")
            is_before = self.cell[receive] < self.cell[op]
            require_legal(is_before, f"{self.rules.op_text(receive)} stands after its use")
        for op in self.cell:
            is_idle = op.letters in COMMUNICATION and op not in message_ops
            require_legal(not is_idle, f"{self.rules.op_text(op)} transfers no message")

    def _check_updates(self) -> None:
        """Check the U cells of each row; without U cells, check that there is no weight rule."""
        self.has_updates = any(op.letters == "U" for op in self.cell)
        self.last_gradient: dict[TableOp, TableOp] = {}  # before each update
        if self.has_updates:
            for row in self.rows:
                self._follow_updates([op for cell in row for op in cell])
        else:
            is_plain = self.weight_lag is None and self.runs == self.local_steps == 1
            require_legal(is_plain, "weights have a rule, and no U cell updates them")

    def _follow_updates(self, row: list[TableOp]) -> None:
        """Check that each gradient is applied, and that each forward reads existing weights."""
        # by (stage, run): gradients not yet applied, and updates so far; a run is a LocalSGD model
        gradients: dict[Any, list[TableOp]] = defaultdict(list)
        num_updates: dict[Any, int] = defaultdict(int)
        version = {}  # by (stage, microbatch): number of updates before the forward
        round_size = self.runs * self.local_steps  # microbatches between two averages of the runs
        for k, op in enumerate(row):
            letters, stage, microbatch = op
            key, text = (stage, microbatch % self.runs), self.rules.op_text(op)
            if letters == "F":
                version[stage, microbatch] = num_updates[key]
                updates = (later for later in row[k:] if later[:2] == ("U", stage))
                next_round = min((u.microbatch // round_size for u in updates), default=math.inf)
                is_early = self.runs > 1 and next_round < microbatch // round_size
                require_legal(not is_early, f"{text} begins a round before an update of the last")
            elif letters in ("B", "W"):
                gradients[key].append(op)
                lag = math.inf if self.weight_lag is None else self.weight_lag
                exists = num_updates[key] - lag <= version[stage, microbatch]
                require_legal(exists, f"the F of {text} reads weights of later updates")
            elif letters == "U":
                is_applied = microbatch in [gradient.microbatch for gradient in gradients[key]]
                require_legal(is_applied, f"op {text} applies no gradient of its microbatch")
                self.last_gradient[op] = gradients.pop(key)[-1]
                num_updates[key] += 1
        for ops in gradients.values():
            texts = ", ".join(map(self.rules.op_text, ops))
            require_legal(not ops, f"the gradient of {texts} is never applied")

    def _check_gathered(self, worker: int, row: list[TableOp]) -> None:
        """Check that UNSHARD and RESHARD alternate, and that ops have gathered weights."""
        changes = ("UNSHARD", "RESHARD")
        has_weights = {op.stage: False for op in row if op.letters in changes}
        for op in row:
            letters, stage, _ = op
            text = f"{self.rules.op_text(op)} on worker {worker}"
            if letters in changes:
                is_in_turn = has_weights[stage] == (letters == "RESHARD")
                require_legal(is_in_turn, f"{text} gathers or drops weights out of turn")
                has_weights[stage] = not has_weights[stage]
            elif "UNSHARD" in self.rules.stage_cells(letters):
                require_legal(has_weights.get(stage, True), f"{text} needs weights before UNSHARD")


def message_cells(producer: TableOp, consumer: TableOp) -> tuple[TableOp, TableOp]:
    """Return the SEND and the RECV of the message from a producer to a consumer."""
    letter = "F" if producer.stage < consumer.stage else "B"
    send, receive = f"SEND_{letter}", f"RECV_{letter}"
    return producer._replace(letters=send), consumer._replace(letters=receive)


def awaited_op(wait: TableOp) -> TableOp:
    """Return the op that a wait cell, such as WAIT_O, waits for."""
    return wait._replace(letters=wait.letters.removeprefix("WAIT_"))
