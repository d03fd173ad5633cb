"""Jobs in threads of their own, and what they tell, as it comes."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

News = TypeVar("News")


def news_of(
    jobs: Sequence[Callable[[Callable[[News], None]], None]], stop: Callable[[], None]
) -> Iterator[News]:
    """Run jobs side by side and yield what they tell, until all have ended.

    Each job is given the function that it tells its news with. An error of a job is raised here.
    When the iterator is closed, `stop` is called again and again until the jobs have ended.
    """
    told: queue.SimpleQueue[tuple[News] | BaseException | None] = queue.SimpleQueue()

    def run(job: Callable[[Callable[[News], None]], None]) -> None:
        try:
            job(lambda news: told.put((news,)))
        except BaseException as error:  # the caller's thread has to hear of it
            told.put(error)
        finally:
            told.put(None)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            one = told.get()
            if isinstance(one, BaseException):
                raise one
            if one is None:
                running -= 1
            else:
                yield one[0]
    finally:
        while any(thread.is_alive() for thread in threads):
            stop()
            for thread in threads:
                with contextlib.suppress(RuntimeError):
                    thread.join(0.05)
