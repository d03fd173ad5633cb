"""The entry point of calibration: measured rows in, a system and what is known of it out."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.step.step_time import StepTimes
from pipejax.analysis.step.validation import PredictionErrors, check_peaks, prediction_errors
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import check_types, whole_number
from pipejax.base.display import short_repr, short_repr_of
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.measured.measured_rows import MeasuredRows
from pipejax.costs.system.parts import written_with
from pipejax.costs.system.system import CalibrationRecord, FittedParameter, System
from pipejax.search.calibration.hold_outs import Folds, bands_of, columns_of, coverage_of, folds_of
from pipejax.search.calibration.parameters import (
    FITTED,
    Parameters,
    calibrated_system,
    factors,
    fitted_numbers,
    joined,
    parameters_of,
)
from pipejax.search.calibration.robust_fit import NOISE, Points, RobustFit, robust_fit, weights_of

OUTLIER = 3.5  # noises from which a row is listed as one
LAYER_SPREAD = 1.0  # of the logarithm of a layer's time, where each shape has its own
LAYER_SHAPE = "h,s,t,c,e,b"  # columns that the time of a layer depends on
MOST_STARTS = 1000
NO_FOLDS = Folds((), np.zeros((0, 0), bool))


@short_repr
class Outlier(NamedTuple):
    """A row that lies far from what the others say; it was kept, but pulls no more than a limit.

    Attributes:
      row: number in its file, from 1.
      file: the file.
      measured: [s].
      predicted: [s].
      error: predicted over measured, less 1 [%].
    """

    row: int
    file: str
    measured: float
    predicted: float
    error: float


@short_repr_of("fit held_out parameters system coverage outliers noise seconds")
@dataclasses.dataclass(frozen=True)
class Calibration:
    """A system fitted to measured step times, and how far it can be trusted.

    Attributes:
      system: with the fitted numbers, and the record of its calibration.
      parameters: what was fitted, by name.
      layer_factors: time of a layer over what the system says, by shape, where each has its own.
      fit: errors of all rows, which were fitted.
      held_out: errors of rows that were left out of the fit; None without a hold-out.
      folds: the same by what was left out.
      coverage: share of left-out rows within a band from all other left-out rows, by the percent
        that it should be [%].
      outliers: rows that lie far off.
      noise: standard deviation of log predicted over measured, outliers bounded.
      predicted: (rows) step times of the fit [s].
      starts_differ: largest relative difference of a number between all starts.
      seconds: that calibration took.
    """

    system: System
    parameters: Mapping[str, FittedParameter]
    layer_factors: Mapping[str, float]
    fit: PredictionErrors
    held_out: PredictionErrors | None
    folds: Mapping[str, PredictionErrors]
    coverage: Mapping[int, float]
    outliers: tuple[Outlier, ...]
    noise: float
    predicted: Float[NumpyArray, " rows"]
    starts_differ: float
    seconds: float


def calibrate(
    rows: MeasuredRows,
    system: System,
    *,
    fit: Sequence[str] | None = None,
    hold_out: str | None = None,
    starts: int = 1,
    layer_times: str | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Fit numbers of a system to measured step times.

    Robust least squares on the logarithm of time: each number has a prior that keeps it physical
    where the rows leave it open, and rows that lie far off pull no more than a limit. Gradients
    are exact, through the batched evaluator. Kernels are priced one by one.

    Args:
      rows: measured runs.
      system: the machine; what is not fitted stays as it is.
      fit: names of the numbers, as "compute.efficiency"; all that have priors if None.
      hold_out: what else is fitted without, and predicted: "t=8", "group:h,t,b", "k-fold:5",
        "few:8" (all but eight rows, in several draws) or "model".
      starts: how many points to start from: the priors' medians, then draws from the priors.
      layer_times: columns, as "h,t,b": every combination of their values then has a layer time
        of its own, and only what is beside the layers follows from the system.
      seed: of the draws.
      on_progress: called with how many steps the fits have taken, None and "steps"; a bar in
        notebooks if None.

    Returns:
      The fitted system with standard errors and residuals.

    Raises:
      ValueError: if no row has seconds, a name is unknown, or the hold-out leaves nothing out or
        nothing to fit.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.costs.measured.rows_file import read_rows
      >>> rows = read_rows("runs.csv")  # doctest: +SKIP
      >>> pj.calibrate(rows, pj.load_system("a100"), hold_out="t=8").held_out  # doctest: +SKIP
    """
    began = time.perf_counter()
    check_types(rows=(rows, MeasuredRows), system=(system, System))
    starts = whole_number(starts, "starts", most=MOST_STARTS)
    rows = rows.take(np.isfinite(rows.seconds))
    if not len(rows):
        raise ValueError("rows: no step time was measured, there is nothing to fit")
    problem = _fitting(rows, system, tuple(FITTED if fit is None else fit), layer_times)
    folds = NO_FOLDS if hold_out is None else folds_of(rows, hold_out, seed=seed)
    points = np.random.default_rng(seed).standard_normal((starts, len(problem.parameters.names)))
    points[0] = 0.0
    weights = np.tile(problem.weights, (starts, 1))
    with telling("calibrate", on_progress) as tell:
        steps = itertools.count(1)
        problem = problem._replace(after_step=lambda: tell(next(steps), None, "steps"))
        found = robust_fit(problem.residuals, points, weights)
        best = int(found.objective.argmin())
        left_out = _left_out(problem, folds, found.point[best])
    return _result(problem, found, best, folds, left_out, time.perf_counter() - began)


