"""Random objects, a table with costs and links, and every door that says how long they take."""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import strategies
from hypothesis import assume, strategies as st
from legal_sizes import WHOLE, build
from test_explorer import run_of_page

import pipejax as pj
from pipejax.engine.steady_state import steady_state
from pipejax.plots.explorer.payload import Explored, payload

EXAMPLES = int(os.environ.get("EXAMPLES", "300"))
MANY = 5 if EXAMPLES < 1000 else 10  # costs of a set: what a table takes is paid once for all
NODES, PREDS, WORKERS = 512, 8, 4  # one compiled shape for all drawn programs
FAR = 2520 * 1000  # periods: a multiple of the cycle's own up to 10
QUARTERS = st.integers(2, 8).map(lambda k: k / 4)
LINKS = st.sampled_from(strategies.LINKS)
QUEUES = st.sampled_from(["worker", "pair", "direction"])
OPS = ("forward", "backward", "input_grad", "weight_grad", "recompute", "offload", "load")
STEP_END = ("all_reduce", "update")
MESSAGES = ("latency", "transmit")
PAIRS = ("pair", "pair_factor")
VALUES = {  # of a cost: seconds
    "unequal": lambda rng, shape: rng.integers(0, 41, shape) / 8,
    "ties": lambda rng, shape: rng.integers(1, 3, shape) / 1.0,
    "zeros": lambda rng, shape: rng.integers(0, 2, shape) * rng.integers(0, 9, shape) / 4,
    "no round numbers": lambda rng, shape: rng.random(shape) * (rng.random(shape) < 0.9),
}


class Set(NamedTuple):
    """One table, one setting of the links, several costs of equal shapes, and the same as a batch.

    `exact`: every sum of the costs is exact, in float32 too; `grown` gives the table of more
    microbatches; `padded` is the program in the shape that all drawn ones have.
    """

    table: pj.ScheduleTable
    links: pj.Links
    rows: list
    many: pj.Costs
    runs: list
    exact: bool
    grown: Callable | None
    padded: object

    @property
    def program(self):
        return self.runs[0].program

    @property
    def by_microbatch(self):
        return self.rows[0].per_microbatch()


# ------------------------------------------------------------------------------------ what is drawn
def _shape(field, table, by_microbatch, choice):
    """One of the shapes that a cost of the table may have, those by microbatch last."""
    stages, pipes, count = table.num_stages, table.num_pipes, table.num_microbatches
    if field in MESSAGES:
        boundaries = 2, pipes, stages - 1
        shapes = [(), (stages - 1,), boundaries, (*boundaries, count), (1, 1, 1, count)]
    elif field in (*STEP_END, *PAIRS):
        shapes = [(), (stages,), (stages,)]
    else:
        shapes = [(), (stages,), (stages,), (1, count), (stages, count)]
    return shapes[choice % (len(shapes) if by_microbatch else 3)]


def _leaves(rng, table, shared):
    """Leaves of a batch, the axis of its configurations first; `shared` fields are all alike."""
    draw = VALUES[str(rng.choice([*VALUES, "unequal"]))]
    fields = [*OPS, *MESSAGES, *(STEP_END if rng.random() < 0.5 else ())]
    if np.any(table.is_fused) and rng.random() < 0.7:
        fields.append(str(rng.choice(PAIRS)))
    leaves, by_microbatch = {}, rng.random() < 0.4
    # each shape of all costs is a program that JAX traces: most sets have one of a few
    choices = rng.integers(15, size=len(fields) if rng.random() < 0.3 else 1)
    for field, choice in zip(fields, np.resize(choices, len(fields)), strict=True):
        shape = _shape(field, table, by_microbatch, choice)
        sample = np.repeat(draw(rng, (1, *shape)), MANY, axis=0)
        leaves[field] = sample if field in shared else draw(rng, (MANY, *shape))
        if field in MESSAGES:
            leaves[field] = leaves[field] / 4
    if "update" in leaves:  # where no all-reduce and no update takes time both are left out
        leaves["update"] = leaves["update"] + 0.125
    return leaves, draw is not VALUES["no round numbers"]


