"""Workers on nodes: message times by pair of places, and the search of the placement."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import reference
import strategies
from daily import daily, with_cases
from hypothesis import given, settings, strategies as st
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.model_topology import model_placements
from pipejax.costs.topology import levels_on
from pipejax.schedules.table.links import LINKS
from pipejax.search.orders import permutations as permutation_search

COSTS = pj.Costs(forward=1.0, backward=2.0)
MODEL = {"minibatch": 8, "tensor_parallel": 2}


def far_times(placement, sizes, times, places):
    """Latency and transmit times where a message takes what the link between two places does."""

    def level(pipe, boundary):
        first, second = (places[placement[pipe][s]] for s in (boundary, boundary + 1))
        return next((k for k, n in enumerate(sizes) if first // n == second // n), -1)

    pipes, stages = placement.shape
    links = [*itertools.product((0, 1), range(pipes), range(stages - 1))]
    return [{(way, p, b): time[level(p, b)] for way, p, b in links} for time in times]


@settings(max_examples=30)
@given(
    case=strategies.cases(pairs=True, step_end=True),
    link=st.sampled_from(LINKS),
    data=st.data(),
)
def test_messages_take_what_the_link_between_two_places_does(case, link, data):
    table = case.table
    size = data.draw(st.integers(1, 3))
    sizes = [size, *[size * data.draw(st.integers(2, 3))] * data.draw(st.booleans())]
    times = [[data.draw(strategies.TIMES) for _ in (*sizes, 0)] for _ in "LX"]
    places = data.draw(st.permutations(range(table.num_workers)))
    machine = pj.Topology(sizes, *times, places)
    costs = pj.costing.topology_costs(case.costs, table, machine)
    pipes = table.pipe_of_microbatch.tolist()
    latency, transmit = far_times(table.placement, sizes, times, places)
    theirs = dataclasses.replace(case.theirs, latency=latency, transmit=transmit)
    expected = reference.Run(case.rows, pipes, theirs, link)
    assert pj.evaluate(table, costs, link=link).makespan == expected.makespan


def evaluated(table, machine):
    return pj.evaluate(table, pj.costing.topology_costs(COSTS, table, machine))


def test_times_of_links_are_differentiable():
    table = build("interleaved-1f1b", 4, 4)
    program = pj.lower(table)

    def total(far):
        machine = pj.Topology(2, transmit=(0.125, far))
        return pj.makespan(program, pj.costing.topology_costs(COSTS, table, machine))

    run = evaluated(table, pj.Topology(2, transmit=(0.125, 0.5)))
    with jax.enable_x64(True):
        slope = jax.grad(total)(0.5)
    assert slope == (run.makespan - total(0.5 - 2**-10)) * 2**10
    assert slope == int(slope) > 0


SCHEDULES = ["1f1b", "interleaved-1f1b", "chimera", "hanayo", "zb-h1"]
MACHINES = [(2, (0.0, 1.0)), (3, (0.125, 0.75)), (4, (0.0, 0.5)), ((1, 3), (0.0, 0.25, 1.5))]


@functools.cache
def all_placements(name, sizes, transmit):
    """Makespans of all 720 placements of 6 workers, each priced by itself, in one batch."""
    table = build(name, 6, 6)
    orders = list(itertools.permutations(range(6)))
    costs = [
        pj.costing.topology_costs(COSTS, table, pj.Topology(sizes, transmit=transmit, places=order))
        for order in orders
    ]
    batch = jax.tree.map(lambda *leaves: np.stack([np.atleast_1d(leaf) for leaf in leaves]), *costs)
    return np.asarray(pj.makespans(pj.lower(table), batch))


@pytest.mark.parametrize(
    ("name", "machine", "tried"),
    daily(itertools.product(SCHEDULES, MACHINES, ("all", "some")), always=2, total=6),
)
def test_the_search_equals_all_placements(name, machine, tried, monkeypatch):
    if tried == "some":
        monkeypatch.setattr(permutation_search, "EXHAUSTIVE", 0)
    sizes, transmit = machine
    table, times = build(name, 6, 6), all_placements(name, sizes, transmit)
    topology = pj.Topology(sizes, transmit=transmit)
    result = pj.search.places(table, COSTS, topology, iterations=30)
    assert result.value == pytest.approx(times.min(), rel=1e-12)
    assert result.lower_bound <= times.min() * (1 + 1e-12)
    assert result.baselines["in order"] == pytest.approx(times[0], rel=1e-12)
    assert all(result.value <= time * (1 + 1e-12) for time in result.baselines.values())
    there = pj.Topology(sizes, transmit=transmit, places=result.best.places.tolist())
    assert evaluated(table, there).makespan == result.value
    if tried == "all":
        assert (result.stopped, result.gap) == ("optimal", 0.0)


def test_the_bound_knows_how_often_nodes_are_left():
    """A chain leaves four nodes three times at least, a ring four times."""
    ring, chain = build("interleaved-1f1b", 16, 16), build("1f1b", 16, 16)
    machine = pj.Topology(4, transmit=(0.05, 0.5))
    result = pj.search.places(ring, COSTS, machine, iterations=0)
    assert result.lower_bound == pytest.approx(result.baselines["in order"], rel=1e-12)
    three = np.full(15, 0.05)
    three[-3:] = 0.5  # the last ones cost least
    least = pj.evaluate(chain, pj.Costs(forward=1.0, backward=2.0, transmit=three)).makespan
    result = pj.search.places(chain, COSTS, machine, iterations=0)
    assert result.lower_bound <= least
    near = pj.evaluate(chain, pj.Costs(forward=1.0, backward=2.0, transmit=0.05)).makespan
    assert near < result.lower_bound <= result.value
    far = pj.search.places(build("chimera", 8, 8), COSTS, machine, iterations=0)
    assert far.gap == 1 - far.lower_bound / far.value > 0.01


def test_placements_that_cost_the_same_are_run_once():
    table = build("1f1b", 8, 8)
    result = pj.search.places(table, COSTS, pj.Topology(4, transmit=(0.0, 1.0)))
    # 70 halves of 8 workers, less those with the nodes' names exchanged
    assert result.evaluated <= 35
    assert (result.best.places // 4).tolist() in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


@with_cases("arguments", {}, {"data_parallel": 2, "zero": 1}, {"stragglers": {1: 1.5}})
@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_a_model_at_all_places(name, arguments):
    """Messages, copies of stages and tied embeddings, as each placement by itself has them."""
    table = build(name, 8, 8)
    model, system = pj.load_model("gpt3-175b"), pj.load_system("h100")
    work = pj.Workload(model, **MODEL, **arguments)
    placed = model_placements(work, system, table)
    rng = np.random.default_rng(0)
    moved = [np.roll(np.arange(8), 1), *(rng.permutation(8) for _ in range(4))]
    places = np.array([np.arange(8), *moved])
    batch = placed.batch(places)
    for k, order in enumerate(places.tolist()):
        own_places = {**MODEL, **arguments, "worker_places": order}
        there = pj.Workload(model, **own_places)
        expected = pj.stage_costs(there, system, table)
        at = placed.at(order)
        for field, time in vars(expected).items():
            if time is not None:
                np.testing.assert_allclose(getattr(at, field), time, rtol=1e-12, err_msg=field)
        exchange = batch.all_reduce[k]
        np.testing.assert_allclose(exchange, expected.all_reduce, rtol=1e-12)
    shared = {tuple(np.asarray(placed.at(order).all_reduce)) for order in places.tolist()}
    assert len(shared) > 1  # where copies or ends lie decides what their gradients take


@pytest.mark.parametrize("name", ["terapipe", "seq-1f1b", "chunked-prefill"])
def test_slices_at_all_places(name):
    """A message carries the tokens of one slice, on links of the node and of the network."""
    table = build(name, 16, 2, slices=4)
    work, system = pj.Workload(pj.load_model("llama3-8b"), minibatch=2), pj.load_system("h100")
    at = model_placements(work, system, table).at(list(range(16)))
    # one sequence in 4 slices of 2,048 tokens, 4,096 wide, 2 bytes each; workers 7 and 8 are apart
    sent = 2048 * 4096 * 2
    transmit = np.full(15, sent / system.peer_link.rate)
    transmit[7] = sent / system.network.rate
    np.testing.assert_allclose(np.asarray(at.transmit)[0, 0], transmit, rtol=1e-12)


def test_a_model_is_placed():
    table = build("chimera", 4, 4)
    model, system = pj.load_model("gpt3-175b"), pj.load_system("h100")
    work = pj.Workload(model, minibatch=4, tensor_parallel=4, worker_places=(0, 2, 1, 3))
    result = pj.search.places(table, work, system)
    times = {}
    for order in itertools.permutations(range(4)):
        there = dataclasses.replace(work, worker_places=order)
        times[order] = pj.evaluate(table, pj.stage_costs(there, system, table)).makespan
    assert result.value == pytest.approx(min(times.values()), rel=1e-12)
    assert result.baselines["given"] == pytest.approx(times[0, 2, 1, 3], rel=1e-12)
    assert result.value < result.baselines["given"]


def test_levels_pick_what_files_and_microbatches_say():
    """Message times that differ by boundary and microbatch keep their axes."""
    table = build("1f1b", 4, 3)
    transmit = np.arange(1.0, 10.0).reshape(1, 1, 3, 3)
    near = pj.Costs(forward=1.0, backward=2.0, transmit=transmit)
    far = pj.Costs(forward=1.0, backward=2.0, transmit=10 * transmit)
    placed = levels_on(near, table, pj.Topology(2, transmit=(1.0, 2.0)))
    assert placed.at([0, 1, 2, 3]).transmit[0, 0].tolist() == [1.0, 2.0, 1.0]
    options = type(placed).from_levels([near, far], table, (2,)).at([0, 1, 2, 3]).transmit
    assert options[1, 0].tolist() == [[1, 2, 3], [40, 50, 60], [7, 8, 9]]


LOOPED = ["-s", "interleaved-1f1b", "-P", 4, "-M", 4, "-T", "F=1,B=2"]
NODES = ["--workers-per-node", 2, "--latency", 0.125, "--transmit", "0,0.5"]


def test_places_on_the_command_line(answer, call, tmp_path):
    out, figure = tmp_path / "places.json", tmp_path / "places.svg"
    line = [*LOOPED, *NODES, "--worker-places", "0,2,1,3"]
    result = answer("tune", "places", *line, "--out", out, "--figure", figure)
    table = build("interleaved-1f1b", 4, 4)
    machine = pj.Topology(2, latency=0.125, transmit=(0.0, 0.5), places=(0, 2, 1, 3))
    in_order = evaluated(table, machine).makespan
    assert result["baselines"]["given"] == in_order > result["value"]
    assert (result["best"]["boundaries"], result["best"]["nodes"]) == ([4, 3], [[0, 1], [2, 3]])
    assert sorted(result["best"]["places"]) == [0, 1, 2, 3]
    for places, makespan in ((out, result["value"]), ("0,2,1,3", in_order)):
        there = answer("evaluate", *LOOPED, *NODES, "--worker-places", places)
        assert there["makespan"] == makespan
    assert "between nodes" in figure.read_text()
    code, text, _ = call("tune", "places", *LOOPED, *NODES, "--details")
    assert (code, "3 of 7" in text, "0 1" in text) == (0, True, True)
    many = ["compare", "--schedules", "1f1b,chimera", *LOOPED[2:], *NODES]
    rows = answer(*many, "--worker-places", "0,2,1,3")
    assert rows != answer(*many)


def test_files_say_what_levels_take(answer, mistake, tmp_path):
    file, plain = tmp_path / "costs.json", tmp_path / "plain.json"
    times = '{"unit": "milliseconds", "F": 1, "B": 2, '
    file.write_text(
        times + '"workers_per_node": 2, "message": [{"bytes": 1e6, "bandwidth": 1e12}, '
        '{"latency": [0, 1, 0, 0, 0, 0, 0], "transmit": 0.5}], "message_back": [{}, {}]}'
    )
    plain.write_text(times + '"message": {"transmit": 1}}')
    table = build("interleaved-1f1b", 4, 4)
    costs = pj.read_costs(file, table, places=(0, 2, 3, 1))
    assert costs.transmit[0, 0] == pytest.approx([5e-4, 1e-6, 5e-4, 1e-6, 5e-4, 1e-6, 5e-4])
    assert costs.latency[:, 0].tolist() == [[0.0] * 7] * 2
    in_order = pj.read_costs(file, table)
    assert in_order.latency[0, 0].tolist() == [0.0, 1e-3, *[0.0] * 5]
    both = ["evaluate", *LOOPED[:-2], "--costs", file]
    assert answer(*both)["makespan"] == pj.evaluate(table, in_order).makespan
    moved = answer(*both, "--worker-places", "0,2,3,1")["makespan"]
    assert moved == pj.evaluate(table, costs).makespan
    result = answer("tune", "places", *both[1:])
    assert result["value"] <= min(result["baselines"].values())
    assert "workers-per-node has no effect" in mistake(*both, "--workers-per-node", 2)
    with pytest.raises(ValueError, match="places need workers_per_node"):
        pj.read_costs(plain, table, places=(0, 2, 1, 3))
    plain.write_text(times + '"workers_per_node": 2, "message": {"transmit": 1}}')
    with pytest.raises(ValueError, match="message must be a list of 2"):
        pj.read_costs(plain, table)


def test_a_system_has_its_own_nodes(answer):
    model = ["--model", "gpt3-175b", "--system", "h100", "--minibatch", 4, "--tensor-parallel", 4]
    words = ["-s", "chimera", "-P", 4, "-M", 4, *model]
    moved = answer("evaluate", *words, "--worker-places", "0,2,1,3")
    assert moved["makespan"] > answer("evaluate", *words)["makespan"]
    assert sum(moved["breakdown"].values()) == pytest.approx(moved["makespan"])
