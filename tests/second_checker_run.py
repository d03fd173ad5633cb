"""Of the second checker: costs, and the run, as docs/certificates.md has them."""

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from second_checker_table import (
    COMMUNICATION,
    SHARDING,
    TIMED,
    WAIT_SEND,
    cells_of,
    demand,
    hold,
    is_list,
    is_time,
    is_whole,
)

MODELS = ("delay", "queued", "blocking", "rendezvous")
UNIT = {"F": 1, "I": 1, "W": 1, "R": 1, "B": 2}


def place(stage):
    """Place of the times of a stage, or of a worker by its name."""
    return int(stage.removeprefix("worker ")) if isinstance(stage, str) else stage


def of(time, microbatch):
    return float(time[microbatch] if isinstance(time, list) else time)


# ----------------------------------------------------------------------------------------- costs
def read_links(record, table):
    keys = {"model", "queues", "posting", "host_links", "shared_links", "pair_links", "eager_below"}
    demand(isinstance(record, dict) and set(record) == keys, "keys of links")
    demand(record["model"] in MODELS, "model")
    demand(record["queues"] in ("worker", "pair", "direction"), "queues")
    workers = len(table.rows)

    def is_worker(w):
        return is_whole(w) and w < workers

    def is_pair(pair):
        return is_list(pair, is_worker) and len(pair) == 2 and pair[0] != pair[1]

    given, shared, host = record["pair_links"], record["shared_links"], record["host_links"]
    demand(is_list(given, lambda each: isinstance(each, list) and len(each) == 2), "pair_links")
    demand(all(is_pair(pair) and model in MODELS for pair, model in given), "pair_links")
    of_pairs = {tuple(pair): model for pair, model in given}
    demand(len(of_pairs) == len(given), "pair_links")
    models = {record["model"], *of_pairs.values()}
    demand(record["posting"] in ("early", "program") and is_time(record["eager_below"]), "posting")
    meets = "rendezvous" in models
    demand(meets or (record["posting"] == "early" and not record["eager_below"]), "posting")
    sends = any(table.crossing())
    demand(record["posting"] == "early" or table.has_cells or not sends, "posting needs cells")
    if shared != "pairs":
        demand(is_list(shared, lambda g: is_list(g, is_pair) and g), "shared_links")
        demand(all(len({*map(tuple, g)}) == len(g) for g in shared), "shared_links")
    demand(not shared or models != {"delay"}, "shared_links")
    demand(is_list(host, lambda g: is_list(g, is_worker) and g), "host_links")
    named = [w for group in host for w in group]
    demand(len(named) == len(set(named)), "host_links")
    return {**record, "pairs": of_pairs, "meets": meets}


def check_shape(value, shape, check, what):
    if not shape:
        return demand(check(value), what)
    demand(isinstance(value, list) and len(value) == shape[0], what)
    for entry in value:
        check_shape(entry, shape[1:], check, what)


def depth(value):
    return 1 + depth(value[0]) if isinstance(value, list) and value else 0


def shape_of(key, table):
    own = table.own
    if key in ("latency", "transmit"):
        return 2, len(table.placement), len(own.graph) or table.stages - 1
    return (len(table.rows),) if own.of(key) == "worker" else (table.stages,)


def check_axes(value, key, table, check):
    """A list of its shape, or with an axis of microbatches."""
    shape = shape_of(key, table)
    if key != "A" and table.own.of(key) != "stage" and depth(value) > len(shape):
        shape = *shape, len(table.pipe_of)
    check_shape(value, shape, check, key)


def read_seconds(seconds, table, is_whole_units, with_bounds):
    demand(isinstance(seconds, dict), "seconds")
    timed = {*TIMED, *table.own.kinds}
    demand(set(seconds) <= timed | {"pair", "pair_factor", "latency", "transmit"}, "seconds")
    demand(not {"pair", "pair_factor"} <= set(seconds), "pair and pair_factor")
    cells = [cell for row in table.rows for cell in row]
    priced = [cell for cell in cells if len(cell) == 1 or "pair" not in seconds]
    needed = {op[0] for cell in priced for op in cell if op[0] in timed}
    with_bounds &= table.own.is_usual
    needed |= {"A", "U", "latency", "transmit", *("FBIW" if with_bounds else "")}
    demand(needed <= set(seconds), "a time is missing")
    for key, value in seconds.items():
        check_axes(value, key, table, is_whole if is_whole_units else is_time)
    return seconds


