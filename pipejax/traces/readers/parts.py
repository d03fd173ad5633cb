"""Parts of a run, as they come from several files: counted, joined, each slice once."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Bool, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.record import INTEGERS, NONE, TIMES, LeftOut, Trace

Columns = dict[str, NumpyArray]  # by the names of the arrays of a Trace


def number_groups(*keys: NumpyArray) -> Int[NumpyArray, " rows"]:
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


# as files say it, in lower case with - between words; whatever is not here keeps its name
_NAMES = {
    "F": "f forward fwd forward-compute forward-step fwd-compute",
    "B": "b backward bwd backward-compute backward-step bwd-compute full-backward",
    "I": "i backward-input input-grad input-gradient dgrad backward-dgrad bwd-input "
    "backward-input-compute backward-dgrad-compute b-input",
    "W": "w backward-weight weight-grad weight-gradient wgrad backward-wgrad bwd-weight "
    "backward-weight-compute backward-wgrad-compute wgrad-compute b-weight",
    "SEND_F": "send-f forward-send send-forward fwd-send send-fwd",
    "RECV_F": "recv-f forward-recv recv-forward fwd-recv recv-fwd forward-receive",
    "SEND_B": "send-b backward-send send-backward bwd-send send-bwd",
    "RECV_B": "recv-b backward-recv recv-backward bwd-recv recv-bwd backward-receive",
}
# who ends together, by a part of the phase's name; the first that fits counts. "replicas": all
# copies of a stage, "ends": first and last worker of a pipeline, "all": all workers of all
# replicas, "alone": nobody that a trace of pipelines holds (tensor parallelism)
SCOPES: tuple[tuple[str, str], ...] = (
    ("layernorm", "alone"),
    ("embedding", "ends"),
    ("clip", "all"),
    ("all-gather", "replicas"),
    ("all_gather", "replicas"),
    ("allgather", "replicas"),
    ("reduce-scatter", "replicas"),
    ("reduce_scatter", "replicas"),
    ("all-reduce", "replicas"),
    ("all_reduce", "replicas"),
    ("allreduce", "replicas"),
)
_PHASE_OF = {name: phase for phase, names in _NAMES.items() for name in names.split()}


def phase_name(name: str) -> str:
    """Return the phase that a name means, or the name.

    Example:
      >>> phase_name("forward-compute"), phase_name("recv_backward"), phase_name("optimizer")
      ('F', 'RECV_B', 'optimizer')
    """
    return _PHASE_OF.get("-".join(name.strip().casefold().replace("_", " ").split()), name.strip())


def positions(
    names: Iterable[str], phase_names: Mapping[str, str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the position of the phase that each name means, by what the user says too."""
    meanings = {name: phase_names.get(name) or phase_name(name) for name in names}
    phases = tuple(dict.fromkeys(meanings.values()))
    return {name: phases.index(phase) for name, phase in meanings.items()}, phases


def collective_scope(phase: str) -> str | None:
    """Return the scope of a collective of this name; None if it is no collective."""
    return next((scope for part, scope in SCOPES if part in phase.lower()), None)


def check_phases(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a phase that is none of a table and whose slices are ops."""
    # It is one if its slices have a stage and a microbatch, or, where nothing has a microbatch, if
    # there are as many as forwards: a collective has no microbatch.
    count = np.bincount(columns["phase"], minlength=len(phases))
    for code, name in enumerate(phases):
        if name in Phase.__members__ or not count[code] or collective_scope(name):
            continue
        is_phase = columns["phase"] == code
        numbers = [columns[key][is_phase] >= 0 for key in ("stage", "microbatch") if key in columns]
        if "microbatch" in columns:
            is_op = len(numbers) == 2 and bool((numbers[0] & numbers[1]).any())
        else:
            is_op = "F" in phases and count[code] == count[phases.index("F")]
        if is_op:
            raise wrong(
                "files",
                f"must have phases by known names: {count[code]} slices of microbatches are of "
                f"phase {name!r}; say which op it is, as --columns W={name}",
            )


def with_split_backwards(
    columns: Columns, phases: Sequence[str]
) -> tuple[Int[NumpyArray, " slices"], tuple[str, ...]]:
    """Return phases in which a B that has a W of its own is an I, as most frameworks write it."""
    code = columns["phase"]
    if "W" not in phases or "B" not in phases:
        return code, (*phases,)
    phases = (*phases, *{"I"}.difference(phases))
    keys = [columns[name] for name in ("step", "replica", "stage", "microbatch")]
    _, key = np.unique(np.stack(keys), axis=1, return_inverse=True)
    is_w, is_b = (code == phases.index(name) for name in "WB")
    is_split = is_b & np.isin(key, key[is_w])
    return np.where(is_split, phases.index("I"), code), phases
