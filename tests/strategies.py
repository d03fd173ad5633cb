"""Hypothesis: random legal tables, random costs, random small graphs."""

import dataclasses
from typing import NamedTuple

import numpy as np
import reference
from hypothesis import strategies as st

import pipejax as pj
from pipejax.costs.costs import PHASE_FIELDS
from pipejax.schedules.table.links import LINKS

SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
TIMES = st.integers(0, 40).map(lambda k: k / 8)  # dyadic: sums are exact, ties happen


class Case(NamedTuple):
    """A table with costs, for the library and for the reference."""

    table: pj.ScheduleTable
    rows: list
    costs: pj.Costs
    theirs: reference.Costs


class Choices(NamedTuple):
    """Cells of a table besides forwards."""

    splits: np.ndarray
    recomputes: np.ndarray
    offloads: np.ndarray
    fuse: bool


@st.composite
def tables(
    draw,
    communication=False,
    max_workers=4,
    max_microbatches=5,
    max_pipes=2,
    offloads=True,
    sharding=False,
):
    workers = draw(st.integers(1, max_workers))
    stages = draw(st.integers(workers, 2 * workers + 1))
    microbatches = draw(st.integers(1, max_microbatches))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    pipes = draw(st.integers(1, max_pipes))
    placement = np.stack(
        [
            rng.permutation(
                np.concatenate([np.arange(workers), rng.integers(0, workers, stages - workers)])
            )
            for _ in range(pipes)
        ]
    )
    microbatch_pipes = rng.integers(0, pipes, microbatches)
    # every worker needs an op: pipe 0 reaches all of them, so give it the first microbatch
    microbatch_pipes[0] = 0
    splits = rng.random((stages, microbatches)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    recomputes = rng.random((stages, microbatches)) < draw(st.sampled_from([0.0, 0.3]))
    share = draw(st.sampled_from([0.0, 0.3, 1.0])) if offloads else 0.0
    out = rng.random((stages, microbatches)) < share
    does = Choices(splits, recomputes, out, draw(st.booleans()))
    rows = _run(rng, placement, microbatch_pipes, does, communication)
    if draw(st.integers(0, 3)) == 0:
        rows = [with_updates(rng, row) for row in rows]
    if communication and draw(st.booleans()):
        rows = [_with_waits(rng, row) for row in rows]
    if sharding and draw(st.booleans()):
        rows = [_with_sharding(rng, row) for row in rows]
    for row in rows:  # idle cells mean order only
        for place in sorted(rng.integers(0, len(row) + 1, rng.integers(0, 3)), reverse=True):
            row.insert(int(place), "")
    where = {"placement": placement, "pipe_of_microbatch": microbatch_pipes}
    table = pj.ScheduleTable.from_rows(rows, **where, name="random")
    return table, rows


@st.composite
def host_links(draw, workers):
    """Draw groups of workers that share a host link: often none."""
    if draw(st.booleans()):
        return []
    order = draw(st.permutations(range(workers)))
    cut = draw(st.integers(1, workers))
    return [group for group in (order[:cut], order[cut:]) if group]


@st.composite
def carried(draw, link, workers):
    """Draw what else `pj.Links` and the reference take: posting, shared links and models of pairs."""
    result = {}
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    if pairs and draw(st.booleans()):
        pair_models = st.dictionaries(st.sampled_from(pairs), st.sampled_from(LINKS), min_size=1)
        result["pair_links"] = sorted(draw(pair_models).items())
    models = {link, *(model for _, model in result.get("pair_links", ()))}
    if "rendezvous" in models and draw(st.booleans()):
        result["posting"] = "program"
    if "rendezvous" in models and draw(st.booleans()):
        result["eager_below"] = draw(st.integers(1, 20)) / 8
    if models != {"delay"} and pairs and draw(st.booleans()):
        groups = st.lists(st.lists(st.sampled_from(pairs), min_size=1, unique=True), min_size=1)
        result["shared_links"] = draw(st.just("pairs") | groups)
    return result


def _with_waits(rng, row):
    """Put waits for some SENDs anywhere behind them."""
    waits = []
    for place, cell in enumerate(row):
        for phase, stage, microbatch in reference.split(cell) if cell else []:
            if phase.startswith("SEND") and rng.random() < 0.5:
                wait = f"{stage}WAIT_{phase}{microbatch}"
                waits.append((rng.integers(place, len(row)) + 1, wait))
    row = list(row)
    for place, wait in sorted(waits, reverse=True):
        row.insert(place, wait)
    return row


def with_updates(rng, row):
    """Apply the gradients of a row in U cells: now and then, and at the end what is left."""
    updated, pending = [], {}  # gradients by stage that no update has applied yet

    def update(stage):
        updated.append(f"{stage}U{rng.choice(pending.pop(stage))}")

    for cell in row:
        updated.append(cell)
        for phase, stage, microbatch in reference.split(cell) if cell else []:
            if phase in ("B", "W"):
                pending.setdefault(stage, []).append(microbatch)
        for stage in [stage for stage in pending if rng.random() < 0.4]:
            update(stage)
    for stage in list(pending):
        update(stage)
    return updated


def _with_sharding(rng, row):
    """Put what serves a stage as a whole anywhere in the row of its worker, some of it twice."""
    stages = sorted({stage for cell in row for _, stage, _ in reference.split(cell)})
    row = list(row)
    for _ in range(rng.integers(0, 4)):
        cell = f"{rng.choice(stages)}{rng.choice(SHARDING)}"
        row.insert(rng.integers(0, len(row) + 1), cell)
    return row


def _phases(rng, split, recompute, offload):
    """Ops of a stage and microbatch in an order that they could have; a wait may come at any time."""
    phases = ["F", *["O", "L"] * bool(offload), *["R"] * bool(recompute)]
    phases += ["I", "W"] if split else ["B"]
    return phases + ["WAIT_O"] * bool(offload and rng.random() < 0.4)


def _run(rng, placement, microbatch_pipes, does, communication):
    """Append ready ops to rows until none is left."""
    stages, microbatches = does.splits.shape
    phases = {
        (s, m): _phases(rng, does.splits[s, m], does.recomputes[s, m], does.offloads[s, m])
        for s in range(stages)
        for m in range(microbatches)
    }
    rows = [[] for _ in range(placement.max() + 1)]
    done = set()
    home = lambda s, m: int(placement[microbatch_pipes[m], s])  # noqa: E731

    def is_ready(phase, s, m):
        if phase == "F":
            return s == 0 or ("F", s - 1, m) in done
        if phase in ("W", "O", "WAIT_O"):
            return ({"W": "I", "O": "F", "WAIT_O": "O"}[phase], s, m) in done
        if phase in ("R", "L"):
            return (phases[s, m][phases[s, m].index(phase) - 1], s, m) in done
        before = phases[s, m][phases[s, m].index(phase) - 1]
        above = s == stages - 1 or {("I", s + 1, m), ("B", s + 1, m)} & done
        return (before, s, m) in done and bool(above)

    while todo := [(p, s, m) for (s, m), ps in phases.items() for p in ps if (p, s, m) not in done]:
        ready = [op for op in todo if is_ready(*op)]
        phase, s, m = ready[rng.integers(len(ready))]
        ops = [(phase, s, m)]
        partners = [op for op in ready if op[0] in "BI" and home(*op[1:]) == home(s, m)]
        if does.fuse and phase == "F" and partners and rng.random() < 0.6:
            ops.append(partners[rng.integers(len(partners))])
        rows[home(s, m)].append(reference.cell_text(tuple(ops)))
        done |= set(ops)
        if communication:
            _send(rows, ops, phases, home, stages)
    return rows


def _send(rows, ops, phases, home, stages):
    """Insert SEND and RECV as soon as a message exists: an order that cannot deadlock."""
    for phase, s, m in ops:
        if phase == "F" and s < stages - 1 and home(s, m) != home(s + 1, m):
            rows[home(s, m)].append(f"{s}SEND_F{m}")
            rows[home(s + 1, m)].append(f"{s + 1}RECV_F{m}")
        if phase in "BI" and s > 0 and home(s, m) != home(s - 1, m):
            rows[home(s, m)].append(f"{s}SEND_B{m}")
            rows[home(s - 1, m)].append(f"{s - 1}RECV_B{m}")


@st.composite
def cases(draw, communication=False, pairs=False, step_end=False, by_microbatch=False, **options):
    """Draw a legal table and costs for it; `options` is what `tables` takes besides."""
    table, rows = draw(tables(communication=communication, **options))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step_end = step_end and draw(st.booleans())
    return price(table, rows, rng, pairs=pairs, step_end=step_end, by_microbatch=by_microbatch)


def price(table, rows, rng, pairs=False, step_end=False, by_microbatch=False):
    """Give a table random per-stage and per-link costs, some of them by microbatch."""
    stages, pipes = table.num_stages, table.num_pipes

    def values(*shape):
        if by_microbatch and rng.random() < 0.7:
            shape = *shape, table.num_microbatches
        return rng.integers(0, 40, shape) / 8

    names = ("forward", "backward", "input_grad", "weight_grad", "recompute", "offload")
    ops = {name: values(stages) for name in names}
    if rng.random() < 0.5:
        ops["load"] = values(stages)
    if any(text.endswith(SHARDING) for row in rows for text in row):
        ops |= {name.lower(): rng.integers(0, 40, stages) / 16 for name in SHARDING}
    if step_end:
        ops |= {name: rng.integers(0, 40, stages) / 4 for name in ("all_reduce", "update")}
    latency, transmit = values(2, pipes, stages - 1) / 4, values(2, pipes, stages - 1) / 2
    pair = values(stages) * 2 if pairs else None
    factor = [None, 0.0, 0.25, 1.0, 1.5][int(rng.integers(5))] if pair is None else None
    costs = pj.Costs(**ops, latency=latency, transmit=transmit, pair=pair, pair_factor=factor)
    ops.setdefault("load", ops["offload"])
    letters = {letter: ops[name] for letter, name in PHASE_FIELDS.items() if name in ops}
    links = np.ndindex(2, pipes, max(stages - 1, 0))
    where = list(links)
    theirs = reference.Costs(
        {(p, s): v[s].tolist() for p, v in letters.items() for s in range(stages)},
        {k: latency[k].tolist() for k in where},
        {k: transmit[k].tolist() for k in where},
        {} if pair is None else dict(enumerate(pair.tolist())),
        factor,
    )
    return Case(table, rows, costs, theirs)


def padded(program, *, num_nodes, max_preds):
    """A program with nodes and predecessors that change nothing: one compiled shape for many."""
    rest = dict.fromkeys(("stage", "microbatch", "pipe", "worker", "sender", "receiver"), -1)
    rest |= dict.fromkeys(("preds", "lag_index", "duration_index", "phase"), 0)
    nodes, preds = (program.num_nodes, num_nodes), (program.max_preds, max_preds)
    widths = [(0, expected - size) for size, expected in (nodes, preds)]
    longer = {
        name: np.pad(array, widths[: array.ndim], constant_values=value)
        for name, value in rest.items()
        for array in [np.asarray(getattr(program, name))]
    }
    return dataclasses.replace(program, **longer)
