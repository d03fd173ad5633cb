"""Dataset of a sweep: its variables, its blocks, and its Zarr store.

A block is evaluated and written at once, with the checksum last. A block without a correct checksum
is evaluated again. The content of the store does not depend on the order of writes.
"""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
import zarr

from pipejax.analysis.step.outputs import SWEPT, StepOutput
from pipejax.base.array_types import NumpyArray
from pipejax.base.files import (
    ATTRIBUTES,
    DRAFT,
    LOCK,
    ORIGIN,
    check_origin,
    draft_folder,
    locked,
    name_in_errors,
    provenance,
    refuse_existing,
)
from pipejax.costs.system.parts import RESOURCES
from pipejax.sweep.declaration import Sweep, label

STATUS = ("not evaluated", "feasible", "out of memory", "illegal")
FEASIBLE, OUT_OF_MEMORY, ILLEGAL = 1, 2, 3
NO_RESOURCE = -1
POINTS = 1 << 17  # largest number of points in a block: about a second of work, files of a megabyte
CHECKSUM = "block_checksum"
SAME = ("grid", *ORIGIN)  # attributes that all blocks of a dataset share
FORMAT: Any = 2  # version of Zarr's format, which specifies how texts are stored
TEXT = "str"
PARTIAL = "*.partial"  # incomplete files of a killed process
SHAPES = 8  # largest number of programs in a block; each takes time at any number of systems


class Variable(NamedTuple):
    """A variable of the dataset."""

    dtype: str  # data type; "str" for text
    fill: Any  # value at points that are not evaluated
    unit: str
    meaning: str  # description, the "long_name"
    per_system: bool  # whether the variable has the axes of systems
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()  # () or ((further dimension, labels),)
    flags: tuple[str, ...] = ()  # meanings of the variable's values 0, 1, ..

    def places(self, sweep: Sweep) -> list[int]:
        """Return the indices of the variable's axes that are dimensions of the dataset."""
        used = sweep.axes if self.per_system else sweep.shape_axes
        return [place for place, axis in enumerate(used) if axis.is_listed]

    def empty(self, num_systems: int) -> NumpyArray:
        """Return an array of fill values for one schedule and workload, (systems, ...) or ()."""
        shape = ((num_systems,) if self.per_system else ()) + self.extra_shape
        return np.full(shape, self.fill, object if self.dtype == "str" else self.dtype)

    @property
    def extra_shape(self) -> tuple[int, ...]:
        """Return the size of the further dimension, such as resources; () without one."""
        return tuple(len(labels) for _, labels in self.extra)


def sweep_variables(sweep: Sweep) -> Mapping[str, Variable]:
    """Return {name: variable} of the dataset of a sweep."""
    (choices,) = (axis.values for axis in sweep.shape_axes if axis.name == "schedule")
    has_plans = any(choice.is_planned for choice in choices)  # then tables differ by system
    variables = {
        "step_time": Variable(sweep.dtype, np.nan, "s", "time of one training step", True),
        "status": Variable(
            "int8", 0, "1", "whether the point is legal and fits the memory", True, flags=STATUS
        ),
        "memory_bytes": Variable(
            "float64", np.nan, "B", "need of the fullest accelerator", has_plans
        ),
        "reason": Variable("str", "", "1", "why the point is illegal", False),
    }
    outputs = {name: _output_variable(SWEPT[name], sweep.dtype) for name in sweep.outputs}
    return variables | outputs


def _output_variable(output: StepOutput, dtype: str) -> Variable:
    """Return the variable of the dataset that holds an output."""
    return Variable(
        dtype=output.dtype or dtype,
        fill=NO_RESOURCE if output.resources == "index" else np.nan,
        unit=output.unit,
        meaning=output.meaning,
        per_system=True,
        extra=(("resource", RESOURCES),) if output.resources == "dimension" else (),
        flags=RESOURCES if output.resources == "index" else (),
    )


class Block(NamedTuple):
    """A box-shaped part of the grid, which is evaluated and written at once."""

    number: int  # counted from 0; the last axis varies fastest
    cuts: tuple[slice, ...]  # (axes) slice of the block on each axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of values in the block along each axis."""
        return tuple(cut.stop - cut.start for cut in self.cuts)

    @property
    def num_points(self) -> int:
        """Count the points of the block."""
        return math.prod(self.shape)


