"""`pipejax calibrate`: what measured runs say of the numbers of a machine."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.output.files import JSON, Output
from pipejax.cli.output.numbers import digits, quantity, seconds
from pipejax.cli.output.report import Answer, pick, plain, progress
from pipejax.cli.output.tables import Column, TextTable, grid, rows_table

NO_FIT: Mapping[str, Any] = {"parameters": {}, "bands": {}, "written": None}
NO_FIT_NOTE = (
    "no fit predicts held-out runs better than the unchanged system, so no file is written "
    "(--fit NAMES fits these numbers all the same)"
)


@options
class FitOptions:
    """Options of a fit of a system to runs of models and to collectives."""

    system: str
    stack: str | None = None
    collectives: str | None = None
    fit: str | None = None
    hold_out: str | None = None
    starts: int = 1
    layer_times: str | None = None
    general: bool = False
    seed: int = 0


@options
def calibrate(
    *files: Annotated[Path, Parameter(name="DATA.csv", help="Measured runs of models.")],
    fitting: FitOptions,
    out: Annotated[Output, JSON],
) -> Answer:
    """Adjust the numbers of a system until predictions match your measured runs."""
    from pipejax.costs.measured.measured_rows import joined
    from pipejax.costs.system.system import read_named
    from pipejax.search.calibration.calibrate import calibrated_file
    from pipejax.search.calibration.parameters import FITTED

    system, collectives, fit = fitting.system, fitting.collectives, fitting.fit
    if not files and collectives is None:
        raise ValueError("no measurements: give DATA.csv of runs, --collectives, or both")
    machine, base = pj.load_system(system), read_named("hardware", system, "system")[0]
    links: pj.results.LinkCalibration | None = None
    identified: set[str] = set()
    if collectives is not None:
        timed_collectives = pj.files.read_collectives(collectives)
        with progress("calibrating links: compiling and fitting"):
            links = pj.links.calibrate_links(timed_collectives, machine)
        machine = links.system
        identified = {number.name for number in links.parameters if number.identified}
    names = None if fit is None else fit.split(",")
    if names is None and identified:
        names = [name for name in FITTED if name not in identified]
    runs = None
    if files:
        rows = joined([pj.files.read_rows(path, fitting.stack) for path in files])
        arguments = pick(fitting, "hold_out starts layer_times seed general")
        with progress("calibrating: compiling and fitting"):
            runs = pj.calibrate(rows, machine, fit=names, **arguments)
    if links is None and runs is not None and not runs.parameters:
        data = _as_json(runs)
        view = [*_view(runs), NO_FIT_NOTE]
        return Answer({**data, **NO_FIT}, view, details=_details(runs, data))
    calibrations = [result.system.calibration for result in (links, runs) if result is not None]
    stack_numbers = {} if runs is None else runs.stack_numbers
    name = (out.path or Path()).stem  # it has to be given
    content = calibrated_file(base, [*filter(None, calibrations)], name, stack_numbers)
    out.save_json(content)
    data = {name: content["calibration"][name] for name in ("parameters", "bands")}
    view, details = list[object](), dict[str, Iterable[object]]()
    if runs is not None:
        data |= _as_json(runs) | {"starts": fitting.starts}
        view += _view(runs)
        details |= _details(runs, data)
    if links is not None:
        data["collectives"] = links.fit._asdict()
        view.append(
            f"links fitted to {links.fit.rows} collectives and messages: "
            f"predictions are {digits(links.fit.mape)} % off in the mean"
        )
        details["links"] = [
            _number_table(links.parameters, f"{links.fit.rows} collectives and messages"),
            _error_table({"fitted": data["collectives"]}, "errors of their times"),
        ]
    return Answer(data, view, details=details)


def _as_json(fit: "pj.results.Calibration") -> dict[str, Any]:
    """Return a fit for `--json`: errors [%] before and after it, held-out rows and outliers."""
    return {
        "as_is": fit.as_is._asdict(),
        "left_out": None if fit.left_out is None else fit.left_out._asdict(),
        "fit": fit.fit._asdict(),
        "held_out": None if fit.held_out is None else fit.held_out._asdict(),
        "outliers": [row._asdict() for row in fit.outliers],
        "remarks": list(fit.remarks),
        "folds": {name: errors._asdict() for name, errors in fit.folds.items()},
        "coverage": {str(percent): share for percent, share in fit.coverage.items()},
        **pick(fit, "layer_factors noise starts_differ seconds"),
    }


def _number_table(numbers: Iterable[Any], fitted_to: str) -> TextTable:
    """Make a table of fitted numbers with their standard errors."""
    numbers = list(numbers)
    columns = [
        ("number", [number.name for number in numbers]),
        ("value", [quantity(number.value, number.unit) for number in numbers]),
        ("standard error", [quantity(n.standard_error or 0.0, n.unit) for n in numbers]),
        ("by", ["rows" if number.identified else "prior" for number in numbers]),
    ]
    return grid(columns, title=f"fitted to {fitted_to}")


def _view(fit: "pj.results.Calibration") -> Iterator[object]:
    """Yield the mean errors before and after the fit, and the errors of runs outside the fit."""
    before, after = digits(fit.as_is.mape), digits(fit.fit.mape)
    yield (
        f"predicted step times are [bold]{after} %[/] off in the mean after the fit, {before} % "
        f"before it; {len(fit.parameters)} numbers are fitted to {fit.fit.rows} runs"
    )
    held_out = fit.held_out or fit.left_out
    if held_out is not None:
        yield f"cross-check: {digits(held_out.mape)} % off on runs that are not in the fit"
    for percent, share in fit.coverage.items():
        yield f"{digits(share)} % of the rows held out lie in their {percent} % band"
    yield from map(plain, fit.remarks)


def _details(fit: "pj.results.Calibration", data: Mapping[str, Any]) -> dict[str, Iterable[object]]:
    """Return {title: tables of errors or fitted numbers, or lines of text}."""
    parts = {
        "as it was": data["as_is"],
        "without its own row": data["left_out"],
        "fitted": data["fit"],
        "held out": data["held_out"],
    }
    errors = {name: part for name, part in parts.items() if part}
    error_table = _error_table(errors, "errors of step times")
    details: dict[str, Iterable[object]] = {"errors": [error_table]}
    if fit.parameters:
        fitted_to = f"{fit.fit.rows} runs in {fit.seconds:.1f} s"
        details["numbers"] = [_number_table(fit.parameters.values(), fitted_to)]
    if data.get("starts", 1) > 1:
        details["starts"] = [f"{data['starts']} starts agree to {100 * fit.starts_differ:.2g} %"]
    if fit.outliers:
        details["outliers"] = [
            plain(
                f"outlier: {row.file}, row {row.row}: measured {seconds(row.measured)}, predicted "
                f"{seconds(row.predicted)} ({row.error:+.3g} %)"
            )
            for row in fit.outliers
        ]
    return details


def _error_table(parts: Mapping[str, Mapping[str, Any]], title: str) -> TextTable:
    """Make a table of errors [%], a row for each set of predictions in `parts`."""
    rows = ({"part": name, **errors} for name, errors in parts.items())
    percents = ("mape", "median", "p90", "bias", "largest")
    errors_columns = (Column(name, name, "{:.2f} %".format) for name in percents)
    columns = (Column("part", "part", escape), Column("rows", "rows"), *errors_columns)
    return rows_table(rows, columns, title=title)
