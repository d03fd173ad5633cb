"""Forwards braided with backwards: order by order, and run by an event loop of the tests.

Rules and orders are written down again: of Megatron-LM from `TransformerLayerSchedulePlan.run` and
`forward_backward_pipelining_with_interleaving`, of DualPipe from figure 4 of arXiv:2412.19437.
"""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from daily import read_cases, with_cases
from legal_sizes import build
from reference import assert_runs, parsed, texts
from test_published_schedules import megatron_row

import pipejax as pj

# seconds of the example: dispatch and combine take a quarter of a forward each
TIMES = {"Fa": 1.0, "Fd": 0.6, "Fm": 1.0, "Fc": 0.6, "Bc": 0.6, "Bm": 2.0, "Bd": 0.6, "Ba": 2.0}
HALVES = {"Im": 1.0, "Wm": 1.0, "Ia": 1.0, "Wa": 1.0}  # of Bm and Ba
NET = {"Fd", "Fc", "Bc", "Bd"}
FORWARD = {"Fd": "Fa", "Fm": "Fd", "Fc": "Fm"}
BACKWARD = {"Bm": "Bc", "Bd": "Bm", "Ba": "Bd"}
SPLIT = {"Im": "Bc", "Wm": "Im", "Bd": "Im", "Ia": "Bd", "Wa": "Ia"}
MEGATRON = {"F": "Fa Fd Fm Fc", "B": "Bc Bm Bd Ba", "FB": "Bc Fa Bm Fd Bd Fm Fc Ba"}
FUSED = {"forward": 3.2, "input_grad": 3.2, "weight_grad": 2.0, "backward": 5.2, "transmit": 0.1}
STEPS = {  # braid; fused pairs of k = 0, of the compute of both, of k = 1
    "dualpipe": (108.5, 105.1, 114.7, 143.5),
    "dualpipe-v": (221.0, 211.2, 232.0, 294.4),
}
SIZES = [(p, p * units) for p in (2, 4, 6, 8, 12, 16) for units in (1, 2, 3, 5)]


def to_waits(last, within, ends="Ba"):
    """Return the waits of ops of stages up to `last`, for a backward with these rules and this end."""
    within = {**FORWARD, **within}

    def waits(letters, stage, m):
        if letters in within:
            return [((within[letters], stage, m), False)]
        if letters == "Fa":
            return [(("Fc", stage - 1, m), True)] if stage else []
        return [((ends, stage + 1, m), True) if stage < last else (("Fc", last, m), False)]

    return waits


def make_costs(times, hop=0.1):
    return pj.Costs(transmit=hop, others={letters.lower(): t for letters, t in times.items()})


def by_lane(row):
    return [[op for op in row if (op[0] in NET) == nearby] for nearby in (False, True)]


