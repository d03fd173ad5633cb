"""The schedule tables of the tabular-schedule paper, op by op, as one dataset.

All slots are equal (F = B = 1 of a microbatch on a worker) and messages take no time: so the
orders are those that are published, for B = S.
"""

from functools import partial

from sweeps.design.timelines import sweep
from sweeps.kit.command import write

SHOWN = ("gpipe", "1f1b", "chimera", "chimera-asymmetric", "hanayo, 1 wave")
MICROBATCHES = 4
SLOTS = {"F": 1, "B": 1}


def main() -> None:
    """Write the dataset."""
    tables = partial(sweep, SHOWN, microbatches=MICROBATCHES, slots=SLOTS, delay=0.0)
    write(__doc__ or "", tables, lambda data: f"{data.sizes['op']} ops of all tables")


if __name__ == "__main__":
    main()