def read_memory(memory, table):
    keys = {"sizes", "weight_share", "checkpoints"}
    demand(isinstance(memory, dict) and set(memory) - {"at_work"} == keys, "memory")
    more = memory.get("at_work")
    if more is not None:
        demand(isinstance(more, list) and len(more) == 3, "at_work")
        for value in more:
            check_axes(value, "sizes", table, is_time)
    for key, value in ((key, memory[key]) for key in keys):
        most = 1 if key == "weight_share" and more is None else 1e308
        check_axes(value, key, table, lambda x, most=most: is_time(x) and x <= most)
    return memory


# ------------------------------------------------------------------------------------------- run
class Message(NamedTuple):
    """An event beside the rows, by its SEND."""

    sender: int
    receiver: int
    model: str
    later: float  # that it arrives than it ends [s]
    name: str


NO_LINKS = {"model": "delay", "queues": "worker", "posting": "early", "host_links": []}
NO_LINKS |= {"shared_links": [], "pair_links": [], "eager_below": 0, "pairs": {}, "meets": False}


class Run:
    """Start and end of all events. One is (worker, slot), a SEND, or an A or U of the step's end."""

    def __init__(self, table, links, seconds, is_unit=False):
        self.table, self.links, self.seconds, self.is_unit = table, links, seconds, is_unit
        self.lasts, self.waits, self.messages = {}, defaultdict(list), {}
        self.queues, self.arrives_at = defaultdict(list), defaultdict(set)
        self.add_rows()
        self.add_host_links()
        self.add_step_end()
        self.add_inputs()
        for users in self.queues.values():
            users.sort(key=lambda user: user[0])
            for (_, one), (_, other) in pairwise(users):
                self.waits[other].append((one, 0.0))
        self.join()
        self.go()

    def unit_end(self, cell):
        if not hasattr(self, "unit"):
            places = max(self.table.stages, len(self.table.rows))
            seconds = {p: [UNIT.get(p, 0)] * places for p in TIMED}
            own = self.table.own.kinds
            seconds |= {k: [kind.get("slot", 1)] * places for k, kind in own.items()}
            links = NO_LINKS | {"host_links": self.links["host_links"]}
            self.unit = Run(self.table, links, seconds, is_unit=True)
        return self.unit.end[cell]

    def time(self, cell):
        seconds = self.seconds
        if len(cell) == 2 and "pair" in seconds:
            return of(seconds["pair"][cell[0][1]], cell[0][2])
        each = [of(seconds[p][place(s)], m) if p in seconds else 0.0 for p, s, m in cell]
        if len(cell) == 2 and "pair_factor" in seconds:
            factor = of(seconds["pair_factor"][cell[0][1]], cell[0][2])
            return max(each) + factor * min(each)
        return float(sum(each))

    def add_rows(self):
        """Rule 1; what is executed before each cell, and the next op after each."""
        skipped = COMMUNICATION if self.links["meets"] else COMMUNICATION + WAIT_SEND
        self.before, self.next_op, self.last, self.last_op = {}, {}, {}, {}
        self.reduced = {}  # what reduces gradients on a lane, by worker and stage
        own, on_lane = self.table.own, {}
        for w, row in enumerate(self.table.rows):
            of_stage = {}
            for k, cell in enumerate(row):
                self.before[w, k] = self.last.get(w)
                if not cell or cell[0][0] in skipped:
                    continue
                here, phase = (w, k), cell[0][0]
                self.lasts[here], lane = self.time(cell), own.lane(phase)
                before = self.last if lane in ("compute", "host") else on_lane.setdefault(lane, {})
                if w in before:
                    self.waits[here].append((before[w], 0.0))
                for need in [(x, op[1]) for op in cell for x in own.needs(op[0])]:
                    self.waits[here] += [(of_stage[need], 0.0)] if need in of_stage else []
                if phase in own.lanes:
                    self.waits[here] += [(self.last[w], 0.0)] if w in self.last else []
                    of_stage[cell[0][:2]] = here
                    if phase == "REDUCE_GRAD":
                        self.reduced.setdefault((cell[0][1], w), []).append(here)
                if lane == "compute" and own.is_op(phase):
                    self.next_op[self.last_op.get(w)] = here
                    self.last_op[w] = here
                if lane != "host":
                    before[w] = here

    def add_host_links(self):
        """Rule 3."""
        group = {w: ("host", *g) for g in self.links["host_links"] for w in g}
        for op, (w, k) in self.table.at.items():
            if self.table.own.lane(op[0]) == "host":
                self.queues[group.get(w, ("host", w))].append(((k, w), (w, k)))

    def add_step_end(self):
        """Rules 6 and 7."""
        updates = [t for each in self.seconds["U"] for t in (each if depth(each) else [each])]
        if not any([*self.seconds["A"], *updates]):
            return
        at = self.table.at
        if self.table.updates:
            for op, gradient in self.table.applied.items():
                reduction = "A", op[1], op[2]
                self.lasts[reduction] = float(self.seconds["A"][op[1]])
                self.waits[reduction].append((at[gradient], 0.0))
                self.waits[at[op]].append((reduction, 0.0))
                self.queues["A", at[op][0]].append((at[gradient], reduction))
            return
        copies, first = {}, {}  # last gradient and first microbatch of each
        for (phase, s, m), cell in at.items():
            key = s, cell[0]
            if self.table.own.ends_backward(phase):
                copies[key] = max(cell, copies.get(key, cell))
            if m >= 0:
                first[key] = min(m, first.get(key, m))
        for s in range(self.table.stages):
            reduction, cells = ("A", s, -1), [c for (t, _), c in copies.items() if t == s]
            if not cells:
                continue
            self.lasts[reduction] = float(self.seconds["A"][s])
            self.waits[reduction] += [(cell, 0.0) for cell in cells]
            workers = [cell[0] for cell in cells]
            behind = [each for w in workers for each in self.reduced.get((s, w), [])]
            self.waits[reduction] += [(each, 0.0) for each in behind]
            end = max(map(self.unit_end, cells + behind))
            for w in workers:
                self.queues["A", w].append(((end, s), reduction))
            pairs = [(a, b) for a in workers for b in workers if a != b]
            for group in {g for pair in pairs for g in self.groups(*pair)}:
                self.queues[group].append(((end, len(self.table.rows), s), reduction))
        for (s, w), _ in sorted(copies.items(), key=lambda copy: copy[1]):
            update = "U", s, w
            self.lasts[update] = of(self.seconds["U"][s], first[s, w])
            self.waits[update] += [(self.last[w], 0.0), (("A", s, -1), 0.0)]
            self.next_op[self.last_op[w]] = update
            self.last[w] = self.last_op[w] = update

    def groups(self, sender, receiver):
        shared = self.links["shared_links"]
        if shared == "pairs":
            return [("shared", *sorted((sender, receiver)))]
        return [("shared", k) for k, g in enumerate(shared) if [sender, receiver] in g]

    def add_inputs(self):
        """Rules 2, 4 and 5."""
        at, found = self.table.at, {}
        for op, cell in at.items():
            for maker, sends, number in self.table.inputs(op):
                if self.is_unit or not sends or at[maker][0] == cell[0]:
                    self.waits[cell].append((at[maker], 0.0))
                else:
                    found.setdefault((maker, cell, op[1]), []).append((number, op[2], op))
        for (maker, *_), by in found.items():
            self.add_message(maker, *min(by))
        for op, cell in at.items():
            send = op[0].removeprefix("WAIT_"), *op[1:]
            message = self.messages.get(send) if op[0] in WAIT_SEND else None
            if message and message.model == "rendezvous":
                self.waits[cell].append((send, 0.0))

    def join(self):
        """What all do together is one op."""
        groups = defaultdict(list)
        for (letters, _, m), cell in self.table.at.items():
            if self.table.own.together(letters):
                groups[letters, m].append(cell)
        for cells in groups.values():
            waits = [wait for cell in cells for wait in self.waits[cell]]
            self.waits.update(dict.fromkeys(cells, waits))

    def add_message(self, maker, number, _, op):
        at, links, own = self.table.at, self.links, self.table.own
        (w, slot), (v, k) = at[maker], at[op]
        send, receive = cells_of(maker, op)
        (way, boundary), m = own.way(maker[1], op[1]), maker[2]
        latency, transmit = (
            of(self.seconds[key][way][self.table.pipe_of[m]][boundary], m)
            for key in ("latency", "transmit")
        )
        name = f"{maker[1]}SEND_{'FB'[way]}{m}"
        if not own.is_usual:
            send = maker, (v, k), op[1]
            first = next(other for other in self.table.rows[v][k] if other[1] == op[1])
            name = f"{own.text(maker)} to {own.text(first)}"
        behind = slot, way, op[1], number, op[2]
        pairs = links["pairs"]
        model = pairs.get((w, v), pairs.get((v, w), links["model"]))
        if model == "rendezvous" and transmit < links["eager_below"]:
            model = "queued"
        is_queued = model in ("queued", "blocking")
        self.messages[send] = Message(w, v, model, latency if is_queued else 0.0, name)
        self.lasts[send] = transmit if is_queued else latency + transmit
        self.waits[send].append((at[maker], 0.0))
        self.waits[at[op]].append((send, self.messages[send].later))
        self.arrives_at[send].add(at[op])
        if model == "blocking" and at[maker] in self.next_op:
            self.waits[self.next_op[at[maker]]].append((send, 0.0))
        groups = [] if model == "delay" else self.groups(w, v)
        if is_queued and not groups:
            self.queues["link", w, v].append((behind, send))
        if model == "rendezvous":
            for cell, one, other in ((send, w, v), (receive, v, w)):
                scope = {"worker": (), "pair": (other,), "direction": ("FB"[way],)}
                rank = at[cell] if self.table.has_cells else self.turn(maker, behind)
                self.queues["queue", one, *scope[links["queues"]]].append((rank, send))
                if links["posting"] == "program" and self.before[at[cell]] is not None:
                    self.waits[send].append((self.before[at[cell]], 0.0))
        for group in groups:
            self.queues[group].append((self.turn(maker, behind), send))

    def turn(self, maker, behind):
        cell = self.table.at[maker]
        return self.unit_end(cell), cell[0], *maker[1:], *behind

    def go(self):
        """Run what is there until nothing is left."""
        self.start, self.end = {}, {}
        left = {event: len(self.waits[event]) for event in self.lasts}
        followers = defaultdict(list)
        for event in left:
            for other, _ in self.waits[event]:
                followers[other].append(event)
        ready = [event for event, count in left.items() if not count]
        for event in ready:
            self.start[event] = max(
                (self.end[o] + lag for o, lag in self.waits[event]), default=0.0
            )
            self.end[event] = self.start[event] + self.lasts[event]
            for other in followers[event]:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        hold(len(self.end) == len(self.lasts), "deadlock")

    def phase(self, event):
        """Letters of a cell's op; none of other events."""
        is_cell = isinstance(event[0], int)
        return self.table.rows[event[0]][event[1]][0][0] if is_cell else ""

    def events_of(self, worker):
        """Executed cells of a row that are no host ops, and updates behind it."""
        cells = [e for e in self.end if e[0] == worker and self.phase(e)]
        cells = [e for e in cells if self.table.own.lane(self.phase(e)) == "compute"]
        return cells + [e for e in self.end if e[0] == "U" and e[2] == worker]

    def is_rest(self, event):
        phase = self.phase(event)
        return phase in SHARDING + WAIT_SEND or (phase and self.table.own.of(phase) == "stage")

    def name(self, event):
        if event in self.messages:
            sent = self.messages[event]
            return f"{sent.name} (worker {sent.sender} to {sent.receiver})"
        if event[0] == "A":
            return f"{event[1]}A{event[2]}" if event[2] >= 0 else f"{event[1]}A"
        if event[0] == "U":
            return f"{event[1]}U (worker {event[2]})"
        cell = self.table.rows[event[0]][event[1]]
        return f"{';'.join(map(self.table.own.text, cell))} (worker {event[0]}, slot {event[1]})"
