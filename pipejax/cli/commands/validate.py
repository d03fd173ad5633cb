"""`pipejax validate`: predictions held against measured step times."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.markup import escape

import pipejax as pj
from pipejax.base.checks import positive
from pipejax.base.data_files import parse_float
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import explain_commands
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.numbers import digits, seconds
from pipejax.cli.output.report import Answer, pick, plain, progress
from pipejax.cli.output.tables import Column, rows_table

DATA = "Measured runs. Without a file: all tables of runs that come with pipejax."
MAX_WORST = 5  # rows with the largest errors
MAX_GROUPS = 14  # groups in a legend
TITLES = {"mape": "mean", "median": "median", "p90": "90 % within", "bias": "bias"}


@options
def validate(
    *files: Annotated[str, Parameter(name="DATA.csv", help=DATA)],
    system: str | None = None,
    stack: str | None = None,
    link: str | None = None,
    tolerance: str = "10",
    predictions: str | None = None,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Predict measured runs, and show how far off the predictions are.

    Exit code 0 if the mean error of the step times, or of memory where no time was measured, is
    within the tolerance, 1 if it is beyond.
    """
    max_error = positive(parse_float(tolerance.removesuffix("%")), "--tolerance")
    with progress("predicting"):
        validation = pj.validate(files, system, stack=stack, link=link or "delay")
    pipejax_validation = None  # of the same rows, beside the predictions of another
    if predictions is not None:
        from pipejax.analysis.step.validation import judge

        validation, pipejax_validation = judge(validation, predictions)
    errors = validation.time or validation.memory  # each row has one of them
    is_within = errors is not None and errors.mape <= max_error
    if figure.path is not None:
        _draw(figure, validation)
    result = {
        **_statistics(validation),
        "configurations": _statistics(validation.by_configuration),
        "ranking": None if validation.ranking is None else validation.ranking._asdict(),
        "worst": validation.worst(MAX_WORST),
        "groups": {name: _statistics(part) for name, part in validation.groups.items()},
        **({} if pipejax_validation is None else {"pipejax": _statistics(pipejax_validation)}),
        "tolerance": max_error,
    }
    sizes = np.abs(np.nan_to_num(validation.errors))
    worst_row = validation.measured.take(sizes.argmax(keepdims=True))
    next_commands = explain_commands(worst_row, system, link or "delay")
    return Answer(result, _view(result, errors), is_within, next_commands, _details(result))


def _statistics(validation: "pj.results.Validation") -> dict[str, Any]:
    """Return the errors of a validation for `--json`; errors of times are null without times."""
    time, memory = validation.time, validation.memory
    result: dict[str, Any] = {"rows": len(validation.measured)}
    result |= dict.fromkeys(TITLES) if time is None else pick(time, " ".join(TITLES))
    result["coverage_90"] = validation.coverage_90
    if validation.out_of_memory is not None:
        result["out_of_memory"] = validation.out_of_memory._asdict()
    if memory is not None:
        result["memory"] = memory._asdict()
    return result


def _view(data: Mapping[str, Any], errors: Any) -> Iterator[object]:
    """Yield the mean error, the worst row, and the quality of the ranking of layouts."""
    if errors is None:
        yield "no row can be judged: none has a time or a memory"
    else:
        max_error = data["tolerance"]
        word = "within" if errors.mape <= max_error else "[red]above[/]"
        yield (
            f"predictions are [bold]{_percent(errors.mape)}[/] off in the mean of {data['rows']} "
            f"rows, {word} the tolerance of {max_error:g} %"
        )
        sign = "long" if errors.bias > 0 else "short"
        yield f"bias: {_percent(abs(errors.bias))} too {sign}"
    if data["worst"]:
        worst = data["worst"][0]
        yield plain(
            f"worst: row {worst['row']} of {Path(worst['file']).name}, measured "
            f"{seconds(worst['measured'])}, predicted {seconds(worst['predicted'])} "
            f"({worst['error']:+.3g} %)"
        )
    if data["ranking"] is not None:
        ranking = data["ranking"]
        count = round(ranking["best_found"] / 100 * ranking["jobs"])
        yield (
            f"the layout predicted fastest is the fastest in {count} of {ranking['jobs']} jobs "
            f"({ranking['layouts']} layouts), and takes {ranking['regret']:.3g} % longer than the "
            f"fastest on average over the jobs, {ranking['worst_regret']:.3g} % at most"
        )
    if "out_of_memory" in data:
        verdicts = data["out_of_memory"]
        yield (
            f"out of memory: {verdicts['recall']:.3g} % of the {verdicts['rows']} runs that ran "
            f"out are predicted to, and {verdicts['precision']:.3g} % of the predicted ones did"
        )


def _details(data: Mapping[str, Any]) -> dict[str, Iterable[object]]:
    """Return {title: tables} of errors by group and of the worst rows."""
    # Rows of the first table are groups, then totals: of all runs; of all configurations, if some
    # have several runs; or of the user's predictions beside pipejax's own.
    groups = data["groups"] if len(data["groups"]) > 1 else {}
    totals = {"all": data}
    if data["configurations"]["rows"] < data["rows"]:
        totals["all, by configuration"] = data["configurations"]
    if "pipejax" in data:
        totals = {"predictions": data, "pipejax": data["pipejax"]}
    rows = [{"group": name, **part} for name, part in {**groups, **totals}.items()]
    columns = [
        Column("group", "group", escape),
        Column("rows", "rows"),
        *(Column(title, name, _percent) for name, title in TITLES.items()),
        Column("in 90 % band", "coverage_90", _percent),
    ]
    if any("memory" in row for row in rows):
        columns.append(Column("memory: mean", "memory", lambda part: _percent(part["mape"])))
        columns.append(Column("bias", "memory", lambda part: _percent(part["bias"])))
    worst = rows_table(data["worst"], WORST, title="rows with the largest errors")
    return {"errors by group": [rows_table(rows, columns)], "worst rows": [worst]}


def _percent(value: float) -> str:
    return f"{digits(value)} %"


WORST = (
    Column("row", lambda row: escape(f"{Path(row['file']).stem}, row {row['row']}")),
    Column("group", "group", escape),
    Column("measured", "measured", seconds),
    Column("predicted", "predicted", seconds),
    Column("error", "error", "{:+.1f} %".format),
)


def _draw(figure: Output, validation: "pj.results.Validation") -> None:
    """Draw predicted against measured step times; groups have a legend if they are few."""
    from pipejax.plots.charts import draw_predictions  # matplotlib is an extra, slow to import

    timed = validation.take(np.isfinite(validation.measured.seconds))
    names = timed.parts.tolist()
    with drawing(figure, 1, 3.2) as (_, axes):
        draw_predictions(axes, timed.measured.seconds, timed.predicted.seconds, names)
        axes.set_title(f"{len(names)} rows, grey: within 10 %", loc="left")
        if 1 < len(set(names)) <= MAX_GROUPS:
            axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.16))
