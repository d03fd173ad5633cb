"""The reference of the tests: the run of the checker, which shares no code with the engine."""

import json
import re
from dataclasses import dataclass, field

import pipejax as pj
from pipejax.checker import claims, run as events
from pipejax.checker.prices import NO_LINKS, read_links
from pipejax.checker.rules import LETTERS, SHARDING, TIMED, TableRules
from pipejax.checker.run import DeadlockError
from pipejax.checker.table import CellReader, Table
from pipejax.checker.values import IllegalError
from pipejax.schedules.table.table_files import from_json, to_json

__all__ = ["LETTERS", "SHARDING", "DeadlockError", "IllegalError"]
OP = re.compile(r"(\d*)([A-Z][A-Za-z_]*?)(\d*)(?=[;)]|$)")


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


def split(text):
    """'(0F1;2B0)OVERLAP_F_B' -> [('F', 0, 1), ('B', 2, 0)]; sharding cells have microbatch None."""
    ops = OP.findall(text.replace("OVERLAP_F_B", "").strip())
    return [(x, int(s) if s else None, int(m) if m else None) for s, x, m in ops]


def cell_text(cell):
    """Inverse of `split`."""
    ops = [f"{stage}{phase}{'' if m is None else m}" for phase, stage, m in cell]
    return f"({';'.join(ops)})OVERLAP_F_B" if len(ops) == 2 else ops[0]


def parsed(rows):
    """Ops of each worker from texts of usual cells or of kinds, as the checker writes ops."""
    return [
        [
            (x, f"worker {w}" if s is None else s, -1 if m is None else m)
            for text in row
            for x, s, m in split(text)
        ]
        for w, row in enumerate(rows)
    ]


def texts(table):
    return [[str(op) for cell in row for op in cell] for row in table.rows()]


def table_data(rows, microbatch_pipes, grammar=None):
    """A table as JSON has it: each stage of a pipe is where its first op stands."""
    data = {"format": "pipejax-table", "version": 1, "name": "", "slots": {}, "stage_shares": []}
    data |= grammar or {}
    reader = CellReader(TableRules(data))
    ops = [(op, w) for w, row in enumerate(rows) for x in row for op in reader.read_cell(x, w)]
    stages = 1 + max(s for (_, s, _), _ in ops if isinstance(s, int))
    pipes = [{} for _ in range(1 + max(microbatch_pipes, default=0))]
    for (_, stage, m), worker in ops:
        if isinstance(stage, int) and m >= 0:
            pipes[microbatch_pipes[m]].setdefault(stage, worker)
    for (letters, stage, _), worker in ops:  # a pipe without microbatches may hold the stage
        if letters in SHARDING and all(pipe.get(stage) != worker for pipe in pipes):
            pipes.append({stage: worker})
    placement = [[pipe.get(stage, 0) for stage in range(stages)] for pipe in pipes]
    placement = data.get("placement", placement)
    return data | {"rows": rows, "placement": placement, "pipe_of_microbatch": [*microbatch_pipes]}


def listed_seconds(costs, table):
    """Seconds as a certificate lists them; what is not given takes none."""
    stages, workers = range(table.num_stages), range(len(table.rows))
    places = dict.fromkeys((*TIMED, *table.rules.kinds), stages)
    scope = table.rules.scope
    places |= {x: [f"worker {w}" for w in workers] for x in places if scope(x) == "worker"}
    seconds = {x: [costs.op.get((x, place), 0.0) for place in at] for x, at in places.items()}
    boundaries = range(len(table.rules.graph) or table.num_stages - 1)
    for key in ("latency", "transmit"):
        options = getattr(costs, key)
        pipes = range(len(table.placement))
        seconds[key] = [
            [[options.get((way, p, k), 0.0) for k in boundaries] for p in pipes] for way in (0, 1)
        ]
    if costs.pair:
        seconds["pair"] = [costs.pair[stage] for stage in stages]
    if costs.pair_factor is not None:
        seconds["pair_factor"] = [costs.pair_factor] * table.num_stages
    return seconds


class Run(events.Run):
    """One execution of a table; start and end by (worker, slot), messages by their SEND."""

    def __init__(self, rows, pipes, costs, link="delay", queues="worker", host_links=(), **more):
        data = table_data([*map(list, rows)], pipes, more.pop("grammar", None))
        links = {"model": link, "queues": queues, "host_links": host_links, **more}
        is_posted, table, slots = more.get("posting") == "program", Table(data), None
        if is_posted and not table.has_communication and any(table.crossing()):
            try:
                with_cells = pj.links.insert_transfers(from_json(data), link=pj.Links(**links))
            except pj.ScheduleError:  # without messages it is a deadlock too
                links["posting"] = "early"
            else:
                data["rows"] = json.loads(to_json(with_cells))["rows"]
                table, slots = Table(data), _slots(rows, data["rows"])
        links = read_links(json.loads(json.dumps(NO_LINKS | links)), table, "links")
        super().__init__(table, links, listed_seconds(costs, table))
        workers = range(len(table.rows))
        self._busy = [sum(self.durations[e] for e in self.worker_events(w)) for w in workers]
        if slots is not None:
            for times in (self.start, self.end):
                moved = {cell: times.pop(cell) for cell in slots if cell in times}
                times |= {slots[cell]: time for cell, time in moved.items()}

    @property
    def makespan(self):
        return max(self.end.values())

    def busy(self):
        return self._busy

    def peak_in_flight(self):
        return [claims.peak_in_flight(row, self.rules) for row in self.table.rows]

    def held(self, sizes, weight_share, checkpoints):
        """Return memory curves of workers, [(moment, level)], by sizes and weight shares of stages."""
        memory = {"sizes": sizes, "weight_share": weight_share, "checkpoints": checkpoints}
        return [claims.memory_curve(self, memory, row) for row in range(len(self.table.rows))]


def _slots(before, after):
    """Slots of the cells of a table by those where SEND and RECV cells were put in."""
    result = {}
    for w, (old, new) in enumerate(zip(before, after, strict=True)):
        there = [k for k, text in enumerate(new) if text and not re.search("SEND|RECV", text)]
        here = [k for k, text in enumerate(old) if text.strip()]
        result |= {(w, k): (w, slot) for k, slot in zip(there, here, strict=True)}
    return result


def assert_runs(table, costs, waits):
    """A table's rules are those that a test writes down, and it runs as the checker runs it.

    `waits` names what an op waits for, each with whether a message leads from there.
    """
    read = Table(json.loads(to_json(table)))
    for op, (worker, _) in read.cell.items():
        crosses = lambda other: read.cell[other][0] != worker  # noqa: B023, E731
        rules = {(other, sent and crosses(other)) for other, sent, _ in read.inputs(op)}
        assert rules == {(other, sent and crosses(other)) for other, sent in waits(*op)}, op
    run = pj.evaluate(table, costs)
    assert pj.verify(pj.certificate(run)).problems == ()
    return run
