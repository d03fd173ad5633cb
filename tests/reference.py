"""The oracle: docs/semantics.md as an event loop over dictionaries.

Plain Python; it shares no code with the library but the text of cells. A run starts whatever can
start until all is done; a run that stops before is a deadlock. What waits for what is read from a
grammar, by default the usual one.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise, permutations

from reference_grammar import Grammar, Table, demand

HOST = ("O", "L")  # beside compute, on the host link of the worker
USUAL = Grammar()


class DeadlockError(Exception):
    """Nothing can start; `run` is what has run until then."""

    def __init__(self, run):
        super().__init__("deadlock")
        self.run = run


@dataclass
class Costs:
    """Seconds: ops by (letters, stage or "worker 0"), messages by (direction, pipe, boundary).

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
    return USUAL.split(text)


def numbered(ops, worker, slot):
    """A cell whose ops have names of their own: of no microbatch by slot, of no stage by worker."""
    return tuple(
        (
            letters,
            f"worker {worker}" if place is None else place,
            f"at {slot}" if m is None else m,
        )
        for letters, place, m in ops
    )


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
        grammar=USUAL,
    ):
        self.grammar = grammar
        self.costs, self.link, self.queues, self.pipe_of = costs, link, queues, pipe_of
        self.texts, self.host_links = rows, host_links
        self.posting, self.shared_links = posting, shared_links
        self.pair_links, self.eager_below = {tuple(p): m for p, m in pair_links}, eager_below
        self.meets = "rendezvous" in (link, *self.pair_links.values())
        self.known_ends = None
        self.rows = [
            [numbered(grammar.split(x), w, slot) for slot, x in enumerate(row) if x.strip()]
            for w, row in enumerate(rows)
        ]
        if not self.meets:  # no transfer is waited for
            self.rows = [[c for c in row if "WAIT_SEND" not in c[0][0]] for row in self.rows]
        runs = [[c for c in row if self.is_run(c)] for row in self.rows]  # the rest is messages
        self.cell_of = {op: (w, c) for w, row in enumerate(runs) for c in row for op in c}
        self.table = self.sizes()
        self.ops = [[c for c in row if self.lane(c) == "compute"] for row in runs]
        self.lanes = {}  # cells by worker and lane beside compute
        for w, row in enumerate(runs):
            for c in row:
                if self.lane(c) not in ("compute", "host"):
                    self.lanes.setdefault((w, self.lane(c)), []).append((w, c))
        self.shared = {}  # what all workers do as one: cells by letters and microbatch
        for (letters, _, m), cell in self.cell_of.items():
            if grammar.together(letters):
                self.shared.setdefault((letters, m), []).append(cell)
        # cell after which a host op, or what moved to a lane, may start; ops of each host link
        self.issued, self.host = {}, {}
        self.of_stage = {}  # what each cell waits for of its stages as a whole
        self.queue_on_host_links()
        self.gradients = {}  # (stage, worker): the cell of its last gradient
        for w, row in enumerate(self.ops):
            for c in row:
                for phase, stage, _ in c:
                    if grammar.ends_backward(phase):
                        self.gradients.pop((stage, w), None)
                        self.gradients[stage, w] = (w, c)  # the last comes last
        self.first = {}  # microbatch that an update behind the rows is of
        self.joined = {}  # all-reduce: cells of gradients that it waits for
        self.reduction_of = {}  # cell of an update: its all-reduce
        ends = [costs.op.get((phase, stage), 0.0) for phase in "AU" for stage, _ in self.gradients]
        if any(any(x) if isinstance(x, list) else x for x in ends):
            self.reduce_within() or self.reduce_at_end()
        self.messages = self.sent()
        self.into, self.out_of = {}, {}  # messages by the cell that waits, and by that which sends
        for message in self.messages:
            self.into.setdefault(message[1], []).append(message)
            self.out_of.setdefault(message[0], []).append(message)
        self.posted = {}  # message: cells of both rows after which its ends are posted
        if posting == "program":
            self.post()
        self.check_issues()
        self.start, self.end = {}, {}
        self.waits = {}  # of each user of a resource: what it waits for, with the lag
        self.run()

    def lane(self, cell):
        return self.grammar.lane(cell[0][0])

    def is_run(self, cell):
        """Whether it is no SEND or RECV."""
        return cell[0][0] in self.grammar.kinds

    def sizes(self):
        """Stages and microbatches as far as ops say, and where each op stands."""
        stages = [stage for _, stage, _ in self.cell_of if isinstance(stage, int)]
        numbers = [m for _, _, m in self.cell_of if isinstance(m, int)]
        return Table(1 + max(stages, default=-1), 1 + max(numbers, default=-1), self.cell_of)

    def sent(self):
        """Messages: one from each op to each cell that waits for it by a rule that sends one.

        Those of one op stand with activations first, then by the stage that they go to, then as
        rules do.
        """
        found = {}
        for op, cell in self.cell_of.items():
            if op[0] in self.grammar.kinds and self.grammar.of(op[0]) != "stage":
                for p, number, sends in self.grammar.waits(op, cell[0], self.table):
                    maker = self.cell_of[p]
                    if sends and maker[0] != cell[0]:
                        demand(p[1] != op[1], f"a message within a stage: {p} to {op}")
                        way = self.grammar.way(p[1], op[1])[0]
                        key = maker, way, op[1], number, op[2]
                        known = found.get((p, cell, op[1]))
                        if known is None or key[3:] < known[0][3:]:
                            found[p, cell, op[1]] = key, (maker, cell, p, op)
        self.rank = {message: key[1:] for key, message in found.values()}
        return sorted(self.rank, key=self.rank.get)

    def queue_on_host_links(self):
        """In the order of columns, ties by worker."""
        link_of = {w: group[0] for group in self.host_links for w in group}
        split = self.grammar.split
        for slot, w in sorted(
            (slot, w)
            for w, row in enumerate(self.texts)
            for slot, text in enumerate(row)
            if text.strip() and self.grammar.lane(split(text)[0][0]) == "host"
        ):
            cell = numbered(split(self.texts[w][slot]), w, slot)
            self.host.setdefault(link_of.get(w, w), []).append((w, cell))
        for w, row in enumerate(self.rows):
            last = None
            made = {}  # (letters, stage): the last one so far
            for c in row:
                is_moved = c[0][0] in self.grammar.lanes
                if (self.lane(c) == "host" or is_moved) and last is not None:
                    self.issued[w, c] = (w, last)
                if is_moved:
                    made[c[0][:2]] = (w, c)
                needed = {(need, op[1]) for op in c for need in self.grammar.needs(op[0])}
                self.of_stage[w, c] = [made[key] for key in needed if key in made]
                if self.lane(c) == "host" or is_moved:
                    continue
                if self.is_run(c) and self.lane(c) == "compute":
                    last = c

    def check_issues(self):
        """A host op is issued behind all in its row that it waits for."""
        for w, c in self.host_cells():
            for op in c:
                for producer in self.producers(op):
                    v, other = self.cell_of[producer]
                    row = self.rows[w]
                    is_row = v == w and self.lane(other) in ("compute", "host")
                    if is_row and row.index(other) > row.index(c):
                        raise DeadlockError(self)

    def host_cells(self):
        return [cell for users in self.host.values() for cell in users]

    def reduce_within(self):
        """Updates in cells: each has an all-reduce of its own, after the gradient before it."""
        for w, row in enumerate(self.ops):
            last = {}
            for c in row:
                for phase, stage, m in c:
                    if phase in ("B", "W"):
                        last[stage] = (w, c)
                    elif phase == "U":
                        self.joined["A", stage, (w, m)] = [last[stage]]
                        self.reduction_of[w, c] = ("A", stage, (w, m))
        return bool(self.joined)

    def reduce_at_end(self):
        """One all-reduce per stage, then an update of every copy."""
        cells = [cell for cells in self.lanes.values() for cell in cells]
        for (stage, w), gradient in self.gradients.items():
            reduced = [x for x in cells if x[0] == w and x[1][0][:2] == ("REDUCE_GRAD", stage)]
            update = (("U", stage, -1 - w),)  # of no microbatch: its copy's first one says how long
            own = [m for (_, s, m), (v, _) in self.cell_of.items() if (s, v) == (stage, w)]
            self.first[update[0]] = min(m for m in own if isinstance(m, int))
            self.ops[w].append(update)
            self.joined.setdefault(("A", stage, None), []).extend([gradient, *reduced])
            self.reduction_of[w, update] = ("A", stage, None)

    def producers(self, op):
        """Ops that an op waits for."""
        if self.grammar.of(op[0]) == "stage":
            return []
        waits = self.grammar.waits(op, self.cell_of[op][0], self.table)
        return [producer for producer, _, _ in waits]

    def place(self, message):
        (_, _, p, op) = message
        way, boundary = self.grammar.way(p[1], op[1])
        return way, self.pipe_of[p[2]], boundary

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
        lasts = [
            of_microbatch(self.costs.op.get((p, stage), 0.0), self.first.get((p, stage, m), m))
            for p, stage, m in cell
        ]
        if len(cell) == 2 and self.costs.pair_factor is not None:
            return max(lasts) + self.costs.pair_factor * min(lasts)
        return sum(lasts)

    def chains_of_cells(self):
        """Rows, lanes and host links -> their cells (worker, ops) in order."""
        chain = {("row", w): [(w, c) for c in row] for w, row in enumerate(self.ops)}
        chain |= {("lane", *lane): users for lane, users in self.lanes.items()}
        return chain | {("host", link): users for link, users in self.host.items()}

    def chains(self):
        """Resource -> its users in order; a user is a cell (worker, ops), a message, or an A."""
        chain = self.chains_of_cells()
        chain |= {("reduction", *reduction): [reduction] for reduction in self.joined}
        order = {(w, c): k for w, row in enumerate(self.rows) for k, c in enumerate(row)}
        for a in sorted(self.joined, key=self.made) if self.joined else ():
            for w in self.participants(a):
                chain.setdefault(("collectives", w), []).append(a)
        follows = {message: self.model(message) for message in self.messages}
        for message in sorted(self.messages, key=lambda x: order[x[0]]):
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
            split, kinds = self.grammar.split, self.grammar.kinds
            places = {stage for row in self.rows for cell in row for _, stage, _ in cell}
            slots = {(p, s): kind.get("slot", 1) for p, kind in kinds.items() for s in places}
            rows = [
                [text if text.strip() and split(text)[0][0] in kinds else "" for text in row]
                for row in self.texts
            ]
            free, links = Costs(slots, {}, {}), {"host_links": self.host_links}
            self.known_ends = Run(rows, self.pipe_of, free, **links, grammar=self.grammar).end
        return self.known_ends

    def made(self, user):
        """When a message or an all-reduce is made in that run, and what decides ties."""
        ends = self.unit_ends()
        if user[0] == "A":
            return max(ends[cell] for cell in self.joined[user]), 1, 0, user[1], 0
        slot = self.rows[user[0][0]].index(user[0][1])
        return ends[user[0]], 0, user[0][0], *user[2][1:], slot, *self.rank[user]

    def letter(self, message):
        return "FB"[self.rank[message][0]]

    def has_cells(self):
        return any(c[0][0].startswith("SEND") for row in self.rows for c in row)

    def in_rounds(self):
        """Cells as PyTorch's lowering meets them: each worker in turn takes the next, if it can.

        What it takes has run at once, but for host ops behind one that has not: these run as soon
        as it has, and their rows go on meanwhile.
        """
        left = [[c for c in row if self.is_run(c)] for row in self.rows]
        met, run = [], set()
        before_on_host = {b: a for users in self.host.values() for a, b in pairwise(users)}

        def can(cell):
            waits = [self.cell_of[p] for op in cell[1] for p in self.producers(op)]
            waits += [c[cell] for c in (self.issued, before_on_host) if cell in c]
            return all(other in run for other in waits)

        while any(left):
            size = len(met)
            for w, row in enumerate(left):
                if row and (can((w, row[0])) or self.lane(row[0]) == "host"):
                    met.append((w, row.pop(0)))
                    behind = [cell for cell in met if cell not in run]
                    while found := [cell for cell in behind if cell not in run and can(cell)]:
                        run.add(found[0])
            if size == len(met):
                raise DeadlockError(self)
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
                elif self.is_run(user[1]) and self.lane(user[1]) == "compute":
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
                raise DeadlockError(self)
            todo = left

    def lags(self, message):
        where, m = self.place(message), message[2][2]
        times = self.costs.latency, self.costs.transmit
        return tuple(of_microbatch(time.get(where, 0.0), m) for time in times)

    def previous_op(self, cell):
        """The op before an op in its row, in which sharding cells and waits are none."""
        row = [c for c in self.ops[cell[0]] if self.grammar.is_op(c[0][0])]
        place = row.index(cell[1])
        return (cell[0], row[place - 1]) if place else None

    def waits_of(self, user, before):
        """What a cell, a message or an all-reduce waits for, each with the lag behind its end."""
        waits = [(other, 0.0) for other in before.get(user, [])]
        if user[0] == "A":
            return waits + [(cell, 0.0) for cell in self.joined[user]]
        if len(user) == 4:  # a message
            posted = self.posted.get(user, []) if self.model(user) == "rendezvous" else []
            return waits + [(cell, 0.0) for cell in (user[0], *posted)]
        waits += [(self.reduction_of[user], 0.0)] if user in self.reduction_of else []
        waits += [(self.issued[user], 0.0)] if user in self.issued else []
        waits += [(cell, 0.0) for cell in self.of_stage.get(user, [])]
        messages = self.into.get(user, [])
        by_message = {(message[2], message[3][1]) for message in messages}
        waits += [
            (self.cell_of[p], 0.0)
            for op in user[1]
            if op in self.cell_of  # updates behind the rows are not
            for p in self.producers(op)
            if (p, op[1]) not in by_message
        ]
        phase, *numbers = user[1][0]
        if phase.startswith("WAIT_SEND"):
            op = phase.removeprefix("WAIT_SEND_"), *numbers
            named = (m for m in self.messages if (self.letter(m), *m[2][1:]) == op)
            waits += [(m, 0.0) for m in named if self.model(m) == "rendezvous"]
        for message in messages:
            lag, transmit = self.lags(message)
            by_model = {"delay": (message[0], lag + transmit), "rendezvous": (message, 0.0)}
            waits.append(by_model.get(self.model(message), (message, lag)))
        if self.grammar.is_op(phase):
            blocks = self.out_of.get(self.previous_op(user), [])
            waits += [(m, 0.0) for m in blocks if self.model(m) == "blocking"]
        return waits

    def lasts(self, user):
        if user[0] == "A":
            return self.reduction_time(user)
        if len(user) == 2:
            return self.duration(user[1])
        lag, transmit = self.lags(user)
        return lag + transmit if self.model(user) == "rendezvous" else transmit

    def try_run(self, user, before):
        """Run a cell or message if all that it waits for has ended; with it what is one op with it."""
        letters, _, m = user[1][0] if len(user) == 2 else ("", None, None)
        users = self.shared.get((letters, m), [user])
        waits = [wait for each in users for wait in self.waits_of(each, before)]
        if any(other not in self.end for other, _ in waits):
            return False
        for each in users:
            self.waits[each] = waits
            self.start[each] = max([0.0] + [self.end[other] + lag for other, lag in waits])
            self.end[each] = self.start[each] + self.lasts(each)
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
                held -= sum(phase in ("B", "W") for phase, _, _ in cell)
            peaks.append(peak)
        return peaks

    def held(self, size, for_w, checkpoint):
        """What each worker holds, [(moment, level)], by sizes and weight shares of stages."""
        changes = [{} for _ in self.rows]
        kinds = self.grammar.kinds
        again = [k for k in kinds if kinds[k].get("at_start", {}).get("checkpoint", 0) < 0]
        again = [k for k in again if self.grammar.of(k) == "microbatch"]
        for (letters, place, m), cell in self.cell_of.items():
            stage = place if isinstance(place, int) else self.table.stages - 1
            whole, kind = size[stage], self.grammar.kinds[letters]
            sizes = {item: share * whole for item, share in self.grammar.items.items()}
            sizes |= {"activation": whole, "for_w": for_w[stage] * whole}
            sizes |= {"checkpoint": checkpoint[stage]}
            sizes["left"] = whole
            if any((k, stage, m) in self.cell_of for k in again):
                sizes["left"] = checkpoint[stage]
            for moment, name in ((self.start[cell], "at_start"), (self.end[cell], "at_end")):
                for item, count in kind.get(name, {}).items():
                    own = changes[cell[0]]
                    own[moment] = own.get(moment, 0.0) + count * sizes[item]
        levels = (accumulate(own[moment] for moment in sorted(own)) for own in changes)
        return [
            list(zip(sorted(own), up, strict=True)) for own, up in zip(changes, levels, strict=True)
        ]


def cell_text(cell):
    """Inverse of `split`."""
    ops = [f"{stage}{phase}{'' if m is None else m}" for phase, stage, m in cell]
    return f"({';'.join(ops)})OVERLAP_F_B" if len(ops) == 2 else ops[0]
