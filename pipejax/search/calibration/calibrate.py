"""Entry point of calibration: fit a system to measured step times, and state its errors."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pipejax.analysis.step.evidence import as_numbers, group_errors
from pipejax.analysis.step.step_time import StepTimes
from pipejax.analysis.step.validation import (
    PredictionErrors,
    check_machine_of_rows,
    prediction_errors,
)
from pipejax.base.array_types import Bool, Float, Int, NumpyArray
from pipejax.base.checks import as_tuple, check_types, whole_number, wrong
from pipejax.base.display import short_repr, with_short_repr
from pipejax.base.progress import OnProgress, telling
from pipejax.costs.measured.measured_rows import CONFIGURATION, MeasuredRows
from pipejax.costs.model.stack import load_stack
from pipejax.costs.system.parts import system_number, written_with
from pipejax.costs.system.system import Band, CalibrationRecord, FittedParameter, System
from pipejax.search.calibration.hold_outs import (
    Folds,
    band_coverage,
    error_bands,
    fold_by_columns,
    random_parts,
    read_folds,
)
from pipejax.search.calibration.parameters import (
    FITTED,
    LADDER,
    Parameters,
    calibrated_system,
    fitted_numbers,
    parameters_with_priors,
    with_factors,
)
from pipejax.search.calibration.robust_fit import NOISE, Points, RobustFit, robust_fit, row_weights

ByFold = Float[NumpyArray, "folds rows"]
OUTLIER = 3.5  # a row is an outlier if its residual exceeds this times the noise
LAYER_SPREAD = 1.0  # prior spread of the logarithm of a layer factor
LAYER_SHAPE = "h,s,t,c,e,b"  # columns that the time of a layer depends on
ALL = "all"  # stands for all numbers in `FITTED`
RUN = ",".join(CONFIGURATION)
MAX_ROWS = 60  # number of random rows that choose the numbers to fit
MAX_FOLDS = 10  # number of folds of these rows
MIN_GAIN = 0.01  # least reduction of the mean relative error on unseen rows that justifies a fit
MAX_FACTOR = 20.0  # the unit is wrong if the median of measured / predicted time is beyond this
MIN_GAP_FACTOR = 1.3  # least factor between two groups of residuals
MIN_KIND_SHARE = 0.15  # least share of the rows in such a group
UNIT_FACTOR = 3.0  # largest ratio of the median to the factor of another unit
MAX_STARTS = 1000


@short_repr
class Outlier(NamedTuple):
    """A measured run far from its predicted time; its influence on the fit is limited."""

    row: int  # number of the row in the file, from 1
    file: str
    measured: float  # [s]
    predicted: float  # [s]
    error: float  # predicted / measured - 1 [%]


@with_short_repr("fit held_out parameters system coverage outliers noise seconds")
@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """A system fitted to measured step times, with the errors of its predictions.

    Attributes:
      system: the system with the fitted numbers, and the record of its calibration.
      parameters: {name: fitted number}.
      layer_factors: {layer shape: fitted / modelled time of a layer}, if layer times are fitted.
      fit: errors of the fit on all rows.
      held_out: errors on held-out rows, which the fits have not seen; None without a hold-out.
      folds: {fold: errors on its held-out rows}.
      as_is: errors of the unchanged machine on all rows.
      left_out: errors of fits of the same numbers on rows that they have not seen; None if the user
        named the numbers.
      coverage: {nominal percentage of a band: share of held-out rows within the band [%]}. A band
        comes from all other held-out rows.
      outliers: rows far from their predictions.
      remarks: faults of the rows as a whole.
      noise: standard deviation of log(predicted / measured), with bounded outliers.
      predicted: (rows) step times of the fit [s].
      predicted_unseen: (rows) geometric mean of the step times by fits that have not seen the row
        [s]; NaN without such fits.
      starts_differ: largest relative difference of a fitted number between starts.
      seconds: duration of the calibration.
    """

    system: System
    parameters: Mapping[str, FittedParameter]
    layer_factors: Mapping[str, float]
    fit: PredictionErrors
    held_out: PredictionErrors | None
    folds: Mapping[str, PredictionErrors]
    as_is: PredictionErrors
    left_out: PredictionErrors | None
    coverage: Mapping[int, float]
    outliers: tuple[Outlier, ...]
    remarks: tuple[str, ...]
    noise: float
    predicted: Float[NumpyArray, " rows"]
    predicted_unseen: Float[NumpyArray, " rows"]
    starts_differ: float
    seconds: float

    @property
    def stack_numbers(self) -> dict[str, float]:
        """Return {name: number in SI units} of the software stack; empty if it has no name."""
        record = self.system.calibration
        if record is None or not record.stack:
            return {}
        names = ("kernels.attention_efficiency", "kernels.elementwise", "host.launch")
        return {name: float(system_number(self.system, name)) for name in names}


def calibrate(
    rows: MeasuredRows,
    system: System,
    *,
    fit: Sequence[str] | None = None,
    hold_out: str | None = None,
    starts: int = 1,
    layer_times: str | None = None,
    seed: int = 0,
    general: bool = False,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Fit numbers of a system to measured step times.

    The fit is robust least squares on the logarithm of time. If the rows do not determine a number,
    a prior keeps it near the number of the system. Without `fit`, cross-validation chooses the
    numbers to fit. No number is fitted if the unchanged system predicts better. All rows of a
    configuration together have the weight of one row.

    Args:
      rows: measured runs, all with the same stack.
      system: the machine, whose other numbers do not change.
      fit: names of the numbers, such as "compute.efficiency", or "all" numbers with priors;
        default: chosen from `LADDER`.
      hold_out: rows that further fits leave out and predict: "t=8", "group:h,t,b", "k-fold:5",
        "few:8" (all but eight rows, in several draws) or "model".
      starts: number of start points: first the medians of the priors, then draws from the priors.
      layer_times: columns, such as "h,t,b". Layers get a factor on their times for every
        combination of values in these columns.
      seed: seed of the draws.
      general: whether priors are those of machines in general, instead of the system's numbers.
      on_progress: called with the number of steps of the fits, None and "steps".

    Returns:
      The fitted system with standard errors and residuals.

    Raises:
      ValueError: if no row has seconds, a name is unknown, the hold-out leaves out no row or all
        rows, the rows have several stacks, or their unit seems to be wrong.

    Example:
      >>> import pipejax as pj
      >>> from pipejax.costs.measured.rows_file import read_rows
      >>> rows = read_rows("runs.csv")  # doctest: +SKIP
      >>> pj.calibrate(rows, pj.load_system("a100"), hold_out="t=8").held_out  # doctest: +SKIP
    """
    start_time = time.perf_counter()
    check_types(rows=(rows, MeasuredRows), system=(system, System))
    starts = whole_number(starts, "starts", maximum=MAX_STARTS)
    rows = rows.take(np.isfinite(rows.seconds))
    if not len(rows):
        raise ValueError("rows: no step time was measured, there is nothing to fit")
    system = _with_stack_of_rows(rows, system)
    problem = _set_up_fit(rows, system, _names(fit), layer_times, general)
    as_is = problem.unchanged_times()  # (rows) [s]
    _check_scale(rows, as_is)
    no_folds = Folds((), np.zeros((0, len(rows)), bool))
    folds = no_folds if hold_out is None else read_folds(rows, hold_out, seed=seed)
    points = np.random.default_rng(seed).standard_normal((starts, len(problem.parameters.names)))
    points[0] = 0.0  # the medians of the priors
    weights = np.tile(problem.weights, (starts, 1))
    with telling("calibrate", on_progress) as tell:
        steps = itertools.count(1)
        problem = problem._replace(after_step=lambda: tell(next(steps), None, "steps"))
        chosen = None
        if fit is None and layer_times is None:
            problem, chosen = _choose_fitted_numbers(problem, as_is, seed)
        minimum = robust_fit(problem.residuals, points, weights)
        best = int(minimum.objective.argmin())
        fold_residual = _fit_folds(problem, folds, minimum.point[best])
    comparison, seconds = (as_is, chosen), time.perf_counter() - start_time
    return _result(problem, minimum, best, folds, fold_residual, comparison, seconds)


