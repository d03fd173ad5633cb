"""Training logs without layouts: torchtitan, DeepSpeed, NeMo, nanotron, Hugging Face.

A line of an iteration says its seconds, or a rate from which they follow. The sizes that a log does
not say are columns for the user to give, never a guess.
"""

import gzip
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipejax.base.file_fields import read_cell, whole
from pipejax.base.files import read_file
from pipejax.costs.model.model import Model
from pipejax.costs.system.system import read_named

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = r"(nan|inf|[\d.,]+(?:e[+-]?\d+)?[KMB]?)"
_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9}
_REQUIRED = ("tensor", "pipeline", "accelerators", "microbatch_size", "recompute")


class Trainer(NamedTuple):
    """Forms of the lines of iterations that a program prints."""

    name: str  # of the program
    marks: Mapping[str, str]  # text before the number of each quantity
    formula: str  # how the seconds follow
    facts: Mapping[str, str] = {}  # text before the number of a column, on lines of their own
    note: str = ""  # what is not read, in words

    def read(self, line: str) -> dict[str, float]:
        """Read the quantities of a line; empty if it is not of an iteration."""
        quantities: dict[str, float] = {}
        for name, mark in self.marks.items():
            if match := re.search(mark + r"\s*" + _NUMBER, line):
                text = match[1].replace(",", "").rstrip(".")
                factor = _FACTORS.get(text[-1:], 1.0)
                quantities[name] = float(text.rstrip("KMB")) * factor
        if "ms" in quantities:
            quantities["seconds"] = quantities.pop("ms") / 1e3
        return quantities if quantities.keys() - {"batch"} else {}


TRAINERS = tuple(
    Trainer(**record) for record in read_named("arguments", "trainers", "file")[0]["trainers"]
)
MEGATRON = TRAINERS[0]


def read_log_lines(path: str | Path) -> list[str]:
    """Read the lines of a log, which may be packed by gzip, without the codes of colours."""
    content = read_file(Path(path))
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path}: it cannot be unpacked: {error}") from None
    return _COLOUR.sub("", content.decode(errors="replace")).splitlines()


def rows_by_batch(
    path: Path, times: Iterable[tuple[int, float]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the columns of a row for each batch size, and notes on omissions."""
    # The first of several times warms up and is left out, and so is one that is no number. A spread
    # of 0 is left out: clocks were too coarse for it.
    times_by_batch: dict[int, list[float]] = {}
    for batch, time in times:
        times_by_batch.setdefault(batch, []).append(time)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for batch, batch_times in times_by_batch.items():
        seconds = [time for time in batch_times if math.isfinite(time) and time > 0]
        if omitted := len(batch_times) - len(seconds):
            notes.append(f"{path}: {omitted} lines without a time are left out")
        if not seconds:
            raise ValueError(f"{path}: no line of {batch} sequences has a time")
        if len(seconds) == 1:
            notes.append(f"{path}: only one line of {batch} sequences, with its warm-up")
        steady = seconds[1:] or seconds
        row: dict[str, Any] = {"global_batch": batch}
        row["seconds"] = float(f"{statistics.fmean(steady):.6g}")
        if len(steady) > 1:
            row["n"] = len(steady)
            if spread := float(f"{statistics.stdev(steady):.3g}"):
                row["spread"] = spread
        rows.append(row)
    return rows, notes


def check_columns(path: Path, columns: Iterable[str], cells: Mapping[str, str]) -> None:
    """Refuse cells of columns that the log itself gives."""
    if repeated := sorted({*cells} & {*columns}):
        raise ValueError(f"{path}: it says {repeated[0]} itself: leave it out of --columns")


class TrainerLog(NamedTuple):
    """The iterations of a log without arguments."""

    path: Path  # of the log, for errors
    trainer: Trainer  # the program that wrote it
    iterations: Sequence[Mapping[str, float]]  # quantities of each
    facts: Mapping[str, str]  # columns that the log says on other lines

    @classmethod
    def read(cls, path: str | Path) -> "TrainerLog":
        """Read a log with the first of `TRAINERS` that finds an iteration in it."""
        lines = read_log_lines(path)
        text = "\n".join(lines)
        for trainer in TRAINERS:
            if iterations := [*filter(None, map(trainer.read, lines))]:
                columns = trainer.facts.items()  # with the text before the number of each
                matches = {name: re.search(rf"{mark} (\d+)", text) for name, mark in columns}
                facts = {name: match[1] for name, match in matches.items() if match}
                return cls(Path(path), trainer, iterations, facts)
        names = ", ".join(dict.fromkeys(trainer.name for trainer in TRAINERS))
        first = next((line.strip()[:60] for line in lines if line.strip()), "")
        raise ValueError(
            f"{path}: it must be a log of {names}: arguments as `num_layers ..... 48` or lines of "
            f"iterations, got {first!r}"
        )

    def rows(
        self, model: str, trained: Model, columns: Mapping[str, str]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return rows of measured runs, completed by columns that the log lacks."""
        quantities = self.iterations[-1]
        has_batch = "batch" in quantities or {"seconds", "samples"} <= {*quantities}
        log_columns = {*self.facts, "global_batch"} if has_batch else {*self.facts}
        check_columns(self.path, log_columns, columns)
        columns = {**self.facts, **columns}
        required = _REQUIRED if has_batch else (*_REQUIRED, "global_batch")
        if missing := [name for name in required if name not in columns]:
            cells = ",".join(f"{name}=.." for name in missing)
            kind = f"it is a log of {self.trainer.name}, which"
            if self.trainer is MEGATRON:
                kind = "it holds no arguments, as `num_layers ..... 48`, and"
            raise ValueError(
                f"{self.path}: {kind} does not say {', '.join(missing)}: give --columns {cells}; "
                f"seconds are {self.trainer.formula}"
            )
        sizes = {"sequence": str(trained.sequence), "global_batch": "0", **columns}
        tokens, batch, accelerators = (
            read_cell(whole(int(name != "global_batch")), sizes[name], name)
            for name in ("sequence", "global_batch", "accelerators")
        )
        if not batch and "samples" in quantities:  # lines round it differently
            batches = [line["seconds"] * line["samples"] for line in self.iterations]
            batch = round(statistics.median(batches))
        times = []
        for line in self.iterations:
            size = batch or round(line["batch"])
            if "seconds" in line:
                time = line["seconds"]
            elif "steps" in line:
                time = 1 / line["steps"]
            else:
                rate = line.get("samples") or line.get("tokens", 0) * accelerators / tokens
                time = size / rate if rate else 0.0  # `rows_by_batch` leaves out times of 0
            times.append((size, time))
        rows, notes = rows_by_batch(self.path, times)
        source = {"source": f"{self.path.name}, iterations timed by {self.trainer.name}"}
        if self.trainer.note:
            notes.append(f"{self.path}: {self.trainer.note}")
        return [{"model": model, **columns, **row, **source} for row in rows], notes
