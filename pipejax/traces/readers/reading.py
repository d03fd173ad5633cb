"""Files of a measured run, whatever wrote them, as one trace."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipejax.base.checks import check_types, whole_number, wrong
from pipejax.base.progress import OnProgress, telling
from pipejax.traces.readers import chrome, columns as in_columns, rank_lists, sources
from pipejax.traces.readers.parts import joined, nothing
from pipejax.traces.readers.readings import RunSizes
from pipejax.traces.record import LeftOut, Trace


def refused(path: Path) -> LeftOut:
    """Say what reads a log, and what writes slices: a timer is a sum, or its extremes."""
    return LeftOut(
        str(path),
        "a log of Megatron has times of steps and sums of timers, not when an op ran: pipejax init "
        "rows --from LOG reads its steps; Primus writes ops with --dump_pp_data, PyTorch's "
        "pipelining under torch.profiler",
    )


Files = str | Path | Sequence[str | Path]
_FORMS = (
    "Parquet or CSV with a slice in each row, JSON with lists of start and end of a rank, Chrome "
    "traces of PyTorch's profiler"
)
_LISTED = 3


def read(
    files: Files,
    *,
    columns: Mapping[str, str] | None = None,
    stages_per_worker: int | None = None,
    microbatches: int | None = None,
    steps: int | None = None,
    world: int | None = None,
    on_progress: OnProgress | None = None,
) -> Trace:
    r"""Read a measured run from its files, whose form is told by what they hold.

    Known are Parquet and CSV with a slice in each row, by the names of the public production jobs
    or by `columns`; JSON with the starts and ends of each rank, as Primus writes it; Chrome traces
    with the labels that PyTorch's pipelining writes around its actions (`PP:0F1`), one file for
    each rank; and the traces that `pj.files.chrome_trace` writes. Any of them may be packed by
    gzip. Several files are parts of one run.

    Args:
      files: a file, a folder, whose files are all read, or several of them.
      columns: for Parquet and CSV, which column is the step, replica, worker, stage, chunk (number
        of the stage among those of its worker), phase, microbatch, start, end or duration, where
        they are called otherwise; "unit": "ms" says in which unit times are (s, ms, us, ns), which
        is that behind the column's name, as in start_ms, or seconds. "W": "param_grad" says what
        the phases F, B, I and W are called.
      stages_per_worker: how many, where files do not say it and several readings can be.
      microbatches: of a pipeline in a step, likewise.
      steps: in all files, likewise.
      world: ranks of the run; those that are missing of them are left out.
      on_progress: called with the bytes that were read, of how many, and the file.

    Returns:
      The trace, times in seconds. Damaged and foreign files, rows and slices are in `left_out`
      with their number; `inferred` says which numbers no file has, and what they follow from.

    Raises:
      ValueError: if no file holds a slice of a pipeline, files are of different runs, a column or
        a rank is not there, or numbers that no file says can be several.
      ModuleNotFoundError: for Parquet without pyarrow.
      OSError: if a file cannot be read.

    Example:
      >>> import pathlib, tempfile, pipejax as pj
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.csv"
      >>> rows = ["pp,op,mb,start_ms,dur_ms", "0,forward,0,0,10", "1,forward,0,12,10"]
      >>> _ = path.write_text("\n".join([*rows, "1,backward,0,22,20", "0,backward,0,44,"]))
      >>> trace = pj.traces.read(path)
      >>> len(trace), trace.workers, f"{trace.end.max():.3f} s"
      (3, 2, '0.042 s')
      >>> trace.left_out
      (LeftOut(what='rows', why='its end is no finite number'),)
    """
    names = dict(columns or {})
    counts = (stages_per_worker, microbatches, steps, world)
    labels = ("stages_per_worker", "microbatches", "steps", "world")
    for count, label in zip(counts, labels, strict=True):
        if count is not None:
            whole_number(count, label)
    sizes = RunSizes(0, *(count or 0 for count in counts))
    check_types(files=(files, str, Path, list, tuple))
    entries = [files] if isinstance(files, str | Path) else files
    paths = _paths(entries)
    if not paths:
        where = f" in {', '.join(map(str, entries))}" if entries else ""
        raise wrong("files", f"must hold a trace: there is no file{where}")
    forms = {path: sources.find_form(path) for path in paths}
    by_form: dict[str, list[Path]] = {}
    if sources.RANK_LISTS in {form for form, _ in forms.values()}:  # their sizes lie beside them
        size_files = {path.parent / "config.json" for path in paths} - {*paths}
        forms |= {path: sources.find_form(path) for path in sorted(size_files) if path.is_file()}
        paths = [*forms]
    for path, (form, _) in forms.items():
        by_form.setdefault(form, []).append(path)
    total, done = sum(path.stat().st_size for path in paths), 0
    with telling("read", on_progress) as to:

        def tell(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            to(done, total, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        tables = [*by_form.get(sources.PARQUET, []), *by_form.get(sources.CSV, [])]
        lists, chrome_paths = by_form.get(sources.RANK_LISTS, []), by_form.get(sources.CHROME, [])
        parts = [
            in_columns.read_columns(tables, names, sizes, tell),
            rank_lists.read_rank_lists(lists, by_form.get(sources.SIZES, []), sizes, tell),
            chrome.read_chrome(chrome_paths, sizes, tell),
            nothing(refused(path) for path in by_form.get(sources.LOG, [])),
            nothing(LeftOut(str(path), why) for path, (_, why) in forms.items() if why),
        ]
    trace = joined(parts, _spoken(paths))
    if not len(trace):
        raise wrong("files", _why_nothing(trace.left_out))
    return trace


def _paths(files: Sequence[str | Path]) -> list[Path]:
    """Files that are given, and those of folders that are."""
    paths: list[Path] = []
    for path in map(Path, files):
        if path.is_dir():
            paths += sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
        else:
            paths.append(path)
    return list(dict.fromkeys(paths))


def _spoken(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return str(paths[0])
    folders = {str(path.parent) for path in paths}
    return f"{len(paths)} files of {', '.join(sorted(folders)[:_LISTED])}"


def _why_nothing(left_out: Sequence[LeftOut]) -> str:
    reasons = [f"{entry.what}: {entry.why}" for entry in left_out]
    more = f"; and {len(reasons) - _LISTED} more" * (len(reasons) > _LISTED)
    return f"hold no slice of a pipeline: {'; '.join(reasons[:_LISTED])}{more}. Known are {_FORMS}"
