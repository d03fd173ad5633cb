"""Of the second checker: tables, as docs/certificates.md has them."""

import re
from collections import defaultdict

HOST = ("O", "L")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WAIT_SEND = ("WAIT_SEND_F", "WAIT_SEND_B")
LETTERS = (*"FBIWRUOL", *SHARDING, "WAIT_O", *COMMUNICATION, *WAIT_SEND)
TIMED = (*"FBIWRUOLA", *SHARDING)
OP = re.compile(
    rf"([0-9]{{1,9}})({'|'.join(sorted(LETTERS, key=len, reverse=True))})([0-9]{{0,9}})"
)
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")
INPUTS = {  # letters of the same stage and microbatch
    "R": "FL",
    "B": "FRL",
    "I": "FRL",
    "W": "I",
    "U": "BW",
    "O": "F",
    "L": "O",
    "WAIT_O": "O",
}


class Malformed(Exception):
    """What is read is no certificate."""


class Failed(Exception):
    """What is claimed does not hold."""


def demand(condition, what):
    if not condition:
        raise Malformed(what)


def hold(condition, what):
    if not condition:
        raise Failed(what)


def is_whole(value, least=0):
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 10**300


def is_time(value):
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and 0 <= value < 1e308


def inputs(op):
    """Ops that an op waits for, of those that a table holds."""
    phase, s, m = op
    for letter in INPUTS.get(phase, ""):
        yield letter, s, m
    if phase == "F":
        yield "F", s - 1, m
    if phase in ("B", "I"):
        yield from (("I", s + 1, m), ("B", s + 1, m))


# ---------------------------------------------------------------------------------------- tables
def parse_op(text):
    match = OP.fullmatch(text.strip())
    hold(match, f"{text!r} is no op")
    stage, phase, m = match.groups()
    hold((m == "") == (phase in SHARDING), f"{text!r} is no op")
    return phase, int(stage), int(m) if m else -1


def parse_cell(text):
    text = text.strip()
    pair = PAIR.fullmatch(text)
    if not pair:
        return [parse_op(text)] if text else []
    cell = [parse_op(part) for part in pair.groups()]
    hold(cell[0][0] == "F" and cell[1][0] in ("B", "I"), f"{text!r} is no fused pair")
    return cell


def is_list(value, check):
    return isinstance(value, list) and all(map(check, value))


