"""Mario's R cells and ReCycle's routes, against counts and event loops of the tests."""

import itertools
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st
from legal_sizes import build
from reference import assert_runs, texts

import pipejax as pj
from examples.recycle import recycle
from pipejax.schedules import REGISTRY

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


# Megatron-LM's interleaved order, cell by cell
# The order is written down again from what `forward_backward_pipelining_with_interleaving` does: a
# table of (microbatch, chunk) by groups, of which backwards take the chunks from behind; then so many
# forwards of warm-up, forward and backward in turn, and the backwards that are left.


def megatron_row(workers, microbatches, chunks, group, extra, rank):
    order = [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
    forwards = [f"{chunk * workers + rank}F{m}" for m, chunk in order]
    backwards = [f"{(chunks - 1 - chunk) * workers + rank}B{m}" for m, chunk in order]
    warmup = min((workers - rank - 1) * 2 + (chunks - 1) * group + extra, len(order))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return forwards[:warmup] + [op for pair in pairs for op in pair] + backwards[-warmup:]


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("extra", [0, 1])
def test_groups_of_any_size(workers, chunks, extra):
    refused = 0
    for microbatches in range(workers, 4 * workers + 1):
        for group in {workers, workers + 1, 2 * workers, microbatches}:
            options = {"group_size": group, "extra_warmup": extra, "stages_per_worker": chunks}
            size = {"num_workers": workers, "num_microbatches": microbatches}
            if group > microbatches or 0 < microbatches % group < workers:
                with pytest.raises(ValueError, match="group_size must lie between the workers"):
                    pj.schedules.build("interleaved-1f1b", **size, **options)
                refused += 1
                continue
            table = pj.schedules.build("interleaved-1f1b", **size, **options)
            arguments = workers, microbatches, chunks, group, extra
            assert texts(table) == [megatron_row(*arguments, rank) for rank in range(workers)]
    assert refused


def test_larger_groups_hide_messages():
    """Groups of 8 take 111 where those of 4 take 119, of messages as long as a forward."""
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    result = {}
    for group in (None, 4, 8):
        size = {"num_workers": 4, "num_microbatches": 16, "group_size": group}
        run = pj.evaluate(pj.schedules.build("interleaved-1f1b", **size), costs)
        result[group] = run.makespan, int(run.peak_in_flight.max())
    assert result == {None: (119.0, 11), 4: (119.0, 11), 8: (111.0, 15)}


# R cells put into any table, and weight gradients that recompute once more

F, B, I, R = (pj.Phase[letter] for letter in "FBIR")  # noqa: E741
SIZE = {"num_workers": 4, "num_microbatches": 8}


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"chunked-prefill"}))  # has no backward
def test_every_backward_recomputes_first(name):
    table = pj.schedules.build(name, **SIZE).with_recomputation()
    assert (table.where[R] >= 0).all()
    for row in table.rows():
        for cell, after in itertools.pairwise(row):
            for op in cell:
                if op.phase == R:
                    assert (op.stage, op.microbatch) in [
                        other[1:] for other in after if other.phase in (B, I)
                    ]
    assert [*table.with_recomputation().rows()] == [*table.rows()]


def test_checkpoints_are_what_waits_for_a_backward():
    """F leaves a checkpoint; R brings the activation back, I leaves what W needs of it."""
    table = pj.schedules.build("zb-h1", **SIZE)
    costs = pj.Costs(forward=1.0, backward=2.0, recompute=1.0)
    sizes = {"sizes": [1.0] * 4, "checkpoints": [0.125] * 4, "weight_share": [0.25] * 4}
    whole = pj.analysis.activation_memory(pj.evaluate(table, costs), **sizes)
    less = pj.analysis.activation_memory(pj.evaluate(table.with_recomputation(), costs), **sizes)
    assert whole.peak[0] == 4.0
    assert less.peak[0] == 3 * 0.125 + 1.0


def test_recomputing_twice_loses_what_split_backwards_gain(answer):
    """At F = I = W = R, ZB-H1 beats 1F1B; with R before I and again before W it is slower."""
    options = "-P", 4, "-M", 16, "--stage-times", "F=1,I=1,W=1,R=1", "--recompute-cells"
    result = {
        name: answer("evaluate", "-s", name, *options, *more)["makespan"]
        for name, more in (("1f1b", ()), ("zb-h1", ("--recompute-again",)))
    }
    once = answer("evaluate", "-s", "zb-h1", *options)["makespan"]
    assert result["1f1b"] == 16 * 4.0 + 3 * 3.0  # an R waits for no gradient: it fills the bubble
    assert 16 * 4.0 <= once < result["1f1b"] < 16 * 5.0 <= result["zb-h1"]


def test_what_has_no_effect_is_refused(call, tmp_path):
    options = "evaluate", "-s", "1f1b", "-P", 4, "-M", 8, "--stage-times"
    code, _, message = call(*options, "F=1,B=2,R=1")
    assert (code, "R has no effect" in message) == (2, True)
    code, _, message = call(*options, "F=1,B=2,R=1", "--recompute-cells", "--recompute-again")
    assert (code, "--recompute-again has no effect: no W in 1f1b" in message) == (2, True)
    code, _, message = call(*options, "F=1,B=2", "--recompute-cells")
    assert (code, "phase R has no cost" in message) == (2, True)


def test_a_table_of_a_file_gets_them_too(answer, tmp_path):
    path = tmp_path / "table.json"
    pj.write_table(pj.schedules.build("gpipe", **SIZE), path)
    options = "evaluate", "--table", path, "--stage-times", "F=1,B=2,R=0.5", "--recompute-cells"
    assert answer(*options)["makespan"] == 8 * 3.5 + 3 * 3.0


# Circular pipelines as Shardy's MPMD states them: which of two ops of a worker comes first
# openxla/shardy, integrations/python/jax/mpmd/schedule_impl.py (snapshot a0277a8), told again here:
# a predicate names pairs of ops, of which the first has to stand before the second in a worker's row.


def circular(a, b, p, *, reverse, group=None):
    """Groups of P microbatches on the first stage of a worker, then on its second, and so on."""
    if a.phase != b.phase:
        return a.phase == pj.Phase.F
    key = [(op.microbatch // (group or p), op.stage, op.microbatch) for op in (a, b)]
    if a.phase == pj.Phase.F:
        return key[0] < key[1]
    if reverse:
        return key[0] > key[1]
    back = [(group, -stage, microbatch) for group, stage, microbatch in key]
    return back[0] < back[1]


def check(table, **options):
    for row in table.rows():
        ops = [op for cell in row for op in cell]
        for later, earlier in itertools.combinations(reversed(ops), 2):
            message = circular(later, earlier, table.num_workers, **options)
            assert not message, f"{later} should stand before {earlier}"


REVERSE = {"circular": True, "looped-bfs": False}


@pytest.mark.parametrize("name", REVERSE)
@given(workers=st.integers(1, 7), per_worker=st.integers(1, 4), groups=st.integers(1, 3))
def test_circular_pipelines(name, workers, per_worker, groups):
    """A round is a group of P microbatches; ours, as MaxText's, go round with all of them."""
    per_worker = per_worker if name == "circular" else max(2, per_worker)
    count = workers * groups
    arguments = {"workers": workers, "microbatches": count, "stages_per_worker": per_worker}
    table, reverse = build(name, **arguments), REVERSE[name]
    check(table, reverse=reverse, group=count)
    if groups == 1 or per_worker == 1:
        check(table, reverse=reverse)
        return
    with pytest.raises(AssertionError, match="should stand before"):  # Shardy's rounds are smaller
        check(table, reverse=reverse)
