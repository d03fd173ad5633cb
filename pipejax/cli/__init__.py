"""The command line: one module per command; `app.py` puts them together."""

import gc
import os
import sys


def main() -> None:
    """Run the command line; a user's mistake ends with exit code 2 and one line on stderr."""
    # NumPy's matrices are small: its threads would wait for each other, and take the processors
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(100_000)  # modules stay: a search for garbage among them takes 50 ms
    try:
        from pipejax.cli import process

        process.open_streams()
        process.watch_signals()
    except KeyboardInterrupt:
        os.write(2, b"error: interrupted\n")
        os._exit(130)
    try:
        process.defer_jax()  # before a module is imported that uses JAX
        from pipejax.cli.app import run  # cyclopts and rich are an extra

        code = run(sys.argv[1:])
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        sys.stderr.write(f"error: the command line needs {name}: pip install 'pipejax[cli]'\n")
        code = 2
    process.leave(code)
