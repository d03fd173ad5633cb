"""A runtime in a process of its own: what it needs is set before its library is imported.

The process reads one JSON object from stdin and writes one to stdout. What it prints besides, and
what the library prints, is shown only where it fails.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipejax.base.interruption import if_interrupted

PACKAGE_ROOT = str(Path(__file__).parents[2])
LAST_LINES = 3  # of stderr, where a process fails without saying why


def call_module(module: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Start a module as a process, send it a request, and return what it answers.

    Args:
      module: calls `serve` when it is executed.
      request: what JSON can hold.
      environment: variables beside those of this process.

    Raises:
      ValueError: what the process refuses.
      RuntimeError: if it fails.
    """
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    with if_interrupted(process.kill):
        try:
            out, err = process.communicate(json.dumps(request))
        finally:
            process.kill()
    try:
        answer = json.loads(out)
    except ValueError:
        said = "; ".join(err.strip().splitlines()[-LAST_LINES:]) or "it said nothing"
        raise RuntimeError(f"{module} ended with code {process.returncode}: {said}") from None
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return answer["result"]


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the request on stdin; a ValueError is what is refused.

    Whatever else is printed goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        said = {"result": answer(json.load(sys.stdin))}
    except ValueError as error:
        said = {"refused": str(error)}
    with out:
        json.dump(said, out)