class Table:
    """A legal table: ops by cell, cells by op."""

    def __init__(self, data):
        self.read(data)
        self.rows = [[parse_cell(text) for text in row] for row in data["rows"]]
        self.at = {}
        for w, row in enumerate(self.rows):
            hold(any(row), f"worker {w} has no op")
            for k, cell in enumerate(row):
                for op in cell:
                    self.put(op, (w, k))
        self.has_cells = any(op[0] in COMMUNICATION for op in self.at)
        self.check_complete()
        self.check_rows()
        self.check_communication()
        self.check_updates()

    def read(self, data):
        keys = {"format", "version", "name", "placement", "pipe_of_microbatch"}
        keys |= {"slots", "stage_shares", "rows"}
        demand(isinstance(data, dict) and set(data) - {"weights"} == keys, "keys of the table")
        is_one = data["version"] == 1 and not isinstance(data["version"], bool)
        demand(data["format"] == "pipejax-table" and is_one, "format of the table")
        demand(isinstance(data["name"], str) and len(data["name"]) <= 1000, "name of the table")
        demand(is_list(data["rows"], lambda r: is_list(r, lambda c: isinstance(c, str))), "rows")
        self.placement, self.pipe_of = data["placement"], data["pipe_of_microbatch"]
        demand(is_list(self.placement, lambda r: is_list(r, is_whole)), "placement")
        demand(len({len(row) for row in self.placement}) == 1, "placement")
        demand(self.placement[0], "placement")
        self.stages, workers = len(self.placement[0]), len(data["rows"])
        demand(all(w < workers for row in self.placement for w in row), "placement")
        pipes = len(self.placement)
        demand(is_list(self.pipe_of, lambda p: is_whole(p) and p < pipes), "pipes")
        slots, shares = data["slots"], data["stage_shares"]
        demand(isinstance(slots, dict) and set(slots) <= set("FBIWR"), "slots")
        demand(all(is_time(t) and t > 0 for t in slots.values()), "slots")
        demand(is_list(shares, lambda x: is_time(x) and x > 0), "stage_shares")
        demand(len(shares) in (0, self.stages), "stage_shares")
        self.weights = data.get("weights", {})
        demand(isinstance(self.weights, dict), "weights")
        demand(set(self.weights) <= {"behind", "runs", "local_steps"}, "weights")
        demand(all(is_whole(self.weights.get(k, 1), 1) for k in ("runs", "local_steps")), "weights")
        behind = self.weights.get("behind")
        demand(behind is None or is_whole(behind), "weights")
        self.runs = self.weights.get("runs", 1)

    def put(self, op, cell):
        _, s, m = op
        hold(s < self.stages and m < len(self.pipe_of), f"{op} is of no stage or microbatch")
        pipes = self.placement if m < 0 else [self.placement[self.pipe_of[m]]]
        hold(cell[0] in [pipe[s] for pipe in pipes], f"{op} is on another worker")
        if m >= 0:
            hold(op not in self.at, f"{op} stands twice")
            self.at[op] = cell

    def check_complete(self):
        has = self.at.__contains__
        for s in range(self.stages):
            for m in range(len(self.pipe_of)):
                whole, grad, weight, off, load = (has((p, s, m)) for p in "BIWOL")
                hold(has(("F", s, m)), "no forward")
                hold(grad == weight and whole != grad, "no backward, or two")
                hold(off == load, "an offload or a load alone")
        for phase, s, m in self.at:
            if phase.startswith("WAIT_") and phase not in SHARDING:
                hold(has((phase.removeprefix("WAIT_"), s, m)), "a wait for nothing")

    def check_rows(self):
        for op, (w, k) in self.at.items():
            before = [*inputs(op)]
            if op[0] in WAIT_SEND:
                before.append((op[0].removeprefix("WAIT_"), *op[1:]))
            for other in before:
                v, j = self.at.get(other, (-1, -1))
                hold(v != w or j < k, f"{op} waits for a later op")

    def check_communication(self):
        if not self.has_cells:
            return
        wanted = set()
        for maker, op in self.crossing():
            send, receive = cells_of(maker, op)
            wanted |= {send, receive}
            hold(send in self.at and receive in self.at, f"no SEND or RECV for {op}")
            hold(self.at[send] > self.at[maker] and self.at[receive] < self.at[op], f"{send}")
        hold(wanted == {op for op in self.at if op[0] in COMMUNICATION}, "a SEND or RECV too many")

    def crossing(self):
        """Pairs of an op and one on another worker that waits for it."""
        for op, (w, _) in self.at.items():
            for maker in inputs(op):
                if maker in self.at and self.at[maker][0] != w:
                    yield maker, op

    def check_updates(self):
        self.updates = [op for op in self.at if op[0] == "U"]
        self.applied = {}  # last gradient before each U
        if not self.updates:
            is_plain = self.weights.get("behind") is None and self.runs == 1
            hold(is_plain and self.weights.get("local_steps", 1) == 1, "weights without updates")
            return
        for row in self.rows:
            self.follow_updates([op for cell in row for op in cell])

    def follow_updates(self, row):
        behind, steps = self.weights.get("behind"), self.weights.get("local_steps", 1)
        waiting, count, seen = defaultdict(list), defaultdict(int), {}
        for place, op in enumerate(row):
            phase, s, m = op
            key = s, m % self.runs
            if phase == "F":
                seen[s, m] = count[key]
                size = self.runs * steps
                later = [o for o in row[place:] if o[:2] == ("U", s) and o[2] // size < m // size]
                hold(self.runs == 1 or not later, "a round begins early")
            elif phase in ("B", "W"):
                waiting[key].append(op)
                hold(behind is None or count[key] - behind <= seen[s, m], "weights of later")
            elif phase == "U":
                hold(m in [gradient[2] for gradient in waiting[key]], "an update of no gradient")
                self.applied[op] = waiting.pop(key)[-1]
                count[key] += 1
        hold(not any(waiting.values()), "a gradient is not applied")


def cells_of(maker, op):
    """SEND and RECV of a message."""
    letter = "F" if maker[1] < op[1] else "B"
    return (f"SEND_{letter}", *maker[1:]), (f"RECV_{letter}", *op[1:])