class _Fitting(NamedTuple):
    """What is fitted to which rows."""

    rows: MeasuredRows
    system: System
    parameters: Parameters
    num_numbers: int
    step_times: StepTimes
    after_step: Callable[[], object] = lambda: None

    @property
    def independent_share(self) -> float:
        """How many independent rows one row is worth: all together as many as shapes of a layer.

        What a model says of a layer is wrong by as much in all rows that have it. Were each of
        them taken as news, many rows of few shapes would overrule every prior, and so meet the
        errors of the model with numbers that no machine has. Shapes with a time of their own have
        no such error left.
        """
        if len(self.parameters.names) > self.num_numbers:
            return 1.0
        return len(columns_of(self.rows, LAYER_SHAPE).names) / len(self.rows)

    @property
    def weights(self) -> Float[NumpyArray, " rows"]:
        """Weights of rows: those whose repetitions spread count less."""
        return self.independent_share * weights_of(self.rows.variance, NOISE)

    def residuals(self, points: Points) -> tuple[NumpyArray, NumpyArray]:
        """Log of predicted over measured, and its derivatives by whitened parameters."""
        names = self.parameters.names[: self.num_numbers]
        values = self.parameters.values(points)
        seconds, slopes = self.step_times.predict_and_grad(self.system, names, values)
        self.after_step()
        jacobian = slopes * self.parameters.slopes(points)[:, None] / seconds[..., None]
        return np.log(seconds / self.rows.seconds), jacobian


def _fitting(
    rows: MeasuredRows, system: System, names: tuple[str, ...], layer_times: str | None
) -> _Fitting:
    check_peaks(rows, system)
    kernels = dataclasses.replace(system.kernels, priced=True)
    system = dataclasses.replace(system, kernels=kernels)
    numbers = parameters_of(system, names)
    if layer_times is None:
        return _Fitting(rows, system, numbers, len(names), StepTimes(rows))
    shapes = columns_of(rows, layer_times)
    group = shapes.left_out.argmax(axis=0)
    free = factors([f"layer {name}" for name in shapes.names], LAYER_SPREAD)
    return _Fitting(
        rows, system, joined(numbers, free), len(names), StepTimes(rows, layer_group=group)
    )


def _left_out(problem: _Fitting, folds: Folds, start: Points) -> Float[NumpyArray, "folds rows"]:
    """Fit without each fold's rows; (folds, rows) log of predicted over measured."""
    if not folds.names:
        return np.zeros((0, len(problem.rows)))
    points = np.tile(start, (len(folds.names), 1))
    weights = problem.weights * (1.0 - folds.left_out)
    return robust_fit(problem.residuals, points, weights).residual


