"""Logs of Megatron: they hold times of steps and timers, but no slice of time."""

from pathlib import Path

from pipejax.traces.record import LeftOut


def refused(path: Path) -> LeftOut:
    """Say what reads a log, and what writes slices: a timer is a sum, or its extremes."""
    return LeftOut(
        str(path),
        "a log of Megatron has times of steps and sums of timers, not when an op ran: pipejax init "
        "rows --from LOG reads its steps; Primus writes ops with --dump_pp_data, PyTorch's "
        "pipelining under torch.profiler",
    )
