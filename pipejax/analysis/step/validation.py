"""Comparison of predictions with measured runs: errors, worst rows, coverage of error bands."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.step.step_time import StepTimes, row_workloads
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, wrong
from pipejax.base.display import ResultDict, ResultList, short_repr, with_short_repr
from pipejax.base.progress import Notice
from pipejax.costs.measured.measured_rows import CONFIGURATION, SIZES, MeasuredRows, joined
from pipejax.costs.measured.rows_file import read_predictions, read_rows
from pipejax.costs.model.stack import load_stack
from pipejax.costs.stage.stage_costs import check_machine
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import DATA, System, load_system
from pipejax.schedules.table.links import Links


@short_repr
class PredictionErrors(NamedTuple):
    """Statistics of prediction errors (predicted / measured - 1), in percent.

    Attributes:
      rows: number of measured rows.
      mape: mean of the absolute errors [%].
      median: median of the absolute errors [%].
      p90: 90 % quantile of the absolute errors [%].
      bias: mean of the errors [%]; above 0 if predicted times or sizes are too large.
      largest: the largest absolute error [%].
    """

    rows: int
    mape: float
    median: float
    p90: float
    bias: float
    largest: float


def relative_errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> Float[NumpyArray, " rows"]:
    """Return errors predicted / measured - 1 (rows); NaN for rows without a measurement."""
    return np.asarray(predicted, float) / np.asarray(measured, float) - 1


def prediction_errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> PredictionErrors:
    """Return error statistics over measured rows; `measured` is NaN for unmeasured rows.

    Raises:
      ValueError: if nothing was measured, or a prediction is missing.
    """
    errors = 100 * relative_errors(predicted, measured)[np.isfinite(measured)]
    if not errors.size:
        raise ValueError("nothing was measured: there are no errors to sum up")
    if not np.isfinite(errors).all():
        raise ValueError(f"{np.sum(~np.isfinite(errors))} of {errors.size} rows have no prediction")
    sizes = np.abs(errors)
    return PredictionErrors(
        rows=errors.size,
        mape=float(sizes.mean()),
        median=float(np.median(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        bias=float(errors.mean()),
        largest=float(sizes.max()),
    )


@short_repr
class Predictions(NamedTuple):
    """Predictions for measured rows."""

    # NaN stands for an unknown number
    seconds: Float[NumpyArray, " rows"]  # step time [s]
    memory_bytes: Float[NumpyArray, " rows"]  # memory of the fullest worker [B]
    low: Float[NumpyArray, " rows"]  # lower end of the 90 % band of the step time [s]
    high: Float[NumpyArray, " rows"]  # upper end of the 90 % band [s]
    # 1 if the row is predicted to fit in memory, else 0; None if memory is not predicted at all
    fits: Float[NumpyArray, " rows"] | None = None

    def take(self, index: NumpyArray) -> "Predictions":
        """Select rows by a mask or by their indices."""
        return Predictions._make(None if values is None else values[index] for values in self)


@short_repr
class MemoryVerdicts(NamedTuple):
    """Quality of predictions that runs end out of memory."""

    rows: int  # number of runs that ended out of memory
    precision: float  # share of the predicted failures that happened [%]
    recall: float  # share of the measured failures that were predicted [%]


@short_repr
class Ranking(NamedTuple):
    """Agreement of the predicted with the measured ranking of the layouts of one job."""

    jobs: int  # number of jobs with at least two different layouts
    layouts: int  # number of layouts of these jobs
    kendall: float  # Kendall's tau of predicted and measured step times, mean over the jobs
    best_found: float  # share of the jobs whose best layout is also predicted as the best [%]
    # measured time (predicted best layout / best layout) - 1, mean over the jobs [%]
    regret: float
    worst_regret: float  # largest regret of any job [%]


def _kendall(order: NumpyArray, reference: NumpyArray) -> float:
    """Return Kendall's tau-a of two orders: (concordant - discordant pairs) / all pairs."""
    first, second = np.triu_indices(len(order), 1)
    signs = np.sign(order[first] - order[second]) * np.sign(reference[first] - reference[second])
    return float(signs.mean())


Predict = Callable[[MeasuredRows, System], Predictions]


