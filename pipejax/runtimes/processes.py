"""Processes of a runtime: started and ended together.

The environment of a process is set before it imports the library of the runtime. A process gets one
request on stdin, which stays open: when this process ends, for whatever reason, the others end.
Their output is shown only after a failure.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pipejax.base.progress import if_interrupted

PACKAGE_ROOT = str(Path(__file__).parents[2])
LAST_LINES = 3  # of what a process said before it failed, where it does not say why
FAILED, REFUSED = "failed: ", "refused: "  # begin the line in which a process says why it ended


def call_together(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> list[Any]:
    """Start a process for each request; return their answers."""
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
            lines = (place / f"{number}.log").read_text(errors="replace").strip().splitlines()
            for line in lines:
                if line.startswith(REFUSED):
                    raise ValueError(line.removeprefix(REFUSED))
            reasons = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
            why = "; ".join(reasons or lines[-LAST_LINES:]) or "it said nothing"
            raise RuntimeError(f"process {number} of {len(processes)} {what}: {why}")
        return [json.loads((place / f"{k}.json").read_text()) for k in range(len(processes))]


def serve(answer_to: Callable[[Any], Any]) -> None:
    """Answer one request from stdin, or report the error in one line and exit."""
    # A ValueError is a refusal. The process exits at once, as ranks may wait for each other.
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        answer = answer_to(request)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(str(cause).split())
        is_refused = isinstance(error, ValueError)
        text = f"{REFUSED}{why}" if is_refused else f"{FAILED}{type(cause).__name__}: {why}"
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
        os._exit(1)
    Path(request["answer"]).write_text(json.dumps(answer))


def _end_with_the_caller() -> None:
    """End this process when stdin closes: its caller is gone."""
    sys.stdin.read()
    os._exit(3)


def _start(module: str, log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a module in a new process, with its output in a log file."""
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as written:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
        )


def _stdin(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], timeout: float | None
) -> tuple[int, str] | None:
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
