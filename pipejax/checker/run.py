"""The run of a table, as events that wait for other events.

An event is a cell (worker, slot), a message (named by its SEND), or at the end of the step an
all-reduce ("A", ..) or an update ("U", ..). An event starts when all events that it waits for have
ended.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from pipejax.checker.prices import NO_LINKS, Prices
from pipejax.checker.rules import COMMUNICATION, SHARDING, TIMED, WAIT_SEND, TableOp
from pipejax.checker.table import Cell, Table, awaited_op, message_cells
from pipejax.checker.values import at_microbatch, depth

Event = tuple[Any, ...]
UNIT_TIMES = {"F": 1, "I": 1, "W": 1, "R": 1, "B": 2}


class DeadlockError(Exception):
    """Error of a run in which events wait for each other in a cycle."""

    def __init__(self, run: "Run", cycle: list[Event]) -> None:
        """Write the names of the events into the message of the error."""
        names = " waits for ".join(map(run.name, [*cycle, cycle[0]]))
        super().__init__(f"deadlock: {names}")
        self.run, self.cycle = run, cycle


class TableMessage(NamedTuple):
    """Message between workers; it arrives `lag` seconds after its transmission ends."""

    sender: int
    receiver: int
    model: str
    lag: float
    name: str
    consumer: Cell


class Run:
    """Start and end of all events of a table [s]."""

    def __init__(
        self, table: Table, links: Prices, seconds: Prices, *, is_unit: bool = False
    ) -> None:
        """Collect all events and what they wait for; compute start and end of each event."""
        self.table, self.rules, self.links = table, table.rules, links
        self.seconds, self.is_unit = seconds, is_unit
        self.durations: dict[Event, float] = {}
        # for each event: (event that it waits for, lag after the end of that event)
        self.waits: dict[Event, list[tuple[Event, float]]] = defaultdict(list)
        self.messages: dict[Event, TableMessage] = {}
        self.queues: dict[Event, list[tuple[Any, Event]]] = defaultdict(list)
        self._unit: Run | None = None
        self._add_rows()
        self._add_host_links()
        self._add_step_end()
        self._add_inputs()
        for queue in self.queues.values():
            queue.sort(key=itemgetter(0))
            for (_, previous), (_, event) in pairwise(queue):
                self._wait(event, previous)
        self._join_collectives()
        self._run()

    def _wait(self, event: Event, *producers: Event | None) -> None:
        """Let an event wait for the end of its producers."""
        self.waits[event] += [(producer, 0.0) for producer in producers if producer is not None]

    def unit_end(self, cell: Cell) -> float:
        """Return the end of a cell in a run without messages; such ends order the messages."""
        if self._unit is None:
            length = max(self.table.num_stages, len(self.table.rows))  # lists by stage or worker
            slots: dict[str, Any] = {x: UNIT_TIMES.get(x, 0) for x in TIMED}
            slots |= {letters: kind["slot"] for letters, kind in self.rules.kinds.items()}
            seconds = {letters: [slot] * length for letters, slot in slots.items()}
            links = NO_LINKS | {"host_links": self.links["host_links"], "has_rendezvous": False}
            self._unit = Run(self.table, links, seconds, is_unit=True)
        return self._unit.end[cell]

    def duration(self, cell: list[TableOp]) -> float:
        """Return the duration of the op or fused pair in a cell [s]."""
        seconds, (_, stage, microbatch) = self.seconds, cell[0]
        if len(cell) == 2 and "pair" in seconds:
            return at_microbatch(seconds["pair"][stage], microbatch)
        times = [  # `place` is a stage such as 2, or a text such as "worker 2"
            at_microbatch(seconds[letters][int(str(place).removeprefix("worker "))], m)
            if letters in seconds
            else 0.0
            for letters, place, m in cell
        ]
        if len(cell) == 2 and "pair_factor" in seconds:
            factor = at_microbatch(seconds["pair_factor"][stage], microbatch)
            return max(times) + factor * min(times)
        return float(sum(times))

    def _add_rows(self) -> None:
        """Add the executed cells; each waits for the previous cell of its row on the same lane."""
        skipped = COMMUNICATION if self.links["has_rendezvous"] else COMMUNICATION + WAIT_SEND
        self.previous: dict[Cell, Event | None] = {}  # for each cell: the compute cell before it
        self.next_op: dict[Event, Event] = {}  # for each op: the next op of its row
        self.last: dict[Any, Event] = {}  # last cell on compute, by worker
        self.last_op: dict[int, Event] = {}  # by worker: last op of the row so far
        # REDUCE_GRAD cells on a lane, by stage and worker
        self.reduced: dict[tuple[int, int], list[Cell]] = defaultdict(list)
        for worker, row in enumerate(self.table.rows):
            # the last cell so far on each lane, and of each pair of letters and stage
            self.lane_cell: dict[str, Event] = {}
            self.stage_cell: dict[tuple[str, int], Event] = {}
            for slot, cell in enumerate(row):
                event = Cell(worker, slot)
                self.previous[event] = self.lane_cell.get("compute")
                if cell and cell[0].letters not in skipped:
                    self._add_cell(event, cell)
            if "compute" in self.lane_cell:
                self.last[worker] = self.lane_cell["compute"]

    def _add_cell(self, event: Cell, cell: list[TableOp]) -> None:
        """Add an executed cell, which waits for earlier cells of its row on the same lane."""
        worker, (letters, stage, _) = event.worker, cell[0]
        lane, previous = self.rules.lane(letters), self.previous[event]
        self.durations[event] = self.duration(cell)
        self._wait(event, previous if lane == "host" else self.lane_cell.get(lane))
        for op in cell:
            needs = [(letters, op.stage) for letters in self.rules.stage_cells(op.letters)]
            self._wait(event, *map(self.stage_cell.get, needs))
        if letters in self.rules.lanes:
            self._wait(event, previous)
            self.stage_cell[letters, stage] = event
            if letters == "REDUCE_GRAD":
                self.reduced[stage, worker].append(event)
        if lane == "compute" and self.rules.is_row_op(letters):
            if worker in self.last_op:
                self.next_op[self.last_op[worker]] = event
            self.last_op[worker] = event
        self.lane_cell[lane] = event

    def _add_host_links(self) -> None:
        """Queue offloads and loads on each host link, ordered by slot, then by worker."""
        groups = {worker: group for group in self.links["host_links"] for worker in group}
        for op, (worker, slot) in self.table.cell.items():
            if self.rules.lane(op.letters) == "host":
                queue = "host", *groups.get(worker, (worker,))
                self.queues[queue].append(((slot, worker), (worker, slot)))

    def _add_step_end(self) -> None:
        """Add gradient all-reduces (A) and optimizer updates (U), if any of them takes time."""
        updates = (update if depth(update) else [update] for update in self.seconds["U"])
        times = [*self.seconds["A"], *chain.from_iterable(updates)]
        if any(times) and self.table.has_updates:
            self._add_listed_updates()
        elif any(times):
            self._add_default_updates()

    def _add_listed_updates(self) -> None:
        """Add an all-reduce before each update that is a cell of the table."""
        cells = self.table.cell
        for update, last_gradient in self.table.last_gradient.items():
            reduction = update._replace(letters="A")
            self.durations[reduction] = float(self.seconds["A"][update.stage])
            self._wait(reduction, cells[last_gradient])
            self._wait(cells[update], reduction)
            # queues are sorted by the first item
            self.queues["A", cells[update].worker].append((cells[last_gradient], reduction))

    def _add_default_updates(self) -> None:
        """Add one all-reduce per stage, and one update per stage and worker."""
        # An all-reduce waits for the last gradient of its stage on each worker with this stage. An
        # update waits for the all-reduce of its stage, and for the last op of its worker.
        last_gradient: dict[tuple[int, int], Cell] = {}  # by stage and worker
        first_microbatch: dict[tuple[int, int], int] = {}
        for (letters, stage, microbatch), cell in self.table.cell.items():
            key = stage, cell.worker
            if self.rules.is_gradient(letters):
                last_gradient[key] = max(cell, last_gradient.get(key, cell))
            if microbatch >= 0:
                first_microbatch[key] = min(microbatch, first_microbatch.get(key, microbatch))
        for stage in sorted({stage for stage, _ in last_gradient}):
            workers = [worker for copy_stage, worker in last_gradient if copy_stage == stage]
            self._add_reduction(stage, workers, [last_gradient[stage, w] for w in workers])
        for (stage, worker), _ in sorted(last_gradient.items(), key=itemgetter(1)):
            update, microbatch = ("U", stage, worker), first_microbatch[stage, worker]
            self.durations[update] = at_microbatch(self.seconds["U"][stage], microbatch)
            self._wait(update, self.last[worker], ("A", stage, -1))
            self.next_op[self.last_op[worker]] = update
            self.last[worker] = self.last_op[worker] = update

    def _add_reduction(self, stage: int, workers: list[int], gradients: list[Cell]) -> None:
        """Add the all-reduce of a stage, which waits for the last gradient on each worker."""
        reduction = "A", stage, -1
        self.durations[reduction] = float(self.seconds["A"][stage])
        cells = [*gradients, *(cell for w in workers for cell in self.reduced[stage, w])]
        self._wait(reduction, *cells)
        end = max(map(self.unit_end, cells))
        for worker in workers:
            self.queues["A", worker].append(((end, stage), reduction))
        pairs = [(a, b) for a in workers for b in workers if a != b]
        for group in {group for pair in pairs for group in self._shared_groups(*pair)}:
            self.queues[group].append(((end, len(self.table.rows), stage), reduction))

    def _shared_groups(self, sender: int, receiver: int) -> list[Event]:
        """List the groups of shared links to which the link from sender to receiver belongs."""
        shared = self.links["shared_links"]
        if shared == "pairs":
            return [("shared", *sorted((sender, receiver)))]
        return [("shared", k) for k, group in enumerate(shared) if [sender, receiver] in group]

    def _add_inputs(self) -> None:
        """Let ops wait for their inputs; inputs from another worker arrive as messages."""
        cells = self.table.cell
        # by (producer, cell, stage of the consumer), because one message serves all ops of a stage
        # in a cell
        consumers_by_message: dict[Any, list[tuple[int, int, TableOp]]] = defaultdict(list)
        for op, cell in cells.items():
            for producer, has_message, rule in self.table.inputs(op):
                if self.is_unit or not has_message or cells[producer].worker == cell.worker:
                    self._wait(cell, cells[producer])
                else:
                    key = producer, cell, op.stage
                    consumers_by_message[key].append((rule, op.microbatch, op))
        for (producer, *_), consumers in consumers_by_message.items():
            rule, _, op = min(consumers)
            self._add_message(producer, op, rule)
        for op, cell in cells.items():
            message = self.messages.get(awaited_op(op)) if op.letters in WAIT_SEND else None
            if message is not None and message.model == "rendezvous":
                self._wait(cell, awaited_op(op))

    def _add_message(self, producer: TableOp, op: TableOp, rule: int) -> None:
        """Add the message from a producer to an op that waits for it by the rule with a number."""
        # Messages on a link are sorted by `rank`, messages in any other queue by `key`.
        source, target = self.table.cell[producer], self.table.cell[op]
        sender, receiver = source.worker, target.worker
        route = self.rules.route(producer.stage, op.stage)
        assert route is not None  # stages that exchange messages have an edge
        direction, boundary = route
        microbatch = producer.microbatch
        pipe = self.table.pipes[microbatch]
        latency, transmit = (
            at_microbatch(self.seconds[key][direction][pipe][boundary], microbatch)
            for key in ("latency", "transmit")
        )
        event, name = self._name_message(producer, op, "FB"[direction])
        model = self._model(sender, receiver, transmit)
        has_link = model in ("queued", "blocking")
        lag = latency if has_link else 0.0
        self.messages[event] = TableMessage(sender, receiver, model, lag, name, target)
        self.durations[event] = transmit if has_link else latency + transmit
        self._wait(event, source)
        self.waits[target].append((event, lag))
        if model == "blocking" and source in self.next_op:
            self._wait(self.next_op[source], event)
        shared_links = [] if model == "delay" else self._shared_groups(sender, receiver)
        rank = source.slot, direction, op.stage, rule, op.microbatch
        key = (self.unit_end(source), sender, producer.stage, microbatch, *rank)
        for group in shared_links:
            self.queues[group].append((key, event))
        if has_link and not shared_links:
            self.queues["link", sender, receiver].append((rank, event))
        if model == "rendezvous":
            self._add_rendezvous(event, message_cells(producer, op), direction, key)

    def _name_message(self, producer: TableOp, op: TableOp, letter: str) -> tuple[Event, str]:
        """Return the event and the name of a message: its SEND, or producer and consumer."""
        if self.rules.is_usual:
            send, _ = message_cells(producer, op)
            return send, f"{producer.stage}SEND_{letter}{producer.microbatch}"
        target = self.table.cell[op]
        cell_ops = self.table.rows[target.worker][target.slot]
        first = next(cell_op for cell_op in cell_ops if cell_op.stage == op.stage)
        name = f"{self.rules.op_text(producer)} to {self.rules.op_text(first)}"
        return (producer, target, op.stage), name

    def _add_rendezvous(
        self, event: Event, ops: tuple[TableOp, TableOp], direction: int, key: Event
    ) -> None:
        """Add a message to a queue of its sender and to one of its receiver."""
        # SEND and RECV cells (`ops`) order the queues; without such cells, `key` does.
        workers = self.messages[event].sender, self.messages[event].receiver
        for op, worker, other in zip(ops, workers, workers[::-1], strict=True):
            scope = {"worker": (), "pair": (other,), "direction": (direction,)}
            queue = "queue", worker, *scope[self.links["queues"]]
            cell = self.table.cell[op] if self.table.has_communication else None
            self.queues[queue].append((key if cell is None else cell, event))
            if cell is not None and self.links["posting"] == "program":
                self._wait(event, self.previous[cell])

    def _model(self, sender: int, receiver: int, transmit: float) -> str:
        """Return the link model of a message; small messages under rendezvous are `queued`."""
        pairs = self.links["pairs"]
        back = pairs.get((receiver, sender), self.links["model"])
        model = str(pairs.get((sender, receiver), back))
        is_small = model == "rendezvous" and transmit < self.links["eager_below"]
        return "queued" if is_small else model

    def _join_collectives(self) -> None:
        """Let each cell of a collective op wait for the inputs of all its cells."""
        groups = defaultdict(list)
        for (letters, _, microbatch), cell in self.table.cell.items():
            if self.rules.is_collective(letters):
                groups[letters, microbatch].append(cell)
        for cells in groups.values():
            waits = [wait for cell in cells for wait in self.waits[cell]]
            self.waits.update(dict.fromkeys(cells, waits))

    def _run(self) -> None:
        """Compute start and end of each event, and the event that it waits for longest."""
        self.start: dict[Event, float] = {}
        self.end: dict[Event, float] = {}
        self.last_wait: dict[Event, Event] = {}
        remaining = {event: len(self.waits[event]) for event in self.durations}
        followers = defaultdict(list)
        for event in remaining:
            for other, _ in self.waits[event]:
                followers[other].append(event)
        ready = [event for event, count in remaining.items() if not count]
        for event in ready:
            start = 0.0
            for other, lag in self.waits[event]:
                arrival = self.end[other] + lag
                if arrival > start or event not in self.last_wait:
                    start, self.last_wait[event] = arrival, other
            self.start[event], self.end[event] = start, start + self.durations[event]
            for other in followers[event]:
                remaining[other] -= 1
                if not remaining[other]:
                    ready.append(other)
        if len(self.end) < len(self.durations):
            raise DeadlockError(self, self._cycle())

    def _cycle(self) -> list[Event]:
        """Return a list of events in which each waits for the next, and the last for the first."""
        event = next(event for event in self.durations if event not in self.end)
        path: list[Event] = []
        while event not in path:
            path.append(event)
            event = next(other for other, _ in self.waits[event] if other not in self.end)
        return path[path.index(event) :]

    def letters(self, event: Event) -> str:
        """Return the letters of the op in a cell, or "" if the event is not a cell."""
        if not isinstance(event[0], int):
            return ""
        worker, slot = event
        return self.table.rows[worker][slot][0].letters

    def worker_events(self, worker: int) -> list[Event]:
        """List the executed compute cells of a worker, then its updates at the end of the step."""
        cells = (event for event in self.end if event[0] == worker and self.letters(event))
        events = [event for event in cells if self.rules.lane(self.letters(event)) == "compute"]
        return events + [event for event in self.end if event[0] == "U" and event[2] == worker]

    def is_span_op(self, event: Event) -> bool:
        """Return whether the span of a worker may begin or end with an event."""
        letters = self.letters(event)
        if letters in SHARDING + WAIT_SEND:
            return False
        return not letters or self.rules.scope(letters) != "stage"

    def name(self, event: Event) -> str:
        """Return the name that certificates use for an event."""
        if event in self.messages:
            message = self.messages[event]
            return f"{message.name} (worker {message.sender} to {message.receiver})"
        if event[0] == "A":
            _, stage, microbatch = event  # microbatch -1: an all-reduce of the whole stage
            return f"{stage}A{microbatch}" if microbatch >= 0 else f"{stage}A"
        if event[0] == "U":
            _, stage, worker = event
            return f"{stage}U (worker {worker})"
        worker, slot = event
        ops = map(self.rules.op_text, self.table.rows[worker][slot])
        return f"{';'.join(ops)} (worker {worker}, slot {slot})"


def by_worker(values: Iterable[Any]) -> dict[str, Any]:
    """Return {"worker 0": value, ..}, as in a certificate."""
    return {f"worker {worker}": value for worker, value in enumerate(values)}
