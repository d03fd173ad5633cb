"""Files of a run: decompressed, and their formats recognized by content."""

import codecs
import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipejax.base.checks import wrong

OnBytes = Callable[[int], object]  # takes the number of bytes read since the last call

PARQUET, CSV, RANK_LISTS, CHROME = "Parquet", "CSV", "lists of a rank", "Chrome trace"
SIZES, LOG, OTHER = "sizes of a run", "log of Megatron", "other"
HEAD_BYTES = 2**18  # enough to recognize the format
_READ_BYTES, _OUTPUT_BYTES = 2**16, 2**20  # bytes read at once, and unpacked at once
_SALVAGE_BYTES = 32  # bytes unpacked at once near a fault
_GZIP_MAGIC, _GZIP_WINDOW = b"\x1f\x8b", 31  # the second makes zlib expect gzip
_DELIMITERS = ",;\t"
_LIST_OF_TIMES = re.compile(r'"(fwd|bwd|wgrad)_(start|end)"\s*:\s*\[')
_TIMER = re.compile(
    r"elapsed time per iteration \(ms\):|time across ranks \(ms\):|^\s+forward-compute \.{2,}: \(",
    re.MULTILINE,
)


class CutError(ValueError):
    """A file ends, or cannot be unpacked any further, before all of it was read."""


def read_bytes(path: Path, on_bytes: OnBytes) -> Iterator[bytes]:
    """Yield the content of a file, decompressed if it is gzip, whatever its suffix."""
    # Raises CutError, after all readable content, where gzip is damaged or ends early.
    with path.open("rb") as file:
        piece = file.read(_READ_BYTES)
        is_packed = piece.startswith(_GZIP_MAGIC)
        engine = zlib.decompressobj(_GZIP_WINDOW)
        while piece:
            on_bytes(len(piece))
            if not is_packed:
                yield piece
            while is_packed and piece:
                if engine.eof:  # a gzip file may hold several members
                    engine = zlib.decompressobj(_GZIP_WINDOW)
                engine_before = engine.copy()
                try:
                    content = engine.decompress(piece, _OUTPUT_BYTES)
                except zlib.error as error:
                    yield from _salvage(engine_before, piece)
                    raise CutError(f"gzip cannot be unpacked any further: {error}") from None
                yield content
                piece = engine.unused_data if engine.eof else engine.unconsumed_tail
            piece = file.read(_READ_BYTES)
    if is_packed and not engine.eof:
        yield engine.flush()
        if not engine.eof:
            raise CutError("gzip ends early")


def _salvage(engine: "zlib._Decompress", piece: bytes) -> Iterator[bytes]:
    """Decompress the bytes before a fault in small pieces: a piece with a fault yields nothing."""
    with contextlib.suppress(zlib.error):
        for begin in range(0, len(piece), _SALVAGE_BYTES):
            yield engine.decompress(piece[begin : begin + _SALVAGE_BYTES])


def read_texts(path: Path, on_bytes: OnBytes) -> Iterator[str]:
    """Yield the content of a file as text, piece by piece; invalid UTF-8 becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    for piece in read_bytes(path, on_bytes):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def read_lines(path: Path, on_bytes: OnBytes) -> Iterator[str]:
    """Yield the lines of a file with their ends; of a damaged file only complete lines."""
    rest = ""
    for text in read_texts(path, on_bytes):
        *complete_lines, rest = (rest + text).splitlines(keepends=True) or [""]
        yield from complete_lines
    if rest:
        yield rest


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed."""
    head = b""
    with contextlib.suppress(CutError):  # the reader of the format will report the damage
        for piece in read_bytes(path, lambda _: None):
            head += piece
            if len(head) >= HEAD_BYTES:
                break
    return head[:HEAD_BYTES]


def find_form(path: Path) -> tuple[str, str]:
    """Return the format of a file, and for OTHER the reason why it is not read."""
    if not path.is_file():
        path.stat()  # raises if there is no such file
        raise wrong("files", f"must be files or folders; {path} is neither")
    head = read_head(path)
    if head.startswith(b"PAR1"):
        return PARQUET, ""
    text = head.decode("utf-8-sig", "replace")
    if not text.strip():
        return OTHER, "it is empty"
    if "\0" in text or text.count("\ufffd") > len(text) // 10:
        return OTHER, "it holds binary data that is no Parquet"
    bracket = text.lstrip()[0]
    if bracket in "[{":
        return _find_json_form(text, is_array=bracket == "[")
    if _TIMER.search(text):
        return LOG, ""
    return (CSV, "") if find_delimiter(text.split("\n", 1)[0]) else (OTHER, "no trace in its text")


def _find_json_form(text: str, *, is_array: bool) -> tuple[str, str]:
    if not is_array and _LIST_OF_TIMES.search(text):
        return RANK_LISTS, ""
    if is_array or '"traceEvents"' in text or len(text) >= HEAD_BYTES // 4:
        return CHROME, ""
    return (SIZES, "") if '"pp_size"' in text else (OTHER, "JSON without slices of time")


def find_delimiter(header: str) -> str | None:
    """Return the delimiter of a CSV header; None if the header has fewer than three cells."""
    delimiter = max(_DELIMITERS, key=header.count)
    return delimiter if header.count(delimiter) >= 2 else None
