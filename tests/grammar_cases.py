"""Hypothesis: random grammars, tables that follow them, and costs; most tables can run."""

import copy
import dataclasses
from typing import NamedTuple

import numpy as np
import reference
import strategies
from hypothesis import strategies as st
from reference import SHARDING, IllegalError

import pipejax as pj
from pipejax.checker.rules import TableOp, TableRules
from pipejax.checker.table import CellReader
from pipejax.costs.costs import MESSAGE_FIELDS, PHASE_FIELDS
from pipejax.schedules.table.table_files import from_json

LETTERS = ["Fa", "Fb", "N", "BW", "Ga", "S", "T", "WAIT_X", "FB"]  # some begin as usual ones do
LANES = ["compute"] * 5 + ["net"] * 3 + ["dma"] * 2
OWNERS = ["microbatch"] * 8 + ["worker"] * 3 + ["copy", "stage"]
ORDER = {"F": 0, "O": 1, "L": 2, "R": 3, "B": 10, "I": 10, "W": 20}  # of usual kinds
USUAL = ("F", "B", "I", "W", "R", "O", "L", "A", "U", *SHARDING)  # that have times here


class Case(NamedTuple):
    """A table as JSON has it, with costs for the library and for the reference.

    `arrays` has the costs by name; one pair factor is a number.
    """

    data: dict
    costs: pj.Costs
    theirs: reference.Costs
    arrays: dict

    @property
    def grammar(self):
        return Grammar(self.data)

    def table(self):
        return from_json(self.data)

    def run(self, link="delay", *queues, **links):
        """The table as the reference runs it, if it is one."""
        data = self.data
        more = {"grammar": data, **links}
        pipes = data["pipe_of_microbatch"]
        return reference.Run(data["rows"], pipes, self.theirs, link, *queues, **more)


class Grammar(TableRules):
    """Kinds and rules of a table, which list what an op waits for as far as it is there."""

    def __init__(self, data):
        super().__init__(data)
        self.reader = CellReader(self)

    def split(self, text):
        """Ops of a cell; those of a worker are of worker 0."""
        return self.reader.read_cell(text, 0)

    def waits(self, op, worker, table):
        yield from (p for p in self.usual_inputs(op) if p in table.op_cells)
        for p, *_ in self.added_inputs(op, worker, table.stages, table.microbatches):
            if p not in table.op_cells:
                raise IllegalError(f"{op} lacks {p}")
            yield p


class Table(NamedTuple):
    """Table that a rule is asked about: counts of stages and microbatches, and ops."""

    stages: int
    microbatches: int
    op_cells: dict


@dataclasses.dataclass
class Drawn:
    """Random numbers and sizes; `microbatches` are slices, `mode` says which usual kinds there are."""

    rng: np.random.Generator
    mode: str
    stages: int
    workers: int
    microbatches: int
    slices: int
    graph: list

    def often(self, chance):
        return self.rng.random() < chance

    def resolve_choice(self, values):
        return values[self.rng.integers(len(values))]


# ---------------------------------------------------------------------------------------- grammars
def _graph(d):
    """Edges of a graph of stages without a circle, whatever their numbers; some stages join two."""
    stages = list(range(d.stages))
    order = d.rng.permutation(stages).tolist() if d.often(0.3) else stages
    counts = [1 + d.often(0.4) for _ in range(1, d.stages)]
    pairs = [(d.rng.integers(k), k) for k, n in enumerate(counts, 1) for _ in range(n)]
    edges = {(order[source], order[k]) for source, k in pairs}
    return d.rng.permutation(sorted(edges)).tolist()


