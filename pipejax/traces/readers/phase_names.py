"""What files call the phases, and which backward is only the part for the input."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.cells.ops import Phase
from pipejax.traces.readers.parts import Columns

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


def phase_of(name: str) -> str:
    """Return the phase that a name means, or the name.

    Example:
      >>> phase_of("forward-compute"), phase_of("recv_backward"), phase_of("optimizer")
      ('F', 'RECV_B', 'optimizer')
    """
    return _PHASE_OF.get("-".join(name.strip().casefold().replace("_", " ").split()), name.strip())


def positions(
    names: Iterable[str], given: Mapping[str, str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the position of the phase that each name means, by what the user says too."""
    meant = {name: given.get(name) or phase_of(name) for name in names}
    phases = tuple(dict.fromkeys(meant.values()))
    return {name: phases.index(phase) for name, phase in meant.items()}, phases


def scope_of(phase: str) -> str | None:
    """Return the scope of a collective of this name; None if it is no collective."""
    return next((scope for part, scope in SCOPES if part in phase.lower()), None)


def check_phases(columns: Columns, phases: Sequence[str]) -> None:
    """Refuse a phase that is none of a table and whose slices are ops."""
    # It is one if its slices have a stage and a microbatch, or, where nothing has a microbatch, if
    # there are as many as forwards: a collective has no microbatch.
    count = np.bincount(columns["phase"], minlength=len(phases))
    for code, name in enumerate(phases):
        if name in Phase.__members__ or not count[code] or scope_of(name):
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
    of_w, of_b = (code == phases.index(name) for name in "WB")
    is_split = of_b & np.isin(key, key[of_w])
    return np.where(is_split, phases.index("I"), code), phases