def _result(
    problem: _Fitting,
    found: RobustFit,
    best: int,
    folds: Folds,
    left_out: Float[NumpyArray, "folds rows"],
    seconds: float,
) -> Calibration:
    rows, residual, noise = problem.rows, found.residual[best], float(found.noise[best])
    predicted = rows.seconds * np.exp(residual)
    values = problem.parameters.values(found.point)
    fitted = fitted_numbers(problem.parameters, found, best, problem.num_numbers)
    numbers, factors_ = fitted[: problem.num_numbers], fitted[problem.num_numbers :]
    by_fold = [residuals[own] for residuals, own in zip(left_out, folds.left_out, strict=True)]
    judged = np.concatenate(by_fold) if by_fold else residual
    bands = bands_of(judged, len(by_fold) if len(by_fold) > 1 else len(judged))
    record = CalibrationRecord(_sources(rows), len(rows), numbers, bands)
    times = [rows.seconds[own] for own in folds.left_out]
    return Calibration(
        system=calibrated_system(problem.system, record),
        parameters={number.name: number for number in numbers},
        layer_factors={one.name: one.value for one in factors_},
        fit=prediction_errors(predicted, rows.seconds),
        held_out=_errors(np.concatenate(by_fold), np.concatenate(times)) if by_fold else None,
        folds={
            name: _errors(residuals, measured)
            for name, residuals, measured in zip(folds.names, by_fold, times, strict=True)
        },
        coverage=coverage_of(by_fold, left_out, folds.left_out),
        outliers=_outliers(rows, predicted, residual, noise),
        noise=noise,
        predicted=predicted,
        starts_differ=float(np.abs(values / values[best] - 1).max()),
        seconds=seconds,
    )


def _errors(residual: NumpyArray, measured: NumpyArray) -> PredictionErrors:
    return prediction_errors(measured * np.exp(residual), measured)


def _outliers(
    rows: MeasuredRows, predicted: NumpyArray, residual: NumpyArray, noise: float
) -> tuple[Outlier, ...]:
    """Rows beyond `OUTLIER` noises, the farthest first."""
    order = np.argsort(-np.abs(residual), kind="stable")
    return tuple(
        Outlier(
            int(rows.row[k]),
            str(rows.file[k]),
            float(rows.seconds[k]),
            float(predicted[k]),
            100 * float(np.expm1(residual[k])),
        )
        for k in order[np.abs(residual[order]) > OUTLIER * noise]
    )


def _sources(rows: MeasuredRows) -> str:
    """Name each source once, or the files where rows do not say one."""
    texts = np.where(rows.source == "", rows.file, rows.source)
    return "; ".join(dict.fromkeys(texts.tolist()))


# whose presence means that kernels are priced, as they were in the fit of whole runs
PRICED: Mapping[str, Any] = {"kernels": {}}


def calibrated_file(
    base: Mapping[str, Any], records: Sequence[CalibrationRecord], name: str
) -> dict[str, Any]:
    """Put fitted numbers and their provenance into the content of a system's file.

    `base` is the content of the file that the calibration began with: what was not fitted stays.
    `records` say what was fitted, one after the other; of bands the last ones count.
    """
    parameters = {each.name: each for record in records for each in record.parameters}
    bands = [band for record in records if record.bands for band in record.bands]
    content = written_with(
        {**(PRICED if bands else {}), **base},
        {name: each.value for name, each in parameters.items()},
    )
    fitted = {known: each._asdict() for known, each in parameters.items()}
    for each in fitted.values():
        del each["name"]
    told = "; ".join(f"{record.rows} measured rows: {record.source}" for record in records)
    return content | {
        "name": name,
        "source": f"{base['source']} Calibrated on {told}",
        "calibration": {
            "source": "; ".join(record.source for record in records),
            "rows": sum(record.rows for record in records),
            "parameters": fitted,
            "bands": {f"{band.percent:g}": [band.low, band.high] for band in bands},
        },
    }
