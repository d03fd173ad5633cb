"""Files of a run: decompression, and recognition of their format by content."""

import codecs
import contextlib
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.base.array_types import NumpyArray
from pipejax.base.checks import resolve_choice, wrong
from pipejax.traces.readers.readings import RunSizes
from pipejax.traces.record import LeftOut, Trace

OnBytes = Callable[[int], object]  # takes the number of bytes read since the last call

_MAGIC_LENGTH = 16  # first characters of a file that identify binary formats
HEAD_BYTES = 2**18  # enough to recognize the format
_READ_BYTES = 2**16  # bytes read at once
_UNPACKED_BYTES = 2**10  # bytes unpacked at once: a fault loses at most these before it
_TIMER = re.compile(
    r"elapsed time per iteration \(ms\):|time across ranks \(ms\):|^\s+forward-compute \.{2,}: \(",
    re.MULTILINE,
)
_JSON = re.compile(r"\s*(\{|\[\s*([\[{\"\]]|$))")
_GZIP_MAGIC = b"\x1f\x8b"
_DELIMITERS = ",;\t"


class CutError(ValueError):
    """Error for a file that ends early, or cannot be decompressed to its end."""


def read_bytes(path: Path, on_bytes: OnBytes) -> Iterator[bytes]:
    """Yield the content of a file, decompressed if it is gzip, regardless of its suffix."""
    # Raises CutError, after all readable content, where gzip is damaged or ends early.
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        source: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        position, piece = 0, b"-"
        while piece:
            try:
                piece = source.read1(_UNPACKED_BYTES if is_packed else _READ_BYTES)
            except EOFError:
                raise CutError("gzip ends early") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise CutError(f"gzip cannot be unpacked any further: {error}") from None
            on_bytes(file.tell() - position)
            position = file.tell()
            yield piece


def read_texts(path: Path, on_bytes: OnBytes) -> Iterator[str]:
    """Yield the content of a file as text, piece by piece; invalid UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    for piece in read_bytes(path, on_bytes):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def read_lines(path: Path, on_bytes: OnBytes) -> Iterator[str]:
    """Yield the lines of a file with line ends; of a damaged file, only its complete lines."""
    last_line = ""  # it may be incomplete
    for text in read_texts(path, on_bytes):
        *complete_lines, last_line = (last_line + text).splitlines(keepends=True) or [""]
        yield from complete_lines
    if last_line:
        yield last_line


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNIT = "unit"  # in the user's names of columns
_OP_SECONDS = (3e-4, 20.0)  # range of plausible medians of op times
_EPOCH, _LATEST = (1.4e9, 2.5e9), 4e9  # [s]: range of starts since 1970; largest plausible start


def name_order(path: Path | str) -> list[tuple[str, int]]:
    """Return a sort key for file names, by which 2 comes before 10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", str(path))]


class Request(NamedTuple):
    """Information from the user about a run, a callback for progress, and a list of faults."""

    column_names: Mapping[str, str]
    sizes: RunSizes
    on_bytes: OnBytes
    left_out: list[LeftOut]  # readers add the content of files that they do not use

    @property
    def unit(self) -> str | None:
        """Return the unit of times if the user states it, else None."""
        unit = self.column_names.get(UNIT)
        return None if unit is None else resolve_choice(unit, SECONDS, f"columns: {UNIT}")


def infer_unit(seconds: NumpyArray, start: NumpyArray, expected: str = "") -> str:
    """Return the only unit in which ops take plausible times; check an expected unit."""
    # `seconds` are times of ops and `start` their starts, both in this unit.
    median, first = float(np.median(seconds)), float(np.median(np.abs(start)))
    shortest, longest = (3e-4, 2.0) if expected else _OP_SECONDS  # 10 ms in ns are 10 s in us
    units = [
        unit
        for unit, factor in SECONDS.items()
        if shortest <= median * factor <= longest and first * factor < _LATEST
    ]
    epochs = [unit for unit in units if _EPOCH[0] <= first * SECONDS[unit] <= _EPOCH[1]]
    units = epochs if len(epochs) == 1 else units
    if expected in units or (len(units) == 1 and not expected):
        return expected or units[0]
    valid = units or [unit for unit in SECONDS if unit != expected]
    choice = " or ".join(f"--columns unit={unit}" for unit in valid)
    why = f"ops take {median:.3g} in the median"
    if expected:
        why, choice = f"{why}, in {expected}", f"{choice}, or unit={expected} if this is right"
    raise wrong("files", f"must state the unit of times: {why}; give {choice}")


class Reader(NamedTuple):
    """Reader of a file format, and the format's row in the documentation."""

    form: str
    writers: str  # programs that write it
    content: str
    can_read: Callable[[str], bool]  # takes the head of a file
    read: Callable[[Sequence[Path], Request], Trace]  # takes all files if `can_read` accepts each


def read_head(path: Path) -> str:
    """Return the first characters of a file, decompressed; a NUL ends those of binary content."""
    if not path.is_file():
        path.stat()  # raises if there is no such file
        raise wrong("files", f"must be files or folders; {path} is neither")
    content = b""
    with contextlib.suppress(CutError):  # the reader of the format will report the damage
        for piece in read_bytes(path, lambda _: None):
            content += piece
            if len(content) >= HEAD_BYTES:
                break
    text = content[:HEAD_BYTES].decode("utf-8-sig", "replace")
    is_binary = "\0" in text or text.count("\ufffd") > len(text) // 10
    return (text[:_MAGIC_LENGTH].partition("\0")[0] + "\0") if is_binary else text


def why_unreadable(head: str) -> str:
    """Return the reason why no reader accepts a file."""
    if is_log(head):
        return (
            "a log of Megatron has times of steps and sums of timers, not when an op ran: pipejax "
            "init rows --from LOG reads its steps; Primus writes ops with --dump_pp_data, "
            "PyTorch's pipelining under torch.profiler"
        )
    if "\0" in head:
        more = "; of a report of Nsight Systems, give nsys export --type sqlite"
        return f"it holds binary data that is no Parquet{more}"
    if not head.strip():
        return "it is empty"
    return "JSON without slices of time" if is_json(head) else "no trace in its text"


def is_log(head: str) -> bool:
    """Return whether a file is a log of Megatron, which has no slices of time."""
    return bool(_TIMER.search(head))


def is_json(head: str) -> bool:
    """Return whether a file is a JSON object, or a list of objects, lists or texts."""
    # lines of logs begin with text such as [rank0]: or [2026-11-30 10:00:01]
    return bool(_JSON.match(head))


def is_json_lines(head: str) -> bool:
    """Return whether each line of a file is a JSON object."""
    return bool(re.match(r"\s*\{[^\n]*\}[ \t\r]*\n\s*\{", head))


def is_json_rows(head: str) -> bool:
    """Return whether a file is a JSON list of objects that are no events of a Chrome trace."""
    return bool(re.match(r"\s*\[\s*\{", head)) and '"ph"' not in head


def find_delimiter(header: str) -> str | None:
    """Return the delimiter of a CSV header; None if the header has fewer than three cells."""
    delimiter = max(_DELIMITERS, key=header.count)
    return delimiter if header.count(delimiter) >= 2 else None