@with_short_repr("time memory coverage_90 measured predicted")
@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """Measured runs with their predictions.

    Attributes:
      measured: the measured rows.
      predicted: predictions for these rows.
    """

    measured: MeasuredRows
    predicted: Predictions

    @property
    def time(self) -> PredictionErrors | None:
        """Return error statistics of the step times; None if no step time was measured."""
        return _errors(self.predicted.seconds, self.measured.seconds)

    @property
    def memory(self) -> PredictionErrors | None:
        """Return error statistics of the fullest worker's memory; None if no row has both."""
        return _errors(self.predicted.memory_bytes, self.measured.memory_bytes)

    @property
    def out_of_memory(self) -> "MemoryVerdicts | None":
        """Judge predictions of failures by memory; None if no failure was measured."""
        fits, is_measured = self.predicted.fits, self.measured.out_of_memory
        if fits is None or not is_measured.any():
            return None
        is_predicted = fits == 0
        hits = 100 * int((is_predicted & is_measured).sum())
        measured, predicted = int(is_measured.sum()), int(is_predicted.sum())
        return MemoryVerdicts(measured, precision=hits / max(predicted, 1), recall=hits / measured)

    @property
    def errors(self) -> Float[NumpyArray, " rows"]:
        """Return the error of each row's step time, predicted / measured - 1."""
        return relative_errors(self.predicted.seconds, self.measured.seconds)

    @property
    def coverage_90(self) -> float | None:
        """Return the share [%] of measured step times in the 90 % band; None without bands."""
        low, high, seconds = self.predicted.low, self.predicted.high, self.measured.seconds
        has_band = np.isfinite(low) & np.isfinite(high) & np.isfinite(seconds)
        if not has_band.any():
            return None
        return float(100 * np.mean(((low <= seconds) & (seconds <= high))[has_band]))

    def take(self, index: NumpyArray) -> "Validation":
        """Select rows by a mask or by their indices."""
        return Validation(self.measured.take(index), self.predicted.take(index))

    @property
    def by_configuration(self) -> "Validation":
        """Merge rows of equal configuration into a row with their mean measured step time."""
        groups = _equal_rows(self.measured, CONFIGURATION)
        first_rows = np.array([rows[0] for rows in groups], int)
        means = np.array([self.measured.seconds[rows].mean() for rows in groups])
        measured = self.measured.take(first_rows).with_columns(seconds=means)
        return Validation(measured, self.predicted.take(first_rows))

    @property
    def ranking(self) -> Ranking | None:
        """Compare predicted and measured ranking of each job's layouts; None if no job has two."""
        means = self.by_configuration
        is_finite = np.isfinite(means.errors)
        rows, times = means.measured.take(is_finite), means.predicted.seconds[is_finite]
        names = "model", "accelerators", "global_batch", "precision", "system", "stack"
        jobs = [job for job in _equal_rows(rows, (*SIZES, *names)) if len(job) > 1]
        if not jobs:
            return None
        taus, regrets = [], []
        for job_rows in jobs:
            measured, predicted = rows.seconds[job_rows], times[job_rows]
            taus.append(_kendall(predicted, measured))
            regrets.append(100 * (measured[predicted.argmin()] / measured.min() - 1))
        return Ranking(
            jobs=len(jobs),
            layouts=sum(map(len, jobs)),
            kendall=float(np.mean(taus)),
            best_found=100 * float(np.mean(np.array(regrets) == 0)),
            regret=float(np.mean(regrets)),
            worst_regret=max(regrets),
        )

    @property
    def names(self) -> NumpyArray:
        """Return the group of each row, as "file: group" if there are several files."""
        pairs = zip(self.parts, self.measured.group, strict=True)
        names = [part if group in ("", part) else f"{part}: {group}" for part, group in pairs]
        return np.array(names)

    @property
    def parts(self) -> NumpyArray:
        """Return the file of each row if there are several files, else its group."""
        files = np.array([Path(file).stem for file in self.measured.file])
        return files if len(set(files)) > 1 else self.measured.group

    @property
    def groups(self) -> "dict[str, Validation]":
        """Return {group: its rows}, in the order of the rows."""
        names = self.names
        return ResultDict({x: self.take(names == x) for x in dict.fromkeys(names.tolist())})

    def worst(self, count: int) -> list[dict[str, Any]]:
        """List the rows with the largest errors of the step time [%], the worst first."""
        errors = self.errors
        order = np.argsort(-np.abs(np.nan_to_num(errors)), kind="stable")[:count]  # largest first
        return ResultList(
            [
                {
                    "file": str(self.measured.file[i]),
                    "row": int(self.measured.row[i]),
                    "group": str(self.measured.group[i]),
                    "measured": float(self.measured.seconds[i]),
                    "predicted": float(self.predicted.seconds[i]),
                    "error": float(100 * errors[i]),
                }
                for i in order
                if np.isfinite(errors[i])
            ]
        )


