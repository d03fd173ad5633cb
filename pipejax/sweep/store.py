"""The Zarr store of a sweep: written block by block, and never half a block taken for a whole.

A block's values are written first, its checksum last. A block counts as whole if its checksum is
there and what is read back agrees with it; all others are evaluated and written again. Nothing in
the store depends on when or in how many pieces it was written.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from pipejax.base.array_types import NumpyArray
from pipejax.base.provenance import provenance
from pipejax.sweep.axes import label
from pipejax.sweep.blocks import Block, block_shape, get_block, num_blocks
from pipejax.sweep.declaration import Sweep
from pipejax.sweep.variables import Variable, variables_of

CHECKSUM = "block_checksum"
SAME = ("grid", "pipejax", "jax", "numpy", "code")  # what blocks of one dataset have in common
FORMAT: Any = 2  # of Zarr: it has a specified form of text
TEXT = "str"


class Store:
    """A store that is being written.

    Example:
      >>> from pathlib import Path
      >>> from pipejax.sweep import evaluate_block, get_block, read_sweep
      >>> sweep = read_sweep({"schedules": "1f1b", "workers": 4, "minibatch": 8,
      ...     "microbatch_size": [1, 2], "models": "gpt-22b", "systems": "h100"})
      >>> path = Path(tempfile.mkdtemp()) / "out.zarr"
      >>> create_store(sweep, path)
      >>> store = Store(sweep, path)
      >>> store.is_whole(0)
      False
      >>> store.write(get_block(sweep, 0), evaluate_block(sweep, get_block(sweep, 0)))
      >>> store.is_whole(0)
      True
    """

    def __init__(self, sweep: Sweep, path: Path) -> None:
        """Open a store that `create_store` made."""
        self.sweep = sweep
        group: Any = zarr.open_group(str(path), mode="r+")
        self._arrays: dict[str, Any] = dict(group.arrays())

    def write(self, block: Block, values: dict[str, Any]) -> None:
        """Write a block, its checksum last.

        Args:
          block: which part of the grid.
          values: array by variable.
        """
        for name, region in self._regions(block):
            self._arrays[name][region] = values[name]
        parts = [values[name] for name, _ in self._regions(block)]
        self._arrays[CHECKSUM][block.number : block.number + 1] = np.array([_checksum(parts)])

    def is_whole(self, number: int) -> bool:
        """Return whether a block is there with all its values.

        Args:
          number: of the block.

        Returns:
          Whether its checksum is there and what is stored agrees with it.
        """
        block = get_block(self.sweep, number)
        try:
            kept = int(self._arrays[CHECKSUM][number])
            if kept == 0:
                return False
            parts = [self._arrays[name][region] for name, region in self._regions(block)]
        except (OSError, ValueError, RuntimeError, TypeError):  # a file that was cut short
            return False
        return kept == _checksum(parts)

    def _regions(self, block: Block) -> Iterator[tuple[str, tuple[slice, ...]]]:
        """Variables of a block, and where they lie in their arrays.

        What does not depend on the system is written with the first block of systems.
        """
        axes = list(zip(self.sweep.axes, block.low, block.high, strict=True))
        shapes = len(self.sweep.shape_axes)
        is_first = not any(low for _, low, _ in axes[shapes:])
        for name, variable in variables_of(self.sweep).items():
            if variable.per_system or is_first:
                used = axes if variable.per_system else axes[:shapes]
                box = [slice(low, high) for axis, low, high in used if axis.is_listed]
                yield name, (*box, *(slice(None) for _ in variable.extra))


def _checksum(parts: list[NumpyArray]) -> int:
    """CRC of values, text included; 0 stands for a block that is not there."""
    total = 0
    for part in parts:
        is_text = part.dtype.kind not in "fi"
        data = "\0".join(map(str, part.ravel())).encode() if is_text else part.tobytes()
        total = zlib.crc32(data, total)
    return total + 1


def create_store(sweep: Sweep, path: Path) -> None:
    """Make a store without values: axes, units, provenance; all of it is there or nothing."""
    with _draft(sweep, path) as draft:
        draft.chmod(0o777 & ~_umask())
        os.rename(draft, path)


def restore(sweep: Sweep, path: Path) -> None:
    """Put back axes, units and metadata that were damaged; a run without a break has the same."""
    with _draft(sweep, path) as draft:
        for made in draft.rglob("*"):
            there = path / made.relative_to(draft)
            if made.is_file() and not (there.is_file() and _same_file(made, there)):
                there.parent.mkdir(parents=True, exist_ok=True)
                os.replace(made, there)


def _same_file(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


@contextlib.contextmanager
def _draft(sweep: Sweep, path: Path) -> Iterator[Path]:
    """Make a store without values beside its place; what is left of it goes at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.new-"
    for left in path.parent.glob(f"{prefix}*"):  # by a process that was killed
        with contextlib.suppress(OSError), locked(left):
            shutil.rmtree(left)
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        with locked(draft):
            _fill(sweep, draft)
            yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fill(sweep: Sweep, path: Path) -> None:
    template = _coordinates(sweep)
    template.to_zarr(path, zarr_format=FORMAT, consolidated=False)
    group: Any = zarr.open_group(str(path), mode="r+")
    size = dict(zip([axis.name for axis in sweep.axes], block_shape(sweep), strict=True))
    for name, variable in variables_of(sweep).items():
        used = sweep.axes if variable.per_system else sweep.shape_axes
        dims = [axis.name for axis in used if axis.is_listed]
        group.create_array(
            name,
            shape=(*(sweep.sizes[dim] for dim in dims), *variable.extra_shape),
            chunks=(*(size[dim] for dim in dims), *variable.extra_shape),
            dtype=variable.dtype,
            # a fill value is read as "missing": only numbers that can be missing have one
            fill_value=variable.fill if variable.dtype.startswith("float") else None,
            attributes=_attributes(variable, [*dims, *(dim for dim, _ in variable.extra)]),
        )
    group.create_array(
        CHECKSUM,
        shape=(num_blocks(sweep),),
        chunks=(1,),
        dtype="int64",
        fill_value=None,
        attributes={
            "_ARRAY_DIMENSIONS": ["block"],
            "long_name": "CRC-32 of the values of a block, plus 1; 0 if it is missing",
        },
    )
    zarr.consolidate_metadata(str(path), zarr_format=FORMAT)


