"""What a command answers: said once, and printed as one JSON object, as text or as tables."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from rich.text import Text

from pipejax.base.progress import if_interrupted
from pipejax.cli.output.files import Output
from pipejax.cli.output.progress import progress
from pipejax.cli.output.report import is_json, plain, print_all, print_json


class Answer(NamedTuple):
    """What a command answers; it is printed when the command returns it."""

    # what `--json` prints; a file of `written` that has no place in it stands behind it
    result: dict[str, Any] | list[dict[str, Any]]
    # what a person reads: lines with markup, texts as they are, and tables. A generator makes them
    # only where they are printed.
    said: Iterable[object] = ()
    written: Mapping[str, Output] = {}  # files, each behind the words that say so
    holds: bool = True  # whether what the command checks holds; if not, its exit code is 1
    next: tuple[str, ...] = ()  # command lines to go on with

    def show(self) -> None:
        """Print it, and raise what went wrong with the first file that could not be written."""
        if is_json():
            result = self.result
            if isinstance(result, dict):
                result = result | ({"next": self.next} if self.next else {})
                for output in self.written.values():
                    result = result | output.as_json()
            print_json(result)
        else:
            for part in chain(self.said, file_lines(self.written)):
                print_all(part)
            for line in self.next:
                print_all(plain(f"next: {line}"))
        for output in self.written.values():
            output.end(json=is_json())


def file_lines(written: Mapping[str, Output]) -> Iterator[Text]:
    """Say where files have been written, behind these words; of others nothing."""
    for words, output in written.items():
        if output.written is not None:
            yield plain(f"{words} {output.written}")


@contextmanager
def best_so_far(answer: Callable[[Any], Answer]) -> Iterator[Callable[[Any], object]]:
    """Show, if the command is interrupted in this block, what was last kept in it."""
    kept: deque[Any] = deque(maxlen=1)

    def say() -> str | None:
        if not kept:
            return None
        answer(kept[0]).show()
        return "this is the best so far"

    with if_interrupted(say):
        yield kept.append


def searched(
    search: Any,
    iterations: int,
    limit: float,
    report: Callable[[Any], Callable[[], Answer]],
    gap: float = 0.0,
) -> Answer:
    """Run a local search under a bar, and answer with its result, if interrupted too."""
    with (
        best_so_far(lambda search: report(search.result("interrupted"))()) as keep,
        progress("searching", iterations) as bar,
    ):
        keep(search)
        answer = report(search.run(iterations, limit, bar.tell, gap))
    return answer()
