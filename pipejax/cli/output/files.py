"""Files that commands write: what is wrong with them is said before the work."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipejax.base.files import drafted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SWEEPS = ("xarray", "zarr", "filelock")


class OutputKind(NamedTuple):
    """A kind of file that an option asks for.

    Attributes:
      suffixes: of its name.
      modules: that write it.
      needs: begins the sentence that names a module that is missing.
      extra: of the package, which brings the modules.
    """

    suffixes: tuple[str, ...]
    modules: tuple[str, ...] = ()
    needs: str = ""
    extra: str = ""


DRAWING = OutputKind((".png", ".pdf", ".svg"), ("matplotlib",), "drawing needs", "figures")
TIMELINE = DRAWING._replace(suffixes=(*DRAWING.suffixes, ".html"))
TABLE = OutputKind((".csv", ".json"))
DATASET = OutputKind((".zarr",), ("xarray", "zarr"), "datasets need", "sweeps")


def check_out(out: Path | None, kind: OutputKind, option: str = "--out") -> None:
    """Check the file of an option, where one is given.

    Raises:
      ValueError: if it has another suffix, is a folder, or a dataset that is there, if its folder
        is missing, or if nothing here can write it.
    """
    if out is None:
        return
    if out.suffix not in kind.suffixes:
        known = f"one of {', '.join(kind.suffixes)}" if kind.suffixes[1:] else kind.suffixes[0]
        raise ValueError(f"{option} must end in {known}, got {str(out)!r}")
    if kind is DATASET and out.exists():
        raise ValueError(f"{option} {out} exists: give another, nothing is written over")
    if out.is_dir():
        raise ValueError(f"{option} {out} is a folder")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{option} {out}: there is no folder {out.parent}")
    check_modules(f"{option} {out}: {kind.needs}", kind.modules, kind.extra)


def check_modules(needs: str, modules: tuple[str, ...], extra: str) -> None:
    """Check that modules of an extra are installed."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise ValueError(f"{needs} {name}: pip install 'pipejax[{extra}]'") from None


@contextmanager
def drawing(out: Path, width: float, height: float) -> "Iterator[tuple[Figure, Axes]]":
    """Give a figure to draw on, as a share of the page's width by inches, and write it to a file.

    Only where `check_out` has passed.
    """
    import matplotlib.pyplot as plt  # an extra, slow to import

    from pipejax.plots import style

    style.use()
    figure, axes = plt.subplots(figsize=(width * style.PAGE, height))
    yield figure, axes
    with drafted(out) as draft:
        figure.savefig(draft)
    plt.close(figure)


def write_dataset(data: Any, out: Path) -> None:
    """Write an xarray dataset as a Zarr store that is there as a whole or not at all."""
    with drafted(out) as draft:
        data.to_zarr(draft, zarr_format=2)
