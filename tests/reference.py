"""The oracle: docs/semantics.md as an event loop over dictionaries.

Plain Python; it shares no code with the library but the text of cells. A run starts whatever can
start until all is done; a run that stops before is a deadlock.
"""

import re
from dataclasses import dataclass, field
from itertools import pairwise, permutations

WAITS = {  # phase: [(phases, of which the first that exists, stage offset)]
    "F": [("F", -1)],
    "R": [("F", 0), ("L", 0)],
    "W": [("I", 0)],
    "B": [("F", 0), ("R", 0), ("L", 0), ("IB", 1)],
    "I": [("F", 0), ("R", 0), ("L", 0), ("IB", 1)],
    "U": [("WB", 0)],
    "O": [("F", 0)],
    "L": [("O", 0)],
    "WAIT_O": [("O", 0)],
    "WAIT_SEND_F": [],  # the message is found by name
    "WAIT_SEND_B": [],
    "UNSHARD": [],  # of a stage as a whole: the row is all that it waits for
    "RESHARD": [],
    "REDUCE_GRAD": [],
    "WAIT_REDUCE_GRAD": [],
}
OPS = ("F", "B", "I", "W", "R", "U")  # what waits for blocking messages
HOST = ("O", "L")  # beside compute, on the host link of the worker
UNIT = {"F": 1, "I": 1, "W": 1, "R": 1, "B": 2}


class DeadlockError(Exception):
    """Nothing can start."""


@dataclass
class Costs:
    """Seconds: ops by (phase, stage), messages by (direction, pipe, boundary).

    Each is a number, or a list with one for each microbatch.
    """

    op: dict
    latency: dict
    transmit: dict
    pair: dict = field(default_factory=dict)
    pair_factor: float | None = None


def of_microbatch(seconds, m):
    return seconds[m] if isinstance(seconds, list) else seconds


def split(text):
    """'(0F1;2B0)OVERLAP_F_B' -> [('F', 0, 1), ('B', 2, 0)]; sharding cells have microbatch None."""
    found = re.findall(r"(\d+)([A-Z_]+?)(\d+|$)(?=[;)]|$)", text.replace("OVERLAP_F_B", "").strip())
    return [(phase, int(stage), int(m) if m else None) for stage, phase, m in found]


def numbered(ops, slot):
    """A cell whose ops have names of their own: one of no microbatch is called by its slot."""
    return tuple((phase, stage, f"at {slot}" if m is None else m) for phase, stage, m in ops)