def _names(fit: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the numbers to fit; "all" stands for the names in `FITTED`."""
    requested = (ALL,) if fit is None else as_tuple(fit)
    # a repeated name is kept, and refused later
    unlisted_names = tuple(name for name in FITTED if name not in requested)
    expanded = (unlisted_names if name == ALL else (name,) for name in requested)
    return tuple(itertools.chain.from_iterable(expanded))


class _Fitting(NamedTuple):
    """Fit of a system's numbers, such as efficiencies and latencies, to measured rows."""

    rows: MeasuredRows
    system: System
    parameters: Parameters
    num_system_numbers: int  # number of parameters of the system; layer factors follow them
    step_times: StepTimes
    free: Bool[NumpyArray, " parameters"]  # whether the fit changes the parameter
    after_step: Callable[[], object] = lambda: None

    @property
    def weights(self) -> Float[NumpyArray, " rows"]:
        """Return the weight of each row; repeated runs of a configuration share one weight."""
        # A fold of `fold_by_columns` holds the rows with equal values in these columns.
        # All rows with a layer shape share the model's error for this shape. With full weights,
        # many rows of few shapes would overrule every prior, and absurd numbers would fit these
        # errors. Shapes with a fitted layer factor have no such error.
        runs, configuration_weight = fold_by_columns(self.rows, RUN), 1.0
        if len(self.parameters.names) == self.num_system_numbers:
            shapes = fold_by_columns(self.rows, LAYER_SHAPE)
            configuration_weight = len(shapes.names) / len(runs.names)
        is_member = runs.left_out  # (configurations, rows)
        repetitions = is_member.sum(axis=1)[is_member.argmax(axis=0)]
        return configuration_weight * row_weights(self.rows.variance, NOISE) / repetitions

    def unchanged_times(self) -> Float[NumpyArray, " rows"]:
        """Return the step time [s] of each row that the unchanged system predicts."""
        # NaN stands for the number of the system, and 1 for a layer factor without effect
        values = np.ones((1, len(self.parameters.names)))
        values[:, : self.num_system_numbers] = np.nan
        names = self.parameters.names[: self.num_system_numbers]
        seconds, _ = self.step_times.predict_and_grad(self.system, names, values)
        return seconds[0]

    def residuals(self, points: Points) -> tuple[NumpyArray, NumpyArray]:
        """Return log(predicted / measured), and slopes with a further, last axis of parameters."""
        names = self.parameters.names[: self.num_system_numbers]
        values = np.where(self.free, self.parameters.values(points), np.nan)
        seconds, slopes = self.step_times.predict_and_grad(self.system, names, values)
        self.after_step()
        jacobian = slopes * self.parameters.slopes(points)[:, None] / seconds[..., None]
        return np.log(seconds / self.rows.seconds), jacobian * self.free


def _set_up_fit(
    rows: MeasuredRows,
    system: System,
    names: tuple[str, ...],
    layer_times: str | None,
    general: bool,
) -> _Fitting:
    """Set up the fit of numbers with priors; with `layer_times`, of layer factors, too."""
    check_machine_of_rows(rows, system)
    kernels = dataclasses.replace(system.kernels, priced=True)
    system = dataclasses.replace(system, kernels=kernels)
    parameters = parameters_with_priors(system, names, general=general)
    layer_group = None
    if layer_times is not None:
        shapes = fold_by_columns(rows, layer_times)
        layer_group = shapes.left_out.argmax(axis=0)  # (rows) the layer factor of each row
        layer_names = [f"layer {name}" for name in shapes.names]
        parameters = with_factors(parameters, layer_names, LAYER_SPREAD)
    step_times = StepTimes(rows, layer_group=layer_group, system=system)
    is_free = np.ones(len(parameters.names), bool)
    return _Fitting(rows, system, parameters, len(names), step_times, is_free)


def _with_stack_of_rows(rows: MeasuredRows, system: System) -> System:
    """Return the system with the software stack of the rows; all rows must have the same stack."""
    stacks = dict.fromkeys(rows.stack.tolist())
    if len(stacks) > 1:
        names = ", ".join(name or "none" for name in stacks)
        why = "fitted numbers depend on the software, so calibrate the rows of each stack alone"
        raise wrong("stack", f"must be the same in all rows, got {names}: {why}")
    name = next(iter(stacks))
    return load_stack(name).on(system) if name else system


# {unit of time that a column may have by mistake: number of units in a second}
UNITS = {"milliseconds": 1e3, "microseconds": 1e6, "minutes": 1 / 60, "hours": 1 / 3600}


def _check_scale(rows: MeasuredRows, as_is: NumpyArray) -> None:
    """Refuse rows whose measured times are off by a large common factor, as with a wrong unit."""
    factor = float(np.median(rows.seconds / as_is))
    # distance of the factor from that of each unit, on a logarithmic scale
    distances = {unit: abs(math.log(factor / size)) for unit, size in UNITS.items()}
    nearest_unit = min(distances, key=lambda unit: distances[unit])
    is_unit = distances[nearest_unit] < math.log(UNIT_FACTOR)
    if not is_unit and 1 / MAX_FACTOR < factor < MAX_FACTOR:
        return
    guess = f", as if they were {nearest_unit}" if is_unit else ""
    text = f"the median row took {factor:.3g} times the predicted time{guess}"
    raise wrong("seconds", f"must be times of this machine in seconds: {text}")


class _FitChoice(NamedTuple):
    """Errors of the chosen fits, or of the unchanged system, on rows that they have not seen."""

    rows: Int[NumpyArray, " sample"]  # indices of at most `MAX_ROWS` rows
    residual: Float[NumpyArray, " sample"]  # log(predicted / measured)
    num_folds: int


def _choose_fitted_numbers(
    problem: _Fitting, as_is: Float[NumpyArray, " rows"], seed: int
) -> tuple[_Fitting, _FitChoice]:
    """Choose the numbers to fit: the set of `LADDER` that predicts unseen rows best."""
    # The error of a set is the mean error on unseen rows in cross-validation. Rows of a
    # configuration are left out together, because they predict each other. A set must predict
    # better than the unchanged system (`as_is` [s]) in two ways. Its mean error must be smaller by
    # `MIN_GAIN`, because repeated runs differ by about as much. Its largest error must not be
    # larger, because few rows say little about other rows. Otherwise no number is fitted.
    num_rows = len(problem.rows)
    sample_rows = np.arange(num_rows)
    sample = problem
    if num_rows > MAX_ROWS:
        sample_rows = np.sort(np.random.default_rng(seed).permutation(num_rows)[:MAX_ROWS])
        rows = problem.rows.take(sample_rows)
        sample = problem._replace(rows=rows, step_times=StepTimes(rows, system=problem.system))
    # random folds of complete configurations
    row_configuration = fold_by_columns(sample.rows, RUN).left_out.argmax(axis=0)  # (rows) index
    num_configurations = int(row_configuration.max()) + 1
    random = np.random.default_rng(seed)
    folds = random_parts(num_configurations, min(num_configurations, MAX_FOLDS), random)
    folds = folds._replace(left_out=folds.left_out[:, row_configuration])
    best_residual = np.log(as_is / problem.rows.seconds)[sample_rows]
    as_is_error = np.abs(np.expm1(best_residual))
    best_error = as_is_error.mean() - MIN_GAIN
    best_free = np.zeros(len(problem.free), bool)
    if len(folds.names) > 1:
        for names in LADDER:
            candidate = sample._replace(free=np.isin(problem.parameters.names, names))
            fold_residual = _fit_folds(candidate, folds, np.zeros(len(candidate.free)))
            row_fold = folds.left_out.argmax(axis=0)  # the fit of this fold has not seen the row
            residual = fold_residual[row_fold, np.arange(len(sample_rows))]
            error = np.abs(np.expm1(residual))
            if error.mean() < best_error and error.max() <= as_is_error.max():
                best_free, best_residual, best_error = candidate.free, residual, error.mean()
    choice = _FitChoice(sample_rows, best_residual, len(folds.names))
    return problem._replace(free=best_free), choice


def _fit_folds(problem: _Fitting, folds: Folds, start: Float[NumpyArray, " parameters"]) -> ByFold:
    """Fit once per fold, without the fold's rows; return log(predicted / measured) by fold."""
    if not folds.names:
        return np.zeros((0, len(problem.rows)))
    points = np.tile(start, (len(folds.names), 1))
    weights = problem.weights * (1.0 - folds.left_out)
    return robust_fit(problem.residuals, points, weights).residual


def _record(
    problem: _Fitting,
    residual: Float[NumpyArray, " rows"],
    numbers: tuple[FittedParameter, ...],
    bands: tuple[Band, ...],
) -> CalibrationRecord:
    """Return the record of a fit: sources, fitted numbers, bands, and errors by regime."""
    rows = problem.rows
    sources = np.where(rows.source == "", rows.file, rows.source)
    evidence = group_errors(rows, np.expm1(residual), float(problem.system.gpus_per_node))
    overlaps = np.unique(rows.overlap[rows.data > 1])  # overlap matters only for several replicas
    return CalibrationRecord(
        source="; ".join(dict.fromkeys(sources.tolist())),
        rows=len(rows),
        parameters=numbers,
        bands=bands,
        stack=str(rows.stack[0]),
        evidence=as_numbers(evidence),
        overlap=float(overlaps[0]) if len(overlaps) == 1 else None,
    )


def _result(
    problem: _Fitting,
    minimum: RobustFit,
    best: int,
    folds: Folds,
    fold_residual: Float[NumpyArray, "folds rows"],
    comparison: tuple[NumpyArray, "_FitChoice | None"],
    seconds: float,
) -> Calibration:
    """Return the result of a fit; a residual is log(predicted / measured)."""
    # `fold_residual[k]`: all rows, in the fit that leaves out fold k. `best`: index of the best
    # start. `comparison`: (rows) times of the unchanged system [s], and the choice of the numbers.
    rows, residual, noise = problem.rows, minimum.residual[best], float(minimum.noise[best])
    predicted = rows.seconds * np.exp(residual)
    values = problem.parameters.values(minimum.point)
    fitted = fitted_numbers(problem.parameters, minimum, best, problem.num_system_numbers)
    numbers = tuple(itertools.compress(fitted[: problem.num_system_numbers], problem.free))
    layer_factors = fitted[problem.num_system_numbers :]
    # residuals of the rows that each fold leaves out
    by_fold = [row[is_out] for row, is_out in zip(fold_residual, folds.left_out, strict=True)]
    left_out_residual = (fold_residual * folds.left_out).sum(axis=0)
    num_folds = folds.left_out.sum(axis=0)  # number of folds that leave out each row
    unseen_residual = left_out_residual / np.where(num_folds > 0, num_folds, np.nan)
    as_is, chosen = comparison
    is_far = np.abs(residual) > OUTLIER * noise
    # error bands come from unseen rows, if there are such rows
    if by_fold:
        band_residual, groups = np.concatenate(by_fold), len(by_fold)
    elif chosen is not None:
        band_residual = chosen.residual[~is_far[chosen.rows]]
        groups = min(chosen.num_folds, len(band_residual))
    else:
        band_residual, groups = residual[~is_far], 0
    bands = error_bands(band_residual, groups if groups > 1 else len(band_residual))
    evidence_residual = residual.copy()
    if chosen is not None:
        evidence_residual[chosen.rows] = chosen.residual
    record = _record(problem, evidence_residual, numbers, bands)
    times = [rows.seconds[is_left_out] for is_left_out in folds.left_out]
    return Calibration(
        system=calibrated_system(problem.system, record),
        parameters={number.name: number for number in numbers},
        layer_factors={factor.name: factor.value for factor in layer_factors},
        fit=prediction_errors(predicted, rows.seconds),
        held_out=_errors(np.concatenate(by_fold), np.concatenate(times)) if by_fold else None,
        folds={
            name: _errors(residuals, measured)
            for name, residuals, measured in zip(folds.names, by_fold, times, strict=True)
        },
        as_is=prediction_errors(as_is, rows.seconds),
        left_out=None if chosen is None else _errors(chosen.residual, rows.seconds[chosen.rows]),
        coverage=band_coverage(by_fold, fold_residual, folds.left_out),
        outliers=_outliers(rows, predicted, residual, is_far),
        remarks=_remarks(residual),
        noise=noise,
        predicted=predicted,
        predicted_unseen=rows.seconds * np.exp(unseen_residual),
        starts_differ=float(np.abs(values / values[best] - 1).max()),
        seconds=seconds,
    )


def _errors(residual: NumpyArray, measured: NumpyArray) -> PredictionErrors:
    return prediction_errors(measured * np.exp(residual), measured)


def _outliers(
    rows: MeasuredRows, predicted: NumpyArray, residual: NumpyArray, is_far: NumpyArray
) -> tuple[Outlier, ...]:
    """List the rows marked in `is_far`, the largest residual first."""
    order = np.argsort(-np.abs(residual), kind="stable")
    return tuple(
        Outlier(
            row=int(rows.row[k]),
            file=str(rows.file[k]),
            measured=float(rows.seconds[k]),
            predicted=float(predicted[k]),
            error=100 * float(np.expm1(residual[k])),
        )
        for k in order[is_far[order]]
    )


def _remarks(residual: Float[NumpyArray, " rows"]) -> tuple[str, ...]:
    """Return a remark if residuals form two groups with a wide gap between them."""
    ordered = np.sort(residual)
    gaps = np.diff(ordered)
    min_rows = max(2, math.ceil(MIN_KIND_SHARE * len(ordered)))  # rows of each group
    inner_gaps = gaps[min_rows - 1 : len(ordered) - min_rows]
    if not len(inner_gaps) or inner_gaps.max() < math.log(MIN_GAP_FACTOR):
        return ()
    cut = min_rows + int(inner_gaps.argmax())
    factor = math.exp(float(np.median(ordered[cut:]) - np.median(ordered[:cut])))
    return (
        f"{cut} of {len(ordered)} rows took about {factor:.3g} times as long as the other rows "
        "suggest: their unit, stack or machine differs, and no fit matches both groups",
    )


def calibrated_file(
    base: Mapping[str, Any],
    records: Sequence[CalibrationRecord],
    name: str,
    stack_numbers: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Put fitted numbers and the records of their fits into the content of a system's file."""
    # `base` is the content before the fits. Numbers that were not fitted stay, except for
    # `stack_numbers`, the numbers of the runs' software in SI units. `records` are the fits in
    # order; the last bands, stack and overlap count.
    stack = next((record.stack for record in reversed(records) if record.stack), "")
    overlaps = [record.overlap for record in records if record.overlap is not None]
    evidence = [list(row) for record in records for row in record.evidence]
    parameters = {fit.name: fit for record in records for fit in record.parameters}
    bands = [band for record in records for band in record.bands]
    # if the file has a section of kernels, kernels are priced, as in a fit of complete runs
    content = written_with(
        {**({"kernels": {}} if bands else {}), **base},
        {**stack_numbers, **{name: parameter.value for name, parameter in parameters.items()}},
    )
    fitted = {fitted_name: parameter._asdict() for fitted_name, parameter in parameters.items()}
    for parameter in fitted.values():
        del parameter["name"]
    sources = "; ".join(f"{record.rows} measured rows: {record.source}" for record in records)
    return content | {
        "name": name,
        "source": f"{base['source']} Calibrated on {sources}",
        "calibration": {
            "source": "; ".join(record.source for record in records),
            "rows": sum(record.rows for record in records),
            "parameters": fitted,
            "bands": {f"{band.percent:g}": [band.low, band.high] for band in bands},
            **({"stack": stack} if stack else {}),
            **({"overlap": overlaps[-1]} if overlaps else {}),
            **({"evidence": evidence} if evidence else {}),
        },
    }
