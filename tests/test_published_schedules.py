"""Mario's R cells and ReCycle's routes, against counts and event loops of the tests."""

import itertools
import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from daily import read_cases, with_cases
from hypothesis import given, settings, strategies as st
from legal_sizes import build
from reference import assert_runs, texts
from test_published import RECORDS, gpt, records, weight_share

import pipejax as pj
from examples.recycle import recycle
from pipejax.analysis.comparison import closed_form
from pipejax.schedules import REGISTRY
from pipejax.schedules.table.held_activations import peak_in_flight

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


@with_cases("name limit", ("1f1b", 4 / 3), ("chimera", 3 / 2), ("interleaved-1f1b", 3 / 2))
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


FAILURES = read_cases("failed workers")


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
    assert (table.op_cells[R] >= 0).all()
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


# V schedules against their published memory, bubbles and rows

EQUAL = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}
WORKERS = (2, 3, 4, 5, 8, 16)  # and all microbatches up to twice as many, some more


def span_idle(table):
    """Idle time in the longest span of a worker at F = I = W = 1, without messages."""
    run = pj.evaluate(table, pj.Costs(**EQUAL))
    return run.max_span - 6 * table.num_microbatches


@pytest.mark.parametrize("record", records("cm.unit."))
@pytest.mark.usefixtures("unchecked")
def test_published_bubbles_and_peaks(record):  # "any of 2p, 3p, 8p": all three
    setting, value = record["setting"], record["value"]
    for per_worker in (2, 3, 8):
        table = build(setting["schedule"].lower(), setting["p"], per_worker * setting["p"])
        assert span_idle(table) == value["bubble"]
        assert peak_in_flight(table).max() == value["peak_chunks"]


