"""Predictions held against measured runs: errors, groups, worst rows, reach of the bands."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.step.step_time import StepTimes, row_workloads
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, wrong
from pipejax.base.display import ResultDict, ResultList, short_repr, with_short_repr
from pipejax.costs.measured.measured_rows import (
    CONFIGURATION,
    SIZES,
    MeasuredRows,
    joined,
)
from pipejax.costs.measured.rows_file import read_predictions, read_rows
from pipejax.costs.model.stack import load_stack
from pipejax.costs.stage.stage_costs import check_machine
from pipejax.costs.stage.stage_work import memory_bytes
from pipejax.costs.system.system import DATA, System, load_system
from pipejax.schedules.table.links import Links


@short_repr
class PredictionErrors(NamedTuple):
    """Errors of predictions, predicted / measured - 1, summed up in percent.

    Attributes:
      rows: how many were measured.
      mape: mean of the absolute errors [%].
      median: of the absolute errors [%].
      p90: what 90 % of the absolute errors are within [%].
      bias: mean of the errors: above 0 where predictions are too slow or too large [%].
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
    """Return predicted / measured - 1, NaN where nothing was measured."""
    return np.asarray(predicted, float) / np.asarray(measured, float) - 1


def prediction_errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> PredictionErrors:
    """Sum up the errors of the rows that were measured; what was not is NaN and left out.

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
    """Predictions for measured rows.

    Attributes:
      seconds: (rows) a step [s].
      memory_bytes: (rows) of the fullest worker, NaN where it is not known [B].
      low: (rows) lower end of the 90 % band of a step, NaN where there is none [s].
      high: (rows) its upper end [s].
      fits: (rows) 1 where its memory is predicted to be enough, 0 where it is not, NaN where that
        is not known; None where nobody asks.
    """

    seconds: Float[NumpyArray, " rows"]
    memory_bytes: Float[NumpyArray, " rows"]
    low: Float[NumpyArray, " rows"]
    high: Float[NumpyArray, " rows"]
    fits: Float[NumpyArray, " rows"] | None = None

    def take(self, which: NumpyArray) -> "Predictions":
        """Select rows by a mask or by their indices."""
        fits = None if self.fits is None else self.fits[which]
        return Predictions(
            self.seconds[which], self.memory_bytes[which], self.low[which], self.high[which], fits
        )


@short_repr
class MemoryVerdicts(NamedTuple):
    """Predictions of which runs end for lack of memory.

    Attributes:
      rows: how many did.
      precision: share of those predicted to that did [%].
      recall: share of those that did that was predicted [%].
    """

    rows: int
    precision: float
    recall: float


@short_repr
class Ranking(NamedTuple):
    """Quality of the order in which predictions rank layouts of one job.

    Attributes:
      jobs: with at least two different layouts.
      layouts: of all of them.
      kendall: tau of predicted and measured step times, mean over the jobs.
      best_found: share of the jobs whose layout of the shortest step is predicted to be it [%].
      regret: how much longer the predicted best takes than the best, mean over the jobs [%].
      worst_regret: of any job [%].
    """

    jobs: int
    layouts: int
    kendall: float
    best_found: float
    regret: float
    worst_regret: float


def _kendall(order: NumpyArray, reference: NumpyArray) -> float:
    """Kendall's tau-a of two orders: pairs alike less pairs reversed, over all pairs."""
    first, second = np.triu_indices(len(order), 1)
    alike = np.sign(order[first] - order[second]) * np.sign(reference[first] - reference[second])
    return float(alike.mean())


Predict = Callable[[MeasuredRows, System], Predictions]