def _attributes(variable: Variable, dims: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"_ARRAY_DIMENSIONS": dims, "long_name": variable.meaning}
    if variable.dtype != TEXT:
        found["units"] = variable.unit
    if variable.flags:
        found["flag_values"] = list(range(len(variable.flags)))
        found["flag_meanings"] = " ".join(flag.replace(" ", "_") for flag in variable.flags)
    return found


def _coordinates(sweep: Sweep) -> xr.Dataset:
    """Labels of all axes; a single value becomes a coordinate without a dimension."""
    labels: dict[str, Any] = {}
    for axis in sweep.axes:
        values = [label(value) for value in axis.values]
        attributes = {"units": axis.unit} if axis.unit else {}
        if axis.is_listed:
            labels[axis.name] = (axis.name, values, attributes)
        elif values[0] is not None:
            labels[axis.name] = ((), values[0], attributes)
    for variable in variables_of(sweep).values():
        labels |= {name: (name, list(entries)) for name, entries in variable.extra}
    attributes = {"title": sweep.title, "grid": sweep.to_json(), "dtype": sweep.dtype}
    return xr.Dataset(coords=labels, attrs=attributes | provenance())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a folder for this process, which the system lets go when the process ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(0, "another process writes to it", str(path)) from None
        yield
    finally:
        os.close(handle)


def check_same(sweep: Sweep, path: Path) -> None:
    """Check that a store holds this sweep and was begun by this code."""
    try:
        found = dict(zarr.open_group(str(path), mode="r").attrs)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # whatever it is
        found = {}
    if "grid" not in found:
        raise ValueError(f"{path} is not the dataset of a sweep: nothing is written to it")
    wanted = {"grid": sweep.to_json(), **provenance()}
    for key in SAME:
        if found.get(key) != wanted[key]:
            if key == "grid":
                raise ValueError(
                    f"{path} holds another grid: give another --out, or the file it was begun with"
                )
            raise ValueError(
                f"{path} was begun with {key} {found.get(key)}, this is "
                f"{wanted[key]}: its blocks would not match"
            )