@st.composite
def make_links(draw, table):
    """Draw links: the model, its queues, shared host links and what `carried` draws."""
    model = draw(LINKS)
    groups = draw(strategies.host_links(table.num_workers)) if table.offloads else ()
    more = draw(strategies.carried(model, table.num_workers))
    return pj.Links(model, draw(QUEUES), groups, **more)


@st.composite
def tables(draw):
    """Draw a table of the registry, and how it grows; sizes for which there is none are left out."""
    name = draw(st.sampled_from(WHOLE))
    workers = draw(st.integers(1, WORKERS))
    microbatches = draw(st.integers(1, 10) | st.integers(3 * workers, 5 * workers))
    try:
        table = build(name, workers, microbatches)
    except ValueError:
        assume(False)
    if not table.offloads and draw(st.integers(0, 3)) == 0:
        return pj.links.insert_transfers(table), None

    return table, lambda more: build(name, workers, microbatches + more)


@st.composite
def sets(draw):
    """Draw a set; orders of transfers that deadlock are left out."""
    table, grown = draw(tables())
    links = draw(make_links(table))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = {"transmit"} if links.eager_below else set()
    leaves, exact = _leaves(rng, table, shared)
    slow = draw(st.none() | st.lists(QUARTERS, min_size=WORKERS, max_size=WORKERS))
    rows = [pj.Costs(**{name: leaf[k] for name, leaf in leaves.items()}) for k in range(MANY)]
    if slow is not None:
        factors = slow[: table.num_workers]
        rows = [pj.costing.scaled_costs(row, table, workers=factors) for row in rows]
    try:
        runs = [pj.evaluate(table, row, link=links) for row in rows]
    except pj.ScheduleError:
        assume(False)
    nodes, preds = runs[0].program.preds.shape
    assume(nodes <= NODES and preds <= PREDS)
    many = jax.tree.map(lambda *leaf: np.stack(leaf), *rows)
    # JAX traces a program of another name or links anew, and no trace reads them
    unnamed = dataclasses.replace(runs[0].program, name="", links=pj.Links())
    padded = strategies.padded(unnamed, num_nodes=NODES, max_preds=PREDS)
    return Set(table, links, rows, many, runs, exact, grown, padded)


