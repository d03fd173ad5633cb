"""A calibration as the content of a system file, which every command takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipejax.costs.calibration_record import CalibrationRecord
from pipejax.costs.system_numbers import written_with

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