@with_short_repr("time memory coverage_90 measured predicted")
@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """Measured rows and their predictions.

    Attributes:
      measured: the rows.
      predicted: what is predicted of each.
    """

    measured: MeasuredRows
    predicted: Predictions

    @property
    def time(self) -> PredictionErrors | None:
        """Errors of the step times; None where none was measured."""
        return _errors(self.predicted.seconds, self.measured.seconds)

    @property
    def memory(self) -> PredictionErrors | None:
        """Errors of the memory of the fullest worker; None where there is nothing to compare."""
        return _errors(self.predicted.memory_bytes, self.measured.memory_bytes)

    @property
    def out_of_memory(self) -> "MemoryVerdicts | None":
        """Compare predicted with measured runs out of memory; None without any."""
        fits, over = self.predicted.fits, self.measured.out_of_memory
        if fits is None or not over.any():
            return None
        is_over = fits == 0
        both = int((is_over & over).sum())
        return MemoryVerdicts(
            int(over.sum()), 100 * both / max(int(is_over.sum()), 1), 100 * both / int(over.sum())
        )

    @property
    def errors(self) -> Float[NumpyArray, " rows"]:
        """(rows) predicted / measured step time - 1."""
        return relative_errors(self.predicted.seconds, self.measured.seconds)

    @property
    def coverage_90(self) -> float | None:
        """Return the share of measured step times in the 90 % band [%]; None without bands."""
        low, high, seconds = self.predicted.low, self.predicted.high, self.measured.seconds
        has_band = np.isfinite(low) & np.isfinite(high) & np.isfinite(seconds)
        if not has_band.any():
            return None
        return float(100 * np.mean(((low <= seconds) & (seconds <= high))[has_band]))

    def take(self, which: NumpyArray) -> "Validation":
        """Select rows by a mask or by their indices."""
        return Validation(self.measured.take(which), self.predicted.take(which))

    @property
    def by_configuration(self) -> "Validation":
        """Average the measurements of each configuration: one row for each."""
        texts = [self.measured.column(name).astype(str) for name in CONFIGURATION]
        runs = list(zip(*(text.tolist() for text in texts), strict=True))
        place = {run: k for k, run in reversed(list(enumerate(runs)))}
        first = np.array([place[run] for run in runs])
        which = np.unique(first)
        seconds = [self.measured.seconds[first == k] for k in which]
        measured = dataclasses.replace(
            self.measured.take(which), seconds=np.array([times.mean() for times in seconds])
        )
        return Validation(measured, self.predicted.take(which))

    @property
    def ranking(self) -> Ranking | None:
        """Judge how predictions rank layouts of one job; None where no job has several."""
        once = self.by_configuration
        is_finite = np.isfinite(once.errors)
        rows, times = once.measured.take(is_finite), once.predicted.seconds[is_finite]
        columns = (
            *SIZES,
            "model",
            "accelerators",
            "global_batch",
            "precision",
            "system",
            "stack",
        )
        texts = [rows.column(name).astype(str).tolist() for name in columns]
        rows_by_job: dict[tuple[str, ...], list[int]] = {}
        for k, job in enumerate(zip(*texts, strict=True)):
            rows_by_job.setdefault(job, []).append(k)
        several = [np.array(job_rows) for job_rows in rows_by_job.values() if len(job_rows) > 1]
        if not several:
            return None
        taus, regrets = [], []
        for job_rows in several:
            measured, predicted = rows.seconds[job_rows], times[job_rows]
            taus.append(_kendall(predicted, measured))
            regrets.append(100 * (measured[predicted.argmin()] / measured.min() - 1))
        return Ranking(
            jobs=len(several),
            layouts=sum(map(len, several)),
            kendall=float(np.mean(taus)),
            best_found=100 * float(np.mean(np.array(regrets) == 0)),
            regret=float(np.mean(regrets)),
            worst_regret=max(regrets),
        )

    @property
    def names(self) -> NumpyArray:
        """(rows) names of the groups; each file has its own where there are several."""
        pairs = zip(self.parts, self.measured.group, strict=True)
        return np.array(
            [part if group in ("", part) else f"{part}: {group}" for part, group in pairs]
        )

    @property
    def parts(self) -> NumpyArray:
        """(rows) the file of each row where there are several, else its group."""
        files = np.array([Path(file).stem for file in self.measured.file])
        return files if len(set(files)) > 1 else self.measured.group

    @property
    def groups(self) -> "dict[str, Validation]":
        """The same of each group, in the order in which they come."""
        names = self.names
        return ResultDict({x: self.take(names == x) for x in dict.fromkeys(names.tolist())})

    def worst(self, count: int) -> list[dict[str, Any]]:
        """List the rows with the largest errors of the step time [%], the worst first."""
        errors = self.errors
        order = np.argsort(-np.abs(np.nan_to_num(errors)), kind="stable")[:count]
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


def _errors(
    predicted: Float[NumpyArray, " rows"], measured: Float[NumpyArray, " rows"]
) -> PredictionErrors | None:
    """Errors where there are both; what is measured and not predicted was refused before."""
    both = np.isfinite(measured) & np.isfinite(predicted)
    return prediction_errors(predicted[both], measured[both]) if both.any() else None


LARGE = ("nanotron_h100",)  # tables that take longer than all others, and are asked for by name


