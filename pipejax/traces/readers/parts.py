"""Parts of a run, as they come from several files: counted, joined, each slice once."""

from collections.abc import Iterable, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.traces.record import INTEGERS, NONE, TIMES, LeftOut, Trace

Columns = dict[str, NumpyArray]  # by the names of the arrays of a Trace


def group_of(*keys: NumpyArray) -> Int[NumpyArray, " rows"]:
    """Number the rows by their keys: equal keys, equal number, ascending as the keys are."""
    number = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        _, place = np.unique(key, return_inverse=True)
        number = number * (int(place.max(initial=0)) + 1) + place
        _, number = np.unique(number, return_inverse=True)
    return number


def turn_in(group: Int[NumpyArray, " rows"], *order: NumpyArray) -> Int[NumpyArray, " rows"]:
    """Count the rows of each group from 0, in the order of keys, the first of which decides."""
    rows = np.lexsort([*reversed(order), group])
    first = np.flatnonzero(np.diff(group[rows], prepend=-1))
    sizes = np.diff(first, append=len(rows))
    turn = np.empty(len(rows), np.int64)
    turn[rows] = np.arange(len(rows)) - np.repeat(first, sizes)
    return turn


def sound(
    checks: Sequence[tuple[Bool[NumpyArray, " rows"], str]], what: str
) -> tuple[Bool[NumpyArray, " rows"], list[LeftOut]]:
    """Return which rows pass all checks (fault, why), and how many fall out, each by its first."""
    passes = np.ones(len(checks[0][0]), bool)
    left_out = []
    for is_wrong, why in checks:
        if count := int(np.sum(is_wrong & passes)):
            left_out.append(LeftOut(what, why, count))
        passes &= ~is_wrong
    return passes, left_out


def nothing(left_out: Iterable[LeftOut]) -> Trace:
    """Return a trace without slices."""
    columns = {name: np.zeros(0) for name in (*INTEGERS, *TIMES)}
    return Trace.of(columns, (), left_out)


def joined(traces: Sequence[Trace], source: str) -> Trace:
    """Put the parts of a run together; what stands twice in the same words counts once."""
    traces = [trace for trace in traces if len(trace) or trace.left_out]
    phases = tuple(dict.fromkeys(t.phases[k] for t in traces for k in np.unique(t.phase).tolist()))
    columns = {
        name: np.concatenate([np.zeros(0), *(getattr(trace, name) for trace in traces)])
        for name in (*INTEGERS, *TIMES)
    }
    coded = [
        np.array([phases.index(name) if name in phases else NONE for name in trace.phases])
        for trace in traces
    ]
    columns["phase"] = np.concatenate(
        [np.zeros(0), *(code[t.phase] for code, t in zip(coded, traces, strict=True) if len(t))]
    )
    left_out = [entry for trace in traces for entry in trace.left_out]
    rows = np.lexsort([*columns.values()])
    is_new = np.zeros(len(rows), bool)
    is_new[:1] = True
    for values in columns.values():
        is_new[1:] |= np.diff(values[rows]) != 0
    if doubled := int(np.sum(~is_new)):
        left_out.append(LeftOut("slices", "they stand twice, alike to the last digit", doubled))
    columns = {name: values[np.sort(rows[is_new])] for name, values in columns.items()}
    return Trace.of(
        columns,
        phases,
        left_out,
        source=source,
        known_workers=max((trace.known_workers for trace in traces), default=0),
        inferred=tuple(dict.fromkeys(text for trace in traces for text in trace.inferred)),
        has_step_clocks=any(trace.has_step_clocks for trace in traces),
    )