def _equal_rows(rows: MeasuredRows, names: Iterable[str]) -> list[list[int]]:
    columns = [rows.column(name).astype(str).tolist() for name in names]
    groups: dict[tuple[str, ...], list[int]] = {}
    for row, values in enumerate(zip(*columns, strict=True)):
        groups.setdefault(values, []).append(row)
    return [*groups.values()]


def _errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> PredictionErrors | None:
    has_both = np.isfinite(measured) & np.isfinite(predicted)
    return prediction_errors(predicted[has_both], measured[has_both]) if has_both.any() else None


LARGE = ("nanotron_h100",)  # tables that take longest, and so are left out by default


def measured_tables(*, large: bool = False, unseen: bool = False) -> tuple[Path, ...]:
    """List the files of measured rows that come with pipejax, without `LARGE` files by default.

    With `unseen`, list the files to which no number is fitted.
    """
    paths = sorted((DATA / "measured" / ("unseen" if unseen else "")).glob("*.csv"))
    return tuple(path for path in paths if large or path.stem not in LARGE)


def validate(
    data: str | Path | MeasuredRows | Sequence[str | Path] = (),
    system: System | str | Path | None = None,
    *,
    stack: str | Path | None = None,
    link: str | Links = "delay",
    predict: Predict | None = None,
) -> Validation:
    """Predict measured runs, and compare predictions with measurements.

    Args:
      data: files of measured rows, or `MeasuredRows`; by default all tables that come with pipejax.
      system: a machine, or its name or file; by default the machine that each row names.
      stack: name or file of the software; by default the software that each row names. Not allowed
        with `MeasuredRows`.
      link: link model of messages, or `Links`.
      predict: function from rows and a machine to predictions; by default the cost model.

    Returns:
      Measured and predicted times and memory, with `time`, `memory`, `coverage_90`, `groups` and
      `worst(count)`.

    Raises:
      ValueError: if a row is wrong, or if a row names no system and `system` is None.
      OSError: if a file cannot be read.

    Example:
      >>> import pipejax as pj
      >>> def guess(rows, system):  # 10 % too slow, in place of the cost model
      ...     seconds = 1.1 * rows.seconds
      ...     return Predictions(seconds, rows.memory_bytes, 0.9 * seconds, 1.1 * seconds)
      >>> found = pj.validate(DATA / "measured" / "korthikanti_a100.csv", predict=guess)
      >>> print(f"{found.time.mape:.1f} % of {found.time.rows} runs, {len(found.groups)} groups")
      10.0 % of 9 runs, 3 groups
    """
    check_types(
        data=(data, str, Path, MeasuredRows, Sequence),
        system=(system, System, str, Path, type(None)),
    )
    if isinstance(data, MeasuredRows) and stack is not None:
        raise wrong("stack", f"is for files: read MeasuredRows with this stack, got {stack!r}")
    rows = data if isinstance(data, MeasuredRows) else _read(data, stack)
    predict = predict or functools.partial(predicted_by_costs, link=link)
    machine = load_system(system) if isinstance(system, str | Path) else system
    is_nameless = rows.system == ""
    if machine is None and is_nameless.any():
        k = int(np.argmax(is_nameless))
        raise wrong("system", f"must be given: {rows.file[k]}, row {rows.row[k]}, names none")
    if machine is not None and machine.calibration is None:  # a calibrated one may replace them
        _warn_overridden(rows, machine.name)
    return Validation(rows, _predict(rows, machine, predict))


