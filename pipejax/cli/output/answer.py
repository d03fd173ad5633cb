"""Answers of commands, printed as one JSON object, as text or as tables; their progress."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from pipejax.base.progress import OnProgress, if_interrupted
from pipejax.cli.options.option import parse_seconds
from pipejax.cli.output.report import (
    SEARCH_FIELDS,
    current_style,
    has_details,
    is_json,
    pick,
    plain,
    print_all,
    print_json,
    savings,
    search_end,
)


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[OnProgress]:
    """Show a bar on a terminal while the block runs; yield the function that moves it."""
    err = Console(stderr=True, highlight=False)
    bar = Progress(console=err, transient=True, disable=not err.is_terminal)
    with bar, if_interrupted(bar.stop):
        task = bar.add_task(title, total=total)

        def show(done: float, total: float | None, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield show


class Answer(NamedTuple):
    """Answer of a command, which is printed when the command returns it."""

    # object of `--json`, without the files of the command and what to go on with
    result: dict[str, Any] | list[dict[str, Any]]
    # first screen: a sentence that answers, then at most a dozen lines and tables; a generator
    # makes them only if they are printed
    view: Iterable[object] = ()
    holds: bool = True  # False if a check of the command failed: exit code 1
    next: tuple[str, ...] = ()  # command lines to go on with
    details: Mapping[str, Iterable[object]] = {}  # parts that `--details` adds, by their names

    def as_json(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the value that `--json` prints: the result, next commands and written files."""
        if not isinstance(self.result, dict):
            return self.result
        result = self.result | ({"next": self.next} if self.next else {})
        for output in current_style().outputs:
            result = result | output.as_json()
        return result

    def show(self) -> None:
        """Print the answer; raise the error of the first file that could not be written."""
        if is_json():
            print_json(self.as_json())
        else:
            outputs = current_style().outputs
            view = [*self.view]
            count = len([*takewhile(lambda part: not str(part).startswith("next: "), view)])
            view[count:count] = [plain(f"wrote {file.written}") for file in outputs if file.written]
            print_all(*view)
            if has_details():
                printed_lines = [part for part in view if isinstance(part, Text)]
                details = chain.from_iterable(self.details.values())
                print_all(*(part for part in details if part not in printed_lines))
            next_lines = (plain(f"next: {line}") for line in self.next)
            print_all(*(line for line in next_lines if line not in view))
            if self.details and not has_details():
                print_all(plain(f"more with --details: {', '.join(self.details)}"))
        for output in current_style().outputs:
            output.end(json=is_json())


@contextmanager
def best_so_far(answer: Callable[[Any], Answer]) -> Iterator[Callable[[Any], object]]:
    """Yield a function that stores the best result so far of a search in the block.

    If the user interrupts the block, `answer` of the last stored result is printed.
    """
    best: deque[Any] = deque(maxlen=1)

    def show_best() -> str | None:
        """Print the best answer so far, and return a note on it; return None without one."""
        if not best:
            return None
        answer(best[0]).show()
        return "this is the best so far"

    with if_interrupted(show_best):
        yield best.append


def run_search(
    search: Any, iterations: int, limit: str, report: Callable[[Any], Answer], gap: float = 0.0
) -> Answer:
    """Run a local search for at most `iterations` and the time limit, and report its result.

    If the user interrupts it, the best result so far is reported. It stops early at the gap, the
    share that a better result could still save.
    """
    limit_seconds = parse_seconds(limit, "--time-limit")
    with (
        best_so_far(lambda search: report(search.result("interrupted"))) as keep,
        progress("searching", iterations) as on_progress,
    ):
        keep(search)
        result = search.run(iterations, limit_seconds, on_progress, gap)
    return report(result)


def search_answer(
    first_lines: Sequence[str],
    data: Mapping[str, Any],
    result: Any,
    nouns: tuple[str, str],
    *,
    time: str = "step time",
    last_lines: Iterable[object] = (),
    next: tuple[str, ...] = (),
    details: Mapping[str, Iterable[object]] = {},
    too_large: Collection[str] = (),
) -> Answer:
    """Answer with the result of a search, its baselines and why it ended."""
    times = result.baselines
    tables = [savings(nouns[0], time, times, result.value, too_large)] if times else []
    view = [*first_lines, *tables, *search_end(result, nouns[1]), *last_lines]
    return Answer({**data, **pick(result, SEARCH_FIELDS)}, view, next=next, details=details)