def _kinds(d):
    """Kinds by letters, with the items that they take and free."""
    count = d.rng.integers(2, 7) if d.mode == "own" else d.rng.integers(0, 5)
    items = d.resolve_choice([{}, {"kv": 0.5}, {"kv": 0.25, "weights": 2.0}])
    parts = ["activation", "for_w", "checkpoint", *items]
    kinds = {}
    for letters in d.rng.permutation(LETTERS)[:count].tolist():
        first = d.mode == "own" and not kinds  # says which microbatches there are
        scope = "microbatch" if first else d.resolve_choice(OWNERS)
        lanes = LANES + ["host"] * (scope == "microbatch")
        kind = {"letters": letters, "of": scope}
        kind["lane"] = "compute" if first else d.resolve_choice(lanes)
        if d.often(0.8):
            kind["time"] = f"of {letters}"
        if scope == "worker" and d.often(0.6):
            kind["together"] = True
        if scope == "microbatch" and d.often(0.2):
            kind["time"] = d.resolve_choice(["forward", "shared"])
        if d.often(0.3):
            kind["slot"] = int(d.rng.integers(1, 4))
        for moment in ("at_start", "at_end"):
            if d.often(0.3):
                names = [d.resolve_choice(parts) for _ in range(2)]
                kind[moment] = {name: int(d.rng.integers(-2, 3)) for name in names}
        kinds[letters] = kind
    return kinds, items


