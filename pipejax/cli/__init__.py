"""The command line: one module per command; `app.py` puts them together."""

import sys


def main() -> None:
    """Run the command line; a user's mistake ends with exit code 2 and one line on stderr."""
    try:
        from pipejax.cli.app import run  # typer and rich are an extra

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(2)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"error: the command line needs {error.name}: pip install 'pipejax[cli]'\n"
        )
        sys.exit(2)
