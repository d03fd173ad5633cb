"""`pipejax validate`: predictions held against measured step times."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

import pipejax as pj
from pipejax.base.checks import positive
from pipejax.cli.options.values import FileIfGiven, Text, parse_float
from pipejax.cli.output.files import DRAWING, NO_OUTPUT, Output, drawing
from pipejax.cli.output.report import (
    grid,
    pick,
    print_all,
    print_json,
    print_written,
    seconds,
    waiting,
)

if TYPE_CHECKING:
    from pipejax.analysis.step.validation import PredictionErrors, Validation

SHOWN = 5  # worst rows
MOST_NAMED = 14  # groups in a legend
TITLES = {"mape": "mean", "median": "median", "p90": "90 % within", "bias": "bias"}


def validate(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA.csv]...",
            help="Measured rows; all tables that come with pipejax if there are none.",
        ),
    ] = None,
    system: Text = None,
    tolerance: str = "10",
    predictions: FileIfGiven = None,
    out: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> None:
    """Predict measured runs, and show how far off the predictions are.

    Exit code 0 if the mean error of the step times, or of memory where no time was measured, is
    within the tolerance, 1 if it is beyond.

    Options:
      system: the one that each row names if not given.
      predictions: pipejax is judged by the same rows; columns row (of DATA.csv, from 1), seconds
        and memory_bytes.
      out: a picture (.png, .pdf, .svg).

    Example:
      pipejax validate runs.csv --system h100
    """
    allowed = positive(parse_float(tolerance.removesuffix("%")), "--tolerance")
    with waiting("predicting"):
        own = pj.validate(files or (), system)
    found, beside = own, None
    if predictions is not None:
        from pipejax.analysis.step.validation import judge

        found, beside = judge(own, predictions)
    judged = found.time or found.memory  # each row has one of them
    is_within = judged is not None and judged.mape <= allowed
    if out.path is not None:
        _draw(out, found)
    if json:
        of_ours = {} if beside is None else {"pipejax": _statistics(beside)}
        drawn = out.as_json() if out.path is not None else {}
        print_json(_as_json(found) | of_ours | {"tolerance": allowed} | drawn)
    else:
        _print(found, beside)
        word = "within" if is_within else "[red]beyond[/]"
        print_all(f"mean error [bold]{_percent(judged, 'mape')}[/], {word} {allowed:g} %")
        print_written("drawn to", out.written)
    out.end(json=json)
    if not is_within:
        raise typer.Exit(1)


def _statistics(found: "Validation") -> dict[str, Any]:
    """What `--json` says of some rows."""
    time, memory = found.time, found.memory
    result: dict[str, Any] = {"rows": len(found.measured)}
    result |= dict.fromkeys(TITLES) if time is None else pick(time, " ".join(TITLES))
    result["coverage_90"] = found.coverage_90
    return result | ({} if memory is None else {"memory": memory._asdict()})


def _as_json(found: "Validation") -> dict[str, Any]:
    groups = {name: _statistics(part) for name, part in found.groups.items()}
    return _statistics(found) | {"worst": found.worst(SHOWN), "groups": groups}


def _print(found: "Validation", beside: "Validation | None") -> None:
    parts = found.groups if len(found.groups) > 1 else {}
    whole = {"all": found}
    if beside is not None:
        whole = {"predictions": found, "pipejax": beside}
    print_all(_table({**parts, **whole}), "the rows that are predicted worst:", _worst(found))


def _table(parts: "dict[str, Validation]") -> Table:
    times = [part.time for part in parts.values()]
    memories = [part.memory for part in parts.values()]
    columns: list[tuple[str, Iterable[object]]] = [
        ("group", map(escape, parts)),
        ("rows", (len(part.measured) for part in parts.values())),
        *((title, [_percent(t, name) for t in times]) for name, title in TITLES.items()),
        ("in 90 % band", (_share(part.coverage_90) for part in parts.values())),
    ]
    if any(memories):
        columns.append(("memory: mean", (_percent(memory, "mape") for memory in memories)))
        columns.append(("bias", (_percent(memory, "bias") for memory in memories)))
    return grid(columns)


def _percent(errors: "PredictionErrors | None", name: str) -> str:
    return "-" if errors is None else _share(getattr(errors, name))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


def _worst(found: "Validation") -> Table:
    rows = found.worst(SHOWN)
    return grid(
        [
            ("row", (escape(f"{Path(row['file']).stem}, row {row['row']}") for row in rows)),
            ("group", (escape(row["group"]) for row in rows)),
            ("measured", (seconds(row["measured"]) for row in rows)),
            ("predicted", (seconds(row["predicted"]) for row in rows)),
            ("error", (f"{row['error']:+.1f} %" for row in rows)),
        ]
    )


def _draw(out: Output, found: "Validation") -> None:
    from pipejax.plots.charts import draw_predictions  # matplotlib is an extra, slow to import

    known = found.take(np.isfinite(found.measured.seconds))
    names = known.parts.tolist()
    with drawing(out, 1, 3.2) as (_, axes):
        draw_predictions(axes, known.measured.seconds, known.predicted.seconds, names)
        if 1 < len(set(names)) <= MOST_NAMED:
            axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.16))
