"""Hypothesis: true certificates of every kind, of random legal tables and registered schedules."""

import dataclasses
import itertools
import json

import grammar_cases
import numpy as np
import strategies
from hypothesis import assume, strategies as st
from legal_sizes import WHOLE, build, is_legal

import pipejax as pj
from pipejax.checker.prices import read_links, read_memory, read_seconds
from pipejax.checker.table import Table
from pipejax.checker.verify import derive_bounds
from pipejax.schedules.table.links import LINK_MODELS, MEETING
from pipejax.search.schedule.initial_plans import greedy_plan
from pipejax.search.schedule.plan import to_table
from pipejax.search.schedule.problem import build_problem
from pipejax.search.schedule.store import certify

LINKS = [pj.Links(model) for model in LINK_MODELS if model not in MEETING]
LINKS += [pj.Links("rendezvous", queues=queues) for queues in ("worker", "pair", "direction")]
LINKS += [pj.Links("rendezvous", posting="program"), pj.Links("queued", shared_links="pairs")]
SIZES = [
    (name, p, m)
    for name, p, m in itertools.product(sorted(WHOLE), (1, 2, 3, 4), (1, 2, 3, 4, 6, 8))
    if is_legal(name, p, m)
]
SHARDING = ("unshard", "reshard", "reduce_grad", "wait_reduce_grad")
LETTERS = [name.upper() for name in SHARDING]
# what is done to drawn costs: all of them, or those that a coin picks
CHANGES = {
    "as drawn": lambda rng, value: value,
    "zero": lambda rng, value: 0.0 * value,
    "some zero": lambda rng, value: value * (rng.random() < 0.5),
    "rounding": lambda rng, value: rng.random(np.shape(value)),
    "tiny": lambda rng, value: value * 1e-9 / 3,
    "huge": lambda rng, value: value * 1e9 / 7,
}


def written(claimed):
    """A certificate as it is read from a file."""
    return json.loads(json.dumps(claimed))


@st.composite
def registered(draw):
    """A registered schedule of some size, as it is or with the cells that PyTorch puts in."""
    name, p, m = draw(st.sampled_from(SIZES))
    table = build(name, p, m)
    cells = draw(st.sampled_from(["", "", "plain", "pytorch"]))
    if not cells or table.updates_within or table.offloads:
        return table
    return pj.links.insert_transfers(table, lowering=cells if cells == "pytorch" else None)


@st.composite
def random_tables(draw):
    """A random legal table, with sharding cells anywhere in it."""
    table, rows = draw(strategies.tables(communication=draw(st.booleans())))
    if not draw(st.booleans()):
        return table
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [list(row) for row in rows]
    for _ in range(rng.integers(1, 5)):
        pipe, stage = (rng.integers(size) for size in table.placement.shape)
        row = rows[table.placement[pipe, stage]]
        row.insert(rng.integers(len(row) + 1), f"{stage}{LETTERS[rng.integers(4)]}")
    rest = {"placement": table.placement, "pipe_of_microbatch": table.pipe_of_microbatch}
    return pj.ScheduleTable.from_rows(rows, **rest, weights=table.weights)


