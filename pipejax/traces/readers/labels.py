"""Labels of slices: the ops that they name."""

import re

from pipejax.traces.record import NONE

Cell = tuple[tuple[str, int, int], ...]  # phase, stage, microbatch; two of a fused pair

PYTORCH = "PP:"
_CELL = re.compile(r"(\d{1,9})([A-Z](?:[A-Z_]*[A-Z])?)(\d{0,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")
# label of PyTorch's schedules with one stage per rank, without the stage
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,9})")


def parse_label(label: str) -> Cell:
    """Return the ops of a label; an empty tuple for any other text.

    Example:
      >>> parse_label("PP:0F1"), parse_label("0UNSHARD"), parse_label("aten::mm")
      ((('F', 0, 1),), (('UNSHARD', 0, -1),), ())
      >>> parse_label("PP:(2F1;3B0)OVERLAP_F_B")
      (('F', 2, 1), ('B', 3, 0))
      >>> parse_label("Backward 3")
      (('B', -1, 3),)
    """
    if single := _SINGLE.fullmatch(label):
        return ((single[1][0], NONE, int(single[2])),)
    label = label.removeprefix(PYTORCH)
    pair = _PAIR.fullmatch(label)
    ops = [_CELL.fullmatch(text) for text in (pair.groups() if pair else (label,))]
    return tuple((cell[2], int(cell[1]), int(cell[3] or NONE)) for cell in ops if cell is not None)
