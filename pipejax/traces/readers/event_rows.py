"""The slices of pipelines in one Chrome trace, as arrays, and what the file says about its rank."""

import dataclasses
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipejax.base.array_types import Float, Int, NumpyArray
from pipejax.base.checks import wrong
from pipejax.schedules.cells.ops import COMPUTING, Phase, format_cell, matching_receive, parse_cell
from pipejax.traces.readers.parts import sound
from pipejax.traces.readers.rank_lists import file_rank
from pipejax.traces.readers.sources import CutError, Tell, texts
from pipejax.traces.record import NONE, LeftOut

Cell = tuple[tuple[str, int, int], ...]  # phase, stage, microbatch; two of a fused pair

PYTORCH = "PP:"
RECEIVES = ("gloo:recv", "nccl:recv")  # what a RECV does, until somebody waits for it
STEP = "ProfilerStep#"
_CELL = re.compile(r"(\d{1,9})([A-Z](?:[A-Z_]*[A-Z])?)(\d{0,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B")
# schedules of PyTorch with one stage a rank do not say which
_SINGLE = re.compile(r"(Forward|Backward) (\d{1,9})")


def parse_label(label: str) -> Cell:
    """Return the ops of a label, nothing for one that is none.

    Example:
      >>> parse_label("PP:0F1"), parse_label("0UNSHARD"), parse_label("aten::mm")
      ((('F', 0, 1),), (('UNSHARD', 0, -1),), ())
      >>> parse_label("PP:(2F1;3B0)OVERLAP_F_B")
      (('F', 2, 1), ('B', 3, 0))
      >>> parse_label("Backward 3")
      (('B', -1, 3),)
    """
    if single := _SINGLE.fullmatch(label):
        return ((single[1][0], NONE, int(single[2])),)
    label = label.removeprefix(PYTORCH)
    pair = _PAIR.fullmatch(label)
    ops = [_CELL.fullmatch(text) for text in (pair.groups() if pair else (label,))]
    return tuple((cell[2], int(cell[1]), int(cell[3] or NONE)) for cell in ops if cell is not None)


BROKEN, EARLY = "events that are not JSON", "it ends early"  # faults that are counted
# A trace of other people's run may hold 10^7 events of no use here: none is kept, and only a window
# of the text is in memory.

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
        target = max(2 * size, 2**16)
        try:
            while size < target:
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

    def find(self, pattern: "re.Pattern[str]") -> bool:
        """Go to the next place that looks so; False if there is none."""
        self.at += 1
        while not (match := pattern.search(self.text, self.at)):
            self.at = max(self.at, len(self.text) - _TAIL)
            if not self.more():
                return False
        self.at = match.start()
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
                match = _BETWEEN.match(text, at)
                value, at = _scan(text, match.end())  # type: ignore[union-attr]  # "" matches
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


_KEPT = (PYTORCH, *RECEIVES, STEP, "Forward ", "Backward ")
_OWN = frozenset(("compute", "collective", "host link", "message"))  # categories of our exports
# a label on a stream: of a backward there is none, for another thread launches its kernels
_ON_STREAM = "gpu_user_annotation"
_KERNEL, _LAUNCHES = "kernel", frozenset(("cuda_runtime", "cuda_driver", "runtime", "driver"))
_SLICE, _RECEIVE, _MARK, _OURS = range(4)
_COLUMNS = {
    "kind": np.int8,
    "label": np.int64,
    "start": np.float64,
    "length": np.float64,
    "process": np.int64,
    "thread": np.int64,
}


@dataclasses.dataclass
class Rows:
    """Slices of one rank."""

    rank: int  # in the run; of our own exports, the worker
    world: int  # how many ranks the run has, as far as the file says
    label: Int[NumpyArray, " slices"]  # position in the names of labels, ascending by start
    start: Float[NumpyArray, " slices"]  # [us]
    end: Float[NumpyArray, " slices"]  # [us]
    receives: Float[NumpyArray, "2 receives"]  # of RECVs, until somebody waits [us]
    kernels: Float[NumpyArray, "4 kernels"]  # launch, start, end [us], stream
    marks: list[tuple[int, float, float]]  # number, start and end of steps that are marked [us]
    is_cut: bool = False  # whether its file ends early
    is_ours: bool = False  # an export of ours: a worker of one pipeline in one step