def block_shape(sweep: Sweep) -> tuple[int, ...]:
    """Choose the number of values in a block along each axis."""
    # From the last axis to the first, a block gets as many values as `POINTS` and `SHAPES` allow.
    counts: list[int] = []
    points = shapes = 1
    for place in reversed(range(len(sweep.axes))):
        is_shape = place < len(sweep.shape_axes)
        limit = POINTS // points
        if is_shape:
            limit = min(limit, SHAPES // shapes)
        # Blocks of equal size share compilations. So 10 values in blocks of at most 9 are 5 and 5.
        length = len(sweep.axes[place].values)
        num_blocks = math.ceil(length / max(1, limit))
        count = math.ceil(length / num_blocks)
        points *= count
        shapes *= count if is_shape else 1
        counts.insert(0, count)
    return tuple(counts)


def num_blocks(sweep: Sweep) -> int:
    """Count the blocks of a grid."""
    return math.prod(_blocks_by_axis(sweep))


def get_block(sweep: Sweep, number: int) -> Block:
    """Return the block with this number."""
    places = np.unravel_index(number, _blocks_by_axis(sweep))
    cuts = []
    for axis, place, size in zip(sweep.axes, places, block_shape(sweep), strict=True):
        start = int(place) * size
        cuts.append(slice(start, min(len(axis.values), start + size)))
    return Block(number, tuple(cuts))


def _blocks_by_axis(sweep: Sweep) -> list[int]:
    sizes = zip(sweep.axes, block_shape(sweep), strict=True)
    return [math.ceil(len(axis.values) / count) for axis, count in sizes]


class BlockStore:
    """A store open for writing; `open_store` makes it and holds the lock."""

    def __init__(self, sweep: Sweep, path: Path) -> None:
        self.sweep = sweep
        group: Any = zarr.open_group(str(path), mode="r+")
        self._arrays: dict[str, Any] = dict(group.arrays())

    def write(self, block: Block, values: dict[str, Any]) -> None:
        """Write {variable: array} of a block, and then its checksum."""
        regions = self._regions(block)
        for name, region in regions.items():
            self._arrays[name][region] = values[name]
        total = _checksum([values[name] for name in regions])
        self._arrays[CHECKSUM][block.number : block.number + 1] = np.array([total])

    def is_whole(self, block: Block) -> bool:
        """Return whether a block is stored and matches its checksum."""
        try:
            checksum = int(self._arrays[CHECKSUM][block.number])
            if checksum == 0:
                return False
            regions = self._regions(block)
            parts = [self._arrays[name][region] for name, region in regions.items()]
        except (OSError, ValueError, RuntimeError, TypeError):  # a file that was cut short
            return False
        return checksum == _checksum(parts)

    def _regions(self, block: Block) -> dict[str, tuple[Any, ...]]:
        """Return {variable: index of its array that the block writes}."""
        # The first block of systems writes the variables without axes of systems.
        is_first = not any(cut.start for cut in block.cuts[len(self.sweep.shape_axes) :])
        return {
            name: (*(block.cuts[place] for place in variable.places(self.sweep)), ...)
            for name, variable in sweep_variables(self.sweep).items()
            if variable.per_system or is_first
        }


def _checksum(arrays: list[NumpyArray]) -> int:
    """Return 1 + the CRC of arrays of numbers or texts; 0 stands for a missing block."""
    total = 0
    for array in arrays:
        is_text = array.dtype.kind not in "fi"
        data = "\0".join(map(str, array.ravel())).encode() if is_text else array.tobytes()
        total = zlib.crc32(data, total)
    return total + 1


@contextlib.contextmanager
def open_store(
    sweep: Sweep, path: Path, *, resume: bool = False, replace: bool = False
) -> Iterator[BlockStore]:
    """Create, resume or replace a store, and hold its lock."""
    check_path = functools.partial(_check_path, sweep, path, resume=resume, replace=replace)
    check_path()  # before the lock, which would put a file into the folder
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    with locked(path, wait=False):
        check_path()  # another process may have written before this one got the lock
        with name_in_errors(path):  # the error of a full disk names no file
            if replace:
                _remove_content(path)
            _restore(sweep, path)
            yield BlockStore(sweep, path)


def _remove_content(path: Path) -> None:
    """Remove all files except the lock; attributes, which mark a store, come last."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == ATTRIBUTES):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _check_path(sweep: Sweep, path: Path, *, resume: bool, replace: bool) -> None:
    """Check that a path has no store, or has a store that may be replaced or resumed."""
    if not path.exists() or (path.is_dir() and all(map(_is_ours, path.iterdir()))):
        return
    if not resume and not replace:
        refuse_existing(path)
    attributes = _read_attributes(path)
    if not {*SAME} <= {*attributes}:
        raise ValueError(f"{path} is not the dataset of a sweep: nothing is written to it")
    if replace:
        for entry in path.iterdir():
            is_part = _is_ours(entry) or entry.name.startswith(".z") or entry.is_dir()
            if not is_part:
                raise ValueError(f"{path} holds {entry.name}, no part of a dataset: move it")
        return
    if attributes["grid"] != sweep.to_json():
        raise ValueError(f"{path} holds another grid: give another --out or the first declaration")
    check_origin(path, attributes)


def _is_ours(path: Path) -> bool:
    """Return whether a file is a lock or a draft of a killed process."""
    return path.name == LOCK or DRAFT in path.name


def _read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a store from the first intact file; empty if none is intact."""
    for name, inside in ((ATTRIBUTES, ()), (".zmetadata", ("metadata", ATTRIBUTES))):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            content = json.loads((path / name).read_bytes())
            for key in inside:
                content = content[key]
            return dict(content)
    return {}


def _restore(sweep: Sweep, path: Path) -> None:
    """Write the axes, units and metadata of a store; intact files stay."""
    # Each missing or different file is replaced atomically. Attributes come first, because they
    # mark the folder as a store that a later run can restore.
    for partial in path.rglob(PARTIAL):
        partial.unlink()
    with draft_folder(path / "metadata", is_locked=True) as draft:
        _create_arrays(sweep, draft)
        files = [file for file in draft.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file != draft / ATTRIBUTES):
            target = path / file.relative_to(draft)
            if not (target.is_file() and file.read_bytes() == target.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)


def _create_arrays(sweep: Sweep, path: Path) -> None:
    """Write the coordinates, and an empty array for each variable and for the checksums."""
    _coordinates(sweep).to_zarr(path, zarr_format=FORMAT, consolidated=False)
    group: Any = zarr.open_group(str(path), mode="r+")
    size = block_shape(sweep)
    for name, variable in sweep_variables(sweep).items():
        places = variable.places(sweep)
        dims = [sweep.axes[place].name for place in places]
        group.create_array(
            name,
            shape=(*(sweep.sizes[dim] for dim in dims), *variable.extra_shape),
            chunks=(*(size[place] for place in places), *variable.extra_shape),
            dtype=variable.dtype,
            # a fill value is read as "missing", so only floats have a fill value
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
    """Return the attributes with which Zarr stores a variable: dimensions, meaning, unit, codes."""
    attributes: dict[str, Any] = {"_ARRAY_DIMENSIONS": dims, "long_name": variable.meaning}
    if variable.dtype != TEXT:
        attributes["units"] = variable.unit
    if variable.flags:
        attributes["flag_values"] = list(range(len(variable.flags)))
        attributes["flag_meanings"] = " ".join(flag.replace(" ", "_") for flag in variable.flags)
    return attributes


def _coordinates(sweep: Sweep) -> xr.Dataset:
    """Return the labels of all axes as a dataset; a single-valued axis is a scalar coordinate."""
    labels: dict[str, Any] = {}
    for axis in sweep.axes:
        values = [label(value) for value in axis.values]
        attributes = {"units": axis.unit} if axis.unit else {}
        if axis.is_listed:
            labels[axis.name] = (axis.name, values, attributes)
        elif values[0] is not None:
            labels[axis.name] = ((), values[0], attributes)
    for variable in sweep_variables(sweep).values():
        labels |= {name: (name, list(entries)) for name, entries in variable.extra}
    attributes = {"title": sweep.title, "grid": sweep.to_json(), "dtype": sweep.dtype}
    return xr.Dataset(coords=labels, attrs=attributes | provenance())
