"""Files of pipejax that four calls enter: how far a reader walks from a question to its answer.

Run `python benchmarks/walks.py`; with `--files` it lists them in the order of their first call.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pipejax as pj

ROOT = str(Path(pj.__file__).parent)
ENGINE = str(Path(ROOT, "engine"))
EXAMPLES = Path(ROOT).parent / "examples"


def entered_files(call: Callable[[], object], stop: str = "\0") -> list[str]:
    """Return the files that a call enters, at most until it enters a folder."""
    call()  # imports, which are no steps of the walk
    files: dict[str, None] = {}
    has_stopped = False

    def enter(frame: object, event: str, _: object) -> None:
        nonlocal has_stopped
        path = frame.f_code.co_filename  # type: ignore[attr-defined]  # to mypy an object
        has_stopped |= path.startswith(stop)
        if event == "call" and path.startswith(ROOT) and not has_stopped:
            files[path.removeprefix(f"{ROOT}/")] = None

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [*files]


def main() -> None:
    from pipejax.cli.app import run

    costs = pj.Costs(forward=[1.0, 1.0, 1.5, 1.0], backward=2.0, transmit=0.1)
    scenario = pj.Scenario("1f1b", num_workers=4, num_microbatches=8, costs=costs)
    table, trace = scenario.table(), pj.traces.read([EXAMPLES / "production_job.parquet"])
    line = ["evaluate", "-s", "1f1b", "-P", "4", "-M", "8", "-T", "F=1,B=2"]
    walks = {
        "evaluate": lambda: pj.evaluate(table, costs),
        "explain": lambda: pj.explain(scenario.replace()),
        "trace": lambda: pj.traces.analyse(trace),
    }
    counts = {name: entered_files(call) for name, call in walks.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        counts["pipejax evaluate, before the engine"] = entered_files(lambda: run(line), ENGINE)
    for name, files in counts.items():
        print(f"{len(files):3} files: {name}")
        for file in files if "--files" in sys.argv else ():
            print(f"      {file}")


if __name__ == "__main__":
    main()