def measured_tables(*, large: bool = False) -> tuple[Path, ...]:
    """List the files of measured rows that come with pipejax; `LARGE` ones only if asked for."""
    paths = sorted((DATA / "measured").glob("*.csv"))
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
      data: measured rows: files, or rows that have been read; all tables that come with pipejax if
        there are none.
      system: the machine, its name or its file; the one that each row names if None.
      stack: name or file of the software; the one that each row names if None. Rows that have been
        read have theirs.
      link: link model of messages, or `Links`.
      predict: gives the predictions of rows on a machine; the cost model if None.

    Returns:
      Measured and predicted times and memory, with `time`, `memory`, `coverage_90`, `groups` and
      `worst(count)`.

    Raises:
      ValueError: if a row is wrong, or names no system where none is given.
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
        raise wrong("stack", f"of rows that were read is theirs: read them with it, got {stack!r}")
    rows = data if isinstance(data, MeasuredRows) else _read(data, stack)
    predict = predict or functools.partial(predicted_by_costs, link=link)
    if system is not None:
        machine = system if isinstance(system, System) else load_system(system)
        return Validation(rows, _predict(rows, machine, predict))
    nameless = rows.system == ""
    if nameless.any():
        first = int(np.argmax(nameless))
        where = f"{rows.file[first]}, row {rows.row[first]}"
        raise wrong("system", f"must be given: {where}, names none")
    predictions = _empty_predictions(len(rows))
    for name in dict.fromkeys(rows.system.tolist()):
        which = rows.system == name
        _fill(predictions, which, _predict(rows.take(which), load_system(name), predict))
    return Validation(rows, predictions)


def judge(ours: Validation, path: str | Path) -> tuple[Validation, Validation]:
    """Hold a simulator's predictions against measured rows, and ours of the same rows.

    Args:
      ours: rows of one file, with our predictions.
      path: the simulator's predictions, as `read_predictions` reads them.

    Returns:
      Its predictions and ours, of the rows that it predicts.
    """
    files = set(ours.measured.file)
    if len(files) != 1:
        raise wrong("predictions", f"are of one file of measured rows, got {len(files)} files")
    columns = read_predictions(path, len(ours.measured))
    none = np.full(len(ours.measured), np.nan)
    theirs = Validation(ours.measured, Predictions(**columns, low=none, high=none))
    which = np.isfinite(columns["seconds"])
    if not which.any():
        raise ValueError(f"{path} predicts no step time")
    return theirs.take(which), ours.take(which)


def _read(data: str | Path | Sequence[str | Path], stack: str | Path | None) -> MeasuredRows:
    files = [Path(data)] if isinstance(data, str | Path) else [Path(path) for path in data]
    for path in files:
        if files.count(path) > 1:
            raise ValueError(f"{path} is given twice")
    return joined([read_rows(path, stack) for path in files or measured_tables()])


def _empty_predictions(rows: int) -> Predictions:
    return Predictions(*(np.full(rows, np.nan) for _ in Predictions._fields))


def _fill(predictions: Predictions, which: NumpyArray, part: Predictions) -> None:
    for values, new in zip(predictions, part, strict=True):
        if new is not None and values is not None:
            values[which] = new


def _predict(rows: MeasuredRows, system: System, predict: Predict) -> Predictions:
    predictions = _empty_predictions(len(rows))
    for name in dict.fromkeys(rows.stack.tolist()):
        which = rows.stack == name
        machine = load_stack(name).on(system) if name else system
        _fill(predictions, which, predict(rows.take(which), machine))
    for name in ("seconds", "memory_bytes"):
        values, measured = getattr(predictions, name), getattr(rows, name)
        missing = ~np.isfinite(values) & np.isfinite(measured)
        if missing.any():
            first = int(np.argmax(missing))
            raise ValueError(f"{rows.file[first]}, row {rows.row[first]}: no {name} predicted")
    return predictions


def predicted_by_costs(
    rows: MeasuredRows, system: System, link: str | Links = "delay"
) -> Predictions:
    """Predict rows by the cost model, with the 90 % band of the machine's calibration."""
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
    """Refuse rows that need a number that the system lacks: a peak, or a rate of its host."""
    for k, workload in enumerate(row_workloads(rows)):
        try:
            check_machine(workload, system)
        except ValueError as error:
            raise ValueError(f"{rows.file[k]}, row {rows.row[k]}: {error}") from None


def _step_times(rows: MeasuredRows, link: str | Links) -> StepTimes:
    """Build the schedules of all rows; a row that has none is named."""
    try:
        return StepTimes(rows, link=link)
    except ValueError:
        for k in range(len(rows)):
            try:
                StepTimes(rows.take(np.array([k])), link=link)
            except ValueError as error:
                raise ValueError(f"{rows.file[k]}, row {rows.row[k]}: {error}") from None
        raise