class _EventCollector:
    """Events of a file that are used, with a number for each slice."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names, self.count = names, 0
        self.unread = Counter[str]()  # ops of our exports that are none of these phases
        self.meanings: dict[str, tuple[int, int]] = {}  # kind and number of labels
        self.kind, self.label = array("b"), array("q")
        self.start, self.length = array("d"), array("d")
        self.process, self.thread = array("q"), array("q")
        self.receiving: set[tuple[int, int]] = set()  # tracks of our exports that receive
        # number, start, length and stream of kernels; number and start of their launches
        self.kernels = array("q"), array("d"), array("d"), array("q")
        self.launches = array("q"), array("d")

    def take(self, event: Event) -> None:
        self.count += 1
        name = event.get("name")
        if type(name) is not str:
            return
        if event.get("ph") != "X":
            self._take_title(event, name)
            return
        category = event.get("cat")
        if category == _KERNEL or category in _LAUNCHES:
            self._take_kernel(event, is_launch=category != _KERNEL)
            return
        is_ours = not name.startswith(_KEPT)
        if is_ours and (category not in _OWN or not parse_label(name)):
            self.unread.update([name] * (category == COMPUTING))
            return
        if name not in self.meanings:
            self.meanings[name] = self._meaning(name)
        kind, label = self.meanings[name]
        if label < 0:
            return
        if is_ours:
            kind = _OURS
        elif kind == _SLICE and category == _ON_STREAM:
            return
        self.kind.append(kind)
        self.label.append(label)
        self.start.append(_number(event.get("ts")))
        self.length.append(_number(event.get("dur")))
        self.process.append(_whole(event.get("pid")))
        self.thread.append(_whole(event.get("tid")))

    def _take_kernel(self, event: Event, *, is_launch: bool) -> None:
        """Keep a kernel, or the call on the host that launched it: both have one number."""
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        number = args.get("correlation")
        if type(number) is not int or number <= 0:
            return
        start = _number(event.get("ts"))
        numbers, starts = self.launches if is_launch else self.kernels[:2]
        numbers.append(number)
        starts.append(start)
        if not is_launch:
            self.kernels[2].append(_number(event.get("dur")))
            self.kernels[3].append(_whole(args.get("stream", event.get("tid"))))

    def launched(self) -> Float[NumpyArray, "4 kernels"]:
        """Launch, start and end of each kernel [us], and its stream."""
        number, start, length, stream = map(np.array, self.kernels)
        by_number, called = map(np.array, self.launches)
        order = np.argsort(by_number, kind="stable")
        at = np.searchsorted(by_number[order], number)
        is_launched = at < len(order)
        is_launched[is_launched] = by_number[order][at[is_launched]] == number[is_launched]
        launch = called[order][at[is_launched]]
        kernels = np.stack(
            [launch, start[is_launched], (start + length)[is_launched], stream[is_launched]]
        )
        return kernels[:, np.isfinite(kernels).all(axis=0) & (kernels[2] >= kernels[1])]

    def _meaning(self, name: str) -> tuple[int, int]:
        """Kind and number of a label; below 0 for one that is none of a pipeline."""
        if name.startswith(RECEIVES):
            name, kind = RECEIVES[0], _RECEIVE  # peers and tags make many
        elif name.startswith(STEP):
            kind = _MARK
        elif parse_label(name):
            kind = _SLICE
        else:
            return _SLICE, -1
        return kind, self.names.setdefault(name, len(self.names))

    def _take_title(self, event: Event, name: str) -> None:
        args = event.get("args")
        title = args.get("name") if name == "thread_name" and isinstance(args, dict) else None
        if str(title).startswith("receive from worker"):
            self.receiving.add((_whole(event.get("pid")), _whole(event.get("tid"))))


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else np.nan


def _whole(value: Any) -> int:
    """A process or thread; words that name one are as good as their hash."""
    return value if type(value) is int and abs(value) < 2**62 else hash(str(value)) >> 2


def read_rows(
    path: Path, names: dict[str, int], tell: Tell, left_out: list[LeftOut]
) -> tuple[list[Rows], int | None]:
    """Read what a file holds of a pipeline, and the time of its zero [ns], None if it says none."""
    header: dict[str, Any] = {}
    faults: Counter[str] = Counter()
    collector = _EventCollector(names)
    for event in events(texts(path, tell), header, faults):
        collector.take(event)
    for why, count in faults.items():
        left_out.append(LeftOut(f"parts of {path}", why, count))
    if not np.isin(collector.kind, (_SLICE, _OURS)).any():
        why = (
            f"none of its {collector.count:,} events has a label of PyTorch's pipelining, as PP:0F1"
        )
        left_out.append(LeftOut(str(path), why))
        return [], None
    columns = {name: np.array(getattr(collector, name), dtype) for name, dtype in _COLUMNS.items()}
    passes, dropped = sound(
        [
            (~np.isfinite(columns["start"] + columns["length"]), "its time is no finite number"),
            (columns["length"] < 0, "it ends before it starts"),
        ],
        f"slices of {path}",
    )
    left_out += dropped
    columns = {name: values[passes] for name, values in columns.items()}
    if np.any(columns["kind"] == _OURS):
        if collector.unread:
            name, count = collector.unread.most_common(1)[0][0], collector.unread.total()
            raise wrong(
                "files", f"must have phases by known names: {count} ops of {path} are as {name!r}"
            )
        return _ours(columns, collector, names), None
    rank, world = _rank(header, path)
    if rank is None:
        left_out.append(LeftOut(str(path), "neither it nor its name says of which rank it is"))
        return [], None
    zero = header.get("baseTimeNanoseconds")
    is_cut = any(why != BROKEN for why in faults)
    rows = _rank_rows(columns, rank, world, names)
    rows = dataclasses.replace(rows, is_cut=is_cut, kernels=collector.launched())
    return ([rows] if len(rows.label) else []), zero if type(zero) is int else None


def _rank(header: Mapping[str, Any], path: Path) -> tuple[int | None, int]:
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    rank = rank if type(rank) is int and rank >= 0 else file_rank(path)
    return rank, world if type(world) is int and 0 < world < 10**6 else 0


def _rank_rows(
    columns: Mapping[str, NumpyArray], rank: int, world: int, names: Mapping[str, int]
) -> Rows:
    """Sort the slices of a rank by what they are."""
    columns = dict(columns) | {"end": columns["start"] + columns["length"]}
    masks = {kind: columns["kind"] == kind for kind in range(_OURS)}
    text = {number: name for name, number in names.items()}
    marks = [
        (int(number), start, end)
        for label, start, end in zip(
            *(columns[k][masks[_MARK]].tolist() for k in ("label", "start", "end")), strict=True
        )
        if (number := text[label].removeprefix(STEP)).isdecimal() and len(number) < 10
    ]
    slices = np.flatnonzero(masks[_SLICE])
    # what stands twice in a trace is once in the run: else it would begin a step
    key = np.stack([columns[k][slices] for k in ("start", "end", "label")])
    slices = slices[np.unique(key, axis=1, return_index=True)[1]]
    return Rows(
        rank,
        world,
        label=columns["label"][slices],
        start=columns["start"][slices],
        end=columns["end"][slices],
        receives=np.stack([columns[k][masks[_RECEIVE]] for k in ("start", "end")]),
        kernels=np.zeros((4, 0)),
        marks=marks,
    )


def _ours(
    columns: Mapping[str, NumpyArray], collector: _EventCollector, names: dict[str, int]
) -> list[Rows]:
    """Part one of our own exports into its workers; a message is seen by both its ends."""
    label = columns["label"].copy()
    tracks = zip(columns["process"].tolist(), columns["thread"].tolist(), strict=True)
    text = {number: name for name, number in names.items()}
    receives = np.array([track in collector.receiving for track in tracks], bool)
    for number in np.unique(label[receives]):
        cell = parse_cell(text[number])
        if len(cell) == 1 and cell[0].phase in (Phase.SEND_F, Phase.SEND_B):
            name = format_cell((matching_receive(cell[0]),))
            label[receives & (label == number)] = names.setdefault(name, len(names))
    moved = dict(columns) | {"label": label, "kind": np.full(len(label), _SLICE)}
    workers = np.unique(columns["process"])
    by_worker = []
    for worker in workers[(workers >= 0) & (workers < 10**6)]:
        worker_columns = {
            name: values[columns["process"] == worker] for name, values in moved.items()
        }
        rows = _rank_rows(worker_columns, int(worker), len(workers), names)
        by_worker.append(dataclasses.replace(rows, is_ours=True))
    return by_worker
