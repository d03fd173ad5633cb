"""What a calibrated system says of its calibration: source, rows, parameters, bands."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipejax.base.checks import is_number, whole_number
from pipejax.base.data_files import check_keys
from pipejax.base.display import short_repr, short_repr_of


@short_repr
class FittedParameter(NamedTuple):
    """One fitted number.

    Attributes:
      name: section and key of the system file.
      value: in the unit.
      unit: text.
      standard_error: in the unit; None where the data leave it open.
      identified: whether the data say more of it than its prior.
    """

    name: str
    value: float
    unit: str
    standard_error: float | None
    identified: bool


@short_repr
class Band(NamedTuple):
    """Quantiles of measured over predicted time.

    Attributes:
      percent: share of runs that lie between.
      low: measured over predicted time at the lower end.
      high: at the upper end.
    """

    percent: float
    low: float
    high: float


@short_repr_of("rows source parameters bands")
class CalibrationRecord(NamedTuple):
    """What the numbers of a system were fitted to, and how well.

    Attributes:
      source: where the measured runs come from.
      rows: how many runs.
      parameters: what was fitted.
      bands: how far measured times lie from predicted ones.
    """

    source: str
    rows: int
    parameters: tuple[FittedParameter, ...]
    bands: tuple[Band, ...]


def read_calibration(data: Any, where: str) -> CalibrationRecord:
    """Read the section of a system file that tells of its calibration."""
    check_keys(data, dict.fromkeys(CalibrationRecord._fields, ""), where)
    if not isinstance(data.get("source"), str):
        raise ValueError(f"{where}: source must be a text, got {data.get('source')!r}")
    parameters, bands = data.get("parameters", {}), data.get("bands", {})
    for name, section in (("parameters", parameters), ("bands", bands)):
        if not isinstance(section, Mapping):
            raise ValueError(f"{where}: {name} must be an object, got {section!r}")
    return CalibrationRecord(
        data["source"],
        whole_number(data.get("rows"), f"{where}: rows"),
        tuple(
            _parameter(name, one, f"{where}: parameters: {name}")
            for name, one in parameters.items()
        ),
        tuple(
            _band(percent, ends, f"{where}: bands: {percent}") for percent, ends in bands.items()
        ),
    )


def _parameter(name: str, data: Any, where: str) -> FittedParameter:
    check_keys(data, dict.fromkeys(FittedParameter._fields[1:], ""), where)
    value, error = data.get("value"), data.get("standard_error")
    if not is_number(value) or not (error is None or is_number(error)):
        raise ValueError(f"{where}: value must be a number, and standard_error too if there is one")
    return FittedParameter(
        name, value, str(data.get("unit", "")), error, bool(data.get("identified", True))
    )


def _band(percent: str, ends: Any, where: str) -> Band:
    is_pair = isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends))
    if not (is_pair and 0 < ends[0] <= ends[1] and percent.isdigit() and 0 < int(percent) < 100):
        raise ValueError(f'{where} must be as "90": [0.9, 1.2], two factors above 0, got {ends!r}')
    return Band(float(percent), float(ends[0]), float(ends[1]))
