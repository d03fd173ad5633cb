"""The checker's own run of a table: events that wait for events, in plain Python.

It shares nothing with the engine but the reader of tables. An event is a cell, a message between
workers, an all-reduce or an update behind the rows; it starts when the last event that it waits
for is there. Its account of activation memory is its own as well. The numbers in comments are
those of docs/semantics.md. What a table has of its own says `own_rules`.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from pipejax.analysis.verify.own_rules import Named, OwnRules, WaitedFor
from pipejax.schedules.cells.ops import TIMED
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

# (worker, slot) of a cell; ("A", ..) or ("U", ..); a message as its SEND, which is `Named`, or in a
# table with rules of its own as ("to", its producer, what waits)
Event = tuple[Any, ...]
# by phase letter (stages); "pair" or "pair_factor"; "latency", "transmit" by boundary; or of these
# by microbatch
Seconds = Mapping[str, Any]
Curve = list[tuple[float, float]]  # (time [s], held from then on)
UNIT_TIMES = {"F": 1.0, "I": 1.0, "W": 1.0, "R": 1.0, "B": 2.0}  # Messages: what orders transfers
COMPUTE = "compute"
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WAIT_SEND = ("WAIT_SEND_F", "WAIT_SEND_B")
UNTIMED = ("WAIT_O", *WAIT_SEND)  # WAIT_REDUCE_GRAD has a time of its own
# Order 2, Offloading 2: phases on the same stage that an op waits for, of those that are there
SAME_STAGE = {"R": "FL", "B": "FRL", "I": "FRL", "W": "I", "U": "BW", "O": "F", "L": "O"}
SAME_STAGE["WAIT_O"] = "O"


def inputs(op: Named, own: OwnRules) -> Iterator[Named]:
    """Name the ops that an op waits for by the usual rules, whether or not the table holds them."""
    phase, stage, microbatch = op
    for letter in SAME_STAGE.get(phase, ""):
        yield letter, stage, microbatch
    if phase == "F":
        yield from (("F", before, microbatch) for before in own.before(stage))
        yield from (("F", stage, before) for before in own.slices_before(microbatch))
    if phase in ("B", "I"):
        for letter in ("I", "B"):
            yield from ((letter, behind, microbatch) for behind in own.behind(stage))
            yield from ((letter, stage, behind) for behind in own.slices_behind(microbatch))


class Message(NamedTuple):
    """A message between workers.

    Attributes:
      sender: worker.
      receiver: worker.
      later: how much later it arrives than it holds its link [s].
      way: direction, 0 forth and 1 back.
      stage: of its producer.
      microbatch: of its producer.
    """

    sender: int
    receiver: int
    later: float
    way: int
    stage: int
    microbatch: int


class EventRun:
    """Start and end of every event [s].

    Attributes:
      own: what the table has of its own.
      rows: cells by worker and slot, each a list of ops.
      at: place (worker, slot) of every op.
      lasts: duration of each event [s].
      waits: what each event waits for, and how long after its end.
      lane_of: lane of each event of a cell.
      ends_of_row: of each worker, the last event in its row.
      last_ops: of each worker, the last op in its row; sharding cells and waits are none.
      reached: what a worker runs before a SEND or RECV of its row, by its place.
      reduced: what reduces gradients on a lane, by worker and stage.
      reductions: end of the last gradient in the run of `unit_ends`, and workers, of those at the
        end of the step.
      message: messages by their events.
      follows: link model of each; that of a message below `eager_below` is "queued".
      start: of each event [s]; those that can never start are not there: a deadlock.
      end: of each event [s].
      last: what each event waited for last; itself where it waits for nothing.
    """

    def __init__(self, table: ScheduleTable, costs: Seconds, links: Links) -> None:
        """Collect what waits for what, and run it."""
        self.table, self.costs, self.links, self.own = table, costs, links, OwnRules(table)
        self.rows = [
            [
                [
                    (op.phase.name, op.stage if op.stage >= 0 else -1 - w, op.microbatch)
                    for op in cell
                ]
                for cell in row
            ]
            for w, row in enumerate(table.rows())
        ]
        self.at = {
            op: (worker, slot)
            for worker, row in enumerate(self.rows)
            for slot, cell in enumerate(row)
            for op in cell
        }
        self.lasts: dict[Event, float] = {}
        self.waits: dict[Event, list[tuple[Event, float]]] = {}
        self.next_in_row: dict[Event, Event] = {}
        self.ends_of_row: dict[int, Event] = {}
        self.last_ops: dict[int, Event] = {}
        self.reached: dict[Event, list[Event]] = {}
        self.reduced: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self.reductions: dict[Event, tuple[float, list[int]]] = {}
        self.message: dict[Event, Message] = {}
        self.follows: dict[Event, str] = {}
        self.has_cells = table.has_communication
        self.pipe_of = table.pipe_of_microbatch.tolist()
        self._add_rows()
        self._share_host_links()
        self._add_step_end()
        self._add_waits()
        self._open_together()
        self._run()

    def _add(self, event: Event, lasts: float, before: Iterable[Event]) -> None:
        self.lasts[event], self.waits[event] = lasts, [(other, 0.0) for other in before]

    def _chain(self, users: Iterable[tuple[Any, Event]]) -> None:
        """Let users of one resource have their turns by rank."""
        for (_, before), (_, event) in pairwise(sorted(users, key=itemgetter(0))):
            self.waits[event].append((before, 0.0))

    def _time(self, cell: Sequence[Named]) -> float:
        """Order 3: a fused pair lasts the sum unless it has a cost, or a factor of overlap."""
        if len(cell) == 2 and "pair" in self.costs:
            cell = [("pair", *cell[0][1:])]
        timed = (op for op in cell if op[0] not in UNTIMED)
        lasts = [
            of_microbatch(self.costs[phase][at if at >= 0 else -1 - at], m)
            for phase, at, m in timed
        ]
        if len(cell) == 2 and "pair_factor" in self.costs:
            factor = of_microbatch(self.costs["pair_factor"][cell[0][1]], cell[0][2])
            lasts = [max(lasts), factor * min(lasts)]
        return float(sum(lasts))

    def _add_rows(self) -> None:
        """Order 1: one after the other. Offloading 1: host ops are issued where they stand."""
        rests = MESSAGES if self.links.meets else MESSAGES + WAIT_SEND
        for worker, row in enumerate(self.rows):
            before: dict[str, list[Event]] = defaultdict(list)  # of each lane the last one
            of_stage: dict[tuple[str, int], Event] = {}  # the last of those on lanes
            for slot, cell in enumerate(row):
                here = worker, slot
                if not cell or cell[0][0] in rests:
                    self.reached[here] = before[COMPUTE]
                    continue
                lane = self.own.lane(cell[0][0])
                self._add(here, self._time(cell), before[COMPUTE if lane == "host" else lane])
                needs = [(each, op[1]) for op in cell for each in self.own.of_stage(op[0])]
                self.waits[here] += [(of_stage[n], 0.0) for n in needs if n in of_stage]
                if cell[0][0] in self.own.lanes:
                    self.waits[here] += [(other, 0.0) for other in before[COMPUTE]]
                    of_stage[cell[0][:2]] = here
                    if cell[0][0] == "REDUCE_GRAD":
                        self.reduced[worker, cell[0][1]].append(here)
                if lane == COMPUTE and self.own.is_op(cell[0][0]):
                    if worker in self.last_ops:
                        self.next_in_row[self.last_ops[worker]] = here
                    self.last_ops[worker] = here
                before[lane] = [here]
            if before[COMPUTE]:
                self.ends_of_row[worker] = before[COMPUTE][0]

    def _share_host_links(self) -> None:
        """Offloading 4: in the order of the columns, ties by worker."""
        link_of = {worker: group for group in self.links.host_links for worker in group}
        queues = defaultdict(list)
        for worker, slot in (self.at[op] for op in self.at if self.own.lane(op[0]) == "host"):
            queues[link_of.get(worker, (worker,))].append(((slot, worker), (worker, slot)))
        for users in queues.values():
            self._chain(users)

    def _add_step_end(self) -> None:
        """Order 5: A after the last gradient of every copy of a stage, U behind A and the row.

        A worker takes part in one A at a time, in the order of `unit_ends`: in a row, as it stands.
        """
        if not any([*self.costs["A"], *map(_most, self.costs["U"])]):
            return
        runs = self.table.weights.runs
        last: dict[Event, Event] = {}  # gradient of a worker's copy of a stage, by run
        copies: dict[tuple[int, int], Event] = {}
        met: dict[tuple[int, int], int] = {}  # first microbatch of a copy: its U may be by that
        turns: dict[int, list[tuple[Any, Event]]] = defaultdict(list)
        for (phase, stage, microbatch), cell in sorted(self.at.items(), key=itemgetter(1)):
            key = cell[0], stage, microbatch % runs
            if microbatch >= 0:  # sharding cells are of none
                met[key[:2]] = min(microbatch, met.get(key[:2], microbatch))
            if phase in self.own.ends_backward:
                copies[key[:2]] = cell
            if phase in ("B", "W"):
                last[key] = cell
            elif phase == "U":
                reduction = "A", stage, microbatch
                self._add(reduction, float(self.costs["A"][stage]), [last[key]])
                self.waits[cell].append((reduction, 0.0))
                turns[cell[0]].append((last[key], reduction))
        within = self.table.updates_within
        for stage, lasts in () if within else enumerate(self.costs["A"]):
            reduction, ends = ("A", stage, -1), [at for (_, s), at in copies.items() if s == stage]
            if not ends:
                continue
            behind = ends + [each for worker, _ in ends for each in self.reduced[worker, stage]]
            self._add(reduction, float(lasts), behind)
            latest = max(self.unit_ends[cell] for cell in behind)
            self.reductions[reduction] = latest, [worker for worker, _ in ends]
            for worker, _ in ends:
                turns[worker].append(((latest, stage), reduction))
        for users in turns.values():
            self._chain(users)
        if within:
            return
        for (worker, stage), _ in sorted(copies.items(), key=itemgetter(1)):
            update, before = ("U", stage, worker), self.ends_of_row[worker]
            lasts = of_microbatch(self.costs["U"][stage], met[worker, stage])
            self._add(update, lasts, [before, ("A", stage, -1)])
            self.next_in_row[self.last_ops[worker]] = update
            self.ends_of_row[worker] = self.last_ops[worker] = update

    def _add_waits(self) -> None:
        """Order 2: what an op waits for. Messages: what crosses between workers, and how."""
        sends = "latency" in self.costs  # the run that orders transfers is free of messages
        queues: dict[Event, list[tuple[Any, Event]]] = defaultdict(list)
        sent: dict[Any, tuple[int, int, Named]] = {}  # by producer, and cell and stage that wait
        for op, cell in self.at.items():
            usual = (WaitedFor(made) for made in inputs(op, self.own))
            for made, is_sent, rule in (*usual, *self.own.awaited(op, cell[0])):
                if made in self.at and (self.at[made][0] == cell[0] or not (sends and is_sent)):
                    self.waits[cell].append((self.at[made], 0.0))
                elif made in self.at:
                    key, first = (made, cell, op[1]), (rule, op[2], op)
                    sent[key] = min(first, sent.get(key, first))
        for (made, *_), (rule, _, op) in sent.items():
            event = self._add_message(made, op)
            for queue, rank in self._places(event, self.at[made], op, rule):
                queues[queue].append((rank, event))
        for op, cell in self.at.items():
            send = op[0].removeprefix("WAIT_"), *op[1:]
            if op[0] in WAIT_SEND and self.follows.get(send) == "rendezvous":
                self.waits[cell].append((send, 0.0))
        for reduction, (end, workers) in self.reductions.items():
            pairs = ((a, b) for a in workers for b in workers if a != b)
            for group in {group for pair in pairs for group in self._groups(*pair)}:
                queues[group].append(((end, len(self.rows), reduction[1]), reduction))
        for users in queues.values():
            self._chain(users)

    def _add_message(self, made: Named, op: Named) -> Event:
        (sender, slot), (receiver, other) = self.at[made], self.at[op]
        producer, consumer, microbatch = (sender, slot), (receiver, other), made[2]
        way, boundary = self.own.way(made[1], op[1])
        latency, transmit = (
            of_microbatch(self.costs[name][way][self.pipe_of[microbatch]][boundary], microbatch)
            for name in ("latency", "transmit")
        )
        model = self._model_of(sender, receiver)
        if model == "rendezvous" and transmit < self.links.eager_below:
            model = "queued"
        on_link, behind = latency + transmit, 0.0
        if model in ("queued", "blocking"):
            on_link, behind = transmit, latency
        event: Event = MESSAGES[::2][way], *made[1:]
        if self.own.names_ops:  # the first op of its cell that is of this stage
            event = "to", made, next(o for o in self.rows[receiver][other] if o[1] == op[1])
        self.message[event] = Message(sender, receiver, behind, way, made[1], microbatch)
        self.follows[event] = model
        self._add(event, on_link, [producer])
        self.waits[consumer].append((event, behind))
        if model == "blocking" and producer in self.next_in_row:
            self.waits[self.next_in_row[producer]].append((event, 0.0))
        return event

    def _open_together(self) -> None:
        """What all workers do together waits for all that any of them waits for."""
        groups: dict[Any, list[Event]] = defaultdict(list)
        for (letters, _, microbatch), cell in self.at.items():
            if self.own.together(letters):
                groups[letters, microbatch].append(cell)
        for cells in groups.values():
            waits = [wait for cell in cells for wait in self.waits[cell]]
            self.waits |= dict.fromkeys(cells, waits)

    def _model_of(self, sender: int, receiver: int) -> str:
        """Name the link model of a directed pair: its own, that of the way back, or that of all."""
        named = dict(self.links.named_pairs)
        back = named.get((receiver, sender), self.links.model)
        return named.get((sender, receiver), back)

    def _groups(self, sender: int, receiver: int) -> list[Event]:
        """Name the groups of shared links that hold a directed pair of workers."""
        if self.links.shared_links == "pairs":
            return [("shared", *sorted((sender, receiver)))]
        groups = enumerate(self.links.shared_groups)
        return [("shared", k) for k, pairs in groups if (sender, receiver) in pairs]

    def _places(
        self, event: Event, producer: Event, op: Named, rule: int
    ) -> Iterator[tuple[Event, Any]]:
        """Name the queues that a message goes through, and its rank in each."""
        sent, model, slot = self.message[event], self.follows[event], producer[1]
        sender, receiver, direction = sent.sender, sent.receiver, "FB"[sent.way]
        behind = slot, sent.way, op[1], rule, op[2]  # of messages of one op
        # where its table does not give its rank
        turn = self.unit_ends[producer], sender, sent.stage, sent.microbatch, *behind
        groups = self._groups(sender, receiver) if model != "delay" else []
        if model in ("queued", "blocking") and not groups:
            yield ("link", sender, receiver), behind
        receive = f"RECV_{direction}", *op[1:]
        ends = ((event, sender, receiver), (receive, receiver, sender))
        for cell, worker, other in ends if model == "rendezvous" else ():
            scope = {"worker": (worker,), "pair": (worker, other), "direction": (worker, direction)}
            yield scope[self.links.queues], self.at[cell] if self.has_cells else turn
            if self.has_cells and self.links.posting == "program":
                self.waits[event] += [(before, 0.0) for before in self.reached[self.at[cell]]]
        for group in groups:
            yield group, turn

    @functools.cached_property
    def unit_ends(self) -> Mapping[Event, float]:
        """End of each cell in the run that orders transfers: only `UNIT_TIMES` pass there."""
        places = max(self.table.num_stages, len(self.rows))
        costs = {phase.name: [UNIT_TIMES.get(phase.name, 0.0)] * places for phase in TIMED}
        costs |= {k: [float(kind.slot or 1)] * places for k, kind in self.own.kinds.items()}
        return EventRun(self.table, costs, Links(host_links=self.links.host_links)).end

    def _run(self) -> None:
        """Start every event when the last that it waits for is there."""
        followers = defaultdict(list)
        for event, before in self.waits.items():
            for other, _ in before:
                followers[other].append(event)
        left = {event: len(before) for event, before in self.waits.items()}
        ready = [event for event, count in left.items() if count == 0]
        self.start: dict[Event, float] = {}
        self.end: dict[Event, float] = {}
        self.last: dict[Event, Event] = {}
        while ready:
            event = ready.pop()
            arrivals = [(self.end[other] + lag, other) for other, lag in self.waits[event]]
            begins, self.last[event] = max(arrivals, key=itemgetter(0), default=(0.0, event))
            self.start[event], self.end[event] = begins, begins + self.lasts[event]
            for follower in followers[event]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)

    def deadlock(self) -> list[Event]:
        """Return events of which each waits for the next, and the last for the first, if any do."""
        event = next((event for event in self.waits if event not in self.end), None)
        way: list[Event] = []
        while event is not None and event not in way:
            way.append(event)
            event = next(other for other, _ in self.waits[event] if other not in self.end)
        return way[way.index(event) :] if event is not None else []

    def ops(self) -> Iterator[tuple[Named, Event]]:
        """List the ops of all cells that run, with their cells."""
        for worker, row in enumerate(self.rows):
            for slot, cell in enumerate(row):
                if (worker, slot) in self.end:
                    yield from ((op, (worker, slot)) for op in cell)

    def worker_of(self, event: Event) -> int | None:
        """Worker whose row an event stands in; messages, all-reduces and lanes run beside it."""
        if event in self.message or event[0] == "A":
            return None
        if event[0] == "U":
            return int(event[2])
        is_row = self.own.lane(self.rows[event[0]][event[1]][0][0]) == COMPUTE
        return int(event[0]) if is_row else None

    def holds(self, event: Event, phases: Sequence[str]) -> bool:
        """Whether an event in a row is a cell that holds one of some phases."""
        return event[0] != "U" and self.rows[event[0]][event[1]][0][0] in phases

    def name(self, event: Event) -> str:
        """Name an event as certificates do."""
        if event in self.message:
            ends = " to ".join(map(self.own.text, event[1:])) if event[0] == "to" else _text(event)
            return transfer_name(ends, *self.message[event][:2])
        if event[0] == "A":
            return reduction_name(*event[1:])
        if event[0] == "U":
            return update_name(*event[1:])
        worker, slot = event
        return cell_name(";".join(map(self.own.text, self.rows[worker][slot])), worker, slot)


def _most(time: Any) -> float:
    return float(max(time) if isinstance(time, list) else time)


def of_microbatch(time: Any, microbatch: int) -> float:
    """Read a time that is one number, or one for each microbatch [s]."""
    return float(time[microbatch] if isinstance(time, list) else time)


def _text(op: Event) -> str:
    phase, stage, microbatch = op
    return f"{stage}{phase}{microbatch if microbatch >= 0 else ''}"


def cell_name(ops: str, worker: int, slot: int) -> str:
    """Name a cell in a certificate."""
    return f"{ops} (worker {worker}, slot {slot})"


def transfer_name(send: str, sender: int, receiver: int) -> str:
    """Name a message in a certificate."""
    return f"{send} (worker {sender} to {receiver})"


def reduction_name(stage: int, microbatch: int) -> str:
    """Name an all-reduce in a certificate, by the update that it is for where cells update."""
    return _text(("A", stage, microbatch))


def update_name(stage: int, worker: int) -> str:
    """Name an update behind the rows in a certificate."""
    return f"{stage}U (worker {worker})"


def by_worker(values: Iterable[Any]) -> dict[str, Any]:
    """Name the workers of a certificate."""
    return {f"worker {worker}": value for worker, value in enumerate(values)}


class ActivationSizes(NamedTuple):
    """What activations take, by stage, in one unit; or lists by stage and microbatch.

    Attributes:
      whole: all of an activation.
      weight_share: share of it that W needs after I.
      checkpoints: what F leaves of it where R comes later.
      at_work: what B, I and W recompute by themselves; empty for nothing.
    """

    whole: Sequence[Any]
    weight_share: Sequence[Any]
    checkpoints: Sequence[Any]
    at_work: Sequence[Sequence[Any]] = ()


def memory_curves(run: EventRun, sizes: ActivationSizes) -> list[Curve]:
    """Follow what each worker holds; at one moment only the sum of all changes counts (rule 5)."""
    changes: list[dict[float, float]] = [defaultdict(float) for _ in run.rows]
    for (phase, place, number), cell in run.ops():
        # what is of a worker counts as the last stage, what is of no microbatch as the first
        stage, microbatch = max(place, -1), max(number, 0)
        whole, share, rest = (of_microbatch(size[stage], microbatch) for size in sizes[:3])
        again = any((each, stage, microbatch) in run.at for each in run.own.recomputing)
        left = rest if again else whole
        for_weights = share * whole
        taken = {"F": left, "R": whole - left, "L": left}
        freed = {"B": -whole, "I": for_weights - whole, "W": -for_weights, "O": -left}
        work = [of_microbatch(size[stage], microbatch) for size in sizes.at_work]
        for letter, size in zip("BIW", work, strict=False):  # none at all, or of each
            taken, freed = taken | {letter: size}, freed | {letter: freed[letter] - size}
        kind = run.own.kinds.get(phase)
        if kind is not None:
            items = (item * whole for item in run.own.items)
            parts = [whole, for_weights, rest, *(work or [0, 0, 0]), *items]
            for change, at in ((taken, kind.at_start), (freed, kind.at_end)):
                change |= (
                    {phase: sum(count * parts[part] for part, count in at.items())} if at else {}
                )
        if phase in taken:
            changes[cell[0]][run.start[cell]] += taken[phase]
        if phase in freed:
            changes[cell[0]][run.end[cell]] += freed[phase]
    return [_summed(own) for own in changes]


def _summed(changes: dict[float, float]) -> Curve:
    curve, held = [], 0.0
    for moment in sorted(changes):
        held += changes[moment]
        curve.append((moment, held))
    return curve


def peaks_in_flight(run: EventRun) -> list[float]:
    """Count activations from F to the end of B or W, in row order; both of a pair count.

    What kinds of a table's own take and free counts too, an item as its share.
    """
    peaks = []
    for row in run.rows:
        held: float = 0
        peak = held
        for cell in row:
            held += sum((op[0] == "F") + run.own.counted(op[0], "at_start") for op in cell)
            peak = max(peak, held)
            held -= sum(op[0] in ("B", "W") for op in cell)
            held += sum(run.own.counted(op[0], "at_end") for op in cell)
        peaks.append(peak)
    return peaks
