"""Files that commands write: what is wrong with them is said before the work."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWINGS = (".png", ".pdf", ".svg")
TABLES = (".csv", ".json")


def check_drawing(out: Path | None) -> None:
    """Check the drawing of `--out`, where one is given.

    Raises:
      ValueError: if it is no drawing, its folder is missing, or nothing here can draw.
    """
    check_file(out, DRAWINGS)
    if out is not None:
        _check_modules(out, "--out", ("matplotlib",), "drawing", "figures")


def check_file(out: Path | None, suffixes: tuple[str, ...]) -> None:
    """Check the file of `--out`, where one is given.

    Raises:
      ValueError: if it has another suffix, is a folder, or its folder is missing.
    """
    if out is None:
        return
    if out.suffix not in suffixes:
        raise ValueError(f"--out must end in one of {', '.join(suffixes)}, got {str(out)!r}")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder")
    _check_folder(out, "--out")


@contextmanager
def drawing(out: Path, width: float, height: float) -> "Iterator[tuple[Figure, Axes]]":
    """Give a figure to draw on, as a share of the page's width by inches, and write it to a file.

    Only where `check_drawing` has passed.
    """
    import matplotlib.pyplot as plt  # an extra, slow to import

    from pipejax.plots import style

    style.use()
    figure, axes = plt.subplots(figsize=(width * style.PAGE, height))
    yield figure, axes
    figure.savefig(out)
    plt.close(figure)


def check_table(out: Path | None) -> None:
    """Check the table of `--out`, where one is given.

    Raises:
      ValueError: as `check_file`.
    """
    check_file(out, TABLES)


def check_store(out: Path | None, option: str) -> None:
    """Check the store of an option, where one is given.

    Raises:
      ValueError: if it is no Zarr store, exists, its folder is missing, or nothing can write it.
    """
    if out is None:
        return
    if out.suffix != ".zarr":
        raise ValueError(f"{option} must end in .zarr, got {str(out)!r}")
    if out.exists():
        raise ValueError(f"{option} {out} exists: give another, nothing is written over")
    _check_folder(out, option)
    _check_modules(out, option, ("xarray", "zarr"), "datasets", "sweeps")


def _check_folder(out: Path, option: str) -> None:
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{option} {out}: there is no folder {out.parent}")


def _check_modules(out: Path, option: str, modules: tuple[str, ...], what: str, extra: str) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            need = "needs" if what == "drawing" else "need"
            raise ValueError(
                f"{option} {out}: {what} {need} {name}: pip install 'pipejax[{extra}]'"
            ) from None
