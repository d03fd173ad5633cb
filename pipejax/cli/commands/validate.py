"""`pipejax validate`: predictions held against measured step times."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from rich.markup import escape

import pipejax as pj
from pipejax.base.checks import positive
from pipejax.cli.options.option import options
from pipejax.cli.options.values import FileIfGiven, Text, parse_float
from pipejax.cli.output.answer import Answer
from pipejax.cli.output.files import NO_OUTPUT, Output, drawing
from pipejax.cli.output.kinds import DRAWING
from pipejax.cli.output.numbers import seconds
from pipejax.cli.output.progress import waiting
from pipejax.cli.output.report import Column, pick, table_of

if TYPE_CHECKING:
    from pipejax.analysis.step.validation import Validation

SHOWN = 5  # worst rows
MOST_NAMED = 14  # groups in a legend
TITLES = {"mape": "mean", "median": "median", "p90": "90 % within", "bias": "bias"}


@options
def validate(
    *files: Annotated[
        str,
        Parameter(
            name="DATA.csv",
            help="Measured rows; all tables that come with pipejax if there are none.",
        ),
    ],
    system: Text = None,
    stack: Text = None,
    link: Text = None,
    tolerance: str = "10",
    predictions: FileIfGiven = None,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Predict measured runs, and show how far off the predictions are.

    Exit code 0 if the mean error of the step times, or of memory where no time was measured, is
    within the tolerance, 1 if it is beyond.

    Options:
      system: the one that each row names if not given.
      stack: likewise.
      predictions: pipejax is judged by the same rows; columns row (of DATA.csv, from 1), seconds
        and memory_bytes.
      figure: a picture (.png, .pdf, .svg).

    Example:
      pipejax validate runs.csv --system h100
    """
    allowed = positive(parse_float(tolerance.removesuffix("%")), "--tolerance")
    with waiting("predicting"):
        of_pipejax = pj.validate(files, system, stack=stack, link=link or "delay")
    validation, beside = of_pipejax, None
    if predictions is not None:
        from pipejax.analysis.step.validation import judge

        validation, beside = judge(of_pipejax, predictions)
    judged = validation.time or validation.memory  # each row has one of them
    is_within = judged is not None and judged.mape <= allowed
    if figure.path is not None:
        _draw(figure, validation)
    of_ours = {} if beside is None else {"pipejax": _statistics(beside)}
    result = {
        **_statistics(validation),
        "configurations": _statistics(validation.by_configuration),
        "ranking": None if validation.ranking is None else validation.ranking._asdict(),
        "worst": validation.worst(SHOWN),
        "groups": {name: _statistics(part) for name, part in validation.groups.items()},
        **of_ours,
        "tolerance": allowed,
    }
    word = "within" if is_within else "[red]beyond[/]"
    error = "-" if judged is None else _percent(judged.mape)
    said = (*_tables(result), f"mean error [bold]{error}[/], {word} {allowed:g} %")
    return Answer(result, said, {"drawn to": figure} if figure.path is not None else {}, is_within)


def _statistics(found: "Validation") -> dict[str, Any]:
    time, memory = found.time, found.memory
    result: dict[str, Any] = {"rows": len(found.measured)}
    result |= dict.fromkeys(TITLES) if time is None else pick(time, " ".join(TITLES))
    result["coverage_90"] = found.coverage_90
    verdicts = found.out_of_memory
    result |= {} if verdicts is None else {"out_of_memory": verdicts._asdict()}
    return result | ({} if memory is None else {"memory": memory._asdict()})


def _tables(result: Mapping[str, Any]) -> Iterator[object]:
    groups = result["groups"] if len(result["groups"]) > 1 else {}
    whole = {"all": result}
    if result["configurations"]["rows"] < result["rows"]:
        whole["all, by configuration"] = result["configurations"]
    if "pipejax" in result:
        whole = {"predictions": result, "pipejax": result["pipejax"]}
    rows = [{"group": name, **part} for name, part in {**groups, **whole}.items()]
    columns = [
        Column("group", "group", escape),
        Column("rows", "rows"),
        *(Column(title, name, _percent) for name, title in TITLES.items()),
        Column("in 90 % band", "coverage_90", _percent),
    ]
    if any("memory" in row for row in rows):
        columns += [
            Column("memory: mean", "memory", lambda errors: _percent(errors["mape"])),
            Column("bias", "memory", lambda errors: _percent(errors["bias"])),
        ]
    yield table_of(rows, columns)
    if result["ranking"] is not None:
        of = result["ranking"]
        yield (
            f"{of['layouts']} layouts of {of['jobs']} jobs: Kendall's tau {of['kendall']:.2f}; the "
            f"predicted best is the best in {of['best_found']:.0f} % of the jobs, and takes "
            f"{of['regret']:.2f} % longer in the mean, at most {of['worst_regret']:.1f} %"
        )
    if "out_of_memory" in result:
        verdicts = result["out_of_memory"]
        yield (
            f"{verdicts['rows']} runs ended for lack of memory: {verdicts['recall']:.1f} % of them "
            f"are predicted to, and {verdicts['precision']:.1f} % of those predicted to did"
        )
    yield "the rows that are predicted worst:"
    yield table_of(result["worst"], WORST)


def _percent(value: float) -> str:
    return f"{value:.2f} %"


WORST = (
    Column("row", lambda row: escape(f"{Path(row['file']).stem}, row {row['row']}")),
    Column("group", "group", escape),
    Column("measured", "measured", seconds),
    Column("predicted", "predicted", seconds),
    Column("error", "error", "{:+.1f} %".format),
)


def _draw(figure: Output, found: "Validation") -> None:
    from pipejax.plots.charts import draw_predictions  # matplotlib is an extra, slow to import

    known = found.take(np.isfinite(found.measured.seconds))
    names = known.parts.tolist()
    with drawing(figure, 1, 3.2) as (_, axes):
        draw_predictions(axes, known.measured.seconds, known.predicted.seconds, names)
        axes.set_title(f"{len(names)} rows, grey: within 10 %", loc="left")
        if 1 < len(set(names)) <= MOST_NAMED:
            axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.16))
