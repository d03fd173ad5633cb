"""Events of a Chrome trace one by one, from a file of any size, and from damaged ones.

A trace of other people's run may hold 10^7 events of no use here: none is kept, and only a window
of the text is in memory.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pipejax.traces.readers.sources import CutError

BROKEN, EARLY = "events that are not JSON", "it ends early"  # faults that are counted
_GAP = re.compile(r"[\s,:]*")
_BETWEEN = re.compile(r"[\s,}]*")  # events; a brace is left where one was broken
_EVENT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
_EVENTS = re.compile(r'"traceEvents"\s*:')
_LONGEST = 2**23  # characters of an event, or of a value beside the events
_TAIL = 64  # characters before the end of a window, where what is cut off looks broken
# the decoder's own scanner, a fifth faster than `raw_decode`; its stub does not list it
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # its stub lacks it

Event = dict[str, Any]


class _TextWindow:
    """The part of a text that is read and not used yet, and a place in it."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self.pieces, self.text, self.at, self.has_ended, self.why = pieces, "", 0, False, EARLY

    def more(self) -> bool:
        """Drop what is before the place and read on, to double the rest at least."""
        held = [self.text[self.at :]]
        size = before = len(held[0])
        wanted = max(2 * size, 2**16)
        try:
            while size < wanted:
                held.append(next(self.pieces))
                size += len(held[-1])
        except StopIteration:
            self.has_ended = True
        except CutError as error:
            self.has_ended, self.why = True, str(error)
        self.text, self.at = "".join(held), 0
        return size > before

    def next_sign(self, gap: "re.Pattern[str]") -> str:
        """Go behind a gap and return the character there; empty at the end."""
        while True:
            self.at = gap.match(self.text, self.at).end()  # type: ignore[union-attr]  # "" matches
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def find(self, wanted: "re.Pattern[str]") -> bool:
        """Go to the next place that looks so; False if there is none."""
        self.at += 1
        while not (found := wanted.search(self.text, self.at)):
            self.at = max(self.at, len(self.text) - _TAIL)
            if not self.more():
                return False
        self.at = found.start()
        return True

    def value(self) -> Any:
        """Read the value at the place, and go behind it."""
        while True:
            try:
                value, end = _scan(self.text, self.at)
            except StopIteration as error:
                place, is_cut = int(error.value), False
            except json.JSONDecodeError as error:
                place, is_cut = error.pos, error.msg.startswith("Unterminated string")
            except RecursionError:
                raise ValueError("nested too deeply") from None
            else:
                self.at, begin = end, self.at
                if end < len(self.text) or self.has_ended:
                    return value
                self.at = begin
                self.more()  # a number could go on
                continue
            is_cut |= place >= len(self.text) - _TAIL
            is_long = len(self.text) - self.at > _LONGEST
            if not is_cut or is_long or not self.more():
                raise ValueError("not JSON")


def events(
    pieces: Iterator[str], header: dict[str, Any], faults: "Counter[str]"
) -> Iterator[Event]:
    """Yield the events of a trace."""
    window = _TextWindow(pieces)
    is_list, is_whole = window.next_sign(_GAP) == "[", False
    window.at += 1
    if is_list:
        yield from _listed(window, faults)
        is_whole = window.why == EARLY and window.at >= len(window.text)  # the bracket is optional
    while not is_list:
        sign = window.next_sign(_GAP)
        is_whole = sign == "}"
        if sign in ("", "}"):
            break
        try:
            key = window.value()
            if window.next_sign(_GAP) == "[" and key == "traceEvents":
                window.at += 1
                yield from _listed(window, faults)
            else:
                header[str(key)] = window.value()
        except ValueError:
            if not window.find(_EVENTS):  # what is broken beside the events is not needed for them
                break
    if not is_whole:
        faults[window.why] += 1


def _listed(window: _TextWindow, faults: "Counter[str]") -> Iterator[Event]:
    """Yield the events of a list, and go behind it."""
    while True:
        text, at = window.text, window.at
        try:
            while True:  # as long as all is well, without a call
                found = _BETWEEN.match(text, at)
                value, at = _scan(text, found.end())  # type: ignore[union-attr]  # "" matches
                if at == len(text):  # behind an event there is always something
                    break
                window.at = at
                if type(value) is dict:
                    yield value
        except (StopIteration, ValueError, RecursionError):
            pass
        sign = window.next_sign(_BETWEEN)
        if sign == "]":
            window.at += 1
            return
        try:
            value = window.value()
        except ValueError:
            if not window.find(_EVENT):
                return
            faults[BROKEN] += 1
            continue
        if type(value) is dict:
            yield value
