"""Kinds of files that options ask for: their suffixes, and the modules that write them."""

from typing import NamedTuple

SWEEPS = ("xarray", "zarr", "filelock")


class OutputKind(NamedTuple):
    """A kind of file that an option asks for."""

    suffixes: tuple[str, ...]  # of its name
    modules: tuple[str, ...] = ()  # that write it
    needs: str = ""  # begins the sentence that names a module that is missing
    extra: str = ""  # of the package, which brings the modules
    is_folder: bool = False  # whether it is a Zarr store
    is_new: bool = False  # whether it is a folder that must not be there
    resumes: bool = False  # whether one that is there may be gone on with
    plain: tuple[str, ...] = ()  # suffixes of files that none of the modules writes
    # kind of a file with other suffixes, if the option takes that too
    other: "OutputKind | None" = None


ANY = OutputKind(())
DRAWING = OutputKind((".png", ".pdf", ".svg"), ("matplotlib",), "drawing needs", "figures")
TIMELINE = DRAWING._replace(suffixes=(*DRAWING.suffixes, ".html"), plain=(".html",))
PAGE = OutputKind((".html",))
TABLES = OutputKind((), is_new=True)
TABLE = OutputKind((".csv", ".json"))
TEMPLATE = OutputKind((".json", ".csv"))
CERTIFICATE = OutputKind((".json",))
ORDER = OutputKind((".json",))
LAYOUT = OutputKind((".json", ".txt"))
SYSTEM = OutputKind((".json",))
DATASET = OutputKind((".zarr",), ("xarray", "zarr"), "datasets need", "sweeps", is_folder=True)
POINTS = OutputKind((".parquet",), ("pyarrow",), "Parquet needs", "traces")
CONFIG = OutputKind((".toml",))
PLAN = OutputKind((".zarr", ".csv"), SWEEPS, "plans need", "sweeps", resumes=True, other=CONFIG)
GRID = OutputKind((), SWEEPS, "sweeps need", "sweeps", is_folder=True, resumes=True)
