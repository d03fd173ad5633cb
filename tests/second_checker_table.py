"""Of the second checker: tables, as docs/certificates.md has them."""

import re
from collections import defaultdict

from second_checker_own import KEYS as OWN_KEYS, Own

SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WAIT_SEND = ("WAIT_SEND_F", "WAIT_SEND_B")
LETTERS = (*"FBIWRUOL", *SHARDING, "WAIT_O", *COMMUNICATION, *WAIT_SEND)
TIMED = (*"FBIWRUOLA", *SHARDING)
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


def usual_inputs(op, own):
    """Ops that an op waits for by the usual rules, of those that a table holds."""
    phase, s, m = op
    for letter in INPUTS.get(phase, ""):
        yield letter, s, m
    if phase == "F":
        yield from (("F", before, m) for before in own.before(s))
        if m % own.slices:
            yield "F", s, m - 1
    if phase in ("B", "I"):
        yield from ((letter, behind, m) for behind in own.behind(s) for letter in "IB")
        if (m + 1) % own.slices:
            yield from (("I", s, m + 1), ("B", s, m + 1))


# ---------------------------------------------------------------------------------------- tables
class Reader:
    """Reads cells of a table with kinds of its own."""

    def __init__(self, own):
        letters = sorted([*LETTERS, *own.kinds], key=len, reverse=True)
        number = r"(?:([0-9]{1,9})\.([0-9]{1,9}))?" if own.slices > 1 else "([0-9]{0,9})()"
        self.own = own
        self.form = re.compile(rf"([0-9]{{0,9}})({'|'.join(letters)}){number}(?:@(\w+))?")

    def op(self, text, worker):
        match = self.form.fullmatch(text.strip())
        hold(match, f"{text!r} is no op")
        stage, letters, m, part, lane = match.groups()
        of = self.own.of(letters)
        hold(bool(m) == (of != "stage") and bool(stage) == (of != "worker"), f"{text!r} is no op")
        hold(lane in (None, self.own.lane_of_text(letters)), f"{text!r} is on another lane")
        hold(int(part or 0) < self.own.slices, f"{text!r} is no slice")
        number = int(m) * self.own.slices + int(part or 0) if m else -1
        return letters, int(stage) if stage else f"worker {worker}", number

    def cell(self, text, worker):
        text = text.strip()
        pair = PAIR.fullmatch(text)
        if not pair:
            return [self.op(text, worker)] if text else []
        cell = [self.op(part, worker) for part in pair.groups()]
        hold(cell[0][0] == "F" and cell[1][0] in ("B", "I"), f"{text!r} is no fused pair")
        return cell


def is_list(value, check):
    return isinstance(value, list) and all(map(check, value))


class Table:
    """A legal table: ops by cell, cells by op."""

    def __init__(self, data):
        self.read(data)
        reader = Reader(self.own)
        self.rows = [[reader.cell(x, w) for x in row] for w, row in enumerate(data["rows"])]
        counted = {*"FBIWR"} | {k for k in self.own.kinds if self.own.is_counted(k)}
        numbers = [op[2] for row in self.rows for cell in row for op in cell if op[0] in counted]
        self.count = 1 + max(numbers, default=-1)
        hold(self.count == len(self.pipe_of), "pipes of microbatches that are none")
        self.check_slices()
        self.at = {}
        for w, row in enumerate(self.rows):
            hold(any(row), f"worker {w} has no op")
            for k, cell in enumerate(row):
                for op in cell:
                    self.put(op, (w, k))
        self.has_cells = any(op[0] in COMMUNICATION for op in self.at)
        hold(self.own.is_usual or not self.has_cells, "communication cells")
        for rule in self.own.rules:
            self.own.check_rule(rule, self)
        self.check_complete()
        self.check_rows()
        self.check_communication()
        self.check_updates()
        for row in self.rows if "UNSHARD" in self.own.lanes else []:
            self.check_weights([op for cell in row for op in cell])

    def check_weights(self, row):
        """Gathered and dropped in turn, and there when needed, of a stage that is gathered at all."""
        turns = ("UNSHARD", "RESHARD")
        there = {op[1]: False for op in row if op[0] in turns}
        for letters, s, _ in row:
            if letters in turns:
                hold(there[s] == (letters == "RESHARD"), f"{letters} of {s} out of turn")
                there[s] = not there[s]
            elif "UNSHARD" in self.own.needs(letters):
                hold(there.get(s, True), f"{letters} of {s} lacks weights")

    def read(self, data):
        keys = {"format", "version", "name", "placement", "pipe_of_microbatch"}
        keys |= {"slots", "stage_shares", "rows"}
        more = {"weights", *OWN_KEYS}
        demand(isinstance(data, dict) and set(data) - more == keys, "keys of the table")
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
        self.own = Own(data, demand, hold)
        demand(isinstance(slots, dict) and set(slots) <= {*"FBIWR", *self.own.kinds}, "slots")
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

    def check_slices(self):
        hold(self.count % self.own.slices == 0, "a microbatch lacks slices")
        for m in range(self.count):
            hold(self.pipe_of[m] == self.pipe_of[m - m % self.own.slices], "slices in two pipes")

    def inputs(self, op):
        """What an op waits for: the op, whether a message goes if it crosses, number of the rule."""
        for maker in usual_inputs(op, self.own):
            if maker in self.at:
                yield maker, True, -1
        for maker, sends, number in self.own.makers(op, self.at[op][0], self):
            hold(maker in self.at, f"{op} waits for {maker}, which is not there")
            yield maker, sends, number

    def put(self, op, cell):
        _, s, m = op
        hold(m < self.count, f"{op} is of no microbatch")
        if isinstance(s, str):
            hold(op not in self.at, f"{op} stands twice")
            self.at[op] = cell
            return
        hold(s < self.stages, f"{op} is of no stage")
        pipes = self.placement if m < 0 else [self.placement[self.pipe_of[m]]]
        hold(cell[0] in [pipe[s] for pipe in pipes], f"{op} is on another worker")
        if m >= 0:
            hold(op not in self.at, f"{op} stands twice")
            self.at[op] = cell

    def check_complete(self):
        has, own = self.at.__contains__, self.own
        is_usual = not own.kinds or any(op[0] in tuple("FBIW") for op in self.at)
        for s in range(self.stages if is_usual else 0):
            for m in range(self.count):
                whole, grad, weight, off, load = (has((p, s, m)) for p in "BIWOL")
                hold(has(("F", s, m)), "no forward")
                if own.forward_only:
                    hold(not (whole or grad or weight or has(("U", s, m))), "a backward")
                else:
                    hold(grad == weight and whole != grad, "no backward, or two")
                hold(off == load, "an offload or a load alone")
        for phase, s, m in self.at:
            if phase in ("WAIT_O", *WAIT_SEND):
                hold(has((phase.removeprefix("WAIT_"), s, m)), "a wait for nothing")

    def check_rows(self):
        own = self.own
        for op, (w, k) in self.at.items():
            before = [maker for maker, *_ in self.inputs(op)]
            if op[0] in WAIT_SEND:
                before.append((op[0].removeprefix("WAIT_"), *op[1:]))
            for other in before:
                v, j = self.at.get(other, (-1, -1))
                hold(v != w or own.beside(op[0], other[0]) or j < k, f"{op} waits for a later op")
        for maker, op in self.crossing():
            hold(maker[1] != op[1] and own.way(maker[1], op[1]), "a message of no way")

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
            for maker, sends, _ in self.inputs(op):
                if sends and self.at[maker][0] != w:
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
