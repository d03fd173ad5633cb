"""Files of a run: opened through gzip, and their form told by what they hold."""

import codecs
import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipejax.base.checks import wrong

Tell = Callable[[int], object]  # takes how many bytes of a file were read since it was last called

PARQUET, CSV, RANK_LISTS, CHROME = "Parquet", "CSV", "lists of a rank", "Chrome trace"
SIZES, LOG, OTHER = "sizes of a run", "log of Megatron", "other"
HEAD = 2**18  # bytes that tell the form
_PIECE, _MOST, _SMALL = 2**16, 2**20, 32  # bytes read at once, unpacked at once, and near a fault
_GZIP, _ANY_GZIP = b"\x1f\x8b", 31  # the second is zlib's word for gzip
_DELIMITERS = ",;\t"
_LIST_OF_TIMES = re.compile(r'"(fwd|bwd|wgrad)_(start|end)"\s*:\s*\[')
_TIMER = re.compile(
    r"elapsed time per iteration \(ms\):|time across ranks \(ms\):|^\s+forward-compute \.{2,}: \(",
    re.MULTILINE,
)


class CutError(ValueError):
    """A file ends, or cannot be unpacked any further, before all of it was read."""


def unpacked(path: Path, tell: Tell) -> Iterator[bytes]:
    """Yield the content of a file, through gzip where it is packed, however it is called."""
    with path.open("rb") as file:
        piece = file.read(_PIECE)
        is_packed = piece.startswith(_GZIP)
        engine = zlib.decompressobj(_ANY_GZIP)
        while piece:
            tell(len(piece))
            if not is_packed:
                yield piece
            while is_packed and piece:
                if engine.eof:  # files may follow each other in one
                    engine = zlib.decompressobj(_ANY_GZIP)
                before = engine.copy()
                try:
                    content = engine.decompress(piece, _MOST)
                except zlib.error as error:
                    yield from _up_to_the_fault(before, piece)
                    raise CutError(f"gzip cannot be unpacked any further: {error}") from None
                yield content
                piece = engine.unused_data if engine.eof else engine.unconsumed_tail
            piece = file.read(_PIECE)
    if is_packed and not engine.eof:
        yield engine.flush()
        if not engine.eof:
            raise CutError("gzip ends early")


def _up_to_the_fault(engine: "zlib._Decompress", piece: bytes) -> Iterator[bytes]:
    """Unpack what comes before a fault, in small parts, for one is lost as a whole."""
    with contextlib.suppress(zlib.error):
        for at in range(0, len(piece), _SMALL):
            yield engine.decompress(piece[at : at + _SMALL])


def texts(path: Path, tell: Tell) -> Iterator[str]:
    """Yield the content of a file as text; bytes that are none become replacement characters."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    for piece in unpacked(path, tell):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def lines(path: Path, tell: Tell) -> Iterator[str]:
    """Yield the lines of a file, each with its end; behind a cut there is no part of a line."""
    held = ""
    for text in texts(path, tell):
        *whole, held = (held + text).splitlines(keepends=True) or [""]
        yield from whole
    if held:
        yield held


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, through gzip."""
    head = b""
    try:
        for piece in unpacked(path, lambda _: None):
            head += piece
            if len(head) >= HEAD:
                break
    except CutError:
        pass  # what could be read tells the form; the reader of that form says where it ends
    return head[:HEAD]


def find_form(path: Path) -> tuple[str, str]:
    """Tell the form of a file, and for OTHER what it seems to be."""
    if not path.is_file():
        path.stat()
        raise wrong("files", f"must be files or folders; {path} is neither")
    head = read_head(path)
    if head.startswith(b"PAR1"):
        return PARQUET, ""
    text = head.decode("utf-8-sig", "replace")
    if not text.strip():
        return OTHER, "it is empty"
    if "\0" in text or text.count("\ufffd") > len(text) // 10:
        return OTHER, "it holds binary data that is no Parquet"
    begin = text.lstrip()[0]
    if begin in "[{":
        return _form_of_json(text, is_array=begin == "[")
    if _TIMER.search(text):
        return LOG, ""
    return (CSV, "") if find_delimiter(text.split("\n", 1)[0]) else (OTHER, "no trace in its text")


def _form_of_json(text: str, *, is_array: bool) -> tuple[str, str]:
    if not is_array and _LIST_OF_TIMES.search(text):
        return RANK_LISTS, ""
    if is_array or '"traceEvents"' in text or len(text) >= HEAD // 4:
        return CHROME, ""
    return (SIZES, "") if '"pp_size"' in text else (OTHER, "JSON without slices of time")


def find_delimiter(header: str) -> str | None:
    """Return what parts the cells of a header; None where it has fewer than three."""
    best = max(_DELIMITERS, key=header.count)
    return best if header.count(best) >= 2 else None
