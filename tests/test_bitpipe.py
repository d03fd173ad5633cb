"""BitPipe (arXiv:2410.19367) against its authors' pictures and the event loop of the tests.

The pictures are those of wuhouming/BitPipe, docs/BitPipe_images (BitPipe-v.svg, and scale-moreb.svg,
b): four workers, F = 1 and B = 2 slots of a stage.
"""

from itertools import chain

import numpy as np
import pytest

import pipejax as pj

# f, g: forwards on a worker's first and second stage of a pipe; b, c: their backwards
FOUR = """
f1 . f2 f3 g3 f4 g4 g1 c1 c1 g2 . c2 c2 c3 c3 b3 b3 c4 c4 b4 b4 b1 b1 . . b2 b2
. f1 f3 f2 f4 g3 g1 g4 g2 . c1 c1 c3 c3 c2 c2 c4 c4 b3 b3 b1 b1 b4 b4 b2 b2 . .
. f3 f1 f4 f2 g1 g3 g2 g4 . c3 c3 c1 c1 c4 c4 c2 c2 b1 b1 b3 b3 b2 b2 b4 b4 . .
f3 . f4 f1 g1 f2 g2 g3 c3 c3 g4 . c4 c4 c1 c1 b1 b1 c2 c2 b2 b2 b3 b3 . . b4 b4
"""
EIGHT = """
f1 . f2 f3 g3 f4 g4 g1 c1 c1 g2 . c2 c2 c3 c3 b3 b3 c4 c4 b4 b4 b1 b1 f5 f6 b2 b2
. f1 f3 f2 f4 g3 g1 g4 g2 . c1 c1 c3 c3 c2 c2 c4 c4 b3 b3 b1 b1 b4 b4 b2 b2 f5 f7
. f3 f1 f4 f2 g1 g3 g2 g4 . c3 c3 c1 c1 c4 c4 c2 c2 b1 b1 b3 b3 b2 b2 b4 b4 f7 f5
f3 . f4 f1 g1 f2 g2 g3 c3 c3 g4 . c4 c4 c1 c1 b1 b1 c2 c2 b2 b2 b3 b3 f7 f8 b4 b4
"""
BEHIND = """
f7 g7 f8 g8 g5 c5 c5 g6 . c6 c6 c7 c7 b7 b7 c8 c8 b8 b8 b5 b5 . . b6 b6
f6 f8 g7 g5 g8 g6 . c5 c5 c7 c7 c6 c6 c8 c8 b7 b7 b5 b5 b8 b8 b6 b6 . .
f8 f6 g5 g7 g6 g8 . c7 c7 c5 c5 c8 c8 c6 c6 b5 b5 b7 b7 b6 b6 b8 b8 . .
f5 g5 f6 g6 g7 c7 c7 g8 . c8 c8 c5 c5 b5 b5 c6 c6 b6 b6 b7 b7 . . b8 b8
"""
PAIR = pj.Costs(forward=1.0, backward=2.0)


def get_rows(picture):
    return [line.split() for line in picture.split("\n") if line]


def built(workers, microbatches):
    return pj.schedules.build("bitpipe", num_workers=workers, num_microbatches=microbatches)


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


SIZES = [(p, p * units) for p in (2, 4, 6, 8, 12, 16) for units in (1, 2, 3, 5)]


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