class Run:
    """One execution of a table under one link model."""

    def __init__(
        self,
        rows,
        pipe_of,
        costs,
        link="delay",
        queues="worker",
        host_links=(),
        posting="early",
        shared_links=(),
        pair_links=(),
        eager_below=0.0,
    ):
        self.costs, self.link, self.queues, self.pipe_of = costs, link, queues, pipe_of
        self.texts, self.host_links = rows, host_links
        self.posting, self.shared_links = posting, shared_links
        self.pair_links, self.eager_below = {tuple(p): m for p, m in pair_links}, eager_below
        self.meets = "rendezvous" in (link, *self.pair_links.values())
        self.known_ends = None
        self.rows = [
            [numbered(split(text), slot) for slot, text in enumerate(row) if text.strip()]
            for row in rows
        ]
        if not self.meets:  # no transfer is waited for
            self.rows = [[c for c in row if "WAIT_SEND" not in c[0][0]] for row in self.rows]
        runs = [[c for c in row if c[0][0] in WAITS] for row in self.rows]  # the rest is messages
        self.cell_of = {op: (w, c) for w, row in enumerate(runs) for c in row for op in c}
        self.ops = [[c for c in row if c[0][0] not in HOST] for row in runs]
        self.issued, self.host = {}, {}  # cell after which a host op may start; ops of each link
        self.queue_on_host_links()
        self.gradients = {}  # (stage, worker): the cell of its last gradient
        for w, row in enumerate(self.ops):
            for c in row:
                for phase, stage, _ in c:
                    if phase in "BW":
                        self.gradients.pop((stage, w), None)
                        self.gradients[stage, w] = (w, c)  # the last comes last
        self.joined = {}  # all-reduce: cells of gradients that it waits for
        self.reduction_of = {}  # cell of an update: its all-reduce
        if any(costs.op.get((phase, stage)) for phase in "AU" for stage, _ in self.gradients):
            self.reduce_within() or self.reduce_at_end()
        self.messages = [
            (self.cell_of[p], self.cell_of[op], p, op)
            for row in self.ops
            for c in row
            for op in c
            for p in self.producers(op)
            if self.cell_of[p][0] != self.cell_of[op][0]
        ]
        self.posted = {}  # message: cells of both rows after which its ends are posted
        if posting == "program":
            self.post()
        self.start, self.end = {}, {}
        self.waits = {}  # of each user of a resource: what it waits for, with the lag
        self.run()

    def queue_on_host_links(self):
        """In the order of columns, ties by worker."""
        link_of = {w: group[0] for group in self.host_links for w in group}
        for _, w, c in sorted(
            (slot, w, tuple(split(text)))
            for w, row in enumerate(self.texts)
            for slot, text in enumerate(row)
            if text.strip() and split(text)[0][0] in HOST
        ):
            self.host.setdefault(link_of.get(w, w), []).append((w, c))
        for w, row in enumerate(self.rows):
            last = None
            for c in row:
                if c[0][0] in HOST and last is not None:
                    self.issued[w, c] = (w, last)
                elif c[0][0] in WAITS and c[0][0] not in HOST:
                    last = c

    def reduce_within(self):
        """Updates in cells: each has an all-reduce of its own, after the gradient before it."""
        for w, row in enumerate(self.ops):
            last = {}
            for c in row:
                for phase, stage, m in c:
                    if phase in "BW":
                        last[stage] = (w, c)
                    elif phase == "U":
                        self.joined["A", stage, (w, m)] = [last[stage]]
                        self.reduction_of[w, c] = ("A", stage, (w, m))
        return bool(self.joined)

    def reduce_at_end(self):
        """One all-reduce per stage, then an update of every copy."""
        for (stage, w), gradient in self.gradients.items():
            update = (("U", stage, -1 - w),)  # of no microbatch
            self.ops[w].append(update)
            self.joined.setdefault(("A", stage, None), []).append(gradient)
            self.reduction_of[w, update] = ("A", stage, None)

    def producers(self, op):
        phase, stage, m = op
        for phases, offset in WAITS.get(phase, []):
            exist = [
                (p, stage + offset, m) for p in phases if (p, stage + offset, m) in self.cell_of
            ]
            if exist:
                yield exist[0]

    def place(self, message):
        (_, _, p, op) = message
        return int(op[1] < p[1]), self.pipe_of[p[2]], min(p[1], op[1])

    def model(self, message):
        """The link model that a message follows; a pair names the way back too, if that is not."""
        ends = message[0][0], message[1][0]
        back = self.pair_links.get(ends[::-1], self.link)
        model = self.pair_links.get(ends, back)
        is_small = model == "rendezvous" and self.lags(message)[1] < self.eager_below
        return "queued" if is_small else model

    def reduction_time(self, reduction):
        return self.costs.op.get(("A", reduction[1]), 0.0)

    def duration(self, cell):
        if len(cell) == 2 and cell[0][1] in self.costs.pair:
            return of_microbatch(self.costs.pair[cell[0][1]], cell[0][2])
        lasts = [of_microbatch(self.costs.op.get((p, stage), 0.0), m) for p, stage, m in cell]
        if len(cell) == 2 and self.costs.pair_factor is not None:
            return max(lasts) + self.costs.pair_factor * min(lasts)
        return sum(lasts)

    def chains(self):
        """Resource -> its users in order; a user is a cell (worker, ops), a message, or an A."""
        chain = {("row", w): [(w, c) for c in row] for w, row in enumerate(self.ops)}
        chain |= {("host", link): users for link, users in self.host.items()}
        chain |= {("reduction", *reduction): [reduction] for reduction in self.joined}
        order = {user: k for users in chain.values() for k, user in enumerate(users)}
        for a in sorted(self.joined, key=self.made) if self.joined else ():
            for w in self.participants(a):
                chain.setdefault(("collectives", w), []).append(a)
        follows = {message: self.model(message) for message in self.messages}
        for message in sorted(self.messages, key=lambda x: (order[x[0]], int(x[3][1] < x[2][1]))):
            ends = message[0][0], message[1][0]
            if follows[message] in ("queued", "blocking") and not list(self.groups_of(ends)):
                chain.setdefault(("link", *ends), []).append(message)
        for _, key, message in sorted(self.ranked(), key=lambda x: x[0]) if self.meets else ():
            chain.setdefault(("queue", *key), []).append(message)
        if self.shared_links:
            carried = [message for message in self.messages if follows[message] != "delay"]
            for user in sorted([*carried, *self.joined], key=self.made):
                for group in {g for pair in self.pairs(user) for g in self.groups_of(pair)}:
                    chain.setdefault(("shared", group), []).append(user)
        return chain

    def pairs(self, user):
        """Directed pairs of workers that a message or an all-reduce uses."""
        if user[0] == "A":
            return list(permutations(self.participants(user), 2))
        return [(user[0][0], user[1][0])]

    def groups_of(self, pair):
        """Shared links that carry what goes from one worker to another."""
        if self.shared_links == "pairs":
            return [tuple(sorted(pair))]
        return [k for k, group in enumerate(self.shared_links) if pair in map(tuple, group)]

    def participants(self, reduction):
        return sorted({w for w, _ in self.joined[reduction]})

    def unit_ends(self):
        """Ends of all cells in the message-free run with unit slots."""
        if self.known_ends is None:
            stages = {stage for row in self.rows for cell in row for _, stage, _ in cell}
            free = Costs({(p, s): UNIT[p] for p in UNIT for s in stages}, {}, {})
            rows = [
                [text if text.strip() and split(text)[0][0] in WAITS else "" for text in row]
                for row in self.texts
            ]
            self.known_ends = Run(rows, self.pipe_of, free, host_links=self.host_links).end
        return self.known_ends

    def made(self, user):
        """When a message or an all-reduce is made in that run, and what decides ties."""
        ends = self.unit_ends()
        if user[0] == "A":
            return max(ends[cell] for cell in self.joined[user]), 1, 0, user[1], 0
        return ends[user[0]], 0, user[0][0], user[2][1], user[2][2]

    def letter(self, message):
        return "B" if message[3][1] < message[2][1] else "F"

    def has_cells(self):
        return any(c[0][0].startswith("SEND") for row in self.rows for c in row)

    def in_rounds(self):
        """Cells as PyTorch's lowering meets them: each worker in turn takes the next, if it can.

        What it takes has run at once, but for host ops behind one that has not: these run as soon
        as it has, and their rows go on meanwhile.
        """
        left = [[c for c in row if c[0][0] in WAITS] for row in self.rows]
        met, run = [], set()
        before_on_host = {b: a for users in self.host.values() for a, b in pairwise(users)}

        def can(cell):
            waits = [self.cell_of[p] for op in cell[1] for p in self.producers(op)]
            waits += [c[cell] for c in (self.issued, before_on_host) if cell in c]
            return all(other in run for other in waits)

        while any(left):
            size = len(met)
            for w, row in enumerate(left):
                if row and (can((w, row[0])) or row[0][0][0] in HOST):
                    met.append((w, row.pop(0)))
                    behind = [cell for cell in met if cell not in run]
                    while found := [cell for cell in behind if cell not in run and can(cell)]:
                        run.add(found[0])
            if size == len(met):
                raise DeadlockError(left)
        return met

    def inserted(self):
        """Rows of cells and ends of messages, ("SEND" or "RECV", message), as PyTorch has them."""
        rows = [[] for _ in self.rows]
        for cell in self.in_rounds():
            rows[cell[0]].append(cell)
            sent = [m for m in self.messages if m[0] == cell]
            for message in sorted(sent, key=self.letter, reverse=True):  # F before B
                rows[cell[0]].append(("SEND", message))
                rows[message[1][0]].append(("RECV", message))
        return rows

    def written(self):
        """The same of a table that says itself where its messages stand."""
        named = {}
        for m in self.messages:
            letter, (_, _, p, op) = self.letter(m), m
            named[(f"SEND_{letter}", *p[1:])] = ("SEND", m)
            named[(f"RECV_{letter}", *op[1:])] = ("RECV", m)
        return [[named.get(c[0], (w, c)) for c in row] for w, row in enumerate(self.rows)]

    def post(self):
        """Each end is posted when what the row executes before it has ended."""
        for row in self.written() if self.has_cells() else self.inserted():
            last = None
            for user in row:
                if user[0] in ("SEND", "RECV"):
                    self.posted.setdefault(user[1], []).extend([] if last is None else [last])
                elif user[1][0][0] in WAITS and user[1][0][0] not in HOST:
                    last = user

    def ranked(self):
        """(rank, queue, message) for both sides of every transfer."""
        if self.has_cells() or self.posting == "program":
            rows = self.written() if self.has_cells() else self.inserted()
            rank = {user: k for row in rows for k, user in enumerate(row)}
        else:
            ordered = sorted(self.messages, key=self.made)
            rank = {(end, m): k for k, m in enumerate(ordered) for end in ("SEND", "RECV")}
        for message in (m for m in self.messages if self.model(m) == "rendezvous"):
            w, v, letter = message[0][0], message[1][0], self.letter(message)
            for end, one, other in (("SEND", w, v), ("RECV", v, w)):
                key = {"worker": (one,), "pair": (one, other), "direction": (one, letter)}
                yield rank[end, message], key[self.queues], message

    def run(self):
        chain = self.chains()
        before = {}
        for users in chain.values():
            for a, b in pairwise(users):
                before.setdefault(b, []).append(a)
        todo = [user for users in chain.values() for user in users]
        while todo:
            left = [
                user for user in todo if user not in self.end and not self.try_run(user, before)
            ]
            if len(left) == len(todo):
                raise DeadlockError(todo)
            todo = left

    def lags(self, message):
        where, m = self.place(message), message[2][2]
        times = self.costs.latency, self.costs.transmit
        return tuple(of_microbatch(time.get(where, 0.0), m) for time in times)

    def previous_op(self, cell):
        """The op before an op in its row, in which sharding cells and waits are none."""
        row = [c for c in self.ops[cell[0]] if c[0][0] in OPS]
        place = row.index(cell[1])
        return (cell[0], row[place - 1]) if place else None

    def try_run(self, user, before):
        """Run a cell or message if all that it waits for has ended."""
        if any(other not in self.end for other in before.get(user, [])):
            return False
        is_message = len(user) == 4
        waits = [(other, 0.0) for other in before.get(user, [])]
        if user[0] == "A":
            waits += [(cell, 0.0) for cell in self.joined[user]]
        elif is_message:
            posted = self.posted.get(user, []) if self.model(user) == "rendezvous" else []
            waits += [(cell, 0.0) for cell in (user[0], *posted)]
        else:
            waits += [(self.reduction_of[user], 0.0)] if user in self.reduction_of else []
            waits += [(self.issued[user], 0.0)] if user in self.issued else []
            waits += [
                (self.cell_of[p], 0.0)
                for op in user[1]
                for p in self.producers(op)
                if self.cell_of[p][0] == user[0]
            ]
            phase, *numbers = user[1][0]
            if phase.startswith("WAIT_SEND"):
                op = phase.removeprefix("WAIT_SEND_"), *numbers
                named = (m for m in self.messages if (self.letter(m), *m[2][1:]) == op)
                waits += [(m, 0.0) for m in named if self.model(m) == "rendezvous"]
            for message in self.messages:
                if message[1] == user:
                    lag, transmit = self.lags(message)
                    waits.append(
                        {"delay": (message[0], lag + transmit), "rendezvous": (message, 0.0)}.get(
                            self.model(message), (message, lag)
                        )
                    )
            if user[1][0][0] in OPS:
                previous = self.previous_op(user)
                blocks = (m for m in self.messages if m[0] == previous)
                waits += [(m, 0.0) for m in blocks if self.model(m) == "blocking"]
        if any(other not in self.end for other, _ in waits):
            return False
        if is_message:
            lag, transmit = self.lags(user)
            lasts = lag + transmit if self.model(user) == "rendezvous" else transmit
        elif user[0] == "A":
            lasts = self.reduction_time(user)
        else:
            lasts = self.duration(user[1])
        self.waits[user] = waits
        self.start[user] = max([0.0] + [self.end[other] + lag for other, lag in waits])
        self.end[user] = self.start[user] + lasts
        return True

    @property
    def makespan(self):
        return max(end for user, end in self.end.items())

    def busy(self):
        return [sum(self.duration(c) for c in row) for row in self.ops]

    def peak_in_flight(self):
        peaks = []
        for row in self.ops:
            held = peak = 0
            for cell in row:
                held += sum(phase == "F" for phase, _, _ in cell)
                peak = max(peak, held)
                held -= sum(phase in "BW" for phase, _, _ in cell)
            peaks.append(peak)
        return peaks


def cell_text(cell):
    """Inverse of `split`."""
    ops = [f"{stage}{phase}{'' if m is None else m}" for phase, stage, m in cell]
    return f"({';'.join(ops)})OVERLAP_F_B" if len(ops) == 2 else ops[0]
