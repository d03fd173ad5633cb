"""Files that commands write: their errors are raised before the work."""

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pipejax as pj
from pipejax.base.files import atomic_write, check_writable, is_dataset, write_file
from pipejax.schedules.table.table_files import text_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipejax.plots.style import Paper

# Kinds of files that options ask for: their suffixes, and the modules that write them

SWEEPS = ("xarray", "zarr", "filelock")


class OutputKind(NamedTuple):
    """A kind of file that an option asks for."""

    suffixes: tuple[str, ...]  # allowed suffixes of its name; any if empty
    modules: tuple[str, ...] = ()  # modules that write it
    needs: str = ""  # first words of the error about a missing module, as "drawing needs"
    extra: str = ""  # extra of the package that installs the modules
    is_folder: bool = False  # whether it is a Zarr store
    is_new: bool = False  # whether it is a folder that must not exist
    resumes: bool = False  # whether the command continues an existing store
    plain: tuple[str, ...] = ()  # suffixes of files that need none of the modules
    # kind of a file with other suffixes, if the option takes that too
    other: "OutputKind | None" = None


ANY = OutputKind(())
DRAWING = OutputKind((".png", ".pdf", ".svg"), ("matplotlib",), "drawing needs", "figures")
TIMELINE = DRAWING._replace(suffixes=(*DRAWING.suffixes, ".html"), plain=(".html",))
PAGE = OutputKind((".html",))
TABLES = OutputKind((), is_new=True)
TABLE = OutputKind((".csv", ".json"))
TEMPLATE = OutputKind((".json", ".csv"))
JSON = OutputKind((".json",))
LAYOUT = OutputKind((".json", ".txt"))
DATASET = OutputKind((".zarr",), ("xarray", "zarr"), "datasets need", "sweeps", is_folder=True)
POINTS = OutputKind((".parquet",), ("pyarrow",), "Parquet needs", "traces")
CONFIG = OutputKind((".toml",))
PLAN = OutputKind((".zarr", ".csv"), SWEEPS, "plans need", "sweeps", resumes=True, other=CONFIG)
GRID = OutputKind((), SWEEPS, "sweeps need", "sweeps", is_folder=True, resumes=True)


PRINTED = {".csv": "--format csv", ".json": "--json"}  # options of all commands that draw numbers