@pytest.mark.parametrize("name", ["v-half", "v-min", "zb-v"])
@pytest.mark.parametrize("workers", [*WORKERS[:-1], pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("unchecked")
def test_closed_forms_hold_where_they_say(name, workers):
    step = 1 if workers < 8 else 5
    for m in (*range(1, 2 * workers + 1, step), 3 * workers, 8 * workers):
        table = build(name, workers, m)
        form, shape = closed_form(table)
        run = pj.evaluate(table, pj.Costs(**EQUAL))
        assert peak_in_flight(table).max() == form.in_flight[1](shape, 0)
        if form.holds(shape):
            published = form.span_bubble_ratio[1](shape)
            assert run.span_bubble_ratio == pytest.approx(published, abs=1e-12), m


@pytest.mark.usefixtures("unchecked")
def test_memory_is_what_the_authors_say():  # in microbatches, of two stages on a worker
    message = RECORDS["cm.hf"]["value"]
    assert (message["V-Min"], message["V-Half"]) == ("(p+4)//3", "(p+2)//2")
    for p in WORKERS:
        for name, microbatches in (("v-min", (p + 4) // 3), ("v-half", (p + 2) // 2)):
            assert peak_in_flight(build(name, p, 2 * p)).max() == 2 * microbatches


def searched(setting, limit=1.0, **options):
    """Run of ZB-V planned for published times, and its memory in activations of one stage."""
    key = f"zbv.prof.{setting['model']}.m{setting['m']}"
    letters = zip("FIW", "FBW", strict=True)
    slots = {phase: RECORDS[f"{key}.T_{x}_chunk"]["value"] for phase, x in letters}
    comm = RECORDS[f"{key}.T_comm"]["value"]
    p, share = setting["p"], weight_share(setting["model"])
    options |= {"weight_share": share, "transfer": comm, "slots": slots}
    table = build("zb-v", p, setting["m"], memory_limit=2 * limit * p, **options)
    names = ("forward", "input_grad", "weight_grad")
    times = dict(zip(names, map(float, slots.values()), strict=True))
    run = pj.evaluate(table, pj.Costs(**times, transmit=float(comm)))
    return run, pj.analysis.activation_memory(run, weight_share=share).peak.max()


def get_rows(prefix, schedule, always):
    return [
        pytest.param(*r.values, id=r.id, marks=() if always in r.id else pytest.mark.slow)
        for r in records(prefix)
        if r.values[0]["setting"].get("schedule") in (schedule, None)
    ]


@pytest.mark.parametrize("record", get_rows("zbv.t8.", "ZB-V", "6.2B.m48"))
@pytest.mark.usefixtures("unchecked")
def test_zb_v_is_as_good_as_published(record):
    run, held = searched(record["setting"])
    assert run.span_bubble_ratio <= record["value"] + 5e-4
    assert held <= 2 * record["setting"]["p"] * (1 + 1e-9)


@pytest.mark.parametrize("record", get_rows("zbv.fig9.", None, "6.2B.m48"))
@with_cases("which", 5, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3, 4, 8, 16)))
@pytest.mark.usefixtures("unchecked")
def test_zb_v_against_memory(record, which):  # Figure 9: the limit in multiples of p
    setting, published = record["setting"], record["value"]["ZB-V heuristic"]
    limit = setting["M_limit_over_pMB"][which]
    run, held = searched(setting, limit)
    assert run.span_bubble_ratio <= published[which] + 5e-4
    assert held <= 2 * limit * setting["p"] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("record", records("zbv.t6.mem."))
@pytest.mark.usefixtures("unchecked")
def test_zb_v_measured_memory(record):  # Table 6 [GB]: ours are 3 to 5 % above
    setting = record["setting"]
    table = searched(setting)[0].table
    model = gpt(RECORDS[f"zb.t3.{setting['model']}"]["value"] | {"vocab": 51200})
    edges = {"embedding_units": 1, "loss_units": 1}  # the first and last stage have a layer less
    workload = pj.Workload(model, setting["b"] * setting["m"], **edges)
    assert pj.memory_bytes(workload, table).max() / 1e9 == pytest.approx(record["value"], rel=0.06)


def test_zb_v_is_planned_for_its_messages():
    slots, message = {"F": 1.0, "I": 1.1, "W": 0.8}, 0.5
    costs = pj.Costs(forward=1.0, input_grad=1.1, weight_grad=0.8, transmit=message)
    spans = [
        pj.evaluate(build("zb-v", 4, 8, slots=slots, transfer=c), costs).max_span
        for c in (0.0, message)
    ]
    assert spans[1] < spans[0]


@pytest.mark.usefixtures("unchecked")
def test_zb_v_keeps_any_limit():
    spans = []
    for limit in (2, 2.5, 3, 5, 8, 13):
        run = pj.evaluate(build("zb-v", 4, 8, memory_limit=limit), pj.Costs(**EQUAL))
        assert pj.analysis.activation_memory(run, weight_share=1 / 3).peak.max() <= limit + 1e-9
        spans.append(run.max_span)
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 48  # no bubble


BY_AUTHORS = read_cases("spans of V-Half by its authors")


def planned(name, workers, microbatches, times):
    """Span of a V schedule planned for F, I, W and a message, and of the fixed order; the table."""
    forward, input_grad, weight_grad, transfer = map(float, times)
    names = ("forward", "input_grad", "weight_grad", "transmit")
    costs = pj.Costs(**dict(zip(names, map(float, times), strict=True)))
    slots = dict(zip("FIW", (forward, input_grad, weight_grad), strict=True))
    table = build(name, workers, microbatches, slots=slots, transfer=transfer)
    fixed = build(name, workers, microbatches)
    spans = (pj.evaluate(candidate, costs).max_span for candidate in (table, fixed))
    return *spans, table


@pytest.mark.parametrize("case", BY_AUTHORS, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
@pytest.mark.usefixtures("unchecked")
def test_spans_are_those_of_the_authors_at_their_times(case):
    *arguments, span = case
    span_of_plan, fixed, table = planned(*arguments)
    assert span_of_plan <= 1.004 * span < fixed
    assert peak_in_flight(table).max() <= 2 * (arguments[1] // 2 + 1)


@settings(max_examples=10)
@given(
    name=st.sampled_from(["v-half", "v-min"]),
    workers=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    times=st.tuples(*(3 * [st.floats(0.2, 3)]), st.floats(0, 1)),
)
def test_what_is_planned_is_never_longer_than_the_fixed_order(name, workers, microbatches, times):
    planned_span, fixed, table = planned(name, workers, microbatches, times)
    assert planned_span <= fixed * (1 + 1e-12)
    largest = workers // 2 + 1 if name == "v-half" else (workers + 4) // 3
    assert peak_in_flight(table).max() <= 2 * largest


# Vocabulary parallelism (arXiv:2411.05288): what the paper states, and an event loop of the tests
# The authors' table (README of sail-sg/VocabularyParallelism) says of 1F1B, Vocab-1 and Vocab-2: the
# same bubble, and p, p + 2 and p + 1 microbatches of activations.

EXAMPLE = {"F": 1.0, "B": 2.0, "S": 0.5, "T": 0.5, "X": 0.2, "Y": 0.2, "Z": 0.2}
NET = ("X", "Y", "Z")
MORE = {1: 2, 2: 1}  # microbatches that a variant holds more: its reductions


def built(base, workers, microbatches, **options):
    arguments = {"num_workers": workers, "num_microbatches": microbatches}
    return pj.schedules.build(f"vocabulary-{base}", **arguments, **options)


def make_costs(table, times, hop=0.0):
    added = {kind.time: times[letters] for letters, kind in table.grammar.kinds.items()}
    fields = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    usual = {fields[letters]: t for letters, t in times.items() if letters in fields}
    return pj.Costs(**usual, transmit=hop, others=added)


def vocabulary_waits(stages, variant, gradient):
    """Return the waits of ops in either variant, as figure 8 of the paper draws them."""
    within = {"S": "X", "Y": "S", "T": "Y", "Z": "T"}
    last = {1: "Z", 2: "Y"}[variant]

    def waits(letters, stage, m):
        if letters in within:
            return [((within[letters], stage, m), False)]
        if letters == "X":
            return [(("F", stages - 1, m), False)]
        if letters == "F":
            return [(("F", stage - 1, m), True)] if stage else []
        if letters == "W":
            return [(("I", stage, m), False)]
        before = [(("F", stage, m), False)]
        if stage < stages - 1:
            return [*before, ((gradient, stage + 1, m), True)]
        home = {"B": stages - 1, "I": 0}[gradient]  # V-Half ends on worker 0
        return [*before, ((last, f"worker {home}", m), False)]

    return waits


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("base", ["1f1b", "v-half"])
def test_runs_as_the_event_loop(base, variant):
    rng = np.random.default_rng(variant)
    gradient = "B" if base == "1f1b" else "I"
    for workers, microbatches in ((1, 2), (2, 1), (3, 4), (4, 7)):
        for overlap in (False, True):
            table = built(base, workers, microbatches, variant=variant, overlap=overlap)
            letters = "FBSTXYZ" if gradient == "B" else "FIWSTXYZ"
            used = {letter: rng.integers(1, 20) / 8 for letter in letters}
            waits = vocabulary_waits(table.num_stages, variant, gradient)
            assert_runs(table, make_costs(table, used, 0.25), waits)


def test_the_example_takes_15_8_seconds():
    """P = 2, M = 3, passes of 0.5, exchanges of 0.2, a hop of 0.1; the authors' order takes less."""
    result = []
    for overlap in (False, True):
        table = built("1f1b", 2, 3, overlap=overlap)
        result.append(pj.evaluate(table, make_costs(table, EXAMPLE, 0.1)).makespan)
    assert result == pytest.approx([15.8, 15.1])


VOCABULARY_SIZES = [(2, 8), (4, 6), (4, 16), (8, 32)]
FREE = EXAMPLE | dict.fromkeys(NET, 0.0)  # exchanges that take no time


@pytest.mark.parametrize(("workers", "microbatches"), VOCABULARY_SIZES)
def test_the_bubble_is_that_of_1f1b(workers, microbatches):
    """(P - 1) (F + B), where a worker has F, B, S and T of each microbatch to do."""
    ideal = (workers - 1) * 3.0 + microbatches * 4.0
    result = {}
    for variant in MORE:
        for overlap in (False, True):
            table = built("1f1b", workers, microbatches, variant=variant, overlap=overlap)
            run = pj.evaluate(table, make_costs(table, FREE))
            assert run.busy.tolist() == [4.0 * microbatches] * workers
            result[variant, overlap] = run.makespan - ideal
    assert result[2, False] == 0.0
    assert max(map(abs, result.values())) <= 1.0  # S and T of one microbatch


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("base", ["1f1b", "v-half"])
def test_the_order_of_the_authors_hides_exchanges(base, variant):
    """A further microbatch takes what a worker does of it, whatever exchanges take beside."""
    work = {"F": 1.0, "B": 2.0} if base == "1f1b" else dict.fromkeys("FIW", 0.5)
    times = {**EXAMPLE, **work}
    cycles = []
    for overlap in (False, True):
        spans = []
        for count in (16, 24):
            table = built(base, 4, count, variant=variant, overlap=overlap)
            spans.append(pj.evaluate(table, make_costs(table, times)).makespan)
        cycles.append((spans[1] - spans[0]) / 8)
    # right behind its forward an S of the second variant waits for the broadcast
    assert cycles == pytest.approx([4.0 + 0.2 * (variant == 2), 4.0])


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize(("workers", "microbatches"), VOCABULARY_SIZES)
def test_a_microbatch_lives_so_many_intervals(workers, microbatches, variant):
    """An interval is what a worker does of a microbatch; each reduction lets it live one longer."""
    table = built("1f1b", workers, microbatches, variant=variant)
    result = pj.evaluate(table, make_costs(table, FREE))
    held = [workers - r + MORE[variant] for r in range(workers)]
    assert result.peak_in_flight.tolist() == [min(count, microbatches) for count in held]
    if microbatches < 4 * workers:
        return
    middle = microbatches // 2
    at = [table.op_cells[p][:, middle : middle + 2] for p in (pj.Phase.F, pj.Phase.B)]
    start, end = result.start.ravel()[at[0]], result.finish.ravel()[at[1]]
    assert np.diff(end).ravel().tolist() == [4.0] * workers
    lives = (end - start)[:, 0] / 4.0
    assert [math.ceil(count) for count in lives] == held


@pytest.mark.parametrize("variant", MORE)
@pytest.mark.parametrize("workers", [2, 4])
def test_v_half_holds_as_many_more_and_runs_without_gaps(workers, variant):
    """A further microbatch takes what a worker does of it; more activations are of two stages."""
    times = {**dict.fromkeys("FIW", 0.5), **{k: v for k, v in FREE.items() if k not in "FB"}}
    spans = []
    for microbatches in (4 * workers, 6 * workers):
        table = built("v-half", workers, microbatches, variant=variant)
        plain = pj.schedules.build("v-half", num_workers=workers, num_microbatches=microbatches)
        result = pj.evaluate(table, make_costs(table, times))
        bare = pj.schedules.peak_in_flight(plain)
        assert result.peak_in_flight.max() == bare.max() + 2 * MORE[variant]
        spans.append(result.makespan)
    assert spans[1] - spans[0] == 4.0 * 2 * workers
