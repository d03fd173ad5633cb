"""Tables that PyTorch's schedule classes generate and lower, without processes: stages are stubs."""

import csv
import io
import itertools
import types

from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

SINGLE = {"GPipe": theirs.ScheduleGPipe, "1F1B": theirs.Schedule1F1B}
MULTI = {
    "LoopedBFS": theirs.ScheduleLoopedBFS,
    "Interleaved1F1B": theirs.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": theirs.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": theirs.ScheduleZBVZeroBubble,
    "DualPipeV": theirs.ScheduleDualPipeV,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
NO_LOSS = {"loss_fn": lambda output, target: output}


def stubs(rank, ranks, per_rank, style):
    """Stand-ins of the stages of one rank: what the constructors of the schedules read."""
    stages = generate_rank_to_stage_mapping(ranks, ranks * per_rank, style=style)[rank]
    return [
        types.SimpleNamespace(
            stage_index=stage,
            num_stages=ranks * per_rank,
            group_size=ranks,
            group_rank=rank,
            is_first=stage == 0,
            is_last=stage == ranks * per_rank - 1,
            has_backward=True,
            submod=None,
        )
        for stage in stages
    ]


def runtime(ranks, per_rank, microbatches):
    """PyTorch's runtime without a table: it lowers what it is given."""
    return theirs._PipelineScheduleRuntime(
        stubs(0, ranks, per_rank, "loop"), microbatches, **NO_LOSS
    )


def compute_only(name, ranks, per_rank, microbatches):
    """The actions by rank of one of PyTorch's schedules before lowering; None where it has none."""
    if name in SINGLE:
        if per_rank > 1 or (name == "1F1B" and microbatches < ranks):
            return None
        order = SINGLE[name](stubs(0, ranks, 1, "loop")[0], microbatches, **NO_LOSS).pipeline_order
        rows = {
            rank: [a for a in row if a is None or a.is_compute_op] for rank, row in order.items()
        }
        if name == "1F1B":  # the last rank counts its forwards from 1
            rows[ranks - 1] = [
                a._replace(microbatch_index=a.microbatch_index - 1)
                if a and a.computation_type == theirs.F
                else a
                for a in rows[ranks - 1]
            ]
        return rows
    style = "v" if name in V_SHAPED else "loop"
    try:
        return MULTI[name](stubs(0, ranks, per_rank, style), microbatches, **NO_LOSS).pipeline_order
    except ValueError:  # it says that these sizes are not for this schedule
        return None


def lowered(actions, ranks, per_rank, microbatches):
    """The actions by rank with communication, as PyTorch's runtime executes them."""
    schedule = runtime(ranks, per_rank, microbatches)
    copied = {rank: list(row) for rank, row in actions.items()}
    schedule._prepare_schedule_with_comms(copied)
    return schedule.pipeline_order_with_comms


def texts(actions):
    """Cells as text, row by row."""
    return [
        ["" if action is None else str(action) for action in actions[rank]]
        for rank in sorted(actions)
    ]


def as_csv(rows):
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def grid(sizes, per_ranks, counts):
    """All that the classes generate: (name, ranks, stages per rank, microbatches, actions)."""
    names = [*SINGLE, *MULTI]
    for name, ranks, per_rank in itertools.product(names, sizes, per_ranks):
        for count in counts(ranks):
            try:
                actions = compute_only(name, ranks, per_rank, count)
            except (AssertionError, IndexError):  # it generates nothing that can run
                actions = None
            if actions is not None:
                yield name, ranks, per_rank, count, actions
