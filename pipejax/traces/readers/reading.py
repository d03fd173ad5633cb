"""Reading of a measured run, from files of any supported format, into one trace."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipejax.base.checks import check_types, whole_number, wrong
from pipejax.base.progress import OnProgress, telling
from pipejax.traces.readers import chrome, columns as in_columns, nsight, rank_lists
from pipejax.traces.readers.parts import empty_trace, join_traces
from pipejax.traces.readers.readings import RunSizes
from pipejax.traces.readers.sources import UNIT, Request, is_log, read_head, why_unreadable
from pipejax.traces.record import OPS, LeftOut, Trace

# a file belongs to the first reader that can read it
READERS = (nsight.READER, rank_lists.READER, chrome.READER, in_columns.READER)
_MAX_EARLY = 0.1  # share of a step by which a replica may begin it before others end the last one
Files = str | Path | Sequence[str | Path]
_MAX_LISTED = 3  # files or reasons that a message lists


def read(
    files: Files,
    *,
    columns: Mapping[str, str] | None = None,
    stages_per_worker: int | None = None,
    microbatches: int | None = None,
    steps: int | None = None,
    world: int | None = None,
    replicas: int | None = None,
    on_progress: OnProgress | None = None,
) -> Trace:
    r"""Read a measured run from its files; the content of a file determines its format.

    Formats are those of `READERS`; all but SQLite may be gzipped. Several files are parts of a run.

    Args:
      files: a file, a folder, whose files are all read, or a list of files and folders.
      columns: for Parquet and CSV, names of the columns of step, replica, worker, stage, chunk
        (number of the stage on its worker), phase, microbatch, start, end or duration. "unit":
        "ms" sets the unit of times (s, ms, us, ns); default: the suffix of the column, as in
        start_ms, or seconds. "W": "param_grad" sets the name of the phase F, B, I or W.
      stages_per_worker: stages of a worker; needed if no file states it and several numbers fit.
      microbatches: microbatches of a pipeline in a step; needed in the same case.
      steps: steps in all files; needed in the same case.
      world: ranks of the run; missing ranks are left out.
      replicas: copies of the pipeline among the ranks, if labels do not tell them apart.
      on_progress: called with the bytes read so far, all bytes, and a text.

    Returns:
      The trace, times in seconds. `left_out` counts damaged and foreign files, rows and slices;
      `inferred` names numbers that no file states, with the reason for their values.

    Raises:
      ValueError: if no file holds a slice of a pipeline, files belong to different runs, a column
        or a rank is missing, or several values fit for a number that no file states.
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
      (LeftOut(what='rows', why='its end is no finite number: 5'),)
    """
    names = dict(columns or {})
    counts = (stages_per_worker, microbatches, steps, world, replicas)
    labels = ("stages_per_worker", "microbatches", "steps", "world", "replicas")
    for count, label in zip(counts, labels, strict=True):
        if count is not None:
            whole_number(count, label)
    sizes = RunSizes(0, *(count or 0 for count in counts))
    check_types(files=(files, str, Path, list, tuple))
    entries = [files] if isinstance(files, str | Path) else files
    paths, again = _list_files(entries)
    if not paths:
        where = f" in {', '.join(map(str, entries))}" if entries else ""
        raise wrong("files", f"must hold a trace: there is no file{where}")
    by_form: dict[str, list[Path]] = {}
    reasons = [LeftOut(str(path), "it is listed again", count) for path, count in again.items()]
    for path in paths:
        head = read_head(path)
        reader = next((reader for reader in READERS if reader.can_read(head)), None)
        if reader is None or is_log(head):
            reasons.append(LeftOut(str(path), why_unreadable(head)))
        else:
            by_form.setdefault(reader.form, []).append(path)
    total, done = sum(path.stat().st_size for path in paths), 0
    with telling("read", on_progress) as report:

        def on_bytes(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            report(done, total, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        traces = [
            reader.read(by_form.get(reader.form, []), Request(names, sizes, on_bytes, []))
            for reader in READERS
        ]
    traces.append(empty_trace(reasons))
    trace = join_traces(traces, _source_text(paths))
    if not len(trace):
        raise wrong("files", _why_empty(trace.left_out))
    if names.keys() - {UNIT} and not by_form.get(in_columns.READER.form):
        raise wrong("columns", f"are for {in_columns.READER.form}, and no file is one", names)
    stated = {label: count for label, count in zip(labels, counts, strict=True) if count}
    _check_stated_sizes(trace, stated)
    _check_clocks(trace)
    if _has_overlapping_steps(trace):
        why = "replicas do not wait for each other: clocks differ, or these are two jobs"
        trace = dataclasses.replace(trace, inferred=(*trace.inferred, why))
    return trace


def _check_stated_sizes(trace: Trace, stated: Mapping[str, int]) -> None:
    """Refuse sizes stated by the user that differ from those of the files."""
    is_op = trace.has_phase(OPS)
    # if readers had to infer a size, they used the stated size
    replicas, pairs = len(trace.replicas), np.stack([trace.replica, trace.microbatch])[:, is_op]
    per_replica = Counter(np.unique(pairs, axis=1)[0].tolist())
    sizes = {
        "steps": len(np.unique(trace.step[is_op])),
        "microbatches": max(per_replica.values(), default=0),
        "stages_per_worker": trace.stages / trace.workers,
        "replicas": replicas,
    }
    if stated.get("world") and stated.get("replicas", 0) > replicas:
        del sizes["replicas"]  # all ranks of a replica may be missing
    for name, count in stated.items():
        if name in sizes and count != sizes[name]:
            raise wrong(name, f"must be {sizes[name]:g}, as in the files, got {count}", count)


def _check_clocks(trace: Trace) -> None:
    """Refuse times that are so coarse that most ops take no time."""
    seconds = (trace.end - trace.start)[trace.has_phase(OPS)]
    if 2 * (count := int((seconds == 0).sum())) > len(seconds):
        why = f"{count} of {len(seconds)} ops end at the time at which they start"
        raise wrong("files", f"must have finer times: {why}")


def _has_overlapping_steps(trace: Trace) -> bool:
    """Return whether replicas begin a step long before others have ended the previous step."""
    # Replicas exchange gradients between steps, so steps overlap only if clocks or jobs differ.
    if trace.has_step_clocks or len(trace.replicas) < 2 or len(trace.steps) < 2:
        return False
    is_op = trace.has_phase(OPS)
    columns = trace.step[is_op], trace.replica[is_op]
    step, replica = (np.unique(numbers, return_inverse=True)[1] for numbers in columns)
    begin = np.full((step.max() + 1, replica.max() + 1), np.inf)
    end = -begin
    np.minimum.at(begin, (step, replica), trace.start[is_op])
    np.maximum.at(end, (step, replica), trace.end[is_op])
    early = end[:-1].max(axis=1) - begin[1:].min(axis=1)
    if (begin[1:] < begin[:-1]).any() or (begin[1:] < end[:-1]).all():  # each step has its zero
        return False
    return bool(np.median(early) > _MAX_EARLY * np.median(end - begin))


def _list_files(files: Sequence[str | Path]) -> tuple[list[Path], dict[Path, int]]:
    """Return all files once, with those in folders, and the number of repetitions of files."""
    paths: list[Path] = []
    for path in map(Path, files):
        if path.is_dir():
            parts = [(p, p.relative_to(path).parts) for p in path.rglob("*")]
            visible = [p for p, names in parts if not any(name[0] == "." for name in names)]
            paths += sorted(filter(Path.is_file, visible))
        else:
            paths.append(path)
    counts = Counter(path.resolve() for path in paths)
    firsts = {path.resolve(): path for path in reversed(paths)}
    again = {firsts[path]: count - 1 for path, count in counts.items() if count > 1}
    return [firsts[path] for path in counts], again


def _source_text(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return str(paths[0])
    folders = {str(path.parent) for path in paths}
    return f"{len(paths)} files of {', '.join(sorted(folders)[:_MAX_LISTED])}"


def _why_empty(left_out: Sequence[LeftOut]) -> str:
    """Return the error text for files without pipeline slices, with the first few reasons."""
    reasons = [f"{entry.what}: {entry.why}" for entry in left_out]
    listed = "; ".join(reasons[:_MAX_LISTED]) or "there are no rows"
    if len(reasons) > _MAX_LISTED:
        listed += f"; and {len(reasons) - _MAX_LISTED} more"
    forms = ", ".join(f"{reader.form} ({reader.writers})" for reader in READERS)
    return (
        f"hold no slice of a pipeline: {listed}. Known are {forms}; a log of steps is for "
        "pipejax init rows --from LOG"
    )