# ---------------------------------------------------------------------------------------- the doors
def alone(costs):
    """One configuration as a batch of one."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], costs)


def _finish_times(options):
    for row, run in zip(options.rows, options.runs, strict=True):
        finish = np.asarray(pj.finish_times(options.padded, row))
        assert np.array_equal(finish[: len(run.node_finish)], run.node_finish)
        yield finish.max()


def _batch_of_one(options):
    for row in options.rows:
        yield from pj.makespans(options.program, alone(row), batch_size=1, unroll=False)


def _single_precision(options):
    single = jax.tree.map(lambda leaf: leaf.astype(np.float32), options.many)
    return pj.makespans(options.program, single, batch_size=MANY, unroll=False)


def _counts(options):
    """The sum of counts times costs is the makespan; so is the value beside them."""
    values, counts = pj.makespans_and_grad(options.program, options.many, batch_size=MANY)
    products = jax.tree.map(lambda n, x: (n * x).reshape(MANY, -1).sum(1), counts, options.many)
    if options.rows[0].pair_factor is None:  # a time that is no sum of costs
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), values, rtol=1e-12, atol=1e-12)
    return values


def _corners(options):
    program, none = options.padded, [0] * WORKERS  # workers that there are not end at the source
    last = np.append(program.last_node, none)[:WORKERS]
    named = {f"costs {k}": row for k, row in enumerate(options.rows)}
    return pj.analysis.corners(dataclasses.replace(program, last_node=last), named).makespan


def _formula(options):
    """The closed form along each of the costs, and along its messages and all else apart."""
    for row, run in zip(options.rows, options.runs, strict=True):
        sent = {name: getattr(row, name) for name in MESSAGES}
        free = {name: 0 * leaf for name, leaf in vars(row).items() if leaf is not None}
        parts = {
            "messages": pj.Costs(**{**free, **sent}),
            "others": dataclasses.replace(row, **{name: 0 * leaf for name, leaf in sent.items()}),
        }
        value = float(pj.formula(run.program, {"all": row})(all=1.0))
        assert float(pj.formula(run.program, parts)(messages=1.0, others=1.0)) == value
        yield value


def _certificate(options):
    for run in options.runs:
        verdict = pj.verify(pj.certificate(run))
        # what is held is a sum of shares of activations, which need not end at 0 to the last bit
        wrong = [p for p in verdict.problems if not abs(p.claimed - p.derived) <= 1e-12]
        assert not wrong, wrong
        yield verdict.makespan


def _trace(options):
    for run in options.runs:
        events = json.loads(pj.files.chrome_trace(run))["traceEvents"]
        ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
        yield max(ends, default=0.0) / 1e6


def _explorer(options):
    """Write a page of the first costs: it looks for closed forms under all link models."""
    scene = payload([Explored(options.runs[0])], unit="s")
    factors = [factor["initial"] for factor in scene["factors"]]
    finish, *_ = run_of_page(scene["schedules"][0], factors, options.links.model)
    return [finish.max()]


def _jitter(options):
    """Without variance, of the first of the costs."""
    table, costs, links = options.table, options.rows[0], options.links
    return pj.jitter(table, costs, pj.analysis.Jitter(), samples=1, link=links).makespans


def _periods(options):
    """As it is, grown by periods, and what each further microbatch takes, of the first costs."""
    program, costs = options.program, options.rows[0]
    step = steady_state(program).microbatches

    def far(more):
        count = options.table.num_microbatches + more
        how = {"num_microbatches": count, "batch_size": 1}
        return pj.analysis.extrapolated_makespans(program, alone(costs), **how).item()

    slope = (far(2 * FAR * step) - far(FAR * step)) / (FAR * step)
    result = pj.cycle_time(program, alone(costs), batch_size=1).item()
    assert abs(result - slope) <= 1e-9 * max(1.0, result)
    if options.grown is not None:
        longer = pj.evaluate(options.grown(step), costs, link=options.links).makespan
        assert abs(far(step) - longer) <= 1e-12 * max(1.0, longer)
    return [far(0)]


class Door(NamedTuple):
    """A way to the seconds of a set, one for each of its costs or of the first ones."""

    seconds: Callable
    rounding: float = 1e-12
    off: float = 0.0
    applies: Callable = lambda arguments: True


def _has_period(options):
    if options.by_microbatch or options.links.eager_below:
        return False
    try:
        steady_state(options.program)
    except ValueError:
        return False
    return True


DOORS = {
    "makespan": Door(lambda x: [float(pj.makespan(x.padded, row)) for row in x.rows]),
    "finish_times": Door(_finish_times, rounding=0.0),
    "makespans": Door(lambda x: pj.makespans(x.program, x.many, batch_size=MANY, unroll=False)),
    "makespans of one": Door(_batch_of_one),
    "makespans in float32": Door(_single_precision, rounding=NODES * 2.0**-24),
    "makespans_and_grad": Door(_counts),
    "corners": Door(_corners),
    "first path": Door(lambda x: [pj.analysis.longest_paths(run, 1)[0].length for run in x.runs]),
    "formula": Door(
        _formula,
        applies=lambda x: x.exact and not x.links.eager_below and x.rows[0].pair_factor is None,
    ),
    "certificate": Door(_certificate),
    "trace": Door(_trace, rounding=1e-9, off=2e-9),
    "explorer": Door(_explorer, applies=lambda x: not x.links.eager_below),
    "jitter": Door(_jitter, rounding=0.0),
    "periods": Door(_periods, off=1e-12, applies=_has_period),
}
