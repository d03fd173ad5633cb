"""A calibration as the content of a system file, which every command takes."""

from collections.abc import Mapping
from typing import Any

from pipejax.costs.system_numbers import written_with
from pipejax.search.calibration.calibrate import Calibration


def calibrated_file(base: Mapping[str, Any], found: Calibration, name: str) -> dict[str, Any]:
    """Put the fitted numbers and their provenance into the content of a system's file.

    `base` is the content of the file that the calibration began with: what was not fitted stays.
    """
    record = found.system.calibration
    assert record is not None
    values = {each.name: each.value for each in record.parameters}
    content = written_with({"kernels": {}, **base}, values)
    fitted = {each.name: {**each._asdict(), "name": ""} for each in record.parameters}
    for each in fitted.values():
        del each["name"]
    return content | {
        "name": name,
        "source": f"{base['source']} Calibrated on {record.rows} measured runs: {record.source}",
        "calibration": {
            "source": record.source,
            "rows": record.rows,
            "parameters": fitted,
            "bands": {f"{band.percent:g}": [band.low, band.high] for band in record.bands},
        },
    }
