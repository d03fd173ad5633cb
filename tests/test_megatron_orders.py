"""Megatron-LM's interleaved order, cell by cell.

The order is written down again from what `forward_backward_pipelining_with_interleaving` does: a
table of (microbatch, chunk) by groups, of which backwards take the chunks from behind; then so many
forwards of warm-up, forward and backward in turn, and the backwards that are left.
"""

import pytest
from reference import texts

import pipejax as pj


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