def braided(cells, orders):
    """Lanes of a row of forwards and backwards; what is a tuple is a pair."""
    ops = []
    for cell in cells:
        for letters in orders["".join(op[0] for op in cell)].split():
            _, stage, m = cell[0] if letters[0] == "F" else cell[-1]
            ops.append((letters, stage, m))
    return by_lane(ops)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_order_of_megatron(workers, stages):
    """Warm-up with a forward more, then pairs, in each the order in which ops are launched."""
    for microbatches in range(workers, 3 * workers + 1, workers):
        table = build("combined-1f1b", workers, microbatches, stages_per_worker=stages)
        for rank, row in enumerate(parsed(texts(table))):
            (ops,) = parsed([megatron_row(workers, microbatches, stages, workers, 1, rank)])
            warmup = min(2 * (workers - rank - 1) + (stages - 1) * workers + 1, len(ops) // 2)
            pairs = (len(ops) - 2 * warmup) // 2
            middle = ops[warmup : warmup + 2 * pairs]
            cells = [(op,) for op in ops[:warmup]]
            cells += list(zip(middle[::2], middle[1::2], strict=True))
            cells += [(op,) for op in ops[warmup + 2 * pairs :]]
            assert by_lane(row) == braided(cells, MEGATRON)


def test_the_braid_takes_123_seconds_where_1f1b_takes_162():
    braid = pj.evaluate(build("combined-1f1b", 4, 16), make_costs(TIMES))
    plain = pj.evaluate(build("1f1b", 4, 16), pj.Costs(forward=3.2, backward=5.2, transmit=0.1))
    assert (braid.makespan, plain.makespan) == pytest.approx((123.2, 162.4))
    assert braid.peak_in_flight.tolist() == [8, 6, 4, 2]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_combined_runs_as_the_event_loop(stages):
    rng = np.random.default_rng(stages)
    for workers in (1, 2, 4):
        for microbatches in (1, 5, 8):
            table = build("combined-1f1b", workers, microbatches, stages_per_worker=stages)
            times = {letters: float(rng.integers(0, 20)) / 8 for letters in TIMES}
            waits = to_waits(workers * stages - 1, BACKWARD)
            assert_runs(table, make_costs(times, 0.25), waits)


SPLIT_ORDERS = {
    "F": "Fa Fd Fm Fc",
    "B": "Bc Im Wm Bd Ia Wa",
    "I": "Bc Im Bd Ia",
    "W": "Wm Wa",
    "FB": "Bc Fa Fd Im Wm Bd Fm Fc Ia Wa",
}


@with_cases("name sizes", *read_cases("test_dualpipe_is_braided_pair_by_pair"))
def test_dualpipe_is_braided_pair_by_pair(name, sizes):
    rng = np.random.default_rng(5)
    for workers, microbatches in sizes:
        table = build(f"braided-{name}", workers, microbatches)
        fused = build(name, workers, microbatches)
        assert (table.placement == fused.placement).all()
        assert (table.pipe_of_microbatch == fused.pipe_of_microbatch).all()
        for row, plain in zip(parsed(texts(table)), fused.rows(), strict=True):
            cells = [[(op.phase.name, op.stage, op.microbatch) for op in c] for c in plain if c]
            assert by_lane(row) == braided(cells, SPLIT_ORDERS)
        times = {letters: float(rng.integers(0, 20)) / 8 for letters in (*TIMES, *HALVES)}
        waits = to_waits(table.num_stages - 1, SPLIT, "Ia")
        used = {letters: times[letters] for letters in table.grammar.letters}
        result = assert_runs(table, make_costs(used, 0.25), waits)
        assert result.peak_in_flight.tolist() == pj.schedules.peak_in_flight(fused).tolist()


@pytest.mark.parametrize("name", STEPS)
def test_what_a_fused_pair_takes_and_what_a_braid(name):
    """No k says it: 0 is less than the compute of a pair, and where pairs meet braids save more."""
    times = {k: v for k, v in {**TIMES, **HALVES}.items() if k not in ("Bm", "Ba")}
    result = [pj.evaluate(build(f"braided-{name}", 4, 16), make_costs(times)).makespan]
    for pair in ({"pair_factor": 0.0}, {"pair": 6.0}, {"pair_factor": 1.0}):
        result.append(pj.evaluate(build(name, 4, 16), pj.Costs(**FUSED, **pair)).makespan)
    assert result == pytest.approx(STEPS[name])


@pytest.mark.parametrize("name", ["combined-1f1b", "braided-dualpipe", "braided-dualpipe-v"])
def test_a_step_ends_with_all_reduces_and_updates(name):
    """Once the last gradient of a stage is there, though no op is called B or W."""
    table = build(name, 2, 4)
    times = {kind.time: 1.0 for kind in table.grammar.kinds.values()}
    plain = pj.evaluate(table, pj.Costs(others=times)).makespan
    run = pj.evaluate(table, pj.Costs(others=times, all_reduce=50.0, update=7.0))
    assert run.makespan > plain + 50.0
    assert pj.verify(pj.certificate(run)).ok
    assert pj.Phase.REDUCE_GRAD in pj.schedules.insert_sharding(table).used_phases


# encoders before a model: an event loop of the tests, closed forms, and bubbles that are filled
def encoder_waits(encoders, entry, stages):
    """A forward waits for those before it, of the model's first stage all encoders' last ones."""
    first = encoders * entry
    durations = [entry * (e + 1) - 1 for e in range(encoders)]

    def before(stage):
        if stage == first:
            return durations
        return [stage - 1] if stage > first or stage % entry else []

    def waits(letters, stage, m):
        if letters == "F":
            return [(("F", other, m), True) for other in before(stage)]
        after = [other for other in range(stages) if stage in before(other)]
        return [(("F", stage, m), False), *((("B", other, m), True) for other in after)]

    return waits


@pytest.mark.parametrize("name", ["encoders-1f1b", "filled-encoders"])
@pytest.mark.parametrize(("encoders", "entry"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_runs_as_the_event_loop(name, encoders, entry):
    rng = np.random.default_rng(encoders)
    for workers, microbatches in ((4, 1), (6, 3), (6, 8)):
        if name == "encoders-1f1b" and encoders * entry >= workers:
            continue
        options = {"encoders": encoders, "encoder_stages": entry}
        table = build(name, workers, microbatches, **options)
        times = {"F": rng.integers(1, 20) / 8, "B": rng.integers(1, 20) / 8}
        waits = encoder_waits(encoders, entry, table.num_stages)
        costs = pj.Costs(forward=times["F"], backward=times["B"], transmit=0.25)
        assert_runs(table, costs, waits)


@pytest.mark.parametrize("encoders", [1, 2, 3])
@pytest.mark.parametrize(("entry", "model"), [(1, 1), (1, 4), (2, 3), (3, 2)])
def test_encoders_side_by_side_are_one_chain_with_the_model(encoders, entry, model):
    """1F1B of K + L stages takes (M + K + L - 1)(F + B), however many encoders there are."""
    for microbatches in (1, 4, 9):
        workers = encoders * entry + model
        options = {"encoders": encoders, "encoder_stages": entry}
        table = build("encoders-1f1b", workers, microbatches, **options)
        result = pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0))
        assert result.makespan == 3.0 * (microbatches + entry + model - 1)
        chain = [entry + model - k for k in range(entry)] * encoders
        held = [min(n, microbatches) for n in [*chain, *range(model, 0, -1)]]
        assert result.peak_in_flight.tolist() == held


def filled_run(workers, microbatches, encoders, depth, share, **options):
    options |= {"encoders": encoders, "encoder_stages": depth, "encoder_share": share}
    table = build("filled-encoders", workers, microbatches, **options)
    parts = np.array([share] * (encoders * depth) + [1.0] * workers)
    return pj.evaluate(table, pj.Costs(forward=parts, backward=2 * parts))


@pytest.mark.parametrize("rounds", [2, 6])
@pytest.mark.parametrize(("workers", "entry", "share"), [(4, 1, 0.5), (4, 2, 0.25), (8, 2, 0.5)])
def test_bubbles_take_in_work_of_encoders(workers, rounds, entry, share):
    """A step is longer than the model alone by less than what each worker does for encoders."""
    microbatches = rounds * workers
    result = filled_run(workers, microbatches, 2, entry, share)
    alone = 3.0 * (microbatches + workers - 1)
    work = result.busy - 3.0 * microbatches
    assert work.sum() == pytest.approx(3.0 * share * microbatches * 2 * entry)
    assert result.makespan - alone < work.mean()
    assert result.makespan >= result.busy.max()


def test_filled_bubbles_of_the_example():
    """12 s of work more on each worker, 6 s more of the step: 9 s of bubble become 3."""
    result = filled_run(4, 16, 2, 1, 0.5)
    assert (result.makespan, result.busy.tolist()) == (63.0, [60.0] * 4)


@pytest.mark.parametrize("held", [1, 2, 3, None])
@pytest.mark.parametrize("entry", [1, 2])
def test_encoders_hold_no_more_than_they_may(entry, held):
    if held is not None and held < entry:
        return
    options = {"held": held, "encoder_stages": entry, "encoders": 2}
    table = build("filled-encoders", 4, 16, **options)
    copies = 4 // entry
    largest = []
    for row in parsed(texts(table)):
        level = dict.fromkeys(range(2 * entry), 0)
        for letters, stage, _ in row:
            if stage < 2 * entry:
                level[stage] += 1 if letters == "F" else -1
                largest.append(level[stage])
    assert max(largest) == (16 // copies if held is None else held)


# BitPipe (arXiv:2410.19367) against its authors' pictures and the event loop of the tests:
# those of wuhouming/BitPipe, docs/BitPipe_images (BitPipe-v.svg, and scale-moreb.svg, b): four
# workers, F = 1 and B = 2 slots of a stage
PICTURES = (Path(__file__).parent / "data" / "bitpipe.txt").read_text().split("\n\n")
_, FOUR, EIGHT, BEHIND = PICTURES
PAIR = pj.Costs(forward=1.0, backward=2.0)


def get_rows(picture):
    return [line.split() for line in picture.split("\n") if line]


def built(workers, microbatches):
    return build("bitpipe", workers, microbatches)


def named(op):
    """An op as the pictures name it, where 1 2 5 6 go down and 3 4 7 8 up."""
    unit, rest = divmod(op.microbatch, 4)
    letter = {"F": "fg", "B": "bc"}[op.phase.name][op.stage >= 4]
    return f"{letter}{4 * unit + 2 * (rest % 2) + rest // 2 + 1}"


@pytest.mark.parametrize(("pictures", "slots"), [((FOUR,), 28), ((EIGHT, BEHIND), 53)])
def test_runs_as_the_authors_draw_it(pictures, slots):
    """In the order drawn, as long, and no op later: the pictures leave some where others end."""
    cells = [[*chain(*rows)] for rows in zip(*map(get_rows, pictures), strict=True)]
    run = pj.evaluate(built(4, 4 * len(pictures)), PAIR)
    assert run.makespan == slots == max(map(len, cells))
    for w, row in enumerate(cells):
        held = run.table.phase[w].nonzero()[0]
        result = [named(*run.table.cell(w, slot)) for slot in held]
        assert result == list(dict.fromkeys(op for op in row if op != "."))
        late = [row.index(op) - run.start[w, slot] for op, slot in zip(result, held, strict=True)]
        assert set(late) <= {0, 1}


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.0, 2.0), (3.0, 4.0), (2.0, 1.0)])
def test_idle_time(forward, backward):
    """(P - 2) max(F, B), which at P = M = 4 is that of the picture, and more where units meet."""
    costs = pj.Costs(forward=forward, backward=backward)
    for p, m in SIZES:
        met = max(p - 3, 0) * (backward - forward) if backward > forward else 0
        met = (p - 2) * (forward - backward) if forward > backward else met
        idle = (p - 2) * max(forward, backward) + (m // p - 1) * met
        run = pj.evaluate(built(p, m), costs)
        assert run.makespan == pytest.approx(2 * m * (forward + backward) + idle)
        if forward == backward:
            assert run.bubble_ratio == pytest.approx((p - 2) / (4 * m + p - 2))


def test_activations_are_those_of_the_picture():
    """Stages of a worker's pipes between f or g and their b or c, counted slot by slot."""
    held = []
    for row in get_rows(FOUR):
        events = [op for k, op in enumerate(row) if op != "." and op not in row[:k]]
        levels = np.cumsum([1 if op[0] in "fg" else -1 for op in events])
        held.append(int(levels.max()))
    assert held == [7, 8, 8, 7]
    for p, m in SIZES:
        expected = [3 * p // 2 + 1 + min(r, p - 1 - r) for r in range(p)]
        assert pj.schedules.peak_in_flight(built(p, m)).tolist() == expected
        assert p != 4 or expected == held
