"""Calibration of links from measured times of single collectives and messages."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.analysis.step.validation import PredictionErrors, prediction_errors
from pipejax.base.array_types import Array, Float, NumpyArray
from pipejax.base.checks import as_tuple, check_types
from pipejax.base.compiled import compiled
from pipejax.base.display import with_short_repr
from pipejax.costs.layers.collectives import collective_time
from pipejax.costs.measured.measured_rows import MESSAGE, CollectiveRows
from pipejax.costs.model.layout import Group
from pipejax.costs.system.system import CalibrationRecord, FittedParameter, System
from pipejax.search.calibration.parameters import (
    Parameters,
    calibrated_system,
    fitted_numbers,
    parameters_with_priors,
)
from pipejax.search.calibration.robust_fit import Points, robust_fit, row_weights

LIBRARY = (
    "collectives.latency",
    "collectives.simple_latency",
    "collectives.low_latency_share",
    "collectives.copies",
)
# beyond these limits, the rows probably have a wrong unit
MAX_ERROR = 50.0  # mean error of fitted times [%]
MAX_SPREADS = 6.0  # distance of a number from its prior's median, in spreads: 0.05 is 6 from 0.8
MODEL_NOISE = 0.02  # noise of a collective's time, besides the spread of repetitions


@with_short_repr("fit parameters system")
class LinkCalibration(NamedTuple):
    """A system whose links and collectives are fitted to measurements.

    Attributes:
      system: the system with the fitted numbers, and the record of its calibration.
      parameters: the fitted numbers.
      fit: errors of all rows.
    """

    system: System
    parameters: tuple[FittedParameter, ...]
    fit: PredictionErrors


def calibrate_links(
    rows: CollectiveRows, system: System, *, fit: Sequence[str] | None = None
) -> LinkCalibration:
    """Fit a system's links and collectives to collectives and messages measured in isolation.

    The fit is robust least squares on the logarithm of time, as for step times. Rows whose
    repetitions differ have smaller weights.

    Args:
      rows: measured collectives and messages.
      system: the machine, whose other numbers do not change.
      fit: names of the numbers; default: numbers of all links that the rows use, and of the library
        if rows are collectives.

    Returns:
      The fitted system with standard errors.

    Raises:
      ValueError: if a name is unknown, the prior of a number excludes the system's value, the mean
        error of the fitted times is above 50 %, or a fitted number is far outside its prior.

    Example:
      >>> import pipejax as pj
      >>> rows = pj.files.read_collectives("nccl.csv")  # doctest: +SKIP
      >>> pj.links.calibrate_links(rows, pj.load_system("a100")).fit.mape  # doctest: +SKIP
    """
    check_types(rows=(rows, CollectiveRows), system=(system, System))
    names = as_tuple(_default_numbers(rows) if fit is None else fit)
    parameters = parameters_with_priors(system, names)
    model = functools.partial(_residuals, rows, system, parameters)
    weights = row_weights(rows.variance, MODEL_NOISE)
    minimum = robust_fit(model, np.zeros((1, len(names))), weights[None])
    numbers = fitted_numbers(parameters, minimum)
    record = CalibrationRecord(rows.source, len(rows.seconds), numbers, ())
    predicted = rows.seconds * np.exp(minimum.residual[0])
    errors = prediction_errors(predicted, rows.seconds)
    hint = f"check seconds, bytes (of the whole tensor), ranks, and the links of {system.name}"
    if errors.mape > MAX_ERROR:
        ratio = float(np.median(rows.seconds / predicted))
        raise ValueError(
            f"{rows.source}: fitted times differ by {errors.mape:.3g} % in the mean, and measured "
            f"times are {ratio:.3g} times the fitted times in the median: {hint}"
        )
    spreads = np.abs(minimum.point[0])
    if spreads.max() > MAX_SPREADS:
        number = numbers[int(spreads.argmax())]
        value = f"{number.value:.3g} {number.unit}".rstrip()
        raise ValueError(
            f"{rows.source}: the rows fit only with {number.name} = {value}, which no machine has: "
            f"{hint}"
        )
    return LinkCalibration(calibrated_system(system, record), numbers, errors)


def _default_numbers(rows: CollectiveRows) -> list[str]:
    names = [] if all(kind == MESSAGE for kind in rows.kind) else [*LIBRARY]
    if (rows.inside > 1).any():
        names += ["node.efficiency", "node.latency"]
    if (rows.ranks > rows.inside).any():
        names += ["network.efficiency", "network.latency"]
    return names


def _residuals(
    rows: CollectiveRows, system: System, parameters: Parameters, points: Points
) -> tuple[NumpyArray, NumpyArray]:
    """Return log(predicted / measured) (points, rows), and slopes (points, rows, numbers)."""
    # slopes are derivatives by whitened parameters
    seconds = np.empty((len(points), len(rows.seconds)))
    slopes = np.empty((*seconds.shape, points.shape[1]))
    values, kinds = parameters.values(points), np.array(rows.kind)
    # without texts, all systems share one compilation
    unnamed = dataclasses.replace(system, name="", source="", calibration=None)
    with jax.enable_x64(True):
        for kind in dict.fromkeys(rows.kind):
            selected = np.flatnonzero(kinds == kind)
            sizes = (rows.ranks[selected], rows.inside[selected], rows.volume[selected])
            times_and_slopes = _times(unnamed, values, sizes, names=parameters.names, kind=kind)
            seconds[:, selected], slopes[:, selected] = map(np.asarray, times_and_slopes)
    jacobian = slopes * parameters.slopes(points)[:, None] / seconds[..., None]
    return np.log(seconds / rows.seconds), jacobian


@functools.partial(compiled, static_argnames=("names", "kind"))
def _times(
    system: System,
    values: Float[Array, "batch values"],
    rows: tuple[Array, Array, Array],
    *,
    names: tuple[str, ...],
    kind: str,
) -> tuple[Float[Array, "batch rows"], Float[Array, "batch rows values"]]:
    """Predict the times [s] of rows of one kind for each set of values; also return slopes."""
    ranks, inside, volume = (column.astype(float) for column in rows)

    def times(values: Array) -> tuple[Array, Array]:
        """Predict the rows' times, returned twice: `jacfwd` differentiates the first."""
        machine = system
        for k, name in enumerate(names):
            machine = machine.with_number(name, values[k])
        if kind == MESSAGE:
            in_node, node, network = inside > 1, machine.peer_link, machine.network
            latency = jnp.where(in_node, node.latency, network.latency)
            seconds = latency + volume / jnp.where(in_node, node.rate, network.rate)
        else:
            group = Group(ranks, inside)
            seconds = jnp.asarray(collective_time(machine, kind, volume, group))
        return seconds, seconds  # the first is differentiated, the second returned with the slopes

    slopes, seconds = jax.vmap(jax.jacfwd(times, has_aux=True))(values)
    return seconds, slopes