def _end(d, letters, scope, fixed):
    """The text of an end of a rule: of one place or microbatch in some of them."""
    number = str(d.rng.integers(d.microbatches // d.slices))
    number += f".{d.rng.integers(d.slices)}" if d.slices > 1 else ""
    if not d.often(fixed):
        return letters
    if scope == "worker":
        return letters + number
    places = [f"{letters}@first", f"{letters}@last", f"{d.rng.integers(d.stages)}{letters}{number}"]
    return d.resolve_choice(places)


def _rule(d, grammar, consumer, producer):
    """A rule by which ops of one kind wait for those of another, or for their own."""
    waits, built = grammar.scope(consumer), grammar.scope(producer)
    text = _end(d, consumer, waits, 0.25)
    slices = [f" (slice {k:+d})" for k in (-1, 1)] * (d.slices > 1)
    if consumer == producer:  # along the stages or the slices
        ways = slices + ["@-1", "@-1", "@+1", "@-2"][: 3 if d.graph else 4] * (built != "worker")
        which = d.resolve_choice(ways or [""])
    elif built != "worker" and (waits == "worker" or d.often(0.1)):
        producer, which = _end(d, producer, built, 1.0), ""
    else:
        ways = [""] * 4 + ["@-1", "@+1"] * 2 + [] if d.graph else ["@+2"]
        which = d.resolve_choice(ways) if "worker" not in (built, waits) else ""
        which += d.resolve_choice([""] * 7 + [" (all)"]) if not which else ""
        which += d.resolve_choice(slices) if slices and not which and d.often(0.3) else ""
    sends = "worker" not in (built, waits) and "@" in which + producer and d.often(0.7)
    return f"{text} <- {producer}{which}{' [message]' if sends else ''}"


def _rules(d, grammar):
    """Rules between kinds; of those of a stage as a whole none speaks."""
    usual = {"usual": [*ORDER], "forward": ["F", "O", "L", "R"], "own": []}[d.mode]
    worker_kinds = [letters for letters in grammar.kinds if grammar.scope(letters) != "stage"]
    order = {letters: ORDER[letters] for letters in usual}
    order |= {letters: d.rng.random() * 25 for letters in worker_kinds}
    pairs = []
    for letters in worker_kinds:
        before = [k for k in order if order[k] < order[letters]]
        later = [k for k in order if order[k] > order[letters]]
        pairs += [(letters, d.resolve_choice(before)) for _ in range(d.rng.integers(3)) if before]
        pairs += [(d.resolve_choice(later), letters) for _ in range(d.rng.integers(2)) if later]
        pairs += [(letters, letters)] * d.often(0.5)
    if len(order) > 1 and d.often(0.1):  # perhaps a circle
        pairs.append((d.resolve_choice([*order]), d.resolve_choice([*order])))
    return [_rule(d, grammar, *pair) for pair in pairs]


# ------------------------------------------------------------------------------------------ tables
def _ops(d, kinds):
    """Ops: (letters, stage or worker, microbatch); some kinds are not everywhere."""
    everywhere = [(s, m) for s in range(d.stages) for m in range(d.microbatches)]
    shares = [d.resolve_choice(values) for values in ([0.0, 0.5, 1.0], [0.0, 0.3], [0.0, 0.3])]
    result = []
    for s, m in everywhere if d.mode != "own" else []:
        splits, recomputes, offloads = map(d.often, shares)
        phases = ["F", *["O", "L"] * offloads, *["R"] * recomputes]
        phases += (["I", "W"] if splits else ["B"]) * (d.mode == "usual")
        result += [TableOp(phase, s, m) for phase in phases]
    for number, (letters, kind) in enumerate(kinds.items()):
        places = everywhere
        if kind["of"] == "worker":
            names = [f"worker {w}" for w in range(d.workers)]
            places = [(name, m) for name in names for m in range(d.microbatches)]
        share, only_last = d.resolve_choice([1.0, 1.0, 1.0, 0.7]), d.often(0.2)
        if d.mode == "own" and number == 0:
            share, only_last = 1.0, False
        there = [(p, m) for p, m in places if not only_last or p == places[-1][0]]
        if kind["of"] != "stage":
            result += [TableOp(letters, place, m) for place, m in there if d.often(share)]
    return result


def _holds(data, rule, table):
    """Return whether both ends of a rule exist wherever it speaks of them."""
    grammar = Grammar({**data, "rules": [rule]})
    try:
        grammar.check_rule(grammar.rules[-1], table.op_cells, table.stages, table.microbatches)
        for op in table.op_cells:
            for _ in grammar.waits(op, 0, table):
                pass
    except IllegalError:
        return False
    return True


def _rows(d, grammar, table, home, fuses):
    """Rows of cells in an order that they could have; None where there is none."""
    rows, done = [[] for _ in range(d.workers)], set()
    keys = {op: (op[0], op[2]) if grammar.is_collective(op[0]) else op for op in table.op_cells}
    waits, groups = {}, {}
    for op, key in keys.items():
        producers = {*grammar.waits(op, home(op), table)}
        waits.setdefault(key, set()).update(producers)
        groups.setdefault(key, []).append(op)
    while groups:
        ready = [key for key in groups if waits[key] <= done]
        if not ready:
            return None
        key = d.resolve_choice(ready)
        cells = [[op] for op in groups[key]]
        partners = [o for o in ready if o[0] in ("B", "I") and home(o) == home(cells[0][0])]
        if fuses and key[0] == "F" and partners and d.often(0.6):
            cells[0].append(d.resolve_choice(partners))
        for cell in cells:
            rows[home(cell[0])].append(_text(cell, d.slices))
            done |= {*cell}
            for op in cell:
                groups.pop(keys[op], None)
    return rows


def _text(cell, slices):
    """Inverse of `Grammar.split`."""
    ops = []
    for letters, place, m in cell:
        number = f"{m // slices}.{m % slices}" if slices > 1 else f"{m}"
        ops.append(f"{'' if isinstance(place, str) else place}{letters}{number}")
    return f"({';'.join(ops)})OVERLAP_F_B" if len(ops) == 2 else ops[0]


def _with_stages(d, grammar, placement, rows):
    """Put what serves a stage as a whole anywhere, some of it twice, and idle cells."""
    stage_kinds = [kind for kind in grammar.kinds if grammar.scope(kind) == "stage"]
    letters = [*SHARDING, *stage_kinds]
    if gathers := "UNSHARD" in grammar.lanes and d.often(0.95):
        letters = letters[2:]
    for w, row in enumerate(rows):
        held = [s for s in range(d.stages) if w in (pipe[s] for pipe in placement)]
        for s in held if gathers else []:
            _gather(d, grammar, row, s)
        for _ in range(d.rng.integers(3) if held and d.often(0.3) else 0):
            cell = f"{d.resolve_choice(held)}{d.resolve_choice(letters)}"
            row.insert(d.rng.integers(len(row) + 1), cell)
        for place in sorted(d.rng.integers(0, len(row) + 1, d.rng.integers(0, 3)), reverse=True):
            row.insert(int(place), "")


def _gather(d, grammar, row, stage):
    """Gather the weights of a stage before its ops, and drop them in some gaps, or never gather."""
    ops = [grammar.split(text) for text in row]
    served = [[place for x, place, _ in cell if grammar.stage_cells(x)] for cell in ops]
    used = [k for k, places in enumerate(served) if stage in places]
    if d.often(0.3):
        return
    puts, last = [], -1  # (place before which it stands, letters)
    for k in used:
        if last < 0:
            puts.append((d.rng.integers(k + 1), "UNSHARD"))
        elif d.often(0.3):
            drop = d.rng.integers(last + 1, k + 1)
            puts += [(drop, "RESHARD"), (d.rng.integers(drop, k + 1), "UNSHARD")]
        last = k
    if puts and d.often(0.5):
        puts.append((d.rng.integers(last + 1, len(row) + 1), "RESHARD"))
    for place, letters in reversed(puts):
        row.insert(place, f"{stage}{letters}")


def _spoil(d, rows):
    """Swap two cells, take one away, put one twice, or move one to another row."""
    row = d.resolve_choice(rows)
    if not row:
        return
    k, j = d.rng.integers(len(row), size=2).tolist()
    match d.rng.integers(6):
        case 0:
            row[k] = ""
        case 1:
            row.insert(j, row[k])
        case 2:
            d.resolve_choice(rows).append(row.pop(k))
        case _:
            row[k], row[j] = row[j], row[k]


def _placement(d, pipes):
    """Worker of each stage of each pipe; every worker has a stage of pipe 0."""
    more = d.stages - d.workers
    pipe_workers = [
        d.rng.permutation([*range(d.workers), *d.rng.integers(0, d.workers, more)]).tolist()
        for _ in range(pipes)
    ]
    pipes_by_microbatch = np.repeat(d.rng.integers(0, pipes, d.microbatches // d.slices), d.slices)
    pipes_by_microbatch[: d.slices] = 0
    return pipe_workers, pipes_by_microbatch.tolist()


def _table(d, pipes):
    """A table as JSON has it; nearly all can run, and some of the others are spoiled ones."""
    kinds, items = _kinds(d)
    data = {"format": "pipejax-table", "version": 1, "name": "random", "slots": {}}
    data |= {"stage_shares": [], "kinds": [*kinds.values()], "items": items, "slices": d.slices}
    data |= {"forward_only": d.mode == "forward", "graph": d.graph}
    moved = ["UNSHARD", "REDUCE_GRAD"][: d.rng.integers(1, 3)][:: d.resolve_choice([1, -1])]
    is_moved = d.often(0.4)
    data["lanes"] = {
        k: d.resolve_choice(["net", "dma"]) for k in moved if is_moved and d.often(0.8)
    }
    data["placement"], data["pipe_of_microbatch"] = _placement(d, pipes)
    table = Table(d.stages, d.microbatches, dict.fromkeys(_ops(d, kinds)))
    rules = [r for r in _rules(d, Grammar(data)) if _holds(data, r, table) or d.often(0.03)]

    def home(op):
        _, place, m = op
        in_pipe = data["placement"][data["pipe_of_microbatch"][m]]
        return int(place.removeprefix("worker ")) if isinstance(place, str) else in_pipe[place]

    fuses = d.often(0.5)
    while True:
        grammar = Grammar(data | {"rules": rules})
        try:
            rows = _rows(d, grammar, table, home, fuses)
        except IllegalError:
            rows = None
        is_order = rows is not None
        if rows is None and (not rules or d.often(0.1)):  # in any order
            rows = [[] for _ in range(d.workers)]
            for op in d.rng.permutation(len(table.op_cells)).tolist():
                op = [*table.op_cells][op]
                rows[home(op)].append(_text([op], d.slices))
        if rows is not None:
            break
        rules = rules[:-1]
    spoils = d.resolve_choice([0] * 6 + [1, 2])
    if d.mode == "usual" and is_order and not spoils and d.slices == 1 and d.often(0.2):
        rows = [strategies.with_updates(d.rng, row) for row in rows]
    _with_stages(d, grammar, data["placement"], rows)
    for _ in range(spoils):
        before = copy.deepcopy(rows)
        _spoil(d, rows)
        if _counted(grammar, rows) != len(data["pipe_of_microbatch"]):
            rows = before  # its costs are of as many microbatches
    return data | {"rules": rules, "rows": rows}


def _counted(grammar, rows):
    """Count the microbatches that workers compute."""
    ops = [op for row in rows for text in row if text for op in grammar.split(text)]
    counted = (m for letters, _, m in ops if letters in "FBIWR" or grammar.is_counted(letters))
    return 1 + max(counted, default=-1)


@st.composite
def cases(draw, by_microbatch=False, max_workers=4):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mode = draw(st.sampled_from(["usual", "usual", "forward", "own", "own"]))
    workers, slices = draw(st.integers(1, max_workers)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    stages = draw(st.integers(workers, workers + 2))
    microbatches = draw(st.integers(1, 4 if slices == 1 else 2)) * slices
    d = Drawn(rng, mode, stages, workers, microbatches, slices, [])
    d.graph = _graph(d) if draw(st.integers(0, 3)) == 0 else []
    return price(_table(d, draw(st.integers(1, 2))), rng, by_microbatch=by_microbatch)


def price(data, rng, *, by_microbatch=False):
    """Give a table random costs, with ties and zeros among them, exact in float32 too."""
    stages, workers = len(data["placement"][0]), len(data["rows"])
    count, edges = len(data["pipe_of_microbatch"]), len(data["graph"]) or stages - 1

    def values(*shape, often=by_microbatch):
        shape = (*shape, count) if often and rng.random() < 0.7 else shape
        return rng.integers(0, 40, shape) / 8 * (rng.random(shape) < 0.9)

    options = {}
    for letters, (name, scope) in get_fields(data).items():
        places = workers if scope == "worker" else stages
        if name not in options:
            is_wide = by_microbatch and scope != "stage" and letters != "A"
            options[name] = values(places, often=is_wide)
        if letters in ("A", "U") and rng.random() < 0.5:
            options[name] = options[name] * 0.0
    for name in MESSAGE_FIELDS:
        options[name] = values(2, len(data["placement"]), edges) / 4
    pair = values(stages) if any("OVERLAP" in x for row in data["rows"] for x in row) else None
    factor = None if pair is None else [0.0, 0.25, 1.5, None][rng.integers(4)]
    options["pair_factor"] = factor
    options["pair"] = pair if factor is None and rng.random() < 0.7 else None
    return priced(data, options)


def get_fields(data):
    """Name of the cost of each kind, and what it is of, by letters."""
    stage_letters = ("A", *SHARDING)
    result = {k: (PHASE_FIELDS[k], "stage" if k in stage_letters else "microbatch") for k in USUAL}
    added = data["kinds"]
    return result | {k["letters"]: (k.get("time", k["letters"]), k["of"]) for k in added}


def priced(data, options):
    """A table with costs by name, for the library and for the reference."""
    usual = {field.name for field in dataclasses.fields(pj.Costs)}
    added = {name: value for name, value in options.items() if name not in usual}
    costs = pj.Costs(**{name: options[name] for name in options if name in usual}, others=added)
    stages, workers = len(data["placement"][0]), len(data["rows"])
    op = {}
    for letters, (name, scope) in get_fields(data).items():
        names = [f"worker {w}" for w in range(workers)] if scope == "worker" else [*range(stages)]
        op |= {(letters, place): options[name][k].tolist() for k, place in enumerate(names)}
    sent = [
        {where: options[name][where].tolist() for where in np.ndindex(options[name].shape[:3])}
        for name in MESSAGE_FIELDS
    ]
    pair = options["pair"]
    pairs = {} if pair is None else dict(enumerate(pair.tolist()))
    theirs = reference.Costs(op, *sent, pair=pairs, pair_factor=options["pair_factor"])
    return Case(data, costs, theirs, options)


def again(case, rng):
    """Other costs of a table, of the same shapes; what is left out where it costs nothing stays so."""

    def other(name, value):
        if value is None:
            return None
        sample = rng.integers(0, 40, np.shape(value)) / 32 * (rng.random(np.shape(value)) < 0.9)
        return 2 * value if name in ("all_reduce", "update") else sample

    return priced(case.data, {name: other(name, value) for name, value in case.arrays.items()})
