"""Jobs of a runtime, their results, and the processes that run them together.

The environment of a process is set before it imports the library of the runtime. A process gets one
request on stdin, which stays open: when this process ends, for whatever reason, the others end.
Their output is shown only after a failure.
"""

import concurrent.futures
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple

from pipejax.base.checks import resolve_name
from pipejax.base.display import short_repr
from pipejax.base.progress import if_interrupted
from pipejax.costs.costs import Costs
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable, check_usual

# A runtime trains a small model for one step, divided into the stages of the table, and compares
# its gradients with those of the model without a pipeline. It may also time steps.

# each the function `run_table` of its module, imported when it is asked for
RUNTIMES = {"jax": "pipejax.runtimes.spmd.runtime", "torch": "pipejax.runtimes.gloo.runtime"}


class RuntimeJob(NamedTuple):
    """Table, model and options of a run that a runtime executes."""

    table: ScheduleTable  # the schedule
    links: Links = Links()  # what the prediction of its step time assumes of messages
    costs: Costs | None = None  # [s]; None: as long as they compute
    hidden: int = 16  # width of the layers of a stage
    batch_size: int = 2  # examples of a microbatch
    steps: int = 0  # steps to time, after one that is not; 0 times nothing
    seed: int = 0  # of parameters and data
    trace: Path | None = None  # folder for a trace of the timed steps


@short_repr
class RuntimeRun(NamedTuple):
    """Results of a run on a runtime: errors of gradients and loss, and measured times, if any."""

    runtime: str  # its name
    version: str  # of the library that ran the table
    # largest difference to gradients without a pipeline, relative to the largest entry; or NaN
    gradient_error: float
    loss: float  # mean over the microbatches
    loss_error: float  # relative difference to the loss of the model without a pipeline
    left_out: Mapping[str, str] = {}  # cells that the runtime does not execute, by phase, and why
    step_times: Sequence[float] = ()  # measured steps [s]
    predicted: float | None = None  # makespan at the times of the profile [s]
    profile: Mapping[str, Sequence[float]] = {}  # [s] of an op by phase letter, by stage
    message: Sequence[float] = ()  # seconds of a message, one for each stage boundary
    step_size: float | None = None  # factor of the mean gradient in U cells

    @property
    def error(self) -> float:
        """Return the larger of gradient error and loss error; infinity if either is NaN."""
        errors = (self.gradient_error, self.loss_error)
        return math.inf if any(map(math.isnan, errors)) else max(errors)


def run_table(runtime: str, job: RuntimeJob) -> RuntimeRun:
    """Run a table on a runtime; raise a ValueError if the runtime cannot execute it."""
    check_usual(job.table, f"the runtime {runtime}")
    module = RUNTIMES[resolve_name(runtime, RUNTIMES, "runtime")]
    run: Callable[[RuntimeJob], RuntimeRun] = import_module(module).run_table
    return run(job)


PACKAGE_ROOT = str(Path(__file__).parents[2])
LAST_LINES = 3  # of what a process said before it failed, where it does not say why
FAILED, REFUSED = "failed: ", "refused: "  # begin the line in which a process says why it ended


def call_together(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> list[Any]:
    """Start one process for each request, and return the answers of all processes."""
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
                failure = _wait(processes, timeout)
            finally:
                end_all()
                for process in processes:
                    process.wait()
                    _stdin(process).close()
        if failure is not None:
            number, outcome = failure
            lines = (place / f"{number}.log").read_text(errors="replace").strip().splitlines()
            for line in lines:
                if line.startswith(REFUSED):
                    raise ValueError(line.removeprefix(REFUSED))
            reasons = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
            reason = "; ".join(reasons or lines[-LAST_LINES:]) or "it said nothing"
            raise RuntimeError(f"process {number} of {len(processes)} {outcome}: {reason}")
        return [json.loads((place / f"{k}.json").read_text()) for k in range(len(processes))]


def serve(answer_to: Callable[[Any], Any]) -> None:
    """Answer a request from stdin; on failure, report the error in one line and exit."""
    # A ValueError is a refusal. The process exits at once, as ranks may wait for each other.
    request = json.loads(sys.stdin.readline())

    def end_with_caller() -> None:
        """End this process when stdin closes, because the calling process has ended."""
        sys.stdin.read()
        os._exit(3)

    threading.Thread(target=end_with_caller, daemon=True).start()
    try:
        answer = answer_to(request)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split())
        is_refused = isinstance(error, ValueError)
        text = f"{REFUSED}{reason}" if is_refused else f"{FAILED}{type(cause).__name__}: {reason}"
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
        os._exit(1)
    Path(request["answer"]).write_text(json.dumps(answer))


def _start(module: str, log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Run a module in a new process whose output goes to a log file."""
    path = os.pathsep.join(filter(None, (PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )


def _stdin(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], timeout: float | None
) -> tuple[int, str] | None:
    """Wait until all processes end or one fails; return the failed process and its failure."""
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
