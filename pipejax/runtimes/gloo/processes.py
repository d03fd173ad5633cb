"""Processes that work together: started at once, ended together, none of them left behind.

Each is sent one line on stdin, which stays open as long as its answer is awaited: a process that
watches it ends when this one does, however this one ends.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pipejax.base.interruption import if_interrupted

PACKAGE_ROOT = str(Path(__file__).parents[3])
LAST_LINES = 3  # of what a process said before it failed, where it does not say why
FAILED = "failed: "  # begins the line in which a process says why


def call_together(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    timeout: float,
) -> list[Any]:
    """Start a process for each request; return their answers.

    Args:
      module: executed with `python -m`; it reads a line of JSON, and writes JSON to the file that
        the key "answer" names. Processes meet at the file that the key "meeting" names.
      requests: what JSON can hold, one for each process.
      environment: variables beside those of this process.
      timeout: seconds after which all are ended.

    Raises:
      RuntimeError: if one fails, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="pipejax-") as folder:
        place = Path(folder)
        processes = [_start(module, place / f"{k}.log", environment) for k in range(len(requests))]

        def end_all() -> None:
            for process in processes:
                process.kill()

        with if_interrupted(end_all):
            try:
                for k, (process, request) in enumerate(zip(processes, requests, strict=True)):
                    files = {"answer": str(place / f"{k}.json"), "meeting": str(place / "meeting")}
                    _stdin(process).write(json.dumps({**request, **files}).encode() + b"\n")
                    _stdin(process).flush()
                failed = _wait(processes, timeout)
            finally:
                end_all()
                for process in processes:
                    process.wait()
                    _stdin(process).close()
        if failed is not None:
            number, what = failed
            said = (place / f"{number}.log").read_text(errors="replace").strip().splitlines()
            reasons = [line.removeprefix(FAILED) for line in said if line.startswith(FAILED)]
            why = "; ".join(reasons or said[-LAST_LINES:]) or "it said nothing"
            raise RuntimeError(f"process {number} of {len(processes)} {what}: {why}")
        return [json.loads((place / f"{k}.json").read_text()) for k in range(len(processes))]


def _start(module: str, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as written:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
        )


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> tuple[int, str] | None:
    """Wait until all have ended or one has failed; return which, and how."""
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        waits = {pool.submit(process.wait): k for k, process in enumerate(processes)}
        try:
            for done in concurrent.futures.as_completed(waits, timeout):
                if done.result() != 0:
                    return waits[done], f"ended with code {done.result()}"
        except concurrent.futures.TimeoutError:
            number = next(k for wait, k in waits.items() if not wait.done())
            return number, f"had not ended after {timeout:g} s"
        finally:
            for process in processes:
                process.kill()
    return None
