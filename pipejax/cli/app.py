"""The application: commands, and how mistakes are reported."""

import re
import sys
from collections.abc import Sequence
from itertools import pairwise

import jax
import typer

from pipejax.cli.commands import (
    compare,
    evaluate,
    export,
    jitter,
    optimize,
    order,
    schedules as schedules_command,
    sensitivity,
    show,
    staleness,
    sweep,
    train,
    tune,
)
from pipejax.cli.options.groups import with_options
from pipejax.schedules.cells.schedule_error import ScheduleError

app = typer.Typer(
    name="pipejax",
    help="How long does one LLM training step take under this pipeline schedule on this machine?",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    evaluate.evaluate,
    compare.compare,
    sensitivity.sensitivity,
    tune.tune,
    jitter.jitter,
    staleness.staleness,
    train.train,
    show.show,
    export.export,
    order.order,
    optimize.optimize,
):
    app.command()(with_options(command))
app.command()(sweep.sweep)
app.command()(schedules_command.schedules)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
      arguments: as after the program's name.

    Returns:
      Exit code: 0, or 2 for a user's mistake, which is named in one line on stderr; where a
      person reads it, the table follows with the place marked.
    """
    # jax leaves this function without annotations
    jax.config.update("jax_enable_x64", True)
    try:
        result = app(list(arguments) or ["--help"], standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Abort:
        return _report("interrupted")
    except typer.TyperException as error:
        return _report(_with_value(error.format_message(), arguments))
    except ScheduleError as error:
        return _report(error.reason, error.grid if sys.stderr.isatty() else "")
    except OSError as error:
        return _report(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, OverflowError) as error:
        return _report(str(error))
    except MemoryError as error:
        return _report(f"too large for the memory of this machine: {error}")


def _with_value(message: str, arguments: Sequence[str]) -> str:
    """Add the value that an option was given, which typer leaves out of its message."""
    option = re.match(r"Invalid value for '(--[\w-]+)'", message)
    if option is None:
        return message
    name = option[1]
    given = dict(pairwise(arguments))
    given |= dict(a.split("=", 1) for a in arguments if a.startswith(f"{name}="))
    return f"{message}, got {given[name]!r}" if name in given else message


def _report(message: str, details: str = "") -> int:
    """Write one line, and details for a person, to stderr."""
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n" + (f"{details}\n" if details else ""))
    return 2
