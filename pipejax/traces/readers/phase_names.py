"""What files call the phases, and which backward is only the part for the input."""

from collections.abc import Iterable, Sequence

import numpy as np

from pipejax.base.array_types import Int, NumpyArray
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
_PHASE_OF = {name: phase for phase, names in _NAMES.items() for name in names.split()}


def phase_of(name: str) -> str:
    """Return the phase that a name means, or the name.

    Example:
      >>> phase_of("forward-compute"), phase_of("recv_backward"), phase_of("optimizer")
      ('F', 'RECV_B', 'optimizer')
    """
    return _PHASE_OF.get("-".join(name.strip().casefold().replace("_", " ").split()), name.strip())


def positions(names: Iterable[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the position of the phase that each name means, and the phases."""
    meant = {name: phase_of(name) for name in names}
    phases = tuple(dict.fromkeys(meant.values()))
    return {name: phases.index(phase) for name, phase in meant.items()}, phases


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
