"""Jobs of a runtime, results of jobs, and the processes that run a job together.

The environment of a process is set before it imports the library of the runtime. A process gets
one request on stdin, which stays open. When the calling process ends, for any reason, stdin closes
and the process ends too. The output of processes is shown only after a failure.
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

# A runtime trains a small model for one step, divided into the stages of the table. It compares
# the gradients with a run without a pipeline, and may measure step times.

# name of a runtime -> module with its function `run_table`, imported at first use
RUNTIMES = {"jax": "pipejax.runtimes.spmd.runtime", "torch": "pipejax.runtimes.gloo.runtime"}


class RuntimeJob(NamedTuple):
    """Table, model and options of a run that a runtime executes."""

    table: ScheduleTable  # the schedule
    links: Links = Links()  # links for the prediction of the step time
    costs: Costs | None = None  # least times of ops and messages [s]; None: no least times
    hidden: int = 16  # width of the layers of a stage
    batch_size: int = 2  # examples of a microbatch
    steps: int = 0  # measured steps, after one step that is not measured
    seed: int = 0  # random seed of parameters and data
    trace: Path | None = None  # folder for a trace of the timed steps


@short_repr
class RuntimeRun(NamedTuple):
    """Results of a run on a runtime: errors of gradients and loss, and measured times, if any."""

    runtime: str  # name of the runtime
    version: str  # version of the library that ran the table
    # largest difference to gradients without a pipeline, relative to the largest entry; or NaN
    gradient_error: float
    loss: float  # mean loss over the microbatches
    loss_error: float  # relative difference to the loss of the model without a pipeline
    left_out: Mapping[str, str] = {}  # phase -> reason why the runtime does not execute its cells
    step_times: Sequence[float] = ()  # measured step times [s]
    predicted: float | None = None  # predicted makespan at the measured op and message times [s]
    profile: Mapping[str, Sequence[float]] = {}  # phase letter -> op time of each stage [s]
    message: Sequence[float] = ()  # message time of each stage boundary [s]
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
LAST_LINES = 3  # lines of output in the error about a process that gave no reason
FAILED, REFUSED = "failed: ", "refused: "  # beginnings of the line with the reason of a failure


def call_together(
    module: str,
    requests: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> list[Any]:
    """Start a process for each request; return the list of the answers of all processes."""
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
                failure = _wait_for_all(processes, timeout)
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
    """Answer the request on stdin; after an error, write the reason in one line and exit."""
    # A ValueError is a refusal. The process exits at once, because other ranks may wait for it.
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


def _wait_for_all(
    processes: Sequence["subprocess.Popen[bytes]"], timeout: float | None
) -> tuple[int, str] | None:
    """Wait until all processes end or one fails; return (number, failure) of the failed one."""
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
