"""What labels of slices mean: PyTorch's pipelining writes `PP:` and a cell around its actions."""

import re

from pipejax.traces.record import NONE

Cell = tuple[tuple[str, int, int], ...]  # phase, stage, microbatch; two of a fused pair

PYTORCH = "PP:"
RECEIVES = ("gloo:recv", "nccl:recv")  # what a RECV does, until somebody waits for it
STEP = "ProfilerStep#"
_CELL = re.compile(r"(\d{1,9})([A-Z](?:[A-Z_]*[A-Z])?)(\d{0,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")
# schedules of PyTorch with one stage a rank do not say which
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,9})")


def cell_of(label: str) -> Cell:
    """Return the ops of a label, nothing for one that is none.

    Example:
      >>> cell_of("PP:0F1"), cell_of("0UNSHARD"), cell_of("aten::mm")
      ((('F', 0, 1),), (('UNSHARD', 0, -1),), ())
      >>> cell_of("PP:(2F1;3B0)OVERLAP_F_B")
      (('F', 2, 1), ('B', 3, 0))
      >>> cell_of("Backward 3")
      (('B', -1, 3),)
    """
    if single := _SINGLE.fullmatch(label):
        return ((single[1][0], NONE, int(single[2])),)
    label = label.removeprefix(PYTORCH)
    pair = _PAIR.fullmatch(label)
    found = [_CELL.fullmatch(text) for text in (pair.groups() if pair else (label,))]
    return tuple(
        (cell[2], int(cell[1]), int(cell[3] or NONE)) for cell in found if cell is not None
    )
