"""`pipejax export`: a table for other programs."""

from typing import Annotated

from pipejax.base.checks import resolve_choice
from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import build
from pipejax.cli.options.tables import RunOptions
from pipejax.cli.output.files import ANY, Output
from pipejax.cli.output.report import Answer
from pipejax.runtimes.formats import FORMATS


@options
def export(*, run: RunOptions = RunOptions(), format: str, out: Annotated[Output, ANY]) -> Answer:
    """Write a schedule (for PyTorch, JaxPP, Shardy, or as JSON) or its timeline (for Perfetto)."""
    format = resolve_choice(format, FORMATS, "--format")
    scenario = run.scenario()
    table = build(scenario)
    text = FORMATS[format].writer(scenario.evaluate() if FORMATS[format].is_run else table)
    out.save_text(text)
    return Answer({"format": format, "bytes": len(text.encode())})
