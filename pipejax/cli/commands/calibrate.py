"""`pipejax calibrate`: what measured runs say of the numbers of a machine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.option import options
from pipejax.cli.options.values import Count, FileIfGiven, Seed, Text
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output
from pipejax.cli.output.kinds import SYSTEM
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import Column, pick, plain, table_of

if TYPE_CHECKING:
    from pipejax.costs.system.system import FittedParameter
    from pipejax.search.calibration.calibrate import Calibration
    from pipejax.search.calibration.calibrate_links import LinkCalibration

NOTHING: Mapping[str, Any] = {"parameters": {}, "bands": {}, "written": None}
AS_IT_IS = (
    "the system as it is predicts runs that a fit does not see no worse than any fit: nothing is "
    "written (name numbers with --fit to fit them all the same)"
)
SHOWN = 10  # outliers that a person reads
# how a number is shown: its unit by what it is in, and by how much that is larger
SHOWN_IN = {"FLOP/s": ("TFLOP/s", 1e12), "B/s": ("GB/s", 1e9), "s": ("us", 1e-6), "B": ("GB", 1e9)}


@options
class FitOptions:
    """How a system is fitted to runs of models, and to collectives.

    Attributes:
      system: to begin with.
      stack: the software of all runs; the one that rows name if not given.
      collectives: what they decide of links is not fitted to runs again.
      fit: as compute.efficiency,host.layer, or all; if not given, what predicts runs best that the
        fit did not see, or nothing where the system as it is does.
      general: not the system's own numbers.
      hold_out: or group:h,t,b, or few:8 (all but eight).
      layer_times: as h,t,b.
    """

    system: Text = None
    stack: Text = None
    collectives: FileIfGiven = None
    fit: Text = None
    hold_out: Text = None
    starts: Count = 1
    layer_times: Text = None
    general: bool = False
    seed: Seed = 0


@options
def calibrate(
    *files: Annotated[Path, Parameter(name="DATA.csv", help="Measured runs of models.")],
    fitting: FitOptions = FitOptions(),
    out: Annotated[Output, SYSTEM] = NO_OUTPUT,
) -> Answer:
    """Fit a system to measured runs, robustly.

    Options:
      out: the system, which every command takes (.json).

    Example:
      pipejax calibrate runs.csv --system a100 --out mine.json
    """
    return fit_system(files, fitting, out)


def fit_system(files: Sequence[Path], fitting: FitOptions, out: Output) -> Answer:
    """Fit a system to runs of models, to collectives, or first to these and then to runs."""
    from pipejax.costs.system.system import read_named
    from pipejax.search.calibration.calibrate import calibrated_file
    from pipejax.search.calibration.parameters import FITTED

    system, collectives, fit = fitting.system, fitting.collectives, fitting.fit
    if out.path is None:
        raise ValueError("missing option --out")
    if system is None:
        raise ValueError("missing option --system")
    if not files and collectives is None:
        raise ValueError("give DATA.csv, measured runs, or --collectives, or both: what to fit to")
    out.check(SYSTEM)
    machine, base = pj.load_system(system), read_named("hardware", system, "system")[0]
    links = None if collectives is None else _fit_links(collectives, machine)
    decided: set[str] = set()
    if links is not None:
        machine = links.system
        decided = {each.name for each in links.parameters if each.identified}
    names = None if fit is None else fit.split(",")
    if names is None and decided:
        names = [name for name in FITTED if name not in decided]
    found = None
    if files:
        how = pick(fitting, "hold_out starts layer_times seed general")
        found = _fit_runs(files, machine, fitting.stack, fit=names, **how)
    if links is None and found is not None and not found.parameters:
        told = _as_json(found)
        return Answer({**told, **NOTHING}, [*_said(found, told), AS_IT_IS], {})
    parts = [each.system.calibration for each in (links, found) if each is not None]
    numbers = {} if found is None else found.stack_numbers
    content = calibrated_file(base, [each for each in parts if each], out.path.stem, numbers)
    out.save_json(content)
    result = {name: content["calibration"][name] for name in ("parameters", "bands")}
    said: list[object] = []
    if found is not None:
        result |= _as_json(found) | {"starts": fitting.starts}
    if links is not None:
        result["collectives"] = links.fit._asdict()
        said.append(_numbers(links.parameters, f"{links.fit.rows} collectives and messages"))
        said.append(_errors({"fitted": result["collectives"]}, "errors of their times"))
    if found is not None:
        said += _said(found, result)
    return Answer(result, said, {"written to": out})


def _fit_links(path: str, machine: pj.System) -> "LinkCalibration":
    rows = pj.files.read_collectives(path)
    with waiting("calibrating links: compiling and fitting"):
        return pj.links.calibrate_links(rows, machine)


def _fit_runs(
    data: Sequence[Path], machine: pj.System, stack: str | None, **options: Any
) -> "Calibration":
    from pipejax.costs.measured.measured_rows import joined

    rows = joined([pj.files.read_rows(path, stack) for path in data])
    with waiting("calibrating: compiling and fitting"):
        return pj.calibrate(rows, machine, **options)


def _as_json(found: "Calibration") -> dict[str, Any]:
    return {
        "as_is": found.as_is._asdict(),
        "left_out": None if found.left_out is None else found.left_out._asdict(),
        "fit": found.fit._asdict(),
        "held_out": None if found.held_out is None else found.held_out._asdict(),
        "outliers": [each._asdict() for each in found.outliers],
        "remarks": list(found.remarks),
        "folds": {name: errors._asdict() for name, errors in found.folds.items()},
        "coverage": {str(percent): share for percent, share in found.coverage.items()},
        **pick(found, "layer_factors noise starts_differ seconds"),
    }


def _numbers(numbers: Iterable["FittedParameter"], fitted_to: str) -> Table:
    rows = []
    for each in numbers:
        unit, scale = SHOWN_IN.get(each.unit, (each.unit, 1.0))
        error = 0.0 if each.standard_error is None else each.standard_error
        rows.append(
            {
                "number": each.name,
                "value": f"{each.value / scale:.4g} {unit}".strip(),
                "standard error": f"{error / scale:.2g}",
                "by": "rows" if each.identified else "prior",
            }
        )
    columns = [Column(name, name) for name in ("number", "value", "standard error", "by")]
    return table_of(rows, columns, title=f"fitted to {fitted_to}")


def _said(found: "Calibration", result: Mapping[str, Any]) -> Iterator[object]:
    if found.parameters:
        fitted_to = f"{found.fit.rows} runs in {found.seconds:.1f} s"
        yield _numbers(found.parameters.values(), fitted_to)
    parts = {
        "as it is": result["as_is"],
        "each run left out": result["left_out"],
        "fitted": result["fit"],
        "held out": result["held_out"],
    }
    yield _errors({name: part for name, part in parts.items() if part}, "errors of step times")
    if len(found.folds) > 1:
        worst = sorted(result["folds"].items(), key=lambda item: -item[1]["mape"])[:SHOWN]
        yield _errors(dict(worst), "held out, the worst")
    for percent, share in found.coverage.items():
        yield f"{share:.1f} % of the rows held out lie in their {percent} % band"
    if result.get("starts", 1) > 1:
        yield f"{result['starts']} starts agree to {100 * found.starts_differ:.2g} %"
    yield from map(plain, found.remarks)
    for each in found.outliers[:SHOWN]:
        yield plain(
            f"outlier: {each.file}, row {each.row}: measured {each.measured:.4g} s, predicted "
            f"{each.predicted:.4g} s ({each.error:+.1f} %)"
        )
    if found.outliers[SHOWN:]:
        yield f"and {len(found.outliers) - SHOWN} more outliers"


def _errors(parts: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    rows = ({"part": name, **errors} for name, errors in parts.items())
    percents = ("mape", "median", "p90", "bias", "largest")
    columns = (
        Column("part", "part", escape),
        Column("rows", "rows"),
        *(Column(name, name, "{:.2f} %".format) for name in percents),
    )
    return table_of(rows, columns, title=title)
