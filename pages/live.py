"""The explorer's page of the site: every schedule that it can run, at the times of the gallery."""

import tempfile
from pathlib import Path

from pages.commands import run_quietly
from pages.gallery import MESSAGE, MICROBATCHES, TIMES, WORKERS

LIVE = "live.html"
SHOWN = "1f1b,zb-v"  # at first, for what may be chosen is best seen beside another
_EMPTY = "<!doctype html><html lang='en'><title>explorer</title><p>Left out of this build.</p>\n"


def command(out: str) -> list[str]:
    """Return the command that writes the page."""
    times = ",".join(f"{letter}={TIMES[letter]:g}" for letter in "FBIW")
    size = ["--workers", str(WORKERS), "--microbatches", str(MICROBATCHES)]
    options = [*size, "--worker-times", times, "--comm", str(MESSAGE)]
    return ["show", "--schedules", SHOWN, *options, "--choose", "--out", out]


def live_page(*, whole: bool) -> str:
    """Return the page; a word in its place where what takes time is left out."""
    if not whole:
        return _EMPTY
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / LIVE
        run_quietly(command(str(page)))
        return page.read_text(encoding="utf-8")


def address(name: str, stages_per_worker: int) -> str:
    """Return the address where the page shows one schedule of the gallery."""
    count = f"*{stages_per_worker}" if stages_per_worker > 1 else ""
    return f"{LIVE}#show={name}{count}&size={WORKERS}x{MICROBATCHES}"
