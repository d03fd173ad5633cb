"""Jobs in threads of their own: their news, their errors, and how they end."""

import threading
import time

import pytest

from pipejax.base.progress import merge_progress


def test_news_of_all_jobs_come_in_their_order():
    def job(first):
        return lambda tell: [tell(first + k) for k in range(5)]

    message = list(merge_progress([job(0), job(100)], stop=lambda: None))
    assert sorted(message) == [*range(5), *range(100, 105)]
    assert [news for news in message if news < 100] == [*range(5)]


def test_a_job_goes_on_when_the_next_news_is_asked_for():
    built = []

    def job(tell):
        for number in range(3):
            built.append(number)
            tell(number)

    news = merge_progress([job], stop=lambda: None)
    for number in range(3):
        assert next(news) == number
        time.sleep(0.05)  # in which it could do more
        assert built == [*range(number + 1)]
    assert list(news) == []


def test_an_error_of_a_job_is_raised_and_ends_the_others():
    over = threading.Event()

    def fails(tell):
        tell(1)
        raise ValueError("no such thing")

    news = merge_progress([fails, lambda tell: over.wait()], over.set)
    assert next(news) == 1
    with pytest.raises(ValueError, match="no such thing"):
        next(news)
    assert over.is_set()


def test_closing_stops_what_begins_late_too():
    begun, stops = threading.Event(), []

    def job(tell):
        tell("begun")
        begun.wait()  # a stop before now is not heard

    def stop():
        stops.append(True)
        if len(stops) == 3:
            begun.set()

    news = merge_progress([job], stop)
    assert next(news) == "begun"
    news.close()
    assert len(stops) >= 3
