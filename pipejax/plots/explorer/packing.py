"""Arrays in a page: whole numbers in as few bytes as they need, deflated, in base64.

The browser unpacks them with its own `DecompressionStream`. Positions are stored as steps from one
to the next: schedules repeat themselves, so the steps are few different numbers. Position 0 is
none, and stays 0; so that no step is 0 too, those that do not lead back are 1 larger.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipejax.base.array_types import NumpyArray

Packed = dict[str, Any]  # as from `pack`
WHOLE = ("int8", "int16", "int32")  # whole numbers take the first of these that holds them
REAL = "float64"
LEVEL = 6  # of zlib: higher ones take long for a few percent


def pack(arrays: Mapping[str, NumpyArray], steps: tuple[str, ...] = ()) -> Packed:
    """Pack arrays of numbers; those that are named in `steps` as steps between entries."""
    found = {}
    for name, array in arrays.items():
        flat = np.ravel(array)
        if name in steps:
            flat = flat.astype(np.int64)
            step = np.diff(flat[flat != 0], prepend=0)
            flat[flat != 0] = step + (step >= 0)
        found[name] = flat.astype(_smallest(flat))
    # the widest first: each array then begins at a multiple of its own width
    order = sorted(found, key=lambda name: -found[name].itemsize)
    content = b"".join(
        found[name].astype(found[name].dtype.newbyteorder("<")).tobytes() for name in order
    )
    return {
        "arrays": [
            [name, found[name].dtype.name, found[name].size, name in steps] for name in order
        ],
        "data": base64.b64encode(zlib.compress(content, LEVEL)).decode(),
    }


def _smallest(values: NumpyArray) -> str:
    if values.dtype.kind == "f":
        return REAL
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
    return next(kind for kind in WHOLE if largest <= np.iinfo(kind).max)