def judge(ours: Validation, path: str | Path) -> tuple[Validation, Validation]:
    """Return the predictions of another simulator, and ours for the rows that it predicts.

    Args:
      ours: rows of one file, with our predictions.
      path: file of the simulator's predictions, as `read_predictions` reads it.
    """
    files = set(ours.measured.file)
    if len(files) != 1:
        raise wrong("predictions", f"must be for one file of measured rows, got {len(files)} files")
    columns = read_predictions(path, len(ours.measured))
    no_band = np.full(len(ours.measured), np.nan)
    theirs = Validation(ours.measured, Predictions(**columns, low=no_band, high=no_band))
    is_predicted = np.isfinite(columns["seconds"])
    if not is_predicted.any():
        raise ValueError(f"{path} predicts no step time")
    return theirs.take(is_predicted), ours.take(is_predicted)


def _read(data: str | Path | Sequence[str | Path], stack: str | Path | None) -> MeasuredRows:
    files = [Path(data)] if isinstance(data, str | Path) else [Path(path) for path in data]
    for path in files:
        if files.count(path) > 1:
            raise ValueError(f"{path} is given twice")
    return joined([read_rows(path, stack) for path in files or measured_tables()])


def _warn_overridden(rows: MeasuredRows, system: str) -> None:
    """Warn if a system predicts rows that name another system."""
    other_rows = rows.system[(rows.system != "") & (rows.system != system)]
    if len(other_rows):
        names = ", ".join(dict.fromkeys(other_rows.tolist()))
        text = f"{system} predicts {len(other_rows)} rows that name another system ({names})"
        warnings.warn(text, Notice, stacklevel=3)


def _predict(rows: MeasuredRows, system: System | None, predict: Predict) -> Predictions:
    """Predict rows in groups of equal system and stack; each measured number needs a prediction."""
    # Without a system, each row is predicted on the system that it names.
    predictions = Predictions(*(np.full(len(rows), np.nan) for _ in Predictions._fields))
    names = rows.system if system is None else np.full(len(rows), system.name)
    for name, stack in dict.fromkeys(zip(names.tolist(), rows.stack.tolist(), strict=True)):
        mask = (names == name) & (rows.stack == stack)
        machine = load_system(name) if system is None else system
        machine = load_stack(stack).on(machine) if stack else machine
        for values, new in zip(predictions, predict(rows.take(mask), machine), strict=True):
            if new is not None and values is not None:
                values[mask] = new
    for name in ("seconds", "memory_bytes"):
        values, measured = getattr(predictions, name), getattr(rows, name)
        is_missing = ~np.isfinite(values) & np.isfinite(measured)
        if is_missing.any():
            k = int(np.argmax(is_missing))
            raise ValueError(f"{rows.file[k]}, row {rows.row[k]}: no {name} predicted")
    return predictions


def predicted_by_costs(
    rows: MeasuredRows, system: System, link: str | Links = "delay"
) -> Predictions:
    """Predict rows by the cost model, with the 90 % error band of the system's calibration."""
    check_machine_of_rows(rows, system)
    times = _step_times(rows, link)
    seconds = times.predict(system)
    memory = np.full(len(rows), np.nan)
    for k in np.flatnonzero(np.isfinite(rows.memory_bytes) | rows.out_of_memory.any()):
        memory[k] = memory_bytes(times.workloads[k], times.tables[k]).max()
    fits = np.where(np.isfinite(memory), memory <= float(system.memory_available), np.nan)
    bands = () if system.calibration is None else system.calibration.bands
    low, high = next(((b.low, b.high) for b in bands if b.percent == 90), (np.nan, np.nan))
    return Predictions(seconds, memory, low * seconds, high * seconds, fits)


def check_machine_of_rows(rows: MeasuredRows, system: System) -> None:
    """Refuse rows if the system lacks a number that they need, such as a peak in FP8."""
    for k, workload in enumerate(row_workloads(rows)):
        try:
            check_machine(workload, system)
        except ValueError as error:
            raise ValueError(f"{rows.file[k]}, row {rows.row[k]}: {error}") from None


def _step_times(rows: MeasuredRows, link: str | Links) -> StepTimes:
    """Build the schedules of all rows; an error names the row whose schedule is impossible."""
    try:
        return StepTimes(rows, link=link)
    except ValueError:
        for k in range(len(rows)):
            try:
                StepTimes(rows.take(np.array([k])), link=link)
            except ValueError as error:
                raise ValueError(f"{rows.file[k]}, row {rows.row[k]}: {error}") from None
        raise
