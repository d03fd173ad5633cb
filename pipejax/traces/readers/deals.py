"""Deals of ranks to replicas and workers, where labels do not state them."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pipejax.base.checks import ArgumentError, wrong
from pipejax.traces.readers.parts import Columns
from pipejax.traces.record import OP_INPUTS, OPS, Trace, transfers

Places = Sequence[tuple[int, int]]  # replica and worker of each rank
MAX_LEAD = 0.1  # of an op before its inputs, relative to the median op
_OP_FIELDS = ("phase", "stage", "microbatch")


def deal_ranks(
    ranks: Sequence[int],
    parts: Sequence[Columns],
    world: int,
    replicas: int,
    build: Callable[[Places, int], Trace],
) -> Trace:
    """Make the trace of the only deal of ranks in which ops follow their inputs.

    `parts` are the ops of each rank; `build` makes a trace from the places of the ranks and the
    number of workers. `replicas` is the stated number, or 0.
    """
    ops = [
        {*zip(*(part[name][part["stage"] >= 0].tolist() for name in _OP_FIELDS), strict=True)}
        for part in parts
    ]
    # a pipeline runs every op once, so the ranks that share an op are as many as the replicas
    counts = Counter(op for rank_ops in ops for op in rank_ops if op[2] >= 0)
    if replicas and world % replicas:
        raise wrong("replicas", f"must divide the {world} ranks of the run, got {replicas}")
    faults: list[ArgumentError] = []

    def list_traces(replicas: int) -> list[Trace]:
        traces = []
        for places in _list_deals(ranks, ops, world, replicas):
            try:
                traces.append(build(places, world // replicas))
            except ArgumentError as error:
                faults.append(error)
        return traces

    number = replicas or max(counts.values(), default=1)
    traces = list_traces(number if world % number == 0 else 1)
    if not (any(map(_is_causal, traces)) or replicas or any(ops)):
        divisors = [number for number in range(2, world // 2 + 1) if world % number == 0]
        possible = [number for number in divisors if any(map(_is_causal, list_traces(number)))]
        if possible:
            options = " or ".join(f"--replicas {number}" for number in (*possible, 1))
            why = f"as one pipeline, the {world} ranks need other clocks; give {options}"
            raise wrong("files", f"must state their replicas: {why}")
    if faults and not traces:
        raise faults[0]
    return _select_trace(traces, number)


def _list_deals(
    ranks: Sequence[int], ops: Sequence[set[tuple[int, ...]]], world: int, replicas: int
) -> list[Places]:
    """List the deals, by turns or by blocks, in which no replica runs an op twice."""
    by_turns = [(rank % replicas, rank // replicas) for rank in ranks]
    by_blocks = [divmod(rank, world // replicas) for rank in ranks]
    deals: list[Places] = []
    for places in [by_turns, by_blocks] if by_turns != by_blocks else [by_turns]:
        runs = Counter[object]()
        for (replica, _), rank_ops in zip(places, ops, strict=True):
            runs.update((replica, op) for op in rank_ops if op[2] >= 0)
        if replicas == 1 or max(runs.values(), default=1) == 1:
            deals.append(places)
    return deals


def _is_causal(trace: Trace) -> bool:
    """Return whether ops start after their inputs, by the clocks as recorded."""
    producers, consumers = transfers(trace, OP_INPUTS)
    lead = (trace.end[producers] - trace.start[consumers]).max(initial=0.0)
    seconds = (trace.end - trace.start)[trace.has_phase(OPS)]
    return bool(lead <= MAX_LEAD * np.median(seconds)) if len(seconds) else True


def _select_trace(traces: Sequence[Trace], replicas: int) -> Trace:
    """Return the only trace whose ops start after their inputs; of one trace, this."""
    causal = [trace for trace in traces if _is_causal(trace)] if len(traces) > 1 else traces
    if len(causal) > 1:  # replicas in lockstep follow any deal: workers are in order of stages
        causal = [trace for trace in causal if _has_ordered_workers(trace)]
    if len(causal) != 1:
        why = f"{replicas} replicas run the same ops, and {len(causal)} deals of ranks can be"
        raise wrong("files", f"must tell replicas apart: {why}; give the files of one replica")
    return causal[0]


def _has_ordered_workers(trace: Trace) -> bool:
    """Return whether the first stages of the workers of each replica ascend."""
    first = np.full((len(trace.replicas), trace.workers), np.iinfo(np.int64).max)
    is_op = trace.stage >= 0
    np.minimum.at(first, (trace.replica[is_op], trace.worker[is_op]), trace.stage[is_op])
    return bool((np.diff(first) > 0).all())
