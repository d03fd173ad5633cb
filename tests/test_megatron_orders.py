"""Megatron-LM's interleaved order, cell by cell, and orders of slices.

The order is written down again from what `forward_backward_pipelining_with_interleaving` does: a
table of (microbatch, chunk) by groups, of which backwards take the chunks from behind; then so many
forwards of warm-up, forward and backward in turn, and the backwards that are left.
"""

import pytest

import pipejax as pj
from examples import sliced


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


def rows_of(table):
    return [[str(op) for cell in row for op in cell] for row in table.rows()]


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
            given = workers, microbatches, chunks, group, extra
            assert rows_of(table) == [megatron_row(*given, rank) for rank in range(workers)]
    assert refused


def test_larger_groups_hide_messages():
    """Groups of 8 take 111 where those of 4 take 119, of messages as long as a forward."""
    costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.0)
    found = {}
    for group in (None, 4, 8):
        size = {"num_workers": 4, "num_microbatches": 16, "group_size": group}
        run = pj.evaluate(pj.schedules.build("interleaved-1f1b", **size), costs)
        found[group] = run.makespan, int(run.peak_in_flight.max())
    assert found == {None: (119.0, 11), 4: (119.0, 11), 8: (111.0, 15)}


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_slices_shorten_the_ends_of_a_step(workers, slices):
    """Step time and activations of Seq1F1B (arXiv:2406.03488) and of TeraPipe (arXiv:2102.07988)."""
    microbatches = 8
    ops = microbatches * slices
    for build, held in (
        (sliced.seq_1f1b, [min(ops, workers - r - 1 + slices) for r in range(workers)]),
        (sliced.terapipe, [ops] * workers),
    ):
        table = build(workers, microbatches, slices)
        run = pj.evaluate(table, pj.Costs.per_worker(table, forward=1.0, backward=2.0))
        # all but the ends: idle is (P - 1) / K of a microbatch's forward and backward
        assert run.makespan == pytest.approx(3 * (microbatches + (workers - 1) / slices))
        assert run.peak_in_flight.tolist() == held
        assert run.busy.tolist() == pytest.approx([3 * microbatches] * workers)
    if slices == 1:
        whole = pj.schedules.build("1f1b", num_workers=workers, num_microbatches=microbatches)
        own = rows_of(sliced.seq_1f1b(workers, microbatches, 1))
        assert own == [[op for op in row if op] for row in rows_of(whole)]


def test_rules_hold_slices_in_order():
    rows = [["0F0.1", "0F0.0", "0B0.1", "0B0.0"]]
    with pytest.raises(pj.ScheduleError, match=r"0F0\.1 on worker 0 waits for 0F0\.0"):
        pj.ScheduleTable.from_rows(rows, grammar=pj.schedules.Grammar(slices=2))
