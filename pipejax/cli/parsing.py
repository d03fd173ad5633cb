"""A command line as cyclopts reads it, and the run of its command."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import CoercionError, CycloptsError, MissingArgumentError
from cyclopts.exceptions import RepeatArgumentError, UnusedCliTokensError

from pipejax.cli.options.line import LineOptions, written_as
from pipejax.cli.options.option import COMMON, check_outputs, parser
from pipejax.cli.output.report import printing


def parse(
    command: Callable[..., Any], words: Sequence[str], line: LineOptions
) -> inspect.BoundArguments:
    """Read the options of a command, as a line and its file of options give them.

    Raises:
      ValueError: if the command has no such option, its value is of another type, or it has no
        effect beside the others.
    """
    app = parser(command)
    app.config = (line.read,)
    try:
        _, bound, _ = app.parse_args(list(words), print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ValueError(_message(error)) from None
    bound.apply_defaults()
    return bound


def _message(error: CycloptsError) -> str:
    """Return what is wrong with a command line, with options by their names."""
    option = error.argument.name if error.argument else ""
    if isinstance(error, MissingArgumentError) and error.argument and not error.keyword:
        return f"missing option {option}" if option.startswith("-") else f"missing {option}"
    if isinstance(error, RepeatArgumentError):
        return f"{option or error.token.keyword} is given twice"
    if isinstance(error, CoercionError) and error.msg and error.token:
        return f"{option} {error.msg}"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument: {' '.join(error.unused_tokens or ())}"
    text = str(error).removesuffix(".").replace(". Did you mean", "; did you mean")
    text = text.replace(". Must be >= ", ": must be at least ").replace('"', "'")
    return text[0].lower() + text[1:]


def answer(command: Callable[..., Any], bound: inspect.BoundArguments, line: LineOptions) -> int:
    """Run a command, print its answer and return the exit code."""
    arguments, takes = bound.arguments, inspect.signature(command).parameters
    common = {name: arguments[name] for name in COMMON if name in arguments}
    for name in common.keys() - takes.keys():
        del arguments[name]
    outputs = check_outputs(command, arguments, force=common.get("force", False))
    format = None if "format" in takes else common.get("format")  # else that of its file
    written = line.typed({**common, **arguments})
    style = printing(format, json=common["json"], details=common["details"])
    with style, written_as(written):
        result = command(*bound.args, **bound.kwargs)
        result.show()
    for output in outputs:
        output.end(json=common["json"])
    return 0 if result.holds else 1
