"""The application: commands, and how mistakes are reported."""

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

import pipejax as pj
from pipejax.cli.options.groups import with_options
from pipejax.schedules.cells.schedule_error import ScheduleError

COMMANDS = (  # each the function of its name in the module of its name
    "evaluate",
    "compare",
    "sensitivity",
    "tune",
    "jitter",
    "staleness",
    "train",
    "show",
    "export",
    "order",
    "optimize",
    "sweep",
    "schedules",
)
ABOUT = "How long does one LLM training step take under this pipeline schedule on this machine?"


@functools.cache
def application(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Put commands together: all of them, or the one that is called, which is there sooner."""
    app = typer.Typer(name="pipejax", add_completion=False, pretty_exceptions_enable=False)
    app.callback(help=ABOUT)(_program)
    for name in names:
        command = getattr(importlib.import_module(f"pipejax.cli.commands.{name}"), name)
        about = (inspect.getdoc(command) or "").partition("\n\nOptions:")[0]
        app.command(help=about)(with_options(command))
    return app


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"pipejax {pj.__version__}")
        raise typer.Exit
    return wanted


def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options of the program itself; with it, one command is a command by name too."""


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
      arguments: as after the program's name.

    Returns:
      Exit code: 0, or 2 for a user's mistake, which is named in one line on stderr; where a
      person reads it, the table follows with the place marked.
    """
    _compute_in_float64()
    try:
        called = tuple(arguments[:1]) if arguments and arguments[0] in COMMANDS else COMMANDS
        result = application(called)(list(arguments) or ["--help"], standalone_mode=False)
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


def _compute_in_float64() -> None:
    """What a person reads is float64; JAX is not imported for that, a mistake needs none of it."""
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", True)
    else:
        os.environ.setdefault("JAX_ENABLE_X64", "true")


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