@dataclasses.dataclass
class Output:
    """A file that an option names: checked before the work, written after it."""

    path: Path | None = None  # the file, or None where none is given
    option: str = "--out"  # option that names it
    force: bool = False  # whether an existing file is replaced
    drawn_by: str = ""  # another option of the command, which draws, if there is one
    is_saved: bool = False  # whether the file was written, or its error is known
    _error: OSError | None = None
    _unwritten: str = ""

    def check(self, kind: OutputKind) -> "Output":
        """Check, before the work, that a file of this kind can be written after it; return it."""
        if self.path is None:
            return self
        out = f"{self.option} {self.path}"
        if kind.other is not None and self.path.suffix in kind.other.suffixes:
            return self.check(kind.other)
        if kind.suffixes and self.path.suffix not in kind.suffixes:
            suffixes = kind.suffixes + (kind.other.suffixes if kind.other else ())
            legal = f"one of {', '.join(suffixes)}" if suffixes[1:] else suffixes[0]
            hint = self._hint(kind)
            raise ValueError(f"{self.option} must end in {legal}, got {str(self.path)!r}{hint}")
        if kind.resumes and os.path.isdir(self.path):  # the command checks the store
            return self
        try:
            check_writable(self.path)
        except (OSError, ValueError) as error:  # no name has a zero byte
            raise ValueError(f"{out}: {getattr(error, 'strerror', error)}") from None
        if kind.is_new and os.path.lexists(self.path):
            raise ValueError(f"{out} exists: give a folder that does not")
        if kind.is_folder:
            self._check_folder(out)
        elif self.path.is_dir():
            raise ValueError(f"{out} is a folder")
        elif self.path.is_file() and not self.force:
            raise ValueError(f"{out} exists: give another, or --force to replace it")
        if self.path.suffix not in kind.plain:
            check_modules(f"{out}: {kind.needs}", kind.modules, kind.extra)
        return self

    def _hint(self, kind: OutputKind) -> str:
        """Name the option or format that writes a file of this suffix."""
        suffix = "" if self.path is None else self.path.suffix
        if self.drawn_by and suffix in DRAWING.suffixes:
            return f": {self.drawn_by} draws"
        if kind.suffixes == DRAWING.suffixes and suffix in PRINTED:
            return f": {PRINTED[suffix]} prints the numbers"
        return ""

    def _check_folder(self, out: str) -> None:
        """Check a store: only datasets of this package are ever replaced."""
        path = self.path or Path()
        if not os.path.lexists(path):
            return
        if not self.force:
            raise ValueError(f"{out} exists: give another, or --force to replace it")
        if not is_dataset(path):
            raise ValueError(f"{out} is not a dataset that was written here: it is never replaced")

    def save(self, write: Callable[[Path], object], text: Callable[[], str] | None = None) -> None:
        """Write the file, if one is named; `end` raises the error, if any, and prints the text."""
        # So the report is printed even if the file cannot be written.
        if self.path is None:
            return
        self.is_saved = True
        try:
            with atomic_write(self.path, replace=self.force) as draft:
                write(draft)
        except OSError as error:
            self._error, self._unwritten = error, "" if text is None else text()

    def save_text(self, text: str) -> None:
        """Write a text, as `save` does: it is printed if it cannot be written."""
        self.save(lambda draft: write_file(draft, text), lambda: text)

    def save_json(self, content: dict[str, Any]) -> None:
        """Write a JSON object, as `save_text` does."""
        self.save_text(json.dumps(content, indent=2) + "\n")

    def save_table(self, table: pj.ScheduleTable) -> None:
        """Write a table as its suffix says."""
        if self.path is not None:
            self.save_text(text_for(table, self.path))

    def save_dataset(self, data: Any) -> None:
        """Write an xarray dataset as a Zarr store."""
        self.save(lambda draft: data.to_zarr(draft, zarr_format=2))

    def save_certificate(self, certificate: dict[str, Any]) -> None:
        """Write a certificate, if a file is named for it, and check it in any case."""
        self.save(lambda draft: write_file(draft, json.dumps(certificate, allow_nan=False)))
        verdict = pj.verify(certificate)
        if not verdict.ok:
            place = f"; the certificate is in {self.written}" if self.written else ""
            raise AssertionError(
                f"{len(verdict.problems)} claims of the result do not hold, first "
                f"{verdict.problems[0]}{place}: please report it"
            )

    def save_timelines(self, runs: "Mapping[str, pj.Evaluation]", **options: Any) -> None:
        """Draw the timelines of runs by name, if a file is named, with options of `pj.plot`."""
        if self.path is not None:
            self.save_picture(pj.plot(runs, **options))

    def save_picture(self, picture: Any) -> None:
        """Write a picture as its suffix says."""
        from pipejax.plots.timeline import save  # matplotlib is an extra, slow to import

        self.save(lambda draft: save(picture, draft))

    @property
    def written(self) -> Path | None:
        """Return the file if it was written."""
        return self.path if self.is_saved and self._error is None else None

    def as_json(self) -> dict[str, Any]:
        """Return its name for `--json`, or null and the content that could not be written."""
        result: dict[str, Any] = {self.option.removeprefix("--"): self.written}
        if self._unwritten:
            result["unwritten"] = self._unwritten
        return result

    def end(self, *, json: bool) -> None:
        """Raise the error of writing after the report; the content follows as text."""
        if self._error is None:
            return
        if not json:
            sys.stdout.write(self._unwritten)
        raise self._error


NO_OUTPUT = Output()  # of an option that is not given


def check_distinct_paths(outputs: Iterable[Output]) -> None:
    """Refuse two options that name one file: the second would replace the first."""
    option_by_path: dict[str, str] = {}
    for output in outputs:
        if output.path is not None:
            other = option_by_path.setdefault(os.path.realpath(output.path), output.option)
            if other != output.option and not output.path.is_char_device():
                raise ValueError(f"{other} and {output.option} name the same file {output.path}")


def check_modules(needs: str, modules: tuple[str, ...], extra: str) -> None:
    """Check that modules of an extra are installed."""
    for name in modules:
        spec = None
        with suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(name)  # an import may take half a second
        if spec is None:
            raise ValueError(f"{needs} {name}: pip install 'pipejax[{extra}]'")


@contextmanager
def drawing(
    out: Output, columns: int, height: float, paper: "Paper | None" = None
) -> "Iterator[tuple[Figure, Axes]]":
    """Yield a figure of one or two columns of a paper, `height` inches high, and then write it."""
    import matplotlib as mpl  # an extra, slow to import

    from pipejax.plots import style

    paper = paper or style.Paper((style.COLUMN, style.PAGE)[columns - 1])
    figure = style.Picture(paper, height)
    with mpl.rc_context(paper.settings()):
        yield figure, figure.subplots()
    out.save(figure.savefig)
