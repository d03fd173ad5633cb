"""The deal of microbatches to replicas: against all deals, its bounds, and a recorded job."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from daily import daily
from legal_sizes import build

import pipejax as pj
from pipejax.costs.stage.microbatches import in_order
from pipejax.schedules.table.links import Links
from pipejax.search.orders.permutations import order_bound, packed_bound

RECORDED = Path(__file__).parent / "data" / "traces_deal" / "durations.csv"
# schedule, workers, link, replicas, microbatches of each
CASES = [
    *(("1f1b", 2, "delay", 2, 2), ("1f1b", 2, "blocking", 2, 3), ("gpipe", 3, "rendezvous", 2, 3)),
    *(("dualpipe-v", 2, "delay", 2, 4), ("zb-h1", 2, "queued", 3, 2)),
    ("chimera", 2, "blocking", 3, 2),
]


def draw_samples(case, count, seed=0):
    """Costs of so many steps; some microbatches are far longer than others."""
    name, workers, _, replicas, microbatches = case
    table, members = build(name, workers, microbatches), replicas * microbatches
    rng = np.random.default_rng(seed)
    batches = []
    for step in range(count):
        shape, sigma = (table.num_stages, members), (0.2, 0.8, 1.5)[step % 3]
        forward, backward = rng.lognormal(0, sigma, (2, *shape))
        batches.append(pj.Costs(forward=forward, backward=backward, transmit=0.25, latency=0.125))
    return table, batches


def brute_force(table, batches, link, replicas):
    """Least value of each step, of all sequences of all its microbatches cut into replicas."""
    size = table.num_microbatches
    orders = np.array([*itertools.permutations(range(size * replicas))]).reshape(-1, size)
    rows, which = np.unique(orders, axis=0, return_inverse=True)
    program = pj.lower(table, link=link)
    result = []
    for costs in batches:
        times = np.asarray(pj.makespans(program, in_order(costs, rows)))
        result.append(times[which.reshape(-1, replicas)].max(axis=1).min())
    return np.array(result)


@pytest.mark.parametrize(("name", "workers", "link", "replicas", "size"), daily(CASES))
def test_deals_equal_brute_force_and_bounds_stay_below(name, workers, link, replicas, size):
    case = name, workers, link, replicas, size
    table, batches = draw_samples(case, 40 if size < 4 else 16)
    optimum = brute_force(table, batches, link, replicas)
    for bound in (order_bound, packed_bound):
        below = [bound(table, costs, Links.resolve(link), replicas) for costs in batches]
        assert (below <= optimum * (1 + 1e-12)).all()
    iterations = 60 if size < 4 else 240
    all_deals = pj.search.deals(table, batches, replicas=replicas, link=link, iterations=iterations)
    np.testing.assert_allclose([result.value for result in all_deals], optimum, rtol=1e-12)
    for step, (result, costs) in enumerate(zip(all_deals, batches, strict=True)):
        if step < 6:  # one by one
            check(result, table, costs, link, replicas)
        assert result.lower_bound <= result.value * (1 + 1e-12)


def check(result, table, costs, link, replicas):
    """A deal holds each microbatch once, and takes what evaluate says of each replica."""
    order = result.best.order
    assert order.shape == (replicas, table.num_microbatches)
    assert sorted(order.ravel().tolist()) == list(range(order.size))
    alone = [pj.evaluate(table, in_order(costs, row), link=link).makespan for row in order]
    assert result.value == max(alone)
    program = pj.lower(table, link=link)
    assert np.asarray(pj.makespans(program, result.best.costs)).tolist() == alone
    assert result.value <= min(result.baselines.values())
    options = np.arange(order.size).reshape(order.shape)
    for name, deal in (("given", options), ("round robin", options.reshape(order.T.shape).T)):
        times = [pj.evaluate(table, in_order(costs, row), link=link).makespan for row in deal]
        assert result.baselines[name] == max(times)


@pytest.fixture(scope="module")
def recorded():
    with RECORDED.open() as file:
        rows = list(csv.DictReader(file))
    steps = sorted({int(row["step"]) for row in rows})
    times = np.zeros((len(steps), 2, 2, 64))
    for row in rows:
        at = steps.index(int(row["step"])), int(row["stage"])
        member = int(row["dp_rank"]) * 8 + int(row["mb_id"])
        for phase, name in enumerate(("forward-compute", "backward-compute")):
            times[at[0], phase, at[1], member] = float(row[name])
    assert times.min() > 0
    table = build("1f1b", 2, 8)
    costs = [pj.Costs(forward=f, backward=b, transmit=0.0083) for f, b in times]
    return table, costs


def test_a_recorded_job_is_dealt_near_its_bound(recorded):
    table, batches = recorded
    all_deals = pj.search.deals(table, batches, replicas=8, link="blocking", iterations=30)
    for result, costs in zip(all_deals, batches, strict=True):
        check(result, table, costs, "blocking", 8)
        assert result.baselines["greedy with order"] < result.baselines["greedy"]
        plain, greedy = (result.baselines[name] for name in ("given", "greedy with order"))
        assert result.value < greedy < 0.9 * plain
        assert 0 < result.gap < 0.04


def test_a_seed_gives_one_answer_and_no_time_the_best_baseline(recorded):
    table, (costs, *_) = recorded
    options = {"replicas": 8, "link": "blocking", "seed": 3}
    first, same = (pj.search.deals(table, [costs], iterations=4, **options)[0] for _ in range(2))
    assert first.best.order.tolist() == same.best.order.tolist()
    assert (first.value, first.evaluated) == (same.value, same.evaluated)
    assert first.stopped == "iterations"
    for more, why in (({"time_limit": 0.0}, "time"), ({"iterations": 0}, "iterations")):
        (none,) = pj.search.deals(table, [costs], **more, **options)
        assert none.stopped == why
        assert first.value < none.value == min(none.baselines.values())


def test_steps_may_differ_in_what_no_microbatch_does():
    case = ("1f1b", 2, "delay", 2, 3)
    table, batches = draw_samples(case, 3)
    batches = [
        pj.Costs(forward=c.forward, backward=c.backward, transmit=t, update=[0.0, t])
        for c, t in zip(batches, (0.0, 0.5, 2.0), strict=True)
    ]
    together = pj.search.deals(table, batches, replicas=2)
    for result, costs in zip(together, batches, strict=True):
        assert result.value == pj.search.deals(table, [costs], replicas=2)[0].value
        halves = [in_order(costs, np.arange(low, low + 3)) for low in (0, 3)]
        ends = [pj.evaluate(table, half).makespan for half in halves]
        assert result.baselines["given"] == max(ends)


def test_of_equal_replicas_the_bound_is_the_value():
    """One worker: all that is dealt is work, and blocks of 1 + 3 and 2 + 2 are even."""
    table = build("gpipe", 1, 2)
    lengths = np.array([[1.0, 2.0, 2.0, 3.0]])
    costs = pj.Costs(forward=lengths, backward=lengths)
    (result,) = pj.search.deals(table, [costs], replicas=2)
    assert (result.value, result.lower_bound, result.stopped) == (8.0, 8.0, "optimal")


def test_the_longest_microbatches_meet():
    """Three long ones, two replicas: one gets two, whatever the mean says."""
    table = build("gpipe", 1, 2)
    costs = pj.Costs(forward=np.array([[4.0, 4.0, 4.0, 0.0]]), backward=0.5)
    links = Links.resolve("delay")
    assert order_bound(table, costs, links, 2) == 7.0
    assert packed_bound(table, costs, links, 2) == 9.0


def test_a_sender_that_is_held_is_part_of_the_bound():
    """Blocking: the last worker waits between its microbatches until a gradient is transmitted."""
    table = build("1f1b", 2, 3)
    forward = np.array([[0.0] * 3, [10.0, 20.0, 30.0]])
    costs = pj.Costs(forward=forward, backward=0.0, transmit=1.0)
    links = {name: Links.resolve(name) for name in ("delay", "blocking")}
    result = {name: order_bound(table, costs, link) for name, link in links.items()}
    assert result == {"delay": 1 + 60 + 1, "blocking": 1 + 60 + 2 + 1}
