"""Mario's R cells and ReCycle's routes, against counts and event loops of the tests."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from legal_sizes import build
from reference import assert_runs, texts

import pipejax as pj
from examples.recycle import recycle

SPLIT = pj.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)


def step(table, f=1.0, b=2.0, r=1.0):
    return pj.evaluate(table, pj.Costs(forward=f, backward=b, recompute=r)).makespan


def but_last(table):
    last = f"{table.num_stages - 1}R"
    rows = [[op for op in row if not op.startswith(last)] for row in texts(table)]
    return table.with_rows(rows)


SIZES = [*product((2, 3, 4, 8), (1, 3, 4, 8, 16))]


def test_recomputation_as_cells_is_free_at_both_ends_of_a_step():
    for (p, m), (f, b, r) in product(SIZES, [(1, 2, 1), (2, 3, 1), (1, 1, 0.5)]):
        table = build("1f1b", p, m)
        assert step(table, f, b + r) == (m + p - 1) * (f + b + r)
        if m >= p:
            cells = step(table.with_recomputation(), f, b, r)
            assert cells == m * (f + r + b) + (p - 1) * (f + b)


def test_earlier_forwards_and_no_recomputation_at_the_last_stage():
    """Two microbatches of F = R = 1, B = 2 are free in 1F1B, three where forwards come earlier."""
    for p, m in SIZES:
        for name, free in (("1f1b", 2), ("eager-1f1b", 3)):
            result = step(but_last(build(name, p, m).with_recomputation()))
            assert result == (m + p - 1) * 3 + max(m - free, 0)


@pytest.mark.parametrize(
    ("name", "limit"), [("1f1b", 4 / 3), ("chimera", 3 / 2), ("interleaved-1f1b", 3 / 2)]
)
def test_what_order_alone_can_save(name, limit):
    """At R = F and B = 2 F: from recomputation within B to none, which no R cell goes below."""
    for p, m in [(4, 4), (4, 8), (8, 8), (8, 32)]:
        table = build(name, p, m)
        within, cells, none = step(table, b=3.0), step(table.with_recomputation()), step(table)
        assert none < cells < within <= limit * none + 1e-9


def to_waits(stages, gradient):
    def waits(kind, s, m):
        if kind == "W":
            return [(("I", s, m), False)]
        if kind == "F":
            return [(("F", s - 1, m), True)] if s else []
        return [(("F", s, m), False), *([((gradient, s + 1, m), True)] if s < stages - 1 else [])]

    return waits


FAILURES = [  # pipelines, stages, microbatches, workers that failed
    (1, 3, 4, ()),
    (2, 1, 3, (1,)),
    (2, 4, 8, (6,)),
    (2, 3, 7, (0, 4, 5)),
    (3, 4, 18, (1, 6, 9)),
    (3, 2, 9, (0, 2)),
    (4, 3, 10, (4, 7, 10)),
]


@pytest.mark.parametrize("split", [False, True])
def test_routes_and_runs_after_failures(split):
    """Every microbatch stays in its pipeline but for peers of what failed, which share evenly."""
    rng = np.random.default_rng(4)
    used = {kind: rng.integers(1, 20) / 8 for kind in "FBIW"}
    costs = {"forward": used["F"], "backward": used["B"]}
    costs |= {"input_grad": used["I"], "weight_grad": used["W"]} if split else {}
    costs["backward"] = used["I"] + used["W"] if split else used["B"]
    for d, p, m, failed in FAILURES:
        lost = "+".join(map(str, failed))
        table = recycle(d * p - len(failed), m, stages=p, failed=lost, split=split)
        alive = [worker for worker in range(d * p) if worker not in failed]
        counts = Counter()
        for number in range(m):
            route = table.placement[table.pipe_of_microbatch[number]]
            for s, worker in enumerate(alive[w] for w in route):
                home = p * (number % d) + s
                assert worker % p == s
                assert worker == home or home in failed
                counts[home, worker] += 1
        for home in failed:
            shares = [counts[home, w] for w in alive if w % p == home % p]
            assert max(shares) - min(shares) <= 1
        costs_of_table = pj.Costs(**costs, transmit=0.25)
        assert_runs(table, costs_of_table, to_waits(p, "I" if split else "B"))


def test_without_failures_pipelines_run_1f1b():
    for d, p, m in product((1, 2, 3), (1, 2, 4), (1, 2, 5)):
        table = recycle(d * p, d * m, stages=p, split=False)
        assert step(table) == (m + p - 1) * 3
        expected = texts(build("1f1b", p, m))
        for w, row in enumerate(texts(table)):
            ops = [(op[:2], int(op[2:]) // d) for op in row]
            assert [f"{kind}{number}" for kind, number in ops] == [
                f"{w % p}{op[1:]}" for op in expected[w % p]
            ]


@pytest.mark.parametrize(("d", "entry"), [(2, 8), (3, 6), (3, 16), (4, 12)])
def test_halves_of_backwards_fill_bubbles_after_a_failure(d, entry):
    """A peer of stage s has d / (d - 1) of the microbatches, from slot s on."""
    stages, load = 4, 3 * entry * d // (d - 1)
    for failed in range(d * stages):
        halves, whole = (
            pj.evaluate(recycle(d * stages - 1, d * entry, stages=stages, **more), SPLIT)
            for more in ({"failed": failed, "split": True}, {"failed": failed, "split": False})
        )
        assert load + failed % stages <= halves.makespan <= load + stages - 1 < whole.makespan
        assert halves.busy.max() == load <= halves.max_span < whole.max_span
        assert sum(halves.busy) == 3 * stages * d * entry


MISUSES = {
    "no survivor": ((6, 4), {"stages": 4, "failed": "1+5"}, "all workers of stage 1 failed"),
    "no such worker": ((7, 4), {"stages": 4, "failed": 9}, "names worker 9, and there were 0 to 7"),
    "uneven": ((7, 4), {"stages": 4}, "7 workers and 0 that failed are no 4 x D"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_failures(misuse):
    (workers, microbatches), options, message = MISUSES[misuse]
    with pytest.raises(ValueError, match=message):
        recycle(workers, microbatches, **options)


def test_failures_on_the_command_line(answer):
    arguments = "-P", 11, "-M", 18, "--stage-times", "F=1,I=1,W=1"
    options = "--schedule-options", "stages=4,failed=6"
    result = answer("evaluate", "-s", "examples/recycle.py:recycle", *arguments, *options)
    assert (result["makespan"], result["max_span"]) == (29.0, 27.0)