@st.composite
def make_costs(draw, table):
    """Costs with ties, zeros, rounding, stragglers, microbatches of their own, fused pairs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = {name: draw(st.booleans()) for name in ("pairs", "step_end", "by_microbatch")}
    costs = strategies.price(table, [], rng, **kinds).costs
    sharding = {name: rng.integers(0, 9, table.num_stages) / 8 for name in SHARDING}
    costs = dataclasses.replace(costs, **sharding)
    change = CHANGES[draw(st.sampled_from(list(CHANGES)))]
    options = {f.name: getattr(costs, f.name) for f in dataclasses.fields(costs)}
    changed = {n: change(rng, np.asarray(v)) for n, v in options.items() if np.ndim(v)}
    costs = dataclasses.replace(costs, **changed)
    if draw(st.integers(0, 4)) == 0:
        slow = {int(rng.integers(table.num_workers)): 1 + rng.random()}
        try:
            return pj.costing.scaled_costs(costs, table, workers=slow)
        except ValueError:  # a stage has copies on several workers
            return costs
    return costs


@st.composite
def make_links(draw, workers):
    link = draw(st.sampled_from(LINKS))
    how = draw(strategies.carried(link.model, workers))
    how["queues"] = draw(st.sampled_from(["worker", "pair", "direction"]))
    how["host_links"] = draw(strategies.host_links(workers))
    return dataclasses.replace(link, **how)


@st.composite
def runs(draw):
    """A certificate of a run, with what may be claimed beside it."""
    table = draw(registered() | random_tables() | random_tables())
    return draw(get_claims(table, draw(make_costs(table)), draw(make_links(table.num_workers))))


def legal(case):
    """The table of a case and its costs, if it is one that can run."""
    try:
        return case.table(), case.costs
    except pj.ScheduleError:
        assume(False)


@st.composite
def get_claims(draw, table, costs, links):
    try:
        run = pj.evaluate(table, costs, link=links)
    except pj.ScheduleError:  # shared host links, or queues that cells order, can be a deadlock
        assume(False)
    memory = draw(get_memory(run))
    claims = {"offload": table.offloads or draw(st.booleans())}
    claims["objective"] = draw(st.sampled_from(["makespan", "span"]))
    if draw(st.booleans()):
        claims["limits"] = memory.peak * draw(st.sampled_from([1.0, 1.5]))
    if draw(st.booleans()):
        reached = run.max_span if claims["objective"] == "span" else run.makespan
        claims["lower_bounds"] = {"solver": reached / 2}
        claims["lower_bounds"] |= get_bounds(pj.certificate(run, memory=memory, **claims))
    return written(pj.certificate(run, memory=memory, **claims))


def get_bounds(claimed):
    """Return the derived bounds of random schedules without fused pairs and recomputation."""
    result = derived_bounds(claimed)
    cells = [text for row in claimed["table"]["rows"] for text in row]
    is_searched = not any("OVERLAP" in text or "R" in text for text in cells)
    kinds = result if is_searched else {"path"} & result.keys()
    return {kind: result[kind] for kind in kinds if np.isfinite(result[kind])}


def derived_bounds(claimed):
    """Lower bounds as the checker derives them."""
    costs, claim = written(claimed["costs"]), claimed["claim"]
    table = Table(written(claimed["table"]))
    links = read_links(costs["links"], table, "links")
    options = {"is_in_units": False, "has_bounds": True}
    seconds = read_seconds(costs["seconds"], table, "seconds", **options)
    memory = read_memory(costs["memory"], table, "memory")
    return derive_bounds(table, links, seconds, memory, claim)


@st.composite
def get_memory(draw, run):
    """Activation memory of sizes by stage, or by stage and microbatch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (run.stages, run.microbatches)[: draw(st.sampled_from([1, 1, 2]))]
    draws = [lambda: rng.choice([0, 0.25, 1], shape), lambda: rng.random(shape)]
    numbers = draw(st.sampled_from(draws))
    names = ("sizes", "weight_share", "checkpoints")
    options = {name: numbers() for name in names if draw(st.booleans())}
    return pj.analysis.activation_memory(run, **options)


@st.composite
def optima(draw):
    """A certificate of a solved problem: a plan that a heuristic made, and a bound."""
    name, p, m = draw(st.sampled_from([s for s in SIZES if s[0] in ("1f1b", "chimera", "hanayo")]))
    table = build(name, p, m)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stages = table.num_stages
    names = ("forward", "input_grad", "weight_grad", "offload", "load")
    times = {name: rng.integers(1, 9, stages) * 1.0 for name in names}
    times |= {name: rng.integers(0, 3, stages) * 1.0 for name in ("all_reduce", "update")}
    transmit = rng.integers(0, 3, (2, table.num_pipes, stages - 1)) * 1.0
    costs = pj.Costs(**times, transmit=transmit)
    asked = {"objective": draw(st.sampled_from(["makespan", "span"]))}
    asked["offload"] = draw(st.booleans())
    limits = draw(st.sampled_from([2.0, 3.0, 100.0])) * stages / p
    links = draw(st.sampled_from(["delay", "queued"]))
    result = make_optimum(table, costs, limits, link=links, **asked)
    assume(result is not None)
    return result


def make_optimum(table, costs, limits, **asked):
    """A certificate of a plan that a heuristic made; None where it made none."""
    problem = build_problem(table, costs, limits, 1.0, 0.5, **asked)
    plan = greedy_plan(problem, problem.limits)
    if plan is None:
        return None
    table = to_table(problem, plan, "greedy")
    return json.loads(json.dumps(certify(problem, table, 1, seconds=0.5, source="greedy")))


@st.composite
def formulas_of_grammars(draw):
    """A certificate of a closed form of a table with kinds and rules of its own."""
    table, _ = legal(draw(grammar_cases.cases(max_workers=2)))
    links = draw(make_links(table.num_workers).filter(lambda links: not links.eager_below))
    try:
        links = dataclasses.replace(links, posting="early")
        form = pj.formula(pj.lower(table, link=links, step_end=False), max_facets=3)
    except ValueError:  # a deadlock, or so many facets that three of them bound nothing
        assume(False)
    return written(form.certificate(table))


KINDS = {"run": runs(), "optimum": optima(), "formula of a grammar": formulas_of_grammars()}
